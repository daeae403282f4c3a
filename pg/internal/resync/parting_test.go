package resync

import (
	"fmt"
	"maps"
	"slices"
	"testing"
)

// The model of ranks that close a group: each runs some operations, which end as soon as the rank
// has begun them, and then closes the group or does something else. Notices between two ranks come
// in order, after any delay.

// leaver does with its Partings what the driver does.
type leaver struct {
	Partings
	last   uint64 // operation that its program runs
	closes bool   // after it
	failed bool   // its group fails after it
	seq    uint64
	waits  bool
	left   bool
}

type leaving struct {
	parents []int
	ranks   []leaver
	wires   [][][]Parting // from, to
}

func (w *leaving) clone() *leaving {
	c := &leaving{w.parents, slices.Clone(w.ranks), make([][][]Parting, len(w.ranks))}
	for r := range c.ranks {
		c.ranks[r].heard = maps.Clone(c.ranks[r].heard)
		c.wires[r] = make([][]Parting, len(w.ranks))
		for s := range c.wires[r] {
			c.wires[r][s] = slices.Clone(w.wires[r][s])
		}
	}
	return c
}

func (w *leaving) print() string { return fmt.Sprint(w.ranks, w.wires) }

// update does what the driver's part does.
func (w *leaving) update(r int) {
	l := &w.ranks[r]
	var children []int
	for c, p := range w.parents {
		if p == r {
			children = append(children, c)
		}
	}
	at, wants := l.seq, uint64(0)
	if l.waits {
		wants = l.seq
	}
	if l.waits || l.failed && l.seq == l.last {
		at = ^uint64(0)
	}
	if l.Update(1, wants, at, w.parents[r], children) {
		for s := range w.ranks {
			if s == w.parents[r] || slices.Contains(children, s) {
				w.wires[r][s] = append(w.wires[r][s], l.Told())
			}
		}
	}
}

// steps returns all states that may follow.
func (w *leaving) steps() (all []*leaving) {
	step := func(r int, f func(w *leaving, l *leaver)) {
		c := w.clone()
		f(c, &c.ranks[r])
		c.update(r)
		all = append(all, c)
	}
	for r := range w.ranks {
		l := &w.ranks[r]
		switch {
		case l.left:
			continue
		case l.seq < l.last:
			step(r, func(_ *leaving, l *leaver) { l.seq++ })
		case l.closes && !l.waits:
			step(r, func(_ *leaving, l *leaver) { l.waits = true })
		case l.waits && l.Told().All >= l.seq, // or it sees that another has left
			l.waits && slices.ContainsFunc(w.ranks, func(o leaver) bool { return o.left }):
			step(r, func(_ *leaving, l *leaver) { l.left = true })
		}
		for s := range w.ranks {
			if len(w.wires[s][r]) > 0 {
				step(r, func(c *leaving, l *leaver) {
					l.Hear(s, c.wires[s][r][0])
					c.wires[s][r] = c.wires[s][r][1:]
				})
			}
		}
	}
	return all
}

// check returns what is wrong with a state, of which nothing follows if end is set. alike says that
// all ranks that close the group do so after the same operation.
func (w *leaving) check(end, alike bool) error {
	for r, l := range w.ranks {
		for s, o := range w.ranks {
			over := o.waits || o.failed && o.seq == o.last
			if l.left && (alike || l.Told().All >= l.seq) && o.seq < l.seq && !over {
				return fmt.Errorf("rank %d left after operation %d, and rank %d has come to %d", r, l.seq, s, o.seq)
			}
		}
		if end && l.waits && !l.left {
			return fmt.Errorf("rank %d waits for ever", r)
		}
	}
	return nil
}

// A rank leaves when all others have come to its last operation, not before, in every order of
// events.
func TestRankLeavesAfterAllHaveCome(t *testing.T) {
	type program struct {
		last           uint64
		closes, failed bool
	}
	const closes, fails = 0, 2 // 1: it goes on
	states := 0
	trees := [][]int{{-1, 0}, {-1, 0, 0}, {-1, 0, 1}}
	if raceEnabled {
		trees = trees[:1]
	}
	for _, parents := range trees {
		n := len(parents)
		kinds := 6 // the last operation is 1 or 2, and then the rank closes, goes on or has failed
		total := 1
		for range n {
			total *= kinds
		}
		for code := range total {
			programs, most := make([]program, n), uint64(0)
			for r, c := 0, code; r < n; r, c = r+1, c/kinds {
				programs[r] = program{uint64(1 + c%2), c%kinds/2 == closes, c%kinds/2 == fails}
				most = max(most, programs[r].last)
			}
			begin := &leaving{parents: parents, ranks: make([]leaver, n), wires: make([][][]Parting, n)}
			stuck := false // a rank goes on without the last operation of one that waits for it
			alike := true
			for r, p := range programs {
				for _, o := range programs {
					alike = alike && (!p.closes || !o.closes || p.last == o.last)
				}
				begin.ranks[r] = leaver{last: p.last, closes: p.closes, failed: p.failed}
				begin.wires[r] = make([][]Parting, n)
				stuck = stuck || !p.closes && !p.failed && p.last < most
			}
			seen := map[string]bool{begin.print(): true}
			for queue := []*leaving{begin}; len(queue) > 0; {
				w := queue[len(queue)-1]
				queue = queue[:len(queue)-1]
				next := w.steps()
				if err := w.check(len(next) == 0 && !stuck, alike); err != nil {
					t.Fatalf("tree %v, programs %+v: %v\n%s", parents, programs, err, w.print())
				}
				for _, o := range next {
					if key := o.print(); !seen[key] {
						seen[key] = true
						queue = append(queue, o)
					}
				}
			}
			states += len(seen)
		}
	}
	t.Logf("%d states", states)
}

// What belongs to another view does not count.
func TestPartingsOfAnotherView(t *testing.T) {
	var p Partings
	p.Hear(1, Parting{Epoch: 1, Wanted: 5, Below: 5, All: 5})
	if !p.Update(1, 0, 5, -1, []int{1}) || p.Told() != (Parting{1, 5, 5, 5}) {
		t.Errorf("in its view: %+v", p.Told())
	}
	if p.Update(2, 0, 5, -1, []int{1}) || p.Told() != (Parting{Epoch: 2}) {
		t.Errorf("in the next: %+v", p.Told())
	}
	p.Update(2, 6, 6, 1, nil)
	if p.Told() != (Parting{2, 6, 6, 0}) {
		t.Errorf("it waits: %+v", p.Told())
	}
	if p.Hear(1, Parting{2, 6, 6, 6}); !p.Update(2, 6, 6, 1, nil) || p.Told().All != 6 {
		t.Errorf("the parent says that all are there: %+v", p.Told())
	}
}
