package tcp

import (
	"fmt"
	"testing"

	"tutti/internal/ports"
	"tutti/p2p"
	"tutti/p2p/linktest"
)

func TestConformance(t *testing.T) {
	small := func(cfg Config) *Transport {
		cfg.MaxFrame = MinFrame
		tr := tight(8<<10, cfg)
		tr.buffer = minBuffer
		return tr
	}
	big := func(cfg Config) *Transport {
		cfg.MaxFrame = 1 << 20
		return tight(32<<10, cfg)
	}
	for name, make := range map[string]func(Config) *Transport{
		"default":           func(cfg Config) *Transport { return New(local(cfg)) },
		"small":             small,
		"big, small socket": big,
	} {
		t.Run(name, func(t *testing.T) {
			linktest.Run(t, func(tb testing.TB) p2p.Transport {
				held := must(ports.Reserve()) // no other process listens where a transport has been closed
				tb.Cleanup(func() { held.Close() })
				return make(Config{Ports: fmt.Sprint(held.Port)})
			})
		})
	}
}

func TestKilledPeers(t *testing.T) {
	for name, cfg := range map[string]Config{"default": {}, "small": {MaxFrame: MinFrame}} {
		t.Run(name, func(t *testing.T) {
			linktest.RunKilled(t, func(testing.TB) p2p.Transport { return New(local(cfg)) })
		})
	}
}

func BenchmarkLinks(b *testing.B) {
	linktest.Bench(b, func(testing.TB) p2p.Transport { return New(local(Config{})) })
}
