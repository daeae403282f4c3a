package pg

import (
	"encoding/binary"
	"errors"
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

// call is one collective on one rank, checked and ready to run. It belongs to the group, one at a
// time.
type call struct {
	kind       collectives.Kind
	dtype      DType
	op         Reduction
	root       int
	count      int            // Shape.Count
	in, out    unsafe.Pointer // out == in where the operation is in place
	counts     []int          // Shape.Counts
	recvCounts []int
	ranks      int  // slots of the group when it was checked
	uniform    bool // its outcome is, whatever Config.Uniform says
}

// forget drops the caller's memory. What was called stays.
func (c *call) forget() { c.in, c.out, c.counts, c.recvCounts = nil, nil, nil, nil }

// size returns how many bytes the operation is about in a group of n ranks: those of the longest
// buffer of a rank.
func (c *call) size(n int) int {
	elem := c.dtype.Size()
	switch c.kind {
	case collectives.Barrier:
		return 0
	case collectives.AllReduce, collectives.Broadcast, collectives.Reduce:
		return c.count * elem
	case collectives.AllGatherV, collectives.AllToAllV:
		total := 0
		for _, k := range c.counts {
			total += k * elem
		}
		return total
	}
	return c.count * elem * n
}

// detached is c without the caller's memory.
func (c *call) detached() call {
	d := *c
	d.forget()
	d.counts = slices.Clone(c.counts)
	return d
}

// synchronizes reports whether every rank's result depends on every other's data.
func (c *call) synchronizes() bool {
	switch c.kind {
	case collectives.Barrier, collectives.AllReduce, collectives.AllGather, collectives.ReduceScatter, collectives.AllToAll:
		return true
	case collectives.AllGatherV, collectives.AllToAllV:
		return false
	}
	return c.count == 0 // a barrier
}

// token packs what all ranks must agree on. It travels in the header of every message of the call.
func (c *call) token(seq uint64, algo collectives.Algo) p2p.Token {
	t := p2p.Token{Seq: seq, Count: uint64(c.count), Call: uint64(flight.Pack(c.kind, c.dtype, c.op, algo, c.root))}
	if c.kind == collectives.AllGatherV {
		h := uint64(14695981039346656037) // FNV-1a over the counts
		for _, n := range c.counts {
			h = (h ^ uint64(n)) * 1099511628211
		}
		t.Count = h
	}
	return t
}

// describe says in words what is called: "allreduce (float32 sum, 1024 elements)".
func (c *call) describe() string {
	t := c.token(0, collectives.Auto)
	return flight.Describe(flight.Call(t.Call), t.Count)
}

// spell turns a token back into words: "allreduce #12 (float32 sum, 1024 elements)".
func spell(t p2p.Token) string {
	if t == enterToken {
		return "entering a view"
	}
	return flight.Spell(t.Seq, flight.Call(t.Call), t.Count)
}

// check validates a request and makes a call of it. It looks at nothing that only this rank knows
// but the lengths of its own buffers. With the proxy's lock, as the number of slots may grow.
func (g *Group) check(q *request) (call, error) {
	c := call{kind: q.kind, op: q.op, root: q.root, in: q.src.Ptr, out: q.dst.Ptr, dtype: q.src.DType,
		counts: q.counts, recvCounts: q.recvCounts, ranks: g.size}
	return c, g.checkInto(&c, q)
}

func (g *Group) checkInto(c *call, q *request) error {
	kind, op, root, dst, src, counts, recvCounts := q.kind, q.op, q.root, q.dst, q.src, q.counts, q.recvCounts
	n := g.size
	bad := func(arg, got, want string) error {
		return &ArgumentError{Call: kind.String(), Arg: arg, Got: got, Want: want}
	}
	switch kind {
	case 0:
		return &ArgumentError{Call: "an operation", Arg: "its type", Got: "none that is known",
			Want: "one of the …Op types of package pg, not a pointer to one"}
	case collectives.Barrier:
		c.dtype = Uint8
		return nil
	}
	if root < 0 || root >= n {
		return bad("root", strconv.Itoa(root), fmt.Sprintf("a rank, 0 to %d", n-1))
	}
	rooted := kind == collectives.Gather || kind == collectives.Scatter
	if src.DType == 0 && src.Count == 0 && src.Ptr == nil && (kind == collectives.AllReduce || kind == collectives.Scatter && root != g.rank) {
		c.dtype = dst.DType // in place, or not used here
		if kind == collectives.AllReduce {
			src = dst
			c.in = dst.Ptr
		}
	}
	if !c.dtype.Valid() {
		return bad("the data type", c.dtype.String(), "one of the data types of package pg")
	}
	if dst.DType != c.dtype && !(rooted && root != g.rank && dst.Count == 0) {
		return bad("the destination's data type", dst.DType.String(), c.dtype.String()+" like the source's")
	}
	for _, b := range [2]struct {
		name string
		Buffer
	}{{"the destination", dst}, {"the source", src}} {
		if b.Count < 0 || b.Count > 0 && b.Ptr == nil {
			return bad(b.name, fmt.Sprintf("%d elements at %v", b.Count, b.Ptr), "a buffer of its length")
		}
		if b.DType.Valid() && b.Count > maxBytes/b.DType.Size() {
			return bad(b.name, fmt.Sprintf("%d elements of %v", b.Count, b.DType), "a buffer that fits in memory")
		}
		if b.Location != "" && !b.Location.Host() {
			return bad(b.name+"'s location", string(b.Location), "host memory: no transport of this group reaches any other")
		}
	}
	if kind.Reduces() && !kernels.Supported(op, c.dtype) {
		_, err := kernels.Lookup(op, c.dtype)
		return bad("the reduction", fmt.Sprintf("%v of %v", op, c.dtype), fmt.Sprintf("a combination that exists (%v)", err))
	}
	times := func(big Buffer, arg string, small int) error {
		if small > maxBytes/c.dtype.Size()/n {
			return bad("the length of a part", strconv.Itoa(small), fmt.Sprintf("what fits in memory %d times", n))
		}
		if big.Count != n*small {
			return bad("the length of the "+arg, strconv.Itoa(big.Count), fmt.Sprintf("%d: %d ranks times %d elements", n*small, n, small))
		}
		return nil
	}
	var err error
	switch kind {
	case collectives.AllReduce, collectives.Broadcast, collectives.Reduce:
		c.count = src.Count
		if dst.Count != src.Count {
			err = bad("the length of the destination", strconv.Itoa(dst.Count), strconv.Itoa(src.Count)+" like the source")
		}
	case collectives.ReduceScatter:
		c.count = dst.Count
		err = times(src, "source", dst.Count)
	case collectives.AllGather:
		c.count = src.Count
		err = times(dst, "destination", src.Count)
	case collectives.AllToAll:
		c.count = src.Count / n
		if dst.Count != src.Count {
			err = bad("the length of the destination", strconv.Itoa(dst.Count), strconv.Itoa(src.Count)+" like the source")
		} else {
			err = times(src, "source", c.count)
		}
	case collectives.Gather:
		c.count = src.Count
		if g.rank == root {
			err = times(dst, "destination at the root", src.Count)
		}
	case collectives.Scatter:
		c.count = dst.Count
		if g.rank == root {
			err = times(src, "source at the root", dst.Count)
		}
	case collectives.AllGatherV:
		var total int
		if total, err = g.checkCounts(kind, c.dtype.Size(), "counts", counts); err == nil {
			if dst.Count != total {
				err = bad("the length of the destination", strconv.Itoa(dst.Count), fmt.Sprintf("%d, the sum of the counts", total))
			} else if src.Count != counts[g.rank] {
				err = bad("the length of the source", strconv.Itoa(src.Count), fmt.Sprintf("counts[%d] = %d", g.rank, counts[g.rank]))
			}
		}
	case collectives.AllToAllV:
		var out, in int
		if out, err = g.checkCounts(kind, c.dtype.Size(), "sendCounts", counts); err == nil {
			in, err = g.checkCounts(kind, c.dtype.Size(), "recvCounts", recvCounts)
		}
		switch {
		case err != nil:
		case src.Count != out:
			err = bad("the length of the source", strconv.Itoa(src.Count), fmt.Sprintf("%d, the sum of sendCounts", out))
		case dst.Count != in:
			err = bad("the length of the destination", strconv.Itoa(dst.Count), fmt.Sprintf("%d, the sum of recvCounts", in))
		case counts[g.rank] != recvCounts[g.rank]:
			err = bad(fmt.Sprintf("recvCounts[%d]", g.rank), strconv.Itoa(recvCounts[g.rank]), fmt.Sprintf("sendCounts[%d] = %d: both are what this rank sends to itself", g.rank, counts[g.rank]))
		}
	default:
		err = bad("the operation", kind.String(), "a collective")
	}
	if err != nil {
		return err
	}
	if want := g.clash(kind, root, &dst, &src, counts); want != "" {
		return bad("the destination", "overlapping the source", want)
	}
	return nil
}

// maxBytes is the longest buffer, and the most that the parts of one may have together.
const maxBytes = math.MaxInt >> 7

// clash looks at buffers whose lengths fit. It returns "" if they have no memory in common or what
// the operation may work in place on, else what would be right.
func (g *Group) clash(kind collectives.Kind, root int, dst, src *Buffer, counts []int) (want string) {
	big, part, own := dst, src, 0 // part may be the one that begins own elements into big
	want = "memory of its own, or with the source as this rank's part of it"
	switch kind {
	case collectives.AllReduce, collectives.Broadcast, collectives.Reduce:
		want = "the source itself, or memory of its own"
	case collectives.AllGather:
		own = g.rank * src.Count
	case collectives.AllGatherV:
		for _, n := range counts[:g.rank] {
			own += n
		}
	case collectives.Gather:
		if g.rank != root {
			return ""
		}
		own = g.rank * src.Count
	case collectives.Scatter:
		if g.rank != root {
			return ""
		}
		big, part, own = src, dst, g.rank*dst.Count
		want = "memory of its own, or this rank's part of the source"
	default:
		part, want = nil, "memory of its own"
	}
	if part != nil && uintptr(part.Ptr) == uintptr(big.Ptr)+uintptr(own*big.DType.Size()) || !overlap(dst, src) {
		return ""
	}
	return want
}

func (g *Group) checkCounts(kind collectives.Kind, elem int, arg string, counts []int) (total int, err error) {
	bad := func(got, want string) error {
		return &ArgumentError{Call: kind.String(), Arg: arg, Got: got, Want: want}
	}
	if len(counts) != g.size {
		return 0, bad(fmt.Sprintf("of length %d", len(counts)), fmt.Sprintf("one count for each of the %d ranks", g.size))
	}
	for r, n := range counts {
		if n < 0 || n > maxBytes/elem-total {
			return 0, bad(fmt.Sprintf("%d for rank %d", n, r), "counts of zero or more that fit in memory")
		}
		total += n
	}
	return total, nil
}

func overlap(a, b *Buffer) bool {
	p, q := uintptr(a.Ptr), uintptr(b.Ptr)
	n, m := uintptr(a.Count*a.DType.Size()), uintptr(b.Count*b.DType.Size())
	return n > 0 && m > 0 && p < q+m && q < p+n
}

// How a failure travels to the other ranks: Abort's payload. The first byte is the kind.
const (
	abortRank     = 1 // reporter, failed rank, text
	abortTimeout  = 2 // reporter, after (ns), token of the call, missing ranks (at most maxMissing) with their last tokens, text
	abortMismatch = 3 // rank a, rank b, their tokens
	abortOther    = 4 // reporter, text
	abortCall     = 5 // reporter, text: Group.Abort
	maxMissing    = 16
)

type wireAbort struct {
	Kind     byte
	A, B     int // reporter and failed rank, or the two ranks that disagree
	Call     p2p.Token
	Other    p2p.Token
	After    int64
	Missing  []lastSeen
	Text     string
	Canceled bool
}

// lastSeen is a missing rank with the token last seen of it.
type lastSeen struct {
	Rank int
	Has  bool
	Last p2p.Token
}

func (m lastSeen) seen() Seen {
	if !m.Has {
		return Seen{Rank: m.Rank, What: "nothing yet"}
	}
	return Seen{Rank: m.Rank, What: spell(m.Last)}
}

func putToken(b []byte, t p2p.Token) []byte {
	b = binary.LittleEndian.AppendUint64(b, t.Seq)
	b = binary.LittleEndian.AppendUint64(b, t.Call)
	return binary.LittleEndian.AppendUint64(b, t.Count)
}

func (a *wireAbort) encode() []byte {
	b := []byte{a.Kind, 0}
	if a.Canceled {
		b[1] = 1
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(a.A))
	b = binary.LittleEndian.AppendUint32(b, uint32(a.B))
	b = putToken(putToken(b, a.Call), a.Other)
	b = binary.LittleEndian.AppendUint64(b, uint64(a.After))
	missing := a.Missing[:min(len(a.Missing), maxMissing)]
	b = append(b, byte(len(missing)))
	for _, m := range missing {
		b = binary.LittleEndian.AppendUint32(b, uint32(m.Rank))
		has := byte(0)
		if m.Has {
			has = 1
		}
		b = putToken(append(b, has), m.Last)
	}
	return append(b, a.Text[:min(len(a.Text), p2p.MaxAbort-len(b))]...)
}

const abortFixed = 2 + 8 + 48 + 8 + 1

var errBadAbort = errors.New("malformed abort message")

// decodeAbort reads what a peer sent; size bounds the rank numbers.
func decodeAbort(b []byte, size int) (*wireAbort, error) {
	if len(b) < abortFixed || b[0] < abortRank || b[0] > abortCall {
		return nil, errBadAbort
	}
	u32 := func(at int) int { return int(int32(binary.LittleEndian.Uint32(b[at:]))) }
	tok := func(at int) p2p.Token {
		return p2p.Token{Seq: binary.LittleEndian.Uint64(b[at:]), Call: binary.LittleEndian.Uint64(b[at+8:]), Count: binary.LittleEndian.Uint64(b[at+16:])}
	}
	a := &wireAbort{Kind: b[0], Canceled: b[1] == 1, A: u32(2), B: u32(6), Call: tok(10), Other: tok(34), After: int64(binary.LittleEndian.Uint64(b[58:]))}
	if a.A < 0 || a.A >= size || a.B < 0 || a.B >= size || a.After < 0 {
		return nil, errBadAbort
	}
	n, at := int(b[66]), abortFixed
	if n > maxMissing || len(b) < at+n*29 {
		return nil, errBadAbort
	}
	for ; n > 0; n-- {
		m := lastSeen{Rank: u32(at), Has: b[at+4] == 1, Last: tok(at + 5)}
		if m.Rank < 0 || m.Rank >= size {
			return nil, errBadAbort
		}
		a.Missing = append(a.Missing, m)
		at += 29
	}
	a.Text = string(b[at:])
	return a, nil
}
