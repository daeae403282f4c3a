// Package ifname chooses which of the machine's network addresses a job uses.
//
// By default all interfaces that are up are used, the likely ones first, and the routing table
// decides which of them leads to a peer. A Filter excludes interfaces: those that lead nowhere
// (docker0), that have another purpose (a management network), or that are slow. Listeners and
// diallers use the same filter (TUTTI_IFNAME): an address that is not allowed is neither listened
// on nor published.
package ifname

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
)

// ErrNone says that this machine has no network address, or none that a Filter allows.
var ErrNone = errors.New("no network address left")

// Filter selects interfaces and addresses. The zero Filter allows all.
type Filter struct {
	spec       string
	allow, ban []rule
}

// rule is a name ("eth0"), the beginning of a name ("eth*") or a network.
type rule struct {
	name  string
	glob  bool
	block netip.Prefix // valid: the rule is a network
}

// Interface is one network interface that is up, with its usable addresses.
type Interface struct {
	Name     string
	Loopback bool
	Addrs    []netip.Addr
}

// Parse reads a comma-separated list of interface names ("eth0"), beginnings of names ("eth*"),
// addresses ("10.0.0.7") and networks ("10.0.0.0/8"). An item after "^" is excluded; a "^" at the
// very front excludes the whole list, as other collective libraries read it ("^docker0,lo" excludes
// both). If nothing is listed but exclusions, or nothing at all, everything else is allowed.
func Parse(spec string) (Filter, error) {
	f := Filter{spec: strings.TrimSpace(spec)}
	if f.spec == "" {
		return f, nil
	}
	all := strings.HasPrefix(f.spec, "^")
	for item := range strings.SplitSeq(f.spec, ",") {
		item = strings.TrimSpace(item)
		name, banned := strings.CutPrefix(item, "^")
		r, err := parseRule(strings.TrimSpace(name))
		if err != nil {
			return Filter{}, fmt.Errorf("interfaces %q: %w", spec, err)
		}
		if banned || all {
			f.ban = append(f.ban, r)
		} else {
			f.allow = append(f.allow, r)
		}
	}
	return f, nil
}

func parseRule(s string) (rule, error) {
	if strings.Contains(s, "/") {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			return rule{}, fmt.Errorf("%q is no network: expected ADDRESS/BITS", s)
		}
		return rule{block: p.Masked()}, nil
	}
	if a, err := netip.ParseAddr(s); err == nil && a.Zone() == "" {
		return rule{block: netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen())}, nil
	}
	name, glob := strings.CutSuffix(s, "*")
	if name == "" && !glob || len(name) > 15 || strings.ContainsAny(name, "^*:% \t\n=") {
		return rule{}, fmt.Errorf("%q is no interface name: expected NAME, NAME*, ADDRESS or ADDRESS/BITS, after "+
			"^ to exclude", s)
	}
	return rule{name: name, glob: glob}, nil
}

func (r rule) matches(name string, a netip.Addr) bool {
	switch {
	case r.block.IsValid():
		return r.block.Contains(a)
	case r.glob:
		return strings.HasPrefix(name, r.name)
	}
	return name == r.name
}

// String returns the argument of Parse.
func (f Filter) String() string { return f.spec }

// Allows says whether the filter allows address a of the interface name.
func (f Filter) Allows(name string, a netip.Addr) bool {
	hit := func(r rule) bool { return r.matches(name, a.Unmap()) }
	return !slices.ContainsFunc(f.ban, hit) && (len(f.allow) == 0 || slices.ContainsFunc(f.allow, hit))
}

// Addrs returns the allowed addresses of this machine's interfaces that are up, best first: no
// link-local ones, container and VM bridges (which have the same address on every machine) behind
// the others, loopback last. It is an error if none is left; the error lists the candidates.
func (f Filter) Addrs() ([]netip.Addr, error) {
	ifs, err := Interfaces()
	if err != nil {
		return nil, err
	}
	return f.Choose(ifs)
}

// Choose is Addrs on given interfaces.
func (f Filter) Choose(ifs []Interface) ([]netip.Addr, error) {
	type ranked struct {
		class int
		addr  netip.Addr
	}
	var got []ranked
	var seen []string
	for _, i := range ifs {
		for _, a := range i.Addrs {
			a = a.Unmap()
			if a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified() {
				continue
			}
			seen = append(seen, fmt.Sprintf("%s %v", i.Name, a))
			if !f.Allows(i.Name, a) {
				continue
			}
			class := 0
			switch {
			case i.Loopback || a.IsLoopback():
				class = 2
			case bridge(i.Name):
				class = 1
			}
			got = append(got, ranked{class, a})
		}
	}
	switch {
	case len(seen) == 0:
		return nil, fmt.Errorf("%w: no interface that is up has one", ErrNone)
	case len(got) == 0:
		return nil, fmt.Errorf("%w: interfaces %q allow none of [%s]", ErrNone, f.spec, strings.Join(seen, ", "))
	}
	slices.SortStableFunc(got, func(a, b ranked) int { return cmp.Compare(a.class, b.class) })
	var out []netip.Addr
	for _, r := range got {
		if !slices.Contains(out, r.addr) {
			out = append(out, r.addr)
		}
	}
	return out, nil
}

func bridge(name string) bool {
	for _, p := range []string{"docker", "br-", "virbr", "veth", "cni", "lxcbr", "podman", "flannel", "vmnet"} {
		if strings.HasPrefix(name, p) {
			return true
		}
	}
	return false
}

// Interfaces lists this machine's interfaces that are up.
func Interfaces() ([]Interface, error) {
	ifs, err := net.Interfaces()
	if err != nil {
		return nil, fmt.Errorf("list network interfaces: %w", err)
	}
	var out []Interface
	for _, i := range ifs {
		if i.Flags&net.FlagUp == 0 {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			continue // the interface was removed between the two calls
		}
		o := Interface{Name: i.Name, Loopback: i.Flags&net.FlagLoopback != 0}
		for _, a := range addrs {
			if n, ok := a.(*net.IPNet); ok {
				if ip, ok := netip.AddrFromSlice(n.IP); ok {
					o.Addrs = append(o.Addrs, ip.Unmap())
				}
			}
		}
		out = append(out, o)
	}
	return out, nil
}
