package pg

import (
	"context"
	"fmt"
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

// BenchmarkBesideReceives is the cost of a small allreduce while receives are posted.
func BenchmarkBesideReceives(b *testing.B) {
	for _, posted := range []int{0, 1, 10_000} {
		b.Run(fmt.Sprintf("posted=%d", posted), func(b *testing.B) {
			gs, err := Local(2, Config{})
			if err != nil {
				b.Fatal(err)
			}
			ctx := context.Background()
			for i := range posted {
				for r, g := range gs {
					g.Start(RecvOp{X: BufferOf(make([]byte, 8)), From: 1 - r, Tag: i})
				}
			}
			over := make(chan error)
			run := func(g *Group) error {
				x := make([]float32, 16)
				for range b.N {
					if err := AllReduce(ctx, g, x, Sum); err != nil {
						return err
					}
				}
				return nil
			}
			b.ResetTimer()
			go func() { over <- run(gs[1]) }()
			if err := run(gs[0]); err != nil {
				b.Error(err)
			}
			if err := <-over; err != nil {
				b.Error(err)
			}
			b.StopTimer()
			for _, g := range gs {
				g.Close()
			}
		})
	}
}

// BenchmarkStartSend is the cost of starting a send that has to wait for its receiver.
func BenchmarkStartSend(b *testing.B) {
	gs, err := Local(2, Config{})
	if err != nil {
		b.Fatal(err)
	}
	x := make([]byte, 1024)
	b.ReportAllocs()
	for b.Loop() {
		gs[0].Start(SendOp{X: BufferOf(x), To: 1})
	}
	for _, g := range gs {
		g.Close()
	}
}
