package soft

import (
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"

	"tutti/rdma"
)

// cq is a completion queue. Its fields are under the fabric's lock.
type cq struct {
	d      *device
	depth  int
	wake   func()
	ready  []entry // visible
	coming int     // not yet visible
	qps    int     // uses by queue pairs
	armed  bool
	full   bool // overflowed
	closed bool
}

// entry is a completion, and the queue that gets its place back when it is polled.
type entry struct {
	c     rdma.Completion
	queue *window
	seq   uint64
}

// window counts the requests of a queue.
type window struct{ posted, retired uint64 }

func (w *window) room(depth int) bool { return w.posted-w.retired < uint64(depth) }

// NewCQ implements rdma.Device.
func (d *device) NewCQ(depth int, wake func()) (rdma.CQ, error) {
	d.f.mu.Lock()
	defer d.f.mu.Unlock()
	if err := d.may("make a completion queue"); err != nil {
		return nil, err
	}
	if depth < 1 || depth > d.f.cfg.Attributes.MaxCQDepth {
		return nil, d.wrong(fmt.Sprintf("make a completion queue for %d", depth), syscall.EINVAL)
	}
	c := &cq{d: d, depth: depth, wake: wake}
	d.cqs = append(d.cqs, c)
	return c, nil
}

// Depth implements rdma.CQ.
func (c *cq) Depth() int { return c.depth }

// may returns why the queue cannot be used, or nil.
func (c *cq) may(call string) error {
	switch {
	case c.closed:
		return fmt.Errorf("%s on %s: %w", call, c.d.hw.name, rdma.ErrClosed)
	case c.full:
		return c.d.wrong(call+" that has overflowed", syscall.EIO)
	case c.d.removed: // what has completed is still there
		if len(c.ready) == 0 && c.coming == 0 {
			return fmt.Errorf("%s on %s: %w", call, c.d.hw.name, rdma.ErrRemoved)
		}
	}
	return nil
}

// Poll implements rdma.CQ.
func (c *cq) Poll(out []rdma.Completion) (int, error) {
	f := c.d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := c.may("poll a completion queue"); err != nil {
		return 0, err
	}
	n := min(len(out), len(c.ready), rdma.PollBatch)
	for i, e := range c.ready[:n] {
		out[i] = e.c
		e.queue.retired = max(e.queue.retired, e.seq+1)
	}
	c.ready = slices.Delete(c.ready, 0, n)
	return n, nil
}

// Arm implements rdma.CQ.
func (c *cq) Arm() error {
	c.d.f.mu.Lock()
	defer c.d.f.mu.Unlock()
	if err := c.may("arm a completion queue"); err != nil {
		return err
	}
	c.armed = true
	return nil
}

// Close implements rdma.CQ.
func (c *cq) Close() error {
	c.d.f.mu.Lock()
	defer c.d.f.mu.Unlock()
	switch {
	case c.closed:
		return fmt.Errorf("close a completion queue of %s: %w", c.d.hw.name, rdma.ErrClosed)
	case c.qps > 0:
		return c.d.wrong("close a completion queue in use", syscall.EBUSY)
	}
	c.closed = true
	c.d.cqs = slices.DeleteFunc(c.d.cqs, func(o *cq) bool { return o == c })
	c.d.f.quiet(c)
	return nil
}

// put has a completion become visible by a later step.
func (l *lane) put(c rdma.Completion, seq uint64) {
	f := l.q.dev.f
	l.done = append(l.done, done{c, seq})
	f.list(l)
	if l.cq.coming++; l.cq.coming+len(l.cq.ready) > l.cq.depth && !l.cq.full {
		l.cq.full = true
		f.happen(l.q.dev.hw, rdma.Event{Kind: rdma.CQFailed})
		for _, q := range l.q.dev.hw.sorted() {
			if q.cfg.Send == l.cq || q.cfg.Recv == l.cq {
				q.broken()
			}
		}
	}
}

// deliver makes the oldest completion visible.
func (l *lane) deliver() {
	if len(l.done) == 0 {
		return
	}
	d, c := l.done[0], l.cq
	l.done = l.done[1:]
	c.coming--
	if c.full {
		return
	}
	w := l.q.recvs
	if l == &l.q.sendDone {
		w = l.q.sends
	}
	c.ready = append(c.ready, entry{d.c, w, d.seq})
	c.ring()
}

// ring has wake be called if Arm has asked for it.
func (c *cq) ring() {
	if c.armed && c.wake != nil {
		c.armed = false
		c.d.f.calls = append(c.d.f.calls, call{c, c.wake})
	}
}

// clear drops what is on its way.
func (l *lane) clear() {
	l.cq.coming -= len(l.done)
	l.done = nil
}

// qp is a queue pair. Its fields are under the fabric's lock.
type qp struct {
	dev      *device
	number   uint32
	cfg      rdma.QPConfig
	limits   rdma.QPLimits
	state    rdma.State
	port     int
	access   rdma.Access
	route    rdma.Route
	gid      rdma.GID // of this end, since Connect
	queue    []*request
	receives []receive
	sends    *window
	recvs    *window
	sending  lane
	sendDone lane
	recvDone lane
	lost     int // repetitions of the first request without an answer
	unready  int // and without a receive at the peer
	closed   bool
}

// request is a posted send request.
type request struct {
	rdma.SendRequest
	seq    uint64
	data   []byte // of an inline request
	begun  bool
	placed bool // before requests in front of it
	moved  int
}

type receive struct {
	rdma.RecvRequest
	seq uint64
}

// NewQP implements rdma.Device.
func (d *device) NewQP(cfg rdma.QPConfig) (rdma.QP, error) {
	f := d.f
	f.mu.Lock()
	defer f.mu.Unlock()
	const call = "make a queue pair"
	if err := d.may(call); err != nil {
		return nil, err
	}
	a := &f.cfg.Attributes
	send, okS := cfg.Send.(*cq)
	recv, okR := cfg.Recv.(*cq)
	cfg.Segments = max(cfg.Segments, 1)
	switch {
	case !okS || !okR || send.d != d || recv.d != d || send.closed || recv.closed:
		return nil, d.wrong(call+" with completion queues of another device, or closed ones", syscall.EINVAL)
	case cfg.PKey < 0 || cfg.PKey > 1<<16-1:
		return nil, d.wrong(fmt.Sprintf("%s with partition key %d", call, cfg.PKey), syscall.EINVAL)
	case cfg.SendDepth < 1 || cfg.SendDepth > a.MaxQPDepth || cfg.RecvDepth < 0 || cfg.RecvDepth > a.MaxQPDepth ||
		cfg.Segments > a.MaxSegments || cfg.Inline > f.cfg.Inline || cfg.Inline < 0:
		return nil, d.wrong(fmt.Sprintf("%s with %d sends, %d receives, %d segments and %d bytes inline", call,
			cfg.SendDepth, cfg.RecvDepth, cfg.Segments, cfg.Inline), syscall.EINVAL)
	case len(d.hw.qps) >= a.MaxQPs:
		return nil, d.wrong(call, syscall.ENOMEM)
	}
	q := &qp{dev: d, cfg: cfg, sends: &window{}, recvs: &window{}, limits: rdma.QPLimits{SendDepth: cfg.SendDepth,
		RecvDepth: cfg.RecvDepth, SendSegments: cfg.Segments, RecvSegments: cfg.Segments, Inline: cfg.Inline}}
	q.sending = lane{q: q, send: true}
	q.sendDone, q.recvDone = lane{q: q, cq: send}, lane{q: q, cq: recv}
	if n := len(d.hw.free); f.cfg.ReuseNumbers && n > 0 {
		q.number, d.hw.free = d.hw.free[n-1], d.hw.free[:n-1]
	} else {
		d.hw.number++
		q.number = d.hw.number
	}
	d.hw.qps[q.number] = q
	d.qps++
	send.qps++
	recv.qps++
	return q, nil
}

// Number implements rdma.QP.
func (q *qp) Number() uint32 { return q.number }

// Limits implements rdma.QP.
func (q *qp) Limits() rdma.QPLimits { return q.limits }

// State implements rdma.QP.
func (q *qp) State() (rdma.State, error) {
	q.dev.f.mu.Lock()
	defer q.dev.f.mu.Unlock()
	return q.state, q.may("query a queue pair")
}

func (q *qp) may(call string) error {
	if q.closed {
		return fmt.Errorf("%s of %s: %w", call, q.dev.hw.name, rdma.ErrClosed)
	}
	return q.dev.may(call)
}

// enter begins a change of the state, which must be one of from.
func (q *qp) enter(call string, from ...rdma.State) error {
	call = fmt.Sprintf("%s queue pair %d", call, q.number)
	if err := q.may(call); err != nil {
		return err
	}
	if len(from) > 0 && !slices.Contains(from, q.state) {
		return &rdma.Error{Call: call, Device: q.dev.hw.name, Errno: syscall.EINVAL,
			Advice: fmt.Sprintf("its state is %v", q.state)}
	}
	return nil
}

// Init implements rdma.QP.
func (q *qp) Init(port int, access rdma.Access) error {
	q.dev.f.mu.Lock()
	defer q.dev.f.mu.Unlock()
	if err := q.enter("initialize", rdma.StateReset); err != nil {
		return err
	}
	if port < 1 || port > len(q.dev.hw.ports) {
		return q.dev.wrong(fmt.Sprintf("initialize a queue pair on port %d", port), syscall.EINVAL)
	}
	q.state, q.port, q.access = rdma.StateInit, port, access
	return nil
}

// Connect implements rdma.QP.
func (q *qp) Connect(r *rdma.Route) error {
	q.dev.f.mu.Lock()
	defer q.dev.f.mu.Unlock()
	if err := q.enter("connect", rdma.StateInit); err != nil {
		return err
	}
	gid, ok := q.dev.hw.ports[q.port-1].gid(r.GIDIndex)
	if !ok || r.Port != q.port || r.MTU < 256 || r.MTU > 4096 || r.MTU&(r.MTU-1) != 0 || r.PSN >= 1<<24 ||
		r.RemotePSN >= 1<<24 || r.Reads > q.dev.f.cfg.Attributes.MaxReads || r.Retries > 7 ||
		r.RNRRetries > 7 || r.Timeout > 31 || r.ServiceLevel > 15 {
		return q.dev.wrong(fmt.Sprintf("connect queue pair %d by %+v", q.number, *r), syscall.EINVAL)
	}
	q.state, q.route, q.gid = rdma.StateReady, *r, gid
	return nil
}

// Fail implements rdma.QP.
func (q *qp) Fail() error {
	q.dev.f.mu.Lock()
	defer q.dev.f.mu.Unlock()
	if err := q.enter("fail"); err != nil {
		return err
	}
	q.fail()
	return nil
}

// fail moves the queue pair to Failed.
func (q *qp) fail() {
	if q.state == rdma.StateFailed {
		return
	}
	q.state = rdma.StateFailed
	for _, r := range q.receives {
		q.recvDone.put(rdma.Completion{ID: r.ID, QP: q.number, Status: rdma.Flushed}, r.seq)
	}
	q.receives = nil
	q.wakeSends()
}

// broken is fail with an event.
func (q *qp) broken() {
	if q.state != rdma.StateFailed {
		q.fail()
		q.dev.f.happen(q.dev.hw, rdma.Event{Kind: rdma.QPFailed, QP: q.number})
	}
}

func (q *qp) wakeSends() {
	q.sending.blocked = 0
	if len(q.queue) > 0 {
		q.dev.f.list(&q.sending)
	}
}

// Reset implements rdma.QP.
func (q *qp) Reset() error {
	q.dev.f.mu.Lock()
	defer q.dev.f.mu.Unlock()
	if err := q.enter("reset"); err != nil {
		return err
	}
	if q.dev.f.cfg.Attributes.Quirks.NoReset {
		return fmt.Errorf("reset queue pair %d of %s, a device on which it has to be replaced: %w", q.number,
			q.dev.hw.name,
			errors.ErrUnsupported)
	}
	q.drop()
	q.state = rdma.StateReset
	return nil
}

// drop forgets all requests.
func (q *qp) drop() {
	q.dev.hw.settle()
	q.queue, q.receives = nil, nil
	q.sends, q.recvs = &window{}, &window{} // completions that are visible already count no more
	q.lost, q.unready = 0, 0
	q.sendDone.clear()
	q.recvDone.clear()
}

// Close implements rdma.QP.
func (q *qp) Close() error {
	q.dev.f.mu.Lock()
	defer q.dev.f.mu.Unlock()
	if q.closed {
		return fmt.Errorf("destroy a queue pair of %s: %w", q.dev.hw.name, rdma.ErrClosed)
	}
	if ask := q.dev.f.cfg.Faults.Call; ask != nil && !q.dev.removed {
		call := fmt.Sprintf("destroy queue pair %d", q.number)
		if errno := ask(q.dev.hw.name, call); errno != 0 {
			return q.dev.wrong(call, errno)
		}
	}
	q.drop()
	q.closed = true
	q.state = rdma.StateReset
	delete(q.dev.hw.qps, q.number)
	q.dev.hw.free = append(q.dev.hw.free, q.number)
	q.dev.qps--
	q.sendDone.cq.qps--
	q.recvDone.cq.qps--
	return nil
}

// Post implements rdma.QP.
func (q *qp) Post(chain []rdma.SendRequest) (int, error) {
	f := q.dev.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := q.may("post requests to a queue pair"); err != nil {
		return 0, err
	}
	for i := range chain {
		if errno := q.post(&chain[i], i); errno != 0 {
			return i, &rdma.Error{Call: fmt.Sprintf("post request %d of %d to queue pair %d (%v)", i+1, len(chain),
				q.number,
				q.state), Device: q.dev.hw.name, Errno: errno}
		}
	}
	return len(chain), nil
}

// post posts one request.
func (q *qp) post(s *rdma.SendRequest, i int) syscall.Errno {
	f := q.dev.f
	total := uint64(0)
	for _, g := range s.Segments {
		total += uint64(g.Len)
	}
	switch {
	case q.state != rdma.StateReady && q.state != rdma.StateFailed:
		return syscall.EINVAL
	case s.Op < rdma.Write || s.Op > rdma.Read || len(s.Segments) > q.limits.SendSegments,
		s.Inline && (total > uint64(q.limits.Inline) || s.Op == rdma.Read):
		return syscall.EINVAL
	case !q.sends.room(q.limits.SendDepth):
		return syscall.ENOMEM
	}
	if ask := f.cfg.Faults.Post; ask != nil {
		if errno := ask(q.dev.hw.name, q.number, i); errno != 0 {
			return errno
		}
	}
	r := &request{SendRequest: *s, seq: q.sends.posted}
	r.Segments = slices.Clone(s.Segments)
	if s.Inline {
		for _, g := range s.Segments {
			r.data = append(r.data, bytesAt(g.Address, int(g.Len))...)
		}
	}
	q.sends.posted++
	q.queue = append(q.queue, r)
	f.list(&q.sending)
	return 0
}

// PostRecv implements rdma.QP.
func (q *qp) PostRecv(chain []rdma.RecvRequest) (int, error) {
	f := q.dev.f
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := q.may("post receives to a queue pair"); err != nil {
		return 0, err
	}
	for i := range chain {
		r := &chain[i]
		errno := syscall.Errno(0)
		switch {
		case q.state == rdma.StateReset || len(r.Segments) > q.limits.RecvSegments:
			errno = syscall.EINVAL
		case !q.recvs.room(q.limits.RecvDepth):
			errno = syscall.ENOMEM
		}
		if errno != 0 {
			return i, &rdma.Error{Call: fmt.Sprintf("post receive %d of %d to queue pair %d (%v)", i+1, len(chain),
				q.number,
				q.state), Device: q.dev.hw.name, Errno: errno}
		}
		seq := q.recvs.posted
		q.recvs.posted++
		if q.state == rdma.StateFailed {
			q.recvDone.put(rdma.Completion{ID: r.ID, QP: q.number, Status: rdma.Flushed}, seq)
			continue
		}
		q.receives = append(q.receives, receive{rdma.RecvRequest{ID: r.ID, Segments: slices.Clone(r.Segments)}, seq})
	}
	return len(chain), nil
}

// advance runs a step of the send queue, and reports whether there may be another one.
func (q *qp) advance() bool {
	if len(q.queue) == 0 {
		return false
	}
	switch q.state {
	case rdma.StateFailed:
		q.end(rdma.Flushed)
	case rdma.StateReady:
		if !q.overtake() {
			q.work(q.queue[0])
		}
	}
	return len(q.queue) > 0
}

// end completes the first request. A status other than Success fails the queue pair.
func (q *qp) end(s rdma.Status) {
	r := q.queue[0]
	q.queue = q.queue[1:]
	q.lost, q.unready = 0, 0
	switch {
	case s != rdma.Success:
		q.sendDone.put(rdma.Completion{ID: r.ID, QP: q.number, Status: s}, r.seq)
		q.fail()
	case r.Signaled:
		op := r.Op
		switch op { // a device does not tell them apart
		case rdma.WriteImm:
			op = rdma.Write
		case rdma.SendImm:
			op = rdma.Send
		}
		q.sendDone.put(rdma.Completion{ID: r.ID, QP: q.number, Op: op}, r.seq)
	}
}

// overtakes is how many requests behind the first one may overtake it.
const overtakes = 4

// overtake may place the data of a write before that of requests in front of it: before a read, as
// the standard allows, and before other writes, as devices do whose packets take several paths; or
// the end of the first write before the rest. The completions keep their order. It reports whether
// it has.
func (q *qp) overtake() bool {
	const end = 64
	if q.dev.f.rng.IntN(4) > 0 {
		return false
	}
	i := q.dev.f.rng.IntN(min(len(q.queue), 1+overtakes))
	w := q.queue[i]
	if i > 0 && q.queue[0].Op == rdma.Read && q.queue[0].begun || w.Op != rdma.Write && w.Op != rdma.WriteImm ||
		w.moved > 0 || slices.ContainsFunc(q.queue[min(i, 1):i+1], func(r *request) bool { return r.Fence }) {
		return false
	}
	p := q.peer()
	if p == nil {
		return false
	}
	local, n, ok := q.gather(w)
	if !ok || n == 0 || p.access&rdma.RemoteWrite == 0 {
		return false
	}
	to, ok := p.dev.reach(w.RemoteKey, w.RemoteAddress, uint64(n), rdma.RemoteWrite)
	switch {
	case !ok || i == 0 && n <= end:
		return false
	case i == 0:
		p.dev.write(to, local, n-end, end)
	default:
		p.dev.write(to, local, 0, n)
		w.placed, w.moved = true, n
	}
	return true
}

// work makes progress with r, the first request of a queue pair that is ready.
func (q *qp) work(r *request) {
	f := q.dev.f
	if !r.begun {
		r.begun = true
		if ask := f.cfg.Faults.Request; ask != nil {
			if s := ask(q.dev.hw.name, q.number, &r.SendRequest); s != rdma.Success {
				q.end(s)
				return
			}
		}
	}
	if r.placed && r.Op == rdma.Write {
		q.end(rdma.Success)
		return
	}
	local, n, ok := q.gather(r)
	switch {
	case !ok:
		q.end(rdma.LocalProtection)
		return
	case n > 1<<31:
		q.end(rdma.LocalLength)
		return
	}
	p := q.peer()
	if p == nil {
		q.repeat()
		return
	}
	q.lost = 0
	remote, status := q.remote(p, r, n)
	if status == rdma.RNRRetryExceeded {
		if q.unready++; q.route.RNRRetries < 7 && q.unready > int(q.route.RNRRetries) {
			q.end(status)
			return
		}
		q.sending.blocked = f.now() + 640*time.Microsecond
		return
	}
	if status != rdma.Success {
		q.end(status)
		return
	}
	if rest := n - r.moved; rest > 0 {
		k := rest
		if rest > wordsTo {
			if k = min(rest, 64<<10); f.cfg.Manual {
				k = min(rest, 64+f.rng.IntN(rest)&^63)
			}
		}
		switch r.Op {
		case rdma.Read:
			p.dev.hw.settle()
			scatter(local, remote, r.moved, k)
		case rdma.Write, rdma.WriteImm:
			p.dev.write(remote[0], local, r.moved, k)
		default:
			scatter(remote, local, r.moved, k)
		}
		if r.moved += k; r.moved < n {
			return
		}
	}
	switch r.Op {
	case rdma.Send, rdma.SendImm:
		p.received(rdma.Completion{Op: rdma.Recv, Bytes: uint32(n), Imm: r.Imm, HasImm: r.Op == rdma.SendImm})
	case rdma.WriteImm:
		p.received(rdma.Completion{Op: rdma.RecvWriteImm, Bytes: uint32(n), Imm: r.Imm, HasImm: true})
	}
	q.end(rdma.Success)
}

// received completes the first receive.
func (q *qp) received(c rdma.Completion) {
	q.dev.hw.settle()
	r := q.receives[0]
	q.receives = q.receives[1:]
	c.ID, c.QP = r.ID, q.number
	q.recvDone.put(c, r.seq)
}

// repeat counts a packet that was lost.
func (q *qp) repeat() {
	wait := 10 * time.Millisecond
	if q.route.Timeout > 0 {
		wait = 4096 * time.Nanosecond << q.route.Timeout
		if q.lost++; q.lost > int(q.route.Retries) {
			q.end(rdma.RetryExceeded)
			return
		}
	}
	q.sending.blocked = q.dev.f.now() + wait
}

// peer returns the queue pair that takes the packets of q, nil if they are lost.
func (q *qp) peer() *qp {
	own := &q.dev.hw.ports[q.port-1]
	if gid, ok := own.gid(q.route.GIDIndex); own.down || !ok || gid != q.gid {
		return nil
	}
	for _, h := range q.dev.f.devices {
		p := h.qps[q.route.Remote]
		if p == nil || h.removed || p.port == 0 || p.state != rdma.StateReady {
			continue
		}
		at := &h.ports[p.port-1]
		here := slices.ContainsFunc(at.gids, func(e rdma.GIDEntry) bool { return e.GID == q.route.GID })
		if here && !at.down && p.route.Remote == q.number && p.route.GID == q.gid && p.route.RemotePSN == q.route.PSN &&
			p.route.PSN == q.route.RemotePSN {
			return p
		}
	}
	return nil
}

// gather returns the local memory of r, and its length.
func (q *qp) gather(r *request) (parts [][]byte, n int, ok bool) {
	if r.Inline {
		return [][]byte{r.data}, len(r.data), true
	}
	access := rdma.Access(0)
	if r.Op == rdma.Read {
		access = rdma.LocalWrite
	}
	return q.parts(r.Segments, access)
}

// parts returns the memory of segments.
func (q *qp) parts(segments []rdma.Segment, access rdma.Access) (parts [][]byte, n int, ok bool) {
	for _, s := range segments {
		if s.Len == 0 {
			continue
		}
		m, ok := q.dev.reach(s.Key, s.Address, uint64(s.Len), access)
		if !ok {
			return nil, 0, false
		}
		parts = append(parts, m)
		n += len(m)
	}
	return parts, n, true
}

// remote returns the memory of r at p, or how r ends.
func (q *qp) remote(p *qp, r *request, n int) ([][]byte, rdma.Status) {
	if r.Op != rdma.Write && r.Op != rdma.Read && len(p.receives) == 0 {
		return nil, rdma.RNRRetryExceeded
	}
	if r.Op == rdma.Send || r.Op == rdma.SendImm {
		parts, room, ok := p.parts(p.receives[0].Segments, rdma.LocalWrite)
		if !ok {
			p.reject(rdma.LocalProtection)
			return nil, rdma.RemoteOperation
		}
		if n > room {
			p.reject(rdma.LocalLength)
			return nil, rdma.RemoteInvalid
		}
		return parts, rdma.Success
	}
	if n == 0 {
		return nil, rdma.Success
	}
	access := rdma.RemoteWrite
	if r.Op == rdma.Read {
		access = rdma.RemoteRead
	}
	m, ok := p.dev.reach(r.RemoteKey, r.RemoteAddress, uint64(n), access)
	if !ok || p.access&access == 0 {
		p.broken()
		return nil, rdma.RemoteAccess
	}
	return [][]byte{m}, rdma.Success
}

// reject ends the first receive with an error, which fails the queue pair.
func (q *qp) reject(s rdma.Status) {
	r := q.receives[0]
	q.receives = q.receives[1:]
	q.recvDone.put(rdma.Completion{ID: r.ID, QP: q.number, Status: s}, r.seq)
	q.broken()
}

// write is scatter to memory of a device, whose writes may be delayed.
func (d *device) write(to []byte, src [][]byte, at, n int) {
	if !slices.Contains(d.f.cfg.Delayed, d.hw.name) {
		scatter([][]byte{to}, src, at, n)
		return
	}
	c, data := cursor{parts: src}, make([]byte, 0, n)
	for c.skip(at); len(data) < n; {
		data = append(data, c.take(min(n-len(data), c.left()))...)
	}
	d.hw.delayed = append(d.hw.delayed, delayed{to[at:][:n], data})
}

// scatter moves n bytes from position at of src to the same position of dst.
func scatter(dst, src [][]byte, at, n int) {
	d, s := cursor{parts: dst}, cursor{parts: src}
	d.skip(at)
	s.skip(at)
	for n > 0 {
		k := min(n, d.left(), s.left())
		move(d.take(k), s.take(k))
		n -= k
	}
}

// cursor is a position in memory of several parts.
type cursor struct {
	parts [][]byte
	at    int // of parts[0]
}

func (c *cursor) left() int { return len(c.parts[0]) - c.at }

func (c *cursor) skip(n int) {
	for n > 0 {
		k := min(n, c.left())
		c.take(k)
		n -= k
	}
}

// take returns the next n bytes, at most those of one part.
func (c *cursor) take(n int) []byte {
	b := c.parts[0][c.at:][:n]
	if c.at += n; c.at == len(c.parts[0]) {
		c.parts, c.at = c.parts[1:], 0
	}
	return b
}
