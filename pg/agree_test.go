package pg

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func FuzzStart(f *testing.F) {
	f.Add(start{3, 4}.encode())
	f.Fuzz(func(t *testing.T, b []byte) {
		x, err := decodeStart(b)
		if err != nil {
			return
		}
		if y, err := decodeStart(x.encode()); err != nil || x != y {
			t.Errorf("%x: %v, then %v (%v)", b, x, y, err)
		}
	})
}

// agreeRank is a rank of the model: it goes through a program of operations ('o') and agreements
// ('a'), the same for all.
type agreeRank struct {
	agreements
	life  int
	pc    int    // of what it does next, or is in
	seq   uint64 // the operation that it began last
	in    bool   // it is in program[pc]
	inbox []func()
}

type agreeWorld struct {
	t       *testing.T
	program string
	ranks   []*agreeRank
	lives   int
	numbers map[int]uint64 // of the agreement at each place of the program, as known
	jumped  bool           // the numbers were begun afresh
}

// tell does what Group.tell does.
func (w *agreeWorld) tell(from int) {
	r := w.ranks[from]
	if !r.counts {
		return
	}
	for slot, to := range w.ranks {
		mine := r.mine
		if slot != from && mine.n > 0 {
			to.inbox = append(to.inbox, func() { to.heard[from] = mine })
		}
	}
	for slot, s := range r.untold() {
		to := w.ranks[slot]
		to.inbox = append(to.inbox, func() {
			if to.start(s) {
				w.tell(slot)
			}
		})
	}
}

// over reports whether what the rank is in can end there.
func (w *agreeWorld) over(slot int) bool {
	r := w.ranks[slot]
	for other, o := range w.ranks {
		if other == slot {
			continue
		}
		if w.program[r.pc] == 'o' {
			if o.seq < r.seq {
				return false
			}
		} else if _, known := r.vote(other); !known {
			return false
		}
	}
	return true
}

// step has a rank do something, and reports whether it could.
func (w *agreeWorld) step(slot int) bool {
	r := w.ranks[slot]
	switch {
	case len(r.inbox) > 0:
		f := r.inbox[0]
		r.inbox = r.inbox[1:]
		f()
	case r.pc == len(w.program):
		return false
	case !r.in && w.program[r.pc] == 'o':
		r.in, r.seq = true, r.seq+1
	case !r.in:
		r.in = true
		r.cast(true, r.seq)
		w.tell(slot)
	case !w.over(slot):
		return false
	default:
		if w.program[r.pc] == 'a' {
			if n, known := w.numbers[r.pc]; known && n != r.mine.n && !w.jumped {
				w.t.Fatalf("%s: the agreement at %d has number %d at rank %d, and had %d",
					w.program, r.pc, r.mine.n, slot, n)
			}
			w.numbers[r.pc] = r.mine.n
		}
		r.in = false
		r.pc++
	}
	return true
}

// replace has ranks lost; others come in their place, with an exchange of all.
func (w *agreeWorld) replace(lost []int) {
	begins, floor, from := uint64(1), uint64(0), uint64(byAdmit)
	for slot, r := range w.ranks {
		if slices.Contains(lost, slot) {
			continue
		}
		over := r.seq
		if r.in && w.program[r.pc] == 'o' { // it is run again
			over--
		}
		begins = max(begins, over+1)
		floor, from = max(floor, r.count()), min(from, r.from())
	}
	pc := 0
	for n := uint64(0); pc < len(w.program); pc++ {
		if w.program[pc] == 'o' {
			if n++; n == begins {
				break
			}
		}
	}
	for slot := range w.ranks {
		if slices.Contains(lost, slot) {
			w.lives++
			w.ranks[slot] = &agreeRank{agreements: newAgreements(), life: w.lives, pc: pc, seq: begins - 1}
			for _, r := range w.ranks {
				r.forget(slot)
			}
		}
	}
	w.jumped = w.jumped || from != 0
	for slot, r := range w.ranks {
		for len(r.inbox) > 0 { // a notice comes before what was told after it
			f := r.inbox[0]
			r.inbox = r.inbox[1:]
			f()
		}
		r.meet(slot, lost, begins, floor, min(from, begins))
	}
	for slot := range w.ranks {
		w.tell(slot)
	}
}

// Ranks that come in, wherever the others are in their program, number its agreements as the others
// do, and nobody waits for ever.
func TestNewcomersCountAgreementsAsOthersDo(t *testing.T) {
	for seed := range uint64(20000) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		w := &agreeWorld{t: t, numbers: map[int]uint64{}}
		for range 4 + rnd.IntN(12) {
			w.program += string("oa"[rnd.IntN(2)])
		}
		w.program += "oa"
		for range 2 + rnd.IntN(3) {
			w.ranks = append(w.ranks, &agreeRank{agreements: newAgreements()})
		}
		left := rnd.IntN(4)
		for stuck := 0; stuck < 200; {
			if left > 0 && rnd.IntN(30) == 0 {
				left--
				lost := rnd.Perm(len(w.ranks))[:1+rnd.IntN(len(w.ranks)-1)]
				w.replace(lost)
			}
			if stuck++; w.step(rnd.IntN(len(w.ranks))) {
				stuck = 0
			}
		}
		for slot, r := range w.ranks {
			if r.pc < len(w.program) {
				t.Fatalf("seed %d, %s: rank %d stands at %d: %+v", seed, w.program, slot, r.pc, r.agreements)
			}
		}
	}
}
