package route

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"tutti/internal/ifname"
)

func TestJudge(t *testing.T) {
	own, banned := netip.MustParseAddr("10.1.0.7"), netip.MustParseAddr("192.168.0.7")
	m := Machine{
		Nets: []netip.Prefix{netip.PrefixFrom(own, 16), netip.PrefixFrom(banned, 24),
			netip.MustParsePrefix("127.0.0.1/8")},
		Allows: func(a netip.Addr) bool { return a != banned },
		Source: func(to netip.AddrPort) (netip.Addr, error) {
			switch b := to.Addr().As4(); b[0] {
			case 10:
				return own, nil
			case 192:
				return banned, nil
			case 127:
				return to.Addr(), nil
			}
			return netip.Addr{}, errors.New("network is unreachable")
		},
	}
	for _, c := range []struct {
		to    string
		peer  Where
		class Class
		ok    bool
	}{
		{"10.1.0.9:1", Elsewhere, Subnet, true},
		{"10.2.0.9:1", Elsewhere, Routed, true},
		{"192.168.0.9:1", Elsewhere, Foreign, true},
		{"10.1.0.7:1", Here, Subnet, true},
		{"127.0.0.1:1", Here, Loopback, true},
		{"127.0.0.1:1", Unknown, Loopback, true},
		{"127.0.0.1:1", Elsewhere, 0, false},
		{"127.1.2.3:1", Elsewhere, 0, false},
		{"10.1.0.7:1", Elsewhere, 0, false},
		{"8.8.8.8:1", Elsewhere, 0, false},
	} {
		p, err := m.Judge(netip.MustParseAddrPort(c.to), c.peer)
		if (err == nil) != c.ok || err == nil && (p.Class != c.class || p.To.String() != c.to || !p.From.IsValid()) {
			t.Errorf("%s, %d: %+v, %v", c.to, c.peer, p, err)
		}
	}
	paths := []Path{{Class: Loopback}, {Class: Foreign}, {Class: Routed}, {Class: Subnet}}
	if slices.SortFunc(paths, Compare); paths[0].Class != Subnet || paths[3].Class != Loopback {
		t.Errorf("best first: %v", paths)
	}
}

func TestMachineFollowsFilter(t *testing.T) {
	filter, err := ifname.Parse("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	m := This(filter)
	if !slices.ContainsFunc(m.Nets, func(p netip.Prefix) bool { return p.Addr().IsLoopback() && p.Bits() > 0 }) {
		t.Errorf("networks %v: no loopback", m.Nets)
	}
	lo := netip.MustParseAddr("127.0.0.1")
	if a, err := m.Source(netip.AddrPortFrom(lo, 9)); err != nil || a != lo {
		t.Errorf("source towards %v: %v, %v", lo, a, err)
	}
	if !m.Allows(lo) || m.Allows(netip.MustParseAddr("192.0.2.1")) {
		t.Errorf("the filter %v is not kept", filter)
	}
}
