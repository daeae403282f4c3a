//go:build linux

package torture

import (
	"sync"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/mem"
	"tutti/pg"
)

// deviceMemory is a pool in the memory of a device, and streams for its buffers. The device delays
// its work, and its memory has any contents while it is written.
type deviceMemory struct {
	*pool
	d  *devicetest.Late
	at mem.Memory

	mu      sync.Mutex
	streams map[*handle]device.Stream
}

// newDevice returns a device for the ranks of a process.
func newDevice(seed uint64) *devicetest.Late {
	return devicetest.NewLate("cuda:0", seed, 20*time.Microsecond)
}

func newDeviceMemory(d *devicetest.Late, n int) (*deviceMemory, error) {
	at, err := d.Alloc(n)
	if err != nil {
		return nil, err
	}
	return &deviceMemory{pool: newPool("device memory", d.Bytes(at)), d: d, at: at,
		streams: map[*handle]device.Stream{}}, nil
}

func (m *deviceMemory) free() {
	m.stop(nil)
	m.d.Free(m.at)
}

// stream returns the stream of a group's calls, nil if there is none.
func (m *deviceMemory) stream(h *handle) device.Stream {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.streams[h] == nil {
		s, err := m.d.Stream()
		if err != nil {
			return nil
		}
		m.streams[h] = s
	}
	return m.streams[h]
}

// stop closes the stream of a group whose calls are over, or all.
func (m *deviceMemory) stop(h *handle) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for of, s := range m.streams {
		if h == nil || h == of {
			s.Close()
			delete(m.streams, of)
		}
	}
}

// has reports whether b is memory of the device.
func (m *deviceMemory) has(b []byte) bool {
	if len(b) == 0 {
		return false
	}
	at, from := uintptr(unsafe.Pointer(&b[0])), uintptr(unsafe.Pointer(&m.mem[0]))
	return at >= from && at < from+uintptr(len(m.mem))
}

// buffer describes b, which is memory of the device.
func (m *deviceMemory) buffer(b []byte, dt pg.DType, s device.Stream) pg.Buffer {
	at := int(uintptr(unsafe.Pointer(&b[0])) - uintptr(unsafe.Pointer(&m.mem[0])))
	return pg.DeviceBuffer(m.at.Slice(at, len(b)), dt, s)
}

// place chooses the kinds of memory of a call's two buffers: those of a collective are on one
// device, or on none.
func (p *Part) place() (dst, src Mem) {
	if p.Dst == MemDevice || p.Src == MemDevice {
		return MemDevice, MemDevice
	}
	return p.Dst, p.Src
}
