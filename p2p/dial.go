package p2p

import (
	"context"
	"errors"
	"fmt"
	mrand "math/rand/v2"
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
func (h *host) Wake()          { h.p.wakeAll() }

// Region finds a shared region. It does not take the proxy's lock: a link of another rank in this
// process calls it with the lock of that rank's proxy.
func (h *host) Region(id uint64) (*Region, error) {
	if r := h.p.regions.find(id); r != nil {
		return r, nil
	}
	return nil, ErrNoRegion
}

// Admit decides on an incoming connection. If two connections cross, the lower rank's survives.
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
	switch {
	case pr.err != nil && !pr.vacant:
		return fmt.Errorf("%w: %v has failed for rank %d: %v", ErrStale, from, p.cfg.Self.Rank, pr.err)
	case pr.id.Incarnation != 0 && pr.id.Incarnation != from.Incarnation:
		return fmt.Errorf("%w: rank %d is known as incarnation %016x", ErrStale, from.Rank, pr.id.Incarnation)
	case pr.link != nil || pr.expected():
		return fmt.Errorf("%w: rank %d has one with rank %d already", ErrSuperseded, p.cfg.Self.Rank, from.Rank)
	case pr.dialing && p.cfg.Self.Rank < from.Rank:
		return fmt.Errorf("%w: rank %d is dialling rank %d", ErrSuperseded, p.cfg.Self.Rank, from.Rank)
	}
	pr.admitted = time.Now()
	return nil
}

// expected reports whether an admitted connection may still become a link.
func (pr *peer) expected() bool {
	return !pr.admitted.IsZero() && time.Since(pr.admitted) < HandshakeTimeout
}

// Accepted attaches the link of an admitted connection.
func (h *host) Accepted(from Identity, l Link) {
	p := h.p
	if from.Role == RoleClient {
		p.cfg.Clients.Accepted(from, l, h.transport)
		return
	}
	p.attach(&p.peers[from.Rank], from, l, h.transport)
}

// connect starts to dial the peer unless that is under way. Called with the lock whenever an
// operation waits for a peer without a link; never blocks.
func (p *Proxy) connect(pr *peer) {
	if pr.link != nil || pr.err != nil || pr.dialing || p.closed || pr.rank == p.cfg.Self.Rank {
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
	ctx, stop := context.WithCancel(p.ctx)
	pr.dialing, pr.stop = true, stop
	p.wg.Add(1)
	go func() {
		defer p.wg.Done()
		defer stop()
		err := p.dial(ctx, pr, bound)
		p.Lock()
		defer p.Unlock()
		pr.dialing, pr.stop = false, nil
		if err != nil && pr.link == nil && pr.err == nil && !p.closed {
			p.log.Debug("cannot link", "peer", pr.rank, "err", err)
			pr.err = err
			if p.cfg.Notify != nil {
				p.cfg.Notify(Identity{Rank: pr.rank, Incarnation: pr.id.Incarnation}, err)
			}
		}
		p.wakeAll()
	}()
}

// dial dials until there is a link, the peer is known to be gone or refuses, ctx ends, or bound has
// passed since the directory first had an answer.
func (p *Proxy) dial(ctx context.Context, pr *peer, bound time.Duration) error {
	pause := 2 * time.Millisecond
	var last error
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
			l, name, err = p.try(ctx, pr, to)
		} else if errors.Is(err, ErrStale) { // the directory was behind, which the next question may change
			err = fmt.Errorf("%w (%w)", err, errRetry)
		}
		switch {
		case err == nil:
			p.attach(pr, to.Identity, l, name)
			return nil
		case p.linked(pr) || p.ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrStale) && p.cfg.Patient != nil && p.cfg.Patient():
		case errors.Is(err, errRetry) && !errors.Is(err, syscall.EMFILE):
		case errors.Is(err, ErrPeerGone) && ctx.Err() == nil, errors.Is(err, ErrStale), errors.Is(err, ErrAuth):
			return err
		case errors.Is(err, syscall.EMFILE): // the peer may have accepted this attempt, and will not accept another
			return files.Explain(err)
		}
		if last == nil || ctx.Err() == nil {
			last = err
		}
		// A superseded dial waits for the peer's connection in the same way.
		t := time.NewTimer(pause/2 + mrand.N(pause))
		select {
		case <-ctx.Done():
			t.Stop()
			if p.linked(pr) || p.ctx.Err() != nil {
				return nil
			}
			return fmt.Errorf("no link within %v: %w", bound, last)
		case <-t.C:
		}
		if p.linked(pr) {
			return nil
		}
		pause = min(2*pause, 500*time.Millisecond)
	}
}

var errRetry = errors.New("may come up yet")

func (p *Proxy) linked(pr *peer) bool {
	p.Lock()
	defer p.Unlock()
	return pr.link != nil || pr.err != nil
}

// try dials the peer once, over the first transport that reaches it.
func (p *Proxy) try(ctx context.Context, pr *peer, to Peer) (Link, string, error) {
	select {
	case p.dials <- struct{}{}:
		defer func() { <-p.dials }()
	case <-ctx.Done():
		return nil, "", ctx.Err()
	}
	p.Lock()
	expected := pr.id.Incarnation
	p.Unlock()
	if expected != 0 && expected != to.Incarnation {
		return nil, "", fmt.Errorf("its incarnation %016x is over, another has its place: %w", expected,
			ErrPeerGone)
	}
	var why []string
	for _, t := range p.cfg.Transports {
		ep, ok := to.Endpoints[t.Name()]
		if !ok {
			why = append(why, t.Name()+": the peer does not offer it")
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
	return nil, "", fmt.Errorf("no transport reaches rank %d: %s", pr.rank, strings.Join(why, "; "))
}
