package collectives

import (
	"fmt"
	"math/bits"
	"unsafe"
)

// The plans determine which steps have completed before another one begins: a step begins after
// everything that it needs has completed, the n-th Recv from a peer completes after its n-th Send
// has read its source, and the n-th WaitSignal after the n-th Signal. A vector clock over all steps
// of all ranks is the set of steps that are known to have completed.

// clock is a set of steps, by number over all ranks.
type clock []uint64

func (c clock) has(step int) bool { return c[step/64]>>(step%64)&1 == 1 }
func (c clock) add(step int)      { c[step/64] |= 1 << (step % 64) }

func (c clock) join(o clock) {
	for i, w := range o {
		c[i] |= w
	}
}

// orders holds the clocks of the begin and the end of all steps.
type orders struct {
	first []int   // number of each rank's first step; at the end, of all steps
	begin []clock // steps that have completed when a step begins
	end   []clock // steps that have completed when it has, itself included
}

// order computes the clocks of all steps. It fails if some never complete.
func (m *machine) order() (*orders, error) {
	o := &orders{first: []int{0}}
	for _, r := range m.ranks {
		o.first = append(o.first, o.first[r.i]+len(r.Steps))
	}
	total := o.first[len(m.ranks)]
	o.begin, o.end = make([]clock, total), make([]clock, total)
	said := map[lane][]int{} // Sends and Signals
	for _, r := range m.ranks {
		for j := range r.Steps {
			if s := &r.Steps[j]; s.Verb == Send || s.Verb == Signal {
				at := lane{r.i, r.Shape.index(int(s.Peer)), s.Verb == Signal}
				said[at] = append(said[at], o.first[r.i]+j)
			}
		}
	}
	waits, keeps := make([]int, total), make([][]int, total)
	cause := make([]int, total) // of a Recv or WaitSignal, -1: none
	var ready []int
	for _, r := range m.ranks {
		for j := range r.Steps {
			s, n := &r.Steps[j], o.first[r.i]+j
			for _, d := range s.Needs {
				keeps[o.first[r.i]+int(d)] = append(keeps[o.first[r.i]+int(d)], n)
			}
			waits[n], cause[n] = len(s.Needs), -1
			if s.Verb == Recv || s.Verb == WaitSignal {
				from := said[lane{r.Shape.index(int(s.Peer)), r.i, s.Verb == WaitSignal}]
				if r.order[j] >= len(from) {
					return nil, m.deadlock()
				}
				cause[n] = from[r.order[j]]
				keeps[cause[n]] = append(keeps[cause[n]], n)
				waits[n]++
			}
			if waits[n] == 0 {
				ready = append(ready, n)
			}
		}
	}
	words := (total + 63) / 64
	rank, known := 0, 0
	for ; len(ready) > 0; known++ {
		n := ready[len(ready)-1]
		ready = ready[:len(ready)-1]
		for rank = 0; o.first[rank+1] <= n; rank++ {
		}
		begin := make(clock, words)
		for _, d := range m.ranks[rank].Steps[n-o.first[rank]].Needs {
			begin.join(o.end[o.first[rank]+int(d)])
		}
		end := make(clock, words)
		end.join(begin)
		if cause[n] >= 0 {
			end.join(o.end[cause[n]])
		}
		end.add(n)
		o.begin[n], o.end[n] = begin, end
		for _, k := range keeps[n] {
			if waits[k]--; waits[k] == 0 {
				ready = append(ready, k)
			}
		}
	}
	if known < total {
		return nil, m.deadlock()
	}
	return o, nil
}

// An access is a step's use of a range of addresses.
type access struct {
	step, by int // by: the index of the rank
	from, to uintptr
	write    bool
}

// prove checks that accesses of several ranks to one rank's memory are ordered, that no rank leaves
// a call while peers use its memory, and that none leaves a call without data before all have
// entered. Check covers the accesses of a rank to its own memory.
func (m *machine) prove() error {
	shared, empty := false, m.ranks[0].Shape.Empty()
	for _, r := range m.ranks {
		shared = shared || r.LoadStore || r.OneSided
	}
	if !shared && !empty {
		return nil
	}
	o, err := m.order()
	if err != nil {
		return err
	}
	name := func(i int) int { return m.ranks[i].Shape.Rank }
	used := make([][]access, len(m.ranks)) // by owner
	for _, r := range m.ranks {
		for j := range r.Steps {
			s := &r.Steps[j]
			note := func(f Ref, write bool) error {
				owner := r
				if f.Buf.Remote() {
					owner = m.ranks[r.Shape.index(int(f.Peer))]
					if f.Buf == PeerTmp && f.Off > owner.Tmp-f.Len {
						return fmt.Errorf("collectives: %s %s of rank %d: step %d (%v): %v passes the end, %d bytes",
							r.Algo, r.Shape.Kind, r.Shape.Rank, j, s, f, owner.Tmp)
					}
				}
				b := m.memory(r, f)
				if len(b) == 0 {
					return nil
				}
				from := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
				used[owner.i] = append(used[owner.i],
					access{o.first[r.i] + j, r.i, from, from + uintptr(len(b)), write})
				return nil
			}
			for _, f := range s.reads() {
				if err := note(f, false); err != nil {
					return err
				}
			}
			if s.Verb == Send {
				continue
			}
			if s.Verb == Copy && m.inPlace(r, s) {
				continue
			}
			if err := note(s.Dst, true); err != nil {
				return err
			}
		}
	}
	words := (o.first[len(m.ranks)] + 63) / 64
	for owner, list := range used {
		last := make(clock, words)
		for n := o.first[owner]; n < o.first[owner+1]; n++ {
			last.join(o.end[n])
		}
		for i, a := range list {
			if a.by != owner && !last.has(a.step) {
				at := a.step - o.first[a.by]
				return fmt.Errorf("collectives: %s %s: rank %d leaves while rank %d uses the same memory of it "+
					"(step %d: %v)", m.ranks[0].Algo, m.ranks[0].Shape.Kind, name(owner), name(a.by), at,
					m.ranks[a.by].Steps[at])
			}
			for _, b := range list[:i] {
				if a.by != b.by && (a.write || b.write) && a.from < b.to && b.from < a.to &&
					!o.begin[a.step].has(b.step) && !o.begin[b.step].has(a.step) {
					return fmt.Errorf("collectives: %s %s: ranks %d and %d use the same memory of rank %d at the same "+
						"time (steps %d and %d)", m.ranks[0].Algo, m.ranks[0].Shape.Kind, name(a.by), name(b.by),
						name(owner), a.step-o.first[a.by], b.step-o.first[b.by])
				}
			}
		}
	}
	if !empty {
		return nil
	}
	for i := range m.ranks {
		last := make(clock, words)
		for n := o.first[i]; n < o.first[i+1]; n++ {
			last.join(o.end[n])
		}
		for j := range m.ranks {
			if j != i && !last.any(o.first[j], o.first[j+1]) {
				return fmt.Errorf("collectives: %s %s of nothing: rank %d leaves without knowing that rank %d has "+
					"entered", m.ranks[0].Algo, m.ranks[0].Shape.Kind, name(i), name(j))
			}
		}
	}
	return nil
}

// inPlace reports whether a Copy has equal source and destination.
func (m *machine) inPlace(r *rank, s *Step) bool {
	return s.Dst.Len > 0 && &m.memory(r, s.Dst)[0] == &m.source(r, s.Src)[0]
}

// any reports whether the set contains a step in [from, to).
func (c clock) any(from, to int) bool {
	for n := from; n < to; {
		w := c[n/64] >> (n % 64)
		if w != 0 {
			return n+bits.TrailingZeros64(w) < to
		}
		n += 64 - n%64
	}
	return false
}
