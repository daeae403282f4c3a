package cuda

import (
	"fmt"
	"math"
	"time"
	"unsafe"

	"tutti/collectives"
	"tutti/kernels"
)

// MaxPacketRanks is the most ranks that exchange packets.
const MaxPacketRanks = 8

// PacketRound is how many bytes of a message go in a round of packets. A longer message takes
// several, in each of which all ranks wait for each other.
const PacketRound = 128 << 10

const (
	packets      = "_packets"
	byBytes      = "_bytes"
	payload      = 8 // bytes of data in a packet
	packet       = 16
	packetBlocks = 16 // few, so that all of them run at once
	inboxSlot    = PacketRound / payload * packet
)

// The two marks of a packet have 9 bits for the number of the call, and 23 each of what the call
// is: the low 31 bits of the number of elements, 5 for their type, 3 for the operation, 3 for the
// root and 4 for the kind.
const (
	markNumber = 9
	markBits   = 32 - markNumber
	markCount  = 31
	markType   = markCount
	markOp     = markType + 5
	markRoot   = markOp + 3
	markKind   = markRoot + 3
)

// packetParams has the layout of PacketParams in src/params.h.
type packetParams struct {
	dst, src, n, flip, divisor, magic uint64
	from, to                          uint64
	slot, calls, words, limit, id     uint64
	ranks, rank, flags, root          uint32
	marks                             [2]uint32
	part                              [MaxPacketRanks]uint32
	inbox                             [MaxPacketRanks]uint64
}

// Packets is what a rank knows to exchange messages with others over memory that they have mapped
// of each other. A packet has 8 bytes of data and two marks, so that who finds the marks has the
// data: no rank waits for a flag after the data. Ranks store into each other's inboxes and nowhere
// else. The marks tell the number of the call and what it is, so that ranks whose calls differ find
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

// PacketWords is the number of words of Packets.Words, and PacketsEnded the one in which the caller
// counts calls with a number that have ended.
const (
	PacketWords  = 6
	PacketsEnded = 4
)

// InboxBytes returns the bytes of an inbox: two slots for every rank, so that a rank may send while
// another still reads the round before, and the numbers of calls.
func InboxBytes(ranks int) int { return 2*ranks*inboxSlot + 4*(1+PacketRound/payload) }

// A PacketCall is a collective of ranks that exchange packets. What its buffers hold is that of the
// kind: see package collectives, whose slots are the parts of a buffer.
type PacketCall struct {
	Kind  collectives.Kind // one whose parts are as long as each other, with data
	Op    kernels.Op       // of a kind that reduces
	DType kernels.DType
	Root  int // rank, of a kind that has one
	Count int // elements of a part, or of a vector
	// Parts are the parts of the ranks in buffers that have several.
	Parts []int
	// Number tells calls apart: see PacketFailure. It need not be the same at all ranks. 0: the
	// call may be repeated.
	Number uint64
	// Addresses, of bytes. A buffer that the rank does not use need not exist.
	Dst, Src uint64
}

// Do returns the launch of this rank's part of a collective, whose reductions are those of package
// kernels, in the order of the ranks. All ranks make the same calls in the same order, each after
// its call before has ended, which is the order of a stream. The kernel ends when the packets of
// all ranks have come. It gives up and leaves the destination undefined when another rank's call
// differs, when the limit is over, when the first of Words says so, or when a call before has given
// up; the inboxes have to be replaced then. The Grid is 0 if the count is. An error says that the
// call is not defined, or that there are too many ranks.
func (x Packets) Do(c PacketCall) (Launch, error) {
	ranks, layout := len(x.Inboxes), c.Kind.Layout()
	reduces, rooted := c.Kind.Reduces(), layout.InAtRoot || layout.OutAtRoot
	parted := layout.In.Parted() || layout.Out.Parted()
	switch {
	case layout.In != collectives.One && layout.In != collectives.All ||
		layout.Out != collectives.One && layout.Out != collectives.All:
		return Launch{}, fmt.Errorf("kernels/cuda: %v cannot go in packets", c.Kind)
	case reduces && !kernels.Supported(c.Op, c.DType):
		return Launch{}, fmt.Errorf("kernels/cuda: %v of %v is not defined", c.Op, c.DType)
	case !c.DType.Valid() || c.Count < 0 || c.Count > math.MaxInt/c.DType.Size():
		return Launch{}, fmt.Errorf("kernels/cuda: %d elements of %v in packets", c.Count, c.DType)
	case ranks < 2 || ranks > MaxPacketRanks || x.Rank < 0 || x.Rank >= ranks:
		return Launch{}, fmt.Errorf("kernels/cuda: rank %d of %d exchanges packets, want one of 2 to %d ranks",
			x.Rank, ranks, MaxPacketRanks)
	case rooted && (c.Root < 0 || c.Root >= ranks):
		return Launch{}, fmt.Errorf("kernels/cuda: rank %d as the root of %d ranks that exchange packets", c.Root,
			ranks)
	case parted && len(c.Parts) != ranks:
		return Launch{}, fmt.Errorf("kernels/cuda: %d parts of %d ranks that exchange packets", len(c.Parts), ranks)
	}
	bytes := uint64(c.Count * c.DType.Size())
	p := packetParams{dst: c.Dst, src: c.Src, slot: inboxSlot, words: x.Words,
		calls: x.Inboxes[x.Rank] + 2*uint64(ranks)*inboxSlot, limit: uint64(max(x.Limit, 0)), id: c.Number,
		ranks: uint32(ranks), rank: uint32(x.Rank), root: uint32(ranks)}
	what := uint64(c.Count)&(1<<markCount-1) | uint64(c.DType)<<markType | uint64(c.Kind)<<markKind
	if rooted {
		what |= uint64(c.Root) << markRoot
	}
	if layout.In.Parted() {
		p.from = bytes
	}
	if layout.Out.Parted() {
		p.to = bytes
	}
	for r := 0; parted && r < ranks; r++ {
		p.part[r] = uint32(c.Parts[r])
	}
	if layout.InAtRoot {
		p.root = uint32(c.Root)
	}
	used := uint64(0)
	reads, writes := c.Kind.Uses(x.Rank == c.Root)
	if reads {
		used |= c.Src | p.from
	} else {
		p.flags |= silent
	}
	if writes {
		used |= c.Dst | p.to
	} else {
		p.flags |= idle
	}
	var kernel string
	unit := uint64(1)
	if reduces {
		what |= uint64(c.Op-1) << markOp
		r := reductionOf(c.Op, c.DType)
		divisor := 0
		if c.Op == kernels.Avg {
			divisor = ranks
		}
		flags := uint32(0)
		p.divisor, p.magic, flags = division(c.DType, divisor)
		p.flags |= flags
		kernel, unit, p.flip = r.kernel, uint64(r.unit), r.flip
	} else if kernel = copies + byBytes; (used|bytes)%payload == 0 {
		kernel, unit = copies, payload
	}
	if used%unit == 0 {
		p.flags |= natural
	}
	p.n = bytes / unit
	p.marks = [2]uint32{uint32(what) << markNumber, uint32(what>>markBits) << markNumber}
	copy(p.inbox[:], x.Inboxes)
	// The grid follows from the length, so that all ranks have the same: a thread then waits only
	// for what threads with its own number send first.
	blocks := min((bytes+payload*threads-1)/(payload*threads), packetBlocks)
	l := Launch{Function: kernel + packets, Grid: uint32(blocks), Block: threads}
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
	// Number is that of the call. If it has none it is Recorded, and this is the number of the
	// first call that had not ended.
	Number   uint64
	Recorded bool
	Rank     int // that is late, or whose call differs
	// The call of this rank, and that of the other one if it differs, without their buffers; of the
	// Count, the low 31 bits.
	Ours, Theirs PacketCall
}

// PacketFailureOf reads Packets.Words, of which the second is 0 until a call gives up. The third
// one becomes 1 when a call begins after that.
func PacketFailureOf(words [PacketWords]uint64) PacketFailure {
	const recorded = 1 << 63
	why := words[1]
	f := PacketFailure{Reason: Reason(why), Number: words[3] &^ recorded, Recorded: words[3]&recorded != 0,
		Rank: int(why >> 8 & 0xff), Ours: packetCallOf(words[5])}
	if f.Reason == Differs {
		f.Theirs = packetCallOf(why >> 16)
	}
	return f
}

// packetCallOf returns what two marks tell.
func packetCallOf(what uint64) PacketCall {
	c := PacketCall{Kind: collectives.Kind(what >> markKind), DType: kernels.DType(what >> markType & 31),
		Root: int(what >> markRoot & 7), Count: int(what & (1<<markCount - 1))}
	if c.Kind.Reduces() {
		c.Op = kernels.Op(what>>markOp&7 + 1)
	}
	return c
}
