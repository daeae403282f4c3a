package verbs

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"strings"

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
	frameShown                 // of the dialler: its requests have passed the lane
	// Frames follow in the ring. Call is the lane in whose ring those before it end, at position
	// Off. 0: those came over the TCP connection, before this one.
	frameReady
	// The sender has given up the lane, and reads nothing more of the ring. It has taken what is
	// before position Off, where frame or skip mark Count begins. The frames behind it follow over
	// the TCP connection, unless Flags is 1: then they are in the ring of the lane that has
	// followed.
	frameDown
	frameLeft // the sender has read the ring to its end, and requests nothing more over the lane
	frameWish // of the acceptor: a lane beside this one could use more ports
	// Frames about the memory of puts and gets: see bulk and exposure. Call is the generation. The
	// payload of frameKey, unless it is a refusal, is a key for each rail, that of the sender's
	// device of the rail, as railKey.append lays it out, and 0 for a rail without a device.
	frameFenced  // the sender's queue pairs of the lane are closed
	frameClaim   // asks for a key of region Off
	frameKey     // for Count bytes at address Off, with the rights Flags; without: see askAgain; payload: keys
	frameRevoke  // requests with the key fail from now on
	frameRevoked // no request with it is under way, nor will be
)

// askAgain is Count of a frameKey without rights if the memory may have a key later.
const askAgain = 1

// keyBytes is the length of a railKey in a frameKey.
const keyBytes = 16

// railKey is what a request on a rail needs to reach exposed memory. Where writes may be visible
// later than what follows in the lane's ring, they are visible when a read of the byte at reads
// with readKey, which follows on the same rail, has ended.
type railKey struct {
	key, readKey uint32
	reads        uint64 // 0: no read is needed
}

// append appends the key as little-endian bytes in the order of its fields.
func (k railKey) append(b []byte) []byte {
	le := binary.LittleEndian
	return le.AppendUint64(le.AppendUint32(le.AppendUint32(b, k.key), k.readKey), k.reads)
}

// decodeKey takes keyBytes. All of them are valid: the sender's device checks what is done with
// them.
func decodeKey(b []byte) railKey {
	le := binary.LittleEndian
	return railKey{le.Uint32(b), le.Uint32(b[4:]), le.Uint64(b[8:])}
}

// Limits of a setup. The largest frame of a TCP connection is a quarter of a ring.
const (
	minRing     = 32 << 10
	maxRing     = 16 << 20
	maxRails    = 16 // of a lane
	setupHead   = 16
	pathSize    = 32
	maxText     = 1 << 10
	wireVersion = 6
)

// setup is what one end tells the other to connect with.
type setup struct {
	ring    int    // bytes, a power of two: of both ends' the smaller one
	key     uint32 // of the ring
	address uint64
	frames  path
	rails   []path // of the acceptor as many as of the dialler
}

// path is a queue pair of a lane, and how it is reached. The zero path stands for a rail that one
// end leaves out.
type path struct {
	link  rdma.GIDType
	mtu   int // bytes
	gid   rdma.GID
	lid   uint16
	grh   bool // see rdma.Port.GRHRequired
	qp    uint32
	psn   uint32
	reads int // that it serves at a time
	// pair is the number of the port of the other end: of those with the protocol, in the order of
	// their names, counted from 0 and again after the last one. Of the acceptor that of the
	// dialler.
	pair int
}

// encode returns the setup as bytes, little-endian: a head, the path of frames, and the rails.
//
//	0   format, 6
//	1   bytes of the ring, 1 << n
//	2   number of rails
//	3   0
//	4   key
//	8   address of the ring
//
// A path is:
//
//	0   protocol of the address
//	1   MTU, 256 << n
//	2   reads at a time
//	3   number of the port to be paired with
//	4   queue pair, first packet number
//	12  local identifier
//	14  1: the port needs packets with an address, see rdma.Port.GRHRequired; 0
//	16  address of the port
func (s *setup) encode() []byte {
	le := binary.LittleEndian
	b := []byte{wireVersion, byte(bits.Len(uint(s.ring)) - 1), byte(len(s.rails)), 0}
	b = le.AppendUint64(le.AppendUint32(b, s.key), s.address)
	b = s.frames.append(b)
	for i := range s.rails {
		b = s.rails[i].append(b)
	}
	return b
}

func (p *path) append(b []byte) []byte {
	if p.qp == 0 {
		return append(b, make([]byte, pathSize)...)
	}
	le := binary.LittleEndian
	b = append(b, byte(p.link), byte(bits.Len(uint(p.mtu))-9), byte(p.reads), byte(p.pair))
	b = le.AppendUint32(le.AppendUint32(b, p.qp), p.psn)
	b = append(le.AppendUint16(b, p.lid), 0, 0)
	if p.grh {
		b[len(b)-2] = 1
	}
	return append(b, p.gid[:]...)
}

// decodeSetup accepts exactly the results of encode. The error wraps p2p.ErrProtocol.
func decodeSetup(b []byte) (s setup, err error) {
	bad := func(format string, args ...any) (setup, error) {
		return setup{}, fmt.Errorf("%w: setup of %d bytes: %s", p2p.ErrProtocol, len(b), fmt.Sprintf(format, args...))
	}
	switch {
	case len(b) > 0 && b[0] != wireVersion:
		return bad("format %d, this build speaks %d: run the same version on all ranks", b[0], wireVersion)
	case len(b) < setupHead:
		return bad("want at least %d", setupHead)
	case b[2] == 0 || b[2] > maxRails || b[3] != 0 || len(b) != setupHead+pathSize*(1+int(b[2])):
		return bad("%d rails of at most %d", b[2], maxRails)
	case b[1] > 31:
		return bad("ring code %d", b[1])
	}
	le := binary.LittleEndian
	s = setup{ring: 1 << b[1], key: le.Uint32(b[4:]), address: le.Uint64(b[8:]), rails: make([]path, b[2])}
	switch {
	case s.ring < minRing || s.ring > maxRing:
		return bad("a ring of %d bytes, want %d to %d", s.ring, minRing, maxRing)
	case s.address%unit != 0 || s.address+uint64(s.ring) < s.address:
		return bad("memory at %#x, want an address aligned to %d", s.address, unit)
	}
	if s.frames, err = decodePath(b[setupHead:][:pathSize]); err != nil {
		return bad("path of frames: %v", err)
	}
	for i := range s.rails {
		one := b[setupHead+pathSize*(1+i):][:pathSize]
		if [pathSize]byte(one) == [pathSize]byte{} {
			continue
		}
		if s.rails[i], err = decodePath(one); err != nil {
			return bad("rail %d: %v", i, err)
		}
	}
	return s, nil
}

func decodePath(b []byte) (path, error) {
	if rdma.GIDType(b[0]) > rdma.RoCEv2 || b[1] > 4 || b[2] == 0 || b[14] > 1 || b[15] != 0 {
		return path{}, fmt.Errorf("protocol %d, MTU code %d, %d reads, bytes %d and %d", b[0], b[1], b[2], b[14], b[15])
	}
	le := binary.LittleEndian
	p := path{link: rdma.GIDType(b[0]), mtu: 256 << b[1], reads: int(b[2]), pair: int(b[3]), qp: le.Uint32(b[4:]),
		psn: le.Uint32(b[8:]), lid: le.Uint16(b[12:]), grh: b[14] == 1, gid: rdma.GID(b[16:])}
	if p.qp == 0 || p.qp >= 1<<24 || p.psn >= 1<<24 {
		return path{}, fmt.Errorf("queue pair %d, packet number %d", p.qp, p.psn)
	}
	return p, nil
}

// endpoint is what a transport publishes: the format, the protocols of its ports, and the endpoint
// of its TCP listener.
type endpoint struct {
	links links
	tcp   []byte
}

// links is a set of protocols, 1<<rdma.GIDType each.
type links uint8

func (l links) String() string {
	var names []string
	for t := range rdma.RoCEv2 + 1 {
		if l&(1<<t) != 0 {
			names = append(names, t.String())
		}
	}
	return strings.Join(names, ", ")
}

func (e endpoint) encode() []byte { return append([]byte{wireVersion, byte(e.links)}, e.tcp...) }

func decodeEndpoint(b []byte) (endpoint, error) {
	if len(b) < 3 || len(b) > p2p.MaxEndpoint || b[0] != wireVersion || b[1] == 0 || b[1] >= 2<<rdma.RoCEv2 {
		return endpoint{}, fmt.Errorf("rdma: %d bytes are no endpoint of format %d: run the same version on all ranks",
			len(b), wireVersion)
	}
	return endpoint{links: links(b[1]), tcp: b[2:]}, nil
}
