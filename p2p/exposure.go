package p2p

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"
)

// An Exposure is how a rank lets its peers read buffers of an operation, and ends that at any
// moment without asking them. It is a 64-bit word in memory that the peers map. Begin stores a
// ticket there, a number that this rank never uses again, and the rank tells the ticket to the
// peers along with where the buffers are. Withdraw stores another value.
//
// A peer reads the buffers and then looks at the word. If the ticket still stands there, the owner
// had not left the operation when the data was read, so that the data is the operation's. Otherwise
// the peer drops what it has read. Nobody stores into the owner's memory, so that a peer that is
// slow, stopped or dead harms nobody. The scheme is that of a sequence lock (Linux seqlock_t) whose
// readers give up instead of trying again.
//
// What must be ordered, and by what:
//
//	owner   the buffers' contents before the message                     the link commits with release
//	owner   Begin's store before the message that tells the ticket      the link commits with release
//	owner   Withdraw's store before the caller's next store to a buffer  amd64: XCHG is a full barrier;
//	                                                                     arm64: SWPAL, then DMB ISH
//	reader  the message before the loads of the data                     the link takes with acquire
//	reader  the loads of the data before the load of the word            amd64: loads stay in order, LFENCE against
//	                                                                     string loads; arm64: DMB ISHLD
//
// On other processors no order is known here and nothing is exposed: see CanExpose.
type Exposure struct {
	word  *atomic.Uint64
	board *Region
	off   int
	last  *atomic.Uint64 // the proxy's latest ticket
}

// CanExpose says whether this processor's memory order is one of those that Exposure knows.
const CanExpose = canExpose

// Words are a cache line apart, so that the owner's stores to one disturb the readers of no other.
const (
	wordSpacing = 64
	boardSize   = 64 << 10
)

// board hands out the words of one region.
type board struct {
	region *Region
	free   []int // offsets
}

// NewExposure returns an exposure for one operation at a time, which FreeExposure gives back. It
// fails with errors.ErrUnsupported where peers cannot map this rank's memory. With the lock.
func (p *Proxy) NewExposure() (*Exposure, error) {
	if !CanExpose {
		return nil, fmt.Errorf("exposing memory on this processor: %w", errors.ErrUnsupported)
	}
	if p.closed {
		return nil, ErrClosed
	}
	for i := range p.boards {
		if b := &p.boards[i]; len(b.free) > 0 {
			off := b.free[len(b.free)-1]
			b.free = b.free[:len(b.free)-1]
			return p.exposure(b.region, off), nil
		}
	}
	r, err := p.alloc(boardSize)
	if err != nil {
		return nil, err
	}
	if !r.Shared {
		err := fmt.Errorf("exposing memory: no transport shares it: %w", errors.ErrUnsupported)
		return nil, errors.Join(err, p.Deregister(r), r.Free())
	}
	p.regions.add(r)
	b := board{region: r}
	for off := boardSize - wordSpacing; off > 0; off -= wordSpacing {
		b.free = append(b.free, off)
	}
	p.boards = append(p.boards, b)
	return p.exposure(r, 0), nil
}

func (p *Proxy) exposure(r *Region, off int) *Exposure {
	return &Exposure{word: r.Word(off), board: r, off: off, last: &p.tickets}
}

// FreeExposure withdraws e and gives its word back. A word may be used again at once, for tickets
// are not. With the lock.
func (p *Proxy) FreeExposure(e *Exposure) {
	if p.closed { // the boards are gone
		return
	}
	e.Withdraw()
	for i := range p.boards {
		if b := &p.boards[i]; b.region == e.board {
			b.free = append(b.free, e.off)
		}
	}
}

// Place returns where the peers find the word: the ID of a region of this rank, and the offset in
// it.
func (e *Exposure) Place() (region uint64, off int) { return e.board.ID, e.off }

// Begin opens the operation's buffers to whoever is told the ticket. It must precede that message.
func (e *Exposure) Begin() (ticket uint64) {
	ticket = e.last.Add(1)
	e.word.Store(ticket)
	return ticket
}

// Withdraw ends what Begin began: whatever a peer reads from now on it will not take for the
// operation's data. The buffers may be written as soon as Withdraw has returned. It does not wait
// for anybody.
func (e *Exposure) Withdraw() {
	e.word.Swap(0)
	storeBarrier()
}

// A Ticket is a peer's side of an Exposure.
type Ticket struct {
	word  *atomic.Uint64
	value uint64
}

// NewTicket returns the ticket value at offset off of the mapped board of a peer.
func NewTicket(board *Mapping, off int, value uint64) (Ticket, error) {
	if off < 0 || off%wordSpacing != 0 || off > len(board.Mem)-8 || value == 0 {
		return Ticket{}, fmt.Errorf("%w: ticket %d at offset %d of %d bytes", ErrProtocol, value, off, len(board.Mem))
	}
	return Ticket{(*atomic.Uint64)(unsafe.Pointer(&board.Mem[off])), value}, nil
}

// Valid reports whether everything that this goroutine has read from the owner's buffers so far was
// the operation's: the owner had not left it.
func (t Ticket) Valid() bool {
	loadBarrier()
	return t.word.Load() == t.value
}
