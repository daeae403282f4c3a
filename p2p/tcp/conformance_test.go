package tcp

import (
	"testing"

	"tutti/p2p"
	"tutti/p2p/linktest"
)

func TestConformance(t *testing.T) {
	small := func() *Transport {
		tr := tight(8<<10, Config{MaxFrame: MinFrame})
		tr.buffer = minBuffer
		return tr
	}
	for name, make := range map[string]func() *Transport{
		"default":           func() *Transport { return New(local(Config{})) },
		"small":             small,
		"big, small socket": func() *Transport { return tight(32<<10, Config{MaxFrame: 1 << 20}) },
	} {
		t.Run(name, func(t *testing.T) {
			linktest.Run(t, func(testing.TB) p2p.Transport { return make() })
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
