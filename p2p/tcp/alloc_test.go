//go:build !race

package tcp

import (
	"testing"

	"tutti/p2p"
)

// Warm links allocate nothing, with small frames as with ones that are written in parts and filled
// in place.
func TestNoAllocations(t *testing.T) {
	a, b, _, _ := tightPair(t, 64<<10)
	frames := []*p2p.Header{header(1, 1000), header(2, 200<<10)}
	p, dst := pattern(200<<10, 0), make([]byte, 200<<10)
	round := func() {
		for _, h := range frames {
			n := int(h.Len)
			for sent, got := false, 0; got < n; {
				if !sent {
					sent, _ = a.Send(h, p[:n])
				}
				a.Flush()
				a.Arm()
				a.Disarm()
				r, q, err := b.Recv()
				if err != nil {
					t.Fatal(err)
				}
				if r == nil {
					b.Arm()
					b.Disarm()
					continue
				}
				if q != nil {
					got = copy(dst, q)
					continue
				}
				k, err := b.Fill(dst[got:n])
				if err != nil {
					t.Fatal(err)
				}
				got += k
			}
			b.Release()
		}
	}
	for range 20 {
		round()
	}
	if n := testing.AllocsPerRun(100, round); n >= 1 {
		t.Errorf("%v allocations a round", n)
	}
}
