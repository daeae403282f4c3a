package verbs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"sync"
	"sync/atomic"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/rma"
	"tutti/p2p/tcp"
	"tutti/rdma"
)

// Name is the transport's name.
const Name = "rdma"

// Config configures a Transport.
type Config struct {
	Provider rdma.Provider
	// Devices says which ports may be used, in the form of rdma.ParseDevices. The first one of
	// these that is active is used.
	Devices string
	// GID says which address of the port is used: see rdma.ChooseGID.
	GID string
	// RingBytes is the size of a link's ring, rounded up to a power of two; the smaller one of both
	// ends counts. A link has twice as much memory. The largest frame is nearly a quarter of
	// the ring. Default 128 KiB.
	RingBytes int
	// TCP configures the connections that make and end links. Of its sizes of frames none counts.
	TCP tcp.Config
}

// Transport implements p2p.Transport and p2p.Exposer. Its links implement p2p.OneSided.
type Transport struct {
	cfg   Config
	table rma.Table // this rank's exposed memory
	keys  exposures // the same, for peers' devices
	tcp   *tcp.Transport
	log   *slog.Logger
	host  p2p.Host // set by Listen
	link  rdma.GIDType

	// Bytes of puts and gets of this rank that its device has moved.
	put, got atomic.Uint64

	news atomic.Uint64 // what has happened to TCP connections, lanes and the device
	ups  atomic.Uint64 // ports that came back

	mu      sync.Mutex
	device  *device
	closed  bool
	waiting chan struct{} // closed at the next news; nil: nobody waits

	opening sync.Mutex // held while a device is opened; before mu
}

// New returns an idle transport. Listen returns errors of cfg.
func New(cfg Config) *Transport {
	cfg.RingBytes = ringBytes(cfg.RingBytes)
	cfg.TCP.Conns, cfg.TCP.MaxFrame, cfg.TCP.Plain = 1, cfg.RingBytes/4, true
	t := &Transport{cfg: cfg, log: cfg.TCP.Logger}
	if t.log == nil {
		t.log = slog.New(slog.DiscardHandler)
	}
	t.tcp = tcp.New(cfg.TCP)
	return t
}

// ringBytes returns the size of a link's ring for Config.RingBytes.
func ringBytes(n int) int {
	if n == 0 {
		n = 128 << 10
	}
	return 1 << bits.Len(uint(min(max(n, minRing), maxRing)-1))
}

// ringOf returns the size of the ring beside a TCP connection with frames of up to n bytes.
func ringOf(n int) int { return min(1<<(bits.Len(uint(n))+1), maxRing) }

// Name implements p2p.Transport.
func (t *Transport) Name() string { return Name }

// Listen implements p2p.Transport.
func (t *Transport) Listen(ctx context.Context, h p2p.Host) ([]byte, error) {
	d, err := open(&t.cfg, t.event)
	if err != nil {
		return nil, err
	}
	s, _, err := d.address()
	if err != nil {
		return nil, errors.Join(err, d.release())
	}
	t.mu.Lock()
	if t.closed || t.device != nil {
		t.mu.Unlock()
		return nil, errors.Join(fmt.Errorf("rdma: Listen: %w or already listening", p2p.ErrClosed), d.release())
	}
	t.host, t.device, t.link = h, d, s.link
	t.mu.Unlock()
	at, err := t.tcp.Listen(ctx, &listener{h, t})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("rdma: %w", err), t.Close())
	}
	t.log.Debug("rdma: listening", "device", d.at, "address", s.gid)
	return endpoint{s.link, at}.encode(), nil
}

// acquire returns the device, which the caller releases. One that was removed is opened again, or
// another one that may be used.
func (t *Transport) acquire() (*device, error) {
	t.opening.Lock()
	defer t.opening.Unlock()
	if d, err := t.present(); d != nil || err != nil {
		return d, err
	}
	d, err := open(&t.cfg, t.event)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil, errors.Join(p2p.ErrClosed, d.release())
	}
	old := t.device
	t.device = d
	d.retain()
	t.mu.Unlock()
	if err := old.release(); err != nil {
		t.log.Warn("rdma: cannot close a device that was removed", "device", old.at, "reason", err)
	}
	return d, nil
}

// present returns the device, retained, or nil if it was removed.
func (t *Transport) present() (*device, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.closed:
		return nil, p2p.ErrClosed
	case t.device.gone.Load():
		return nil, nil
	}
	t.device.retain()
	return t.device, nil
}

// event is called with the events of devices.
func (t *Transport) event(e rdma.Event) {
	if e.Kind == rdma.PortUp {
		t.ups.Add(1)
	}
	t.tell()
}

// tell says that there is news, and wakes the host.
func (t *Transport) tell() {
	t.news.Add(1)
	t.mu.Lock()
	if t.waiting != nil {
		close(t.waiting)
		t.waiting = nil
	}
	h := t.host
	t.mu.Unlock()
	if h != nil {
		h.Wake()
	}
}

// next returns a channel that is closed when there is news.
func (t *Transport) next() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.waiting == nil {
		t.waiting = make(chan struct{})
	}
	return t.waiting
}

// listener is the host of the TCP connections.
type listener struct {
	p2p.Host
	t *Transport
}

// Wake implements p2p.Host.
func (l *listener) Wake() { l.t.tell() }

// Accepted implements p2p.Host.
func (l *listener) Accepted(from p2p.Identity, base p2p.Link) {
	l.Host.Accepted(from, l.t.wrap(l.t.newLink(from, base, false)))
}

func (t *Transport) wrap(l *link) p2p.Link { return framed{rma.NewFrames(l, &t.table, t.host.Wake)} }

// Reaches implements p2p.Transport.
func (t *Transport) Reaches(b []byte) error {
	e, err := decodeEndpoint(b)
	if err != nil {
		return err
	}
	t.mu.Lock()
	d, kind := t.device, t.link
	t.mu.Unlock()
	if d != nil && kind != e.link {
		return fmt.Errorf("rdma: the peer's port is %v, and %s is %v: they cannot be connected", e.link, d.at, kind)
	}
	return t.tcp.Reaches(e.tcp)
}

// Dial implements p2p.Transport. Frames go over TCP until the queue pairs are connected.
func (t *Transport) Dial(ctx context.Context, to p2p.Identity, b []byte) (p2p.Link, error) {
	t.mu.Lock()
	listening := t.host != nil && !t.closed
	t.mu.Unlock()
	if !listening {
		return nil, fmt.Errorf("rdma: dial %v from a transport that does not listen: %w", to, p2p.ErrClosed)
	}
	e, err := decodeEndpoint(b)
	if err != nil {
		return nil, err
	}
	base, err := t.tcp.Dial(ctx, to, e.tcp)
	if err != nil {
		return nil, fmt.Errorf("rdma: %w", err)
	}
	return t.wrap(t.newLink(to, base, true)), nil
}

// Expose implements p2p.Exposer: any host memory, with an empty key.
func (t *Transport) Expose(r *mem.Region, x *mem.Remote) ([]byte, error) {
	if err := t.table.Expose(r, x); err != nil {
		return nil, fmt.Errorf("rdma: %w", err)
	}
	t.keys.add(&exposure{generation: x.Generation, region: x.ID, rights: x.Rights,
		mem: r.Slice(int(x.Base), int(x.Len))})
	return []byte{}, nil
}

// Withdraw implements p2p.Exposer. It waits until no device accesses the memory, but not for peers.
func (t *Transport) Withdraw(_ context.Context, x *mem.Remote) error {
	t.table.Withdraw(x)
	e := t.keys.get(x.Generation)
	if e == nil {
		return nil
	}
	err := e.end()
	t.tell() // links have to tell their peers
	if err != nil {
		return fmt.Errorf("rdma: %w", err)
	}
	t.keys.remove(x.Generation)
	return nil
}

// Close implements p2p.Transport. It waits for calls of Host.Admit and Host.Accepted.
func (t *Transport) Close() error {
	t.mu.Lock()
	first := !t.closed
	t.closed = true
	d := t.device
	t.mu.Unlock()
	err := t.tcp.Close()
	for _, e := range t.keys.all() {
		err = errors.Join(err, e.end())
	}
	if put, got := t.put.Load(), t.got.Load(); first && put+got > 0 {
		t.log.Info("rdma: the device has moved", "put", put, "got", got)
	}
	if first && d != nil {
		err = errors.Join(err, d.release())
	}
	return err
}
