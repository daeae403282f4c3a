package soft

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"unsafe"

	"tutti/mem"
	"tutti/rdma"
)

// Devices implements rdma.Provider.
func (f *Fabric) Devices() (names []string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range f.devices {
		if !h.removed {
			names = append(names, h.name)
		}
	}
	return names, nil
}

// Open implements rdma.Provider.
func (f *Fabric) Open(name string, notify func(rdma.Event)) (rdma.Device, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range f.devices {
		if h.name != name || h.removed {
			continue
		}
		d := &device{f: f, hw: h, notify: notify}
		if err := d.may("open"); err != nil {
			return nil, err
		}
		h.open = append(h.open, d)
		return d, nil
	}
	return nil, fmt.Errorf("open %s: %w", name, rdma.ErrNoDevice)
}

// device is an open device. Its fields are under the fabric's lock.
type device struct {
	f       *Fabric
	hw      *hardware
	notify  func(rdma.Event)
	qps     int
	cqs     []*cq // in the order in which they were made
	mrs     int
	closed  bool
	removed bool // the hardware was, since Open
}

// may returns why a call cannot be made, or nil. With the fabric's lock, as the methods in lower
// case everywhere.
func (d *device) may(call string) error {
	switch {
	case d.closed || d.f.closed:
		return fmt.Errorf("%s on %s: %w", call, d.hw.name, rdma.ErrClosed)
	case d.removed || d.hw.removed:
		return fmt.Errorf("%s on %s: %w", call, d.hw.name, rdma.ErrRemoved)
	}
	if ask := d.f.cfg.Faults.Call; ask != nil {
		if errno := ask(d.hw.name, call); errno != 0 {
			return &rdma.Error{Call: call, Device: d.hw.name, Errno: errno}
		}
	}
	return nil
}

func (d *device) wrong(call string, errno syscall.Errno) error {
	return &rdma.Error{Call: call, Device: d.hw.name, Errno: errno}
}

// Name implements rdma.Device.
func (d *device) Name() string { return d.hw.name }

// Attributes implements rdma.Device.
func (d *device) Attributes() rdma.Attributes {
	a := d.f.cfg.Attributes
	a.GUID, a.NUMANode, a.Firmware = uint64(d.hw.name[len(d.hw.name)-1]), -1, "soft"
	return a
}

// Port implements rdma.Device.
func (d *device) Port(number int) (rdma.Port, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if err := d.may("query port"); err != nil {
		return rdma.Port{}, err
	}
	if number < 1 || number > len(d.hw.ports) {
		return rdma.Port{}, d.wrong(fmt.Sprintf("query port %d", number), syscall.EINVAL)
	}
	p := rdma.Port{State: rdma.PortActive, Ethernet: true, MTU: 4096, GIDs: 16, MaxBytes: 1 << 31, Gbps: 100}
	if d.hw.ports[number-1].down {
		p.State = rdma.PortDown
	}
	return p, nil
}

// GIDs implements rdma.Device.
func (d *device) GIDs(number int) ([]rdma.GIDEntry, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if err := d.may("query addresses"); err != nil {
		return nil, err
	}
	if number < 1 || number > len(d.hw.ports) {
		return nil, d.wrong(fmt.Sprintf("query addresses of port %d", number), syscall.EINVAL)
	}
	return slices.Clone(d.hw.ports[number-1].gids), nil
}

// gid returns the address with an index, false if there is none.
func (p *port) gid(index int) (rdma.GID, bool) {
	for _, e := range p.gids {
		if e.Index == index {
			return e.GID, true
		}
	}
	return rdma.GID{}, false
}

// mr is registered memory.
type mr struct {
	d        *device
	key      uint32
	base     uint64
	bytes    []byte
	mapped   []byte // the pages of bytes, if they are those of a DMA buffer
	access   rdma.Access
	released bool
}

// Register implements rdma.Device.
func (d *device) Register(m mem.Memory, access rdma.Access) (rdma.MR, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	call := fmt.Sprintf("register %d bytes", m.Len())
	if err := d.may(call); err != nil {
		return nil, err
	}
	if !m.Loc().Host() || m.Len() == 0 {
		return nil, d.wrong(call, syscall.EINVAL)
	}
	b := m.Bytes()
	r, err := d.register(call, uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), b, access)
	if err != nil {
		return nil, err
	}
	return r, nil
}

// RegisterDMABuf implements rdma.Device. It takes every descriptor that can be mapped for reading
// and writing.
func (d *device) RegisterDMABuf(fd int, offset, n, address uint64, access rdma.Access) (rdma.MR, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	call := fmt.Sprintf("register %d bytes of a DMA buffer", n)
	if err := d.may(call); err != nil {
		return nil, err
	}
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil {
		return nil, d.wrong(call, syscall.EBADF)
	}
	if size := uint64(max(st.Size, 0)); n == 0 || n > size || offset > size-n {
		return nil, d.wrong(call, syscall.EINVAL)
	}
	skip := offset % uint64(os.Getpagesize())
	pages, err := syscall.Mmap(fd, int64(offset-skip), int(skip+n), syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_SHARED)
	if err != nil {
		errno, _ := errors.AsType[syscall.Errno](err)
		return nil, d.wrong(call, errno)
	}
	r, err := d.register(call, address, pages[skip:], access)
	if err != nil {
		return nil, errors.Join(err, syscall.Munmap(pages))
	}
	r.mapped = pages
	return r, nil
}

func (d *device) register(call string, base uint64, b []byte, access rdma.Access) (*mr, error) {
	const remoteWrites = rdma.RemoteWrite | rdma.RemoteAtomic
	n := uint64(len(b))
	switch {
	case n == 0 || n > d.f.cfg.Attributes.MaxMRBytes || base+n < base:
		return nil, d.wrong(call, syscall.EINVAL)
	case access&remoteWrites != 0 && access&rdma.LocalWrite == 0:
		return nil, d.wrong(call, syscall.EINVAL)
	case d.mrs >= d.f.cfg.Attributes.MaxMRs:
		return nil, d.wrong(call, syscall.ENOMEM)
	}
	d.f.keys++
	key := d.f.keys<<8 | d.f.rng.Uint32()&0xff
	if n := len(d.f.free); n > 0 && d.f.cfg.ReuseKeys {
		key, d.f.free = d.f.free[n-1], d.f.free[:n-1]
	}
	r := &mr{d: d, key: key, base: base, bytes: b, access: access}
	d.f.regions[r.key] = r
	d.mrs++
	return r, nil
}

// LocalKey implements rdma.MR.
func (r *mr) LocalKey() uint32 { return r.key }

// RemoteKey implements rdma.MR.
func (r *mr) RemoteKey() uint32 { return r.key }

// Close implements rdma.MR.
func (r *mr) Close() error {
	r.d.f.mu.Lock()
	defer r.d.f.mu.Unlock()
	if r.released {
		return fmt.Errorf("deregister memory of %s: %w", r.d.hw.name, rdma.ErrClosed)
	}
	r.d.hw.settle()
	r.released = true
	r.d.mrs--
	delete(r.d.f.regions, r.key)
	if r.d.f.cfg.ReuseKeys {
		r.d.f.free = append(r.d.f.free, r.key)
	}
	r.bytes = nil
	if r.mapped != nil {
		return syscall.Munmap(r.mapped)
	}
	return nil
}

// reach returns n bytes at address of the region with key, if it is one of d and allows access.
func (d *device) reach(key uint32, address, n uint64, access rdma.Access) ([]byte, bool) {
	r := d.f.regions[key]
	if r == nil || r.d != d || r.access&access != access || address < r.base || n > uint64(len(r.bytes)) ||
		address-r.base > uint64(len(r.bytes))-n {
		return nil, false
	}
	return r.bytes[address-r.base:][:n], true
}

// wordsTo is the longest copy in bytes of which each aligned word is stored as a whole.
const wordsTo = 256

// move copies from src to dst, which have the same length. Aligned words of short copies, and the
// last one of others, are loaded and stored as a whole, and in ascending order, so that a program
// may poll for one.
func move(dst, src []byte) {
	if len(dst) == 0 || len(src) == 0 {
		return
	}
	to, from := unsafe.Pointer(unsafe.SliceData(dst)), unsafe.Pointer(unsafe.SliceData(src))
	n, words := len(src), 0
	if n%8 != 0 || uintptr(to)%8 != 0 || uintptr(from)%8 != 0 {
		copy(dst, src)
		return
	}
	if n > wordsTo {
		words = n - 8
		copy(dst[:words], src)
	}
	for i := words; i < n; i += 8 {
		atomic.StoreUint64((*uint64)(unsafe.Add(to, i)), atomic.LoadUint64((*uint64)(unsafe.Add(from, i))))
	}
}

// Close implements rdma.Device.
func (d *device) Close() error {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	switch {
	case d.closed:
		return fmt.Errorf("close %s: %w", d.hw.name, rdma.ErrClosed)
	case d.qps+len(d.cqs)+d.mrs > 0:
		return d.wrong(fmt.Sprintf("close with %d queue pairs, %d completion queues and %d memory regions", d.qps,
			len(d.cqs), d.mrs), syscall.EBUSY)
	}
	d.closed = true
	d.hw.open = slices.DeleteFunc(d.hw.open, func(o *device) bool { return o == d })
	d.f.quiet(d)
	return nil
}

// bytesAt returns the memory at an address of this process, which the caller of a provider promises
// to be allocated.
func bytesAt(address uint64, n int) []byte {
	p := *(*unsafe.Pointer)(unsafe.Pointer(&address))
	return unsafe.Slice((*byte)(p), n)
}
