package p2p

import (
	"errors"
	"fmt"
	"sync/atomic"

	"tutti/mem"
)

// Transfer is a put, a get or a flush that this rank has begun. The zero value is ready for Put, Get
// or FlushPuts; it may be used again when it is done. Its local memory belongs to the transfer until
// then.
type Transfer struct {
	pr    *peer
	by    OneSided
	id    uint64
	done  bool
	bytes int
	err   error
}

// Done reports whether the transfer has ended. With the proxy's lock, as what follows.
func (t *Transfer) Done() bool { return t.done }

// Err returns why a transfer that is done failed: an *AccessError, a *PeerError that wraps
// ErrPeerGone, or one that wraps ErrCancelled or ErrClosed.
func (t *Transfer) Err() error { return t.err }

// Bytes returns how much a transfer that is done has moved.
func (t *Transfer) Bytes() int { return t.bytes }

// Path is one way for bulk data between this rank and a peer.
type Path struct {
	Spec PathSpec
	OneSided
}

// Pather is a link with several paths, in order of preference. A link without it that is OneSided is
// one path itself, between host memory and host memory, with its transport's name.
type Pather interface {
	// Paths returns the same paths at every call. They live as long as the link.
	Paths() []Path
}

// pathsOf returns the paths of a link.
func pathsOf(l Link, transport string) []Path {
	if m, ok := l.(Pather); ok {
		return m.Paths()
	}
	if o, ok := l.(OneSided); ok {
		return []Path{{PathSpec{Name: transport, Local: HostMemory, Remote: HostMemory}, o}}
	}
	return nil
}

// transfers is what a peer has under way with remote memory.
type transfers struct {
	paths []Path    // of the link
	now   Immediate // the first path, if it is one and can move host memory
	next  uint64
	open  []*Transfer // in no order
}

// attach takes the paths of a new link.
func (ts *transfers) attach(paths []Path) {
	ts.paths, ts.now = paths, nil
	if len(paths) > 0 && paths[0].Spec.carries(mem.Anywhere, mem.Anywhere) {
		ts.now, _ = paths[0].OneSided.(Immediate)
	}
}

// take takes the transfer with id from those that are open, nil if it was cancelled.
func (ts *transfers) take(id uint64) *Transfer {
	for i, t := range ts.open {
		if t.id == id {
			last := len(ts.open) - 1
			ts.open[i], ts.open[last] = ts.open[last], nil
			ts.open = ts.open[:last]
			return t
		}
	}
	return nil
}

// path chooses the way for n bytes between local and remote, of which to, unless it is nil, has the
// keys. The error says why there is none.
func (pr *peer) path(local, remote mem.Location, to *mem.Remote, n int) (OneSided, error) {
	ts := &pr.transfers
	if len(ts.paths) == 1 && (to == nil || to.Has(ts.paths[0].Spec.Name)) {
		if s := &ts.paths[0].Spec; s.carries(local, remote) {
			return ts.paths[0].OneSided, nil
		}
	}
	return pr.choose(local, remote, to, n)
}

// choose is path where there are several, or none.
func (pr *peer) choose(local, remote mem.Location, to *mem.Remote, n int) (OneSided, error) {
	ts := &pr.transfers
	var specs [8]PathSpec
	var index [8]int
	k := 0
	for i := range ts.paths {
		s := &ts.paths[i].Spec
		if to != nil {
			if !to.Has(s.Name) {
				continue
			}
		}
		if k < len(specs) {
			specs[k], index[k] = *s, i
			k++
		}
	}
	if i := ChoosePath(specs[:k], local, remote, n); i >= 0 {
		return ts.paths[index[i]].OneSided, nil
	}
	return nil, &PeerError{pr.rank, fmt.Errorf("none of %d paths over %s moves memory between %s here and %s there: %w",
		len(ts.paths), pr.counts.transport, local, remote, errors.ErrUnsupported)}
}

// begin has a link take a transfer, which start offers to it, as soon as it can.
func (c *Channel) beginTransfer(w *Wait, t *Transfer, slot int, choose func(*peer) (OneSided, error),
	start func(OneSided, uint64) error) error {
	p, st := c.p, c.stream(slot)
	pr := st.pr
	*t = Transfer{pr: pr}
	for {
		if c.err != nil {
			return c.err
		}
		if err := st.lostPeer(); err != nil {
			return err
		}
		if pr.link != nil {
			by, err := choose(pr)
			if err != nil {
				return err
			}
			ts := &pr.transfers
			err = start(by, ts.next+1)
			switch {
			case err == nil:
				ts.next++
				t.by, t.id = by, ts.next
				ts.open = append(ts.open, t)
				p.collect(pr)
				return nil
			case errors.Is(err, ErrPeerGone), errors.Is(err, ErrClosed): // polling takes the link down, with the reason
			case !errors.Is(err, ErrAgain):
				return err
			}
			if pr.lent != nil {
				p.unlend(pr) // what is needed may be behind it
			}
		}
		if err := p.progress(w, pr); err != nil {
			return err
		}
	}
}

// lostPeer is gone, as an error that wraps ErrPeerGone.
func (st *stream) lostPeer() error {
	var e *PeerError
	if err := st.gone(); errors.As(err, &e) {
		return &PeerError{e.Rank, gonePeer(e.Err)}
	}
	return nil
}

// gonePeer has why a peer is lost wrap ErrPeerGone.
func gonePeer(err error) error {
	if errors.Is(err, ErrPeerGone) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrPeerGone, err)
}

// Put begins to copy local to offset of to, memory of the rank in slot, and then to write s: see
// Putter. It blocks until the link has taken the transfer, makes progress meanwhile, and has a link
// made if there is none. An error is an *AccessError, a *PeerError, or why the channel failed or w
// must not wait any longer; nothing was begun then. With the lock, which it gives up while it waits.
//
// Transfers are in no order with the channel's messages. A channel that fails ends the waiting for
// them, no transfer.
//
// Whether the target has to make progress depends on the path: over tcp its proxy places the data
// when somebody there polls, in shared memory it has nothing to do.
func (c *Channel) Put(w *Wait, t *Transfer, slot int, local mem.Memory, to *mem.Remote, offset uint64, s Signal) error {
	pr := c.stream(slot).pr
	if now := pr.transfers.now; now != nil && c.err == nil && now.PutNow(local, to, offset, s) {
		*t = Transfer{pr: pr, done: true, bytes: local.Len()}
		return nil
	}
	at := to
	if at == nil || s.At != nil && local.Len() == 0 {
		at = s.At
	}
	return c.beginTransfer(w, t, slot, func(pr *peer) (OneSided, error) {
		remote := mem.Anywhere
		if at != nil {
			remote = at.Loc
		}
		return pr.path(local.Loc(), remote, at, local.Len())
	}, func(by OneSided, id uint64) error { return by.Put(id, local, to, offset, s) })
}

// Get begins to copy from offset of from, memory of the rank in slot, to local: see Getter. Otherwise
// it is as Put.
func (c *Channel) Get(w *Wait, t *Transfer, slot int, local mem.Memory, from *mem.Remote, offset uint64) error {
	return c.beginTransfer(w, t, slot,
		func(pr *peer) (OneSided, error) { return pr.path(local.Loc(), from.Loc, from, local.Len()) },
		func(by OneSided, id uint64) error { return by.Get(id, local, from, offset) })
}

// FlushPuts begins a transfer that ends when all puts to host memory of the rank in slot that were
// begun before have ended. Otherwise it is as Put.
func (c *Channel) FlushPuts(w *Wait, t *Transfer, slot int) error {
	return c.beginTransfer(w, t, slot,
		func(pr *peer) (OneSided, error) { return pr.path(mem.Anywhere, mem.Anywhere, nil, 0) },
		func(by OneSided, id uint64) error { return by.FlushPuts(id) })
}

// WaitTransfer blocks until t is done, and returns its error. If the channel fails or w must not wait
// any longer, t is cancelled, and that is the error. With the lock, which it gives up while it waits.
func (c *Channel) WaitTransfer(w *Wait, t *Transfer) error {
	for !t.done {
		if t.pr.lent != nil {
			c.p.unlend(t.pr)
		}
		err := c.err
		if err == nil {
			err = c.p.progress(w, t.pr)
		}
		if err != nil && !t.done {
			c.p.CancelTransfer(t)
			return err
		}
	}
	return t.err
}

// CancelTransfer ends t: its local memory is not touched afterwards. A put may have been placed all
// the same, in part or whole. With the lock.
func (p *Proxy) CancelTransfer(t *Transfer) {
	if t.done || t.by == nil {
		return
	}
	t.by.Cancel(t.id)
	p.collect(t.pr)
	if !t.done {
		t.pr.transfers.take(t.id)
		t.done, t.err = true, ErrCancelled
	}
}

// wordPolls is how often WaitWord looks at its word, while it may poll without giving its core away,
// before it polls the links.
const wordPolls = 30

// WaitWord blocks until reached accepts the value of word, host memory of this rank that the rank in
// slot signals to, and returns the value. An error is a *PeerError if that rank is gone, or why the
// channel failed or w must not wait any longer. With the lock, which it gives up while it waits.
func (c *Channel) WaitWord(w *Wait, slot int, word *atomic.Uint64, reached func(uint64) bool) (uint64, error) {
	st := c.stream(slot)
	for {
		v := word.Load()
		for i := 0; i < wordPolls && !reached(v) && c.p.hot(w) && !w.try; i++ {
			pause()
			v = word.Load()
		}
		if reached(v) {
			w.calm()
			return v, nil
		}
		err := c.err
		if err == nil {
			err = st.lostPeer()
		}
		if err == nil {
			if st.pr.lent != nil {
				c.p.unlend(st.pr)
			}
			err = c.p.progress(w, st.pr)
		}
		if err != nil {
			if v = word.Load(); reached(v) { // it came at the last moment
				return v, nil
			}
			return v, err
		}
	}
}

// collect takes the completions of a peer's transfers, and reports whether there were any.
func (p *Proxy) collect(pr *peer) bool {
	ts := &pr.transfers
	if len(ts.open) == 0 {
		return false
	}
	any := false
	for i := range ts.paths {
		for {
			n := ts.paths[i].Poll(p.ended[:])
			for _, c := range p.ended[:n] {
				if t := ts.take(c.ID); t != nil {
					t.done, t.bytes = true, c.Bytes
					if t.err = c.Err; c.Err != nil && errors.Is(c.Err, ErrPeerGone) {
						t.err = &PeerError{pr.rank, c.Err}
					}
					any = true
				}
			}
			clear(p.ended[:n])
			if n < len(p.ended) {
				break
			}
		}
	}
	return any
}

// lose ends what is under way with a peer whose link is gone because of err.
func (p *Proxy) lose(pr *peer, err error) {
	p.collect(pr) // what has ended well
	ts := &pr.transfers
	for _, t := range ts.open {
		t.done, t.err = true, err
	}
	clear(ts.open)
	ts.open, ts.paths, ts.now = ts.open[:0], nil, nil
}

// finish lets go of what transfers hold in a link that is closed, and that nobody uses any more.
func finish(paths []Path) {
	var out [16]Completion
	for _, path := range paths {
		for path.Poll(out[:]) > 0 {
		}
	}
}
