package pg

import (
	"context"
	"errors"
	"net"
	"runtime"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/internal/ident"
	"tutti/p2p"
	"tutti/pg/internal/join"
	"tutti/pg/membership"
)

// mute is a transport that never answers: dialling it lasts as long as it may, or gives a link that
// takes nothing (full) or everything (hollow), and from which nothing comes.
type mute struct{ way string }

func (m *mute) Name() string                                     { return "mute" }
func (m *mute) Listen(context.Context, p2p.Host) ([]byte, error) { return []byte("x"), nil }
func (m *mute) Reaches([]byte) error                             { return nil }
func (m *mute) Close() error                                     { return nil }
func (m *mute) Dial(ctx context.Context, _ p2p.Identity, _ []byte) (p2p.Link, error) {
	if m.way == "dial" {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return &muteLink{taking: m.way == "hollow"}, nil
}

type muteLink struct{ taking bool }

func (l *muteLink) Send(*p2p.Header, []byte) (bool, error) { return l.taking, nil }
func (l *muteLink) Flush() (bool, error)                   { return true, nil }
func (l *muteLink) Recv() (*p2p.Header, []byte, error)     { return nil, nil, nil }
func (l *muteLink) Fill([]byte) (int, error)               { return 0, nil }
func (l *muteLink) Release()                               {}
func (l *muteLink) MaxFrame() int                          { return 64 << 10 }
func (l *muteLink) Arm() bool                              { return false }
func (l *muteLink) Disarm()                                {}
func (l *muteLink) Err() error                             { return nil }
func (l *muteLink) Close() error                           { return nil }

// unanswered is rank 0 of n in this process; the others are behind a mute transport, or behind a
// directory that never answers.
func unanswered(t *testing.T, n int, way string, timeout time.Duration) *Group {
	t.Helper()
	s, err := Config{Size: n, MaxSize: n, Timeout: timeout}.resolve(func(string) string { return "" })
	if err != nil {
		t.Fatal(err)
	}
	ids, places, incarnations := make([]p2p.Identity, n), make([]join.Place, n), make([]uint64, n)
	for r := range n {
		ids[r] = p2p.Identity{Rank: r, Incarnation: ident.New()}
		places[r], incarnations[r] = join.Place{Cores: runtime.NumCPU()}, ids[r].Incarnation
	}
	resolve := func(ctx context.Context, rank int) (p2p.Peer, error) {
		if way == "directory" {
			<-ctx.Done()
			return p2p.Peer{}, ctx.Err()
		}
		return p2p.Peer{Identity: ids[rank], Endpoints: map[string][]byte{"mute": []byte("x")}}, nil
	}
	p := p2p.New(p2p.Config{Self: ids[0], Size: n, Secret: []byte(bootstrap.NewSecret()), Resolve: resolve,
		Transports: []p2p.Transport{&mute{way}}, Threads: true,
		Oversubscribed: true, Logger: s.Logger})
	j := newJob(s)
	j.session = join.New(&join.Settings{Size: n, MaxSize: n, Logger: s.Logger})
	j.session.Self, j.session.Proxy, j.session.Here = ids[0], p, places[0]
	j.proxy, j.local, j.places, j.initial = p, true, places, membership.First(incarnations)
	if _, err := p.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	g, err := j.world()
	if err != nil {
		t.Fatal(err)
	}
	g.locate(places)
	return g
}

// Every public call that waits for peers ends near its ctx's end, or that of Config.Timeout, with a
// *TimeoutError, whichever method of the transport or directory it is that never answers.
func TestEveryCallEndsInTime(t *testing.T) {
	const n = 3
	calls := turnTakers(n)
	x := make([]int64, 100_000)
	calls["send"] = func(ctx context.Context, g *Group) error { return Send(ctx, g, x, 1, 0) }
	calls["recv"] = func(ctx context.Context, g *Group) error { _, err := Recv(ctx, g, x, 1, 0); return err }
	calls["recv from any"] = func(ctx context.Context, g *Group) error {
		_,
			err := Recv(ctx, g, x, AnyRank, AnyTag)
		return err
	}
	calls["allreduce of much"] = func(ctx context.Context, g *Group) error { return AllReduce(ctx, g, x, Sum) }
	calls["behind what was started"] = func(ctx context.Context, g *Group) error {
		g.Start(BarrierOp{})
		return g.Barrier(ctx)
	}
	// the root needs nothing of the others where the link takes all
	rootless := map[string]bool{"scatter": true, "broadcast": true}
	for _, way := range []string{"directory", "dial", "full", "hollow"} {
		for name, call := range calls {
			for _, bound := range []string{"ctx", "timeout"} {
				t.Run(way+"/"+name+"/"+bound, func(t *testing.T) {
					t.Parallel()
					ctx, timeout := t.Context(), 200*time.Millisecond
					if bound == "ctx" {
						timeout = time.Minute
						var cancel context.CancelFunc
						ctx, cancel = context.WithTimeout(ctx, 200*time.Millisecond)
						defer cancel()
					}
					g := unanswered(t, n, way, timeout)
					began := time.Now()
					err := call(ctx, g)
					if took := time.Since(began); took > 10*time.Second {
						t.Errorf("it took %v", took)
					}
					var late *TimeoutError
					if !errors.As(err, &late) && !(err == nil && way == "hollow" && rootless[name]) {
						t.Errorf("got %v, want a *TimeoutError", err)
					}
					began = time.Now()
					g.Close()
					if took := time.Since(began); took > 10*time.Second {
						t.Errorf("Close took %v", took)
					}
				})
			}
		}
	}
}

// Join ends near its ctx's end if a process accepts connections for the store and never answers.
func TestJoinEndsInTime(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, scheme := range []string{"tutti://", "etcd://"} {
		for _, bound := range []string{"ctx", "timeout"} {
			ctx, timeout := t.Context(), 300*time.Millisecond
			if bound == "ctx" {
				timeout = time.Minute
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, 300*time.Millisecond)
				defer cancel()
			}
			began := time.Now()
			g, err := Join(ctx, Config{Size: 2, Rank: 1, Job: "silent", StoreAddr: scheme + l.Addr().String(),
				Secret: []byte("0123456789abcdef"), Timeout: timeout})
			if took := time.Since(began); err == nil || took > 15*time.Second {
				t.Errorf("%s, %s: %v after %v", scheme, bound, err, took)
			}
			if g != nil {
				g.Close()
			}
		}
	}
}
