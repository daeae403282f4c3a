package endpoint

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// allDirect has all endpoints of all tests use RDMA, for whatever can go there.
var allDirect = flag.Bool("endpoint.rdma", false, "run all tests with RDMA")

// commonFabric is what they use. A request in so many fails.
var commonFabric = sync.OnceValue(func() *soft.Fabric {
	requests := 0 // with the fabric's lock
	return soft.New(soft.Config{Late: 3, Faults: soft.Faults{
		Request: func(string, uint32, *rdma.SendRequest) rdma.Status {
			if requests++; requests%500 == 0 {
				return rdma.RemoteOperation
			}
			return rdma.Success
		}}})
})

// overRDMA returns cfg with RDMA, if all tests use it.
func overRDMA(cfg Config) Config {
	if *allDirect && cfg.RDMA.Provider == nil {
		cfg.RDMA = RDMA{Provider: commonFabric(), From: 1}
	}
	return cfg
}

// newFabric returns a fabric and what has an endpoint use it, for operations of any size. The test
// fails if objects of its devices are left.
func newFabric(t testing.TB, cfg soft.Config) (*soft.Fabric, RDMA) {
	f := soft.New(cfg)
	t.Cleanup(func() {
		if qps, cqs, mrs := f.Objects(); qps+cqs+mrs > 0 {
			t.Errorf("%d queue pairs, %d completion queues and %d memory regions are left", qps, cqs, mrs)
		}
		f.Close()
	})
	return f, RDMA{Provider: f, From: 1}
}

// sharedPattern is pattern in shared memory.
func sharedPattern(t testing.TB, n int) []byte {
	b := shared(t, n)
	copy(b, pattern(n, 1))
	return b
}

// devices has each of two endpoints use a device of its own, if they are those of a fabric.
func devices(r RDMA) (a, b RDMA) {
	a, b = r, r
	if _, ok := r.Provider.(*soft.Fabric); ok {
		a.Devices, b.Devices = "soft0", "soft1"
	}
	return a, b
}

// directPair returns two endpoints with a device each. The first one reads and writes region "data"
// of the second one by RDMA.
func directPair(t testing.TB, r RDMA, data []byte) (a, b *Endpoint, pb, pa *Peer, region *Region) {
	t.Helper()
	ra, rb := devices(r)
	b = newEndpoint(t, newContext(t), Config{Name: "b", RDMA: rb})
	a = newEndpoint(t, newContext(t), Config{Name: "a", RDMA: ra})
	region, err := b.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{Rights: Read | Write})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if pb, err = a.Connect(ctx, b.Info()); err != nil {
		t.Fatal(err)
	}
	if pa, err = b.Accept(ctx); err != nil {
		t.Fatal(err)
	}
	warm(t, pb, "data")
	return a, b, pb, pa, region
}

// warm reads a region until that goes by RDMA.
func warm(t testing.TB, p *Peer, region string) {
	t.Helper()
	before := directOf(p, OpRead)
	until(t, "RDMA", func() bool {
		wait(t, p.Read(make([]byte, 1), region, 0))
		return directOf(p, OpRead) > before
	})
}

// directOf returns how many operations have gone by RDMA.
func directOf(p *Peer, k Kind) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.counts.direct[k].N
}

// directTests are those that every provider passes.
var directTests = []struct {
	name string
	f    func(t *testing.T, r RDMA)
}{{"reads and writes", readsAndWritesAreDirect}, {"batches", batchesAreDirect}, {"unregister", unregisterEndsKeys},
	{"revoked keys", revokedKeysCostNothing}, {"rights", keysHaveTheRightsOfTheClient},
	{"messages", messagesAreDirect}, {"order of messages", messagesKeepTheirOrder},
	{"truncated messages", messagesByRDMAAreTruncatedOrExact}, {"messages from regions", messagesFromRegions},
	{"messages that are given up", messagesByRDMAAreGivenUp}}

func TestOperationsGoByRDMA(t *testing.T) {
	for _, c := range directTests {
		t.Run(c.name, func(t *testing.T) {
			_, r := newFabric(t, soft.Config{Late: 3})
			c.f(t, r)
		})
	}
}

func readsAndWritesAreDirect(t *testing.T, r RDMA) {
	data := sharedPattern(t, 4<<20)
	a, _, p, q, region := directPair(t, r, data)
	if p.Path() != PathDirect {
		t.Fatalf("path %v", p.Path())
	}
	reads, writes := directOf(p, OpRead), directOf(p, OpWrite)
	read, _ := region.Traffic()
	for i, n := range sizes {
		src, off := pattern(n, uint64(i+2)), int64(i*13)
		wait(t, p.Write(src, "data", off))
		dst := make([]byte, n)
		wait(t, p.Read(dst, "data", off))
		if !bytes.Equal(src, dst) || !bytes.Equal(src, data[off:][:n]) {
			t.Fatalf("%d bytes differ", n)
		}
	}
	want := uint64(len(sizes) - 1) // but for the empty one
	reads, writes = directOf(p, OpRead)-reads, directOf(p, OpWrite)-writes
	if reads != want || writes != want {
		t.Errorf("%d reads and %d writes by RDMA, want %d", reads, writes, want)
	}
	if again, _ := region.Traffic(); again != read {
		t.Errorf("the peer's processor has served %d bytes", again-read)
	}
	if s := a.Stats(); s.Paths["rdma"] != 1 || s.Direct["write"].N != want || s.Detours != 0 {
		t.Errorf("state %+v", s)
	}
	// The other end uses the same connection.
	if _, err := a.Register("back", mem.Host(data, mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	warm(t, q, "back")
	if a.Stats().Detours != 0 {
		t.Error("the path was lost")
	}
}

// Operations that one call starts are one batch for the device.
func batchesAreDirect(t *testing.T, r RDMA) {
	data := sharedPattern(t, 1<<20)
	_, _, p, _, _ := directPair(t, r, data)
	before := directOf(p, OpRead)
	var ops []Op
	bufs := make([][]byte, 1000)
	for i := range bufs {
		bufs[i] = make([]byte, 64+i%512)
		ops = append(ops, Op{Kind: OpRead, Local: mem.Host(bufs[i], mem.Anywhere), Region: "data",
			Offset: int64(i * 500)})
	}
	ops[7].Offset = int64(len(data))
	f := p.Batch(ops)
	if err := f.Wait(t.Context()); !errors.Is(err, ErrBounds) {
		t.Errorf("the batch: %v", err)
	}
	for i := range bufs {
		r := f.Result(i)
		if i == 7 {
			if !errors.Is(r.Err, ErrBounds) {
				t.Errorf("operation 7: %+v", r)
			}
		} else if r.Err != nil || r.N != int64(len(bufs[i])) || !bytes.Equal(bufs[i], data[i*500:][:len(bufs[i])]) {
			t.Fatalf("operation %d: %+v", i, r)
		}
	}
	if n := directOf(p, OpRead) - before; n != 999 {
		t.Errorf("%d reads by RDMA", n)
	}
}

// What one end of a connection guards, or cannot do, goes by TCP.
func TestGuardedConnectionsUseNoRDMA(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	for name, cfg := range map[string]Config{"checksum": {Checksum: true, RDMA: r}, "sealed": {Seal: true, RDMA: r},
		"no device": {}} {
		data := sharedPattern(t, 1<<20)
		b := newEndpoint(t, newContext(t), cfg)
		a := newEndpoint(t, newContext(t), Config{RDMA: r})
		if _, err := b.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{}); err != nil {
			t.Fatal(err)
		}
		p := connect(t, a, b.Info())
		for range 20 {
			got := make([]byte, len(data))
			if wait(t, p.Read(got, "data", 0)); !bytes.Equal(got, data) {
				t.Fatal("other bytes")
			}
		}
		if p.Path() != PathTCP || directOf(p, OpRead) > 0 {
			t.Errorf("%s: path %v, %d reads by RDMA", name, p.Path(), directOf(p, OpRead))
		}
	}
}

// Unregister is an error for the peer, and for its device.
func unregisterEndsKeys(t *testing.T, r RDMA) {
	data := sharedPattern(t, 1<<20)
	_, b, p, _, region := directPair(t, r, data)
	for round := range 20 {
		var fs []*Future
		for range 10 {
			fs = append(fs, p.Write(make([]byte, len(data)), "data", 0))
		}
		if round%2 == 0 { // some have ended, some are under way
			wait(t, fs[0])
		}
		region.Unregister()
		for i := range data { // it is the program's again
			data[i] = byte(round)
		}
		for _, f := range fs {
			if err := f.Wait(t.Context()); err != nil && !errors.Is(err, ErrStale) && !errors.Is(err, ErrNoRegion) {
				t.Fatal(err)
			}
		}
		for i := range data {
			if data[i] != byte(round) {
				t.Fatalf("round %d: byte %d was written after Unregister", round, i)
			}
		}
		var err error
		region, err = b.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{Rights: Read | Write})
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(data))
		until(t, "the new region", func() bool { return p.Read(got, "data", 0).Wait(t.Context()) == nil })
		if !bytes.Equal(got, data) {
			t.Fatal("other bytes")
		}
	}
	warm(t, p, "data")
}

// The path survives requests of a peer that has been told of the end of a region.
func revokedKeysCostNothing(t *testing.T, r RDMA) {
	data := sharedPattern(t, 1<<20)
	a, b, p, _, region := directPair(t, r, data)
	for range 20 {
		region.Unregister()
		until(t, "Revoked", func() bool { return revoking(b) == 0 })
		if err := p.Read(make([]byte, 1), "data", 0).Wait(t.Context()); !errors.Is(err, ErrStale) {
			t.Fatal(err)
		}
		var err error
		region, err = b.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{Rights: Read | Write})
		if err != nil {
			t.Fatal(err)
		}
		warm(t, p, "data")
	}
	if n := a.Stats().Detours; n > 0 {
		t.Errorf("the path failed %d times", n)
	}
}

// revoking returns how many keys peers may use although their regions are gone.
func revoking(e *Endpoint) (n int) {
	for _, p := range e.Peers() {
		p.mu.Lock()
		if s := p.session; s != nil && s.path != nil {
			n += len(s.path.revoking)
		}
		p.mu.Unlock()
	}
	return n
}

// clientSecret returns the credential of a client.
func clientSecret(t testing.TB, name string) string {
	t.Helper()
	secret, err := bootstrap.ParseSecret(testSecret)
	if err != nil {
		t.Fatal(err)
	}
	text, err := bootstrap.NewCredential(secret, name)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// Keys have the rights that the peer has, and no others.
func keysHaveTheRightsOfTheClient(t *testing.T, r RDMA) {
	data := sharedPattern(t, 1<<20)
	b := newEndpoint(t, newContext(t), Config{RDMA: r})
	x, err := b.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{Rights: Read | Write,
		Clients: map[string]mem.Rights{"adam": Read}})
	if err != nil {
		t.Fatal(err)
	}
	secrets := map[string]string{"": testSecret, "adam": clientSecret(t, "adam"), "eve": clientSecret(t, "eve")}
	var keys []uint32
	for name, secret := range secrets {
		a := newEndpoint(t, newContext(t), Config{Secret: secret, RDMA: r})
		p := connect(t, a, b.Info())
		warm(t, p, "data")
		err = p.Write(make([]byte, 1), "data", 0).Wait(t.Context())
		if name == "adam" != errors.Is(err, ErrRights) || name != "adam" && err != nil {
			t.Errorf("client %q writes: %v", name, err)
		}
		p.mu.Lock()
		for _, k := range p.session.path.keys {
			keys = append(keys, k.remote)
		}
		if name == "adam" { // its software tries nonetheless
			for n, k := range p.known {
				k.Rights |= Write
				p.known[n] = k
			}
		}
		p.mu.Unlock()
		if name == "adam" {
			want := bytes.Clone(data)
			err := p.Write(make([]byte, len(data)), "data", 0).Wait(t.Context())
			if !errors.Is(err, ErrRights) || !bytes.Equal(data, want) {
				t.Errorf("a write without the right: %v", err)
			}
			if a.Stats().Detours != 1 {
				t.Error("the device has let it pass, or was not asked")
			}
		}
	}
	x.keyMu.Lock()
	if len(x.grants) != len(secrets) || keys[0] == keys[1] || keys[1] == keys[2] || keys[0] == keys[2] {
		t.Errorf("%d registrations, keys %x", len(x.grants), keys)
	}
	x.keyMu.Unlock()
}

// A device that gives keys again gives none that a peer may still use.
func TestKeysThatPeersMayUseAreNotGivenAgain(t *testing.T) {
	_, r := newFabric(t, soft.Config{ReuseKeys: true})
	data := sharedPattern(t, 64<<10)
	_, b, p, _, region := directPair(t, r, data)
	p.mu.Lock()
	old := p.session.path.keys[p.known["data"].id]
	old.users++ // an operation of the peer may use the key for a long time
	p.mu.Unlock()
	region.Unregister()
	other := newEndpoint(t, newContext(t), Config{RDMA: r})
	q := connect(t, other, b.Info())
	next := func() uint32 {
		x, err := b.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{Rights: Read | Write})
		if err != nil {
			t.Fatal(err)
		}
		q.mu.Lock()
		delete(q.known, "data")
		q.mu.Unlock()
		warm(t, q, "data")
		q.mu.Lock()
		k := q.session.path.keys[q.known["data"].id]
		q.mu.Unlock()
		x.Unregister()
		return k.remote
	}
	for range 10 {
		if next() == old.remote {
			t.Fatal("other memory has the key")
		}
	}
	p.mu.Lock()
	p.session.path.unuseLocked(old)
	p.unlock()
	until(t, "Revoked", func() bool { return revoking(b) == 0 })
}

// stalls is a provider that says when its next call of a kind begins, and waits then.
type stalls struct {
	rdma.Provider
	register, open stall
}

// stall holds up one call.
type stall struct {
	armed, came atomic.Bool
	end         chan struct{}
}

// arm has the next call wait until end is called, which may be called again.
func (s *stall) arm() (end func()) {
	s.end = make(chan struct{})
	s.armed.Store(true)
	return sync.OnceFunc(func() { close(s.end) })
}

func (s *stall) call() {
	if s.armed.CompareAndSwap(true, false) {
		s.came.Store(true)
		<-s.end
	}
}

func (s *stalls) Open(name string, notify func(rdma.Event)) (rdma.Device, error) {
	s.open.call()
	d, err := s.Provider.Open(name, notify)
	return stallingDevice{d, s}, err
}

type stallingDevice struct {
	rdma.Device
	of *stalls
}

func (d stallingDevice) Register(m mem.Memory, access rdma.Access) (rdma.MR, error) {
	d.of.register.call()
	return d.Device.Register(m, access)
}

// A session does not keep a region that is unregistered while its key is given to the peer.
func TestRegionsThatGoWhileTheirKeysAreGiven(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	ra, rb := devices(r)
	s := &stalls{Provider: rb.Provider}
	rb.Provider = s
	data := sharedPattern(t, 64<<10)
	b := newEndpoint(t, newContext(t), Config{Name: "b", RDMA: rb})
	a := newEndpoint(t, newContext(t), Config{Name: "a", RDMA: ra})
	add := func(name string) *Region {
		t.Helper()
		x, err := b.Register(name, mem.Host(data, mem.Anywhere), RegionConfig{})
		if err != nil {
			t.Fatal(err)
		}
		return x
	}
	held := func(p *Peer, x *Region) bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		_, ok := p.session.path.holds[x]
		return ok
	}
	kept := add("data")
	p := connect(t, a, b.Info())
	q := accept(t, b)
	warm(t, p, "data")

	register := s.register.arm()
	defer register()
	x := add("other")
	wait(t, p.Read(make([]byte, 1), "other", 0)) // asks for a key
	until(t, "a registration", s.register.came.Load)
	open := s.open.arm()
	defer open()
	opened := make(chan error, 1)
	go func() {
		d, err := b.card.Domain("another client") // holds up what releases a domain
		if err == nil {
			err = d.Release()
		}
		opened <- err
	}()
	until(t, "the device", s.open.came.Load)
	register()
	until(t, "the end of the registration", func() bool {
		x.keyMu.Lock()
		defer x.keyMu.Unlock()
		return len(x.grants) > 0
	})
	x.Unregister()
	open()
	if err := <-opened; err != nil {
		t.Error(err)
	}
	until(t, "the answer", func() bool {
		q.mu.Lock()
		defer q.mu.Unlock()
		return q.session.owed == 0
	})
	if held(q, x) {
		t.Error("the session has a region that is gone")
	}

	q.mu.Lock()
	path := q.session.path
	q.mu.Unlock()
	if path.hold(kept); !held(q, kept) {
		t.Error("the session does not have a region from which a message is lent")
	}
	kept.Unregister()
	if path.hold(kept); held(q, kept) {
		t.Error("the session has a region that was unregistered while a message from it was lent")
	}
}

// An operation that waits for its flight while its key is revoked does not use the key.
func TestQueuedOperationsLoseRevokedKeys(t *testing.T) {
	_, r := newFabric(t, soft.Config{ReuseKeys: true})
	data := sharedPattern(t, 64<<10)
	_, b, p, _, region := directPair(t, r, data)
	var path *path
	until(t, "the end of the flights", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		if path = p.session.path; path.flights != 0 {
			return false
		}
		path.flights = maxFlights
		return true
	})
	write := p.Write(bytes.Repeat([]byte{0xee}, len(data)), "data", 0)
	p.mu.Lock()
	queued := path.queue.len()
	p.mu.Unlock()
	if queued != 1 {
		t.Fatalf("%d operations wait for a flight, want 1", queued)
	}
	region.Unregister()
	until(t, "Revoked", func() bool { return revoking(b) == 0 })
	want := bytes.Clone(data)
	other := newEndpoint(t, newContext(t), Config{RDMA: r})
	if _, err := b.Register("other", mem.Host(data, mem.Anywhere), RegionConfig{Rights: Read | Write}); err != nil {
		t.Fatal(err)
	}
	warm(t, connect(t, other, b.Info()), "other") // it may have the key again
	p.mu.Lock()
	path.flights = 0
	path.flyLocked()
	p.unlock()
	if err := write.Wait(t.Context()); !errors.Is(err, ErrStale) {
		t.Errorf("the write: %v, want ErrStale", err)
	}
	if !bytes.Equal(data, want) {
		t.Error("the write has changed memory of another region")
	}
}

// A given-up operation ends, and nothing of it comes late.
func TestGivenUpOperationsOverRDMA(t *testing.T) {
	f, r := newFabric(t, soft.Config{})
	data := shared(t, 4<<20)
	a, _, p, _, _ := directPair(t, r, data)
	for round := 0; round < 10 || round < 1000 && a.Stats().Detours == 0; round++ {
		f.SetPort("soft1", 1, false) // what is under way stays under way
		src := bytes.Repeat([]byte{byte(2*round + 1)}, len(data))
		ctx, cancel := context.WithCancel(t.Context())
		fs := []*Future{p.Write(src, "data", 0), p.Read(make([]byte, 1<<20), "data", 0)}
		for range round { // so that they are under way in some rounds
			runtime.Gosched()
		}
		cancel()
		for _, f := range fs {
			if err := f.Wait(ctx); err != nil && !errors.Is(err, ErrCancelled) {
				t.Fatal(err)
			}
		}
		clear(src) // it is the program's again
		f.SetPort("soft1", 1, true)
		want := bytes.Repeat([]byte{byte(2*round + 2)}, len(data))
		wait(t, p.Write(want, "data", 0))
		got := make([]byte, len(data))
		wait(t, p.Read(got, "data", 0))
		if !bytes.Equal(got, want) || !bytes.Equal(data, want) {
			t.Fatalf("round %d: a write that was given up has come later than the next one", round)
		}
		warm(t, p, "data")
	}
	if a.Stats().Detours == 0 {
		t.Error("no path was given up")
	}
}

func TestDeadlinesOverRDMA(t *testing.T) {
	f, r := newFabric(t, soft.Config{})
	r.Settings.Timeout = unanswered
	_, _, p, _, _ := directPair(t, r, shared(t, 1<<20))
	f.SetPort("soft1", 1, false)
	x := p.Start(Op{Kind: OpRead, Local: mem.Host(make([]byte, 1<<20), mem.Anywhere), Region: "data",
		Timeout: 10 * time.Millisecond})
	if err := x.Wait(t.Context()); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	f.SetPort("soft1", 1, true)
	warm(t, p, "data")
}

// Operations go on by TCP while a port is down, and by RDMA afterwards.
func TestPortsGoDownUnderLoad(t *testing.T) {
	f, r := newFabric(t, soft.Config{})
	data := shared(t, 8*laneOf)
	a, _, p, _, _ := directPair(t, r, data)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 1))
			for n := uint64(0); ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				size := 1 + rng.IntN(laneOf)
				src := pattern(size, n)
				if err := p.Write(src, "data", int64(i*laneOf)).Wait(t.Context()); err != nil {
					t.Error(err)
					return
				}
				got := make([]byte, size)
				if err := p.Read(got, "data", int64(i*laneOf)).Wait(t.Context()); err != nil || !bytes.Equal(got, src) {
					t.Errorf("lane %d: %v, or other bytes", i, err)
					return
				}
			}
		})
	}
	for i := range 4 {
		device := [...]string{"soft0", "soft1"}[i%2]
		detours := a.Stats().Detours
		f.SetPort(device, 1, false)
		until(t, "a detour", func() bool { return a.Stats().Detours > detours })
		f.SetPort(device, 1, true)
		before := directOf(p, OpRead)
		until(t, "RDMA", func() bool { return directOf(p, OpRead) > before && p.Path() == PathDirect })
	}
	close(stop)
	wg.Wait()
}

const laneOf = 64 << 10

// A request that fails in a recoverable way costs the path for a while, and later operations of its
// region go by RDMA again. After a fatal one those of the region go by TCP, and cost the path
// nothing. The operation itself ends well in either case.
func TestStatusClasses(t *testing.T) {
	for _, status := range []rdma.Status{rdma.RetryExceeded, rdma.Flushed, rdma.RemoteAccess, rdma.LocalProtection,
		rdma.RemoteInvalid} {
		t.Run(status.String(), func(t *testing.T) {
			var now atomic.Bool
			_, r := newFabric(t, soft.Config{Faults: soft.Faults{
				Request: func(_ string, _ uint32, r *rdma.SendRequest) rdma.Status {
					if r.Op == rdma.Read && now.CompareAndSwap(true, false) {
						return status
					}
					return rdma.Success
				}}})
			data := sharedPattern(t, 1<<16)
			_, b, p, _, _ := directPair(t, r, data)
			if _, err := b.Register("other", mem.Host(shared(t, 100), mem.Anywhere), RegionConfig{}); err != nil {
				t.Fatal(err)
			}
			got := make([]byte, len(data))
			fails := func() bool {
				warm(t, p, "other")
				now.Store(true)
				wait(t, p.Read(got, "data", 0))
				return !now.Swap(false)
			}
			if !fails() || !bytes.Equal(got, data) {
				t.Fatal("nothing has failed, or other bytes were read")
			}
			warm(t, p, "other")
			if status.Recoverable() {
				warm(t, p, "data")
				return
			}
			// It bars the region if it is the first error that is seen of the read.
			until(t, "reads by TCP", func() bool { return !fails() })
			warm(t, p, "other")
			before := directOf(p, OpRead)
			wait(t, p.Read(got, "data", 0))
			if n := directOf(p, OpRead) - before; n != 0 || !bytes.Equal(got, data) || p.Path() != PathDirect {
				t.Errorf("%d operations of the region have gone by RDMA, the path is %v", n, p.Path())
			}
		})
	}
}

// A fatal status of a batch with two regions bars that region alone whose requests fail, also if
// they are tried without others: the other one goes by RDMA again, and its operations end well.
func TestFatalStatusBarsItsRegionOnly(t *testing.T) {
	var bad atomic.Uint32 // the key whose reads fail
	_, r := newFabric(t, soft.Config{Faults: soft.Faults{
		Request: func(_ string, _ uint32, r *rdma.SendRequest) rdma.Status {
			if r.Op == rdma.Read && r.RemoteKey == bad.Load() {
				return rdma.RemoteAccess
			}
			return rdma.Success
		}}})
	data, other := sharedPattern(t, 1<<16), sharedPattern(t, 1<<16)
	slices.Reverse(other)
	a, b, p, _, _ := directPair(t, r, data)
	if _, err := b.Register("other", mem.Host(other, mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	warm(t, p, "other")
	p.mu.Lock()
	bad.Store(p.session.path.keys[p.known["data"].id].remote)
	p.mu.Unlock()
	both := func() {
		t.Helper()
		got := [2][]byte{make([]byte, len(data)), make([]byte, len(other))}
		wait(t, p.Batch([]Op{{Kind: OpRead, Local: mem.Host(got[0], mem.Anywhere), Region: "data"},
			{Kind: OpRead, Local: mem.Host(got[1], mem.Anywhere), Region: "other"}}))
		if !bytes.Equal(got[0], data) || !bytes.Equal(got[1], other) {
			t.Fatal("other bytes")
		}
	}
	both()
	if n := a.Stats().Detours; n != 1 {
		t.Fatalf("%d failures of a batch with a bad key, want 1", n)
	}
	warm(t, p, "other") // fails if that is barred, too
	both()              // tries the bad key without the other one
	warm(t, p, "other")
	for range 5 {
		before := directOf(p, OpRead)
		both()
		if n := directOf(p, OpRead) - before; n != 1 {
			t.Errorf("%d operations of a batch have gone by RDMA, want that of the other region", n)
		}
	}
	if n := a.Stats().Detours; n != 2 {
		t.Errorf("%d failures, want one of the batch and one of the bad key alone", n)
	}
}

// A peer that only reads and writes by RDMA sends no frames, and keeps its session.
func TestRDMAKeepsTheSession(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	data := sharedPattern(t, 100)
	b := newEndpoint(t, newContext(t), Config{RDMA: r, IdleTimeout: 10 * time.Millisecond})
	a := newEndpoint(t, newContext(t), Config{RDMA: r})
	if _, err := b.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	p := connect(t, a, b.Info())
	warm(t, p, "data")
	sessions := a.Stats().Sessions
	for begin := time.Now(); time.Since(begin) < 300*time.Millisecond; {
		wait(t, p.Read(make([]byte, 100), "data", 0))
	}
	if n := a.Stats().Sessions; n != sessions {
		t.Errorf("%d sessions were made meanwhile", n-sessions)
	}
}

// A device that is removed ends nothing but the use of it, and is used again when it is back: for
// regions whose keys the peer has, for regions that it has not used yet, and for messages. No
// registration of a region is left from before.
func TestRemovedDevices(t *testing.T) {
	for _, device := range []string{"soft0", "soft1"} {
		t.Run(device, func(t *testing.T) {
			f, r := newFabric(t, soft.Config{ReuseNumbers: true, ReuseKeys: true})
			data := sharedPattern(t, 1<<20)
			_, b, p, pa, x := directPair(t, r, data)
			other := sharedPattern(t, 1<<20)
			slices.Reverse(other)
			for i := range 3 {
				f.Remove(device)
				for range 20 {
					got := make([]byte, len(data))
					if wait(t, p.Read(got, "data", 0)); !bytes.Equal(got, data) {
						t.Fatal("other bytes")
					}
				}
				name := fmt.Sprint("other ", i)
				if _, err := b.Register(name, mem.Host(other, mem.Anywhere), RegionConfig{Rights: Read}); err != nil {
					t.Fatal(err)
				}
				f.Restore(device)
				for _, region := range []struct {
					name string
					data []byte
				}{{"data", data}, {name, other}} {
					warm(t, p, region.name)
					got := make([]byte, len(data))
					if wait(t, p.Read(got, region.name, 0)); !bytes.Equal(got, region.data) {
						t.Fatalf("other bytes of %q", region.name)
					}
				}
				before := directOf(pa, OpRecv)
				until(t, "a message by RDMA", func() bool {
					got := make([]byte, len(other))
					received := pa.Recv(got)
					wait(t, p.Send(other))
					if wait(t, received); !bytes.Equal(got, other) {
						t.Fatal("other bytes of a message")
					}
					return directOf(pa, OpRecv) > before
				})
				until(t, "one registration of the region", func() bool {
					x.keyMu.Lock()
					defer x.keyMu.Unlock()
					return len(x.grants) == 1
				})
			}
		})
	}
}

// unanswered is a timeout of the device (4.096 µs * 2^20) after which it repeats a request that no
// test waits for.
const unanswered = 20

// Operations over RDMA end when either end is closed.
func TestCloseEndsRDMA(t *testing.T) {
	for _, near := range []bool{true, false} {
		f, r := newFabric(t, soft.Config{})
		r.Settings.Timeout = unanswered
		a, b, p, _, _ := directPair(t, r, shared(t, 1<<20))
		f.SetPort("soft1", 1, false)
		x := p.Write(make([]byte, 1<<20), "data", 0)
		if near {
			a.Close()
		} else {
			b.Close()
		}
		err := x.Wait(t.Context())
		if near && !errors.Is(err, ErrClosed) || !near && !errors.Is(err, ErrBroken) {
			t.Errorf("closed here: %t: %v", near, err)
		}
	}
}

// Settings of the network that no connection can have are an error of New.
func TestSettingsOfTheNetworkAreChecked(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	r.Settings.ServiceLevel = 16
	e, err := New(newContext(t), Config{Secret: "a secret of this test alone", RDMA: r})
	if err == nil {
		e.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "ServiceLevel 16") {
		t.Errorf("%v, want an error with the service level", err)
	}
}
