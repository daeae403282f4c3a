//go:build linux

package torture

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tutti/tests/internal/rig"
)

const (
	patience      = 150 * time.Second // bounds a program, …
	foundPatience = 20 * time.Second  // … and the rest of one in which something was found
)

// A stage is where jobs run as processes: a store, hosts if there are several, and a process for
// each rank, which is used for one job after the other.
type stage struct {
	t         *testing.T
	rig       *rig.Stage
	transport string
	net       *rig.Switch // nil: one host
	store     *rig.Process
	address   string
	secret    string
	jobs      int
	members   map[int]*member
	events    chan event
	hosts     int
}

// member is a rank's process.
type member struct {
	number int
	p      *rig.Process
	r      *rig.Rank
	conn   net.Conn
	mu     sync.Mutex
	out    *json.Encoder
	host   int
	jobs   int // that it has run
}

type event struct {
	m    *member
	news news
	err  error // its end
}

// StoreVariable makes the test binary a store.
const StoreVariable = "TORTURE_STORE"

// storeHost is the address where it listens.
const storeHost = "TORTURE_STORE_HOST"

func newStage(t *testing.T, transport, secret string) *stage {
	s := &stage{t: t, rig: rig.New(t), transport: transport, secret: secret, members: map[int]*member{},
		events: make(chan event, 64)}
	var enter, env []string
	switch transport {
	case "tcp":
		s.hosts = maxRanks
	case "hosts":
		s.hosts = 3
	}
	if s.hosts > 0 {
		s.net = rig.NewSwitch(t, s.hosts+1) // the last is the store's
		enter = s.net.Hosts[s.hosts].Enter()
		env = append(env, storeHost+"="+s.net.Address(s.hosts))
	}
	s.store = s.rig.StartIn(enter, append(env, StoreVariable+"="+secret), rig.Self(t))
	s.store.Out.Await(t, "\n")
	s.address = strings.TrimPrefix(strings.TrimSpace(s.store.Out.String()), "at ")
	return s
}

// launch starts a rank's process.
func (s *stage) launch(number int) *member {
	s.t.Helper()
	m := &member{number: number}
	var enter []string
	switch s.transport {
	case "tcp":
		m.host = number
	case "hosts":
		m.host = (number/2 + s.jobs) % s.hosts // a replacement may be elsewhere
	}
	if s.net != nil {
		enter = s.net.Hosts[m.host].Enter()
	}
	m.p = s.rig.StartIn(enter, []string{"RANK=" + strconv.Itoa(number), "GOTRACEBACK=all"}, rig.Self(s.t))
	m.r = s.rig.Next()
	in := (*json.Decoder)(nil)
	m.conn, in = m.r.Play()
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
	s.members[number] = m
	return m
}

func (m *member) tell(o order) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.out.Encode(o) // where it is dead, its connection says so
}

// end kills a rank's process and waits until it is gone.
func (s *stage) end(m *member) {
	syscall.Kill(m.r.PID, syscall.SIGCONT)
	syscall.Kill(m.r.PID, syscall.SIGKILL)
	m.p.Wait()
	m.conn.Close()
	if s.members[m.number] == m {
		delete(s.members, m.number)
	}
}

// killAll ends all ranks.
func (s *stage) killAll() {
	for _, m := range s.members {
		s.end(m)
	}
}

// A session is a job that runs.
type session struct {
	s     *stage
	job   Job
	setup setup
	first map[int]*rig.Usage // of each rank's process at the end of an early program
	progs int

	faults sync.WaitGroup // that are under way
}

// start starts a job.
func (s *stage) start(job Job) (*session, *Finding) {
	s.jobs++
	x := &session{s: s, job: job, first: map[int]*rig.Usage{}}
	x.setup = setup{Job: job, Name: fmt.Sprintf("torture-%d", s.jobs), Store: s.address, Secret: s.secret}
	for number, m := range s.members { // a process that has seen much makes room for a new one
		if number >= job.Ranks || m.jobs >= 40 {
			s.end(m)
		}
	}
	var all []*member
	for number := range job.Ranks {
		m := s.members[number]
		if m == nil {
			m = s.launch(number)
		}
		m.jobs++
		all = append(all, m)
	}
	for _, m := range all {
		own := x.setup
		own.Number = m.number
		m.tell(order{Setup: &own})
	}
	return x, x.await(len(all), "join", recovery+slack, func(n news) (bool, string) { return n.Ready, n.Error })
}

// await waits for an answer of all ranks.
func (x *session) await(n int, what string, limit time.Duration, is func(news) (bool, string)) *Finding {
	late := time.After(limit)
	for n > 0 {
		select {
		case e := <-x.s.events:
			if x.s.members[e.m.number] != e.m {
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

// stacks has all ranks print what they do.
func (x *session) stacks() string {
	var text strings.Builder
	for _, number := range x.numbers() {
		m := x.s.members[number]
		syscall.Kill(m.r.PID, syscall.SIGCONT)
		syscall.Kill(m.r.PID, syscall.SIGQUIT)
		m.p.Wait()
		fmt.Fprintf(&text, "\n--- rank %d\n%s", number, ours(m.p.Err.String()))
	}
	return text.String()
}

// ours are the stacks that have to do with us.
func ours(text string) string {
	var b strings.Builder
	for _, whose := range []string{"tutti/tests/torture.(*rank)", "tutti/"} { // what the rank does comes first
		for block := range strings.SplitSeq(text, "\n\n") {
			if rank := strings.Contains(block, "tutti/tests/torture.(*rank)"); strings.Contains(block, whose) &&
				(rank == (whose != "tutti/")) && b.Len() < 20000 {
				b.WriteString(block + "\n\n")
			}
		}
	}
	return b.String()
}

func (x *session) numbers() (all []int) {
	for number := range x.s.members {
		all = append(all, number)
	}
	slices.Sort(all)
	return all
}

// Result is what became of a program.
type Result struct {
	Findings []Finding
	Ops      int
	Errors   map[string]int
	Slow     []string       // calls
	Faults   map[string]int // that happened, by kind
	Lost     bool           // the job cannot go on
}

func (res *Result) find(f *Finding) {
	res.Findings = append(res.Findings, *f)
	res.Lost = true
}

// run runs a program on the job.
func (x *session) run(p *Program) *Result {
	res := &Result{Errors: map[string]int{}, Faults: map[string]int{}}
	s := x.s
	x.progs++
	reports := map[int]*Report{}
	gates := map[int]Gate{}
	phase := 0
	running := 0
	done := make(chan string, len(p.Faults)+1)
	doomed := map[int]bool{} // their end is on purpose
	late := time.NewTimer(patience)
	defer late.Stop()
	for number := range x.job.Ranks {
		s.members[number].tell(order{Program: p})
	}
	began := map[int]bool{}
	found := map[int][]Finding{}
	asked := map[*member]int{} // faults that a rank is to do
	gone := map[int]bool{}     // dead, and not replaced yet
	check := func() {
		if running > 0 || len(gates)+len(gone) < x.job.Ranks || len(gates) == 0 {
			return
		}
		to := Go{}
		step := 0
		for number, g := range gates {
			step = g.Step
			if phase == 1 && g.State == "recovered" {
				to.Stay = append(to.Stay, number)
			} else if phase == 1 {
				to.Back = append(to.Back, number)
			}
		}
		if phase == 1 {
			for number := range gone {
				to.Back = append(to.Back, number)
			}
			slices.Sort(to.Stay)
			slices.Sort(to.Back)
			if len(to.Stay) == 0 {
				res.Lost = true
				res.Faults["job lost"]++
				return
			}
			for number := range gone {
				m := s.launch(number)
				own := x.setup
				own.Number, own.Late = number, true
				m.tell(order{Setup: &own})
				m.tell(order{Program: p, From: step, Back: &to})
			}
			clear(gone)
		}
		for number := range gates {
			s.members[number].tell(order{Go: &to})
		}
		clear(gates)
		phase = 1 - phase
	}
	for len(reports) < x.job.Ranks && !res.Lost {
		select {
		case e := <-s.events:
			m, n := e.m, e.news
			if s.members[m.number] != m {
				continue
			}
			switch {
			case e.err != nil && doomed[m.number]:
				m.p.Wait()
				m.conn.Close()
				delete(s.members, m.number)
				delete(doomed, m.number)
				delete(gates, m.number)
				gone[m.number] = true
				running -= 1 + asked[m]
				check()
			case e.err != nil:
				res.find(x.died(m, "a program"))
			case n.At != nil:
				for i, f := range p.Faults {
					if f.Step != *n.At || f.At != m.number || began[i*1000+f.Step] {
						continue
					}
					began[i*1000+f.Step] = true
					v := s.members[f.Victim]
					if v == nil || doomed[f.Victim] || gone[f.Victim] || len(gone)+len(doomed) >= x.job.Ranks-1 &&
						(f.Kind == "kill" || f.Kind == "leave" || f.Kind == "evict") {
						continue
					}
					res.Faults[f.Kind]++
					running++
					switch f.Kind {
					case "kill":
						doomed[f.Victim] = true
					case "evict":
						asked[m]++
					}
					x.faults.Go(func() { x.inject(f, v, m, done) })
				}
			case n.Gate != nil:
				gates[m.number] = *n.Gate
				check()
			case n.Did:
				if n.Error != "" {
					res.find(&Finding{Kind: "error", Rank: m.number, Text: n.Error})
				}
				running--
				asked[m]--
				check()
			case n.Hang != nil:
				res.find(n.Hang)
			case n.Found != nil:
				if len(found) == 0 {
					late.Reset(foundPatience)
				}
				found[m.number] = append(found[m.number], *n.Found)
			case n.Report != nil:
				reports[m.number] = n.Report
			case n.Error != "":
				res.find(&Finding{Kind: "error", Rank: m.number, Text: n.Error})
			}
		case <-done:
			running--
			check()
		case <-late.C:
			if res.Lost = true; len(found) > 0 {
				continue
			}
			res.find(&Finding{Kind: "stuck",
				Text: fmt.Sprintf("the program does not end (gates %v in phase %d, dead %v, %d reports, %d faults)%s",
					gates, phase, gone, len(reports), running, x.stacks())})
		}
	}
	x.faults.Wait()
	for number, all := range found {
		if reports[number] == nil {
			res.Findings = append(res.Findings, all...)
		}
	}
	judge(res, reports, x)
	if res.Lost {
		s.mend()
		s.killAll()
	}
	return res
}

// mend ends what faults may still do to the network and the store.
func (s *stage) mend() {
	s.store.Signal(syscall.SIGCONT)
	if s.net != nil {
		s.net.Part()
	}
}

// judge compares what ranks say that they have to say alike, and what they hold.
func judge(res *Result, reports map[int]*Report, x *session) {
	facts := map[string]int{}
	var numbers []int
	for number := range reports {
		numbers = append(numbers, number)
	}
	slices.Sort(numbers)
	for _, number := range numbers {
		rep := reports[number]
		res.Ops += rep.Ops
		for _, slow := range rep.Slow {
			res.Slow = append(res.Slow, fmt.Sprintf("rank %d: %s", number, slow))
		}
		for k, n := range rep.Errors {
			res.Errors[k] += n
		}
		res.Findings = append(res.Findings, rep.Findings...)
		for k, v := range rep.Facts {
			first, ok := facts[k]
			if !ok {
				facts[k] = number
			} else if w := reports[first].Facts[k]; w != v {
				step := 0
				fmt.Sscanf(strings.TrimPrefix(k, "step "), "%d", &step)
				res.Findings = append(res.Findings,
					Finding{"disagreement", number, step, fmt.Sprintf("%s: %s, and at rank %d: %s", k, v, first, w)})
			}
		}
		if x == nil || rep.Use == nil {
			continue
		}
		if was := x.first[number]; was == nil || x.progs < 4 {
			x.first[number] = rep.Use
		} else if u := rep.Use; u.Files > was.Files+16 || u.Maps > was.Maps+24 || u.Goroutines > was.Goroutines+32 ||
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

// inject has a fault happen.
func (x *session) inject(f Fault, v, at *member, done chan<- string) {
	s := x.s
	time.Sleep(f.After)
	pid := v.r.PID
	switch f.Kind {
	case "kill":
		syscall.Kill(pid, syscall.SIGKILL)
		return // its end is the fault's
	case "stop":
		syscall.Kill(pid, syscall.SIGSTOP)
		time.Sleep(f.For)
		syscall.Kill(pid, syscall.SIGCONT)
	case "evict":
		at.tell(order{Evict: &f.Victim})
		return // it says when it has done it
	case "leave": // the rank does it itself
	case "store":
		s.store.Signal(syscall.SIGSTOP)
		time.Sleep(f.For)
		s.store.Signal(syscall.SIGCONT)
	case "part":
		if s.net != nil {
			s.net.Part(v.host)
			time.Sleep(f.For)
			s.net.Part()
		}
	case "deafen":
		if o := s.members[f.Other]; s.net != nil && o != nil && o.host != v.host {
			s.net.Deafen(v.host, o.host)
			time.Sleep(f.For)
			s.net.Mend(v.host, o.host)
		}
	}
	done <- f.Kind
}

// finish ends the job. Processes go on to the next.
func (x *session) finish() *Finding {
	for _, m := range x.s.members {
		m.tell(order{End: true})
	}
	f := x.await(len(x.s.members), "the end of the job", recovery+slack,
		func(n news) (bool, string) { return n.Ended != nil, "" })
	if f != nil {
		x.s.killAll()
	}
	return f
}
