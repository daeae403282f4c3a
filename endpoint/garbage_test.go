//go:build !race

package endpoint

import (
	"runtime"
	"testing"
	"time"
	"unsafe"

	"tutti/mem"
)

// Warm, a small operation leaves its Future to the collector, which the program may keep, and
// nothing else.
func TestOnlyFuturesAreGarbage(t *testing.T) {
	const rounds, depth, size = 100, 16, 96
	if n := unsafe.Sizeof(Future{}); n > size {
		t.Errorf("a Future has %d bytes, want at most %d", n, size)
	}
	_, e, p, q := pair(t, Config{Conns: 1})
	buf := make([]byte, 64)
	if _, err := e.Register("r", mem.Host(buf, mem.Anywhere), RegionConfig{Rights: Read | Write}); err != nil {
		t.Fatal(err)
	}
	local := make([]byte, len(buf))
	cases := []struct {
		name    string
		futures int
		start   func() []*Future
	}{
		{"messages that a recv waits for", 2, func() []*Future { return []*Future{q.Recv(local), p.Send(buf)} }},
		{"messages that wait for a recv", 2, func() []*Future { return []*Future{p.Send(buf), q.Recv(local)} }},
		{"reads", 1, func() []*Future { return []*Future{p.Read(local, "r", 0)} }},
		{"writes", 1, func() []*Future { return []*Future{p.Write(local, "r", 0)} }},
	}
	if *allDirect { // reads and writes have requests of the device
		cases = cases[:2]
	}
	for _, c := range cases {
		futures := make([]*Future, 0, c.futures*depth)
		// A waiter that falls asleep allocates, more often on a busy machine, and so does the rest
		// of the process. So the best of many tries counts. The first one warms up.
		want := uint64(rounds * depth * c.futures * size)
		least := 100 * want
		late := time.Now().Add(patience)
		for try := 0; least > want+want/4 && (try < 50 || time.Now().Before(late)); try++ {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			for range rounds {
				futures = futures[:0]
				for range depth {
					futures = append(futures, c.start()...)
				}
				for _, f := range futures {
					if err := f.Wait(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
			}
			runtime.ReadMemStats(&after)
			least = min(least, after.TotalAlloc-before.TotalAlloc)
		}
		if least > want+want/4 {
			t.Errorf("%s: %d bytes in %d operations, %d are of Futures", c.name, least, rounds*depth, want)
		}
	}
}
