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
	"tutti/rdma/rdmatest"
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
		{"two devices that delay writes", soft.Config{Seed: 7, Devices: 4,
			Delayed: []string{"soft0", "soft1", "soft2", "soft3"}}, minRing, twoEach},
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

// complete has the device of a's peer complete a frame, whatever is in the ring.
func complete(a *linktest.End) {
	l := inner(a)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.tx.request(rdma.WriteImm, 0, 0).Imm = immFrame
	l.tx.post()
}

// A frame is taken when the device has completed its receive, whatever is in the ring before.
func TestFramesAreTakenWithTheirCompletions(t *testing.T) {
	f := soft.New(soft.Config{Seed: 5})
	t.Cleanup(f.Close)
	a, b := pair(t, f)
	raised(t, a, b)
	early := producer{data: inner(b).rx.in.data}
	early.compose(&p2p.Header{Len: 1 << 31}, nil) // no frame of a
	for range 2 * idlePolls {
		if h, _, err := b.Recv(); h != nil || err != nil {
			t.Fatalf("without a completion %+v is taken: %v", h, err)
		}
	}
	h, p := linktest.Frame(0, 100, nil)
	if ok, err := a.Send(&h, p); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if err := b.Expect(0, 100); err != nil {
		t.Error(err)
	}
}

// receiver counts calls of PostRecv, and the receives.
type receiver struct {
	rdma.QP
	calls, posted int
}

func (r *receiver) PostRecv(list []rdma.RecvRequest) (int, error) {
	n, err := r.QP.PostRecv(list)
	r.calls++
	r.posted += n
	return n, err
}

// Receives are posted again in batches, also if frames come one by one, and not late.
func TestReceivesArePostedInBatches(t *testing.T) {
	f := soft.New(soft.Config{Seed: 6})
	t.Cleanup(f.Close)
	a, b := pair(t, f)
	raised(t, a, b)
	n := inner(b).rx
	to := &receiver{QP: n.qp}
	n.qp = to
	const frames = 1000
	for i := range frames {
		h, p := linktest.Frame(i, 8, nil)
		if ok, err := a.Send(&h, p); !ok || err != nil {
			t.Fatal(ok, err)
		}
		if err := b.Expect(i, 8); err != nil {
			t.Fatal(err)
		}
		if missing := i + 1 - to.posted; missing >= batch {
			t.Fatalf("%d receives are missing after frame %d", missing, i)
		}
	}
	if to.calls > frames/batch+1 {
		t.Errorf("%d calls for the receives of %d frames, at most %d in batches of %d", to.calls, frames,
			frames/batch+1, batch)
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
		complete(a)
		ends(t, b, p2p.ErrProtocol, "commit word 0x4d", "rank 0")
	})
	t.Run("length", func(t *testing.T) {
		a, b := pair(t, f)
		raised(t, a, b)
		evil := producer{data: inner(b).rx.in.data}
		evil.compose(&p2p.Header{Len: 1 << 31}, nil)
		complete(a)
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

// The consumer reads what was composed, whatever the sizes, whenever it reads, and in whatever
// order the frames under way were placed; with other bytes in its memory it accesses nothing
// outside.
func TestRingIsReadAsItWasComposed(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const n = minRing
	out, in := producer{data: make([]byte, n)}, consumer{data: make([]byte, n), seq: 1}
	type sent struct {
		h p2p.Header
		p []byte
	}
	var under []sent
	var writes []span // not yet placed
	wraps := 0
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
			if need > frameBytes(uint64(size)) {
				wraps++
			}
			writes = append(writes, out.compose(&s.h, s.p)...)
			under = append(under, s)
		} else if len(under) == 0 {
			t.Fatalf("no room for %d bytes in an empty ring", size)
		}
		take := min(r.IntN(3), len(under))
		if take > 0 {
			for _, k := range r.Perm(len(writes)) {
				w := writes[k]
				copy(in.data[w.at:], out.data[w.at:w.at+w.n])
			}
			writes = writes[:0]
		}
		for range take {
			if err := in.next(); err != nil {
				t.Fatalf("frame %d, with %d under way: %v", i, len(under), err)
			}
			if in.hdr != under[0].h || !bytes.Equal(in.payload, under[0].p) {
				t.Fatalf("frame %d: %+v, want %+v", i, in.hdr, under[0].h)
			}
			in.release()
			under = under[1:]
		}
		if len(writes) == 0 && in.begun() != (len(under) > 0) {
			t.Fatalf("frame %d: with %d under way begun is %v", i, len(under), in.begun())
		}
	}
	if wraps < 100 {
		t.Errorf("%d skip marks", wraps)
	}
	for range 20000 {
		for i := 0; i < n; i += 8 {
			if r.IntN(8) == 0 {
				atomic.StoreUint64(word(in.data, uint64(i+8)), commitWord(in.seq, uint64(r.IntN(4))))
			}
		}
		if err := in.next(); err == nil {
			in.release()
		} else if !errors.Is(err, p2p.ErrProtocol) {
			t.Fatal(err)
		}
	}
}

// example returns a setup whose bytes are in TestSetupBytes.
func example() setup {
	p := path{link: rdma.RoCEv2, mtu: 1024, gid: rdma.GID{10: 0xff, 11: 0xff, 12: 10, 15: 1}, qp: 17, psn: 5, reads: 1}
	q := p
	q.qp, q.psn, q.reads, q.pair, q.lid, q.grh = 18, 6, 16, 1, 0x102, true
	return setup{ring: minRing, key: 9, address: 1 << 20, frames: p, rails: []path{q, {}}}
}

// TestSetupBytes: the format has not changed.
func TestSetupBytes(t *testing.T) {
	want := "060f0200" + "09000000" + "0000100000000000" +
		"02020100" + "11000000" + "05000000" + "00000000" + "00000000000000000000ffff0a000001" +
		"02021001" + "12000000" + "06000000" + "02010100" + "00000000000000000000ffff0a000001" +
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

// Objects of a link can be made if a device refuses inline data with any errno, and if one of two
// ports, the first, refuses all queue pairs.
func TestCheckWithDevicesThatRefuse(t *testing.T) {
	for name, c := range map[string]struct {
		devices int
		refuses func(device string, call int) bool
	}{
		"inline data":     {1, func(_ string, call int) bool { return call == 1 }},
		"all queue pairs": {2, func(device string, _ int) bool { return device == "soft0" }},
	} {
		t.Run(name, func(t *testing.T) {
			made := 0
			call := func(device, call string) syscall.Errno {
				if call == "make a queue pair" {
					if made++; c.refuses(device, made) {
						return syscall.EIO
					}
				}
				return 0
			}
			f := soft.New(soft.Config{Devices: c.devices, Faults: soft.Faults{Call: call}})
			t.Cleanup(f.Close)
			if err := Check(over(f, 0)); err != nil {
				t.Error(err)
			}
			if qps, cqs, mrs := f.Objects(); qps+cqs+mrs > 0 {
				t.Errorf("%d queue pairs, %d completion queues and %d memory regions are left", qps, cqs, mrs)
			}
		})
	}
}

// A port that needs packets with an address gets them from both ends of its links.
func TestPortsThatNeedAddresses(t *testing.T) {
	f := soft.New(soft.Config{Seed: 13})
	t.Cleanup(f.Close)
	a, b := linktest.Pair(t, ports{}.open(rdmatest.InfiniBand(f, "soft0"), minRing))
	raised(t, a, b)
}

// The settings of the network are those of all queue pairs, and bounds of time follow that of a
// packet.
func TestSettingsOfTheNetwork(t *testing.T) {
	f := soft.New(soft.Config{Seed: 14})
	t.Cleanup(f.Close)
	want := rdma.Settings{TrafficClass: 106, ServiceLevel: 3, PKey: 2, Timeout: 20}
	seen, made, connected := rdmatest.WithSettings(t, f, want)
	cfg := over(seen, minRing)
	cfg.Settings = want
	a, b := linktest.Pair(t, func(testing.TB) p2p.Transport { return New(cfg) })
	raised(t, a, b)
	if made.Load() < 4 || connected.Load() < 4 {
		t.Errorf("%d queue pairs, %d connected: want those of frames and of data at both ends", made.Load(),
			connected.Load())
	}
	l := inner(a)
	cfg.Settings.ServiceLevel = 16
	if err := Check(cfg); err == nil || !strings.Contains(err.Error(), "ServiceLevel 16") {
		t.Errorf("Check with service level 16: %v", err)
	}
	const repeats = (retries + 1) * (4096 * time.Nanosecond << 20)
	if l.linger < repeats || l.lane.late <= repeats {
		t.Errorf("Close lingers for %v, and a request is late after %v: a device repeats packets for %v", l.linger,
			l.lane.late, repeats)
	}
}
