// Package route judges the addresses that a peer has published: which of them lead to it from here,
// and which to try first.
package route

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"tutti/internal/files"
	"tutti/internal/ifname"
)

// Where says whether a peer shares this process's loopback interface.
type Where int

// What is known of a peer.
const (
	Unknown Where = iota
	Here
	Elsewhere
)

// Class says how good a Path is.
type Class int

// The classes of paths, best first.
const (
	Subnet   Class = iota // through an allowed interface, into its own network
	Routed                // through an allowed interface
	Foreign               // through an interface that the filter does not allow: better than no connection
	Loopback              // this host
)

// A Path is an address that can be dialled.
type Path struct {
	To    netip.AddrPort
	From  netip.Addr // the local address that the kernel would use
	Class Class
}

// A Machine is the network configuration by which Judge judges.
type Machine struct {
	Nets   []netip.Prefix // of the interfaces that are up, with this machine's address in them
	Allows func(netip.Addr) bool
	Source func(to netip.AddrPort) (netip.Addr, error)
}

// This returns this machine as it is now, with the interfaces that filter allows.
func This(filter ifname.Filter) Machine {
	m := Machine{Source: kernelSource}
	names := map[netip.Addr]string{}
	if filter.String() != "" { // else every interface is allowed
		ifs, _ := ifname.Interfaces() // on failure paths are ordered worse, but found
		for _, i := range ifs {
			for _, a := range i.Addrs {
				names[a] = i.Name
			}
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
				m.Nets = append(m.Nets, netip.PrefixFrom(ip, ones))
			}
		}
	}
	m.Allows = func(a netip.Addr) bool { return filter.Allows(names[a], a) }
	return m
}

// kernelSource returns the local address that the kernel's routing selects for a peer. Connecting a
// datagram socket sends nothing.
func kernelSource(to netip.AddrPort) (netip.Addr, error) {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
	if err != nil {
		return netip.Addr{}, files.Explain(err)
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap().WithZone(""), nil
}

// Judge returns the path to the address to of a peer, or why there is none. An address of this host
// leads to this host, so that a peer elsewhere is not reached by it.
func (m Machine) Judge(to netip.AddrPort, peer Where) (Path, error) {
	p := Path{To: to}
	local := to.Addr().IsLoopback() || slices.ContainsFunc(m.Nets,
		func(n netip.Prefix) bool { return n.Addr() == to.Addr() })
	if local && peer == Elsewhere {
		return p, fmt.Errorf("%v: is an address of this host, and the peer is on another", to)
	}
	var err error
	if p.From, err = m.Source(to); err != nil {
		return p, fmt.Errorf("%v: no route: %w", to, err)
	}
	switch {
	case to.Addr().IsLoopback():
		p.Class = Loopback
	case !m.Allows(p.From):
		p.Class = Foreign
	case slices.ContainsFunc(m.Nets, func(n netip.Prefix) bool { return n.Addr() == p.From && n.Contains(to.Addr()) }):
		p.Class = Subnet
	default:
		p.Class = Routed
	}
	return p, nil
}

// Compare orders paths: the better one first, for stable sorting.
func Compare(a, b Path) int { return cmp.Compare(a.Class, b.Class) }
