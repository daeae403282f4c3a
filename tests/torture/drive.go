//go:build linux

package torture

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tutti/internal/proctest"
	"tutti/tests/internal/rig"
)

const (
	patience      = 150 * time.Second // bounds a program, …
	foundPatience = 20 * time.Second  // … and the rest of one in which something was found
)

// A stage runs jobs as processes: a store, hosts if there are several, and a process for each rank,
// which runs several jobs.
type stage struct {
	t            *testing.T
	rig          *rig.Stage
	transport    string
	net          *rig.Switch // nil: one host
	store        *proctest.Child
	address      string
	secret       string
	jobs         int
	members      map[int]*member
	spares       []*member // waiting for a rank to be lost
	incarnations map[int]int
	events       chan event
	hosts        int
	devices      *devices // of ranks that share this process; nil: they have processes
}

// member is a rank's process.
type member struct {
	number int
	p      *proctest.Child // nil: goroutines of this one
	conn   net.Conn
	mu     sync.Mutex
	out    *json.Encoder
	host   int
	jobs   int // number of jobs that it has run
}

type event struct {
	m    *member
	news news
	err  error // its end
}

func newStage(t *testing.T, transport, secret string) *stage {
	s := &stage{t: t, rig: rig.New(t), transport: transport, secret: secret, members: map[int]*member{},
		incarnations: map[int]int{}, events: make(chan event, 64)}
	var enter []string
	host := ""
	switch transport {
	case "tcp":
		s.hosts = maxRanks
	case "hosts":
		s.hosts = 3
	case "soft":
		s.devices = newDevices(t)
	}
	if s.hosts > 0 {
		s.net = rig.NewSwitch(t, s.hosts+1) // the last is the store's
		s.net.LaySlow()
		enter = s.net.Hosts[s.hosts].Enter()
		host = s.net.Address(s.hosts)
	}
	s.store, s.address = s.rig.Store(enter, rig.Embedded, secret, host)
	return s
}

// spare is the number of a member without a rank.
const spare = -1

// launch starts a rank's process.
func (s *stage) launch(number int) *member {
	m := s.process(number)
	s.members[number] = m
	return m
}

// process starts a process.
func (s *stage) process(number int) *member {
	s.t.Helper()
	m := &member{number: number}
	var enter []string
	switch s.transport {
	case "tcp":
		m.host = (number + s.hosts) % s.hosts
	case "hosts":
		m.host = (max(number, 0)/2 + s.jobs + s.incarnations[number]) % s.hosts // a replacement may be elsewhere
		s.incarnations[number]++
	}
	if s.net != nil {
		enter = s.net.Hosts[m.host].Enter()
	}
	if s.devices != nil {
		m.conn = s.devices.play(number)
		s.listen(m, json.NewDecoder(m.conn))
		return m
	}
	m.p = s.rig.StartIn(enter, []string{"RANK=" + strconv.Itoa(number), "GOTRACEBACK=all"}, proctest.Self())
	in := (*json.Decoder)(nil)
	m.conn, in = s.rig.Next().Play()
	s.listen(m, in)
	return m
}

// listen receives what a member says.
func (s *stage) listen(m *member, in *json.Decoder) {
	m.out = json.NewEncoder(m.conn)
	go func() {
		for {
			var n news
			if err := in.Decode(&n); err != nil {
				s.events <- event{m: m, err: err}
				return
			}
			s.events <- event{m: m, news: n}
		}
	}()
}

// known reports whether the process is current.
func (s *stage) known(m *member) bool {
	return s.members[m.number] == m || slices.Contains(s.spares, m)
}

// all returns the current processes.
func (s *stage) all() []*member {
	return slices.AppendSeq(slices.Clone(s.spares), maps.Values(s.members))
}

func (m *member) tell(o order) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.out.Encode(o) // if it is dead, its connection fails
}

// end kills a rank's process and waits for its end.
func (s *stage) end(m *member) {
	if m.p != nil {
		m.p.Kill()
	}
	m.conn.Close()
	if s.members[m.number] == m {
		delete(s.members, m.number)
	}
	s.spares = slices.DeleteFunc(s.spares, func(o *member) bool { return o == m })
}

// killAll ends all ranks.
func (s *stage) killAll() {
	for _, m := range s.all() {
		s.end(m)
	}
}

// A session is a running job.
type session struct {
	s     *stage
	job   Job
	setup setup
	first map[int]*rig.Usage // of each rank's process at the end of an early program
	gone  map[int]bool       // ranks without a process: dead and not replaced, or to come later
	later map[int]bool       // ranks that have not come yet
	progs int

	faults sync.WaitGroup // under way
}

// start starts a job.
func (s *stage) start(job Job) (*session, *Finding) {
	s.jobs++
	x := &session{s: s, job: job, first: map[int]*rig.Usage{}, gone: map[int]bool{}, later: map[int]bool{}}
	x.setup = setup{Job: job, Name: fmt.Sprintf("torture-%d", s.jobs), Store: s.address, Secret: s.secret}
	if job.GPUs != NoGPUs {
		var err error
		if x.setup.Driver, err = makeGPUs(); err != nil {
			return x, &Finding{Kind: "error", Text: err.Error()}
		}
	}
	for number, m := range s.members { // a process that has run many jobs is replaced
		if number >= job.Ranks-job.Later || m.jobs >= 40 {
			s.end(m)
		}
	}
	var all []*member
	for i := range job.Later {
		x.gone[job.Ranks-1-i], x.later[job.Ranks-1-i] = true, true
	}
	for number := range job.Ranks - job.Later {
		m := s.members[number]
		if m == nil {
			m = s.launch(number)
		}
		m.jobs++
		all = append(all, m)
	}
	for _, m := range all {
		x.tell(m, false)
	}
	f := x.await(len(all), "join", recovery+slack, func(n news) (bool, string) { return n.Ready, n.Error })
	if f == nil {
		x.stock()
	}
	return x, f
}

// tell makes a process join the job, at once or as the program says.
func (x *session) tell(m *member, late bool) {
	own := x.setup
	own.Number, own.Late = m.number, late
	m.tell(order{Setup: &own})
}

// stock starts as many standby processes as the job needs.
func (x *session) stock() {
	for len(x.s.spares) < x.job.Standby {
		m := x.s.process(spare)
		x.s.spares = append(x.s.spares, m)
		x.tell(m, true)
	}
}

// await waits for an answer of all ranks.
func (x *session) await(n int, what string, limit time.Duration, is func(news) (bool, string)) *Finding {
	late := time.After(limit)
	for n > 0 {
		select {
		case e := <-x.s.events:
			if !x.s.known(e.m) {
				continue
			}
			if e.err != nil {
				return x.died(e.m, what)
			}
			if ok, err := is(e.news); ok {
				n--
			} else if err != "" {
				return &Finding{Kind: "error", Rank: e.m.number, Text: what + ": " + err}
			} else if e.news.Hang != nil {
				return e.news.Hang
			}
		case <-late:
			return &Finding{Kind: "stuck", Text: what + x.stacks()}
		}
	}
	return nil
}

func tail(s string, n int) string {
	if len(s) > n {
		return "…" + s[len(s)-n:]
	}
	return s
}

func (x *session) died(m *member, during string) *Finding {
	if m.p == nil {
		x.s.end(m)
		return &Finding{Kind: "death", Rank: m.number, Text: "it ended during " + during}
	}
	code := m.p.Wait()
	text := m.p.Err.String()
	if i := strings.Index(text, "\n\ngoroutine "); i > 0 && len(text) > i+8000 {
		text = text[:i+8000]
	}
	f := &Finding{Kind: "death", Rank: m.number,
		Text: fmt.Sprintf("its process ended during %s with code %d: %s", during, code, tail(text, 16000))}
	x.s.end(m)
	return f
}

// stacks makes all ranks print their stacks.
func (x *session) stacks() string {
	var text strings.Builder
	if x.s.devices != nil {
		all := make([]byte, 4<<20)
		return "\n--- all ranks\n" + ours(string(all[:runtime.Stack(all, true)]))
	}
	for _, m := range x.s.all() {
		m.p.TrySignal(syscall.SIGCONT)
		m.p.TrySignal(syscall.SIGQUIT)
		m.p.Wait()
		fmt.Fprintf(&text, "\n--- rank %d\n%s", m.number, ours(m.p.Err.String()))
	}
	return text.String()
}

// ours selects the stacks of our packages.
func ours(text string) string {
	var b strings.Builder
	for _, whose := range []string{"tutti/tests/torture.(*rank)", "tutti/"} { // the rank's own goroutine comes first
		for block := range strings.SplitSeq(text, "\n\n") {
			if rank := strings.Contains(block, "tutti/tests/torture.(*rank)"); strings.Contains(block, whose) &&
				(rank == (whose != "tutti/")) && b.Len() < 20000 {
				b.WriteString(block + "\n\n")
			}
		}
	}
	return b.String()
}

// Result is the result of a program.
type Result struct {
	Findings []Finding
	Ops      int
	Errors   map[string]int
	Graphs   map[string]int // refused, and launches
	Slow     []string       // calls
	Faults   map[string]int // that happened, by kind
	Lost     bool           // the job cannot continue
}

func (res *Result) find(f *Finding) {
	res.Findings = append(res.Findings, *f)
	res.Lost = true
}

// A course is the progress of a program on a job.
type course struct {
	*session
	p       *Program
	res     *Result
	reports map[int]*Report
	gates   map[int]Gate
	phase   phase
	running int             // faults
	done    chan error      // faults that have ended, or failed
	began   map[int]bool    // faults, by their place in the program
	doomed  map[int]bool    // ranks that are ended on purpose
	asked   map[*member]int // number of faults that a rank has to inject
	found   map[int][]Finding
	back    *order // for ranks that join again
}

// phase is what the ranks at their gates wait for.
type phase int

const (
	faultsOver phase = iota // the end of all faults
	recovered               // all know which ranks remain
	joined                  // the end of the faults while others join
)

// run runs a program on the job.
func (x *session) run(p *Program) *Result {
	res := &Result{Errors: map[string]int{}, Faults: map[string]int{}, Graphs: map[string]int{}}
	c := &course{session: x, p: p, res: res, reports: map[int]*Report{}, gates: map[int]Gate{},
		done: make(chan error, len(p.Faults)), began: map[int]bool{}, doomed: map[int]bool{},
		asked: map[*member]int{}, found: map[int][]Finding{}}
	s := x.s
	x.progs++
	late := time.NewTimer(patience)
	defer late.Stop()
	for _, m := range s.members {
		m.tell(order{Program: p})
	}
	for len(c.reports)+len(x.gone) < x.job.Ranks && !res.Lost {
		select {
		case e := <-s.events:
			if !s.known(e.m) {
				continue
			}
			if e.news.Found != nil && len(c.found) == 0 {
				late.Reset(foundPatience)
			}
			c.hear(e.m, e.news, e.err)
		case err := <-c.done:
			c.ended(err)
		case <-late.C:
			if res.Lost = true; len(c.found) > 0 {
				continue
			}
			res.find(&Finding{Kind: "stuck",
				Text: fmt.Sprintf("the program does not end (gates %v in phase %d, dead %v, %d reports, %d faults)%s",
					c.gates, c.phase, x.gone, len(c.reports), c.running, x.stacks())})
		}
	}
	x.faults.Wait()
	for len(c.done) > 0 {
		c.failed(<-c.done)
	}
	for number, all := range c.found {
		if c.reports[number] == nil {
			res.Findings = append(res.Findings, all...)
		}
	}
	judge(res, c.reports, x)
	if res.Lost {
		c.failed(s.mend())
		s.killAll()
	}
	return res
}

// hear handles a message of a process, or its end.
func (c *course) hear(m *member, n news, err error) {
	switch {
	case err != nil && c.doomed[m.number]:
		c.lost(m)
	case err != nil:
		c.res.find(c.died(m, "a program"))
	case n.At != nil:
		for i, f := range c.p.Faults {
			if f.Step == *n.At && f.At == m.number && !f.Joining {
				c.begin(i, f, m)
			}
		}
	case n.Gate != nil:
		c.gates[m.number] = *n.Gate
		c.check()
	case n.Did:
		if n.Error != "" {
			c.res.find(&Finding{Kind: "error", Rank: m.number, Text: n.Error})
		}
		c.running--
		c.asked[m]--
		c.check()
	case n.Hang != nil:
		c.res.find(n.Hang)
	case n.Found != nil:
		c.found[m.number] = append(c.found[m.number], *n.Found)
	case n.Report != nil:
		c.reports[m.number] = n.Report
	case n.Error != "":
		c.res.find(&Finding{Kind: "error", Rank: m.number, Text: n.Error})
	case n.Slot != nil: // a standby process has joined
		if c.back == nil || c.s.members[*n.Slot] != nil {
			c.res.find(&Finding{Kind: "error", Rank: *n.Slot,
				Text: "a process on standby came in where no rank was lost"})
			return
		}
		c.s.spares = slices.DeleteFunc(c.s.spares, func(o *member) bool { return o == m })
		m.number = *n.Slot
		c.s.members[m.number] = m
		c.res.Faults["stood by"]++
		m.tell(*c.back)
		c.stock()
	}
}

// lost handles the end of a process that is to be killed. It may have crashed before.
func (c *course) lost(m *member) {
	if m.p.Wait() != -1 {
		c.res.find(c.died(m, "a program"))
		return
	}
	m.conn.Close()
	delete(c.s.members, m.number)
	delete(c.doomed, m.number)
	delete(c.gates, m.number)
	c.gone[m.number] = true
	c.running -= 1 + c.asked[m]
	if c.phase == joined { // its successor has to join
		c.replace()
	}
	c.check()
}

// begin begins a fault, unless it has begun or is impossible.
func (c *course) begin(i int, f Fault, at *member) {
	if c.began[i] {
		return
	}
	c.began[i] = true
	v := c.s.members[f.Victim]
	if v == nil || c.doomed[f.Victim] {
		return
	}
	if left := c.job.Ranks - len(c.gone) - len(c.doomed); left <= 1 && f.causes() == Lost {
		return
	}
	name := f.Kind
	if f.Joining {
		name += " while joining"
	}
	c.res.Faults[name]++
	c.running++
	switch f.Kind {
	case "kill":
		c.doomed[f.Victim] = true
	case "evict":
		c.asked[at]++
	}
	other := c.s.members[f.Other]
	c.faults.Go(func() { c.inject(f, v, at, other, c.done) })
}

// ended handles the end of a fault.
func (c *course) ended(err error) {
	c.failed(err)
	c.running--
	c.check()
}

// failed reports that a fault could not be injected, or ended, unless err is nil.
func (c *course) failed(err error) {
	if err != nil {
		c.res.find(&Finding{Kind: "error", Text: err.Error()})
	}
}

// check opens the gates when all live ranks have come to theirs.
func (c *course) check() {
	if c.running > 0 || len(c.gates)+len(c.gone) < c.job.Ranks || len(c.gates) == 0 {
		return
	}
	to := Go{}
	step, next := 0, faultsOver
	for _, g := range c.gates {
		step = g.Step
	}
	switch c.phase {
	case faultsOver:
		next = recovered
	case recovered:
		for number, g := range c.gates {
			if g.State == "recovered" {
				to.Stay = append(to.Stay, number)
			} else {
				to.Back = append(to.Back, number)
			}
		}
		to.Back = slices.AppendSeq(to.Back, maps.Keys(c.gone))
		slices.Sort(to.Stay)
		slices.Sort(to.Back)
		if len(to.Stay) == 0 {
			c.res.Lost = true
			c.res.Faults["job lost"]++
			return
		}
		to.Rough = len(to.Back) > 0 && slices.ContainsFunc(c.p.Faults,
			func(f Fault) bool { return f.Joining && f.Step == step && f.Kind == "kill" })
		if c.back = (&order{Program: c.p, From: step, Back: &to}); to.Rough {
			next = joined
		}
		c.replace()
		for i, f := range c.p.Faults {
			if f.Joining && f.Step == step && len(to.Back) > 0 {
				if f.Kind == "kill" { // a rank that joins
					f.Victim = to.Back[f.Victim%len(to.Back)]
				}
				c.begin(i, f, nil)
			}
		}
	}
	c.phase = next
	for number := range c.gates {
		c.s.members[number].tell(order{Go: &to})
	}
	clear(c.gates)
}

// replace starts new processes for ranks that are gone, or lets those on standby join.
func (c *course) replace() {
	waiting := len(c.s.spares)
	for _, number := range slices.Sorted(maps.Keys(c.gone)) {
		if waiting > 0 {
			waiting--
			continue
		}
		if c.later[number] {
			delete(c.later, number)
			c.res.Faults["came later"]++
		}
		m := c.s.launch(number)
		c.tell(m, true)
		m.tell(*c.back)
	}
	clear(c.gone)
}

// mend ends the effects of faults on the network and the store.
func (s *stage) mend() error {
	errs := []error{signal(s.store, syscall.SIGCONT)}
	if s.net != nil {
		errs = append(errs, s.net.Part())
	}
	if s.devices != nil {
		s.devices.part(noRank)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("end the effects of faults: %w", err)
	}
	return nil
}

// anything is the value of a fact on which the ranks need not agree.
const anything = "?"

// judge compares the facts on which ranks have to agree, and their resources.
func judge(res *Result, reports map[int]*Report, x *session) {
	facts := map[string]int{}
	var numbers []int
	for number := range reports {
		numbers = append(numbers, number)
	}
	slices.Sort(numbers)
	free := map[string]bool{}
	for _, rep := range reports {
		for k, v := range rep.Facts {
			free[k] = free[k] || v == anything
		}
	}
	for _, number := range numbers {
		rep := reports[number]
		res.Ops += rep.Ops
		for _, slow := range rep.Slow {
			res.Slow = append(res.Slow, fmt.Sprintf("rank %d: %s", number, slow))
		}
		for k, n := range rep.Errors {
			res.Errors[k] += n
		}
		for k, n := range rep.Graphs {
			res.Graphs[k] += n
		}
		res.Findings = append(res.Findings, rep.Findings...)
		for k, v := range rep.Facts {
			first, ok := facts[k]
			if !ok {
				facts[k] = number
			} else if w := reports[first].Facts[k]; w != v && !free[k] {
				step := 0
				fmt.Sscanf(strings.TrimPrefix(k, "step "), "%d", &step)
				res.Findings = append(res.Findings,
					Finding{"disagreement", number, step, fmt.Sprintf("%s: %s, and at rank %d: %s", k, v, first, w)})
			}
		}
		if x == nil || rep.Use == nil {
			continue
		}
		inboxes := 2 * x.job.Ranks * rep.Recorded // each view keeps a file or a mapping a rank, the driver as many
		if was := x.first[number]; was == nil || x.progs < 4 {
			x.first[number] = rep.Use
		} else if u := rep.Use; u.Files > was.Files+16+inboxes || u.Maps > was.Maps+24+inboxes ||
			u.Goroutines > was.Goroutines+32 ||
			u.Heap > was.Heap+48<<20+3*uint64(x.job.Pool) {
			res.Findings = append(res.Findings,
				Finding{Kind: "resources", Rank: number,
					Text: fmt.Sprintf("after %d programs it holds %+v, where it held %+v", x.progs, *u, *was)})
			x.first[number] = u
		}
	}
	if len(res.Findings) > 0 {
		res.Lost = true
	}
}

// inject injects a fault. It runs beside the driver, which alone may use the maps of members, and
// fail the test.
func (x *session) inject(f Fault, v, at, other *member, done chan<- error) {
	time.Sleep(f.After)
	var err error
	switch f.Kind {
	case "kill":
		if err = signal(v.p, syscall.SIGKILL); err == nil {
			return // its end is the fault's
		}
	case "evict":
		at.tell(order{Evict: &f.Victim})
		return // it reports when it is done
	default:
		err = x.s.disturb(f, v, other)
	}
	if err != nil {
		err = fmt.Errorf("fault %q of rank %d: %w", f.Kind, f.Victim, err)
	}
	done <- err
}

// disturb injects a fault and ends it.
func (s *stage) disturb(f Fault, v, other *member) error {
	during := func(begin, end func() error) error {
		if err := begin(); err != nil {
			return err
		}
		time.Sleep(f.For)
		return end()
	}
	switch f.Kind {
	case "leave": // the rank does it itself
	case "stop":
		return during(func() error { return signal(v.p, syscall.SIGSTOP) },
			func() error { return signal(v.p, syscall.SIGCONT) })
	case "store":
		store := s.store.Process() // it must not have ended
		return during(func() error { return store.Signal(syscall.SIGSTOP) },
			func() error { return store.Signal(syscall.SIGCONT) })
	case "part":
		if s.devices != nil {
			s.devices.part(f.Victim)
			time.Sleep(f.For)
			s.devices.part(noRank)
		}
		if s.net != nil {
			return during(func() error { return s.net.Part(v.host) }, func() error { return s.net.Part() })
		}
	case "slow":
		if s.net != nil {
			return during(func() error { return s.net.Slow(v.host, f.Delay, f.Loss) },
				func() error { return s.net.Part() })
		}
	case "deafen":
		if s.net != nil && other != nil && other.host != v.host {
			return during(func() error { return s.net.Deafen(v.host, other.host) },
				func() error { return s.net.Mend(v.host, other.host) })
		}
	default:
		s.devices.fail(f)
	}
	return nil
}

// signal sends a signal to a process, unless it has ended.
func signal(c *proctest.Child, sig syscall.Signal) error {
	if err := c.Process().Signal(sig); !errors.Is(err, proctest.ErrEnded) {
		return err
	}
	return nil
}

// finish ends the job. Processes continue with the next.
func (x *session) finish() *Finding {
	all := x.s.all()
	for _, m := range all {
		m.tell(order{End: true})
	}
	f := x.await(len(all), "the end of the job", recovery+slack,
		func(n news) (bool, string) { return n.Ended != nil && n.Error == "", n.Error })
	if f != nil {
		x.s.killAll()
	}
	for _, m := range slices.Clone(x.s.spares) {
		x.s.end(m)
	}
	return f
}
