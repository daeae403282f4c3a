package collectives

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"unsafe"
)

// Memory is one rank's In and Out, laid out as Kind says, parts of inactive slots included; Out may
// be, or contain, In.
type Memory struct{ In, Out []byte }

// Schedule says how Interpret runs the ranks against each other.
type Schedule struct {
	Seed  uint64 // picks who goes next and when a message arrives; the same seed gives the same run
	Eager bool   // a Send never waits; else it waits until its Recv is posted
	Grain int    // bytes of a Copy or Combine that a rank does in one turn, a multiple of Elem; 0: all of them
	// Combine folds srcs, in order, into dst, which may be one of them. final is Step.Final.
	Combine func(dst []byte, srcs [][]byte, final bool)
}

// Interpret runs the plans of all ranks of one call, plans[i] and mem[i] for the i-th active slot,
// in plain memory, with their steps in a random order among those that the contract allows, and
// leaves the results in mem. It reports what is wrong with the plans: what Check finds, a deadlock,
// messages that nobody receives, lengths that differ, and conflicting accesses to directly mapped
// memory that no signal orders, leaving the operation while a peer still uses the memory included;
// a barrier, or another call of nothing, that somebody leaves before all have entered. A posted
// Recv fills its range with rubbish at once, and messages into Once ranges are now and then lent
// instead of copied, so that a plan that relies on luck ends with wrong bytes.
func Interpret(plans []*Plan, mem []Memory, how Schedule) error {
	m := &machine{how: how, rng: rand.New(rand.NewPCG(how.Seed, 0x7474)), links: map[[2]int]*link{}}
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
		r := &rank{Plan: p, i: i, mem: mem[i], tmp: make([]byte, p.Tmp), from: make([]*message, len(p.Steps)),
			lent: map[Ref][]byte{}}
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
		r.clock = make([]uint32, len(plans))
		m.direct = m.direct || p.Direct
		m.ranks = append(m.ranks, r)
	}
	return m.run()
}

type message struct {
	data  []byte
	clock []uint32
}

type link struct {
	posted []int // the receiver's Recv steps without a message yet
	queue  []*message
	listed bool // among machine.ready
}

type rank struct {
	*Plan
	i       int
	mem     Memory
	tmp     []byte
	base    [2][]int
	pc, off int
	from    []*message // by Recv step: what has arrived
	open    int        // Recvs posted whose message has not
	lent    map[Ref][]byte
	clock   []uint32 // vector clock: steps of each rank known to have happened
	log     []access // to this rank's In and Out
	ended   bool
}

// An access is what a rank did to a range of addresses at one moment of its own clock.
type access struct {
	by       int
	when     uint32
	from, to uintptr
	write    bool
}

type machine struct {
	how    Schedule
	rng    *rand.Rand
	ranks  []*rank
	links  map[[2]int]*link // by indices of sender and receiver
	ready  []*delivery
	direct bool
}

type delivery struct {
	*link
	to *rank
}

func (m *machine) link(from, to int) *link {
	k := [2]int{from, to}
	if m.links[k] == nil {
		m.links[k] = &link{}
	}
	return m.links[k]
}

func (m *machine) list(l *link, to *rank) {
	if !l.listed && len(l.posted) > 0 && len(l.queue) > 0 {
		l.listed = true
		m.ready = append(m.ready, &delivery{l, to})
	}
}

func (m *machine) run() error {
	left := len(m.ranks)
	for left > 0 {
		if k := len(m.ready); k > 0 && m.rng.IntN(2) == 0 {
			if err := m.deliver(m.rng.IntN(k)); err != nil {
				return err
			}
			continue
		}
		moved := false
		for i, start := 0, m.rng.IntN(len(m.ranks)); i < len(m.ranks) && !moved; i++ {
			r := m.ranks[(start+i)%len(m.ranks)]
			if r.ended {
				continue
			}
			var err error
			if moved, err = m.turn(r); err != nil {
				return err
			}
			if r.ended {
				left--
			}
		}
		if !moved && len(m.ready) > 0 {
			if err := m.deliver(m.rng.IntN(len(m.ready))); err != nil {
				return err
			}
		} else if !moved && left > 0 {
			return m.deadlock()
		}
	}
	for k, l := range m.links {
		if len(l.queue) > 0 {
			return fmt.Errorf("collectives: %s %s: rank %d never receives %d messages of rank %d", m.ranks[0].Algo,
				m.ranks[0].Shape.Kind,
				m.ranks[k[1]].Shape.Rank, len(l.queue), m.ranks[k[0]].Shape.Rank)
		}
	}
	return nil
}

func (m *machine) deadlock() error {
	var w strings.Builder
	for _, r := range m.ranks {
		if r.pc < len(r.Steps) {
			fmt.Fprintf(&w, "\nrank %d at step %d: %v", r.Shape.Rank, r.pc, r.Steps[r.pc])
		} else if !r.ended {
			fmt.Fprintf(&w, "\nrank %d at the end, with messages to come", r.Shape.Rank)
		}
	}
	return fmt.Errorf("collectives: %s %s: deadlock:%s", m.ranks[0].Algo, m.ranks[0].Shape.Kind, w.String())
}

func (m *machine) deliver(i int) error {
	d := m.ready[i]
	m.ready[i] = m.ready[len(m.ready)-1]
	m.ready = m.ready[:len(m.ready)-1]
	step, msg := d.posted[0], d.queue[0]
	d.posted, d.queue, d.listed = d.posted[1:], d.queue[1:], false
	st := &d.to.Steps[step]
	if len(msg.data) != st.Dst.Len {
		return fmt.Errorf("collectives: %s %s: rank %d, step %d (%v): got %d bytes", d.to.Algo, d.to.Shape.Kind,
			d.to.Shape.Rank, step, st, len(msg.data))
	}
	if st.Once && m.rng.IntN(2) == 0 {
		d.to.lent[st.Dst] = msg.data
	} else {
		copy(m.memory(d.to, st.Dst), msg.data)
	}
	d.to.from[step] = msg
	d.to.open--
	m.list(d.link, d.to)
	return nil
}

func (m *machine) memory(r *rank, f Ref) []byte {
	owner, buf := r, f.Buf
	if buf == PeerIn || buf == PeerOut {
		owner, buf = m.ranks[r.Shape.index(int(f.Peer))], buf-PeerIn
	}
	if f.Len == 0 {
		return nil
	}
	if buf == Tmp {
		return r.tmp[f.Off : f.Off+f.Len]
	}
	at := owner.base[buf][f.Part] + f.Off
	return [][]byte{owner.mem.In, owner.mem.Out}[buf][at : at+f.Len : at+f.Len]
}

// source is memory, or the message that was lent for it.
func (m *machine) source(r *rank, f Ref) []byte {
	if data, ok := r.lent[f]; ok && f.Buf == Tmp {
		return data
	}
	return m.memory(r, f)
}

func (r *rank) join(msg *message) {
	for i, t := range msg.clock {
		r.clock[i] = max(r.clock[i], t)
	}
}

// turn lets r do one thing. It reports whether it could.
func (m *machine) turn(r *rank) (bool, error) {
	if r.pc == len(r.Steps) {
		if r.open > 0 {
			return false, nil
		}
		for _, msg := range r.from {
			if msg != nil {
				r.join(msg)
			}
		}
		r.ended = true
		for j, t := range r.clock {
			if t == 0 && j != r.i && r.Shape.Empty() {
				return false, fmt.Errorf("collectives: %s %s of nothing: rank %d leaves without knowing that "+
					"rank %d has entered", r.Algo, r.Shape.Kind, r.Shape.Rank, r.Shape.Active[j])
			}
		}
		for _, b := range [][]byte{r.mem.In, r.mem.Out} { // from now on they are the caller's again
			if err := m.touch(r, r, b, true); err != nil {
				return false, err
			}
		}
		return true, nil
	}
	s := &r.Steps[r.pc]
	for _, n := range s.Needs {
		if r.from[n] == nil {
			return false, nil
		}
	}
	peer := r.Shape.index(int(s.Peer))
	if s.Verb == Send && !m.how.Eager {
		if l := m.link(r.i, peer); len(l.posted) <= len(l.queue) {
			return false, nil
		}
	}
	if r.off == 0 {
		for _, n := range s.Needs {
			r.join(r.from[n])
		}
		if err := m.accesses(r, s); err != nil {
			return false, err
		}
	}
	end := true
	switch s.Verb {
	case Send:
		l := m.link(r.i, peer)
		msg := &message{data: bytes.Clone(m.source(r, s.Src))}
		r.clock[r.i]++
		msg.clock = append(msg.clock, r.clock...)
		l.queue = append(l.queue, msg)
		m.list(l, m.ranks[peer])
		delete(r.lent, s.Src)
	case Recv:
		dst := m.memory(r, s.Dst)
		for i := range dst {
			dst[i] = byte(m.rng.Uint32())
		}
		l := m.link(peer, r.i)
		l.posted = append(l.posted, r.pc)
		r.open++
		m.list(l, r)
	case Copy:
		dst, src := m.memory(r, s.Dst), m.source(r, s.Src)
		if from, to := r.piece(m.how.Grain, len(dst)); len(dst) > 0 && &dst[0] != &src[0] {
			copy(dst[from:to], src[from:to])
			end = to == len(dst)
		}
	case Combine:
		from, to := r.piece(m.how.Grain, s.Dst.Len)
		srcs := make([][]byte, len(s.Srcs))
		for i, f := range s.Srcs {
			srcs[i] = m.source(r, f)[from:to]
		}
		dst := m.memory(r, s.Dst)
		m.how.Combine(dst[from:to], srcs, s.Final)
		end = to == s.Dst.Len
	}
	if end {
		for _, f := range append([]Ref{s.Src}, s.Srcs...) {
			if f.Buf == Tmp {
				delete(r.lent, f)
			}
		}
		r.pc++
		r.off = 0
		r.clock[r.i]++
	}
	return true, nil
}

// piece is what one turn does of a step of n bytes.
func (r *rank) piece(grain, n int) (from, to int) {
	from, to = r.off, n
	if grain > 0 {
		to = min(from+grain, n)
	}
	r.off = to
	return from, to
}

// accesses notes what step s of r does to mapped memory, its own and its peers'.
func (m *machine) accesses(r *rank, s *Step) error {
	if !m.direct {
		return nil
	}
	note := func(f Ref, write bool) error {
		owner := r
		switch f.Buf {
		case Tmp:
			return nil
		case PeerIn, PeerOut:
			owner = m.ranks[r.Shape.index(int(f.Peer))]
		}
		return m.touch(r, owner, m.memory(r, f), write)
	}
	for _, f := range append([]Ref{s.Src}, s.Srcs...) {
		if err := note(f, false); err != nil {
			return err
		}
	}
	if dst := m.memory(r, s.Dst); s.Verb == Send || s.Verb == Copy && len(dst) > 0 &&
		&dst[0] == &m.memory(r, s.Src)[0] {
		return nil // nothing written
	}
	return note(s.Dst, true)
}

// touch checks an access of r to memory of owner against what other ranks did to it without a
// signal in between.
func (m *machine) touch(r, owner *rank, b []byte, write bool) error {
	if len(b) == 0 || !m.direct {
		return nil
	}
	from := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	to := from + uintptr(len(b))
	for _, a := range owner.log {
		if a.by != r.i && a.from < to && from < a.to && (a.write || write) && r.clock[a.by] <= a.when {
			return fmt.Errorf("collectives: %s %s: ranks %d and %d use the same memory of rank %d at the same "+
				"time (rank %d at step %d of %d)", r.Algo, r.Shape.Kind,
				m.ranks[a.by].Shape.Rank, r.Shape.Rank, owner.Shape.Rank, r.Shape.Rank, r.pc, len(r.Steps))
		}
	}
	owner.log = append(owner.log, access{r.i, r.clock[r.i], from, to, write})
	return nil
}
