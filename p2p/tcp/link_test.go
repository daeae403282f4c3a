package tcp

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"net"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/p2p"
)

func TestHeaderEncoding(t *testing.T) {
	h := p2p.Header{Kind: 1, Flags: 2, Service: 0x0403, Len: 0x08070605, Chan: 0x0c0b0a09, Ack: 0x100f0e0d,
		Seq: 0x1817161514131211, Call: 0x201f1e1d1c1b1a19, Count: 0x2827262524232221, Off: 0x302f2e2d2c2b2a29}
	var b [p2p.HeaderSize]byte
	h.Encode(&b)
	for i := range b {
		if want := byte(i + 1); b[i] != want {
			t.Fatalf("byte %d of %x is %d, want %d", i, b, b[i], want)
		}
	}
	var d p2p.Header
	if d.Decode(&b); d != h {
		t.Errorf("decoded as %+v", d)
	}
}

// wire returns the link over a connection under l.
func wire(l p2p.Link) *link { return l.(*framed).link }

// minBuffer is the smallest receive buffer that tests use: one that holds a payload of inline bytes
// with its header.
const minBuffer = 32 << 10

// rawPair returns a link and the descriptor of its far end.
func rawPair(t testing.TB, p *poller, maxFrame int) (*link, int) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	l, err := newLink("a link", fds[0], maxFrame, minBuffer, p)
	if err != nil {
		t.Fatal(err)
	}
	return l, fds[1]
}

func testPoller(t testing.TB) *poller {
	p, err := newPoller(time.Minute, func() {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.release)
	return p
}

// head returns what a frame with header(seq, n) begins with on the stream.
func head(seq uint64, n int) []byte {
	b := make([]byte, headerSpace)
	header(seq, n).Encode((*[p2p.HeaderSize]byte)(b))
	return b
}

// Payloads begin at multiples of 64 bytes of the stream if those before them end there.
func TestPayloadsKeepAlignment(t *testing.T) {
	l, far := rawPair(t, testPoller(t), MinFrame)
	defer l.Close()
	defer unix.Close(far)
	var want []byte
	for i, n := range []int{0, 64, copyLimit, copyLimit + 64, 0, 128} {
		if ok, err := l.Send(header(uint64(i), n), pattern(n, 1)); !ok || err != nil {
			t.Fatal(ok, err)
		}
		if want = append(want, head(uint64(i), n)...); len(want)%64 != 0 {
			t.Fatalf("payload %d begins at %d", i, len(want))
		}
		want = append(want, pattern(n, 1)...)
	}
	got := make([]byte, len(want)+1)
	if n, err := unix.Read(far, got); err != nil || !bytes.Equal(got[:n], want) {
		t.Errorf("%d bytes, %v; want the %d of the frames", n, err, len(want))
	}
}

// Any bytes in any pieces: what Recv and Fill return is what a simple reading of the whole says,
// and then the right error.
func FuzzStream(f *testing.F) {
	frame := func(n int) []byte {
		return append(head(uint64(n), n), pattern(n, 1)...)
	}
	f.Add([]byte(nil), uint64(0))
	f.Add(frame(0), uint64(1))
	f.Add(bytes.Join([][]byte{frame(10), frame(0), frame(2000), frame(30)}, nil), uint64(0x1234))
	f.Add(bytes.Join([][]byte{frame(20000), frame(40000), frame(5)}, nil), uint64(0xfedcba9876543210))
	f.Add(frame(40000)[:30000], uint64(99))
	f.Add(append(frame(7), bytes.Repeat([]byte{0xff}, 100)...), uint64(7))
	const maxFrame = 40960
	p := testPoller(f)
	f.Fuzz(func(t *testing.T, in []byte, seed uint64) {
		type want struct {
			h       p2p.Header
			payload []byte
		}
		var frames []want
		end := p2p.ErrPeerGone
		for rest := in; len(rest) >= headerSpace; {
			var h p2p.Header
			h.Decode((*[p2p.HeaderSize]byte)(rest))
			if h.Len > maxFrame {
				end = p2p.ErrProtocol
				break
			}
			if rest = rest[headerSpace:]; int(h.Len) > len(rest) {
				break
			}
			frames = append(frames, want{h, rest[:h.Len]})
			rest = rest[h.Len:]
		}
		random := func(n int) int { seed = seed*6364136223846793005 + 1442695040888963407; return int(seed>>33) % n }
		l, far := rawPair(t, p, maxFrame)
		defer l.Close()
		sent := 0
		feed := func() {
			if sent == len(in) {
				if far >= 0 {
					unix.Close(far)
					far = -1
				}
				return
			}
			if n, err := unix.Write(far, in[sent:min(len(in), sent+1+random(50000))]); err == nil {
				sent += n
			}
		}
		var err error
		for i := 0; ; i++ {
			var h *p2p.Header
			var payload []byte
			for h == nil && err == nil {
				if h, payload, err = l.Recv(); h == nil {
					feed()
				}
			}
			if err != nil {
				if i != len(frames) || !errors.Is(err, end) {
					t.Fatalf("after %d of %d frames: %v, want %v", i, len(frames), err, end)
				}
				break
			}
			got, whole := *h, payload != nil
			if i == len(frames) { // the last one is cut short, which only Fill can notice
				for dst := make([]byte, got.Len); err == nil; feed() {
					_, err = l.Fill(dst)
				}
				if !errors.Is(err, p2p.ErrPeerGone) {
					t.Fatalf("in a frame that is cut short: %v", err)
				}
				break
			}
			if !whole || random(3) == 0 {
				payload = make([]byte, got.Len)
				for k := 0; k < len(payload) && err == nil; {
					var n int
					if n, err = l.Fill(payload[k:min(len(payload), k+1+random(20000))]); n == 0 {
						feed()
					}
					if _, again, _ := l.Recv(); again != nil {
						t.Fatal("payload offered after Fill")
					}
					k += n
				}
			}
			if err != nil || !reflect.DeepEqual(got, frames[i].h) || !bytes.Equal(payload, frames[i].payload) {
				t.Fatalf("frame %d: %+v, %v, want %+v", i, got, err, frames[i].h)
			}
			l.Release()
		}
		if far >= 0 {
			unix.Close(far)
		}
		if l.Err() == nil || !l.Arm() {
			t.Errorf("after the end: Err is %v, and Arm lets sleep", l.Err())
		}
	})
}

// Frames of all sizes stay in order and whole, under back-pressure, both ends asleep now and then.
func TestFramesOfAllSizes(t *testing.T) {
	a, b, na, nb := pair(t, Config{MaxFrame: 512 << 10})
	sizes := []int{0, 1, copyLimit, copyLimit + 1, inline, 512 << 10, 100, 200 << 10, 512 << 10, 16 << 10,
		inline + 1}
	const rounds = 12
	failed := make(chan error, 1)
	go func() {
		for i := range rounds * len(sizes) {
			n := sizes[i%len(sizes)]
			for ok := false; !ok; {
				var err error
				if ok, err = a.Send(header(uint64(i), n), pattern(n, byte(i))); err != nil {
					failed <- err
					return
				}
				if !ok && !a.Arm() {
					<-na.woken
				}
			}
		}
		for ok := false; !ok; {
			if ok, _ = a.Flush(); !ok && !a.Arm() {
				<-na.woken
			}
		}
		failed <- nil
	}()
	for i := range rounds * len(sizes) {
		n := sizes[i%len(sizes)]
		for {
			if h, _, err := b.Recv(); err != nil {
				t.Fatal(err)
			} else if h != nil {
				break
			}
			if !b.Arm() {
				<-nb.woken
			}
		}
		h, p, err := take(b, 100_000)
		if err != nil || h != *header(uint64(i), n) || !bytes.Equal(p, pattern(n, byte(i))) {
			t.Fatalf("frame %d: %+v, %v", i, h, err)
		}
	}
	if err := <-failed; err != nil {
		t.Fatal(err)
	}
}

// fill sends until the peer's and the kernel's buffers are full, and returns how many frames were
// taken.
func fill(t testing.TB, l p2p.Link, n int) int {
	t.Helper()
	p := pattern(n, 0)
	for i := 0; ; i++ {
		ok, err := l.Send(header(uint64(i), n), p)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			return i
		}
	}
}

// Close with frames under way in both directions neither loses what was flushed nor hangs.
func TestCloseWithUnreadData(t *testing.T) {
	a, b, _, _ := pair(t, Config{})
	const n = 100
	for i := range n {
		for _, l := range []p2p.Link{a, b} {
			if ok, err := l.Send(header(uint64(i), 1000), pattern(1000, byte(i))); !ok || err != nil {
				t.Fatal(ok, err)
			}
			if ok, err := l.Flush(); !ok || err != nil {
				t.Fatal(ok, err)
			}
		}
	}
	a.Close() // a has not read anything: closing its socket at once would reset the connection
	for i := range n {
		if h, p, err := take(b, 1000); err != nil || h.Seq != uint64(i) || !bytes.Equal(p, pattern(1000, byte(i))) {
			t.Fatalf("frame %d: %+v, %v", i, h, err)
		}
	}
	if _, _, err := b.Recv(); !errors.Is(err, p2p.ErrPeerGone) {
		t.Errorf("after the last frame: %v", err)
	}
}

// Close is over in bounded time although the peer takes nothing.
func TestCloseAgainstFullPeer(t *testing.T) {
	a, _, _, _ := tightPair(t, 32<<10)
	fill(t, a, 10000)
	done := make(chan struct{})
	go func() { a.Close(); close(done) }()
	select {
	case <-done:
	case <-time.After(patience):
		t.Fatal("Close hangs")
	}
}

func TestErrorsNameThePeer(t *testing.T) {
	a, b, na, nb := pair(t, Config{})
	at := wire(b).name[strings.LastIndex(wire(b).name, "at ")+3:]
	b.Send(header(0, 0), nil)
	a.Close()
	var err error
	until(t, "the end of the link", func() bool { _, _, err = b.Recv(); return err != nil })
	for _, part := range []string{na.self.String(), at, "closed the connection at the end of a frame"} {
		if !errors.Is(err, p2p.ErrPeerGone) || !strings.Contains(err.Error(), part) {
			t.Errorf("%v: does not say %q", err, part)
		}
	}
	if ok, err2 := b.Send(header(1, 0), nil); ok || err2 == nil || err2.Error() != err.Error() {
		t.Errorf("Send afterwards: %v, %v", ok, err2)
	}
	if _, _, err := a.Recv(); !errors.Is(err, p2p.ErrClosed) || !strings.Contains(err.Error(), nb.self.String()) {
		t.Errorf("after Close on this side: %v", err)
	}
}

func TestProtocolViolationsEndLink(t *testing.T) {
	p := testPoller(t)
	l, far := rawPair(t, p, MinFrame)
	defer l.Close()
	defer unix.Close(far)
	for _, c := range []struct{ announced, given int }{{1, 0}, {0, 1}, {MinFrame + 1, MinFrame + 1}} {
		if ok, err := l.Send(header(0, c.announced), make([]byte, c.given)); ok || err == nil || l.Err() != nil {
			t.Errorf("Send of %+v: %v, %v, link %v", c, ok, err, l.Err())
		}
	}
	unix.Write(far, append(head(0, 100), make([]byte, 99)...))
	if h, payload, err := l.Recv(); h == nil || payload != nil || err != nil {
		t.Fatal(h, payload, err)
	}
	func() {
		defer func() {
			if recover() == nil {
				t.Error("Release of a frame that is not there whole: the next bytes would be read as a header")
			}
		}()
		l.Release()
	}()
	unix.Write(far, make([]byte, 1))
	if _, payload, err := l.Recv(); len(payload) != 100 || err != nil {
		t.Fatalf("%d bytes, %v", len(payload), err)
	}
	l.Release()
	b := head(0, 0)
	binary.LittleEndian.PutUint32(b[4:], 1<<32-1)
	unix.Write(far, b)
	for range 2 {
		if _, _, err := l.Recv(); !errors.Is(err, p2p.ErrProtocol) || !strings.Contains(err.Error(), "4294967295") {
			t.Errorf("a frame of 4 GiB: %v", err)
		}
	}
	if _, err := l.Send(header(0, 0), nil); !errors.Is(err, p2p.ErrProtocol) {
		t.Errorf("Send afterwards: %v", err)
	}
}

// A refused Send wakes its sender once there is room, and only a refused one does.
func TestRefusedSendIsWokenByRoom(t *testing.T) {
	a, b, na, _ := tightPair(t, 32<<10)
	if a.Arm() {
		t.Fatal("Arm on an idle link")
	}
	sent := fill(t, a, 5000)
	before := na.wakes.Load() // the wake may come as soon as Arm has asked for it
	if a.Arm() {
		t.Fatal("Arm on a link that just refused")
	}
	for ; sent > 1 && na.wakes.Load() == before; sent-- { // the last one needs a Flush
		if _, _, err := take(b, 5000); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "a wake", func() bool { return na.wakes.Load() > before })
	until(t, "room", func() bool {
		ok, err := a.Send(header(0, 0), nil)
		if err != nil {
			t.Fatal(err)
		}
		return ok
	})
	if ok, err := a.Flush(); err != nil {
		t.Fatal(ok, err)
	}
	until(t, "an idle link", func() bool { // the kernel may still report what was asked before
		ok, _ := a.Flush()
		before = na.wakes.Load()
		return ok && !a.Arm()
	})
}

// A host that answers is not taken for gone because its process takes nothing: its window is
// closed, and the kernel's questions are answered.
func TestStoppedPeerIsNotGone(t *testing.T) {
	a, b, _, _ := tightPair(t, 32<<10)
	fill(t, a, 10000)
	s := &wire(a).stream
	probed := false
	second, end := time.Now().Add(time.Second), time.Now().Add(patience)
	for ; time.Now().Before(end) && (!probed || time.Now().Before(second)); time.Sleep(20 * time.Millisecond) {
		s.checkHost(100 * time.Millisecond)
		i, err := unix.GetsockoptTCPInfo(s.fd, unix.SOL_TCP, unix.TCP_INFO)
		probed = probed || err == nil && i.Backoff > 0
	}
	if !probed {
		t.Fatal("the kernel did not probe the closed window: this test shows nothing")
	}
	if err := a.Err(); err != nil {
		t.Error(err)
	}
	if _, _, err := take(b, 10000); err != nil {
		t.Error(err)
	}
}

func TestSocketOptions(t *testing.T) {
	a, b, _, _ := pair(t, Config{PeerTimeout: 12 * time.Second})
	for _, l := range []p2p.Link{a, b} {
		for what, o := range map[string]struct{ level, opt, want int }{
			"TCP_NODELAY":   {unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
			"SO_KEEPALIVE":  {unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
			"TCP_KEEPIDLE":  {unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 4},
			"TCP_KEEPINTVL": {unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 2},
			"TCP_KEEPCNT":   {unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 4},
		} {
			if v, err := unix.GetsockoptInt(wire(l).stream.fd, o.level, o.opt); err != nil || v != o.want {
				t.Errorf("%s is %d, %v, want %d", what, v, err, o.want)
			}
		}
	}
}

// TestLongTimeouts: a timeout beyond what the system's options can say is no error.
func TestLongTimeouts(t *testing.T) {
	for _, d := range []time.Duration{28 * time.Hour, math.MaxInt64} {
		pair(t, Config{PeerTimeout: d})
	}
}

// raw connects to a node without the transport's help.
func raw(t testing.TB, n *node) net.Conn {
	t.Helper()
	e := must(decodeEndpoint(n.endpoint))
	c, err := net.Dial("tcp", e.at[0].String())
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(patience))
	t.Cleanup(func() { c.Close() })
	return c
}

// A Send that was refused only because of what had to be flushed first may get further after Flush,
// with no event to wait for.
func TestArmAfterFlush(t *testing.T) {
	a, b, _, _ := tightPair(t, 32<<10)
	sent := fill(t, a, 5000)
	for ; sent > 0; sent-- {
		for flushed := false; ; {
			h, p, err := b.Recv()
			if err != nil {
				t.Fatal(err)
			}
			if h != nil && (p != nil || flushed) {
				break
			}
			if flushed, err = a.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := take(b, 5000); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "room", func() bool { ok, _ := a.Flush(); return ok && wire(a).stream.room() })
	if !a.Arm() {
		t.Error("Arm lets sleep although Send has room")
	}
}
