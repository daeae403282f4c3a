package endpoint

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"tutti/device"
	"tutti/endpoint/internal/gate"
	"tutti/mem"
)

// accelerator copies between host memory and a device.
type accelerator struct {
	device.Device
	mu   sync.Mutex
	idle []device.Stream
}

// copy copies src to dst and waits for the end. There is no bound: a copy that the device has taken
// ends or fails, and until then the memory of both sides must stay.
func (a *accelerator) copy(dst, src mem.Memory) error {
	s, err := a.stream()
	if err != nil {
		return err
	}
	if err = s.Copy(dst, src); err == nil {
		var e device.Event
		if e, err = s.Record(); err == nil {
			err = e.Wait(context.Background())
		}
	}
	if err != nil {
		return errors.Join(err, s.Close())
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.idle = append(a.idle, s)
	return nil
}

// stream returns a stream that is not in use.
func (a *accelerator) stream() (device.Stream, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := len(a.idle); n > 0 {
		s := a.idle[n-1]
		a.idle = a.idle[:n-1]
		return s, nil
	}
	return a.Stream()
}

// close closes the streams.
func (a *accelerator) close() (err error) {
	for _, s := range a.idle {
		err = errors.Join(err, s.Close())
	}
	a.idle = nil
	return err
}

// array is memory of a device. It implements gate.Device.
type array struct {
	a *accelerator
	m mem.Memory
}

func (x array) Load(dst []byte, off int64) error {
	return x.a.copy(mem.Host(dst, mem.Anywhere), x.m.Slice(int(off), len(dst)))
}

func (x array) Store(src []byte, off int64) error {
	return x.a.copy(x.m.Slice(int(off), len(src)), mem.Host(src, mem.Anywhere))
}

func (x array) Stage(n int) ([]byte, func(), error) {
	h, ok := x.a.Device.(device.HostAllocator)
	if !ok {
		return make([]byte, n), func() {}, nil
	}
	m, err := h.AllocHost(n)
	if err != nil {
		return nil, nil, err
	}
	return m.Bytes(), func() { h.FreeHost(m) }, nil
}

// open opens a gate to memory, which reach has accepted.
func (c *Context) open(g *gate.Gate, m mem.Memory) {
	if m.Loc().Host() {
		g.Open(m.Bytes())
	} else {
		g.OpenDevice(array{c.devices[m.Loc()], m})
	}
}

// exporter returns the device that has memory if it exports it; nil for memory of the host.
func (c *Context) exporter(m mem.Memory) device.Exporter {
	if m.Loc().Host() {
		return nil
	}
	e, _ := c.devices[m.Loc()].Device.(device.Exporter)
	return e
}

// reach returns an error if the context cannot access memory.
func (c *Context) reach(m mem.Memory) error {
	if m.Loc().Host() || c.devices[m.Loc()] != nil {
		return nil
	}
	return fmt.Errorf("memory at %s, of no device of the Context (ContextConfig.Devices): %w", m.Loc(),
		errors.ErrUnsupported)
}
