package p2p

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// The frames of the proxy. Header fields that are not named are 0; Ack is always the credit of
// (Chan, this direction's reverse).
const (
	// ordered lane. Seq, Call, Count: the operation; Off: place in the message; flagLast on its
	// last frame
	frameData   = iota + 1
	frameCredit // carries only Ack
	frameAbort  // the channel failed at the sender; payload: why
	frameBye    // the sender closed the channel in good order
	frameEager  // tagged message, whole. Count: tag
	frameRTS    // tagged message, announced. Count: tag, Seq: sender's id, Off: bytes
	// Seq: sender's id, Off: receiver's id, 0: the receiver does not want it now, all of it is to
	// come again; flagDrop: it has it, or does not want it at all
	frameCTS
	frameBulk // data of an announced message. Seq: receiver's id, Off: place
	// the sender has been waiting for long. Seq, Call, Count: in which operation; Off: for whom,
	// see packSlots
	frameStatus
	frameLeave  // the sender goes on in another epoch. Seq: the last operation that it has run in this one
	frameCancel // the sender took an announced message back. Seq: sender's id, Off: receiver's id or 0
	// nothing: somebody waits for the peer, and wants to know whether its host answers; of no
	// channel
	frameBeat
	// from now on Chan stands for this channel. Seq, Call: its name, Count, Off: its epoch; no
	// credit
	frameOpen
	frameNotice // payload: what key Seq of the sender is from now on; no credit
)

const (
	flagLast = 1 << iota
	flagDrop
	flagHint // see Channel.Begin
)

// MaxAbort is the longest payload of Abort in bytes.
const MaxAbort = 1024

// maxUnopened bounds the channels that peers may use before this rank opens them.
const maxUnopened = 4096

// PeerError says that a peer's link failed or could not be made.
type PeerError struct {
	Rank int
	Err  error
}

func (e *PeerError) Error() string { return fmt.Sprintf("rank %d: %v", e.Rank, e.Err) }
func (e *PeerError) Unwrap() error { return e.Err }

// Peer is what a directory knows of a rank.
type Peer struct {
	Identity
	Endpoints map[string][]byte // by transport name
}

// Config is what a Proxy is made of. All fields without a default must be set.
type Config struct {
	Self   Identity
	Size   int // ranks of the job
	Secret []byte
	// Resolve asks the directory for a rank; it may block until ctx ends, and returns an error that
	// wraps ErrPeerGone when the rank is known to be gone.
	Resolve func(ctx context.Context, rank int) (Peer, error)
	// Transports in order of preference. The proxy owns them.
	Transports []Transport
	// Window is the credit per channel, peer and direction, in bytes; the same at all ranks.
	// Default: 64 MiB over Size, within 32 KiB and 512 KiB.
	Window int
	// Oversubscribed says that there are more local ranks than cores: waiters then yield at once.
	Oversubscribed bool
	// Threads says that all ranks are goroutines of this process, so that yielding is the Go
	// scheduler's business alone.
	Threads bool
	// Notify hears of every link that comes up (err nil) or goes down, with the peer's incarnation.
	// It is called with the proxy's lock and must not block.
	Notify func(peer Identity, err error)
	// Clients takes the links of programs that are no ranks. Default: they are refused.
	Clients Clients
	// Patient, if it returns true, has a peer that refuses this rank as unknown dialled again: it
	// may still believe in an earlier life of this rank. Who has not come yet is dialled for 30 s,
	// too. Called by any goroutine, with or without the lock.
	Patient func() bool
	// ConnectTimeout bounds how long a peer that is being dialled may stay unreachable. Default 30
	// s.
	ConnectTimeout time.Duration
	// Heartbeat is how often a peer that somebody waits for is sent a frame that says nothing, so
	// that a transport notices when the peer's host does not answer. Default 0: never.
	Heartbeat time.Duration
	// Linger bounds how long Vacate leaves a Distant link in service for what the peer may have sent
	// before it left. Default 0: not at all.
	Linger time.Duration
	Logger *slog.Logger // default: none
}

// Clients serves programs that know the job's secret and are no ranks. Its methods are called from
// any goroutine, without the proxy's lock.
type Clients interface {
	// Admit is Host.Admit for a client.
	Admit(from Identity) error
	// Accepted takes the link of an admitted client, and owns it from then on: the proxy neither
	// polls nor closes it.
	Accepted(from Identity, l Link, transport string)
}

// DefaultWindow is Config.Window's default for a job of size ranks.
func DefaultWindow(size int) int { return min(max(64<<20/max(size, 1)&^4095, 32<<10), 512<<10) }

// Proxy is a rank's engine for all traffic with its peers. It owns the links, matches what is sent
// with what is awaited, keeps the credits and makes progress: there is no thread of its own,
// whoever waits polls. All state is under one lock, held while polling and matching but never while
// sleeping.
type Proxy struct {
	cfg       Config
	log       *slog.Logger
	endpoints map[string][]byte
	ctx       context.Context // ends at Close
	cancel    context.CancelFunc
	wg        sync.WaitGroup
	dials     chan struct{} // bounds dialling

	mu       sync.Mutex
	peers    []peer  // by rank
	links    []*peer // those with a live link
	chans    map[chanKey]*Channel
	floors   map[Name]floor // of channels that were opened: what arrives below is dropped
	unopened int
	reserved uint64 // names of channels
	pool     pool
	discard  []byte
	arrivals uint64
	closed   bool
	regions  regions
	boards   []board       // words of exposures
	tickets  atomic.Uint64 // the latest of any exposure
	wanted   atomic.Int32  // goroutines in Lock
	behind   atomic.Int32  // goroutines in regain

	ended [16]Completion // being taken from a link

	sleepMu  sync.Mutex
	sleepers []*Wait
	asleep   atomic.Int32
	draining bool // see drain
}

// peer is what the proxy knows of one rank.
type peer struct {
	rank int
	connection
	sender
	receiver
	counts    counts
	transfers transfers
}

// connection is a peer's link, or why there is none. At most one of link and err is set. Without
// either the peer is not linked yet: dialing and admitted say what is being done about that.
type connection struct {
	id       Identity // zero Incarnation: not known yet
	link     Link
	linkNo   uint64 // which of the peer's links that is
	err      error  // the peer is gone, until Relink or Vacate says otherwise
	vacant   bool   // any incarnation may link itself
	leaving  *leaving
	was      error // err before Relink, until there is a link
	bye      bool  // it said goodbye first
	dialing  bool
	since    time.Time // link first wanted
	admitted time.Time // an incoming connection was admitted, and is expected
	stop     context.CancelFunc
	beaten   time.Time // when a heartbeat was sent last
}

// sender is what is to be sent to a peer. All of it ends with the link.
type sender struct {
	numbers uint32     // of channels, that were given out over the link
	free    []uint32   // those of them that nothing has any more
	sendErr error      // sending failed; what has arrived is still read, then the link goes down
	refused bool       // the link had no room for the latest frame
	unsent  bool       // the link keeps what it could not pass on
	out     Header     // the frame that is being sent: on the heap once, not once a frame
	ctl     []ctl      // control frames that the link had no room for
	queued  []*stream  // with messages of the tagged lane to begin
	bulk    []*SendReq // that the peer has asked for
}

// receiver is where what comes from a peer goes.
type receiver struct {
	in     []inbound // by channel number
	lent   *Recv     // has the current frame's payload in place; the link stands still
	cur    Header    // of the current frame
	st     *stream   // of the current or last frame; nil: of a channel that was closed
	target target    // what the current frame belongs to; nil: it is dropped
	dst    []byte    // where the rest of the current frame goes
	left   int       // bytes of it still to come, >= len(dst); what exceeds dst is dropped
}

// A target is what a frame with a payload belongs to: a *Recv of the ordered lane, a *RecvReq of the
// tagged one, or an *early, which is kept until somebody asks for it.
type target interface {
	// placed is called when the payload of frame h of st is where it belongs.
	placed(p *Proxy, st *stream, h *Header)
}

// leaving is a peer that was vacated while its last frames may be under way.
type leaving struct {
	why  error
	over chan struct{} // closed when the link has gone down
}

type ctl struct {
	h       Header
	payload []byte
}

// patience is how long a peer is dialled that may not have come yet.
const patience = 30 * time.Second

// New makes a proxy. It does nothing until Listen.
func New(cfg Config) *Proxy {
	if cfg.Window == 0 {
		cfg.Window = DefaultWindow(cfg.Size)
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = patience
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	p := &Proxy{cfg: cfg, log: cfg.Logger, peers: make([]peer, cfg.Size),
		chans: map[chanKey]*Channel{}, floors: map[Name]floor{},
		dials: make(chan struct{}, 16)}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	for i := range p.peers {
		p.peers[i].rank = i
	}
	p.pool.control = p.Control
	return p
}

// Listen starts every transport and returns their endpoints, by name, for the directory. It may
// block until ctx ends. On error the proxy must be closed.
func (p *Proxy) Listen(ctx context.Context) (map[string][]byte, error) {
	p.endpoints = map[string][]byte{}
	for _, t := range p.cfg.Transports {
		ep, err := t.Listen(ctx, &host{p, t.Name()})
		if err != nil {
			return nil, err // it names the transport
		}
		if len(ep) > MaxEndpoint {
			return nil, fmt.Errorf("%s: endpoint of %d bytes, at most %d are allowed", t.Name(), len(ep), MaxEndpoint)
		}
		p.endpoints[t.Name()] = ep
	}
	return p.endpoints, nil
}

// SetOversubscribed corrects Config.Oversubscribed once it is known how many ranks share the
// machine. With the lock.
func (p *Proxy) SetOversubscribed(yes bool) {
	p.cfg.Oversubscribed = yes
	for _, pr := range p.links {
		p.tune(pr.link)
	}
}

// tune tells a link that this rank has a core of its own, if it has. With the lock.
func (p *Proxy) tune(l Link) {
	if s, ok := l.(SeldomSleeper); ok && !p.cfg.Oversubscribed {
		s.SleepSeldom()
	}
}

// Closed reports whether Close was called. Takes the lock itself.
func (p *Proxy) Closed() bool {
	p.Lock()
	defer p.Unlock()
	return p.closed
}

// Endpoints returns what Listen returned.
func (p *Proxy) Endpoints() map[string][]byte { return p.endpoints }

// Lock and Unlock hold the proxy for a sequence of calls that says it needs that.
func (p *Proxy) Lock() {
	if !p.mu.TryLock() {
		p.wanted.Add(1)
		p.mu.Lock()
		p.wanted.Add(-1)
	}
}

// Yield gives the lock to whoever waits for it, if anybody does, and reports whether it did. For who
// holds the lock for long without waiting for a peer: between two pieces of memory that it moves.
// With the lock.
func (p *Proxy) Yield() bool {
	if p.wanted.Load() == 0 && p.behind.Load() == 0 {
		return false
	}
	p.mu.Unlock()
	runtime.Gosched()
	p.regain()
	return true
}

// regain takes the lock again for who gave it up while it waits for a peer. Those who spin do not
// give it up sooner for that, as they do for Lock: they wait too, and deliver what comes for both.
func (p *Proxy) regain() {
	if !p.mu.TryLock() {
		p.behind.Add(1)
		p.mu.Lock()
		p.behind.Add(-1)
	}
}

// Unlock is Lock's counterpart.
func (p *Proxy) Unlock() { p.mu.Unlock() }

// Close tells the peers goodbye, closes links, transports and regions made for control, and ends
// every goroutine before it returns. Pending waits fail with ErrClosed. What was sent is still
// delivered by the links, within their own bounds.
func (p *Proxy) Close() error {
	p.Lock()
	if p.closed {
		p.Unlock()
		p.wg.Wait()
		return nil
	}
	deadline := time.Now().Add(200 * time.Millisecond)
	for time.Now().Before(deadline) && p.pending() { // e.g. the last frame of a broadcast, when the socket was full
		p.pollAll()
	}
	p.closed = true
	p.cancel()
	links := make([]Link, 0, len(p.links))
	var paths []Path
	for _, pr := range p.links {
		p.unlend(pr)
		links = append(links, pr.link)
		paths = append(paths, pr.transfers.paths...)
		p.lose(pr, ErrClosed)
		pr.link, pr.err = nil, ErrClosed
	}
	p.links = nil
	for _, c := range p.chans {
		if c.err == nil {
			c.err = ErrClosed
		}
	}
	p.Unlock()
	p.wakeAll()
	var first error
	for _, t := range p.cfg.Transports { // no new links from here on
		if err := t.Close(); err != nil && first == nil {
			first = err
		}
	}
	for _, l := range links {
		if err := l.Close(); err != nil && first == nil {
			first = err
		}
	}
	finish(paths)
	p.wg.Wait()
	p.Lock()
	p.pool.free()
	for _, b := range p.boards {
		p.regions.remove(b.region.ID)
		if err := errors.Join(p.Deregister(b.region), b.region.Free()); err != nil && first == nil {
			first = err
		}
	}
	p.boards = nil
	p.Unlock()
	return first
}

// pending reports whether a link or the proxy still holds frames for a peer.
func (p *Proxy) pending() bool {
	for _, pr := range p.links {
		if pr.unsent || len(pr.ctl) > 0 && pr.sendErr == nil {
			return true
		}
	}
	return false
}

// attach takes a new link into service, unless the peer already has one.
func (p *Proxy) attach(pr *peer, id Identity, l Link, transport string) {
	p.Lock()
	if p.closed || pr.link != nil || pr.err != nil && !pr.vacant {
		p.Unlock()
		l.Close()
		return
	}
	if pr.stop != nil {
		pr.stop() // our own dialling lost
	}
	pr.id, pr.link, pr.err, pr.was, pr.vacant, pr.bye, pr.admitted = id, l, nil, nil, false, false, time.Time{}
	pr.linkNo++
	pr.transfers.attach(pathsOf(l, transport))
	p.links = append(p.links, pr)
	p.tune(l)
	pr.counts.transport = transport
	p.log.Debug("link up", "peer", pr.rank, "incarnation", id.Incarnation, "transport", transport)
	for _, c := range p.chans {
		if st := c.streams[pr.rank]; st != nil && st.lost != nil {
			c.renew(st)
		}
		if st := c.streams[pr.rank]; st != nil {
			for key := range NoticeKeys {
				c.tell(st, key)
			}
		}
		if c.aborted != nil && c.has(pr.rank) {
			c.control(pr, Header{Kind: frameAbort, Len: uint32(len(c.aborted))}, c.aborted)
		}
	}
	if p.cfg.Notify != nil {
		p.cfg.Notify(id, nil)
	}
	p.Unlock()
	p.wakeAll()
}

// down takes a failed link out of service: evidence that the peer is gone.
func (p *Proxy) down(pr *peer, err error) {
	if pr.link == nil {
		return
	}
	if pr.bye && errors.Is(err, ErrPeerGone) {
		err = fmt.Errorf("it closed its group: %w", ErrPeerGone)
	}
	left := pr.leaving
	if left != nil {
		err = left.why
	}
	l, paths := pr.link, pr.transfers.paths
	p.unlend(pr)
	p.lose(pr, &PeerError{pr.rank, gonePeer(err)})
	p.log.Debug("link down", "peer", pr.rank, "err", err)
	if e, ok := pr.target.(*early); ok {
		p.pool.put(e.buf)
	}
	pr.link, pr.err, pr.sender, pr.receiver = nil, err, sender{}, receiver{}
	for i, o := range p.links {
		if o == pr {
			p.links = append(p.links[:i], p.links[i+1:]...)
			break
		}
	}
	for _, c := range p.chans {
		if st := c.streams[pr.rank]; st != nil {
			c.sever(st, err)
		}
	}
	p.wg.Add(1)
	go func() { defer p.wg.Done(); l.Close(); finish(paths) }()
	p.wakeAll()
	if left != nil { // which was told when the peer was vacated
		pr.leaving = nil
		close(left.over)
		pr.vacate(left.why)
		return
	}
	if p.cfg.Notify != nil {
		p.cfg.Notify(pr.id, err)
	}
}

// unlend gives the payload that a Recv borrowed back to the link, keeping a copy.
func (p *Proxy) unlend(pr *peer) {
	r := pr.lent
	if r == nil {
		return
	}
	copy(r.buf, r.view)
	r.view = r.buf
	p.returnLent(pr)
}

func (p *Proxy) returnLent(pr *peer) {
	st := pr.lent.st
	pr.lent = nil
	pr.link.Release()
	st.taken += cost(int(pr.cur.Len))
	p.repay(st)
}

// Vacate says that this incarnation of rank is a member no more, or with 0 that none is. Its link, if
// there is one, goes down because of why, waits for it fail then, and another incarnation may link
// itself; one that is linked already stays. What the rank had sent is taken first: a Distant link
// stays in service until the rank has ended it, Config.Linger is over or another incarnation comes.
// Takes the lock itself.
func (p *Proxy) Vacate(rank int, incarnation uint64, why error) {
	p.Lock()
	defer p.Unlock()
	pr := &p.peers[rank]
	another := incarnation != 0 && pr.link != nil && pr.id.Incarnation != incarnation
	if p.closed || rank == p.cfg.Self.Rank || pr.leaving != nil || another {
		return
	}
	p.unlend(pr)
	for until := time.Now().Add(readFor); p.poll(pr) && time.Now().Before(until); { // it may live, and go on sending
	}
	if _, distant := pr.link.(Distant); !distant || p.cfg.Linger <= 0 {
		p.remove(pr, why)
		return
	}
	l := &leaving{why, make(chan struct{})}
	pr.leaving = l
	p.wg.Go(func() {
		t := time.NewTimer(p.cfg.Linger)
		defer t.Stop()
		select {
		case <-l.over:
		case <-p.ctx.Done():
		case <-t.C:
			p.Lock()
			defer p.Unlock()
			if pr.leaving == l {
				p.remove(pr, why)
			}
		}
	})
	if p.cfg.Notify != nil {
		p.cfg.Notify(pr.id, why)
	}
	p.wakeAll()
}

// readFor is how long Vacate reads at once from a peer that goes on sending.
const readFor = 50 * time.Millisecond

// remove ends what is left of a peer's life.
func (p *Proxy) remove(pr *peer, why error) {
	p.down(pr, why)
	for _, c := range p.chans {
		if st := c.streams[pr.rank]; st != nil {
			st.notices.heard = [NoticeKeys][]byte{} // of a life that is over
		}
	}
	if pr.stop != nil {
		pr.stop()
	}
	pr.vacate(why)
	p.wakeAll()
}

// vacate makes room for any incarnation.
func (pr *peer) vacate(why error) {
	pr.err, pr.was, pr.vacant, pr.id, pr.since, pr.admitted = why, nil, true, Identity{}, time.Time{}, time.Time{}
}

// succeed ends the link of a peer that was vacated when another incarnation of it comes.
func (p *Proxy) succeed(pr *peer, incarnation uint64) {
	if pr.leaving != nil && pr.id.Incarnation != incarnation {
		p.remove(pr, pr.leaving.why)
	}
}

// Relink forgets why the link to rank failed, if it did, and makes one unless there is one. It does
// not block; Config.Notify tells the outcome. Takes the lock itself.
func (p *Proxy) Relink(rank int) {
	p.Lock()
	defer p.Unlock()
	pr := &p.peers[rank]
	if pr.link != nil || pr.dialing {
		return
	}
	pr.was = pr.err
	pr.err, pr.vacant, pr.since = nil, false, time.Now().Add(-dialTieBreak)
	p.connect(pr)
}

// Expect says which incarnation of rank is a member: no other is linked until Vacate. It does
// nothing while there is a link, unless that is of another incarnation, which was vacated: it ends.
// Takes the lock itself.
func (p *Proxy) Expect(rank int, incarnation uint64) {
	p.Lock()
	defer p.Unlock()
	pr := &p.peers[rank]
	p.succeed(pr, incarnation)
	if pr.link == nil && rank != p.cfg.Self.Rank {
		pr.id = Identity{Rank: rank, Incarnation: incarnation}
		if pr.vacant {
			pr.err, pr.was, pr.vacant = nil, nil, false
		}
	}
}

// Down returns why rank cannot be reached, nil while it can, or may be and never failed to. With
// the lock.
func (p *Proxy) Down(rank int) error {
	if pr := &p.peers[rank]; pr.err == nil {
		return pr.was
	}
	return p.peers[rank].err
}

// Progress polls once, or gives way and sleeps as long waits do, and returns nil when the caller
// should look again at what it waits for, or why w must not wait any longer. With the lock, which
// it may give up meanwhile.
func (p *Proxy) Progress(w *Wait) error { return p.progress(w, nil) }

// Wake ends the sleep of everybody who waits, so that they look again at what they wait for. From
// any goroutine.
func (p *Proxy) Wake() { p.wakeAll() }

// Linked returns the incarnation that rank is linked as, 0 if it is not. Takes the lock itself.
func (p *Proxy) Linked(rank int) uint64 {
	p.Lock()
	defer p.Unlock()
	if pr := &p.peers[rank]; pr.link != nil {
		return pr.id.Incarnation
	}
	return 0
}

// Idle looks once at every link, unless somebody else uses the proxy: for a rank that computes and
// would not notice what happens to its peers.
func (p *Proxy) Idle() {
	if p.mu.TryLock() {
		if !p.closed && p.asleep.Load() == 0 {
			p.pollAll()
		}
		p.mu.Unlock()
	}
}

// drain sees to it that what this rank has told its peers, as that an operation failed, goes out
// although nobody may wait here any more. With the lock.
func (p *Proxy) drain() {
	if p.draining || p.closed || !p.pending() {
		return
	}
	p.draining = true
	p.wg.Go(func() {
		var w Wait
		w.Reset(p.ctx, 0, true)
		p.Lock()
		for p.pending() && p.progress(&w, nil) == nil {
		}
		p.draining = false
		p.Unlock()
	})
}

// control sends a control frame of a channel in use, or keeps it until the link has room. It
// carries the channel's credit, as every frame does.
func (c *Channel) control(pr *peer, h Header, payload []byte) {
	if pr.link == nil || pr.sendErr != nil || c.retired {
		return
	}
	st := c.streamOf(pr)
	h.Chan, h.Ack, st.told = c.p.number(st), st.taken, st.taken
	c.p.queue(pr, h, payload)
}

// queue sends a frame after all others that wait to be sent.
func (p *Proxy) queue(pr *peer, h Header, payload []byte) {
	if len(pr.ctl) == 0 && p.transmit(pr, &h, payload) {
		return
	}
	if pr.sendErr == nil {
		pr.ctl = append(pr.ctl, ctl{h, payload})
	}
}

// transmit offers one frame to the peer's link; a failure takes the link down and returns false.
func (p *Proxy) transmit(pr *peer, h *Header, payload []byte) bool {
	pr.out = *h
	ok, err := pr.link.Send(&pr.out, payload)
	if err == nil && ok {
		pr.counts.sent(len(payload))
		var flushed bool
		if flushed, err = pr.link.Flush(); err == nil {
			pr.unsent = !flushed
		}
	}
	if err != nil {
		pr.sendErr = err // if the frame was taken, only flushing failed: the peer may have read it, and ended
		return ok
	}
	// somebody may sleep until there is room: the link has forgotten its wish, and there was room
	if pr.refused && ok && p.asleep.Load() > 0 {
		p.wakeAll()
	}
	pr.refused = !ok
	return ok
}
