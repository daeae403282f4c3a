//go:build linux

package torture

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"tutti/pg"
	"tutti/tests/internal/rig"
)

// A Finding is a violation.
type Finding struct {
	Kind string // wrong, store, late, hang, error, spurious, disagreement, resources, death, stuck
	Rank int
	Step int
	Text string
}

func (f *Finding) String() string {
	return fmt.Sprintf("%s: rank %d, step %d: %s", f.Kind, f.Rank, f.Step, f.Text)
}

// A Report is the result of a program on a rank.
type Report struct {
	Rank     int
	Findings []Finding         `json:",omitempty"`
	Facts    map[string]string `json:",omitempty"` // facts on which all ranks that state them have to agree
	Ops      int               // number of operations
	Slow     []string          `json:",omitempty"` // calls that took longer than a second
	Errors   map[string]int    `json:",omitempty"` // typed errors seen, by type
	Graphs   map[string]int    `json:",omitempty"` // that were refused, and launches
	Recorded int               `json:",omitempty"` // views of groups in which graphs were captured, in all programs
	Use      *rig.Usage        `json:",omitempty"`
}

// A Gate is where ranks wait for the end of the faults of a disturbance; Go is the answer.
type Gate struct {
	Step  int
	State string // "" (member), "out" (removed), "recovered", "joining"
}

// Go is the answer to a Gate.
type Go struct {
	Stay  []int // remaining ranks
	Back  []int // ranks that join again
	Rough bool  // some of these are lost while they join, and join again
}

// guide is a rank's interface to the driver of the test.
type guide interface {
	At(step int)    // this rank has come to the step, which triggers faults
	Gate(g Gate) Go // waits until all ranks have come and all faults have ended
	Found(f Finding)
	Hang(f Finding) // does not return if the process has to end
}

// rank runs programs on one rank of a job.
type rank struct {
	job   Job
	me    int
	guide guide
	join  func(ctx context.Context) (*pg.Group, error)

	entered func(g *pg.Group) // called with every group of all ranks; may be nil
	shared  bool              // other ranks share the process
	others  func()            // waits until they have made the steps; nil: the group of all ranks has not failed

	// Tests of this package replace it.
	conduct func(ctx context.Context, c *call, how How) error

	groups   map[int]*handle
	windows  map[int]*live
	plain    *pool
	device   *deviceMemory
	guards   []*pool
	turn     int    // of the guards
	touching bool   // registered memory 0 is in use, …
	untouch  func() // ends touching
	alloc    [3]*region

	watch *watch

	// The views in which graphs were captured: the groups keep what these use until the devices are
	// closed.
	recorded map[viewKey]bool
	heals    int // that have ended: each may have entered another view of the same ranks

	mu      sync.Mutex // guards what follows and the pools: the parts of a step together run concurrently
	p       *Program
	now     int
	rep     *Report
	flight  []*call
	differs bool        // the present disturbance is ranks that make different calls
	later   [][2]string // facts, if this rank remains
	told    bool        // this rank knows of it
}

// region is registered memory of a rank.
type region struct {
	*pool
	mem []byte
	g   *pg.Group // that it was allocated from
}

// newRank makes a rank. d is a device of its groups, nil if it has none.
func newRank(job Job, me int, g guide, d memoryDevice,
	join func(ctx context.Context) (*pg.Group, error)) (*rank, error) {
	r := &rank{job: job, me: me, guide: g, join: join, conduct: conduct, groups: map[int]*handle{},
		windows: map[int]*live{}, recorded: map[viewKey]bool{}, rep: &Report{Rank: me}}
	mem, err := guarded(job.Pool)
	if err != nil {
		return nil, err
	}
	r.plain = newPool("plain memory", mem)
	if r.device, err = newDeviceMemory(d, job.Pool); err != nil {
		return nil, err
	}
	for i := range 8 {
		mem, err := guarded(128 << 10)
		if err != nil {
			return nil, err
		}
		r.guards = append(r.guards, newPool(fmt.Sprintf("guarded memory %d", i), mem))
	}
	r.watch = newWatch(slack, hung, func(text string) {
		r.guide.Hang(Finding{Kind: "hang", Rank: r.me, Step: r.step(), Text: text})
	})
	return r, nil
}

func (r *rank) step() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.now
}

// enter makes g the group of all ranks.
func (r *rank) enter(g *pg.Group) {
	h := &handle{g: g}
	h.grow()
	r.groups = map[int]*handle{0: h}
	if r.entered != nil {
		r.entered(g)
	}
	r.renew(0)
}

// leave leaves the job.
func (r *rank) leave() {
	r.endWindows(nil)
	for _, id := range r.ids() {
		r.groups[id].g.Close()
	}
	for i := range r.alloc {
		r.free(i)
	}
	r.groups = map[int]*handle{}
}

// close closes the rank, without its groups.
func (r *rank) close() { r.watch.close() }

// group returns a group, nil if there is none. Steps together make others meanwhile.
func (r *rank) group(id int) *handle {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.groups[id]
}

func (r *rank) ids() (ids []int) {
	for id := range r.groups {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

func (r *rank) find(kind, format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.rep.Findings) < 20 {
		f := Finding{kind, r.me, r.now, fmt.Sprintf(format, args...)}
		r.rep.Findings = append(r.rep.Findings, f)
		r.guide.Found(f)
	}
}

// fact states a fact on which all ranks that state it have to agree.
func (r *rank) fact(key, format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.rep.Facts == nil {
		r.rep.Facts = map[string]string{}
	}
	r.rep.Facts[key] = fmt.Sprintf(format, args...)
}

// ifStays states a fact for the ranks that are members after the disturbance.
func (r *rank) ifStays(key, value string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.later = append(r.later, [2]string{key, value})
}

// renew frees registered memory i, if there is any, and allocates it again.
func (r *rank) renew(i int) {
	h := r.groups[0]
	if h == nil || i == 0 && r.touching || !r.free(i) {
		return
	}
	mem, err := pg.Alloc[byte](h.g, r.job.Pool)
	if err != nil {
		r.find("error", "alloc: %v", err)
		return
	}
	for j, b := range mem {
		if b != 0 {
			r.find("wrong", "alloc: byte %d of %d is %#x, want zeroed memory", j, len(mem), b)
			break
		}
	}
	r.alloc[i] = &region{newPool(fmt.Sprintf("registered memory %d", i), mem), mem, h.g}
	r.alloc[i].end -= touchSize
}

// free frees registered memory i. It returns false if an operation uses it.
func (r *rank) free(i int) bool {
	a := r.alloc[i]
	if a == nil {
		return true
	}
	for _, b := range a.held {
		if b.active {
			return false
		}
	}
	if err := a.check(); err != nil {
		r.find("store", "%v", err)
	}
	r.alloc[i] = nil
	if err := pg.Free(a.g, a.mem); err != nil {
		r.find("error", "free: %v", err)
	}
	return true
}

// take returns n bytes of a kind of memory.
func (r *rank) take(m Mem, n, size int, owner string) *buffer {
	if n == 0 {
		return nil
	}
	r.mu.Lock()
	var b *buffer
	err := errBusy
	switch m {
	case MemAlloc, MemOffset:
		skew := 0
		if m == MemOffset {
			skew = size * (1 + n%7)
		}
		for i := range r.alloc {
			if a := r.alloc[(i+r.now)%len(r.alloc)]; a != nil && errors.Is(err, errBusy) {
				b, err = a.take(n, skew, owner)
			}
		}
	case MemDevice:
		b, err = r.device.take((r.now+n)%2, n, size*(n%3), owner)
	case shortDevice:
		b, err = r.device.take(shortPool, n, size*(n%3), owner)
	case graphDevice:
		b, err = r.device.take(graphPool, n, size*(n%3), owner)
	case MemGuard:
		for range r.guards {
			if r.turn = (r.turn + 1) % len(r.guards); errors.Is(err, errBusy) {
				b, err = r.guards[r.turn].last(n, owner)
			}
		}
	}
	if errors.Is(err, errBusy) || b == nil && err == nil {
		skew := 0
		if m == MemOdd {
			skew = size
		}
		b, err = r.plain.take(n, skew, owner)
	}
	if errors.Is(err, errBusy) || b == nil && err == nil { // there is no room
		p := newPool("memory of its own", make([]byte, n+1024))
		b, err = p.take(n, 0, owner)
	}
	r.mu.Unlock()
	if err != nil {
		r.find("store", "%v", err)
	}
	return b
}

func (r *rank) giveBack(c *call) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range c.bufs {
		b.p.giveBack(b)
	}
	c.bufs, c.dst, c.src = nil, nil, nil
}

// run runs a program from a step on, and returns the report.
func (r *rank) run(p *Program, from int, back *Go) *Report {
	r.mu.Lock()
	r.p, r.now, r.rep = p, from, &Report{Rank: r.me, Errors: map[string]int{}}
	r.mu.Unlock()
	ctx := context.Background()
	stop := r.touch()
	if back != nil {
		r.comeBack(ctx, *back)
		from++
	}
	for i := from; i < len(p.Steps); i++ {
		r.mu.Lock()
		r.now = i
		r.mu.Unlock()
		r.announce(i)
		r.do(ctx, &p.Steps[i], 0)
	}
	r.land(ctx, false)
	if r.others != nil {
		r.others()
	} else if h := r.groups[0]; h != nil {
		if slices.ContainsFunc(p.Steps, func(s Step) bool { return s.Op.window() }) {
			r.meet(ctx, &Step{}, h)
		}
		r.endWindows(nil)
	}
	for _, id := range r.ids() {
		if id != 0 {
			r.drop(id)
		}
	}
	stop()
	r.mu.Lock()
	pools := append([]*pool{r.plain}, r.guards...)
	for _, p := range r.device.pools {
		pools = append(pools, p.pool)
	}
	for _, a := range r.alloc {
		if a != nil {
			pools = append(pools, a.pool)
		}
	}
	var bad []error
	for _, q := range pools {
		if err := q.check(); err != nil {
			bad = append(bad, err)
		}
	}
	r.mu.Unlock()
	for _, err := range bad {
		r.find("store", "at the end: %v", err)
	}
	r.stopStreams(nil)
	r.rep.Recorded = len(r.recorded)
	if p.Seed%16 == 0 && !r.shared {
		r.rep.Use = rig.Use()
	}
	return r.rep
}

// announce tells the guide that this rank has come to a step with faults.
func (r *rank) announce(i int) {
	for _, f := range r.p.Faults {
		if f.Step == i && f.Kind == "leave" && f.Victim == r.me && len(r.groups) > 0 {
			r.land(context.Background(), false)
			r.endWindows(nil)
			for _, id := range r.ids() {
				r.drop(id)
			}
		}
	}
	if slices.ContainsFunc(r.p.Faults, func(f Fault) bool { return f.Step == i && f.At == r.me }) {
		r.guide.At(i)
	}
}

// touch stores to the end of the first registered memory, beside the buffers of operations, until
// the program ends, and checks its stores.
func (r *rank) touch() (stop func()) {
	r.untouch = func() {}
	if r.p.Touch != r.me || r.alloc[0] == nil {
		return r.untouch
	}
	a := r.alloc[0]
	words := unsafe.Slice((*uint64)(unsafe.Pointer(&a.mem[len(a.mem)-touchSize])), touchSize/8)
	end, done := make(chan struct{}), make(chan struct{})
	r.touching = true
	go func() {
		defer close(done)
		clear(words)
		for n := uint64(1); ; n++ {
			for i := range words {
				if words[i] != n-1 {
					r.find("wrong", "this rank's own stores to registered memory are lost: word %d is %d, want %d",
						i, words[i], n-1)
					return
				}
				words[i] = n
			}
			select {
			case <-end:
				return
			default:
				runtime.Gosched()
			}
		}
	}()
	var once sync.Once
	r.untouch = func() {
		once.Do(func() {
			close(end)
			<-done
			r.touching = false
		})
	}
	return r.untouch
}

// timed makes a call that should end within limit.
func (r *rank) timed(what string, limit time.Duration, f func() error) error {
	began := time.Now()
	late, err := r.watch.call(what, limit, f)
	if age := time.Since(began); age > time.Second {
		r.mu.Lock()
		r.rep.Slow = append(r.rep.Slow,
			fmt.Sprintf("at step %d: %s took %v: %v", r.now, what, age.Round(time.Millisecond), err))
		r.mu.Unlock()
	}
	if late != "" {
		r.find("late", "%s", late)
	}
	return err
}

// limit returns the time limit of a call that waits for earlier ones.
func (r *rank) limit(p *Part) time.Duration {
	l := r.job.Timeout * time.Duration(1+len(r.flight))
	if p.Limit > 0 {
		l = min(l, p.Limit)
	}
	if p.Cancel != 0 {
		l = min(l, max(p.Cancel, 0))
	}
	return l
}

// judge checks whether an error is allowed.
func (r *rank) judge(what string, may Causes, err error) {
	if err == nil {
		return
	}
	var lost *pg.RankError
	var late *pg.TimeoutError
	var differ *pg.MismatchError
	var bad *pg.ArgumentError
	kind, ok := "untyped", false
	switch {
	case errors.As(err, &differ):
		kind, ok = "MismatchError", may&Differing != 0
		r.mu.Lock()
		r.told = true
		r.mu.Unlock()
	case errors.As(err, &lost):
		kind, ok = "RankError", may&(Lost|Unheard|Shut) != 0
	case errors.As(err, &late):
		kind, ok = "TimeoutError", may&(Cancelled|Unheard) != 0
	case errors.As(err, &bad):
		kind = "ArgumentError"
	case errors.Is(err, pg.ErrEvicted):
		kind, ok = "ErrEvicted", may&(Lost|Unheard) != 0
	case errors.Is(err, pg.ErrIsolated):
		kind, ok = "ErrIsolated", may&Unheard != 0
	case errors.Is(err, pg.ErrAborted):
		kind, ok = "ErrAborted", may&Aborted != 0
	case errors.Is(err, pg.ErrClosed):
		kind, ok = "ErrClosed", may&Shut != 0
	}
	r.mu.Lock()
	if r.rep.Errors == nil {
		r.rep.Errors = map[string]int{}
	}
	r.rep.Errors[kind]++
	r.mu.Unlock()
	if !ok {
		how := "spurious"
		if kind == "untyped" {
			how = "error"
		}
		r.find(how, "%s: %s, which nothing explains (%s): %v", what, kind, may, err)
	}
}

func (c Causes) String() string {
	var all []string
	for i, name := range []string{"cancelled", "lost", "differing", "aborted", "unheard", "opaque", "shut"} {
		if c>>i&1 != 0 {
			all = append(all, name)
		}
	}
	if all == nil {
		return "nothing is disturbed"
	}
	return strings.Join(all, " ")
}

// part returns this rank's part of a step.
func (r *rank) part(s *Step) *Part {
	if r.me < len(s.Ranks) {
		return &s.Ranks[r.me]
	}
	return &Part{}
}

func (r *rank) do(ctx context.Context, s *Step, lane int) {
	part := r.part(s)
	if part.Late > 0 {
		time.Sleep(part.Late)
	}
	r.mu.Lock()
	r.rep.Ops++
	r.mu.Unlock()
	switch s.Op {
	case Wait:
		r.land(ctx, part.Last)
		return
	case Brace:
		r.land(ctx, false)
		if h := r.groups[0]; h != nil {
			err := r.timed("barrier", r.job.Timeout, func() error { return h.g.Barrier(ctx) })
			r.judge("barrier", s.May, err)
		}
		return
	case Heal:
		r.heal(ctx, s)
		return
	case Alloc:
		r.renew(s.Root % len(r.alloc))
		return
	case Free:
		if i := s.Root % len(r.alloc); i > 0 {
			r.free(i)
		}
		return
	case Renew:
		r.renewDevice(ctx)
		return
	case Together:
		var wg sync.WaitGroup
		for i := range s.Par {
			wg.Go(func() { r.do(ctx, &s.Par[i], i+1) })
		}
		wg.Wait()
		return
	}
	if s.Op.window() {
		r.windowStep(ctx, s, part)
		return
	}
	h := r.group(s.Group)
	if h == nil {
		return
	}
	switch s.Op {
	case Message:
		r.message(ctx, s, part, h)
	case Window:
		r.window(ctx, s, part, h)
	case Agree:
		r.agree(ctx, s, part, h, lane)
	case Split:
		r.split(ctx, s, part, h)
	case Close:
		if s.Group != 0 {
			if part.No && len(r.windowsOf(h)) == 0 {
				if err := r.timed("close", r.job.Timeout, h.g.Close); err != nil {
					r.find("error", "close with operations under way: %v", err)
				}
			}
			r.landOn(ctx, h)
			if len(r.windowsOf(h)) > 0 {
				r.meet(ctx, s, h)
			}
			r.drop(s.Group)
		}
	case Abort:
		if s.Group != 0 {
			r.abort(ctx, s, part, h)
		}
	case Admit:
		if s.May == 0 {
			n := 0
			err := r.timed("admit", r.limit(part), func() (err error) { n, err = h.g.Admit(ctx); return err })
			if r.judge("admit", s.May, err); err == nil {
				r.fact(fmt.Sprintf("%d admitted", r.now), "%d", n)
			}
		}
	case Graph:
		r.graph(ctx, s, h)
	case Chain:
		r.chain(ctx, s, part, h)
	case Argument:
		r.argument(ctx, s, h)
	default:
		r.collective(ctx, s, part, h, lane)
		if s.differs(h) {
			// A rank that needed no other notices with an operation that needs others, or the one
			// after that: a barrier of all may have ended here when the first rank notices.
			r.land(ctx, false)
			var err error
			for i := 0; i < 2 && err == nil; i++ {
				err = r.timed("barrier", r.job.Timeout, func() error { return h.g.Barrier(ctx) })
			}
			if r.judge("barrier after calls that differ", s.May, err); err == nil {
				r.find("error", "ranks called different things, and two barriers succeed after it")
			}
		}
	}
}

func (r *rank) drop(id int) {
	h := r.groups[id]
	r.endWindows(h)
	delete(r.groups, id)
	if err := r.timed("close", r.job.Timeout, h.g.Close); err != nil {
		r.find("error", "close: %v", err)
	}
	r.stopStreams(h)
}

// stopStreams closes the streams of a group whose calls are over, or all.
func (r *rank) stopStreams(h *handle) {
	if err := r.timed("closing a stream", 0, func() error { return r.device.stop(h) }); err != nil {
		r.find("error", "closing a stream: %v", err)
	}
}

// stream returns the stream of the buffers of a call on a group. It is nil if none is on a device,
// and for an odd count.
func (r *rank) stream(h *handle, part *Part, count int, dst, src []byte) *deviceStream {
	if count%2 != 0 || !r.device.has(dst) && !r.device.has(src) {
		return nil
	}
	s, err := r.device.stream(streamKey{h, part.Other})
	if err != nil {
		r.find("error", "a stream: %v", err)
	}
	return s
}

// collective makes a collective and, unless a later step waits for it, checks it.
func (r *rank) collective(ctx context.Context, s *Step, part *Part, h *handle, lane int) {
	how := part.How
	if how == "" {
		how = Blocking
	}
	c := newCall(s, r.p.Seed+uint64(r.now)*64+uint64(lane), r.me, h)
	c.name = fmt.Sprintf("step %d: %s", r.now, c.name)
	if lane > 0 {
		c.name += fmt.Sprintf(" on group %d", s.Group)
	}
	name := c.name
	r.mu.Lock()
	r.differs = r.differs || s.differs(h)
	r.mu.Unlock()
	toMem, fromMem := s.place(part, r.job.GPUs)
	r.lay(c, part, toMem, fromMem)
	if dst, src := c.lengths(); r.device.has(c.dst) != r.device.has(c.src) && dst > 0 && src > 0 { // no room for one
		r.giveBack(c)
		r.lay(c, part, MemPlain, MemPlain)
	}
	if c.ends = part.Cancel != 0 || part.Limit != 0; how != Blocking {
		c.limit = part.Limit
	}
	c.device, c.stream = r.device, r.stream(h, part, c.count, c.dst, c.src)
	input := c.src
	c.fill(r.me)
	if c.op == Broadcast && h.slot() != c.root {
		input = nil
	}
	r.bring(c, part, input)
	c.before = h.g.View()
	cctx, cancel := part.within(ctx)
	defer cancel()
	err := r.timed(c.name, r.limit(part), func() error { return r.conduct(cctx, c, how) })
	r.follow(c)
	if c.work != nil {
		if how == Started {
			r.mu.Lock()
			r.flight = append(r.flight, c)
			r.mu.Unlock()
			return
		}
		select {
		case <-c.work.Done():
			err = c.work.Err() // ctx may have ended the wait at the same time
		default: // ctx has ended only the wait
			if !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
				r.find("error", "%s: Wait returned before the operation was done: %v", name, err)
			}
			r.await(ctx, c)
			return
		}
	}
	r.check(name, c, err)
}

// lay takes the buffers of a call of kinds of memory.
func (r *rank) lay(c *call, part *Part, toMem, fromMem Mem) {
	me, size := c.h.slot(), c.d.size
	dst, src := c.lengths()
	grab := func(m Mem, n int) []byte {
		b := r.take(m, n*size, size, c.name)
		if b != nil {
			c.bufs = append(c.bufs, b)
		}
		return b.bytes()
	}
	switch {
	case c.op == AllReduce && part.InPlace, c.op == Broadcast, c.op == Reduce:
		c.inPlace = true
		c.dst = grab(toMem, dst)
		c.src = c.dst
	case part.InPlace && (c.op == AllGather || c.op == AllGatherV || c.op == Gather && me == c.root):
		c.inPlace = true
		c.dst = grab(toMem, dst)
		at := me * c.count * size
		if c.op == AllGatherV {
			at = 0
			for _, k := range c.counts[:me] {
				at += k * size
			}
		}
		c.src = c.dst[at : at+src*size]
	case part.InPlace && c.op == Scatter && me == c.root:
		c.inPlace = true
		c.src = grab(fromMem, src)
		c.dst = c.src[me*c.count*size : (me+1)*c.count*size]
	default:
		c.dst, c.src = grab(toMem, dst), grab(fromMem, src)
	}
}

// await waits for a started operation: first briefly, to interrupt it anywhere.
func (r *rank) await(ctx context.Context, c *call) {
	err := r.timed("waiting for "+c.name, r.limit(&Part{}), func() error {
		return waitFor(ctx, c.work)
	})
	r.check(c.name, c, err)
}

// land waits for all started operations, the latest first if last.
func (r *rank) land(ctx context.Context, last bool) {
	for len(r.flight) > 0 {
		i := 0
		if last {
			i = len(r.flight) - 1
		}
		c := r.flight[i]
		r.await(ctx, c)
		r.mu.Lock()
		r.flight = slices.Delete(r.flight, i, i+1)
		r.mu.Unlock()
	}
}

// landOn waits for the started operations of a group.
func (r *rank) landOn(ctx context.Context, h *handle) {
	for _, c := range slices.Clone(r.flight) {
		if c.h == h {
			r.await(ctx, c)
			r.mu.Lock()
			r.flight = slices.DeleteFunc(r.flight, func(o *call) bool { return o == c })
			r.mu.Unlock()
		}
	}
}

// check checks the result of a call.
func (r *rank) check(name string, c *call, err error) {
	may := c.step.May
	if c.h == r.group(0) { // which is neither aborted nor closed
		may &^= Aborted | Shut
	}
	r.judge(name, may, err)
	if err != nil || c.held {
		if err := c.settle(r.limit(&Part{})); err != nil {
			r.find("error", "%v", err)
		}
	}
	var lost *pg.RankError
	local := c.work != nil && c.work.LocalSuccess() // the result is there, even if it does not count
	switch {
	case c.opaque:
	case err == nil || local:
		if err == nil {
			r.followed(c)
		}
		after := c.h.g.View()
		// Unused memory, and parts of ranks that contributed nothing, may have any contents.
		was := slices.Clone(c.dst)
		if c.op == AllGather && len(c.bufs) > 0 { // as it was
			paint(was, c.bufs[0].at)
		}
		wrong, by := c.result(c.dst, was, after)
		if wrong != "" {
			r.find("wrong", "%s in place %v on %s: %s (views %v, %v; error %v)", name, c.inPlace, c.where(), wrong,
				c.before, after, err)
		} else if err == nil && by != nil && c.exchanged() && c.step.May != 0 && c.h == r.group(0) {
			r.ifStays(name+" by", fmt.Sprint(by))
		}
	case c.inPlace && c.op.reduces() && errors.As(err, &lost) && !lost.Overwritten:
		want := slices.Clone(c.dst)
		c.input(r.me, want, want)
		if text := c.d.compare(c.dst, want); text != "" {
			r.find("wrong", "%s failed, not overwriting its input, and the input is lost: %s: %v", name, text, err)
		}
	}
	if text := c.changed(r.me); text != "" {
		r.find("wrong", "%s has changed its input on %s: %s (%v)", name, c.where(), text, err)
	}
	if r.job.Uniform && r.job.OnFailure != pg.Report && c.step.May != 0 && !c.opaque && c.step.May&^(Lost) == 0 &&
		c.h == r.group(0) {
		r.ifStays(name+" outcome", fmt.Sprint(err == nil))
	}
	if r.job.Uniform && c.step.May == Cancelled {
		value := fmt.Sprint(err == nil)
		// A rank that gives up while the result is confirmed, or its stream comes to the end,
		// fails, and others may not. The error of a call that is not a Work does not tell when.
		if err != nil && c.ends && (c.work == nil || local || c.device.has(c.dst) || c.device.has(c.src)) {
			value = anything
		}
		r.ifStays(fmt.Sprintf("%s outcome in %v", name, c.h.ranks), value)
	}
	r.giveBack(c)
}

func (c *call) where() string {
	var all []string
	for _, b := range c.bufs {
		all = append(all, b.p.name)
	}
	return strings.Join(all, " and ")
}

// unmap frees the rank's memory.
func (r *rank) unmap() error {
	for _, p := range append([]*pool{r.plain}, r.guards...) {
		giveMapped(p.mem)
	}
	return r.device.free()
}
