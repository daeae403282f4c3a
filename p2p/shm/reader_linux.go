package shm

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/p2p"
)

// ReadMemory implements p2p.Reader by process_vm_readv(2), which copies once where frames in the ring copy twice. The system may forbid it (another user,
// Yama's ptrace_scope, a container's seccomp filter, another pid namespace).
func (l *link) ReadMemory(dst []byte, addr uint64) error {
	l.pidOnce.Do(func() {
		l.sock.raw.Control(func(fd uintptr) {
			if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
				l.pid = int(cred.Pid)
			}
		})
	})
	if l.pid <= 0 {
		return fmt.Errorf("%v is in a pid namespace that this process does not see: %w", l.peer, errors.ErrUnsupported)
	}
	for len(dst) > 0 {
		local := []unix.Iovec{{Base: unsafe.SliceData(dst), Len: uint64(len(dst))}}
		remote := []unix.RemoteIovec{{Base: uintptr(addr), Len: len(dst)}}
		n, err := unix.ProcessVMReadv(l.pid, local, remote, 0)
		// A pid may be another process's by now, but not as long as the peer's end of the socket is open.
		if !l.alive() {
			return fmt.Errorf("%v ended while its memory was read: %w", l.peer, p2p.ErrPeerGone)
		}
		switch {
		case errors.Is(err, unix.EPERM), errors.Is(err, unix.ENOSYS):
			return fmt.Errorf("reading the memory of %v: %w: %w", l.peer, err, errors.ErrUnsupported)
		case err != nil:
			return fmt.Errorf("reading %d bytes at %#x of %v: %w: %w", len(dst), addr, l.peer, err, p2p.ErrProtocol)
		case n <= 0:
			return fmt.Errorf("reading %d bytes at %#x of %v: %w: nothing there", len(dst), addr, l.peer, p2p.ErrProtocol)
		}
		dst = dst[n:]
		addr += uint64(n)
	}
	return nil
}

// alive reports whether the peer's end of the socket is open.
func (l *link) alive() bool {
	open := false
	l.sock.raw.Control(func(fd uintptr) {
		var b [1]byte
		n, _, err := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		open = n > 0 || errors.Is(err, unix.EAGAIN)
	})
	return open && l.Err() == nil
}
