package verbs

import (
	"encoding/binary"
	"fmt"
	"math/bits"

	"tutti/p2p"
	"tutti/rdma"
)

// service marks the frames of this package in p2p.Header.Service.
const service = 2

// Kinds of control frames, in p2p.Header.Kind. Seq is the number of the lane, which the dialler
// gives, from 1 on.
const (
	frameProposal   = iota + 1 // of the dialler; payload: a setup
	frameAcceptance            // of the acceptor; payload: a setup
	frameRefusal               // of the acceptor; payload: a text
	frameReady                 // the frames behind it, up to frameDown, are in the ring
	// The sender reads nothing more of the ring. It has taken what is before position Off, where
	// frame or skip mark Count begins. The frames behind it follow over the TCP connection.
	frameDown
	// Frames about the memory of puts and gets: see bulk and exposure. Call is the generation.
	frameFenced  // the sender's queue pairs of the lane are closed
	frameClaim   // asks for a key of region Off
	frameKey     // the key Chan for Count bytes at address Off, with the rights Flags; without rights: refused
	frameRevoke  // requests with the key fail from now on
	frameRevoked // no request with it is under way, nor will be
)

// Limits of a setup. The largest frame of a TCP connection is a quarter of a ring.
const (
	minRing     = 32 << 10
	maxRing     = 16 << 20
	setupSize   = 48
	maxText     = 512
	wireVersion = 2
)

// setup is what one end tells the other to connect with.
type setup struct {
	link    rdma.GIDType
	mtu     int // bytes
	gid     rdma.GID
	lid     uint16
	qp      uint32
	psn     uint32
	ring    int    // bytes, a power of two: of both ends' the smaller one
	address uint64 // of the ring
	key     uint32
	reads   int    // that its queue pair for data serves at a time
	bulk    uint32 // queue pair for data, with the same first packet number
}

// encode returns the setup as bytes, little-endian:
//
//	0   format, 2
//	1   protocol of the address
//	2   MTU, 256 << n
//	3   bytes of the ring, 1 << n
//	4   queue pair, first packet number
//	12  key
//	16  address of the ring
//	24  address of the port
//	40  local identifier
//	42  reads at a time
//	43  0
//	44  queue pair for data
func (s *setup) encode() []byte {
	le := binary.LittleEndian
	b := []byte{wireVersion, byte(s.link), byte(bits.Len(uint(s.mtu)) - 9), byte(bits.Len(uint(s.ring)) - 1)}
	b = le.AppendUint32(le.AppendUint32(le.AppendUint32(b, s.qp), s.psn), s.key)
	b = append(le.AppendUint64(b, s.address), s.gid[:]...)
	return le.AppendUint32(append(le.AppendUint16(b, s.lid), byte(s.reads), 0), s.bulk)
}

// decodeSetup accepts exactly the results of encode. The error wraps p2p.ErrProtocol.
func decodeSetup(b []byte) (s setup, err error) {
	bad := func(format string, args ...any) (setup, error) {
		return setup{}, fmt.Errorf("%w: setup of %d bytes: %s", p2p.ErrProtocol, len(b), fmt.Sprintf(format, args...))
	}
	switch {
	case len(b) > 0 && b[0] != wireVersion:
		return bad("format %d, this build speaks %d: run the same version on all ranks", b[0], wireVersion)
	case len(b) != setupSize:
		return bad("want %d", setupSize)
	case rdma.GIDType(b[1]) > rdma.RoCEv2 || b[2] > 4 || b[3] > 31 || b[42] == 0 || b[43] != 0:
		return bad("protocol %d, MTU code %d, ring code %d, %d reads", b[1], b[2], b[3], b[42])
	}
	le := binary.LittleEndian
	s = setup{link: rdma.GIDType(b[1]), mtu: 256 << b[2], ring: 1 << b[3], qp: le.Uint32(b[4:]), psn: le.Uint32(b[8:]),
		key: le.Uint32(b[12:]), address: le.Uint64(b[16:]), gid: rdma.GID(b[24:40]), lid: le.Uint16(b[40:]),
		reads: int(b[42]), bulk: le.Uint32(b[44:])}
	switch {
	case s.ring < minRing || s.ring > maxRing:
		return bad("a ring of %d bytes, want %d to %d", s.ring, minRing, maxRing)
	case s.qp == 0 || s.qp >= 1<<24 || s.psn >= 1<<24 || s.bulk == 0 || s.bulk >= 1<<24:
		return bad("queue pairs %d and %d, packet number %d", s.qp, s.bulk, s.psn)
	case s.address%unit != 0 || s.address+uint64(s.ring) < s.address:
		return bad("memory at %#x, want an address aligned to %d", s.address, unit)
	}
	return s, nil
}

// endpoint is what a transport publishes: the format, the protocol of its port, and the endpoint of
// its TCP listener.
type endpoint struct {
	link rdma.GIDType
	tcp  []byte
}

func (e endpoint) encode() []byte { return append([]byte{wireVersion, byte(e.link)}, e.tcp...) }

func decodeEndpoint(b []byte) (endpoint, error) {
	if len(b) < 3 || len(b) > p2p.MaxEndpoint || b[0] != wireVersion || rdma.GIDType(b[1]) > rdma.RoCEv2 {
		return endpoint{}, fmt.Errorf("rdma: %d bytes are no endpoint of format %d: run the same version on all ranks",
			len(b), wireVersion)
	}
	return endpoint{link: rdma.GIDType(b[1]), tcp: b[2:]}, nil
}
