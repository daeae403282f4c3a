package linktest

import (
	"bytes"
	"errors"
	"slices"
	"testing"
	"time"

	"tutti/mem"
	"tutti/p2p"
)

// A Device is a device whose memory is put and got, such as a GPU of a fake driver.
type Device interface {
	Location() mem.Location
	Alloc(n int) (mem.Memory, error)
	Free(m mem.Memory) error
	Bytes(m mem.Memory) []byte // as other devices see it
}

// Alloc returns memory of a device with the contents b, until the end of the test.
func Alloc(tb testing.TB, d Device, b []byte) mem.Memory {
	tb.Helper()
	m, err := d.Alloc(len(b))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := d.Free(m); err != nil {
			tb.Error(err)
		}
	})
	copy(d.Bytes(m), b)
	return m
}

// RunDevice tests a transport with links that take local memory of d, as Run does.
func RunDevice(t *testing.T, d Device, open func(tb testing.TB) p2p.Transport) {
	s := suite{open}
	t.Run("Local", func(t *testing.T) { s.device(t, d) })
}

// TakesDevices reports whether a link says that it takes local memory of devices.
func TakesDevices(l p2p.Link) bool {
	p, ok := l.(p2p.Pather)
	return ok && p.Paths()[0].Spec.Local&p2p.DeviceMemory != 0
}

// device: local memory of a device is put and got as that of the host, by a link that reaches it.
// One that does not reach it says so, and changes nothing of it.
func (s suite) device(t *testing.T, d Device) {
	x, y := Sides(t, s.open)
	if !TakesDevices(x.Link) {
		t.Fatalf("links of %s do not take memory of devices", x.Node.T.Name())
	}
	const guard = 64
	sizes := edges(x.MaxFrame())
	top := slices.Max(sizes)
	r := y.Alloc(t, top)
	to := y.Expose(t, r, 0, top, mem.Read|mem.Write)
	local := Alloc(t, d, make([]byte, top+2*guard))
	all := d.Bytes(local)
	longest := 0
	for late := time.Now().Add(Patience); longest < top; {
		for round, n := range sizes {
			m, off := local.Slice(guard, n), uint64(round*13%(top-n+1))
			clear(r.Bytes())
			fill(d.Bytes(m), round)
			err := x.Await(x.Start(func(id uint64) error { return x.Rma.Put(id, m, to, off, p2p.Signal{}) }))
			if errors.Is(err, errors.ErrUnsupported) {
				continue
			}
			if err != nil || !filled(r.Bytes()[off:][:n], round) {
				t.Fatalf("put of %d bytes at %d: other bytes have arrived, or none: %v", n, off, err)
			}
			clear(all)
			err = x.Await(x.Start(func(id uint64) error { return x.Rma.Get(id, m, to, off) }))
			if errors.Is(err, errors.ErrUnsupported) {
				continue
			}
			if err != nil || !filled(d.Bytes(m), round) {
				t.Fatalf("get of %d bytes at %d: other bytes have come, or none: %v", n, off, err)
			}
			if !bytes.Equal(all[:guard], make([]byte, guard)) || bytes.Count(all[guard+n:], []byte{0}) != guard+top-n {
				t.Fatalf("get of %d bytes at %d: bytes around them have changed", n, off)
			}
			longest = max(longest, n)
		}
		if time.Now().After(late) {
			t.Fatalf("no more than %d bytes were moved at a time, of %d", longest, top)
		}
	}
}

// locations: a link that does not take local memory of devices refuses it at once.
func (s suite) locations(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil || TakesDevices(x.Link) {
		return
	}
	to := y.Expose(t, y.Alloc(t, 4096), 0, 4096, mem.Read|mem.Write)
	m := mem.Device(1<<20, 4096, "cuda:0")
	for what, begin := range map[string]func(id uint64) error{
		"put": func(id uint64) error { return x.Rma.Put(id, m, to, 0, p2p.Signal{}) },
		"get": func(id uint64) error { return x.Rma.Get(id, m, to, 0) },
	} {
		if err := x.Await(x.Start(begin)); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s with memory of a device: %v", what, err)
		}
	}
}
