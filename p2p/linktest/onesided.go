package linktest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"tutti/kernels"
	"tutti/mem"
	"tutti/p2p"
)

// Side is an end of a link with the state of a test of remote memory.
type Side struct {
	*End
	Node  *Node
	Rma   p2p.OneSided
	Ended map[uint64]p2p.Completion // by id
	next  uint64
	other *Side // in the same goroutine: both make progress
}

var generations atomic.Uint64

// Sides connects two nodes whose links have all capabilities for remote memory, or returns nil if
// links of this transport have none.
func Sides(tb testing.TB, open func(testing.TB) p2p.Transport) (x, y *Side) {
	tb.Helper()
	a, b := Listen(tb, open(tb), NewHost(0)), Listen(tb, open(tb), NewHost(1))
	p, q := Connect(tb, a, b)
	x, y = NewSide(p, a), NewSide(q, b)
	if x == nil || y == nil {
		tb.Logf("links of %s have no remote memory, and do not say that they do", a.T.Name())
		return nil, nil
	}
	x.other, y.other = y, x
	return x, y
}

// NewSide returns a side of e, nil if the link lacks a capability or the transport exposes nothing.
func NewSide(e *End, n *Node) *Side {
	r, ok := e.Link.(p2p.OneSided)
	if _, exposes := n.T.(p2p.Exposer); !ok || !exposes {
		return nil
	}
	return &Side{End: e, Node: n, Rma: r, Ended: map[uint64]p2p.Completion{}}
}

// Alloc returns n bytes that can be exposed with every right.
func (s *Side) Alloc(tb testing.TB, n int) *mem.Region {
	tb.Helper()
	r, err := s.alloc(n)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { r.Free() })
	return r
}

func (s *Side) alloc(n int) (r *mem.Region, err error) {
	if a, ok := s.Node.T.(p2p.WritableAllocator); ok {
		if r, err = a.AllocWritable(n); err != nil {
			return nil, err
		}
	} else {
		r = mem.NewRegion(rand.Uint64()|1, mem.Host(make([]byte, n), mem.Anywhere), false, false,
			func() error { return nil })
	}
	s.Node.Share(r.ID, r)
	return r, nil
}

// Expose opens n bytes of r and returns what the peer decodes.
func (s *Side) Expose(tb testing.TB, r *mem.Region, off, n int, rights mem.Rights) *mem.Remote {
	tb.Helper()
	b, err := s.expose(r, off, n, rights)
	if err != nil {
		tb.Fatal(err)
	}
	got := new(mem.Remote)
	if err := got.UnmarshalBinary(b); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := s.Withdraw(got); err != nil {
			tb.Errorf("Withdraw at the end: %v", err)
		}
	})
	return got
}

// expose returns the description in the form that travels.
func (s *Side) expose(r *mem.Region, off, n int, rights mem.Rights) ([]byte, error) {
	x := &mem.Remote{ID: r.ID, Generation: generations.Add(1), Base: uint64(off), Len: uint64(n), Rights: rights,
		Loc: r.Loc()}
	key, err := s.Node.T.(p2p.Exposer).Expose(r, x)
	if err != nil {
		return nil, err
	}
	x.Keys = []mem.Key{{Path: s.Node.T.Name(), Blob: key}}
	return x.MarshalBinary()
}

// Withdraw ends Expose, with Patience.
func (s *Side) Withdraw(x *mem.Remote) error {
	ctx, cancel := context.WithTimeout(context.Background(), Patience)
	defer cancel()
	return s.Node.T.(p2p.Exposer).Withdraw(ctx, x)
}

// Turn makes progress on this side: it handles frames of remote memory and completions. There must
// be no frames for the proxy.
func (s *Side) Turn() error {
	runtime.Gosched() // loops of Turns leave processors to what a device in memory does
	h, _, err := s.Recv()
	if err == nil && h != nil {
		return fmt.Errorf("a frame for the proxy: %+v", h)
	}
	return errors.Join(s.collect(), err)
}

// collect takes completions.
func (s *Side) collect() error {
	var out [16]p2p.Completion
	for {
		n := s.Rma.Poll(out[:])
		for _, c := range out[:n] {
			if before, twice := s.Ended[c.ID]; twice {
				return fmt.Errorf("operation %d ended twice: %+v and %+v", c.ID, before, c)
			}
			s.Ended[c.ID] = c
		}
		if n < len(out) {
			return nil
		}
	}
}

// turns makes progress on both sides.
func (s *Side) turns() error {
	if s.other != nil {
		if err := s.other.Turn(); err != nil {
			return err
		}
	}
	return s.Turn()
}

// Start begins an operation with a new id, and repeats that while there is no room.
func (s *Side) Start(begin func(id uint64) error) (uint64, error) {
	s.next++
	for deadline := time.Now().Add(Patience); ; runtime.Gosched() {
		err := begin(s.next)
		if !errors.Is(err, p2p.ErrAgain) {
			return s.next, err
		}
		if err := s.turns(); err != nil {
			return s.next, err
		}
		if time.Now().After(deadline) {
			return s.next, fmt.Errorf("no room for %v: %w", Patience, err)
		}
	}
}

// PutTo puts b, and returns the operation.
func (s *Side) PutTo(b []byte, to *mem.Remote, off uint64, sig p2p.Signal) (uint64, error) {
	return s.Start(func(id uint64) error { return s.Rma.Put(id, mem.Host(b, mem.Anywhere), to, off, sig) })
}

// GetFrom gets b, and returns the operation.
func (s *Side) GetFrom(b []byte, from *mem.Remote, off uint64) (uint64, error) {
	return s.Start(func(id uint64) error { return s.Rma.Get(id, mem.Host(b, mem.Anywhere), from, off) })
}

// Await waits for the completion of an operation that was begun with err.
func (s *Side) Await(id uint64, err error) error {
	for deadline := time.Now().Add(Patience); err == nil; runtime.Gosched() {
		if c, ok := s.Ended[id]; ok {
			return c.Err
		}
		if err = s.turns(); err == nil && time.Now().After(deadline) {
			err = fmt.Errorf("operation %d has not ended after %v", id, Patience)
		}
	}
	return err
}

// noise is what fill writes: a prime number of bytes, none of which is 0. The race detector would
// see each access of a loop over bytes.
var noise = func() []byte {
	b, r := make([]byte, 65521), rand.NewPCG(1, 2)
	for i := range b {
		b[i] = byte(1 + r.Uint64()%255)
	}
	return b
}()

// fill writes the bytes of round to b.
func fill(b []byte, round int) {
	for at := round * 7919 % len(noise); len(b) > 0; at = 0 {
		b = b[copy(b, noise[at:]):]
	}
}

// filled reports whether b holds the bytes of round.
func filled(b []byte, round int) bool {
	for at := round * 7919 % len(noise); len(b) > 0; at = 0 {
		n := min(len(b), len(noise)-at)
		if !bytes.Equal(b[:n], noise[at:at+n]) {
			return false
		}
		b = b[n:]
	}
	return true
}

// blank reports whether all bytes of b are 0.
func blank(b []byte) bool {
	return len(b) == 0 || b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1])
}

// bulk returns n, or less for a link with small frames, which may be slow.
func bulk(x *Side, n int) int { return min(n, 64*x.MaxFrame()&^7) }

// edges returns the sizes at which the implementation changes.
func edges(frame int) []int {
	list := []int{0, 1, 7, 8, 9, 63, 64, 65, 4064, 4096, 4097, 65535, 65536, 65537, 1<<20 + 3}
	for _, n := range []int{frame - 33, frame - 32, frame - 31, frame - 1, frame, frame + 1, 3*frame + 5} {
		if n > 0 {
			list = append(list, n)
		}
	}
	return list
}

// put: data of every size arrives where it was put, and nowhere else, and the completion says so.
func (s suite) put(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	const guard = 128
	sizes := edges(x.MaxFrame())
	top := 0
	for _, n := range sizes {
		top = max(top, n)
	}
	r := y.Alloc(t, top+2*guard)
	to := y.Expose(t, r, guard, top, mem.Write)
	local := make([]byte, top)
	for round, n := range sizes {
		off := (round * 13) % (top - n + 1)
		clear(r.Bytes())
		fill(local[:n], round)
		id, err := x.PutTo(local[:n], to, uint64(off), p2p.Signal{})
		if err := x.Await(id, err); err != nil {
			t.Fatalf("put of %d bytes at %d: %v", n, off, err)
		}
		if c := x.Ended[id]; c.Bytes != n {
			t.Errorf("put of %d bytes: the completion says %d", n, c.Bytes)
		}
		b := r.Bytes()
		if !filled(b[guard+off:guard+off+n], round) {
			t.Fatalf("put of %d bytes at %d: the target has other bytes", n, off)
		}
		if !blank(b[:guard+off]) || !blank(b[guard+off+n:]) {
			t.Fatalf("put of %d bytes at %d: others have changed too", n, off)
		}
	}
	s.refused(t, x, y, mem.Write)
	s.many(t, x, func(id uint64) error {
		return x.Rma.Put(id, mem.Host(local[:1000], mem.Anywhere), to, 0, p2p.Signal{})
	})
}

// get: the same for reading.
func (s suite) get(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	sizes := edges(x.MaxFrame())
	top := 0
	for _, n := range sizes {
		top = max(top, n)
	}
	r := y.Alloc(t, top+64)
	from := y.Expose(t, r, 64, top, mem.Read)
	local := make([]byte, top+2)
	for round, n := range sizes {
		off := (round * 13) % (top - n + 1)
		clear(local)
		fill(r.Bytes()[64+off:64+off+n], round)
		id, err := x.GetFrom(local[1:1+n], from, uint64(off))
		if err := x.Await(id, err); err != nil {
			t.Fatalf("get of %d bytes at %d: %v", n, off, err)
		}
		if c := x.Ended[id]; c.Bytes != n || !filled(local[1:1+n], round) || local[0] != 0 || local[n+1] != 0 {
			t.Fatalf("get of %d bytes at %d: other bytes, or more of them; %+v", n, off, c)
		}
	}
	s.refused(t, x, y, mem.Read)
	s.many(t, x, func(id uint64) error { return x.Rma.Get(id, mem.Host(local[:1000], mem.Anywhere), from, 0) })
	if r.Writable { // memory that peers cannot write can still be read
		a, ok := y.Node.T.(p2p.Allocator)
		if !ok {
			return
		}
		sealed, err := a.Alloc(5000)
		if err != nil {
			t.Fatal(err)
		}
		defer sealed.Free()
		fill(sealed.Bytes(), 3)
		id, err := x.GetFrom(local[:5000], y.Expose(t, sealed, 0, 5000, mem.Read), 0)
		if err := x.Await(id, err); err != nil || !filled(local[:5000], 3) {
			t.Errorf("get from memory for reading: %v", err)
		}
	}
}

// refused: a forbidden operation ends with the reason, changes nothing, and does not fail the link.
func (s suite) refused(t *testing.T, x, y *Side, right mem.Rights) {
	const n = 4096
	r := y.Alloc(t, 3*n)
	good := y.Expose(t, r, n, n, mem.Read|mem.Write|mem.Signal)
	reads, writes := y.Expose(t, r, n, n, mem.Read), y.Expose(t, r, n, n, mem.Write|mem.Signal)
	quiet := y.Expose(t, r, n, n, mem.Read|mem.Write)
	other := writes
	if right == mem.Write {
		other = reads
	}
	local := bytes.Repeat([]byte{0xee}, n)
	do := func(b []byte, to *mem.Remote, off uint64) (uint64, error) {
		if right == mem.Write {
			return x.PutTo(b, to, off, p2p.Signal{})
		}
		return x.GetFrom(b, to, off)
	}
	access := func(name string, err, want error) {
		t.Helper()
		var a *p2p.AccessError
		if !errors.Is(err, want) || !errors.As(err, &a) {
			t.Errorf("%s: %v, want an AccessError: %v", name, err, want)
		}
	}
	// Operations that the description forbids do not begin.
	for _, c := range []struct {
		off  uint64
		n    int
		to   *mem.Remote
		want error
	}{
		{1, n, good, p2p.ErrBounds}, {n, 1, good, p2p.ErrBounds}, {n + 1, 0, good, p2p.ErrBounds},
		{math.MaxUint64, 2, good, p2p.ErrBounds}, {math.MaxUint64 - n + 1, n, good, p2p.ErrBounds},
		{0, n, other, p2p.ErrRights},
	} {
		before := len(x.Ended)
		_, err := do(local[:c.n], c.to, c.off)
		if access(fmt.Sprintf("%d bytes at %d", c.n, c.off), err, c.want); len(x.Ended) != before {
			t.Error("an operation that was not begun has ended")
		}
	}
	// The target refuses what the description was forged to allow.
	forged := func(x *mem.Remote, change func(*mem.Remote)) *mem.Remote {
		y := *x
		change(&y)
		return &y
	}
	longer := forged(good, func(r *mem.Remote) { r.Len = 2 * n })
	for name, c := range map[string]struct {
		to   *mem.Remote
		off  uint64
		want error
	}{
		"a length that was enlarged": {longer, 1, p2p.ErrBounds},
		"an end that was moved":      {longer, n, p2p.ErrBounds},
		"rights that were added":     {forged(other, func(r *mem.Remote) { r.Rights |= right }), 0, p2p.ErrRights},
		"a generation that never was": {forged(good, func(r *mem.Remote) { r.Generation += 1 << 40 }), 0,
			p2p.ErrRevoked},
		"another one's generation": {forged(good, func(r *mem.Remote) { r.Generation = quiet.Generation; r.ID++ }), 0,
			p2p.ErrRevoked},
		"a region that never was": {forged(good, func(r *mem.Remote) { r.ID++ }), 0, p2p.ErrRevoked},
		"an enormous length": {forged(good, func(r *mem.Remote) { r.Len = 1 << 61 }), 1<<61 - n,
			p2p.ErrBounds},
	} {
		access(name, x.Await(do(local, c.to, c.off)), c.want)
	}
	if right == mem.Write {
		word := func(to *mem.Remote, off uint64) error {
			return x.Await(x.PutTo(nil, nil, 0, p2p.Signal{At: to, Offset: off, Value: 7}))
		}
		access("a signal without the right", word(quiet, 0), p2p.ErrRights)
		access("a signal that is not aligned", word(good, 4), p2p.ErrBounds)
		access("a signal behind the end", word(good, n), p2p.ErrBounds)
		access("a signal far behind the end", word(good, math.MaxUint64-7), p2p.ErrBounds)
		access("a signal with a forged right", word(forged(quiet, func(r *mem.Remote) { r.Rights |= mem.Signal }), 0),
			p2p.ErrRights)
		access("a signal with a forged length", word(longer, n), p2p.ErrBounds)
		access("a signal to a generation that never was",
			word(forged(good, func(r *mem.Remote) { r.Generation += 1 << 40 }), 0), p2p.ErrRevoked)
		bad := forged(good, func(r *mem.Remote) { r.Generation += 1 << 40 })
		access("data that is refused", x.Await(x.PutTo(local[:8], bad, 0, p2p.Signal{At: good, Offset: 64, Value: 9})),
			p2p.ErrRevoked)
	}
	for i, v := range r.Bytes() {
		if v != 0 {
			t.Fatalf("byte %d was changed by something that was refused", i)
		}
	}
	for i, v := range local {
		if v != 0xee && right == mem.Write {
			t.Fatalf("local byte %d has changed", i)
		}
	}
	if err := x.Await(do(local, good, 0)); err != nil {
		t.Errorf("what is allowed, after what was not: %v", err)
	}
	if right == mem.Read && !bytes.Equal(local, make([]byte, n)) {
		t.Error("it got other bytes")
	}
	for _, to := range []*mem.Remote{good, reads, writes, quiet} {
		if err := y.Withdraw(to); err != nil {
			t.Error(err)
		}
	}
}

// many: a link takes many operations, then says so, and each ends once.
func (s suite) many(t *testing.T, x *Side, begin func(id uint64) error) {
	t.Helper()
	var ids []uint64
	for {
		x.next++
		err := begin(x.next)
		if errors.Is(err, p2p.ErrAgain) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if ids = append(ids, x.next); len(ids) > p2p.MaxOutstanding {
			t.Fatalf("%d operations without a Poll, at most %d should be taken", len(ids),
				p2p.MaxOutstanding)
		}
	}
	if len(ids) < p2p.MaxOutstanding/2 {
		t.Errorf("no room for more than %d operations", len(ids))
	}
	for _, id := range ids {
		if err := x.Await(id, nil); err != nil {
			t.Fatal(err)
		}
	}
	if x.Arm() && len(ids) == 0 {
		t.Error("nothing was begun")
	}
	x.Disarm()
}

// signal: a target that sees a signal sees the data before it, of its own put or, with a strong
// one, of all earlier puts, whether the target is busy or asleep.
func (s suite) signal(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	const parts, part = 5, 70_000
	sizes := []int{8, 64, 4000, part}
	data, words, back := y.Alloc(t, parts*part), y.Alloc(t, 4096), x.Alloc(t, 4096)
	to := y.Expose(t, data, 0, parts*part, mem.Write)
	flag := y.Expose(t, words, 0, 4096, mem.Signal)
	answer := x.Expose(t, back, 0, 4096, mem.Signal)
	x.other, y.other = nil, nil // each in a goroutine of its own
	const rounds = 200
	plan := func(round int) (n int, strong bool) { return sizes[round%len(sizes)], round/len(sizes)%2 == 1 }
	var left atomic.Int32
	left.Store(2)
	// together runs until both sides are done, because each needs the other's progress.
	together := func(s *Side) error {
		left.Add(-1)
		for deadline := time.Now().Add(Patience); left.Load() > 0; runtime.Gosched() {
			if err := s.Turn(); err != nil {
				return err
			}
			if time.Now().After(deadline) {
				return errors.New("the other side is not through")
			}
		}
		return nil
	}
	// wait waits for a word, asleep in every third round.
	wait := func(s *Side, w *atomic.Uint64, value uint64) error {
		for deadline := time.Now().Add(Patience); w.Load() != value; {
			if err := s.Turn(); err != nil {
				return err
			}
			if w.Load() == value {
				break
			}
			if value%3 == 0 {
				if !s.Arm() {
					if err := s.Host.Sleep(); err != nil {
						return fmt.Errorf("waiting for signal %d, which is %d: %w", value, w.Load(), err)
					}
				}
				s.Disarm()
			} else {
				runtime.Gosched()
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("signal %d has not come, it is %d", value, w.Load())
			}
		}
		return nil
	}
	both(t, func() error {
		local := make([]byte, part)
		for round := 1; round <= rounds; round++ {
			n, strong := plan(round)
			fill(local[:n], round)
			var last uint64
			for i := range parts {
				sig := p2p.Signal{}
				if !strong {
					sig = p2p.Signal{At: flag, Offset: uint64(8 * i), Value: uint64(round)}
				} else if i == parts-1 {
					sig = p2p.Signal{At: flag, Offset: 8 * parts, Value: uint64(round), Strong: true}
				}
				id, err := x.PutTo(local[:n], to, uint64(i*part), sig)
				if err != nil {
					return err
				}
				last = id
			}
			if err := wait(x, back.Word(64), uint64(round)); err != nil {
				return err
			}
			if err := x.Await(last, nil); err != nil {
				return err
			}
			for id := last; id > last-parts; id-- { // all have come: local is used again
				if err := x.Await(id, nil); err != nil {
					return err
				}
			}
		}
		return together(x)
	}, func() error {
		for round := 1; round <= rounds; round++ {
			n, strong := plan(round)
			for i := range parts {
				at := i
				if strong {
					at = parts
				}
				if err := wait(y, words.Word(8*at), uint64(round)); err != nil {
					return err
				}
				if !filled(data.Bytes()[i*part:i*part+n], round) {
					return fmt.Errorf("round %d: signal %d came before its %d bytes (strong: %v)", round, i, n, strong)
				}
			}
			id, err := y.PutTo(nil, nil, 0, p2p.Signal{At: answer, Offset: 64, Value: uint64(round)})
			if err := y.Await(id, err); err != nil {
				return err
			}
		}
		return together(y)
	})
}

// strong: a strong signal comes after all earlier puts, which are not placed when it begins; and a
// target that is about to sleep checks again after a signal.
func (s suite) strong(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	const n, puts, more = 2 << 20, 8, 64
	data, words := y.Alloc(t, n*puts+more), y.Alloc(t, 64)
	to := y.Expose(t, data, 0, n*puts+more, mem.Write)
	flag := y.Expose(t, words, 0, 64, mem.Signal)
	local := make([]byte, n)
	for round := 1; round <= 3; round++ {
		fill(local, round)
		for i := range puts {
			if _, err := x.PutTo(local, to, uint64(i*n), p2p.Signal{}); err != nil {
				t.Fatal(err)
			}
		}
		// Its own data has no order with the data of earlier puts, so it goes beside that.
		id, err := x.PutTo(local[:8*(round-1)], to, n*puts, p2p.Signal{At: flag, Value: uint64(round), Strong: true})
		for deadline := time.Now().Add(Patience); err == nil && words.Word(0).Load() != uint64(round); {
			if err = x.turns(); err == nil && time.Now().After(deadline) {
				err = errors.New("the signal has not come")
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		for i := range puts {
			if !filled(data.Bytes()[i*n:(i+1)*n], round) {
				t.Fatalf("a strong signal came before put %d", i)
			}
		}
		if !y.Arm() {
			t.Error("Arm does not say that a signal has come")
		}
		y.Disarm()
		for deadline := time.Now().Add(Patience); x.Await(id, nil) == nil && y.Arm(); y.Disarm() {
			if err := y.Turn(); err != nil {
				t.Fatal(err)
			}
			if time.Now().After(deadline) {
				t.Fatal("Arm always says that there is something")
			}
		}
		y.Disarm()
	}
}

// unplaced: a signal is not written if data that it is ordered after is not placed, because its put
// was cancelled. Signals without that order, and later ones, are written.
func (s suite) unplaced(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	large := max(bulk(x, 4<<20), 600<<10) // more than an engine moves at once
	data, words := y.Alloc(t, 2*large+8), y.Alloc(t, 64)
	flag := y.Expose(t, words, 0, 64, mem.Signal)
	local := make([]byte, large)
	fill(local, 1)
	const strong, own, other, none = 0, 8, 16, 64 // offsets of words
	cancelled := 0
	for round := uint64(1); round <= 8; round++ {
		clear(data.Bytes())
		to := y.Expose(t, data, 0, 2*large+8, mem.Write)
		begin := func(b []byte, at int, word uint64) uint64 {
			t.Helper()
			sig := p2p.Signal{At: flag, Offset: word, Value: round, Strong: word == strong}
			if word == none {
				sig = p2p.Signal{}
			}
			id, err := x.PutTo(b, to, uint64(at), sig)
			if err != nil {
				t.Fatal(err)
			}
			return id
		}
		first := begin(local, 0, none)
		after := begin(nil, 0, strong)
		second := begin(local, large, own)
		same := begin(local[:8], 2*large, own)
		free := begin(nil, 0, other)
		for range round % 4 { // some data is under way
			if err := x.turns(); err != nil {
				t.Fatal(err)
			}
		}
		x.Rma.Cancel(first)
		x.Rma.Cancel(second)
		if err := x.Await(free, nil); err != nil || words.Word(other).Load() != round {
			t.Fatalf("a signal without an order: %v", err)
		}
		for _, c := range []struct {
			name     string
			put, sig uint64
			word     int
			data     []byte
		}{
			{"a strong signal after a cancelled put", first, after, strong, data.Bytes()[:large]},
			{"a signal after a cancelled one to the same word", second, same, own, data.Bytes()[large : 2*large]},
		} {
			put, sig := x.Await(c.put, nil), x.Await(c.sig, nil)
			written := words.Word(c.word).Load() == round
			switch {
			case put != nil && !errors.Is(put, p2p.ErrCancelled):
				t.Fatal(put)
			case put != nil:
				cancelled++
			}
			switch {
			case written && !bytes.Equal(c.data, local):
				t.Errorf("%s: it was written, and the data is not placed", c.name)
			case written != (sig == nil), sig != nil && !errors.Is(sig, p2p.ErrUnplaced):
				t.Errorf("%s: written %v, its put ended with %v", c.name, written, sig)
			}
		}
		last := begin(nil, 0, strong)
		if err := x.Await(last, nil); err != nil || words.Word(strong).Load() != round {
			t.Fatalf("a strong signal that was begun after the end of a cancelled put: %v", err)
		}
		if err := y.Withdraw(to); err != nil { // until then a cancelled put may still be placed
			t.Fatal(err)
		}
	}
	if cancelled == 0 {
		t.Error("no put was cancelled before its end")
	}
}

// words: signals to one word are written in the order of their puts, also if a later put is
// smaller: the word never goes back.
func (s suite) words(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	const large, number = 1 << 20, 60
	sizes := []int{large, 8, 0, 100_000, 64 << 10}
	r := y.Alloc(t, 64+large*len(sizes))
	to := y.Expose(t, r, 0, r.Len(), mem.Write|mem.Signal)
	local := make([]byte, large)
	var ids []uint64
	for i := range number {
		k := i % len(sizes) // puts of different sizes may be done in different ways, so they do not overlap
		id, err := x.PutTo(local[:sizes[k]], to, uint64(64+k*large), p2p.Signal{At: to, Value: uint64(i + 1)})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	last := uint64(0)
	for deadline := time.Now().Add(Patience); last < number; {
		if err := x.turns(); err != nil {
			t.Fatal(err)
		}
		if err := y.turns(); err != nil {
			t.Fatal(err)
		}
		v := r.Word(0).Load()
		if v < last {
			t.Fatalf("the word has gone back from %d to %d", last, v)
		}
		if last = v; time.Now().After(deadline) {
			t.Fatalf("the word is %d, of %d signals", v, number)
		}
	}
	for _, id := range ids {
		if err := x.Await(id, nil); err != nil {
			t.Fatal(err)
		}
	}
	if v := r.Word(0).Load(); v != number {
		t.Errorf("the word is %d after %d signals", v, number)
	}
}

// completion: every operation ends once, in any order. A small one does not wait for large ones,
// nor do the link's own frames. Cancelled ones access no memory. When the peer ends, all remaining
// ones end.
func (s suite) completion(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	// Operations that are under way at a time have memory of their own: their data comes in any
	// order, and by different means.
	const large, more, number, parts = 1 << 20, 100, 40, 60
	r := y.Alloc(t, parts*large+more)
	to := y.Expose(t, r, 0, parts*large+more, mem.Read|mem.Write)
	local := make([]byte, large)
	fill(local, 1)
	for i := range parts {
		copy(r.Bytes()[i*large:], local)
	}
	var ids []uint64
	for i := range number {
		clear(r.Bytes()[i*large:][:large])
		id, err := x.PutTo(local, to, uint64(i*large), p2p.Signal{})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	small, err := x.PutTo(local[:more], to, parts*large, p2p.Signal{})
	if err != nil {
		t.Fatal(err)
	}
	ids = append(ids, small)
	before := -1 // operations that had ended when the small one had
	look := func() {
		if _, ended := x.Ended[small]; ended && before < 0 {
			before = len(x.Ended) - 1
		}
	}
	const frames = 20
	sent, got := 0, 0
	h, p := Frame(0, 64, nil)
	// The frames come last in every turn, so that the puts find the room first.
	for deadline := time.Now().Add(Patience); got < frames; {
		if f, _, ok, err := y.Take(); err != nil {
			t.Fatal(err)
		} else if ok {
			if f.Seq != uint64(got) {
				t.Fatalf("frame %d arrived as number %d", f.Seq, got)
			}
			got++
		}
		if err := y.collect(); err != nil {
			t.Fatal(err)
		}
		if err := x.Turn(); err != nil {
			t.Fatal(err)
		}
		look()
		if sent < frames {
			h.Seq = uint64(sent)
			ok, err := x.Send(&h, p)
			if err != nil {
				t.Fatal(err)
			}
			if ok {
				sent++
			}
		}
		if _, err := x.Flush(); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d of %d frames have passed %d large puts", got, frames, number)
		}
	}
	if n := len(x.Ended); n >= number {
		t.Errorf("%d frames have arrived after %d large puts that were begun before them", frames, n)
	}
	if err := x.Await(small, nil); err != nil {
		t.Fatal(err)
	}
	if look(); before > number/2 {
		t.Errorf("a small put has ended after %d large ones that were begun before it", before)
	}
	for _, id := range ids {
		if err := x.Await(id, nil); err != nil {
			t.Fatal(err)
		}
	}
	for i := range parts {
		if !filled(r.Bytes()[i*large:][:large], 1) {
			t.Errorf("part %d of the target has other bytes", i)
		}
	}
	if !filled(r.Bytes()[parts*large:], 1) {
		t.Error("the target of the small put has other bytes")
	}

	// Cancelled operations end, and their memory is not written.
	ids = ids[:0]
	const gets = parts / 3
	buf := make([]byte, gets*large)
	for i := range 20 {
		var id uint64
		var err error
		if i%2 == 0 {
			id, err = x.GetFrom(buf[i/2*large:][:large], to, uint64(i*large))
		} else {
			id, err = x.PutTo(local, to, uint64(i*large), p2p.Signal{})
		}
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	for range 5 {
		if err := x.turns(); err != nil {
			t.Fatal(err)
		}
	}
	for _, id := range ids {
		x.Rma.Cancel(id)
	}
	clear(buf)
	for _, id := range ids {
		if err := x.Await(id, nil); err != nil && !errors.Is(err, p2p.ErrCancelled) {
			t.Fatal(err)
		}
	}
	for i, v := range buf {
		if v != 0 {
			t.Fatalf("byte %d was written after Cancel", i)
		}
	}
	if err := x.Await(x.GetFrom(buf[:1000], to, 0)); err != nil || !filled(buf[:1000], 1) {
		t.Fatalf("a get after cancelled ones: %v", err)
	}

	// The peer ends.
	ids = ids[:0]
	for i := range parts {
		var id uint64
		var err error
		switch i % 3 {
		case 0:
			id, err = x.GetFrom(buf[i/3*large:][:large], to, uint64(i*large))
		case 1:
			id, err = x.PutTo(local, to, uint64(i*large), p2p.Signal{})
		default:
			id, err = x.Start(x.Rma.FlushPuts)
		}
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	y.Close()
	x.other = nil
	failed, lost := 0, false // lost: a put has failed
	for i, id := range ids {
		for deadline := time.Now().Add(Patience); ; runtime.Gosched() {
			c, ok := x.Ended[id]
			if ok && c.Err != nil {
				if failed++; !errors.Is(c.Err, p2p.ErrPeerGone) {
					t.Errorf("operation %d ended with %v, want %v", id, c.Err, p2p.ErrPeerGone)
				}
			}
			if ok {
				if lost = lost || i%3 == 1 && c.Err != nil; i%3 == 2 && lost && c.Err == nil {
					t.Errorf("flush %d has ended well, but a put before it has not", id)
				}
				break
			}
			x.Turn() // it returns the link's error
			if time.Now().After(deadline) {
				t.Fatalf("operation %d has not ended although the peer is gone", id)
			}
		}
	}
	if failed == 0 {
		t.Error("every operation has ended well although the peer had gone")
	}
	id, err := x.PutTo(local, to, 0, p2p.Signal{})
	for deadline := time.Now().Add(Patience); err == nil && time.Now().Before(deadline); runtime.Gosched() {
		x.Turn()
		if c, ok := x.Ended[id]; ok {
			if err = c.Err; err == nil {
				break
			}
		}
	}
	if err == nil || errors.Is(err, p2p.ErrAgain) {
		t.Errorf("a put to a peer that is gone: %v", err)
	}
}

// closedHere: operations under way when this end is closed end with an error, too.
func (s suite) closedHere(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	const n = 8 << 20
	to := y.Expose(t, y.Alloc(t, n), 0, n, mem.Write)
	local := make([]byte, n)
	var ids []uint64
	for range 10 {
		id, err := x.PutTo(local, to, 0, p2p.Signal{})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	x.Close()
	if err := x.collect(); err != nil {
		t.Fatal(err)
	}
	failed := 0
	for _, id := range ids {
		c, ok := x.Ended[id]
		if !ok {
			t.Fatalf("operation %d has not ended with its link", id)
		}
		if c.Err != nil {
			failed++
		}
	}
	if failed == 0 {
		t.Error("every operation has ended well although the link was closed")
	}
}

// revoke: after Withdraw has returned the memory does not change any more, and operations end with
// the reason.
func (s suite) revoke(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	n := bulk(x, 1<<20)
	all := 2 * n
	r := y.Alloc(t, all)
	b := r.Bytes()
	local, buf := make([]byte, n), make([]byte, n)
	first := y.Expose(t, r, 0, all, mem.Read|mem.Write|mem.Signal)
	if err := x.Await(x.PutTo(local, first, 0, p2p.Signal{})); err != nil {
		t.Fatal(err)
	}
	if err := y.Withdraw(first); err != nil {
		t.Fatal(err)
	}
	second := y.Expose(t, r, 0, all, mem.Read|mem.Write|mem.Signal)
	for name, err := range map[string]error{
		"put":    x.Await(x.PutTo(local, first, 0, p2p.Signal{})),
		"get":    x.Await(x.GetFrom(buf, first, 0)),
		"signal": x.Await(x.PutTo(nil, nil, 0, p2p.Signal{At: first, Value: 1})),
	} {
		var a *p2p.AccessError
		if !errors.Is(err, p2p.ErrRevoked) || !errors.As(err, &a) || a.Op != name || a.Generation != first.Generation {
			t.Errorf("%s to memory that was withdrawn: %v", name, err)
		}
	}
	if err := x.Await(x.PutTo(local, second, 0, p2p.Signal{})); err != nil {
		t.Errorf("memory that is exposed again: %v", err)
	}
	if err := y.Withdraw(first); err != nil {
		t.Errorf("Withdraw for the second time: %v", err)
	}
	x.other, y.other = nil, nil
	to := second
	over := func(err error) bool { // the signals of all puts are to one word
		return errors.Is(err, p2p.ErrRevoked) || errors.Is(err, p2p.ErrUnplaced)
	}
	for round, began := 0, time.Now(); round < 3 || round < 25 && time.Since(began) < time.Second; round++ {
		var done, refused, stop atomic.Int64
		both(t, func() error { // the peer puts continuously
			ids := map[uint64]int{} // sizes of puts under way
			busy := map[int]bool{}  // by size
			var locals [8][]byte    // so that every put changes the memory
			for i := range locals {
				locals[i] = bytes.Repeat([]byte{byte(8*round + i + 1)}, n)
			}
			defer stop.Store(1)
			for k, deadline := 0, time.Now().Add(Patience); refused.Load() < 50; k++ {
				// Puts under way have memory of their own: they may be done in different ways.
				if size := min(n, 64<<(k%15)); !busy[size] {
					id, err := x.PutTo(locals[x.next%8][:size], to, uint64(size),
						p2p.Signal{At: to, Value: uint64(round + 1)})
					if err != nil {
						return err
					}
					ids[id], busy[size] = size, true
				}
				if now, ok := x.Rma.(p2p.Immediate); ok {
					k := x.next % 8
					now.PutNow(locals[k][:8+k], to, 16, &p2p.Signal{At: to, Value: k})
				}
				if err := x.Turn(); err != nil {
					return err
				}
				for id, size := range ids {
					if c, ok := x.Ended[id]; ok {
						delete(ids, id)
						busy[size] = false
						if done.Add(1); c.Err != nil {
							if refused.Add(1); !over(c.Err) {
								return c.Err
							}
						}
					}
				}
				if time.Now().After(deadline) {
					return errors.New("puts to memory that was withdrawn are not refused")
				}
			}
			for id := range ids {
				if err := x.Await(id, nil); err != nil && !over(err) {
					return err
				}
			}
			return nil
		}, func() error {
			for begun := done.Load() + 20; done.Load() < begun && stop.Load() == 0; {
				if err := y.Turn(); err != nil {
					return err
				}
			}
			if err := y.Withdraw(to); err != nil {
				return err
			}
			before := bytes.Clone(b)
			if bytes.Equal(before, make([]byte, all)) {
				return errors.New("nothing was put before Withdraw")
			}
			for stop.Load() == 0 {
				if err := y.Turn(); err != nil {
					return err
				}
			}
			for range 100 {
				if err := y.Turn(); err != nil {
					return err
				}
			}
			if !bytes.Equal(b, before) {
				return fmt.Errorf("round %d: memory has changed after Withdraw", round)
			}
			return nil
		})
		if t.Failed() {
			return
		}
		clear(b)
		to = y.Expose(t, r, 0, all, mem.Read|mem.Write|mem.Signal)
	}
}

// now: a put by PutNow is complete at once, with its signal, or was not begun.
func (s suite) now(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	now, ok := x.Rma.(p2p.Immediate)
	if !ok {
		t.Logf("links of %s put nothing at once, and do not say that they do", x.Node.T.Name())
		return
	}
	const n = 1<<20 + 4096
	r := y.Alloc(t, n)
	to := y.Expose(t, r, 64, n-128, mem.Write|mem.Signal)
	local := make([]byte, n)
	put := func(size int, off uint64, sig *p2p.Signal) bool {
		return now.PutNow(local[:size], to, off, sig)
	}
	if at := now.Near(to); at != 0 {
		t.Errorf("Near is %#x before anything was put", at)
	}
	for deadline := time.Now().Add(Patience); !put(8, 0, nil); { // until the link knows the memory
		if err := x.turns(); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing can be put at once")
		}
	}
	sizes := []int{0, 1, 8, 64, 1000, 4000, 1 << 20}
	for range 200 { // some by each way of kernels.CopyOut, unless this process has chosen one before
		sizes = append(sizes, 64<<10+13)
	}
	for round, size := range sizes {
		fill(local[:size], round)
		if !put(size, 64, &p2p.Signal{At: to, Value: uint64(round + 1)}) {
			t.Fatalf("%d bytes and a signal cannot be put at once", size)
		}
		if v := r.Word(64).Load(); v != uint64(round+1) || !filled(r.Bytes()[128:128+size], round) {
			t.Fatalf("%d bytes: they are not there, or the signal is %d", size, v)
		}
		if !y.Arm() {
			t.Error("Arm does not say that a signal has come")
		}
		y.Disarm()
	}
	if at := now.Near(to); at == 0 {
		t.Error("Near does not know memory to which was put at once")
	} else {
		kernels.Acquire(at, n-128)
	}
	before := bytes.Clone(r.Bytes())
	forged := *to
	forged.Len = n
	quiet := y.Expose(t, r, 0, n, mem.Write)
	for what, done := range map[string]bool{
		"nothing":                put(0, 0, nil),
		"beyond the end":         put(8, n-128-7, nil),
		"far away":               put(8, math.MaxUint64-3, nil),
		"signal not aligned":     put(8, 0, &p2p.Signal{At: to, Offset: 4, Value: 99}),
		"signal behind the end":  put(8, 0, &p2p.Signal{At: to, Offset: n, Value: 99}),
		"a forged length":        now.PutNow(local[:8], &forged, n-128, nil),
		"a signal without right": put(8, 0, &p2p.Signal{At: quiet, Value: 99}),
	} {
		if done {
			t.Errorf("%s: it was put", what)
		}
	}
	if err := y.Withdraw(to); err != nil {
		t.Fatal(err)
	}
	if put(8, 0, nil) || put(0, 0, &p2p.Signal{At: to, Value: 99}) {
		t.Error("something was put to memory that was withdrawn")
	}
	if !bytes.Equal(before, r.Bytes()) {
		t.Error("memory has changed")
	}
	y.Close()
	x.Close()
	if put(8, 0, nil) {
		t.Error("something was put over a link that is closed")
	}
	if at := now.Near(to); at != 0 {
		t.Errorf("Near is %#x over a link that is closed", at)
	}
}

// flush: it ends after every earlier put, and their data is placed then.
func (s suite) flush(t *testing.T) {
	x, y := Sides(t, s.open)
	if x == nil {
		return
	}
	const n = 300_000
	r := y.Alloc(t, n*8)
	to := y.Expose(t, r, 0, n*8, mem.Write)
	local := make([]byte, n)
	for round := range 20 {
		fill(local, round)
		var ids []uint64
		for i := range 8 {
			id, err := x.PutTo(local[:n-i], to, uint64(i*n), p2p.Signal{})
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, id)
		}
		id, err := x.Start(x.Rma.FlushPuts)
		if err := x.Await(id, err); err != nil {
			t.Fatal(err)
		}
		for i, put := range ids {
			if c, ok := x.Ended[put]; !ok || c.Err != nil {
				t.Fatalf("put %d has not ended although what was flushed has: %+v", i, c)
			}
			if !filled(r.Bytes()[i*n:i*n+n-i], round) {
				t.Fatalf("put %d is not placed although it was flushed", i)
			}
		}
	}
	id, err := x.Start(x.Rma.FlushPuts) // of nothing
	if err := x.Await(id, err); err != nil {
		t.Fatal(err)
	}
}
