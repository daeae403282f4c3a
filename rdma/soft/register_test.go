package soft

import (
	"errors"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"tutti/mem"
	"tutti/rdma"
)

// exporter exports a file, or fails.
type exporter struct {
	fd  int
	err error
}

func (e exporter) Export(m mem.Memory) (int, uint64, error) {
	if e.err != nil {
		return -1, 0, e.err
	}
	fd, err := unix.Dup(e.fd)
	return fd, 100, err
}

// Memory is registered wherever it is, and no descriptor is left.
func TestRegister(t *testing.T) {
	refuse := syscall.Errno(0)
	f := New(Config{Faults: Faults{Call: func(_, call string) syscall.Errno {
		if call == "register 50 bytes of a DMA buffer" {
			return refuse
		}
		return 0
	}}})
	defer f.Close()
	d, err := f.Open("soft0", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	m, err := rdma.Register(d, mem.Host(make([]byte, 5), mem.Anywhere), nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	m.Close()
	gpu := mem.Device(0x7000, 50, "cuda:0")
	fd, _ := file(t, 4096)
	m, err = rdma.Register(d, gpu, exporter{fd: fd}, 0)
	if at := rdma.Address(gpu); err != nil || at != 0x7000 {
		t.Fatalf("address %#x, %v", at, err)
	}
	m.Close()
	if m, err := rdma.Register(d, gpu, nil, 0); !errors.Is(err, errors.ErrUnsupported) || m != nil {
		t.Errorf("without an exporter: %v", err)
	}
	broken := errors.New("broken")
	if m, err := rdma.Register(d, gpu, exporter{err: broken}, 0); !errors.Is(err, broken) || m != nil {
		t.Errorf("an exporter that fails: %v", err)
	}
	next, err := unix.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(next)
	refuse = syscall.EOPNOTSUPP
	if m, err := rdma.Register(d, gpu, exporter{fd: fd}, 0); !errors.Is(err, errors.ErrUnsupported) || m != nil {
		t.Errorf("a device that refuses: %v", err)
	}
	again, err := unix.Dup(fd)
	if err != nil || again != next {
		t.Errorf("descriptor %d is open (%v)", next, err)
	}
	unix.Close(again)
}
