// Package gate guards memory that an engine reads or writes on behalf of somebody else, who may
// take it back at any time.
package gate

import "sync"

// Gate is a piece of host memory. The engine accesses it between Enter and Leave; after Close it
// does not any more.
type Gate struct {
	mu   sync.RWMutex
	mem  []byte
	open bool
}

// Open makes g a gate to b. Nobody may be using g.
func (g *Gate) Open(b []byte) { g.mem, g.open = b, true }

// Enter begins an access to n bytes at off, which must be in range, and returns them; false: g is
// closed. After success Leave must follow soon: Close waits for it.
func (g *Gate) Enter(off, n int64) ([]byte, bool) {
	g.mu.RLock()
	if !g.open {
		g.mu.RUnlock()
		return nil, false
	}
	return g.mem[off : off+n : off+n], true
}

// Leave ends an access.
func (g *Gate) Leave() { g.mu.RUnlock() }

// Close ends all access, and waits for what is under way. It reports whether g was open.
func (g *Gate) Close() bool {
	g.mu.Lock()
	was := g.open
	g.open, g.mem = false, nil
	g.mu.Unlock()
	return was
}

// IsOpen reports whether g is open.
func (g *Gate) IsOpen() bool {
	g.mu.RLock()
	defer g.mu.RUnlock()
	return g.open
}
