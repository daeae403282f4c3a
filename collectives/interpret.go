package collectives

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"unsafe"
)

// Memory is one rank's In and Out, laid out as Kind says, including parts of inactive slots. Out
// may be, or contain, In.
type Memory struct{ In, Out []byte }

// Schedule says in which order Interpret runs steps.
type Schedule struct {
	Seed  uint64 // selects the next rank and the arrival of messages; the same seed gives the same run
	Eager bool   // a Send never blocks; else it waits until its Recv is posted
	// Late: any step that may begin does, and completes some time later. Otherwise a rank runs one
	// step after the other, and only the Late verbs complete later.
	Late bool
	// Grain, unless Late, is the number of bytes of a Copy or ReduceInto that a rank processes in
	// one turn, a multiple of Elem; 0: all.
	Grain int
	// Fold combines srcs, in order, into dst, which may be one of them. final is Step.Final.
	Fold func(dst []byte, srcs [][]byte, final bool)
}

// Interpret runs the plans of all ranks of one call, plans[i] and mem[i] for the i-th active slot,
// in plain memory, with their steps in a random order that the contract allows, and leaves the
// results in mem. It returns errors of the plans: violations that Check finds, a deadlock, messages
// without a receiver, lengths that differ, conflicting accesses to peers' memory that the plans
// together do not order, including leaving the operation while a peer still uses the memory, and a
// barrier (or another call without data) that a rank leaves before all have entered. To expose
// plans that work by chance, a range that a step will write holds garbage from the step's begin to
// its end, a late step reads its sources at its begin or at its end, and messages into Once ranges
// are sometimes lent instead of copied.
func Interpret(plans []*Plan, mem []Memory, how Schedule) error {
	m := &machine{how: how, rng: rand.New(rand.NewPCG(how.Seed, 0x7474)), links: map[lane]*link{}}
	if err := m.load(plans, mem); err != nil {
		return err
	}
	if err := m.prove(); err != nil {
		return err
	}
	return m.run()
}

// load checks each plan and takes it over.
func (m *machine) load(plans []*Plan, mem []Memory) error {
	if len(plans) == 0 || len(plans) != len(plans[0].Shape.Active) || len(mem) != len(plans) {
		return fmt.Errorf("collectives: %d plans and %d memories; want one of each for every active slot", len(plans),
			len(mem))
	}
	for i, p := range plans {
		if err := p.Check(); err != nil {
			return err
		}
		a, b := plans[0], p
		if a.Shape.Kind != b.Shape.Kind || a.Algo != b.Algo ||
			fmt.Sprint(a.Shape.Active) != fmt.Sprint(b.Shape.Active) || b.Shape.Rank != b.Shape.Active[i] {
			return fmt.Errorf("collectives: plan %d is not of the same call, or not in the order of the slots", i)
		}
		r := newRank(p, i, mem[i])
		m.spoil(r.tmp)
		for _, buf := range []Buf{In, Out} {
			base := []int{0}
			for part := range p.Shape.Parts(buf, p.Shape.Rank) {
				base = append(base, base[part]+p.Shape.PartBytes(buf, p.Shape.Rank, part))
			}
			have := [][]byte{mem[i].In, mem[i].Out}[buf]
			if want := base[len(base)-1]; len(have) != want {
				return fmt.Errorf("collectives: rank %d has %d bytes of %v, want %d", p.Shape.Rank, len(have), buf,
					want)
			}
			r.base[buf] = base
		}
		m.ranks = append(m.ranks, r)
	}
	return nil
}

// A lane is one direction between two ranks, by index, for messages or for signals.
type lane struct {
	from, to int
	signals  bool
}

type link struct {
	posted []int // the receiver's steps without a message
	queue  [][]byte
	listed bool // among machine.ready
}

type rank struct {
	*Plan
	i       int
	mem     Memory
	tmp     []byte
	base    [2][]int
	pc, off int // unless late
	done    []bool
	left    int // steps that have not completed
	lent    map[Ref][]byte

	// For late steps: those without open needs that have not begun, the number of open needs of
	// each of the others, the steps that wait for each, and the order of steps that begin in order.
	ready   []int
	blocked []int
	keeps   [][]int32
	order   []int // by step: its number among those of its verb and peer
	next    map[[2]int32]int
	flying  []flight
}

// A flight is a step that has begun, with the data that it has read, or nil.
type flight struct {
	step int
	srcs [][]byte
}

func newRank(p *Plan, i int, mem Memory) *rank {
	n := len(p.Steps)
	r := &rank{Plan: p, i: i, mem: mem, tmp: make([]byte, p.Tmp), done: make([]bool, n), left: n,
		lent: map[Ref][]byte{}, blocked: make([]int, n), keeps: make([][]int32, n), order: make([]int, n),
		next: map[[2]int32]int{}}
	count := map[[2]int32]int{}
	for j := range p.Steps {
		s := &p.Steps[j]
		if r.blocked[j] = len(s.Needs); len(s.Needs) == 0 {
			r.ready = append(r.ready, j)
		}
		for _, d := range s.Needs {
			r.keeps[d] = append(r.keeps[d], int32(j))
		}
		r.order[j] = count[s.lane()]
		count[s.lane()]++
	}
	return r
}

// lane returns a key of the steps that begin in the order of the plan.
func (s *Step) lane() [2]int32 { return [2]int32{int32(s.Verb), s.Peer} }

type machine struct {
	how   Schedule
	rng   *rand.Rand
	ranks []*rank
	links map[lane]*link
	ready []*delivery
}

type delivery struct {
	*link
	to *rank
}

func (m *machine) link(at lane) *link {
	if m.links[at] == nil {
		m.links[at] = &link{}
	}
	return m.links[at]
}

func (m *machine) list(l *link, to *rank) {
	if !l.listed && len(l.posted) > 0 && len(l.queue) > 0 {
		l.listed = true
		m.ready = append(m.ready, &delivery{l, to})
	}
}

func (m *machine) run() error {
	left := len(m.ranks)
	for _, r := range m.ranks {
		if r.left == 0 {
			left--
		}
	}
	for left > 0 {
		if k := len(m.ready); k > 0 && m.rng.IntN(2) == 0 {
			if r, err := m.deliver(m.rng.IntN(k)); err != nil {
				return err
			} else if r.left == 0 {
				left--
			}
			continue
		}
		moved := false
		for i, start := 0, m.rng.IntN(len(m.ranks)); i < len(m.ranks) && !moved; i++ {
			r := m.ranks[(start+i)%len(m.ranks)]
			if r.left == 0 {
				continue
			}
			if moved = m.turn(r); r.left == 0 {
				left--
			}
		}
		if !moved && len(m.ready) > 0 {
			if r, err := m.deliver(m.rng.IntN(len(m.ready))); err != nil {
				return err
			} else if r.left == 0 {
				left--
			}
		} else if !moved && left > 0 {
			return m.deadlock()
		}
	}
	for k, l := range m.links {
		if len(l.queue) > 0 {
			return fmt.Errorf("collectives: %s %s: rank %d never receives %d messages of rank %d", m.ranks[0].Algo,
				m.ranks[0].Shape.Kind,
				m.ranks[k.to].Shape.Rank, len(l.queue), m.ranks[k.from].Shape.Rank)
		}
	}
	return nil
}

func (m *machine) deadlock() error {
	var w strings.Builder
	for _, r := range m.ranks {
		for j := range r.Steps {
			if !r.done[j] {
				fmt.Fprintf(&w, "\nrank %d at step %d: %v", r.Shape.Rank, j, r.Steps[j])
				break
			}
		}
	}
	return fmt.Errorf("collectives: %s %s: deadlock:%s", m.ranks[0].Algo, m.ranks[0].Shape.Kind, w.String())
}

// complete ends step j.
func (r *rank) complete(j int) {
	r.done[j] = true
	r.left--
	for _, k := range r.keeps[j] {
		if r.blocked[k]--; r.blocked[k] == 0 {
			r.ready = append(r.ready, int(k))
		}
	}
}

func (m *machine) deliver(i int) (*rank, error) {
	d := m.ready[i]
	m.ready[i] = m.ready[len(m.ready)-1]
	m.ready = m.ready[:len(m.ready)-1]
	step, msg := d.posted[0], d.queue[0]
	d.posted, d.queue, d.listed = d.posted[1:], d.queue[1:], false
	st := &d.to.Steps[step]
	if len(msg) != st.Dst.Len {
		return nil, fmt.Errorf("collectives: %s %s: rank %d, step %d (%v): got %d bytes", d.to.Algo, d.to.Shape.Kind,
			d.to.Shape.Rank, step, st, len(msg))
	}
	if st.Once && m.rng.IntN(2) == 0 {
		d.to.lent[st.Dst] = msg
	} else {
		copy(m.memory(d.to, st.Dst), msg)
	}
	d.to.complete(step)
	m.list(d.link, d.to)
	return d.to, nil
}

func (m *machine) memory(r *rank, f Ref) []byte {
	owner, buf := r, f.Buf
	if buf.Remote() {
		owner, buf = m.ranks[r.Shape.index(int(f.Peer))], buf-PeerIn
	}
	if f.Len == 0 {
		return nil
	}
	if buf == Tmp {
		return owner.tmp[f.Off : f.Off+f.Len]
	}
	at := owner.base[buf][f.Part] + f.Off
	return [][]byte{owner.mem.In, owner.mem.Out}[buf][at : at+f.Len : at+f.Len]
}

// source returns the memory of f, or the message that was lent for it.
func (m *machine) source(r *rank, f Ref) []byte {
	if data, ok := r.lent[f]; ok && f.Buf == Tmp {
		return data
	}
	return m.memory(r, f)
}

// reads returns the ranges that a step reads.
func (s *Step) reads() []Ref {
	if s.Verb == ReduceInto {
		return s.Srcs
	}
	return []Ref{s.Src}
}

// may reports whether step j of r, which has no open needs, can begin now.
func (m *machine) may(r *rank, j int) bool {
	s := &r.Steps[j]
	switch s.Verb {
	case Copy, ReduceInto, Put:
		return true
	}
	if m.how.Late && r.next[s.lane()] != r.order[j] {
		return false
	}
	if s.Verb == Send && !m.how.Eager {
		l := m.link(lane{r.i, r.Shape.index(int(s.Peer)), false})
		return len(l.posted) > len(l.queue)+r.sending(s.Peer)
	}
	return true
}

// sending returns how many Sends to a peer have begun that have not completed.
func (r *rank) sending(peer int32) (n int) {
	for _, f := range r.flying {
		if s := &r.Steps[f.step]; s.Verb == Send && s.Peer == peer {
			n++
		}
	}
	return n
}

// begin begins step j of r.
func (m *machine) begin(r *rank, j int) {
	s := &r.Steps[j]
	r.next[s.lane()]++
	peer := r.Shape.index(int(s.Peer))
	switch s.Verb {
	case Recv, WaitSignal:
		m.spoil(m.memory(r, s.Dst))
		l := m.link(lane{peer, r.i, s.Verb == WaitSignal})
		l.posted = append(l.posted, j)
		m.list(l, r)
		return
	case Signal:
		m.say(lane{r.i, peer, true}, nil)
		r.complete(j)
		return
	}
	f := flight{step: j}
	dst := m.memory(r, s.Dst)
	same := s.Verb == Copy && m.inPlace(r, s)
	early := m.rng.IntN(2) == 0
	for _, ref := range s.reads() {
		early = early || overlapping(dst, m.source(r, ref)) && !same
	}
	if early {
		for _, ref := range s.reads() {
			f.srcs = append(f.srcs, bytes.Clone(m.source(r, ref)))
		}
	}
	if s.Verb != Send && !same {
		m.spoil(dst)
	}
	r.flying = append(r.flying, f)
}

func overlapping(a, b []byte) bool {
	if len(a) == 0 || len(b) == 0 {
		return false
	}
	x, y := uintptr(unsafe.Pointer(&a[0])), uintptr(unsafe.Pointer(&b[0]))
	return x < y+uintptr(len(b)) && y < x+uintptr(len(a))
}

func (m *machine) spoil(b []byte) {
	for i := range b {
		b[i] = byte(m.rng.Uint32())
	}
}

func (m *machine) say(at lane, msg []byte) {
	l := m.link(at)
	l.queue = append(l.queue, msg)
	m.list(l, m.ranks[at.to])
}

// finish completes the k-th step of r that has begun or, for a Send, the first one to the same
// peer.
func (m *machine) finish(r *rank, k int) {
	f := r.flying[k]
	s := &r.Steps[f.step]
	for i := range k {
		if o := &r.Steps[r.flying[i].step]; s.Verb == Send && o.lane() == s.lane() {
			k, f = i, r.flying[i]
			s = o
			break
		}
	}
	r.flying = append(r.flying[:k], r.flying[k+1:]...)
	srcs := f.srcs
	if srcs == nil {
		for _, ref := range s.reads() {
			srcs = append(srcs, m.source(r, ref))
		}
	}
	switch dst := m.memory(r, s.Dst); s.Verb {
	case Send:
		m.say(lane{r.i, r.Shape.index(int(s.Peer)), false}, bytes.Clone(srcs[0]))
	case Copy, Put:
		copy(dst, srcs[0])
	case ReduceInto:
		m.how.Fold(dst, srcs, s.Final)
	}
	r.read(s)
	r.complete(f.step)
}

// read ends the loans of a step.
func (r *rank) read(s *Step) {
	for _, f := range s.reads() {
		if f.Buf == Tmp {
			delete(r.lent, f)
		}
	}
}

// turn lets r make one move. It reports whether it could.
func (m *machine) turn(r *rank) bool {
	if n := len(r.flying); n > 0 && m.rng.IntN(2) == 0 {
		m.finish(r, m.rng.IntN(n))
		return true
	}
	if m.how.Late {
		for i, start := 0, m.rng.IntN(max(1, len(r.ready))); i < len(r.ready); i++ {
			k := (start + i) % len(r.ready)
			if j := r.ready[k]; m.may(r, j) {
				r.ready[k] = r.ready[len(r.ready)-1]
				r.ready = r.ready[:len(r.ready)-1]
				m.begin(r, j)
				return true
			}
		}
	} else if r.pc < len(r.Steps) && r.blocked[r.pc] == 0 && m.may(r, r.pc) {
		if m.step(r, r.pc) {
			r.pc++
			r.off = 0
		}
		return true
	}
	if n := len(r.flying); n > 0 {
		m.finish(r, m.rng.IntN(n))
		return true
	}
	return false
}

// step runs a piece of step j and reports whether that was the last, or the step is late.
func (m *machine) step(r *rank, j int) (end bool) {
	s := &r.Steps[j]
	switch s.Verb {
	case Recv, Put, Signal, WaitSignal:
		m.begin(r, j)
		return true
	case Send:
		m.say(lane{r.i, r.Shape.index(int(s.Peer)), false}, bytes.Clone(m.source(r, s.Src)))
		end = true
	case Copy:
		dst, src := m.memory(r, s.Dst), m.source(r, s.Src)
		if end = m.inPlace(r, s); !end {
			from, to := r.piece(m.how.Grain, len(dst))
			copy(dst[from:to], src[from:to])
			end = to == len(dst)
		}
	case ReduceInto:
		from, to := r.piece(m.how.Grain, s.Dst.Len)
		srcs := make([][]byte, len(s.Srcs))
		for i, f := range s.Srcs {
			srcs[i] = m.source(r, f)[from:to]
		}
		m.how.Fold(m.memory(r, s.Dst)[from:to], srcs, s.Final)
		end = to == s.Dst.Len
	}
	if end {
		r.read(s)
		r.complete(j)
	}
	return end
}

// piece returns the range that one turn processes of a step of n bytes.
func (r *rank) piece(grain, n int) (from, to int) {
	from, to = r.off, n
	if grain > 0 {
		to = min(from+grain, n)
	}
	r.off = to
	return from, to
}
