package rdma

import (
	"net/netip"
	"strings"
	"testing"
)

func entry(index int, address string, t GIDType) GIDEntry {
	return GIDEntry{Index: index, GID: netip.MustParseAddr(address).As16(), Type: t, Interface: "eth0"}
}

func TestGIDIsTheOneThatPeersReach(t *testing.T) {
	card := []GIDEntry{ // as a card with two addresses has them
		entry(0, "fe80::1", RoCEv1), entry(1, "fe80::1", RoCEv2), entry(2, "10.1.0.1", RoCEv1), entry(3, "10.1.0.1",
			RoCEv2),
		entry(4, "2001:db8::1", RoCEv1), entry(5, "2001:db8::1", RoCEv2), entry(8, "192.168.0.1", RoCEv2),
	}
	for _, c := range []struct {
		of    []GIDEntry
		want  string
		index int
	}{
		{card, "", 3},
		{card[:2], "", 1},
		{card[:3], "", 1},
		{card[4:6], "", 5},
		{[]GIDEntry{entry(0, "::1", RoCEv2), entry(1, "fe80::1", RoCEv2)}, "", 1},
		{[]GIDEntry{entry(0, "127.0.0.1", RoCEv2), entry(1, "fe80::1", RoCEv2)}, "", 1},
		{[]GIDEntry{entry(7, "10.0.0.2", RoCEv2), entry(3, "10.0.0.1", RoCEv2)}, "", 3},
		{[]GIDEntry{entry(0, "fe80::1", InfiniBand), entry(1, "fe80::2", InfiniBand)}, "", 0},
		{[]GIDEntry{{Index: 0, Type: RoCEv2}, entry(4, "fe80::1", RoCEv1)}, "", 4},
		{card, "0", 0},
		{card, "8", 8},
		{card, "192.168.0.1", 8},
		{card, "::ffff:192.168.0.1", 8},
		{card, "2001:db8::1", 5},
		{card, "192.168.0.0/16", 8},
		{card, "fe80::/10", 1},
	} {
		if e, err := ChooseGID(c.of, c.want); err != nil || e.Index != c.index {
			t.Errorf("%v, %q: %v, %v; want index %d", c.of, c.want, e, err, c.index)
		}
	}
	for want, why := range map[string]string{"": "no address", "7": "no address", "1.2.3.4": "no address",
		"eth0": "want an index",
		"-1":   "want an index", "fe80::1%eth0": "want an index", "10.0.0.0/33": "want an index"} {
		of := card
		if want == "" {
			of = nil
		}
		if e, err := ChooseGID(of, want); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%q: %v, %v; want an error with %q", want, e, err, why)
		}
	}
	if _, err := ChooseGID(card, "10.9.9.9"); err == nil || !strings.Contains(err.Error(),
		"10.1.0.1 (index 3, RoCE v2, eth0)") {
		t.Errorf("the error does not name the addresses: %v", err)
	}
	if _, err := ChooseGID([]GIDEntry{{Index: 2}}, ""); err == nil {
		t.Error("an empty entry is an address")
	}
}

// What a packet needs on its way depends on the addresses of the two ends, and on their ports.
func TestRouteLeads(t *testing.T) {
	gid := func(s string) GID { return netip.MustParseAddr(s).As16() }
	for _, c := range []struct {
		name     string
		link     GIDType
		from, to GID
		grh      bool
		want     Route
		wrong    string
	}{
		{"RoCE", RoCEv2, gid("fe80::1"), gid("fe80::2"), false, Route{LID: 3, Global: true}, ""},
		{"a subnet", InfiniBand, gid("fe80::1"), gid("fe80::2"), false, Route{LID: 3}, ""},
		{"no addresses", InfiniBand, GID{}, GID{}, false, Route{LID: 3}, ""},
		{"a subnet with addresses", InfiniBand, gid("fe80::1"), gid("fe80::2"), true, Route{LID: 3, Global: true}, ""},
		{"a router", InfiniBand, gid("fec0:0:0:1::1"), gid("fec0:0:1234:2::1"), false,
			Route{LID: 0x1234, Global: true}, ""},
		{"no router", InfiniBand, gid("fec0:0:0:1::1"), gid("fec0:0:0:2::1"), false, Route{LID: 3, Global: true}, ""},
		{"two routers of a subnet", InfiniBand, gid("fec0:0:0:1::1"), gid("fec0:0:1234:1::1"), false,
			Route{LID: 3}, ""},
		{"prefixes that name no router", InfiniBand, gid("2001:db8:1:1::1"), gid("2001:db8:2:1::1"), false,
			Route{LID: 3, Global: true}, ""},
		{"no address here", InfiniBand, GID{}, gid("fec0:0:1234:2::1"), false, Route{}, "both need one"},
		{"addresses needed", InfiniBand, GID{}, GID{}, true, Route{}, "both need one"},
	} {
		var r Route
		err := r.Lead(c.link, c.from, c.to, 3, c.grh)
		if c.wrong != "" {
			if err == nil || !strings.Contains(err.Error(), c.wrong) {
				t.Errorf("%s: %v, want an error with %q", c.name, err, c.wrong)
			}
			continue
		}
		if c.want.GID = c.to; err != nil || r != c.want {
			t.Errorf("%s: %+v, %v, want %+v", c.name, r, err, c.want)
		}
	}
}
