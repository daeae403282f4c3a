package exec

import (
	"sync"
	"testing"

	"tutti/collectives"
	"tutti/kernels"
)

// A call that is repeated is bound: also a barrier, which has no buffers, and not a call without
// data, of which each rank may have its own kind of buffers.
func TestRepeatedCallsAreBound(t *testing.T) {
	x, y := make([]float32, 4), make([]float32, 4)
	of := func(x []float32) Buffer { return buffer(x, kernels.Float32) }
	for _, c := range []struct {
		name string
		q    func(rank int) *Request
		want bool
	}{
		{"barrier", func(int) *Request { return &Request{Kind: collectives.Barrier} }, true},
		{"broadcast", func(rank int) *Request {
			own := of([][]float32{x, y}[rank])
			return &Request{Kind: collectives.Broadcast, Dst: own, Src: own}
		}, true},
		{"empty", func(int) *Request {
			return &Request{Kind: collectives.Broadcast, Dst: of(nil), Src: of(nil)}
		}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			all := ranks(t, 2, 1, false)
			var wg sync.WaitGroup
			for rank, it := range all {
				wg.Go(func() {
					g := it.runners[0]
					for call := range 3 {
						if err := g.run(t.Context(), c.q(rank), collectives.Auto); err != nil {
							t.Errorf("rank %d, call %d: %v", rank, call, err)
						}
						if is := g.Bound() != nil; is != (c.want && call > 0) {
							t.Errorf("rank %d: call %d is bound: %v", rank, call, is)
						}
					}
				})
			}
			wg.Wait()
		})
	}
}
