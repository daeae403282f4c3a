// Package soft is an RDMA provider in memory, for tests. It implements package rdma with the rules
// of reliable connections: states, rights, bounds, limits of queues, retries, errors and flushes.
//
// A Fabric has devices with ports. All that happens in it is a sequence of steps: a part of a
// request's data is placed, a completion becomes visible, an event is reported. The next step is
// chosen at random from a seed, so that completions come late and in any order between queue pairs.
// With Config.Manual the test runs the steps, and the same calls have the same results; otherwise a
// goroutine of the fabric does.
//
// The data of a write may be placed before that of earlier requests, and its end before the rest,
// as on a network with several paths. Completions keep the order of the requests.
//
// Faults are injected with Config.Faults, and by the methods of Fabric: ports go down and come
// back, with other addresses on request, devices disappear, queue pairs fail. Config.ReuseNumbers
// gives a queue pair the number of the one that was destroyed last.
//
// A send queue is as strict as that of the strictest device: the place of a request is free again
// when a completion of it, or of a later request of the same queue pair, was polled.
package soft

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"

	"tutti/rdma"
)

// Config describes a Fabric.
type Config struct {
	Seed    uint64
	Manual  bool
	Devices int // named soft0, soft1, ...; 0 means 2
	Ports   int // of a device; 0 means 1
	// Attributes are the limits of all devices. Zero values have defaults.
	Attributes   rdma.Attributes
	Inline       int // bytes that a queue pair takes at most; 0 means 220
	ReuseNumbers bool
	// ReuseKeys gives a memory region the key of the one that was deregistered last.
	ReuseKeys bool
	// Late makes completions and data late: the next step is one that makes progress visible only
	// once in so many. 0 and 1 have no effect.
	Late int
	// Delayed names devices. The data of a write to one of them becomes visible when the device
	// completes a receive, serves a read, or ends a registration or a queue pair, whenever the
	// write completes.
	Delayed []string
	Faults  Faults
}

// Faults are asked, with the fabric's lock held, whether a call or a request fails. They must not
// call the fabric. A nil function fails nothing.
type Faults struct {
	// Post is asked before a request is posted: i counts those of the chain. The chain ends with an
	// error.
	Post func(device string, qp uint32, i int) syscall.Errno
	// Request is asked when a request begins: it ends with the result, unless that is Success. Some
	// of its data may have been placed.
	Request func(device string, qp uint32, r *rdma.SendRequest) rdma.Status
	// Call is asked before objects are made, and before queue pairs change their states or are
	// destroyed.
	Call func(device, call string) syscall.Errno
}

// Fabric is a network of devices. Its methods may be called from any goroutine.
type Fabric struct {
	cfg Config

	mu      sync.Mutex
	changed sync.Cond // there may be something to do, or a callback has returned
	rng     *rand.Rand
	devices []*hardware
	lanes   []*lane // with something to do
	events  []event // not yet reported
	keys    uint32
	free    []uint32 // keys of memory regions that were deregistered
	regions map[uint32]*mr
	clock   time.Duration // of a manual fabric
	calls   []call        // to be made without the lock
	calling any           // whose call is under way
	steps   uint64
	closed  bool
	ended   chan struct{}
	start   time.Time
}

// lane is a FIFO of a queue pair: its send queue, or completions that are not visible yet.
type lane struct {
	q       *qp
	send    bool // the send queue; else done
	cq      *cq
	done    []done
	listed  bool
	blocked time.Duration // by the fabric's clock: not before
}

// done is a completion on its way to a completion queue.
type done struct {
	c   rdma.Completion
	seq uint64 // the request's
}

// call is a call of a notify or wake function, of a device or a completion queue.
type call struct {
	of any
	do func()
}

type event struct {
	d *device
	e rdma.Event
}

// hardware is a device, which may be open several times.
type hardware struct {
	name    string
	ports   []port
	removed bool
	open    []*device
	qps     map[uint32]*qp
	free    []uint32 // numbers of destroyed queue pairs
	number  uint32   // the latest new one
	delayed []delayed
}

// delayed is data of a write that is not visible yet.
type delayed struct{ to, data []byte }

// settle makes the data of all writes to the device visible.
func (h *hardware) settle() {
	for _, w := range h.delayed {
		move(w.to, w.data)
	}
	h.delayed = h.delayed[:0]
}

type port struct {
	down bool
	gids []rdma.GIDEntry
}

// New makes a fabric. Close follows.
func New(cfg Config) *Fabric {
	if cfg.Devices == 0 {
		cfg.Devices = 2
	}
	if cfg.Ports == 0 {
		cfg.Ports = 1
	}
	if cfg.Inline == 0 {
		cfg.Inline = 220
	}
	a := &cfg.Attributes
	a.Ports = cfg.Ports
	for _, d := range []struct {
		at   *int
		want int
	}{{&a.MaxQPs, 1 << 16}, {&a.MaxQPDepth, 8192}, {&a.MaxSegments, 16}, {&a.MaxCQDepth, 1 << 20}, {&a.MaxMRs, 1 << 20},
		{&a.MaxReads, 16}} {
		if *d.at == 0 {
			*d.at = d.want
		}
	}
	if a.MaxMRBytes == 0 {
		a.MaxMRBytes = 1 << 40
	}
	f := &Fabric{cfg: cfg, rng: rand.New(rand.NewPCG(cfg.Seed, 12)), regions: map[uint32]*mr{},
		ended: make(chan struct{}), start: time.Now()}
	f.changed.L = &f.mu
	for i := range cfg.Devices {
		h := &hardware{name: fmt.Sprintf("soft%d", i), qps: map[uint32]*qp{}, number: 16}
		for p := range cfg.Ports {
			// 10.I.P.1, as a routable address, behind a link-local one.
			v4 := rdma.GID{10: 0xff, 11: 0xff, 12: 10, 13: byte(i), 14: byte(p), 15: 1}
			local := rdma.GID{0: 0xfe, 1: 0x80, 13: byte(i), 14: byte(p), 15: 1}
			h.ports = append(h.ports, port{gids: []rdma.GIDEntry{
				{Index: 0, GID: local, Type: rdma.RoCEv1, Interface: h.name},
				{Index: 1, GID: local, Type: rdma.RoCEv2, Interface: h.name},
				{Index: 2, GID: v4, Type: rdma.RoCEv2, Interface: h.name}}})
		}
		f.devices = append(f.devices, h)
	}
	if cfg.Manual {
		close(f.ended)
	} else {
		go f.run()
	}
	return f
}

// Close stops the fabric. Calls on its objects fail from then on, but their Close.
func (f *Fabric) Close() {
	f.mu.Lock()
	f.closed = true
	f.changed.Broadcast()
	f.mu.Unlock()
	<-f.ended
}

// Steps returns the number of steps so far.
func (f *Fabric) Steps() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.steps
}

// After one step in so many, at random, run lets other users of the fabric take the lock.
const together = 4

// run runs steps until Close. A device works while its users do: they see what is half done.
func (f *Fabric) run() {
	defer close(f.ended)
	f.mu.Lock()
	defer f.mu.Unlock()
	for !f.closed {
		if f.stepLocked() {
			if f.rng.IntN(together) == 0 {
				f.mu.Unlock()
				runtime.Gosched()
				f.mu.Lock()
			}
			continue
		}
		if at, ok := f.earliest(); ok {
			t := time.AfterFunc(at-f.now(), func() {
				f.mu.Lock() // after Wait has begun
				defer f.mu.Unlock()
				f.changed.Broadcast()
			})
			f.changed.Wait()
			t.Stop()
		} else {
			f.changed.Wait()
		}
	}
}

// Step runs one step of a manual fabric, and reports whether there was one. If all that is left
// waits for a repetition, its time comes.
func (f *Fabric) Step() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stepLocked() {
		return true
	}
	at, ok := f.earliest()
	if !ok {
		return false
	}
	f.clock = max(f.clock, at)
	return f.stepLocked()
}

// now returns the time by the fabric's clock.
func (f *Fabric) now() time.Duration {
	if f.cfg.Manual {
		return f.clock
	}
	return time.Since(f.start)
}

// earliest returns the time of the next repetition, false if there is none.
func (f *Fabric) earliest() (at time.Duration, ok bool) {
	for _, l := range f.lanes {
		if !ok || l.blocked < at {
			at, ok = l.blocked, true
		}
	}
	return at, ok
}

// list says that there may be something to do in l.
func (f *Fabric) list(l *lane) {
	if !l.listed {
		l.listed = true
		f.lanes = append(f.lanes, l)
		f.changed.Broadcast()
	}
}

// unlist removes lane i.
func (f *Fabric) unlist(i int) {
	last := len(f.lanes) - 1
	f.lanes[i].listed = false
	f.lanes[i] = f.lanes[last]
	f.lanes = f.lanes[:last]
}

// stepLocked runs a step, and reports whether there was one. It releases the lock during callbacks.
func (f *Fabric) stepLocked() bool {
	did := false
	if n := len(f.lanes) + len(f.events); n > 0 {
		switch i := f.rng.IntN(n); {
		case i >= len(f.lanes):
			e := f.events[0]
			f.events = f.events[1:]
			f.report(e)
			did = true
		default:
			did = f.try(i)
		}
	}
	if did {
		f.steps++
	}
	for len(f.calls) > 0 {
		c := f.calls[0]
		f.calls = f.calls[1:]
		f.calling = c.of
		f.mu.Unlock()
		c.do()
		f.mu.Lock()
		f.calling = nil
		f.changed.Broadcast()
	}
	return did
}

// quiet drops the calls of a device or a completion queue that have not begun, and waits for the
// end of one that has.
func (f *Fabric) quiet(of any) {
	f.calls = slices.DeleteFunc(f.calls, func(c call) bool { return c.of == of })
	for f.calling == of {
		f.changed.Wait()
	}
}

// try runs a step of lane i or, if that has to wait, of the next one that has not.
func (f *Fabric) try(i int) bool {
	if f.cfg.Late > 1 && f.rng.IntN(f.cfg.Late) > 0 { // another lane has the better chance
		for j, l := range f.lanes {
			if l.send {
				i = j
				break
			}
		}
	}
	now := f.now()
	for range len(f.lanes) {
		l := f.lanes[i]
		if l.blocked <= now {
			more := false
			if l.send {
				more = l.q.advance()
			} else {
				l.deliver()
				more = len(l.done) > 0
			}
			if !more {
				f.unlist(i)
			}
			return true
		}
		i = (i + 1) % len(f.lanes)
	}
	return false
}

// report calls notify for an event.
func (f *Fabric) report(e event) {
	if e.d.notify == nil || e.d.closed {
		return
	}
	f.calls = append(f.calls, call{e.d, func() { e.d.notify(e.e) }})
}

// happen has an event reported to all that have the device open.
func (f *Fabric) happen(h *hardware, e rdma.Event) {
	for _, d := range h.open {
		f.events = append(f.events, event{d, e})
	}
	f.changed.Broadcast()
}

// hardware returns a device by name.
func (f *Fabric) hardware(name string) *hardware {
	for _, h := range f.devices {
		if h.name == name {
			return h
		}
	}
	panic(fmt.Sprintf("soft: no device %q", name))
}

// SetPort takes a port down, or brings it back. Packets to and from a port that is down are lost.
func (f *Fabric) SetPort(device string, number int, up bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.hardware(device)
	if p := &h.ports[number-1]; p.down == up {
		p.down = !up
		kind := rdma.PortLost
		if up {
			kind = rdma.PortUp
		}
		f.happen(h, rdma.Event{Kind: kind, Port: number})
	}
}

// MoveGIDs moves all addresses of a port by n places in its table, as systems do with addresses
// that were removed and added again.
func (f *Fabric) MoveGIDs(device string, number, n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.hardware(device)
	for i := range h.ports[number-1].gids {
		h.ports[number-1].gids[i].Index += n
	}
	f.happen(h, rdma.Event{Kind: rdma.GIDsChanged, Port: number})
}

// Remove removes a device. Its queue pairs fail, and calls on its objects but Close do as well.
// Those who wait for completions are woken.
func (f *Fabric) Remove(device string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.hardware(device)
	if h.removed {
		return
	}
	h.removed = true
	for _, q := range h.sorted() {
		q.fail()
	}
	f.happen(h, rdma.Event{Kind: rdma.DeviceRemoved})
	for _, d := range h.open {
		d.removed = true
		for _, c := range d.cqs {
			c.ring()
		}
	}
}

// Restore brings back a device that was removed. It has to be opened again.
func (f *Fabric) Restore(device string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hardware(device).removed = false
}

// Break fails a queue pair, as a device does by itself.
func (f *Fabric) Break(device string, number uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if q := f.hardware(device).qps[number]; q != nil && q.state != rdma.StateReset {
		q.broken()
	}
}

// BreakAll fails all queue pairs of a device that are connected.
func (f *Fabric) BreakAll(device string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.hardware(device).sorted() {
		if q.state == rdma.StateReady {
			q.broken()
		}
	}
}

// Objects returns how many queue pairs, completion queues and memory regions there are.
func (f *Fabric) Objects() (qps, cqs, mrs int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range f.devices {
		for _, d := range h.open {
			cqs += len(d.cqs)
		}
		qps += len(h.qps)
	}
	return qps, cqs, len(f.regions)
}

// sorted returns the queue pairs in the order of their numbers.
func (h *hardware) sorted() []*qp {
	return slices.SortedFunc(maps.Values(h.qps), func(a, b *qp) int { return cmp.Compare(a.number, b.number) })
}
