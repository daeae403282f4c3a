package collectives

import (
	"fmt"
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

// Check reports the first breach, by this one plan, of the contract that Shape, Step and Ref
// describe: ranges within their buffers; In never written; no range read or written while a Recv
// that the step does not wait for may fill it; scratch memory written before it is read; Once true;
// peers' memory never written, and something sent after it was read; In not read where Out has been
// written and both may be the same memory; Combine's sources in ranges equal to Dst or apart from
// it. What only all ranks' plans together show, Interpret finds.
func (p *Plan) Check() error {
	c := checker{Plan: p, written: map[memKey]*ranges{}, clobbered: map[memKey]*ranges{}, open: arrivals{},
		lent: map[int]int{}}
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
		return fmt.Errorf("collectives: %s %s of rank %d: step %d (%v): nobody reads what is to be read once", p.Algo,
			p.Shape.Kind, p.Shape.Rank, i, p.Steps[i])
	}
	return nil
}

type checker struct {
	*Plan
	written   map[memKey]*ranges // Tmp, but for what was lent and is gone
	clobbered map[memKey]*ranges // where In may have been overwritten through Out
	open      arrivals
	lent      map[int]int // Once Recvs not yet read
	unsaid    bool        // peers' memory was read, and nothing has been sent since
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
	case PeerIn, PeerOut:
		if !c.Direct {
			return fmt.Errorf("%v in a plan that is not marked Direct", r)
		}
		if c.Shape.index(int(r.Peer)) < 0 || int(r.Peer) == c.Shape.Rank {
			return fmt.Errorf("%v: no such peer", r)
		}
		size = c.Shape.PartBytes(r.Buf-PeerIn, int(r.Peer), int(r.Part))
	default:
		return fmt.Errorf("%v: no such memory", r)
	}
	if r.Off < 0 || r.Len < 0 || r.Off > size-r.Len {
		return fmt.Errorf("%v passes the end, %d bytes", r, size)
	}
	if write && r.Buf == In {
		return fmt.Errorf("%v is written, but is the caller's to read only", r)
	}
	if write && (r.Buf == PeerIn || r.Buf == PeerOut) {
		return fmt.Errorf("%v is written, but is a peer's", r)
	}
	c.unsaid = c.unsaid || !write && r.Len > 0 && (r.Buf == PeerIn || r.Buf == PeerOut)
	return nil
}

// use checks one range that step i reads or writes.
func (c *checker) use(i int, r Ref, write bool) error {
	if err := c.bounds(r, write); err != nil || r.Len == 0 {
		return err
	}
	k, end := c.Shape.key(r), r.Off+r.Len
	if a, b := c.open.meeting(k, r.Off, end); a < b {
		return fmt.Errorf("%v: step %d may still fill it", r, c.open[k][a].step)
	}
	if r.Buf == Tmp {
		var gone []int
		for j := range c.lent {
			d := c.Steps[j].Dst
			if d.Off >= end || r.Off >= d.Off+d.Len {
				continue
			}
			if write || d != r {
				return fmt.Errorf("%v: step %d said that %v is read once, as it is", r, j, d)
			}
			gone = append(gone, j)
		}
		if !write && !set(c.written, k).covers(r.Off, end) {
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

// wrote notes that r has a new content.
func (c *checker) wrote(r Ref) {
	switch r.Buf {
	case Tmp:
		set(c.written, c.Shape.key(r)).add(r.Off, r.Off+r.Len)
	case Out:
		set(c.clobbered, c.Shape.key(r)).add(r.Off, r.Off+r.Len)
	}
}

func (c *checker) step(i int, s *Step) error {
	for _, n := range s.Needs {
		if n < 0 || int(n) >= i || c.Steps[n].Verb != Recv {
			return fmt.Errorf("needs %d, which is no earlier Recv", n)
		}
		d := c.Steps[n].Dst
		k := c.Shape.key(d)
		for a, b := c.open.meeting(k, d.Off, d.Off+d.Len); a < b; a++ {
			if c.open[k][a].step == n {
				c.open.drop(k, a, a+1)
				break
			}
		}
	}
	if s.Verb == Send || s.Verb == Recv {
		if c.Shape.index(int(s.Peer)) < 0 || int(s.Peer) == c.Shape.Rank {
			return fmt.Errorf("no such peer")
		}
	}
	switch s.Verb {
	case Send:
		if s.Src.Buf == PeerIn || s.Src.Buf == PeerOut {
			return fmt.Errorf("sends a peer's memory")
		}
		c.unsaid = false
		return c.use(i, s.Src, false)
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
		c.open.add(c.Shape.key(s.Dst), span{s.Dst.Off, s.Dst.Off + s.Dst.Len, int32(i)})
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
	case Combine:
		if len(s.Srcs) == 0 {
			return fmt.Errorf("nothing to combine")
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
