package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"tutti/internal/route"
)

// path is a candidate that can be dialled.
type path struct {
	route.Path
	name string // the name that was resolved, if there was one
}

func (p path) String() string {
	if p.name != "" {
		return fmt.Sprintf("%s (%v)", p.name, p.To)
	}
	return p.To.String()
}

// machine is this machine, with the interfaces and the choice of addresses of the transport.
func (t *Transport) machine() route.Machine {
	t.mu.Lock()
	filter := t.filter
	t.mu.Unlock()
	m := route.This(filter)
	if t.cfg.Select != nil {
		m.Source = func(to netip.AddrPort) (netip.Addr, error) { return t.cfg.Select(to.Addr()) }
	}
	return m
}

// whereIs says whether the peer on host, a hostID, shares this process's loopback interface.
func whereIs(host uint64) route.Where {
	switch {
	case host == 0 || hostID() == 0:
		return route.Unknown
	case host == hostID():
		return route.Here
	}
	return route.Elsewhere
}

// paths returns the paths from m to e, the endpoint of a peer there, best first, and why other
// candidates have none. Names are resolved with lookup.
func (e endpoint) paths(m route.Machine, there route.Where, lookup func(string) ([]netip.Addr, error)) (
	found []path, why []error) {
	for _, c := range e.at {
		addrs := []netip.Addr{c.addr}
		if !c.addr.IsValid() {
			var err error
			if addrs, err = lookup(c.name); err != nil {
				why = append(why, fmt.Errorf("host name %s does not resolve: %w", c.name, err))
				continue
			}
		}
		for _, a := range addrs {
			p, err := m.Judge(netip.AddrPortFrom(a.Unmap(), c.port), there)
			if err != nil {
				why = append(why, err)
				continue
			}
			found = append(found, path{p, c.name})
		}
	}
	slices.SortStableFunc(found, func(a, b path) int { return route.Compare(a.Path, b.Path) })
	return found, why
}

func lookup(ctx context.Context) func(string) ([]netip.Addr, error) {
	return func(name string) ([]netip.Addr, error) {
		return net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	}
}

// list joins several reasons in one line; errors.Is finds each of them.
type list []error

func (l list) Error() string {
	s := make([]string, len(l))
	for i, e := range l {
		s[i] = e.Error()
	}
	return strings.Join(s, "; ")
}

func (l list) Unwrap() []error { return l }

var errNoPath = errors.New("none of the peer's addresses can be reached from here")
