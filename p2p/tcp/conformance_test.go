package tcp

import (
	"testing"

	"tutti/p2p"
	"tutti/p2p/linktest"
)

func TestConformance(t *testing.T) {
	for name, cfg := range map[string]Config{
		"default":           {},
		"3 connections":     {Conns: 3},
		"small":             {MaxFrame: MinFrame, BufferSize: minBuffer, SocketBuffer: 8 << 10},
		"big, small socket": {MaxFrame: 1 << 20, SocketBuffer: 32 << 10, Conns: 2},
	} {
		t.Run(name, func(t *testing.T) {
			linktest.Run(t, func(testing.TB) p2p.Transport { return New(local(cfg)) })
		})
	}
}

func BenchmarkLinks(b *testing.B) {
	linktest.Bench(b, func(testing.TB) p2p.Transport { return New(local(Config{})) })
}
