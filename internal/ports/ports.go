// Package ports implements the rule by which every listener of a job chooses its port: an explicit
// port that is taken is an error which names it, a range uses its first free port, and 0 leaves the
// choice to the kernel.
//
// An explicit port usually has a reason (a firewall, a configured peer), so that a listener must
// not silently use another.
package ports

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"syscall"
)

// Spec is a port ("29500"), a range of ports, both ends included ("29500-29600"), or the kernel's
// choice ("0", "" and the zero Spec).
type Spec struct{ Lo, Hi uint16 }

// ParseSpec reads the textual form of a Spec.
func ParseSpec(s string) (Spec, error) {
	s = strings.TrimSpace(s)
	if s == "" {
		return Spec{}, nil
	}
	lo, hi, ranged := strings.Cut(s, "-")
	a, err := parsePort(lo, s)
	if err != nil || !ranged {
		return Spec{a, a}, err
	}
	b, err := parsePort(hi, s)
	switch {
	case err != nil:
		return Spec{}, err
	case a == 0 || b < a:
		return Spec{}, fmt.Errorf("port range %q: expected LOW-HIGH with 1 <= LOW <= HIGH <= 65535", s)
	}
	return Spec{a, b}, nil
}

func parsePort(s, whole string) (uint16, error) {
	n, err := strconv.ParseUint(strings.TrimSpace(s), 10, 16)
	if err != nil {
		return 0, fmt.Errorf("port %q: expected a port (29500), a range (29500-29600) or 0 for the kernel's choice",
			whole)
	}
	return uint16(n), nil
}

// ParseAddr reads HOST:PORT with a Spec for the port. The host may be empty, or an IPv6 address in
// brackets.
func ParseAddr(s string) (host string, spec Spec, err error) {
	host, port, err := net.SplitHostPort(strings.TrimSpace(s))
	if err != nil || strings.ContainsAny(host, " /") || port == "" {
		return "", Spec{}, fmt.Errorf("address %q: expected HOST:PORT, such as 127.0.0.1:9400, "+
			"127.0.0.1:9400-9407 or :0", s)
	}
	spec, err = ParseSpec(port)
	return host, spec, err
}

// String returns the textual form, "0" for the kernel's choice.
func (s Spec) String() string {
	if s.Lo == s.Hi {
		return strconv.Itoa(int(s.Lo))
	}
	return fmt.Sprintf("%d-%d", s.Lo, s.Hi)
}

// After returns the spec for a further listener: the n-th port after an explicit one, else s
// itself.
func (s Spec) After(n int) (Spec, error) {
	if s.Lo != s.Hi || s.Lo == 0 {
		return s, nil
	}
	p := int(s.Lo) + n
	if p > 65535 {
		return Spec{}, fmt.Errorf("port %d: a further listener needs port %d, and the last one is 65535: give a lower "+
			"port, a range or 0", s.Lo, p)
	}
	return Spec{uint16(p), uint16(p)}, nil
}

// Listen opens a TCP listener at host (an address; "" means every address of this machine) on the
// first free port of spec. Only "address in use" continues with the next port of a range; any other
// failure ends the search. It blocks only to resolve a host name.
func Listen(ctx context.Context, host string, spec Spec) (net.Listener, error) {
	var lc net.ListenConfig
	var last error
	for p := int(spec.Lo); p <= int(spec.Hi); p++ {
		l, err := lc.Listen(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(p)))
		if err == nil {
			return l, nil
		}
		if last = err; !errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("listen on port %d of %s: %w", p, where(host), err)
		}
	}
	switch {
	case last == nil:
		return nil, fmt.Errorf("port range %v is empty", spec)
	case spec.Lo == 0:
		return nil, fmt.Errorf("all ports of %s that the kernel may choose are taken: free some, or give it more "+
			"(net.ipv4.ip_local_port_range): %w", where(host), last)
	case spec.Lo == spec.Hi:
		return nil, fmt.Errorf("port %d of %s is taken: free it, or give a range or 0: %w", spec.Lo,
			where(host), last)
	}
	return nil, fmt.Errorf("all %d ports %v of %s are taken by other processes: free one, or give a wider "+
		"range or 0: %w", int(spec.Hi)-int(spec.Lo)+1, spec, where(host), last)
}

func where(host string) string {
	if host == "" {
		return "this machine"
	}
	return host
}
