package shm

import (
	"encoding/binary"
	"fmt"

	"tutti/p2p"
)

// Kinds of messages. Setup, the grants and the lifeline carry exactly one descriptor, the others
// none.
const (
	msgBell       = iota + 1 // wake up
	msgSetup                 // first message of the acceptor: size is the ring's, version the layout's
	msgFail                  // instead of setup: size is the errno
	msgAsk                   // request for region id
	msgGrant                 // answer: region id, of size bytes, with its descriptor
	msgDeny                  // answer: region id does not exist
	msgDrop                  // region id, which was granted, is freed: unmap it
	msgAskStore              // msgAsk, for reading and writing
	msgGrantStore            // its answer
	msgDenyStore             // its answer: the peer has no write access to region id
	msgLifeline              // the reading end of a pipe that breaks when the sender begins to end
	msgWitness               // the sender's memory at address id holds size, 8 bytes
	msgEnd
)

const (
	messageSize = 24
	version     = 5 // of the memory's layout and the messages
)

// message is a message on a link's socket, always messageSize bytes:
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

// hasFile reports whether the message carries a descriptor.
func (m message) hasFile() bool {
	return m.kind == msgSetup || m.kind == msgGrant || m.kind == msgGrantStore || m.kind == msgLifeline
}
