package endpoint

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tutti/mem"
)

func init() { hostTimeout = 3 * time.Second }

// tooLong is longer than a host may be silent, counted from the start of an operation.
const tooLong = 4 * time.Second

// flows has the connections that a dialer makes.
type flows struct {
	mu  sync.Mutex
	fds []int
}

func (f *flows) dial(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
	d.Control = func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(own uintptr) {
			f.mu.Lock()
			defer f.mu.Unlock()
			if fd, err := unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0); err == nil {
				f.fds = append(f.fds, fd)
			}
		})
	}
	return d.DialContext(ctx, "tcp", address)
}

// cut has the kernel drop whatever arrives on the connections that were made before.
func (f *flows) cut(t *testing.T) {
	t.Helper()
	nothing := unix.SockFprog{Len: 1, Filter: &unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, fd := range f.fds {
		if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &nothing); err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
	}
	f.fds = nil
}

// What is given up while the peer's host answers nothing ends the session. The next operation has
// another one.
func TestSilentHostLosesItsSession(t *testing.T) {
	t.Parallel()
	memory := func() mem.Memory { return mem.Host(make([]byte, 1), mem.Anywhere) }
	start := func(p *Peer, kind Kind) error {
		op := Op{Kind: kind, Local: memory(), Region: "r", Timeout: tooLong}
		return p.Start(op).Wait(context.Background())
	}
	cases := []struct {
		name   string
		conns  int
		giveUp func(p *Peer) error
		p      *Peer
		beside *Future
		given  chan error
	}{
		{name: "read", conns: 1, giveUp: func(p *Peer) error { return start(p, OpRead) }},
		{name: "write beside another connection", conns: 2, giveUp: func(p *Peer) error { return start(p, OpWrite) }},
		{name: "cancelled read", conns: 1, giveUp: func(p *Peer) error {
			f := p.Read(make([]byte, 1), "r", 0)
			ctx, cancel := context.WithTimeout(context.Background(), tooLong)
			defer cancel()
			return f.Wait(ctx)
		}},
		{name: "lookup", conns: 1, giveUp: func(p *Peer) error {
			// It may start long after its time has begun.
			ctx, cancel := context.WithTimeout(context.Background(), hostTimeout+tooLong)
			defer cancel()
			_, err := p.Lookup(ctx, "r")
			return err
		}},
	}
	server := newEndpoint(t, newContext(t), Config{})
	if _, err := server.Register("r", memory(), RegionConfig{Rights: Read | Write}); err != nil {
		t.Fatal(err)
	}
	for i := range cases {
		c := &cases[i]
		var f flows
		t.Cleanup(func() { f.cut(t) })
		e := newEndpoint(t, newContext(t), Config{Conns: c.conns, Checksum: true, Dialer: f.dial}) // without RDMA
		c.p = connect(t, e, server.Info())
		wait(t, c.p.Read(make([]byte, 1), "r", 0))
		f.cut(t)
		c.beside, c.given = c.p.Read(make([]byte, 1), "r", 0), make(chan error, 1)
		go func() { c.given <- c.giveUp(c.p) }()
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if err := <-c.given; !errors.Is(err, context.DeadlineExceeded) {
				t.Fatalf("%v, want the end of the time", err)
			}
			if err := c.beside.Wait(t.Context()); !errors.Is(err, ErrBroken) {
				t.Errorf("a read that has more time: %v, want %v", err, ErrBroken)
			}
			wait(t, c.p.Read(make([]byte, 1), "r", 0))
		})
	}
}

// A session at rest does not end because of a short outage. The time that the host is silent for
// counts from the first request that was given up.
func TestOutageAfterRestIsNotSilence(t *testing.T) {
	t.Parallel()
	server := newEndpoint(t, newContext(t), Config{})
	if _, err := server.Register("r", mem.Host(make([]byte, 1), mem.Anywhere), RegionConfig{Rights: Read}); err != nil {
		t.Fatal(err)
	}
	var f flows
	t.Cleanup(func() { f.cut(t) })
	p := connect(t, newEndpoint(t, newContext(t), Config{Conns: 1, Dialer: f.dial}), server.Info())
	wait(t, p.Read(make([]byte, 1), "r", 0))
	s := p.session
	rests := time.Now()
	for time.Since(rests) < hostTimeout {
		time.Sleep(100 * time.Millisecond)
	}
	f.cut(t)
	// The first read starts between these times.
	began, first := time.Now(), time.Time{}
	for {
		late := !first.IsZero() && time.Since(first) > 2*hostTimeout // before this read starts
		f := p.Start(Op{Kind: OpRead, Local: mem.Host(make([]byte, 1), mem.Anywhere), Region: "r",
			Timeout: time.Second})
		if first.IsZero() {
			first = time.Now()
		}
		err := f.Wait(t.Context())
		took := time.Since(began)
		if err == nil {
			return // over another session
		}
		p.mu.Lock()
		same := p.session == s
		p.mu.Unlock()
		if !errors.As(err, new(*TimeoutError)) || !same && took < hostTimeout || same && late {
			t.Fatalf("after %v: %v; the session is the same: %v", took, err, same)
		}
	}
}

// A host that answers is not taken for gone because its process takes nothing.
func TestStoppedPeerKeepsItsSession(t *testing.T) {
	t.Parallel()
	stop := make(chan struct{})
	info := rawServer(t, 7, func(r *raw) {
		r.answer()
		<-stop
	})
	t.Cleanup(func() { close(stop) })
	p := connect(t, newEndpoint(t, newContext(t), Config{Conns: 1}), info)
	const n = 64 << 20 // more than there is room for
	p.mu.Lock()
	s := p.session
	p.known = map[string]RemoteRegion{"r": {Name: "r", Len: n, Rights: Write, id: 1, generation: 1}}
	p.mu.Unlock()
	var late *TimeoutError
	if err := p.Start(Op{Kind: OpWrite, Local: mem.Host(make([]byte, n), mem.Anywhere), Region: "r",
		Timeout: tooLong}).Wait(t.Context()); !errors.As(err, &late) {
		t.Fatalf("%v, want a timeout", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session != s {
		t.Errorf("the session has ended: %v", s.err)
	}
}
