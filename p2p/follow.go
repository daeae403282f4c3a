package p2p

import (
	pq "container/heap"
	"context"
	"runtime"
	"time"
)

// Followed messages are those that no goroutine waits for in WaitSend or WaitMsg. They end by
// themselves when the frame that completes them is handled, whichever goroutine polls. One
// goroutine, in Attend, polls for all of them, and ends those that cannot succeed any more.

// A Message is a *SendReq or a *RecvReq.
type Message interface {
	// followed returns the message's place among the followed ones.
	followed() *follow
	// fails returns why a message that has not ended cannot end well, or nil.
	fails(c *Channel) error
	// cancel withdraws the message.
	cancel(c *Channel)
}

// follow is the state of a followed message. A message that is not followed has the zero value.
type follow struct {
	ended func(error) // nil: it is not followed
	on    *followList
	next  *follow
	prev  *follow
	of    Message
	due   time.Time // zero: no time limit
	at    int       // its place in followers.due, if it has a time limit
}

// followList is a list of the followed messages that wait for one peer or for any, in the order in
// which they were followed. The zero value is empty.
type followList struct {
	root follow
	n    int
}

func (l *followList) add(f *follow) {
	if l.root.next == nil {
		l.root.next, l.root.prev = &l.root, &l.root
	}
	f.on, f.prev, f.next = l, l.root.prev, &l.root
	f.prev.next, f.next.prev = f, f
	l.n++
}

func (l *followList) remove(f *follow) {
	f.prev.next, f.next.prev = f.next, f.prev
	f.on, f.next, f.prev = nil, nil, nil
	l.n--
}

// all returns the messages of the list, which may change while they are handled.
func (l *followList) all() []*follow {
	all := make([]*follow, 0, l.n)
	for f := l.root.next; f != nil && f != &l.root; f = f.next {
		all = append(all, f)
	}
	return all
}

// followers are the followed messages of a channel.
type followers struct {
	n      int
	ends   int        // messages that have ended
	any    followList // receives from any slot that have not been matched
	due    dues
	doubt  bool // a link has gone down: some may have failed
	waiter Wait // of Attend
}

// dues is a heap of messages with a time limit.
type dues []*follow

func (d dues) Len() int           { return len(d) }
func (d dues) Less(i, j int) bool { return d[i].due.Before(d[j].due) }
func (d dues) Swap(i, j int)      { d[i], d[j] = d[j], d[i]; d[i].at, d[j].at = i, j }
func (d *dues) Push(x any)        { f := x.(*follow); f.at = len(*d); *d = append(*d, f) }
func (d *dues) Pop() any {
	last := len(*d) - 1
	f := (*d)[last]
	(*d)[last] = nil
	*d = (*d)[:last]
	return f
}

// Follow has a posted message end by itself: then ended is called once with its outcome, as
// WaitSend or WaitMsg would return it, with the lock. If the message is done already, Follow calls
// it; one that cannot succeed ends in Attend, unless its peer has another link by then. limit
// bounds the message from now on, unless it is 0. Some goroutine must be in Attend while messages
// are followed. For a while after Follow, or the end of a message, it polls without sleeping. With
// the lock.
func (c *Channel) Follow(m Message, limit time.Duration, ended func(error)) {
	f := m.followed()
	f.ended, f.of = ended, m
	c.gather(f)
	c.follows.n++
	if limit > 0 {
		f.due = time.Now().Add(limit)
		pq.Push(&c.follows.due, f)
	}
	switch m := m.(type) {
	case *SendReq:
		if m.done {
			c.end(f, nil)
			return
		}
	case *RecvReq:
		if m.done {
			c.end(f, m.err)
			return
		}
	}
	c.follows.waiter.calm()
	c.p.wakeAll()
}

// Followed returns the number of followed messages.
func (c *Channel) Followed() int { return c.follows.n }

// gather puts a followed message among those that wait for the same peer.
func (c *Channel) gather(f *follow) {
	if f.ended == nil {
		return
	}
	if f.on != nil {
		f.on.remove(f)
	}
	switch m := f.of.(type) {
	case *SendReq:
		m.st.followed.add(f)
	case *RecvReq:
		switch {
		case m.st != nil:
			m.st.followed.add(f)
		case m.from != AnySlot:
			c.stream(m.from).followed.add(f)
		default:
			c.follows.any.add(f)
		}
	}
}

// end ends a message if it is followed.
func (c *Channel) end(f *follow, err error) {
	if f.ended == nil {
		return
	}
	f.on.remove(f)
	c.follows.n--
	c.follows.ends++
	if !f.due.IsZero() {
		pq.Remove(&c.follows.due, f.at)
	}
	c.follows.waiter.calm() // another message may follow soon
	ended := f.ended
	*f = follow{}
	ended(err)
}

// Attend polls until no message is followed. It ends the messages that fail, all of them with ctx's
// error when ctx ends. With the lock, which it releases while it waits. One goroutine at a time may
// call it.
func (c *Channel) Attend(ctx context.Context) {
	w := &c.follows.waiter
	w.Reset(ctx, 0, true)
	w.idle = true // it sends its own heartbeats
	for ends := c.follows.ends; c.follows.n > 0; {
		c.review()
		if c.follows.n == 0 {
			return
		}
		c.reach(w)
		if err := c.p.progress(w, nil); err != nil {
			c.endAll(func(Message) error { return err })
		}
		if c.follows.ends != ends { // goroutines that waited for them run now, if this one lets them
			ends = c.follows.ends
			c.p.mu.Unlock()
			runtime.Gosched()
			c.p.regain()
		}
	}
}

// reach requests the links that followed messages need, checks those that they have, and bounds the
// next sleep.
func (c *Channel) reach(w *Wait) {
	now, peers := time.Now(), 0
	w.linking, w.until, w.sole = false, time.Time{}, nil
	for _, st := range c.fast {
		if st == nil || st.followed.n == 0 {
			continue
		}
		peers++
		w.sole = st.pr
		if st.pr.link == nil {
			w.linking = true
			c.p.connect(st.pr)
		} else {
			c.p.beat(st.pr, now)
		}
	}
	if c.follows.any.n > 0 {
		c.p.beat(nil, now)
	}
	if c.follows.any.n > 0 || peers > 1 {
		w.sole = nil
	}
	if len(c.follows.due) > 0 {
		w.until = c.follows.due[0].due
	}
}

// review ends the followed messages that have failed, or whose time is over.
func (c *Channel) review() {
	if c.err != nil || c.follows.doubt {
		c.follows.doubt = false
		c.endAll(func(m Message) error { return m.fails(c) })
		return
	}
	for _, st := range c.fast {
		if st != nil && st.followed.n > 0 && st.unreachable() != nil {
			c.endFailed(st.followed.all(), func(m Message) error { return m.fails(c) })
		}
	}
	if c.follows.any.n > 0 && c.noSender() != nil {
		c.endFailed(c.follows.any.all(), func(m Message) error { return m.fails(c) })
	}
	if len(c.follows.due) == 0 {
		return
	}
	now := time.Now()
	if c.follows.due[0].due.After(now) {
		return
	}
	c.p.Look()
	for len(c.follows.due) > 0 && !c.follows.due[0].due.After(now) {
		c.endFailed([]*follow{c.follows.due[0]}, func(Message) error { return ErrTimeout })
	}
}

// endAll ends the followed messages for which why returns an error.
func (c *Channel) endAll(why func(Message) error) {
	for _, st := range c.fast {
		if st != nil && st.followed.n > 0 {
			c.endFailed(st.followed.all(), why)
		}
	}
	c.endFailed(c.follows.any.all(), why)
}

func (c *Channel) endFailed(all []*follow, why func(Message) error) {
	for _, f := range all {
		m := f.of
		if f.ended == nil { // it has ended meanwhile
			continue
		}
		if err := why(m); err != nil && f.ended != nil { // why may have read the peer's last frames
			m.cancel(c)
			c.end(f, err)
		}
	}
}

// Drop ends a followed message with err, unless it has ended. With the lock.
func (c *Channel) Drop(m Message, err error) {
	c.endFailed([]*follow{m.followed()}, func(Message) error { return err })
}

func (s *SendReq) followed() *follow { return &s.follow }
func (r *RecvReq) followed() *follow { return &r.follow }

func (s *SendReq) cancel(c *Channel) { c.CancelSend(s) }
func (r *RecvReq) cancel(c *Channel) { c.CancelRecv(r) }
