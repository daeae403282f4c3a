package p2p

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"tutti/mem"
)

// Transfer is a put, a get or a flush that this rank has begun. The zero value is ready for Put,
// Get or FlushPuts. Its local memory belongs to the transfer until it is done; then it may be
// reused.
type Transfer struct {
	pr    *peer
	by    OneSided
	id    uint64
	kind  transferKind
	done  bool
	bytes int
	err   error
}

type transferKind uint8

const (
	aPut transferKind = iota
	aGet
	aFlush
)

// Done reports whether the transfer has ended. With the proxy's lock, as what follows.
func (t *Transfer) Done() bool { return t.done }

// Err returns why a transfer that is done failed: an *AccessError; a *PeerError that wraps
// ErrPeerGone or, if the link works, ErrProtocol; or an error that wraps ErrCancelled, ErrClosed,
// ErrUnplaced or errors.ErrUnsupported, as in Completion.
func (t *Transfer) Err() error { return t.err }

// Bytes returns the number of bytes that a finished transfer has moved.
func (t *Transfer) Bytes() int { return t.bytes }

// Path is one route for bulk data between this rank and a peer.
type Path struct {
	Spec PathSpec
	OneSided
}

// Pather is a link with several paths, in order of preference. A OneSided link without it is a
// single path between host memory and host memory, with its transport's name.
type Pather interface {
	// Paths returns the same paths at every call. They are valid while the link exists. One without
	// a name has that of the link's transport.
	Paths() []Path
}

// pathsOf returns the paths of a link.
func pathsOf(l Link, transport string) []Path {
	if m, ok := l.(Pather); ok {
		paths := slices.Clone(m.Paths())
		for i := range paths {
			paths[i].Spec.Name = cmp.Or(paths[i].Spec.Name, transport)
		}
		return paths
	}
	if o, ok := l.(OneSided); ok {
		return []Path{{PathSpec{Name: transport, Local: HostMemory, Remote: HostMemory}, o}}
	}
	return nil
}

// transfers is the state of a peer's transfers.
type transfers struct {
	paths []Path    // of the link
	now   Immediate // the first path, if it is Immediate and carries host memory
	next  uint64
	open  []*Transfer // in no order
}

// attach sets the paths of a new link.
func (ts *transfers) attach(paths []Path) {
	ts.paths, ts.now = paths, nil
	if len(paths) > 0 && paths[0].Spec.carries(mem.Anywhere, mem.Anywhere) {
		ts.now, _ = paths[0].OneSided.(Immediate)
	}
}

// take removes the transfer with id from the open ones, nil if it was cancelled.
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

// path chooses a path for n bytes between local and remote. to, unless it is nil, has the keys. The
// error says why there is none.
func (pr *peer) path(local, remote mem.Location, to *mem.Remote, n int) (OneSided, error) {
	ts := &pr.transfers
	if len(ts.paths) == 1 && (to == nil || to.Has(ts.paths[0].Spec.Name)) {
		if s := &ts.paths[0].Spec; s.carries(local, remote) {
			return ts.paths[0].OneSided, nil
		}
	}
	return pr.choose(local, remote, to, n)
}

// choose is path for several paths, or none.
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

// Carries reports whether the link to the rank in slot, if there is one, has a path for n bytes
// between memory at local and to. With the lock.
func (c *Channel) Carries(slot int, local mem.Location, to *mem.Remote, n int) bool {
	pr := c.stream(slot).pr
	if pr.link == nil {
		return false
	}
	_, err := pr.path(local, to.Loc, to, n)
	return err == nil
}

// beginTransfer offers a transfer to a link by start until the link takes it.
func (c *Channel) beginTransfer(w *Wait, t *Transfer, kind transferKind, slot int,
	choose func(*peer) (OneSided, error), start func(OneSided, uint64) error) error {
	p, st := c.p, c.stream(slot)
	pr := st.pr
	*t = Transfer{pr: pr, kind: kind}
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
			case errors.Is(err, ErrPeerGone), errors.Is(err, ErrClosed), pr.link.Err() != nil:
				// Polling takes the link down, with the reason.
			case !errors.Is(err, ErrAgain):
				return pr.fault(err)
			}
			if pr.lent != nil {
				p.unlend(pr) // its frames may be behind the loan
			}
		}
		if err := p.progress(w, pr); err != nil {
			return err
		}
	}
}

// lostPeer returns the error of a peer without a link. It wraps ErrPeerGone.
func (st *stream) lostPeer() error {
	var e *PeerError
	if err := st.gone(); errors.As(err, &e) {
		return &PeerError{e.Rank, gonePeer(e.Err)}
	}
	return nil
}

// gonePeer makes err wrap ErrPeerGone.
func gonePeer(err error) error {
	if errors.Is(err, ErrPeerGone) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrPeerGone, err)
}

// Put begins to copy local to offset of to, memory of the rank in slot, and then to write s: see
// Putter. It blocks until the link has taken the transfer, and makes a link if there is none. The
// error is an *AccessError, a *PeerError, why the channel failed, or why w has ended; nothing was
// begun then. With the lock, which it releases while it waits.
//
// value, unless it is nil, gives s.Value at the moment when the link takes the transfer, after the
// ends of earlier transfers were collected: other goroutines may signal to the same word while Put
// waits, and the last value must be the largest. With an error nothing is begun, and Put returns
// it.
//
// Transfers are not ordered with the channel's messages. The failure of a channel ends waits for
// transfers, but not the transfers.
//
// Whether the target has to make progress depends on the path: over tcp its proxy places the data
// while it polls; shared memory needs nothing.
func (c *Channel) Put(w *Wait, t *Transfer, slot int, local mem.Memory, to *mem.Remote, offset uint64, s Signal,
	value func() (uint64, error)) error {
	at := to
	if at == nil || s.At != nil && local.Len() == 0 {
		at = s.At
	}
	return c.beginTransfer(w, t, aPut, slot, func(pr *peer) (by OneSided, err error) {
		if value != nil {
			c.p.collect(pr)
			if s.Value, err = value(); err != nil {
				return nil, err
			}
		}
		remote := mem.Anywhere
		if at != nil {
			remote = at.Loc
		}
		return pr.path(local.Loc(), remote, at, local.Len())
	}, func(by OneSided, id uint64) error { return by.Put(id, local, to, offset, s) })
}

// PutNow is Put and the end of the transfer, if the link can do both at once: see Immediate. False:
// nothing was begun, use Put, which has the reason if the peer has closed the channel. With the
// lock.
func (c *Channel) PutNow(slot int, local []byte, to *mem.Remote, offset uint64, s *Signal) bool {
	st := c.stream(slot)
	pr := st.pr
	now := pr.transfers.now
	if now == nil || st.left || c.err != nil || !now.PutNow(local, to, offset, s) {
		return false
	}
	pr.counts.put(len(local))
	return true
}

// Near returns where PutNow writes to, for kernels.AcquireOut alone: see Immediate. With the lock.
func (c *Channel) Near(slot int, to *mem.Remote) uintptr {
	if now := c.stream(slot).pr.transfers.now; now != nil {
		return now.Near(to)
	}
	return 0
}

// Get begins to copy from offset of from, memory of the rank in slot, to local: see Getter.
// Otherwise it is as Put.
func (c *Channel) Get(w *Wait, t *Transfer, slot int, local mem.Memory, from *mem.Remote, offset uint64) error {
	return c.beginTransfer(w, t, aGet, slot,
		func(pr *peer) (OneSided, error) { return pr.path(local.Loc(), from.Loc, from, local.Len()) },
		func(by OneSided, id uint64) error { return by.Get(id, local, from, offset) })
}

// FlushPuts begins a transfer that ends when all puts to host memory of the rank in slot that were
// begun before have ended, and fails if one of them ends because the link has. It behaves like Put.
func (c *Channel) FlushPuts(w *Wait, t *Transfer, slot int) error {
	return c.beginTransfer(w, t, aFlush, slot,
		func(pr *peer) (OneSided, error) { return pr.path(mem.Anywhere, mem.Anywhere, nil, 0) },
		func(by OneSided, id uint64) error { return by.FlushPuts(id) })
}

// WaitTransfer blocks until t is done, and returns its error. If the channel fails or w ends, it
// cancels t and returns that error. With the lock, which it releases while it waits.
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

// CancelTransfer ends t: its local memory is not used afterwards (but see Completer.Cancel). A put
// may have been placed in part or as a whole. With the lock.
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

// wordPolls is how often WaitWord reads its word between two polls of the links, while it may poll
// without yielding its core.
const wordPolls = 30

// freePolls is how often PollWord reads its word: for a microsecond or two.
const freePolls = 100

// PollWord reads word until reached accepts its value, a few times if each rank has a core, else
// once. It reports whether reached accepted a value. Without the lock, so that a caller that finds
// the value does not have to release it.
func (p *Proxy) PollWord(word *atomic.Uint64, reached func(uint64) bool) bool {
	for i := 1; !reached(word.Load()); i++ {
		if i == freePolls || p.oversubscribed.Load() {
			return false
		}
		pause()
	}
	return true
}

// WaitWord blocks until reached accepts the value of word, host memory of this rank that the rank
// in slot signals to, and returns the value. The error is a *PeerError if that rank is gone, why
// the channel failed, or why w has ended. With the lock, which it releases while it waits.
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
			if v = word.Load(); reached(v) { // the signal came meanwhile
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
					t.err = pr.fault(c.Err)
					t.count()
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

// fault returns the error of a transfer for which the link gave err. What the peer has caused is a
// *PeerError, which wraps ErrPeerGone if the link has failed.
func (pr *peer) fault(err error) error {
	switch {
	case !errors.Is(err, ErrPeerGone) && !errors.Is(err, ErrProtocol):
		return err
	case pr.link.Err() != nil:
		err = gonePeer(err)
	}
	return &PeerError{pr.rank, err}
}

// count adds a transfer that has ended to the peer's counts.
func (t *Transfer) count() {
	switch {
	case t.err != nil:
	case t.kind == aPut:
		t.pr.counts.put(t.bytes)
	case t.kind == aGet:
		t.pr.counts.got(t.bytes)
	}
}

// lose ends the transfers with a peer whose link failed with err, or is given up although it works.
// Their local memory is not used afterwards.
func (p *Proxy) lose(pr *peer, err error) {
	p.collect(pr) // those that succeeded
	ts := &pr.transfers
	for _, t := range ts.open {
		if t.by != nil {
			t.by.Cancel(t.id)
		}
		t.done, t.err = true, err
	}
	clear(ts.open)
	ts.open, ts.paths, ts.now = ts.open[:0], nil, nil
}

// finish releases the references of transfers to a closed link that is no longer used.
func finish(paths []Path) {
	var out [16]Completion
	for _, path := range paths {
		for path.Poll(out[:]) > 0 {
		}
	}
}
