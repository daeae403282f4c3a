package pg

import (
	"context"
	"testing"
)

// What a call costs before anybody else is involved.
func BenchmarkAlone(b *testing.B) {
	gs, err := Local(1, Config{})
	if err != nil {
		b.Fatal(err)
	}
	defer gs[0].Close()
	x := make([]float32, 16)
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		if err := AllReduce(ctx, gs[0], x, Sum); err != nil {
			b.Fatal(err)
		}
	}
}
