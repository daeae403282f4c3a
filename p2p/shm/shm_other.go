//go:build !linux

package shm

import (
	"context"
	"errors"

	"tutti/p2p"
)

var errSystem = errors.New("shm: shared memory between processes needs Linux (memfd, abstract sockets); use tcp")

// Transport stands in for the transport on systems that cannot have it.
type Transport struct{}

// New returns a transport whose methods say that this system cannot have it.
func New(Config) *Transport { return &Transport{} }

// Identify returns an error.
func Identify() (string, error) { return "", errSystem }

// Name implements p2p.Transport.
func (*Transport) Name() string { return "shm" }

// Listen returns an error.
func (*Transport) Listen(context.Context, p2p.Host) ([]byte, error) { return nil, errSystem }

// Reaches returns an error.
func (*Transport) Reaches([]byte) error { return errSystem }

// Dial returns an error.
func (*Transport) Dial(context.Context, p2p.Identity, []byte) (p2p.Link, error) {
	return nil, errSystem
}

// Alloc returns an error.
func (*Transport) Alloc(int) (*p2p.Region, error) { return nil, errSystem }

// Close does nothing.
func (*Transport) Close() error { return nil }
