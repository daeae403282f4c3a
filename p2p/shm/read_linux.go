package shm

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/p2p"
)

// Plain memory of the peer is read by process_vm_readv(2), by the number of the peer's process.
// That takes the permission to trace it, which the system may refuse: another user without
// privileges, yama (kernel.yama.ptrace_scope above 0), a filter of system calls, a process that is
// not dumpable, another namespace of process numbers. Nothing here widens the permission: this
// process names no tracer (PR_SET_PTRACER).
//
// So an end has to find out. Each end tells the other the address of a word, and the random number
// in it, its witness. An end that reads that number there has the permission, and the right
// process. Otherwise it does not read, and the ranks use rings.
//
// A number of a process may be reused, and a process may execute another program. After each read
// the pidfd, which is of the process that the socket was connected to, says whether the process has
// ended, and the socket whether the peer's end is open. The kernel closes it in execve before it
// lets others access the new program's memory. If both are open the data is the peer's.

// witness is the word that peers read.
type witness struct{ value uint64 }

func newWitness() *witness {
	var b [8]byte
	rand.Read(b[:])
	return &witness{binary.LittleEndian.Uint64(b[:]) | 1}
}

// message tells a peer of the word. It keeps its address, because the heap does not move.
func (w *witness) message() message {
	return message{kind: msgWitness, id: uint64(uintptr(unsafe.Pointer(w))), size: w.value}
}

// reading is what a link needs to read the peer's process. The zero reading never works.
type reading struct {
	works    atomic.Bool
	attested bool // the witness has come; the link's reader alone uses it

	mu            sync.Mutex // one goroutine looks at a time
	sock, process syscall.RawConn
	fds           [2]unix.PollFd
	both, poll    func(fd uintptr) // made once, so that looking allocates nothing
	here          bool             // the result of poll
}

// init prepares for reading the process at the other end of sock.
func (r *reading) init(sock *socket, process *os.File) {
	raw, err := process.SyscallConn()
	if err != nil {
		return
	}
	r.sock, r.process = sock.raw, raw
	r.both = func(fd uintptr) {
		r.fds[0] = unix.PollFd{Fd: int32(fd), Events: unix.POLLRDHUP}
		r.process.Control(r.poll)
	}
	r.poll = func(fd uintptr) {
		r.fds[1] = unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
		for {
			n, err := unix.Poll(r.fds[:], 0)
			if r.here = n == 0 && err == nil; err != unix.EINTR {
				return
			}
		}
	}
}

// present reports whether the peer's process has not ended, and its end of the socket is open.
func (r *reading) present() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.here = false // and stays so if a descriptor is closed
	r.sock.Control(r.both)
	return r.here
}

// attest handles the peer's witness: it tries to read it.
func (l *link) attest(m message) error {
	if l.reading.attested {
		return fmt.Errorf("%w: a second witness", p2p.ErrProtocol)
	}
	l.reading.attested = true
	if l.reading.process == nil || l.pid <= 0 {
		return nil
	}
	var b [8]byte
	if err := readAll(l.pid, b[:], m.id); err == nil && binary.NativeEndian.Uint64(b[:]) == m.size {
		l.reading.works.Store(true)
	}
	return nil
}

// ReadsProcess implements p2p.ProcessReader.
func (l *link) ReadsProcess() bool { return l.reading.works.Load() }

// ReadProcess implements p2p.ProcessReader.
func (l *link) ReadProcess(dst []byte, from uint64) error {
	if !l.reading.works.Load() {
		return fmt.Errorf("reading memory of %v: %w", l.peer, errors.ErrUnsupported)
	}
	err := readAll(l.pid, dst, from)
	switch {
	case !l.reading.present():
		l.reading.works.Store(false)
		return fmt.Errorf("reading memory of %v: %w", l.peer, p2p.ErrPeerGone)
	case errors.Is(err, unix.EFAULT):
		return fmt.Errorf("%w: %v says that it has a buffer at %#x, and its process has no memory there",
			p2p.ErrProtocol, l.peer, from)
	case err != nil:
		l.reading.works.Store(false)
		return fmt.Errorf("reading memory of %v: %w, which it was not before: %w", l.peer, errors.ErrUnsupported, err)
	}
	return nil
}

// Readable implements p2p.ProcessReader. It reads this process as a peer does.
func (l *link) Readable(b []byte) bool {
	if len(b) == 0 {
		return true
	}
	var got [1]byte
	first := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	return readAll(os.Getpid(), got[:], first) == nil && readAll(os.Getpid(), got[:], first+uint64(len(b)-1)) == nil
}

// readAll copies len(dst) bytes at address from of process pid.
func readAll(pid int, dst []byte, from uint64) error {
	for len(dst) > 0 {
		local := [1]unix.Iovec{{Base: unsafe.SliceData(dst)}}
		local[0].SetLen(len(dst))
		remote := [1]unix.RemoteIovec{{Base: uintptr(from), Len: len(dst)}}
		n, err := unix.ProcessVMReadv(pid, local[:], remote[:], 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n <= 0:
			return unix.EFAULT
		default:
			dst, from = dst[n:], from+uint64(n)
		}
	}
	return nil
}
