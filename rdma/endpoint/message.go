package endpoint

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"tutti/internal/plain"
	"tutti/rdma"
)

// Limits of a message.
const (
	MaxQPs     = 64  // queue pairs of an endpoint
	maxText    = 256 // bytes of a reason
	headerSize = 60
	// MaxMessage is the most bytes of a request or a reply.
	MaxMessage = headerSize + 8*MaxQPs + maxText
)

// wireVersion is the first byte of every message. In all versions a message has headerSize bytes at
// least, with the same sender, of which an end makes the answer to a request of another one.
const wireVersion = 2

// end names an end of a connection, at a point of its history.
type end struct {
	session uint64 // 0: not known
	version uint64 // see machine.version
}

// generation returns the generation of the queue pairs that the end has, or is about to make.
func (e end) generation() uint64 { return e.version / 2 }

// bound reports whether these queue pairs are connected.
func (e end) bound() bool { return e.version%2 == 1 }

func (e end) String() string {
	if e.session == 0 {
		return "unknown"
	}
	return fmt.Sprintf("%x.%d", e.session, e.version)
}

// offer is what one end tells the other to connect its queue pairs with.
type offer struct {
	link  rdma.GIDType
	gid   rdma.GID
	lid   uint16
	grh   bool // see rdma.Port.GRHRequired
	mtu   int  // bytes
	reads int  // at a time
	qps   []pair
}

// pair is a queue pair of an offer.
type pair struct{ number, psn uint32 }

func (o *offer) equal(p *offer) bool {
	return o.link == p.link && o.gid == p.gid && o.lid == p.lid && o.grh == p.grh && o.mtu == p.mtu &&
		o.reads == p.reads && slices.Equal(o.qps, p.qps)
}

type kind uint8

// A request asks the other end to connect with the offer. The other kinds answer it: accepted has
// the offer that the request's was connected with; stale says that the request does not name the
// present version of the other end; busy, with a reason, that it may succeed later; refused, with a
// reason, that it will not.
const (
	request kind = iota + 1
	accepted
	stale
	busy
	refused
	kinds
)

func (k kind) String() string {
	return [...]string{"", "request", "accepted", "stale", "busy", "refused"}[k]
}

// message is a request or a reply. From is the sender at that time, to is the receiver as the
// sender knows it; in a reply, the sender of the request as the request has it.
type message struct {
	kind     kind
	from, to end
	offer    offer  // of a request, and of accepted
	text     string // of busy and refused
}

func (m *message) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v from %v to %v", m.kind, m.from, m.to)
	if m.text != "" {
		fmt.Fprintf(&b, ": %s", m.text)
	}
	return b.String()
}

// encode returns the message as bytes, little-endian:
//
//	0   format, 2
//	1   kind
//	2   number of queue pairs
//	3   protocol of the address
//	4   sender: session, version
//	20  receiver: session, version
//	36  address
//	52  local identifier
//	54  MTU, 256 << n
//	55  reads at a time
//	56  length of the reason
//	58  1: the port needs packets with an address, see rdma.Port.GRHRequired; 0
//	60  queue pairs: number, first packet number, 4 bytes each; then the reason
func (m *message) encode() []byte {
	text := reason(m.text)
	le := binary.LittleEndian
	b := make([]byte, 0, headerSize+8*len(m.offer.qps)+len(text))
	b = append(b, wireVersion, byte(m.kind), byte(len(m.offer.qps)), byte(m.offer.link))
	for _, e := range []end{m.from, m.to} {
		b = le.AppendUint64(le.AppendUint64(b, e.session), e.version)
	}
	b = append(b, m.offer.gid[:]...)
	b = le.AppendUint16(b, m.offer.lid)
	shift := 0
	for m.offer.mtu > 256<<shift {
		shift++
	}
	b = append(b, byte(shift), byte(m.offer.reads))
	b = append(le.AppendUint16(b, uint16(len(text))), 0, 0)
	if m.offer.grh {
		b[58] = 1
	}
	for _, p := range m.offer.qps {
		b = le.AppendUint32(le.AppendUint32(b, p.number), p.psn)
	}
	return append(b, text...)
}

// reason returns the beginning of a reason, as one plain line.
func reason(s string) string {
	if s = plain.Text(s); len(s) > maxText {
		n := maxText
		for !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	return s
}

// refusal answers a request of another format: so the peer, too, learns that the formats differ. It
// returns nil for what is no request.
func refusal(request []byte, why *FormatError) []byte {
	if len(request) < headerSize || len(request) > MaxMessage {
		return nil
	}
	le := binary.LittleEndian
	to := end{max(le.Uint64(request[4:]), 1), le.Uint64(request[12:])} // 0 is invalid
	return (&message{kind: refused, from: end{session: 1}, to: to, text: why.Error()}).encode()
}

// decode reads a message. It keeps nothing of b.
func decode(b []byte) (*message, error) {
	bad := func(format string, args ...any) (*message, error) {
		return nil, fmt.Errorf("rdma: malformed handshake: "+format, args...)
	}
	if len(b) > 0 && b[0] != wireVersion {
		return nil, &FormatError{Peer: b[0], Own: wireVersion}
	}
	if len(b) < headerSize || len(b) > MaxMessage {
		return bad("%d bytes, expected %d to %d", len(b), headerSize, MaxMessage)
	}
	le := binary.LittleEndian
	m := &message{kind: kind(b[1]), from: end{le.Uint64(b[4:]), le.Uint64(b[12:])},
		to: end{le.Uint64(b[20:]), le.Uint64(b[28:])}}
	count, text := int(b[2]), int(le.Uint16(b[56:]))
	o := &m.offer
	o.link, o.lid, o.reads, o.grh = rdma.GIDType(b[3]), le.Uint16(b[52:]), int(b[55]), b[58] == 1
	copy(o.gid[:], b[36:])
	switch {
	case m.kind < request || m.kind >= kinds:
		return bad("kind %d", m.kind)
	case m.from.session == 0 || m.to.session == 0 && (m.kind != request || m.to.version != 0):
		return bad("%v without a session", m)
	case count > MaxQPs || text > maxText || len(b) != headerSize+8*count+text || b[58] > 1 || b[59] != 0:
		return bad("%d bytes for %d queue pairs and a reason of %d bytes", len(b), count, text)
	}
	offers := m.kind == request || m.kind == accepted
	switch {
	case offers != (count > 0) || text > 0 && m.kind != busy && m.kind != refused:
		return bad("%v with %d queue pairs and a reason of %d bytes", m.kind, count, text)
	case !offers && (o.link != 0 || o.lid != 0 || o.reads != 0 || o.grh || b[54] != 0 || o.gid != rdma.GID{}):
		return bad("%v with an address", m.kind)
	case m.kind == accepted && !m.from.bound():
		return bad("accepted by %v, which is not connected", m.from)
	}
	if offers {
		if o.link > rdma.RoCEv2 || b[54] > 4 {
			return bad("protocol %d, MTU code %d", o.link, b[54])
		}
		o.mtu, o.qps = 256<<b[54], make([]pair, count)
	}
	for i := range o.qps {
		p := pair{le.Uint32(b[headerSize+8*i:]), le.Uint32(b[headerSize+8*i+4:])}
		if p.number == 0 || p.number >= 1<<24 || p.psn >= 1<<24 ||
			slices.ContainsFunc(o.qps[:i], func(q pair) bool { return q.number == p.number }) {
			return bad("queue pair %d of %d has the number %d and the packet number %d", i+1, count, p.number, p.psn)
		}
		o.qps[i] = p
	}
	if m.text = string(b[headerSize+8*count:]); !utf8.ValidString(m.text) ||
		strings.ContainsFunc(m.text, plain.Controls) {
		return bad("a reason that is not text")
	}
	return m, nil
}
