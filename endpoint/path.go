package endpoint

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"tutti/endpoint/internal/card"
	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
	"tutti/endpoint/stats"
	"tutti/mem"
	"tutti/rdma"
	handshake "tutti/rdma/endpoint"
)

// RDMA says which RDMA device an endpoint uses. The zero value is none.
//
// Large reads and writes of a peer that has a device, too, then go from memory to memory without
// the peer's processor, once the two ends have connected queue pairs and this one knows the key of
// the region: until then, and whenever that fails, they go by TCP. Files, memory of devices that
// do not export it, and connections with Checksum or Seal always do.
//
// A message of more than 64 KiB waits at its sender, whose device knows its memory. The receiver
// reads it there when it is received. Shorter ones go by TCP at once, as far as there is room.
//
// A write has ended when the peer's device has acknowledged it. Region.Traffic and the counters of
// the peer do not have what went without its processor.
type RDMA struct {
	// Provider finds devices: that of package rdma/verbs, for example. nil: no device is used.
	Provider rdma.Provider
	// Devices selects devices and ports, as mlx5_0,mlx5_1:1: see rdma.ParseDevices. The first one
	// that is active is used. Default: any.
	Devices string
	// GID selects an address of the port: an index, an address or a network; see rdma.ChooseGID.
	// Default: the best one.
	GID string
	// Settings are those of the network, as rdma.ParseSettings has them. The default of
	// Settings.Timeout is 14, 67 ms.
	Settings rdma.Settings
	// From is the length in bytes from which operations go by RDMA, messages only if they have more
	// than 64 KiB, too. Default 4 KiB.
	From int64
}

// Path says what carries large reads, writes and messages.
type Path uint8

// Paths.
const (
	NoPath     Path = iota // there are no connections
	PathTCP                // the connections
	PathDirect             // RDMA
)

// String returns "none", "tcp" or "rdma".
func (p Path) String() string {
	if p > PathDirect {
		return fmt.Sprintf("path %d", uint8(p))
	}
	return [...]string{"none", "tcp", "rdma"}[p]
}

// Path returns what would carry a large read or write that starts now, of a region that was used
// before. Messages go by RDMA when it is PathDirect at both ends, but for the first ones.
func (p *Peer) Path() Path {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session == nil || !p.session.up {
		return NoPath
	}
	return p.session.pathLocked()
}

// pathLocked is Path of a session that is up.
func (s *session) pathLocked() Path {
	if s.path != nil && s.path.state == direct {
		return PathDirect
	}
	return PathTCP
}

// Times and limits of a path.
const (
	defaultFrom = 4 << 10
	exportFrom  = 256 << 10             // of operations with memory of a device, which is registered for them
	maxFlights  = 8                     // groups of operations under way
	maxGroup    = 64 << 20              // bytes of a group of several operations
	maxGrouped  = 64                    // operations
	grace       = 20 * time.Millisecond // for what was given up to end by itself
	firstPause  = 50 * time.Millisecond // before a failed path is tried again
	lastPause   = 30 * time.Second
	maxOwed     = 8 // Joins, and Fences, of the peer that were not answered
)

// path is the RDMA path of a session: the connections carry what it cannot. peer.mu guards it, but
// for the fields below making.
type path struct {
	s     *session
	state pathState
	conn  *card.Conn // of the state direct

	queue    queue[*task]       // that wait for a flight
	flights  int                // goroutines that move operations
	aboard   map[*task]struct{} // whose memory the device may access
	stranded []*task            // that the connections carry when the path is fenced
	grace    *time.Timer        // for operations aboard that were given up; nil: there are none
	keys     map[uint64]*key    // of the peer's regions, by id
	used     time.Time          // when an operation last ended

	calls    map[uint64]chan []byte // Joins of this end that were not answered
	lastCall uint64
	fence    uint64                    // number of the last Fence
	fenced   bool                      // it was answered
	next     time.Time                 // when a path that has failed is tried again
	pause    time.Duration             // until then, after the next failure
	warned   bool                      // that memory cannot be registered
	beyond   map[mem.Location]struct{} // whose memory cannot be
	wants    bool                      // the peer was told that this end reads messages

	// Of the peer.
	joins, fences int  // that were not answered
	foreign       bool // it is of another build, which was said
	reads         bool // it reads messages
	loans         map[*loan]struct{}
	holds         map[*Region]struct{}
	revoking      map[uint64]withheld // keys that the peer may still use, by number of the Revoke
	lastRevoke    uint64
	closed        bool // it cannot use any more

	making sync.Mutex // of line
	line   *card.Line // nil: not made yet, or given up
	domain *card.Domain
	kept   bool // keep closes it
}

// pathState is what a path can be used for.
type pathState uint8

const (
	apart   pathState = iota // not connected; the next operation connects it
	joining                  // being connected
	direct                   // reads and writes go there
	fencing                  // failed: nothing begins, by whatever means, until the peer can get nothing late
	never                    // there is none in this session
)

// key is what the requests of this end reach a region of the peer with.
type key struct {
	region, generation uint64
	address            uint64
	remote             uint32
	known              bool
	refused            bool
	barred             bool   // a request with it has failed in a way that another connection does not change
	alone              bool   // or one of a group that had other keys, too: no group has it and others
	users              int    // operations aboard
	revoke             uint64 // number of the peer's Revoke; 0: it is valid
}

// withheld is a key that is given to no other memory while a peer may use it.
type withheld struct {
	domain *card.Domain
	key    uint32
}

// newPath returns the path of a session whose ends both can use one.
func newPath(s *session) *path {
	return &path{s: s, aboard: map[*task]struct{}{}, keys: map[uint64]*key{}, calls: map[uint64]chan []byte{},
		pause: firstPause, beyond: map[mem.Location]struct{}{},
		loans: map[*loan]struct{}{}, holds: map[*Region]struct{}{}, revoking: map[uint64]withheld{}}
}

// takeLocked reports whether the path takes an operation of a region, which was checked. If it
// could, and something is missing, it sees to that.
func (p *path) takeLocked(t *task, r RemoteRegion) bool {
	s := p.s
	if t.File != nil || !p.reachesLocked(t) || t.n == 0 || t.n < s.ep.cfg.RDMA.From || s.fences > 0 {
		return false
	}
	if p.joinSoonLocked(); p.state != direct {
		return false
	}
	k := p.keys[r.id]
	if k == nil || k.generation != r.generation {
		p.claimLocked(r)
		return false
	}
	if !k.known || k.barred {
		return false
	}
	t.key = k
	t.stage = moving
	s.frames++ // so that the session is not idle
	p.queue.push(t)
	p.flyLocked()
	return true
}

// claimLocked asks for the key of a region.
func (p *path) claimLocked(r RemoteRegion) {
	s := p.s
	if s.fullLocked() {
		return
	}
	if len(p.keys) >= maxKnown {
		for id, k := range p.keys {
			if k.known && k.users == 0 || k.refused {
				delete(p.keys, id)
				break
			}
		}
	}
	k := &key{region: r.id, generation: r.generation}
	p.keys[r.id] = k
	s.claimKeyLocked(k)
}

// claimKeyLocked sends a Claim.
func (s *session) claimKeyLocked(k *key) {
	s.last++
	s.requests[s.last] = request{key: k}
	b := wire.Header{Size: 16, Address: s.last, Op: wire.Claim}.Append(nil)
	s.conns[0].Later(wire.Words(b, k.region, k.generation))
	s.peer.touchLocked(s.conns[0])
}

// giveKeyLocked answers a Claim of the peer.
func (s *session) giveKeyLocked(c *link.Conn, id, address uint64, remote uint32) {
	s.owed--
	b := wire.Header{Size: 16, Address: id, Op: wire.Key}.Append(nil)
	c.Later(wire.Words(b, address, uint64(remote)))
	s.peer.touchLocked(c)
}

// keyLocked handles the answer to a Claim.
func (s *session) keyLocked(id, address, remote uint64) error {
	r, ok := s.requests[id]
	if !ok || r.key == nil || remote > 1<<32-1 {
		return fmt.Errorf("%w: key %#x for request %d, which did not ask for it", wire.ErrFrame, remote, id)
	}
	delete(s.requests, id)
	k := r.key
	k.address, k.remote, k.known = address, uint32(remote), true
	s.freedLocked()
	return nil
}

// flyLocked starts a flight for what waits.
func (p *path) flyLocked() {
	if p.flights < maxFlights && p.queue.len() > 0 && p.s.ep.goes(p.fly) {
		p.flights++
	}
}

// fly moves groups of operations until none waits.
func (p *path) fly() {
	peer := p.s.peer
	for {
		peer.mu.Lock()
		conn := p.conn
		group, requests := p.groupLocked()
		if len(group) == 0 {
			p.flights--
			p.settleLocked()
			peer.unlock()
			return
		}
		peer.unlock() // other ways may have something to send
		err := conn.Move(requests)
		peer.mu.Lock()
		p.landLocked(group, conn, err)
		peer.unlock()
	}
}

// groupLocked takes the first operations off the queue.
func (p *path) groupLocked() (group []*task, requests []card.Request) {
	bytes := int64(0)
	for p.queue.len() > 0 && len(group) < maxGrouped {
		t := p.queue.first()
		if t.ended {
			p.queue.pop()
			continue
		}
		if t.Kind != OpRecv && p.keys[t.key.region] != t.key { // it was revoked, or forgotten
			p.queue.pop()
			t.key = nil
			p.s.sendPiecesLocked(t)
			continue
		}
		local := t.localOf()
		if len(group) > 0 && (bytes+int64(local.Len()) > maxGroup || !t.key.joins(group[0].key)) {
			break
		}
		p.queue.pop()
		bytes += int64(local.Len())
		t.flight = p
		p.aboard[t] = struct{}{}
		t.key.users++
		group = append(group, t)
		requests = append(requests, card.Request{Write: t.Kind == OpWrite, Local: local,
			Exporter: p.s.ep.ctx.exporter(local), Remote: t.key.address + uint64(t.Offset), Key: t.key.remote})
	}
	if p.queue.len() > 0 {
		p.flyLocked()
	}
	return group, requests
}

// joins reports whether a group with o may have k.
func (k *key) joins(o *key) bool { return k == o || !k.alone && !o.alone }

// failedLocked notes the error of a group that has k. A fatal status bars the key if the group has
// no other one. Otherwise it may be that of another key, and each is tried without others.
func (k *key) failedLocked(err error, group []*task) {
	switch {
	case !rdma.Fatal(err):
	case slices.ContainsFunc(group, func(t *task) bool { return t.key != k }):
		k.alone = true
	default:
		k.barred = true
	}
}

// landLocked goes on with operations whose memory the device does not access any more.
func (p *path) landLocked(group []*task, conn *card.Conn, err error) {
	s := p.s
	if err == nil {
		for _, t := range group {
			t.key.alone = false
		}
	}
	for _, t := range group {
		t.flight = nil
		delete(p.aboard, t)
		p.unuseLocked(t.key)
		switch {
		case t.Kind == OpRecv:
			s.borrowedLocked(t, err)
		case t.ended: // given up meanwhile
			s.peer.over = append(s.peer.over, t)
		case err == nil:
			t.result.N, t.result.Total = t.n, t.n
			s.peer.countLocked(func(c *counts) { c.direct[t.Kind].Add(uint64(t.n)) })
			t.free = true
			s.peer.endLocked(t)
		case errors.As(err, new(*card.MemoryError)):
			s.sendPiecesLocked(t)
		default:
			t.key.failedLocked(err, group)
			p.stranded = append(p.stranded, t)
		}
	}
	s.frames++
	p.used = time.Now()
	switch {
	case err == nil:
		p.pause = firstPause
	case errors.As(err, new(*card.MemoryError)):
		p.warnLocked(err)
		for _, t := range group {
			p.cannotLocked(t)
		}
	default:
		p.downLocked(conn, err)
	}
}

// reachesLocked reports whether the device of this end can access the memory of an operation.
func (p *path) reachesLocked(t *task) bool {
	if t.gate.Device() == nil {
		return true
	}
	_, no := p.beyond[t.Local.Loc()]
	return !no && t.n >= exportFrom && p.s.ep.ctx.exporter(t.Local) != nil
}

// cannotLocked has the memory of the device that an operation uses move by TCP from now on.
func (p *path) cannotLocked(t *task) {
	if t.gate.Device() != nil {
		p.beyond[t.Local.Loc()] = struct{}{}
	}
}

// warnLocked logs once why memory cannot be registered.
func (p *path) warnLocked(err error) {
	if !p.warned {
		p.warned = true
		p.s.ep.log.Warn("endpoint: memory cannot be registered for RDMA, it is moved by TCP", "peer", p.s.peer,
			"err", err)
	}
}

// unuseLocked notes that an operation does not use a key any more.
func (p *path) unuseLocked(k *key) {
	if k.users--; k.users == 0 && k.revoke != 0 {
		p.tellLocked(wire.Header{Address: k.revoke, Op: wire.Revoked}.Append(nil))
	}
}

// tellLocked sends a frame on the first connection.
func (p *path) tellLocked(frame []byte) {
	if s := p.s; !s.broken {
		s.conns[0].Later(frame)
		s.peer.touchLocked(s.conns[0])
	}
}

// giveUpLocked ends an operation aboard sooner than the device might.
func (p *path) giveUpLocked() {
	if p.grace != nil || p.s.broken {
		return
	}
	p.grace = time.AfterFunc(grace, func() {
		p.s.peer.mu.Lock()
		defer p.s.peer.unlock()
		p.grace = nil
		for t := range p.aboard {
			if t.ended {
				p.downLocked(p.conn, fmt.Errorf("%s was given up", t.what()))
				return
			}
		}
	})
}

// downLocked takes the path out of service after a failure of conn. What is under way there ends,
// and goes by the connections when the peer has confirmed that nothing of it can come late.
func (p *path) downLocked(conn *card.Conn, why error) {
	if p.state != direct || p.conn != conn {
		return
	}
	p.state, p.conn, p.fenced = fencing, nil, false
	p.s.ep.log.Warn("endpoint: RDMA is not used for a while", "peer", p.s.peer, "pause", p.pause, "err", why)
	p.s.peer.countLocked(func(c *counts) { c.detours++ })
	p.stranded = append(p.stranded, p.queue.all()...)
	p.queue = queue[*task]{}
	p.s.ep.goes(func() { // else the session ends
		conn.Fail()
		peer := p.s.peer
		peer.mu.Lock()
		defer peer.unlock()
		p.fence++
		p.tellLocked(wire.Header{Address: p.fence, Op: wire.Fence}.Append(nil))
	})
}

// settleLocked goes on without the path when it is fenced and nothing is aboard.
func (p *path) settleLocked() {
	if p.state != fencing || !p.fenced || p.flights > 0 || p.s.broken {
		return
	}
	p.state = apart
	p.next = time.Now().Add(p.pause)
	p.pause = min(2*p.pause, lastPause)
	stranded := p.stranded
	p.stranded = nil
	for _, t := range stranded {
		switch {
		case t.ended:
		case t.Kind == OpRecv:
			p.s.pullPartsLocked(t.letter)
		default:
			p.s.sendPiecesLocked(t)
		}
	}
	p.s.freedLocked()
}

// breakLocked ends what waits for the path, when the session breaks. What is aboard ends for its
// waiter when the line is closed.
func (p *path) breakLocked(why error) {
	p.state, p.conn = never, nil
	for _, t := range slices.Concat(p.queue.all(), p.stranded) {
		p.s.peer.failLocked(t, why)
	}
	for t := range p.aboard {
		p.s.peer.failLocked(t, why)
	}
	p.queue, p.stranded = queue[*task]{}, nil
	if p.grace != nil {
		p.grace.Stop()
	}
}

// restsLocked reports whether nothing is under way.
func (p *path) restsLocked() bool {
	return p == nil || p.queue.len()+len(p.aboard)+len(p.stranded) == 0
}

// usedLocked reports whether the path was used within d, which the peer cannot see.
func (p *path) usedLocked(d time.Duration) bool { return p != nil && time.Since(p.used) < d }

// joinSoonLocked connects the path, if it is not connected, and none has failed just now.
func (p *path) joinSoonLocked() {
	if p.state == apart && !time.Now().Before(p.next) && p.s.ep.goes(p.join) {
		p.state = joining
	}
}

// join connects the queue pairs.
func (p *path) join() {
	ctx, cancel := context.WithTimeout(p.s.ep.life, p.s.ep.cfg.DialTimeout)
	defer cancel()
	line, err := p.make()
	var conn *card.Conn
	if err == nil {
		conn, err = line.Open(ctx)
	}
	peer := p.s.peer
	peer.mu.Lock()
	defer peer.unlock()
	var refused *handshake.RefusedError
	var format *handshake.FormatError
	switch {
	case p.state != joining: // the session is broken
	case err == nil:
		p.state, p.conn = direct, conn
		maps.DeleteFunc(p.keys, func(_ uint64, k *key) bool { return k.refused }) // the peer's device may be another
		select {
		case <-conn.Ended(): // lost has been called, or waits
			p.downLocked(conn, errors.New("the connection was lost right after it was made"))
		default:
		}
	case errors.As(err, &format):
		p.state = never
		p.s.ep.log.Warn("endpoint: no RDMA", "peer", peer, "err", err)
	case errors.Is(err, handshake.ErrGone), errors.As(err, &refused) && refused.Final:
		p.state = never
		p.s.ep.log.Info("endpoint: no RDMA", "peer", peer, "err", err)
	default:
		p.state = apart
		p.next = time.Now().Add(p.pause)
		p.pause = min(2*p.pause, lastPause)
		p.s.ep.log.Info("endpoint: no RDMA yet", "peer", peer, "err", err)
	}
}

// make returns the line, which lives until the session ends, or its device is removed.
func (p *path) make() (*card.Line, error) {
	p.making.Lock()
	defer p.making.Unlock()
	if p.line != nil && p.domain.Removed() {
		p.giveUpLine()
	}
	if p.line != nil {
		return p.line, nil
	}
	e := p.s.ep
	p.s.peer.mu.Lock()
	closed := p.closed
	p.s.peer.mu.Unlock()
	if closed {
		return nil, ErrClosed
	}
	d, err := e.card.Domain(p.s.peer.client)
	if err != nil {
		return nil, err
	}
	line, err := d.NewLine(card.LineConfig{Call: p.call, Lost: p.lost})
	if err != nil {
		return nil, errors.Join(err, d.Release())
	}
	p.line, p.domain = line, d
	if !p.kept && !e.goes(p.keep) {
		p.close()
		return nil, ErrClosed
	}
	p.kept = true
	return line, nil
}

// giveUpLine closes the line of a device that was removed. It revokes the keys that the peer has.
// p.making is held.
func (p *path) giveUpLine() {
	peer, d := p.s.peer, p.domain
	p.closeLine()
	peer.mu.Lock()
	told := slices.Collect(maps.Keys(p.holds))
	peer.mu.Unlock()
	for _, r := range told {
		if key, ok := r.takeBack(p.s, d); ok {
			p.revoke(r, d, key)
		}
	}
	p.line, p.domain = nil, nil
	p.release(d)
}

// keep closes the line when the session ends.
func (p *path) keep() {
	<-p.s.over
	p.making.Lock()
	defer p.making.Unlock()
	p.close()
}

// closeLine closes the line, and waits until nothing uses it. p.making is held.
func (p *path) closeLine() {
	if err := p.line.Close(); err != nil {
		p.s.ep.log.Error("endpoint: an RDMA connection was not closed in order", "peer", p.s.peer, "err", err)
	}
}

// release releases a domain of the path.
func (p *path) release(d *card.Domain) {
	if err := d.Release(); err != nil {
		p.s.ep.log.Error("endpoint: an RDMA device was not closed", "err", err)
	}
}

// close ends the path: the peer cannot use anything any more. p.making is held.
func (p *path) close() {
	peer := p.s.peer
	if p.line != nil {
		p.closeLine()
	}
	peer.mu.Lock()
	p.closed = true
	held, revoking := p.holds, p.revoking
	p.holds, p.revoking = nil, nil
	var loans []*loan
	for l := range p.loans {
		if !l.taken {
			l.domain.Permit(l.key)
		}
		if !l.ending {
			l.ending = true
			loans = append(loans, l)
		}
	}
	p.loans = nil
	peer.mu.Unlock()
	for _, l := range loans {
		l.end(false)
	}
	for r := range held {
		r.forget(p.s)
	}
	for _, w := range revoking {
		w.domain.Permit(w.key)
	}
	if p.domain != nil {
		p.release(p.domain)
	}
	p.line, p.domain = nil, nil
}

// lost is card.LineConfig.Lost.
func (p *path) lost(conn *card.Conn, cause error) {
	p.s.peer.mu.Lock()
	defer p.s.peer.unlock()
	p.downLocked(conn, cause)
}

// errNoDevice says that the peer has no device, or does not use it.
var errNoDevice = fmt.Errorf("the peer does not use RDMA: %w", handshake.ErrGone)

// call is card.LineConfig.Call.
func (p *path) call(ctx context.Context, request []byte) ([]byte, error) {
	s := p.s
	s.peer.mu.Lock()
	p.lastCall++
	id, reply := p.lastCall, make(chan []byte, 1)
	p.calls[id] = reply
	b := wire.Header{Size: uint64(len(request)), Address: id, Op: wire.Join}.Append(nil)
	p.tellLocked(append(b, request...))
	s.peer.unlock()
	defer func() {
		s.peer.mu.Lock()
		delete(p.calls, id)
		s.peer.mu.Unlock()
	}()
	select {
	case b := <-reply:
		if len(b) == 0 {
			return nil, errNoDevice
		}
		return b, nil
	case <-s.over:
		return nil, fmt.Errorf("%w: %w", ErrBroken, handshake.ErrGone)
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// agreement is the token of a Join or a Joined.
type agreement struct {
	op wire.Opcode
	id uint64
}

// agreedLocked handles a Join or a Joined.
func (s *session) agreedLocked(a agreement, b []byte) error {
	p := s.path
	if a.op == wire.Joined {
		if p == nil || a.id == 0 || a.id > p.lastCall {
			return fmt.Errorf("%w: the answer to Join %d, which was not sent", wire.ErrFrame, a.id)
		}
		if reply := p.calls[a.id]; reply != nil {
			delete(p.calls, a.id)
			reply <- b
		}
		return nil
	}
	if err := s.checkBacklog(s.conns[0]); err != nil {
		return err
	}
	answer := func(b []byte) {
		f := wire.Header{Size: uint64(len(b)), Address: a.id, Op: wire.Joined}.Append(nil)
		s.conns[0].Later(append(f, b...))
		s.peer.touchLocked(s.conns[0])
	}
	if p == nil {
		answer(nil)
		return nil
	}
	if p.joins++; p.joins > maxOwed {
		return fmt.Errorf("%w: %d Joins at once", wire.ErrFrame, p.joins)
	}
	if !s.ep.goes(func() {
		line, err := p.make()
		var reply []byte
		if err == nil {
			reply, err = line.Handle(b)
		} else {
			s.ep.log.Debug("endpoint: no RDMA for a peer", "peer", s.peer, "err", err)
			reply, err = handshake.Busy(b, err.Error()) // the device may come back
		}
		s.peer.mu.Lock()
		defer s.peer.unlock()
		if err != nil {
			level := slog.LevelInfo
			if errors.As(err, new(*handshake.FormatError)) && !p.foreign {
				p.foreign, level = true, slog.LevelWarn
			}
			s.ep.log.Log(context.Background(), level, "endpoint: RDMA is refused", "peer", s.peer, "err", err)
		}
		if p.joins--; !s.broken {
			answer(reply)
		}
	}) {
		return ErrClosed
	}
	return nil
}

// claimedLocked handles a Claim of the peer.
func (s *session) claimedLocked(c *link.Conn, id, region, generation uint64) error {
	if err := s.oweLocked(c); err != nil {
		return err
	}
	r, code := s.ep.regions.find(wire.Range{Region: region, Generation: generation})
	p := s.path
	switch {
	case region == 0 && generation == 0 && p != nil:
		p.wantedLocked(c, id)
		return nil
	case code != wire.OK:
	case r.rightsOf(s.peer.client) == 0:
		code = wire.NoRegion
	case p == nil || r.memory.Len() == 0:
		code = wire.Denied
	default:
		if s.ep.goes(func() { p.grant(c, id, r) }) { // to register memory takes time
			return nil
		}
		return ErrClosed
	}
	s.replyLocked(c, id, code, 0, "")
	return nil
}

// grant answers a Claim.
func (p *path) grant(c *link.Conn, id uint64, r *Region) {
	s := p.s
	var g *grant
	_, err := p.make() // what the session has is given back when its line is closed
	if err == nil {
		g, err = p.register(r)
	}
	s.peer.mu.Lock()
	if err == nil && g.domain.Removed() {
		err = rdma.ErrRemoved // after this the peer is told that the key is revoked: see giveUpLine
	}
	gone := s.broken || p.closed
	if !gone && g != nil {
		p.holdLocked(r)
	}
	switch {
	case gone:
	case r.gone.Load(): // what Unregister tells the peer comes later
		s.replyLocked(c, id, wire.Stale, 0, "")
	case err != nil:
		s.ep.log.Warn("endpoint: a region cannot be registered for RDMA, it is served by TCP", "region", r.name,
			"err", err)
		s.replyLocked(c, id, wire.Denied, 0, "")
	default:
		s.giveKeyLocked(c, id, g.Address, g.RemoteKey())
	}
	s.peer.unlock()
	if gone {
		r.forget(s)
	}
}

// holdLocked notes that the peer has the key of a region. Of one that is gone, revoke may have been
// called already.
func (p *path) holdLocked(r *Region) {
	if !r.gone.Load() {
		p.holds[r] = struct{}{}
	}
}

// register returns the registration of a region for the peer.
func (p *path) register(r *Region) (*grant, error) {
	e := p.s.ep
	d, err := e.card.Domain(p.s.peer.client)
	if err != nil {
		return nil, err
	}
	g, err := r.grantTo(p.s, d)
	return g, errors.Join(err, d.Release())
}

// revokedLocked handles a Revoke of the peer.
func (s *session) revokedLocked(id, region, generation uint64) error {
	p := s.path
	if p == nil || id == 0 {
		return fmt.Errorf("%w: Revoke %d of a key that was not asked for", wire.ErrFrame, id)
	}
	if err := s.checkBacklog(s.conns[0]); err != nil {
		return err
	}
	if k := p.keys[region]; k != nil && k.generation == generation && k.known {
		delete(p.keys, region)
		if k.users > 0 {
			k.revoke = id
			return nil
		}
	}
	p.tellLocked(wire.Header{Address: id, Op: wire.Revoked}.Append(nil))
	return nil
}

// releasedLocked handles a Revoked of the peer.
func (s *session) releasedLocked(id uint64) error {
	p := s.path
	if p == nil || id == 0 || id > p.lastRevoke {
		return fmt.Errorf("%w: Revoked %d, which was not asked for", wire.ErrFrame, id)
	}
	if w, ok := p.revoking[id]; ok {
		delete(p.revoking, id)
		w.domain.Permit(w.key)
	}
	return nil
}

// fenceLocked handles a Fence of the peer.
func (s *session) fenceLocked(id uint64) error {
	p := s.path
	if p == nil {
		return fmt.Errorf("%w: a Fence without RDMA", wire.ErrFrame)
	}
	if err := s.checkBacklog(s.conns[0]); err != nil {
		return err
	}
	if p.fences++; p.fences > maxOwed {
		return fmt.Errorf("%w: %d Fences at once", wire.ErrFrame, p.fences)
	}
	if !s.ep.goes(func() {
		p.cut()
		s.peer.mu.Lock()
		defer s.peer.unlock()
		p.fences--
		p.tellLocked(wire.Header{Address: id, Op: wire.Fenced}.Append(nil))
	}) {
		return ErrClosed
	}
	return nil
}

// confirmedLocked handles a Fenced of the peer.
func (s *session) confirmedLocked(id uint64) error {
	p := s.path
	if p == nil || id == 0 || id != p.fence || p.state != fencing {
		return fmt.Errorf("%w: Fenced %d, which was not asked for", wire.ErrFrame, id)
	}
	p.fenced = true
	p.settleLocked()
	return nil
}

// directTo gives the counts of paths to the endpoint's state.
func (c *counts) directTo(s *stats.Endpoint) {
	for kind := OpRead; kind <= OpRecv; kind++ {
		if n := c.direct[kind]; n.N > 0 {
			s.Direct[kind.String()] = n
		}
	}
	s.Detours = c.detours
}

// grant is the registration of a region in a protection domain.
type grant struct {
	card.Registration
	domain  *card.Domain
	holders map[*session]struct{} // that know the key
}

// grantTo returns the registration of the region in the domain of a session.
func (r *Region) grantTo(s *session, d *card.Domain) (*grant, error) {
	r.keyMu.Lock()
	defer r.keyMu.Unlock()
	if r.gone.Load() {
		return nil, ErrStale
	}
	g := r.grants[d]
	if g == nil {
		var access rdma.Access
		rights := r.rightsOf(s.peer.client)
		if rights.Has(mem.Read) {
			access |= card.Read
		}
		if rights.Has(mem.Write) {
			access |= card.Write
		}
		k, err := d.Register(r.memory, r.exporter, access, false)
		if err != nil {
			return nil, err
		}
		g = &grant{k, d, map[*session]struct{}{}}
		if r.grants == nil {
			r.grants = map[*card.Domain]*grant{}
		}
		r.grants[d] = g
	}
	g.holders[s] = struct{}{}
	return g, nil
}

// forget notes that a session cannot use the region's key any more.
func (r *Region) forget(s *session) {
	r.keyMu.Lock()
	defer r.keyMu.Unlock()
	for _, g := range r.grants {
		delete(g.holders, s)
	}
}

// takeBack notes that a session may not use the region's key of a domain any more, and withholds
// it. It reports whether the session has it.
func (r *Region) takeBack(s *session, d *card.Domain) (key uint32, ok bool) {
	r.keyMu.Lock()
	defer r.keyMu.Unlock()
	g := r.grants[d]
	if g == nil {
		return 0, false
	}
	if _, ok = g.holders[s]; ok {
		delete(g.holders, s)
		key = g.RemoteKey()
		d.Withhold(key)
	}
	return key, ok
}

// leave is card.Config.Last.
func (g *registry) leave(d *card.Domain) {
	for _, r := range g.all() {
		r.leave(d)
	}
}

// leave deregisters the region in a domain that is not used any more.
func (r *Region) leave(d *card.Domain) {
	r.keyMu.Lock()
	defer r.keyMu.Unlock()
	if g := r.grants[d]; g != nil {
		delete(r.grants, d)
		r.deregistered(g.Close())
	}
}

// withdraw deregisters the region everywhere: no peer reaches it afterwards. Holders of a key
// are told.
func (r *Region) withdraw() {
	r.keyMu.Lock()
	r.gone.Store(true)
	grants := r.grants
	r.grants = nil
	failed := map[*grant]bool{}
	for d, g := range grants {
		for range g.holders {
			d.Withhold(g.RemoteKey())
		}
		failed[g] = !r.deregistered(g.Close())
	}
	r.keyMu.Unlock()
	for d, g := range grants {
		for s := range g.holders {
			if failed[g] { // then the queue pairs must not reach it
				s.path.cut()
			}
			s.path.revoke(r, d, g.RemoteKey())
		}
	}
}

// deregistered reports whether err is nil, and logs it otherwise.
func (r *Region) deregistered(err error) bool {
	if err != nil && !errors.Is(err, rdma.ErrRemoved) {
		r.reg.log.Error("endpoint: a region stays registered with an RDMA device", "region", r.name, "err", err)
		return false
	}
	return true
}

// cut takes the present connection out of service.
func (p *path) cut() {
	p.making.Lock()
	line := p.line
	p.making.Unlock()
	if line != nil {
		line.Cut()
	}
}

// revoke tells the peer that a key is not valid any more.
func (p *path) revoke(r *Region, d *card.Domain, remote uint32) {
	peer := p.s.peer
	peer.mu.Lock()
	defer peer.unlock()
	delete(p.holds, r)
	if p.closed {
		d.Permit(remote)
		return
	}
	p.lastRevoke++
	p.revoking[p.lastRevoke] = withheld{d, remote}
	b := wire.Header{Size: 16, Address: p.lastRevoke, Op: wire.Revoke}.Append(nil)
	p.tellLocked(wire.Words(b, r.id, r.generation))
}
