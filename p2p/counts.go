package p2p

import "time"

// counts is what the proxy counts of the traffic with a peer, over all links that there were.
type counts struct {
	transport               string // of the latest link
	framesSent, bytesSent   uint64
	framesTaken, bytesTaken uint64
	waited                  time.Duration
}

func (c *counts) sent(n int)     { c.framesSent++; c.bytesSent += uint64(n) }
func (c *counts) received(n int) { c.framesTaken++; c.bytesTaken += uint64(n) }

// blame charges the time that a Wait waits to the peers that it waits for. Waits that end before
// anybody looks at the clock count nothing.
type blame struct {
	on     *peer // nil: nobody in particular
	looked time.Time
	told   func(rank int)
}

// look is called at every look at the clock; first says that it is the first one since there was
// progress.
func (b *blame) look(now time.Time, first bool) {
	if !first && b.on != nil {
		b.on.counts.waited += now.Sub(b.looked)
	}
	b.looked = now
}

func (b *blame) sleep() {
	if b.told != nil && b.on != nil {
		b.told(b.on.rank)
	}
}

// OnSleep sets what is called, with the proxy's lock, when w is about to sleep because of a rank.
// It stays set.
func (w *Wait) OnSleep(f func(rank int)) { w.blame.told = f }

// PeerCounts is what a proxy knows of its traffic with a peer, over all links that there were.
type PeerCounts struct {
	Rank                       int
	Up                         bool   // there is a link
	Transport                  string // of the link, or of the last one
	Err                        error  // why there is none, if that is known
	FramesSent, FramesReceived uint64
	BytesSent, BytesReceived   uint64 // payloads
	// spent waiting for it, in waits that were long enough to look at the clock
	Waited      time.Duration
	Incarnation uint64 // 0: not known
}

// Counts lists the peers that there is or was a link to, or that were waited for. Memory that peers
// map is read and written without being counted. With the lock.
func (p *Proxy) Counts() []PeerCounts {
	var all []PeerCounts
	for i := range p.peers {
		if pr, c := &p.peers[i], &p.peers[i].counts; pr.link != nil || pr.err != nil || *c != (counts{}) {
			all = append(all, PeerCounts{Rank: pr.rank, Up: pr.link != nil, Transport: c.transport, Err: pr.err,
				FramesSent: c.framesSent, FramesReceived: c.framesTaken,
				BytesSent: c.bytesSent, BytesReceived: c.bytesTaken, Waited: c.waited, Incarnation: pr.id.Incarnation})
		}
	}
	return all
}

// Waiting returns the operation in which the rank in slot has said that it waits for long, and for
// which slots; false if it never has. With the lock.
func (c *Channel) Waiting(slot int) (t Token, slots []int, ok bool) {
	if st := c.fast[slot]; st != nil && st.waits != (Token{}) {
		slots, _ = c.WaitsFor(slot, st.waits)
		return st.waits, slots, true
	}
	return Token{}, nil, false
}
