package p2p_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/p2p"
)

// nowhere is a transport whose peers never answer.
type nowhere struct{}

func (nowhere) Name() string                                     { return "nowhere" }
func (nowhere) Listen(context.Context, p2p.Host) ([]byte, error) { return []byte("x"), nil }
func (nowhere) Reaches([]byte) error                             { return nil }
func (nowhere) Close() error                                     { return nil }
func (nowhere) Dial(ctx context.Context, _ p2p.Identity, _ []byte) (p2p.Link, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// dialler returns a proxy for rank 0 of two, with its channel, that reaches rank 1 as cfg says.
func dialler(t *testing.T, cfg p2p.Config) (*p2p.Proxy, *p2p.Channel) {
	t.Helper()
	cfg.Self, cfg.Size, cfg.Secret = p2p.Identity{Rank: 0, Incarnation: 1}, 2, []byte("0123456789abcdef")
	cfg.Threads, cfg.Oversubscribed = true, true
	p := p2p.New(cfg)
	t.Cleanup(func() { p.Close() })
	if _, err := p.Listen(context.Background()); err != nil {
		t.Fatal(err)
	}
	return p, open(t, p, 1, 2)
}

// rank1 is what the directory says of an incarnation of rank 1.
func rank1(incarnation uint64) p2p.Peer {
	return p2p.Peer{Identity: p2p.Identity{Rank: 1, Incarnation: incarnation},
		Endpoints: map[string][]byte{"nowhere": []byte("x")}}
}

// waitRecv waits for a message from rank 1, and returns the error.
func waitRecv(p *p2p.Proxy, c *p2p.Channel, w *p2p.Wait) error {
	var r p2p.Recv
	p.Lock()
	defer p.Unlock()
	c.PostRecv(&r, 1, p2p.Token{Seq: 1}, make([]byte, 1), false)
	return c.WaitRecv(w, &r)
}

// A peer that cannot be reached has failed after ConnectTimeout, unless it may not have come yet.
func TestUnreachablePeerFails(t *testing.T) {
	for _, patience := range []bool{false, true} {
		p, c := dialler(t, p2p.Config{Transports: []p2p.Transport{nowhere{}}, ConnectTimeout: 20 * time.Millisecond,
			Patient: func() bool { return patience },
			Resolve: func(context.Context, int) (p2p.Peer, error) {
				return rank1(2), nil
			}})
		timeout := 20 * time.Second
		if patience {
			timeout = 300 * time.Millisecond
		}
		var w p2p.Wait
		w.Reset(context.Background(), timeout, true)
		err := waitRecv(p, c, &w)
		if failed := errors.As(err, new(*p2p.PeerError)); failed == patience || err == nil {
			t.Errorf("with patience %v: %v", patience, err)
		}
		p.Close()
	}
}

// third is a transport like nowhere with another name.
type third struct{ nowhere }

func (third) Name() string { return "third" }

// away is a transport that does not reach its peers.
type away struct{ nowhere }

func (away) Name() string         { return "away" }
func (away) Reaches([]byte) error { return errors.New("not from here") }

// The error of a link that did not come up names the next transport that reaches the peer.
func TestUnreachablePeerNamesOtherTransport(t *testing.T) {
	peer := rank1(2)
	peer.Endpoints["away"], peer.Endpoints["third"] = []byte("x"), []byte("x")
	for _, more := range []bool{false, true} {
		all := []p2p.Transport{nowhere{}, away{}}
		if more {
			all = append(all, third{})
		}
		p, c := dialler(t, p2p.Config{Transports: all, ConnectTimeout: time.Second,
			Resolve: func(context.Context, int) (p2p.Peer, error) { return peer, nil }})
		err := waitRecv(p, c, patient(context.Background()))
		if err == nil || strings.Contains(err.Error(), "TUTTI_TRANSPORT=third") != more ||
			strings.Contains(err.Error(), "TUTTI_TRANSPORT") != more {
			t.Errorf("with another transport %v: %v", more, err)
		}
	}
}

// refusing is a transport whose peers are other incarnations.
type refusing struct{ nowhere }

func (refusing) Dial(context.Context, p2p.Identity, []byte) (p2p.Link, error) {
	return nil, fmt.Errorf("not me: %w", p2p.ErrStale)
}

// scripting is a transport whose dials end with these errors, the last one again and again.
type scripting struct {
	nowhere
	errs  []error
	dials atomic.Int32
}

func (s *scripting) Dial(context.Context, p2p.Identity, []byte) (p2p.Link, error) {
	n := int(s.dials.Add(1))
	return nil, fmt.Errorf("dial %d: %w", n, s.errs[min(n, len(s.errs))-1])
}

// A shortage at this end ends the dial at once: the peer may have accepted, and then refuses
// further ones. Other errors are not hidden by these refusals.
func TestShortageEndsDial(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		text string
		once bool // otherwise until ConnectTimeout has passed
	}{
		"memory":      {fmt.Errorf("%w: mapping: %w", p2p.ErrShortage, syscall.ENOMEM), "cannot allocate", true},
		"descriptors": {syscall.EMFILE, "RLIMIT_NOFILE", true},
		"files":       {syscall.ENFILE, "fs.file-max", false},
		"other":       {syscall.EIO, "dial 2", false},
	} {
		t.Run(name, func(t *testing.T) {
			tr, bound := &scripting{errs: []error{p2p.ErrStale, c.err, p2p.ErrFailed}}, time.Second
			if c.once {
				bound = 10 * time.Second
			}
			p, ch := dialler(t, p2p.Config{Transports: []p2p.Transport{tr}, ConnectTimeout: bound,
				Resolve: func(context.Context, int) (p2p.Peer, error) { return rank1(2), nil }})
			if err := waitRecv(p, ch, patient(t.Context())); !errors.Is(err, p2p.ErrStale) {
				t.Fatal(err)
			}
			p.Reconnect(1) // from now on refusals are no reason to give up
			err := waitRecv(p, ch, patient(t.Context()))
			if !errors.Is(err, c.err) || !strings.Contains(err.Error(), c.text) || errors.Is(err, p2p.ErrFailed) {
				t.Errorf("%v, want %v and %q", err, c.err, c.text)
			}
			if errors.Is(err, p2p.ErrShortage) != c.once || c.once && tr.dials.Load() != 2 ||
				strings.Contains(err.Error(), "no link within") == c.once {
				t.Errorf("%d dials: %v; a shortage: %v", tr.dials.Load(), err, c.once)
			}
		})
	}
}

// A peer of another build or with other settings, and one without a transport that this rank has,
// have failed at once.
func TestUnfitPeerIsNotDialledAgain(t *testing.T) {
	for name, c := range map[string]struct {
		own  p2p.Transport
		err  error // of the directory
		want error
		text string
	}{
		"directory": {nowhere{}, fmt.Errorf("%w: other terms", p2p.ErrUnfit), p2p.ErrUnfit, "other terms"},
		"handshake": {&scripting{errs: []error{p2p.ErrVersion}}, nil, p2p.ErrVersion, "dial 1"},
		"no common transport": {third{}, nil, p2p.ErrUnfit,
			`rank 1, which has ["nowhere"]; this one has ["third"]: set TUTTI_TRANSPORT alike`},
	} {
		t.Run(name, func(t *testing.T) {
			var asked atomic.Int32
			p, ch := dialler(t, p2p.Config{Transports: []p2p.Transport{c.own}, Patient: func() bool { return true },
				Resolve: func(context.Context, int) (p2p.Peer, error) { asked.Add(1); return rank1(2), c.err }})
			err := waitRecv(p, ch, patient(t.Context()))
			if !errors.As(err, new(*p2p.PeerError)) || !errors.Is(err, c.want) || asked.Load() != 1 ||
				!strings.Contains(err.Error(), c.text) {
				t.Errorf("asked %d times: %v", asked.Load(), err)
			}
			if why := p.Unlinked(1); !errors.Is(why, c.want) {
				t.Errorf("there is no link because of %v", why)
			}
		})
	}
}

// While a peer is dialled, the proxy knows why there is no link yet.
func TestUnlinkedTellsWhy(t *testing.T) {
	for _, tr := range []p2p.Transport{away{}, &scripting{errs: []error{syscall.EHOSTUNREACH}}} {
		peer := rank1(2)
		peer.Endpoints["away"] = []byte("x")
		p, ch := dialler(t, p2p.Config{Transports: []p2p.Transport{tr},
			Resolve: func(context.Context, int) (p2p.Peer, error) { return peer, nil }})
		if why := p.Unlinked(1); why != nil {
			t.Errorf("before it is dialled: %v", why)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- waitRecv(p, ch, patient(ctx)) }()
		for end := time.Now().Add(20 * time.Second); p.Unlinked(1) == nil; runtime.Gosched() {
			if time.Now().After(end) {
				t.Fatal("there is no reason")
			}
		}
		want := map[string]string{"away": "away: not from here", "nowhere": "no route"}[tr.Name()]
		if why := p.Unlinked(1); !strings.Contains(why.Error(), want) || errors.Is(why, p2p.ErrUnfit) {
			t.Errorf("%v, want %s", why, want)
		}
		cancel()
		<-done
		p.Close()
	}
}

// A directory that knows an old incarnation is asked again. A peer that says so itself has failed.
func TestStaleDirectoryIsAskedAgain(t *testing.T) {
	var asked atomic.Int32
	p, c := dialler(t, p2p.Config{Transports: []p2p.Transport{refusing{}},
		Resolve: func(context.Context, int) (p2p.Peer, error) {
			if asked.Add(1) < 3 {
				return p2p.Peer{}, fmt.Errorf("old record: %w", p2p.ErrStale)
			}
			return rank1(2), nil
		}})
	err := waitRecv(p, c, patient(context.Background()))
	if !errors.As(err, new(*p2p.PeerError)) || !strings.Contains(err.Error(), "not me") || asked.Load() != 3 {
		t.Errorf("asked %d times: %v", asked.Load(), err)
	}
}

// The time in which the directory waits for a peer to come does not count.
func TestLatePeerIsWaitedFor(t *testing.T) {
	const late = 200 * time.Millisecond
	p, c := dialler(t, p2p.Config{Transports: []p2p.Transport{nowhere{}}, ConnectTimeout: late / 10,
		Resolve: func(ctx context.Context, _ int) (p2p.Peer, error) {
			select {
			case <-ctx.Done():
			case <-time.After(late):
			}
			return p2p.Peer{}, fmt.Errorf("after a while: %w", p2p.ErrPeerGone)
		}})
	began := time.Now()
	err := waitRecv(p, c, patient(context.Background()))
	if !errors.As(err, new(*p2p.PeerError)) || time.Since(began) < late {
		t.Errorf("after %v: %v", time.Since(began), err)
	}
}

// A dial that began before MarkDead has no effect on a later incarnation.
func TestDialToDeadIncarnationIsForgotten(t *testing.T) {
	var asked atomic.Int32
	began, held := make(chan struct{}), make(chan struct{})
	p, c := dialler(t, p2p.Config{Transports: []p2p.Transport{refusing{}},
		Resolve: func(ctx context.Context, _ int) (p2p.Peer, error) {
			if asked.Add(1) == 1 {
				close(began)
				<-held
				<-ctx.Done()
				return p2p.Peer{}, ctx.Err()
			}
			return rank1(2), nil
		}})
	ctx, cancel := context.WithCancel(context.Background())
	go func() { <-began; cancel() }()
	if err := waitRecv(p, c, patient(ctx)); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	p.MarkDead(1, 0, errors.New("it is dead"))
	p.Expect(1, 0)
	close(held)
	err := waitRecv(p, c, patient(context.Background()))
	if !errors.As(err, new(*p2p.PeerError)) || !strings.Contains(err.Error(), "not me") {
		t.Errorf("asked %d times: %v, want the later dial's error", asked.Load(), err)
	}
}

// A dial to one incarnation goes on when another is marked dead.
func TestDialSurvivesDeathOfAnotherIncarnation(t *testing.T) {
	began, held := make(chan struct{}), make(chan struct{})
	p, c := dialler(t, p2p.Config{Transports: []p2p.Transport{refusing{}},
		Resolve: func(ctx context.Context, _ int) (p2p.Peer, error) {
			close(began)
			<-held
			return rank1(3), ctx.Err()
		}})
	p.Expect(1, 3)
	p.Reconnect(1)
	<-began
	p.MarkDead(1, 2, errors.New("it is dead"))
	close(held)
	err := waitRecv(p, c, patient(context.Background()))
	if !errors.As(err, new(*p2p.PeerError)) || !strings.Contains(err.Error(), "not me") {
		t.Errorf("%v, want the dial's error", err)
	}
}

// While a connection that was admitted may become a link, the peer's other ones are refused. When
// it is lost they are not.
func TestLostAdmissionMakesRoom(t *testing.T) {
	peer, tr := p2p.Identity{Rank: 1, Incarnation: 2}, &hostile{}
	p, _ := dialler(t, p2p.Config{Transports: []p2p.Transport{tr}})
	p.Expect(1, peer.Incarnation)
	for range 2 {
		if err := tr.host.Admit(peer); err != nil {
			t.Fatal(err)
		}
		if err := tr.host.Admit(peer); !errors.Is(err, p2p.ErrSuperseded) {
			t.Errorf("another connection: %v", err)
		}
		tr.host.Lost(p2p.Identity{Rank: 1, Incarnation: 3})
		if err := tr.host.Admit(peer); !errors.Is(err, p2p.ErrSuperseded) {
			t.Errorf("after the loss of another incarnation's: %v", err)
		}
		tr.host.Lost(peer)
	}
}

// A peer that connects although there is a link has lost its end of it, unless its dial may have
// crossed that of the link.
func TestHalfOpenLinkIsReplaced(t *testing.T) {
	const old = p2p.HandshakeTimeout + time.Minute
	peer, other := p2p.Identity{Rank: 1, Incarnation: 2}, p2p.Identity{Rank: 1, Incarnation: 3}
	tr := &hostile{}
	var told []error // of rank 1's links
	p, _ := dialler(t, p2p.Config{Transports: []p2p.Transport{tr},
		Notify: func(_ p2p.Identity, err error) { told = append(told, err) }})
	link := &muted{fails: new(atomic.Bool), asked: make(chan struct{}, 1)}
	accept(t, tr.host, peer, link)
	for range 2 {
		if err := tr.host.Admit(peer); !errors.Is(err, p2p.ErrSuperseded) {
			t.Errorf("while the link is young: %v", err)
		}
	}
	p.Age(1, old)
	// A dial that crossed that of the link may end now, if a process was stopped.
	if err := tr.host.Admit(peer); !errors.Is(err, p2p.ErrSuperseded) || p.Linked(1) == 0 {
		t.Errorf("the first time that it connects: %v, linked with incarnation %d", err, p.Linked(1))
	}
	if err := tr.host.Admit(other); !errors.Is(err, p2p.ErrStale) || p.Linked(1) == 0 {
		t.Errorf("another incarnation connects: %v, linked with incarnation %d", err, p.Linked(1))
	}
	for range 2 { // the first one is lost
		if err := tr.host.Admit(peer); err != nil {
			t.Fatal(err)
		}
		if life := p.Linked(1); life != 0 {
			t.Errorf("linked with incarnation %d while the peer connects", life)
		}
		tr.host.Lost(peer)
	}
	accept(t, tr.host, peer, &muted{fails: new(atomic.Bool), asked: make(chan struct{}, 1)})
	if p.Linked(1) != peer.Incarnation || p.Down(1) != nil {
		t.Errorf("linked with incarnation %d, down: %v", p.Linked(1), p.Down(1))
	}
	if len(told) != 3 || told[0] != nil || !errors.Is(told[1], p2p.ErrPeerGone) ||
		!strings.Contains(told[1].Error(), "it connects anew") || told[2] != nil {
		t.Errorf("told %q", told)
	}
}

// A connection that was admitted becomes no link when its incarnation is marked dead meanwhile,
// also if the next one is expected.
func TestAdmissionEndsWithItsIncarnation(t *testing.T) {
	tr := &hostile{}
	p, _ := dialler(t, p2p.Config{Transports: []p2p.Transport{tr}})
	old, next := p2p.Identity{Rank: 1, Incarnation: 2}, p2p.Identity{Rank: 1, Incarnation: 3}
	p.Expect(1, old.Incarnation)
	if err := tr.host.Admit(old); err != nil {
		t.Fatal(err)
	}
	p.MarkDead(1, old.Incarnation, errors.New("it is dead"))
	p.Expect(1, next.Incarnation)
	late := &scripted{}
	tr.host.Accepted(old, late)
	if life := p.Linked(1); life != 0 || !late.closed {
		t.Errorf("linked with incarnation %d, the late link is closed: %v", life, late.closed)
	}
	accept(t, tr.host, next, &scripted{})
	if life := p.Linked(1); life != next.Incarnation {
		t.Errorf("linked with incarnation %d, want %d", life, next.Incarnation)
	}
}

// narrow is a link with frames that are too short.
type narrow struct{ scripted }

func (narrow) MaxFrame() int { return p2p.MinFrame - 1 }

// A link that does not carry all control frames is refused, and operations learn that.
func TestNarrowLinkIsRefused(t *testing.T) {
	tr, link := &hostile{}, &narrow{}
	p, c := dialler(t, p2p.Config{Transports: []p2p.Transport{tr}})
	accept(t, tr.host, p2p.Identity{Rank: 1, Incarnation: 2}, link)
	if err := waitRecv(p, c, patient(t.Context())); !errors.Is(err, p2p.ErrProtocol) || !link.closed {
		t.Errorf("got %v, the link is closed: %v", err, link.closed)
	}
}

// TestAdmittedRankKeepsItsLink: a rank that is about to become a member is not marked dead.
func TestAdmittedRankKeepsItsLink(t *testing.T) {
	tr := &hostile{}
	p, _ := dialler(t, p2p.Config{Transports: []p2p.Transport{tr}})
	id := p2p.Identity{Rank: 1, Incarnation: 2}
	if err := tr.host.Admit(id); err != nil {
		t.Fatal(err)
	}
	p.MarkDeadUnlinked(1, 0, errors.New("no process"))
	l := &scripted{}
	tr.host.Accepted(id, l)
	if p.Linked(1) != 2 || l.closed {
		t.Error("the link of a rank that is about to join was closed")
	}
}

// TestExpectEndsOtherAdmissions: a connection of another incarnation that is being accepted does
// not become a link.
func TestExpectEndsOtherAdmissions(t *testing.T) {
	tr := &hostile{}
	p, _ := dialler(t, p2p.Config{Transports: []p2p.Transport{tr}})
	old, next := p2p.Identity{Rank: 1, Incarnation: 2}, p2p.Identity{Rank: 1, Incarnation: 3}
	p.MarkDead(1, 0, errors.New("it is dead"))
	if err := tr.host.Admit(old); err != nil {
		t.Fatal(err)
	}
	p.Expect(1, next.Incarnation)
	l := &scripted{}
	tr.host.Accepted(old, l)
	if err := tr.host.Admit(next); err != nil {
		t.Error(err)
	}
	if p.Linked(1) == 2 {
		t.Error("linked with an incarnation that is not expected")
	}
}
