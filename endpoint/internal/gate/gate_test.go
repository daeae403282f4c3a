package gate

import (
	"sync"
	"testing"
)

func TestClosedGateAdmitsNoUser(t *testing.T) {
	var g Gate
	if _, ok := g.Enter(0, 0); ok || g.IsOpen() {
		t.Error("a gate is open that was never opened")
	}
	g.Open(make([]byte, 10))
	b, ok := g.Enter(2, 3)
	if !ok || len(b) != 3 || cap(b) != 3 {
		t.Errorf("%d bytes with room for %d, %v", len(b), cap(b), ok)
	}
	g.Leave()
	if !g.IsOpen() || !g.Close() || g.IsOpen() || g.Close() {
		t.Error("Close does not say whether the gate was open")
	}
	if _, ok := g.Enter(0, 1); ok {
		t.Error("a closed gate is open")
	}
}

// No user is within a gate when Close has returned.
func TestCloseWaits(t *testing.T) {
	var g Gate
	b := make([]byte, 1)
	g.Open(b)
	var wg sync.WaitGroup
	inside := make(chan struct{}, 1)
	for range 4 {
		wg.Go(func() {
			var mu sync.Mutex
			for {
				m, ok := g.Enter(0, 1)
				if !ok {
					return
				}
				mu.Lock()
				_ = m[0] // the race detector compares it with the write below
				mu.Unlock()
				select {
				case inside <- struct{}{}:
				default:
				}
				g.Leave()
			}
		})
	}
	<-inside
	g.Close()
	b[0] = 1
	wg.Wait()
}
