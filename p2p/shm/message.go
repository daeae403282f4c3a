package shm

import (
	"encoding/binary"
	"fmt"

	"tutti/p2p"
)

// Kinds of message. Only setup and the grants come with a descriptor, exactly one.
const (
	msgBell       = iota + 1 // wake up
	msgSetup                 // acceptor's first: size is the ring's, version the layout's
	msgFail                  // instead of setup: size is the errno
	msgAsk                   // for region id
	msgGrant                 // answer: region id, of size bytes, with its descriptor
	msgDeny                  // answer: there is no region id
	msgDrop                  // region id, which was granted, is freed: unmap it
	msgAskStore              // msgAsk, for reading and writing
	msgGrantStore            // its answer
	msgDenyStore             // its answer: there is no region id that the peer may write
	msgEnd
)

const (
	messageSize = 24
	version     = 3 // of the memory's layout and the messages
)

// message is what passes over a link's socket, always messageSize bytes:
//
//	0 kind | 1-3 zero | 4-7 version | 8-15 id | 16-23 size
type message struct {
	kind    uint8
	version uint32
	id      uint64
	size    uint64
}

func (m message) encode() (b [messageSize]byte) {
	b[0] = m.kind
	binary.LittleEndian.PutUint32(b[4:], m.version)
	binary.LittleEndian.PutUint64(b[8:], m.id)
	binary.LittleEndian.PutUint64(b[16:], m.size)
	return b
}

func decodeMessage(b *[messageSize]byte) (message, error) {
	le := binary.LittleEndian
	m := message{b[0], le.Uint32(b[4:]), le.Uint64(b[8:]), le.Uint64(b[16:])}
	if m.kind == 0 || m.kind >= msgEnd || m.encode() != *b {
		return message{}, fmt.Errorf("%w: malformed message % x", p2p.ErrProtocol, b[:])
	}
	return m, nil
}

// hasFile says whether a descriptor comes with the message.
func (m message) hasFile() bool {
	return m.kind == msgSetup || m.kind == msgGrant || m.kind == msgGrantStore
}
