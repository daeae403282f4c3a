package p2p

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"
)

// An Exposure lets peers read the buffers of an operation, and can end that at any moment without
// asking them. It is a 64-bit word in memory that the peers map. Begin stores a ticket there, a
// number that this rank never uses again, and the rank sends the ticket to the peers along with the
// addresses of the buffers. Withdraw stores another value.
//
// A peer reads the buffers and then the word. If the word still has the ticket, the owner had not
// left the operation when the data was read, so that the data is valid. Otherwise the peer discards
// the data. Peers never store into the owner's memory, so that a slow, stopped or dead peer does no
// harm. The scheme is that of a sequence lock (Linux seqlock_t) whose readers give up instead of
// trying again.
//
// Required orders, and what provides them:
//
//	owner   the buffers' contents before the message                     the link commits with release
//	owner   Begin's store before the message that tells the ticket      the link commits with release
//	owner   Withdraw's store before the caller's next store to a buffer  amd64: XCHG is a full barrier;
//	                                                                     arm64: SWPAL, then DMB ISH
//	reader  the message before the loads of the data                     the link takes with acquire
//	reader  the loads of the data before the load of the word            amd64: loads stay in order, LFENCE against
//	                                                                     string loads; arm64: DMB ISHLD
//
// On other processors the order is not known, and nothing is exposed: see CanExpose.
type Exposure struct {
	word  *atomic.Uint64
	board *Region
	off   int
	last  *atomic.Uint64 // the proxy's latest ticket
}

// CanExpose says whether Exposure works on this processor.
const CanExpose = canExpose

// Words are a cache line apart, so that a store to one does not slow readers of another.
const (
	wordSpacing = 64
	boardSize   = 64 << 10
)

// board allocates the words of one region.
type board struct {
	region *Region
	free   []int // offsets
}

// NewExposure returns an exposure for one operation at a time; FreeExposure frees it. It fails with
// errors.ErrUnsupported if peers cannot map this rank's memory. With the lock.
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
	r, err := p.alloc(boardSize, false)
	if err != nil {
		return nil, err
	}
	if !r.Shared && !p.cfg.Threads {
		err := fmt.Errorf("exposing memory: no transport shares it: %w", errors.ErrUnsupported)
		return nil, errors.Join(err, p.deregister(r), r.Free())
	}
	p.regions.add(r, true)
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

// FreeExposure withdraws e and frees its word. The word may be reused at once, because tickets
// never are. With the lock.
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

// Place returns the location of the word for peers: the ID of a region of this rank, and the offset
// in it.
func (e *Exposure) Place() (region uint64, off int) { return e.board.ID, e.off }

// Begin opens the operation's buffers to peers that get the ticket. It must precede the message
// with the ticket.
func (e *Exposure) Begin() (ticket uint64) {
	ticket = e.last.Add(1)
	e.word.Store(ticket)
	return ticket
}

// Withdraw ends Begin: peers discard data that they read from now on. The buffers may be written as
// soon as Withdraw has returned. It does not wait for peers.
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

// Valid reports whether everything that this goroutine has read from the owner's buffers is valid:
// the owner had not left the operation.
func (t Ticket) Valid() bool {
	loadBarrier()
	return t.word.Load() == t.value
}
