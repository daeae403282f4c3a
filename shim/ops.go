//go:build cgo && linux

package main

// #include "internal.h"
import "C"

import (
	"context"
	"fmt"
	"math"
	"time"
	"unsafe"

	"tutti/device/cuda"
	"tutti/pg"
)

// operation is an operation as the host describes it, checked as far as package pg cannot.
type operation struct {
	kind       int
	dst, src   pg.Buffer
	op         pg.Reduction
	peer, tag  int
	srcs, dsts []int // counts, in memory of the host
}

// read fills o with what the host describes for a rank, or describes a failure in f. It does not
// look at what the rank does not use.
func (o *operation) read(in *C.tutti_op, rank int, f *C.struct_failure) C.int {
	if in.flags != 0 {
		return failed(&coded{fmt.Sprintf("flags are %#x: none are known", in.flags), errUnsupported}, f)
	}
	if in.kind < C.TUTTI_OP_BARRIER || in.kind > C.TUTTI_OP_RECV {
		return invalid(f, "kind is %d, want one of TUTTI_OP_...", in.kind)
	}
	*o = operation{kind: int(in.kind), peer: int(in.peer), tag: int(in.tag)}
	uses := usedBy[in.kind]
	if rank != o.peer {
		uses &^= usedAtRoot[in.kind]
	}
	if uses&reduction != 0 {
		if in.reduction < 0 || in.reduction > math.MaxUint8 {
			return invalid(f, "reduction is %d, want TUTTI_SUM or another", in.reduction)
		}
		o.op = pg.Reduction(in.reduction)
	}
	if c := buffer(&in.dst, &o.dst, "dst", uses&dst != 0, in.stream, f); c != C.TUTTI_OK {
		return c
	}
	if c := buffer(&in.src, &o.src, "src", uses&src != 0, in.stream, f); c != C.TUTTI_OK {
		return c
	}
	if uses&counts == 0 {
		return C.TUTTI_OK
	}
	if in.counts_len > pg.MaxRanks || in.dst_counts == nil && in.counts_len > 0 ||
		in.src_counts == nil && in.counts_len > 0 && in.kind == C.TUTTI_OP_ALLTOALLV {
		return invalid(f, "counts_len is %d, but counts are missing or too many", in.counts_len)
	}
	o.dsts = unsafe.Slice((*int)(unsafe.Pointer(in.dst_counts)), int(in.counts_len))
	if in.kind == C.TUTTI_OP_ALLTOALLV {
		o.srcs = unsafe.Slice((*int)(unsafe.Pointer(in.src_counts)), int(in.counts_len))
	}
	return C.TUTTI_OK
}

// What a kind of operation uses. int64_t is Go's int: the library is built for 64 bits.
const (
	dst = 1 << iota
	src
	counts
	reduction
)

var usedBy = [...]int{
	C.TUTTI_OP_BARRIER:        0,
	C.TUTTI_OP_ALLREDUCE:      dst | src | reduction,
	C.TUTTI_OP_REDUCE_SCATTER: dst | src | reduction,
	C.TUTTI_OP_ALLGATHER:      dst | src,
	C.TUTTI_OP_ALLGATHERV:     dst | src | counts,
	C.TUTTI_OP_ALLTOALL:       dst | src,
	C.TUTTI_OP_ALLTOALLV:      dst | src | counts,
	C.TUTTI_OP_BROADCAST:      dst,
	C.TUTTI_OP_REDUCE:         dst | reduction,
	C.TUTTI_OP_GATHER:         dst | src,
	C.TUTTI_OP_SCATTER:        dst | src,
	C.TUTTI_OP_SEND:           src,
	C.TUTTI_OP_RECV:           dst,
}

// usedAtRoot is what only the root uses of that.
var usedAtRoot = [len(usedBy)]int{
	C.TUTTI_OP_GATHER:  dst,
	C.TUTTI_OP_SCATTER: src,
}

// gpus are the GPUs of the host's buffers. They stay open: the host may use them until it ends.
var gpus = cuda.Finder{Getenv: getenv}

// goHasDevice returns 1 if buffers may be in the memory of the device with a number, else 0.
//
//export goHasDevice
func goHasDevice(number C.int32_t) C.int {
	if _, err := gpus.Device(int(number)); err != nil {
		return 0
	}
	return 1
}

// buffer reads a buffer of the host, on a stream if it is a device's memory.
func buffer(in *C.tutti_buffer, b *pg.Buffer, name string, used bool, stream unsafe.Pointer,
	f *C.struct_failure) C.int {
	if !used {
		return C.TUTTI_OK
	}
	switch {
	case in.device < C.TUTTI_HOST:
		return invalid(f, "%s.device is %d, want TUTTI_HOST or the number of a device", name, in.device)
	case in.dtype < 0 || in.dtype > math.MaxUint8 || !pg.DType(in.dtype).Valid():
		return invalid(f, "%s.dtype is %d, want one of TUTTI_INT8 to TUTTI_BOOL", name, in.dtype)
	case in.count > math.MaxInt:
		return invalid(f, "%s.count is %d: no memory is that large", name, in.count)
	}
	*b = pg.Buffer{Ptr: in.data, Count: int(in.count), DType: pg.DType(in.dtype)}
	if in.device == C.TUTTI_HOST || in.count == 0 {
		return C.TUTTI_OK
	}
	d, err := gpus.Device(int(in.device))
	if err != nil {
		return failed(&coded{fmt.Sprintf("%s is memory of CUDA device %d: %v", name, in.device, err), errUnsupported},
			f)
	}
	b.Location, b.Stream = d.Location(), d.Borrow(uintptr(stream))
	return C.TUTTI_OK
}

// do runs the operation.
func (o *operation) do(ctx context.Context, g *pg.Group) error {
	switch o.kind {
	case C.TUTTI_OP_ALLREDUCE:
		return g.Do(ctx, pg.AllReduceOp{Dst: o.dst, Src: o.src, Op: o.op})
	case C.TUTTI_OP_REDUCE_SCATTER:
		return g.Do(ctx, pg.ReduceScatterOp{Dst: o.dst, Src: o.src, Op: o.op})
	case C.TUTTI_OP_ALLGATHER:
		return g.Do(ctx, pg.AllGatherOp{Dst: o.dst, Src: o.src})
	case C.TUTTI_OP_ALLGATHERV:
		return g.Do(ctx, pg.AllGatherVOp{Dst: o.dst, Src: o.src, Counts: o.dsts})
	case C.TUTTI_OP_ALLTOALL:
		return g.Do(ctx, pg.AllToAllOp{Dst: o.dst, Src: o.src})
	case C.TUTTI_OP_ALLTOALLV:
		return g.Do(ctx, pg.AllToAllVOp{Dst: o.dst, Src: o.src, SendCounts: o.srcs, RecvCounts: o.dsts})
	case C.TUTTI_OP_BROADCAST:
		return g.Do(ctx, pg.BroadcastOp{X: o.dst, Root: o.peer})
	case C.TUTTI_OP_REDUCE:
		return g.Do(ctx, pg.ReduceOp{X: o.dst, Root: o.peer, Op: o.op})
	case C.TUTTI_OP_GATHER:
		return g.Do(ctx, pg.GatherOp{Dst: o.dst, Src: o.src, Root: o.peer})
	case C.TUTTI_OP_SCATTER:
		return g.Do(ctx, pg.ScatterOp{Dst: o.dst, Src: o.src, Root: o.peer})
	case C.TUTTI_OP_SEND:
		return g.Do(ctx, pg.SendOp{X: o.src, To: o.peer, Tag: o.tag})
	}
	return g.Do(ctx, pg.BarrierOp{})
}

// start starts the operation; limit is as in tutti_op.
func (o *operation) start(g *pg.Group, limit time.Duration) *pg.Work {
	switch o.kind {
	case C.TUTTI_OP_ALLREDUCE:
		return begin(g, limit, pg.AllReduceOp{Dst: o.dst, Src: o.src, Op: o.op})
	case C.TUTTI_OP_REDUCE_SCATTER:
		return begin(g, limit, pg.ReduceScatterOp{Dst: o.dst, Src: o.src, Op: o.op})
	case C.TUTTI_OP_ALLGATHER:
		return begin(g, limit, pg.AllGatherOp{Dst: o.dst, Src: o.src})
	case C.TUTTI_OP_ALLGATHERV:
		return begin(g, limit, pg.AllGatherVOp{Dst: o.dst, Src: o.src, Counts: o.dsts})
	case C.TUTTI_OP_ALLTOALL:
		return begin(g, limit, pg.AllToAllOp{Dst: o.dst, Src: o.src})
	case C.TUTTI_OP_ALLTOALLV:
		return begin(g, limit, pg.AllToAllVOp{Dst: o.dst, Src: o.src, SendCounts: o.srcs, RecvCounts: o.dsts})
	case C.TUTTI_OP_BROADCAST:
		return begin(g, limit, pg.BroadcastOp{X: o.dst, Root: o.peer})
	case C.TUTTI_OP_REDUCE:
		return begin(g, limit, pg.ReduceOp{X: o.dst, Root: o.peer, Op: o.op})
	case C.TUTTI_OP_GATHER:
		return begin(g, limit, pg.GatherOp{Dst: o.dst, Src: o.src, Root: o.peer})
	case C.TUTTI_OP_SCATTER:
		return begin(g, limit, pg.ScatterOp{Dst: o.dst, Src: o.src, Root: o.peer})
	case C.TUTTI_OP_SEND:
		return begin(g, limit, pg.SendOp{X: o.src, To: o.peer, Tag: o.tag})
	case C.TUTTI_OP_RECV:
		return begin(g, limit, pg.RecvOp{X: o.dst, From: o.peer, Tag: o.tag})
	}
	return begin(g, limit, pg.BarrierOp{})
}

func begin(g *pg.Group, limit time.Duration, op pg.Operation) *pg.Work {
	if limit == 0 {
		return g.Start(op)
	}
	return g.StartWithin(limit, op)
}

// perform runs an operation that the host describes.
func perform(ctx context.Context, g *group, in *C.tutti_op, f *C.struct_failure) C.int {
	var o operation
	if c := o.read(in, g.Rank(), f); c != C.TUTTI_OK {
		return c
	}
	if in.timeout_ns > 0 && ctx == context.Background() {
		l := within(time.Duration(in.timeout_ns))
		defer l.release()
		ctx = l
	} else if in.timeout_ns > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(in.timeout_ns))
		defer cancel()
	}
	if o.kind != C.TUTTI_OP_RECV {
		return failed(interrupted(ctx, o.do(ctx, g.Group)), f)
	}
	s, err := g.DoRecv(ctx, pg.RecvOp{X: o.dst, From: o.peer, Tag: o.tag})
	if err == nil && in.status != nil {
		*in.status = status(s)
	}
	return failed(interrupted(ctx, err), f)
}

func status(s pg.Status) C.tutti_status {
	return C.tutti_status{from: C.int32_t(s.From), tag: C.int32_t(s.Tag), count: C.uint64_t(s.Count)}
}

//export goDo
func goDo(h C.uint64_t, in *C.tutti_op, f *C.struct_failure) C.int {
	g := findGroup(h, f)
	if g == nil {
		return C.TUTTI_EINVAL
	}
	return perform(context.Background(), g, in, f)
}
