package tcp

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"tutti/internal/route"
)

var sample = endpoint{maxFrame: 256 << 10, host: 0x1122334455667788, at: []netip.AddrPort{
	netip.MustParseAddrPort("10.0.0.3:29500"), netip.MustParseAddrPort("[fd00::3]:29501")}}

func TestEndpointEncoding(t *testing.T) {
	want := "\x03\x00\x00\x04\x00\x88\x77\x66\x55\x44\x33\x22\x11\x02" +
		"\x3c\x73\x04\x0a\x00\x00\x03" +
		"\x3d\x73\x06\xfd\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x03"
	if got := sample.encode(); string(got) != want {
		t.Errorf("encoded as %q, want %q: peers of other builds do not understand it", got, want)
	}
	for cut := range len(want) {
		if _, err := decodeEndpoint([]byte(want[:cut])); err == nil {
			t.Errorf("the first %d bytes are taken for an endpoint", cut)
		}
	}
	change := func(at int, with string) []byte { return []byte(want[:at] + with + want[at+len(with):]) }
	for what, b := range map[string][]byte{
		"version 2":              change(0, "\x02"),
		"frames of up to 0":      change(1, "\x00\x00\x00\x00"),
		"frames of up to 262145": change(1, "\x01"),
		"frames of up to 2147":   change(1, "\x00\x00\x00\x80"),
		"0 addresses":            change(13, "\x00"),
		"17 addresses":           change(13, "\x11"),
		"port 0":                 change(14, "\x00\x00"),
		"unknown kind 5":         change(16, "\x05"),
		"0.0.0.0":                change(17, "\x00\x00\x00\x00"),
		"224.0.0.1":              change(17, "\xe0\x00\x00\x01"),
		"::ffff:10.0.0.1":        change(24, "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x0a\x00\x00\x01"),
		"1 bytes too many":       []byte(want + "x"),
		"at most 4096":           make([]byte, 4097),
	} {
		if e, err := decodeEndpoint(b); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: decoded as %+v, %v", what, e, err)
		}
	}
}

func TestEndpointRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		e := endpoint{maxFrame: frameUnit * rapid.IntRange(1, MaxMaxFrame/frameUnit).Draw(t, "frame"),
			host: rapid.Uint64().Draw(t, "host")}
		for range rapid.IntRange(1, maxAddresses).Draw(t, "n") {
			b := rapid.SliceOfN(rapid.ByteRange(1, 127), 16, 16).Draw(t, "addr")
			addr := netip.AddrFrom16([16]byte(b))
			if rapid.Bool().Draw(t, "IPv4") {
				addr = netip.AddrFrom4([4]byte(b))
			}
			e.at = append(e.at, netip.AddrPortFrom(addr, rapid.Uint16Min(1).Draw(t, "port")))
		}
		b := e.encode()
		if len(b) > 4096 {
			t.Fatalf("%d bytes", len(b))
		}
		if d, err := decodeEndpoint(b); err != nil || !reflect.DeepEqual(d, e) {
			t.Fatalf("%+v became %+v, %v", e, d, err)
		}
	})
}

// What decodes as an endpoint encodes to the same bytes.
func FuzzEndpoint(f *testing.F) {
	f.Add(sample.encode())
	f.Add([]byte{2, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 6, 255})
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := decodeEndpoint(b)
		if err != nil {
			return
		}
		if !bytes.Equal(e.encode(), b) {
			t.Errorf("%q decodes to %+v, which encodes to %q", b, e, e.encode())
		}
	})
}

func TestPaths(t *testing.T) {
	const elsewhere = route.Elsewhere
	addr := netip.MustParseAddr
	m := route.Machine{
		Nets: []netip.Prefix{netip.MustParsePrefix("10.1.0.7/16"), netip.MustParsePrefix("192.168.0.7/24"),
			netip.MustParsePrefix("172.17.0.1/16"), netip.MustParsePrefix("127.0.0.1/8")},
		Allows: func(a netip.Addr) bool { return a != addr("192.168.0.7") },
		Source: func(to netip.AddrPort) (netip.Addr, error) {
			switch s := to.Addr().String(); {
			case strings.HasPrefix(s, "10.1.") || strings.HasPrefix(s, "10.2."):
				return addr("10.1.0.7"), nil
			case strings.HasPrefix(s, "192.168.0."):
				return addr("192.168.0.7"), nil
			case strings.HasPrefix(s, "172.17."):
				return addr("172.17.0.1"), nil
			case to.Addr().IsLoopback():
				return to.Addr(), nil
			}
			return netip.Addr{}, errors.New("network is unreachable")
		},
	}
	for _, c := range []struct {
		peer route.Where
		at   string
		want string
		why  string // of what cannot be dialled
	}{
		{elsewhere, "192.168.0.9 10.2.0.9 10.1.0.9", "10.1.0.9:1 10.2.0.9:1 192.168.0.9:1", ""},
		{elsewhere, "127.0.0.1 10.1.0.9", "10.1.0.9:1", "127.0.0.1:1: is an address of this host"},
		{route.Here, "127.0.0.1 10.1.0.7", "10.1.0.7:1 127.0.0.1:1", ""},
		{route.Unknown, "127.0.0.1 10.2.0.9", "10.2.0.9:1 127.0.0.1:1", ""}, // unknown: perhaps
		{elsewhere, "172.17.0.1 10.1.0.9", "10.1.0.9:1", "172.17.0.1:1: is an address of this host"},
		{elsewhere, "172.17.0.2", "172.17.0.2:1", ""},
		{elsewhere, "fd00::9 10.1.0.9", "10.1.0.9:1", "[fd00::9]:1: no route: network is unreachable"},
		{elsewhere, "8.8.8.8", "", "8.8.8.8:1: no route: network is unreachable"},
	} {
		var e endpoint
		for s := range strings.SplitSeq(c.at, " ") {
			e.at = append(e.at, netip.AddrPortFrom(addr(s), 1))
		}
		paths, why := e.paths(m, c.peer)
		var got []string
		for _, p := range paths {
			got = append(got, p.To.String())
		}
		if fmt.Sprint(strings.Join(got, " ")) != c.want || !strings.HasPrefix(list(why).Error(), c.why) ||
			c.why == "" && len(why) > 0 {
			t.Errorf("%s, %d: %q because %q, want %q because %q", c.at, c.peer, got, list(why), c.want, c.why)
		}
	}
}

func TestThisHostHasAnIdentity(t *testing.T) {
	if hostID() == 0 || whereIs(hostID()) != route.Here || whereIs(hostID()+1) != route.Elsewhere ||
		whereIs(0) != route.Unknown {
		t.Errorf("host %x", hostID())
	}
}
