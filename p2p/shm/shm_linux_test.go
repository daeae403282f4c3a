package shm

import (
	"testing"

	"tutti/p2p"
	"tutti/p2p/linktest"
)

func TestConformance(t *testing.T) {
	for name, cfg := range map[string]Config{"Default": {}, "Smallest": {RingBytes: 1}} {
		t.Run(name, func(t *testing.T) {
			linktest.Run(t, func(testing.TB) p2p.Transport { return New(cfg) })
		})
	}
	t.Run("SleepSeldom", func(t *testing.T) {
		linktest.Run(t, func(testing.TB) p2p.Transport { return linktest.SleepSeldom(New(Config{})) })
	})
}

func BenchmarkLink(b *testing.B) {
	b.Run("Default", func(b *testing.B) {
		linktest.Bench(b, func(testing.TB) p2p.Transport { return New(Config{}) })
	})
	b.Run("SleepSeldom", func(b *testing.B) {
		linktest.Bench(b, func(testing.TB) p2p.Transport { return linktest.SleepSeldom(New(Config{})) })
	})
}
