package pg

import (
	"context"

	"tutti/collectives"
	"tutti/pg/internal/exec"
)

// Operation is the argument of Start and Do: one of the …Op types.
type Operation interface {
	operation()
}

func (AllReduceOp) operation()     {}
func (ReduceScatterOp) operation() {}
func (AllGatherOp) operation()     {}
func (AllGatherVOp) operation()    {}
func (AllToAllOp) operation()      {}
func (AllToAllVOp) operation()     {}
func (BroadcastOp) operation()     {}
func (ReduceOp) operation()        {}
func (GatherOp) operation()        {}
func (ScatterOp) operation()       {}
func (BarrierOp) operation()       {}
func (SendOp) operation()          {}
func (RecvOp) operation()          {}

// Buffers of an operation may share memory only as its type says. Any other overlap is an
// *ArgumentError.

// AllReduceOp combines Src of all ranks into Dst of every rank. Src may be Dst; a zero Src means
// that.
type AllReduceOp struct {
	Dst, Src Buffer
	Op       Reduction
}

// ReduceScatterOp combines the parts of Src and leaves part r at rank r: Src.Count =
// Size*Dst.Count. They must not overlap.
type ReduceScatterOp struct {
	Dst, Src Buffer
	Op       Reduction
}

// AllGatherOp collects Src of every rank: Dst.Count = Size*Src.Count. Src may be this rank's part
// of Dst. The part of an inactive slot is left as it was; that of a slot which was lost during the
// operation may hold what the lost rank gave, all or some of it.
type AllGatherOp struct{ Dst, Src Buffer }

// AllGatherVOp collects Src of every rank, Counts[r] elements of rank r, packed in Dst. Counts is
// the same on all ranks. Src may be this rank's part of Dst.
type AllGatherVOp struct {
	Dst, Src Buffer
	Counts   []int
}

// AllToAllOp sends part r of Src to rank r and puts what rank r sent into part r of Dst. Src and
// Dst must not overlap.
type AllToAllOp struct{ Dst, Src Buffer }

// AllToAllVOp is AllToAllOp with SendCounts[r] elements for rank r and RecvCounts[r] from it,
// packed. Rank a's SendCounts[b] must be rank b's RecvCounts[a].
type AllToAllVOp struct {
	Dst, Src               Buffer
	SendCounts, RecvCounts []int
}

// BroadcastOp copies X of Root to X of every rank.
type BroadcastOp struct {
	X    Buffer
	Root int
}

// ReduceOp combines X of all ranks into X of Root; elsewhere X is left as it was.
type ReduceOp struct {
	X    Buffer
	Root int
	Op   Reduction
}

// GatherOp collects Src of every rank in Dst of Root: there Dst.Count = Size*Src.Count, and Src may
// be its part of Dst; elsewhere Dst is not used.
type GatherOp struct {
	Dst, Src Buffer
	Root     int
}

// ScatterOp gives part r of the Root's Src to rank r's Dst: at the root Src.Count = Size*Dst.Count,
// and Dst may be its part of Src; elsewhere Src is not used.
type ScatterOp struct {
	Dst, Src Buffer
	Root     int
}

// BarrierOp ends when every rank has begun it.
type BarrierOp struct{}

// SendOp sends X to rank To under Tag (0..MaxTag). It ends when X may be reused, which for a small
// message is before the receiver has asked for it. A started one of a device's memory, whose data
// has yet to come from there, may always wait for the receiver. Its stream waits for nothing, so
// that later work may change X at once.
type SendOp struct {
	X   Buffer
	To  int
	Tag int
}

// RecvOp receives a message of exactly X's length and type from From (or AnyRank) under Tag (or
// AnyTag). Messages of one sender and tag are received in the order of their sending.
//
// A device's stream waits for the message of a started one: a send behind it on the same stream
// begins afterwards. If the stream does not come in time, a message that has arrived is lost. A
// message of more than 4 MiB that its sender gives up in the middle makes a receive in a device's
// memory fail with a *RankError, instead of waiting for the next message.
type RecvOp struct {
	X    Buffer
	From int
	Tag  int
}

// AllReduce combines x of all ranks, element by element, and leaves the result in x at every rank.
// All ranks give the same length, type and op. It blocks until the operation has ended; see the
// package documentation for errors and ctx.
func AllReduce[T Number](ctx context.Context, g *Group, x []T, op Reduction) error {
	b := bufferOf(x)
	return g.blocking(ctx, &exec.Request{Kind: collectives.AllReduce, Op: op, Dst: b, Src: b})
}

// ReduceScatter combines src of all ranks and leaves part r of the result in dst of rank r:
// len(src) = Size*len(dst).
func ReduceScatter[T Number](ctx context.Context, g *Group, dst, src []T, op Reduction) error {
	return g.blocking(ctx, &exec.Request{Kind: collectives.ReduceScatter, Op: op, Dst: bufferOf(dst),
		Src: bufferOf(src)})
}

// AllGather collects src of all ranks in dst, by rank: len(dst) = Size*len(src). An inactive slot's
// part is left as it was, unless the slot was lost during the operation.
func AllGather[T Element](ctx context.Context, g *Group, dst, src []T) error {
	return g.blocking(ctx, &exec.Request{Kind: collectives.AllGather, Dst: bufferOf(dst), Src: bufferOf(src)})
}

// AllGatherV collects src of all ranks, counts[r] elements from rank r, packed in dst by rank.
// counts is the same on all ranks.
func AllGatherV[T Element](ctx context.Context, g *Group, dst, src []T, counts []int) error {
	return g.blocking(ctx, &exec.Request{Kind: collectives.AllGatherV, Dst: bufferOf(dst), Src: bufferOf(src),
		Counts: counts})
}

// AllToAll sends part r of src to rank r and receives into part r of dst from rank r: len(dst) =
// len(src) = Size*part. They must not overlap.
func AllToAll[T Element](ctx context.Context, g *Group, dst, src []T) error {
	return g.blocking(ctx, &exec.Request{Kind: collectives.AllToAll, Dst: bufferOf(dst), Src: bufferOf(src)})
}

// AllToAllV is AllToAll with sendCounts[r] elements for rank r and recvCounts[r] from it, packed by
// rank. Rank a's sendCounts[b] must be rank b's recvCounts[a], zero included.
func AllToAllV[T Element](ctx context.Context, g *Group, dst, src []T, sendCounts, recvCounts []int) error {
	return g.blocking(ctx, &exec.Request{Kind: collectives.AllToAllV, Dst: bufferOf(dst), Src: bufferOf(src),
		Counts: sendCounts, RecvCounts: recvCounts})
}

// Broadcast copies x of root to x of every rank.
func Broadcast[T Element](ctx context.Context, g *Group, x []T, root int) error {
	b := bufferOf(x)
	return g.blocking(ctx, &exec.Request{Kind: collectives.Broadcast, Root: root, Dst: b, Src: b})
}

// Reduce combines x of all ranks into x of root; elsewhere x is left as it was.
func Reduce[T Number](ctx context.Context, g *Group, x []T, root int, op Reduction) error {
	b := bufferOf(x)
	return g.blocking(ctx, &exec.Request{Kind: collectives.Reduce, Op: op, Root: root, Dst: b, Src: b})
}

// Gather collects src of every rank in dst of root, by rank: there len(dst) = Size*len(src);
// elsewhere dst is not used and may be nil.
func Gather[T Element](ctx context.Context, g *Group, dst, src []T, root int) error {
	return g.blocking(ctx, &exec.Request{Kind: collectives.Gather, Root: root, Dst: bufferOf(dst), Src: bufferOf(src)})
}

// Scatter gives part r of root's src to rank r in dst: at root len(src) = Size*len(dst); elsewhere
// src is not used and may be nil.
func Scatter[T Element](ctx context.Context, g *Group, dst, src []T, root int) error {
	return g.blocking(ctx, &exec.Request{Kind: collectives.Scatter, Root: root, Dst: bufferOf(dst), Src: bufferOf(src)})
}

// Barrier returns when every rank has called it.
func (g *Group) Barrier(ctx context.Context) error {
	return g.blocking(ctx, &exec.Request{Kind: collectives.Barrier})
}

// Status describes a message that Recv received.
type Status struct {
	From, Tag int
	Count     int // elements
}

// Send sends x to rank to under tag (0..MaxTag). It returns when x may be reused: for small
// messages at once, unless too many are waiting for the receiver; for large ones when the receiver
// has them. After an error a large message was not received, unless it arrived at that moment; a
// small one may have been.
func Send[T Element](ctx context.Context, g *Group, x []T, to, tag int) error {
	_, err := g.pointToPoint(ctx, BufferOf(x), to, tag, false)
	return err
}

// Recv receives into x from rank from (or AnyRank) under tag (or AnyTag). The message must have
// exactly len(x) elements of the same type; any other is consumed and reported as an
// *ArgumentError. Messages of one sender and tag arrive in the order of their sending.
//
// If the link between two ranks breaks and is made anew, small messages that were sent may be lost.
// Then all Recvs from the sender that wait fail with a *RankError that says so, or else the next
// one that no message from before matches, whatever its tag. Later ones receive what was sent over
// the new link.
//
// A Recv that times out or is cancelled consumes no message: the next Recv that matches receives a
// message that was arriving in x, as a whole. x may be partly overwritten.
func Recv[T Element](ctx context.Context, g *Group, x []T, from, tag int) (Status, error) {
	return g.pointToPoint(ctx, BufferOf(x), from, tag, true)
}
