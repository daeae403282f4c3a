package verbs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/p2p/rma"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// sides returns the ends of a link over f, for tests of remote memory. Its ring is up.
func sides(t *testing.T, f *soft.Fabric) (x, y *linktest.Side) {
	t.Helper()
	return sidesOf(t, f, ports{})
}

// sidesOf returns the ends of a link over certain ports.
func sidesOf(t *testing.T, f *soft.Fabric, p ports) (x, y *linktest.Side) {
	t.Helper()
	x, y = linktest.Sides(t, p.open(f, minRing))
	raised(t, x.End, y.End)
	return x, y
}

// wide are ports with several rails, for tests of what is to hold with one and with several.
var wide = map[string]ports{"one rail": {}, "two queue pairs": {queuePairs: 2},
	"two devices": twoEach, "four rails": {twoEach.devices, 2}}

// overRails runs a test over all of wide.
func overRails(t *testing.T, test func(t *testing.T, p ports)) {
	for name, p := range wide {
		t.Run(name, func(t *testing.T) { test(t, p) })
	}
}

// bytesMoved returns how much the device of a side has put and got for it.
func bytesMoved(s *linktest.Side) (put, got uint64) {
	t := s.Node.T.(*Transport)
	return t.put.Load(), t.got.Load()
}

// pattern returns n bytes that differ between rounds.
func pattern(n, round int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(round), byte(round >> 8), 5}).Read(b)
	return b
}

// alone waits until an operation of s has ended, asleep, while the other side does nothing.
func alone(s *linktest.Side, id uint64, err error) error {
	for err == nil {
		if c, ok := s.Ended[id]; ok {
			return c.Err
		}
		if !s.Arm() {
			err = s.Host.Sleep()
		}
		s.Disarm()
		err = errors.Join(err, s.Turn())
	}
	return err
}

// moveBothWays puts and gets over a pair of sides, the second time without any help of the target's
// processor, and checks that the device has moved all bytes.
func moveBothWays(t *testing.T, x, y *linktest.Side) {
	t.Helper()
	const guard, most = 256, 5<<20 + 3
	r := y.Alloc(t, most+2*guard)
	to := y.Expose(t, r, guard, most, mem.Read|mem.Write)
	first := make([]byte, leastMove)
	place(t, x, first, to)
	for round, n := range []int{leastMove, leastMove + 1, pieceBytes, pieceBytes + 1, most} {
		put, got := bytesMoved(x)
		off := most - n
		b := pattern(n, round)
		id, err := x.PutTo(b, to, uint64(off), p2p.Signal{})
		if err := alone(x, id, err); err != nil {
			t.Fatalf("put of %d bytes: %v", n, err)
		}
		if !bytes.Equal(r.Bytes()[guard+off:][:n], b) {
			t.Fatalf("put of %d bytes: other bytes have arrived", n)
		}
		back := make([]byte, n)
		id, err = x.GetFrom(back, to, uint64(off))
		if err := alone(x, id, err); err != nil {
			t.Fatalf("get of %d bytes: %v", n, err)
		}
		if !bytes.Equal(back, b) {
			t.Fatalf("get of %d bytes: other bytes have arrived", n)
		}
		nowPut, nowGot := bytesMoved(x)
		if nowPut-put != uint64(n) || nowGot-got != uint64(n) {
			t.Fatalf("%d bytes: the device has put %d of them and got %d", n, nowPut-put, nowGot-got)
		}
	}
	none := make([]byte, guard)
	if !bytes.Equal(r.Bytes()[:guard], none) || !bytes.Equal(r.Bytes()[guard+most:], none) {
		t.Error("bytes around the exposed range have changed")
	}
}

// Long puts and gets need neither frames nor the target's processor, but for the key of the memory.
func TestDataByRDMA(t *testing.T) {
	f := soft.New(soft.Config{Seed: 21, Late: 3})
	t.Cleanup(f.Close)
	x, y := sides(t, f)
	moveBothWays(t, x, y)
	moveBothWays(t, y, x)
}

// Shorter ones go in frames.
func TestShortDataInFrames(t *testing.T) {
	f := soft.New(soft.Config{Seed: 22})
	t.Cleanup(f.Close)
	x, y := sides(t, f)
	to := y.Expose(t, y.Alloc(t, leastMove), 0, leastMove, mem.Read|mem.Write)
	b := make([]byte, leastMove-1)
	if err := errors.Join(x.Await(x.PutTo(b, to, 0, p2p.Signal{})), x.Await(x.GetFrom(b, to, 0))); err != nil {
		t.Fatal(err)
	}
	if put, got := bytesMoved(x); put+got > 0 {
		t.Errorf("the device has put %d bytes and got %d", put, got)
	}
	if _, _, mrs := f.Objects(); mrs != 4 { // those of the rings
		t.Errorf("%d memory regions", mrs)
	}
}

// Puts, signals and gets have their results, whatever fails meanwhile. What a put has placed does
// not change after its end, although frames may have repeated it: the target uses the memory for
// something else at once.
func TestDataSurvivesDevices(t *testing.T) {
	for _, name := range []string{"one rail", "four rails"} {
		t.Run(name, func(t *testing.T) { testDataSurvivesDevices(t, wide[name]) })
	}
}

func testDataSurvivesDevices(t *testing.T, p ports) {
	for name, c := range map[string]struct {
		faults func(now *atomic.Bool) soft.Faults // one, when it is set
		fault  func(f *soft.Fabric, l *link, i int)
	}{
		"failed queue pairs": {fault: func(f *soft.Fabric, l *link, i int) {
			l.mu.Lock()
			defer l.mu.Unlock()
			if n := l.lane; n != nil && l.stageOf(n) >= probing {
				r := n.bulk.rails[i%len(n.bulk.rails)]
				f.Break(r.Name(), r.qp.Number())
			}
		}},
		"port down": {fault: func(f *soft.Fabric, _ *link, i int) { f.SetPort("soft0", 1, i%2 == 1) }},
		"removed device": {fault: func(f *soft.Fabric, _ *link, i int) {
			if i%2 == 0 {
				f.Remove("soft0")
			} else {
				f.Restore("soft0")
			}
		}},
		"refused posts": {faults: func(now *atomic.Bool) soft.Faults {
			return soft.Faults{Post: func(string, uint32, int) syscall.Errno {
				if now.CompareAndSwap(true, false) {
					return syscall.ENOMEM
				}
				return 0
			}}
		}},
		"failed requests": {faults: func(now *atomic.Bool) soft.Faults {
			return soft.Faults{Request: func(_ string, _ uint32, r *rdma.SendRequest) rdma.Status {
				if r.Op != rdma.WriteImm && now.CompareAndSwap(true, false) {
					return rdma.RetryExceeded
				}
				return rdma.Success
			}}
		}},
		"refused registrations": {faults: func(now *atomic.Bool) soft.Faults {
			return soft.Faults{Call: func(_, call string) syscall.Errno {
				if strings.HasPrefix(call, "register") && now.CompareAndSwap(true, false) {
					return syscall.ENOMEM
				}
				return 0
			}}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			var now atomic.Bool
			cfg := soft.Config{Seed: 23, Devices: 4, Late: 4, ReuseKeys: true, ReuseNumbers: true}
			if p.devices[0] != "" { // puts to an only device end without a read: see exposure.keys
				cfg.Delayed = []string{"soft0", "soft1", "soft2", "soft3"}
			}
			if c.faults != nil {
				cfg.Faults = c.faults(&now)
			}
			f := soft.New(cfg)
			t.Cleanup(f.Close)
			x, y := sidesOf(t, f, p)
			survive(t, x, y, 60, 6, 600_000, func(i int) {
				if now.Store(true); c.fault != nil {
					c.fault(f, inner([]*linktest.Side{x, y}[i%2].End), i)
				}
			})
		})
	}
}

// survive puts, signals and gets parts of a number of bytes in rounds, in some of which there is a
// fault, and checks the results; at the end the device moves data again.
func survive(t *testing.T, x, y *linktest.Side, rounds, every, part int, fault func(i int)) {
	t.Helper()
	const parts = 4
	if testing.Short() {
		part /= 3
	}
	data, source, words := y.Alloc(t, 2*parts*part), y.Alloc(t, part), y.Alloc(t, 64)
	to := y.Expose(t, data, 0, 2*parts*part, mem.Write)
	from := y.Expose(t, source, 0, part, mem.Read)
	flag := y.Expose(t, words, 0, 64, mem.Signal)
	used := bytes.Repeat([]byte{0xee}, parts*part)
	for round := range rounds {
		half := round % 2 * parts * part
		there := data.Bytes()[half:][:parts*part]
		copy(source.Bytes(), pattern(part, -round))
		b, back := pattern(parts*part, round), make([]byte, part)
		var ids []uint64
		for i := range parts {
			id, err := x.PutTo(b[i*part:][:part], to, uint64(half+i*part),
				p2p.Signal{At: flag, Offset: uint64(8 * i), Value: uint64(round + 1)})
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, id)
		}
		id, err := x.GetFrom(back, from, 0)
		if err != nil {
			t.Fatal(err)
		}
		for range round % 7 {
			if err := errors.Join(x.Turn(), y.Turn()); err != nil {
				t.Fatal(err)
			}
		}
		if round%every == every/2 {
			l := inner(x.End)
			l.mu.Lock()
			l.pause = minPause
			l.mu.Unlock()
			fault(round / every)
		}
		for _, id := range append(ids, id) {
			if err := x.Await(id, nil); err != nil {
				t.Fatalf("round %d: %v", round, err)
			}
		}
		if !bytes.Equal(there, b) || !bytes.Equal(back, source.Bytes()) {
			t.Fatalf("round %d: other bytes have arrived", round)
		}
		for i := range parts {
			if v := words.Word(8 * i).Load(); v != uint64(round+1) {
				t.Fatalf("round %d: signal %d is %d", round, i, v)
			}
		}
		copy(there, used)
		if other := data.Bytes()[parts*part-half:][:parts*part]; round > 0 && !bytes.Equal(other, used) {
			t.Fatalf("round %d: memory has changed after the end of its puts", round)
		}
	}
	raised(t, x.End, y.End)
	// The lane may have to give way yet to one with what came back last.
	for late := time.Now().Add(linktest.Patience); ; {
		put, _ := bytesMoved(x)
		place(t, x, used[:part], to)
		now, _ := bytesMoved(x)
		if now == put+uint64(part) {
			return
		}
		if time.Now().After(late) {
			t.Fatalf("%d bytes of %d were moved at the end", now-put, part)
		}
	}
}

// place puts b to the beginning of to, and waits until it is there.
func place(t *testing.T, x *linktest.Side, b []byte, to *mem.Remote) {
	t.Helper()
	if err := x.Await(x.PutTo(b, to, 0, p2p.Signal{})); err != nil {
		t.Fatal(err)
	}
}

// An operation whose lane has failed waits until the queue pairs of both ends are closed.
func TestFailedLaneIsFenced(t *testing.T) { overRails(t, testFence) }

func testFence(t *testing.T, p ports) {
	type number struct {
		device string
		qp     uint32
	}
	var fails atomic.Pointer[number] // the queue pair whose requests fail
	f := soft.New(soft.Config{Seed: 24, Devices: 4, Faults: soft.Faults{
		Request: func(device string, qp uint32, _ *rdma.SendRequest) rdma.Status {
			if n := fails.Load(); n != nil && *n == (number{device, qp}) {
				return rdma.RetryExceeded
			}
			return rdma.Success
		}}})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, p)
	const n = 8 << 20
	r := y.Alloc(t, n)
	to := y.Expose(t, r, 0, n, mem.Write)
	b := pattern(n, 1)
	place(t, x, b[:leastMove], to)
	l := inner(x.End)
	r0 := l.lane.bulk.rails[0]
	fails.Store(&number{r0.Name(), r0.qp.Number()})
	id, err := x.PutTo(b, to, 0, p2p.Signal{})
	if err != nil {
		t.Fatal(err)
	}
	limbo := func() (n *lane, closed bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		if len(l.limbo) == 0 {
			return nil, false
		}
		return l.limbo[0], l.limbo[0].closed
	}
	// The other end does nothing, so that it does not close its queue pairs.
	for late := time.Now().Add(linktest.Patience); ; runtime.Gosched() {
		if err := x.Turn(); err != nil {
			t.Fatal(err)
		}
		if _, closed := limbo(); closed {
			break
		}
		if time.Now().After(late) {
			t.Fatal("the lane goes on without its queue pair")
		}
	}
	for range 1000 {
		if err := x.Turn(); err != nil {
			t.Fatal(err)
		}
	}
	if n, _ := limbo(); n == nil || len(n.bulk.moves) != 1 {
		t.Fatal("the move has ended before the peer's queue pairs were closed")
	}
	if err := x.Await(id, nil); err != nil {
		t.Fatal(err)
	}
	if n, _ := limbo(); n != nil || !bytes.Equal(r.Bytes(), b) {
		t.Error("other bytes have arrived, or the lane stays")
	}
}

// What a cancelled put has in the network cannot be placed over the data of a later one.
func TestCancelledPutIsFenced(t *testing.T) { overRails(t, testCancelledPutIsFenced) }

func testCancelledPutIsFenced(t *testing.T, p ports) {
	f := soft.New(soft.Config{Seed: 34, Devices: 4, Late: 8})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, p)
	const n = 8 << 20
	r := y.Alloc(t, n)
	to := y.Expose(t, r, 0, n, mem.Write)
	for round, size := range []int{8, leastMove, 3 << 20} {
		raised(t, x.End, y.End)
		place(t, x, make([]byte, leastMove), to)
		l := inner(x.End)
		n := l.lane
		first := pattern(r.Len(), round)
		id, err := x.PutTo(first, to, 0, p2p.Signal{})
		if err != nil || n.bulk.under() == 0 {
			t.Fatalf("%d requests under way: %v", n.bulk.under(), err)
		}
		theirs := inner(y.End).lane
		theirs.bulk.halting.Lock()
		x.Rma.Cancel(id)
		clear(first) // nothing reads it any more
		if err := x.Await(id, nil); !errors.Is(err, p2p.ErrCancelled) {
			t.Errorf("the put that was cancelled: %v", err)
		}
		b := pattern(size, -round)
		id, err = x.PutTo(b, to, 0, p2p.Signal{})
		for range 2000 { // the peer cannot close its queue pair yet
			if err := errors.Join(err, x.Turn(), y.Turn()); err != nil {
				t.Fatal(err)
			}
		}
		if c, ended := x.Ended[id]; ended {
			t.Errorf("%d bytes: a put has ended while a part of the cancelled one may still be placed: %+v", size, c)
		}
		theirs.bulk.halting.Unlock()
		if err := x.Await(id, nil); err != nil || !bytes.Equal(r.Bytes()[:size], b) {
			t.Fatalf("%d bytes: %v, or other bytes have arrived", size, err)
		}
		if len(l.limbo)+len(l.later) > 0 || l.haunted.Load() {
			t.Errorf("%d lanes and %d puts still wait", len(l.limbo), len(l.later))
		}
	}
}

// It does not matter which end is first.
func TestFenceNeedsBothEnds(t *testing.T) {
	for _, peerFirst := range []bool{false, true} {
		m := &rma.Move{}
		n := &lane{}
		n.bulk.moves = []*move{{m: m, under: 1}}
		l := &link{limbo: []*lane{n}}
		n.fenced, n.closed = peerFirst, !peerFirst
		if l.settleLocked(n); len(l.moved) > 0 || len(l.limbo) != 1 {
			t.Errorf("the move ends before both ends are closed (the peer's is: %v)", peerFirst)
		}
		n.fenced, n.closed = true, true
		if l.settleLocked(n); len(l.moved) != 1 || l.moved[0] != m || m.OK || len(l.limbo) > 0 {
			t.Error("the move does not end as one that frames have to carry")
		}
	}
}

// A key stands for no other memory while a peer may use it.
func TestKeysOfWithdrawnMemory(t *testing.T) { overRails(t, testKeysOfWithdrawnMemory) }

func testKeysOfWithdrawnMemory(t *testing.T, p ports) {
	f := soft.New(soft.Config{Seed: 25, Devices: 4, ReuseKeys: true})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, p)
	const n = leastMove
	r := y.Alloc(t, n)
	to := y.Expose(t, r, 0, n, mem.Write)
	place(t, x, make([]byte, n), to)
	l := inner(x.End)
	keys := l.lane.bulk.keys[to.Generation].rails
	if err := y.Withdraw(to); err != nil {
		t.Fatal(err)
	}
	// given reports whether one of n more memory regions of a device has its key. The fabric
	// gives the latest ones first.
	given := func(n int) bool {
		t.Helper()
		for i, rail := range inner(y.End).lane.bulk.rails {
			for range n {
				mr, err := inner(y.End).t.registerKey(rail.device, r.Memory, rdma.LocalWrite|rdma.RemoteWrite)
				if err != nil {
					t.Fatal(err)
				}
				defer mr.Close()
				if mr.RemoteKey() == keys[i].key {
					return true
				}
			}
		}
		return false
	}
	if given(2) {
		t.Error("a key that the peer has stands for memory again")
	}
	for late := time.Now().Add(linktest.Patience); ; runtime.Gosched() {
		if err := errors.Join(x.Turn(), y.Turn()); err != nil {
			t.Fatal(err)
		}
		l := inner(y.End)
		l.mu.Lock()
		left := len(l.lane.revoking)
		l.mu.Unlock()
		if left == 0 {
			break
		}
		if time.Now().After(late) {
			t.Fatal("the peer does not give up the key")
		}
	}
	if len(l.lane.bulk.keys) > 0 || l.m.gen != 1 {
		t.Errorf("%d keys are left, lane %d", len(l.lane.bulk.keys), l.m.gen)
	}
	if !given(32) {
		t.Error("the key is withheld although the peer has given it up")
	}
}

// Memory that gets no key, because peers may still use all those that the device has, gets one
// later. Meanwhile its data goes in frames, and nothing is registered again until a key is free:
// because peers have given it up, or because memory is deregistered that they had no key for.
func TestKeysBecomeFree(t *testing.T) {
	t.Run("given up", func(t *testing.T) { testKeysBecomeFree(t, false) })
	t.Run("deregistered", func(t *testing.T) { testKeysBecomeFree(t, true) })
}

func testKeysBecomeFree(t *testing.T, deregistered bool) {
	f, registered, _ := registrations(t, soft.Config{Seed: 37, ReuseKeys: true})
	x, y := sides(t, f)
	const n = 1 << 20
	r := y.Alloc(t, n)
	d := inner(y.End).lane.port.device
	other := y.Expose(t, r, 0, n, mem.Read)
	e := inner(y.End).t.keys.get(other.Generation)
	e.mu.Lock()
	_, err := e.register(inner(y.End).t, []*device{d})
	e.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	var keys []uint32
	var mrs []rdma.MR
	for range 32 {
		mr, err := d.Register(r.Memory, 0)
		if err != nil {
			t.Fatal(err)
		}
		keys, mrs = append(keys, mr.RemoteKey()), append(mrs, mr)
	}
	for i, mr := range mrs {
		if err := mr.Close(); err != nil {
			t.Fatal(err)
		}
		d.keys.Withhold(keys[i])
	}
	to := y.Expose(t, r, 0, n, mem.Write)
	b := pattern(n, 1)
	// put puts b, and returns how many bytes the device has moved, and the registrations.
	put := func() (moved uint64, calls int64) {
		t.Helper()
		before, _ := bytesMoved(x)
		calls = registered.Load()
		place(t, x, b, to)
		after, _ := bytesMoved(x)
		return after - before, registered.Load() - calls
	}
	if moved, _ := put(); moved > 0 {
		t.Errorf("%d bytes were moved without a key", moved)
	}
	if moved, calls := put(); moved+uint64(calls) > 0 {
		t.Errorf("%d bytes were moved and %d registrations made while no key is free", moved, calls)
	}
	if deregistered {
		if err := y.Withdraw(other); err != nil {
			t.Fatal(err)
		}
	} else {
		for _, k := range keys {
			d.keys.Permit(k)
		}
	}
	if moved, _ := put(); moved != n {
		t.Errorf("%d bytes of %d were moved with a key", moved, n)
	}
	if !bytes.Equal(r.Bytes(), b) {
		t.Error("other bytes have arrived")
	}
}

// Memory that a device cannot register now, for another reason than its keys, is tried again by the
// next operation.
func TestRegistrationIsTriedAgain(t *testing.T) {
	var refuse atomic.Bool
	f, _ := countCalls(t, soft.Config{Seed: 38}, func(call string) bool { return strings.HasPrefix(call, "register") },
		func(string) syscall.Errno {
			if refuse.Load() {
				return syscall.EAGAIN
			}
			return 0
		})
	x, y := sides(t, f)
	const n = leastMove
	to := y.Expose(t, y.Alloc(t, n), 0, n, mem.Write)
	for _, want := range []uint64{0, n} {
		refuse.Store(want == 0)
		place(t, x, pattern(n, 1), to)
		if moved, _ := bytesMoved(x); moved != want {
			t.Errorf("%d bytes were moved, want %d", moved, want)
		}
	}
}

// An access that meets a Withdraw fails its lane, and then has the reason; the link goes on.
func TestWithdrawUnderAccess(t *testing.T) { overRails(t, testWithdrawUnderAccess) }

func testWithdrawUnderAccess(t *testing.T, p ports) {
	f := soft.New(soft.Config{Seed: 26, Devices: 4, Late: 6, ReuseKeys: true})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, p)
	const n = 2 << 20
	r := y.Alloc(t, n)
	for round := range 20 {
		to := y.Expose(t, r, 0, n, mem.Read|mem.Write)
		b := bytes.Repeat([]byte{1}, n)
		place(t, x, b, to)
		id, err := x.PutTo(b, to, 0, p2p.Signal{})
		if err != nil {
			t.Fatal(err)
		}
		for range round {
			if err := x.Turn(); err != nil {
				t.Fatal(err)
			}
		}
		if err := y.Withdraw(to); err != nil {
			t.Fatal(err)
		}
		clear(r.Bytes())
		if err := x.Await(id, nil); err != nil && !errors.Is(err, p2p.ErrRevoked) {
			t.Fatal(err)
		}
		if !bytes.Equal(r.Bytes(), make([]byte, n)) {
			t.Fatalf("round %d: memory has changed after Withdraw", round)
		}
	}
}

// slow is a provider whose devices take until goOn is closed to register memory of slowBytes that
// peers may write.
type slow struct {
	rdma.Provider
	begun, goOn chan struct{}
}

const slowBytes = 3<<20 + 1

func (s slow) Open(name string, notify func(rdma.Event)) (rdma.Device, error) {
	d, err := s.Provider.Open(name, notify)
	return slowDevice{d, s}, err
}

type slowDevice struct {
	rdma.Device
	of slow
}

func (d slowDevice) Register(m mem.Memory, a rdma.Access) (rdma.MR, error) {
	if m.Len() == slowBytes && a&rdma.RemoteWrite != 0 {
		d.of.begun <- struct{}{}
		<-d.of.goOn
	}
	return d.Device.Register(m, a)
}

// Withdraw waits no longer than its context for a device that is registering the memory. It goes on
// by itself, and may be called again.
func TestWithdrawDuringRegistration(t *testing.T) {
	f := soft.New(soft.Config{Seed: 28, Devices: 4})
	t.Cleanup(f.Close)
	s := slow{f, make(chan struct{}, 2), make(chan struct{})}
	x, y := linktest.Sides(t, twoEach.open(s, minRing))
	raised(t, x.End, y.End)
	to := y.Expose(t, y.Alloc(t, slowBytes), 0, slowBytes, mem.Write)
	id, err := x.PutTo(make([]byte, slowBytes), to, 0, p2p.Signal{})
	if err != nil {
		t.Fatal(err)
	}
	for late := time.Now().Add(linktest.Patience); len(s.begun) == 0; {
		if err := errors.Join(x.Turn(), y.Turn()); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(late) {
			t.Fatal("the memory is not registered")
		}
	}
	tr := y.Node.T.(*Transport)
	withdraw := func(ctx context.Context) chan error {
		c := make(chan error, 1)
		go func() { c <- tr.Withdraw(ctx, to) }()
		return c
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	first := withdraw(over)
	select {
	case err := <-first:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Withdraw during the registration returns %v", err)
		}
	case <-time.After(linktest.Patience):
		t.Error("Withdraw waits longer than its context")
	}
	again := withdraw(t.Context())
	close(s.goOn)
	if err := <-again; err != nil {
		t.Error(err)
	}
	if n := len(s.begun); n != 1 {
		t.Errorf("%d devices have begun to register the memory, want 1", n)
	}
	if err := x.Await(id, nil); !errors.Is(err, p2p.ErrRevoked) {
		t.Errorf("a put to memory that was withdrawn has ended with %v", err)
	}
}

// A key that comes while an end is about to sleep begins a request, whose completion wakes it.
func TestKeyBeforeSleep(t *testing.T) { overRails(t, testKeyBeforeSleep) }

func testKeyBeforeSleep(t *testing.T, p ports) {
	f := soft.New(soft.Config{Seed: 31, Devices: 4, Late: 8})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, p)
	const n = 1 << 20
	r := y.Alloc(t, n)
	to := y.Expose(t, r, 0, n, mem.Write)
	id, err := x.PutTo(pattern(n, 1), to, 0, p2p.Signal{})
	if err != nil {
		t.Fatal(err)
	}
	mine, theirs := inner(x.End), inner(y.End)
	keyed := func() bool { // y has given the key, and x's TCP connection has it
		theirs.mu.Lock()
		given := len(theirs.lane.granted) == 1 && len(theirs.out) == 0
		theirs.mu.Unlock()
		return given && mine.t.news.Load() != mine.heard
	}
	for late := time.Now().Add(linktest.Patience); !keyed(); runtime.Gosched() {
		if err := y.Turn(); err != nil {
			t.Fatal(err)
		}
		if time.Now().After(late) {
			t.Fatal("no key")
		}
	}
	look := x.Arm()
	if mine.lane.bulk.under() == 0 {
		t.Fatal("the key did not begin a request")
	}
	if !look && mine.lane.bulk.unheard() {
		t.Error("it would sleep, and no completion would wake it")
	}
	x.Disarm()
	if err := alone(x, id, nil); err != nil || !bytes.Equal(r.Bytes(), pattern(n, 1)) {
		t.Errorf("%v, or other bytes have arrived", err)
	}
}

// silent is a completion queue of a device that has forgotten its requests.
type silent struct{ rdma.CQ }

func (silent) Poll([]rdma.Completion) (int, error) { return 0, nil }
func (silent) Arm() error                          { return nil }

// An end that sleeps while its device forgets a request wakes, and gives up the lane.
func TestLateMoveWakes(t *testing.T) { overRails(t, testLateMoveWakes) }

func testLateMoveWakes(t *testing.T, p ports) {
	f := soft.New(soft.Config{Seed: 32, Devices: 4})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, p)
	const n = 1 << 20
	r := y.Alloc(t, n)
	to := y.Expose(t, r, 0, n, mem.Write)
	place(t, x, make([]byte, leastMove), to)
	l := inner(x.End)
	l.lane.late = 20 * time.Millisecond
	for _, r := range l.lane.bulk.rails {
		r.cq = silent{r.cq}
	}
	b := pattern(n, 1)
	id, err := x.PutTo(b, to, 0, p2p.Signal{})
	if err != nil {
		t.Fatal(err)
	}
	for l.m.gen == 1 {
		if !x.Arm() {
			if err := x.Host.Sleep(); err != nil {
				t.Fatal(err)
			}
		}
		x.Disarm()
		if err := x.Turn(); err != nil {
			t.Fatal(err)
		}
	}
	if err := x.Await(id, nil); err != nil || !bytes.Equal(r.Bytes(), b) {
		t.Errorf("%v, or other bytes have arrived", err)
	}
}

// A peer that never gives up keys costs the lane, not memory for each.
func TestKeysThatAreNotGivenUp(t *testing.T) {
	f := soft.New(soft.Config{Seed: 33})
	t.Cleanup(f.Close)
	x, y := sides(t, f)
	l := inner(y.End)
	n := l.lane
	for i := range uint64(2 * maxKeys) {
		l.revoke(n, i, []held{{n.port.device, uint32(1<<20 + i)}}) // x is not told of it: y does nothing
		if failed := n.err != nil; failed != (i >= maxKeys) {
			t.Fatalf("after %d keys: %v", i+1, n.err)
		}
	}
	device := n.port.device
	for late := time.Now().Add(linktest.Patience); ; runtime.Gosched() {
		l.mu.Lock()
		l.out = slices.DeleteFunc(l.out, func(c control) bool { return c.h.Kind == frameRevoke })
		l.mu.Unlock()
		if err := errors.Join(y.Turn(), x.Turn()); err != nil {
			t.Fatal(err)
		}
		left := device.keys.Len()
		if left == 0 {
			break
		}
		if time.Now().After(late) {
			t.Fatalf("%d keys are withheld", left)
		}
	}
	raised(t, x.End, y.End)
}

// What a peer says about keys without reason ends the link.
func TestHostileKeys(t *testing.T) {
	const key = "1234567890123456"
	for name, c := range map[string]struct {
		h       p2p.Header
		payload string
		n       int
		want    string
	}{
		"a key that was not asked for": {p2p.Header{Kind: frameKey, Call: 7, Flags: 1}, key, 1, "not asked"},
		"a second key": {p2p.Header{Kind: frameKey, Call: 1 << 50, Flags: 1, Count: 8}, key, 2,
			"not asked"},
		"rights": {p2p.Header{Kind: frameKey, Call: 1 << 50, Flags: 0x80}, key, 1, "rights"},
		"memory beyond all addresses": {p2p.Header{Kind: frameKey, Call: 1 << 50, Flags: 1, Off: math.MaxUint64,
			Count: 2}, key, 1, "2 bytes at 0xffffffffffffffff"},
		"no key": {p2p.Header{Kind: frameKey, Call: 1 << 50, Flags: 1}, "", 1,
			"0 values for 1 queue pairs"},
		"keys of other rails": {p2p.Header{Kind: frameKey, Call: 1 << 50, Flags: 1}, key + key, 1,
			"2 values for 1"},
		"a part of a key": {p2p.Header{Kind: frameKey, Call: 1 << 50, Flags: 1}, key + "1", 1,
			"1 bytes too many"},
		"a refusal with a key":                {p2p.Header{Kind: frameKey, Call: 1 << 50}, key, 1, "1 values for 1"},
		"a key that was not given taken back": {p2p.Header{Kind: frameRevoke, Call: 7}, "", 1, "not given"},
		"a key that was asked for taken back": {p2p.Header{Kind: frameRevoke, Call: 1 << 50}, "", 1, "not given"},
		"a key that was not taken back given up": {p2p.Header{Kind: frameRevoked, Call: 7}, "", 1,
			"was not asked to"},
		"a fence of a lane in use": {p2p.Header{Kind: frameFenced}, "", 1, "about lane 1"},
		"questions without end":    {p2p.Header{Kind: frameClaim, Call: 3}, "", 1 << 12, "questions"},
	} {
		t.Run(name, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 27})
			t.Cleanup(f.Close)
			x, y := sides(t, f)
			// x asks for a key of what was never exposed; y, which is hostile, answers otherwise.
			never := &mem.Remote{ID: 9, Generation: 1 << 50, Len: 1 << 30, Rights: mem.Read | mem.Write,
				Loc: mem.Anywhere, Keys: []mem.Key{{Path: Name}}}
			if _, err := x.PutTo(make([]byte, leastMove), never, 0, p2p.Signal{}); err != nil {
				t.Fatal(err)
			}
			l := inner(y.End)
			l.mu.Lock()
			for range c.n {
				h := c.h
				h.Service, h.Seq = service, l.m.gen
				h.Len = uint32(len(c.payload))
				l.out = append(l.out, control{h, []byte(c.payload)})
			}
			l.pumpLocked()
			l.mu.Unlock()
			if c.n < 1000 {
				ends(t, x.End, p2p.ErrProtocol, c.want, "rank 1")
				return
			}
			// They are answered only as fast as the asking end reads.
			for late := time.Now().Add(linktest.Patience); ; {
				l.mu.Lock()
				l.pumpLocked()
				l.mu.Unlock()
				if err := x.Turn(); err != nil {
					break
				}
				if time.Now().After(late) {
					t.Fatal("no end")
				}
			}
		})
	}
}

// FuzzMemoryFrames: whatever frames about memory come, in whatever order, each is taken or ends the
// link, and what is kept for the peer is bounded.
func FuzzMemoryFrames(f *testing.F) {
	kinds := []uint8{frameFenced, frameClaim, frameKey, frameRevoke, frameRevoked}
	encode := func(frames ...p2p.Header) (b []byte) {
		for _, h := range frames {
			b = append(b, byte(slices.Index(kinds, h.Kind)), byte(h.Seq), byte(h.Call), h.Flags)
			b = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(b, h.Off), h.Count)
		}
		return b
	}
	f.Add(encode(p2p.Header{Kind: frameKey, Seq: 1, Call: 1, Flags: 2, Count: 1 << 20},
		p2p.Header{Kind: frameRevoke, Seq: 1, Call: 1}))
	f.Add(encode(p2p.Header{Kind: frameClaim, Seq: 1, Call: 2}, p2p.Header{Kind: frameFenced, Seq: 0},
		p2p.Header{Kind: frameRevoked, Seq: 1, Call: 2}))
	fabric := soft.New(soft.Config{Seed: 29})
	f.Cleanup(fabric.Close)
	cfg := over(fabric, minRing)
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := openAll(&cfg, func(rdma.Event) {})
		if err != nil {
			t.Fatal(err)
		}
		tr := New(cfg)
		tr.devices = all
		defer tr.Close()
		n := &lane{gen: 1}
		defer n.close()
		if err := tr.make(n, minRing, nil, 0, func() {}); err != nil {
			t.Fatal(err)
		}
		l := &link{t: tr, lane: n, lanes: []*lane{n}, tx: n, least: 8,
			m: machine{gen: 1, tx: 1, lanes: []course{{gen: 1, stage: up, told: true}}}}
		l.base = failing{}
		defer l.wg.Wait()
		for i := range 3 {
			l.Move(&rma.Move{Read: i == 1, Local: mem.Host(make([]byte, 64), mem.Anywhere), Region: 1,
				Generation: uint64(i / 2)})
		}
		for ; len(b) >= 20; b = b[20:] {
			h := p2p.Header{Kind: kinds[int(b[0])%len(kinds)], Seq: uint64(b[1]), Call: uint64(b[2]), Flags: b[3],
				Off: binary.LittleEndian.Uint64(b[4:]), Count: binary.LittleEndian.Uint64(b[12:])}
			l.mu.Lock()
			err := l.memoryLocked(&h, b[20:20+min(len(b)-20, int(h.Flags>>4))])
			l.mu.Unlock()
			if err != nil {
				break
			}
			if len(l.out) > 2*p2p.MaxOutstanding || len(n.bulk.keys) > 2 || len(n.bulk.moves)+len(l.moved) > 3 {
				t.Fatalf("%d frames, %d keys, %d moves and %d that have ended", len(l.out), len(n.bulk.keys),
					len(n.bulk.moves), len(l.moved))
			}
		}
	})
}

// failing is a link that takes nothing.
type failing struct{ p2p.Link }

func (failing) Send(*p2p.Header, []byte) (bool, error) { return false, nil }

// A key that allows nothing at the peer's device costs the lane, not the operation.
func TestWrongKeys(t *testing.T) { overRails(t, testWrongKeys) }

func testWrongKeys(t *testing.T, p ports) {
	for name, change := range map[string]func(k *key){
		"key":     func(k *key) { k.rails[0].key ^= 1 << 20 },
		"address": func(k *key) { k.address += 1 << 40 },
		"length":  func(k *key) { k.address += 4096; k.n += 4096 },
	} {
		t.Run(name, func(t *testing.T) {
			f := soft.New(soft.Config{Seed: 28, Devices: 4})
			t.Cleanup(f.Close)
			x, y := sidesOf(t, f, p)
			const n = 1 << 20
			r := y.Alloc(t, n)
			to := y.Expose(t, r, 0, n, mem.Read|mem.Write)
			b := pattern(n, 1)
			place(t, x, b[:leastMove], to)
			l := inner(x.End)
			change(l.lane.bulk.keys[to.Generation])
			if err := x.Await(x.PutTo(b, to, 0, p2p.Signal{})); err != nil || !bytes.Equal(r.Bytes(), b) {
				t.Errorf("put: %v, or other bytes", err)
			}
			if l.m.gen < 2 {
				t.Error("it has the same lane")
			}
		})
	}
}

// A request that ends with a recoverable status costs its lane, and the data of later ones is moved
// over the next lane. After a fatal one the data of that memory goes in frames, and costs no more
// lanes. Other memory is not concerned. The operation itself ends well in either case.
func TestStatusClasses(t *testing.T) {
	for status := rdma.LocalLength; status <= rdma.GeneralError; status++ {
		t.Run(fmt.Sprint(uint8(status), " ", status), func(t *testing.T) {
			var now atomic.Bool
			f := soft.New(soft.Config{Seed: 35, Faults: soft.Faults{
				Request: func(_ string, _ uint32, r *rdma.SendRequest) rdma.Status {
					if r.Op != rdma.WriteImm && len(r.Segments) > 0 && r.ID < railDepth &&
						now.CompareAndSwap(true, false) {
						return status
					}
					return rdma.Success
				}}})
			t.Cleanup(f.Close)
			x, y := sides(t, f)
			const n = 1 << 20
			data, other := y.Alloc(t, n), y.Alloc(t, n)
			to := y.Expose(t, data, 0, n, mem.Read|mem.Write)
			beside := y.Expose(t, other, 0, n, mem.Read|mem.Write)
			b := pattern(n, 2)
			for round, get := range []bool{false, true, false} {
				raised(t, x.End, y.End)
				gen := inUse(x.End)
				place(t, x, b, beside) // by RDMA, so that its failure would be noticed
				put, got := bytesMoved(x)
				if round == 0 {
					place(t, x, b, to)
					put, got = bytesMoved(x)
					now.Store(true)
				}
				c := bytes.Clone(b)
				var err error
				if get {
					err = x.Await(x.GetFrom(c, to, 0))
				} else {
					err = x.Await(x.PutTo(c, to, 0, p2p.Signal{}))
				}
				if err != nil || !bytes.Equal(data.Bytes(), b) || !bytes.Equal(c, b) {
					t.Fatalf("round %d: %v, or other bytes", round, err)
				}
				if round == 0 {
					if now.Load() {
						t.Fatal("nothing has failed")
					}
					continue
				}
				nowPut, nowGot := bytesMoved(x)
				moved := nowPut + nowGot - put - got
				if want := map[bool]uint64{true: n, false: 0}[status.Recoverable()]; moved != want {
					t.Errorf("round %d: the device has moved %d bytes, want %d", round, moved, want)
				}
				if inUse(x.End) != gen {
					t.Errorf("round %d: the lane was given up", round)
				}
			}
			if gen := inUse(x.End); gen < 2 {
				t.Errorf("lane %d has survived the failure", gen)
			}
			put, _ := bytesMoved(x)
			place(t, x, b, beside)
			if now, _ := bytesMoved(x); now != put+n {
				t.Errorf("other memory: the device has moved %d bytes", now-put)
			}
		})
	}
}

// The status of a request that has failed counts, also if the flush of the queue pair's receive is
// seen before it.
func TestStatusAfterFlush(t *testing.T) { overRails(t, testStatusAfterFlush) }

func testStatusAfterFlush(t *testing.T, p ports) {
	var now atomic.Bool
	f := soft.New(soft.Config{Seed: 36, Devices: 4, Faults: soft.Faults{
		Request: func(_ string, _ uint32, r *rdma.SendRequest) rdma.Status {
			if now.Load() && r.Op != rdma.WriteImm && len(r.Segments) > 0 && r.ID < railDepth {
				return rdma.MemoryWindow
			}
			return rdma.Success
		}}})
	t.Cleanup(f.Close)
	x, y := sidesOf(t, f, p)
	raised(t, x.End, y.End)
	const n = 1 << 20
	r := y.Alloc(t, n)
	to := y.Expose(t, r, 0, n, mem.Read|mem.Write)
	b := pattern(n, 1)
	place(t, x, b, to)
	now.Store(true)
	id, err := x.PutTo(b, to, 0, p2p.Signal{})
	l := inner(x.End)
	l.mu.Lock()
	seen := false
	for _, r := range l.lane.bulk.rails {
		if r.under == 0 {
			continue
		}
		seen = true
		c := &rdma.Completion{ID: r.receive(), Status: rdma.Flushed}
		if !r.own {
			l.lane.bulk.fails(c)
		} else if err := l.lane.bulk.complete(r, c, nil); err != nil {
			l.lane.bulk.broken(r, err)
		}
	}
	l.mu.Unlock()
	if err := x.Await(id, err); err != nil || !bytes.Equal(r.Bytes(), b) || !seen {
		t.Errorf("%v, or other bytes, or nothing was under way (%v)", err, !seen)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.barred.has(to.Generation) {
		t.Error("the memory is not barred")
	}
}

// Of what is barred only the latest is kept.
func TestBarsAreBounded(t *testing.T) {
	var b bars
	for i := range uint64(3 * maxKeys) {
		b.add(i)
		b.add(i)
	}
	if len(b.set) != maxKeys || len(b.order) != maxKeys || b.has(2*maxKeys-1) || !b.has(2*maxKeys) {
		t.Errorf("%d and %d generations are kept", len(b.set), len(b.order))
	}
}

// Withdraw of memory that no device has does not fail because its context has ended.
func TestWithdrawOfUnusedMemory(t *testing.T) {
	f := soft.New(soft.Config{Seed: 29})
	t.Cleanup(f.Close)
	_, y := sides(t, f)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for range 100 {
		to := y.Expose(t, y.Alloc(t, 4096), 0, 4096, mem.Write)
		if err := y.Node.T.(*Transport).Withdraw(over, to); err != nil {
			t.Fatal(err)
		}
	}
}

// All links wait together for devices that let go of no memory, until one does.
func TestPatienceWithDevicesIsShared(t *testing.T) {
	tr := New(Config{})
	first := tr.patience(time.Hour)
	if again := tr.patience(2 * time.Hour); again != first {
		t.Errorf("the second link waits until %v, the first one until %v", again, first)
	}
	tr.lets()
	if later := tr.patience(2 * time.Hour); later.Sub(first) < 30*time.Minute {
		t.Errorf("after a device let go of memory a link waits until %v, the first one until %v", later, first)
	}
}
