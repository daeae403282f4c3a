package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/p2p/tcp"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// over returns the configuration of a transport on this machine.
func over(p rdma.Provider, ring int) Config {
	return Config{Provider: p, RingBytes: ring, TCP: tcp.Config{Interfaces: "127.0.0.1"}}
}

func TestConformance(t *testing.T) {
	for _, c := range []struct {
		name string
		soft soft.Config
		ring int
		ports
	}{
		{"default", soft.Config{Seed: 1}, 0, ports{}},
		{"small ring, late completions", soft.Config{Seed: 2, Late: 8}, minRing, ports{}},
		{"no inline data", soft.Config{Seed: 3, Inline: 1}, 64 << 10, ports{}},
		{"two devices", soft.Config{Seed: 5, Devices: 4, Late: 3}, minRing, twoEach},
		{"two devices, two queue pairs", soft.Config{Seed: 6, Devices: 4}, 0, ports{twoEach.devices, 2}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := soft.New(c.soft)
			t.Cleanup(f.Close)
			linktest.RunExcept(t, c.ports.open(f, c.ring), "Allocations")
		})
	}
}

// ports are what the ends of a link use.
type ports struct {
	devices    [2]string // in the form of rdma.ParseDevices; "": of one soft1, of the other soft0
	queuePairs int       // on each port
}

// twoEach are two devices at each end.
var twoEach = ports{devices: [2]string{"=soft1,soft3", "=soft0,soft2"}}

// open returns a function that makes a transport of one end and of the other in turn.
func (p ports) open(f rdma.Provider, ring int) func(testing.TB) p2p.Transport {
	if p.devices[0] == "" {
		p.devices = [2]string{"=soft1", "=soft0"}
	}
	n := 0
	return func(testing.TB) p2p.Transport {
		cfg := over(f, ring)
		cfg.Devices, cfg.QueuePairs = p.devices[n%2], p.queuePairs
		n++
		return New(cfg)
	}
}

// pair returns the ends of a link over f.
func pair(t *testing.T, f *soft.Fabric) (a, b *linktest.End) {
	t.Helper()
	return linktest.Pair(t, ports{}.open(f, minRing))
}

// inner returns the link behind an end.
func inner(e *linktest.End) *link {
	frames := e.Link.(framed).Frames
	return reflect.NewAt(reflect.TypeFor[p2p.Link](), reflect.ValueOf(frames).Elem().FieldByName("link").Addr().
		UnsafePointer()).Elem().Interface().(*link)
}

// ends waits until e fails, asleep, and checks why.
func ends(t *testing.T, e *linktest.End, want error, words ...string) {
	t.Helper()
	_, _, err := e.Wait()
	if !errors.Is(err, want) {
		t.Fatalf("%v, want %v", err, want)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%q does not say %q", err, w)
		}
	}
}

// raised waits until frames go over the rings in both directions.
func raised(t testing.TB, ends ...*linktest.End) {
	t.Helper()
	for late := time.Now().Add(linktest.Patience); ; runtime.Gosched() {
		ready := 0
		for _, e := range ends {
			if h, _, err := e.Recv(); h != nil || err != nil {
				t.Fatal(h, err)
			}
			l := inner(e)
			l.mu.Lock()
			if l.lane != nil && l.stageOf(l.lane) == up && l.tx != nil && l.rx != nil {
				ready++
			}
			l.mu.Unlock()
		}
		if ready == len(ends) {
			return
		}
		if time.Now().After(late) {
			t.Fatal("the link goes on without queue pairs")
		}
	}
}

// Close does not wait for a device that fails meanwhile.
func TestCloseWithFailingDevice(t *testing.T) {
	f := soft.New(soft.Config{Seed: 6})
	t.Cleanup(f.Close)
	a, b := pair(t, f)
	raised(t, a, b)
	l := inner(a)
	l.linger = time.Hour
	l.tx.theirs.key ^= 1 << 20
	h, p := linktest.Frame(0, 100, nil)
	if ok, err := a.Send(&h, p); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}

// Whatever a peer writes to the memory that it can reach ends the link, or is a frame.
func TestHostileMemory(t *testing.T) {
	f := soft.New(soft.Config{Seed: 5})
	t.Cleanup(f.Close)
	t.Run("commit word", func(t *testing.T) {
		a, b := pair(t, f)
		raised(t, a, b)
		n := inner(b).rx
		atomic.StoreUint64(word(n.in.data, uint64(len(n.in.data))), 77)
		ends(t, b, p2p.ErrProtocol, "commit word 0x4d", "rank 0")
	})
	t.Run("length", func(t *testing.T) {
		a, b := pair(t, f)
		raised(t, a, b)
		evil := producer{data: inner(b).rx.in.data}
		evil.compose(&p2p.Header{Len: 1 << 31}, nil)
		ends(t, b, p2p.ErrProtocol, "2147483648 bytes")
	})
	for position, before := range map[uint64]uint64{1 << 30: 0, 128: 256} {
		t.Run(fmt.Sprintf("position %d after %d", position, before), func(t *testing.T) {
			a, b := pair(t, f)
			raised(t, a, b)
			n := inner(a).tx
			n.out.freed, n.out.done, n.out.tail = before, before, before
			n.freed(positionImm(position))
			ends(t, a, p2p.ErrProtocol, "it has freed")
		})
	}
}

// The consumer reads what was composed, whatever the sizes and whenever it reads; with other bytes
// in its memory it accesses nothing outside.
func TestRingIsReadAsItWasComposed(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const n = minRing
	out, in := producer{data: make([]byte, n)}, consumer{data: make([]byte, n), seq: 1}
	type sent struct {
		h p2p.Header
		p []byte
	}
	var under []sent
	wraps, parts := 0, 0
	for i := range 20000 {
		size := r.IntN(maxFrame(n) + 1)
		if r.IntN(2) == 0 {
			size %= 300
		}
		out.freed, out.done = in.pos, out.tail
		if need := out.needs(uint64(size)); need <= out.room() && len(under) < 50 {
			s := sent{p2p.Header{Len: uint32(size), Seq: uint64(i), Off: r.Uint64()}, make([]byte, size)}
			for j := range s.p {
				s.p[j] = byte(r.Uint32() | 1)
			}
			if need > frameBytes(uint64(size))+unit {
				wraps++
			}
			for _, w := range out.compose(&s.h, s.p) {
				if w.clear {
					clear(in.data[w.at-wordLen : w.at])
				}
				if w.n == wordLen && len(under) == 0 { // the bytes of a commit word come in any order
					torn := false
					for _, k := range r.Perm(wordLen)[:r.IntN(wordLen)] {
						at := w.at + uint64(k)
						torn = torn || in.data[at] != out.data[at]
						in.data[at] = out.data[at]
					}
					whole := bytes.Equal(in.data[w.at:][:wordLen], out.data[w.at:][:wordLen])
					if ok, err := in.next(); err != nil || ok && !whole {
						t.Fatalf("frame %d: a part of a commit word is %v, %v", i, ok, err)
					} else if torn {
						parts++
						in.held = false
					}
				}
				copy(in.data[w.at:], out.data[w.at:w.at+w.n])
			}
			under = append(under, s)
		} else if len(under) == 0 {
			t.Fatalf("no room for %d bytes in an empty ring", size)
		}
		for range r.IntN(3) {
			ok, err := in.next()
			if err != nil || ok != (len(under) > 0) {
				t.Fatalf("frame %d: %v, %v with %d under way", i, ok, err, len(under))
			}
			if !ok {
				break
			}
			if in.hdr != under[0].h || !bytes.Equal(in.payload, under[0].p) {
				t.Fatalf("frame %d: %+v, want %+v", i, in.hdr, under[0].h)
			}
			in.release()
			under = under[1:]
		}
	}
	if wraps < 100 || parts < 100 {
		t.Errorf("%d skip marks, %d parts of commit words", wraps, parts)
	}
	for range 20000 {
		for i := 0; i < n; i += 8 {
			if r.IntN(8) == 0 {
				atomic.StoreUint64(word(in.data, uint64(i+8)), commitWord(in.seq, uint64(r.IntN(4))))
			}
		}
		if ok, err := in.next(); ok {
			in.release()
		} else if err != nil && !errors.Is(err, p2p.ErrProtocol) {
			t.Fatal(err)
		}
	}
}

// example returns a setup whose bytes are in TestSetupBytes.
func example() setup {
	p := path{link: rdma.RoCEv2, mtu: 1024, gid: rdma.GID{10: 0xff, 11: 0xff, 12: 10, 15: 1}, qp: 17, psn: 5, reads: 1}
	q := p
	q.qp, q.psn, q.reads, q.pair, q.lid = 18, 6, 16, 1, 0x102
	return setup{ring: minRing, key: 9, address: 1 << 20, frames: p, rails: []path{q, {}}}
}

// TestSetupBytes: the format has not changed.
func TestSetupBytes(t *testing.T) {
	want := "040f0200" + "09000000" + "0000100000000000" +
		"02020100" + "11000000" + "05000000" + "00000000" + "00000000000000000000ffff0a000001" +
		"02021001" + "12000000" + "06000000" + "02010000" + "00000000000000000000ffff0a000001" +
		strings.Repeat("00", 32)
	s := example()
	if got := fmt.Sprintf("%x", s.encode()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if got, err := decodeSetup(s.encode()); err != nil || !reflect.DeepEqual(got, s) {
		t.Errorf("%+v, %v, want %+v", got, err, s)
	}
}

// FuzzSetup: what is accepted is what encode writes.
func FuzzSetup(f *testing.F) {
	good := example()
	f.Add(good.encode())
	f.Add([]byte{})
	f.Add(make([]byte, setupHead+2*pathSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := decodeSetup(b)
		if err != nil {
			if !errors.Is(err, p2p.ErrProtocol) {
				t.Fatal(err)
			}
			return
		}
		if !bytes.Equal(s.encode(), b) {
			t.Fatalf("%x is accepted as %+v, which is %x", b, s, s.encode())
		}
	})
}

// Frames that are gathered are posted together: a call of the device for at least ten of them, in
// their order with those that are sent at once, which take a call each.
func TestPostsPerFrame(t *testing.T) {
	var posts atomic.Int64
	f := soft.New(soft.Config{Seed: 51, Faults: soft.Faults{Post: func(device string, _ uint32, i int) syscall.Errno {
		if device == "soft1" && i == 0 {
			posts.Add(1)
		}
		return 0
	}}})
	t.Cleanup(f.Close)
	a, b := pair(t, f)
	raised(t, a, b)
	took := 0
	// pass passes frames, each by send, and returns the posts meanwhile.
	pass := func(frames int, send func(i int, h *p2p.Header, payload []byte) (bool, error)) int64 {
		t.Helper()
		before := posts.Load()
		for i := range frames {
			h, payload := linktest.Frame(took+i, 64, nil)
			if ok, err := send(i, &h, payload); !ok || err != nil {
				t.Fatalf("frame %d: %t, %v", i, ok, err)
			}
		}
		if ok, err := a.Flush(); !ok || err != nil {
			t.Fatal(ok, err)
		}
		during := posts.Load() - before
		for late, end := time.Now().Add(linktest.Patience), took+frames; took < end; {
			h, payload, ok, err := b.Take()
			if ok && err == nil {
				err = linktest.Check(took, 64, h, payload)
				took++
			}
			if err != nil || time.Now().After(late) {
				t.Fatalf("%d frames have arrived: %v", took, err)
			}
		}
		return during
	}
	gather := a.Link.(p2p.Gatherer).Gather
	const frames = 40
	for range 20 {
		n := pass(frames, func(_ int, h *p2p.Header, b []byte) (bool, error) { return gather(h, b) })
		if n > frames/10 {
			t.Errorf("%d posts for %d frames that are gathered", n, frames)
		}
		n = pass(frames, func(_ int, h *p2p.Header, b []byte) (bool, error) { return a.Send(h, b) })
		if n < frames {
			t.Errorf("%d posts for %d frames that are sent at once", n, frames)
		}
		pass(frames, func(i int, h *p2p.Header, b []byte) (bool, error) {
			if i%7 == 3 {
				return a.Send(h, b)
			}
			return gather(h, b)
		})
	}
}

// What is gathered and not flushed arrives all the same when the lane is lost.
func TestGatheredFramesSurviveLanes(t *testing.T) {
	f := soft.New(soft.Config{Seed: 52})
	t.Cleanup(f.Close)
	a, b := pair(t, f)
	took := 0
	for range 4 {
		raised(t, a, b)
		for i := range 9 {
			h, payload := linktest.Frame(took+i, 100, nil)
			if ok, err := a.Link.(p2p.Gatherer).Gather(&h, payload); !ok || err != nil {
				t.Fatal(ok, err)
			}
		}
		l := inner(a)
		l.mu.Lock()
		l.dropLocked(l.lane, errors.New("by the test"))
		l.mu.Unlock()
		for late, end := time.Now().Add(linktest.Patience), took+9; took < end; {
			if _, err := a.Flush(); err != nil {
				t.Fatal(err)
			}
			h, _, err := a.Recv()
			if h != nil || err != nil {
				t.Fatal(h, err)
			}
			got, payload, ok, err := b.Take()
			if ok && err == nil {
				err = linktest.Check(took, 100, got, payload)
				took++
			}
			if err != nil || time.Now().After(late) {
				t.Fatalf("%d frames have arrived: %v", took, err)
			}
		}
	}
}
