package torture

import (
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"tutti/device"
	"tutti/kernels"
	"tutti/pg"
)

// maxRanks bounds the ranks of a job: for these numbers averages of integers are integers (see
// newDatum).
const maxRanks = 5

// generator makes a job and its programs from a seed and the job's number. They depend on no other
// job, which may end early: what a run does next must not depend on that.
type generator struct {
	rnd       *rand.Rand
	transport string
	faults    float64 // share of programs with faults from outside
	cov       *cover
	avoid     string
}

// avoids reports whether programs must not have the named feature, because its findings are known.
func (g *generator) avoids(what string) bool {
	return slices.Contains(strings.Split(g.avoid, ","), what)
}

// newGenerator returns a generator. The transport is a part of the seed, so that transports have
// different jobs.
func newGenerator(seed uint64, job int, transport string, faults float64) *generator {
	h := fnv.New64a()
	io.WriteString(h, transport)
	return &generator{rnd: rand.New(rand.NewPCG(seed^h.Sum64(), uint64(job))), transport: transport, faults: faults,
		cov: newCover()}
}

// chance returns true with probability p.
func (g *generator) chance(p float64) bool { return g.rnd.Float64() < p }

func pick[T any](g *generator, of ...T) T { return of[g.rnd.IntN(len(of))] }

// job makes a job.
func (g *generator) job() Job {
	j := Job{Transport: g.transport, Ranks: pick(g, 2, 2, 3, 3, 3, 4, 4, maxRanks),
		OnFailure: pick(g, pg.Report, pg.Shrink, pg.Retry), Timeout: 10 * time.Second, Pool: pick(g, 1<<20, 2<<20,
			2<<20, 8<<20)}
	if g.transport == "hosts" {
		j.Ranks = pick(g, 3, 4)
	}
	j.Uniform, j.AutoAdmit = g.chance(0.2) && !g.avoids("uniform"), g.chance(0.2)
	if g.chance(0.5) {
		j.Algorithm = pick(g, "loadstore", "loadstore", "oneshot", "twoshot", "pairwise", "doubling", "halving", "ring",
			"tree", "chain", "bruck", "dissemination", "hierarchical", "star", "stars")
	}
	if g.chance(0.05) {
		j.Pool = 40 << 20
	}
	if g.chance(0.6) && !g.avoids("grain") {
		j.Block, j.Piece = pick(g, 8<<10, 40<<10, 256<<10), pick(g, 4<<10, 20<<10, 128<<10)
	}
	if g.chance(6./7) && !g.avoids("gpus") {
		j.GPUs, j.Kernels = pick(g, GPUsEach, GPUsEach, GPUsPairs, GPUsOne, GPUsSome, GPUsApart), g.chance(0.2)
		j.IPC = g.chance(0.3)
		if j.GPUs == GPUsSome && g.transport == "inproc" { // such ranks have one pg.Config
			j.GPUs = GPUsEach
		}
	}
	if g.chance(0.3) && !g.avoids("progress") {
		j.Progress = true
	}
	if g.chance(0.5) && !g.avoids("copy") {
		j.Copy = pick(g, "on", "off")
	}
	if g.chance(0.3) && !g.avoids("staging") {
		j.Staging = pick(g, 32<<10, 256<<10, 2<<20)
	}
	if g.transport == "inproc" || g.faults == 0 {
		return j
	}
	switch n := g.rnd.IntN(100); { // features that only some kinds of faults allow
	case n < 12 && !g.avoids("evicts"):
		j.OnTimeout = pick(g, pg.TimeoutEvicts, pg.TimeoutEvictsAlone)
	case n < 24 && j.Ranks > 2 && !g.avoids("grow"):
		j.Later = 1 + g.rnd.IntN(j.Ranks-2)
	case n < 36 && g.transport != "soft" && !g.avoids("standby"):
		j.Standby, j.AutoAdmit = 2, false
	}
	return j
}

// making is a program under construction.
type making struct {
	*generator
	job   Job
	p     *Program
	order []int // numbers of the existing subgroups
	next  int
	lives []Step // WindowMake of the existing windows
	wins  int
	heavy bool   // they are long, on registered memory
	cause Causes // disturbances that new steps may feel
}

// program makes a program of at least 30 operations.
func (g *generator) program(job Job) *Program {
	m := &making{generator: g, job: job, p: &Program{Seed: g.rnd.Uint64() >> 8, Touch: -1}, next: 1}
	if g.chance(0.3) && !g.avoids("touch") {
		m.p.Touch = g.rnd.IntN(job.Ranks)
	}
	size := 34 + g.rnd.IntN(40)
	outside := g.transport != "inproc" && g.chance(g.faults)
	at := g.rnd.IntN(size)
	if g.slows() && !outside && g.chance(g.faults) {
		m.p.Faults = append(m.p.Faults, m.slow(at))
	}
	if g.transport == "soft" && !g.avoids("devices") {
		for range g.rnd.IntN(6) {
			m.p.Faults = append(m.p.Faults, m.device(g.rnd.IntN(size)))
		}
	}
	for len(m.p.Steps) < size {
		for range 3 + g.rnd.IntN(14) {
			m.clean()
		}
		switch {
		case outside && len(m.p.Steps) >= at:
			m.outside()
			outside = false
		case g.transport == "inproc" && len(m.p.Steps) < size, g.avoids("windows"):
		default:
			m.window()
		}
	}
	m.p.normalize(job)
	g.cov.add(m.p)
	return m.p
}

func (m *making) add(s Step) { m.p.Steps = append(m.p.Steps, s) }

// group returns a random group: most often that of all ranks.
func (m *making) group() int {
	if len(m.order) == 0 || m.chance(0.6) {
		return 0
	}
	return pick(m.generator, m.order...)
}

// parts makes the parts of all ranks different.
func (m *making) parts(s *Step, started bool) {
	mems := mems
	if m.avoids("alloc") {
		mems = mems[2:]
	}
	mem := pick(m.generator, append([]Mem{""}, mems...)...) // "": each its own
	if m.job.GPUs != NoGPUs && m.chance(0.4) {
		mem = MemDevice
	}
	for range m.job.Ranks {
		p := Part{How: Blocking, Dst: pick(m.generator, mems...), Src: pick(m.generator, mems...),
			InPlace: m.chance(0.5)}
		if mem != "" && m.chance(0.9) {
			p.Dst, p.Src = mem, mem
		}
		if started && m.chance(0.5) {
			p.How = pick(m.generator, AtOnce, Started, Started)
		}
		if (p.Dst == MemDevice || p.Src == MemDevice) && m.chance(0.2) {
			p.Hold = m.moment()
		}
		p.Other = (p.Dst == MemDevice || p.Src == MemDevice) && m.chance(0.3)
		s.Ranks = append(s.Ranks, p)
	}
}

var dtypes = kernels.DTypes()

var reductions = []pg.Reduction{pg.Sum, pg.Sum, pg.Product, pg.Min, pg.Max, pg.Avg, pg.BitAnd, pg.BitOr, pg.BitXor}

// count returns a number of elements of a type; for n ranks they fit into the memory.
func (m *making) count(dt pg.DType, parts int) int {
	size := dt.Size()
	most := m.job.Pool / 4 / size / parts
	n := 0
	switch m.rnd.IntN(16) {
	case 0:
		return 0
	case 1, 2, 3:
		n = 1 + m.rnd.IntN(16)
	case 4, 5, 6:
		n = 1 + m.rnd.IntN(1000)
	case 7, 8: // often of the same shape, and as large as for mapped memory, or just less
		n = (128<<10)/size/parts - m.rnd.IntN(2)
	case 9, 10:
		n = (64<<10)/size/parts + m.rnd.IntN(65) - 32
	case 11, 12:
		n = ((16 << 10) + m.rnd.IntN(64<<10)) / size / parts
	case 13, 14:
		n = ((64 << 10) + m.rnd.IntN(256<<10)) / size / parts
	default:
		n = m.rnd.IntN(max(most, 1))
		if n*size > 128<<10 && m.chance(0.8) {
			n = (128 << 10) / size
		}
	}
	return min(max(n, 0), most)
}

// collective makes a collective: of a few candidates the least tried one.
func (m *making) collective(group int, started, together bool) Step {
	var best Step
	low := -1
	for range 3 {
		s := Step{Op: pick(m.generator, collectiveOps...), Group: group, DType: pick(m.generator, dtypes...),
			Root: m.rnd.IntN(8)}
		if m.chance(0.2) {
			s.Op = AllReduce
		}
		if s.Op.reduces() {
			for s.Red = pick(m.generator, reductions...); !supported(s.Red, s.DType); s.Red = pick(m.generator,
				reductions...) {
				s.DType = pick(m.generator, dtypes...)
			}
		} else {
			s.Red = pg.Sum
		}
		parts := 1
		switch s.Op {
		case ReduceScatter, AllGather, AllGatherV, AllToAll, AllToAllV, Gather, Scatter:
			parts = m.job.Ranks
		case Barrier:
			s.DType = pg.Uint8
		}
		if s.Op != Barrier {
			s.Count = m.count(s.DType, parts)
		}
		m.parts(&s, started)
		if m.heavy && s.Op != Barrier {
			s.Count = min((64<<10+m.rnd.IntN(448<<10))/s.DType.Size(), m.job.Pool/8/s.DType.Size()) / parts
			for i := range s.Ranks {
				if !m.avoids("alloc") && (m.job.GPUs == NoGPUs || s.Ranks[i].Dst != MemDevice) {
					s.Ranks[i].Dst, s.Ranks[i].Src = MemAlloc, MemAlloc
				}
			}
		}
		s.May = m.cause
		if n := m.cov.score(&s, together); low < 0 || n < low {
			best, low = s, n
		}
	}
	best.May = 0
	return best
}

// again repeats the latest collective once or twice, like loops in programs, possibly with one
// difference: state that was kept of the first must not be used for a similar one.
func (m *making) again() {
	for range 1 + m.rnd.IntN(2) {
		i := len(m.p.Steps) - 1
		for i >= 0 && !m.p.Steps[i].Op.collective() {
			i--
		}
		if i < 0 || m.p.Steps[i].Alt != nil || !m.has(m.p.Steps[i].Group) {
			return
		}
		s := m.p.Steps[i]
		s.Ranks = nil
		switch m.rnd.IntN(6) {
		case 0, 1:
			s.Root = m.rnd.IntN(8)
		case 2:
			if dt := pick(m.generator, dtypes...); dt.Size() <= s.DType.Size() && supported(s.Red, dt) {
				s.DType = dt
			}
		case 3:
			if red := pick(m.generator, reductions...); s.Op.reduces() && supported(red, s.DType) {
				s.Red = red
			}
		case 4:
			s.Count = m.rnd.IntN(s.Count + 1)
		}
		if m.parts(&s, true); m.chance(0.5) {
			for r := range s.Ranks {
				s.Ranks[r].How = Blocking
			}
		}
		m.add(s)
	}
}

// flood adds a long collective three times, to which some ranks come late. Their links are full, so
// that a rank with a short wait is interrupted within a message.
func (m *making) flood() {
	s := Step{Op: pick(m.generator, AllToAll, AllToAll, AllToAll, AllGather, Broadcast, AllReduce), Group: m.group(),
		DType: pick(m.generator, pg.Uint8, pg.Int32, pg.Float32), Red: pg.Sum, Root: m.rnd.IntN(8)}
	parts := 1
	if s.Op == AllGather || s.Op == AllToAll {
		parts = m.job.Ranks
	}
	s.Count = m.job.Pool / 4 / s.DType.Size() / parts
	for range 3 {
		s.Ranks = nil
		m.parts(&s, false)
		for r := range s.Ranks {
			if p := &s.Ranks[r]; m.chance(0.6) {
				p.How = AtOnce
			} else {
				p.Late = time.Duration(2+m.rnd.IntN(4)) * time.Millisecond
			}
		}
		m.add(s)
	}
}

// burst adds short allreduces of a group's ranks on GPUs, which are under way together on two
// streams of each: these come to them late, and not in the order of the calls.
func (m *making) burst() {
	group := m.group()
	for range 4 + m.rnd.IntN(4) {
		s := Step{Op: AllReduce, Group: group, DType: pick(m.generator, pg.Int32, pg.Float32, pg.BFloat16), Red: pg.Sum}
		most := []int{16 << 10, device.ShortVector}[m.rnd.IntN(2)]
		s.Count = 2 * (1 + m.rnd.IntN(most/2/s.DType.Size()))
		for range m.job.Ranks {
			p := Part{How: Started, Dst: MemDevice, Src: MemDevice, Other: m.chance(0.5)}
			if m.chance(0.4) {
				p.Hold = m.moment()
			}
			s.Ranks = append(s.Ranks, p)
		}
		m.add(s)
	}
}

// graph makes a graph of a few short collectives, or of one that takes several rounds: kernels of
// the fake driver are slow.
func (m *making) graph(group int) Step {
	s := Step{Op: Graph, Group: group, Count: 1 + m.rnd.IntN(3)}
	calls, most := 1+m.rnd.IntN(3), pick(m.generator, 256, 1<<10, 1<<10, 8<<10)
	if m.chance(0.05) {
		s.Count, calls, most = 1, 1, 2*device.ShortVector+1000
	}
	for len(s.Par) < calls {
		c := m.collective(group, false, false)
		if c.Op == Barrier || c.Count == 0 { // which a stream does not record
			continue
		}
		c.Count = min(c.Count, most/c.DType.Size()/m.job.Ranks)
		for i, p := range c.Ranks {
			c.Ranks[i] = Part{InPlace: p.InPlace}
		}
		s.Par = append(s.Par, c)
	}
	for range m.job.Ranks {
		p := Part{}
		if m.chance(0.3) {
			p.Late = m.moment()
		}
		s.Ranks = append(s.Ranks, p)
	}
	return s
}

// chain makes started operations of which each reads what another has written.
func (m *making) chain(group int) Step {
	s := Step{Op: Chain, Group: group, DType: pick(m.generator, chainTypes...)}
	bytes := pick(m.generator, 2<<10, 64<<10, 256<<10)
	bytes = min(bytes+(m.rnd.IntN(3)-1)*64*m.job.Ranks, m.job.Pool/4)
	if m.job.GPUs != NoGPUs { // whose kernels are slow
		bytes = min(bytes, 64<<10)
	}
	s.Count = max(bytes/s.DType.Size()/m.job.Ranks, 1)
	for range 2 + m.rnd.IntN(5) {
		o := Step{Op: pick(m.generator, chainOps...), Root: m.rnd.IntN(8), New: m.rnd.IntN(2)}
		if o.Op.reduces() {
			o.Red = pick(m.generator, chainReductions...)
		}
		s.Par = append(s.Par, o)
	}
	m.parts(&s, false)
	return s
}

// has reports whether a group exists.
func (m *making) has(group int) bool { return group == 0 || slices.Contains(m.order, group) }

// split makes a Split of a group. It is recorded unless it is disturbed.
func (m *making) split(of int) Step {
	s := Step{Op: Split, Group: of, New: m.next}
	m.next++
	alike := m.chance(0.4)
	for range m.job.Ranks {
		p := Part{Color: m.rnd.IntN(2), Key: m.rnd.IntN(4)}
		if alike {
			p.Color = 0
		} else if m.chance(0.1) {
			p.Color = -1
		}
		s.Ranks = append(s.Ranks, p)
	}
	return s
}

func (m *making) note(s *Step) { m.order = append(m.order, s.New) }

func (m *making) forget(group int) {
	for i, id := range m.order {
		if id == group {
			m.order = append(m.order[:i:i], m.order[i+1:]...)
		}
	}
	m.lives = slices.DeleteFunc(m.lives, func(s Step) bool { return s.Group == group })
}

func (m *making) forgetAll() {
	m.order = nil
	m.lives = slices.DeleteFunc(m.lives, func(s Step) bool { return s.Group != 0 })
}

// onWindow makes a step on a window, nil if there is none.
func (m *making) onWindow(op Op) *Step {
	if len(m.lives) == 0 {
		return nil
	}
	made := pick(m.generator, m.lives...)
	s := Step{Op: op, Group: made.Group, Win: made.Win, Count: made.Count, Root: m.rnd.IntN(m.job.Ranks)}
	m.parts(&s, false)
	return &s
}

// windows adds steps on a window, which it may make before.
func (m *making) windows() {
	if m.avoids("windowops") {
		return
	}
	if n := len(m.lives); n == 0 || n < 3 && m.chance(0.2) {
		m.wins++
		s := Step{Op: WindowMake, Group: m.group(), Win: m.wins, Count: 2 + m.count(pg.Uint8, m.job.Ranks)&^1,
			Ranks: make([]Part, m.job.Ranks)}
		if m.cause != 0 { // it ends with the disturbance
			m.add(s)
			return
		}
		m.add(s)
		m.lives = append(m.lives, s)
	}
	ops := pick(m.generator, []Op{WindowPut, WindowSignal, WindowWait, WindowGet}, []Op{WindowSignal, WindowWait},
		[]Op{WindowSignal, WindowWait}, []Op{WindowPut, WindowGet}, []Op{WindowSignal, WindowSignal, WindowWait},
		[]Op{WindowRefresh}, []Op{WindowClose})
	if ops[0] == WindowClose && m.cause != 0 {
		ops = []Op{WindowSignal}
	}
	first := m.onWindow(ops[0])
	for _, op := range ops {
		s := m.onWindow(op)
		if s.Win, s.Group, s.Count = first.Win, first.Group, first.Count; m.chance(0.9) {
			s.Root = first.Root
		}
		if op == WindowClose {
			no := m.chance(0.5)
			for r := range s.Ranks {
				s.Ranks[r] = Part{No: no}
			}
			m.lives = slices.DeleteFunc(m.lives, func(l Step) bool { return l.Win == s.Win })
		}
		m.add(*s)
	}
}

// refresh adds a Refresh of each window, after a disturbance.
func (m *making) refresh() {
	for _, l := range m.lives {
		l.Op, l.Ranks = WindowRefresh, nil
		m.add(l)
	}
}

// clean adds an undisturbed step.
func (m *making) clean() {
	switch n := m.rnd.IntN(100); {
	case n < 3 && m.job.GPUs != NoGPUs && !m.avoids("graphs"):
		m.add(m.graph(m.group()))
	case n < 50:
		m.add(m.collective(m.group(), true, false))
	case n < 52:
		if !m.avoids("chains") {
			m.add(m.chain(m.group()))
		}
	case n < 55:
		switch {
		case m.avoids("started"):
		case m.job.GPUs != NoGPUs && m.chance(0.5):
			m.burst()
		default:
			m.flood()
		}
	case n < 60:
		m.again()
	case n < 64:
		m.add(m.message(m.group(), 64<<10))
	case n < 65:
		m.add(m.message(m.group(), 1<<20).with(Window))
	case n < 70:
		m.windows()
	case n < 74:
		m.add(Step{Op: Wait, Ranks: m.lasts()})
	case n < 79 && len(m.order) < 4:
		s := m.split(m.group())
		m.note(&s)
		m.add(s)
	case n < 81 && len(m.order) > 0:
		s := Step{Op: Close, Group: pick(m.generator, m.order...)}
		m.forget(s.Group)
		m.add(s)
	case n < 83:
		if m.avoids("started") {
			m.add(Step{Op: Wait})
		}
		s := Step{Op: Agree, Group: m.group()}
		for range m.job.Ranks {
			s.Ranks = append(s.Ranks, Part{No: m.chance(0.2)})
		}
		m.add(s)
	case n < 84:
		if m.avoids("started") {
			m.add(Step{Op: Wait})
		}
		m.add(Step{Op: Admit})
	case n < 88:
		if !m.avoids("free") {
			m.add(Step{Op: pick(m.generator, Alloc, Alloc, Free, Renew), Root: m.rnd.IntN(3)})
		}
	case n < 92:
		if n := m.rnd.IntN(13); !m.avoids(fmt.Sprintf("argument=%d", n)) {
			m.add(Step{Op: Argument, Root: n})
		}
	default:
		m.add(m.together())
	}
}

func (m *making) lasts() (parts []Part) {
	for range m.job.Ranks {
		parts = append(parts, Part{Last: m.chance(0.5)})
	}
	return parts
}

// together makes a step of several groups at the same time. If it is undisturbed, a Split may
// precede it.
func (m *making) together() Step {
	if len(m.order) == 0 && m.cause == 0 {
		s := m.split(0)
		m.note(&s)
		m.add(s)
	}
	splits := m.chance(0.2) && len(m.order) < 3
	t := Step{Op: Together}
	var made []Step
	for _, g := range append([]int{0}, m.order...) {
		switch {
		case (splits || m.chance(0.1)) && len(m.order)+len(made) < 6 && m.cause == 0:
			s := m.split(g)
			if made = append(made, s); len(made) > 1 && m.avoids("splits") {
				made = made[:1]
				continue
			}
			t.Par = append(t.Par, s)
		case m.chance(0.8):
			t.Par = append(t.Par, m.collective(g, false, true))
		}
	}
	for i := range made {
		m.note(&made[i])
	}
	if s := m.onWindow(pick(m.generator, WindowPut, WindowSignal, WindowSignal, WindowWait, WindowGet)); s != nil &&
		m.chance(0.4) {
		for i := range s.Ranks { // a collective beside it may hold the stream
			s.Ranks[i].Hold = 0
		}
		t.Par = append(t.Par, *s)
	}
	return t
}

func (m *making) message(group, most int) Step {
	s := Step{Op: Message, Group: group, DType: pick(m.generator, dtypes...), Root: m.rnd.IntN(8)}
	s.Count = min(m.count(s.DType, 1), most/s.DType.Size())
	m.parts(&s, true)
	for i := range s.Ranks {
		s.Ranks[i].Any = m.chance(0.2)
	}
	return s
}

// eager returns a message whose sends wait for no receiver.
func (m *making) eager(group int) Step {
	s := m.message(group, 8<<10)
	for i := range s.Ranks {
		if s.Ranks[i].Src == MemDevice { // it may wait
			s.Ranks[i].Src = MemPlain
		}
	}
	return s
}

// with returns the step with another operation.
func (s Step) with(op Op) Step {
	s.Op = op
	return s
}

// moment returns a short time, usually about that of a collective.
func (m *making) moment() time.Duration {
	return time.Duration(m.rnd.IntN(pick(m.generator, 20, 100, 500, 3000)))*time.Microsecond + 1
}

// window adds steps that are disturbed from inside, and their end.
func (m *making) window() {
	switch n := m.rnd.IntN(100); {
	case n < 12 && !m.avoids("differ"), m.avoids("cancel"):
		m.differ()
	case n < 19 && len(m.order) > 0:
		m.end(pick(m.generator, m.order...))
	default:
		m.cancel()
	}
	m.add(Step{Op: Heal})
	if m.transport != "inproc" { // whose groups do not recover
		m.refresh()
	}
}

// end adds the end of a subgroup by Abort or Close, some of whose operations may be under way.
func (m *making) end(group int) {
	m.add(Step{Op: Brace})
	s := Step{Op: pick(m.generator, Abort, Close), Group: group, Root: m.rnd.IntN(8)}
	busy := s.Op == Close || m.chance(0.5)
	if busy && !m.avoids("busy") {
		m.cause = Aborted
		calls := 1 + m.rnd.IntN(3)
		if s.Op == Close && m.job.OnFailure != pg.Report { // each call on it waits for Config.Window
			calls = 1
		}
		for range calls {
			c := m.collective(group, true, false)
			for r := range c.Ranks {
				c.Ranks[r].How = Started
			}
			m.add(c)
		}
		m.cause = 0
		for range m.job.Ranks {
			s.Ranks = append(s.Ranks, Part{No: m.chance(0.6), Late: pick(m.generator, 0, 0, m.moment())})
		}
	}
	m.forget(group)
	m.add(s)
}

// cancel adds steps whose contexts end.
func (m *making) cancel() {
	m.add(Step{Op: Brace})
	begin := len(m.p.Steps)
	if m.avoids("queued") {
		defer func() {
			for i := range m.p.Steps[begin:] {
				for r := range m.p.Steps[begin+i].Ranks {
					if p := &m.p.Steps[begin+i].Ranks[r]; p.How == Started {
						p.How = Blocking
					}
				}
			}
		}()
	}
	for range m.rnd.IntN(4) {
		m.add(m.collective(m.group(), true, false))
	}
	m.cause, m.heavy = Cancelled, m.chance(0.2)
	defer func() { m.cause, m.heavy = 0, false }()
	if m.job.OnTimeout != pg.TimeoutReports { // ranks may be lost
		if m.avoids("groups") {
			m.forgetAll()
		}
		defer m.forgetAll()
	}
	for i := range 1 + m.rnd.IntN(3) {
		var s Step
		switch m.rnd.IntN(12) {
		case 0:
			s = m.split(m.group())
		case 1:
			if m.avoids("agree") {
				continue
			}
			s = Step{Op: Agree, Group: m.group(), Ranks: make([]Part, m.job.Ranks)}
			if m.avoids("started") {
				m.add(Step{Op: Wait})
			}
		case 2:
			s = m.eager(m.group())
		case 3, 4:
			from := len(m.p.Steps)
			m.windows()
			for j := range m.p.Steps[from:] {
				m.spoil(&m.p.Steps[from+j], i+j == 0)
			}
			continue
		default:
			s = m.collective(m.group(), true, false)
		}
		if m.chance(0.15) {
			s = m.together()
			for j := range s.Par {
				m.spoil(&s.Par[j], i+j == 0)
			}
		}
		m.spoil(&s, i == 0)
		m.add(s)
	}
	for range m.rnd.IntN(4) {
		m.add(m.collective(m.group(), true, false))
	}
}

// spoil makes contexts of a step end, at least one if one is set.
func (m *making) spoil(s *Step, one bool) {
	victim := m.rnd.IntN(m.job.Ranks)
	deadline := m.chance(0.4)
	for r := range s.Ranks {
		p := &s.Ranks[r]
		if r == victim && one || m.chance(0.15) {
			if p.How == Started && m.chance(0.7) {
				p.How = Blocking
			}
			switch {
			case deadline:
				p.Limit = m.moment()
			case m.chance(0.1):
				p.Cancel = -1
			default:
				p.Cancel = m.moment()
			}
		} else if m.chance(0.25) {
			p.Late = m.moment()
		}
	}
}

// differ adds a step that one rank calls differently, and one after which all know that.
func (m *making) differ() {
	m.cause = Differing
	defer func() { m.cause = 0 }()
	s := m.collective(0, true, false)
	for s.Op == Barrier {
		s = m.collective(0, true, false)
	}
	what := []string{"count", "zero", "dtype", "kind"}
	if s.Op.reduces() {
		what = append(what, "reduction")
	}
	if s.Op.rooted() {
		what = append(what, "root")
	}
	s.Count = max(s.Count, 1)
	s.Alt = &Alt{Rank: m.rnd.IntN(m.job.Ranks), What: pick(m.generator, what...)}
	switch {
	case s.Op == AllGatherV || s.Op == AllToAllV:
		s.Alt.What = "kind"
		if s.Op == AllToAllV && m.chance(0.7) {
			s.Alt.What = "received"
		}
	case s.Alt.What == "count":
		s.Alt.Count = s.Count + 1
	case s.Alt.What == "kind":
		s.Alt.Count = s.Count
	}
	if (s.Alt.What == "reduction" || s.Alt.What == "dtype") && !s.altSupported() {
		s.Alt.What, s.Alt.Count = "count", s.Count+1
	}
	if m.avoids("differ=" + s.Alt.What) {
		s.Alt.What, s.Alt.Count = "kind", s.Count
	}
	m.add(Step{Op: Brace})
	m.add(s)
	for range m.rnd.IntN(3) {
		m.add(m.collective(m.group(), true, false))
	}
}

// altSupported reports whether the call of the rank that differs exists.
func (s *Step) altSupported() bool {
	if !s.Op.reduces() {
		return s.Alt.What == "dtype"
	}
	dt, red := s.DType, s.Red
	if s.Alt.What == "dtype" {
		if dt = pg.Int32; s.DType == pg.Int32 {
			dt = pg.Float64
		}
	} else if red = pg.Max; s.Red == pg.Max {
		red = pg.Sum
	}
	return supported(red, dt)
}

// outside adds steps during which faults come from outside, and their end.
func (m *making) outside() {
	m.add(Step{Op: Brace})
	m.cause, m.heavy = Lost, m.chance(0.5)
	if m.chance(0.5) {
		m.cause |= Unheard
	}
	defer func() { m.cause, m.heavy = 0, false }()
	from := len(m.p.Steps)
	if m.avoids("groups") {
		m.forgetAll()
	}
	if m.chance(0.3) && !m.avoids("free") { // memory that is not mapped yet
		m.add(Step{Op: pick(m.generator, Alloc, Alloc, Renew), Root: 1})
	}
	for range 3 + m.rnd.IntN(6) {
		if m.chance(0.1) && !m.avoids("agree") {
			if m.avoids("started") {
				m.add(Step{Op: Wait})
			}
			m.add(Step{Op: Agree, Ranks: make([]Part, m.job.Ranks)})
		} else if m.chance(0.2) {
			m.add(m.message(m.group(), 1<<20).with(Window))
		} else if m.chance(0.15) {
			m.windows()
		} else if m.chance(0.1) && !m.avoids("chains") {
			m.add(m.chain(m.group()))
		} else if m.chance(0.2) && !m.avoids("messages") {
			s := m.eager(m.group())
			if m.chance(0.6) {
				s = m.message(m.group(), pick(m.generator, 64<<10, 1<<20))
				for i := range s.Ranks { // a receive from any rank gives up sooner than such a send
					s.Ranks[i].Any = false
				}
			}
			m.add(s)
		} else if m.chance(0.3) && m.job.GPUs != NoGPUs && !m.avoids("graphs") {
			m.add(m.graph(m.group()))
		} else if m.chance(0.2) {
			m.add(m.together())
		} else {
			m.add(m.collective(m.group(), true, false))
		}
	}
	kinds := []string{"kill", "kill", "kill", "stop", "stop", "evict", "leave", "store"}
	switch m.transport {
	case "shm":
	case "soft": // its ranks have no process of their own
		kinds = []string{"evict", "evict", "leave", "store", "part", "part", "part"}
	default:
		kinds = append(kinds, "part", "part", "deafen")
	}
	if m.job.Standby > 0 { // any other lost rank would come back and take its place
		kinds = []string{"kill"}
	}
	net := false
	for range 1 + m.rnd.IntN(2) {
		f := Fault{Step: from + m.rnd.IntN(len(m.p.Steps)-from), At: m.rnd.IntN(m.job.Ranks), After: m.moment(),
			Kind: pick(m.generator, kinds...), Victim: m.rnd.IntN(m.job.Ranks)}
		f.For = time.Duration(1+m.rnd.IntN(60)) * time.Millisecond
		if m.chance(0.1) {
			f.For += time.Duration(m.rnd.IntN(3500)) * time.Millisecond
		}
		if m.avoids(f.Kind) {
			continue
		}
		switch f.Kind {
		case "leave":
			f.At = f.Victim
		case "evict":
			f.At = (f.Victim + 1 + m.rnd.IntN(m.job.Ranks-1)) % m.job.Ranks
		case "part", "deafen", "store":
			if net {
				continue
			}
			net = true
			f.Other = (f.Victim + 1 + m.rnd.IntN(m.job.Ranks-1)) % m.job.Ranks
		}
		if f.Kind == "stop" && m.chance(0.05) { // longer than deadlines and their slack
			f.For = 7 * time.Second
			for i := range m.p.Steps[from:] {
				for r := range m.p.Steps[from+i].Ranks {
					m.p.Steps[from+i].Ranks[r].Limit = time.Duration(1+m.rnd.IntN(200)) * time.Millisecond
				}
			}
		}
		m.p.Faults = append(m.p.Faults, f)
	}
	m.forgetAll()
	if m.chance(0.3) && !m.avoids("joining") {
		m.p.Faults = append(m.p.Faults, m.joining(len(m.p.Steps)))
	}
	m.add(Step{Op: Heal})
	m.refresh()
}

// joining returns a fault during the joining of the ranks that were lost before the Heal at a step:
// short enough not to fail an operation, or the end of a joining rank.
func (m *making) joining(step int) Fault {
	kinds := []string{"kill", "kill", "stop", "store"}
	if m.slows() {
		kinds = append(kinds, "slow")
	}
	if m.transport == "soft" {
		kinds = append(slices.Clone(deviceFaults), "store")
	}
	f := m.slow(step)
	f.Other = m.rnd.IntN(devicesOf - 1)
	f.Joining, f.Kind = true, pick(m.generator, kinds...)
	f.After = time.Duration(m.rnd.IntN(pick(m.generator, 10, 100, 1000))) * time.Millisecond
	f.For = min(f.For, time.Second)
	return f
}

// slows reports whether hosts can have a slow link.
func (g *generator) slows() bool {
	return (g.transport == "tcp" || g.transport == "hosts") && !g.avoids("slow")
}

// device returns a fault of an RDMA device for a while, at a step.
func (m *making) device(step int) Fault {
	f := Fault{Step: step, At: m.rnd.IntN(m.job.Ranks), After: m.moment(), Kind: pick(m.generator, deviceFaults...),
		Victim: m.rnd.IntN(m.job.Ranks), Other: m.rnd.IntN(devicesOf - 1),
		For: time.Duration(m.rnd.IntN(pick(m.generator, 5, 50, 500))) * time.Millisecond}
	if f.Kind == "break" {
		f.Other = m.rnd.IntN(devicesOf)
	}
	return f
}

// slow returns a fault: a link that is slow and loses frames for a while, at a step.
func (m *making) slow(step int) Fault {
	return Fault{Step: step, At: m.rnd.IntN(m.job.Ranks), After: m.moment(), Kind: "slow",
		Victim: m.rnd.IntN(m.job.Ranks), For: time.Duration(20+m.rnd.IntN(2000)) * time.Millisecond,
		Delay: time.Duration(m.rnd.IntN(20000)) * time.Microsecond, Loss: 0.02 * m.rnd.Float64()}
}
