package endpoint_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/endpoint"
	"tutti/rdma/endpoint/endpointtest"
	"tutti/rdma/queue"
	"tutti/rdma/soft"
)

// bars has tests fail that take longer than they may on a machine that does nothing else.
var bars = flag.Bool("bars", false, "assert times as well, on a machine that does nothing else")

// station is a process's part of a connection: a table whose connections have sets of queue pairs,
// and a device.
type station struct {
	t      testing.TB
	name   string
	d      rdma.Device
	poller *queue.Poller
	mr     rdma.MR
	b      []byte
	table  *endpoint.Table
	stop   context.CancelFunc
	served sync.WaitGroup
	events chan rdma.Event

	mu   sync.Mutex
	sets map[*endpoint.Connection]*queue.Set
}

// What a stream writes at a time, and its parts.
const (
	streams  = 2 // of each station
	piece    = 8 << 10
	pieces   = 32
	slotSize = pieces * piece
)

// newStations returns two stations, which call each other.
func newStations(t testing.TB, p rdma.Provider, devices [2]string, change func(*endpoint.Config)) [2]*station {
	t.Helper()
	var all [2]*station
	for i := range all {
		s := &station{t: t, name: fmt.Sprint("station ", i), b: make([]byte, 2*streams*slotSize),
			sets: map[*endpoint.Connection]*queue.Set{}, events: make(chan rdma.Event, 100)}
		all[i] = s
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		var err error
		s.d, err = p.Open(devices[i], func(e rdma.Event) {
			select {
			case s.events <- e:
			default:
			}
		})
		must(err)
		const rights = rdma.LocalWrite | rdma.RemoteWrite
		s.mr, err = s.d.Register(mem.Host(s.b, mem.Anywhere), rights)
		must(err)
		s.poller, err = queue.NewPoller(s.d, 1024)
		must(err)
		qp := rdma.QPConfig{Send: s.poller.CQ(), Recv: s.poller.CQ(), SendDepth: 64, RecvDepth: 1}
		cfg := endpoint.Config{Session: rand.Uint64() | 1, Device: s.d, Queues: []rdma.QPConfig{qp, qp}, Access: rights,
			Caller: callerFunc(func(_ context.Context, _ string, request []byte) ([]byte, error) {
				return all[1-i].table.Handle(s.name, request)
			}), Prepare: s.prepare, Retire: s.retire}
		if change != nil {
			change(&cfg)
		}
		s.table, err = endpoint.New(cfg)
		must(err)
		var ctx context.Context
		ctx, s.stop = context.WithCancel(context.Background())
		s.served.Go(func() {
			if err := s.poller.Serve(ctx); ctx.Err() == nil && !errors.Is(err, rdma.ErrRemoved) {
				t.Errorf("%s: %v", s.name, err)
			}
		})
	}
	return all
}

func (s *station) prepare(c *endpoint.Connection) error {
	set, err := queue.New(s.poller, c.QPs, queue.Config{Timeout: time.Minute, Failed: func(error) { go c.Fail() }})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sets[c] = set
	return nil
}

func (s *station) retire(c *endpoint.Connection, drained func()) {
	go func() {
		s.mu.Lock()
		set := s.sets[c]
		delete(s.sets, c)
		s.mu.Unlock()
		if set != nil { // prepare has not failed
			ctx, cancel := context.WithTimeout(context.Background(), endpointtest.Patience)
			defer cancel()
			if err := errors.Join(set.Drain(ctx), set.Close()); err != nil {
				s.t.Errorf("%s: %v", s.name, err)
			}
		}
		drained()
	}()
}

// close ends a station. Those that call it may get errors then.
func (s *station) close() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), endpointtest.Patience)
	defer cancel()
	err := s.table.Close(ctx)
	s.stop()
	s.served.Wait()
	if err = errors.Join(err, s.poller.Close(), s.mr.Close(), s.d.Close()); err != nil {
		s.t.Errorf("%s ends: %v", s.name, err)
	}
}

// load is streams from each of two stations to the other one.
type load struct {
	t     testing.TB
	limit time.Duration // of a batch
	stop  context.CancelFunc
	tasks sync.WaitGroup
	bytes atomic.Int64 // that have been written, and compared

	mu   sync.Mutex
	errs []error
}

func newLoad(t testing.TB, both [2]*station, limit time.Duration) *load {
	l := &load{t: t, limit: limit}
	var ctx context.Context
	ctx, l.stop = context.WithCancel(context.Background())
	for i, s := range both {
		for n := range streams {
			l.tasks.Go(func() { l.stream(ctx, s, both[1-i], n) })
		}
	}
	return l
}

// end ends the streams, and returns their errors.
func (l *load) end() []error {
	l.stop()
	l.tasks.Wait()
	return l.errs
}

// errors returns the errors so far.
func (l *load) errors() []error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.errs
}

// failed counts an error, which has to be of a type that a program can tell from others.
func (l *load) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	_, isStatus := errors.AsType[*rdma.StatusError](err)
	_, isFull := errors.AsType[*rdma.QueueFullError](err)
	_, isCall := errors.AsType[*rdma.Error](err)
	_, isPeer := errors.AsType[*endpoint.PeerError](err)
	if late := errors.Is(err, context.DeadlineExceeded); late && l.limit == endpointtest.Patience {
		l.t.Errorf("a batch that has not ended by itself: %v", err)
	} else if !late && !isStatus && !isFull && !isCall && !isPeer && !errors.Is(err, queue.ErrFailed) &&
		!errors.Is(err, rdma.ErrRemoved) && !errors.Is(err, rdma.ErrClosed) {
		l.t.Errorf("an error without a type: %v", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errs = append(l.errs, err)
}

// stream writes from one station to the other until ctx ends, and compares what has arrived with
// what was sent.
func (l *load) stream(ctx context.Context, s, to *station, n int) {
	from, at := s.b[n*slotSize:][:slotSize], to.b[(streams+n)*slotSize:][:slotSize]
	var b queue.Batch
	for i := range pieces { // pieces in another order there
		b.Ops = append(b.Ops, queue.Op{Kind: rdma.Write, Local: addressOf(from[i*piece:]), Key: s.mr.LocalKey(),
			Remote: addressOf(at[(pieces-1-i)*piece:]), RemoteKey: to.mr.RemoteKey(), Len: piece})
	}
	r := rand.NewChaCha8([32]byte{byte(n)})
	pause := time.NewTicker(time.Millisecond) // between attempts that fail
	defer pause.Stop()
	for ctx.Err() == nil {
		for i := range pieces {
			r.Read(from[i*piece:][:64])
		}
		if err := l.write(ctx, s, to, &b); err != nil {
			l.failed(ctx, err)
			select {
			case <-pause.C:
			case <-ctx.Done():
			}
			continue
		}
		for i := range pieces {
			if !bytes.Equal(from[i*piece:][:piece], at[(pieces-1-i)*piece:][:piece]) {
				l.t.Errorf("%s: piece %d of a batch that has ended well has not arrived", s.name, i)
				return
			}
		}
		l.bytes.Add(slotSize)
	}
}

// write writes a batch over the present connection. It always ends, with ctx or not.
func (l *load) write(ctx context.Context, s, to *station, b *queue.Batch) error {
	c, err := s.table.Open(ctx, to.name)
	if err != nil {
		return err
	}
	s.mu.Lock()
	set := s.sets[c]
	s.mu.Unlock()
	if set == nil {
		return rdma.ErrClosed // it was retired meanwhile
	}
	soon, cancel := context.WithTimeout(context.Background(), l.limit)
	defer cancel()
	t, err := set.Submit(soon, b)
	if err != nil {
		return err
	}
	if err = t.Wait(soon); !t.Ended() {
		l.t.Errorf("%s: a batch has not ended, with %v", s.name, err)
	}
	return err
}

// flows waits until so many bytes more have been written.
func (l *load) flows(n int64) {
	l.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late, end := time.After(endpointtest.Patience), l.bytes.Load()+n
	for l.bytes.Load() < end {
		select {
		case <-tick.C:
		case <-late:
			l.mu.Lock()
			defer l.mu.Unlock()
			l.t.Fatalf("no traffic any more; %d errors, the last ones: %v", len(l.errs), l.errs[max(0, len(l.errs)-3):])
		}
	}
}

// fails waits for an error that wraps another one, or for any if that is nil.
func (l *load) fails(want error) {
	l.t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	late := time.After(endpointtest.Patience)
	for !slices.ContainsFunc(l.errors(), func(err error) bool { return want == nil || errors.Is(err, want) }) {
		select {
		case <-tick.C:
		case <-late:
			errs := l.errors()
			l.t.Fatalf("no error %v among %d, the last one: %v", want, len(errs), errs[:min(9, len(errs))])
		}
	}
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// runFailures has queue pairs fail under load, at either end, and each time the streams go on over
// another connection.
func runFailures(t *testing.T, p rdma.Provider, devices [2]string, rounds int, change func(*endpoint.Config)) {
	both := newStations(t, p, devices, change)
	l := newLoad(t, both, endpointtest.Patience)
	var late time.Time // for more rounds, until a batch has failed
	for round := 0; round < rounds || len(l.errors()) == 0 && (round == rounds || time.Now().Before(late)); round++ {
		if round == rounds {
			late = time.Now().Add(endpointtest.Patience)
		}
		l.flows(2 * slotSize)
		s := both[round%2]
		for _, c := range s.table.Connections() {
			if err := c.QPs[round/2%len(c.QPs)].Fail(); err != nil && !errors.Is(err, rdma.ErrClosed) {
				t.Error(err)
			}
			select {
			case <-c.Retired():
			case <-time.After(endpointtest.Patience):
				t.Fatal("a connection with a queue pair that has failed stays")
			}
		}
	}
	l.flows(2 * slotSize)
	errs := l.end()
	for _, s := range both {
		s.close()
	}
	if len(errs) == 0 {
		t.Error("no batch has failed")
	}
	t.Logf("%d bytes, %d errors, the last one: %v", l.bytes.Load(), len(errs), errs[max(0, len(errs)-1):])
}

// TestFailedQueuePairsAreReplacedUnderLoad: also on a device whose queue pairs cannot be reset.
func TestFailedQueuePairsAreReplacedUnderLoad(t *testing.T) {
	for _, quirks := range []rdma.Quirks{{}, {NoReset: true}} {
		f, names := fabric(t, soft.Config{ReuseNumbers: true, Attributes: rdma.Attributes{Quirks: quirks}})
		runFailures(t, f, [2]string{names[0], names[1]}, 20, brisk)
	}
}

// TestRemovedDeviceUnderLoad: what is under way ends with an error that says so, nothing hangs, and
// when the device is back everything works, on objects that are made anew.
func TestRemovedDeviceUnderLoad(t *testing.T) {
	f, names := fabric(t, soft.Config{})
	for range 3 {
		both := newStations(t, f, [2]string{names[0], names[1]}, brisk)
		l := newLoad(t, both, endpointtest.Patience)
		l.flows(4 * slotSize)
		f.Remove(names[0])
		await(t, both[0].events, rdma.DeviceRemoved)
		ctx, cancel := context.WithTimeout(context.Background(), endpointtest.Patience)
		defer cancel()
		for { // until the failed connection is retired
			_, err := both[0].table.Open(ctx, both[1].name)
			if errors.Is(err, rdma.ErrRemoved) {
				break
			}
			if err != nil {
				t.Fatalf("%v, want %v", err, rdma.ErrRemoved)
			}
		}
		l.fails(rdma.ErrRemoved)
		l.end()
		for _, s := range both {
			s.close()
		}
		if _, err := f.Open(names[0], nil); !errors.Is(err, rdma.ErrNoDevice) {
			t.Errorf("%v, want %v", err, rdma.ErrNoDevice)
		}
		f.Restore(names[0])
	}
}

// await waits for an event.
func await(t *testing.T, events <-chan rdma.Event, kind rdma.EventKind) {
	t.Helper()
	for late := time.After(endpointtest.Patience); ; {
		select {
		case e := <-events:
			if e.Kind == kind {
				return
			}
		case <-late:
			t.Fatalf("no event %v", kind)
		}
	}
}
