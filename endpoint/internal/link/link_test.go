package link

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/endpoint/internal/gate"
	"tutti/endpoint/internal/wire"
)

const patience = 20 * time.Second

// transfer sends bytes as Data frames, and Done in the end: with code OK, or Stale if it was given
// up.
type transfer struct {
	Out
	id uint64
}

func (f *transfer) Head(b []byte, at, n int64) []byte {
	return wire.Bulk(b, wire.Data, f.id, n, uint64(at))
}

func (f *transfer) Tail(b []byte, ok bool) []byte {
	o := wire.Outcome{Code: wire.OK, Bytes: uint64(f.N)}
	if !ok {
		o.Code = wire.Stale
	}
	return o.Append(wire.Header{Size: wire.OutcomeSize, Address: f.id, Op: wire.Done}.Append(b))
}

// sink is a handler that puts Data frames to where add says.
type sink struct {
	mu     sync.Mutex
	gates  map[uint64]*gate.Gate
	codes  map[uint64]wire.Code
	lost   map[uint64]bool // not all was stored
	pongs  []uint64
	broken chan error
	news   chan struct{}
}

func newSink() *sink {
	return &sink{gates: map[uint64]*gate.Gate{}, codes: map[uint64]wire.Code{}, lost: map[uint64]bool{},
		broken: make(chan error, 1), news: make(chan struct{}, 1)}
}

// add makes dst the place of a transfer.
func (s *sink) add(id uint64, dst []byte) *gate.Gate {
	g := new(gate.Gate)
	g.Open(dst)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gates[id] = g
	return g
}

func (s *sink) Frame(c *Conn, h wire.Header, ext []byte) (Sink, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch h.Op {
	case wire.Data:
		return Sink{Gate: s.gates[h.Address], Off: int64(wire.Word(ext, 0)), Token: h.Address}, nil
	case wire.Done:
		o, err := wire.DecodeOutcome(ext)
		s.codes[h.Address] = o.Code
		s.tell()
		return Sink{}, err
	case wire.Pong:
		s.pongs = append(s.pongs, h.Address)
		s.tell()
		return Sink{}, nil
	}
	return Sink{}, fmt.Errorf("%w: %v", wire.ErrFrame, h.Op)
}

func (s *sink) tell() {
	select {
	case s.news <- struct{}{}:
	default:
	}
}

func (s *sink) End(_ *Conn, k Sink, stored bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !stored {
		s.lost[k.Token.(uint64)] = true
	}
	return nil
}

func (s *sink) Broken(_ *Conn, err error) { s.broken <- err }

// until waits for something that frames bring about.
func (s *sink) until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	late := time.After(patience)
	for {
		s.mu.Lock()
		done := ok()
		s.mu.Unlock()
		if done {
			return
		}
		select {
		case <-s.news:
		case <-late:
			t.Fatalf("waited for %s in vain", what)
		}
	}
}

// eachMode runs a test on connections of each mode.
func eachMode(t *testing.T, f func(t *testing.T, m wire.Mode)) {
	for m := wire.Plain; m <= wire.Sealed; m++ {
		t.Run(m.String(), func(t *testing.T) { f(t, m) })
	}
}

// guardOf returns the guard of one end, 0 or 1, of a connection.
func guardOf(t *testing.T, m wire.Mode, end int) wire.Guard {
	t.Helper()
	secrets := [2][]byte{bytes.Repeat([]byte{1}, wire.SecretSize), bytes.Repeat([]byte{2}, wire.SecretSize)}
	g, err := wire.NewGuard(m, secrets[end], secrets[1-end])
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// records are those that the end 1 of a connection makes of frames.
func records(t *testing.T, m wire.Mode, frames ...[]byte) (b []byte) {
	t.Helper()
	g := guardOf(t, m, 1)
	for _, f := range frames {
		if m == wire.Plain {
			b = append(b, f...)
		} else {
			b = g.Out.Append(b, f)
		}
	}
	return b
}

// opener reads the bytes that are in the records of r.
type opener struct {
	r    io.Reader
	in   *wire.Records // nil: they are in none
	left []byte
}

func (o *opener) Read(b []byte) (int, error) {
	if o.in == nil {
		return o.r.Read(b)
	}
	if len(o.left) == 0 {
		record := make([]byte, wire.RecordHeader)
		if _, err := io.ReadFull(o.r, record); err != nil {
			return 0, err
		}
		n, err := o.in.Size(record)
		if err != nil {
			return 0, err
		}
		record = append(record, make([]byte, n-len(record))...)
		if _, err := io.ReadFull(o.r, record[wire.RecordHeader:]); err != nil {
			return 0, err
		}
		if o.left, err = o.in.Open(record); err != nil {
			return 0, err
		}
	}
	n := copy(b, o.left)
	o.left = o.left[n:]
	return n, nil
}

// ends returns the end 0 of a connection in a loop, and the socket of the other end.
func ends(t *testing.T, m wire.Mode, h Handler) (c *Conn, other int) {
	t.Helper()
	l, err := NewLoop()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close(errors.New("the test is over")) })
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if c, err = l.Add(fds[0], guardOf(t, m, 0), h, func(*Conn) {}); err != nil {
		t.Fatal(err)
	}
	return c, fds[1]
}

// couple returns two connections that are connected.
func couple(t *testing.T, m wire.Mode, a, b Handler) (x, y *Conn) {
	t.Helper()
	x, fd := ends(t, m, a)
	l, err := NewLoop()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close(errors.New("the test is over")) })
	if y, err = l.Add(fd, guardOf(t, m, 1), b, func(*Conn) {}); err != nil {
		t.Fatal(err)
	}
	return x, y
}

func random(n int, seed uint64) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(seed)})
	r.Read(b)
	return b
}

// Transfers of all sizes, from memory and files, arrive whole beside each other and control frames.
func TestTransfersArrive(t *testing.T) { eachMode(t, transfersArrive) }

func transfersArrive(t *testing.T, m wire.Mode) {
	in := newSink()
	x, _ := couple(t, m, newSink(), in)
	var want, got [][]byte
	var outs []*Out
	sizes := []int{0, 1, small, small + 1, gather, Chunk - 1, Chunk, Chunk + 1, 3*Chunk + 77, 5 << 20}
	for i, n := range append(sizes, sizes...) {
		id := uint64(i)
		src, dst := random(n, id), make([]byte, n)
		f := &transfer{id: id}
		f.Framer, f.Gate, f.N = f, new(gate.Gate), int64(n)
		f.Gate.Open(src)
		if i >= len(sizes) {
			file, err := os.CreateTemp(t.TempDir(), "")
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				f.Gate.Close() // what reads the file reads it within the gate
				file.Close()
			}()
			if _, err := file.Write(append([]byte("skip"), src...)); err != nil {
				t.Fatal(err)
			}
			f.File, f.Off = file, 4
		}
		in.add(id, dst)
		want, got, outs = append(want, src), append(got, dst), append(outs, &f.Out)
	}
	x.Queue(outs...)
	x.Send(wire.Header{Address: 7, Op: wire.Pong}.Append(nil))
	in.until(t, "the transfers", func() bool { return len(in.codes) == len(want) && len(in.pongs) == 1 })
	in.mu.Lock()
	defer in.mu.Unlock()
	for i := range want {
		in.gates[uint64(i)].Close()
		if in.codes[uint64(i)] != wire.OK || in.lost[uint64(i)] || !bytes.Equal(want[i], got[i]) {
			t.Errorf("transfer %d of %d bytes: code %d, lost %v", i, len(want[i]), in.codes[uint64(i)],
				in.lost[uint64(i)])
		}
	}
}

// counted is a transfer that counts its frames.
type counted struct {
	*transfer
	frames *atomic.Int32
}

func (c counted) Head(b []byte, at, n int64) []byte {
	c.frames.Add(1)
	return c.transfer.Head(b, at, n)
}

// inMemory is a device in the host's memory.
type inMemory []byte

func (m inMemory) Load(dst []byte, off int64) error { copy(dst, m[off:]); return nil }

func (m inMemory) Store(src []byte, off int64) error { copy(m[off:], src); return nil }

func (inMemory) Stage(n int) ([]byte, func(), error) { return make([]byte, n), func() {}, nil }

// A transfer that is to go as a whole has one frame, from host memory and from a device.
func TestWholeTransfersHaveOneFrame(t *testing.T) { eachMode(t, wholeTransfersHaveOneFrame) }

func wholeTransfersHaveOneFrame(t *testing.T, m wire.Mode) {
	in := newSink()
	x, _ := couple(t, m, newSink(), in)
	var frames atomic.Int32
	for i := range 2 {
		src, dst := random(MaxWhole, uint64(i)), make([]byte, MaxWhole)
		f := &transfer{id: uint64(i)}
		f.Framer, f.Gate, f.N, f.Whole = counted{f, &frames}, new(gate.Gate), MaxWhole, true
		if i == 0 {
			f.Gate.Open(src)
		} else {
			f.Gate.OpenDevice(inMemory(src))
		}
		in.add(f.id, dst)
		x.Queue(&f.Out)
		x.Flush()
		in.until(t, "the transfer", func() bool { return len(in.codes) == i+1 })
		in.mu.Lock()
		in.gates[f.id].Close()
		if in.codes[f.id] != wire.OK || !bytes.Equal(src, dst) || int(frames.Load()) != i+1 {
			t.Errorf("transfer %d: code %d, %d frames", i, in.codes[f.id], frames.Load())
		}
		in.mu.Unlock()
	}
}

// held is a transfer whose first frame is not made before it is released.
type held struct {
	*transfer
	reached, released chan struct{}
}

func (f held) Head(b []byte, at, n int64) []byte {
	if at == 0 {
		close(f.reached)
		<-f.released
	}
	return f.transfer.Head(b, at, n)
}

// What is given up because the connection was closed must not end as what was given up for a reason
// of its own.
func TestClosedConnectionSendsNoTails(t *testing.T) { eachMode(t, closedConnectionSendsNoTails) }

func closedConnectionSendsNoTails(t *testing.T, m wire.Mode) {
	x, other := ends(t, m, newSink())
	file := os.NewFile(uintptr(other), "other")
	defer file.Close()
	f := held{&transfer{}, make(chan struct{}), make(chan struct{})}
	f.Framer, f.Gate, f.N = f, new(gate.Gate), 2*Chunk
	f.Gate.Open(make([]byte, f.N))
	x.Queue(&f.Out)
	go x.Flush()
	<-f.reached
	x.Close(errors.New("closed"))
	f.Stop()
	close(f.released)
	if b, err := io.ReadAll(file); err != nil || len(b) > 0 {
		t.Errorf("%d bytes come from a closed connection, %v", len(b), err)
	}
}

// A transfer whose source is closed while the socket is full ends its frame with zeros, and its
// Tail says so. One that has not begun, and one that is stopped, send nothing.
func TestTransfersAreGivenUp(t *testing.T) { eachMode(t, transfersAreGivenUp) }

func transfersAreGivenUp(t *testing.T, m wire.Mode) {
	x, other := ends(t, m, newSink())
	file := os.NewFile(uintptr(other), "other")
	defer file.Close()
	if err := unix.SetsockoptInt(x.fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 32<<10); err != nil {
		t.Fatal(err)
	}
	sent := &opener{r: file, in: guardOf(t, m, 1).In}
	src := bytes.Repeat([]byte{0xff}, 8<<20)
	var fs []*transfer
	for id := range uint64(4) {
		f := &transfer{id: id}
		f.Framer, f.Gate, f.N = f, new(gate.Gate), int64(len(src))
		f.Gate.Open(src)
		fs = append(fs, f)
		x.Queue(&f.Out)
	}
	x.Flush() // until the socket is full, within the first
	fs[0].Gate.Close()
	fs[1].Stop()
	fs[2].Gate.Close()
	if !x.Remove(&fs[3].Out) || x.Remove(&fs[3].Out) {
		t.Error("Remove of a transfer that has not begun")
	}
	codes := map[uint64]wire.Code{}
	bytesOf := map[uint64]int64{}
	zeros := false
	for len(codes) < 3 {
		head := make([]byte, wire.HeaderSize)
		if _, err := io.ReadFull(sent, head); err != nil {
			t.Fatal(err)
		}
		h := wire.Decode(head)
		body := make([]byte, h.Size)
		if _, err := io.ReadFull(sent, body); err != nil {
			t.Fatal(err)
		}
		if h.Op == wire.Done {
			codes[h.Address] = wire.Code(body[0])
			continue
		}
		if at := int64(binary.LittleEndian.Uint64(body)); at != bytesOf[h.Address] {
			t.Fatalf("a frame at %d, expected %d", at, bytesOf[h.Address])
		}
		bytesOf[h.Address] += int64(len(body) - 8)
		zeros = zeros || body[len(body)-1] == 0
	}
	for id := range uint64(3) {
		if codes[id] != wire.Stale {
			t.Errorf("transfer %d ended with %d", id, codes[id])
		}
	}
	if bytesOf[0] == 0 || bytesOf[0] > int64(len(src))/2 || !zeros || bytesOf[1] != 0 || bytesOf[2] != 0 {
		t.Errorf("%v bytes were sent, zeros: %v", bytesOf, zeros)
	}
}

// What a closed gate would have got is dropped, and the connection goes on.
func TestClosedSinksDrop(t *testing.T) { eachMode(t, closedSinksDrop) }

func closedSinksDrop(t *testing.T, m wire.Mode) {
	in := newSink()
	x, _ := couple(t, m, newSink(), in)
	f := &transfer{id: 1}
	f.Framer, f.Gate, f.N = f, new(gate.Gate), 1<<20
	f.Gate.Open(make([]byte, f.N))
	in.add(1, nil).Close()
	x.Queue(&f.Out)
	x.Send(wire.Header{Op: wire.Pong}.Append(nil))
	in.until(t, "the end", func() bool { return len(in.codes) == 1 && len(in.pongs) == 1 })
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.lost[1] || in.codes[1] != wire.OK {
		t.Error("End says that everything was stored")
	}
}

func TestConnectionsEnd(t *testing.T) { eachMode(t, connectionsEnd) }

func connectionsEnd(t *testing.T, m wire.Mode) {
	for name, c := range map[string]struct {
		send []byte
		want error
	}{
		"between frames":  {wire.Header{Op: wire.Pong}.Append(nil), ErrEnded},
		"within a header": {[]byte{1, 2, 3}, io.ErrUnexpectedEOF},
		"within a frame":  {wire.Header{Size: 100, Op: wire.Done}.Append(nil), io.ErrUnexpectedEOF},
		"not a frame":     {bytes.Repeat([]byte{0xff}, 100), wire.ErrFrame},
		"refused":         {wire.Header{Op: wire.Ping}.Append(nil), wire.ErrFrame},
	} {
		t.Run(name, func(t *testing.T) {
			in := newSink()
			x, other := ends(t, m, in)
			if _, err := unix.Write(other, records(t, m, c.send)); err != nil {
				t.Fatal(err)
			}
			unix.Close(other)
			select {
			case err := <-in.broken:
				if !errors.Is(err, c.want) || !errors.Is(x.Err(), c.want) {
					t.Errorf("%v, want %v", err, c.want)
				}
			case <-time.After(patience):
				t.Fatal("Broken is not called")
			}
			x.Send(wire.Header{Op: wire.Pong}.Append(nil)) // does nothing
		})
	}
}

// pongs waits for a number of Pong frames.
type pongs struct {
	*sink
	n int
}

func (p pongs) Ended() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.pongs) >= p.n
}

// Waiters and the loop find what arrives, whichever of them polls, and what was to be sent later is
// sent.
func TestWaitersAndLoopsShareConnections(t *testing.T) { eachMode(t, waitersAndLoopsShareConnections) }

func waitersAndLoopsShareConnections(t *testing.T, m wire.Mode) {
	a, b := newSink(), newSink()
	x, y := couple(t, m, a, b)
	for i := 1; i <= 2000; i++ {
		y.Later(wire.Header{Address: uint64(i), Op: wire.Pong}.Append(nil)) // goes with y's next wait
		x.Send(wire.Header{Address: uint64(i), Op: wire.Pong}.Append(nil))
		for _, w := range []struct {
			c *Conn
			pongs
		}{{y, pongs{b, i}}, {x, pongs{a, i}}} {
			if conns := []*Conn{w.c}; !Await(t.Context(), conns, w.pongs) {
				w.until(t, "a frame", func() bool { return len(w.sink.pongs) >= w.n })
				Woken(conns)
			}
		}
	}
}

func TestNoPollingWhileOthersNeedTheProcessors(t *testing.T) {
	var c contention
	at := int64(time.Hour)
	if c.note(at, at+late) || c.present(at+late) {
		t.Error("a short absence was a long one")
	}
	absent := func(want int64) {
		t.Helper()
		long := c.note(at, at+late+1)
		if at += late + 1; !long || c.pause.Load() != want || !c.present(at+want-1) || c.present(at+want) {
			t.Fatalf("long %v, pause %v, want %v", long, time.Duration(c.pause.Load()), time.Duration(want))
		}
		at += want
	}
	single := func(away int64) {
		t.Helper()
		if c.note(at, at+away) || c.present(at+away) || c.pause.Load() != 0 {
			t.Fatalf("a single absence of %v stopped the polling", time.Duration(away))
		}
		at += away
	}
	single(late + 1)
	for away := late + 1; away < snooze; away *= 3 { // each long after the one before
		at += soon + soonTimes*away + 1
		single(away)
	}
	at += soon
	for pause := doze; pause < snooze; pause *= 2 {
		absent(pause)
		if c.note(at, at+1); c.pause.Load() != pause {
			t.Fatalf("one short absence made the pause %v, want %v",
				time.Duration(c.pause.Load()), time.Duration(pause))
		}
	}
	absent(snooze)
	absent(snooze)
	for pause := snooze; pause > 0; {
		at += pause/calm + 1
		if c.note(at, at+1) {
			t.Fatal("a short absence was a long one")
		}
		if pause /= 2; pause < doze {
			pause = 0
		}
		if c.pause.Load() != pause {
			t.Fatalf("pause %v after quiet times, want %v", time.Duration(c.pause.Load()), time.Duration(pause))
		}
	}
	single(late + 1)
	at += soon + soonTimes*(late+1)
	absent(doze)
}

// ended is what Await waits for: a transfer that has come.
type ended struct {
	s  *sink
	id uint64
}

func (e ended) Ended() bool {
	e.s.mu.Lock()
	defer e.s.mu.Unlock()
	_, ok := e.s.codes[e.id]
	return ok
}

// A waiter that leaves the work to a loop that sleeps, because the waiter before polled, wakes it.
func TestAwaitWakesTheLoopUnderContention(t *testing.T) {
	a, b := newSink(), newSink()
	x, y := couple(t, wire.Plain, a, b)
	y.loop.tend = int64(time.Hour) // nobody has waited yet
	y.polled.Store(now())          // by a waiter
	x.Send(wire.Header{Address: 1, Op: wire.Pong}.Append(nil))
	b.until(t, "a frame", func() bool { return len(b.pongs) >= 1 })
	time.Sleep(10 * time.Millisecond) // the loop falls asleep; too short only hides a fault
	y.loop.until.Store(now() + int64(time.Hour))
	conns := []*Conn{y}
	if Await(t.Context(), conns, pongs{b, 2}) {
		t.Fatal("what was not sent has come")
	}
	x.Send(wire.Header{Address: 2, Op: wire.Pong}.Append(nil))
	b.until(t, "another frame", func() bool { return len(b.pongs) >= 2 })
	Woken(conns)
}

// A connection that is closed while it is being added is released by the loop alone, once the loop
// has it: its descriptor may be that of something else before.
func TestConnClosedWhileItIsAdded(t *testing.T) {
	l, err := NewLoop()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close(errors.New("the end of the test"))
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[1])
	h, why := &breaks{why: make(chan error, 1)}, errors.New("closed by a test")
	if _, err := l.Add(fds[0], wire.Guard{}, h, func(c *Conn) {
		c.Close(why)
		for l.mu.Lock(); len(l.kicked) > 0; l.mu.Lock() { // until the loop has looked
			l.mu.Unlock()
			time.Sleep(time.Millisecond)
		}
		l.mu.Unlock()
		if _, err := unix.FcntlInt(uintptr(fds[0]), unix.F_GETFD, 0); err != nil {
			t.Errorf("the descriptor of a connection that is being added: %v", err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-h.why:
		if !errors.Is(err, why) {
			t.Error(err)
		}
	case <-time.After(patience):
		t.Error("the connection is not released")
	}
}

// breaks is a handler that tells of the end.
type breaks struct{ why chan error }

func (h *breaks) Frame(*Conn, wire.Header, []byte) (Sink, error) { return Sink{}, nil }
func (h *breaks) End(*Conn, Sink, bool) error                    { return nil }
func (h *breaks) Broken(_ *Conn, err error)                      { h.why <- err }

func TestAwaitLeavesTheWorkToTheLoopUnderContention(t *testing.T) {
	in := newSink()
	x, y := couple(t, wire.Plain, newSink(), in)
	y.loop.until.Store(now() + int64(time.Hour))
	for id := range uint64(20) {
		src, dst := random(70<<10, id), make([]byte, 70<<10)
		in.add(id, dst)
		f := &transfer{id: id}
		f.Framer, f.Gate, f.N = f, new(gate.Gate), int64(len(src))
		f.Gate.Open(src)
		x.Queue(&f.Out)
		x.Flush()
		if conns := []*Conn{y}; !Await(t.Context(), conns, ended{in, id}) {
			in.until(t, "the transfer", func() bool { _, ok := in.codes[id]; return ok })
			Woken(conns)
		}
		if !bytes.Equal(src, dst) {
			t.Fatal("the bytes differ")
		}
	}
	if w, p := y.waiters.Load(), y.parked.Load(); w != 0 || p != 0 {
		t.Errorf("%d waiters attend, %d are parked", w, p)
	}
}

// chain is a handler that drops each frame, and sends the next one to the connection before.
type chain struct {
	from  int // the other end's descriptor
	frame []byte
	left  int // frames that are not sent
}

func (h *chain) Frame(*Conn, wire.Header, []byte) (_ Sink, err error) {
	if h.left > 0 {
		h.left--
		_, err = unix.Write(h.from, h.frame)
	}
	return Sink{}, err
}
func (h *chain) End(*Conn, Sink, bool) error { return nil }
func (h *chain) Broken(*Conn, error)         {}

// A waiter ends with its context also if frames come all the time, for others.
func TestWaitersGiveUpUnderTraffic(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	l, err := NewLoop()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close(errLoopClosed)
	h := &chain{from: fds[0], frame: wire.Bulk(nil, wire.Data, 0, 0, 0), left: 10 * seldom}
	c, err := l.Add(fds[1], wire.Guard{}, h, func(c *Conn) { c.waiters.Add(1) }) // the loop leaves it alone
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := unix.Write(fds[0], h.frame); err != nil {
		t.Fatal(err)
	}
	if poll(ctx, []*Conn{c}, pongs{newSink(), 1}) || c.Err() != nil {
		t.Errorf("what was not sent has come, or %v", c.Err())
	}
	switch h.left {
	case 0: // the frames have ended
		t.Error("a waiter does not end with its context")
	case 10 * seldom:
		t.Error("no frame has come")
	}
}

// Frames count in the backlog until all that were taken with them are sent.
func TestBacklogCountsWhatIsBeingSent(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fds[0])
	l, err := NewLoop()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close(errLoopClosed)
	c, err := l.Add(fds[1], wire.Guard{}, &chain{}, func(c *Conn) { c.waiters.Add(1) }) // the loop leaves it alone
	if err != nil {
		t.Fatal(err)
	}
	const n = 4 << 20 // more than the sockets take
	c.Later(make([]byte, n))
	c.Flush()
	if got := c.Backlog(); got != n {
		t.Errorf("the backlog is %d bytes while %d are being sent", got, n)
	}
	buf, late := make([]byte, 1<<20), time.Now().Add(patience)
	for c.Backlog() > 0 {
		if _, err := unix.Read(fds[0], buf); err != nil && err != unix.EAGAIN || time.Now().After(late) {
			t.Fatalf("a backlog of %d bytes, %v", c.Backlog(), err)
		}
		c.Poll()
	}
}
