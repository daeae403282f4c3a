package queue

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"

	"tutti/rdma"
	"tutti/rdma/soft"
)

var (
	chaosSteps = flag.Int("chaos.steps", 0, "random steps; 0: a million, fewer with -short or the race detector")
	chaosSeed  = flag.Uint64("chaos.seed", 0, "seed of the first program")
)

// program is a random program on two ends, and its faults.
type program struct {
	r      *rand.Rand
	f      *soft.Fabric
	ends   [2]*end
	active []*work
	free   [2][]int // slots of each end, for the work that it begins
	before [2]map[int]*work
	byID   map[uint32]*work
	id     uint32
	epoch  int    // of connections
	left   [2]int // the latest one that each end has left behind: its notifications come no more
	faulty bool
	down   [2]bool
	gone   [2]bool
	counts map[string]int
	wrong  error
}

const (
	slots    = 6
	slotSize = 12 << 10
)

// work is a batch of one end, with a range of both ends' memory that nothing else uses.
type work struct {
	at        int // end
	slot      int
	x         *submission
	t         *Transfer
	submitted bool // x has ended
	err       error
	reads     bool
	id        uint32 // of the notification; 0: none
	epoch     int
	told      int
	want      []byte    // of the target
	left      [2][]byte // both ranges at the end
}

func (p *program) errorf(format string, args ...any) {
	if p.wrong == nil {
		p.wrong = fmt.Errorf(format, args...)
	}
}

// slotOf returns the range of a slot in an end's memory. Works of the ends use different ranges.
func (p *program) slotOf(e, at, slot int) []byte {
	return p.ends[e].b[(at*slots+slot)*slotSize:][:slotSize]
}

func newProgram(t testing.TB, seed uint64) *program {
	p := &program{r: rand.New(rand.NewPCG(seed, 7)), counts: map[string]int{}, byID: map[uint32]*work{},
		left: [2]int{-1, -1}}
	once := func(n int) bool { return p.faulty && p.r.IntN(n) == 0 }
	cfg := soft.Config{Seed: seed, Manual: true, Late: p.r.IntN(5), ReuseNumbers: p.r.IntN(2) == 0, Faults: soft.Faults{
		Post: func(string, uint32, int) syscall.Errno {
			if once(400) {
				p.counts["post fails"]++
				return syscall.ENOMEM
			}
			return 0
		},
		Request: func(string, uint32, *rdma.SendRequest) rdma.Status {
			if once(500) {
				p.counts["request fails"]++
				return []rdma.Status{rdma.RemoteAccess, rdma.RetryExceeded, rdma.RemoteOperation}[p.r.IntN(3)]
			}
			return rdma.Success
		},
		Call: func(_, call string) syscall.Errno {
			if (call[0] == 'f' || call[0] == 'r') && once(30) { // fail and reset
				p.counts["call fails"]++
				return syscall.EIO
			}
			return 0
		},
	}}
	cfg.Attributes.Quirks.NoReset = p.r.IntN(4) == 0
	p.f = soft.New(cfg)
	t.Cleanup(p.f.Close)
	queues, depth := 1+p.r.IntN(3), 1+p.r.IntN(12)
	c := Config{Chunk: 1 + p.r.IntN(6), Spread: 1 + p.r.Uint64N(3000), MaxBytes: 100 + p.r.Uint64N(5000), Drain: 1,
		Pending: 1000}
	a, b := newEnds(t, p.f, queues, depth, 2*slots*slotSize, c)
	p.ends = [2]*end{a, b}
	for e := range p.ends {
		p.before[e] = map[int]*work{}
		for slot := range slots {
			p.free[e] = append(p.free[e], slot)
		}
	}
	for e, x := range p.ends { // Notified knows the end, so the sets are made anew
		x.cfg.Notified = func(id uint32) { p.notified(e, id) }
		if err := x.s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := join(a, b); err != nil {
		t.Fatal(err)
	}
	return p
}

// notified is called when a notification has come to end e.
func (p *program) notified(e int, id uint32) {
	w := p.byID[id]
	switch {
	case w == nil || w.at == e:
		p.errorf("notification %d, which was not sent", id)
	case w.told > 0:
		p.errorf("notification %d twice", id)
	case w.epoch <= p.left[e]:
		p.errorf("notification %d of another connection", id)
	case !w.reads && w.left[0] == nil && !bytes.Equal(p.slotOf(e, w.at, w.slot), w.want):
		p.errorf("notification %d came before its data", id)
	default:
		w.told++
		p.counts["notifications"]++
	}
}

// begin begins a batch.
func (p *program) begin() {
	at := p.r.IntN(2)
	if len(p.free[at]) == 0 || p.ends[at].s.Err() != nil && p.r.IntN(8) > 0 {
		return
	}
	i := p.r.IntN(len(p.free[at]))
	w := &work{at: at, slot: p.free[at][i], reads: p.r.IntN(3) == 0, epoch: p.epoch}
	if p.ends[at].s.Err() != nil {
		w.epoch++ // it is refused, or posted after the reset
	}
	if old := p.before[at][w.slot]; old != nil { // nothing has touched the memory since
		for e := range p.ends {
			if !bytes.Equal(p.slotOf(e, at, w.slot), old.left[e]) {
				p.errorf("memory of end %d was changed after its transfer had ended with %v", e, old.t.Err())
			}
		}
	}
	e, o := p.ends[at], p.ends[1-at]
	local, remote := p.slotOf(at, at, w.slot), p.slotOf(1-at, at, w.slot)
	source, target := local, remote
	kind := rdma.Write
	if w.reads {
		source, target, kind = remote, local, rdma.Read
	}
	for k := range source {
		source[k] = byte(p.r.Uint32())
	}
	w.want = bytes.Clone(target)
	b := Batch{}
	base := uint64((at*slots + w.slot) * slotSize)
	for off := p.r.Uint64N(200); off < slotSize && len(b.Ops) < 1+p.r.IntN(40); {
		n := min(1+p.r.Uint64N(600), slotSize-off)
		if p.r.IntN(8) == 0 {
			n = slotSize - off
		}
		b.Ops = append(b.Ops, e.op(o, kind, base+off, base+off, n))
		copy(w.want[off:off+n], source[off:])
		if off += n; p.r.IntN(2) == 0 {
			off += p.r.Uint64N(100)
		}
	}
	p.r.Shuffle(len(b.Ops), func(i, j int) { b.Ops[i], b.Ops[j] = b.Ops[j], b.Ops[i] })
	if p.r.IntN(2) == 0 {
		p.id++
		w.id = p.id
		b.Notify, b.ID = true, p.id
		p.byID[p.id] = w
	}
	w.x = newSubmission(e.s)
	if err := w.x.plan(&b); err != nil {
		p.errorf("%v", err)
		return
	}
	w.t = w.x.t
	p.free[at] = append(p.free[at][:i], p.free[at][i+1:]...)
	p.active = append(p.active, w)
	p.counts["batches"]++
}

// step takes a step of a submission, or finds that the transfer has ended.
func (p *program) step() {
	if len(p.active) == 0 {
		return
	}
	i := p.r.IntN(len(p.active))
	w := p.active[i]
	if !w.submitted {
		_, _, err := w.x.step()
		if err == nil && p.faulty && p.r.IntN(3000) == 0 {
			err = errors.New("the user's time has ended")
			p.counts["gives up"]++
		}
		if err != nil {
			w.x.fail(err)
			if w.x.posted == 0 {
				w.err = err
			}
		}
		if w.submitted = err != nil || w.x.phase == done; w.submitted {
			w.t.drop(nil)
		}
	}
	if !w.submitted || !w.t.Ended() {
		return
	}
	w.left = [2][]byte{bytes.Clone(p.slotOf(0, w.at, w.slot)), bytes.Clone(p.slotOf(1, w.at, w.slot))}
	target := w.left[1-w.at]
	if w.reads {
		target = w.left[w.at]
	}
	switch {
	case w.t.Err() == nil && !bytes.Equal(target, w.want):
		p.errorf("a transfer has ended well, with wrong data")
	case w.t.Err() == nil:
		p.counts["ended well"]++
	case w.err != nil:
		p.counts["refused"]++
	default:
		p.counts["failed"]++
	}
	p.active = append(p.active[:i], p.active[i+1:]...)
	p.free[w.at] = append(p.free[w.at], w.slot)
	p.before[w.at][w.slot] = w
	w.x = nil
}

// fault does something bad.
func (p *program) fault() {
	e := p.r.IntN(2)
	x := p.ends[e]
	switch p.r.IntN(12) {
	case 0, 1, 2:
		p.down[e] = !p.down[e]
		p.f.SetPort(x.name, 1, !p.down[e])
		p.counts["ports"]++
	case 3:
		p.f.Break(x.name, x.qps[p.r.IntN(len(x.qps))].Number())
		p.counts["breaks"]++
	case 4:
		x.s.Fail(errors.New("cancelled"))
		p.counts["cancels"]++
	case 5:
		if p.r.IntN(4) == 0 && !p.gone[e] {
			p.f.Remove(x.name)
			p.gone[e] = true
			p.counts["removals"]++
		}
	default: // lost completions cannot be told from a device that is slow
		if x.s.Err() != nil {
			for _, q := range x.s.queues {
				_ = q.purge()
			}
			p.counts["forced"]++
		}
	}
}

// repair brings the connection back if it has failed.
func (p *program) repair(t testing.TB) {
	if p.ends[0].s.Err() == nil && p.ends[1].s.Err() == nil && !p.gone[0] && !p.gone[1] {
		return
	}
	for _, x := range p.ends {
		x.s.Fail(errors.New("the peer has failed"))
		for _, q := range x.s.queues {
			if !q.drained() && p.r.IntN(2000) > 0 {
				return
			}
		}
	}
	wasFaulty := p.faulty
	p.epoch++
	if p.r.IntN(3) > 0 && !p.gone[0] && !p.gone[1] {
		worked := true
		for i, x := range p.ends {
			o := p.ends[1-i]
			err := x.s.Reset(t.Context(), func(i int, q rdma.QP) error { return x.connect(o, i, q) })
			p.left[i] = p.epoch - 1
			worked = worked && err == nil
		}
		if worked {
			p.counts["resets"]++
			return
		}
	}
	p.faulty = false
	for e, x := range p.ends {
		if err := x.s.Close(); err != nil {
			p.errorf("%v", err)
		}
		p.left[e] = p.epoch - 1
	}
	for e, x := range p.ends {
		if p.gone[e] {
			p.f.Restore(x.name)
			x.close()
			x.open()
			p.gone[e] = false
		}
	}
	if err := join(p.ends[0], p.ends[1]); err != nil {
		p.errorf("%v", err)
	}
	p.faulty = wasFaulty
	p.counts["new connections"]++
}

// verify checks the accounts.
func (p *program) verify() {
	for _, x := range p.ends {
		if err := x.s.verify(); err != nil {
			p.errorf("%v", err)
		}
	}
}

// rest ends the program without further faults.
func (p *program) rest(t testing.TB) {
	p.faulty = false
	for e, x := range p.ends {
		if p.down[e] {
			p.f.SetPort(x.name, 1, true)
		}
	}
	for range 1_000_000 {
		moved := p.f.Step()
		for _, x := range p.ends {
			n, _ := x.p.Poll()
			moved = moved || n > 0
		}
		p.step()
		p.repair(t)
		if !moved && len(p.active) == 0 {
			break
		}
	}
	for i, x := range p.ends {
		for _, u := range x.s.Usage() {
			if u.InUse != 0 || u.Recorded != 0 || u.Reserved != 0 || u.Degraded || u.Failed {
				p.errorf("at rest end %d has %+v", i, u)
			}
		}
	}
	if len(p.active) > 0 {
		p.errorf("%d transfers never ended", len(p.active))
	}
	for id, w := range p.byID {
		if w.epoch == p.epoch && w.told == 0 && w.t.Err() == nil && w.err == nil {
			p.errorf("notification %d was lost", id)
		}
	}
}

// run takes n random steps.
func (p *program) run(t testing.TB, n int) {
	for i := 0; i < n && p.wrong == nil; i++ {
		switch k := p.r.IntN(1000); {
		case k < 450:
			p.f.Step()
		case k < 650:
			_, _ = p.ends[p.r.IntN(2)].p.Poll()
		case k < 900:
			p.step()
		case k < 960:
			p.begin()
		case k < 996:
			p.repair(t)
		case p.faulty && k == 999:
			p.fault()
		}
		p.verify()
	}
	if p.wrong == nil {
		p.rest(t)
	}
}

// Random programs over rdma/soft, most of them with all its faults: the accounts are right after
// every step, transfers that end well have moved their bytes, nothing touches the memory of one
// that has ended, notifications come once and after their data, and in the end all credits are
// free.
func TestRandomPrograms(t *testing.T) {
	steps := *chaosSteps
	if steps == 0 {
		if steps = 1_000_000; raceEnabled || testing.Short() {
			steps = 60_000
		}
	}
	const each = 10_000
	counts := map[string]int{}
	for seed := *chaosSeed; steps > 0; seed++ {
		p := newProgram(t, seed)
		p.faulty = seed%5 > 0
		p.run(t, min(steps, each))
		if p.wrong != nil {
			t.Fatalf("seed %d: %v", seed, p.wrong)
		}
		if n := p.counts["failed"] + p.counts["refused"]; seed%5 == 0 && n > 0 {
			t.Fatalf("seed %d: %d transfers failed without a fault", seed, n)
		}
		steps -= each
		for what, n := range p.counts {
			counts[what] += n
		}
		for _, x := range p.ends {
			x.close()
		}
		if q, c, m := p.f.Objects(); q+c+m > 0 {
			t.Fatalf("seed %d: %d queue pairs, %d completion queues and %d regions are left", seed, q, c, m)
		}
	}
	t.Log(counts)
	for _, what := range []string{"ended well", "failed", "refused", "notifications", "resets", "new connections",
		"removals", "post fails", "request fails", "call fails", "ports", "breaks", "cancels", "forced", "gives up"} {
		if counts[what] == 0 && *chaosSteps == 0 && !raceEnabled && !testing.Short() {
			t.Errorf("no program had %s", what)
		}
	}
}
