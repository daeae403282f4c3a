package endpoint

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tutti/endpoint/internal/args"
	"tutti/endpoint/internal/gate"
	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
	"tutti/endpoint/stats"
	"tutti/mem"
)

// Peer is another endpoint. Operations on it connect on demand if its Info is known, as it is after
// Connect; otherwise they fail with ErrBroken while it is not connected, but for Recv. Its methods
// may be called from any goroutine.
//
// Reads and writes that are under way at the same time may be done in any order. A read that starts
// after a write has ended finds what was written. Messages arrive in the order of the sends.
type Peer struct {
	ep   *Endpoint
	life context.Context // ends when the peer, or the endpoint, cannot be used any more, and by that reason
	end  context.CancelCauseFunc
	peerID
	name atomic.Pointer[string] // nil: it has not told it

	mu          sync.Mutex
	info        Info            // Addrs is empty if it was never told
	wanted      bool            // Connect asked for it
	session     *session        // nil: not connected
	lastSession uint64          // its id, or that of the one before
	coming      *session        // whose connections are arriving
	parting     *session        // whose connections the peer is to close
	ending      []*link.Conn    // of broken sessions, not closed yet
	awaited     chan struct{}   // closed when there is a session; nil: no call waits
	dialling    chan struct{}   // closed when the dial ends; nil: none
	waiting     []*task         // for a session
	recvs       queue[*task]    // in order; the first has not ended
	mail        queue[*arrival] // complete messages of earlier sessions
	due         deadlines
	timer       *time.Timer // for the first of due
	alarm       time.Time   // when it fires; zero: it does not
	dialErr     error       // of the last dial
	dead        int         // tasks that were given up since the lists were compacted
	gone        error       // the peer cannot be used any more
	known       map[string]RemoteRegion
	counts      counts
	forgotten   bool // counts are those of the endpoint

	// What release does after it has unlocked.
	over  []*task      // that end
	dirty []*link.Conn // that have something to send

	spareTasks pool[task] // those that were free
}

// peerID is what a peer has proved to be.
type peerID struct {
	client string // "": it has the job's secret
	id     uint64 // of its endpoint
}

func newPeer(e *Endpoint, id peerID, name string) *Peer {
	p := &Peer{ep: e, peerID: id}
	p.life, p.end = context.WithCancelCause(e.life)
	if name != "" {
		p.name.Store(&name)
	}
	return p
}

// Name returns the peer's name: that of its key if it is a client, else what it calls itself.
func (p *Peer) Name() string {
	if name := p.name.Load(); name != nil {
		return *name
	}
	return ""
}

// ID returns the identity of the peer's endpoint: another one for each endpoint that was made.
func (p *Peer) ID() uint64 { return p.id }

// Client returns the client's name if the peer proved to be one, or "" if it has the job's secret.
func (p *Peer) Client() string { return p.client }

// String returns "endpoint NAME".
func (p *Peer) String() string {
	if name := p.Name(); name != "" {
		return "endpoint " + name
	}
	return fmt.Sprintf("endpoint %016x", p.id)
}

// Read starts reading len(dst) bytes from offset off of the peer's region.
func (p *Peer) Read(dst []byte, region string, off int64) *Future {
	return p.Start(Op{Kind: OpRead, Local: mem.Host(dst, mem.Anywhere), Region: region, Offset: off})
}

// Write starts writing src to offset off of the peer's region.
func (p *Peer) Write(src []byte, region string, off int64) *Future {
	return p.Start(Op{Kind: OpWrite, Local: mem.Host(src, mem.Anywhere), Region: region, Offset: off})
}

// ReadInto starts reading n bytes from offset off of the peer's region into a file, from fileOff.
func (p *Peer) ReadInto(f *os.File, fileOff, n int64, region string, off int64) *Future {
	return p.Start(Op{Kind: OpRead, File: f, FileOffset: fileOff, FileLen: n, Region: region, Offset: off})
}

// WriteFrom starts writing n bytes of a file, from fileOff, to offset off of the peer's region.
func (p *Peer) WriteFrom(f *os.File, fileOff, n int64, region string, off int64) *Future {
	return p.Start(Op{Kind: OpWrite, File: f, FileOffset: fileOff, FileLen: n, Region: region, Offset: off})
}

// Send starts sending msg as one message, which may be empty.
func (p *Peer) Send(msg []byte) *Future {
	return p.Start(Op{Kind: OpSend, Local: mem.Host(msg, mem.Anywhere)})
}

// Recv starts receiving the next message, of which dst gets as much as fits: see Result. While it
// waits the connection is not idle. If there is none, Recv does not connect: it waits until one of
// the ends does, for another operation or by Connect. It fails with ErrBroken if the connection
// breaks while it waits; a peer that does not know this end's address can then send only after this
// end has connected again.
func (p *Peer) Recv(dst []byte) *Future {
	return p.Start(Op{Kind: OpRecv, Local: mem.Host(dst, mem.Anywhere)})
}

// Start starts one operation. Wrong arguments are the Future's error.
func (p *Peer) Start(op Op) *Future {
	f := &Future{peer: p}
	f.results = f.one[:]
	return p.start(f, []Op{op})
}

// Batch starts operations, any number and mixture of them, with one Future. They may be done in any
// order, except that messages keep theirs. An operation that fails does not end the others.
func (p *Peer) Batch(ops []Op) *Future {
	return p.start(&Future{peer: p, results: make([]result, len(ops))}, ops)
}

func (p *Peer) start(f *Future, ops []Op) *Future {
	f.left.Store(int32(len(ops)))
	for i := range ops {
		f.results[i].Err = ops[i].check(p.ep.ctx)
	}
	now := time.Now()
	p.mu.Lock()
	for i := range ops {
		t := p.newTaskLocked(f, i, ops[i], now)
		switch {
		case t.result.Err != nil:
			p.endLocked(t)
		case p.gone != nil:
			p.failLocked(t, p.gone)
		default:
			p.ep.ctx.open(&t.gate, t.Local)
			p.due.push(t)
			p.admitLocked(t)
		}
	}
	p.alarmLocked(now)
	flush := (*link.Conn).Flush
	if s := p.session; s != nil && s.up && s.holdLocked(ops) {
		flush = (*link.Conn).FlushSoon
	}
	p.release(flush)
	return f
}

// newTaskLocked makes the task of operation i of a future.
func (p *Peer) newTaskLocked(f *Future, i int, op Op, now time.Time) *task {
	t := p.spareTasks.take()
	t.Op, t.future, t.result, t.at = op, f, &f.results[i], -1
	t.result.task = t
	t.n = t.len()
	if t.Timeout == 0 {
		t.Timeout = p.ep.cfg.Timeout
	}
	t.deadline = now.Add(t.Timeout)
	return t
}

// admitLocked starts a task.
func (p *Peer) admitLocked(t *task) {
	if t.Kind == OpRecv {
		t.stage = receiving
		p.recvs.push(t)
		p.matchLocked()
		return
	}
	t.stage = connecting
	switch s := p.session; {
	case s != nil && s.up && !s.bye:
		s.beginLocked(t)
	default:
		p.waiting = append(p.waiting, t)
		if s == nil || !s.up {
			p.connectLocked()
		}
	}
}

// endLocked ends a task that is in none of the lists any more, or is skipped there. Its result is
// set.
func (p *Peer) endLocked(t *task) {
	t.ended = true
	t.result.task = nil
	p.endedLocked(t)
	p.due.remove(t)
	if t.flight == nil { // else it is over when it lands
		p.over = append(p.over, t)
	}
}

// failLocked ends a task with an error, unless it has ended.
func (p *Peer) failLocked(t *task, err error) {
	if t.ended {
		return
	}
	t.result.Err = fmt.Errorf("%s: %w", t.what(), err)
	p.endLocked(t)
}

// giveUpLocked ends a task wherever it is.
func (p *Peer) giveUpLocked(t *task, err error) {
	t.result.Err = err
	p.endLocked(t) // first: withdrawLocked begins what there is room for then, but nothing of t
	if s := p.session; s != nil {
		s.withdrawLocked(t)
	}
	p.trimRecvsLocked()
	if p.dead++; p.dead > 64 && p.dead > len(p.due) { // they are skipped, but not forgotten
		p.dead = 0
		p.waiting = slices.DeleteFunc(p.waiting, ended)
		p.recvs.drop(ended)
		if s := p.session; s != nil {
			s.compactLocked()
		}
	}
}

func ended(t *task) bool { return t.ended }

// shiftRecvLocked takes the first recv off the list.
func (p *Peer) shiftRecvLocked() {
	p.recvs.pop()
	p.trimRecvsLocked()
}

// trimRecvsLocked takes recvs that were given up off the list's front.
func (p *Peer) trimRecvsLocked() {
	for p.recvs.len() > 0 && p.recvs.first().ended {
		p.recvs.pop()
	}
}

// release releases mu, flushes the connections that have something to send and ends the tasks that
// are over. Those that are free are used again at once.
func (p *Peer) release(flush func(*link.Conn)) {
	type ending struct {
		future *Future
		gate   *gate.Gate // to be closed; nil: nobody else knows it
	}
	var endings [8]ending // a longer list is on the heap
	var conns [4]*link.Conn
	over, dirty := endings[:0], append(conns[:0], p.dirty...)
	for _, t := range p.over {
		e := ending{future: t.future}
		if t.free {
			p.spareTasks.put(t)
		} else {
			e.gate = &t.gate
			t.Local = mem.Memory{} // t may be kept until the peer answers
		}
		over = append(over, e)
	}
	p.over, p.dirty = emptied(p.over), emptied(p.dirty)
	p.mu.Unlock()
	for _, c := range dirty {
		flush(c)
	}
	for _, e := range over {
		if e.gate != nil {
			e.gate.Close()
		}
		e.future.finish()
	}
}

// unlock is release that flushes at once.
func (p *Peer) unlock() { p.release((*link.Conn).Flush) }

// settle is unlock for a handler of c, which is flushed when all that has arrived is handled.
func (p *Peer) settle(c *link.Conn) {
	p.release(func(d *link.Conn) {
		if d == c {
			c.FlushAfter()
		} else {
			d.Flush()
		}
	})
}

// touchLocked has release flush c.
func (p *Peer) touchLocked(c *link.Conn) {
	for _, d := range p.dirty {
		if d == c {
			return
		}
	}
	p.dirty = append(p.dirty, c)
}

// alarmLocked sets the timer to the first deadline.
func (p *Peer) alarmLocked(now time.Time) {
	if len(p.due) == 0 {
		return
	}
	d := max(p.due[0].deadline.Sub(now), 0)
	if p.timer == nil {
		p.timer = time.AfterFunc(d, p.expire)
		p.alarm = p.due[0].deadline
	} else if p.alarm.IsZero() || p.due[0].deadline.Before(p.alarm) {
		p.timer.Reset(d)
		p.alarm = p.due[0].deadline
	}
}

// expire ends the tasks whose time is over.
func (p *Peer) expire() {
	p.mu.Lock()
	now := time.Now()
	since := now
	for len(p.due) > 0 && !now.Before(p.due[0].deadline) {
		t := p.due[0]
		since = first(since, t.began())
		p.giveUpLocked(t, &TimeoutError{t.what(), string(t.stage)})
	}
	if since != now {
		p.checkHostLocked(since)
	}
	p.alarm = time.Time{}
	p.alarmLocked(now)
	p.unlock()
}

// first returns the earlier of two times.
func first(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

// checkHostLocked breaks the session if the peer's host has answered nothing for hostTimeout
// although something was sent. It is for what is given up, and began at since: until then an outage
// of the network may be short enough. The kernel alone would send again for minutes, although a new
// connection may find the peer at once.
func (p *Peer) checkHostLocked(since time.Time) {
	s := p.session
	if s == nil || !s.up {
		return
	}
	now := time.Now()
	for i, c := range s.conns {
		silent := c.Silence()
		if silent == 0 {
			continue
		}
		// A connection at rest gets no answers, so the time counts from the first request that was
		// given up since the last answer.
		sent := since
		if earlier := s.unanswered[i]; earlier.After(now.Add(-silent)) {
			sent = first(sent, earlier)
		}
		s.unanswered[i] = sent
		if silent = min(silent, now.Sub(sent)); silent >= hostTimeout {
			s.breakLocked(fmt.Errorf("%w: the peer's host has answered nothing for %v", ErrBroken, silent))
			p.resumeLocked()
			return
		}
	}
}

// polled returns the connections that bring a future on.
func (p *Peer) polled(f *Future) []*link.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.session
	if s == nil || !s.up {
		return nil
	}
	if !slices.ContainsFunc(f.results, func(r result) bool { return r.task != nil && r.task.key == nil }) {
		return nil // the path has all of them
	}
	if len(s.conns) > 1 {
		for i := range f.results {
			if t := f.results[i].task; t != nil && (t.running > 1 || t.letter != nil && t.letter.pulls > 1) {
				return s.conns
			}
		}
	}
	return s.conns[:1]
}

// connectLocked dials unless that is under way. If it cannot, dialErr says why.
func (p *Peer) connectLocked() {
	if p.dialling != nil {
		return
	}
	if len(p.info.Addrs) == 0 && (p.coming == nil || p.coming.broken) { // else the peer's session is awaited
		p.dialErr = fmt.Errorf("%w: the peer is not connected, and its address is not known here", ErrBroken)
		p.failWaitingLocked(p.dialErr)
		return
	}
	done := make(chan struct{})
	p.dialling = done
	if !p.ep.goes(func() {
		err := p.ep.dial(p)
		p.mu.Lock()
		if p.life.Err() != nil {
			err = context.Cause(p.life)
		}
		p.dialling, p.dialErr = nil, err
		switch {
		case p.session != nil && p.session.up: // made by it, or the peer has connected meanwhile
		case err == nil: // a session was made, and has ended: what waits has come since
			p.resumeLocked()
		default:
			p.failWaitingLocked(err)
		}
		p.unlock()
		close(done)
	}) {
		p.dialling, p.dialErr = nil, ErrClosed
		p.failWaitingLocked(ErrClosed)
	}
}

// resumeLocked connects for what waits, if there is no session.
func (p *Peer) resumeLocked() {
	if len(p.waiting) > 0 && p.session == nil && p.gone == nil {
		p.connectLocked()
	}
}

// failWaitingLocked fails what waits for a connection, which could not be made.
func (p *Peer) failWaitingLocked(err error) {
	for _, t := range p.waiting {
		p.failLocked(t, err)
	}
	p.waiting = nil
}

// connect waits until the peer is connected.
func (p *Peer) connect(ctx context.Context) error {
	for {
		p.mu.Lock()
		if p.gone != nil {
			defer p.mu.Unlock()
			return p.gone
		}
		if p.session != nil && p.session.up {
			p.mu.Unlock()
			return nil
		}
		p.connectLocked()
		done, err := p.dialling, p.dialErr
		p.unlock()
		if done == nil {
			return err
		}
		select {
		case <-done:
		case <-ctx.Done():
			return cancelledBy(ctx)
		}
		p.mu.Lock()
		err, up := p.dialErr, p.session != nil && p.session.up
		p.mu.Unlock()
		if up {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// unwanted says that a Connect has failed: a peer that was never there makes room for others.
func (p *Peer) unwanted() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.lastSession == 0 {
		p.wanted = false
	}
}

// awaitSession waits for a session that the peer makes, until ctx ends or other is closed.
func (p *Peer) awaitSession(ctx context.Context, other <-chan struct{}) error {
	p.mu.Lock()
	if p.session != nil && p.session.up {
		p.mu.Unlock()
		return nil
	}
	if p.awaited == nil {
		p.awaited = make(chan struct{})
	}
	up := p.awaited
	p.mu.Unlock()
	select {
	case <-up:
		return nil
	case <-other:
		return fmt.Errorf("%w: the peer did not finish it", ErrBroken)
	case <-ctx.Done():
		return fmt.Errorf("%w, and the peer did not succeed: %w", errCrossed, ctx.Err())
	}
}

// Lookup returns the description of one of the peer's regions.
func (p *Peer) Lookup(ctx context.Context, name string) (RemoteRegion, error) {
	if err := args.Context(ctx, p, "lookup"); err != nil {
		return RemoteRegion{}, err
	}
	q := &query{op: wire.Lookup, name: name}
	if err := checkName("region", name); err != nil {
		return RemoteRegion{}, err
	}
	if err := p.ask(ctx, q); err != nil {
		return RemoteRegion{}, fmt.Errorf("region %s of %v: %w", name, p, err)
	}
	return q.found[0], nil
}

// MaxPage is the largest number of regions that one call of Regions returns.
const MaxPage = 1024

// Regions returns the first of the peer's regions that this end may use, in the order of their
// names, whose names come after after: at most max, and MaxPage if max is larger, or not above 0.
// If they are fewer than that, they are the last ones. after is "", or a name that a region may
// have.
func (p *Peer) Regions(ctx context.Context, after string, max int) ([]RemoteRegion, error) {
	if err := args.Context(ctx, p, "regions"); err != nil {
		return nil, err
	}
	if after != "" {
		if err := checkName("region", after); err != nil {
			return nil, err
		}
	}
	if max <= 0 || max > MaxPage {
		max = MaxPage
	}
	q := &query{op: wire.List, name: after, max: max}
	if err := p.ask(ctx, q); err != nil {
		return nil, fmt.Errorf("regions of %v: %w", p, err)
	}
	return q.found, nil
}

// query is a request for descriptions of regions, or for the peer's state. peer.mu guards it until
// it is done.
type query struct {
	op    wire.Opcode
	name  string
	max   int
	found []RemoteRegion
	state stats.Endpoint
	then  []*task // that wait for the region
	err   error
	done  chan struct{}
	ended bool

	// Of a watch:
	events []RegionEvent
	more   chan struct{} // there may be events
}

// open sends a query to the peer, and connects first if needed.
func (p *Peer) open(ctx context.Context, q *query) error {
	q.done = make(chan struct{})
	for {
		if err := p.connect(ctx); err != nil {
			return err
		}
		p.mu.Lock()
		s := p.session
		if s != nil && s.up && !s.bye {
			s.askLocked(q)
			p.unlock()
			return nil
		}
		if s == nil || !s.up {
			p.mu.Unlock()
			continue
		}
		if p.awaited == nil {
			p.awaited = make(chan struct{})
		}
		stays := p.awaited
		p.mu.Unlock()
		select {
		case <-stays:
		case <-s.over:
		case <-ctx.Done():
			return cancelledBy(ctx)
		}
	}
}

// lastName returns the name after which the next one of a List comes.
func (q *query) lastName() string {
	if n := len(q.found); n > 0 {
		return q.found[n-1].Name
	}
	return q.name
}

// ask sends a query and waits for the answer, until ctx ends or Config.Timeout.
func (p *Peer) ask(ctx context.Context, q *query) error {
	began := time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, p.ep.cfg.Timeout, &TimeoutError{"request", "waiting for the peer"})
	defer cancel()
	if err := p.open(ctx, q); err != nil {
		return err
	}
	select {
	case <-q.done:
		return q.err
	case <-ctx.Done():
		p.mu.Lock()
		q.ended = true
		if s := p.session; s != nil {
			s.unaskLocked()
		}
		p.checkHostLocked(began)
		p.unlock()
		return cancelledBy(ctx)
	}
}

// cancelledBy is the error of a call whose ctx has ended.
func cancelledBy(ctx context.Context) error {
	cause := context.Cause(ctx)
	if t := (*TimeoutError)(nil); errors.As(cause, &t) {
		return t
	}
	return fmt.Errorf("%w: %w", ErrCancelled, cause)
}

// Close disconnects from the peer: its operations fail with ErrClosed. Idempotent.
func (p *Peer) Close() error {
	p.leave(fmt.Errorf("%v: %w", p, ErrClosed))
	return nil
}

// leave ends the peer for the reason why.
func (p *Peer) leave(why error) {
	p.ep.forget(p)
	p.mu.Lock()
	if s := p.session; s != nil && s.up && !s.bye && s.idleLocked() {
		s.byeToLocked(s.conns) // so that the peer does not take the end of any for a loss
		p.release((*link.Conn).FlushAll)
		p.mu.Lock()
	}
	if p.gone == nil {
		p.gone = why
	}
	p.end(p.gone)
	s := p.session
	p.failWaitingLocked(why)
	if s != nil {
		s.breakLocked(why)
	}
	if p.coming != nil {
		p.coming.breakLocked(why)
	}
	if p.parting != nil {
		p.parting.breakLocked(why)
	}
	for len(p.due) > 0 {
		p.failLocked(p.due[0], why)
	}
	p.recvs, p.mail = queue[*task]{}, queue[*arrival]{}
	if p.timer != nil {
		p.timer.Stop()
	}
	p.unlock()
}
