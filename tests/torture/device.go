//go:build linux

package torture

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
	"unsafe"

	"tutti/collectives"
	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/device/devicetest"
	"tutti/mem"
	"tutti/pg"
)

// A memoryDevice is a device of which the test accesses the memory.
type memoryDevice interface {
	device.Device
	Bytes(m mem.Memory) []byte
	// tape returns a stream of the program's own.
	tape() (tape, error)
}

// late is a memoryDevice whose streams cannot be captured.
type late struct{ *devicetest.Late }

// tape implements memoryDevice.
func (late) tape() (tape, error) { return nil, errors.ErrUnsupported }

// seat is what a rank has of the GPUs of its job. The zero seat is that of a rank without one.
type seat struct {
	device device.Device
	memory memoryDevice  // the same one
	all    device.Finder // of all ranks of this process
	leave  func() error  // when its groups are closed, and its memory is freed; nil: nothing is left
}

// sit gives a rank its device: a GPU of a driver that is made of these files, or a device that
// delays its work, and whose memory has any contents while it is written.
func (j *Job) sit(number int, seed uint64, from fake.Files) (*seat, error) {
	if j.GPUs != NoGPUs {
		return j.seat(number, from)
	}
	d := late{devicetest.NewLate("cuda:0", seed, 20*time.Microsecond)}
	return &seat{device: d, memory: d, all: device.List{d}}, nil
}

// list lists the devices of the rank alone.
func (s *seat) list() device.List {
	if s.device == nil {
		return device.List{}
	}
	return device.List{s.device}
}

func (s *seat) end() error {
	if s.leave == nil {
		return nil
	}
	return s.leave()
}

// deviceMemory is the memory that a rank has of a device, and streams for its buffers.
type deviceMemory struct {
	pools [4]*devicePool
	d     memoryDevice // nil: the pools are empty

	mu      sync.Mutex
	streams map[streamKey]*deviceStream
	used    []func() error // that free words
}

type devicePool struct {
	*pool
	at mem.Memory
}

// The pools of a rank.
const (
	keptPool    = iota // stays until the end of the job
	renewedPool        // is freed and allocated again by Renew
	shortPool          // for shortDevice
	graphPool          // for graphDevice
)

// streamKey names one of the two streams of a group.
type streamKey struct {
	of    *handle
	other bool
}

// A deviceStream is a stream of a group's buffers.
type deviceStream struct {
	device.Stream
	word mem.Memory // that it waits for: see hold
	next uint64     // value of it
}

// Sizes of memory in which there is always room. The short buffers of two programs fit into it, and
// so do those of a graph.
const (
	shortBytes = 4 << 20
	graphBytes = 4 << 20
)

func newDeviceMemory(d memoryDevice, n int) (m *deviceMemory, err error) {
	m = &deviceMemory{d: d, streams: map[streamKey]*deviceStream{}}
	for i, n := range []int{n, n, shortBytes, graphBytes} {
		if m.pools[i], err = newDevicePool(d, fmt.Sprintf("device memory %d", i), n); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// renew frees the memory that is to be renewed, and allocates it again.
func (m *deviceMemory) renew() (err error) {
	p := m.pools[renewedPool]
	if err := m.d.Free(p.at); err != nil {
		return err
	}
	m.pools[renewedPool], err = newDevicePool(m.d, p.name, p.at.Len())
	return err
}

// take returns n bytes of a pool, or of another if they are not free and the pool may be full.
func (m *deviceMemory) take(pool, n, skew int, owner string) (b *buffer, err error) {
	b, err = m.pools[pool].take(n, skew, owner)
	if full := errors.Is(err, errBusy) || b == nil && err == nil; full && pool < shortPool {
		b, err = m.pools[1-pool].take(n, skew, owner)
	} else if full && m.d != nil {
		err = fmt.Errorf("the torture test has too little memory: %d bytes are not free of %s", n, m.pools[pool].name)
	}
	return b, err
}

func newDevicePool(d memoryDevice, name string, n int) (*devicePool, error) {
	if d == nil {
		return &devicePool{pool: newPool(name, nil)}, nil
	}
	at, err := d.Alloc(n)
	if err != nil {
		return nil, err
	}
	return &devicePool{newPool(name, d.Bytes(at)), at}, nil
}

// free frees the memory, after all calls and groups have ended.
func (m *deviceMemory) free() error {
	if m.d == nil {
		return nil
	}
	err := m.stop(nil)
	for _, free := range m.used {
		err = errors.Join(err, free())
	}
	for _, p := range m.pools {
		err = errors.Join(err, m.d.Free(p.at))
	}
	return err
}

// stream returns one of the two streams of a group's calls, nil if there are none.
func (m *deviceMemory) stream(at streamKey) (*deviceStream, error) {
	if m.d == nil {
		return nil, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.streams[at] == nil {
		words, free, err := device.Words(m.d, 1)
		if err != nil {
			return nil, err
		}
		m.used = append(m.used, free)
		s, err := m.d.Stream()
		if err != nil {
			return nil, err
		}
		m.streams[at] = &deviceStream{Stream: s, word: words[0]}
	}
	return m.streams[at], nil
}

// hold has the stream come to what it is given next after some time.
func (s *deviceStream) hold(d time.Duration) error {
	s.next++
	v, word := s.next, s.word.Word(0)
	if err := s.WaitValue(s.word, v); err != nil {
		return err
	}
	time.AfterFunc(d, func() {
		for now := word.Load(); now < v && !word.CompareAndSwap(now, v); now = word.Load() {
		}
	})
	return nil
}

// stop closes the streams of a group whose calls are over, or all.
func (m *deviceMemory) stop(h *handle) (err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for at, s := range m.streams {
		if h == nil || h == at.of {
			err = errors.Join(err, s.Close())
			delete(m.streams, at)
		}
	}
	return err
}

// has reports whether b is memory of the device.
func (m *deviceMemory) has(b []byte) bool {
	return slices.ContainsFunc(m.pools[:], func(p *devicePool) bool { return p.has(b) })
}

func (p *devicePool) has(b []byte) bool {
	if len(b) == 0 || len(p.mem) == 0 {
		return false
	}
	at, from := uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&p.mem[0]))
	return at >= from && at < from+uintptr(len(p.mem))
}

// buffer describes b, which is memory of the device.
func (m *deviceMemory) buffer(b []byte, dt pg.DType, s *deviceStream) pg.Buffer {
	if s == nil {
		return pg.DeviceBuffer(m.place(b), dt, nil)
	}
	return pg.DeviceBuffer(m.place(b), dt, s.Stream)
}

// place returns where b is, which is memory of the device.
func (m *deviceMemory) place(b []byte) mem.Memory {
	p := m.pools[slices.IndexFunc(m.pools[:], func(p *devicePool) bool { return p.has(b) })]
	return p.at.Slice(int(uintptr(unsafe.Pointer(&b[0]))-uintptr(unsafe.Pointer(&p.mem[0]))), len(b))
}

// shortDevice is the memory of the buffers of short collectives that are in MemDevice. These have
// their buffers on GPUs at all ranks that have one, or at none (pg.Config.PeerDevices), even if the
// other device memory is in use.
const shortDevice Mem = "short device"

// graphDevice is the memory of the buffers of graphs.
const graphDevice Mem = "graph device"

// short reports whether the devices may do a step alone, in a group of some size.
func (s *Step) short() bool {
	n := s.Count * s.DType.Size()
	switch s.Op {
	case AllReduce:
		return n <= device.ShortVector
	case AllGather, ReduceScatter, AllToAll:
		return 2*n < collectives.LoadStoreMin(collectives.AllGather)
	}
	return false
}

// place chooses the kinds of memory of a call's two buffers: those of a collective are on one
// device, or on none.
func (s *Step) place(p *Part, gpus GPUs) (dst, src Mem) {
	if gpus != NoGPUs && s.short() && len(s.Ranks) > 0 {
		first := &s.Ranks[0]
		switch {
		case first.Dst == MemDevice || first.Src == MemDevice:
			return shortDevice, shortDevice
		case p.Dst == MemDevice || p.Src == MemDevice:
			return first.Dst, first.Src
		}
		return p.Dst, p.Src
	}
	if p.Dst == MemDevice || p.Src == MemDevice {
		return MemDevice, MemDevice
	}
	return p.Dst, p.Src
}

// renewDevice renews device memory, after all started operations: what frees it may wait for all
// streams of the device, as those of other ranks may wait for this one.
func (r *rank) renewDevice(ctx context.Context) {
	r.land(ctx, false)
	m := r.device
	if m.d == nil || r.shared && (r.job.GPUs == GPUsOne || r.job.GPUs == GPUsPairs) {
		return
	}
	if err := m.pools[renewedPool].check(); err != nil {
		r.find("store", "%v", err)
	}
	if err := r.timed("renewing device memory", r.job.Timeout, m.renew); err != nil {
		r.find("error", "renewing device memory: %v", err)
	}
}

// bring has the stream of a call come to it later, and write the input then: until then, others are
// there.
func (r *rank) bring(c *call, part *Part, input []byte) {
	if c.stream == nil || part.Hold == 0 {
		return
	}
	var from *buffer
	if r.device.has(input) {
		if from = r.take(MemDevice, len(input), c.d.size, c.name+": its input"); from != nil {
			c.bufs = append(c.bufs, from)
		}
	}
	err := c.stream.hold(part.Hold)
	if b := from.bytes(); err == nil && r.device.has(b) {
		copy(b, input)
		for i := range input {
			input[i] ^= 0x55
		}
		err = c.stream.Copy(r.device.place(input), r.device.place(b))
	}
	if c.held = true; err != nil {
		r.find("error", "%s: its stream: %v", c.name, err)
	}
}

// follow has the stream of a call copy the result: it comes to that after the operation.
func (r *rank) follow(c *call) {
	if !c.held || !r.device.has(c.dst) {
		return
	}
	to := r.take(MemDevice, len(c.dst), c.d.size, c.name+": its result")
	if to != nil {
		c.bufs = append(c.bufs, to)
	}
	if !r.device.has(to.bytes()) { // there was no room
		return
	}
	if err := c.stream.Copy(r.device.place(to.bytes()), r.device.place(c.dst)); err != nil {
		r.find("error", "%s: its stream: %v", c.name, err)
		return
	}
	c.copied = to.bytes()
}

// followed checks what follow has copied.
func (r *rank) followed(c *call) {
	if c.copied == nil {
		return
	}
	if text := c.d.compare(c.copied, c.dst); text != "" {
		r.find("wrong", "%s on %s: later work of its stream sees another result: %s", c.name, c.where(), text)
	}
}

// settle waits until the stream of a call does not use its buffers. If the call has failed, it may
// not have come to the operation within the second that this may take at most.
func (c *call) settle(limit time.Duration) error {
	if c.stream == nil {
		return nil
	}
	e, err := c.stream.Record()
	if err != nil {
		return fmt.Errorf("the stream of %s: %w", c.name, err)
	}
	for until := time.Now().Add(limit); !e.Done(); time.Sleep(50 * time.Microsecond) {
		if time.Now().After(until) {
			return fmt.Errorf("the stream of %s has not passed it within %v", c.name, limit)
		}
	}
	return nil
}
