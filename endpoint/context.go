package endpoint

import (
	"errors"
	"fmt"
	"runtime"
	"sync"

	"tutti/device"
	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
	"tutti/mem"
)

// Context has the goroutines that serve the connections of any number of endpoints.
type Context struct {
	mu     sync.Mutex
	loops  []*link.Loop
	next   int
	users  int
	closed bool

	devices map[mem.Location]*accelerator
}

// ContextConfig configures a Context.
type ContextConfig struct {
	// Loops is the number of goroutines, among which connections are divided. Default: half of
	// GOMAXPROCS, 1 to 4.
	Loops int
	// Devices are those whose memory the endpoints may use, in regions and operations. What does
	// not go by RDMA goes through host memory: 512 KiB for each direction of a connection that
	// needs it, of device.HostAllocator if the device is one. The devices must stay usable until
	// Close.
	Devices []device.Device
}

// NewContext starts a Context. Close ends it.
func NewContext(cfg ContextConfig) (*Context, error) {
	if cfg.Loops == 0 {
		cfg.Loops = min(max(runtime.GOMAXPROCS(0)/2, 1), 4)
	}
	if cfg.Loops < 0 {
		return nil, fmt.Errorf("endpoint: %d loops, want 1 or more", cfg.Loops)
	}
	c := &Context{devices: map[mem.Location]*accelerator{}}
	for _, d := range cfg.Devices {
		at := d.Location()
		if c.devices[at] != nil {
			return nil, fmt.Errorf("endpoint: two devices at %s", at)
		}
		c.devices[at] = &accelerator{Device: d}
	}
	for range cfg.Loops {
		l, err := link.NewLoop()
		if err != nil {
			c.Close()
			return nil, fmt.Errorf("endpoint: %w", err)
		}
		c.loops = append(c.loops, l)
	}
	return c, nil
}

// made reports whether NewContext has made c.
func (c *Context) made() bool { return c != nil && len(c.loops) > 0 }

// loop returns the loop for a new connection.
func (c *Context) loop() *link.Loop {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.next++
	return c.loops[c.next%len(c.loops)]
}

// conns is the default number of connections to a peer.
func (c *Context) conns() int { return min(len(c.loops), wire.MaxConns) }

// use counts an endpoint.
func (c *Context) use() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return fmt.Errorf("the context is closed: %w", ErrClosed)
	}
	c.users++
	return nil
}

func (c *Context) unuse() {
	c.mu.Lock()
	c.users--
	c.mu.Unlock()
}

// Close ends the goroutines, and waits for them. The endpoints must have been closed. Idempotent.
func (c *Context) Close() error {
	c.mu.Lock()
	if c.users > 0 {
		defer c.mu.Unlock()
		return fmt.Errorf("endpoint: %d endpoints of the context are open: close them first", c.users)
	}
	was := c.closed
	c.closed = true
	c.mu.Unlock()
	if was {
		return nil
	}
	for _, l := range c.loops {
		l.Close(ErrClosed)
	}
	var err error
	for _, a := range c.devices {
		err = errors.Join(err, a.close())
	}
	return err
}
