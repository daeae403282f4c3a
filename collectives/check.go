package collectives

import (
	"fmt"
	"slices"
	"sort"
)

// ranges is a set of bytes as ascending, disjoint, non-adjacent ranges.
type ranges [][2]int

func (rs ranges) at(off int) int {
	return sort.Search(len(rs), func(i int) bool { return rs[i][1] > off })
}

// covers reports whether all of [off, end) is in the set.
func (rs ranges) covers(off, end int) bool {
	i := rs.at(off)
	return off >= end || i < len(rs) && rs[i][0] <= off && end <= rs[i][1]
}

// meets reports whether any of [off, end) is in the set.
func (rs ranges) meets(off, end int) bool {
	i := rs.at(off)
	return i < len(rs) && rs[i][0] < end && off < end
}

func (rs *ranges) add(off, end int) {
	s := *rs
	i := sort.Search(len(s), func(i int) bool { return s[i][1] >= off })
	j := i
	for ; j < len(s) && s[j][0] <= end; j++ {
		off, end = min(off, s[j][0]), max(end, s[j][1])
	}
	*rs = append(s[:i:i], append([][2]int{{off, end}}, s[j:]...)...)
}

func (rs *ranges) remove(off, end int) {
	var left ranges
	for _, r := range *rs {
		if r[0] < min(off, r[1]) {
			left = append(left, [2]int{r[0], min(off, r[1])})
		}
		if max(end, r[0]) < r[1] {
			left = append(left, [2]int{max(end, r[0]), r[1]})
		}
	}
	*rs = left
}

// Check returns the first violation, by this plan alone, of the contract that Shape, Step and Ref
// describe: ranges are within their buffers; In is never written; two steps that use the same
// bytes, one of them writing, are ordered by Needs; scratch memory is written before it is read;
// Once is true; peers' memory is accessed only by plans that declare it, and a message follows
// every load from it; In is not read after Out was written if both may be the same memory; a source
// of ReduceInto is Dst or disjoint from it. Interpret finds violations by all ranks' plans
// together.
func (p *Plan) Check() error {
	c := checker{Plan: p, written: map[memKey]*ranges{}, clobbered: map[memKey]*ranges{}, used: frontier{},
		lent: map[int]int{}, seen: make([]int32, len(p.Steps))}
	if err := p.Shape.Validate(); err != nil {
		return err
	}
	for i := range p.Steps {
		if err := c.step(i, &p.Steps[i]); err != nil {
			return fmt.Errorf("collectives: %s %s of rank %d: step %d (%v): %w", p.Algo, p.Shape.Kind, p.Shape.Rank, i,
				p.Steps[i], err)
		}
	}
	if c.unsaid {
		return fmt.Errorf("collectives: %s %s of rank %d: it reads a peer's memory and sends nothing afterwards",
			p.Algo, p.Shape.Kind, p.Shape.Rank)
	}
	for i := range c.lent {
		return fmt.Errorf("collectives: %s %s of rank %d: step %d (%v): no step reads a Once Recv", p.Algo,
			p.Shape.Kind, p.Shape.Rank, i, p.Steps[i])
	}
	return nil
}

type checker struct {
	*Plan
	written   map[memKey]*ranges // Tmp, except ended loans
	clobbered map[memKey]*ranges // parts of In that may have been overwritten through Out
	used      frontier
	lent      map[int]int // Once Recvs not yet read
	unsaid    bool        // no message followed the last load from peers' memory
	seen      []int32     // by step: the step for which follows last visited it
	stack     []int32
}

// follows reports whether step i begins only after step d has completed.
func (c *checker) follows(i, d int32) bool {
	mark := i + 1
	c.stack = append(c.stack[:0], i)
	for len(c.stack) > 0 {
		at := c.stack[len(c.stack)-1]
		c.stack = c.stack[:len(c.stack)-1]
		needs := c.Steps[at].Needs
		if _, found := slices.BinarySearch(needs, d); found {
			return true
		}
		for _, n := range needs {
			if n > d && c.seen[n] != mark {
				c.seen[n] = mark
				c.stack = append(c.stack, n)
			}
		}
	}
	return false
}

func set(m map[memKey]*ranges, k memKey) *ranges {
	if m[k] == nil {
		m[k] = new(ranges)
	}
	return m[k]
}

func (c *checker) bounds(r Ref, write bool) error {
	size := 0
	switch r.Buf {
	case Tmp:
		size = c.Tmp
		if r.Part != 0 {
			return fmt.Errorf("%v: scratch memory has no parts", r)
		}
	case In, Out:
		size = c.Shape.PartBytes(r.Buf, c.Shape.Rank, int(r.Part))
	case PeerIn, PeerOut, PeerTmp:
		if !write && !c.LoadStore {
			return fmt.Errorf("%v in a plan that is not marked LoadStore", r)
		}
		if write && !c.OneSided {
			return fmt.Errorf("%v is written, but is a peer's, and the plan is not marked OneSided", r)
		}
		if c.Shape.index(int(r.Peer)) < 0 || int(r.Peer) == c.Shape.Rank {
			return fmt.Errorf("%v: no such peer", r)
		}
		if size = c.Shape.PartBytes(r.Buf-PeerIn, int(r.Peer), int(r.Part)); r.Buf == PeerTmp {
			size = r.Off + r.Len // the peer's plan knows its size
		}
	default:
		return fmt.Errorf("%v: no such memory", r)
	}
	if r.Off < 0 || r.Len < 0 || r.Off > size-r.Len {
		return fmt.Errorf("%v passes the end, %d bytes", r, size)
	}
	if write && r.Buf == In {
		return fmt.Errorf("%v is written, but is the caller's to read only", r)
	}
	c.unsaid = c.unsaid || !write && r.Len > 0 && r.Buf.Remote()
	return nil
}

// use checks one range that step i reads or writes.
func (c *checker) use(i int, r Ref, write bool) error {
	if err := c.bounds(r, write); err != nil || r.Len == 0 {
		return err
	}
	k, end := c.Shape.key(r), r.Off+r.Len
	var unordered error
	c.used.use(k, r.Off, end, int32(i), write, func(step int32) {
		if c.follows(int32(i), step) {
			return
		}
		what := "uses"
		if c.Steps[step].Verb == Recv {
			what = "may still fill"
		}
		unordered = fmt.Errorf("%v: step %d %s it, which is not ordered before", r, step, what)
	})
	if unordered != nil {
		return unordered
	}
	if r.Buf == Tmp {
		var gone []int
		for j := range c.lent {
			d := c.Steps[j].Dst
			if d.Off >= end || r.Off >= d.Off+d.Len {
				continue
			}
			if write || d != r || c.Steps[i].Verb != ReduceInto {
				return fmt.Errorf("%v: step %d said that %v is combined once, as it is", r, j, d)
			}
			gone = append(gone, j)
		}
		if !write && !c.OneSided && !set(c.written, k).covers(r.Off, end) { // else peers write to it too
			return fmt.Errorf("%v: not all of it was written", r)
		}
		for _, j := range gone {
			delete(c.lent, j)
			set(c.written, k).remove(r.Off, end)
		}
	}
	if r.Buf == In && set(c.clobbered, k).meets(r.Off, end) {
		return fmt.Errorf("%v: overwritten before where Out is the same memory", r)
	}
	return nil
}

// wrote records that r has new contents.
func (c *checker) wrote(r Ref) {
	switch r.Buf {
	case Tmp:
		set(c.written, c.Shape.key(r)).add(r.Off, r.Off+r.Len)
	case Out:
		set(c.clobbered, c.Shape.key(r)).add(r.Off, r.Off+r.Len)
	}
}

func (c *checker) step(i int, s *Step) error {
	for j, n := range s.Needs {
		if n < 0 || int(n) >= i || j > 0 && n <= s.Needs[j-1] {
			return fmt.Errorf("needs %d, which is no earlier step, or not in ascending order", n)
		}
	}
	switch s.Verb {
	case Send, Recv, Put, Signal, WaitSignal:
		if c.Shape.index(int(s.Peer)) < 0 || int(s.Peer) == c.Shape.Rank {
			return fmt.Errorf("no such peer")
		}
	}
	switch s.Verb {
	case Send:
		if s.Src.Buf.Remote() {
			return fmt.Errorf("sends a peer's memory")
		}
		c.unsaid = false
		return c.use(i, s.Src, false)
	case Signal, WaitSignal:
		return nil
	case Put:
		if s.Src.Buf.Remote() || s.Dst.Buf != PeerOut && s.Dst.Buf != PeerTmp || s.Dst.Peer != s.Peer {
			return fmt.Errorf("puts from or into the wrong memory")
		}
		if s.Src.Len != s.Dst.Len || s.Src.Len == 0 {
			return fmt.Errorf("puts %d bytes into %d", s.Src.Len, s.Dst.Len)
		}
		if err := c.use(i, s.Src, false); err != nil {
			return err
		}
		return c.use(i, s.Dst, true)
	case Recv:
		if s.Dst.Len == 0 {
			return nil
		}
		if s.Dst.Buf != Tmp && s.Dst.Buf != Out || s.Once && s.Dst.Buf != Tmp {
			return fmt.Errorf("receives into the wrong memory")
		}
		if err := c.use(i, s.Dst, true); err != nil {
			return err
		}
		c.wrote(s.Dst)
		if s.Once {
			c.lent[i] = i
		}
	case Copy:
		if s.Src.Len != s.Dst.Len {
			return fmt.Errorf("copies %d bytes to %d", s.Src.Len, s.Dst.Len)
		}
		if err := c.use(i, s.Src, false); err != nil {
			return err
		}
		if err := c.use(i, s.Dst, true); err != nil {
			return err
		}
		if c.Shape.key(s.Src) != c.Shape.key(s.Dst) || s.Src.Off != s.Dst.Off {
			c.wrote(s.Dst)
		}
	case ReduceInto:
		if len(s.Srcs) == 0 {
			return fmt.Errorf("nothing to reduce")
		}
		for _, r := range s.Srcs {
			if r.Len != s.Dst.Len {
				return fmt.Errorf("%v is not as long as %v", r, s.Dst)
			}
			if err := c.use(i, r, false); err != nil {
				return err
			}
			if c.Shape.key(r) == c.Shape.key(s.Dst) && r.Off != s.Dst.Off && r.Off < s.Dst.Off+s.Dst.Len &&
				s.Dst.Off < r.Off+r.Len {
				return fmt.Errorf("%v overlaps %v", r, s.Dst)
			}
		}
		if err := c.use(i, s.Dst, true); err != nil {
			return err
		}
		c.wrote(s.Dst)
	default:
		return fmt.Errorf("no such verb")
	}
	return nil
}
