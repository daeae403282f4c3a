package ident

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Peer returns the process, user and group at the other end of a connected Unix socket, at the time
// when that end connected or began to listen.
func Peer(socket syscall.RawConn) (*unix.Ucred, error) {
	var cred *unix.Ucred
	var err error
	if cerr := socket.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); cerr != nil {
		err = cerr
	}
	if err != nil {
		return nil, fmt.Errorf("credentials of the peer: %w", err)
	}
	return cred, nil
}
