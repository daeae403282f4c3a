package endpoint

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"tutti/endpoint/internal/wire"
	"tutti/endpoint/stats"
	"tutti/internal/trust"
	"tutti/mem"
)

// Metrics have a counter for each reason before anything fails, by the list of package stats.
func TestReasonsAreAllListed(t *testing.T) {
	failed, refused := stats.Reasons()
	var all, told []string
	for why := range causes {
		all = append(all, why.String())
	}
	for _, why := range codeCauses[wire.OK+1:] {
		told = append(told, why.String())
	}
	for _, l := range [][]string{failed, refused, all, told} {
		slices.Sort(l)
	}
	if !slices.Equal(failed, all) {
		t.Errorf("operations fail for %q, not %q", all, failed)
	}
	if !slices.Equal(refused, told) {
		t.Errorf("requests are refused for %q, not %q", told, refused)
	}
}

func TestStatsCountWhatHappens(t *testing.T) {
	a, b, pb, pa := pair(t, Config{Checksum: true}) // without RDMA: what goes by it is not served
	if _, err := b.Register("rw", mem.Host(make([]byte, 100), mem.Anywhere), RegionConfig{Rights: Read |
		Write}); err != nil {
		t.Fatal(err)
	}
	r, err := b.Register("ro", mem.Host(make([]byte, 50), mem.Anywhere), RegionConfig{})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	buf := make([]byte, 30)
	wait(t, pb.Read(buf, "rw", 0))
	wait(t, pb.Read(buf[:3], "rw", 0))
	wait(t, pb.Write(buf, "rw", 1))
	wait(t, pb.Send(buf[:7]))
	large := pb.Send(make([]byte, maxMessage+1)) // waits here until it is received
	eventually(t, "the offer", func() bool { return b.Stats().Offered.N == 1 })
	want := func(what string, got, want any) {
		t.Helper()
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	sa, sb := a.Stats(), b.Stats()
	want("done", sa.Done, map[string]stats.Count{"read": {N: 2, Bytes: 33}, "write": {N: 1, Bytes: 30},
		"send": {N: 1, Bytes: 7}})
	want("pending", sa.Pending, map[string]int{"send": 1})
	want("failed", sa.Failed, map[string]uint64{})
	want("served", sb.Served, map[string]stats.Count{"read": {N: 2, Bytes: 33}, "write": {N: 1, Bytes: 30}})
	want("waiting", sb.Waiting, stats.Count{N: 1, Bytes: 7})
	want("offered", sb.Offered, stats.Count{N: 1, Bytes: maxMessage + 1})
	want("regions", [2]int64{int64(sb.Regions), sb.RegionBytes}, [2]int64{2, 150})
	want("peers", [3]int{sb.Peers, sb.Connected, sb.Conns}, [3]int{1, 1, a.cfg.Conns})
	want("sessions", [2]uint64{sa.Sessions, sa.Broken}, [2]uint64{1, 0})
	want("name", [2]string{sa.Name, sa.ID}, [2]string{"a", fmt.Sprintf("%016x", a.id)})
	if sa.Sent < 30+7 || sa.Received < 33 || sb.Received < 30+7 || sb.Sent < 33 {
		t.Errorf("bytes: %d and %d, %d and %d", sa.Sent, sa.Received, sb.Sent, sb.Received)
	}

	// What is refused is counted by both ends, and by the one that knew it before.
	for range 2 {
		if err := pb.Write(buf, "ro", 0).Wait(ctx); !errors.Is(err, ErrRights) {
			t.Error(err)
		}
	}
	if err := pb.Read(buf, "none", 0).Wait(ctx); !errors.Is(err, ErrNoRegion) {
		t.Error(err)
	}
	r.Unregister()
	if err := pb.Read(buf, "ro", 0).Wait(ctx); !errors.Is(err, ErrStale) {
		t.Error(err)
	}
	pb.Recv(buf).Cancel()
	wait(t, pa.Recv(buf))
	wait(t, pa.Recv(make([]byte, maxMessage+1)))
	wait(t, large)
	sa, sb = a.Stats(), b.Stats()
	want("failed", sa.Failed, map[string]uint64{"rights": 2, "no region": 1, "stale": 1, "cancelled": 1})
	want("refused", sb.Refused, map[string]uint64{"no region": 1, "stale": 1})
	want("received", sb.Done, map[string]stats.Count{"recv": {N: 2, Bytes: maxMessage + 8}})
	want("nothing waits", []stats.Count{sb.Waiting, sb.Offered}, make([]stats.Count, 2))

	// A session that is lost, and a peer that is forgotten, leave their counts.
	pb.mu.Lock()
	c := pb.session.conns[0]
	pb.mu.Unlock()
	cut(c)
	eventually(t, "the loss", func() bool { return a.Stats().Broken == 1 && b.Stats().Broken == 1 })
	wait(t, pb.Read(buf, "rw", 0))
	before := a.Stats()
	want("sessions", before.Sessions, 2)
	if before.Sent <= sa.Sent || before.Received < sa.Received+30 {
		t.Errorf("bytes: %d and %d, after %d and %d", before.Sent, before.Received, sa.Sent, sa.Received)
	}
	pb.Close()
	if err := pb.Read(buf, "rw", 0).Wait(ctx); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	after := a.Stats()
	want("failed in the end", after.Failed["closed"], 1)
	want("peers", [2]int{after.Peers, after.Conns}, [2]int{0, 0})
	if !maps.Equal(after.Done, before.Done) || after.Sent < before.Sent || after.Received < before.Received {
		t.Errorf("%+v, before %+v", after, before)
	}
}

func TestEndpointsOfTheProcessAreReported(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{Name: "reported"})
	is := func(s stats.Endpoint) bool { return s.ID == fmt.Sprintf("%016x", e.id) && s.Name == "reported" }
	if all := stats.All(); !slices.ContainsFunc(all, is) {
		t.Errorf("%+v", all)
	}
	if _, err := tryRaw(t, e, "another secret of sixteen bytes", 0); err == nil {
		t.Error("a stranger was let in")
	}
	eventually(t, "the stranger", func() bool { return e.Stats().Strangers == 1 })
	e.Close()
	if all := stats.All(); slices.ContainsFunc(all, is) {
		t.Errorf("after Close: %+v", all)
	}
}

// Peers that never were there make room for those that are.
func TestFailedConnectsTakeNoRoom(t *testing.T) {
	c := newContext(t)
	e := newEndpoint(t, c, Config{MaxPeers: 2})
	for i := range 4 {
		_, err := e.Connect(t.Context(), Info{ID: uint64(i + 1), Addrs: []string{"127.0.0.1:1"}})
		if !errors.Is(err, ErrBroken) {
			t.Fatal(err)
		}
	}
	if _, err := newEndpoint(t, c, Config{}).Connect(t.Context(), e.Info()); err != nil {
		t.Error(err)
	}
}

// A client, whose endpoints choose their identities, leaves room for others.
func TestPeersOfAClientAreBounded(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{MaxPeers: 8})
	eve := clientSecret(t, "eve")
	var raws []*raw
	var err error
	for err == nil && len(raws) < 8 {
		var r *raw
		if r, err = tryRaw(t, e, eve, newID()); err == nil {
			raws = append(raws, r.session(1))
		}
	}
	var refused *trust.Refusal
	if !errors.As(err, &refused) || refused.Code != codeFull || len(raws) != 6 {
		t.Fatalf("after %d peers that are one client: %v, want a refusal after 6", len(raws), err)
	}
	connect(t, newEndpoint(t, newContext(t), Config{}), e.Info())
	dialRaw(t, e, clientSecret(t, "adam"), newID()).session(1)
	raws[0].Close()
	until(t, "room for the client", func() bool {
		_, err := tryRaw(t, e, eve, newID())
		return err == nil
	})
}

// Connections of a client that say nothing are bounded, and leave room for other clients and for
// ranks.
func TestConnectionsWithoutHelloAreBounded(t *testing.T) {
	const peers = 32
	e := newEndpoint(t, newContext(t), Config{MaxPeers: peers})
	fill := func(secret string) (raws []*raw, err error) {
		for len(raws) < 10*peers {
			r, err := tryRaw(t, e, secret, newID())
			if err != nil {
				return raws, err
			}
			raws = append(raws, r)
		}
		return raws, nil
	}
	waits := func(client string, n int) {
		t.Helper()
		until(t, "the connections of "+client, func() bool {
			e.mu.Lock()
			defer e.mu.Unlock()
			return e.unsaid[client] == n
		})
	}
	full := func(who string, raws []*raw, err error, want int) {
		t.Helper()
		var refused *trust.Refusal
		if !errors.As(err, &refused) || refused.Code != codeCrowded || len(raws) != want {
			t.Fatalf("after %d connections of %s: %v, want a refusal after %d", len(raws), who, err, want)
		}
	}
	eve := clientSecret(t, "eve")
	raws, err := fill(eve)
	full("one client", raws, err, 48)
	until(t, "the connections", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.greeters) == 48
	})
	dialRaw(t, e, clientSecret(t, "adam"), newID()).session(1)
	others, err := fill(clientSecret(t, "mallory"))
	full("another client", others, err, 16)
	connect(t, newEndpoint(t, newContext(t), Config{}), Info{Addrs: e.Info().Addrs})
	waits("", 0) // the one that asked for the identity
	ranks, err := fill(testSecret)
	full("ranks", ranks, err, 2*peers)

	raws[0].session(1)
	raws[1].Close()
	waits("eve", 46)
	raws, err = fill(eve)
	full("one client, again", raws, err, 2)
}

// As many endpoints as are allowed connect at once, by address alone.
func TestFleetConnects(t *testing.T) {
	for _, c := range []struct {
		secret string
		n      int
	}{{testSecret, 16}, {clientSecret(t, "eve"), 12}} {
		for round := range 10 {
			t.Run(fmt.Sprintf("%d/%d", c.n, round), func(t *testing.T) {
				e := newEndpoint(t, newContext(t), Config{MaxPeers: 16})
				from := newContext(t)
				var fleet sync.WaitGroup
				for range c.n {
					o := newEndpoint(t, from, Config{Secret: c.secret, Conns: 4})
					fleet.Go(func() {
						if _, err := o.Connect(t.Context(), Info{Addrs: e.Info().Addrs}); err != nil {
							t.Error(err)
						}
					})
				}
				fleet.Wait()
			})
		}
	}
}

// Connect tries again if too many connections say nothing, and their burst ends.
func TestConnectOutlastsACrowd(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{MaxPeers: 1})
	var crowd []*raw
	for range minUnsaid {
		crowd = append(crowd, dialRaw(t, e, testSecret, newID()))
	}
	again, dispersed, tries := make(chan struct{}), make(chan struct{}), 0
	dial := func(ctx context.Context, d *net.Dialer, _ int, address string) (net.Conn, error) {
		if tries++; tries == 2 {
			close(again)
			<-dispersed
		}
		return d.DialContext(ctx, "tcp", address)
	}
	o := newEndpoint(t, newContext(t), Config{Dialer: dial})
	done := make(chan error, 1)
	go func() {
		_, err := o.Connect(t.Context(), e.Info())
		done <- err
	}()
	select {
	case <-again:
	case err := <-done:
		t.Fatalf("after %d tries: %v, want another one", tries, err)
	}
	for _, r := range crowd {
		r.Close()
	}
	until(t, "the end of the crowd", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.unsaid) == 0
	})
	close(dispersed)
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A connection that is refused for the crowd does not take the place of a peer.
func TestCrowdEvictsNoPeer(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{MaxPeers: 1})
	id := newID()
	r := dialRaw(t, e, testSecret, id).session(1)
	p := accept(t, e)
	r.Close()
	until(t, "the end of the session", func() bool { return !p.connected() })
	for range minUnsaid {
		dialRaw(t, e, testSecret, id)
	}
	var refused *trust.Refusal
	if _, err := tryRaw(t, e, testSecret, newID()); !errors.As(err, &refused) || refused.Code != codeCrowded {
		t.Errorf("beside the crowd: %v, want a refusal", err)
	}
	if all := e.Peers(); !slices.Equal(all, []*Peer{p}) {
		t.Errorf("the peers are %v, want %v", all, p)
	}
}

// Connect respects MaxPeers, and says what to do.
func TestConnectsBeyondMaxPeersFail(t *testing.T) {
	c := newContext(t)
	e := newEndpoint(t, c, Config{MaxPeers: 2})
	var peers []*Peer
	for range 2 {
		p := connect(t, e, newEndpoint(t, c, Config{}).Info())
		peers = append(peers, p)
	}
	third := newEndpoint(t, c, Config{})
	if _, err := e.Connect(t.Context(), third.Info()); !errors.Is(err, ErrBusy) || len(e.Peers()) != 2 {
		t.Errorf("a third peer of two: %v, %d peers", err, len(e.Peers()))
	}
	if p, err := e.Connect(t.Context(), Info{ID: peers[0].ID()}); err != nil || p != peers[0] {
		t.Errorf("a peer that is there: %v, %v", p, err)
	}
	peers[0].Close()
	if _, err := e.Connect(t.Context(), third.Info()); err != nil {
		t.Errorf("with room for it: %v", err)
	}
}
