package cuda

import (
	"fmt"
	"unsafe"

	"tutti/kernels"
)

// MaxPacketRanks is the most ranks that exchange packets.
const MaxPacketRanks = 8

const (
	packets      = "_packets"
	payload      = 8 // bytes of data in a packet
	packet       = 16
	packetBlocks = 16 // few, so that all of them run at once
)

// packetParams has the layout of PacketParams in src/params.h.
type packetParams struct {
	dst, src, n, flip, divisor, magic uint64
	slot, stop, failed                uint64
	ranks, rank, flags, call          uint32
	inbox                             [MaxPacketRanks]uint64
}

// Packets is what a rank knows to exchange small messages with others over memory that they have
// mapped of each other. A packet has 8 bytes of data and a mark, so that who finds the mark has the
// data: no rank waits for a flag after the data. Ranks store into each other's inboxes and nowhere
// else.
type Packets struct {
	Rank int
	// Inboxes are the addresses of the inbox of every rank, as this rank has mapped it, its own
	// too: InboxBytes at a multiple of 16, zero before the first call.
	Inboxes []uint64
	// Most is the bytes of the longest message, the same in all ranks.
	Most uint64
	// Stop is the address of a word of 8 bytes. A call that waits gives up when it is not 0, and
	// leaves dst undefined. The inboxes are not to be used again then.
	Stop uint64
	// Failed is the address of a word of 8 bytes that a call sets to 1 when it has given up.
	Failed uint64
}

// InboxBytes returns the bytes of an inbox for messages of at most most bytes: two slots for every
// rank, so that a rank may send while another still reads the call before.
func InboxBytes(ranks int, most uint64) uint64 { return 2 * uint64(ranks) * slotBytes(most) }

func slotBytes(most uint64) uint64 { return (most + payload - 1) / payload * packet }

// AllReduce returns the launch that combines src of all ranks, in their order, into dst of each, as
// package kernels defines op on dt; dst is src or disjoint from it. All ranks make the same calls,
// numbered from 1 on without gaps, each after its call before has ended, which is the order of a
// stream. The kernel ends when the packets of all ranks have come, or when Stop says so. The Grid
// is 0 if bytes is 0. An error says that the operation is not defined, that the message or the
// number of ranks is too large, or that call is 0: the numbers are used up, and the inboxes have to
// be replaced.
func (x Packets) AllReduce(op kernels.Op, dt kernels.DType, dst, src, bytes uint64, call uint32) (Launch, error) {
	ranks := len(x.Inboxes)
	switch {
	case !kernels.Supported(op, dt):
		return Launch{}, fmt.Errorf("kernels/cuda: %v of %v is not defined", op, dt)
	case ranks < 2 || ranks > MaxPacketRanks || x.Rank < 0 || x.Rank >= ranks:
		return Launch{}, fmt.Errorf("kernels/cuda: rank %d of %d exchanges packets, want one of 2 to %d ranks",
			x.Rank, ranks, MaxPacketRanks)
	case bytes > x.Most || bytes%uint64(dt.Size()) != 0:
		return Launch{}, fmt.Errorf("kernels/cuda: a message of %d bytes in packets, want at most %d and whole "+
			"elements of %v", bytes, x.Most, dt)
	case call == 0:
		return Launch{}, fmt.Errorf("kernels/cuda: the call 0 of an exchange of packets, want 1 or more; after %d "+
			"calls replace the inboxes", ^call)
	}
	r := reductionOf(op, dt)
	p := packetParams{dst: dst, src: src, n: bytes / uint64(r.unit), flip: r.flip, slot: slotBytes(x.Most),
		stop: x.Stop, failed: x.Failed, ranks: uint32(ranks), rank: uint32(x.Rank), call: call}
	divisor := 0
	if op == kernels.Avg {
		divisor = ranks
	}
	p.divisor, p.magic, p.flags = division(dt, divisor)
	if (dst|src)%uint64(r.unit) == 0 {
		p.flags |= natural
	}
	for i, inbox := range x.Inboxes {
		p.inbox[i] = inbox + uint64(call%2)*uint64(ranks)*p.slot
	}
	// The grid follows from the message, so that all ranks have the same: a thread then waits only
	// for what threads with its own number send first.
	blocks := min((bytes+payload*threads-1)/(payload*threads), packetBlocks)
	l := Launch{Function: r.kernel + packets, Grid: uint32(blocks), Block: threads}
	l.Params = raw(&p, unsafe.Sizeof(p))
	return l, nil
}
