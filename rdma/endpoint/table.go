package endpoint

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"time"

	"tutti/rdma"
)

// Caller calls peers.
type Caller interface {
	// Call sends a request to Table.Handle of a peer, and returns its reply. It must return when
	// ctx ends. A request whose call has failed may still arrive, and may arrive repeatedly. Both
	// are at most MaxMessage bytes. An error that wraps ErrGone says that no call will succeed any
	// more.
	Call(ctx context.Context, peer string, request []byte) ([]byte, error)
}

// Config describes a Table. Zero values of what is not marked as required have defaults.
type Config struct {
	Session uint64      // required: random id of this life of the process
	Device  rdma.Device // required
	Caller  Caller      // required
	// Queues are the queue pairs of a connection, at most MaxQPs, with their completion queues.
	// Both ends need the same number. Required.
	Queues []rdma.QPConfig
	Access rdma.Access // of the peers
	// Port is the port of the device; default 1. Address is one of its addresses; without it, the
	// best one is taken, as rdma.ChooseGID orders them. Each attempt to connect asks the device
	// for them anew, because their indexes change while a port is down.
	Port    int
	Address netip.Addr
	// Route has what the ends do not agree on: Timeout, Retries, RNRRetries, TrafficClass, HopLimit
	// and ServiceLevel. MTU and Reads limit what they agree on, unless they are 0. Other fields are
	// not used. The zero value stands for DefaultRoute.
	Route rdma.Route

	Timeout time.Duration // of a call; default 2 s
	Calls   int           // under way at a time; default 16
	// Pause is the mean time between a failed call and its repetition, doubled for every further
	// one up to 64 times; default 1 ms.
	Pause time.Duration
	Peers int // that the table remembers; default 65536

	// Prepare, if it is not nil, is called with the queue pairs of a future connection before the
	// peer can reach them. Receives can be posted. An error ends the attempt. It must not call the
	// table.
	Prepare func(c *Connection) error
	// Retire, if it is not nil, is called once for every connection that Prepare was called for,
	// when it has failed, was replaced, or did not come about. Its queue pairs are in the state
	// Failed. Drained must be called, from any goroutine, when all requests on them have completed;
	// they are reset or destroyed then, and must not be used any more. It may have closed them
	// itself. Without Retire all this happens at once.
	Retire func(c *Connection, drained func())
	// Retired is the most connections that are not drained yet: with as many, no new ones are
	// prepared. Default 256.
	Retired int
	// Spare is the most queue pairs of each of Queues that are kept for further connections, if the
	// device can reset them. Default 16; negative: none.
	Spare int
}

// DefaultRoute returns the route that stands for the zero value of Config.Route: a packet is
// repeated 6 times, after 67 ms each.
func DefaultRoute() rdma.Route {
	return rdma.Route{Timeout: 14, Retries: 6, RNRRetries: 7, HopLimit: 64}
}

// Table has the connections of a process over one port of a device, one for each peer. Its methods
// may be called from any goroutine.
type Table struct {
	cfg   Config
	slots chan struct{} // one for each call under way
	ctx   context.Context
	stop  context.CancelFunc
	wg    sync.WaitGroup // calls

	mu        sync.Mutex
	endpoints map[string]*peer
	undrained map[*Connection]bool // retired ones; true: being released
	drained   chan struct{}        // replaced when one was released
	failed    error                // of closing queue pairs
	spare     [][]rdma.QP          // in the state Reset, for each of Config.Queues
	closed    bool
}

// peer is what a table has of one peer. The table's lock may be taken with its lock.
type peer struct {
	t    *Table
	name string

	mu      sync.Mutex
	m       machine
	conn    *Connection // of the present generation of queue pairs; nil: there is none
	wait    *wait       // nil: no caller waits
	cause   error       // of the last call, if that has failed
	cancel  context.CancelFunc
	retired []*Connection // to be passed on when mu is released
}

// wait is an attempt to connect that callers wait for.
type wait struct {
	callers int
	done    chan struct{} // closed when conn and err are set
	conn    *Connection
	err     error
}

// New returns a table. Close follows. The device and the completion queues must outlive it.
func New(cfg Config) (*Table, error) {
	a := rdma.Attributes{}
	if cfg.Device != nil {
		a = cfg.Device.Attributes()
	}
	cfg.Port = max(cfg.Port, 1)
	n := len(cfg.Queues)
	if cfg.Session == 0 || cfg.Device == nil || cfg.Caller == nil || n < 1 || n > MaxQPs || cfg.Port > a.Ports {
		return nil,
			fmt.Errorf("rdma: endpoints with session %x, device: %t, caller: %t, %d queue pairs, port %d of %d: "+
				"expected all of them, and at most %d queue pairs", cfg.Session, cfg.Device != nil, cfg.Caller != nil,
				n, cfg.Port, a.Ports, MaxQPs)
	}
	if cfg.Timeout < 0 || cfg.Pause < 0 || cfg.Calls < 0 || cfg.Peers < 0 || cfg.Retired < 0 || cfg.Route.Reads < 0 {
		return nil,
			fmt.Errorf("rdma: endpoints with Timeout %v, Pause %v, Calls %d, Peers %d, Retired %d, Route.Reads %d: "+
				"expected no negative numbers", cfg.Timeout, cfg.Pause, cfg.Calls, cfg.Peers, cfg.Retired,
				cfg.Route.Reads)
	}
	if cfg.Route == (rdma.Route{}) {
		cfg.Route = DefaultRoute()
	}
	defaults := func(at *int, value int) {
		if *at == 0 {
			*at = value
		}
	}
	defaults(&cfg.Route.MTU, 4096)
	defaults(&cfg.Route.Reads, 16)
	cfg.Route.Reads = min(cfg.Route.Reads, a.MaxReads, 255)
	if m := cfg.Route.MTU; m < 256 || m > 4096 || m&(m-1) != 0 {
		return nil, fmt.Errorf("rdma: endpoints with an MTU of %d: expected 256, 512, 1024, 2048 or 4096", m)
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 2 * time.Second
	}
	if cfg.Pause == 0 {
		cfg.Pause = time.Millisecond
	}
	defaults(&cfg.Calls, 16)
	defaults(&cfg.Peers, 1<<16)
	defaults(&cfg.Retired, 256)
	defaults(&cfg.Spare, 16)
	cfg.Queues = slices.Clone(cfg.Queues)
	t := &Table{cfg: cfg, slots: make(chan struct{}, cfg.Calls), endpoints: map[string]*peer{},
		undrained: map[*Connection]bool{}, drained: make(chan struct{}), spare: make([][]rdma.QP, len(cfg.Queues))}
	t.ctx, t.stop = context.WithCancel(context.Background())
	return t, nil
}

// peer returns what the table has of a peer.
func (t *Table) peer(name string) (*peer, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.endpoints[name]
	switch {
	case t.closed:
		return nil, ErrClosed
	case p != nil:
		return p, nil
	case len(t.endpoints) >= t.cfg.Peers:
		return nil, fmt.Errorf("it would be peer %d: Config.Peers allows %d", len(t.endpoints)+1, t.cfg.Peers)
	}
	p = &peer{t: t, name: name, m: *newMachine(t.cfg.Session, len(t.cfg.Queues))}
	t.endpoints[name] = p
	return p, nil
}

// Open returns the connection to a peer, and makes it if there is none. It blocks until then, until
// ctx ends, or until it is known that there will be none. All callers that wait for the same peer
// share one attempt, which goes on while one of them waits. Errors are *PeerError, which wraps
// ctx's error, ErrGone, *RefusedError, *FormatError, *UndrainedError, ErrPort, one of the device,
// or why there is no room for another peer, or they wrap ErrClosed.
func (t *Table) Open(ctx context.Context, name string) (*Connection, error) {
	if err := ctx.Err(); err != nil {
		return nil, &PeerError{Peer: name, Err: err}
	}
	p, err := t.peer(name)
	switch {
	case errors.Is(err, ErrClosed):
		return nil, err
	case err != nil:
		return nil, &PeerError{Peer: name, Err: err}
	}
	p.mu.Lock()
	if p.m.phase == connected {
		defer p.unlock()
		return p.conn, nil
	}
	w := p.wait
	if w == nil {
		w = &wait{done: make(chan struct{})}
		p.wait, p.cause = w, nil
		if p.m.phase == retired {
			p.finishLocked(ErrClosed)
		} else {
			p.stepLocked(open{})
		}
	}
	w.callers++
	p.unlock()
	select {
	case <-w.done:
		return w.conn, w.err
	case <-ctx.Done():
	}
	p.mu.Lock()
	defer p.unlock()
	if w.callers--; p.wait == w && w.callers == 0 {
		p.wait = nil
		p.stepLocked(cancel{})
	}
	select {
	case <-w.done:
		return w.conn, w.err
	default:
		return nil, &PeerError{Peer: name, Err: ctx.Err(), Cause: p.cause}
	}
}

// Handle answers a request that the caller of a peer has sent. The name of the peer must be proven,
// and the same that Open is called with. It waits for no peer. An error says that the request is
// malformed, or that the table is closed or full; the peer gets no reply then. With a *FormatError
// there may be a reply, which tells the peer the same.
func (t *Table) Handle(name string, request []byte) ([]byte, error) {
	r, err := decodeKind(request, true)
	if other := new(*FormatError); errors.As(err, other) {
		return refusal(request, *other), err
	}
	if err != nil {
		return nil, err
	}
	p, err := t.peer(name)
	if err != nil {
		return nil, fmt.Errorf("rdma: request of %s: %w", name, err)
	}
	p.mu.Lock()
	defer p.unlock()
	return p.stepLocked(requested{r}).encode(), nil
}

// Busy returns the reply to a request of an end that has no Table at present, because its device is
// away: the caller tries again, as after any failure that may pass. Reason is for its error.
func Busy(request []byte, reason string) ([]byte, error) {
	r, err := decodeKind(request, true)
	if err != nil {
		return nil, err
	}
	m := &message{kind: busy, from: r.to, to: r.from, text: reason}
	m.from.session = max(m.from.session, 1) // it is not used, but 0 is invalid
	return m.encode(), nil
}

// Connections returns the present connections.
func (t *Table) Connections() (all []*Connection) {
	for _, p := range t.peers() {
		p.mu.Lock()
		if p.m.phase == connected {
			all = append(all, p.conn)
		}
		p.unlock()
	}
	return all
}

// peers returns what the table has of peers.
func (t *Table) peers() []*peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Collect(maps.Values(t.endpoints))
}

// Close ends all connections. Calls of Open that wait get ErrClosed. It waits until the calls under
// way have returned and all connections are drained, or ctx ends: then it destroys the queue pairs
// that are left, and returns an error.
func (t *Table) Close(ctx context.Context) error {
	t.mu.Lock()
	again := t.closed
	t.closed = true
	t.mu.Unlock()
	if again {
		return ErrClosed
	}
	t.stop()
	for _, p := range t.peers() {
		p.mu.Lock()
		p.stepLocked(shut{})
		p.unlock()
	}
	t.wg.Wait()
	var late error
	if t.drain(ctx) != nil {
		left := t.retired()
		for _, c := range left {
			t.release(c)
		}
		late = fmt.Errorf("rdma: %d connections were not drained in time, and are destroyed: %w", len(left), ctx.Err())
		t.drain(context.Background()) // what others release
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	err := errors.Join(late, t.failed)
	for _, qps := range t.spare {
		for _, q := range qps {
			err = errors.Join(err, q.Close())
		}
	}
	clear(t.spare)
	return err
}

// retired returns the connections that were not released yet.
func (t *Table) retired() (all []*Connection) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c, released := range t.undrained {
		if !released {
			all = append(all, c)
		}
	}
	return all
}

// drain waits until all connections are released.
func (t *Table) drain(ctx context.Context) error {
	for {
		t.mu.Lock()
		n, changed := len(t.undrained), t.drained
		t.mu.Unlock()
		if n == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// unlock releases the lock, and passes retired connections on.
func (p *peer) unlock() {
	retired := p.retired
	p.retired = nil
	p.mu.Unlock()
	for _, c := range retired {
		if hook := p.t.cfg.Retire; hook != nil && c.shown {
			hook(c, func() { p.t.release(c) })
		} else {
			p.t.release(c)
		}
	}
}

// stepLocked feeds the machine an event, and carries out its actions. It returns the message of the
// answer or send among them, or nil.
func (p *peer) stepLocked(ev event) (out *message) {
	for queue := []event{ev}; len(queue) > 0; queue = queue[1:] {
		for _, a := range p.m.step(queue[0]) {
			switch a := a.(type) {
			case prepare:
				o, err := p.prepareLocked(a.generation)
				queue = append(queue, prepared{o, err, final(err)})
			case join:
				err := p.conn.join(a)
				queue = append(queue, joined{err, final(err)})
			case retire:
				p.retireLocked()
			case ask:
				p.callLocked(a)
			case send:
				out = a.message
			case answer:
				out = a.message
			case up:
				p.finishLocked(nil)
			case fail:
				p.finishLocked(a.err)
			}
		}
	}
	if !p.m.asking && p.cancel != nil {
		p.cancel()
		p.cancel = nil
	}
	return out
}

// finishLocked tells the waiting callers the outcome.
func (p *peer) finishLocked(err error) {
	w := p.wait
	if w == nil {
		return
	}
	p.wait = nil
	if w.conn = p.conn; err != nil {
		w.conn = nil
		w.err = &PeerError{Peer: p.name, Err: err}
	}
	close(w.done)
}

// callLocked begins a call, in place of the one before it.
func (p *peer) callLocked(a ask) {
	if p.cancel != nil {
		p.cancel()
	}
	var ctx context.Context
	ctx, p.cancel = context.WithCancel(p.t.ctx)
	p.t.wg.Add(1)
	go func() {
		defer p.t.wg.Done()
		p.call(ctx, a)
	}()
}

// call makes a call.
func (p *peer) call(ctx context.Context, a ask) {
	t := p.t
	if a.tries > 0 {
		mean := t.cfg.Pause << min(a.tries-1, 6)
		pause := time.NewTimer(mean/2 + rand.N(mean))
		defer pause.Stop()
		select {
		case <-pause.C:
		case <-ctx.Done():
			return
		}
	}
	select {
	case t.slots <- struct{}{}:
		defer func() { <-t.slots }()
	case <-ctx.Done():
		return
	}
	p.mu.Lock()
	m := p.stepLocked(ready{a.call})
	p.unlock()
	if m == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, t.cfg.Timeout)
	defer cancel()
	b, err := t.cfg.Caller.Call(ctx, p.name, m.encode())
	var reply *message
	if err == nil {
		reply, err = decodeKind(b, false)
	}
	p.mu.Lock()
	defer p.unlock()
	if p.m.call == a.call {
		if p.cause = err; err == nil && reply.kind == busy {
			p.cause = &RefusedError{Reason: reply.text}
		}
	}
	if err != nil {
		never := errors.Is(err, ErrGone) || errors.As(err, new(*FormatError))
		p.stepLocked(failed{call: a.call, err: err, final: never})
		return
	}
	p.stepLocked(replied{a.call, reply})
}

// decodeKind reads a request, or a reply.
func decodeKind(b []byte, isRequest bool) (*message, error) {
	m, err := decode(b)
	if err == nil && (m.kind == request) != isRequest {
		return nil, fmt.Errorf("rdma: malformed handshake: %v, request expected: %t", m, isRequest)
	}
	return m, err
}
