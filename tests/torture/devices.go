//go:build linux

package torture

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/p2p"
	"tutti/p2p/registry"
	"tutti/p2p/tcp"
	"tutti/p2p/verbs"
	"tutti/pg"
	"tutti/rdma/soft"
)

// noRank is the rank of no connection.
const noRank = -2

// devicesOf is the number of devices of a rank. The last one is always there, because a rank cannot
// join without any.
const devicesOf = 3

// devices are RDMA devices in memory, devicesOf for each rank of jobs whose ranks share this
// process, and the connections between those ranks and with the store.
type devices struct {
	fabric *soft.Fabric
	refuse atomic.Pointer[string] // the device that makes no objects

	mu    sync.Mutex
	apart int // the rank without connections
	wires map[*wire]bool
	relay net.Listener
}

// wire is a connection between two ranks, or of one with the store.
type wire struct {
	from, to  int
	near, far net.Conn // the ends here
}

// softLinks is the transport over RDMA devices under the name of the row of newDevices.
type softLinks struct{ *verbs.Transport }

func (softLinks) Name() string { return "soft" }

// newDevices makes the devices, and adds the transport "soft" until the end of the test.
func newDevices(t *testing.T) *devices {
	d := &devices{apart: noRank, wires: map[*wire]bool{}}
	var err error
	if d.relay, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	d.fabric = soft.New(soft.Config{Seed: rand.Uint64(), Devices: devicesOf * maxRanks, Late: 3, ReuseKeys: true,
		ReuseNumbers: true, Faults: soft.Faults{Call: func(device, call string) syscall.Errno {
			if at := d.refuse.Load(); at != nil && *at == device && !strings.HasPrefix(call, "query") {
				return syscall.ENOMEM
			}
			return 0
		}}})
	remove := registry.Add(registry.Kind{Name: "soft", Reach: registry.Network,
		Works: func(registry.Options) error { return nil },
		New: func(o registry.Options) (p2p.Transport, error) {
			return softLinks{verbs.New(verbs.Config{Provider: d.fabric, Devices: o.RDMADevices,
				Exporter: registry.Exporter(o.Devices),
				TCP: tcp.Config{Interfaces: "127.0.0.1", Logger: o.Logger, Dial: o.Dial, PeerTimeout: o.PeerTimeout,
					IdleTimeout: o.IdleTimeout}})}, nil
		}})
	t.Cleanup(func() {
		remove()
		d.relay.Close()
	})
	return d
}

// name returns the name of a rank's device.
func name(rank, i int) string { return fmt.Sprintf("soft%d", devicesOf*rank+i) }

// of gives the devices of a rank, in the form of rdma.ParseDevices. It excludes those of others,
// because a list must not name a device which has just been removed.
func of(rank int) string {
	var others []string
	for r := range maxRanks {
		for i := range devicesOf {
			if r != rank {
				others = append(others, name(r, i))
			}
		}
	}
	return "^=" + strings.Join(others, ",")
}

// play starts a rank in this process, and returns the connection with it.
func (d *devices) play(rank int) net.Conn {
	mine, its := net.Pipe()
	change := func(c *pg.Config) {
		c.Getenv = func(name string) string {
			if name == "TUTTI_RDMA_DEVICES" {
				return of(rank)
			}
			return os.Getenv(name)
		}
		c.Dialer = func(ctx context.Context, dialer *net.Dialer, to int, address string) (net.Conn, error) {
			return d.dial(ctx, dialer, rank, to, address)
		}
		c.Logger = slog.New(slog.DiscardHandler)
	}
	go play(json.NewEncoder(its), json.NewDecoder(its), change, func(p *player) {
		if g := p.world.Load(); g != nil {
			go g.Close()
		}
	})
	return mine
}

// dial makes a connection of a rank, unless one of its ends is apart. It goes through this process,
// which can break it.
func (d *devices) dial(ctx context.Context, dialer *net.Dialer, from, to int, address string) (net.Conn, error) {
	far, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.apart == from || d.apart == to {
		far.Close()
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.EHOSTUNREACH}
	}
	mine, err := net.Dial("tcp", d.relay.Addr().String())
	if err != nil {
		far.Close()
		return nil, err
	}
	near, err := d.relay.Accept() // with the lock: it is the other end of mine
	if err != nil {
		far.Close()
		mine.Close()
		return nil, err
	}
	w := &wire{from, to, near, far}
	d.wires[w] = true
	copy := func(to, from net.Conn) {
		io.Copy(to, from)
		d.mu.Lock()
		defer d.mu.Unlock()
		d.cut(w)
	}
	go copy(near, far)
	go copy(far, near)
	return mine, nil
}

// cut breaks a connection. With the lock.
func (d *devices) cut(w *wire) {
	w.near.Close()
	w.far.Close()
	delete(d.wires, w)
}

// part breaks the connections of a rank, which makes no others until the next call.
func (d *devices) part(rank int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.apart = rank
	for w := range d.wires {
		if w.from == rank || w.to == rank {
			d.cut(w)
		}
	}
}

// fail has a device fail for a while.
func (d *devices) fail(f Fault) {
	at := name(f.Victim, f.Other)
	switch f.Kind {
	case "port", "move":
		d.fabric.SetPort(at, 1, false)
		time.Sleep(f.For)
		if f.Kind == "move" {
			d.fabric.MoveGIDs(at, 1, 1)
		}
		d.fabric.SetPort(at, 1, true)
	case "remove":
		d.fabric.Remove(at)
		time.Sleep(f.For)
		d.fabric.Restore(at)
	case "break":
		d.fabric.BreakAll(at)
	case "refuse":
		d.refuse.Store(&at)
		time.Sleep(f.For)
		d.refuse.CompareAndSwap(&at, nil)
	}
}
