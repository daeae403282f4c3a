package ident

import (
	"errors"
	"fmt"
	"net"
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

// ErrUser says that a socket's other end belongs to another user. It is wrapped.
var ErrUser = errors.New("another user")

// CheckUser returns an error that wraps ErrUser unless the other end of a connection belongs to a
// user that may talk to uid.
func CheckUser(conn *net.UnixConn, uid uint32) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	cred, err := Peer(raw)
	if err != nil {
		return err
	}
	if !MayTalk(uid, cred.Uid) {
		return fmt.Errorf("%w: the other end runs as user %d and this process as user %d; want the same user, or root",
			ErrUser, cred.Uid, uid)
	}
	return nil
}
