package verbs

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"tutti/mem"
	"tutti/p2p"
	"tutti/rdma"
)

const (
	sendDepth = 256  // requests of a send queue
	timeout   = 16   // of a packet, unless it is set: 268 ms; the TCP connection notices dead peers sooner
	retries   = 6    // of a packet: Soft-RoCE takes 7 for ever
	perFrame  = 2    // requests of a frame at most
	chained   = 32   // that are posted with one call
	inline    = unit // bytes of a frame of one unit
	spare     = 16   // receives for positions, of which there is one for each quarter of the ring
	idlePolls = 256  // polls of an idle ring for one of the completion queue
)

// lateTime is how long requests of a lane are under way without a completion, at least, until it
// fails: some devices never repeat a lost packet.
const lateTime = 3 * time.Second

// Immediate values: 0 for a frame, or the consumer's position in units, modulo 1<<31, and a bit.
const (
	immFrame    = 0
	immPosition = 1
)

// frameReceive identifies the receives of the frames' queue pair.
const frameReceive = 1

// positionImm returns the immediate value that tells position pos.
func positionImm(pos uint64) uint32 { return uint32(pos/unit)<<1 | immPosition }

// batch is how many receives are posted again with one call, at least. The rest of spare is enough
// for the positions under way.
const batch = spare / 2

// receives returns the number of receives for a ring of n bytes.
func receives(n int) int { return n/unit + spare }

// noEnd is the end of a ring that is not known.
const noEnd = ^uint64(0)

// position is a place in a ring, where frame or skip mark seq begins.
type position struct{ pos, seq uint64 }

// lane is a connection of queue pairs for frames, its rings, and rails for data. The consumer is
// used under the rules of p2p.Link, everything else with the link's lock.
type lane struct {
	t       *Transport // whose regions it moves
	gen     uint64
	peer    p2p.Identity
	ups     uint64    // Transport.ups before its ports were chosen
	seen    uint64    // Transport.ups before moved looked
	port    port      // of the frames' queue pair
	devices []*device // of all queue pairs, retained; since open
	setup   setup     // what the peer is told
	theirs  setup
	told    bool  // the peer knows of it
	err     error // why it has failed, nil while it works

	in     consumer
	out    producer
	end    uint64   // where the peer's frames end, noEnd while that is not known
	down   position // up to which the peer has taken frames when it gave up the lane
	probed int      // requests that must have finished to show that data passes
	bulk   bulk

	cq     rdma.CQ
	qp     rdma.QP
	mine   []byte    // the ring that the peer writes
	staged []byte    // the copy of the peer's ring
	mrs    []rdma.MR // of mine and staged
	inline int

	posted   int           // requests, since the beginning, with those of the chain
	ready    int           // of these, in the chain
	finished int           // of these, as far as is known
	fresh    int           // since the last one with a completion
	bytes    uint64        // composed since then
	marks    []mark        // requests with completions, oldest first
	since    time.Time     // what is under way has moved, or was posted when nothing was; see check
	late     time.Duration // see lateTime
	alarm    *time.Timer   // wakes an end that sleeps, so that it sees what is late
	wake     func()
	frames   atomic.Uint64 // that have completed receives
	drained  bool          // by drain
	flushed  bool          // no frame completes a receive any more, or none is waited for
	owed     int           // receives that have completed and are to be posted again
	woken    chan struct{}

	chain    [chained]rdma.SendRequest
	segments [chained][1]rdma.Segment
	polled   [rdma.PollBatch]rdma.Completion
	blank    [rdma.PollBatch]rdma.RecvRequest

	// Keys of this end's memory: see exposure.
	granted  map[uint64]*exposure // that the peer has, by generation
	revoking map[uint64][]held    // that it has yet to give up
	claims   int                  // of the peer, that were not answered yet
	closed   bool                 // its queue pairs are
	fenced   bool                 // the peer's are
	ghosts   bool                 // a put was cancelled, of which the network may have a part
}

// mark is what has ended when a request has completed.
type mark struct {
	posted int
	tail   uint64
}

// open makes the objects of a lane with rings of n bytes, with its queue pair for frames on a port
// and rails on others. The queue pairs are in the state Init and have their receives. The caller
// closes the lane, also after an error.
func (l *lane) open(frames port, rails []port, n int, psn uint32, wake func()) error {
	l.port, l.woken = frames, make(chan struct{}, 1)
	for _, p := range append([]port{frames}, rails...) {
		if p.device != nil && !slices.Contains(l.devices, p.device) {
			p.retain()
			l.devices = append(l.devices, p.device)
		}
	}
	l.granted, l.revoking = map[uint64]*exposure{}, map[uint64][]held{}
	l.marks, l.mine, l.staged = make([]mark, 0, sendDepth), make([]byte, n), make([]byte, n)
	l.in, l.out = consumer{data: l.mine, seq: 1}, producer{data: l.staged}
	for i := range l.blank {
		l.blank[i].ID = frameReceive
	}
	for _, m := range []struct {
		b      []byte
		access rdma.Access
	}{{l.mine, rdma.LocalWrite | rdma.RemoteWrite}, {l.staged, 0}} {
		r, err := l.t.registerKey(frames.device, mem.Host(m.b, mem.Anywhere), m.access)
		if err != nil {
			return err
		}
		l.mrs = append(l.mrs, r)
	}
	rung := func() {
		l.ring()
		wake()
	}
	l.late, l.wake = max(lateTime, l.t.lingerTime()*3/2), rung
	var err error
	if l.cq, err = frames.NewCQ(sendDepth+receives(n)+len(rails), rung); err != nil {
		return err
	}
	cfg := rdma.QPConfig{Send: l.cq, Recv: l.cq, SendDepth: sendDepth, RecvDepth: receives(n), Inline: inline,
		PKey: frames.settings.PKey}
	if l.qp, err = frames.NewQP(cfg); err != nil { // devices without so many say it with any errno
		cfg.Inline = 0
		l.qp, err = frames.NewQP(cfg)
	}
	if err != nil {
		return err
	}
	l.inline = l.qp.Limits().Inline
	if err := l.qp.Init(frames.at.Port, rdma.RemoteWrite|rdma.LocalWrite); err != nil {
		return err
	}
	l.setup = setup{ring: n, key: l.mrs[0].RemoteKey(), address: addressOf(l.mine), frames: frames.path}
	l.setup.frames.qp, l.setup.frames.psn, l.setup.frames.reads = l.qp.Number(), psn, 1
	if l.setup.rails, err = l.bulk.open(l, rails, psn, rung); err != nil {
		return err
	}
	return l.postReceives(receives(n))
}

// ring ends a wait for the lane, or the next one.
func (l *lane) ring() {
	select {
	case l.woken <- struct{}{}:
	default:
	}
}

func addressOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

// connect connects the queue pairs with the peer's.
func (l *lane) connect(theirs setup) error {
	switch {
	case theirs.ring != l.setup.ring:
		return fmt.Errorf("%w: a ring of %d bytes, want %d", p2p.ErrProtocol, theirs.ring, l.setup.ring)
	case len(theirs.rails) != len(l.setup.rails):
		return fmt.Errorf("%w: %d queue pairs for data, want %d", p2p.ErrProtocol, len(theirs.rails),
			len(l.setup.rails))
	}
	l.theirs = theirs
	if err := l.port.connect(l.qp, &l.setup.frames, &theirs.frames); err != nil {
		return err
	}
	return l.bulk.connect()
}

// connect connects a queue pair of the port with the peer's.
func (p *port) connect(qp rdma.QP, mine, theirs *path) error {
	if theirs.link != mine.link {
		return fmt.Errorf("the peer's port is %v, and %s is %v: they cannot be connected", theirs.link, p.at, mine.link)
	}
	r := &rdma.Route{Port: p.at.Port, GIDIndex: p.gid, MTU: min(mine.mtu, theirs.mtu), PSN: mine.psn,
		Remote: theirs.qp, RemotePSN: theirs.psn, Reads: min(mine.reads, theirs.reads), Retries: retries,
		RNRRetries: 7}
	p.settings.Apply(r)
	if err := r.Lead(mine.link, mine.gid, theirs.gid, theirs.lid, mine.grh || theirs.grh); err != nil {
		return err
	}
	return qp.Connect(r)
}

// halt closes all queue pairs: see bulk.halt.
func (l *lane) halt() error {
	if l.alarm != nil {
		l.alarm.Stop()
	}
	return errors.Join(l.bulk.halt(), l.port.closeQP(&l.qp))
}

// close closes all objects. The memory stays, because a caller may be reading it. While a queue
// pair cannot be closed, everything else stays, too, and close may be called again.
func (l *lane) close() error {
	if err := l.halt(); err != nil {
		return err
	}
	err := l.bulk.close()
	if l.cq != nil {
		err = errors.Join(err, l.cq.Close())
	}
	for _, r := range l.mrs {
		err = errors.Join(err, l.port.deregister(r))
	}
	for _, d := range l.devices {
		err = errors.Join(err, d.release())
	}
	return err
}

// lost reports whether nothing passes a port that the lane uses.
func (l *lane) lost() bool {
	used := func(r *rail) bool { return r.state == working && r.lost() }
	return l.port.lost() || slices.ContainsFunc(l.bulk.rails, used)
}

// moved returns an error if a port that the lane uses has not its address any more, or has it at
// another index: the device would lose everything until it has given up all repetitions.
func (l *lane) moved() error {
	err := l.port.changed()
	for _, r := range l.bulk.rails {
		if err == nil && r.state == working {
			err = r.changed()
		}
	}
	return err
}

// fail says why the lane does not work any more. The first err stays.
func (l *lane) fail(err error) {
	if l.err == nil {
		l.err = err
	}
}

// fits reports whether there is room for a frame that needs n bytes, in the ring and the send
// queue. One request is left for a position.
func (l *lane) fits(n uint64) bool {
	if l.posted-l.finished+perFrame+1 > sendDepth {
		return false
	}
	return l.out.room() >= n
}

// freed takes the position that the peer has told.
func (l *lane) freed(imm uint32) {
	more := uint64((imm-positionImm(l.out.freed))>>1) * unit
	if imm&immPosition == 0 || more > l.out.tail-l.out.freed {
		l.fail(fmt.Errorf("%w: it has freed %d bytes more than the %d of %d that were sent (immediate value %#x)",
			p2p.ErrProtocol, more, l.out.freed, l.out.tail, imm))
		return
	}
	l.out.freed += more
}

// request adds a request to the chain: it writes n bytes of staged to the same place of the peer's
// ring.
func (l *lane) request(op rdma.Opcode, at, n uint64) *rdma.SendRequest {
	if l.ready == chained {
		l.post()
	}
	i := l.ready
	l.ready++
	l.posted++
	l.fresh++
	parts := l.segments[i][:0]
	if n > 0 {
		parts = append(parts, rdma.Segment{Address: addressOf(l.staged) + at, Key: l.mrs[1].LocalKey(), Len: uint32(n)})
	}
	l.chain[i] = rdma.SendRequest{Op: op, Segments: parts, RemoteAddress: l.theirs.address + at,
		RemoteKey: l.theirs.key, Inline: n <= uint64(l.inline)}
	return &l.chain[i]
}

// post posts the chain, the last request with a completion if the last such is a quarter of the
// queue or of the ring ago. It holds whole frames.
func (l *lane) post() {
	k := l.ready
	if l.ready = 0; k == 0 || l.err != nil {
		return
	}
	if l.fresh >= sendDepth/4 || l.bytes >= uint64(len(l.out.data)/4) {
		l.chain[k-1].Signaled = true
	}
	if l.chain[k-1].Signaled {
		l.fresh, l.bytes = 0, 0
		l.marks = append(l.marks, mark{l.posted, l.out.tail})
	}
	if _, err := l.qp.Post(l.chain[:k]); err != nil {
		l.fail(err)
	}
	if l.finished == l.posted-k || l.chain[k-1].Signaled && len(l.marks) == 1 {
		l.since = time.Now()
	}
}

// send writes a frame to the peer's ring, and those that were gathered before. False: there is no
// room for it, or the lane has failed.
func (l *lane) send(h *p2p.Header, payload []byte) bool {
	ok := l.gather(h, payload)
	l.post()
	return ok
}

// gather is send for a frame that may wait for the next post.
func (l *lane) gather(h *p2p.Header, payload []byte) bool {
	need := l.out.needs(uint64(len(payload)))
	if l.err != nil || !l.fits(need) {
		return false
	}
	if l.ready+perFrame > chained {
		l.post()
	}
	tail := l.out.tail
	var last *rdma.SendRequest
	for _, s := range l.out.compose(h, payload) {
		last = l.request(rdma.Write, s.at, s.n)
	}
	last.Op, last.Imm = rdma.WriteImm, immFrame
	l.bytes += l.out.tail - tail
	return true
}

// turn makes progress: it takes completions, posts receives again, and tells the peer what is free.
func (l *lane) turn() {
	l.post()
	if l.err == nil {
		l.reap()
	}
	if l.due() && l.posted-l.finished < sendDepth && l.err == nil {
		l.in.untold = 0
		l.position()
	}
}

// arrived reports whether there is a frame to take: the device has completed its receive.
func (l *lane) arrived() bool { return !l.in.held && l.frames.Load() > l.in.frames }

// drain has the device complete what it has received, and flush the other receives.
func (l *lane) drain() {
	if l.drained {
		return
	}
	l.drained, l.since = true, time.Now()
	if err := l.qp.Fail(); err != nil {
		l.fail(err)
		l.flushed = true
	}
}

// due reports whether the peer is to be told what is free.
func (l *lane) due() bool { return l.in.untold >= uint64(len(l.in.data)/4) }

// probe has each queue pair show that data passes. It returns what ask does.
func (l *lane) probe() int {
	l.bulk.probe()
	return l.ask()
}

// ask posts a request that completes when everything before it has arrived, and returns the number
// that finished will have reached then.
func (l *lane) ask() int {
	l.request(rdma.Write, 0, 0).Signaled = true
	l.post()
	return l.posted
}

// position tells the peer what is free of the ring here.
func (l *lane) position() {
	l.request(rdma.WriteImm, 0, 0).Imm = positionImm(l.in.pos)
	l.post()
}

// arm requests a call of wake for the next completion.
func (l *lane) arm() error {
	l.bulk.arm()
	return l.cq.Arm()
}

// watch has the end woken for check, and for that of the rails, while requests are under way.
func (l *lane) watch() {
	switch under := l.posted != l.finished || l.bulk.under() > 0; {
	case under && l.alarm == nil:
		l.alarm = time.AfterFunc(l.late/2, l.wake)
	case under:
		l.alarm.Reset(l.late / 2)
	case l.alarm != nil:
		l.alarm.Stop()
	}
}

// check fails the lane if its requests have not moved for late, at a time after which the
// completion queue was found empty. Only a request with a completion shows that: without one under
// way it asks for one, when nothing has moved for half of that time. After drain the receives are
// what has to move.
func (l *lane) check(now time.Time) {
	switch still := now.Sub(l.since); {
	case l.drained:
		l.flushed = l.flushed || still >= min(l.late, lateTime)
	case l.err != nil:
	case len(l.marks) > 0 && still >= l.late:
		l.fail(l.stuck(l.posted-l.finished, l.qp, l.port.at))
	case len(l.marks) == 0 && l.posted != l.finished && still >= l.late/2:
		l.ask()
	}
}

// stuck is the error of requests on a queue pair that do not move.
func (l *lane) stuck(requests int, qp rdma.QP, at rdma.DevicePort) error {
	return fmt.Errorf("%d requests on queue pair %d of %s have not moved for %v", requests, qp.Number(), at, l.late)
}

// reap takes completions, and posts receives again, batch of them or more with a call.
func (l *lane) reap() {
	for {
		now := time.Now() // before Poll: a process may be stopped for long between two calls
		n, err := l.cq.Poll(l.polled[:])
		if err != nil {
			l.fail(err)
			l.flushed = true
			return
		}
		for i := range l.polled[:n] {
			switch c := &l.polled[i]; {
			case c.Status != rdma.Success && c.ID > frameReceive: // the receive of a rail
				l.bulk.fails(c)
			case c.Status != rdma.Success:
				l.flushed = l.flushed || c.ID == frameReceive
				l.fail(&rdma.StatusError{Status: c.Status, Op: rdma.Write, Device: l.port.Name(), QP: c.QP,
					Vendor: c.Vendor})
			case c.Op == rdma.Write && len(l.marks) > 0:
				l.finished, l.out.done = l.marks[0].posted, l.marks[0].tail
				l.marks = l.marks[:copy(l.marks, l.marks[1:])]
				l.since = time.Now()
			case c.Op == rdma.RecvWriteImm:
				if l.owed++; c.Imm == immFrame {
					l.frames.Add(1)
				} else {
					l.freed(c.Imm)
				}
			default:
				l.fail(fmt.Errorf("%w: a completion of %v", p2p.ErrProtocol, c.Op))
			}
		}
		if l.owed >= batch {
			if err := l.postReceives(l.owed); err != nil {
				l.fail(err)
			}
			l.owed = 0
		}
		if n < len(l.polled) {
			l.check(now)
			return
		}
	}
}

// postReceives posts n receives without memory.
func (l *lane) postReceives(n int) error {
	for n > 0 {
		k, err := l.qp.PostRecv(l.blank[:min(n, len(l.blank))])
		if err != nil {
			return err
		}
		n -= k
	}
	return nil
}
