package p2p

import "fmt"

// Notices are values that a rank publishes to a peer, one for each of a few keys; the latest
// counts. They need no receive, no credit and no operation. A rank receives them whenever it polls,
// even before it has opened the channel, and a new link sends them again. So two ranks with a
// working link know each other's latest values.

const (
	// NoticeKeys is the number of keys: 0 to NoticeKeys-1.
	NoticeKeys = 3
	// MaxNotice is the longest value in bytes.
	MaxNotice = 2048
)

// notices holds the values that this rank has sent to a peer on a channel, and those that it has
// received.
type notices struct{ told, heard [NoticeKeys][]byte }

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

// tell sends a notice to the peer if there is a link.
func (c *Channel) tell(st *stream, key int) {
	v := st.notices.told[key]
	if v == nil || st.pr.link == nil {
		return
	}
	c.control(st.pr, Header{Kind: frameNotice, Seq: uint64(key), Len: uint32(len(v))}, v)
}

// OnNotice sets the handler for notices, and calls it for those that have arrived. Polling
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
}

// noticed handles a notice.
func (c *Channel) noticed(st *stream, key int, value []byte) {
	st.notices.heard[key] = append([]byte{}, value...)
	if c.hears != nil && c.ranks != nil && st.slot >= 0 {
		c.hears(st.slot, key, st.notices.heard[key])
	}
}

// Reach makes progress once, as Progress does, and requests a link to the rank in slot if there is
// none. With the lock, which it may release meanwhile.
func (c *Channel) Reach(w *Wait, slot int) error {
	return c.p.progress(w, c.stream(slot).pr)
}

// checkNotice validates the header of a notice.
func checkNotice(pr *peer, h *Header) error {
	if h.Seq >= NoticeKeys || h.Len == 0 || h.Len > MaxNotice {
		return fmt.Errorf("%w: rank %d sent a notice of %d bytes for key %d", ErrProtocol, pr.rank, h.Len, h.Seq)
	}
	return nil
}
