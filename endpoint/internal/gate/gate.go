// Package gate guards memory that an engine reads or writes for another owner, which may
// take it back at any time.
package gate

import "sync"

// Gate is a piece of host memory, or of a device. The engine accesses it between Enter and Leave;
// after Close it does not any more.
type Gate struct {
	mu   sync.RWMutex
	mem  []byte
	dev  Device
	open bool
}

// Device is memory that the processor cannot access.
type Device interface {
	// Load copies from off to dst, and Store src to off. They wait for the end of the copy.
	Load(dst []byte, off int64) error
	Store(src []byte, off int64) error
	// Stage returns n bytes of host memory that copies are fast with. The caller calls free in the
	// end.
	Stage(n int) (b []byte, free func(), err error)
}

// Open makes g a gate to b. g must not be in use.
func (g *Gate) Open(b []byte) { g.mem, g.open = b, true }

// OpenDevice is Open for memory of a device. Enter gives no bytes then.
func (g *Gate) OpenDevice(d Device) { g.dev, g.open = d, true }

// Device returns the argument of OpenDevice, nil for host memory. It does not change with Close.
func (g *Gate) Device() Device { return g.dev }

// Load copies from off to dst, unless g is closed. An error is the device's.
func (g *Gate) Load(dst []byte, off int64) (ok bool, err error) {
	b, ok := g.Enter(off, int64(len(dst)))
	if !ok {
		return false, nil
	}
	defer g.Leave()
	if g.dev != nil {
		err = g.dev.Load(dst, off)
	} else {
		copy(dst, b)
	}
	return err == nil, err
}

// Store copies src to off, unless g is closed. An error is the device's.
func (g *Gate) Store(src []byte, off int64) (ok bool, err error) {
	b, ok := g.Enter(off, int64(len(src)))
	if !ok {
		return false, nil
	}
	defer g.Leave()
	if g.dev != nil {
		err = g.dev.Store(src, off)
	} else {
		copy(b, src)
	}
	return err == nil, err
}

// Enter begins an access to n bytes at off, which must be in range, and returns them; false: g is
// closed. After success Leave must follow soon: Close waits for it.
func (g *Gate) Enter(off, n int64) ([]byte, bool) {
	g.mu.RLock()
	if !g.open {
		g.mu.RUnlock()
		return nil, false
	}
	if g.dev != nil {
		return nil, true
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
