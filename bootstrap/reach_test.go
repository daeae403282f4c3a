package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"tutti/internal/trust"
)

// place is what a connection to an address leads to. ctx is that of the attempt.
type place func(ctx context.Context) (net.Conn, error)

func silence(ctx context.Context) (net.Conn, error) {
	<-ctx.Done()
	return nil, context.Cause(ctx)
}

func nobody(context.Context) (net.Conn, error) { return nil, syscall.ECONNREFUSED }

// process is one that knows the secret, and accepts a connection if verdict is nil.
func process(t *testing.T, secret []byte, verdict error) place {
	return func(context.Context) (net.Conn, error) {
		near, far := net.Pipe()
		go func() {
			defer far.Close()
			a := trust.Acceptor{Secret: secret, Purpose: rpcPurpose,
				Admit: func(net.Conn, trust.Hello) error { return verdict }}
			if _, _, err := a.Handshake(far); (err == nil) != (verdict == nil) {
				t.Error(err)
			}
		}()
		return near, nil
	}
}

// after is first for so many attempts, and then next.
func after(n int, first, next place) place {
	var mu sync.Mutex
	return func(ctx context.Context) (net.Conn, error) {
		mu.Lock()
		n--
		now := first
		if n < 0 {
			now = next
		}
		mu.Unlock()
		return now(ctx)
	}
}

// Which of several addresses is the peer's does not hang on how soon they answer: an answer of
// another process is final when none of the others may still be the peer's.
func TestReachOfSlowAddresses(t *testing.T) {
	secret := []byte("a secret for the tests of this package")
	other := process(t, secret, &trust.Refusal{Code: trust.CodeStale, Text: "this is rank 5"})
	peer := process(t, secret, nil)
	silent := func(n int) (all []place) {
		for range n {
			all = append(all, silence)
		}
		return all
	}
	for name, c := range map[string]struct {
		at     []place
		within time.Duration // of ctx
		want   error
		took   time.Duration // at least, and less than one attempt more
	}{
		"the peer":                 {[]place{peer}, time.Minute, nil, 0},
		"another process":          {[]place{other}, time.Minute, ErrStale, 0},
		"another, and nobody":      {[]place{other, nobody}, time.Minute, ErrStale, 0},
		"another, and a slow peer": {[]place{other, after(1, silence, peer)}, time.Minute, nil, attemptTimeout},
		"another, and a peer that is slow twice": {[]place{silence, other, after(2, silence, peer)}, time.Minute, nil,
			2 * attemptTimeout},
		"another, and nobody in the end": {[]place{other, after(1, silence, nobody)}, time.Minute, ErrStale,
			attemptTimeout},
		"another, and silence": {[]place{other, silence}, time.Minute, ErrStale, 3 * attemptTimeout},
		"another, and silence until the end": {[]place{other, silence}, attemptTimeout / 2, ErrStale,
			attemptTimeout / 2},
		"silence":                 {silent(2), time.Minute, context.DeadlineExceeded, attemptTimeout},
		"silence before the peer": {append(silent(MaxAddrs-1), peer), time.Minute, nil, attemptTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), c.within)
				defer cancel()
				var addrs []string
				for i := range c.at {
					addrs = append(addrs, fmt.Sprint(i))
				}
				client := NewClient(ClientConfig{Secret: secret,
					Dial: func(ctx context.Context, _ *net.Dialer, _ int, address string) (net.Conn, error) {
						var i int
						fmt.Sscan(address, &i)
						return c.at[i](ctx)
					}})
				begin := time.Now()
				conn, err := client.reach(ctx, addrs, trust.Hello{})
				if conn != nil {
					conn.Close()
				}
				if !errors.Is(err, c.want) {
					t.Errorf("%v, want %v", err, c.want)
				}
				if d := time.Since(begin); d < c.took || d >= c.took+attemptTimeout {
					t.Errorf("it took %v, want %v", d, c.took)
				}
			})
		})
	}
}
