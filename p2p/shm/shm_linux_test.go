package shm

import (
	"testing"

	"tutti/p2p"
	"tutti/p2p/linktest"
)

func TestConformance(t *testing.T) {
	for name, cfg := range map[string]Config{"Default": {}, "Smallest": {RingBytes: 1}, "SleepSeldom": {SleepSeldom: true}} {
		t.Run(name, func(t *testing.T) {
			linktest.Run(t, func(testing.TB) p2p.Transport { return New(cfg) })
		})
	}
}

func BenchmarkLink(b *testing.B) {
	linktest.Bench(b, func(testing.TB) p2p.Transport { return New(Config{SleepSeldom: true}) })
}
