// Package dial is how a rank makes its connections: one function, which a program may replace.
package dial

import (
	"context"
	"net"
)

// Store stands for the job's store where a rank is meant.
const Store = -1

// Func makes a connection with address, HOST:PORT, where rank to listens or, with Store, the store.
// d has the local address and the socket options that the connection is to have. It returns when ctx
// ends at the latest. An address at which nobody listens is an error that wraps
// syscall.ECONNREFUSED.
type Func func(ctx context.Context, d *net.Dialer, to int, address string) (net.Conn, error)

// Dial calls f; a nil f is d itself.
func (f Func) Dial(ctx context.Context, d *net.Dialer, to int, address string) (net.Conn, error) {
	if f == nil {
		return d.DialContext(ctx, "tcp", address)
	}
	return f(ctx, d, to, address)
}
