package pg

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"tutti/kernels"
)

// A reduction of small floats in place whose partial sums travel as float32 has not written to its
// buffer when it fails: it can be run again (Retry), and says so.
func TestWideReductionsKeepTheirInput(t *testing.T) {
	for _, algo := range []string{"ring", "doubling", "halving", "tree"} {
		each(t, 3, Config{Timeout: 300 * time.Millisecond, Algorithm: algo}, func(ctx context.Context, g *Group) error {
			if g.Rank() == 2 { // does not come
				return nil
			}
			x := make([]BF16, 10_000)
			for i := range x {
				x[i] = kernels.BF16From(float32(1 + g.Rank()))
			}
			var late *TimeoutError
			if err := AllReduce(ctx, g, x, Sum); !errors.As(err, &late) {
				return fmt.Errorf("%s: got %v, want a *TimeoutError", algo, err)
			}
			if g.run.Dirty() {
				return fmt.Errorf("%s: the input is taken for overwritten", algo)
			}
			for i, v := range x {
				if v != kernels.BF16From(float32(1+g.Rank())) {
					return fmt.Errorf("%s: element %d was written", algo, i)
				}
			}
			return nil
		})
	}
}
