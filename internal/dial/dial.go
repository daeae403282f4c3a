// Package dial defines the function by which a rank makes its connections, which a program may
// replace.
package dial

import (
	"context"
	"net"
)

// Store is the rank that stands for the job's store.
const Store = -1

// Func makes a connection to address, HOST:PORT, at which rank to listens, or the store if to is
// Store. d holds the local address and the socket options that the connection should have. It must
// return when ctx ends. For an address without a listener it must return an error that wraps
// syscall.ECONNREFUSED.
type Func func(ctx context.Context, d *net.Dialer, to int, address string) (net.Conn, error)

// Dial calls f; a nil f is d itself.
func (f Func) Dial(ctx context.Context, d *net.Dialer, to int, address string) (net.Conn, error) {
	if f == nil {
		return d.DialContext(ctx, "tcp", address)
	}
	return f(ctx, d, to, address)
}
