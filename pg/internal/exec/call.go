package exec

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"unsafe"

	"tutti/collectives"
	"tutti/kernels"
	"tutti/p2p"
	"tutti/pg/flight"
)

// Buffer is typed memory of the caller: Count elements of DType at Ptr. Collectives use it until
// they end, and keep no reference afterwards. The zero Buffer is empty.
type Buffer struct {
	Ptr      unsafe.Pointer
	Count    int
	DType    kernels.DType
	Location p2p.Location // "" means host memory
}

// A Request is a collective as the caller describes it.
type Request struct {
	Kind               collectives.Kind
	Op                 kernels.Op
	Root               int
	Dst, Src           Buffer
	Counts, RecvCounts []int
}

// A Call is a checked request.
type Call struct {
	Kind       collectives.Kind
	DType      kernels.DType
	Op         kernels.Op
	Root       int
	Count      int            // Shape.Count
	In, Out    unsafe.Pointer // Out == In if the operation is in place
	Counts     []int          // Shape.Counts
	RecvCounts []int
	Slots      int  // of the group when it was checked
	Uniform    bool // the outcome is the same at all ranks, even if the group is not uniform
	// For is the program's call that the operation is for, and ForCount its count. All ranks have
	// to make the same one. 0: it is the program's call itself.
	For      flight.Call
	ForCount uint64
}

// A Refusal describes an invalid request.
type Refusal struct {
	Arg  string // the offending argument
	Got  string
	Want string
}

// Forget drops the references to the caller's memory.
func (c *Call) Forget() { c.In, c.Out, c.Counts, c.RecvCounts = nil, nil, nil, nil }

// Detached returns c without references to the caller's memory.
func (c *Call) Detached() Call {
	d := *c
	d.Forget()
	d.Counts = slices.Clone(c.Counts)
	return d
}

// Bytes returns the size of the operation in a group of n slots: the bytes of a rank's longest
// buffer.
func (c *Call) Bytes(n int) int {
	l := c.Kind.Layout()
	return max(c.elements(l.In, n), c.elements(l.Out, n)) * c.DType.Size()
}

// elements returns the number of elements of a buffer of extent e in a group of n slots, 0 for Own.
func (c *Call) elements(e collectives.Extent, n int) (total int) {
	switch e {
	case collectives.One:
		return c.Count
	case collectives.All:
		return c.Count * n
	case collectives.Packed:
		for _, k := range c.Counts {
			total += k
		}
	}
	return total
}

// Extents returns the lengths in bytes of the call's buffers at this rank, in a group of n slots,
// and whether the call reads the source and writes the destination.
func (c *Call) Extents(rank, n int) (in, out int, reads, writes bool) {
	l, elem, atRoot := c.Kind.Layout(), c.DType.Size(), rank == c.Root
	in, out = c.elements(l.In, n), c.elements(l.Out, n)
	if l.In == collectives.Own {
		in = c.Counts[rank]
	}
	if c.Kind == collectives.AllToAllV {
		out = 0
		for _, k := range c.RecvCounts {
			out += k
		}
	}
	if in *= elem; l.InAtRoot && !atRoot && l.In.Parted() {
		in = 0
	}
	if out *= elem; l.OutAtRoot && !atRoot && l.Out.Parted() {
		out = 0
	}
	reads, writes = c.Kind.Uses(atRoot)
	return in, out, reads && in > 0, writes && out > 0
}

// Synchronizes reports whether every rank's result depends on every other's data.
func (c *Call) Synchronizes() bool {
	switch c.Kind {
	case collectives.Barrier, collectives.AllReduce, collectives.AllGather, collectives.ReduceScatter,
		collectives.AllToAll:
		return true
	case collectives.AllGatherV, collectives.AllToAllV:
		return false
	}
	return c.Count == 0 // a barrier
}

// Token packs the fields of a call that all ranks must agree on. The header of every message
// carries it.
func (c *Call) Token(seq uint64, algo collectives.Algo) p2p.Token {
	t := p2p.Token{Seq: seq, Count: uint64(c.Count), Call: uint64(flight.Pack(c.Kind, c.DType, c.Op, algo, c.Root))}
	if c.Kind == collectives.AllGatherV {
		h := uint64(14695981039346656037) // FNV-1a over the counts
		for _, n := range c.Counts {
			h = (h ^ uint64(n)) * 1099511628211
		}
		t.Count = h
	}
	if c.For != 0 {
		t.Call, t.Count = uint64(c.For), c.ForCount
	}
	return t
}

// Describe returns the call in words: "allreduce (float32 sum, 1024 elements)".
func (c *Call) Describe() string {
	t := c.Token(0, collectives.Auto)
	return flight.Describe(flight.Call(t.Call), t.Count)
}

// MaxBytes is the largest size of a buffer, all of its parts together.
const MaxBytes = math.MaxInt >> 7

// Check validates a request of the rank in slot rank of a group of size slots, and returns the
// call. It depends on nothing that only this rank knows, except the lengths of its own buffers.
func Check(q *Request, rank, size int) (Call, *Refusal) {
	c := Call{Kind: q.Kind, Op: q.Op, Root: q.Root, In: q.Src.Ptr, Out: q.Dst.Ptr, DType: q.Src.DType,
		Counts: q.Counts, RecvCounts: q.RecvCounts, Slots: size}
	dst, src := q.Dst, q.Src
	switch q.Kind {
	case 0:
		return c, &Refusal{"its type", "none that is known",
			"one of the …Op types of package pg, not a pointer to one"}
	case collectives.Barrier:
		c.DType = kernels.Uint8
		return c, nil
	}
	if q.Root < 0 || q.Root >= size {
		return c, &Refusal{"root", strconv.Itoa(q.Root), fmt.Sprintf("a rank, 0 to %d", size-1)}
	}
	l := q.Kind.Layout()
	atRoot := rank == q.Root
	// A vector is given at all ranks, even at those that do not use it.
	usesIn := !l.InAtRoot || atRoot || l.In == collectives.One
	usesOut := !l.OutAtRoot || atRoot || l.Out == collectives.One
	if src.DType == 0 && src.Count == 0 && src.Ptr == nil && (q.Kind == collectives.AllReduce || !usesIn) {
		c.DType = dst.DType // in place, or not used here
		if q.Kind == collectives.AllReduce {
			src = dst
			c.In = dst.Ptr
		}
	}
	if !c.DType.Valid() {
		return c, &Refusal{"the data type", c.DType.String(), "one of the data types of package pg"}
	}
	if dst.DType != c.DType && !(dst.Count == 0 && !(usesIn && usesOut)) {
		return c, &Refusal{"the destination's data type", dst.DType.String(), c.DType.String() + " like the source's"}
	}
	for _, b := range [2]struct {
		name string
		Buffer
	}{{"the destination", dst}, {"the source", src}} {
		switch {
		case b.Count < 0 || b.Count > 0 && b.Ptr == nil:
			return c, &Refusal{b.name, fmt.Sprintf("%d elements at %v", b.Count, b.Ptr), "a buffer of its length"}
		case b.DType.Valid() && b.Count > MaxBytes/b.DType.Size():
			return c, &Refusal{b.name, fmt.Sprintf("%d elements of %v", b.Count, b.DType),
				"a buffer that fits in memory"}
		case b.Location != "" && !b.Location.Host():
			return c, &Refusal{b.name + "'s location", string(b.Location),
				"host memory, or the memory of one of Config.Devices"}
		}
	}
	if q.Kind.Reduces() && !kernels.Supported(q.Op, c.DType) {
		_, err := kernels.Lookup(q.Op, c.DType)
		return c, &Refusal{"the reduction", fmt.Sprintf("%v of %v", q.Op, c.DType),
			fmt.Sprintf("a combination that exists (%v)", err)}
	}
	if bad := c.lengths(q, l, rank, &dst, &src, usesIn, usesOut); bad != nil {
		return c, bad
	}
	if want := clash(q.Kind, q.Root, rank, &dst, &src, q.Counts); want != "" {
		return c, &Refusal{"the destination", "overlapping the source", want}
	}
	return c, nil
}

// lengths checks the lengths of the buffers in use, and sets Count.
func (c *Call) lengths(q *Request, l collectives.Layout, rank int, dst, src *Buffer, usesIn, usesOut bool) *Refusal {
	parts := func(name string, atRoot bool, big, small int) *Refusal {
		if small > MaxBytes/c.DType.Size()/c.Slots {
			return &Refusal{"the length of a part", strconv.Itoa(small),
				fmt.Sprintf("what fits in memory %d times", c.Slots)}
		}
		if big == c.Slots*small {
			return nil
		}
		if atRoot {
			name += " at the root"
		}
		return &Refusal{"the length of the " + name, strconv.Itoa(big),
			fmt.Sprintf("%d: %d ranks times %d elements", c.Slots*small, c.Slots, small)}
	}
	destination := func(want string) *Refusal {
		return &Refusal{"the length of the destination", strconv.Itoa(dst.Count), want}
	}
	switch {
	case l.Out == collectives.Packed && l.In == collectives.Own:
		total, bad := c.total("counts", q.Counts)
		switch {
		case bad != nil:
			return bad
		case dst.Count != total:
			return destination(fmt.Sprintf("%d, the sum of the counts", total))
		case src.Count != q.Counts[rank]:
			return &Refusal{"the length of the source", strconv.Itoa(src.Count),
				fmt.Sprintf("counts[%d] = %d", rank, q.Counts[rank])}
		}
	case l.Out == collectives.Packed:
		out, bad := c.total("sendCounts", q.Counts)
		if bad != nil {
			return bad
		}
		in, bad := c.total("recvCounts", q.RecvCounts)
		switch {
		case bad != nil:
			return bad
		case src.Count != out:
			return &Refusal{"the length of the source", strconv.Itoa(src.Count),
				fmt.Sprintf("%d, the sum of sendCounts", out)}
		case dst.Count != in:
			return destination(fmt.Sprintf("%d, the sum of recvCounts", in))
		case q.Counts[rank] != q.RecvCounts[rank]:
			return &Refusal{fmt.Sprintf("recvCounts[%d]", rank), strconv.Itoa(q.RecvCounts[rank]),
				fmt.Sprintf("sendCounts[%d] = %d: both are what this rank sends to itself", rank, q.Counts[rank])}
		}
	case l.In == collectives.All && l.Out == collectives.All:
		if c.Count = src.Count / c.Slots; dst.Count != src.Count {
			return destination(strconv.Itoa(src.Count) + " like the source")
		}
		return parts("source", false, src.Count, c.Count)
	case l.In == collectives.All:
		if c.Count = dst.Count; usesIn {
			return parts("source", l.InAtRoot, src.Count, c.Count)
		}
	case l.Out == collectives.All:
		if c.Count = src.Count; usesOut {
			return parts("destination", l.OutAtRoot, dst.Count, c.Count)
		}
	case l.In == collectives.One:
		if c.Count = src.Count; dst.Count != src.Count {
			return destination(strconv.Itoa(src.Count) + " like the source")
		}
	default:
		return &Refusal{"the operation", c.Kind.String(), "a collective"}
	}
	return nil
}

// total returns the sum of counts, one for each slot.
func (c *Call) total(arg string, counts []int) (total int, bad *Refusal) {
	if len(counts) != c.Slots {
		return 0, &Refusal{arg, fmt.Sprintf("of length %d", len(counts)),
			fmt.Sprintf("one count for each of the %d ranks", c.Slots)}
	}
	for r, n := range counts {
		if n < 0 || n > MaxBytes/c.DType.Size()-total {
			return 0, &Refusal{arg, fmt.Sprintf("%d for rank %d", n, r), "counts of zero or more that fit in memory"}
		}
		total += n
	}
	return total, nil
}

// clash checks buffers of valid lengths for shared memory. It returns "" if there is none, or if
// the operation may work in place on it; otherwise the valid alternatives.
func clash(kind collectives.Kind, root, rank int, dst, src *Buffer, counts []int) (want string) {
	big, part, own := dst, src, 0 // part may be the one that begins own elements into big
	want = "memory of its own, or with the source as this rank's part of it"
	switch kind {
	case collectives.AllReduce, collectives.Broadcast, collectives.Reduce:
		want = "the source itself, or memory of its own"
	case collectives.AllGather:
		own = rank * src.Count
	case collectives.AllGatherV:
		for _, n := range counts[:rank] {
			own += n
		}
	case collectives.Gather:
		if rank != root {
			return ""
		}
		own = rank * src.Count
	case collectives.Scatter:
		if rank != root {
			return ""
		}
		big, part, own = src, dst, rank*dst.Count
		want = "memory of its own, or this rank's part of the source"
	default:
		part, want = nil, "memory of its own"
	}
	if part != nil && uintptr(part.Ptr) == uintptr(big.Ptr)+uintptr(own*big.DType.Size()) || !overlap(dst, src) {
		return ""
	}
	return want
}

func overlap(a, b *Buffer) bool {
	p, q := uintptr(a.Ptr), uintptr(b.Ptr)
	n, m := uintptr(a.Count*a.DType.Size()), uintptr(b.Count*b.DType.Size())
	return n > 0 && m > 0 && p < q+m && q < p+n
}
