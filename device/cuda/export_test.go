//go:build cgo && linux

package cuda

import (
	"bytes"
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/mem"
)

// What is exported is the memory: what another device writes there, the GPU reads, and the other
// way round.
func TestExport(t *testing.T) {
	f, v := open(t, fake.Config{DMABuf: true})
	m, err := v.Alloc(3*4096 + 100)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []mem.Memory{m, m.Slice(1, 10), m.Slice(5000, 4096), m.Slice(m.Len()-1, 1)} {
		fd, offset, err := v.Export(part)
		if err != nil {
			t.Fatal(err)
		}
		all, err := unix.Mmap(fd, 0, 4*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if cerr := unix.Close(fd); err != nil || cerr != nil {
			t.Fatal(err, cerr)
		}
		b := all[offset:][:part.Len()]
		if !bytes.Equal(b, f.Bytes(part)) {
			t.Error("other bytes are exported")
		}
		for i := range b {
			b[i] = byte(i * 7)
		}
		if !bytes.Equal(b, f.Bytes(part)) {
			t.Error("what was written is not there")
		}
		if err := unix.Munmap(all); err != nil {
			t.Error(err)
		}
	}
	if !v.Ordered() || v.Flush() != nil || f.Calls()["cuFlushGPUDirectRDMAWrites"] > 0 {
		t.Error("a flush that is not needed")
	}
	for _, m := range []mem.Memory{mem.Host(make([]byte, 1), mem.Anywhere), m.Slice(0, 0),
		mem.Device(64, 1, "cuda:1")} {
		if _, _, err := v.Export(m); !errors.Is(err, device.ErrMemory) {
			t.Errorf("exporting memory at %q: %v", m.Loc(), err)
		}
	}
	var failed *Error
	if _, _, err := v.Export(mem.Device(64, 1, v.Location())); !errors.As(err, &failed) {
		t.Errorf("exporting memory that is not allocated: %v", err)
	}
	f.Fail("cuMemGetHandleForAddressRange", 1, fake.NotSupported)
	if fd, _, err := v.Export(m); !errors.As(err, &failed) || failed.Code != fake.NotSupported || fd >= 0 {
		t.Errorf("a driver that refuses: descriptor %d, %v", fd, err)
	}
}

func TestExportNeedsTheDriver(t *testing.T) {
	_, v := open(t, fake.Config{})
	m, err := v.Alloc(10)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := v.Export(m); !errors.Is(err, errors.ErrUnsupported) {
		t.Error(err)
	}
}

func TestFlush(t *testing.T) {
	f, v := open(t, fake.Config{DMABuf: true, Unordered: true})
	if v.Ordered() || v.Flush() != nil || f.Calls()["cuFlushGPUDirectRDMAWrites"] != 1 {
		t.Errorf("ordered: %t, calls %v", v.Ordered(), f.Calls())
	}
	f.Fail("cuFlushGPUDirectRDMAWrites", 1, fake.NotSupported)
	if v.Flush() == nil {
		t.Error("a flush that failed")
	}
}
