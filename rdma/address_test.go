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
