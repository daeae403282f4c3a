package pg

import (
	"context"
	"testing"
)

// The cost of a call of a single rank.
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

// BenchmarkAsynchronous compares the ways to run one small operation.
func BenchmarkAsynchronous(b *testing.B) {
	gs, err := Local(1, Config{})
	if err != nil {
		b.Fatal(err)
	}
	g := gs[0]
	defer g.Close()
	bg := context.Background()
	ctx, cancel := context.WithCancel(bg)
	defer cancel()
	x := make([]float32, 16)
	op := AllReduceOp{Dst: BufferOf(x), Op: Sum}
	for name, f := range map[string]func() error{
		"blocking":   func() error { return AllReduce(ctx, g, x, Sum) },
		"do":         func() error { return g.Do(ctx, op) },
		"start":      func() error { return g.Start(op).Wait(ctx) },
		"background": func() error { return g.Start(op).Wait(bg) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := f(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
