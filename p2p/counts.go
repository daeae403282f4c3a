package p2p

import "time"

// counts are the proxy's counters of the traffic with a peer, over all its links.
type counts struct {
	transport               string // of the latest link
	framesSent, bytesSent   uint64
	framesTaken, bytesTaken uint64
	bytesPast               uint64 // of bytesSent
	puts, bytesPut          uint64
	gets, bytesGot          uint64
	waited                  time.Duration
}

func (c *counts) sent(n int)     { c.framesSent++; c.bytesSent += uint64(n) }
func (c *counts) received(n int) { c.framesTaken++; c.bytesTaken += uint64(n) }
func (c *counts) put(n int)      { c.puts++; c.bytesPut += uint64(n) }
func (c *counts) got(n int)      { c.gets++; c.bytesGot += uint64(n) }

// blame charges the time of a Wait to the peers that it waits for. Waits that end before the first
// reading of the clock count nothing.
type blame struct {
	on     *peer // nil: no particular peer
	looked time.Time
	told   func(rank int)
}

// look is called at every reading of the clock. first marks the first one since there was progress.
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

// OnSleep sets a function that is called, with the proxy's lock, before w sleeps because of a rank.
// It stays set.
func (w *Wait) OnSleep(f func(rank int)) { w.blame.told = f }

// PeerCounts are the counters and the state of a peer, over all its links.
type PeerCounts struct {
	Rank                       int
	Up                         bool   // there is a link
	Transport                  string // of the link, or of the last one
	Err                        error  // why there is no link, if known
	FramesSent, FramesReceived uint64
	BytesSent, BytesReceived   uint64 // payloads
	BytesPast                  uint64 // of those sent, the ones that went through Bypasser.SendPast
	// Puts and Gets are the puts and gets of this rank that ended well, BytesPut and BytesGot what
	// they moved, over any path. A signal alone is a put of no bytes. These bytes are not in
	// BytesSent and BytesReceived.
	Puts, Gets         uint64
	BytesPut, BytesGot uint64
	// Waited is the time spent waiting for the peer, in waits that were long enough to read the
	// clock.
	Waited      time.Duration
	Incarnation uint64 // 0: not known
}

// Counts lists the peers that had a link, or were waited for. Access to mapped memory is not
// counted. With the lock.
func (p *Proxy) Counts() []PeerCounts {
	var all []PeerCounts
	for i := range p.peers {
		if pr, c := &p.peers[i], &p.peers[i].counts; pr.link != nil || pr.err != nil || *c != (counts{}) {
			all = append(all, PeerCounts{Rank: pr.rank, Up: pr.link != nil, Transport: c.transport, Err: pr.err,
				FramesSent: c.framesSent, FramesReceived: c.framesTaken,
				BytesSent: c.bytesSent, BytesReceived: c.bytesTaken, BytesPast: c.bytesPast, Puts: c.puts,
				Gets: c.gets, BytesPut: c.bytesPut, BytesGot: c.bytesGot,
				Waited: c.waited, Incarnation: pr.id.Incarnation})
		}
	}
	return all
}

// Waiting returns the operation in which the rank in slot announced a long wait, and the slots that
// it waits for; false if it has announced none, or has taken it back. With the lock.
func (c *Channel) Waiting(slot int) (t Token, slots []int, ok bool) {
	if st := c.fast[slot]; st != nil && st.waits != (Token{}) {
		slots, _ = c.WaitsFor(slot, st.waits)
		return st.waits, slots, true
	}
	return Token{}, nil, false
}
