package ports

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
)

// lowest is the first port that Free returns, if it chooses itself: well-known services have lower
// ones.
const lowest = 10000

// Free returns a port on which nothing listens, for a program that will. It is outside the kernel's
// range of ephemeral ports, if one there is free: then only a program that asks for this very port
// can take it meanwhile.
func Free(ctx context.Context) (uint16, error) {
	below := firstEphemeral() - lowest
	for tries := 0; below > 0 && tries < 100; tries++ {
		p := uint16(lowest + rand.IntN(below))
		if l, err := Listen(ctx, "", Spec{p, p}); err == nil {
			return p, l.Close()
		}
	}
	l, err := Listen(ctx, "", Spec{})
	if err != nil {
		return 0, err
	}
	return uint16(l.Addr().(*net.TCPAddr).Port), l.Close()
}

// firstEphemeral returns the first ephemeral port, 0 if it is not known.
func firstEphemeral() (first int) {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return 0
	}
	if _, err := fmt.Sscan(string(text), &first); err != nil {
		return 0
	}
	return first
}
