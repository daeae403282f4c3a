package verbs

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"tutti/p2p"
)

const (
	unit    = 128                // frames are multiples of it
	wordLen = 8                  // bytes of a commit word
	trailer = p2p.HeaderSize + 8 // the end of a frame: header and commit word
)

// The header is stored in its memory layout.
var _ [p2p.HeaderSize - unsafe.Sizeof(p2p.Header{})]struct{}
var _ [unsafe.Sizeof(p2p.Header{}) - p2p.HeaderSize]struct{}

// maxFrame returns the largest payload for rings of n bytes.
func maxFrame(n int) int { return n/4 - unit }

// frameBytes returns the size of a frame with n bytes of payload.
func frameBytes(n uint64) uint64 { return (n + trailer + unit - 1) &^ (unit - 1) }

// span is a range of a ring to be written to the peer.
type span struct{ at, n uint64 }

// producer composes frames in a copy of the ring at the other end. Positions count bytes since the
// beginning, also those that were skipped.
type producer struct {
	data  []byte
	tail  uint64 // composed
	freed uint64 // by the consumer, as far as is known
	done  uint64 // whose writes have completed
	seq   uint64 // of the last frame or skip mark
	spans [2]span
}

// Kinds of commit words, in their lowest bits.
const (
	commitFrame = 1 + iota
	commitSkip
)

// commitWord returns the word behind frame or skip mark seq.
func commitWord(seq, kind uint64) uint64 { return seq<<2 | kind }

// offset returns the end of the next frame, from 1 to len(data).
func offset(pos uint64, n int) uint64 { return uint64(n) - pos&uint64(n-1) }

// needs returns the room in bytes that a frame with n bytes of payload needs, with what is skipped.
func (p *producer) needs(n uint64) uint64 {
	size, off := frameBytes(n), offset(p.tail, len(p.data))
	if size > off {
		return off + size
	}
	return size
}

// room returns the bytes that can be composed.
func (p *producer) room() uint64 { return uint64(len(p.data)) - (p.tail - min(p.freed, p.done)) }

// compose adds a frame, for which there must be room, and returns what has to be written.
func (p *producer) compose(h *p2p.Header, payload []byte) []span {
	size, off := frameBytes(uint64(len(payload))), offset(p.tail, len(p.data))
	var skip uint64 // its offset
	if size > off {
		skip = off
		p.tail += off
		p.seq++
		p.store(skip, commitWord(p.seq, commitSkip))
		off = uint64(len(p.data))
	}
	begin := off - size
	copy(p.data[begin:], payload)
	*(*p2p.Header)(unsafe.Pointer(&p.data[off-trailer])) = *h
	p.seq++
	p.store(off, commitWord(p.seq, commitFrame))
	p.tail += size
	spans := append(p.spans[:0], span{begin, size})
	if skip > 0 {
		spans = append(spans, span{skip - wordLen, wordLen})
	}
	return spans
}

// store stores the commit word of the frame that ends at off.
func (p *producer) store(off, v uint64) { atomic.StoreUint64(word(p.data, off), v) }

// word returns the word that ends at off.
func word(b []byte, off uint64) *uint64 { return (*uint64)(unsafe.Pointer(&b[off-wordLen])) }

// consumer reads frames of a ring that the peer writes.
type consumer struct {
	data    []byte
	pos     uint64 // bytes freed
	untold  uint64 // of these, those that the peer does not know of
	seq     uint64 // of the frame or skip mark expected next, at first 1
	frames  uint64 // freed
	held    bool   // between next and release
	filling bool
	payload []byte // of the held frame, what Fill has left of it
	hdr     p2p.Header
}

// begun reports whether the device has begun to place the next frame: of its commit word, and of
// all else, any part may be missing.
func (c *consumer) begun() bool {
	return atomic.LoadUint64(word(c.data, offset(c.pos, len(c.data)))) != 0
}

// next takes the next frame, which has been placed as a whole. The error wraps p2p.ErrProtocol.
func (c *consumer) next() error {
	for {
		off := offset(c.pos, len(c.data))
		commit := atomic.LoadUint64(word(c.data, off))
		switch {
		case commit == commitWord(c.seq, commitSkip) && off != uint64(len(c.data)):
			*word(c.data, off) = 0
			c.pos += off
			c.untold += off
			c.seq++
			continue
		case commit != commitWord(c.seq, commitFrame):
			return fmt.Errorf("%w: commit word %#x at byte %d of the ring, want frame %d", p2p.ErrProtocol, commit,
				off, c.seq)
		}
		// Copied, so that what is checked is what is used.
		c.hdr = *(*p2p.Header)(unsafe.Pointer(&c.data[off-trailer]))
		n := uint64(c.hdr.Len)
		if n > uint64(maxFrame(len(c.data))) || frameBytes(n) > off {
			return fmt.Errorf("%w: frame of %d bytes at byte %d of a ring of %d; the largest is %d",
				p2p.ErrProtocol, n, off, len(c.data), maxFrame(len(c.data)))
		}
		begin := off - frameBytes(n)
		c.held, c.filling, c.payload = true, false, c.data[begin:begin+n:begin+n]
		return nil
	}
}

// taken returns the position behind the held frame, or else behind the last one, and the number of
// what follows.
func (c *consumer) taken() (pos, seq uint64) {
	if c.held {
		return c.pos + frameBytes(uint64(c.hdr.Len)), c.seq + 1
	}
	return c.pos, c.seq
}

// release frees the held frame. It clears all places where a later commit word may be.
func (c *consumer) release() {
	n, off := frameBytes(uint64(c.hdr.Len)), offset(c.pos, len(c.data))
	for at := off - n; at < off; at += unit {
		*word(c.data, at+unit) = 0
	}
	c.held, c.payload = false, nil
	c.pos += n
	c.untold += n
	c.seq++
	c.frames++
}
