package pg

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"tutti/collectives"
	"tutti/device"
	"tutti/mem"
	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
	"tutti/pg/internal/join"
)

// Short vectors in the memory of devices are combined and exchanged by the devices alone, in
// packets: a kernel of each rank stores what the rank has into memory of the others, and combines
// what it got (device.Exchange). The hosts send no messages for them. It is done in groups of which
// every rank had a device.Exchanger when it joined, and which is on one machine, so that all ranks
// decide alike; a short collective (see shortest) is then in the memory of devices at all ranks, or
// at none.
//
// The kernel of a started operation goes to its stream in Start, that of a blocking call when it
// has the turn. So kernels of one group run in the order of the operations, and one that streams
// wait for is in its stream before their work is: streams may share a queue of the device. The
// operation itself has its place in the order of the group's operations, and its turn ends when
// the kernel has. If it fails, for whatever reason, the exchange is stopped: a word lets all
// kernels of the group end without a result. So it is when the group leaves the view, is aborted
// or closed. The exchange is freed when the kernels of this rank have ended then, unless a graph
// may repeat them.
//
// The ranks make an exchange when the first such operation of a view is called, by two exchanges
// of messages, for which the call waits: all of them have the memory of all others then, or none
// uses it, and such operations go through the host from then on, in all views. So a rank that calls
// an operation in one view, and another rank that calls it in the next, do not choose different
// ways. Where a started operation has its turn in a later view than its kernel, it fails, and says
// so to the other ranks, which may be making the exchange of that view instead.
//
// A stream that records its work gets the kernel of any collective whose ranks have parts of equal
// length, of any length, and nothing else, and the operation is over: it has no place in the order
// of operations. The launches of the graph do have one among each other and among the group's other
// operations in packets, which the program keeps the same at all ranks, and apart in time as the
// stream of a rank does. A kernel of a graph waits for Config.Timeout at most, and for a moment
// after a rank has left the group or the view, as in Recover, or is lost and cannot be removed.
// What it has failed with is the error of the group's next operation. The exchange of a former view
// is stopped, so that a graph from there ends without a result, and the next operation says that it
// has to be captured again.

// packets is a group's state of its exchanges. All fields are under the proxy's lock.
type packets struct {
	now     *exchange   // of the view; nil: not made, or refused
	refused error       // why operations go through the host, in this view and all later ones
	former  []*exchange // of views before, that graphs may repeat: see exchange.kept
}

// An exchange is a device.Exchange of a group's view.
type exchange struct {
	device.Exchange
	inboxes []device.Shared // of the other ranks
	loc     Location
	epoch   uint64
	active  []int // the slots of the ranks
	// Under the proxy's lock.
	recording int         // calls of Group.record under way
	recorded  bool        // a stream has recorded work
	stops     *time.Timer // which stops it: see Group.orphan; nil: no rank has left it
	left      int         // the slot that has left it first
	why       error       // of that: errDeserted, p2p.ErrLeft, or why the rank cannot be reached
	// Kernels of operations that have not been settled. What they fail with is their operation's.
	live atomic.Int32
	// The first failure is that of an operation, or was reported; operations that the device has
	// not come to look like graphs.
	reported, blind atomic.Bool
}

// failed is Failure with slots of the group as ranks.
func (x *exchange) failed() (*device.ExchangeError, bool) {
	why, again := x.Failure()
	if why == nil {
		return nil, again
	}
	slots := *why
	for _, rank := range []*int{&slots.Rank, &slots.Ours.Root, &slots.Theirs.Root} {
		*rank = x.active[min(*rank, len(x.active)-1)]
	}
	return &slots, again
}

// A launch is the kernel of a visit.
type launch struct {
	x       *exchange
	call    device.ExchangeCall
	number  atomic.Uint64 // of the call of the exchange; 0: none yet
	given   atomic.Bool   // to the stream
	settled atomic.Bool   // the operation knows its outcome
}

// failure returns why the kernel has no result, nil if it has one or has not ended. The exchange
// knows only what has failed first; kernels before that have ended well.
func (l *launch) failure() *device.ExchangeError {
	why, _ := l.x.failed()
	if why != nil && l.number.Load() < why.Number {
		return nil
	}
	return why
}

// settle says that the operation knows what the kernel has ended with, if it has.
func (l *launch) settle() {
	if l.given.Load() && !l.settled.Swap(true) {
		l.x.live.Add(-1)
	}
}

// short reports whether the devices do the call. With the proxy's lock.
func (g *Group) short(c *exec.Call, d device.Device) bool {
	_, able := d.(device.Exchanger)
	n := c.Bytes(g.v.Size)
	return able && len(g.v.Active) > 1 && n > 0 && n <= shortest(c.Kind)
}

// shortest returns the most bytes of a collective that the devices do: 0 for kinds that they do in
// graphs only.
func shortest(k collectives.Kind) int {
	switch k {
	case collectives.AllReduce:
		return device.ShortVector
	case collectives.AllGather, collectives.ReduceScatter, collectives.AllToAll:
		return collectives.LoadStoreMin(k) - 1
	}
	return 0
}

// fits reports whether a call's parts are as many as the slots of the view. They are more after the
// group has grown since the call was checked: then it fails as one of the hosts.
func (v *groupView) fits(c *exec.Call) bool {
	l := c.Kind.Layout()
	return c.Slots == v.Size || !l.In.Parted() && !l.Out.Parted()
}

// packetVisit begins the visit of an operation in packets. It returns nil if such operations go
// through the host, or the call does not fit the view any more. ctx bounds the making of an
// exchange.
func (g *Group) packetVisit(ctx context.Context, c *exec.Call, d device.Device, s device.Stream, waits bool) (*visit,
	error) {
	p := g.job.proxy
	p.Lock()
	x, refused := g.packets.now, g.packets.refused
	made := (x != nil || refused != nil) && !g.rough
	barred, unfit := g.barred(), made && !g.v.fits(c)
	p.Unlock()
	switch {
	case barred != nil:
		return &visit{unfit: &unfitError{barred}}, nil
	case unfit:
		return nil, nil
	}
	var err error
	if !made {
		if x, err = g.connect(ctx, c, d.(device.Exchanger), d.Location()); err != nil {
			return nil, err
		}
	}
	switch {
	case x == nil:
		return nil, nil
	case x.loc != d.Location():
		return nil, g.elsewhere(c, x, d)
	}
	v := &visit{stream: s, launch: &launch{x: x, call: exchangeCall(c, x.active, g.rank, x.loc)}}
	if s == nil {
		switch v.own, err = g.devices.waitingStream(d); {
		case errors.Is(err, ErrClosed):
			return nil, err
		case err != nil:
			return &visit{unfit: &unfitError{err}}, nil
		}
		v.stream = v.own.Stream
	}
	if !waits {
		_ = v.launchNow() // what it fails with is the operation's error, in its turn
	}
	return v, nil
}

// elsewhere is the error of an operation on another device than that of the exchange.
func (g *Group) elsewhere(c *exec.Call, x *exchange, d device.Device) error {
	return &ArgumentError{Call: c.Kind.String(), Arg: "a buffer's location", Got: string(d.Location()),
		Want: fmt.Sprintf("%q, where this rank's short collectives began in this view", x.loc)}
}

// exchangeCall returns c as the rank in slot does it in an exchange of the slots of active, with
// memory at loc.
func exchangeCall(c *exec.Call, active []int, slot int, loc Location) device.ExchangeCall {
	at := func(ptr unsafe.Pointer, n int) (m mem.Memory) {
		if n > 0 {
			m = mem.Device(uint64(uintptr(ptr)), n, loc)
		}
		return m
	}
	in, out, _, _ := c.Extents(slot, c.Slots)
	return device.ExchangeCall{Kind: c.Kind, Op: c.Op, DType: c.DType, Root: slices.Index(active, c.Root),
		Count: c.Count, Parts: active, Dst: at(c.Out, out), Src: at(c.In, in)}
}

// capturing reports whether a stream, nil if there is none, records its work.
func capturing(s device.Stream) (bool, error) {
	if r, ok := s.(device.Capturer); ok {
		return r.Capturing()
	}
	return false, nil
}

// record has a stream record an operation, of any length: the exchange is the only way in which
// devices do one again without the hosts.
func (g *Group) record(c *exec.Call, d device.Device, s device.Stream, limit time.Duration, waits bool) error {
	what := fmt.Sprintf("%v on a stream that is being captured", c.Kind)
	refuse := func(why string) error { return fmt.Errorf("%s: %s: %w", what, why, errors.ErrUnsupported) }
	if waits {
		return refuse("it cannot be waited for, so it has to be started")
	}
	even, ok := evenly(*c)
	if !ok {
		return refuse("parts of different lengths cannot be repeated without the hosts")
	}
	c = &even
	p := g.job.proxy
	p.Lock()
	x, v, refused, err := g.packets.now, g.v, g.packets.refused, g.barred()
	has := false
	if x != nil {
		x.recording++
		defer func() { g.endRecording(x, has) }()
	}
	p.Unlock()
	call := exchangeCall(c, v.Active, g.rank, d.Location())
	l := c.Kind.Layout()
	switch {
	case err != nil:
		return err
	case call.Root < 0 && (l.InAtRoot || l.OutAtRoot):
		return &RankError{Rank: c.Root, Epoch: v.epoch, Call: what, Reporter: g.rank, in: g.in, Err: p2p.ErrPeerGone}
	case len(v.Active) == 1:
		return recordAlone(s.(device.Capturer), &call)
	case x == nil:
		why := "none was made"
		if refused != nil {
			why = refused.Error()
		}
		return refuse(fmt.Sprintf("the ranks have no exchange in this view (%s): run an allreduce of up to %d bytes "+
			"in the memory of GPUs once before the capture", why, device.ShortVector))
	case x.loc != d.Location():
		return g.elsewhere(c, x, d)
	}
	_, err = x.Do(s, call, limit)
	has = err == nil
	return err
}

// endRecording ends a call of record; has: the stream has recorded its work. The exchange may have
// been ended meanwhile, and is freed if no graph may repeat work of it.
func (g *Group) endRecording(x *exchange, has bool) {
	g.job.proxy.Lock()
	defer g.job.proxy.Unlock()
	x.recording--
	x.recorded = x.recorded || has
	if has && g.job.roster == nil && !g.closed.Load() {
		g.job.attend()
	}
	if i := slices.Index(g.packets.former, x); i >= 0 && !x.kept() {
		g.packets.former = slices.Delete(g.packets.former, i, i+1)
		g.job.retire(x.Exchange, x.inboxes)
	}
}

// orphan handles that a rank does no more work of the exchange, and why: it has closed or aborted
// the group (errDeserted), has left the view or is in Recover (p2p.ErrLeft), or is lost. What it
// has a result of was under way at all others when it left, and ends well there. So grace is enough
// for that, and what waits after it waits in vain. With the proxy's lock.
func (g *Group) orphan(slot int, why error) {
	if g.halted() != nil { // an abort has ended the exchange
		return
	}
	if x := g.packets.now; x != nil && x.stops == nil && slices.Contains(x.active, slot) {
		x.left, x.why, x.stops = slot, why, time.AfterFunc(grace, x.Stop)
	}
}

// kept reports whether a graph repeats work of the exchange, or may be about to. With the proxy's
// lock.
func (x *exchange) kept() bool { return x.recorded || x.recording > 0 }

// evenly returns c as a collective whose parts are of equal length. It reports false if they are
// not.
func evenly(c exec.Call) (exec.Call, bool) {
	for _, n := range append(slices.Clip(c.Counts), c.RecvCounts...) {
		if n != c.Counts[0] {
			return c, false
		}
	}
	switch c.Kind {
	case collectives.AllGatherV:
		c.Kind, c.Count = collectives.AllGather, c.Counts[0]
	case collectives.AllToAllV:
		c.Kind, c.Count = collectives.AllToAll, c.Counts[0]
	}
	c.Counts, c.RecvCounts = nil, nil
	return c, true
}

// recordAlone has a stream record an operation of a view of this rank alone.
func recordAlone(s device.Capturer, c *device.ExchangeCall) error {
	l, n := c.Kind.Layout(), c.Count*c.DType.Size()
	if dst, src := c.Lengths(0); dst == 0 || src == 0 {
		return nil
	}
	part := func(m mem.Memory, e collectives.Extent) mem.Memory {
		if e.Parted() {
			return m.Slice(n*c.Parts[0], n)
		}
		return m.Slice(0, n)
	}
	return s.RecordCopy(part(c.Dst, l.Out), part(c.Src, l.In))
}

// waitingStream returns a stream of the group at d, in which kernels wait for other ranks.
func (x *devices) waitingStream(d device.Device) (*ownStream, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.closed {
		return nil, ErrClosed
	}
	return x.streamLocked(&x.waiting, d)
}

// launchNow gives the stream the kernel. The kernel has no time limit, since it may come to the
// device long before the operation has the turn: what ends the operation stops the exchange.
func (v *visit) launchNow() error {
	v.mu.Lock()
	defer v.mu.Unlock()
	l := v.launch
	l.x.live.Add(1)
	l.given.Store(true)
	v.give(func(s device.Stream) error {
		number, err := l.x.Do(s, l.call, 0)
		l.number.Store(number)
		return err
	}, v.record)
	return v.err
}

// running reports whether the stream has the kernel and has not done it.
func (v *visit) running() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.launch.given.Load() && v.err == nil && v.event != nil && !v.event.Done()
}

// A rank sends two messages to make an exchange: its inbox, and whether it has mapped those of the
// others. Each is, little-endian,
//
//	0 the view that the rank makes it in | 8 the attempt | 16 which message, 1 or 2
//	24 length of the key | 32 offset | 40 the key, or why it has none; of the second, why it has
//	not mapped all, ending with zeros
const (
	messageView    = 0
	messageAttempt = 8
	messageStage   = 16
	messageHead    = 24 // what is before is the same at all ranks
	messageKey     = 24
	messageOffset  = 32
	messageText    = 40
	messageSize    = messageText + 320
)

// connect makes the exchange of this view for a call, at all ranks alike: nil if one of them
// cannot. If the view changes before all ranks have made it, they begin again. If it changes after
// that, or the group ends, the exchange is one that has stopped.
func (g *Group) connect(ctx context.Context, c *exec.Call, d device.Exchanger, loc Location) (*exchange, error) {
	for {
		if err := g.step(ctx, c); err != nil {
			return nil, err
		}
		p := g.job.proxy
		p.Lock()
		v, at, places := g.v, g.sync.At(), g.job.places
		x, refused := g.packets.now, g.packets.refused
		p.Unlock()
		switch {
		case !v.fits(c):
			return nil, nil
		case x != nil || refused != nil:
			return x, nil
		}
		made, bad := g.newExchange(ctx, d, v)
		mine := make([]byte, messageSize)
		binary.LittleEndian.PutUint64(mine[messageView:], at.View)
		binary.LittleEndian.PutUint64(mine[messageAttempt:], at.Attempt)
		mine[messageStage] = 1
		if bad == nil {
			var key []byte
			var offset uint64
			if key, offset, bad = made.Inbox(); bad == nil {
				binary.LittleEndian.PutUint64(mine[messageKey:], uint64(len(key)))
				binary.LittleEndian.PutUint64(mine[messageOffset:], offset)
				copy(mine[messageText:], key)
			}
		}
		if bad != nil {
			copy(mine[messageText:], bad.Error())
		}
		all, err := g.exchangeBytes(ctx, mine, c, 0)
		if err != nil {
			g.job.retire(made, nil)
			return nil, err
		}
		if !alike(all, mine[:messageHead], v.Active) {
			g.job.retire(made, nil)
			continue
		}
		var inboxes []device.Shared
		why := refusal(all, v.Active, func(b []byte) bool { return binary.LittleEndian.Uint64(b[messageKey:]) == 0 })
		if why == nil {
			clear(mine[messageHead:])
			mine[messageStage] = 2
			if inboxes, err = g.openInboxes(d, made, v, places, all); err != nil {
				copy(mine[messageText:], err.Error())
			}
			if all, err = g.exchangeBytes(ctx, mine, c, 1); err != nil {
				g.job.retire(made, inboxes)
				return nil, err
			}
			if !alike(all, mine[:messageHead], v.Active) {
				g.job.retire(made, inboxes)
				continue
			}
			why = refusal(all, v.Active, func(b []byte) bool { return b[messageText] != 0 })
		}
		p.Lock()
		defer p.Unlock()
		if why != nil {
			g.job.retire(made, inboxes)
			g.refuse(why)
			return nil, nil
		}
		x = &exchange{Exchange: made, inboxes: inboxes, loc: loc, epoch: v.epoch, active: v.Active}
		if g.sync.At() == at && g.halted() == nil {
			g.packets.now = x
			for _, slot := range x.active { // what was said before is not said again
				if down := p.Down(g.jobRank(slot)); g.job.roster == nil && down != nil {
					g.orphan(slot, down)
				}
				if g.msgs.Closed(slot) {
					g.orphan(slot, errDeserted)
				}
				if t, ok := g.sync.Heard(slot); ok && at.Before(t.At) {
					g.orphan(slot, p2p.ErrLeft)
				}
			}
		} else { // other ranks may have begun the operation
			g.end(x)
		}
		return x, nil
	}
}

// newExchange makes this rank's part of an exchange. The device may be doing what the program has
// given it before, as long as for a peer, unless the group ends.
func (g *Group) newExchange(ctx context.Context, d device.Exchanger, v *groupView) (made device.Exchange, err error) {
	ctx, end := limited(ctx, g.job.timeout)
	defer end()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		made, err = d.NewExchange(ctx, slices.Index(v.Active, g.rank), len(v.Active))
	}()
	_ = g.hold(ctx, nil, func() (bool, error) { // what the group ended with is the error of the next step
		select {
		case <-done:
			return true, nil
		default:
			return false, nil
		}
	})
	cancel()
	<-done
	return made, err
}

// retire frees an exchange that no stream has recorded, nil if there is none, and unmaps its
// inboxes, when the streams of this rank have ended its work. It does not wait. If the job is
// closed before, and the work has not ended for a while, they stay until the device is closed.
func (j *job) retire(made device.Exchange, inboxes []device.Shared) {
	if made == nil {
		return
	}
	j.unmapping.Go(func() {
		if err := made.Free(j.retiring); err != nil {
			j.log.Warn("memory of an exchange of devices stays until the device is closed", "err", err)
			return
		}
		j.unmap(inboxes, true)
	})
}

// refuse has all later operations go through the host. With the proxy's lock.
func (g *Group) refuse(why error) {
	if g.packets.refused == nil {
		g.packets.refused = why
		g.job.log.Warn("short vectors in the memory of devices go through the hosts", "group", g.id(), "why", why)
		g.say()
	}
}

// alike reports whether exactly the slots of active have sent a message, and all with this head:
// then all of them are making the exchange of the same view. The ranks see the same messages, and
// decide alike.
func alike(all, head []byte, active []int) bool {
	for slot := range len(all) / messageSize {
		b := all[slot*messageSize:][:messageSize]
		if sent := b[messageStage] != 0; sent != slices.Contains(active, slot) ||
			sent && !bytes.Equal(b[:messageHead], head) {
			return false
		}
	}
	return true
}

// refusal returns the text of the first of the active ranks that has failed.
func refusal(all []byte, active []int, failed func(message []byte) bool) error {
	for _, slot := range active {
		if b := all[slot*messageSize:][:messageSize]; failed(b) {
			return fmt.Errorf("rank %d: %s", slot, trimZeros(b[messageText:]))
		}
	}
	return nil
}

// errNoExchange is why most groups have no exchange.
var errNoExchange = fmt.Errorf("not all ranks are on one machine with devices that combine short vectors, or there "+
	"are more than %d", device.MaxExchangeRanks)

// An earlierError says that an operation was given to its stream in an earlier view.
type earlierError struct{ epoch uint64 }

func (e *earlierError) Error() string {
	return fmt.Sprintf("it was given to its stream in view %d, which is over", e.epoch)
}

// openInboxes maps the inboxes of the other ranks, whose places are by rank of the job. It returns
// those that it has mapped.
func (g *Group) openInboxes(d device.Exchanger, made device.Exchange, v *groupView, places []join.Place, all []byte) (
	mapped []device.Shared, err error) {
	inboxes, offsets := make([]device.Shared, len(v.Active)), make([]uint64, len(v.Active))
	for i, slot := range v.Active {
		b := all[slot*messageSize:][:messageSize]
		length := binary.LittleEndian.Uint64(b[messageKey:])
		if length > device.MaxKey {
			return mapped, fmt.Errorf("%w: a key of %d bytes from rank %d", p2p.ErrProtocol, length, slot)
		}
		offsets[i] = binary.LittleEndian.Uint64(b[messageOffset:])
		if slot == g.rank {
			continue
		}
		owner := places[v.ranks[slot]].Incarnation
		if inboxes[i], err = g.job.imports(d, owner, b[messageText:][:length]); err != nil {
			return mapped, fmt.Errorf("rank %d: %w", slot, err)
		}
		mapped = append(mapped, inboxes[i])
	}
	return mapped, made.Connect(inboxes, offsets)
}

// trimZeros returns text without the zeros behind it.
func trimZeros(text []byte) []byte {
	for len(text) > 0 && text[len(text)-1] == 0 {
		text = text[:len(text)-1]
	}
	return text
}

// step enters the view that is due, before the first of the operations that prepare a call in
// packets. If it is given up before its turn, so is that operation.
func (g *Group) step(ctx context.Context, c *exec.Call) error {
	prepares, count := preparing(c, 0)
	if err := g.enter(ctx, flight.Describe(prepares, count), func() {
		g.expired(g.exchangeCall(messageSize/8, prepares, count), g.ready)
	}); err != nil {
		return err
	}
	defer g.leave()
	g.run.Adopt(g.exchangeCall(messageSize/8, prepares, count))
	if !g.rough {
		return nil
	}
	return g.ready()
}

// preparing returns how messages name number step of the operations that prepare c.
func preparing(c *exec.Call, step int) (call flight.Call, count uint64) {
	t := c.Token(0, collectives.Auto)
	return flight.Call(t.Call).PreparesPackets(step), t.Count
}

// exchangeBytes is exchange of bytes, as a step that prepares a call in packets. Its messages have
// the call, so that a rank whose call differs is told of it.
func (g *Group) exchangeBytes(ctx context.Context, mine []byte, c *exec.Call, step int) ([]byte, error) {
	words := make([]int64, len(mine)/8)
	for i := range words {
		words[i] = int64(binary.LittleEndian.Uint64(mine[8*i:]))
	}
	prepares, count := preparing(c, step)
	got, err := g.exchange(ctx, words, prepares, count)
	if err != nil {
		return nil, err
	}
	var all []byte
	for _, w := range got {
		all = binary.LittleEndian.AppendUint64(all, uint64(w))
	}
	return all, nil
}

// disconnect stops the exchange of the view, which ends. With the proxy's lock.
func (g *Group) disconnect() {
	if x := g.packets.now; x != nil {
		g.end(x)
	}
	g.packets.now = nil
}

// end stops an exchange whose view is over, and keeps it if a graph may repeat its work. With the
// proxy's lock.
func (g *Group) end(x *exchange) {
	x.Stop()
	if x.stops != nil {
		x.stops.Stop()
	}
	if x.kept() {
		g.packets.former = append(g.packets.former, x)
	} else {
		g.job.retire(x.Exchange, x.inboxes)
	}
}

// repeated returns why work that a graph has repeated has no result, or nil. At an evicted rank the
// operations say why themselves. With the proxy's lock.
func (g *Group) repeated() error {
	if ro := g.job.roster; ro != nil && ro.EvictedLocked() {
		return nil
	}
	for _, x := range g.packets.former {
		if why := x.unreported(); why != nil {
			return &graphError{
				text: fmt.Sprintf("a graph with operations of this group was captured in view %d, which is over: "+
					"capture it again, its launch has no result", x.epoch),
				is: g.overtaken(x.epoch, graphCall)}
		}
	}
	if x := g.packets.now; x != nil && x.live.Load() == 0 {
		if why := x.unreported(); why != nil {
			return g.graphFailed(x, why)
		}
	}
	return nil
}

// A graphError says that the launch of a graph has no result.
type graphError struct {
	text string // names no rank
	is   error  // a RankError, a TimeoutError or a MismatchError
}

func (e *graphError) Error() string { return e.text + ": " + e.is.Error() }

func (e *graphError) Unwrap() error { return e.is }

const graphCall = "the launch of a graph"

// graphFailed returns the error of a launch that has no result in the view of x.
func (g *Group) graphFailed(x *exchange, why *device.ExchangeError) error {
	e := &graphError{text: graphCall + " with operations of this group has no result"}
	switch ours := why.Ours.String() + " in " + graphCall; {
	case why.Stopped && x.stops != nil:
		e.is = &RankError{Rank: x.left, Epoch: x.epoch, Call: graphCall, Reporter: g.rank, in: g.in,
			Err: cmp.Or(g.job.proxy.Down(g.jobRank(x.left)), x.why)}
	case why.Stopped:
		e.is = g.overtaken(x.epoch, graphCall)
	case why.Differs:
		e.is = &MismatchError{in: g.in, RankA: g.rank, CallA: ours, RankB: why.Rank, CallB: why.Theirs.String()}
	default:
		t, ok := g.coll.Seen(why.Rank)
		e.is = &TimeoutError{Call: ours, After: g.job.timeout, Reporter: g.rank, in: g.in,
			Missing: []Seen{seen(exec.Seen{Rank: why.Rank, Has: ok, Last: t})}, Err: context.DeadlineExceeded}
	}
	return e
}

// overtakenAbort returns what the other ranks are told of work of an earlier view, or of a graph,
// that has failed with err: which ranks it names, but for a rank that has not left the view or the
// group; then text. now is the operation that notices it.
func (g *Group) overtakenAbort(err error, text string, now p2p.Token) *wireAbort {
	switch e := err.(type) {
	case *TimeoutError:
		a := &wireAbort{Kind: abortTimeout, A: g.rank, Call: now, After: int64(e.After), Text: e.Call}
		for _, m := range e.Missing {
			t, ok := g.coll.Seen(m.Rank)
			a.Missing = append(a.Missing, exec.Seen{Rank: m.Rank, Has: ok, Last: t})
		}
		return a
	case *MismatchError:
		return &wireAbort{Kind: abortMismatch, A: e.RankA, B: e.RankB, Call: now,
			Text: e.CallA + betweenCalls + e.CallB}
	}
	lost, ok := err.(*RankError)
	switch {
	case !ok || errors.As(lost.Err, new(mishap)) || lost.Err == p2p.ErrLeft:
	case lost.Err == errDeserted:
		return &wireAbort{Kind: abortDeserted, A: g.rank, B: lost.Rank, Call: now}
	case lost.Epoch == g.v.epoch || !slices.Contains(g.v.Active, lost.Rank):
		return &wireAbort{Kind: abortRank, A: g.rank, B: lost.Rank, Call: now, Text: lost.Err.Error()}
	}
	return &wireAbort{Kind: abortOther, A: g.rank, Call: now, Text: text}
}

// overtaken returns the error of a call that was given to its stream in an earlier view.
func (g *Group) overtaken(epoch uint64, call string) *RankError {
	if g.lost != nil && g.lost.Epoch >= epoch && !errors.As(g.lost.Err, new(mishap)) {
		return &RankError{Rank: g.lost.Rank, Epoch: g.lost.Epoch, Call: call, Reporter: g.lost.Reporter, in: g.in,
			Err: g.lost.Err}
	}
	return g.rankError(g.rank, g.rank, call, mishap((&earlierError{epoch}).Error()))
}

// unreported returns why work has no result, once, unless that is an operation's.
func (x *exchange) unreported() *device.ExchangeError {
	why, again := x.failed()
	if why == nil || (!why.Recorded || x.reported.Swap(true)) && !again || x.blind.Load() {
		return nil
	}
	return why
}

// account says that the failure of a visit's exchange is that of its operation, if there is one.
func (v *visit) account() {
	x := v.launch.x
	defer v.launch.settle()
	if v.running() {
		x.blind.Store(true)
	} else if v.launch.failure() != nil {
		x.reported.Store(true)
	}
}

// fate returns the error of an operation whose kernel has ended without a result. With the proxy's
// lock.
func (g *Group) fate(x *exchange, why *device.ExchangeError) error {
	switch {
	case why.Stopped:
		if err := g.coll.Err(); err != nil {
			return err
		}
		if x.stops != nil {
			gone := p2p.ErrPeerGone
			if x.why == p2p.ErrLeft {
				gone = x.why
			}
			return &p2p.PeerError{Rank: g.v.ranks[x.left], Err: gone}
		}
		return errMoved
	case why.Recorded:
		return g.graphFailed(x, why)
	case why.Differs:
		ours, t := g.run.Token(), &why.Theirs
		c := exec.Call{Kind: t.Kind, Op: t.Op, DType: t.DType, Root: t.Root, Count: t.Count}
		theirs := c.Token(ours.Seq, collectives.Auto)
		theirs.Call = uint64(flight.Call(theirs.Call).InPackets())
		return &p2p.Disagreement{Rank: why.Rank, Ours: ours, Theirs: theirs}
	}
	return fmt.Errorf("its device: %w: %w", why, p2p.ErrTimeout)
}

// A packetFeed is the exec.Whole of a visit with a launch.
type packetFeed struct {
	g *Group
	v *visit
}

// Need implements exec.Feed.
func (f *packetFeed) Need(int) error { return nil }

// Have implements exec.Feed.
func (f *packetFeed) Have(int) {}

// Do implements exec.Whole.
func (f *packetFeed) Do() error {
	g, v := f.g, f.v
	l := v.launch
	if g.packets.now != l.x { // the group has moved since
		return &earlierError{l.x.epoch}
	}
	if !l.given.Load() {
		g.job.proxy.Leave()
		err := v.launchNow()
		g.job.proxy.Return()
		if err != nil {
			return fmt.Errorf("its stream has failed: %w", err)
		}
	}
	g.beginWait()
	looks := 0
	err := g.holdLocked(func() (bool, error) {
		if !v.running() {
			return true, nil
		}
		g.job.proxy.Look()
		if err := g.hopeless(v); err != nil {
			return false, err
		}
		if looks++; looks%looksAPatience == 0 { // the others are told who is late
			return false, g.wait.Tell()
		}
		return false, nil
	})
	if err != nil {
		return err
	}
	if _, err := v.had(); err != nil {
		return fmt.Errorf("its stream has failed: %w", err)
	}
	defer l.settle()
	if why := l.failure(); why != nil {
		l.x.reported.Store(true)
		return g.fate(l.x, why)
	}
	return nil
}

// looksAPatience is how many looks at a kernel are between two at the time that it takes.
const looksAPatience = 64
