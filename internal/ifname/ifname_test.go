package ifname

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func addrs(s ...string) (out []netip.Addr) {
	for _, a := range s {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

var machine = []Interface{
	{"lo", true, addrs("127.0.0.1", "::1")},
	{"docker0", false, addrs("172.17.0.1")},
	{"eth0", false, addrs("10.0.0.7", "fe80::1", "2001:db8::7", "::ffff:10.0.0.7")},
	{"eth1", false, addrs("192.168.5.7", "169.254.3.3")},
	{"ib0", false, addrs("10.9.0.7")},
}

func TestChoose(t *testing.T) {
	for _, c := range []struct{ spec, want string }{
		{"", "10.0.0.7 2001:db8::7 192.168.5.7 10.9.0.7 172.17.0.1 127.0.0.1 ::1"},
		{"eth0", "10.0.0.7 2001:db8::7"},
		{"eth*", "10.0.0.7 2001:db8::7 192.168.5.7"},
		{"*", "10.0.0.7 2001:db8::7 192.168.5.7 10.9.0.7 172.17.0.1 127.0.0.1 ::1"},
		{" ib0 , lo ", "10.9.0.7 127.0.0.1 ::1"},
		{"10.0.0.0/8", "10.0.0.7 10.9.0.7"},
		{"10.0.0.0/8,^10.9.0.0/16", "10.0.0.7"},
		{"192.168.5.7", "192.168.5.7"},
		{"2001:db8::/32", "2001:db8::7"},
		{"^docker0,lo", "10.0.0.7 2001:db8::7 192.168.5.7 10.9.0.7"},
		{"^docker*,^lo,^eth*", "10.9.0.7"},
		{"eth*,^eth1", "10.0.0.7 2001:db8::7"},
		{"docker0", "172.17.0.1"},
	} {
		f, err := Parse(c.spec)
		if err != nil {
			t.Errorf("Parse(%q): %v", c.spec, err)
			continue
		}
		got, err := f.Choose(machine)
		if s := strings.Trim(fmt.Sprint(got), "[]"); err != nil || s != c.want {
			t.Errorf("%q gives %q, %v, want %q", c.spec, s, err, c.want)
		}
	}
}

// A machine without an address does not lack one because of the filter.
func TestChooseOfNone(t *testing.T) {
	for _, spec := range []string{"", "eth0"} {
		f, err := Parse(spec)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := f.Choose([]Interface{{Name: "eth0", Addrs: addrs("fe80::1")}}); !errors.Is(err, ErrNone) ||
			!strings.Contains(err.Error(), "no interface that is up has one") {
			t.Errorf("%q: %v, %v", spec, got, err)
		}
	}
}

func TestChooseWithoutMatchListsInterfaces(t *testing.T) {
	for _, spec := range []string{"eth", "wlan0", "^*", "169.254.0.0/16", "fe80::1", "11.0.0.0/8"} {
		f, err := Parse(spec)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := f.Choose(machine); err == nil || !strings.Contains(err.Error(), "eth1 192.168.5.7") ||
			!strings.Contains(err.Error(), spec) {
			t.Errorf("%q gives %v, %v: want an error that quotes it and lists what there is", spec, got, err)
		}
	}
}

func TestParseErrors(t *testing.T) {
	for _, spec := range []string{",", "eth0,", "^", "^^eth0", "10.0.0.0/33", "10.0.0/8", "e*h",
		"a-name-beyond-15-bytes", "=eth0", "fe80::1%eth0", "eth 0"} {
		if f, err := Parse(spec); err == nil || !strings.Contains(err.Error(), spec) {
			t.Errorf("Parse(%q) = %+v, %v: want an error that quotes it", spec, f, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"", "eth0", "^docker0,lo", "10.0.0.0/8,^10.9.0.0/16", "*", "^", "::/0", "a*,^b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, spec string) {
		flt, err := Parse(spec)
		if err != nil {
			return
		}
		got, err := flt.Choose(machine)
		if (err == nil) != (len(got) > 0) {
			t.Fatalf("%q: %v, %v", spec, got, err)
		}
		for _, a := range got {
			if a.IsLinkLocalUnicast() || a.Is4In6() || !slices.ContainsFunc(machine,
				func(i Interface) bool { return slices.Contains(i.Addrs, a) && flt.Allows(i.Name, a) }) {
				t.Fatalf("%q chose %v", spec, a)
			}
		}
	})
}

func TestThisMachine(t *testing.T) {
	got, err := Filter{}.Addrs()
	if err != nil {
		t.Skip("no network:", err)
	}
	if i := slices.IndexFunc(got, netip.Addr.IsLoopback); i >= 0 &&
		slices.ContainsFunc(got[i:], func(a netip.Addr) bool { return !a.IsLoopback() }) {
		t.Errorf("loopback is not last: %v", got)
	}
}
