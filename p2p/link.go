package p2p

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"tutti/internal/trust"
)

// Identity names one incarnation of one rank, or of a client.
type Identity struct {
	Rank        int    // slot; of a client 0
	Incarnation uint64 // random, never 0
	Role        Role
}

// Role is the kind of a process.
type Role uint8

const (
	RoleRank   Role = iota // a rank of the job
	RoleClient             // a program that knows the job's secret but is not a rank
)

// clientBit marks a client in the 32 bits of an encoded rank.
const clientBit = 1 << 31

// Wire returns the rank and the role as encoded in a trust.Hello.
func (i Identity) Wire() uint32 {
	if i.Role == RoleClient {
		return clientBit
	}
	return uint32(i.Rank)
}

// IdentityOf is the inverse of Wire, for an incarnation. Invalid values become a rank that no job
// has.
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

// Header is the fixed part of every frame. A link carries it unchanged and interprets only Len.
type Header struct {
	Kind    uint8  // kind of frame, for the proxy
	Flags   uint8  // for the proxy
	Service uint16 // recipient: 0, the proxy, or a layer between link and proxy
	Len     uint32 // bytes of payload, at most MaxFrame
	Chan    uint32 // number of the channel, valid for one direction of one link
	Ack     uint32 // credit returned to the receiver of this frame
	Seq     uint64 // operation sequence or message id
	Call    uint64 // the caller's operation, packed
	Count   uint64 // elements, or tag
	Off     uint64 // position of the payload in its message, or an argument
}

// HeaderSize is the encoded size of a Header in bytes, little-endian, fields in order.
const HeaderSize = 48

// Encode writes the encoding of h to b.
func (h *Header) Encode(b *[HeaderSize]byte) {
	b[0], b[1] = h.Kind, h.Flags
	binary.LittleEndian.PutUint16(b[2:], h.Service)
	binary.LittleEndian.PutUint32(b[4:], h.Len)
	binary.LittleEndian.PutUint32(b[8:], h.Chan)
	binary.LittleEndian.PutUint32(b[12:], h.Ack)
	binary.LittleEndian.PutUint64(b[16:], h.Seq)
	binary.LittleEndian.PutUint64(b[24:], h.Call)
	binary.LittleEndian.PutUint64(b[32:], h.Count)
	binary.LittleEndian.PutUint64(b[40:], h.Off)
}

// Decode sets h to what b encodes. Any bytes encode a Header.
func (h *Header) Decode(b *[HeaderSize]byte) {
	h.Kind, h.Flags = b[0], b[1]
	h.Service = binary.LittleEndian.Uint16(b[2:])
	h.Len = binary.LittleEndian.Uint32(b[4:])
	h.Chan = binary.LittleEndian.Uint32(b[8:])
	h.Ack = binary.LittleEndian.Uint32(b[12:])
	h.Seq = binary.LittleEndian.Uint64(b[16:])
	h.Call = binary.LittleEndian.Uint64(b[24:])
	h.Count = binary.LittleEndian.Uint64(b[32:])
	h.Off = binary.LittleEndian.Uint64(b[40:])
}

// Link is one end of a reliable, ordered path of frames to one incarnation of one peer.
//
// No method blocks. Send, Flush, Recv, Fill, Release, Arm and Disarm are called by one goroutine at
// a time (under the proxy's lock); Close and Err from any. After a failure Send, Flush, Recv and
// Fill return an error that wraps ErrPeerGone (the peer ended or cannot be reached) or ErrProtocol
// (it violated the protocol). Frames that had arrived completely are delivered first. Warm calls
// allocate nothing.
type Link interface {
	// Send offers one frame with h.Len bytes of payload. True: the link has copied or written both,
	// and the caller may reuse them; the link keeps the unsent part in its own memory, at most one
	// frame. False: no room now.
	Send(h *Header, payload []byte) (bool, error)
	// Flush sends what Send kept. True: nothing is left. A link may need what the peer sends for
	// it, so a caller that waits for Flush also calls Recv.
	Flush() (bool, error)
	// Recv returns the next frame, or nil if none has begun to arrive. The header and the payload
	// are in the link's memory and valid until Release. A nil payload with Len > 0 means that the
	// payload is not yet complete in the link's memory: the caller takes it with Fill. Until
	// Release, Recv returns the same frame again.
	Recv() (*Header, []byte, error)
	// Fill moves the next bytes of the current frame's payload into dst, which must not be longer
	// than the rest of it, and returns their number; 0: none has arrived. After a Fill, Recv
	// returns no payload for this frame.
	Fill(dst []byte) (int, error)
	// Release ends the current frame. Its payload must have been taken completely by Fill, or
	// returned completely by Recv.
	Release()
	// MaxFrame is the largest payload in bytes, at least MinFrame.
	MaxFrame() int
	// Arm requests one call of Host.Wake when Recv, Fill or a refused Send or Flush may succeed.
	// True: it may succeed now, do not sleep.
	Arm() bool
	// Disarm cancels Arm; a wake may still come.
	Disarm()
	// Err returns why the link failed, nil while it works.
	Err() error
	// Close ends the link: flushed frames are still delivered to the peer, which then sees
	// ErrPeerGone. Idempotent; releases memory, descriptors and goroutines before it returns.
	Close() error
}

// Mapper is a link whose peer's regions can be mapped into this process for loads. Stores into a
// peer's memory are forbidden, and prevented if the system can do that.
type Mapper interface {
	// Map returns the peer's region id, which the caller releases: one that the peer's Host.Region
	// knows, or of which a range is exposed for reading. It does not block. The first call asks the
	// peer; nil without an error means that the peer has not answered yet, and Host.Wake is called
	// when it has. Mappings may be kept until the peer frees the region or the link is closed. An
	// error wraps ErrNoRegion (the peer refuses; the next call asks again) or ErrProtocol (the
	// answer was no valid region), or is the link's. After one that wraps ErrShortage the next call
	// asks again, too. Warm calls allocate nothing. From any goroutine.
	Map(id uint64) (*Mapping, error)
}

// ProcessReader is a link that can copy from memory of the peer's process that no transport has
// made: one copy, by the kernel, where frames need two. The methods may be called from any
// goroutine, also while the link is closed.
type ProcessReader interface {
	// ReadsProcess reports whether this end may read the peer's memory. The link finds that out by
	// itself, some time after it was made. It ends with a refusal by the system, and with the link.
	ReadsProcess() bool
	// ReadProcess copies len(dst) bytes at address from of the peer's process to dst. It blocks for
	// the copy alone, and allocates nothing. Nil: the process was the peer's during the copy, and
	// had not ended after it. Whether the bytes were still the peer's buffer is for the caller to
	// find out, as with a Mapping (see Exposure). An error wraps ErrPeerGone, ErrProtocol (there is
	// no such memory) or errors.ErrUnsupported (ReadsProcess reports false from now on); dst may
	// have been written.
	ReadProcess(dst []byte, from uint64) error
	// Readable reports whether the system lets other processes read b, memory of this one, as far
	// as its first and last byte tell. Some memory it keeps from them, such as that of devices.
	// It allocates nothing.
	Readable(b []byte) bool
}

// SeldomSleeper is a link that can send faster at the cost of a slower Arm.
type SeldomSleeper interface {
	// SleepSeldom says that this end rarely sleeps, because its rank has its own core. It cannot be
	// undone. Calls follow the rules of Send.
	SleepSeldom()
}

// Gatherer is a link to which each Send costs much more than the copy of a short frame.
type Gatherer interface {
	// Gather is Send for a frame that may wait for the next Flush or Send. The link keeps several
	// short frames, and writes them together.
	Gather(h *Header, payload []byte) (bool, error)
}

// Bypasser is a link over memory that both ends access.
type Bypasser interface {
	// SendPast is Send, but a long payload bypasses the caches of this processor (see
	// kernels.CopyNonTemporal). The peer reads it from memory, not from this processor's caches.
	SendPast(h *Header, payload []byte) (bool, error)
}

// Preparer is a link over memory that both ends access.
type Preparer interface {
	// Prepare says that a frame of n bytes of payload will be sent in some tens of nanoseconds. The
	// link takes the memory for it from the other end's processor meanwhile, and changes nothing.
	// It follows the rules of Send.
	Prepare(n int)
}

// Distant is a link whose frames are delayed. The peer may have ended before they arrive.
type Distant interface{ Distant() }

// Deliverer is a link that delivers what it has taken as fast as the peer reads. Its Close does not
// wait for that as long as it may take.
type Deliverer interface {
	// Delivers reports whether the peer's host has not acknowledged all that Send took. It follows
	// the rules of Send.
	Delivers() bool
}

// Host is the process that a transport serves.
type Host interface {
	Self() Identity
	Secret() []byte // the job's secret, which every connection proves before other data is read
	// Admit decides, after authentication and before the peer is told, whether an incoming
	// connection becomes a link: nil, or an error that wraps ErrSuperseded (this side is dialling
	// and its own connection wins, or there is a link), ErrFailed or ErrStale (unknown
	// incarnation). The error's text is sent to the peer. If a peer connects repeatedly although
	// there is a link that is not new, its end of that has failed: the link is closed, and the
	// connection admitted.
	Admit(from Identity) error
	// Accepted hands over the link of an admitted connection. The host owns it from then on.
	Accepted(from Identity, l Link)
	// Lost says that an admitted connection has failed before it was a link. Until the transport is
	// closed, each call of Admit that returned nil is followed by one of Accepted or Lost.
	Lost(from Identity)
	// Wake wakes the goroutines that wait for progress. Cheap, never blocks, from any goroutine.
	Wake()
	// Region finds a region of this rank that peers may map, for a transport that passes it to one.
	Region(id uint64) (*Region, error)
}

// Transport makes links of one kind.
type Transport interface {
	// Name is "inproc", "shm", "tcp", ….
	Name() string
	// Listen starts to accept links for h and returns the endpoint for peers: opaque except to this
	// transport, at most MaxEndpoint bytes. Before Listen returns, it has tested the listener.
	// Called once.
	Listen(ctx context.Context, h Host) (endpoint []byte, err error)
	// Reaches returns nil if endpoint, of this transport at a peer, can be dialled from here (same
	// process, same machine, a route), else the reason.
	Reaches(endpoint []byte) error
	// Dial makes a link. It blocks until ctx ends at the latest. A refusal by the peer's Admit
	// wraps ErrSuperseded, ErrFailed or ErrStale; a wrong secret wraps ErrAuth, a peer of another
	// build ErrVersion. A shortage at this end, after the peer has accepted, wraps ErrShortage.
	Dial(ctx context.Context, to Identity, endpoint []byte) (Link, error)
	// Close stops accepting and releases everything except links that were returned. Idempotent.
	Close() error
}

// Allocator is a transport that can make memory for peers to map.
type Allocator interface {
	// Alloc returns zeroed, page-aligned memory of n bytes (n >= 1) as a region with a fresh ID,
	// which peers can map for reading. The caller has asked mem.Fits.
	Alloc(n int) (*Region, error)
}

type peerEnds struct{}

func (peerEnds) Error() string        { return ErrPeerGone.Error() }
func (peerEnds) Is(target error) bool { return target == ErrPeerGone }

type failedThere struct{}

func (failedThere) Error() string        { return "the peer's end of an earlier link has failed" }
func (failedThere) Is(target error) bool { return target == ErrStale }

// Errors of links and transports, wrapped.
var (
	ErrPeerGone   = errors.New("peer gone")
	ErrPeerEnds   = peerEnds{} // the peer's process is ending, for certain; it is an ErrPeerGone
	ErrProtocol   = errors.New("protocol violation")
	ErrAuth       = trust.ErrAuth
	ErrVersion    = trust.ErrVersion // the peer is of another build, whose handshake differs
	ErrSuperseded = errors.New("connection superseded by one in the other direction")
	ErrStale      = trust.ErrStale
	ErrFailed     = failedThere{} // the peer admits no link until its Reconnect; it is an ErrStale
	ErrClosed     = errors.New("closed")
	// ErrUnfit: this rank and the peer cannot be in one job, as they were started.
	ErrUnfit = errors.New("the two ranks do not fit")
	// ErrShortage: this end lacks what the link needs, memory or a descriptor, and the peer may be
	// well. From Dial: the peer may have accepted this link, and will not accept another.
	ErrShortage = errors.New("a shortage at this end")
)

// MinFrame is what the payload of a frame of a link may have at least, in bytes. Frames that are
// not divided are not longer: aborts and notices.
const MinFrame = max(MaxAbort, MaxNotice)

// Limits on untrusted input of a peer.
const (
	MaxEndpoint      = 4096
	HandshakeTimeout = 5 * time.Second // for the proof of the secret; the connection is closed after that
)

// Verdict codes of Admit on the wire beside trust.CodeStale, shared by all transports.
const (
	codeRefused    = 1
	codeSuperseded = 2
	codeFailed     = 4
)

// RefusalOf turns an error of Host.Admit into the refusal that package trust sends to the peer;
// FromRefusal turns it back.
func RefusalOf(err error) error {
	if err == nil {
		return nil
	}
	r := &trust.Refusal{Code: codeRefused, Text: err.Error()}
	switch {
	case errors.Is(err, ErrSuperseded):
		r.Code = codeSuperseded
	case errors.Is(err, ErrFailed):
		r.Code = codeFailed
	case errors.Is(err, ErrStale):
		r.Code = trust.CodeStale
	}
	return r
}

// FromRefusal is the dialler's side of RefusalOf: it maps what trust.Client returned to errors that
// wrap ErrSuperseded, ErrFailed, ErrStale, ErrAuth or ErrVersion.
func FromRefusal(err error) error {
	var r *trust.Refusal
	switch {
	case errors.As(err, &r) && r.Code == codeSuperseded:
		return fmt.Errorf("%w (peer says: %s)", ErrSuperseded, r.Text)
	case errors.As(err, &r) && r.Code == codeFailed:
		return fmt.Errorf("%w (peer says: %s)", ErrFailed, r.Text)
	case errors.As(err, &r) && r.Code == trust.CodeStale:
		return fmt.Errorf("%w (peer says: %s)", ErrStale, r.Text)
	case errors.As(err, &r):
		return fmt.Errorf("refused by the peer: %s", r.Text)
	}
	return err
}
