// Package ring passes frames between two ends over plain shared memory: Go heap within a process, a
// mapping between processes.
//
// A channel is a pair of rings, one for each direction. Each ring has one producer and one consumer
// and no lock. A frame is contiguous:
//
//	line 0       commit word (8 bytes) | p2p.Header as the machine lays it out (48) | payload of at most 8 bytes
//	line 1, ...  payload of more than 8 bytes, padded to lines of 64 bytes
//
// The consumer polls the commit word of the next frame directly; there is no tail index in another
// cache line, so that a small frame costs one line transfer. The commit word is written last and
// holds the frame's sequence number. Before a producer commits a frame it clears the commit word of
// the line behind it, so that data of an earlier lap is never taken for a commit. A frame that does
// not fit before the ring's end is preceded by a skip mark, which is committed after it. (The
// structure is that of Lamport's single-producer single-consumer queue with the index moved into
// the slots, as in FastForward, PPoPP 2008.)
//
// The consumer publishes how far it has read, in a line of its own, each time it has freed a
// quarter of the ring. As no frame is larger than a quarter, a producer always finds room when the
// consumer has read everything, and need not wait for the last, unpublished part.
//
// An end that is about to sleep sets its arm word and then polls once more. An end that has
// committed a frame (or published its head) reads the other's arm word and rings the bell if it is
// set. Both use sequentially consistent stores and loads (sync/atomic), so that one of them sees
// the other (Dekker). On the fast path that costs the producer one load of a line that is not being
// written.
//
// A sequentially consistent store waits until its line, and all lines written before, have come
// from the other core, which takes as long as a small frame's whole way. An end that rarely sleeps
// can take the cost on itself (Asymmetric): its Arm makes every core that runs one of the two
// processes pass a barrier (membarrier(2)), and the producer then commits with a plain store, which
// x86 orders after those before it.
//
// The other end may be hostile, or may die at any instruction. Everything read from shared memory
// is copied first and checked then. Whatever the memory holds, a consumer accesses only its ring
// and a producer writes only its own.
package ring

import (
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"unsafe"

	"tutti/kernels"
	"tutti/p2p"
)

// MinData and MaxData bound the size of a ring in bytes. MaxFrame of MinData is p2p.MinFrame or
// more.
const (
	MinData = 8 << 10
	MaxData = 1 << 30
)

const (
	line    = 64
	spacing = 2 * line // between words of different writers: the adjacent-line prefetcher pulls lines in pairs
	control = 4 * spacing
	inline  = line - 8 - p2p.HeaderSize
)

// Bits of the arm word.
const (
	armRecv = 1 << iota // wants a bell for frames
	armSend             // a frame was refused: wants a bell for room
)

// State of an end.
const (
	live     = iota
	draining // failed; frames that have arrived are still delivered
	ended    // no more frames
)

var _ [MinData/4 - line - p2p.MinFrame]struct{}

// The header is stored in its memory layout.
var _ [p2p.HeaderSize - unsafe.Sizeof(p2p.Header{})]struct{}
var _ [unsafe.Sizeof(p2p.Header{}) - p2p.HeaderSize]struct{}

// Round returns the ring size for a wish of n bytes: the next power of two from MinData to MaxData.
func Round(n int) int {
	n = min(max(n, MinData), MaxData)
	return 1 << bits.Len(uint(n-1))
}

// Bytes returns the size of a channel's memory with two rings of data bytes, a result of Round.
func Bytes(data int) int { return control + 2*data }

// MaxFrame returns the largest payload that a ring of data bytes takes.
func MaxFrame(data int) int { return data/4 - line }

// place returns the offset of a payload of n bytes in its frame, and the size of the frame.
func place(n uint64) (at, size uint64) {
	if n <= inline {
		return line - inline, line
	}
	return line, line + (n+line-1)&^(line-1)
}

// End is one end of a channel. It has the methods of p2p.Link except Close, with the same rules for
// callers. Send takes a frame as a whole or not at all, so that Flush does nothing, and Recv always
// returns whole payloads.
type End struct {
	state   atomic.Uint32
	bell    func()
	side    int
	arm     [2]*uint32 // of this end, of the other
	rung    [2]*uint32 // a bell for this end, for the other, is under way
	fences  [2]*uint32 // this end, the other, passes barriers when arming, and takes part in the other's
	light   bool       // both do: commits need no fence
	fence   bool       // this end does
	max     uint64
	size    uint64 // of a ring
	mu      sync.Mutex
	err     error
	_       [line]byte
	out     producer
	_       [line]byte
	in      consumer
	mem     []byte
	quarter uint64
}

type producer struct {
	data   unsafe.Pointer
	tail   uint64 // bytes committed since the beginning
	seq    uint64 // of the last frame or skip
	head   uint64 // bytes that the consumer is known to have freed
	told   *uint64
	wanted uint64 // room that the last refused frame needs; 0: none was refused
}

type consumer struct {
	data    unsafe.Pointer
	pos     uint64 // bytes freed since the beginning
	seq     uint64 // of the frame or skip expected next
	untold  uint64 // freed, not published
	told    *uint64
	held    bool // between Recv and Release
	filling bool
	size    uint64 // of the held frame
	payload []byte // the unread rest of it
	hdr     p2p.Header
}

// Init makes e one end of the channel in mem: Bytes(data) bytes, aligned to 64, all zero before
// either end is initialised. side is 0 at one end and 1 at the other. bell wakes the other end.
// Send and Release call it; it must not block, and is not called again until the other end has
// called Answer.
func (e *End) Init(mem []byte, data, side int, bell func()) error {
	if data != Round(data) || len(mem) != Bytes(data) || uintptr(unsafe.Pointer(unsafe.SliceData(mem)))%line != 0 ||
		side&^1 != 0 {
		return fmt.Errorf("ring: %d bytes of memory for side %d with rings of %d bytes: want %d bytes aligned to "+
			"%d for a power of two within %d..%d",
			len(mem), side, data, Bytes(data), line, MinData, MaxData)
	}
	base := unsafe.Pointer(unsafe.SliceData(mem))
	e.mem, e.side, e.bell = mem, side, bell
	e.size, e.max, e.quarter = uint64(data), uint64(MaxFrame(data)), uint64(data/4)
	for i, s := range [2]int{side, 1 - side} {
		e.arm[i] = (*uint32)(unsafe.Add(base, (2+s)*spacing))
		e.rung[i] = (*uint32)(unsafe.Add(base, (2+s)*spacing+4))
		e.fences[i] = (*uint32)(unsafe.Add(base, (2+s)*spacing+8))
	}
	e.out = producer{data: unsafe.Add(base, control+side*data), told: (*uint64)(unsafe.Add(base, side*spacing))}
	e.in = consumer{data: unsafe.Add(base, control+(1-side)*data), told: (*uint64)(unsafe.Add(base, (1-side)*spacing)),
		seq: 1}
	return nil
}

// Prepare does the slow part of the process's first Asymmetric, some 10 ms, in advance. Call it
// concurrently with other work.
func Prepare() { registerBarrier() }

// Asymmetric moves the cost of sleeping from the other end's every Send to this end's Arm, which
// then takes some microseconds, where the system supports that (Linux on amd64). It cannot be
// undone. The goroutine that may call Send and Arm may call it at any time: the other end sends
// without a fence only after it has seen fences, and then it sees the arm word that was set before.
func (e *End) Asymmetric() {
	if e.fence {
		return
	}
	if e.fence = registerBarrier(); e.fence {
		atomic.StoreUint32(e.fences[0], 1)
	}
}

// Memory returns the channel's memory, as given to Init.
func (e *End) Memory() []byte { return e.mem }

// MaxFrame is the largest payload in bytes.
func (e *End) MaxFrame() int { return int(e.max) }

// Fail ends e: from now on Send fails with err, and so does Recv, at once or, if drain is set,
// after it has delivered the frames that have arrived. The first err stays. From any goroutine.
func (e *End) Fail(err error, drain bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.err == nil {
		e.err = err
	}
	to := uint32(ended)
	if drain {
		to = draining
	}
	if e.state.Load() < to {
		e.state.Store(to)
	}
}

// Err returns the error of Fail, or the other end's protocol violation; nil while e works.
func (e *End) Err() error {
	if e.state.Load() == live {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.err
}

func (e *End) violated(format string, args ...any) error {
	e.Fail(fmt.Errorf("%w: %s", p2p.ErrProtocol, fmt.Sprintf(format, args...)), false)
	return e.Err()
}

// Send implements p2p.Link. A payload that is longer than MaxFrame or not h.Len long is an error of
// the caller that does not fail the link.
func (e *End) Send(h *p2p.Header, payload []byte) (bool, error) { return e.send(h, payload, false) }

// SendPast implements p2p.Bypasser, for payloads from pastLeast bytes on.
func (e *End) SendPast(h *p2p.Header, payload []byte) (bool, error) { return e.send(h, payload, true) }

// pastLeast is the length of a payload in bytes from which on it may bypass the caches.
const pastLeast = 16 << 10

func (e *End) send(h *p2p.Header, payload []byte, past bool) (bool, error) {
	if e.state.Load() != live {
		return false, e.Err()
	}
	n := uint64(h.Len)
	if n != uint64(len(payload)) || n > e.max {
		return false, fmt.Errorf("ring: frame with %d bytes of payload for a header that says %d; the largest is %d",
			len(payload), n, e.max)
	}
	p := &e.out
	at, size := place(n)
	off := p.tail & (e.size - 1)
	rest := e.size - off
	room := size + line // one line more: its commit word is cleared
	if size > rest {
		room += rest
	}
	if e.size-(p.tail-p.head) < room {
		head := atomic.LoadUint64(p.told)
		if head < p.head || head > p.tail {
			return false, e.violated("the peer has freed %d bytes of %d sent, and %d before", head, p.tail, p.head)
		}
		p.head = head
		if e.size-(p.tail-head) < room {
			p.wanted = room
			return false, nil
		}
	}
	p.wanted = 0
	frame := unsafe.Add(p.data, off)
	var skip *uint64
	if size > rest {
		skip = (*uint64)(frame)
		frame = p.data
		p.tail += rest
		p.seq++
	}
	*(*p2p.Header)(unsafe.Add(frame, 8)) = *h
	switch {
	case past && n >= pastLeast:
		kernels.CopyNonTemporal(unsafe.Add(frame, at), unsafe.Pointer(unsafe.SliceData(payload)), int(n))
	case n > 0:
		kernels.CopyShared(unsafe.Add(frame, at), unsafe.Pointer(unsafe.SliceData(payload)), int(n))
	}
	p.tail += size
	p.seq++
	// Plain stores, here and below: the consumer reads these words only after the commit, which
	// comes last.
	*(*uint64)(unsafe.Add(p.data, p.tail&(e.size-1))) = 0
	commit, word := (*uint64)(frame), p.seq<<1
	if skip != nil {
		*commit = word
		commit, word = skip, word-2|1
	}
	if e.light {
		storeRelease(commit, word)
	} else {
		atomic.StoreUint64(commit, word)
		e.light = e.fence && atomic.LoadUint32(e.fences[1]) == 1
	}
	if atomic.LoadUint32(e.arm[1]) != 0 {
		e.ring()
	}
	return true, nil
}

// Flush implements p2p.Link; Send keeps nothing.
func (e *End) Flush() (bool, error) {
	if e.state.Load() != live {
		return false, e.Err()
	}
	return true, nil
}

// Recv implements p2p.Link.
func (e *End) Recv() (*p2p.Header, []byte, error) {
	c := &e.in
	for {
		// Read before the ring, so that frames which a peer committed before it was found gone are
		// seen.
		state := e.state.Load()
		if state == ended {
			return nil, nil, e.Err()
		}
		if c.held {
			if c.filling {
				return &c.hdr, nil, nil
			}
			return &c.hdr, c.payload, nil
		}
		off := c.pos & (e.size - 1)
		frame := unsafe.Add(c.data, off)
		// The payload's first line is fetched along with the commit word's.
		prefetch(unsafe.Add(c.data, (off+line)&(e.size-1)))
		commit := atomic.LoadUint64((*uint64)(frame))
		if commit == 0 {
			if state == draining {
				return nil, nil, e.Err()
			}
			return nil, nil, nil
		}
		if commit == c.seq<<1|1 && off != 0 {
			c.pos += e.size - off
			c.untold += e.size - off
			c.seq++
			continue
		}
		if commit != c.seq<<1 {
			return nil, nil, e.violated("commit word %#x at byte %d of the ring, want frame %d", commit, off, c.seq)
		}
		c.hdr = *(*p2p.Header)(unsafe.Add(frame, 8)) // copied, so that what is checked is what is used
		n := uint64(c.hdr.Len)
		at, size := place(n)
		if n > e.max || off+size > e.size {
			return nil, nil, e.violated("frame of %d bytes at byte %d of a ring of %d; the largest is %d", n, off,
				e.size, e.max)
		}
		if e.state.Load() == ended { // the memory may have been blanked between commit word and header
			return nil, nil, e.Err()
		}
		c.held, c.filling, c.size = true, false, size
		c.payload = unsafe.Slice((*byte)(unsafe.Add(frame, at)), n)
	}
}

// Fill implements p2p.Link.
func (e *End) Fill(dst []byte) (int, error) {
	if e.state.Load() == ended {
		return 0, e.Err()
	}
	if !e.in.held {
		return 0, nil
	}
	e.in.filling = true
	n := min(len(dst), len(e.in.payload))
	kernels.CopyShared(unsafe.Pointer(unsafe.SliceData(dst)), unsafe.Pointer(unsafe.SliceData(e.in.payload)), n)
	e.in.payload = e.in.payload[n:]
	return n, nil
}

// Release implements p2p.Link.
func (e *End) Release() {
	c := &e.in
	if !c.held {
		return
	}
	c.held, c.payload = false, nil
	c.pos += c.size
	c.untold += c.size
	c.seq++
	if c.untold >= e.quarter {
		c.untold = 0
		atomic.StoreUint64(c.told, c.pos)
		if atomic.LoadUint32(e.arm[1])&armSend != 0 {
			e.ring()
		}
	}
}

func (e *End) ring() {
	if atomic.SwapUint32(e.arm[1], 0) != 0 && atomic.SwapUint32(e.rung[1], 1) == 0 {
		e.bell()
	}
}

// Nudge stores v to word, in memory that both ends share, and rings the bell of an armed end, as a
// frame would. A waiter there must read word after Arm.
func (e *End) Nudge(word *uint64, v uint64) {
	if e.light {
		storeRelease(word, v)
	} else {
		atomic.StoreUint64(word, v)
		e.light = e.fence && atomic.LoadUint32(e.fences[1]) == 1
	}
	if atomic.LoadUint32(e.arm[1]) != 0 {
		e.ring()
	}
}

// StoreRelease stores v to p after all earlier loads and stores and, where the processor can do
// that, without waiting for them.
func StoreRelease(p *uint64, v uint64) { storeRelease(p, v) }

// Prepare implements p2p.Preparer: it begins to take the cache lines of the next frame, and the one
// behind it, from the other end's core. The line of the commit word is the one that the other end
// polls.
func (e *End) Prepare(n int) {
	_, size := place(uint64(n))
	off := e.out.tail & (e.size - 1)
	if size < e.size-off {
		kernels.Acquire(uintptr(unsafe.Add(e.out.data, off)), int(size+line))
	}
}

// Answer says that this end received the bell; call it before waking the sleeper. From any
// goroutine.
func (e *End) Answer() { atomic.StoreUint32(e.rung[0], 0) }

// Arm implements p2p.Link. A frame between Recv and Release does not count as available.
func (e *End) Arm() bool {
	want := uint32(armRecv)
	if e.out.wanted != 0 {
		want |= armSend
	}
	atomic.StoreUint32(e.arm[0], want)
	if e.fence {
		barrier()
	}
	if e.state.Load() == live && !e.arrived() && !e.room() {
		return false
	}
	e.Disarm()
	return true
}

func (e *End) arrived() bool {
	c := &e.in
	return !c.held && atomic.LoadUint64((*uint64)(unsafe.Add(c.data, c.pos&(e.size-1)))) != 0
}

func (e *End) room() bool {
	p := &e.out
	return p.wanted != 0 && e.size-(p.tail-atomic.LoadUint64(p.told)) >= p.wanted
}

// Disarm implements p2p.Link.
func (e *End) Disarm() { atomic.StoreUint32(e.arm[0], 0) }
