package endpoint

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strconv"
	"strings"

	"tutti/endpoint/internal/wire"
)

// Info is what an endpoint tells others so that they can connect to it. It contains no secret.
type Info struct {
	// ID is the identity of the endpoint. 0: that of any endpoint at the address is right.
	ID uint64
	// Name is what the endpoint calls itself.
	Name string
	// Addrs are the addresses to dial, HOST:PORT, best first; none: it only dials.
	Addrs []string
}

// maxAddrs bounds the addresses of an Info.
const maxAddrs = 16

// String returns the text of MarshalText; without an ID, the addresses alone.
func (i Info) String() string {
	if i.ID == 0 {
		return strings.Join(i.Addrs, ",")
	}
	return fmt.Sprintf("tutti-endpoint://%s/%s?id=%016x", strings.Join(i.Addrs, ","), url.PathEscape(i.Name), i.ID)
}

// MarshalText implements encoding.TextMarshaler:
// "tutti-endpoint://HOST:PORT,HOST:PORT/NAME?id=HEX". An Info without an ID is
// "HOST:PORT,HOST:PORT".
func (i Info) MarshalText() ([]byte, error) { return []byte(i.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (i *Info) UnmarshalText(text []byte) error {
	got, err := ParseInfo(string(text))
	if err == nil {
		*i = got
	}
	return err
}

// ParseInfo reads the text of an Info. HOST:PORT alone is the endpoint at that address, whichever
// it is.
func ParseInfo(text string) (Info, error) {
	fail := func(why string) (Info, error) {
		return Info{}, fmt.Errorf("endpoint %.100q: %s; want tutti-endpoint://HOST:PORT/NAME?id=HEX or HOST:PORT",
			text, why)
	}
	var i Info
	addrs := text
	if rest, ok := strings.CutPrefix(text, "tutti-endpoint://"); ok {
		var path, query string
		addrs, path, _ = strings.Cut(rest, "/")
		path, query, ok = strings.Cut(path, "?id=")
		if !ok {
			return fail("it has no id")
		}
		var err error
		if i.ID, err = strconv.ParseUint(query, 16, 64); err != nil || len(query) != 16 {
			return fail("its id is not 16 hex digits")
		}
		if i.Name, err = url.PathUnescape(path); err != nil || len(i.Name) > wire.MaxName {
			return fail("its name is malformed")
		}
		if addrs == "" {
			return i, nil
		}
	}
	i.Addrs = strings.Split(addrs, ",")
	if len(i.Addrs) > maxAddrs {
		return fail(fmt.Sprintf("it has more than %d addresses", maxAddrs))
	}
	for _, a := range i.Addrs {
		host, port, err := net.SplitHostPort(a)
		if n, err2 := strconv.ParseUint(port, 10, 16); err != nil || err2 != nil || n == 0 || host == "" {
			return fail(fmt.Sprintf("%.40q is no address", a))
		}
		if strings.ContainsFunc(host, func(r rune) bool {
			return r <= ' ' || r >= 0x7f || strings.ContainsRune("/?@", r)
		}) {
			return fail(fmt.Sprintf("%.40q is no host", host))
		}
	}
	return i, nil
}

// addr is an address as Info has it.
func addr(a netip.AddrPort) string { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()).String() }
