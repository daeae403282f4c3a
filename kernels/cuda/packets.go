package cuda

import (
	"fmt"
	"time"
	"unsafe"

	"tutti/kernels"
)

// The limits of an exchange of packets.
const (
	MaxPacketRanks = 8
	MaxPacketBytes = 16 << 10 // of a message
)

const (
	packets      = "_packets"
	payload      = 8 // bytes of data in a packet
	packet       = 16
	packetBlocks = 16 // few, so that all of them run at once
	inboxSlot    = MaxPacketBytes / payload * packet
)

// A mark has 9 bits for the number of the call, 15 for the number of elements, 5 for their type and
// 3 for the operation.
const (
	markCount = 9
	markType  = 24
	markOp    = 29
)

// packetParams has the layout of PacketParams in src/params.h.
type packetParams struct {
	dst, src, n, flip, divisor, magic uint64
	slot, calls, words, limit         uint64
	ranks, rank, flags, call          uint32
	inbox                             [MaxPacketRanks]uint64
}

// Packets is what a rank knows to exchange small messages with others over memory that they have
// mapped of each other. A packet has 8 bytes of data and a mark, so that who finds the mark has the
// data: no rank waits for a flag after the data. Ranks store into each other's inboxes and nowhere
// else. The mark tells the number of the call and what it is, so that ranks whose calls differ find
// out.
//
// The number of a call is in the memory of the device: a launch may be repeated, as a graph does.
type Packets struct {
	Rank int
	// Inboxes are the addresses of the inbox of every rank, as this rank has mapped it, its own
	// too: InboxBytes at a multiple of 16, zero before the first call.
	Inboxes []uint64
	// Words is the address of PacketWords words of 8 bytes, zero before the first call: see
	// PacketFailure. If the first one is not 0, calls give up.
	Words uint64
	// Limit bounds the wait of a call. 0: it is not bounded.
	Limit time.Duration
}

// PacketWords is the number of words of Packets.Words.
const PacketWords = 3

// InboxBytes returns the bytes of an inbox: two slots for every rank, so that a rank may send while
// another still reads the call before, and the numbers of calls.
func InboxBytes(ranks int) int { return 2*ranks*inboxSlot + 4*(1+MaxPacketBytes/payload) }

// AllReduce returns the launch that combines src of all ranks, in their order, into dst of each, as
// package kernels defines op on dt; dst is src or disjoint from it. All ranks make the same calls
// in the same order, each after its call before has ended, which is the order of a stream. The
// kernel ends when the packets of all ranks have come. It gives up and leaves dst undefined when
// another rank's call differs, when the limit is over, when the first of Words says so, or when a
// call before has given up; the inboxes have to be replaced then. The Grid is 0 if bytes is 0. An
// error says that the operation is not defined, or that the message or the number of ranks is too
// large.
func (x Packets) AllReduce(op kernels.Op, dt kernels.DType, dst, src, bytes uint64) (Launch, error) {
	ranks := len(x.Inboxes)
	switch {
	case !kernels.Supported(op, dt):
		return Launch{}, fmt.Errorf("kernels/cuda: %v of %v is not defined", op, dt)
	case ranks < 2 || ranks > MaxPacketRanks || x.Rank < 0 || x.Rank >= ranks:
		return Launch{}, fmt.Errorf("kernels/cuda: rank %d of %d exchanges packets, want one of 2 to %d ranks",
			x.Rank, ranks, MaxPacketRanks)
	case bytes > MaxPacketBytes || bytes%uint64(dt.Size()) != 0:
		return Launch{}, fmt.Errorf("kernels/cuda: a message of %d bytes in packets, want at most %d and whole "+
			"elements of %v", bytes, MaxPacketBytes, dt)
	}
	r := reductionOf(op, dt)
	p := packetParams{dst: dst, src: src, n: bytes / uint64(r.unit), flip: r.flip, slot: inboxSlot, words: x.Words,
		calls: x.Inboxes[x.Rank] + 2*uint64(ranks)*inboxSlot, limit: uint64(max(x.Limit, 0)), ranks: uint32(ranks),
		rank: uint32(x.Rank)}
	p.call = uint32(bytes)/uint32(dt.Size())<<markCount | uint32(dt)<<markType | uint32(op-1)<<markOp
	divisor := 0
	if op == kernels.Avg {
		divisor = ranks
	}
	p.divisor, p.magic, p.flags = division(dt, divisor)
	if (dst|src)%uint64(r.unit) == 0 {
		p.flags |= natural
	}
	copy(p.inbox[:], x.Inboxes)
	// The grid follows from the message, so that all ranks have the same: a thread then waits only
	// for what threads with its own number send first.
	blocks := min((bytes+payload*threads-1)/(payload*threads), packetBlocks)
	l := Launch{Function: r.kernel + packets, Grid: uint32(blocks), Block: threads}
	l.Params = raw(&p, unsafe.Sizeof(p))
	return l, nil
}

// A Reason is why a call of packets gave up.
type Reason uint8

// The reasons.
const (
	Stopped Reason = iota + 1 // by the first of Words
	Late                      // the rank's packets did not come within the limit
	Differs                   // the rank made another call
)

// A PacketFailure says why a call gave up.
type PacketFailure struct {
	Reason Reason
	Rank   int // that is late, or whose call differs
	// The rank's call, if it differs.
	Op    kernels.Op
	DType kernels.DType
	Count int
}

// PacketFailureOf reads the second of Packets.Words, which is 0 until a call gives up. The third
// one becomes 1 when a call begins after that.
func PacketFailureOf(word uint64) PacketFailure {
	f := PacketFailure{Reason: Reason(word), Rank: int(word >> 8 & 0xff)}
	if f.Reason == Differs {
		mark := uint32(word >> 32)
		f.Op, f.DType = kernels.Op(mark>>markOp+1), kernels.DType(mark>>markType&31)
		f.Count = int(mark >> markCount & 0x7fff)
	}
	return f
}
