package rma

import (
	"errors"
	"slices"
	"testing"

	"tutti/mem"
	"tutti/p2p"
)

// carrier is a wire that moves data of at least a word, when the test says so.
type carrier struct {
	wire
	moves []*Move // under way
	ended []*Move
	asked int
}

func (c *carrier) Move(m *Move) bool {
	if c.asked++; m.Local.Len() < 8 {
		return false
	}
	c.moves = append(c.moves, m)
	return true
}

func (c *carrier) Moved() *Move {
	if len(c.ended) == 0 {
		return nil
	}
	m := c.ended[0]
	c.ended = c.ended[1:]
	return m
}

func (c *carrier) Drop(m *Move) {
	is := func(o *Move) bool { return o == m }
	c.moves, c.ended = slices.DeleteFunc(c.moves, is), slices.DeleteFunc(c.ended, is)
}

// end ends the oldest move.
func (c *carrier) end(ok bool) {
	c.moves[0].OK = ok
	c.ended, c.moves = append(c.ended, c.moves[0]), c.moves[1:]
}

// kinds returns the kinds of the frames that were sent.
func (c *carrier) kinds() (k []uint8) {
	for _, s := range c.out {
		k = append(k, s.h.Kind)
	}
	return k
}

// mover returns a Frames over a carrier, and memory of its peer.
func mover() (*Frames, *carrier, *mem.Remote) {
	c := &carrier{}
	x := &mem.Remote{ID: 5, Generation: 8, Len: 64, Rights: mem.Read | mem.Write | mem.Signal, Loc: "*"}
	return NewFrames(c, &Table{}, func() {}), c, x
}

// poll returns the completions.
func poll(f *Frames) []p2p.Completion {
	var out [16]p2p.Completion
	return slices.Clone(out[:f.Poll(out[:])])
}

// begin begins an operation, and fails the test unless that works.
func begin(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// What is moved needs no frame, and ends when it has been moved.
func TestMovedDataNeedsNoFrames(t *testing.T) {
	f, c, x := mover()
	b := make([]byte, 16)
	begin(t, f.Put(1, mem.Host(b, "*"), x, 8, p2p.Signal{}))
	begin(t, f.Get(2, mem.Host(b, "*"), x, 16))
	if got := poll(f); len(got) > 0 || len(c.out) > 0 || len(c.moves) != 2 {
		t.Fatalf("%v, frames %v, %d moves", got, c.kinds(), len(c.moves))
	}
	p, g := c.moves[0], c.moves[1]
	if p.Read || !g.Read || p.Offset != 8 || g.Offset != 16 || p.Region != 5 || g.Generation != 8 ||
		p.Local.Len() != 16 {
		t.Fatalf("moves %+v and %+v", p, g)
	}
	if f.Arm() {
		t.Error("Arm says that there is something to do")
	}
	c.end(true)
	c.end(true)
	if got := poll(f); len(got) != 2 || got[0] != (p2p.Completion{ID: 1, Bytes: 16}) || got[1] != (p2p.Completion{ID: 2,
		Bytes: 16}) || len(c.out) > 0 || c.asked != 2 {
		t.Fatalf("%+v, frames %v", got, c.kinds())
	}
}

// A signal is sent after the data of its put has been moved, a strong one and one to the same word
// after earlier puts, too. Nothing else waits.
func TestSignalsFollowMovedData(t *testing.T) {
	f, c, x := mover()
	b := make([]byte, 16)
	word := func(off uint64, strong bool) p2p.Signal {
		return p2p.Signal{At: x, Offset: off, Value: off + 1, Strong: strong}
	}
	begin(t, f.Put(1, mem.Host(b, "*"), x, 0, word(0, false)))
	begin(t, f.Put(2, mem.Memory{}, nil, 0, word(0, false)))     // the same word
	begin(t, f.Put(3, mem.Memory{}, nil, 0, word(8, false)))     // another one
	begin(t, f.Put(4, mem.Memory{}, nil, 0, word(16, true)))     // after all
	begin(t, f.Put(5, mem.Host(b[:4], "*"), x, 0, p2p.Signal{})) // is not moved
	poll(f)
	values := func() (v []uint64) {
		for _, s := range c.out {
			if s.h.Kind == frameSignal {
				v = append(v, s.h.Count)
			}
		}
		return v
	}
	if v := values(); !slices.Equal(v, []uint64{9}) || !slices.Contains(c.kinds(), framePut) {
		t.Fatalf("before the data: signals %v, frames %v", v, c.kinds())
	}
	if f.Arm() {
		t.Error("Arm says that there is something to do")
	}
	c.end(true)
	poll(f)
	if v := values(); !slices.Equal(v, []uint64{9, 1, 1, 17}) {
		t.Errorf("signals %v", v)
	}
}

// What could not be moved goes in frames, and the mover is not asked again.
func TestFramesFollowFailedMoves(t *testing.T) {
	f, c, x := mover()
	b := make([]byte, 16)
	begin(t, f.Put(1, mem.Host(b, "*"), x, 0, p2p.Signal{At: x, Offset: 32, Value: 7}))
	begin(t, f.Get(2, mem.Host(b, "*"), x, 0))
	poll(f)
	c.end(false)
	c.end(false)
	poll(f)
	if k := c.kinds(); len(k) != 2 || !slices.Contains(k, framePut) || !slices.Contains(k, frameGet) || c.asked != 2 {
		t.Errorf("frames %v, asked %d times", k, c.asked)
	}
}

// A flush ends after the puts that are being moved.
func TestFlushWaitsForMoves(t *testing.T) {
	f, c, x := mover()
	begin(t, f.Put(1, mem.Host(make([]byte, 16), "*"), x, 0, p2p.Signal{}))
	begin(t, f.FlushPuts(2))
	if got := poll(f); len(got) > 0 {
		t.Fatalf("%+v", got)
	}
	c.end(true)
	if got := poll(f); len(got) != 2 || got[1].ID != 2 {
		t.Errorf("%+v", got)
	}
}

// Cancelled operations, and those of a link that ends, are dropped before their completions.
func TestDroppedMoves(t *testing.T) {
	f, c, x := mover()
	b := make([]byte, 16)
	for i := range 3 {
		begin(t, f.Put(uint64(i), mem.Host(b, "*"), x, 0, p2p.Signal{}))
	}
	poll(f)
	c.end(true) // the first one, which is cancelled before that is known
	f.Cancel(0)
	f.Cancel(1)
	if len(c.moves) != 1 || len(c.ended) > 0 {
		t.Fatalf("%d moves and %d that have ended are left", len(c.moves), len(c.ended))
	}
	for i, e := range poll(f) {
		if e.ID != uint64(i) || !errors.Is(e.Err, p2p.ErrCancelled) {
			t.Errorf("%+v", e)
		}
	}
	f.Close()
	if got := poll(f); len(got) != 1 || !errors.Is(got[0].Err, p2p.ErrClosed) || len(c.moves) > 0 {
		t.Errorf("%+v; %d moves are left", got, len(c.moves))
	}
}

// The peer cannot end, or write to, an operation that is being moved.
func TestFramesForMoves(t *testing.T) {
	for name, h := range map[string]sent{
		"end":  {p2p.Header{Service: Service, Kind: frameDone, Len: doneSize}, make([]byte, doneSize)},
		"data": {p2p.Header{Service: Service, Kind: frameData, Len: 4}, make([]byte, 4)},
	} {
		f, c, x := mover()
		begin(t, f.Get(1, mem.Host(make([]byte, 16), "*"), x, 0))
		poll(f)
		c.in = append(c.in, h)
		if _, _, err := f.Recv(); !errors.Is(err, p2p.ErrProtocol) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
