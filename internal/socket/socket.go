// Package socket sends and receives on sockets without blocking and without allocating.
//
// The descriptors do not belong to the Go runtime's poller, which would wake a thread for every
// packet that arrives, even while a goroutine polls the socket itself.
package socket

import (
	"fmt"
	"net"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// WithinHost reports whether both ends of c have the same address.
func WithinHost(c net.Conn) bool {
	a, ok := c.LocalAddr().(*net.TCPAddr)
	b, too := c.RemoteAddr().(*net.TCPAddr)
	return ok && too && a.IP.Equal(b.IP)
}

// hostControl is the congestion control of connections within a host. The system's default may be
// one that measures the path and spaces packets by a timer (BBR), which finds no rate on a path
// without a queue and halves the bandwidth of messages of some megabytes. Every Linux has Reno, and
// lets every program select it. It limits nothing where no packet is lost.
const hostControl = "reno"

// Detach returns a descriptor of c's socket that the Go runtime's poller does not know, and closes
// c. If c is within this host, it selects the congestion control.
func Detach(c net.Conn) (fd int, err error) {
	defer c.Close()
	sc, ok := c.(syscall.Conn)
	if !ok {
		return -1, fmt.Errorf("a connection without a descriptor: %T", c)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return -1, err
	}
	if e := raw.Control(func(old uintptr) { fd, err = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) }); e != nil {
		return -1, e
	}
	if err == nil && WithinHost(c) {
		unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, hostControl) // else it stays as it is
	}
	return fd, err
}

// rawLimit is the largest size in bytes for which a socket call bypasses the scheduler
// (syscall.RawSyscall): the call cannot block and is short, and in a polling loop the scheduler's
// bookkeeping would be a third of the cost.
const rawLimit = 16 << 10

func call(trap uintptr, fd int, p unsafe.Pointer, n, flags uintptr, size int) (int, syscall.Errno) {
	ordered()
	for {
		var r uintptr
		var e syscall.Errno
		if size <= rawLimit {
			r, _, e = syscall.RawSyscall6(trap, uintptr(fd), uintptr(p), n, flags, 0, 0)
		} else {
			r, _, e = syscall.Syscall6(trap, uintptr(fd), uintptr(p), n, flags, 0, 0)
		}
		switch e {
		case 0:
			ordered()
			return int(r), 0
		case unix.EINTR:
			continue
		case unix.ENOBUFS, unix.ENOMEM: // a temporary shortage of the kernel
			return 0, unix.EAGAIN
		}
		return 0, e
	}
}

const (
	sendFlags = unix.MSG_DONTWAIT | unix.MSG_NOSIGNAL
	recvFlags = unix.MSG_DONTWAIT
)

// Send writes as much of b as there is room for, and returns how much that is.
func Send(fd int, b []byte) (int, syscall.Errno) {
	return call(unix.SYS_SENDTO, fd, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)), sendFlags, len(b))
}

// Recv reads what has arrived into b. 0 bytes without an error are the end of the stream.
func Recv(fd int, b []byte) (int, syscall.Errno) {
	return call(unix.SYS_RECVFROM, fd, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)), recvFlags, len(b))
}

// Discard drops up to n bytes that have arrived, without copying them.
func Discard(fd, n int) (int, syscall.Errno) {
	return call(unix.SYS_RECVFROM, fd, nil, uintptr(n), unix.MSG_DONTWAIT|unix.MSG_TRUNC, n)
}

// Vector is the argument of calls that move two pieces of memory. It is part of its user, so that a
// call allocates nothing.
type Vector struct {
	iov [2]unix.Iovec
	msg unix.Msghdr
}

func (v *Vector) set(a, b []byte) unsafe.Pointer {
	v.iov[0].Base, v.iov[1].Base = unsafe.SliceData(a), unsafe.SliceData(b)
	v.iov[0].SetLen(len(a))
	v.iov[1].SetLen(len(b))
	v.msg.Iov = &v.iov[0]
	v.msg.SetIovlen(2)
	return unsafe.Pointer(&v.msg)
}

// clear drops the references to the caller's memory.
func (v *Vector) clear() { v.iov[0].Base, v.iov[1].Base = nil, nil }

// Send writes a and then b, as Send does.
func (v *Vector) Send(fd int, a, b []byte) (int, syscall.Errno) {
	defer v.clear()
	return call(unix.SYS_SENDMSG, fd, v.set(a, b), sendFlags, 0, len(a)+len(b))
}

// Recv fills a and then b, as Recv does.
func (v *Vector) Recv(fd int, a, b []byte) (int, syscall.Errno) {
	defer v.clear()
	return call(unix.SYS_RECVMSG, fd, v.set(a, b), recvFlags, 0, len(a)+len(b))
}

// Silence returns for how long the peer's host has answered nothing, or 0 if the kernel has not
// probed it several times. TCP_USER_TIMEOUT is no substitute: it also ends a connection whose peer
// is alive and does not read for a while (a stopped or busy process: its window is closed). One or
// two unanswered probes prove nothing: packets get lost, and a host answers probes of a closed
// window only twice a second.
func Silence(fd int) time.Duration {
	i, err := unix.GetsockoptTCPInfo(fd, unix.SOL_TCP, unix.TCP_INFO)
	if err != nil || i.Retransmits < 2 && i.Probes < 3 {
		return 0
	}
	return time.Duration(i.Last_ack_recv) * time.Millisecond
}

// Ready reports whether there is something to read, or the end of the stream, or an error. Unlike
// Recv it does not take the socket's lock, which what is arriving would wait for.
func Ready(fd int) bool {
	p := unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}
	var now unix.Timespec
	n, _, e := syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&now)), 0,
		0, 0)
	return n > 0 || e != 0
}
