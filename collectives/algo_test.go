package collectives

import (
	"math/rand/v2"
	"slices"
	"testing"
)

func TestAlgorithmsAreDescribed(t *testing.T) {
	names := map[string]Algo{}
	for a := OneShot; a < numAlgos; a++ {
		row := algos[a]
		for _, name := range []string{row.name, row.former} {
			if other, taken := names[name]; taken && name != "" {
				t.Errorf("%v and %v are both called %q", other, a, name)
			}
			names[name] = a
		}
		if row.name == "" || !slices.ContainsFunc(row.makers[:], func(f func(*builder)) bool { return f != nil }) {
			t.Errorf("the row %d says nothing: %+v", a, row)
		}
	}
	if numAlgos.Valid() || numAlgos.OnePass() || numAlgos.Requires() != Always {
		t.Error("there is an algorithm behind the last one")
	}
}

// An algorithm is a function that makes a rank's plan, and an entry of the table. Here all ranks
// send their parts along a line and back, and the sweep's proof runs over it.
func TestAlgorithmIsAnEntryOfTheTable(t *testing.T) {
	entry := &algos[Chain].makers[AllGather]
	if *entry != nil {
		t.Fatal("the entry is taken")
	}
	*entry = func(b *builder) {
		b.copy(b.outPart(b.me), b.own())
		line := func(from, to, first, last int) { // parts first..last-1, from a rank to the next
			switch b.me {
			case from:
				for p := first; p < last; p++ {
					b.sendPart(b.Active[to], b.outPart(p))
				}
			case to:
				for p := first; p < last; p++ {
					b.recvPart(b.Active[from], b.outPart(p))
				}
			}
		}
		for i := range b.n - 1 {
			line(i, i+1, 0, i+1)
		}
		for i := b.n - 1; i > 0; i-- {
			line(i, i-1, i, b.n)
		}
	}
	defer func() { *entry = nil }()
	if !slices.Contains(Algorithms(AllGather), Chain) {
		t.Error("it is not among the algorithms")
	}
	r := rand.New(rand.NewPCG(31, 32))
	for n := 1; n <= 9; n++ {
		for range 20 {
			c := draw(r, AllGather, Chain, n)
			if err := c.run(); err != nil {
				t.Fatalf("%v\n%v", c, err)
			}
		}
	}
}
