//go:build cgo && linux

package verbs

import (
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/internal/proctest"
	"tutti/mem"
	"tutti/rdma"
)

// forkVariable is set in the process of TestDeviceRegistrationsAndFork that has no copies of pinned
// pages.
const forkVariable = "SOFTROCE_NO_COPIES"

// TestDeviceRegistrationsAndFork: where the kernel copies pinned pages, no registration costs a
// call of madvise. Where the library has to exclude registered pages from children, there is at
// most one for each range and direction, however often the range is registered.
func TestDeviceRegistrationsAndFork(t *testing.T) {
	const registrations, ranges, size = 20_000, 64, 8192
	if os.Getenv(forkVariable) != "" {
		hideCopies(t)
	}
	p, name := testDevice(t)
	d, err := p.Open(name, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	b, err := unix.Mmap(-1, 0, ranges*2*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	register := func(i int) rdma.MR {
		m, err := d.Register(mem.Host(b[i%ranges*2*size:][:size], mem.Anywhere), rdma.LocalWrite|rdma.RemoteWrite)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	closed := func(m rdma.MR) {
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
	}
	// Calls are counted in this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	calls := countMadvise(t)
	switch p.ForkSupport() {
	case ForkByKernel:
		for i := range registrations {
			closed(register(i))
		}
		if n := calls(); n != 0 {
			t.Errorf("%d calls of madvise for %d registrations, want none", n, registrations)
		}
	case ForkByLibrary:
		var held []rdma.MR
		for i := range ranges {
			held = append(held, register(i))
		}
		exclude := calls()
		for i := range registrations {
			closed(register(i))
		}
		again := calls() - exclude
		for _, m := range held {
			closed(m)
		}
		include := calls() - exclude - again
		if exclude != ranges || again != 0 || include != ranges {
			t.Errorf("%d calls of madvise for %d ranges, %d for %d further registrations of them, and %d when the "+
				"last ones end; want %d, none and %d", exclude, ranges, again, registrations, include, ranges, ranges)
		}
	default:
		t.Errorf("%q", p.ForkSupport())
	}
	if os.Getenv(forkVariable) != "" {
		if p.ForkSupport() != ForkByLibrary {
			t.Errorf("%q without copies of pinned pages, want %q", p.ForkSupport(), ForkByLibrary)
		}
		return
	}
	if p.ForkSupport() != ForkByKernel {
		t.Errorf("%q, want %q", p.ForkSupport(), ForkByKernel)
	}
	other := proctest.Again([]string{forkVariable + "=1"}, "-test.run=^TestDeviceRegistrationsAndFork$",
		"-test.timeout=3m")
	if out, err := other.CombinedOutput(); err != nil {
		t.Errorf("without copies of pinned pages: %v\n%s", err, out)
	}
}

// countMadvise returns a function that returns how many calls of madvise the calling thread has
// made since that change what its children inherit.
func countMadvise(t *testing.T) func() int {
	t.Helper()
	const traces = "/sys/kernel/tracing"
	if err := unix.Mount("none", traces, "tracefs", 0, ""); err != nil && err != unix.EBUSY {
		t.Fatalf("mount %s: %v", traces, err)
	}
	text, err := os.ReadFile(traces + "/events/syscalls/sys_enter_madvise/id")
	if err != nil {
		t.Fatal(err)
	}
	id, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	fd, err := unix.PerfEventOpen(&unix.PerfEventAttr{Type: unix.PERF_TYPE_TRACEPOINT, Config: id,
		Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{}))}, 0, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		t.Fatalf("count calls of madvise: %v", err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	filter := []byte("behavior == " + strconv.Itoa(unix.MADV_DONTFORK) + " || behavior == " +
		strconv.Itoa(unix.MADV_DOFORK) + "\x00")
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.PERF_EVENT_IOC_SET_FILTER,
		uintptr(unsafe.Pointer(&filter[0]))); errno != 0 {
		t.Fatalf("count calls of madvise: %v", errno)
	}
	count := func() int {
		var b [8]byte
		if n, err := unix.Read(fd, b[:]); n != len(b) || err != nil {
			t.Fatal(n, err)
		}
		return int(binary.NativeEndian.Uint64(b[:]))
	}
	// It counts, and only what it is to count.
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err == nil {
		err = errors.Join(unix.Madvise(page, unix.MADV_DONTFORK), unix.Madvise(page, unix.MADV_DOFORK),
			unix.Madvise(page, unix.MADV_NORMAL), unix.Munmap(page))
	}
	if before := count(); err != nil || before != 2 {
		t.Fatalf("%d of 2 calls of madvise were counted: %v", before, err)
	}
	return func() int { return count() - 2 }
}

// hideCopies has the kernel refuse to tell the library of this process that it copies pinned pages,
// as older ones do: no thread can make a socket for the kernel's messages on RDMA devices.
func hideCopies(t *testing.T) {
	t.Helper()
	load := func(offset uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: offset}
	}
	unless := func(value uint32, skip uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jf: skip, K: value}
	}
	give := func(value uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: value} }
	// Offsets are those of the number of the call, and of its first and third argument.
	program := []unix.SockFilter{load(0), unless(unix.SYS_SOCKET, 5), load(16), unless(unix.AF_NETLINK, 3), load(32),
		unless(unix.NETLINK_RDMA, 1), give(unix.SECCOMP_RET_ERRNO | uint32(syscall.EPROTONOSUPPORT)),
		give(unix.SECCOMP_RET_ALLOW)}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	f := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if n, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC,
		uintptr(unsafe.Pointer(&f))); n != 0 || errno != 0 {
		t.Fatalf("filter of system calls: %d, %v", n, errno)
	}
}
