package rma

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"tutti/mem"
	"tutti/p2p"
)

// wire is a link whose other end is the test: it delivers what is queued and keeps what is sent.
type wire struct {
	in     []sent
	out    []sent
	got    int
	pieces bool // payloads come in pieces
	full   bool // it takes nothing
}

type sent struct {
	h p2p.Header
	b []byte
}

func (w *wire) Send(h *p2p.Header, b []byte) (bool, error) {
	if w.full {
		return false, nil
	}
	w.out = append(w.out, sent{*h, bytes.Clone(b)})
	return true, nil
}
func (w *wire) Flush() (bool, error) { return true, nil }
func (w *wire) Recv() (*p2p.Header, []byte, error) {
	if len(w.in) == 0 {
		return nil, nil, nil
	}
	f := &w.in[0]
	if w.pieces && len(f.b) > 0 {
		return &f.h, nil, nil
	}
	return &f.h, f.b, nil
}
func (w *wire) Fill(dst []byte) (int, error) {
	n := copy(dst, w.in[0].b[w.got:min(len(w.in[0].b), w.got+7)])
	w.got += n
	return n, nil
}
func (w *wire) Release()      { w.in, w.got = w.in[1:], 0 }
func (w *wire) MaxFrame() int { return 4096 }
func (w *wire) Arm() bool     { return false }
func (w *wire) Disarm()       {}
func (w *wire) Err() error    { return nil }
func (w *wire) Close() error  { return nil }

const (
	guard = 64
	size  = 256
)

// target is a Frames that exposes size bytes between guards.
func target() (f *Frames, w *wire, b []byte, x *mem.Remote, t *Table) {
	b, w, t = make([]byte, guard+size+guard), &wire{}, &Table{}
	r := mem.NewRegion(7, mem.Host(b, mem.Anywhere), false, false, nil)
	x = &mem.Remote{ID: 7, Generation: 3, Base: guard, Len: size, Rights: mem.Read | mem.Write | mem.Signal, Loc: "*"}
	if err := t.Expose(r, x); err != nil {
		panic(err)
	}
	return NewFrames(w, t, func() {}), w, b, x, t
}

func frame(kind, flags uint8, slot uint32, off uint64, b []byte) sent {
	return sent{p2p.Header{Service: Service, Kind: kind, Flags: flags, Chan: slot, Call: 7, Seq: 3, Off: off,
		Len: uint32(len(b))}, b}
}

func record(v ...uint64) (b []byte) {
	for _, x := range v {
		b = binary.LittleEndian.AppendUint64(b, x)
	}
	return b
}

func done(slot, status uint32) []byte {
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(nil, slot), status)
}

// A peer that was removed changes no memory any more, also in the middle of a put and of a frame.
// Its frames are valid, and its other messages arrive.
func TestRevokedPeerChangesNothing(t *testing.T) {
	f, w, b, _, _ := target()
	recv := func(fr ...sent) {
		t.Helper()
		for w.in = append(w.in, fr...); len(w.in) > 0; {
			if _, _, err := f.Recv(); err != nil {
				t.Fatal(err)
			}
		}
	}
	recv(frame(framePut, flagLast, 0, 0, []byte{1, 1, 1}), frame(framePut, 0, 1, 8, []byte{2, 2}))
	want := bytes.Clone(b)
	if !bytes.Contains(want, []byte{1, 1, 1}) || !bytes.Contains(want, []byte{2, 2}) {
		t.Fatal("nothing was put")
	}
	f.Revoke()
	recv(frame(framePut, flagLast, 1, 10, []byte{3, 3}), frame(framePut, flagLast, 2, 0, []byte{4}),
		frame(framePut, flagLast|flagSignal, 3, 0, append(record(7, 3, 16, 99), 5)),
		sent{p2p.Header{Service: Service, Kind: frameSignal, Flags: flagLast, Chan: 4, Call: 7, Seq: 3, Off: 16,
			Count: 99}, nil})
	if !bytes.Equal(b, want) {
		t.Error("memory has changed")
	}

	f, w, b, _, _ = target()
	w.pieces = true
	w.in = []sent{frame(framePut, flagLast, 0, 0, bytes.Repeat([]byte{6}, 70))}
	if _, _, err := f.Recv(); err != nil || w.got == 0 || len(w.in) == 0 {
		t.Fatalf("%d bytes of a frame have been read: %v", w.got, err)
	}
	want = bytes.Clone(b)
	f.Revoke()
	for len(w.in) > 0 {
		if _, _, err := f.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(b, want) {
		t.Error("the rest of a frame has changed memory")
	}
}

// TestMalformedFramesEndLink: what no peer of ours sends is a protocol violation.
func TestMalformedFramesEndLink(t *testing.T) {
	for name, script := range map[string][]sent{
		"unknown service":             {{p2p.Header{Service: 9}, nil}},
		"unknown kind":                {frame(frameEnd, 0, 0, 0, nil)},
		"kind 0":                      {frame(0, 0, 0, 0, nil)},
		"slot out of range":           {frame(framePut, flagLast, slots, 0, nil)},
		"signal record cut short":     {frame(framePut, flagSignal|flagLast, 0, 0, make([]byte, recordSize-1))},
		"signal with payload":         {frame(frameSignal, flagLast, 0, 0, []byte{1})},
		"get with payload":            {frame(frameGet, 0, 0, 0, []byte{1})},
		"data that was not asked for": {frame(frameData, 0, 0, 0, []byte{1})},
		"data for a put":              {frame(frameData, 0, 1, 0, []byte{1})},
		"data out of order":           {frame(frameData, 0, 2, 8, []byte{1})},
		"data that is too long":       {frame(frameData, 0, 2, 0, make([]byte, 101))},
		"empty data":                  {frame(frameData, 0, 2, 0, nil)},
		"empty records":               {frame(frameDone, 0, 0, 0, nil)},
		"half a record":               {frame(frameDone, 0, 0, 0, make([]byte, doneSize/2))},
		"end of an unused slot":       {frame(frameDone, 0, 0, 0, done(5, statusOK))},
		"end of a slot out of range":  {frame(frameDone, 0, 0, 0, done(slots, statusOK))},
		"unknown status":              {frame(frameDone, 0, 0, 0, done(1, statusEnd))},
		"a get that ends too soon":    {frame(frameDone, 0, 0, 0, done(2, statusOK))},
		"cancelled by the wrong side": {frame(frameDone, 0, 0, 0, done(1, statusCancelled))},
		"ended twice": {frame(frameDone, 0, 0, 0, done(1, statusOK)),
			frame(frameDone, 0, 0, 0, done(1, statusOK))},
	} {
		for _, pieces := range []bool{false, true} {
			f, w, b, x, _ := target()
			w.pieces = pieces
			buf := make([]byte, 100)
			w.full = true // slot 0 is free again
			if err := f.Put(1, mem.Host(buf[:8], "*"), x, 0, p2p.Signal{}); err != nil {
				t.Fatal(err)
			}
			w.full = false
			if err := errors.Join(f.Put(2, mem.Host(buf[:8], "*"), x, 0, p2p.Signal{}),
				f.Get(3, mem.Host(buf, "*"), x, 0)); err != nil {
				t.Fatal(err)
			}
			f.Cancel(1)
			f.Poll(make([]p2p.Completion, 1))
			w.in = script
			var err error
			for i := 0; i < 100 && err == nil; i++ {
				_, _, err = f.Recv()
			}
			if !errors.Is(err, p2p.ErrProtocol) || !errors.Is(f.Err(), p2p.ErrProtocol) {
				t.Errorf("%s (pieces %v): %v", name, pieces, err)
			}
			if !bytes.Equal(b, make([]byte, len(b))) || !bytes.Equal(buf, make([]byte, 100)) && name != "ended twice" {
				t.Errorf("%s: memory has changed", name)
			}
			var out [slots]p2p.Completion
			for _, c := range out[:f.Poll(out[:])] {
				if c.ID == 3 && !errors.Is(c.Err, p2p.ErrProtocol) {
					t.Errorf("%s: what was under way ended with %v", name, c.Err)
				}
			}
			if err := f.Put(9, mem.Host(buf, "*"), x, 0, p2p.Signal{}); !errors.Is(err, p2p.ErrProtocol) {
				t.Errorf("%s: a put afterwards: %v", name, err)
			}
		}
	}
}

// TestRefusedFramesEndTheirOperation: a valid frame for a forbidden operation is answered with the
// reason, and does not fail the link.
func TestRefusedFramesEndTheirOperation(t *testing.T) {
	data := bytes.Repeat([]byte{5}, 16)
	with := func(s sent, change func(*p2p.Header)) sent { change(&s.h); return s }
	for name, c := range map[string]struct {
		script []sent
		want   uint32
	}{
		"wrong generation": {[]sent{with(frame(framePut, flagLast, 0, 0, data), func(h *p2p.Header) { h.Seq = 4 })},
			statusRevoked},
		"wrong region": {[]sent{with(frame(framePut, flagLast, 0, 0, data), func(h *p2p.Header) { h.Call = 8 })},
			statusRevoked},
		"behind the end":     {[]sent{frame(framePut, flagLast, 0, size-15, data)}, statusBounds},
		"before the range":   {[]sent{frame(framePut, flagLast, 0, ^uint64(0)-7, data)}, statusBounds},
		"far away":           {[]sent{frame(framePut, flagLast, 0, 1<<63, data)}, statusBounds},
		"signal not aligned": {[]sent{frame(frameSignal, flagLast, 0, 4, nil)}, statusBounds | statusSignal},
		"second piece": {[]sent{frame(framePut, 0, 0, size, data), frame(framePut, flagLast, 0, 0, data)},
			statusBounds},
		"signal after refused data": {
			[]sent{frame(framePut, flagLast|flagSignal, 0, size, append(record(7, 3, 0, 1), data...))},
			statusBounds},
		"get behind the end": {[]sent{with(frame(frameGet, 0, 0, 1, nil), func(h *p2p.Header) { h.Count = size })},
			statusBounds},
		"get of everything": {[]sent{with(frame(frameGet, 0, 0, 1, nil), func(h *p2p.Header) { h.Count = ^uint64(0) })},
			statusBounds},
	} {
		for _, pieces := range []bool{false, true} {
			f, w, b, _, _ := target()
			w.in, w.pieces = append([]sent{}, c.script...), pieces
			for range 20 {
				if _, _, err := f.Recv(); err != nil {
					t.Fatalf("%s: %v", name, err)
				}
			}
			if len(w.out) != 1 || w.out[0].h.Kind != frameDone || !bytes.Equal(w.out[0].b, done(0, c.want)) {
				t.Errorf("%s (pieces %v): answered with %+v, want status %d", name, pieces, w.out, c.want)
			}
			if !bytes.Equal(b, make([]byte, len(b))) {
				t.Errorf("%s: memory has changed", name)
			}
		}
	}
}

// A put that is cancelled, or was refused, keeps back signals that begin before Poll has returned
// its completion.
func TestUnplacedPutKeepsSignalsBack(t *testing.T) {
	for name, end := range map[string]func(f *Frames, w *wire) error{
		"cancelled": func(f *Frames, _ *wire) error { f.Cancel(1); return nil },
		"refused": func(f *Frames, w *wire) error {
			w.full, w.in = false, []sent{frame(frameDone, 0, 0, 0, done(0, statusRevoked))}
			f.pump()
			_, _, err := f.Recv()
			return err
		},
	} {
		f, w, _, x, _ := target()
		strong, own := p2p.Signal{At: x, Value: 1, Strong: true}, p2p.Signal{At: x, Offset: 8, Value: 1}
		other := p2p.Signal{At: x, Offset: 16, Value: 1}
		w.full = true
		err := errors.Join(f.Put(1, mem.Host(make([]byte, 8), "*"), x, 0, own), end(f, w))
		w.full, w.out = false, nil
		err = errors.Join(err, f.Put(2, mem.Memory{}, nil, 0, strong), f.Put(3, mem.Memory{}, nil, 0, own),
			f.Put(4, mem.Memory{}, nil, 0, other))
		if err != nil {
			t.Fatal(err)
		}
		if len(w.out) != 1 || w.out[0].h.Off != other.Offset {
			t.Errorf("%s: frames %+v, want one for the signal without an order", name, w.out)
		}
		var out [slots]p2p.Completion
		if n := f.Poll(out[:]); n != 3 || !errors.Is(out[1].Err, p2p.ErrUnplaced) ||
			!errors.Is(out[2].Err, p2p.ErrUnplaced) {
			t.Errorf("%s: completions %+v", name, out[:n])
		}
		if err := f.Put(5, mem.Memory{}, nil, 0, strong); err != nil || len(w.out) != 2 {
			t.Errorf("%s: after its completion was returned: %v, %d frames", name, err, len(w.out))
		}
	}
}

// TestUnansweredOperationsAreBounded: a peer that sends and never reads an answer loses its link
// before it costs memory.
func TestUnansweredOperationsAreBounded(t *testing.T) {
	f, w, _, _, _ := target()
	w.full = true
	for i := range 4 * slots {
		w.in = append(w.in, frame(framePut, flagLast, uint32(i%slots), 0, []byte{1}))
	}
	var err error
	for i := 0; i < 10 && err == nil; i++ {
		_, _, err = f.Recv()
	}
	if !errors.Is(err, p2p.ErrProtocol) || len(f.answers) > 2*slots {
		t.Errorf("%v with %d answers", err, len(f.answers))
	}
}

// TestCancelledOperationsHaveTwoAnswers: a peer may cancel what it does not know to be refused, all
// of it at once.
func TestCancelledOperationsHaveTwoAnswers(t *testing.T) {
	f, w, _, _, _ := target()
	for i := range slots {
		get := frame(frameGet, 0, uint32(i), 0, nil)
		get.h.Seq, get.h.Count = 1<<40, 8 // of a region that was withdrawn
		w.in = append(w.in, get)
	}
	for i := range slots {
		w.in = append(w.in, frame(frameCancel, 0, uint32(i), 0, nil))
	}
	w.full = true
	for range 10 {
		if _, _, err := f.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	if len(f.answers) != 2*slots {
		t.Errorf("%d answers, want %d", len(f.answers), 2*slots)
	}
}

// TestAnswersAreSentDuringEndlessFrames: a peer that sends frame after frame does not delay the
// completion of a put.
func TestAnswersAreSentDuringEndlessFrames(t *testing.T) {
	f, w, _, _, _ := target()
	w.in = []sent{frame(framePut, flagLast, 0, 0, []byte{1}), {p2p.Header{Kind: 1}, nil}, {p2p.Header{Kind: 2}, nil}}
	if h, _, err := f.Recv(); err != nil || h == nil || h.Kind != 1 {
		t.Fatal(h, err)
	}
	if len(w.out) != 1 || w.out[0].h.Kind != frameDone {
		t.Errorf("the put is not answered while other frames come: %+v", w.out)
	}
}

// FuzzFrames: whatever a peer sends, nothing panics, and no byte changes outside of what it may
// write and what was asked of it.
func FuzzFrames(f *testing.F) {
	for _, s := range [][]sent{
		{frame(framePut, flagLast, 0, 8, []byte("data"))},
		{frame(framePut, flagLast|flagSignal, 0, 8, append(record(7, 3, 16, 99), 1, 2, 3))},
		{frame(frameSignal, flagLast, 1, 8, nil), frame(frameGet, 0, 2, 0, nil), frame(frameCancel, 0, 2, 0, nil)},
		{frame(frameData, 0, 1, 0, make([]byte, 100)), frame(frameDone, 0, 0, 0, done(1, 0))},
	} {
		var b []byte
		for _, x := range s {
			b = append(b, x.h.Kind, x.h.Flags, byte(x.h.Chan), byte(x.h.Off), byte(len(x.b)), 7, 3, byte(x.h.Count))
			b = append(b, x.b...)
		}
		f.Add(b, true)
		f.Add(b, false)
	}
	f.Fuzz(func(t *testing.T, script []byte, pieces bool) {
		fr, w, b, x, table := target()
		w.pieces = pieces
		local := make([]byte, 3*guard)
		if err := errors.Join(fr.Put(1, mem.Host(make([]byte, 200), "*"), x, 0, p2p.Signal{At: x, Value: 1}),
			fr.Get(2, mem.Host(local[guard:2*guard], "*"), x, 0), fr.FlushPuts(3)); err != nil {
			t.Fatal(err)
		}
		for len(script) >= 8 {
			h := script[:8]
			script = script[8:]
			n := min(int(h[4]), len(script))
			s := frame(h[0], h[1], uint32(h[2]), uint64(int64(int8(h[3]))), script[:n])
			s.h.Call, s.h.Seq, s.h.Count = uint64(h[5]), uint64(h[6]), uint64(h[7])
			script = script[n:]
			w.in = append(w.in, s)
		}
		var ended int
		var out [slots]p2p.Completion
		for i := 0; i < 10_000 && len(w.in) > 0; i++ {
			if _, _, err := fr.Recv(); err != nil {
				break
			}
			ended += fr.Poll(out[:])
			if i == 50 {
				table.Withdraw(x)
			}
		}
		fr.Close()
		if ended += fr.Poll(out[:]); ended != 3 {
			t.Fatalf("%d completions for 3 operations", ended)
		}
		for i, v := range b {
			if v != 0 && (i < guard || i >= guard+size) {
				t.Fatalf("byte %d outside of the range has changed", i-guard)
			}
		}
		for i, v := range local {
			if v != 0 && (i < guard || i >= 2*guard) {
				t.Fatalf("byte %d outside of what was asked for has changed", i-guard)
			}
		}
	})
}

// A flush ends well only if the puts before it have ended before the link.
func TestFlushEndsWithItsLink(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(*Frames, *wire)
		want error
	}{
		{"closed", func(f *Frames, _ *wire) { f.Close() }, p2p.ErrClosed},
		{"violated", func(f *Frames, w *wire) {
			w.in = append(w.in, sent{h: p2p.Header{Service: Service, Kind: frameEnd}})
			f.Recv()
		}, p2p.ErrProtocol},
		{"closed before a put is cancelled", func(f *Frames, _ *wire) { f.Close(); f.Cancel(1) }, p2p.ErrClosed},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := &wire{}
			f := NewFrames(w, &Table{}, func() {})
			to := &mem.Remote{ID: 1, Generation: 1, Len: size, Rights: mem.Write}
			if err := errors.Join(f.Put(1, mem.Host(make([]byte, size), mem.Anywhere), to, 0, p2p.Signal{}),
				f.FlushPuts(2)); err != nil {
				t.Fatal(err)
			}
			c.end(f, w)
			var out [4]p2p.Completion
			n := f.Poll(out[:])
			for _, o := range out[:n] {
				if o.ID == 2 && !errors.Is(o.Err, c.want) {
					t.Errorf("the flush ends with %v, want %v", o.Err, c.want)
				}
			}
			if n != 2 {
				t.Errorf("%d operations end, want 2", n)
			}
		})
	}
}
