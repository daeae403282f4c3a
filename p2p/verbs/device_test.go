//go:build cgo && linux

package verbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/internal/leaktest"
	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/rdma"
	"tutti/rdma/rdmatest"
	"tutti/rdma/verbs"
)

func TestMain(m *testing.M) {
	linktest.PeerMain(func(string) (p2p.Transport, error) {
		p, err := verbs.Load()
		if err != nil {
			return nil, err
		}
		return New(over(p, 0)), nil
	}, map[string]linktest.Role{"putter": putter})
	leaktest.Main(m)
}

// putter exposes memory to the process that has sent it the description of its own, and puts to
// that and gets from it until it is killed.
func putter(s *linktest.Side) error {
	_, b, err := s.Wait()
	if err != nil {
		return err
	}
	var to mem.Remote
	if err := to.UnmarshalBinary(b); err != nil {
		return err
	}
	r := mem.NewRegion(1, mem.Host(make([]byte, to.Len), mem.Anywhere), false, false, nil)
	x := &mem.Remote{ID: 1, Generation: 1, Len: to.Len, Rights: mem.Read | mem.Write, Loc: mem.Anywhere}
	key, err := s.Node.T.(p2p.Exposer).Expose(r, x)
	if err != nil {
		return err
	}
	x.Keys = []mem.Key{{Path: Name, Blob: key}}
	if b, err = x.MarshalBinary(); err != nil {
		return err
	}
	if err := s.Put(&p2p.Header{Len: uint32(len(b))}, b); err != nil {
		return err
	}
	local := make([]byte, to.Len)
	for i := 1; err == nil; i++ {
		for k := range local {
			local[k] = byte(i)
		}
		if err = s.Await(s.PutTo(local, &to, 0, p2p.Signal{})); err == nil {
			err = s.Await(s.GetFrom(local, &to, 0))
		}
	}
	return err
}

// TestDeviceConformance: the suite over a real provider, with that of allocations.
func TestDeviceConformance(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	linktest.Run(t, func(testing.TB) p2p.Transport { return New(over(p, 0)) })
}

// TestDeviceKilledPeers: the same with processes that are killed.
func TestDeviceKilledPeers(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	linktest.RunKilled(t, func(testing.TB) p2p.Transport { return New(over(p, 0)) })
}

// TestDeviceKilledPeer: a process that is killed with writes under way ends its links, whether the
// other end polls or sleeps, and leaves the device usable.
func TestDeviceKilledPeer(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	n := linktest.Listen(t, New(over(p, 0)), linktest.NewHost(0))
	for _, asleep := range []bool{false, true} {
		peer := linktest.StartPeer(t, n, "echo")
		var err error
		e := peer.End
		for i := 0; err == nil; i++ {
			if i == 100 {
				peer.Proc.Signal(unix.SIGKILL)
			}
			if i < 100 || !asleep {
				h, b := linktest.Frame(i, 1000, nil)
				err = e.Put(&h, b)
			}
			if err == nil && i < 100 {
				_, _, err = e.Wait()
			}
			for err == nil && i >= 100 {
				var ok bool
				if _, _, ok, err = e.Take(); !ok && err == nil {
					if asleep {
						err = e.Nap()
						continue
					}
					break
				}
			}
		}
		if !strings.Contains(err.Error(), "rank 1") {
			t.Errorf("asleep %v: %v", asleep, err)
		}
		ends(t, e, p2p.ErrPeerGone)
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

// deviceSides returns the ends of a link over a real device, for tests of remote memory.
func deviceSides(tb testing.TB) (x, y *linktest.Side) {
	tb.Helper()
	p, _ := rdmatest.Devices(tb, verbs.Load)
	x, y = linktest.Sides(tb, func(testing.TB) p2p.Transport { return New(over(p, 0)) })
	raised(tb, x.End, y.End)
	return x, y
}

// secondDevice makes the device rxe1 on the network device d1, until the end of the test. It
// returns ports of both devices, with so many queue pairs each.
func secondDevice(tb testing.TB, p *verbs.Provider, queuePairs int) ports {
	tb.Helper()
	rdmatest.Command(tb, "ip", "link", "add", "d1", "type", "dummy")
	tb.Cleanup(func() { rdmatest.Command(tb, "ip", "link", "delete", "d1") })
	rdmatest.Command(tb, "ip", "link", "set", "d1", "mtu", "4500", "up")
	rdmatest.Command(tb, "ip", "addr", "add", "10.97.0.1/24", "dev", "d1")
	rdmatest.Command(tb, "rdma", "link", "add", "rxe1", "type", "rxe", "netdev", "d1")
	tb.Cleanup(func() { rdmatest.Command(tb, "rdma", "link", "delete", "rxe1") })
	return ports{[2]string{"=rxe0,rxe1", "=rxe0,rxe1"}, queuePairs}
}

// TestDeviceRails: data goes over two devices, with two queue pairs each. When queue pairs fail, or
// a network device goes down, puts and gets have their results, over the other device if need be.
// When it is back both are used again.
func TestDeviceRails(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	x, y := linktest.Sides(t, secondDevice(t, p, 2).open(p, 0))
	proven(t, 4, x.End, y.End)
	const size = 4 << 20
	to := y.Expose(t, y.Alloc(t, size), 0, size, mem.Write)
	shares(t, x, to, size, "rxe0", "rxe1")
	moveBothWays(t, x, y)
	survive(t, x, y, 8, 2, 300_000, func(i int) {
		l := inner([]*linktest.Side{x, y}[i%2].End)
		l.mu.Lock()
		defer l.mu.Unlock()
		if n := l.lane; n != nil && l.stageOf(n) >= probing {
			if err := n.bulk.rails[i].qp.Fail(); err != nil {
				t.Error(err)
			}
		}
	})
	for i, network := range []string{"d0", "d1"} { // frames go over rxe0
		put, _ := bytesMoved(x)
		rdmatest.Command(t, "ip", "link", "set", network, "down")
		down := time.Now()
		for {
			place(t, x, pattern(size, i), to)
			now, _ := bytesMoved(x)
			if now == put+size {
				break
			}
			if put = now; time.Since(down) > linktest.Patience {
				t.Fatalf("%s is down, and the other device is not used", network)
			}
		}
		moved := time.Since(down)
		shares(t, x, to, size, []string{"rxe1", "rxe0"}[i])
		rdmatest.Command(t, "ip", "link", "set", network, "up")
		up := time.Now()
		proven(t, 4, x.End, y.End)
		t.Logf("%s: a put of %d MiB had gone over the other device %v after it was down; both were used %v after it "+
			"was up", network, size>>20, moved.Round(time.Millisecond), time.Since(up).Round(time.Millisecond))
		shares(t, x, to, size, "rxe0", "rxe1")
	}
	survive(t, x, y, 12, 3, 300_000, func(i int) {
		rdmatest.Command(t, "ip", "link", "set", "d1", []string{"down", "up"}[i%2])
	})
	proven(t, 4, x.End, y.End)
}

// BenchmarkDeviceRails measures puts of 1 MiB, 8 at a time, over one and two devices with one and
// two queue pairs each.
func BenchmarkDeviceRails(b *testing.B) {
	p, _ := rdmatest.Devices(b, verbs.Load)
	both := secondDevice(b, p, 1)
	const size = 1 << 20
	for i := range 4 {
		c := both
		if c.queuePairs = 1 + i%2; i < 2 {
			c.devices = [2]string{"=rxe0", "=rxe0"}
		}
		b.Run(fmt.Sprintf("%d devices/%d queue pairs", 1+i/2, c.queuePairs), func(b *testing.B) {
			x, y := linktest.Sides(b, c.open(p, 0))
			proven(b, (1+i/2)*c.queuePairs, x.End, y.End)
			to := y.Expose(b, y.Alloc(b, size), 0, size, mem.Write)
			local := make([]byte, size)
			b.SetBytes(8 * size)
			var times []time.Duration
			for b.Loop() {
				began := time.Now()
				clear(x.Ended)
				var ids [8]uint64
				for k := range ids {
					id, err := x.PutTo(local, to, 0, p2p.Signal{})
					if err != nil {
						b.Fatal(err)
					}
					ids[k] = id
				}
				for _, id := range ids {
					if err := x.Await(id, nil); err != nil {
						b.Fatal(err)
					}
				}
				times = append(times, time.Since(began))
			}
			slices.Sort(times)
			b.ReportMetric(8*size/times[len(times)/2].Seconds()/1e6, "median-MB/s")
		})
	}
}

// TestDeviceData: long puts and gets go by RDMA, without frames and without the target's help.
func TestDeviceData(t *testing.T) {
	x, y := deviceSides(t)
	moveBothWays(t, x, y)
	moveBothWays(t, y, x)
}

// TestDeviceDataReturns: puts and gets have their results when queue pairs go to the error state,
// and when the network device goes down and comes back; afterwards they go by RDMA again.
func TestDeviceDataReturns(t *testing.T) {
	x, y := deviceSides(t)
	survive(t, x, y, 24, 4, 300_000, func(i int) {
		l := inner([]*linktest.Side{x, y}[i%2].End)
		l.mu.Lock()
		defer l.mu.Unlock()
		if n := l.lane; n != nil && l.stageOf(n) >= probing {
			if err := n.bulk.rails[i%len(n.bulk.rails)].qp.Fail(); err != nil {
				t.Error(err)
			}
		}
	})
	survive(t, x, y, 12, 3, 300_000, func(i int) {
		state := []string{"down", "up"}[i%2]
		rdmatest.Command(t, "ip", "link", "set", "d0", state)
	})
}

// TestDevicePrograms: random programs over a real device, whose queue pairs fail.
func TestDevicePrograms(t *testing.T) {
	x, y := deviceSides(t)
	p := &program{t: t, r: rand.New(rand.NewPCG(35, 7)), sides: [2]*linktest.Side{x, y}}
	p.run(3000, 300, func() {
		raised(t, x.End, y.End)
		l := inner(p.sides[p.r.IntN(2)].End)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.pause = minPause
		if n := l.lane; n != nil && l.stageOf(n) >= probing {
			if err := []rdma.QP{n.qp, n.bulk.rails[0].qp}[p.r.IntN(2)].Fail(); err != nil {
				t.Error(err)
			}
		}
	})
}

// TestDeviceKilledPutter: a process that is killed while it puts and gets leaves no write behind.
// Withdraw does not wait for it, nothing changes the memory afterwards, and what was under way to
// it ends.
func TestDeviceKilledPutter(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	n := linktest.Listen(t, New(over(p, 0)), linktest.NewHost(0))
	const size = 4 << 20
	for round := range 5 {
		peer := linktest.StartPeer(t, n, "putter")
		x := peer.Side
		r := x.Alloc(t, size)
		to := x.Expose(t, r, 0, size, mem.Read|mem.Write)
		b, err := to.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		if err := x.End.Put(&p2p.Header{Len: uint32(len(b))}, b); err != nil {
			t.Fatal(err)
		}
		_, b, err = x.End.Wait() // its memory
		if err != nil {
			t.Fatal(err)
		}
		var theirs mem.Remote
		if err := theirs.UnmarshalBinary(b); err != nil {
			t.Fatal(err)
		}
		local := bytes.Repeat([]byte{1}, size)
		put, err := x.PutTo(local, &theirs, 0, p2p.Signal{})
		for late := time.Now().Add(linktest.Patience); ; {
			if err != nil {
				t.Fatal(err)
			}
			if _, done := x.Ended[put]; done {
				put, err = x.PutTo(local, &theirs, 0, p2p.Signal{})
			}
			err = errors.Join(err, x.Turn())
			if moved, _ := bytesMoved(x); moved >= uint64(round+1)*3*size && r.Bytes()[size-1] != 0 {
				break // both put
			}
			if time.Now().After(late) {
				t.Fatal("nothing was put")
			}
		}
		peer.Proc.Signal(unix.SIGKILL)
		began := time.Now()
		if err := x.Withdraw(to); err != nil {
			t.Fatal(err)
		}
		took := time.Since(began)
		before := bytes.Clone(r.Bytes())
		get, err := x.GetFrom(make([]byte, size), &theirs, 0)
		for _, id := range []uint64{put, get} {
			for late := time.Now().Add(linktest.Patience); err == nil; {
				if c, ok := x.Ended[id]; ok {
					if !errors.Is(c.Err, p2p.ErrPeerGone) && c.Err != nil {
						t.Errorf("an operation on a process that was killed: %v", c.Err)
					}
					break
				}
				if e := x.Turn(); e != nil && !errors.Is(e, p2p.ErrPeerGone) {
					t.Fatal(e)
				}
				if time.Now().After(late) {
					t.Fatal("an operation on a process that was killed does not end")
				}
			}
		}
		if err := x.Close(); err != nil {
			t.Error(err)
		}
		if !bytes.Equal(before, r.Bytes()) {
			t.Error("memory has changed after Withdraw")
		}
		t.Logf("Withdraw took %v", took.Round(time.Millisecond))
	}
}

// BenchmarkDeviceData measures puts and gets, moved by the device from memory that it knows and
// from other memory, and in frames, one after another and 8 at a time. Both ends are used by one
// goroutine. The median is of the times of single rounds: the mean has the pauses of a lossy
// network.
func BenchmarkDeviceData(b *testing.B) {
	x, y := deviceSides(b)
	const most = 1 << 20
	r := y.Alloc(b, most)
	to := y.Expose(b, r, 0, most, mem.Read|mem.Write)
	l := inner(x.End)
	kinds, ways := []string{"put", "get"}, []string{"registered", "moved", "frames"}
	known := x.Alloc(b, most)
	x.Node.T.(p2p.Registrar).Register(known)
	for _, n := range []int{4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, most} {
		for i := range 12 {
			put, way, at := i&1 == 0, ways[i>>1%3], 1+i/6*7
			b.Run(fmt.Sprintf("%s/%dK/%d/%s", kinds[i&1], n>>10, at, way), func(b *testing.B) {
				local := make([]byte, n)
				if way == "registered" {
					local = known.Bytes()[:n]
				}
				if l.least = 0; way == "frames" {
					l.least = most + 1
				}
				b.SetBytes(int64(at * n))
				var times []time.Duration
				var ids [8]uint64
				for b.Loop() {
					began := time.Now()
					clear(x.Ended)
					for k := range ids[:at] {
						var err error
						if put {
							ids[k], err = x.PutTo(local, to, 0, p2p.Signal{})
						} else {
							ids[k], err = x.GetFrom(local, to, 0)
						}
						if err != nil {
							b.Fatal(err)
						}
					}
					for _, id := range ids[:at] {
						if err := x.Await(id, nil); err != nil {
							b.Fatal(err)
						}
					}
					times = append(times, time.Since(began))
				}
				slices.Sort(times)
				median := times[len(times)/2]
				b.ReportMetric(float64(median.Microseconds()), "median-us")
				b.ReportMetric(float64(at*n)/median.Seconds()/1e6, "median-MB/s")
			})
		}
	}
}

// TestDeviceReturns: frames arrive once and in order when queue pairs go to the error state, and
// when the network device goes down and comes back; afterwards they go over the ring again.
func TestDeviceReturns(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	a, b := linktest.Pair(t, func(testing.TB) p2p.Transport { return New(over(p, 0)) })
	link := func(state string) {
		if out, err := exec.Command("ip", "link", "set", "d0", state).CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out) // not in the goroutine of the test
		}
	}
	raised(t, a, b)
	from := 0
	// round sends frames both ways, and returns the speed in frames a second.
	round := func(frames int, at func(i int)) float64 {
		began := time.Now()
		together(t, a, b, from, from+frames, at)
		from += frames
		return float64(frames) / time.Since(began).Seconds()
	}
	const frames = 480
	before := round(frames, nil)
	for name, at := range map[string]func(i int){
		"queue pair": func(i int) {
			if i%(frames/4) != 1 {
				return
			}
			l := inner([]*linktest.End{a, b}[i/(frames/4)%2])
			l.mu.Lock()
			defer l.mu.Unlock()
			if n := l.lane; n != nil && l.stageOf(n) >= probing {
				if err := n.qp.Fail(); err != nil {
					t.Error(err)
				}
			}
		},
		"port": func(i int) {
			switch i % (frames / 2) {
			case frames / 8:
				link("down")
			case frames / 4:
				link("up")
			}
		},
	} {
		gen := inner(a).m.gen
		from = (from + frames - 1) / frames * frames
		during := round(frames, at)
		began := time.Now()
		raised(t, a, b)
		back := time.Since(began)
		seq := inner(a).tx.out.seq
		after := round(frames, nil)
		t.Logf("%s: %.0f frames a second before, %.0f meanwhile, %.0f afterwards; the ring was back %v after the last "+
			"frame", name, before, during, after, back.Round(time.Millisecond))
		if l := inner(a); l.m.gen == gen || l.tx == nil || l.tx.out.seq < seq+frames {
			t.Errorf("%s: ring %d after %d; frames do not go over it", name, l.m.gen, gen)
		}
		if *timed && after < before/3 { // the same rings are as fast as before
			t.Errorf("%s: %.0f frames a second, and %.0f before", name, after, before)
		}
	}
}

// timed has TestDeviceReturns and TestDeviceLinkDownAndUp compare times and speeds with those of a
// machine that does nothing else.
var timed = flag.Bool("bars", false, "assert times as well, on a machine that does nothing else")

// stream is puts of a side to slots of the other one, with a signal each, again and again.
type stream struct {
	t      *testing.T
	from   *linktest.Side
	source [][]byte
	ids    []uint64
	rounds []uint64
	data   *mem.Region
	to     *mem.Remote
	words  *mem.Region
	flags  *mem.Remote
}

const (
	slots    = 4
	slotSize = 256 << 10
)

func newStream(t *testing.T, from, to *linktest.Side) *stream {
	s := &stream{t: t, from: from, ids: make([]uint64, slots), rounds: make([]uint64, slots),
		data: to.Alloc(t, slots*slotSize), words: to.Alloc(t, 64)}
	s.to = to.Expose(t, s.data, 0, slots*slotSize, mem.Write)
	s.flags = to.Expose(t, s.words, 0, 64, mem.Signal)
	for i := range slots {
		s.source = append(s.source, pattern(slotSize, i))
		s.put(i)
	}
	return s
}

// put begins the next put to a slot.
func (s *stream) put(i int) {
	s.t.Helper()
	s.rounds[i]++
	for k := 0; k < slotSize; k += 4096 {
		binary.LittleEndian.PutUint64(s.source[i][k:], s.rounds[i])
	}
	var err error
	s.ids[i], err = s.from.PutTo(s.source[i], s.to, uint64(i*slotSize),
		p2p.Signal{At: s.flags, Offset: uint64(8 * i), Value: s.rounds[i]})
	if err != nil {
		s.t.Fatal(err)
	}
}

// turn makes progress, and checks the puts that have ended. None fails: TCP carries what the device
// does not.
func (s *stream) turn(again bool) {
	s.t.Helper()
	if err := s.from.Turn(); err != nil {
		s.t.Fatal(err)
	}
	for i, id := range s.ids {
		c, ok := s.from.Ended[id]
		if !ok {
			continue
		}
		delete(s.from.Ended, id)
		s.ids[i] = 0
		switch v := s.words.Word(8 * i).Load(); {
		case c.Err != nil:
			s.t.Fatalf("put %d to slot %d: %v", s.rounds[i], i, c.Err)
		case v != s.rounds[i]:
			s.t.Fatalf("put %d to slot %d has ended, and the signal is %d", s.rounds[i], i, v)
		case !bytes.Equal(s.data.Bytes()[i*slotSize:][:slotSize], s.source[i]):
			s.t.Fatalf("put %d to slot %d has ended, and other bytes are there", s.rounds[i], i)
		}
		if again {
			s.put(i)
		}
	}
}

// TestDeviceLinkDownAndUp: puts both ways over a link that goes down and comes back are never
// wrong, and none is lost. When it is back, also after longer than packets are repeated, the device
// moves bytes as fast as before: with -bars at the same speed, else at a quarter of the slowest,
// because the machine may have got other work.
func TestDeviceLinkDownAndUp(t *testing.T) {
	p, _ := rdmatest.Devices(t, verbs.Load)
	devices, down, up := rdmatest.Veth(t)
	x, y := linktest.Sides(t, ports{[2]string{"=" + devices[0], "=" + devices[1]}, 1}.open(p, 0))
	proven(t, 1, x.End, y.End)
	streams := []*stream{newStream(t, x, y), newStream(t, y, x)}
	const window, soonest = 200 * time.Millisecond, 2 * time.Second
	moved := func() uint64 {
		a, _ := bytesMoved(x)
		b, _ := bytesMoved(y)
		return a + b
	}
	rate := func(d time.Duration) float64 { // MiB/s by the device
		begin, at := time.Now(), moved()
		for time.Since(begin) < d {
			for _, s := range streams {
				s.turn(true)
			}
		}
		return float64(moved()-at) / time.Since(begin).Seconds() / (1 << 20)
	}
	rate(2 * window)
	for _, outage := range []time.Duration{100 * time.Millisecond, 2 * time.Second} {
		var rates []float64
		for range 9 {
			rates = append(rates, rate(window))
		}
		slices.Sort(rates)
		before := rates[len(rates)/2]
		if before == 0 {
			t.Fatal("the device moves nothing")
		}
		enough := rates[0] / 4
		if *timed {
			enough = 0.95 * before
		}
		down()
		meanwhile := rate(outage)
		up()
		begin, best := time.Now(), 0.0
		for best == 0 || best < enough {
			if best = max(best, rate(window)); time.Since(begin) > linktest.Patience {
				t.Fatalf("%.1f MiB/s before the link was down, and at most %.1f since", before, best)
			}
		}
		took := time.Since(begin)
		t.Logf("down for %v: the device moved %.1f MiB/s before, %.1f meanwhile, %.1f within %v of being up again",
			outage, before, meanwhile, best, took.Round(time.Millisecond))
		if *timed && took > soonest {
			t.Errorf("down for %v: the bandwidth was back after %v, expected within %v", outage, took, soonest)
		}
	}
	for late, left := time.Now().Add(linktest.Patience), true; left; {
		left = false
		for _, s := range streams {
			s.turn(false)
			left = left || slices.ContainsFunc(s.ids, func(id uint64) bool { return id != 0 })
		}
		if time.Now().After(late) {
			t.Fatal("puts do not end")
		}
	}
}
