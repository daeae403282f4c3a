package p2p

import (
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"
)

// Token identifies the operation of a message on the ordered lane. Every header carries it. If the
// tokens of the two ends differ, the ranks have called different operations.
type Token struct {
	Seq   uint64 // number of the operation on its channel
	Call  uint64 // what was called, packed by the caller
	Count uint64 // elements, or a hash of counts
}

// Disagreement says that a peer's message belongs to another operation than the receive that it
// met.
type Disagreement struct {
	Rank         int // the peer, by slot of the channel
	Theirs, Ours Token
	Detail       string
}

func (e *Disagreement) Error() string {
	return fmt.Sprintf("rank %d sent a message of operation #%d where #%d was expected%s", e.Rank, e.Theirs.Seq,
		e.Ours.Seq, e.Detail)
}

// Aborted says that a peer ended the channel; Payload is what it gave to Abort.
type Aborted struct {
	Rank    int // slot of the channel
	Payload []byte
}

func (e *Aborted) Error() string { return fmt.Sprintf("rank %d aborted", e.Rank) }

// Channel is a stream of operations among some ranks, with its own order, credits and failure. A
// channel uses one of two lanes: the ordered lane (PostRecv, WaitRecv, Send), where the n-th
// message from a peer goes to the n-th receive posted for it, or the tagged lane (SendReq,
// RecvReq). All methods need the proxy's lock unless they say otherwise. Slots are positions in the
// channel's list of ranks.
type Channel struct {
	chanKey
	tagged    bool // for the tagged lane; outlives links
	retired   bool // removed from the proxy's tables
	hint      bool // see Begin
	bypass    bool // see Bypass
	p         *Proxy
	ranks     []int    // rank of each slot, -1 for an empty one; nil until opened
	places    []uint32 // see Open
	members   []uint64 // see Restrict
	place     uint32   // until opened: that of this rank, as peers say
	slots     map[int]int
	streams   map[int]*stream // by rank
	fast      []*stream       // by slot
	err       error
	aborted   []byte // the payload of the abort, sent on links that come up later
	until     uint64 // this rank runs neither this operation nor any later one; 0: it has not left
	now       Token  // the operation in progress or the last one
	told      Token  // the operation of the last announcement; zero: none, or it was taken back
	toldWaits uint64
	hears     func(slot, key int, value []byte) // see OnNotice
	misses    func(slot int)                    // see OnLeft
	relays    relays
	window    int
	came      uint64 // see Came

	// Tagged lane.
	posted  postings // unmatched receives
	sends   map[uint64]*SendReq
	recvs   map[uint64]*RecvReq
	nextMsg uint64
	follows followers
}

// stream is a channel's traffic with one peer, both directions.
type stream struct {
	c    *Channel
	pr   *peer
	slot int
	out  uint32 // its channel number on the link numbered on, in frames to the peer
	on   uint64
	in   uint32 // its channel number on the link numbered from, in frames of the peer
	from uint64
	// Credits, in cost units, wrapping.
	sent, acked uint32 // sent by this rank; taken by the peer of that
	taken, told uint32 // taken by this rank; of that, reported to the peer
	held        int    // cost of the frames in early

	posted   recvRing // ordered lane, in posting order
	early    []*early // arrived before a receive was posted
	sendq    []*SendReq
	followed followList
	part     int // bytes sent of the message of which Send has not sent all
	// Tagged lane: short messages sent to the peer's incarnation, and those of it that came whole
	// or began to come for a receive, over all links.
	begun, came uint64

	left    bool      // the peer closed the channel
	heard   time.Time // when this rank learnt that
	until   uint64    // the peer runs neither this operation nor any later one in this epoch; 0: not known
	lost    error     // why the link of this traffic went down
	seen    Token     // of the last message that came
	hasSeen bool
	waits   Token  // the operation in which the peer announced that it waits
	waitFor uint64 // the slots that it waits for, packed
	before  uint64 // the latest operation of which messages had come then: they may be sent ahead
	notices notices
}

// early is a frame that arrived before a receive was posted for it.
type early struct {
	h      Header
	buf    []byte // len is the payload's
	order  uint64 // of arrival, over all peers
	filled bool
	// Its credit has been returned, or is none: an announcement that was matched before, and put
	// back; a message that came over an earlier link; a frameBegun, in the place of lost messages.
	paid bool
}

// Recv is a receive of the ordered lane. The zero value is ready for PostRecv. It may be reused
// when it is done.
type Recv struct {
	st   *stream
	buf  []byte
	got  int
	tok  Token
	view []byte // the message: in buf, or lent by the link
	lend bool
	done bool
}

// Done reports whether the message has arrived.
func (r *Recv) Done() bool { return r.done }

// Came returns the number of messages that Recvs of c have got.
func (c *Channel) Came() uint64 { return c.came }

// Posted reports whether r was posted since the last Forget.
func (r *Recv) Posted() bool { return r.buf != nil || r.st != nil }

// recvRing is a queue of posted receives which allocates only to grow.
type recvRing struct {
	q          []*Recv
	head, size int
}

func (q *recvRing) push(r *Recv) {
	if q.size == len(q.q) {
		bigger := make([]*Recv, max(8, 2*len(q.q)))
		for i := range q.size {
			bigger[i] = q.q[(q.head+i)%len(q.q)]
		}
		q.q, q.head = bigger, 0
	}
	q.q[(q.head+q.size)&(len(q.q)-1)] = r
	q.size++
}

func (q *recvRing) front() *Recv {
	if q.size == 0 {
		return nil
	}
	return q.q[q.head]
}

func (q *recvRing) pop() {
	q.q[q.head] = nil
	q.head = (q.head + 1) & (len(q.q) - 1)
	q.size--
}

// cost is the credit that a frame with n bytes of payload takes: its bytes and its header's cache
// line.
func cost(n int) uint32 { return uint32(64 + n) }

// Name identifies a channel in the whole job. No two channels ever have the same name. The rank
// that makes a channel takes a name from Proxy.Reserve and tells it to the other members. Names
// with Maker 0 are known to all ranks.
type Name struct {
	Maker  uint64 // incarnation of the rank that reserved it
	Number uint64 // counts the names that this incarnation has reserved
}

func (n Name) String() string { return fmt.Sprintf("%x/%d", n.Maker, n.Number) }

// Epoch identifies a period of a channel: the view of its members, and the number of earlier
// attempts to enter that view.
type Epoch struct{ View, Attempt uint64 }

// Before reports whether e precedes o.
func (e Epoch) Before(o Epoch) bool {
	return e.View < o.View || e.View == o.View && e.Attempt < o.Attempt
}

// chanKey names one epoch of one channel.
type chanKey struct {
	name  Name
	epoch Epoch
}

// floor is the state of a channel's name: its oldest open epoch, or that it is closed.
type floor struct {
	epoch  Epoch // if closed, the last
	closed bool
	ended  map[Epoch]ending // epochs that have ended on this rank, where peers may still be
}

// ending is what peers are told of an epoch of a channel that has ended on this rank.
type ending struct {
	until uint64 // see stream.until
	why   []byte // what the epoch was aborted with; nil: it was not
}

// ended returns the state of c's name after the end of c.
func (c *Channel) ended() floor {
	f := c.p.floors[c.name]
	if c.now != (Token{}) { // after an operation no peer is in an earlier epoch
		f.ended = nil
	}
	if c.until != 0 || c.aborted != nil {
		if f.ended == nil {
			f.ended = map[Epoch]ending{}
		}
		f.ended[c.epoch] = ending{c.until, c.aborted}
	}
	return f
}

// above reports whether epoch has ended.
func (f floor) above(epoch Epoch) bool { return f.closed || epoch.Before(f.epoch) }

// Reserve reserves n consecutive names that no channel has had, and returns the first. Its number
// is this rank's place in the channels that are opened for the reservation, whoever names them: see
// Open. The caller calls Settle when it will open no more of them. Takes the lock itself.
func (p *Proxy) Reserve(n int) Name {
	p.Lock()
	defer p.Unlock()
	first := p.reserved + 1
	p.reserved += uint64(n)
	p.unsettled = append(p.unsettled, uint32(first))
	return Name{p.cfg.Self.Incarnation, first}
}

// Settle ends a reservation: this rank opens no channel for it any more. Frames that peers have
// sent on those that it did not open are dropped, and peers that have named them are told that they
// are closed. Takes the lock itself.
func (p *Proxy) Settle(first Name) {
	p.Lock()
	defer p.Unlock()
	place := uint32(first.Number)
	if i := slices.Index(p.unsettled, place); i >= 0 {
		p.unsettled = slices.Delete(p.unsettled, i, i+1)
	}
	for _, c := range p.chans {
		if _, known := p.floors[c.name]; !known && c.ranks == nil && c.place == place { // known: a later epoch
			c.retire()
		}
	}
	for _, pr := range p.links {
		for n := range pr.in {
			if i := &pr.in[n]; i.place == place && p.chans[i.key] == nil && p.floor(i).closed {
				p.farewell(pr, &i.key, floor{closed: true})
			}
		}
	}
}

// settled reports whether this rank opens no channel any more in which it has this place.
func (p *Proxy) settled(place uint32) bool {
	return place != 0 && int32(uint32(p.reserved)-place) >= 0 && !slices.Contains(p.unsettled, place)
}

// inbound is the meaning of a channel number in a peer's frames.
type inbound struct {
	key    chanKey
	place  uint32  // this rank's; 0: not known
	answer bool    // to this rank's frameOpen
	st     *stream // nil: to be looked up
}

// floor returns the state of the name of a channel that is not open, as a peer means it.
func (p *Proxy) floor(i *inbound) floor {
	if f, known := p.floors[i.key.name]; known {
		return f
	}
	return floor{closed: i.answer || p.settled(i.place)} // it was opened, or will never be
}

// maxInbound bounds the numbers that a peer may use at a time, one for each channel and epoch that
// is open there.
const maxInbound = 1 << 18

// number returns the number of st in frames to its peer. Before a link's first frame of a channel
// it sends a frame with the channel's full name.
func (p *Proxy) number(st *stream) uint32 {
	if pr := st.pr; st.on != pr.linkNo {
		place := uint32(0)
		if st.slot >= 0 && st.slot < len(st.c.places) {
			place = st.c.places[st.slot]
		}
		st.out, st.on = p.name(pr, &st.c.chanKey, place, 0), pr.linkNo
		if st.begun > 0 {
			p.queue(pr, Header{Kind: frameBegun, Chan: st.out, Ack: st.taken, Seq: st.begun}, nil)
		}
	}
	return st.out
}

// name assigns a number to a channel in frames to a peer, and sends the peer the channel's full
// name, and the peer's place.
func (p *Proxy) name(pr *peer, k *chanKey, place uint32, flags uint8) (n uint32) {
	if last := len(pr.free) - 1; last >= 0 {
		n, pr.free = pr.free[last], pr.free[:last]
	} else {
		n = pr.numbers
		pr.numbers++
	}
	p.queue(pr, Header{Kind: frameOpen, Flags: flags, Chan: n, Ack: place, Seq: k.name.Maker, Call: k.name.Number,
		Count: k.epoch.View, Off: k.epoch.Attempt}, nil)
	return n
}

// introduce sends the peer the channel's full name, if there is a link and it has not been sent. A
// peer on which the channel or its epoch has ended, perhaps before there was a link, answers with
// farewell.
func (st *stream) introduce() {
	if st.pr.link != nil && st.slot >= 0 && !st.c.retired && !st.replaced() {
		st.c.p.number(st)
	}
}

// farewell tells a peer, which is in an epoch of a channel that has ended on this rank, how it has
// ended: what it was aborted with, which operation was the last, and that the channel is closed.
func (p *Proxy) farewell(pr *peer, k *chanKey, f floor) {
	n := p.name(pr, k, 0, flagEnded)
	e := f.ended[k.epoch]
	if e.why != nil {
		p.queue(pr, Header{Kind: frameAbort, Chan: n, Len: uint32(len(e.why))}, e.why)
	}
	if e.until != 0 {
		p.queue(pr, Header{Kind: frameLeave, Chan: n, Seq: e.until - 1}, nil)
	}
	if f.closed {
		p.queue(pr, Header{Kind: frameBye, Chan: n}, nil)
	}
	pr.free = append(pr.free, n)
}

// opened records the meaning of a channel number of a peer.
func (p *Proxy) opened(pr *peer, h *Header) error {
	n := uint32(len(pr.in))
	if h.Len != 0 || h.Chan > n || h.Chan == n && n >= maxInbound {
		return fmt.Errorf("%w: rank %d opens channel number %d with %d bytes, having opened %d", ErrProtocol, pr.rank,
			h.Chan, h.Len, n)
	}
	if h.Chan == n {
		pr.in = append(pr.in, inbound{})
	}
	key := chanKey{Name{h.Seq, h.Call}, Epoch{h.Count, h.Off}}
	i := inbound{key: key, place: h.Ack, answer: h.Flags&flagEnded != 0}
	pr.in[h.Chan] = i
	if i.answer || p.chans[key] != nil {
		return nil
	}
	if f := p.floor(&i); f.above(key.epoch) {
		if len(pr.ctl) > maxInbound {
			return fmt.Errorf("%w: rank %d opens ended channels, and does not read that they have ended", ErrProtocol,
				pr.rank)
		}
		p.farewell(pr, &key, f)
	}
	return nil
}

// Open opens the channel of this name among ranks (this one included), for the ordered lane or, if
// tagged, for the tagged one. Every member opens it with the same list. Frames that peers sent on
// it before are kept, and frames of other epochs are not delivered; see Next. Takes the lock
// itself.
//
// places has the number of each member's reservation for the channel, by slot: see Reserve. A peer
// names the channel with the place of the member that it names it to. So a member need not remember
// the names of the channels that it has closed: one that it does not know, with the place of a
// reservation that is settled, is none that it will open. nil: the members have no places, and
// remember the name.
func (p *Proxy) Open(name Name, epoch Epoch, ranks []int, places []uint64, tagged bool) (*Channel, error) {
	p.Lock()
	defer p.Unlock()
	var short []uint32 // they wrap, but not within the lives of two channels
	for _, n := range places {
		short = append(short, uint32(n))
	}
	return p.open(chanKey{name, epoch}, ranks, short, tagged)
}

func (p *Proxy) open(key chanKey, ranks []int, places []uint32, tagged bool) (*Channel, error) {
	if p.closed {
		return nil, ErrClosed
	}
	c := p.chans[key]
	f := p.floors[key.name]
	if f.above(key.epoch) || c != nil && c.ranks != nil {
		return nil, fmt.Errorf("channel %v is in use or was used before", key.name)
	}
	if c == nil {
		c = p.newChannel(key)
	} else {
		c.uncount()
	}
	c.tagged = tagged
	f.epoch = key.epoch
	p.floors[key.name] = f
	c.ranks, c.places = ranks, places
	c.fast = make([]*stream, len(ranks))
	c.slots = make(map[int]int, len(ranks))
	for slot, r := range ranks {
		if r < 0 {
			continue
		}
		c.slots[r] = slot
		if st := c.streams[r]; st != nil {
			st.slot = slot
			c.fast[slot] = st
			if tagged && st.pr.link != nil { // it was renewed before its lane was known
				st.lost = nil
			}
			st.introduce()
		}
	}
	for r := range c.streams {
		if _, member := c.slots[r]; !member {
			return nil, fmt.Errorf("%w: rank %d used channel %v, of which it is no member", ErrProtocol, r, key.name)
		}
	}
	return c, nil
}

// ErrLeft says that a peer has moved to another epoch of the channel, and does not run the
// operation.
var ErrLeft = errors.New("it goes on in another view")

// Leave tells the members that this rank runs no operation after number last in this epoch: a peer
// that waits for it in a later one gets an error that wraps ErrLeft. Messages that were sent before
// are still delivered. Members that link up after Next are told then. With the lock.
func (c *Channel) Leave(last uint64) {
	c.until = last + 1
	for pr := range c.linked() {
		c.control(pr, Header{Kind: frameLeave, Seq: last}, nil)
	}
}

// leaves returns why the peer will neither send nor take messages of operation seq, nil if it may.
func (st *stream) leaves(seq uint64) error {
	if st.until != 0 && seq >= st.until {
		return &PeerError{st.pr.rank, ErrLeft}
	}
	return nil
}

// Closed reports whether the rank in slot has closed the channel. With the lock.
func (c *Channel) Closed(slot int) bool {
	st := c.fast[slot]
	return st != nil && st.left
}

// ClosedFor returns for how long this rank has known that the rank in slot has closed the channel,
// 0 if it has not. With the lock.
func (c *Channel) ClosedFor(slot int) time.Duration {
	if !c.Closed(slot) {
		return 0
	}
	return time.Since(c.fast[slot].heard)
}

// Next ends this epoch of an ordered channel and opens a later one among ranks, with -1 for empty
// slots. Messages under way in the old epoch are dropped, and its receives withdrawn. With the
// lock. c must not be used afterwards.
func (c *Channel) Next(epoch Epoch, ranks []int) (*Channel, error) {
	p := c.p
	if p.closed {
		return nil, ErrClosed
	}
	c.fail(ErrClosed)
	c.retire()
	p.floors[c.name] = c.ended()
	for key, o := range p.chans { // of epochs that are skipped
		if key.name == c.name && key.epoch.Before(epoch) {
			o.retire()
		}
	}
	next, err := p.open(chanKey{c.name, epoch}, ranks, c.places, false)
	if err == nil {
		next.Restrict(c.members)
	}
	return next, err
}

// Restrict says which incarnation of each rank is a member, by slot: one that comes in its place
// later is none. Sends to it and receives from it fail with an error that wraps ErrPeerGone, and it
// does not hear of the channel. nil, as after Open: every incarnation is a member. With the lock.
func (c *Channel) Restrict(incarnations []uint64) { c.members = incarnations }

// errReplaced says that a member's rank has another incarnation now.
var errReplaced = fmt.Errorf("another process has its rank now, which is no member: %w", ErrPeerGone)

// replaced reports whether the peer is not the incarnation that is a member.
func (st *stream) replaced() bool {
	if st.c.members == nil || st.slot < 0 {
		return false
	}
	now := st.pr.id.Incarnation
	return now != 0 && now != st.c.members[st.slot]
}

func (p *Proxy) newChannel(key chanKey) *Channel {
	c := &Channel{chanKey: key, p: p, streams: map[int]*stream{}, window: p.cfg.Window, sends: map[uint64]*SendReq{},
		recvs: map[uint64]*RecvReq{}, nextMsg: 1, posted: postings{lists: map[posting]*postingList{}}}
	p.chans[key] = c
	return c
}

func (c *Channel) has(rank int) bool { _, ok := c.slots[rank]; return ok }

// stream returns the traffic with the rank in slot.
func (c *Channel) stream(slot int) *stream {
	if st := c.fast[slot]; st != nil {
		return st
	}
	st := c.streamOf(&c.p.peers[c.ranks[slot]])
	return st
}

func (c *Channel) streamOf(pr *peer) *stream {
	if st := c.streams[pr.rank]; st != nil {
		return st
	}
	st := &stream{c: c, pr: pr, slot: -1}
	c.streams[pr.rank] = st
	if slot, ok := c.slots[pr.rank]; ok {
		st.slot = slot
		c.fast[slot] = st
		st.introduce()
	}
	return st
}

// Err returns why the channel failed: *Aborted, *Disagreement, *PeerError, ErrClosed or the
// argument of Fail.
func (c *Channel) Err() error { return c.err }

// Begin sets the operation that runs from now on. Messages that arrive early are compared with it.
// With hint, every rank whose result depends on this one's data finds Hinted set when the operation
// has ended: message headers pass the hint on with the data.
func (c *Channel) Begin(t Token, hint bool) error {
	c.now, c.hint, c.bypass = t, hint, false
	if c.err == nil {
		for _, st := range c.fast { // what arrived before the operation began
			if st != nil && len(st.early) > 0 {
				c.compare(st, &st.early[0].h)
			}
			if st != nil && st.waits.Seq == t.Seq && st.waits != t {
				c.compareWait(st)
			}
		}
	}
	return c.err
}

// Bypass says that long messages of the ordered lane bypass this processor's caches until the next
// Begin, where the links can do that. With the lock.
func (c *Channel) Bypass() { c.bypass = true }

// Bypasses reports whether the link to slot can do what Bypass asks for, or is not up. With the
// lock.
func (c *Channel) Bypasses(slot int) bool {
	pr := c.stream(slot).pr
	return pr.link == nil || pr.bypasser != nil
}

// Hinted reports whether this rank, or one whose data its result depends on, began the operation
// with a hint.
func (c *Channel) Hinted() bool { return c.hint }

// Probe makes progress once, and sleeps after a long time without progress. It returns why the
// channel failed, if it did.
func (c *Channel) Probe(w *Wait) error {
	if c.err != nil {
		return c.err
	}
	if err := c.p.progress(w, nil); err != nil {
		return err
	}
	return c.err
}

// Seen returns the operation of the last message from slot.
func (c *Channel) Seen(slot int) (Token, bool) {
	if st := c.fast[slot]; st != nil {
		return st.seen, st.hasSeen
	}
	return Token{}, false
}

// maxWaits bounds the slots in a status frame. Each takes slotBits: its number plus one.
const (
	maxWaits = 3
	slotBits = 21
)

func packSlots(slots []int) (packed uint64) {
	for i, s := range slots[:min(len(slots), maxWaits)] {
		packed |= uint64(s+1) << (i * slotBits)
	}
	return packed
}

// Announce tells every linked member that this rank has waited in operation t for slots for long.
// Members that link up later are told then. Only the first three slots are sent. A repeated
// announcement is not sent again.
func (c *Channel) Announce(t Token, slots []int) {
	packed := packSlots(slots)
	if c.told == t && c.toldWaits == packed {
		return
	}
	c.told, c.toldWaits = t, packed
	for pr := range c.linked() {
		c.status(pr)
	}
}

// Retract takes back what this rank has announced: it does not wait any more. On a channel that has
// failed, the last announcement remains: a peer whose time is up looks at it.
func (c *Channel) Retract() {
	if c.told.Seq != 0 && c.err == nil {
		c.Announce(Token{}, nil)
	}
}

// status sends the last announcement to the peer.
func (c *Channel) status(pr *peer) {
	c.control(pr, Header{Kind: frameStatus, Seq: c.told.Seq, Call: c.told.Call, Count: c.told.Count,
		Off: c.toldWaits}, nil)
}

// WaitsFor returns the slots that the rank in slot waits for, as it announced in operation t, or in
// an earlier one, if it has sent nothing of a later one since; false if it has announced nothing,
// or has taken it back.
func (c *Channel) WaitsFor(slot int, t Token) (slots []int, ok bool) {
	st := c.fast[slot]
	if st == nil || st.waits != t &&
		(st.waits.Seq == 0 || st.waits.Seq >= t.Seq || st.seen.Seq > max(st.waits.Seq, st.before)) {
		return nil, false
	}
	for packed := st.waitFor; packed != 0; packed >>= slotBits {
		if s := int(packed&(1<<slotBits-1)) - 1; s >= 0 && s < len(c.ranks) {
			slots = append(slots, s)
		}
	}
	return slots, true
}

// Abort fails the channel and tells every linked member. Members that link up later are told then.
// The channel keeps payload (at most MaxAbort bytes).
func (c *Channel) Abort(cause error, payload []byte) {
	if c.aborted == nil {
		c.aborted = payload
		if c.aborted == nil {
			c.aborted = []byte{}
		}
		for pr := range c.linked() {
			c.control(pr, Header{Kind: frameAbort, Len: uint32(len(payload))}, payload)
		}
		c.p.drain()
	}
	c.fail(cause)
}

// Fail fails the channel on this rank only: its waits return err. With the lock.
func (c *Channel) Fail(err error) { c.fail(err) }

func (c *Channel) fail(err error) {
	if c.err == nil {
		c.err = err
		c.p.wakeAll()
	}
}

// Close ends the channel: peers are told, pending operations fail with ErrClosed, later frames are
// dropped. A peer whose link comes up later is told as well, when it uses the channel: that it is
// closed, and what it was aborted with. Takes the lock itself.
func (c *Channel) Close() {
	c.p.Lock()
	defer c.p.Unlock()
	if f, known := c.p.floors[c.name]; !known || f.closed || c.p.closed {
		return
	}
	for pr := range c.linked() {
		c.control(pr, Header{Kind: frameBye}, nil)
	}
	c.p.owes = c.owes() || c.p.owes && len(c.p.delivering()) > 0
	c.fail(ErrClosed)
	c.retire()
	if f := c.ended(); f.ended == nil && c.places != nil {
		delete(c.p.floors, c.name) // see Open
	} else {
		f.closed = true
		c.p.floors[c.name] = f
		c.p.remember(c)
	}
	for key, o := range c.p.chans {
		if key.name == c.name {
			o.retire()
		}
	}
}

// maxFailed bounds the closed channels with places of which this rank remembers how they failed.
const maxFailed = 1024

// remember notes that the floor of a closed channel remains. It forgets that of the oldest such
// channel if there are too many. Peers that still come to that one are told that it is closed: see
// settled.
func (p *Proxy) remember(c *Channel) {
	if c.places == nil { // settled does not know the name
		return
	}
	p.failed = append(p.failed, c.name)
	if len(p.failed) > maxFailed {
		delete(p.floors, p.failed[0])
		p.failed = p.failed[1:]
	}
}

// OnLeft sets what is called when a peer closes or aborts the channel, each time that a peer says
// so. It is not called for what was said before. Polling goroutines call f with the lock; f must
// not block.
func (c *Channel) OnLeft(f func(slot int)) { c.misses = f }

// miss says that the peer has closed or aborted the channel.
func (c *Channel) miss(st *stream) {
	if c.misses != nil && st.slot >= 0 {
		c.misses(st.slot)
	}
}

// linked yields the members with a link.
func (c *Channel) linked() iter.Seq[*peer] {
	return func(yield func(*peer) bool) {
		for _, r := range c.ranks {
			if r >= 0 && c.p.peers[r].link != nil && !yield(&c.p.peers[r]) {
				return
			}
		}
	}
}

// owes reports whether peers may have to receive something that was sent to them: the channel was
// not aborted.
func (c *Channel) owes() bool {
	if c.aborted != nil {
		return false
	}
	for _, st := range c.streams {
		if st.sent != 0 {
			return true
		}
	}
	return false
}

// uncount takes c, which is not open, from what its users may use at a time.
func (c *Channel) uncount() {
	for _, st := range c.streams {
		st.pr.unopened--
	}
}

// quit drops what a peer has sent on c, which is not open, because its incarnation is over.
func (c *Channel) quit(pr *peer) {
	st := c.streams[pr.rank]
	switch {
	case st == nil:
	case len(c.streams) == 1:
		c.retire()
	default:
		st.clear()
		delete(c.streams, pr.rank)
		pr.unopened--
	}
}

// retire removes c from the proxy's tables.
func (c *Channel) retire() {
	if c.ranks == nil {
		c.uncount()
	}
	c.Forget()
	for _, st := range c.streams {
		st.clear()
		if st.pr.st == st { // drops a frame that is still arriving
			st.pr.st = nil
		}
		st.unqueue()
		st.pr.bulk = slices.DeleteFunc(st.pr.bulk, func(s *SendReq) bool { return s.st == st })
		if pr := st.pr; pr.link != nil && st.on == pr.linkNo { // no later frame uses the number before
			pr.free = append(pr.free, st.out)
		}
		if pr := st.pr; pr.link != nil && st.from == pr.linkNo && pr.in[st.in].st == st {
			pr.in[st.in].st = nil
		}
	}
	c.retired = true
	delete(c.p.chans, c.chanKey)
}

// clear drops the frames that no receive has matched.
func (st *stream) clear() {
	for _, e := range st.early {
		if e.filled {
			st.c.p.pool.put(e.buf)
		}
	}
	st.early, st.held = nil, 0
}

// sever ends the traffic with a peer whose link went down: messages under way are lost, and so are
// those that were announced. Messages that have arrived completely may still be received.
func (c *Channel) sever(st *stream, err error) {
	st.lost, c.follows.doubt = err, true
	if n := len(st.early); n > 0 && !st.early[n-1].filled {
		st.early = st.early[:n-1] // the proxy filled its buffer
	}
	st.early = slices.DeleteFunc(st.early, func(e *early) bool { return e.h.Kind == frameRTS })
	gone := &PeerError{st.pr.rank, err}
	if st.posted.size > 0 { // the operation cannot succeed, whichever peer it waits for now
		c.fail(gone)
	}
	for _, r := range c.recvs {
		if r.st == st {
			c.failRecv(r, gone)
		}
	}
	for _, s := range st.sendq {
		s.err = gone
	}
	for id, s := range c.sends {
		if s.st == st {
			s.err = gone
			delete(c.sends, id)
		}
	}
	st.sendq = nil
}

// errSevered says that a peer's traffic of this epoch has ended with an earlier link.
var errSevered = fmt.Errorf("%w; operations with it work again after a recovery", ErrLost)

// severed ends the traffic with a peer where it has ended with an earlier link. If this rank had
// none then, sever has not ended it here. The lane of a channel that is not open is not known: open
// takes this back if it is the tagged one.
func (c *Channel) severed(st *stream) {
	if c.tagged {
		return
	}
	if st.lost == nil {
		st.lost = errSevered
	}
	if st.posted.size > 0 { // as in sever
		c.fail(st.gone())
	}
}

// renew begins the traffic with a peer over a new link, with new credits. Lost messages of an
// ordered channel stay lost; attach tells the peer. Tagged messages that have come whole may still
// be received if the link is with the same incarnation.
func (c *Channel) renew(st *stream, same bool) {
	fresh := stream{c: c, pr: st.pr, slot: st.slot, sendq: st.sendq, followed: st.followed, notices: st.notices}
	if !c.tagged {
		fresh.lost = st.lost
	}
	if same {
		fresh.early = st.retain()
		fresh.begun, fresh.came = st.begun, st.came
	}
	st.clear()
	*st = fresh
}

// retain takes from st the early tagged messages that outlive their link. No credit bounds them any
// more: what exceeds a window is lost.
func (st *stream) retain() []*early {
	n := 0
	for size := 0; n < len(st.early); n++ {
		e := st.early[n]
		if size += int(cost(len(e.buf))); e.h.Kind == frameData || size > st.c.window {
			break
		}
		e.paid = true
	}
	kept := st.early[:n:n]
	st.early = st.early[n:]
	for _, e := range st.early {
		if e.h.Kind == frameEager || e.h.Kind == frameBegun { // so that the new link finds a loss
			st.came--
		}
	}
	return kept
}

// Forget withdraws all receives of the ordered lane: afterwards the proxy uses none of their
// buffers. A failed operation ends with it.
func (c *Channel) Forget() {
	for _, st := range c.streams {
		st.part = 0
		for st.posted.size > 0 {
			r := st.posted.front()
			st.posted.pop()
			c.drop(r)
		}
		if r := st.pr.lent; r != nil && r.st == st {
			c.drop(r)
		}
	}
}

// drop detaches r from its link: the rest of its message is discarded.
func (c *Channel) drop(r *Recv) {
	pr := r.st.pr
	if pr.lent == r {
		c.p.returnLent(pr)
	}
	if pr.target == r {
		pr.target, pr.dst = nil, nil
	}
	r.buf, r.view, r.done = nil, nil, false
}

// PostRecv posts buf for the next message from slot. It does not block. lend allows the message to
// stay in the link's memory (see View); buf must be valid in any case. r and buf belong to the
// proxy until r is done and released, or Forget.
func (c *Channel) PostRecv(r *Recv, slot int, tok Token, buf []byte, lend bool) {
	st := c.fast[slot]
	if st == nil {
		st = c.stream(slot)
	}
	*r = Recv{st: st, buf: buf, tok: tok, lend: lend}
	st.posted.push(r)
	for len(st.early) > 0 && st.early[0].filled && st.posted.size > 0 && c.err == nil {
		c.p.takeEarly(st)
	}
	if st.posted.size > 0 && (st.lost != nil || st.left || st.pr.err != nil) { // as in sever
		c.fail(st.gone())
	}
}

// accepts checks that a frame continues r's message. If it does not, the channel fails.
func (c *Channel) accepts(r *Recv, h *Header) bool {
	if h.Flags&flagHint != 0 {
		c.hint = true
	}
	if h.Seq != r.tok.Seq || h.Call != r.tok.Call || h.Count != r.tok.Count {
		c.fail(&Disagreement{Rank: r.st.slot, Theirs: Token{h.Seq, h.Call, h.Count}, Ours: r.tok})
		return false
	}
	end := r.got + int(h.Len)
	if h.Off != uint64(r.got) || end > len(r.buf) || (end == len(r.buf)) != (h.Flags&flagLast != 0) {
		c.fail(&Disagreement{Rank: r.st.slot, Theirs: r.tok, Ours: r.tok,
			Detail: fmt.Sprintf(": a message of %d bytes was expected, it has another length", len(r.buf))})
		return false
	}
	return true
}

// advance accounts for a frame that was added to r.
func (c *Channel) advance(r *Recv, h *Header) {
	r.got += int(h.Len)
	if h.Flags&flagLast != 0 {
		r.done, r.view = true, r.buf
		r.st.posted.pop()
		c.came++
	}
}

// compare checks the operation of a message for which no receive is posted yet.
func (c *Channel) compare(st *stream, h *Header) {
	if h.Kind != frameData || c.now.Seq == 0 {
		return
	}
	theirs := Token{h.Seq, h.Call, h.Count}
	if h.Seq < c.now.Seq || h.Seq == c.now.Seq && theirs != c.now {
		c.fail(&Disagreement{Rank: st.slot, Theirs: theirs, Ours: c.now})
	}
}

// compareWait checks the operation in which a peer announced that it waits. It detects calls that
// differ although no message passes, for example when each of two ranks takes the other for the
// root of a gather. A peer that waits in a later operation has sent all its messages of this one.
func (c *Channel) compareWait(st *stream) {
	if c.now.Seq == 0 || c.err != nil {
		return
	}
	r := st.posted.front()
	if st.waits.Seq == c.now.Seq && st.waits != c.now || r != nil && r.tok == c.now && st.waits.Seq > c.now.Seq &&
		len(st.early) == 0 {
		c.fail(&Disagreement{Rank: st.slot, Theirs: st.waits, Ours: c.now})
	}
}

// View returns r's message once it is done: in r's buffer, or lent by the link until ReleaseRecv.
func (r *Recv) View() []byte { return r.view }

// ReleaseRecv returns a lent message. It does nothing for a message in r's buffer.
func (c *Channel) ReleaseRecv(r *Recv) {
	if pr := r.st.pr; pr.lent == r {
		r.view = nil
		c.p.returnLent(pr)
	}
}

// WaitRecv blocks until r is done. It polls r's link most often.
func (c *Channel) WaitRecv(w *Wait, r *Recv) error {
	for !r.done {
		if err := c.PollRecv(w, r); err != nil {
			return err
		}
	}
	return nil
}

// PollRecv is a round of WaitRecv: it returns when something may have changed.
func (c *Channel) PollRecv(w *Wait, r *Recv) error {
	if c.err != nil {
		return c.err
	}
	pr := r.st.pr
	if err := r.st.gone(); err != nil {
		return err
	}
	if r.st.until != 0 {
		if err := r.st.leaves(r.tok.Seq); err != nil {
			return err
		}
	}
	if pr.lent != nil {
		c.p.unlend(pr) // an earlier loan blocks the message that is needed now
	}
	if c.p.rush(w, pr) {
		if !r.done {
			c.p.Moved(0)
		}
		return nil
	}
	return c.p.progress(w, pr)
}

// Send sends buf to slot as one message. It blocks until the link has taken all of it; then buf may
// be reused. After ErrSuspended the message may have been sent in part; the next Send to slot must
// send the same message, and sends the rest.
func (c *Channel) Send(w *Wait, slot int, tok Token, buf []byte) error {
	for {
		if sent, err := c.SendSome(slot, tok, buf); sent || err != nil {
			if err == nil {
				w.calm()
			}
			return err
		}
		if err := c.PollSend(w, slot); err != nil {
			return err
		}
	}
}

// PollSend is the waiting of Send between two calls of SendSome.
func (c *Channel) PollSend(w *Wait, slot int) error { return c.p.progress(w, c.stream(slot).pr) }

// A message travels in frames of frameBytes, so that its receiver takes the first part while the
// next is sent, and ranks that send to each other receive meanwhile. A message of longMessage bytes
// or more to a peer of which nothing is expected travels in frames as long as the link takes, with
// fewer system calls.
const (
	frameBytes  = 512 << 10
	longMessage = 2 << 20
)

// grain returns the bytes of a frame of a message of n bytes. The peer's link must be up.
func (st *stream) grain(n int) int {
	most := min(st.pr.link.MaxFrame(), st.c.window/4)
	if n < longMessage || st.posted.size > 0 {
		most = min(most, frameBytes)
	}
	return most
}

// SendSome is Send as far as that needs no waiting. It reports whether the link has taken all of
// buf. If not, the next message to slot must be the same, and its rest is sent.
func (c *Channel) SendSome(slot int, tok Token, buf []byte) (sent bool, err error) {
	st := c.fast[slot]
	if st == nil {
		st = c.stream(slot)
	}
	pr := st.pr
	h := Header{Kind: frameData, Seq: tok.Seq, Call: tok.Call, Count: tok.Count}
	off := st.part
	st.part = 0
	for {
		if c.err != nil {
			return false, c.err
		}
		if err := st.unreachable(); err != nil {
			return false, c.last(pr, err)
		}
		if err := st.leaves(tok.Seq); err != nil {
			return false, err
		}
		if pr.link == nil {
			break
		}
		n := min(len(buf)-off, st.grain(len(buf)))
		h.Len, h.Off, h.Flags = uint32(n), uint64(off), 0
		if off+n == len(buf) {
			h.Flags = flagLast
		}
		if c.hint {
			h.Flags |= flagHint
		}
		if !c.push(st, &h, buf[off:off+n], c.bypass) {
			if pr.lent != nil { // its credit may be queued behind the loan
				c.p.unlend(pr)
			}
			break
		}
		c.p.moved += n
		if off += n; h.Flags&flagLast != 0 {
			return true, nil
		}
		c.p.Moved(0)
	}
	st.part = off
	return false, nil
}

// last reads the peer's last frames. If they say why the peer left, it returns that, else err.
func (c *Channel) last(pr *peer, err error) error {
	for more := true; more; more = c.p.poll(pr) {
		c.p.unlend(pr) // those behind it are read, too
	}
	if c.err != nil {
		return c.err
	}
	return err
}

// push transmits one frame that counts against the credit, if credit and room allow.
func (c *Channel) push(st *stream, h *Header, payload []byte, past bool) bool {
	n := cost(len(payload))
	if c.retired || st.sent+n-st.acked > uint32(c.window) {
		return false
	}
	h.Chan, h.Ack = c.p.number(st), st.taken
	if len(st.pr.ctl) > 0 {
		return false
	}
	if !c.p.transmit(st.pr, h, payload, past) {
		return false
	}
	st.sent += n
	st.told = st.taken
	return true
}

// repay returns credit to the peer before it runs low.
func (p *Proxy) repay(st *stream) {
	if st.taken-st.told >= uint32(st.c.window)/2 && st.pr.link != nil {
		st.c.control(st.pr, Header{Kind: frameCredit}, nil)
	}
}

// Ledger is the credit account of a channel with one peer, in cost units (bytes, and 64 a frame),
// since the beginning and wrapping. Sent-Acked is in flight (never more than Window). Held has
// arrived and waits for a receive (never more than Window), Taken has been received, and Told is
// the part of Taken that the peer knows of. When the links are empty, one end's Sent is the other's
// Taken plus Held.
type Ledger struct {
	Window            int
	Sent, Acked       uint32
	Taken, Told, Held uint32
}

// Ledger returns the account with slot. Takes the lock itself.
func (c *Channel) Ledger(slot int) Ledger {
	c.p.Lock()
	defer c.p.Unlock()
	st := c.stream(slot)
	return Ledger{c.window, st.sent, st.acked, st.taken, st.told, uint32(st.held)}
}

// Map returns region id of slot, mapped for loads, when the peer has answered. The caller releases
// it. The error is a *PeerError, why the channel failed, or why w has ended. It is none of these,
// and the peer is as before, if it wraps errors.ErrUnsupported (the link maps nothing) or
// ErrShortage (this process lacks a descriptor or memory). With the lock, which it releases while
// it waits.
func (c *Channel) Map(w *Wait, slot int, id uint64) (*Mapping, error) {
	st := c.stream(slot)
	pr := st.pr
	for {
		if c.err != nil {
			return nil, c.err
		}
		if err := st.gone(); err != nil {
			return nil, err
		}
		if pr.lent != nil {
			c.p.unlend(pr) // the loan blocks frames that say why the peer is gone
		}
		if pr.link != nil {
			l, ok := pr.link.(Mapper)
			if !ok {
				return nil, fmt.Errorf("mapping memory of rank %d over %s: %w", pr.rank, pr.counts.transport,
					errors.ErrUnsupported)
			}
			m, err := l.Map(id)
			switch {
			case errors.Is(err, ErrPeerGone) || errors.Is(err, ErrClosed): // polling takes the link down
			case errors.Is(err, ErrShortage) || errors.Is(err, errors.ErrUnsupported):
				return nil, fmt.Errorf("mapping memory of rank %d: %w", pr.rank, err)
			case err != nil:
				return nil, &PeerError{pr.rank, fmt.Errorf("mapping its memory: %w", err)}
			case m != nil:
				return m, nil
			}
		}
		if err := c.p.progress(w, pr); err != nil {
			return nil, err
		}
	}
}

// ProcessReader returns the link to slot if plain memory of its process can be read over it, else
// nil. With the lock; the result is used without it.
func (c *Channel) ProcessReader(slot int) ProcessReader {
	if l, ok := c.stream(slot).pr.link.(ProcessReader); ok && l.ReadsProcess() {
		return l
	}
	return nil
}

// WaitLeft waits for the reason why the rank in slot left operation seq before its end: an abort, a
// close, another epoch, or a link that went down. It returns that, or why w has ended. With the
// lock, which it releases while it waits.
func (c *Channel) WaitLeft(w *Wait, slot int, seq uint64) error {
	st := c.stream(slot)
	for {
		if c.err != nil {
			return c.err
		}
		if err := st.gone(); err != nil {
			return err
		}
		if err := st.leaves(seq); err != nil {
			return err
		}
		if st.pr.lent != nil {
			c.p.unlend(st.pr) // the loan blocks the reason
		}
		if err := c.p.progress(w, st.pr); err != nil {
			return err
		}
	}
}
