package card

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/endpoint"
	"tutti/rdma/rdmatest"
	"tutti/rdma/soft"
)

// patience is longer than anything takes.
const patience = 20 * time.Second

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// side is one end of a line.
type side struct {
	card   *Card
	domain *Domain
	line   *Line
	lost   chan error
}

// newSides returns the ends of a line between two devices of a fabric. The test fails if objects of
// the devices are left.
func newSides(t *testing.T, cfg soft.Config) (*soft.Fabric, [2]*side) {
	t.Helper()
	f := soft.New(cfg)
	t.Cleanup(func() {
		if qps, cqs, mrs := f.Objects(); qps+cqs+mrs > 0 {
			t.Errorf("%d queue pairs, %d completion queues and %d memory regions are left", qps, cqs, mrs)
		}
		f.Close()
	})
	var sides [2]*side
	var mu sync.Mutex
	for i := range sides {
		s := &side{lost: make(chan error, 16)}
		var err error
		s.card, err = Open(Config{Provider: f, Devices: fmt.Sprint("soft", i), Log: slog.New(slog.DiscardHandler)})
		if err == nil {
			s.domain, err = s.card.Domain("a principal")
		}
		if err != nil {
			t.Fatal(err)
		}
		call := func(_ context.Context, request []byte) ([]byte, error) {
			mu.Lock()
			other := sides[1-i].line
			mu.Unlock()
			return other.Handle(request)
		}
		line, err := s.domain.NewLine(LineConfig{Call: call, Lost: func(_ *Conn, err error) { s.lost <- err }})
		if err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		s.line = line
		sides[i] = s
		mu.Unlock()
	}
	t.Cleanup(func() {
		for _, s := range sides {
			for _, err := range []error{s.line.Close(), s.domain.Release(), s.card.Close()} {
				if err != nil {
					t.Error(err)
				}
			}
		}
	})
	return f, sides
}

// register registers memory of s until the test ends.
func (s *side) register(t *testing.T, b []byte, access rdma.Access) Registration {
	t.Helper()
	r, err := s.domain.Register(mem.Host(b, mem.Anywhere), nil, access, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func TestOpenSaysWhatIsWrong(t *testing.T) {
	f := soft.New(soft.Config{})
	defer f.Close()
	f.SetPort("soft0", 1, false)
	c, err := Open(Config{Provider: f})
	if err != nil || c.String() != "soft1:1" {
		t.Errorf("with one port that is down: %v, %v", c, err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	for want, cfg := range map[string]Config{
		"soft0:1 is down":  {Devices: "soft0"},
		"nothing is named": {Devices: "mlx5"},
		"no address":       {GID: "192.0.2.1"},
		"list of devices":  {Devices: ","},
	} {
		cfg.Provider = f
		if _, err := Open(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", cfg, err, want)
		}
	}
}

func TestReadsAndWritesMoveMemory(t *testing.T) {
	f, s := newSides(t, soft.Config{Late: 3})
	data := bytes.Repeat([]byte{1}, 1<<20)
	r := s[1].register(t, data, Read|Write)
	k, err := s[0].line.Open(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	if again, err := s[0].line.Open(soon(t)); err != nil || again != k {
		t.Fatalf("another connection, or %v", err)
	}
	var all []Request
	got := make([][]byte, 200)
	for i := range got { // of many sizes, from the first to the last byte
		got[i] = make([]byte, 1+i*i)
		all = append(all, Request{Local: mem.Host(got[i], mem.Anywhere), Key: r.RemoteKey(),
			Remote: r.Address + uint64(i*(len(data)-len(got[i]))/(len(got)-1))})
	}
	if err := k.Move(all); err != nil {
		t.Fatal(err)
	}
	for i, b := range got {
		if bytes.Count(b, []byte{1}) != len(b) {
			t.Fatalf("read %d has other bytes", i)
		}
	}
	if _, _, mrs := f.Objects(); mrs != 2 {
		t.Errorf("%d memory regions, want those of the test and the staging", mrs)
	}
	two := bytes.Repeat([]byte{2}, 1000)
	if err := k.Move([]Request{{Write: true, Local: mem.Host(two, mem.Anywhere), Remote: r.Address + 5,
		Key: r.RemoteKey()}}); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(data[5:1005], two) || data[4] != 1 || data[1005] != 1 {
		t.Error("other bytes were written")
	}
}

// A key that the peer has not given fails the connection, and the next Open makes another one. The
// error is the fatal one of the request, also if the flushed receives complete before it.
func TestMoveFails(t *testing.T) {
	_, s := newSides(t, soft.Config{Late: 8})
	data := make([]byte, 4096)
	readable := s[1].register(t, data, Read)
	for round := range 50 {
		k, err := s[0].line.Open(soon(t))
		if err != nil {
			t.Fatal(err)
		}
		err = k.Move([]Request{{Write: true, Local: mem.Host([]byte{1}, mem.Anywhere), Remote: readable.Address,
			Key: readable.RemoteKey()}})
		if !rdma.Fatal(err) || data[0] != 0 {
			t.Fatalf("round %d: a write without the right: %v", round, err)
		}
		if err := <-s[0].lost; err == nil {
			t.Error("the connection was lost without a reason")
		}
		<-k.Ended()
		s[1].line.Cut() // its end may not have noticed
		<-s[1].lost
	}
}

func TestMemoryThatCannotBeRegisteredIsNotMoved(t *testing.T) {
	fail := make(chan struct{})
	_, s := newSides(t, soft.Config{Faults: soft.Faults{Call: func(device, call string) syscall.Errno {
		select {
		case <-fail:
			if device == "soft0" && strings.HasPrefix(call, "register") {
				return syscall.ENOMEM
			}
		default:
		}
		return 0
	}}})
	data := make([]byte, 1<<20)
	r := s[1].register(t, data, Read|Write)
	k, err := s[0].line.Open(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	close(fail)
	var memory *MemoryError
	err = k.Move([]Request{{Local: mem.Host(make([]byte, len(data)), mem.Anywhere), Remote: r.Address,
		Key: r.RemoteKey()}})
	if !errors.As(err, &memory) || !errors.Is(err, syscall.ENOMEM) {
		t.Error(err)
	}
	if again, err := s[0].line.Open(soon(t)); err != nil || again != k {
		t.Errorf("the connection was lost: %v", err)
	}
}

// Queue pairs that cannot reach each other are not used.
func TestOpenProvesTheConnection(t *testing.T) {
	f, s := newSides(t, soft.Config{})
	f.SetPort("soft1", 1, false)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := s[0].line.Open(ctx); err == nil {
		t.Error("a connection to a port that is down")
	}
	f.SetPort("soft1", 1, true)
	if _, err := s[0].line.Open(soon(t)); err != nil {
		t.Error(err)
	}
}

// What is under way ends when the connection is failed, by either end.
func TestFailEndsMoves(t *testing.T) {
	for _, near := range []bool{true, false} {
		f, s := newSides(t, soft.Config{})
		data := make([]byte, 1<<20)
		r := s[1].register(t, data, Read|Write)
		k, err := s[0].line.Open(soon(t))
		if err != nil {
			t.Fatal(err)
		}
		f.SetPort("soft1", 1, false)
		done := make(chan error, 1)
		go func() {
			done <- k.Move([]Request{{Write: true, Local: mem.Host(make([]byte, len(data)), mem.Anywhere),
				Remote: r.Address, Key: r.RemoteKey()}})
		}()
		if near {
			k.Fail()
		} else {
			s[1].line.Cut()
			f.SetPort("soft1", 1, true)
		}
		if err := <-done; err == nil && near {
			t.Error("a write to a port that is down has succeeded")
		}
	}
}

func TestLineWithoutAnswerEnds(t *testing.T) {
	f := soft.New(soft.Config{})
	defer f.Close()
	c, err := Open(Config{Provider: f, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	d, err := c.Domain("")
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	l, err := d.NewLine(LineConfig{Call: func(context.Context, []byte) ([]byte, error) { return nil, endpoint.ErrGone },
		Lost: func(*Conn, error) {}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := l.Open(soon(t)); !errors.Is(err, endpoint.ErrGone) {
		t.Error(err)
	}
}

// counted is a provider that counts its open devices.
type counted struct {
	rdma.Provider
	open atomic.Int32
}

func (c *counted) Open(name string, notify func(rdma.Event)) (rdma.Device, error) {
	d, err := c.Provider.Open(name, notify)
	if err != nil {
		return nil, err
	}
	c.open.Add(1)
	return &countedDevice{d, c}, nil
}

type countedDevice struct {
	rdma.Device
	of *counted
}

func (d *countedDevice) Close() error {
	err := d.Device.Close()
	if err == nil {
		d.of.open.Add(-1)
	}
	return err
}

// A device that is back is opened anew. The one that was removed is closed when nothing but the
// card uses it, and what is registered there is closed before that.
func TestRemovedDevicesAreClosed(t *testing.T) {
	f := soft.New(soft.Config{})
	defer f.Close()
	p := &counted{Provider: f}
	var left []Registration
	c, err := Open(Config{Provider: p, Log: slog.New(slog.DiscardHandler), Last: func(*Domain) {
		for _, r := range left {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
		left = nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	b := mem.Host(make([]byte, 100), mem.Anywhere)
	for i := range 10 {
		d, err := c.Domain("")
		if err != nil {
			t.Fatal(err)
		}
		r, err := d.Register(b, nil, Read, false)
		if err != nil {
			t.Fatal(err)
		}
		left = []Registration{r}
		f.Remove("soft0")
		if _, err := d.Register(b, nil, Read, false); !errors.Is(err, rdma.ErrRemoved) || !d.Removed() {
			t.Fatalf("of a device that was removed: %v", err)
		}
		f.Restore("soft0")
		release := func() {
			if err := d.Release(); err != nil {
				t.Fatal(err)
			}
		}
		used := i%2 == 0
		if !used {
			release()
		}
		again, err := c.Domain("")
		if err != nil || again == d {
			t.Fatalf("the same domain, or %v", err)
		}
		if used {
			if n := p.open.Load(); n != 2 || len(left) != 1 {
				t.Fatalf("%d devices are open, want those of both domains", n)
			}
			release()
		}
		if n := p.open.Load(); n != 1 || len(left) != 0 {
			t.Fatalf("after %d removals %d devices are open and %d regions left, want 1 and 0", i+1, n, len(left))
		}
		if err := again.Release(); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Close(); err != nil || p.open.Load() != 0 {
		t.Errorf("%v, and %d devices are open", err, p.open.Load())
	}
}

// held is an exporter that does not export before hold returns.
type held struct{ hold func() }

func (h held) Export(mem.Memory) (int, uint64, error) {
	h.hold()
	return 0, 0, errors.ErrUnsupported
}
func (held) Ordered() bool { return true }
func (held) Flush() error  { return nil }

// The domain of a line that was closed can be released: no Move registers memory there.
func TestCloseWaitsForMoves(t *testing.T) {
	_, s := newSides(t, soft.Config{})
	line, err := s[0].domain.NewLine(LineConfig{Lost: func(*Conn, error) {},
		Call: func(_ context.Context, request []byte) ([]byte, error) { return s[1].line.Handle(request) }})
	if err != nil {
		t.Fatal(err)
	}
	k, err := line.Open(soon(t))
	if err != nil {
		t.Fatal(err)
	}
	begun, closed := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(closed)
		<-begun
		if err := line.Close(); err != nil {
			t.Error(err)
		}
	}()
	err = k.Move([]Request{{Local: mem.Device(1<<40, 1<<20, "cuda:0"), Exporter: held{func() {
		close(begun)
		<-k.Ended()
		select {
		case <-closed:
			t.Error("the line was closed during a Move")
		case <-time.After(100 * time.Millisecond):
		}
	}}}})
	if !errors.As(err, new(*MemoryError)) {
		t.Error(err)
	}
	<-closed
	if err := k.Move(nil); !errors.Is(err, endpoint.ErrClosed) {
		t.Errorf("a Move after Close: %v", err)
	}
}

// The settings of the network are those of all queue pairs.
func TestSettingsOfTheNetwork(t *testing.T) {
	f := soft.New(soft.Config{})
	t.Cleanup(f.Close)
	want := rdma.Settings{TrafficClass: 106, ServiceLevel: 3, PKey: 2, Timeout: 20}
	seen, made, connected := rdmatest.WithSettings(t, f, want)
	connect := seen.Connect
	seen.Connect = func(device string, r *rdma.Route) error {
		if retries := endpoint.DefaultRoute().Retries; r.Retries != retries {
			t.Errorf("%d retries, want %d", r.Retries, retries)
		}
		return connect(device, r)
	}
	c, err := Open(Config{Provider: seen, Settings: want, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	d, err := c.Domain("a principal")
	if err != nil {
		t.Fatal(err)
	}
	var lines [2]*Line
	for i := range lines {
		lines[i], err = d.NewLine(LineConfig{Lost: func(*Conn, error) {},
			Call: func(_ context.Context, request []byte) ([]byte, error) { return lines[1-i].Handle(request) }})
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := lines[0].Open(soon(t)); err != nil {
		t.Error(err)
	}
	if made.Load() != 2*queuePairs || connected.Load() != 2*queuePairs {
		t.Errorf("%d queue pairs, %d connected, want %d", made.Load(), connected.Load(), 2*queuePairs)
	}
	if err := errors.Join(lines[0].Close(), lines[1].Close(), d.Release(), c.Close()); err != nil {
		t.Error(err)
	}
}
