package ports

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"syscall"
	"testing"
)

func TestParseSpec(t *testing.T) {
	for in, want := range map[string]Spec{
		"": {}, "0": {}, " 29500 ": {29500, 29500}, "29500-29600": {29500, 29600}, "1-65535": {1, 65535}, "7-7": {7, 7},
	} {
		got, err := ParseSpec(in)
		if err != nil || got != want {
			t.Errorf("ParseSpec(%q) = %v, %v, want %v", in, got, err, want)
		}
		if again, err := ParseSpec(got.String()); err != nil || again != got {
			t.Errorf("%q does not survive String: %v, %v", in, again, err)
		}
	}
	for _, in := range []string{"x", "-1", "65536", "5-", "-5", "9-8", "0-9", "1-2-3", "1,2", "0x10", "+5"} {
		if got, err := ParseSpec(in); err == nil {
			t.Errorf("ParseSpec(%q) = %v, want an error", in, got)
		} else if !strings.Contains(err.Error(), in) {
			t.Errorf("ParseSpec(%q): error does not quote it: %v", in, err)
		}
	}
}

func TestAfter(t *testing.T) {
	for in, want := range map[string]string{"0": "0", "29500": "29502", "65533": "65535", "5-9": "5-9", "65535": "",
		"65534": ""} {
		spec, err := ParseSpec(in)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := spec.After(2); (err == nil) != (want != "") || err == nil && got.String() != want {
			t.Errorf("the second port after %s: %v, %v, want %q", in, got, err, want)
		}
	}
}

func FuzzParseSpec(f *testing.F) {
	for _, s := range []string{"", "0", "29500-29600", "9-8", "-", "65536"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		s, err := ParseSpec(in)
		if err != nil {
			return
		}
		if s.Lo > s.Hi || s.Lo == 0 && s.Hi != 0 {
			t.Fatalf("ParseSpec(%q) = %+v", in, s)
		}
		if again, err := ParseSpec(s.String()); err != nil || again != s {
			t.Fatalf("%v does not survive String: %v, %v", s, again, err)
		}
	})
}

func port(l net.Listener) uint16 { return uint16(l.Addr().(*net.TCPAddr).Port) }

func TestListen(t *testing.T) {
	ctx := context.Background()
	l, err := Listen(ctx, "127.0.0.1", Spec{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := port(l)

	_, err = Listen(ctx, "127.0.0.1", Spec{p, p})
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(),
		fmt.Sprintf("port %d of 127.0.0.1 is taken", p)) {
		t.Errorf("an explicit port that is taken: %v", err)
	}
	if p < 65000 {
		// Other processes may use the neighbouring ports; the range is long enough to find a free
		// one.
		m, err := Listen(ctx, "127.0.0.1", Spec{p, p + 500})
		if err != nil {
			t.Fatal(err)
		}
		if got := port(m); got <= p || got > p+500 {
			t.Errorf("range %d-%d gave %d", p, p+500, got)
		}
		m.Close()
	}
	if _, err = Listen(ctx, "192.0.2.1", Spec{}); err == nil || errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("an address that is not this machine's: %v", err)
	}
	if _, err = Listen(ctx, "", Spec{9, 8}); err == nil || !strings.Contains(err.Error(), "empty") {
		t.Errorf("an empty range: %v", err)
	}
}

func TestListenRangeExhausted(t *testing.T) {
	ctx := context.Background()
	// Two adjacent ports: if another process has the second, that is taken as well.
	a, err := Listen(ctx, "127.0.0.1", Spec{20000, 60000})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if b, err := Listen(ctx, "127.0.0.1", Spec{port(a) + 1, port(a) + 1}); err == nil {
		defer b.Close()
	}
	s := Spec{port(a), port(a) + 1}
	if _, err := Listen(ctx, "127.0.0.1", s); err == nil || !strings.Contains(err.Error(), "all 2 ports "+s.String()) {
		t.Errorf("a range that is taken whole: %v", err)
	}
}

func TestParseAddr(t *testing.T) {
	for in, want := range map[string]struct {
		host string
		spec Spec
	}{"127.0.0.1:9400": {"127.0.0.1", Spec{9400, 9400}}, ":0": {}, "[::1]:9400-9407": {"::1", Spec{9400, 9407}},
		" node3:1 ": {"node3", Spec{1, 1}}} {
		host, spec, err := ParseAddr(in)
		if err != nil || host != want.host || spec != want.spec {
			t.Errorf("ParseAddr(%q) = %q, %v, %v", in, host, spec, err)
		}
	}
	for _, in := range []string{"", "9400", "127.0.0.1", "127.0.0.1:", "::1:9400", "a b:1", "http://x:1", "x:70000",
		"x:9-8"} {
		if host, spec, err := ParseAddr(in); err == nil {
			t.Errorf("ParseAddr(%q) = %q, %v, want an error", in, host, spec)
		}
	}
}
