package tcp

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"sync"

	"tutti/internal/ident"
	"tutti/p2p"
)

// endpoint is what a listener publishes. Its encoding, little-endian:
//
//	version u8 (1), connections it takes per link u8, its largest frame u32, its host's id u64,
//	number of candidates u8, candidates
//
// where a candidate is port u16, kind u8 and then 4 bytes (kind 4), 16 bytes (kind 6) or a length
// u8 and a name (kind 'n').
type endpoint struct {
	conns    int
	maxFrame int
	host     uint64 // hostID, 0 if unknown
	at       []candidate
}

// candidate is one address at which a listener may be reachable.
type candidate struct {
	addr netip.Addr // invalid: the candidate has a name
	name string     // resolved when dialled
	port uint16
}

const (
	endpointVersion = 1
	endpointFixed   = 15
	maxCandidates   = 16
	maxName         = 253
)

func (c candidate) String() string {
	if c.addr.IsValid() {
		return netip.AddrPortFrom(c.addr, c.port).String()
	}
	return fmt.Sprintf("%s:%d", c.name, c.port)
}

func validName(s string) bool {
	return s != "" && len(s) <= maxName && !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && r != '.' && r != '-' && r != '_'
	})
}

func (e endpoint) encode() []byte {
	b := []byte{endpointVersion, byte(e.conns)}
	b = binary.LittleEndian.AppendUint32(b, uint32(e.maxFrame))
	b = binary.LittleEndian.AppendUint64(b, e.host)
	b = append(b, byte(len(e.at)))
	for _, c := range e.at {
		b = binary.LittleEndian.AppendUint16(b, c.port)
		switch {
		case !c.addr.IsValid():
			b = append(b, 'n', byte(len(c.name)))
			b = append(b, c.name...)
		case c.addr.Is4():
			a := c.addr.As4()
			b = append(append(b, 4), a[:]...)
		default:
			a := c.addr.As16()
			b = append(append(b, 6), a[:]...)
		}
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
	e.conns = int(b[1])
	e.maxFrame = int(binary.LittleEndian.Uint32(b[2:]))
	e.host = binary.LittleEndian.Uint64(b[6:])
	n := int(b[14])
	switch {
	case e.conns < 1 || e.conns > MaxConns:
		return bad("%d connections per link, want 1 to %d", e.conns, MaxConns)
	case e.maxFrame < MinFrame || e.maxFrame > MaxMaxFrame || e.maxFrame%frameUnit != 0:
		return bad("frames of up to %d bytes, want a multiple of %d from %d to %d", e.maxFrame, frameUnit, MinFrame,
			MaxMaxFrame)
	case n < 1 || n > maxCandidates:
		return bad("%d addresses, want 1 to %d", n, maxCandidates)
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
		c := candidate{port: binary.LittleEndian.Uint16(head)}
		var raw []byte
		switch head[2] {
		case 4:
			raw = take(4)
		case 6:
			raw = take(16)
		case 'n':
			if l := take(1); l != nil {
				raw = take(int(l[0]))
			}
		default:
			return bad("address %d has the unknown kind %d", i, head[2])
		}
		if raw == nil {
			return bad("ends in address %d of %d", i, n)
		}
		if head[2] == 'n' {
			c.name = string(raw)
			if !validName(c.name) {
				return bad("address %d is no host name: %q", i, c.name)
			}
		} else {
			c.addr, _ = netip.AddrFromSlice(raw)
			if c.addr.Is4In6() || c.addr.IsUnspecified() || c.addr.IsMulticast() {
				return bad("address %d, %v, is not one that can be dialled", i, c.addr)
			}
		}
		if c.port == 0 {
			return bad("address %d has port 0", i)
		}
		e.at = append(e.at, c)
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
