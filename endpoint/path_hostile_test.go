package endpoint

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"

	"tutti/endpoint/internal/card"
	"tutti/endpoint/internal/wire"
	"tutti/mem"
	"tutti/rdma/soft"
)

// dialDirect is dialRaw for an end that can use RDMA.
func dialDirect(t testing.TB, e *Endpoint, secret string) *raw {
	t.Helper()
	r, err := tryExtra(t, e, secret, newID(), extra(wire.Plain, true))
	if err != nil {
		t.Fatal(err)
	}
	return r.session(1)
}

// What an end that can use RDMA must not say ends its connection, and nothing else.
func TestHostileFramesOfRDMA(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	data := sharedPattern(t, 64<<10)
	_, b, p, _, _ := directPair(t, r, data)
	for name, f := range map[string][]byte{
		"fenced":    frame(wire.Fenced, 1, nil),
		"fenced 0":  frame(wire.Fenced, 0, nil),
		"joined":    frame(wire.Joined, 1, nil, 1, 2, 3),
		"joined 0":  frame(wire.Joined, 0, nil),
		"key":       frame(wire.Key, 1, wire.Words(nil, 0, 0)),
		"revoke 0":  frame(wire.Revoke, 0, wire.Words(nil, 1, 1)),
		"revoked":   frame(wire.Revoked, 1, nil),
		"revoked 0": frame(wire.Revoked, 0, nil),
	} {
		r := dialDirect(t, b, testSecret)
		r.send(f)
		r.ended()
		if t.Failed() {
			t.Fatal(name)
		}
	}
	x := dialDirect(t, b, testSecret)
	for range 3 {
		x.send(frame(wire.Join, 7, nil, 1, 2, 3)) // no message of the handshake
		if h, body := x.expect(wire.Joined); h.Address != 7 || len(body) != 0 {
			t.Errorf("the answer to a malformed Join: %+v, %d bytes", h, len(body))
		}
		x.send(frame(wire.Fence, 8, nil)) // of nothing
		x.expect(wire.Fenced)
		x.send(frame(wire.Revoke, 9, wire.Words(nil, 1, 1))) // of a key that it has not given
		x.expect(wire.Revoked)
	}
	e := x.find("data")
	for _, c := range []struct {
		region, generation uint64
		want               wire.Code
	}{{e.Region, e.Generation + 2, wire.Stale}, {e.Region + 1, e.Generation, wire.Stale}} {
		x.send(frame(wire.Claim, 3, wire.Words(nil, c.region, c.generation)))
		_, body := x.expect(wire.Done)
		if o, err := wire.DecodeOutcome(body); err != nil || o.Code != c.want {
			t.Errorf("claim of %+v: %+v, %v", c, o, err)
		}
	}
	x.send(frame(wire.Claim, 3, wire.Words(nil, e.Region, e.Generation))) // without queue pairs
	x.expect(wire.Key)
	x.Close()
	warm(t, p, "data")
}

// A peer that asks on without reading the answers loses its session, whatever it asks.
func TestAnswersThatAreNotReadAreBounded(t *testing.T) {
	for name, f := range map[string][]byte{
		"bye":   frame(wire.Bye, 0, nil),
		"fence": frame(wire.Fence, 1, nil),
		"join":  frame(wire.Join, 1, nil, 1, 2, 3),
	} {
		t.Run(name, func(t *testing.T) {
			_, rdma := newFabric(t, soft.Config{})
			e := newEndpoint(t, newContext(t), Config{RDMA: rdma})
			const n = 64 << 20 // more than the sockets take
			if _, err := e.Register("data", mem.Host(make([]byte, n), mem.Anywhere), RegionConfig{}); err != nil {
				t.Fatal(err)
			}
			r := dialDirect(t, e, testSecret)
			p := r.accepted(e)
			x := r.find("data")
			r.send(frame(wire.Get, 2, wire.Range{Region: x.Region, Generation: x.Generation, Total: n}.Append(nil)))
			stuck(p)
			r.send(bytes.Repeat(frame(wire.Ping, 1, nil), maxBacklog/wire.HeaderSize+1), f)
			until(t, "the end of the session", func() bool { return !p.connected() })
		})
	}
}

// Answers that a peer does not read are bounded for all its connections together.
func TestUnreadAnswersOfAllConnections(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{})
	const n = 64 << 20 // more than the sockets take
	if _, err := e.Register("data", mem.Host(make([]byte, n), mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	id := newID()
	var rs []*raw
	const conns = 4
	for i := range conns {
		r := dialRaw(t, e, testSecret, id)
		r.send(hello(1, i, conns))
		r.expect(wire.Hello)
		rs = append(rs, r)
	}
	p := rs[0].accepted(e)
	x := rs[0].find("data")
	for i, r := range rs {
		all := wire.Range{Region: x.Region, Generation: x.Generation, Total: n}
		r.send(frame(wire.Get, uint64(i+2), all.Append(nil)))
	}
	stuck(p)
	for _, r := range rs { // a third of the bound for each
		r.Write(bytes.Repeat(frame(wire.Ping, 1, nil), maxBacklog/3/wire.HeaderSize))
	}
	until(t, "the end of the session", func() bool { return !p.connected() })
}

// A client gets no key of what it may not use.
func TestClaimsNeedRights(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	b := newEndpoint(t, newContext(t), Config{RDMA: r})
	data := make([]byte, 100)
	x, err := b.Register("data", mem.Host(data, mem.Anywhere),
		RegionConfig{Clients: map[string]mem.Rights{"eve": Read}})
	if err != nil {
		t.Fatal(err)
	}
	q := dialDirect(t, b, clientSecret(t, "adam"))
	q.send(frame(wire.Claim, 3, wire.Words(nil, x.id, x.generation)))
	_, body := q.expect(wire.Done)
	if o, err := wire.DecodeOutcome(body); err != nil || o.Code != wire.NoRegion {
		t.Errorf("%+v, %v", o, err)
	}
}

// rawLine makes a line of an end that a test plays, with the call to the other end.
func rawLine(t testing.TB, r RDMA, call func(context.Context, []byte) ([]byte, error)) (*card.Domain, *card.Line) {
	t.Helper()
	port, err := card.Open(card.Config{Provider: r.Provider, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	domain, err := port.Domain("")
	if err != nil {
		t.Fatal(err)
	}
	line, err := domain.NewLine(card.LineConfig{Call: call, Lost: func(*card.Conn, error) {}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, err := range []error{line.Close(), domain.Release(), port.Close()} {
			if err != nil {
				t.Error(err)
			}
		}
	})
	return domain, line
}

// After a failure nothing begins before the peer has confirmed that nothing can come late, and what
// was under way is asked for again then.
func TestNothingBeginsBeforeFenced(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	_, line := rawLine(t, r, func(context.Context, []byte) ([]byte, error) {
		return nil, errors.New("the other end connects")
	})
	const size = 100
	fenced, begun := make(chan struct{}), make(chan struct{})
	done := make(chan struct{})
	info := rawServer(t, 5, func(r *raw) {
		defer close(done)
		if !r.answer() {
			return
		}
		puts, waits := 0, false
		for {
			h, body, err := r.next()
			if err != nil {
				return
			}
			switch h.Op {
			case wire.Lookup:
				r.Write(frame(wire.Region, h.Address, wire.Entry{Region: 1, Generation: 1, Len: size,
					Rights: 3}.Append(nil), []byte("data")...))
			case wire.Get:
				x := wire.DecodeRange(body)
				r.Write(frame(wire.Data, h.Address, wire.Words(nil, 0), make([]byte, x.Total)...))
				r.Write(frame(wire.Done, h.Address, outcomeOf(wire.OK, x.Total)))
			case wire.Put:
				if waits {
					t.Error("a write before Fenced")
				}
				puts++
				x := wire.DecodeRange(body)
				if !bytes.Equal(body[wire.BulkSize:], bytes.Repeat([]byte{byte(x.Total)}, int(x.Total))) {
					t.Error("other bytes are written")
				}
				r.Write(frame(wire.Done, h.Address, outcomeOf(wire.OK, x.Total)))
			case wire.Join:
				reply, err := line.Handle(body)
				if err != nil {
					t.Error(err)
				}
				r.Write(frame(wire.Joined, h.Address, nil, reply...))
			case wire.Claim:
				r.Write(frame(wire.Key, h.Address, wire.Words(nil, 4096, 12345))) // of nothing
			case wire.Fence:
				waits = true
				close(fenced)
				<-begun
				r.Write(frame(wire.Ping, 1, nil))
				if h, _, err := r.next(); err != nil || h.Op != wire.Pong { // behind what has begun
					t.Errorf("before Fenced: %v, %v", h.Op, err)
				}
				waits = false
				r.Write(frame(wire.Fenced, h.Address, nil))
			}
			if puts == 2 {
				return
			}
		}
	})
	a := newEndpoint(t, newContext(t), Config{Conns: 1, RDMA: r})
	p := connect(t, a, info)
	until(t, "a key", func() bool {
		wait(t, p.Read(make([]byte, 1), "data", 0))
		p.mu.Lock()
		defer p.mu.Unlock()
		k := p.session.path.keys[1]
		return p.session.path.state == direct && k != nil && k.known
	})
	first := p.Write(bytes.Repeat([]byte{size}, size), "data", 0)
	<-fenced
	next := p.Write(bytes.Repeat([]byte{10}, 10), "data", 0)
	close(begun)
	wait(t, first)
	wait(t, next)
	<-done
	if n := a.Stats().Detours; n != 1 {
		t.Errorf("%d detours", n)
	}
}

// A peer that answers neither Join nor Claim costs no more than the path.
func TestPeersThatDoNotJoin(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	joined := make(chan struct{}, 100)
	info := rawServer(t, 5, func(r *raw) {
		r.serve(func(h wire.Header, body []byte) {
			switch h.Op {
			case wire.Lookup:
				r.Write(frame(wire.Region, h.Address, wire.Entry{Region: 1, Generation: 1, Len: 100,
					Rights: 3}.Append(nil), []byte("data")...))
			case wire.Get:
				x := wire.DecodeRange(body)
				r.Write(frame(wire.Data, h.Address, wire.Words(nil, 0), make([]byte, x.Total)...))
				r.Write(frame(wire.Done, h.Address, outcomeOf(wire.OK, x.Total)))
			case wire.Join:
				joined <- struct{}{}
			}
		})
	})
	a := newEndpoint(t, newContext(t), Config{Conns: 1, RDMA: r})
	p := connect(t, a, info)
	for range 20 {
		wait(t, p.Read(make([]byte, 100), "data", 0))
	}
	<-joined
	if p.Path() != PathTCP {
		t.Errorf("path %v", p.Path())
	}
}
