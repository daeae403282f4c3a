package tcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	"tutti/internal/files"
	"tutti/internal/ifname"
)

// path is a candidate that can be dialled: from which local address, and how good that is (0 is
// best).
type path struct {
	to    netip.AddrPort
	name  string // what was resolved to it, if anything
	from  netip.Addr
	class int
}

func (p path) String() string {
	if p.name != "" {
		return fmt.Sprintf("%s (%v)", p.name, p.to)
	}
	return p.to.String()
}

// The classes of paths, best first.
const (
	classSubnet   = iota // out of an allowed interface, into its own network
	classRouted          // out of an allowed interface
	classForeign         // out of an interface that the configuration does not allow: better than no link at all
	classLoopback        // this host
)

// machine is what paths are judged by; a value so that the judgement can be tested.
type machine struct {
	host   uint64
	nets   []netip.Prefix // of the interfaces that are up, with this machine's address in them
	allows func(netip.Addr) bool
	source func(netip.AddrPort) (netip.Addr, error)
}

func (t *Transport) machine() machine {
	m := machine{host: hostID(), source: kernelSource}
	ifs, _ := ifname.Interfaces() // without it no path is in our own network: worse order, same result
	names := map[netip.Addr]string{}
	for _, i := range ifs {
		for _, a := range i.Addrs {
			names[a] = i.Name
		}
	}
	if addrs, err := net.InterfaceAddrs(); err == nil {
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok {
				ip, _ := netip.AddrFromSlice(n.IP)
				ones, bits := n.Mask.Size()
				if ip = ip.Unmap(); ip.Is4() && bits == 128 {
					ones -= 96
				}
				m.nets = append(m.nets, netip.PrefixFrom(ip, ones))
			}
		}
	}
	t.mu.Lock()
	filter := t.filter
	t.mu.Unlock()
	m.allows = func(a netip.Addr) bool { return filter.Allows(names[a], a) }
	if t.cfg.Select != nil {
		m.source = func(to netip.AddrPort) (netip.Addr, error) { return t.cfg.Select(to.Addr()) }
	}
	return m
}

// kernelSource asks the kernel's routing which local address would be used towards a peer:
// connecting a datagram socket sends nothing.
func kernelSource(to netip.AddrPort) (netip.Addr, error) {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		return netip.Addr{}, files.Explain(err)
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap().WithZone(""), nil
}

// judge says whether and how the candidate to of a peer on host can be dialled.
func (m machine) judge(to netip.AddrPort, host uint64) (path, error) {
	p := path{to: to}
	same := m.host != 0 && host == m.host
	local := to.Addr().IsLoopback() || slices.ContainsFunc(m.nets,
		func(n netip.Prefix) bool { return n.Addr() == to.Addr() })
	if local && !same && m.host != 0 && host != 0 {
		return p, fmt.Errorf("%v: is an address of this host, and the peer is on another", to)
	}
	var err error
	if p.from, err = m.source(to); err != nil {
		return p, fmt.Errorf("%v: no route: %w", to, err)
	}
	switch {
	case to.Addr().IsLoopback():
		p.class = classLoopback
	case !m.allows(p.from):
		p.class = classForeign
	case slices.ContainsFunc(m.nets, func(n netip.Prefix) bool { return n.Addr() == p.from && n.Contains(to.Addr()) }):
		p.class = classSubnet
	default:
		p.class = classRouted
	}
	return p, nil
}

// paths returns how e can be dialled, best first, and why the other candidates cannot. Names are
// resolved with lookup; without it they are left out.
func (m machine) paths(e endpoint, lookup func(string) ([]netip.Addr, error)) (found []path, why []error) {
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
			p, err := m.judge(netip.AddrPortFrom(a.Unmap(), c.port), e.host)
			if err != nil {
				why = append(why, err)
				continue
			}
			p.name = c.name
			found = append(found, p)
		}
	}
	slices.SortStableFunc(found, func(a, b path) int { return cmp.Compare(a.class, b.class) })
	return found, why
}

func lookup(ctx context.Context) func(string) ([]netip.Addr, error) {
	return func(name string) ([]netip.Addr, error) {
		return net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	}
}

// list makes one line of several reasons, each of which stays visible to errors.Is.
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
