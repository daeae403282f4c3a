package p2p

import "time"

// ReadFor is how long MarkDead reads from a peer that continues to send.
const ReadFor = readFor

// MaxFailed is of how many closed channels a rank remembers how they failed.
const MaxFailed = maxFailed

// SetCredit has both directions of the accounts with slot stand at n, as if that much had been sent
// and taken.
func (c *Channel) SetCredit(slot int, n uint32) {
	c.p.Lock()
	defer c.p.Unlock()
	st := c.stream(slot)
	st.sent, st.acked, st.taken, st.told = n, n, n, n
}

// Numbers returns how many numbers for channels this proxy has given out and has been told over its
// link with rank.
func (p *Proxy) Numbers(rank int) (out, in int) {
	p.Lock()
	defer p.Unlock()
	return int(p.peers[rank].numbers), len(p.peers[rank].in)
}

// Remembered returns how many channels there are, and of how many p knows the names.
func (p *Proxy) Remembered() (open, named int) {
	p.Lock()
	defer p.Unlock()
	return len(p.chans), len(p.floors)
}

// Unopened returns how many channels that are not open rank uses, and how many it may use.
func (p *Proxy) Unopened(rank int) (now, most int) {
	p.Lock()
	defer p.Unlock()
	return p.peers[rank].unopened, p.mostUnopened()
}

// Queued returns how many streams are queued because they have messages for rank to begin.
func (p *Proxy) Queued(rank int) int {
	p.Lock()
	defer p.Unlock()
	return len(p.peers[rank].queued)
}

// Age makes the link with rank older by d.
func (p *Proxy) Age(rank int, d time.Duration) {
	p.Lock()
	defer p.Unlock()
	p.peers[rank].made = p.peers[rank].made.Add(-d)
}

// Over is Tell at a given time.
func (w *Wait) Over(now time.Time) error { return w.over(now) }
