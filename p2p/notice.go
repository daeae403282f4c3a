package p2p

import (
	"bytes"
	"fmt"
	"slices"
	"time"
)

// Notices are values that a rank publishes to a peer, one for each of a few keys; the latest
// counts. They need no receive, no credit and no operation. A rank receives them whenever it polls,
// even before it has opened the channel, and a new link sends them again. So two ranks with a
// working link know each other's latest values. A rank may also pass on a value of another rank
// (Relay), so that ranks learn it without a link to that rank.

const (
	// NoticeKeys is the number of keys: 0 to NoticeKeys-1.
	NoticeKeys = 4
	// MaxNotice is the longest value in bytes.
	MaxNotice = 1536
)

// notices holds the values that this rank has sent to a peer on a channel, and those that it has
// received.
type notices struct{ told, heard [NoticeKeys][]byte }

// relays holds the values of other ranks that a channel has passed on, and those that peers passed
// on to it before it had a handler. Either has at most a value for each slot and key.
type relays struct {
	told  map[noticeKey]relay
	heard map[noticeKey][]byte
}

// noticeKey names a value of the rank in slot of.
type noticeKey struct{ of, key int }

// relay is a value for the ranks in slots to.
type relay struct {
	value []byte
	to    []int
}

// Notice sets the value of key for the ranks in slots, except this one. It does not block. value
// belongs to the channel afterwards. A rank without a link gets the value when it has one; Notice
// does not request the link: see Reach. With the lock.
func (c *Channel) Notice(slots []int, key int, value []byte) {
	if len(value) > MaxNotice {
		panic(fmt.Sprintf("a notice of %d bytes, at most %d can be told", len(value), MaxNotice))
	}
	for _, slot := range slots {
		if c.ranks[slot] != c.p.cfg.Self.Rank {
			st := c.stream(slot)
			st.notices.told[key] = value
			c.tell(st, key)
		}
	}
	c.p.drain()
}

// Relay tells the ranks in slots to, except this one, the value of key of the rank in slot of, as
// Notice does with a value of this rank. The latest call for of and key counts. value and to belong
// to the channel afterwards. With the lock.
func (c *Channel) Relay(to []int, of, key int, value []byte) {
	k := noticeKey{of, key}
	if old, ok := c.relays.told[k]; ok && slices.Equal(old.to, to) && bytes.Equal(old.value, value) {
		return
	}
	if c.relays.told == nil {
		c.relays.told = map[noticeKey]relay{}
	}
	c.relays.told[k] = relay{value, to}
	for _, slot := range to {
		if slot != of && c.ranks[slot] != c.p.cfg.Self.Rank {
			c.pass(c.stream(slot), k, value)
		}
	}
	c.p.drain()
}

// pass sends a value of another rank to the peer if there is a link.
func (c *Channel) pass(st *stream, k noticeKey, value []byte) {
	if st.pr.link != nil {
		c.control(st.pr, Header{Kind: frameNotice, Seq: uint64(k.key), Off: uint64(k.of) + 1,
			Len: uint32(len(value))}, value)
	}
}

// retell sends all notices for the peer over its new link.
func (c *Channel) retell(st *stream) {
	for key := range NoticeKeys {
		c.tell(st, key)
	}
	for k, r := range c.relays.told {
		if k.of != st.slot && slices.Contains(r.to, st.slot) {
			c.pass(st, k, r.value)
		}
	}
}

// tell sends a notice to the peer if there is a link.
func (c *Channel) tell(st *stream, key int) {
	v := st.notices.told[key]
	if v == nil || st.pr.link == nil {
		return
	}
	c.control(st.pr, Header{Kind: frameNotice, Seq: uint64(key), Len: uint32(len(v))}, v)
}

// OnNotice sets the handler for notices, and calls it for those that have arrived. A notice that
// was passed on has the slot of the rank whose value it is, and may be older than another. Polling
// goroutines call f with the lock; f must not block. value belongs to f.
func (c *Channel) OnNotice(f func(slot, key int, value []byte)) {
	c.hears = f
	for slot, st := range c.fast {
		for key := range NoticeKeys {
			if st != nil && st.notices.heard[key] != nil {
				f(slot, key, st.notices.heard[key])
			}
		}
	}
	heard := c.relays.heard
	c.relays.heard = nil
	for k, value := range heard {
		c.passedOn(k, value)
	}
}

// noticed handles the notice of frame h.
func (c *Channel) noticed(st *stream, h *Header, value []byte) {
	key := int(h.Seq)
	if h.Off > 0 {
		c.passedOn(noticeKey{int(h.Off - 1), key}, append([]byte{}, value...))
		return
	}
	st.notices.heard[key] = append([]byte{}, value...)
	if c.hears != nil && c.ranks != nil && st.slot >= 0 {
		c.hears(st.slot, key, st.notices.heard[key])
	}
}

// passedOn handles a notice that a peer has passed on.
func (c *Channel) passedOn(k noticeKey, value []byte) {
	switch {
	case c.ranks != nil && k.of >= len(c.ranks): // no member of the channel
	case c.ranks != nil && c.hears != nil:
		c.hears(k.of, k.key, value)
	default:
		if c.relays.heard == nil {
			c.relays.heard = map[noticeKey][]byte{}
		}
		c.relays.heard[k] = value
	}
}

// Reach makes progress once, as Progress does, and requests a link to the rank in slot if there is
// none. With the lock, which it may release meanwhile.
func (c *Channel) Reach(w *Wait, slot int) error {
	return c.p.progress(w, c.stream(slot).pr)
}

// Request requests a link to the rank in slot if there is none, and does not wait for it. With the
// lock.
func (c *Channel) Request(slot int) {
	pr := c.stream(slot).pr
	if pr.link == nil && pr.since.IsZero() {
		pr.since = time.Now().Add(-dialTieBreak)
	}
	c.p.connect(pr)
}

// checkNotice validates the header of a notice.
func (p *Proxy) checkNotice(pr *peer, h *Header) error {
	if h.Seq >= NoticeKeys || h.Len == 0 || h.Len > MaxNotice || h.Off > uint64(p.cfg.Size) {
		return fmt.Errorf("%w: rank %d sent a notice of %d bytes for key %d of slot %d", ErrProtocol, pr.rank, h.Len,
			h.Seq, int64(h.Off)-1)
	}
	return nil
}
