package p2p

import "fmt"

// Notices are what a rank tells a peer of itself: a value for each of a few keys, of which the
// latest counts. They need no receive, no credit and no operation: a rank takes them in whenever it
// polls, before it has opened the channel too, and a link that comes up tells them again. So two
// ranks that are linked for long enough know each other's latest values, whatever happened before.

const (
	// NoticeKeys is how many keys there are: 0 to NoticeKeys-1.
	NoticeKeys = 3
	// MaxNotice is the longest value in bytes.
	MaxNotice = 2048
)

// notices are what this rank has told a peer on a channel, and what it was told.
type notices struct{ told, heard [NoticeKeys][]byte }

// Notice tells the ranks in slots, this one excepted, that key has value from now on. It does not
// block; value is the channel's from then on. A rank that no link leads to learns of it when there
// is one, which Notice does not ask for: see Reach. With the lock.
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

// OnNotice sets who hears what peers tell, and tells what they have told before. f is called with
// the lock by whoever polls, and must not block; value is f's.
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

// noticed takes in what a peer tells.
func (c *Channel) noticed(st *stream, key int, value []byte) {
	st.notices.heard[key] = append([]byte{}, value...)
	if c.hears != nil && c.ranks != nil && st.slot >= 0 {
		c.hears(st.slot, key, st.notices.heard[key])
	}
}

// Reach makes progress once, as Progress does, and has a link made with the rank in slot if there
// is none. With the lock, which it may give up meanwhile.
func (c *Channel) Reach(w *Wait, slot int) error {
	return c.p.progress(w, c.stream(slot).pr)
}

// checkNotice looks at the header of a frame that says it is a notice.
func checkNotice(pr *peer, h *Header) error {
	if h.Seq >= NoticeKeys || h.Len == 0 || h.Len > MaxNotice {
		return fmt.Errorf("%w: rank %d sent a notice of %d bytes for key %d", ErrProtocol, pr.rank, h.Len, h.Seq)
	}
	return nil
}
