package tcp

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync"

	"tutti/internal/ident"
	"tutti/p2p"
)

// endpoint is what a listener publishes. Its encoding, little-endian:
//
//	version u8 (3), its largest frame u32, its host's id u64, number of addresses u8, addresses
//
// where an address is port u16, kind u8 and then 4 bytes (kind 4) or 16 bytes (kind 6).
type endpoint struct {
	maxFrame int
	host     uint64           // hostID, 0 if unknown
	at       []netip.AddrPort // where the listener may be reachable
}

const (
	endpointVersion = 3 // raised with changes of the stream, too
	endpointFixed   = 14
	maxAddresses    = 16
)

func (e endpoint) encode() []byte {
	b := []byte{endpointVersion}
	b = binary.LittleEndian.AppendUint32(b, uint32(e.maxFrame))
	b = binary.LittleEndian.AppendUint64(b, e.host)
	b = append(b, byte(len(e.at)))
	for _, at := range e.at {
		b = binary.LittleEndian.AppendUint16(b, at.Port())
		kind := byte(6)
		if at.Addr().Is4() {
			kind = 4
		}
		b = append(append(b, kind), at.Addr().AsSlice()...)
	}
	return b
}

// decodeEndpoint accepts exactly the results of encode.
func decodeEndpoint(b []byte) (e endpoint, err error) {
	bad := func(format string, args ...any) (endpoint, error) {
		return endpoint{}, fmt.Errorf("tcp endpoint of %d bytes: %s", len(b), fmt.Sprintf(format, args...))
	}
	if len(b) > p2p.MaxEndpoint {
		return bad("at most %d are allowed", p2p.MaxEndpoint)
	}
	if len(b) > 0 && b[0] != endpointVersion {
		return bad("version %d, this build speaks version %d: run the same version on all ranks", b[0], endpointVersion)
	}
	if len(b) < endpointFixed {
		return bad("at least %d are needed", endpointFixed)
	}
	e.maxFrame = int(binary.LittleEndian.Uint32(b[1:]))
	e.host = binary.LittleEndian.Uint64(b[5:])
	n := int(b[13])
	switch {
	case e.maxFrame < MinFrame || e.maxFrame > MaxMaxFrame || e.maxFrame%frameUnit != 0:
		return bad("frames of up to %d bytes, want a multiple of %d from %d to %d", e.maxFrame, frameUnit, MinFrame,
			MaxMaxFrame)
	case n < 1 || n > maxAddresses:
		return bad("%d addresses, want 1 to %d", n, maxAddresses)
	}
	rest := b[endpointFixed:]
	take := func(n int) []byte {
		if n > len(rest) {
			rest = nil
			return nil
		}
		t := rest[:n]
		rest = rest[n:]
		return t
	}
	for i := range n {
		head := take(3)
		if head == nil {
			return bad("ends in address %d of %d", i, n)
		}
		port := binary.LittleEndian.Uint16(head)
		var raw []byte
		switch head[2] {
		case 4:
			raw = take(4)
		case 6:
			raw = take(16)
		default:
			return bad("address %d has the unknown kind %d", i, head[2])
		}
		if raw == nil {
			return bad("ends in address %d of %d", i, n)
		}
		addr, _ := netip.AddrFromSlice(raw)
		if addr.Is4In6() || addr.IsUnspecified() || addr.IsMulticast() {
			return bad("address %d, %v, is not one that can be dialled", i, addr)
		}
		if port == 0 {
			return bad("address %d has port 0", i)
		}
		e.at = append(e.at, netip.AddrPortFrom(addr, port))
	}
	if len(rest) != 0 {
		return bad("%d bytes too many", len(rest))
	}
	return e, nil
}

// hostID identifies the loopback interface of this process: a hash of this boot of the kernel and
// the network namespace; 0 if one of them is unknown.
var hostID = sync.OnceValue(func() uint64 {
	place, err := ident.Here()
	if err != nil {
		return 0
	}
	return place.Hash()
})
