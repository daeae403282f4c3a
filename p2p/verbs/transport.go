package verbs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/bits"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

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
	// Devices says which ports may be used, in the form of rdma.ParseDevices. All of these that are
	// active are used.
	Devices string
	// Nodes are the NUMA nodes of this process's processors, if they are known. The ports of
	// devices on other nodes come after all others.
	Nodes []int
	// QueuePairs is the number of queue pairs for data on each port and link. Default 1. A link has
	// at most 16, and uses no more ports.
	QueuePairs int
	// GID says which address of the port is used: see rdma.ChooseGID.
	GID string
	// Settings are those of the network. The default of Settings.Timeout is 16, 268 ms.
	Settings rdma.Settings
	// RingBytes is the size of a link's ring, rounded up to a power of two; the smaller one of both
	// ends counts. A link has twice as much memory. The largest frame is nearly a quarter of
	// the ring. Default 128 KiB.
	RingBytes int
	// Exporter returns the exporter of a device, such as a GPU, from and to whose memory this rank
	// puts and gets. nil: there are none.
	Exporter func(loc mem.Location) (rdma.Exporter, error)
	// TCP configures the connections that make and end links. Of its sizes of frames none counts.
	TCP tcp.Config
}

// Transport implements p2p.Transport, p2p.Exposer and p2p.Registrar. Its links implement
// p2p.OneSided.
type Transport struct {
	cfg   Config
	table rma.Table // this rank's exposed memory
	keys  exposures // the same, for peers' devices
	tcp   *tcp.Transport
	log   *slog.Logger
	host  p2p.Host // set by Listen
	links links

	locals locals // memory that this rank moves from and to

	// Bytes of puts and gets of this rank that its devices have moved.
	put, got atomic.Uint64

	news atomic.Uint64 // what has happened to TCP connections, lanes and devices
	ups  atomic.Uint64 // of these, ports that came back, or have other addresses

	mu      sync.Mutex
	devices []*device // the nearest first; those that were removed stay until they are back
	seeking bool      // seek runs
	closed  bool
	late    time.Time     // when its links do not linger any more, if closed
	refused time.Time     // see patience; zero: no device has refused
	done    chan struct{} // closed by Close
	waiting chan struct{} // closed at the next news; nil: none waits
	wg      sync.WaitGroup
}

// New returns an idle transport. Listen returns errors of cfg.
func New(cfg Config) *Transport {
	cfg.RingBytes, cfg.QueuePairs = ringBytes(cfg.RingBytes), max(cfg.QueuePairs, 1)
	cfg.Settings.Timeout = cmp.Or(cfg.Settings.Timeout, timeout)
	cfg.TCP.MaxFrame, cfg.TCP.Plain = cfg.RingBytes/4, true
	t := &Transport{cfg: cfg, log: cfg.TCP.Logger, done: make(chan struct{})}
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
	all, err := openAll(&t.cfg, t.event)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	again := t.closed || t.devices != nil
	if !again {
		t.host, t.devices = h, all
	}
	t.mu.Unlock()
	if again {
		for _, d := range all {
			t.releases(d)
		}
		return nil, fmt.Errorf("rdma: Listen: %w or already listening", p2p.ErrClosed)
	}
	active, err := t.active(nil)
	if err != nil {
		return nil, errors.Join(err, t.Close())
	}
	var links links
	for _, p := range active {
		links |= 1 << p.path.link
		t.releases(p.device)
	}
	t.mu.Lock()
	t.links = links
	t.mu.Unlock()
	at, err := t.tcp.Listen(ctx, &listener{h, t})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("rdma: %w", err), t.Close())
	}
	t.log.Info("rdma: listening", "ports", names(active))
	t.event(rdma.Event{}) // a device may be gone already
	return endpoint{links, at}.encode(), nil
}

// active returns the ports that can be used now, but those of some devices, the nearest first, with
// their devices retained. It fails if there is none.
func (t *Transport) active(but []*device) (ports []port, why error) {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil, p2p.ErrClosed
	}
	all := slices.DeleteFunc(slices.Clone(t.devices), func(d *device) bool { return slices.Contains(but, d) })
	for _, d := range all {
		d.retain()
	}
	t.mu.Unlock()
	for _, d := range all {
		p, err := d.address()
		if err == nil && d.lost() {
			err = fmt.Errorf("rdma: port %v was down just now", d.at)
		}
		if err != nil {
			why = errors.Join(why, err)
			t.releases(d)
			continue
		}
		ports = append(ports, p)
	}
	if len(ports) > 0 {
		why = nil
	}
	return ports, why
}

// make makes the objects of a lane with rings of so many bytes, at the acceptor for a proposal: see
// propose and accept.
func (t *Transport) make(n *lane, ring int, theirs *setup, attempt int, wake func()) error {
	n.t, n.ups = t, t.ups.Load()
	n.seen = n.ups
	active, err := t.active(nil)
	if err != nil {
		return err
	}
	defer func() {
		for _, p := range active {
			t.releases(p.device)
		}
	}()
	var frames port
	var rails []port
	if theirs == nil {
		frames, rails = propose(active, t.cfg.QueuePairs, attempt)
	} else if frames, rails, err = accept(active, theirs); err != nil {
		return err
	}
	return n.open(frames, rails, ring, rand.Uint32N(1<<24), wake)
}

// missing reports whether there is a port that can be used, and a lane does not use.
func (t *Transport) missing(n *lane) bool {
	others, _ := t.active(n.devices) // the error is that there are none
	for _, p := range others {
		t.releases(p.device)
	}
	return len(others) > 0
}

// releases releases a device.
func (t *Transport) releases(d *device) {
	if err := d.release(); err != nil {
		t.log.Warn("rdma: cannot close a device", "device", d.at, "reason", err)
	}
}

// event is called with the events of devices.
func (t *Transport) event(e rdma.Event) {
	if e.Kind == rdma.PortUp || e.Kind == rdma.GIDsChanged {
		t.ups.Add(1)
	}
	t.mu.Lock()
	if !t.seeking && !t.closed && slices.ContainsFunc(t.devices, (*device).removed) {
		t.seeking = true
		t.wg.Go(t.seek)
	}
	t.mu.Unlock()
	t.tell()
}

// seek opens devices again that were removed, until all are back. No event says that one is.
func (t *Transport) seek() {
	timer := time.NewTimer(minPause)
	defer timer.Stop()
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		select {
		case <-timer.C:
		case <-t.done:
			return
		}
		t.mu.Lock()
		all := slices.Clone(t.devices)
		t.mu.Unlock()
		for i, d := range all {
			if !d.removed() {
				continue
			}
			again, err := openPort(&t.cfg, d.at, t.event)
			if err != nil {
				continue // not yet
			}
			again.moved.Store(d.moved.Load())
			t.mu.Lock()
			if t.closed {
				d = again
			} else {
				t.devices[i] = again
			}
			t.mu.Unlock()
			t.releases(d)
			t.ups.Add(1)
			t.tell()
		}
		t.mu.Lock()
		t.seeking = slices.ContainsFunc(t.devices, (*device).removed)
		more := t.seeking
		t.mu.Unlock()
		if !more {
			return
		}
		timer.Reset(pause)
	}
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

// lingerTime bounds how long Close waits for the device, to complete what was sent and to close
// queue pairs: until the device repeats no packet any more. It is not shorter than with the default
// timeout of packets, and at most a minute.
func (t *Transport) lingerTime() time.Duration {
	const packet = 4096 * time.Nanosecond
	return min((retries+1)*max(packet<<t.cfg.Settings.Timeout, packet<<timeout), time.Minute)
}

// remaining returns how long a link may linger that would do so for d.
func (t *Transport) remaining(d time.Duration) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		return d
	}
	return min(d, time.Until(t.late))
}

// patience returns until when Drop waits for devices that let go of no memory: for d, or what
// remains of it, after the first has refused.
func (t *Transport) patience(d time.Duration) time.Time {
	left := t.remaining(d)
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.refused.IsZero() {
		t.refused = time.Now().Add(left)
	}
	return t.refused
}

// lets says that a device has let go of memory after it had refused.
func (t *Transport) lets() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.refused = time.Time{}
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

func (t *Transport) wrap(l *link) p2p.Link {
	local := p2p.HostMemory
	if t.cfg.Exporter != nil {
		local |= p2p.DeviceMemory
	}
	return framed{rma.NewFrames(l, &t.table, t.host.Wake), l, local}
}

// Reaches implements p2p.Transport.
func (t *Transport) Reaches(b []byte) error {
	e, err := decodeEndpoint(b)
	if err != nil {
		return err
	}
	t.mu.Lock()
	mine := t.links
	t.mu.Unlock()
	if mine != 0 && mine&e.links == 0 {
		return fmt.Errorf("rdma: the peer's ports are %v, and those here %v: they cannot be connected", e.links, mine)
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
// What takes long are calls of devices, which go on after ctx has ended.
func (t *Transport) Withdraw(ctx context.Context, x *mem.Remote) error {
	t.table.Withdraw(x)
	e := t.keys.get(x.Generation)
	if e == nil {
		return nil
	}
	w := t.keys.end(e, t.tell) // links have to tell their peers
	select {
	case <-w.done:
	case <-ctx.Done():
		if !w.brief {
			return fmt.Errorf("rdma: devices may still access the memory: %w", ctx.Err())
		}
		<-w.done
	}
	if w.err != nil {
		return fmt.Errorf("rdma: %w", w.err)
	}
	return nil
}

// Close implements p2p.Transport. It waits for calls of Host.Admit and Host.Accepted.
func (t *Transport) Close() error {
	t.mu.Lock()
	first := !t.closed
	if first {
		t.closed, t.late = true, time.Now().Add(t.lingerTime())
		close(t.done)
	}
	t.mu.Unlock()
	err := t.tcp.Close()
	t.wg.Wait()
	for _, e := range t.keys.all() {
		w := t.keys.end(e, t.tell)
		<-w.done
		err = errors.Join(err, w.err)
	}
	err = errors.Join(err, t.endLocals())
	if !first {
		return err
	}
	if put, got := t.put.Load(), t.got.Load(); put+got > 0 {
		var ports []string
		for _, d := range t.devices {
			ports = append(ports, fmt.Sprintf("%v: %d", d.at, d.moved.Load()))
		}
		t.log.Info("rdma: the device has moved", "put", put, "got", got, "ports", ports)
	}
	for _, d := range t.devices { // which nothing changes any more
		err = errors.Join(err, d.release())
	}
	return err
}
