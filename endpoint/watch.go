package endpoint

import (
	"context"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"

	"tutti/endpoint/internal/args"
	"tutti/endpoint/internal/link"
	"tutti/endpoint/internal/wire"
)

// RegionEvent is a change of a peer's regions.
type RegionEvent struct {
	RemoteRegion
	Gone bool // it was unregistered
}

// maxEvents bounds the events that a program has not taken from Watch.
const maxEvents = 64 << 10

// Watch returns the peer's regions that this end may use, and then changes of them as they come,
// until ctx ends or the caller stops. A region may be reported twice; the last report counts. The
// last pair has an error: that of ctx, ErrBroken if the connection was lost, or ErrBusy if this end
// or its program was too slow. If this end has 16 watches of the peer already, ErrBusy is all that
// comes.
func (p *Peer) Watch(ctx context.Context) iter.Seq2[RegionEvent, error] {
	return func(yield func(RegionEvent, error) bool) {
		if err := args.Context(ctx, p, "watch"); err != nil {
			yield(RegionEvent{}, err)
			return
		}
		q := &query{op: wire.Watch, more: make(chan struct{}, 1)}
		fail := func(err error) { yield(RegionEvent{}, fmt.Errorf("regions of %v: %w", p, err)) }
		if err := p.open(ctx, q); err != nil {
			fail(err)
			return
		}
		defer p.unwatch(q)
		for after, last := "", false; !last; {
			page, err := p.Regions(ctx, after, MaxPage)
			if err == nil { // a refusal of the watch comes before the first page
				p.mu.Lock()
				err = q.err
				p.mu.Unlock()
			}
			if err != nil {
				fail(err)
				return
			}
			for _, r := range page {
				if !yield(RegionEvent{RemoteRegion: r}, nil) {
					return
				}
				after = r.Name
			}
			last = len(page) < MaxPage
		}
		for {
			p.mu.Lock()
			events, err := q.events, q.err
			q.events = nil
			p.mu.Unlock()
			for _, ev := range events {
				if !yield(ev, nil) {
					return
				}
			}
			if err != nil {
				fail(err)
				return
			}
			select {
			case <-q.more:
			case <-q.done:
			case <-ctx.Done():
				fail(context.Cause(ctx))
				return
			}
		}
	}
}

// unwatch gives up a watch.
func (p *Peer) unwatch(q *query) {
	p.mu.Lock()
	defer p.unlock()
	s := p.session
	if q.ended || s == nil {
		return
	}
	q.ended = true
	for id, r := range s.requests {
		if r.query == q {
			s.conns[0].Later(wire.Header{Address: id, Op: wire.Cancel}.Append(nil))
			p.touchLocked(s.conns[0])
		}
	}
	s.unaskLocked()
}

// eventLocked gives an event to a program that watches.
func (s *session) eventLocked(id uint64, q *query, ev RegionEvent) {
	if len(q.events) >= maxEvents {
		s.conns[0].Later(wire.Header{Address: id, Op: wire.Cancel}.Append(nil))
		s.peer.touchLocked(s.conns[0])
		s.endQueryLocked(q, fmt.Errorf("%w: %d changes were not taken", ErrBusy, len(q.events)))
		return
	}
	q.events = append(q.events, ev)
	select {
	case q.more <- struct{}{}:
	default:
	}
}

// goneLocked handles that a region of the peer is not registered any more.
func (s *session) goneLocked(v vanished, name string) error {
	r, ok := s.requests[v.id]
	if !ok || r.query == nil || r.query.op != wire.Watch {
		return fmt.Errorf("%w: a change for request %d, which did not ask for it", wire.ErrFrame, v.id)
	}
	if err := checkName("region", name); err != nil {
		return fmt.Errorf("%w: %w", wire.ErrFrame, err)
	}
	if x, ok := s.peer.known[name]; ok && x.generation == v.generation {
		delete(s.peer.known, name)
	}
	if !r.query.ended {
		s.eventLocked(v.id, r.query, RegionEvent{RemoteRegion{Name: name, id: v.region, generation: v.generation},
			true})
	}
	return nil
}

// watchers are the requests of peers that want to know of changes.
type watchers struct {
	watchMu  sync.Mutex
	watching map[*service]struct{}
}

func (w *watchers) add(sv *service) {
	w.watchMu.Lock()
	defer w.watchMu.Unlock()
	if w.watching == nil {
		w.watching = map[*service]struct{}{}
	}
	w.watching[sv] = struct{}{}
}

func (w *watchers) remove(sv *service) {
	w.watchMu.Lock()
	defer w.watchMu.Unlock()
	delete(w.watching, sv)
}

// changed tells the peers that watch. Without locks.
func (e *Endpoint) changed(r *Region, gone bool) {
	e.watchMu.Lock()
	all := slices.Collect(maps.Keys(e.watching))
	e.watchMu.Unlock()
	for _, sv := range all {
		p := sv.session.peer
		p.mu.Lock()
		sv.session.reportLocked(sv, r, gone)
		p.unlock()
	}
}

// reportLocked tells the peer of a change.
func (s *session) reportLocked(sv *service, r *Region, gone bool) {
	if s.serving[sv.id] != sv || r.rightsOf(s.peer.client) == 0 {
		return
	}
	c := s.conns[0]
	if c.Backlog() > maxBacklog {
		s.endWatchLocked(c, sv, wire.Busy)
		return
	}
	if gone {
		b := wire.Header{Size: uint64(16 + len(r.name)), Address: sv.id, Op: wire.Gone}.Append(nil)
		c.Later(append(wire.Words(b, r.id, r.generation), r.name...))
	} else {
		c.Later(region(nil, sv.id, r, s.peer.client))
	}
	s.peer.touchLocked(c)
}

// watchLocked begins to report changes to the peer.
func (s *session) watchLocked(c *link.Conn, id uint64) error {
	if err := s.oweLocked(c); err != nil {
		return err
	}
	if s.serving[id] != nil {
		return fmt.Errorf("%w: request %d is open already", wire.ErrFrame, id)
	}
	if s.watches == maxWatches {
		s.answerWhyLocked(c, id, wire.Busy, 0, fmt.Sprintf("%d watches of the session are open", maxWatches))
		return nil
	}
	s.watches++
	sv := s.newServiceLocked(c, id)
	sv.watch = true
	s.ep.watchers.add(sv)
	return nil
}

func (s *session) endWatchLocked(c *link.Conn, sv *service, code wire.Code) {
	delete(s.serving, sv.id)
	s.watches--
	s.ep.watchers.remove(sv)
	s.answerLocked(c, sv.id, code, 0)
}
