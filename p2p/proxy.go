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

	"golang.org/x/sync/errgroup"

	"tutti/internal/yield"
)

// The proxy's kinds of frames. Header fields that are not named are 0. Ack is always the credit of
// the channel's other direction.
const (
	// Ordered lane. Seq, Call, Count: the operation; Off: position in the message; flagLast on its
	// last frame.
	frameData   = iota + 1
	frameCredit // carries only Ack
	frameAbort  // the channel failed at the sender; payload: why
	frameBye    // the sender closed the channel
	frameEager  // tagged message, whole. Count: tag
	frameRTS    // tagged message, announced. Count: tag, Seq: sender's id, Off: bytes
	// Seq: sender's id, Off: receiver's id, 0: the receiver does not want it now, and all of it has
	// to be sent again; flagDrop: the receiver has it, or does not want it at all.
	frameCTS
	frameBulk // data of an announced message. Seq: receiver's id, Off: place
	// The sender has been waiting for long. Seq, Call, Count: the operation; Off: the slots that it
	// waits for, see packSlots.
	frameStatus
	frameLeave  // the sender moved to another epoch. Seq: the last operation that it has run in this one
	frameCancel // the sender cancelled an announced message. Seq: sender's id, Off: receiver's id or 0
	// No content: a check whether the peer's host answers; of no channel.
	frameBeat
	// Chan stands for this channel in later frames. Seq, Call: its name; Count, Off: its epoch.
	// Ack: no credit, but the receiver's place in it, which wraps, or 0: see Proxy.Open. flagEnded:
	// an answer: it has ended at the sender, and the frames that follow say how.
	frameOpen
	// Payload: the new value of key Seq, of the sender or, if Off is not 0, of slot Off-1; no
	// credit.
	frameNotice
	// Follows frameOpen if frames of kind frameEager were sent on the channel over earlier links.
	// Seq: how many, to this incarnation.
	frameBegun
	// The sender's traffic with this incarnation in the ordered lane has ended with an earlier
	// link: it neither sends nor receives anything more in this epoch.
	frameLost
)

const (
	flagLast = 1 << iota
	flagDrop
	flagHint // see Channel.Begin
	flagEnded
)

// MaxAbort is the longest payload of Abort in bytes.
const MaxAbort = 1024

// Bounds of the channels that peers use and this rank has not opened yet: of all peers together or,
// if that is more, as if each used some. Each channel takes about a kilobyte, beside the messages.
const (
	maxUnopened = 4096
	minUnopened = 256
)

// mostUnopened is how many channels that are not open a peer may use at a time.
func (p *Proxy) mostUnopened() int { return max(maxUnopened/max(p.cfg.Size-1, 1), minUnopened) }

// PeerError says that a peer's link failed or could not be made.
type PeerError struct {
	Rank int
	Err  error
}

func (e *PeerError) Error() string { return fmt.Sprintf("rank %d: %v", e.Rank, e.Err) }
func (e *PeerError) Unwrap() error { return e.Err }

// Peer is the directory's entry of a rank.
type Peer struct {
	Identity
	Endpoints map[string][]byte // by transport name
}

// Config describes a Proxy. All fields without a default must be set.
type Config struct {
	Self   Identity
	Size   int // ranks of the job
	Secret []byte
	// Resolve asks the directory for a rank. It blocks until the rank has come, or ctx ends. It
	// returns an error that wraps ErrPeerGone when the rank is known to be gone, ErrUnfit when this
	// rank cannot be in one job with it, and ErrStale when what it knows is out of date: then it is
	// asked again.
	Resolve func(ctx context.Context, rank int) (Peer, error)
	// Transports in order of preference. The proxy owns them.
	Transports []Transport
	// Window is the credit per channel, peer and direction, in bytes; the same at all ranks.
	// Default: DefaultWindow of Size.
	Window int
	// Oversubscribed says that there are more local ranks than cores: waiters then yield at once.
	Oversubscribed bool
	// Threads says that all ranks are goroutines of this process, so that yielding to the Go
	// scheduler is sufficient.
	Threads bool
	// Notify is called for every link that comes up (err nil) or goes down, with the peer's
	// incarnation. It is called with the proxy's lock and must not block.
	Notify func(peer Identity, err error)
	// Clients receives the links of programs that are not ranks. Default: they are refused. The
	// ranks of pg have none; it is for a program that runs a Proxy of its own.
	Clients Clients
	// Patient, if it returns true, makes the proxy dial a peer again that refuses this rank as
	// unknown: the peer may still expect an earlier incarnation. A peer that cannot be reached is
	// then dialled for 30 s at least. Called by any goroutine, with or without the lock.
	Patient func() bool
	// ConnectTimeout bounds how long a peer that Resolve knows may be unreachable while it is
	// dialled. Default 30 s.
	ConnectTimeout time.Duration
	// Progress starts a goroutine that makes progress while no operation waits, from Listen to
	// Close. It sleeps while no frames come; peers then have to wake it.
	Progress bool
	// Turn is the number of bytes that are moved with the lock before it is offered to other
	// goroutines. Handing it over usually means waking another thread. Default 512 KiB, some tens
	// of microseconds.
	Turn int
	// Heartbeat is the interval of empty frames to a peer that an operation waits for, so that a
	// transport notices when the peer's host does not answer. Default 0: none.
	Heartbeat time.Duration
	// Linger bounds how long MarkDead keeps a Distant link for frames that the peer sent before it
	// left. Default 0: not at all.
	Linger time.Duration
	Logger *slog.Logger // default: none
}

// Clients serves programs that know the job's secret but are not ranks. Its methods are called from
// any goroutine, without the proxy's lock.
type Clients interface {
	// Admit is Host.Admit for a client.
	Admit(from Identity) error
	// Accepted passes the link of an admitted client to the callee, which owns it: the proxy
	// neither polls nor closes it.
	Accepted(from Identity, l Link, transport string)
}

// DefaultWindow is Config.Window's default for a job of size ranks: 64 MiB over size, from 32 KiB
// to 8 MiB.
func DefaultWindow(size int) int { return min(max(64<<20/max(size, 1)&^4095, 32<<10), 8<<20) }

// Proxy is a rank's engine for all traffic with its peers. It owns the links, matches messages with
// receives, manages the credits and makes progress. It has no thread, except with Config.Progress:
// waiters poll. All state is under one lock, which is held while polling and matching but never
// while sleeping.
type Proxy struct {
	cfg       Config
	log       *slog.Logger
	endpoints map[string][]byte
	ctx       context.Context // ends at Close
	cancel    context.CancelFunc
	wg        sync.WaitGroup
	dials     chan struct{} // limits concurrent dials

	mu    sync.Mutex
	peers []peer  // by rank
	links []*peer // those with a live link
	chans map[chanKey]*Channel
	// Of channels that are open, of closed ones without places, and of the latest ones of which
	// peers may have to be told more than that they are closed. Frames of earlier epochs are
	// dropped.
	floors    map[Name]floor
	failed    []Name   // closed channels with places that have floors, the oldest first
	reserved  uint64   // names of channels
	unsettled []uint32 // places of reservations that are not settled
	pool      pool
	discard   []byte
	arrivals  uint64
	closed    bool
	regions   regions
	boards    []board       // words of exposures
	tickets   atomic.Uint64 // the latest one of all exposures
	wanted    atomic.Int32  // goroutines in Lock
	behind    atomic.Int32  // goroutines in regain
	working   atomic.Int32  // goroutines between Leave and Return

	oversubscribed atomic.Bool // now; Config has the value at the beginning

	owes   bool         // of a channel that was closed: see Channel.owes
	moved  int          // bytes since the lock was last offered
	poller yield.Poller // of waiters

	ended [16]Completion // buffer for Poll

	sleepMu  sync.Mutex
	sleepers []*Wait
	asleep   atomic.Int32
	calls    atomic.Uint32 // of Wake
	draining bool          // see drain
}

// peer is the proxy's state of one rank.
type peer struct {
	rank int
	connection
	sender
	receiver
	counts    counts
	transfers transfers
	unopened  int // channels with a stream of the peer that are not open
}

// connection is a peer's link, or why there is none. At most one of link and err is set. Without
// either the peer is not linked yet: dial and admitted say whether that is under way.
type connection struct {
	id       Identity // Incarnation 0: not known yet
	link     Link
	linkNo   uint64    // counts the peer's links
	made     time.Time // when the link was attached
	doubted  bool      // the peer has connected since, and no young link explains that
	latest   uint64    // incarnation of the latest link
	err      error     // the peer has failed, until Reconnect or MarkDead
	vacant   bool      // any incarnation may link
	leaving  *leaving
	was      error     // err before Reconnect, until there is a link
	bye      bool      // it closed its channels first
	dial     *dial     // under way; nil: none, or what it finds does not count any more
	since    time.Time // when the link was first wanted
	admitted admission
	beaten   time.Time // time of the last heartbeat
}

// sender is the state of what is sent to a peer. It ends with the link.
type sender struct {
	numbers  uint32     // channel numbers given out on the link
	free     []uint32   // those of them that are free again
	sendErr  error      // sending failed; frames that have arrived are read before the link goes down
	refused  bool       // the link had no room for the latest frame
	unsent   bool       // the link has unsent data
	gatherer Gatherer   // the link, if it is one
	preparer Preparer   // the link, if it is one
	bypasser Bypasser   // the link, if it is one
	out      Header     // the frame that is being sent; here to avoid an allocation for each frame
	ctl      []ctl      // control frames that the link had no room for
	queued   []*stream  // streams with messages of the tagged lane to begin
	bulk     []*SendReq // messages that the peer has asked for
}

// receiver is the state of what arrives from a peer.
type receiver struct {
	in     []inbound // by channel number
	lent   *Recv     // it holds the current frame's payload in the link's memory, which blocks the link
	cur    Header    // of the current frame
	st     *stream   // of the current or last frame; nil: of a channel that was closed
	target target    // the destination of the current frame; nil: it is dropped
	dst    []byte    // where the rest of the current frame goes
	left   int       // bytes of it still to come, >= len(dst); what exceeds dst is dropped
}

// A target is the destination of a frame with a payload: a *Recv of the ordered lane, a *RecvReq of
// the tagged one, or an *early, which is kept until a receive matches it.
type target interface {
	// placed is called when the payload of frame h of st is complete.
	placed(p *Proxy, st *stream, h *Header)
}

// leaving is a peer that was marked dead while its last frames may still arrive.
type leaving struct {
	why  error
	over chan struct{} // closed when the link has gone down
}

type ctl struct {
	h       Header
	payload []byte
}

// patience bounds the dialling of a peer that may not know this rank yet.
const patience = 30 * time.Second

// New makes a proxy. It is idle until Listen.
func New(cfg Config) *Proxy {
	if cfg.Window == 0 {
		cfg.Window = DefaultWindow(cfg.Size)
	}
	if cfg.ConnectTimeout == 0 {
		cfg.ConnectTimeout = patience
	}
	if cfg.Turn == 0 {
		cfg.Turn = 512 << 10
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
	p.oversubscribed.Store(cfg.Oversubscribed)
	return p
}

// Listen starts every transport and returns their endpoints, by name, for the directory. It may
// block until ctx ends. On error the proxy must be closed.
func (p *Proxy) Listen(ctx context.Context) (map[string][]byte, error) {
	p.endpoints = map[string][]byte{}
	for _, t := range p.cfg.Transports {
		ep, err := t.Listen(ctx, &host{p, t.Name()})
		if err != nil {
			return nil, err // names the transport
		}
		if len(ep) > MaxEndpoint {
			return nil, fmt.Errorf("%s: endpoint of %d bytes, at most %d are allowed", t.Name(), len(ep), MaxEndpoint)
		}
		p.endpoints[t.Name()] = ep
	}
	if p.cfg.Progress {
		p.wg.Go(p.attend)
	}
	return p.endpoints, nil
}

// attend makes progress on all links until Close.
func (p *Proxy) attend() {
	var w Wait
	w.Reset(p.ctx, 0, true)
	w.idle = true
	p.Lock()
	defer p.Unlock()
	for p.progress(&w, nil) == nil {
	}
}

// SetOversubscribed updates Config.Oversubscribed when the number of ranks on the machine is known.
// With the lock.
func (p *Proxy) SetOversubscribed(yes bool) {
	p.oversubscribed.Store(yes)
	for _, pr := range p.links {
		p.tune(pr.link)
	}
}

// tune tells a link if this rank has its own core. With the lock.
func (p *Proxy) tune(l Link) {
	if s, ok := l.(SeldomSleeper); ok && !p.oversubscribed.Load() {
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

// Lock locks the proxy for a sequence of calls that need the lock.
func (p *Proxy) Lock() {
	if !p.mu.TryLock() {
		p.wanted.Add(1)
		p.mu.Lock()
		p.wanted.Add(-1)
	}
}

// yield offers the lock to goroutines in Lock, and reports whether there was one.
func (p *Proxy) yield() bool {
	if p.wanted.Load() == 0 && p.behind.Load() == 0 {
		return false
	}
	p.mu.Unlock()
	runtime.Gosched()
	p.regain()
	return true
}

// regain takes the lock again after a wait released it. Waiters that spin do not release the lock
// early for it, as they do for Lock: they wait too, and deliver frames for both.
func (p *Proxy) regain() {
	if !p.mu.TryLock() {
		p.behind.Add(1)
		p.mu.Lock()
		p.behind.Add(-1)
	}
}

// Leave releases the lock for a goroutine that moves much memory without it; Return takes it again.
// Meanwhile idle waiters sleep at once instead of yielding first: the kernel prefers a thread that
// wakes to one that computes, but not one that yields.
func (p *Proxy) Leave() {
	p.working.Add(1)
	p.mu.Unlock()
}

// Return undoes Leave.
func (p *Proxy) Return() {
	p.Lock()
	p.working.Add(-1)
}

// Unlock undoes Lock.
func (p *Proxy) Unlock() { p.mu.Unlock() }

// Close closes links, transports and control regions, and ends every goroutine before it returns.
// Pending waits fail with ErrClosed. Peers that read slowly still get what was sent: Close waits
// for them for 3 seconds at most, but not if all that was sent is of channels that were aborted. It
// closes no channel: to a peer that uses one that Channel.Close has not ended, this rank is gone.
func (p *Proxy) Close() error {
	p.Lock()
	p.sendRest()
	if p.closed {
		p.Unlock()
		p.wg.Wait()
		return nil
	}
	p.closed = true
	p.cancel()
	for i := range p.peers {
		p.peers[i].endDial()
	}
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
	for _, t := range p.cfg.Transports { // no new links afterwards
		if err := t.Close(); err != nil && first == nil {
			first = err
		}
	}
	var closing errgroup.Group // each may linger
	for _, l := range links {
		closing.Go(l.Close)
	}
	if err := closing.Wait(); err != nil && first == nil {
		first = err
	}
	finish(paths)
	p.wg.Wait()
	p.Lock()
	p.pool.free()
	for _, b := range p.boards {
		p.regions.remove(b.region.ID)
		if err := errors.Join(p.deregister(b.region), b.region.Free()); err != nil && first == nil {
			first = err
		}
	}
	p.boards = nil
	p.Unlock()
	return first
}

// Bounds of sendRest: for what peers may need, and for the rest.
const (
	restFor   = 3 * time.Second
	notifyFor = 200 * time.Millisecond
)

// sendRest gives the links time to deliver what they have taken, e.g. the end of a broadcast to a
// rank that reads slowly. It does not wait long for control frames that the links have not taken,
// which say that this rank ends, nor if channels were aborted and no other one has sent anything.
// With the lock, which it releases meanwhile.
func (p *Proxy) sendRest() {
	limit := notifyFor
	owes := p.owes
	for _, c := range p.chans {
		owes = owes || c.owes()
	}
	if owes {
		limit = restFor
	}
	began := time.Now()
	for pause := 20 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		late, waited := p.delivering(), time.Since(began)
		switch {
		case len(late) == 0 && (waited >= notifyFor || !p.pending()):
			return
		case waited >= limit:
			p.log.Warn("a rank ends before its peers have read all that it has sent to them", "peers", late,
				"waited", waited)
			return
		}
		p.pollAll()
		p.Unlock()
		time.Sleep(pause)
		p.Lock()
	}
}

// delivering returns the ranks to which links still deliver what they have taken.
func (p *Proxy) delivering() (ranks []int) {
	for _, pr := range p.links {
		if d, ok := pr.link.(Deliverer); pr.unsent || ok && d.Delivers() {
			ranks = append(ranks, pr.rank)
		}
	}
	return ranks
}

// pending reports whether a link or the proxy still has frames to send.
func (p *Proxy) pending() bool {
	for _, pr := range p.links {
		if pr.unsent || len(pr.ctl) > 0 && pr.sendErr == nil {
			return true
		}
	}
	return false
}

// attach attaches a new link, unless the peer already has one. by is the dial that made it, nil if
// the peer dialled: then its admission must still count.
func (p *Proxy) attach(pr *peer, id Identity, l Link, transport string, by *dial) {
	p.Lock()
	if p.closed || pr.link != nil || pr.err != nil && !pr.vacant || by != nil && pr.dial != by ||
		by == nil && pr.admitted.of != id.Incarnation {
		p.Unlock()
		l.Close()
		return
	}
	pr.endDial()
	if n := l.MaxFrame(); n < MinFrame {
		pr.err = fmt.Errorf("%w: a link of transport %s takes frames of at most %d bytes, %d are needed",
			ErrProtocol, transport, n, MinFrame)
		pr.admitted = admission{}
		if p.cfg.Notify != nil {
			p.cfg.Notify(id, pr.err)
		}
		p.Unlock()
		l.Close()
		p.wakeAll()
		return
	}
	pr.id, pr.link, pr.err, pr.was, pr.vacant, pr.bye, pr.admitted = id, l, nil, nil, false, false, admission{}
	same := pr.latest == id.Incarnation
	pr.latest = id.Incarnation
	pr.linkNo++
	pr.made, pr.doubted = time.Now(), false
	pr.gatherer, _ = l.(Gatherer)
	pr.preparer, _ = l.(Preparer)
	pr.bypasser, _ = l.(Bypasser)
	pr.transfers.attach(pathsOf(l, transport))
	p.links = append(p.links, pr)
	p.tune(l)
	pr.counts.transport = transport
	p.log.Debug("link up", "peer", pr.rank, "incarnation", id.Incarnation, "transport", transport)
	for _, c := range p.chans {
		if c.ranks == nil && !same {
			c.quit(pr)
			continue
		}
		if st := c.streams[pr.rank]; st != nil && st.lost != nil && !st.replaced() {
			c.renew(st, same)
		}
		if st := c.streams[pr.rank]; st != nil {
			st.introduce()
			c.retell(st)
		}
		if c.told.Seq != 0 && c.has(pr.rank) {
			c.status(pr)
		}
		if c.aborted != nil && c.has(pr.rank) {
			c.control(pr, Header{Kind: frameAbort, Len: uint32(len(c.aborted))}, c.aborted)
		}
		// After the abort, which says more. While c is not open the peer knows it: it has used c.
		if st := c.streams[pr.rank]; st != nil && st.lost != nil && c.ranks != nil && same {
			c.control(pr, Header{Kind: frameLost}, nil)
		}
	}
	if p.cfg.Notify != nil {
		p.cfg.Notify(id, nil)
	}
	p.Unlock()
	p.wakeAll()
}

// down detaches a failed link: evidence that the peer is gone.
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
	switch to := pr.target.(type) {
	case *early:
		p.pool.put(to.buf)
		if pr.st != nil && to.h.Kind == frameEager {
			pr.st.came--
		}
	case *RecvReq: // a message that has begun to arrive: only the receiver knows it
		to.st.c.failRecv(to, &PeerError{pr.rank, err})
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
	if left != nil { // it was told when the peer was marked dead
		pr.leaving = nil
		close(left.over)
		pr.markDead(left.why)
		return
	}
	if p.cfg.Notify != nil {
		p.cfg.Notify(pr.id, err)
	}
}

// unlend copies the payload that a Recv has on loan, and ends the loan.
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

// MarkDead says that this incarnation of rank is no longer a member or, with 0, that there is none.
// Its link goes down with the error why, which waits for it return, and another incarnation may
// link; a link of another incarnation, or a dial to it, stays. Frames that the rank had sent are
// received first, but they change no memory any more: a Distant link stays until the rank has ended
// it, Config.Linger has passed, or another incarnation links. Takes the lock itself.
func (p *Proxy) MarkDead(rank int, incarnation uint64, why error) {
	p.Lock()
	defer p.Unlock()
	pr := &p.peers[rank]
	if p.closed || rank == p.cfg.Self.Rank || pr.leaving != nil || pr.another(incarnation) {
		return
	}
	pr.revoke()
	_, distant := pr.link.(Distant)
	stays := distant && p.cfg.Linger > 0
	p.readRest(pr, !stays)
	if !stays || pr.link == nil {
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

// Revoke ends the puts and signals of this incarnation of rank to this one's memory, as far as its
// link can do that (Revoker). MarkDead, which does the same, may come later. With the lock.
func (p *Proxy) Revoke(rank int, incarnation uint64) {
	if pr := &p.peers[rank]; pr.id.Incarnation == incarnation {
		pr.revoke()
	}
}

func (pr *peer) revoke() {
	if l, ok := pr.link.(Revoker); ok {
		l.Revoke()
	}
}

// another reports whether another incarnation than this one is linked, or expected and perhaps
// being dialled. With 0 it is false.
func (pr *peer) another(incarnation uint64) bool {
	return incarnation != 0 && pr.err == nil && pr.id.Incarnation != 0 && pr.id.Incarnation != incarnation
}

// MarkDeadUnlinked is MarkDead if there is no link to rank and none is being accepted. It is for a
// rank that is no member as far as this one knows: it may be about to become one. Takes the lock
// itself.
func (p *Proxy) MarkDeadUnlinked(rank int, incarnation uint64, why error) {
	p.Lock()
	defer p.Unlock()
	pr := &p.peers[rank]
	if !p.closed && rank != p.cfg.Self.Rank && pr.link == nil && !pr.expected() && !pr.another(incarnation) {
		p.remove(pr, why)
	}
}

// readRest reads from a peer that continues to send for this long. If this process is slow, it
// reads at least as many frames, or bytes, as the ring of a link within a host holds.
const (
	readFor    = 50 * time.Millisecond
	readFrames = 1 << 13
	readBytes  = 1 << 20
)

// readRest handles what the peer has sent before its link ends. ends: the link ends right after
// that.
func (p *Proxy) readRest(pr *peer, ends bool) {
	p.unlend(pr)
	until, frames, bytes := time.Now().Add(readFor), readFrames, p.moved+readBytes
	for p.poll(pr) && (time.Now().Before(until) || ends && frames > 0 && p.moved < bytes) {
		frames-- // a live peer may continue to send
	}
}

// remove ends the remaining state of a peer's incarnation.
func (p *Proxy) remove(pr *peer, why error) {
	p.down(pr, why)
	for _, c := range p.chans {
		if st := c.streams[pr.rank]; st != nil {
			st.notices.heard = [NoticeKeys][]byte{} // of the old incarnation
		}
	}
	pr.endDial()
	pr.markDead(why)
	p.wakeAll()
}

// markDead lets any incarnation link.
func (pr *peer) markDead(why error) {
	pr.err, pr.was, pr.vacant, pr.id, pr.since, pr.admitted = why, nil, true, Identity{}, time.Time{}, admission{}
}

// succeed ends the link of a peer that was marked dead when another incarnation links.
func (p *Proxy) succeed(pr *peer, incarnation uint64) {
	if pr.leaving != nil && pr.id.Incarnation != incarnation {
		p.remove(pr, pr.leaving.why)
	}
}

// Reconnect forgets why the link to rank failed, and makes a link unless there is one. If the link
// has failed for the rank as well, it is asked until its Reconnect, for ConnectTimeout at most. If
// the rank has not noticed that, its end goes down, and it takes the new link, when the old one is
// older than HandshakeTimeout. Reconnect does not block; Config.Notify reports the outcome. Takes
// the lock itself.
func (p *Proxy) Reconnect(rank int) {
	p.Lock()
	defer p.Unlock()
	pr := &p.peers[rank]
	if pr.link != nil || pr.dial != nil {
		return
	}
	pr.forgive()
	p.connect(pr)
}

// forgive forgets why the peer has no link, so that it may get one.
func (pr *peer) forgive() {
	pr.was = pr.err
	pr.err, pr.vacant, pr.since = nil, false, time.Now().Add(-dialTieBreak)
}

// Expect sets the incarnation of rank that may link, until MarkDead. It does nothing while there is
// a link, unless that is of another incarnation that was marked dead: it ends. Takes the lock
// itself.
func (p *Proxy) Expect(rank int, incarnation uint64) {
	p.Lock()
	defer p.Unlock()
	pr := &p.peers[rank]
	p.succeed(pr, incarnation)
	if pr.link == nil && rank != p.cfg.Self.Rank {
		pr.id = Identity{Rank: rank, Incarnation: incarnation}
		if pr.admitted.of != incarnation {
			pr.admitted = admission{}
		}
		if pr.vacant {
			pr.err, pr.was, pr.vacant = nil, nil, false
		}
	}
}

// Down returns why rank cannot be reached, nil if it can or has not failed yet. With the lock.
func (p *Proxy) Down(rank int) error {
	if pr := &p.peers[rank]; pr.err == nil {
		return pr.was
	}
	return p.peers[rank].err
}

// Progress polls once, or yields and sleeps as long waits do. It returns nil when the caller should
// check its condition again, else why w has ended. With the lock, which it may release meanwhile.
func (p *Proxy) Progress(w *Wait) error { return p.progress(w, nil) }

// Wake wakes all waiters, so that they check their conditions again. From any goroutine.
func (p *Proxy) Wake() {
	p.calls.Add(1) // for a waiter that is about to sleep
	p.wakeAll()
}

// Linked returns the incarnation that rank is linked with, 0 if it has no link. Takes the lock
// itself.
func (p *Proxy) Linked(rank int) uint64 {
	p.Lock()
	defer p.Unlock()
	if pr := &p.peers[rank]; pr.link != nil {
		return pr.id.Incarnation
	}
	return 0
}

// idleFor bounds a call of Idle: peers may send without an end.
const idleFor = time.Millisecond

// Idle handles the frames that have arrived, unless another goroutine holds the lock, or wants it:
// for a rank that computes and would otherwise not notice failures of its peers.
func (p *Proxy) Idle() {
	if p.mu.TryLock() {
		if !p.closed && p.asleep.Load() == 0 {
			for began := time.Now(); p.pollAll() && p.wanted.Load() == 0 && time.Since(began) < idleFor; {
			}
		}
		p.mu.Unlock()
	}
}

// drain sends queued frames, for example that an operation failed, although no operation may wait
// any more. With the lock.
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

// control sends a control frame of an open channel, or queues it until the link has room. Like
// every frame, it carries the channel's credit.
func (c *Channel) control(pr *peer, h Header, payload []byte) {
	if pr.link == nil || pr.sendErr != nil || c.retired {
		return
	}
	st := c.streamOf(pr)
	if st.replaced() {
		return
	}
	h.Chan, h.Ack, st.told = c.p.number(st), st.taken, st.taken
	c.p.queue(pr, h, payload)
}

// queue sends a frame behind all queued ones.
func (p *Proxy) queue(pr *peer, h Header, payload []byte) {
	if len(pr.ctl) == 0 && p.transmit(pr, &h, payload, false) {
		return
	}
	if pr.sendErr == nil {
		pr.ctl = append(pr.ctl, ctl{h, payload})
	}
}

// transmit offers one frame to the peer's link, with past to Bypasser.SendPast, and reports whether
// the link took it. If the link fails, nothing more is sent, and it goes down when what has arrived
// was read.
func (p *Proxy) transmit(pr *peer, h *Header, payload []byte, past bool) (ok bool) {
	pr.out = *h
	var err error
	if past && pr.bypasser != nil {
		if ok, err = pr.bypasser.SendPast(&pr.out, payload); ok {
			pr.counts.bytesPast += uint64(len(payload))
		}
	} else {
		ok, err = pr.link.Send(&pr.out, payload)
	}
	if err == nil && ok {
		pr.counts.sent(len(payload))
		var flushed bool
		if flushed, err = pr.link.Flush(); err == nil {
			pr.unsent = !flushed
		}
	}
	if err != nil {
		pr.sendErr = err // if only flushing failed, the peer may have read the frame, and ended
		return ok
	}
	// A waiter may sleep until there is room, but the link has dropped its request because there
	// was room.
	if pr.refused && ok && p.asleep.Load() > 0 {
		p.wakeAll()
	}
	pr.refused = !ok
	return ok
}
