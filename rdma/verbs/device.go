//go:build cgo && linux

package verbs

/*
#cgo LDFLAGS: -ldl
#include "verbs.h"
#include <stdlib.h>
*/
import "C"

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/mem"
	"tutti/rdma"
)

// Provider finds the system's devices. Its methods may be called from any goroutine.
type Provider struct {
	fork   ForkSupport
	quirks rdma.Quirks // of all devices
}

var load = sync.OnceValues(func() (*Provider, error) {
	if why := C.tutti_load(); why != nil {
		return nil, fmt.Errorf("%w: %s", ErrUnavailable, C.GoString(why))
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, fmt.Errorf("%w: uname: %w", ErrUnavailable, err)
	}
	return &Provider{fork: prepareFork(forkCalls{
		state: func() int { return int(C.tutti_fork_state()) },
		init: func() error {
			if errno := syscall.Errno(C.tutti_fork_init()); errno != 0 {
				return errno
			}
			return nil
		},
	}, unix.ByteSliceToString(u.Release[:]))}, nil
})

// Load opens libibverbs, once in a process. Its error wraps ErrUnavailable and says what is
// missing. A machine without devices is no error.
func Load() (*Provider, error) { return load() }

// ForkSupport returns how registered memory survives a fork.
func (p *Provider) ForkSupport() ForkSupport { return p.fork }

// WithQuirks returns a provider of the same devices, which treats all of them as if they had these
// quirks, beside those that it knows: for devices that are missing in its table.
func (p *Provider) WithQuirks(q rdma.Quirks) *Provider {
	w := *p
	w.quirks.NoReset = w.quirks.NoReset || q.NoReset
	return &w
}

// DMABuf reports whether the library can register DMA buffers. The device and the kernel have to as
// well.
func (p *Provider) DMABuf() bool { return C.tutti_has_dmabuf() != 0 }

// found is a device of the library's list.
type found struct {
	name  string
	fit   bool // it has reliable connections
	known int  // devices in the list
}

func list() ([]found, error) {
	for n := 16; ; {
		names, transports := make([][C.TUTTI_NAME]C.char, n), make([]C.int, n)
		var count C.int
		if errno := C.tutti_devices(&names[0], &transports[0], C.int(n), &count); errno != 0 {
			return nil, &rdma.Error{Call: "list the devices", Device: "this machine", Errno: syscall.Errno(errno),
				Advice: advise(callList, syscall.Errno(errno))}
		}
		if int(count) > n {
			n = int(count) + 8
			continue
		}
		all := make([]found, count)
		for i := range all {
			all[i] = found{name: C.GoString(&names[i][0]), fit: transports[i] == C.TUTTI_IB}
		}
		return all, nil
	}
}

// Devices returns the names of the devices that have reliable connections, sorted. It implements
// rdma.Provider.
func (p *Provider) Devices() ([]string, error) {
	all, err := list()
	if e, ok := errors.AsType[*rdma.Error](err); ok && e.Errno == syscall.ENOSYS { // a kernel without ib_uverbs
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, d := range all {
		if d.fit {
			names = append(names, d.name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// Open implements rdma.Provider. Notify must not close the device.
func (p *Provider) Open(name string, notify func(rdma.Event)) (rdma.Device, error) {
	all, err := list()
	if err != nil {
		return nil, err
	}
	i := slices.IndexFunc(all, func(f found) bool { return f.name == name })
	switch {
	case i < 0:
		return nil, fmt.Errorf("open %s: %w", name, rdma.ErrNoDevice)
	case !all[i].fit:
		return nil, &rdma.Error{Call: "open", Device: name, Errno: syscall.EOPNOTSUPP,
			Advice: "it is no InfiniBand or RoCE device"}
	}
	d := &device{name: name, notify: notify, cqs: map[uint64]*cq{}}
	at := C.CString(name)
	defer C.free(unsafe.Pointer(at))
	if errno := C.tutti_open(at, &d.c); errno != 0 {
		return nil, d.wrong(callOpen, "open", errno)
	}
	if err = d.identify(); err == nil {
		d.attr.Quirks.NoReset = d.attr.Quirks.NoReset || p.quirks.NoReset
		d.async, err = newWatch(int(d.c.async_fd), name)
	}
	if err == nil {
		if d.completions, err = newWatch(int(d.c.channel_fd), "completion events of "+name); err != nil {
			d.async.close()
		}
	}
	if err != nil {
		C.tutti_close_device(&d.c)
		return nil, err
	}
	d.ended.Go(d.listen)
	d.ended.Go(d.wakes)
	return d, nil
}

// device is an open device.
type device struct {
	name   string
	notify func(rdma.Event)
	attr   rdma.Attributes
	c      C.tutti_device

	async       *watch
	completions *watch         // events of completion queues
	ended       sync.WaitGroup // listen and wakes

	removed atomic.Bool

	mu     sync.RWMutex // held for reading during calls on the context
	closed bool
	used   atomic.Int64 // open objects

	cqsMu sync.Mutex // held during calls of wake functions
	cqs   map[uint64]*cq
	ids   uint64
}

// enter begins a call; leave follows if it returns nil.
func (d *device) enter(call string) error {
	d.mu.RLock()
	if err := d.usable(call, d.closed); err != nil {
		d.mu.RUnlock()
		return err
	}
	return nil
}

func (d *device) leave() { d.mu.RUnlock() }

// usable returns the error of a call on something of d, if it was closed or d was removed.
func (d *device) usable(call string, closed bool) error {
	switch {
	case closed:
		return fmt.Errorf("rdma: %s on %s: %w", call, d.name, rdma.ErrClosed)
	case d.removed.Load():
		return fmt.Errorf("rdma: %s on %s: %w", call, d.name, rdma.ErrRemoved)
	}
	return nil
}

// wrong returns the error of a call that failed with errno.
func (d *device) wrong(kind callKind, call string, errno C.int) error {
	if errno < 0 {
		errno = -errno
	}
	if d.removed.Load() {
		return d.usable(call, false)
	}
	e := syscall.Errno(errno)
	return &rdma.Error{Call: call, Device: d.name, Errno: e, Advice: advise(kind, e)}
}

// destroyed returns the error of a call that destroys something. A device that was removed took all
// with it.
func (d *device) destroyed(call string, errno C.int) error {
	if errno == 0 || d.removed.Load() {
		return nil
	}
	return d.wrong(callDestroy, call, errno)
}

// identify reads the attributes.
func (d *device) identify() error {
	var a C.tutti_attributes
	if errno := C.tutti_query_device(d.c.context, &a); errno != 0 {
		return d.wrong(callQuery, "query the device", errno)
	}
	d.attr = rdma.Attributes{Ports: int(a.ports), MaxQPs: int(a.max_qp), MaxQPDepth: int(a.max_qp_wr),
		MaxSegments: int(a.max_sge), MaxCQDepth: int(a.max_cqe), MaxMRs: int(a.max_mr),
		MaxMRBytes: uint64(a.max_mr_size),
		MaxReads:   int(a.max_reads), Vendor: uint32(a.vendor), Part: uint32(a.part),
		Firmware: C.GoString(&a.firmware[0]),
		GUID:     uint64(a.guid), NUMANode: KernelNUMANode(sysfs, d.name),
		Quirks: quirksOf(driverOf(sysfs, d.name), uint32(a.vendor))}
	return nil
}

// Name implements rdma.Device.
func (d *device) Name() string { return d.name }

// Attributes implements rdma.Device.
func (d *device) Attributes() rdma.Attributes { return d.attr }

// port begins a call for a port.
func (d *device) port(call string, port int) error {
	if port < 1 || port > d.attr.Ports {
		return &rdma.Error{Call: call, Device: d.name, Errno: syscall.EINVAL,
			Advice: fmt.Sprintf("it has ports 1 to %d", d.attr.Ports)}
	}
	return d.enter(call)
}

// Port implements rdma.Device.
func (d *device) Port(port int) (rdma.Port, error) {
	call := fmt.Sprintf("query port %d", port)
	if err := d.port(call, port); err != nil {
		return rdma.Port{}, err
	}
	defer d.leave()
	var p C.tutti_port
	if errno := C.tutti_query_port(d.c.context, C.int(port), &p); errno != 0 {
		return rdma.Port{}, d.wrong(callQuery, call, errno)
	}
	state := rdma.PortUnknown
	if p.state >= 1 && p.state <= 4 {
		state = rdma.PortState(p.state)
	}
	return rdma.Port{State: state, Ethernet: p.ethernet != 0, MTU: int(p.mtu), LID: uint16(p.lid),
		GRHRequired: p.grh != 0, GIDs: int(p.gids), MaxBytes: uint64(p.max_bytes),
		Gbps: gbps(int(p.width), int(p.speed))}, nil
}

// GIDs implements rdma.Device.
func (d *device) GIDs(port int) ([]rdma.GIDEntry, error) {
	p, err := d.Port(port)
	if err != nil {
		return nil, err
	}
	call := fmt.Sprintf("query addresses of port %d", port)
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	var all []rdma.GIDEntry
	for i := range p.GIDs {
		var g C.tutti_gid
		switch errno := C.tutti_query_gid(d.c.context, C.int(port), C.int(i), &g); syscall.Errno(errno) {
		case 0:
			e := rdma.GIDEntry{Index: i, GID: *(*rdma.GID)(unsafe.Pointer(&g.gid)), Type: rdma.GIDType(g._type)}
			if e.GID == (rdma.GID{}) {
				continue
			}
			if nic, err := net.InterfaceByIndex(int(g.ifindex)); g.ifindex > 0 && err == nil {
				e.Interface = nic.Name
			}
			all = append(all, e)
		case syscall.ENODATA:
		case syscall.ENOSYS, syscall.EOPNOTSUPP: // a library or a kernel without the call
			if e, ok := sysfsGID(sysfs, d.name, port, i); ok {
				all = append(all, e)
			}
		default:
			return nil, d.wrong(callQuery, call, errno)
		}
	}
	return all, nil
}

// mr is registered memory.
type mr struct {
	d          *device
	memory     mem.Memory // keeps the bytes reachable
	mr         *C.struct_ibv_mr
	lkey, rkey C.uint32_t
	closed     atomic.Bool
}

// rights returns what the library calls access, or false if it makes no sense.
func rights(access rdma.Access) (bits, relaxed uint32, ok bool) {
	const known = rdma.LocalWrite | rdma.RemoteWrite | rdma.RemoteRead | rdma.RemoteAtomic
	if access&rdma.RelaxedOrdering != 0 {
		relaxed = 1
		access &^= rdma.RelaxedOrdering
	}
	ok = access&^known == 0 && (access&(rdma.RemoteWrite|rdma.RemoteAtomic) == 0 || access&rdma.LocalWrite != 0)
	for i, right := range []rdma.Access{rdma.LocalWrite, rdma.RemoteWrite, rdma.RemoteRead, rdma.RemoteAtomic} {
		if access&right != 0 {
			bits |= 1 << i
		}
	}
	return bits, relaxed, ok
}

// Register implements rdma.Device. Exactly the bytes of m are registered, also if they begin within
// a page.
func (d *device) Register(m mem.Memory, access rdma.Access) (rdma.MR, error) {
	call := fmt.Sprintf("register %d bytes", m.Len())
	if !m.Loc().Host() {
		return nil, &rdma.Error{Call: call + " at " + string(m.Loc()), Device: d.name, Errno: syscall.EINVAL,
			Advice: "device memory needs RegisterDMABuf"}
	}
	return d.register(call, uint64(m.Len()), m, access, func(r *mr, bits, relaxed uint32) C.int {
		at := unsafe.Pointer(unsafe.SliceData(m.Bytes()))
		return C.tutti_reg_mr(d.c.pd, at, C.uint64_t(m.Len()), C.uint32_t(bits), C.int(relaxed), &r.mr, &r.lkey,
			&r.rkey)
	})
}

// RegisterDMABuf implements rdma.Device.
func (d *device) RegisterDMABuf(fd int, offset, n, address uint64, access rdma.Access) (rdma.MR, error) {
	call := fmt.Sprintf("register %d bytes of a DMA buffer", n)
	if fd < 0 {
		return nil, d.wrong(callRegister, call, C.int(syscall.EBADF))
	}
	return d.register(call, n, mem.Memory{}, access, func(r *mr, bits, relaxed uint32) C.int {
		return C.tutti_reg_dmabuf(d.c.pd, C.int(fd), C.uint64_t(offset), C.uint64_t(n), C.uint64_t(address),
			C.uint32_t(bits), C.int(relaxed), &r.mr, &r.lkey, &r.rkey)
	})
}

// register makes a region with the call of do.
func (d *device) register(call string, n uint64, m mem.Memory, access rdma.Access,
	do func(r *mr, bits, relaxed uint32) C.int) (rdma.MR, error) {
	bits, relaxed, ok := rights(access)
	switch {
	case !ok:
		return nil, &rdma.Error{Call: call, Device: d.name, Errno: syscall.EINVAL,
			Advice: "RemoteWrite and RemoteAtomic need LocalWrite"}
	case n == 0 || n > d.attr.MaxMRBytes:
		return nil, &rdma.Error{Call: call, Device: d.name, Errno: syscall.EINVAL,
			Advice: fmt.Sprintf("it registers 1 to %d bytes", d.attr.MaxMRBytes)}
	}
	if err := d.enter(call); err != nil {
		return nil, err
	}
	defer d.leave()
	r := &mr{d: d, memory: m}
	if errno := do(r, bits, relaxed); errno != 0 {
		return nil, d.wrong(callRegister, call, errno)
	}
	d.used.Add(1)
	return r, nil
}

// LocalKey implements rdma.MR.
func (r *mr) LocalKey() uint32 { return uint32(r.lkey) }

// RemoteKey implements rdma.MR.
func (r *mr) RemoteKey() uint32 { return uint32(r.rkey) }

// Close implements rdma.MR.
func (r *mr) Close() error {
	const call = "deregister memory"
	if r.closed.Swap(true) {
		return r.d.usable(call, true)
	}
	if err := r.d.destroyed(call, C.tutti_dereg_mr(r.mr)); err != nil {
		r.closed.Store(false)
		return err
	}
	r.memory = mem.Memory{}
	r.d.used.Add(-1)
	return nil
}

// Close implements rdma.Device.
func (d *device) Close() error {
	const call = "close"
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return d.usable(call, true)
	}
	if n := d.used.Load(); n > 0 {
		d.mu.Unlock()
		return &rdma.Error{Call: call, Device: d.name, Errno: syscall.EBUSY,
			Advice: fmt.Sprintf("close its queue pairs, completion queues and memory regions first (%d are open)", n)}
	}
	d.closed = true
	d.mu.Unlock()
	d.async.close()
	d.completions.close()
	d.ended.Wait()
	return d.destroyed(call, C.tutti_close_device(&d.c))
}
