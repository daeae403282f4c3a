package p2p

import (
	"context"
	"errors"
	"fmt"
	"time"

	"tutti/internal/trust"
)

// Identity names one life of one rank, or of a client.
type Identity struct {
	Rank        int    // slot; of a client 0
	Incarnation uint64 // random, never 0
	Role        Role
}

// Role says what a process is to those that it links with.
type Role uint8

const (
	RoleRank   Role = iota // a rank of the job
	RoleClient             // a program that knows the job's secret and is no rank
)

// clientBit tells clients from ranks where an Identity has 32 bits for its rank.
const clientBit = 1 << 31

// Wire returns the rank and the role as they travel in a trust.Hello.
func (i Identity) Wire() uint32 {
	if i.Role == RoleClient {
		return clientBit
	}
	return uint32(i.Rank)
}

// IdentityOf is the inverse of Wire, for an incarnation. What is no Identity becomes a rank that no
// job has.
func IdentityOf(wire uint32, incarnation uint64) Identity {
	if wire == clientBit {
		return Identity{Incarnation: incarnation, Role: RoleClient}
	}
	return Identity{Rank: int(wire), Incarnation: incarnation}
}

// String returns "rank 3 (incarnation 00c0ffee…)", or "client (incarnation …)".
func (i Identity) String() string {
	if i.Role == RoleClient {
		return fmt.Sprintf("client (incarnation %016x)", i.Incarnation)
	}
	return fmt.Sprintf("rank %d (incarnation %016x)", i.Rank, i.Incarnation)
}

// Header is the fixed part of every frame. A link carries it unchanged and looks only at Len.
type Header struct {
	Kind    uint8  // what the frame is; the proxy's business
	Flags   uint8  // the proxy's business
	Service uint16 // whose frame it is: 0, the proxy's, or that of a layer between link and proxy
	Len     uint32 // bytes of payload, at most MaxFrame
	Chan    uint32 // channel, by a number that holds for one direction of one link
	Ack     uint32 // credit returned to the receiver of this frame
	Seq     uint64 // operation sequence or message id
	Call    uint64 // the caller's operation, packed
	Count   uint64 // elements, or tag
	Off     uint64 // position of the payload in its message, or an argument
}

// HeaderSize is the encoded size of a Header in bytes, little-endian, fields in order.
const HeaderSize = 48

// Link is one end of a reliable, ordered path of frames to one incarnation of one peer.
//
// No method blocks. Send, Flush, Recv, Fill, Release, Arm and Disarm are called by one goroutine at
// a time (under the proxy's lock); Close and Err from any. After a failure Send, Flush, Recv and
// Fill return an error that wraps ErrPeerGone (the peer ended or cannot be reached) or ErrProtocol
// (it sent what no peer of ours sends); frames that had arrived completely before the peer's end
// are still delivered first. Warm calls allocate nothing.
type Link interface {
	// Send offers one frame; payload is what h.Len says. True: both have been taken (copied or
	// written) and the caller may reuse them; what the link could not yet pass on it keeps in
	// memory of its own, at most one frame. False: no room now.
	Send(h *Header, payload []byte) (bool, error)
	// Flush passes on what Send took and kept. True: nothing is left.
	Flush() (bool, error)
	// Recv returns the next frame, or nil if none has begun to arrive. The header and the payload
	// are in the link's memory and valid until Release. A nil payload with Len > 0 means that the
	// payload has not arrived whole in the link's own memory: the caller takes it with Fill. Until
	// Release, Recv returns the same frame again.
	Recv() (*Header, []byte, error)
	// Fill moves the next bytes of the current frame's payload into dst (which must not be longer
	// than what remains of it) and returns how many; 0: none has arrived. Once Fill was called for
	// a frame, Recv returns no payload for it.
	Fill(dst []byte) (int, error)
	// Release ends the current frame. Its payload must have been taken whole by Fill, or offered
	// whole by Recv.
	Release()
	// MaxFrame is the largest payload in bytes.
	MaxFrame() int
	// Arm asks for one call of Host.Wake when Recv, Fill or a refused Send or Flush may get
	// further. True: it may already, do not sleep.
	Arm() bool
	// Disarm withdraws Arm; a wake that is under way may still come.
	Disarm()
	// Err returns why the link failed, nil while it works.
	Err() error
	// Close ends the link: what was sent and flushed is still delivered to the peer, which then
	// sees ErrPeerGone. Idempotent; releases memory, descriptors and goroutines before it returns.
	Close() error
}

// Mapper is a link whose peer's regions can be mapped into this process for loads. Nobody stores
// into a peer's memory; where the system can enforce that, it does.
type Mapper interface {
	// Map returns the peer's region id; the caller releases it. It does not block. Nil without an
	// error says that the peer, which was asked by the first call, has not answered yet: Host.Wake
	// is called when it has. Mappings are kept until the peer frees the region or the link is
	// closed. An error wraps ErrNoRegion (the peer refuses; the next call asks again), ErrProtocol
	// (what it gave is no region), or is the link's. Warm calls allocate nothing. From any
	// goroutine.
	Map(id uint64) (*Mapping, error)
}

// SeldomSleeper is a link that can send faster at the cost of its Arm.
type SeldomSleeper interface {
	// SleepSeldom says that this end expects to sleep seldom, because its rank has a core of its
	// own. It cannot be undone. Calls follow the rules of Send.
	SleepSeldom()
}

// Distant is a link whose frames take a while to arrive. The peer may have ended meanwhile.
type Distant interface{ Distant() }

// Host is what a transport needs of the process that it serves.
type Host interface {
	Self() Identity
	Secret() []byte // the job's secret; every connection proves it before anything else is read
	// Admit decides, after authentication and before the peer is told, whether an incoming
	// connection becomes a link: nil, or an error that wraps ErrSuperseded (this side is dialling
	// and its own connection wins) or ErrStale (unknown incarnation). The text is sent to the peer.
	Admit(from Identity) error
	// Accepted hands over the link of an admitted connection. The host owns it from then on.
	Accepted(from Identity, l Link)
	// Wake ends the sleep of whoever waits for progress; cheap, never blocks, from any goroutine.
	Wake()
	// Region finds a region that this rank shares, for a transport which hands it to a peer.
	Region(id uint64) (*Region, error)
}

// Transport makes links of one kind.
type Transport interface {
	// Name is "inproc", "shm", "tcp", ….
	Name() string
	// Listen starts to accept links for h and returns the descriptor to hand to peers: opaque to
	// all but this transport, at most MaxEndpoint bytes. The listener has answered itself before
	// Listen returns. One call a transport.
	Listen(ctx context.Context, h Host) (endpoint []byte, err error)
	// Reaches says whether endpoint, of the same transport at a peer, can be dialled from here
	// (same process, same machine, a route), and if not why.
	Reaches(endpoint []byte) error
	// Dial makes a link. It blocks, at most until ctx ends. A refusal by the peer's Admit wraps
	// ErrSuperseded or ErrStale; a wrong secret ErrAuth.
	Dial(ctx context.Context, to Identity, endpoint []byte) (Link, error)
	// Close stops accepting and releases everything but links handed out. Idempotent.
	Close() error
}

// Allocator is a transport that can make memory which peers can map.
type Allocator interface {
	// Alloc returns zeroed, page-aligned memory of n bytes (n >= 1) as a region with a fresh ID,
	// which peers can map for reading.
	Alloc(n int) (*Region, error)
}

// Errors of links and transports, wrapped.
var (
	ErrPeerGone   = errors.New("peer gone")
	ErrProtocol   = errors.New("protocol violation")
	ErrAuth       = trust.ErrAuth
	ErrSuperseded = errors.New("connection superseded by one in the other direction")
	ErrStale      = errors.New("unknown incarnation")
	ErrClosed     = errors.New("closed")
)

// Limits of what is read from a peer before anything is allocated for it.
const (
	MaxEndpoint      = 4096
	HandshakeTimeout = 5 * time.Second // a connection that has not proved itself by then is closed
)

// Verdict codes of Admit on the wire, shared by all transports: see internal/trust.
const (
	codeRefused    = 1
	codeSuperseded = 2
	codeStale      = 3
)

// RefusalOf turns an error of Host.Admit into what trust sends to the peer, and FromRefusal back,
// so that a dialler can tell with errors.Is why it was refused.
func RefusalOf(err error) error {
	if err == nil {
		return nil
	}
	r := &trust.Refusal{Code: codeRefused, Text: err.Error()}
	switch {
	case errors.Is(err, ErrSuperseded):
		r.Code = codeSuperseded
	case errors.Is(err, ErrStale):
		r.Code = codeStale
	}
	return r
}

// FromRefusal is the dialler's side of RefusalOf: it maps what trust.Client returned to errors that
// wrap ErrSuperseded, ErrStale or ErrAuth.
func FromRefusal(err error) error {
	var r *trust.Refusal
	switch {
	case errors.As(err, &r) && r.Code == codeSuperseded:
		return fmt.Errorf("%w (peer says: %s)", ErrSuperseded, r.Text)
	case errors.As(err, &r) && r.Code == codeStale:
		return fmt.Errorf("%w (peer says: %s)", ErrStale, r.Text)
	case errors.As(err, &r):
		return fmt.Errorf("refused by the peer: %s", r.Text)
	}
	return err
}
