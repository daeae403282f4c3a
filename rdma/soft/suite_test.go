package soft

import (
	"testing"

	"golang.org/x/sys/unix"

	"tutti/rdma/rdmatest"
)

// file returns a file in memory.
func file(t *testing.T, n int) (fd int, b []byte) {
	fd, err := unix.MemfdCreate("DMA buffer", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, int64(n)); err != nil {
		t.Fatal(err)
	}
	if b, err = unix.Mmap(fd, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(b) })
	return fd, b
}

func TestSuite(t *testing.T) {
	rdmatest.Suite(t, func(t *testing.T) rdmatest.Subject {
		f := New(Config{Seed: 1})
		t.Cleanup(f.Close)
		return rdmatest.Subject{Provider: f, Device: "soft0", SetPort: func(_ *testing.T, up bool) {
			f.SetPort("soft0", 1, up)
		}, Remove: func(*testing.T) { f.Remove("soft0") }, DMABuf: file}
	})
}
