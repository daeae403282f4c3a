// Package wire defines the frames that endpoints exchange over a connection.
//
// A frame is a header, an extension whose size the opcode determines, and a payload. The header is
// 17 bytes, and all numbers are little-endian:
//
//	0 size (8)     bytes that follow the header: extension and payload
//	8 address (8)  of our opcodes: the request that the frame belongs to
//	16 opcode (1)
//
// The opcodes below First are those of DLSlime's TCP endpoint. Their address is one of the target's
// memory. An endpoint neither sends nor serves them: nothing in them can be checked or
// acknowledged.
//
// The package is pure: it encodes and decodes, and docs/wire.md describes what is exchanged when.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"

	"tutti/internal/trust"
)

// HeaderSize is the size of a frame's header in bytes.
const HeaderSize = 17

// Opcode says what a frame is.
type Opcode uint8

// Opcodes of DLSlime's TCP endpoint.
const (
	RawSend  Opcode = 0x00
	RawRead  Opcode = 0x01
	RawWrite Opcode = 0x02
)

// First is the first opcode of Tutti.
const First = Hello

// Opcodes of Tutti. The address of a request is its number, which the requester chooses; an answer
// has the address of its request. The address of Message to Dropped, and of Lend, is the number of
// a message.
const (
	Hello   Opcode = 0x10 + iota // the first frame of both ends; address: the session
	Ping                         // answered by Pong
	Pong                         //
	Bye                          // the sender has nothing to do: answered by Bye (agreed) or Stay
	Stay                         //
	Get                          // read of a region: answered by Data frames and Done
	Put                          // part of a write to a region: answered by Done
	Data                         // part of what Get asked for
	Done                         // the end of a request
	Cancel                       // the requester has given up a request
	Lookup                       // the region of a name: answered by Region or Done
	List                         // regions in the order of their names: answered by Region frames and Done
	Watch                        // changes of regions: answered by Region and Gone frames until Cancel
	Region                       // a region
	Gone                         // a region that is not registered any more
	Message                      // a whole message
	Offer                        // a message that waits at its sender
	Pull                         // asks for part of an offered message
	Piece                        // part of an offered message
	Sent                         // the end of what a Pull asked for
	Taken                        // the receiver has the message, or does not want it
	Credit                       // the receiver has room; address: bytes of messages it has handed on
	Dropped                      // the sender has given the message up
	Inquire                      // the state of the endpoint: answered by State or Done
	State                        // the state of the endpoint
	Join                         // queue pairs of an RDMA device that are to be connected: answered by Joined
	Joined                       // the queue pairs that they are connected with; empty: there will be none
	Claim                        // the key of a region: answered by Key or Done
	Key                          // what RDMA requests reach a region with
	Revoke                       // a key is not valid any more: answered by Revoked
	Revoked                      // the sender makes no more requests with the key
	Fence                        // answered by Fenced
	Fenced                       // no RDMA request from before the Fence has an effect any more
	Lend                         // a message that waits at its sender, where RDMA requests reach it
	beyond
)

var names = [...]string{"Hello", "Ping", "Pong", "Bye", "Stay", "Get", "Put", "Data", "Done", "Cancel", "Lookup",
	"List", "Watch", "Region", "Gone", "Message", "Offer", "Pull", "Piece", "Sent", "Taken", "Credit", "Dropped",
	"Inquire", "State", "Join", "Joined", "Claim", "Key", "Revoke", "Revoked", "Fence", "Fenced",
	"Lend"}

// String returns the name of the opcode.
func (o Opcode) String() string {
	switch {
	case o >= First && o < beyond:
		return names[o-First]
	case o <= RawWrite:
		return [...]string{"RawSend", "RawRead", "RawWrite"}[o]
	}
	return fmt.Sprintf("opcode %#x", uint8(o))
}

// Header is the header of a frame.
type Header struct {
	Size    uint64
	Address uint64
	Op      Opcode
}

// Append appends the encoding of h.
func (h Header) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint64(b, h.Size)
	b = binary.LittleEndian.AppendUint64(b, h.Address)
	return append(b, byte(h.Op))
}

// Decode reads a header from the first HeaderSize bytes of b.
func Decode(b []byte) Header {
	return Header{Size: binary.LittleEndian.Uint64(b), Address: binary.LittleEndian.Uint64(b[8:]), Op: Opcode(b[16])}
}

// Limits of frames. A frame that exceeds them ends its connection.
const (
	MaxName    = 255      // bytes of a name of a region, a client or an endpoint
	MaxText    = 512      // bytes of the text of Done
	MaxMessage = 1 << 20  // bytes of the payload of Message: longer messages are offered
	MaxState   = 16 << 10 // bytes of the payload of State
	MaxJoin    = 1 << 10  // bytes of the payload of Join and Joined
	MaxSize    = 1 << 62  // bytes of regions, requests and messages
	MaxExt     = BulkSize // bytes of the largest extension
)

// Cost is what a message of n bytes counts for a window and for Credit.
func Cost(n uint64) uint64 { return n + 128 }

// ErrFrame says that a frame is malformed or not allowed.
var ErrFrame = errors.New("malformed frame")

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrFrame, fmt.Sprintf(format, args...))
}

// shape is what the opcode says about a frame's size.
type shape struct {
	ext     int    // bytes of the extension
	payload uint64 // maximal bytes of the payload
}

var shapes = [beyond - First]shape{
	Hello - First: {HelloSize, MaxName}, Ping - First: {}, Pong - First: {}, Bye - First: {}, Stay - First: {},
	Get - First: {RangeSize, 0}, Put - First: {BulkSize, MaxSize}, Data - First: {BulkSize, MaxSize},
	Done - First: {OutcomeSize, MaxText}, Cancel - First: {}, Lookup - First: {0, MaxName}, List - First: {4, MaxName},
	Watch - First: {}, Region - First: {EntrySize, MaxName}, Gone - First: {goneSize, MaxName},
	Message - First: {BulkSize, MaxMessage}, Offer - First: {8, 0}, Pull - First: {16, 0},
	Piece - First: {BulkSize, MaxSize},
	Sent - First:  {},
	Taken - First: {OutcomeSize, MaxText}, Credit - First: {}, Dropped - First: {},
	Inquire - First: {}, State - First: {0, MaxState},
	Join - First: {0, MaxJoin}, Joined - First: {0, MaxJoin}, Claim - First: {16, 0}, Key - First: {16, 0},
	Revoke - First: {16, 0}, Revoked - First: {}, Fence - First: {}, Fenced - First: {}, Lend - First: {24, 0},
}

// Check returns the size of the extension of a frame with header h, or an error that wraps
// ErrFrame.
func (h Header) Check() (ext int, err error) {
	if h.Op < First || h.Op >= beyond {
		if h.Op <= RawWrite {
			return 0, malformed("%v with a raw address: only registered regions are served", h.Op)
		}
		return 0, malformed("%v", h.Op)
	}
	s := shapes[h.Op-First]
	if h.Size < uint64(s.ext) || h.Size-uint64(s.ext) > s.payload {
		return 0, malformed("%v of %d bytes, want %d to %d", h.Op, h.Size, s.ext, uint64(s.ext)+s.payload)
	}
	return s.ext, nil
}

// Version is the version of the frames, which Greeting carries.
const Version = 2

// Greeting is the extension of Hello. Its payload is the name of the sender's endpoint.
type Greeting struct {
	Version  uint16
	Index    uint8  // of the connection in its session
	Count    uint8  // connections that the session has
	Requests uint32 // requests that the sender of Hello serves at once
	Window   uint32 // bytes of messages that it keeps before they are received
	Message  uint32 // longest payload of Message that it takes
	Endpoint uint64 // the sender's identity
	Last     uint64 // the session that the sender had last with the receiver; 0: none
}

// HelloSize is the size of an encoded Greeting.
const HelloSize = 32

// Append appends the encoding of g.
func (g Greeting) Append(b []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, g.Version)
	b = append(b, g.Index, g.Count)
	b = binary.LittleEndian.AppendUint32(b, g.Requests)
	b = binary.LittleEndian.AppendUint32(b, g.Window)
	b = binary.LittleEndian.AppendUint32(b, g.Message)
	b = binary.LittleEndian.AppendUint64(b, g.Endpoint)
	return binary.LittleEndian.AppendUint64(b, g.Last)
}

// DecodeGreeting reads the extension of Hello. The error wraps trust.ErrVersion, and not ErrFrame,
// if the sender speaks another version. The size of the extension, and the place of the version in
// it, do not change with the version.
func DecodeGreeting(ext []byte) (g Greeting, err error) {
	le := binary.LittleEndian
	g = Greeting{Version: le.Uint16(ext), Index: ext[2], Count: ext[3], Requests: le.Uint32(ext[4:]),
		Window: le.Uint32(ext[8:]), Message: le.Uint32(ext[12:]), Endpoint: le.Uint64(ext[16:]),
		Last: le.Uint64(ext[24:])}
	switch {
	case g.Version != Version:
		return g, fmt.Errorf("%w: the other end's frames are of version %d, this one's of version %d: run the same "+
			"build at both", trust.ErrVersion, g.Version, Version)
	case g.Index >= g.Count || g.Count > MaxConns:
		return g, malformed("connection %d of %d, at most %d are allowed", g.Index, g.Count, MaxConns)
	case g.Requests == 0 || g.Message > MaxMessage || g.Message > g.Window:
		return g, malformed("%d requests, a window of %d bytes for messages of %d", g.Requests, g.Window, g.Message)
	}
	return g, nil
}

// MaxConns bounds the connections of a session.
const MaxConns = 16

// Range is the extension of Get, and the fields of that of Put: a range of a region.
type Range struct {
	Region     uint64 // id of the region
	Generation uint64
	Offset     uint64 // of the range, of a Put of the frame's payload
	Total      uint64 // bytes of the whole request
}

// RangeSize is the size of an encoded Range.
const RangeSize = 32

// Append appends the encoding of r.
func (r Range) Append(b []byte) []byte {
	for _, v := range [...]uint64{r.Region, r.Generation, r.Offset, r.Total} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// DecodeRange reads the extension of Get or the fields of Put.
func DecodeRange(ext []byte) Range {
	le := binary.LittleEndian
	return Range{Region: le.Uint64(ext), Generation: le.Uint64(ext[8:]), Offset: le.Uint64(ext[16:]),
		Total: le.Uint64(ext[24:])}
}

// Code says how a request or a message ended.
type Code uint8

// Codes.
const (
	OK        Code = iota
	Cancelled      // given up: by the requester, or by the receiver of a message
	NoRegion       // no region with that name that this client may use
	Stale          // the region was unregistered
	Rights         // the region does not allow this to this client
	Bounds         // the range is not within the region
	Failed         // the region's file or device failed
	Busy           // too many requests
	Denied         // not for clients with a credential of their own
	codes
)

// Outcome is the extension of Done and Taken. Their payload is a text that explains a failure.
type Outcome struct {
	Code  Code
	Bytes uint64 // moved by the request; of Taken: received
}

// OutcomeSize is the size of an encoded Outcome.
const OutcomeSize = 9

// Append appends the encoding of o.
func (o Outcome) Append(b []byte) []byte {
	return binary.LittleEndian.AppendUint64(append(b, byte(o.Code)), o.Bytes)
}

// DecodeOutcome reads the extension of Done or Taken.
func DecodeOutcome(ext []byte) (Outcome, error) {
	o := Outcome{Code: Code(ext[0]), Bytes: binary.LittleEndian.Uint64(ext[1:])}
	if o.Code >= codes {
		return o, malformed("code %d", o.Code)
	}
	return o, nil
}

// Entry is the extension of Region. Its payload is the region's name.
type Entry struct {
	Region     uint64
	Generation uint64
	Len        uint64
	Rights     uint8 // mem.Rights of the client that asks
}

// EntrySize is the size of an encoded Entry.
const EntrySize = 25

// Append appends the encoding of e.
func (e Entry) Append(b []byte) []byte {
	for _, v := range [...]uint64{e.Region, e.Generation, e.Len} {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return append(b, e.Rights)
}

// DecodeEntry reads the extension of Region.
func DecodeEntry(ext []byte) (Entry, error) {
	le := binary.LittleEndian
	e := Entry{Region: le.Uint64(ext), Generation: le.Uint64(ext[8:]), Len: le.Uint64(ext[16:]), Rights: ext[24]}
	if e.Len > MaxSize || e.Generation == 0 {
		return e, malformed("region of %d bytes, generation %d", e.Len, e.Generation)
	}
	return e, nil
}

// goneSize is the size of the extension of Gone: region and generation. Its payload is the name.
const goneSize = 16

// BulkSize is the size of the extensions of Put, Data, Message and Piece: their fields, and zeros,
// which the receiver ignores. With the header they take 64 bytes, a cache line. The kernel copies a
// payload from where it is to a page of a socket's buffer, and from there to its destination. If no
// more than such heads come before it, it begins in the page at a multiple of 64, as the memory of
// large payloads does. AMD's Zen 3 takes ten times as long for a string move whose destination is 1
// to 31 bytes behind its source, modulo 4096.
const BulkSize = 64 - HeaderSize

// Bulk appends the head of a frame with op, which is Put, Data, Message or Piece, and a payload of
// n bytes: the header and the extension, which begins with fields.
func Bulk(b []byte, op Opcode, address uint64, n int64, fields ...uint64) []byte {
	from := len(b)
	b = Header{Size: uint64(BulkSize + n), Address: address, Op: op}.Append(b)
	b = Words(b, fields...)
	var zeros [BulkSize]byte
	return append(b, zeros[:HeaderSize+BulkSize-(len(b)-from)]...)
}

// Words appends numbers: the fields of Data and Piece (offset), and the extensions of Offer
// (total), Pull (offset, length), Gone, Claim and Revoke (region, generation), Key (address, key)
// and Lend (total, address, key).
func Words(b []byte, vs ...uint64) []byte {
	for _, v := range vs {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return b
}

// Word returns number i of an extension of Words.
func Word(ext []byte, i int) uint64 { return binary.LittleEndian.Uint64(ext[8*i:]) }

// Limit appends the extension of List: the number of regions that are wanted.
func Limit(b []byte, n uint32) []byte { return binary.LittleEndian.AppendUint32(b, n) }

// DecodeLimit reads the extension of List.
func DecodeLimit(ext []byte) uint32 { return binary.LittleEndian.Uint32(ext) }
