package link

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/endpoint/internal/gate"
	"tutti/endpoint/internal/wire"
)

func eachGuard(t *testing.T, f func(t *testing.T, m wire.Mode)) {
	for _, m := range []wire.Mode{wire.Checked, wire.Sealed} {
		t.Run(m.String(), func(t *testing.T) { f(t, m) })
	}
}

func data(id uint64, off int, payload []byte) []byte {
	return append(wire.Bulk(nil, wire.Data, id, int64(len(payload)), uint64(off)), payload...)
}

// deliver has an end receive bytes, and then the end of the stream, and returns why the connection
// broke.
func deliver(t *testing.T, m wire.Mode, in *sink, b []byte) error {
	t.Helper()
	_, other := ends(t, m, in)
	file := os.NewFile(uintptr(other), "other")
	defer file.Close()
	if _, err := file.Write(b); err != nil {
		t.Fatal(err)
	}
	file.Close()
	select {
	case err := <-in.broken:
		return err
	case <-time.After(patience):
		t.Fatal("Broken is not called")
		return nil
	}
}

// Frames arrive however they are cut into records, and however the records are cut on their way.
func TestRecordsArriveInPieces(t *testing.T) {
	eachGuard(t, func(t *testing.T, m wire.Mode) {
		r := rand.New(rand.NewPCG(1, 2))
		for round := range 50 {
			in := newSink()
			x, other := ends(t, m, in)
			src := random(3*wire.MaxRecord+r.IntN(1000), uint64(round))
			dst := make([]byte, len(src))
			g := in.add(1, dst)
			stream := data(1, 0, src)
			for i := range uint64(200) {
				stream = wire.Header{Address: i, Op: wire.Pong}.Append(stream)
			}
			var frames [][]byte
			for len(stream) > 0 {
				n := 1 + r.IntN([]int{3, 30, 500, wire.MaxRecord}[r.IntN(4)])
				n = min(n, len(stream))
				frames, stream = append(frames, stream[:n]), stream[n:]
			}
			for b := records(t, m, frames...); len(b) > 0; {
				n := min(1+r.IntN([]int{3, 30, 1 << 20}[r.IntN(3)]), len(b))
				n, err := unix.Write(other, b[:n])
				if err != nil {
					t.Fatal(err)
				}
				b = b[n:]
			}
			in.until(t, "the frames", func() bool { return len(in.pongs) == 200 })
			g.Close()
			if !bytes.Equal(src, dst) {
				t.Fatal("other bytes have arrived")
			}
			unix.Close(other)
			if err := <-in.broken; !errors.Is(err, ErrEnded) || x.Err() != err {
				t.Fatal(err)
			}
		}
	})
}

// A stream that was changed anywhere ends the connection, and nothing of the record that was
// changed is stored or handled.
func TestChangedStreamsBreak(t *testing.T) {
	eachGuard(t, func(t *testing.T, m wire.Mode) {
		payload := bytes.Repeat([]byte{0xff}, 20)
		frames := [][]byte{data(1, 0, payload), data(1, 20, payload),
			wire.Header{Address: 7, Op: wire.Pong}.Append(nil)}
		whole := records(t, m, frames...)
		var ends []int
		for i := range frames {
			ends = append(ends, len(records(t, m, frames[:i+1]...)))
		}
		one, two, three := whole[:ends[0]], whole[ends[0]:ends[1]], whole[ends[1]:]
		// breaks checks a stream of which so many records are as they were made.
		breaks := func(what string, good int, want error, b []byte) {
			t.Helper()
			in := newSink()
			dst := make([]byte, 40)
			g := in.add(1, dst)
			if err := deliver(t, m, in, b); !errors.Is(err, want) {
				t.Errorf("%s: %v, want %v", what, err, want)
			}
			g.Close()
			stored := min(good, 2) * 20
			if bytes.Count(dst[:stored], []byte{0xff}) != stored || bytes.Count(dst[stored:], []byte{0}) != 40-stored {
				t.Errorf("%s: %x was stored, want %d bytes", what, dst, stored)
			}
			if want := good / 3; len(in.pongs) != want {
				t.Errorf("%s: %d frames without payload were handled, want %d", what, len(in.pongs), want)
			}
		}
		for i := range whole {
			x := bytes.Clone(whole)
			x[i] ^= 1 << (i % 8)
			good := 0
			for good < len(ends) && ends[good] <= i {
				good++
			}
			breaks("a bit was changed", good, wire.ErrRecord, x)
		}
		for n := range whole {
			good, want := 0, io.ErrUnexpectedEOF
			for good < len(ends) && ends[good] <= n {
				good++
			}
			if n == 0 || good > 0 && ends[good-1] == n {
				want = ErrEnded
			}
			breaks("the end is missing", good, want, whole[:n])
		}
		join := func(parts ...[]byte) []byte { return bytes.Join(parts, nil) }
		breaks("a record comes again", 1, wire.ErrRecord, join(one, one, two, three))
		breaks("records are swapped", 1, wire.ErrRecord, join(one, three, two))
		breaks("a record is missing", 1, wire.ErrRecord, join(one, three))
		breaks("the first record is missing", 0, wire.ErrRecord, join(two, three))
		breaks("the records are missing, and frames come", 0, wire.ErrRecord, join(frames...))
		breaks("frames follow", 3, wire.ErrRecord, join(whole, frames[2]))
		giant := bytes.Clone(whole)
		binary.LittleEndian.PutUint32(giant, 1<<32-1)
		breaks("a record is giant", 0, wire.ErrRecord, giant)
		breaks("nothing was changed", 3, ErrEnded, whole)
		if m == wire.Sealed {
			g := guardOf(t, m, 0)
			var mirror []byte
			for _, f := range frames {
				mirror = g.Out.Append(mirror, f)
			}
			breaks("the records of the receiver come back", 0, wire.ErrRecord, mirror)
		}
	})
}

// Transfers in both directions at once, with a socket that is full most of the time, and sources
// that are closed meanwhile: frames stay whole, and what was not given up arrives.
func TestGuardedTransfersCross(t *testing.T) {
	eachGuard(t, func(t *testing.T, m wire.Mode) {
		a, b := newSink(), newSink()
		x, y := couple(t, m, a, b)
		type moved struct {
			f        *transfer
			src, dst []byte
			to       *sink
			gate     *gate.Gate
		}
		var all []moved
		for id := range uint64(16) {
			for _, way := range []struct {
				c  *Conn
				to *sink
			}{{x, b}, {y, a}} {
				v := moved{f: &transfer{id: id}, src: random(1<<20+int(id)*999, id), to: way.to}
				v.dst = make([]byte, len(v.src))
				v.gate = way.to.add(id, v.dst)
				v.f.Framer, v.f.Gate, v.f.N = v.f, new(gate.Gate), int64(len(v.src))
				v.f.Gate.Open(v.src)
				all = append(all, v)
				way.c.Queue(&v.f.Out)
			}
		}
		x.Flush()
		y.Flush()
		for i, v := range all {
			if i%3 == 0 {
				v.f.Gate.Close()
			}
		}
		for _, s := range []*sink{a, b} {
			s.until(t, "the transfers", func() bool { return len(s.codes) == 16 })
		}
		for i, v := range all {
			v.gate.Close()
			code := v.to.codes[v.f.id]
			switch {
			case code == wire.OK:
				if !bytes.Equal(v.src, v.dst) {
					t.Errorf("transfer %d has other bytes", i)
				}
			case i%3 != 0:
				t.Errorf("transfer %d ended with %v", i, code)
			}
		}
	})
}

// A connection whose peer does not read keeps a bounded amount of memory.
func TestGuardsAreBounded(t *testing.T) {
	eachGuard(t, func(t *testing.T, m wire.Mode) {
		x, other := ends(t, m, newSink())
		defer unix.Close(other)
		f := &transfer{id: 1}
		f.Framer, f.Gate, f.N = f, new(gate.Gate), 8<<20
		f.Gate.Open(make([]byte, f.N))
		x.Queue(&f.Out)
		x.Flush() // until the socket is full
		x.mu.Lock()
		defer x.mu.Unlock()
		for x.flushing {
			x.quiet.Wait()
		}
		if n := cap(x.guard.out) + len(x.in); n > 4*wire.MaxRecord || !x.guard.pending() {
			t.Errorf("%d bytes, pending: %v", n, x.guard.pending())
		}
	})
}
