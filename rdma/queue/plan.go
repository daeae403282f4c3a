package queue

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"tutti/rdma"
)

// Op is one read or write of a batch.
type Op struct {
	Kind      rdma.Opcode // rdma.Write or rdma.Read
	Local     uint64      // address of registered memory
	Key       uint32      // rdma.MR.LocalKey
	Remote    uint64
	RemoteKey uint32
	Len       uint64 // bytes; operations of length 0 are left out
}

// Batch is what one call of Set.Submit does. Submit does not keep Ops.
type Batch struct {
	Ops []Op
	// Notify has the peer's Config.Notified called with ID when the whole batch has been placed.
	Notify bool
	ID     uint32 // at most MaxID
}

// MaxID is the largest number of a notification.
const MaxID = 1<<31 - 1

// spreadBit is set in the immediate data of a notification that comes on all queue pairs of a set.
const spreadBit = 1 << 31

// maxRequest is the longest message of the verbs standard.
const maxRequest = 1 << 31

// cut is what the place at which a batch is divided is a multiple of, counted from its first byte.
const cut = 4096

// limits are those of a request.
type limits struct {
	segments int
	bytes    uint64 // at most maxRequest, so that a segment's length fits its field
}

// sorted appends the operations of b that have a length to ops, sorts them, and returns them with
// their total length in bytes.
func (b *Batch) sorted(ops []Op) ([]Op, uint64, error) {
	if b.Notify && b.ID > MaxID {
		return nil, 0, fmt.Errorf("rdma: notification %#x: expected a number up to %#x", b.ID, uint32(MaxID))
	}
	total := uint64(0)
	for i := range b.Ops {
		o := &b.Ops[i]
		_, local := bits.Add64(o.Local, o.Len, 0)
		_, remote := bits.Add64(o.Remote, o.Len, 0)
		sum, over := bits.Add64(total, o.Len, 0)
		switch {
		case o.Kind != rdma.Write && o.Kind != rdma.Read:
			return nil, 0, fmt.Errorf("rdma: operation %d of a batch is a %v: expected a read or a write", i, o.Kind)
		case local+remote+over > 0 || sum >= 1<<62:
			return nil, 0, fmt.Errorf("rdma: operation %d of a batch, %d bytes from %#x to remote address %#x: "+
				"expected ranges within the address space", i, o.Len, o.Local, o.Remote)
		}
		if total = sum; o.Len > 0 {
			ops = append(ops, *o)
		}
	}
	if len(ops) == 0 && !b.Notify {
		return nil, 0, errors.New("rdma: a batch without bytes and without a notification")
	}
	slices.SortFunc(ops, func(x, y Op) int {
		return cmp.Or(cmp.Compare(x.Kind, y.Kind), cmp.Compare(x.RemoteKey, y.RemoteKey),
			cmp.Compare(x.Remote, y.Remote), cmp.Compare(x.Len, y.Len), cmp.Compare(x.Local, y.Local))
	})
	return ops, total, nil
}

// share returns the bytes that each of n queue pairs gets of total bytes.
func share(total uint64, n int) uint64 {
	return ((total+uint64(n)-1)/uint64(n) + cut - 1) &^ (cut - 1)
}

// cursor is a place in sorted operations, and how many bytes of them are still to be made into
// requests.
type cursor struct {
	ops  []Op
	done uint64 // bytes of ops[0]
	left uint64
}

// skip moves the cursor by n bytes without a request.
func (c *cursor) skip(n uint64) {
	for c.left -= n; n > 0; {
		k := min(n, c.ops[0].Len-c.done)
		n -= k
		c.advance(k)
	}
}

// advance moves the cursor by n bytes of one operation.
func (c *cursor) advance(n uint64) {
	if c.done += n; c.done == c.ops[0].Len {
		c.ops, c.done = c.ops[1:], 0
	}
}

// part returns the cursor of the next n bytes, or of those that are left, and skips them.
func (c *cursor) part(n uint64) cursor {
	p := *c
	p.left = min(n, c.left)
	c.skip(p.left)
	return p
}

// next makes the longest request that begins at c and keeps to lim. Its segments are appended to
// segments, which has the capacity for them. There must be bytes left.
func (c *cursor) next(r *rdma.SendRequest, segments []rdma.Segment, lim limits) []rdma.Segment {
	first := &c.ops[0]
	*r = rdma.SendRequest{Op: first.Kind, RemoteAddress: first.Remote + c.done, RemoteKey: first.RemoteKey}
	begin, room, end := len(segments), min(lim.bytes, c.left), r.RemoteAddress
	for room > 0 {
		o := &c.ops[0]
		if o.Kind != r.Op || o.RemoteKey != r.RemoteKey || o.Remote+c.done != end {
			break
		}
		n, at := min(room, o.Len-c.done), o.Local+c.done
		if k := len(segments) - 1; k >= begin && segments[k].Key == o.Key &&
			segments[k].Address+uint64(segments[k].Len) == at {
			segments[k].Len += uint32(n)
		} else if len(segments)-begin == lim.segments {
			break
		} else {
			segments = append(segments, rdma.Segment{Address: at, Key: o.Key, Len: uint32(n)})
		}
		room -= n
		end += n
		c.left -= n
		c.advance(n)
	}
	r.Segments = segments[begin:len(segments):len(segments)]
	return segments
}
