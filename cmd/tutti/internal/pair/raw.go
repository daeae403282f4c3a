package pair

import "io"

// Lengths in bytes of what an endpoint sends to ask for a range of a region, and to acknowledge:
// see docs/wire.md.
const (
	requestSize = 49
	ackSize     = 26
)

// stretch is what goes one way over the plain connection before the other end's turn.
type stretch struct {
	size  int // bytes of a call of Write
	times int
	data  bool // else a request, or an acknowledgement
}

// exchanges returns what a turn is on the plain connection: so many times bytes to the process that
// serves, and bytes back.
func (t *turn) exchanges() (times int, there, back stretch) {
	request, ack := stretch{requestSize, 1, false}, stretch{ackSize, 1, false}
	one, all := stretch{t.N, 1, true}, stretch{t.N, t.Count, true}
	switch {
	case t.echoes():
		return t.Count, one, one
	case t.Op == batch && t.Depth == 1:
		return t.Count * pieces, request, stretch{pieceSize, 1, true}
	case t.Op == batch:
		return t.Count, stretch{pieces * requestSize, 1, false}, one
	case t.Op == read && t.Depth == 1:
		return t.Count, request, one
	case t.Op == read:
		return 1, request, all
	case t.Depth == 1:
		return t.Count, one, ack
	}
	return 1, all, ack
}

// exchange does a turn on the plain connection; measures says which of the processes this is.
func (c *contestants) exchange(t turn, measures bool) error {
	times, there, back := t.exchanges()
	into := c.buf[:t.N]
	if measures && t.echoes() {
		into = c.back[:t.N]
	}
	control := make([]byte, max(pieces*requestSize, ackSize))
	cursor := 0
	move := func(s stretch, b []byte, f func([]byte) error) error {
		for range s.times {
			from := control
			if s.data {
				from = b[cursor:]
				cursor = (cursor + s.size) % len(b)
			}
			if err := f(from[:s.size]); err != nil {
				return err
			}
		}
		return nil
	}
	send := func(b []byte) error {
		_, err := c.raw.Write(b)
		return err
	}
	receive := func(b []byte) error {
		_, err := io.ReadFull(c.raw, b)
		return err
	}
	for range times {
		if measures {
			if err := move(there, c.buf[:t.N], send); err != nil {
				return err
			}
			if err := move(back, into, receive); err != nil {
				return err
			}
			continue
		}
		if err := move(there, into, receive); err != nil {
			return err
		}
		if err := move(back, c.buf[:t.N], send); err != nil {
			return err
		}
	}
	return nil
}
