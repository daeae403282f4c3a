package rdma

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

func (e GIDEntry) String() string {
	s := fmt.Sprintf("%v (index %d, %v", e.GID, e.Index, e.Type)
	if e.Interface != "" {
		s += ", " + e.Interface
	}
	return s + ")"
}

// ChooseGID returns the address of a port that a connection should use, of those that Device.GIDs
// returned. want is an index, an address, or a network such as 10.0.0.0/8; the empty one is any.
//
// Of those that want allows, addresses with RoCE v2 come before those with RoCE v1; of the same
// protocol an address that is routed comes before a link-local one, and that before one of
// loopback; then IPv4 comes before IPv6, then the lower index. An InfiniBand port has addresses of
// one kind.
//
// Indexes change: a program chooses again when a port came back, or its addresses changed. An
// address in want keeps its meaning then, an index may not.
func ChooseGID(entries []GIDEntry, want string) (GIDEntry, error) {
	allows, err := parseGIDs(want)
	if err != nil {
		return GIDEntry{}, err
	}
	var fit []GIDEntry
	for _, e := range entries {
		if e.GID != (GID{}) && allows(e) {
			fit = append(fit, e)
		}
	}
	if len(fit) > 0 {
		return slices.MinFunc(fit, func(a, b GIDEntry) int {
			return cmp.Or(cmp.Compare(order(a), order(b)), cmp.Compare(a.Index, b.Index))
		}), nil
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.String())
	}
	switch {
	case len(all) == 0:
		return GIDEntry{}, fmt.Errorf("rdma: the port has no address: is its network interface up?")
	case want == "":
		return GIDEntry{}, fmt.Errorf("rdma: none of the port's addresses can be used: %s", strings.Join(all, ", "))
	}
	return GIDEntry{}, fmt.Errorf("rdma: the port has no address %q, but %s", want, strings.Join(all, ", "))
}

// Lead has a route lead to the peer's port with an address and, on InfiniBand, a local identifier.
// from is the address of this end. grh says that the port of one of the ends has Port.GRHRequired.
//
// Within a subnet InfiniBand needs no address otherwise. To another subnet the packets go to a
// router: to the local identifier in the peer's address (FLID), or to lid if there is none.
func (r *Route) Lead(link GIDType, from, to GID, lid uint16, grh bool) error {
	r.GID, r.LID, r.Global = to, lid, true
	switch {
	case link != InfiniBand:
	case sameSubnet(from, to):
		r.Global = grh
	case siteLocal(to):
		r.LID = cmp.Or(binary.BigEndian.Uint16(to[4:]), lid)
	}
	if r.Global && (from == GID{} || to == GID{}) {
		return fmt.Errorf("rdma: packets between the two ports need addresses, and these have %v and %v: both need one",
			from, to)
	}
	return nil
}

// sameSubnet reports whether two InfiniBand addresses are of one subnet. Those that may name a
// router say so in the last 16 bits of their prefix.
func sameSubnet(a, b GID) bool {
	return [8]byte(a[:8]) == [8]byte(b[:8]) || siteLocal(a) && siteLocal(b) && [2]byte(a[6:8]) == [2]byte(b[6:8])
}

// siteLocal reports whether the prefix of an InfiniBand address has the FLID of a router, or 0, and
// the number of the subnet: it is of fec0::/10.
func siteLocal(a GID) bool { return a[0] == 0xfe && a[1]&0xc0 == 0xc0 }

// CheckGID reports what is wrong with want of ChooseGID, nil if it has one of the forms.
func CheckGID(want string) error {
	_, err := parseGIDs(want)
	return err
}

// order returns a number that is the lower the better the address is.
func order(e GIDEntry) int {
	a, n := e.GID.Addr(), 0
	switch {
	case a.IsLoopback() || a.IsMulticast() || a.IsUnspecified():
		n = 4
	case a.IsLinkLocalUnicast():
		n = 2
	}
	if !a.Is4() {
		n++
	}
	if e.Type == RoCEv1 {
		n += 6
	}
	return n
}

// parseGIDs returns which addresses want allows.
func parseGIDs(want string) (func(GIDEntry) bool, error) {
	if want == "" {
		return func(GIDEntry) bool { return true }, nil
	}
	if i, err := strconv.Atoi(want); err == nil && i >= 0 {
		return func(e GIDEntry) bool { return e.Index == i }, nil
	}
	if a, err := netip.ParseAddr(want); err == nil && a.Zone() == "" {
		return func(e GIDEntry) bool { return e.GID.Addr() == a.Unmap() }, nil
	}
	if p, err := netip.ParsePrefix(want); err == nil {
		return func(e GIDEntry) bool { return p.Contains(e.GID.Addr()) }, nil
	}
	return nil,
		fmt.Errorf("rdma: address %q of a port: want an index (3), an address (10.0.0.1) or a network (10.0.0.0/8)",
			want)
}
