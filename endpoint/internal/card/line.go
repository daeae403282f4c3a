package card

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tutti/device"
	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/endpoint"
	"tutti/rdma/queue"
)

// Shape of a connection.
const (
	queuePairs = 2
	sendDepth  = 128
	recvDepth  = 16
	segments   = 4
	largest    = 8 << 20 // bytes of a request: what is given up ends soon
	closing    = 10 * time.Second
	proving    = 5 * time.Second
	spin       = 50 * time.Microsecond // before a wait for a transfer sleeps
)

// peer is the name of the only peer of a line's table.
const peer = "the peer"

// LineConfig describes a Line.
type LineConfig struct {
	// Call gives a request to Line.Handle of the peer, and returns its reply. It must return when
	// ctx ends. An error that wraps endpoint.ErrGone of package rdma says that no call will
	// succeed.
	Call func(ctx context.Context, request []byte) ([]byte, error)
	// Lost is called once for each Conn, when it was taken out of service and nothing that was
	// moved over it accesses memory any more. It must not call the Line.
	Lost func(*Conn, error)
}

// Line leads to one peer. Its methods may be called from any goroutine.
type Line struct {
	domain *Domain
	cfg    LineConfig
	poller *queue.Poller
	table  *endpoint.Table
	bytes  uint64 // of the longest request
	stop   context.CancelFunc
	work   sync.WaitGroup
	moving sync.RWMutex // held for reading by Move
	closed bool         // with moving

	mu    sync.Mutex
	conns map[*endpoint.Connection]*Conn
}

// Conn is connected queue pairs. Its methods may be called from any goroutine.
type Conn struct {
	line   *Line
	c      *endpoint.Connection
	set    *queue.Set
	life   context.Context // ends when the queue pairs are taken out of service
	end    context.CancelFunc
	fails  chan struct{} // closed when the set has failed
	cause  error         // set before fails is closed
	once   sync.Once
	closed chan struct{} // closed when nothing uses the queue pairs any more
	proved atomic.Bool   // a request has come to the peer
}

// NewLine makes a line in a domain, which has to outlive it. Close follows.
func (d *Domain) NewLine(cfg LineConfig) (*Line, error) {
	a := d.dev.Attributes()
	port, err := d.dev.Port(d.card.at.Port)
	if err != nil {
		return nil, err
	}
	l := &Line{domain: d, cfg: cfg, bytes: largest, conns: map[*endpoint.Connection]*Conn{}}
	if port.MaxBytes > 0 {
		l.bytes = min(l.bytes, port.MaxBytes)
	}
	qp := rdma.QPConfig{SendDepth: min(sendDepth, a.MaxQPDepth), RecvDepth: min(recvDepth, a.MaxQPDepth),
		Segments: min(segments, a.MaxSegments), PKey: d.card.cfg.Settings.PKey}
	// Queue pairs may be deeper than what was asked for, and those of the connection before may
	// still be there.
	depth := 4 * queuePairs * (qp.SendDepth + qp.RecvDepth)
	if l.poller, err = queue.NewPoller(d.dev, min(depth, a.MaxCQDepth)); err != nil {
		return nil, err
	}
	qp.Send, qp.Recv = l.poller.CQ(), l.poller.CQ()
	queues := make([]rdma.QPConfig, queuePairs)
	for i := range queues {
		queues[i] = qp
	}
	route := endpoint.DefaultRoute()
	d.card.cfg.Settings.Apply(&route)
	l.table, err = endpoint.New(endpoint.Config{Session: rand.Uint64() | 1, Device: d.dev, Caller: caller{cfg.Call},
		Queues: queues, Access: rdma.RemoteRead | rdma.RemoteWrite, Port: d.card.at.Port, Address: d.card.address,
		Route: route, Calls: 1, Pause: 10 * time.Millisecond, Spare: -1, Prepare: l.prepare, Retire: l.retire})
	if err != nil {
		return nil, errors.Join(err, l.poller.Close())
	}
	ctx, stop := context.WithCancel(context.Background())
	l.stop = stop
	l.work.Go(func() { l.poller.Serve(ctx) }) // an error has failed all sets
	return l, nil
}

// caller implements endpoint.Caller.
type caller struct {
	call func(ctx context.Context, request []byte) ([]byte, error)
}

// Call implements endpoint.Caller.
func (c caller) Call(ctx context.Context, _ string, request []byte) ([]byte, error) {
	return c.call(ctx, request)
}

// prepare makes a Conn of queue pairs that are about to be connected.
func (l *Line) prepare(c *endpoint.Connection) error {
	k := &Conn{line: l, c: c, fails: make(chan struct{}), closed: make(chan struct{})}
	k.life, k.end = context.WithCancel(context.Background())
	l.mu.Lock() // retire is called for the connection also after an error
	l.conns[c] = k
	l.mu.Unlock()
	set, err := queue.New(l.poller, c.QPs, queue.Config{MaxBytes: l.bytes, Notified: func(uint32) {},
		Failed: k.failed})
	if err != nil {
		return err
	}
	k.set = set
	l.work.Go(func() {
		select {
		case <-k.fails:
			c.Fail()
		case <-c.Retired():
		}
	})
	return nil
}

// failed notes why the set has failed.
func (k *Conn) failed(cause error) {
	k.once.Do(func() {
		k.cause = cause
		close(k.fails)
	})
}

// retire closes queue pairs that were taken out of service.
func (l *Line) retire(c *endpoint.Connection, drained func()) {
	l.mu.Lock()
	k := l.conns[c]
	delete(l.conns, c)
	l.mu.Unlock()
	k.failed(errors.New("the connection was ended"))
	if k.set != nil {
		_ = k.set.Drain(context.Background()) // so that each request ends with its own status
	}
	k.end()
	if k.set != nil {
		err := k.set.Close()
		for pause := time.Millisecond; err != nil && pause < closing; pause *= 2 {
			time.Sleep(pause) // a device that is being reset refuses it for some time
			err = k.set.Close()
		}
		if err != nil {
			l.domain.card.cfg.Log.Error("rdma: queue pairs cannot be closed", "device", l.domain.card.at.Device,
				"err", err)
		}
	}
	drained()
	close(k.closed)
	l.cfg.Lost(k, k.cause)
}

// Open returns the connection to the peer, and makes it if there is none, or only the peer has used
// it. It waits until ctx ends. An error that wraps endpoint.ErrGone, a *endpoint.FormatError, or a
// *endpoint.RefusedError that is final, all of package rdma, says that there will never be one.
func (l *Line) Open(ctx context.Context) (*Conn, error) {
	c, err := l.table.Open(ctx, peer)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	k := l.conns[c]
	l.mu.Unlock()
	if k == nil {
		return nil, errors.New("rdma: the queue pairs failed right after they were connected")
	}
	if err := k.prove(ctx); err != nil {
		k.Fail()
		return nil, fmt.Errorf("rdma: the peer's queue pairs do not answer: %w", err)
	}
	return k, nil
}

// prove has an empty write go to the peer: queue pairs can be connected with those of a port that
// this one does not reach.
func (k *Conn) prove(ctx context.Context) error {
	if k.proved.Load() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, proving)
	defer cancel()
	t, err := k.set.Submit(ctx, &queue.Batch{Notify: true})
	if err != nil {
		return err
	}
	if err := t.Wait(ctx); err != nil {
		return err
	}
	k.proved.Store(true)
	return nil
}

// Handle answers a request of LineConfig.Call of the peer, like endpoint.Table. It waits for no
// peer. If the device is away, or the line is being closed for that, the peer is to ask again.
func (l *Line) Handle(request []byte) ([]byte, error) {
	reply, err := l.table.Handle(peer, request)
	if _, bad := l.domain.dev.Port(l.domain.card.at.Port); errors.Is(bad, rdma.ErrRemoved) {
		l.domain.removed.Store(true) // the event may come later
	}
	if l.domain.Removed() || errors.Is(err, endpoint.ErrClosed) {
		return endpoint.Busy(request, "the RDMA device is away")
	}
	return reply, err
}

// Cut takes the present connection out of service, if there is one. When it has returned, no
// request of the peer over a connection from before has an effect any more.
func (l *Line) Cut() {
	for _, c := range l.table.Connections() {
		c.Fail() // the queue pairs are in the state Failed when it has returned
	}
}

// Close ends the connections, and waits until nothing uses them or the domain.
func (l *Line) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closing)
	defer cancel()
	err := l.table.Close(ctx) // ends every Move
	l.moving.Lock()
	l.closed = true
	l.moving.Unlock()
	l.stop()
	l.work.Wait()
	return errors.Join(err, l.poller.Close())
}

// Ended returns a channel that is closed when the connection is out of service and nothing that was
// moved over it accesses memory any more.
func (k *Conn) Ended() <-chan struct{} { return k.closed }

// Fail takes the connection out of service, and waits until nothing that was moved over it accesses
// memory any more.
func (k *Conn) Fail() {
	k.c.Fail()
	<-k.closed
}

// Request is a read or a write of the peer's memory.
type Request struct {
	Write    bool
	Local    mem.Memory      // not empty
	Exporter device.Exporter // of Local; nil: it is memory of the host
	Remote   uint64          // address
	Key      uint32
}

// MemoryError says that memory of this end cannot be registered, or that its device may not see
// what is there.
type MemoryError struct{ Err error }

func (e *MemoryError) Error() string { return e.Err.Error() }

// Unwrap returns the device's error.
func (e *MemoryError) Unwrap() error { return e.Err }

// Move carries out requests, in any order, and waits for all of them. A write has been acknowledged
// by the peer's device when Move returns, and work that begins on a device sees what was read.
// After an error some may have been done (rdma.Fatal tells whether they may be made again); the
// connection is out of service, or about to be, unless the error is a *MemoryError. The memory is
// not accessed any more in either case.
func (k *Conn) Move(requests []Request) error {
	k.line.moving.RLock()
	defer k.line.moving.RUnlock()
	if k.line.closed {
		return endpoint.ErrClosed
	}
	d := k.line.domain
	batch := queue.Batch{Ops: make([]queue.Op, 0, len(requests))}
	var mrs []rdma.MR
	var places []place
	used := false // the queue pairs may access the places
	defer func() {
		if !used {
			d.unstage(places)
		}
		for _, mr := range mrs {
			if err := mr.Close(); err != nil && !errors.Is(err, rdma.ErrRemoved) {
				d.card.cfg.Log.Error("rdma: memory stays registered", "device", d.card.at.Device, "err", err)
			}
		}
		runtime.KeepAlive(requests)
	}()
	for i := range requests {
		r := &requests[i]
		op := queue.Op{Kind: rdma.Read, Remote: r.Remote, RemoteKey: r.Key, Len: uint64(r.Local.Len())}
		if r.Write {
			op.Kind = rdma.Write
		}
		if p, ok := d.stage(r); ok {
			places = append(places, p)
			op.Local, op.Key = d.staging.reg.Address+p.off, d.staging.reg.LocalKey()
			batch.Ops = append(batch.Ops, op)
			continue
		}
		g, err := d.Register(r.Local, r.Exporter, 0, !r.Write)
		if errors.Is(err, rdma.ErrRemoved) {
			k.failed(err)
			return err
		}
		if err != nil {
			return &MemoryError{err}
		}
		mrs = append(mrs, g.MR)
		op.Local, op.Key = g.Address, g.LocalKey()
		batch.Ops = append(batch.Ops, op)
	}
	t, err := k.submit(&batch)
	if err == nil {
		err = k.await(t)
		used = !t.Ended()
	}
	if err != nil {
		k.failed(err) // also if nothing was posted: it might never be
		return err
	}
	for _, p := range places {
		copy(p.to, p.b)
	}
	return flush(requests)
}

// flush has the devices see what was read into their memory.
func flush(requests []Request) error {
	var flushed []mem.Location
	for i := range requests {
		r := &requests[i]
		if r.Exporter == nil || r.Write || r.Exporter.Ordered() || slices.Contains(flushed, r.Local.Loc()) {
			continue
		}
		if err := r.Exporter.Flush(); err != nil {
			return &MemoryError{err}
		}
		flushed = append(flushed, r.Local.Loc())
	}
	return nil
}

// submit submits a batch, and waits for room as long as it takes.
func (k *Conn) submit(b *queue.Batch) (*queue.Transfer, error) {
	for {
		t, err := k.set.Submit(k.life, b)
		var full *rdma.QueueFullError
		if errors.As(err, &full) && full.Retryable && k.life.Err() == nil {
			continue
		}
		return t, err
	}
}

// await waits until a transfer has ended. That happens in any case: a set that fails is closed.
func (k *Conn) await(t *queue.Transfer) error {
	for begin := time.Now(); time.Since(begin) < spin; {
		k.line.poller.Poll() // an error fails the set
		if t.Ended() {
			return t.Err()
		}
		runtime.Gosched()
	}
	select {
	case <-t.Done():
		return t.Err()
	case <-k.closed:
	}
	if t.Ended() {
		return t.Err()
	}
	return errors.New("rdma: the queue pairs cannot be closed") // Move deregisters the memory
}
