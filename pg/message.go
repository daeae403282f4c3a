package pg

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"tutti/p2p"
	"tutti/pg/flight"
	"tutti/pg/internal/exec"
	"tutti/pg/internal/observe"
)

// message is one Send or Recv.
type message struct {
	recv   bool
	x      Buffer
	peer   int
	tag    int
	s      *p2p.SendReq // of a Send
	r      *p2p.RecvReq // of a Recv
	rec    *flight.Record
	waits  int            // calls of Wait, if Start started it
	device *deviceMessage // of a message in a device's memory
}

// newMessage returns a message, with its request in the same memory.
func newMessage(x Buffer, peer, tag int, recv bool) *message {
	if recv {
		var m struct {
			message
			r p2p.RecvReq
		}
		m.message = message{recv: true, x: x, peer: peer, tag: tag, r: &m.r}
		return &m.message
	}
	var m struct {
		message
		s p2p.SendReq
	}
	m.message = message{x: x, peer: peer, tag: tag, s: &m.s}
	return &m.message
}

func (m *message) name() string {
	if m.recv {
		return "recv"
	}
	return "send"
}

// what describes the call.
func (m *message) what() string {
	return fmt.Sprintf("%s (%s, %d elements, tag %d)", m.name(), m.x.DType, m.x.Count, m.tag)
}

func (m *message) status() Status {
	if !m.recv {
		return Status{From: m.peer, Tag: m.tag, Count: m.x.Count}
	}
	return Status{From: m.r.From, Tag: int(m.r.Tag), Count: m.r.Bytes / max(1, DType(m.r.Meta).Size())}
}

// checkMessage validates the arguments of a message. With the proxy's lock.
func (g *Group) checkMessage(m *message) error {
	bad := func(arg, got, want string) error {
		return &ArgumentError{Call: m.name(), Arg: arg, Got: got, Want: want}
	}
	switch {
	case m.recv && m.peer == AnyRank && g.v.Size == 1:
		return bad("the rank", "any, in a group of one rank", "a group with other ranks")
	case m.recv && m.peer == AnyRank:
	case m.peer < 0 || m.peer >= g.v.Size:
		return bad("the rank", strconv.Itoa(m.peer), fmt.Sprintf("a rank, 0 to %d", g.v.Size-1))
	case m.peer == g.rank:
		return bad("the rank", strconv.Itoa(m.peer)+", this rank itself", "another one")
	}
	if (m.tag < 0 || m.tag > MaxTag) && !(m.recv && m.tag == AnyTag) {
		return bad("the tag", strconv.Itoa(m.tag), fmt.Sprintf("0 to %d", MaxTag))
	}
	return checkBuffer(m.name(), &m.x)
}

// checkBuffer validates a buffer of a call that has no other, apart from its location.
func checkBuffer(call string, b *Buffer) error {
	bad := func(arg, got, want string) error {
		return &ArgumentError{Call: call, Arg: arg, Got: got, Want: want}
	}
	switch {
	case !b.DType.Valid():
		return bad("the data type", b.DType.String(), "one of the data types of package pg")
	case b.Count < 0 || b.Count > 0 && b.Ptr == nil:
		return bad("the buffer", fmt.Sprintf("%d elements at %v", b.Count, b.Ptr), "a buffer of its length")
	case b.Count > exec.MaxBytes/b.DType.Size():
		return bad("the buffer", fmt.Sprintf("%d elements of %v", b.Count, b.DType), "a buffer that fits in memory")
	}
	return nil
}

// post hands the message to the proxy. With the proxy's lock.
func (g *Group) post(m *message) {
	if m.device != nil {
		m.device.post()
		return
	}
	buf := m.x.bytes()
	if m.recv {
		g.msgs.PostMsg(m.r, m.peer, int64(m.tag), uint64(m.x.DType), buf)
	} else {
		g.msgs.PostSend(m.s, m.peer, uint64(m.tag), uint64(m.x.DType), buf)
	}
}

// explainMessage returns the caller's error for the end of a message, after it had been waited for.
// With the proxy's lock.
func (g *Group) explainMessage(m *message, err error, waited time.Duration) error {
	if err == nil {
		return nil
	}
	what := m.what()
	var peer *p2p.PeerError
	var aborted *p2p.Aborted
	switch {
	case errors.Is(err, ErrAborted): // whatever its cause is
		return err
	case errors.As(err, &aborted): // only Group.Abort ends messages
		if a, bad := decodeAbort(aborted.Payload, g.v.Size); bad == nil && a.Kind == abortCall {
			return g.told(a)
		}
	case errors.Is(err, p2p.ErrWrongSize):
		s := m.status()
		return &ArgumentError{Call: "recv", Arg: fmt.Sprintf("the message of rank %d with tag %d", s.From, s.Tag),
			Got:  fmt.Sprintf("%d bytes of %v", m.r.Bytes, DType(m.r.Meta)),
			Want: fmt.Sprintf("%d elements of %v", m.x.Count, m.x.DType)}
	case errors.As(err, &peer):
		return g.rankError(g.slotOf(peer.Rank), g.rank, what, peer.Err)
	case errors.Is(err, p2p.ErrClosed) || g.closed.Load():
		return ErrClosed
	case errors.Is(err, p2p.ErrTimeout), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		e := &TimeoutError{Call: what, After: waited, Reporter: g.rank, in: g.in, Err: expiry(err)}
		if m.device != nil && !m.device.v.arrived() {
			e.Call += ", whose stream has not come to it"
		} else if m.peer >= 0 {
			seen := Seen{Rank: m.peer, What: "nothing yet"}
			if t, ok := g.coll.Seen(m.peer); ok {
				seen.What = exec.Spell(t)
			}
			e.Missing = []Seen{seen}
		}
		return e
	}
	return err
}

func (g *Group) pointToPoint(ctx context.Context, x Buffer, peer, tag int, recv bool) (Status, error) {
	m := newMessage(x, peer, tag, recv)
	if ctx == nil {
		return Status{}, noContext(m.what())
	}
	if x.onDevice() {
		return g.doDeviceMessage(ctx, m)
	}
	p := g.job.proxy
	p.Lock()
	defer p.Unlock()
	if err := g.checkMessage(m); err != nil {
		return Status{}, err
	}
	if g.closed.Load() {
		return Status{}, ErrClosed
	}
	var wait p2p.Wait
	wait.Reset(ctx, g.job.timeout, false)
	g.post(m)
	m.rec = g.track.BeginMessage(g.v.epoch, m.described(g), false)
	var err error
	if m.recv {
		err = g.msgs.WaitMsg(&wait, m.r)
	} else {
		err = g.msgs.WaitSend(&wait, m.s)
	}
	if err := g.endMessage(m, g.explainMessage(m, err, wait.Waited()), true); err != nil {
		return Status{}, err
	}
	return m.status(), nil
}

func (g *Group) startMessage(x Buffer, peer, tag int, recv bool, limit time.Duration) *Work {
	m := newMessage(x, peer, tag, recv)
	w := &Work{}
	w.at.Store(&progress{g: g, msg: m})
	var err error
	if x.onDevice() {
		err = g.pack(w, m, false)
	}
	p := g.job.proxy
	p.Lock()
	defer p.Unlock()
	if err == nil && m.device == nil { // else it was checked
		err = g.checkMessage(m)
	}
	if err == nil && g.closed.Load() {
		err = ErrClosed
	}
	switch {
	case err == nil:
		m.rec = g.track.BeginMessage(g.v.epoch, m.described(g), true)
		g.follow(w, m, limit)
	case m.device != nil:
		m.device.end(err)
	default:
		w.end(false, err)
	}
	return w
}

// follow posts a message, and has it end w, after limit at the latest, if that is not 0. With the
// proxy's lock.
func (g *Group) follow(w *Work, m *message, limit time.Duration) {
	began := time.Now()
	if c := m.device; c != nil {
		if c.began = began; limit > 0 {
			c.due = began.Add(limit)
		}
	}
	g.post(m) // before Start returns, so that messages keep their order
	ended := func(err error) {
		if err = g.explainMessage(m, err, time.Since(began)); m.device != nil {
			m.device.sent(err)
			return
		}
		w.end(false, g.endMessage(m, err, false)) // a link may be delivering it
	}
	if m.recv {
		g.msgs.Follow(m.r, limit, ended)
	} else {
		g.msgs.Follow(m.s, limit, ended)
	}
	if g.msgs.Followed() > 0 && !g.attended {
		g.attended = true
		g.wg.Go(func() {
			p := g.job.proxy
			p.Lock()
			defer p.Unlock()
			g.msgs.Attend(g.ctx)
			g.attended = false
		})
	}
}

// described describes the message for the flight recorder.
func (m *message) described(g *Group) observe.Message {
	d := observe.Message{Kind: flight.Send, Rank: m.peer, DType: m.x.DType, Count: m.x.Count, Tag: m.tag}
	if m.recv {
		d.Kind = flight.Recv
	}
	if m.peer >= 0 {
		d.Rank = g.jobRank(m.peer)
	}
	return d
}

// endMessage records and returns the outcome of the message. With the proxy's lock; dumped: it
// releases the lock until the flight recorder has been written, if the message has failed.
func (g *Group) endMessage(m *message, err error, dumped bool) error {
	o := outcome(err)
	g.track.EndMessage(m.rec, o)
	if o != flight.OK {
		g.job.obs.Load().FailureLocked(o, dumped)
	}
	return err
}
