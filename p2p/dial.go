package p2p

import (
	"context"
	"errors"
	"fmt"
	"maps"
	mrand "math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"time"

	"tutti/internal/files"
)

// dialTieBreak is how long the higher rank of a pair waits for the connection of the lower one
// before it dials itself, because both usually need the link at the same time.
const dialTieBreak = 15 * time.Millisecond

// host implements Host for one transport of the proxy.
type host struct {
	p         *Proxy
	transport string
}

func (h *host) Self() Identity { return h.p.cfg.Self }
func (h *host) Secret() []byte { return h.p.cfg.Secret }
func (h *host) Wake()          { h.p.Wake() }

// Region finds a shared region. It does not take the proxy's lock: a link of another rank in this
// process calls it with the lock of that rank's proxy.
func (h *host) Region(id uint64) (*Region, error) {
	if r := h.p.regions.shared(id); r != nil {
		return r, nil
	}
	return nil, ErrNoRegion
}

// Admit decides on an incoming connection. If two connections cross, the lower rank's survives. A
// half-open link ends.
func (h *host) Admit(from Identity) error {
	p := h.p
	if from.Role == RoleClient {
		if p.cfg.Clients == nil {
			return fmt.Errorf("%w: rank %d takes no clients", ErrStale, p.cfg.Self.Rank)
		}
		return p.cfg.Clients.Admit(from)
	}
	if from.Rank < 0 || from.Rank >= p.cfg.Size || from.Rank == p.cfg.Self.Rank {
		return fmt.Errorf("%w: there is no rank %d in this job of %d ranks", ErrStale, from.Rank, p.cfg.Size)
	}
	p.Lock()
	defer p.Unlock()
	if p.closed {
		return ErrClosed
	}
	pr := &p.peers[from.Rank]
	p.succeed(pr, from.Incarnation)
	if pr.halfOpen(from.Incarnation) {
		if pr.doubted {
			p.readRest(pr, true)
			p.down(pr, errAnew)
			pr.forgive()
		}
		pr.doubted = true
	}
	switch {
	case pr.err != nil && !pr.vacant:
		return fmt.Errorf("%w: %v has failed for rank %d: %v", ErrFailed, from, p.cfg.Self.Rank, pr.err)
	case pr.id.Incarnation != 0 && pr.id.Incarnation != from.Incarnation:
		return fmt.Errorf("%w: rank %d is known as incarnation %016x", ErrStale, from.Rank, pr.id.Incarnation)
	case pr.link != nil || pr.expected():
		return fmt.Errorf("%w: rank %d has one with rank %d already", ErrSuperseded, p.cfg.Self.Rank, from.Rank)
	case pr.dial != nil && p.cfg.Self.Rank < from.Rank:
		return fmt.Errorf("%w: rank %d is dialling rank %d", ErrSuperseded, p.cfg.Self.Rank, from.Rank)
	}
	pr.admitted = admission{from.Incarnation, time.Now()}
	return nil
}

// errAnew says why a half-open link went down.
var errAnew = fmt.Errorf("its end of the link has failed, it connects anew: %w", ErrPeerGone)

// halfOpen reports whether the link seems to have failed at the peer, whose incarnation connects
// now: a process dials only without a link, or while its dial crosses that of the link. The latter
// may come late if a process was stopped meanwhile, but only once: a link ends the dial of its
// rank. False for the link of a peer that was marked dead.
func (pr *peer) halfOpen(incarnation uint64) bool {
	return pr.link != nil && pr.leaving == nil && pr.id.Incarnation == incarnation &&
		time.Since(pr.made) > HandshakeTimeout
}

// An admission is an incoming connection of an incarnation that was admitted and has not become a
// link. The zero value is none.
type admission struct {
	of uint64
	at time.Time
}

// expected reports whether an admitted connection may still become a link. Its time is bounded
// because a peer that has stopped may keep it open.
func (pr *peer) expected() bool {
	return pr.admitted.of != 0 && time.Since(pr.admitted.at) < HandshakeTimeout
}

// Accepted attaches the link of an admitted connection.
func (h *host) Accepted(from Identity, l Link) {
	p := h.p
	if from.Role == RoleClient {
		p.cfg.Clients.Accepted(from, l, h.transport)
		return
	}
	p.attach(&p.peers[from.Rank], from, l, h.transport, nil)
}

// Lost ends an admission: the peer may dial again, or this rank does.
func (h *host) Lost(from Identity) {
	if from.Role == RoleClient {
		return
	}
	p := h.p
	p.Lock()
	defer p.Unlock()
	if pr := &p.peers[from.Rank]; pr.admitted.of == from.Incarnation {
		pr.admitted = admission{}
		p.wakeAll()
	}
}

// connect starts to dial the peer unless that is under way. Called with the lock whenever an
// operation waits for a peer without a link; never blocks.
func (p *Proxy) connect(pr *peer) {
	if pr.link != nil || pr.err != nil || pr.dial != nil || p.closed || pr.rank == p.cfg.Self.Rank {
		return
	}
	now := time.Now()
	if pr.since.IsZero() {
		pr.since = now
	}
	if pr.expected() || p.cfg.Self.Rank > pr.rank && now.Sub(pr.since) < dialTieBreak {
		return
	}
	bound := p.cfg.ConnectTimeout
	if p.cfg.Patient != nil && p.cfg.Patient() {
		bound = max(bound, patience)
	}
	d := &dial{p: p, pr: pr, again: pr.was != nil}
	d.ctx, d.stop = context.WithCancel(p.ctx)
	pr.dial = d
	p.wg.Go(func() {
		defer d.stop()
		err := d.run(bound)
		p.Lock()
		defer p.Unlock()
		if pr.dial != d {
			return
		}
		if pr.dial = nil; err != nil {
			p.log.Debug("cannot link", "peer", pr.rank, "err", err)
			pr.err = err
			if p.cfg.Notify != nil {
				p.cfg.Notify(Identity{Rank: pr.rank, Incarnation: pr.id.Incarnation}, err)
			}
		}
		p.wakeAll()
	})
}

// dial is a goroutine's attempt to make a link to a peer. It counts while it is the peer's dial:
// what gives the peer a link or an error, and Close, end it.
type dial struct {
	p     *Proxy
	pr    *peer
	again bool // after a failure: the peer, too, has to forget it, which may take a while
	ctx   context.Context
	stop  context.CancelFunc
	last  error // why there is no link yet; written with the lock
}

// endDial ends the dial that is under way, if there is one.
func (pr *peer) endDial() {
	if pr.dial != nil {
		pr.dial.stop()
		pr.dial = nil
	}
}

// over reports whether the outcome of d does not matter any more.
func (d *dial) over() bool {
	d.p.Lock()
	defer d.p.Unlock()
	return d.pr.dial != d
}

// Unlinked returns why there is no link to a rank, as far as a dial has found out, or nil. Takes
// the lock itself.
func (p *Proxy) Unlinked(rank int) error {
	p.Lock()
	defer p.Unlock()
	pr := &p.peers[rank]
	if pr.link == nil && pr.err == nil && pr.dial != nil {
		return pr.dial.last
	}
	return pr.err
}

// run dials until there is a link, the peer is known to be gone, does not fit or refuses, d is
// over, or bound has passed since the directory first had an answer.
func (d *dial) run(bound time.Duration) error {
	p, pr, ctx := d.p, d.pr, d.ctx
	pause := 2 * time.Millisecond
	var at Peer
	var via string // the transport of the attempt that ended with d.last
	for tries := 0; ; tries++ {
		to, err := p.cfg.Resolve(ctx, pr.rank)
		if tries == 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, bound)
			defer cancel()
		}
		var l Link
		var name string
		if err == nil {
			l, name, err = d.try(ctx, to)
		} else if errors.Is(err, ErrStale) { // the directory was behind, which the next question may change
			err = fmt.Errorf("%w (%w)", err, errRetry)
		}
		switch {
		case err == nil:
			p.attach(pr, to.Identity, l, name, d)
			return nil
		case d.over():
			return nil
		case errors.Is(err, ErrShortage): // the peer will not accept another attempt
			return files.Explain(err)
		case errors.Is(err, syscall.EMFILE):
			return fmt.Errorf("%w: %w", ErrShortage, files.Explain(err))
		case errors.Is(err, ErrFailed) && d.again:
		case errors.Is(err, ErrStale) && p.cfg.Patient != nil && p.cfg.Patient():
		case errors.Is(err, errRetry):
		case errors.Is(err, ErrPeerGone) && ctx.Err() == nil, errors.Is(err, ErrStale), errors.Is(err, ErrAuth),
			errors.Is(err, ErrVersion), errors.Is(err, ErrUnfit):
			return err
		}
		if d.last == nil || ctx.Err() == nil && !errors.Is(err, ErrFailed) && !errors.Is(err, ErrSuperseded) {
			at, via = to, name
			p.Lock()
			d.last = err
			p.Unlock()
		}
		// A superseded dial waits for the peer's connection in the same way.
		t := time.NewTimer(pause/2 + mrand.N(pause))
		select {
		case <-ctx.Done():
			t.Stop()
			if d.over() {
				return nil
			}
			return fmt.Errorf("no link within %v: %w%s", bound, files.Explain(d.last), p.instead(via, at))
		case <-t.C:
		}
		if d.over() {
			return nil
		}
		pause = min(2*pause, 500*time.Millisecond)
	}
}

// instead names the next transport after via that reaches a peer.
func (p *Proxy) instead(via string, to Peer) string {
	after := false
	for _, t := range p.cfg.Transports {
		ep, ok := to.Endpoints[t.Name()]
		if after && ok && t.Reaches(ep) == nil {
			return fmt.Sprintf(" (TUTTI_TRANSPORT=%s at all ranks avoids %s)", t.Name(), via)
		}
		after = after || t.Name() == via
	}
	return ""
}

var errRetry = errors.New("may come up yet")

// try dials the peer once, over the first transport that reaches it. The error wraps ErrUnfit if no
// transport is there at both ends.
func (d *dial) try(ctx context.Context, to Peer) (Link, string, error) {
	p := d.p
	select {
	case p.dials <- struct{}{}:
		defer func() { <-p.dials }()
	case <-ctx.Done():
		return nil, "", ctx.Err()
	}
	p.Lock()
	expected := d.pr.id.Incarnation
	p.Unlock()
	if expected != 0 && expected != to.Incarnation {
		return nil, "", fmt.Errorf("its incarnation %016x is over, another has its place: %w", expected,
			ErrPeerGone)
	}
	var why, own []string
	for _, t := range p.cfg.Transports {
		ep, ok := to.Endpoints[t.Name()]
		if own = append(own, t.Name()); !ok {
			continue
		}
		if err := t.Reaches(ep); err != nil {
			why = append(why, t.Name()+": "+err.Error())
			continue
		}
		l, err := t.Dial(ctx, to.Identity, ep)
		if errors.Is(err, ErrPeerGone) && !errors.Is(err, ErrStale) {
			err = fmt.Errorf("%w (%w)", err, errRetry) // the directory decides whether the peer is gone
		}
		return l, t.Name(), err
	}
	text := fmt.Sprintf("no transport reaches rank %d, which has %q; this one has %q", d.pr.rank,
		slices.Sorted(maps.Keys(to.Endpoints)), own)
	if len(why) == 0 {
		return nil, "", fmt.Errorf("%w: %s: set TUTTI_TRANSPORT alike at all ranks", ErrUnfit, text)
	}
	return nil, "", fmt.Errorf("%s (%s): is TUTTI_TRANSPORT alike at all ranks?", text, strings.Join(why, "; "))
}
