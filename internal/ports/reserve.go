package ports

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Reservation holds a TCP port of 127.0.0.1 for a listener that starts later, or again and again,
// in this or another process. While it is held the kernel gives the port to no socket that asks for
// any free one; a listener on its number succeeds, with SO_REUSEADDR, as package net does.
type Reservation struct {
	Port uint16
	fd   int
}

// Reserve reserves a port of the kernel's choice. The caller must Close the reservation.
//
// The port is held by a socket that is bound and does not listen.
func Reserve() (*Reservation, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("reserve a port: %w", os.NewSyscallError("socket", err))
	}
	r := &Reservation{fd: fd}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1); err != nil {
		r.Close()
		return nil, fmt.Errorf("reserve a port: %w", os.NewSyscallError("setsockopt", err))
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		r.Close()
		return nil, fmt.Errorf("reserve a port: %w", os.NewSyscallError("bind", err))
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("reserve a port: %w", os.NewSyscallError("getsockname", err))
	}
	r.Port = uint16(at.(*unix.SockaddrInet4).Port)
	return r, nil
}

// Address returns 127.0.0.1:PORT.
func (r *Reservation) Address() string { return fmt.Sprintf("127.0.0.1:%d", r.Port) }

// Close gives the port back. It does not affect listeners on it.
func (r *Reservation) Close() error { return unix.Close(r.fd) }
