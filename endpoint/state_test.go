package endpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"tutti/bootstrap"
	"tutti/endpoint/internal/wire"
	"tutti/endpoint/stats"
	"tutti/mem"
)

// stateOf asks a peer for its state.
func stateOf(t testing.TB, p *Peer) stats.Endpoint {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s, err := p.Stats(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestPeerTellsItsState(t *testing.T) {
	eachGuard(t, []int{1, 2}, func(t *testing.T, cfg Config) {
		a, b, pb, pa := pair(t, cfg)
		if _, err := b.Register("r", mem.Host(make([]byte, 100), mem.Anywhere), RegionConfig{}); err != nil {
			t.Fatal(err)
		}
		wait(t, pb.Read(make([]byte, 30), "r", 0))
		recv := pa.Recv(make([]byte, 1))
		defer recv.Cancel()
		got, want := stateOf(t, pb), b.Stats()
		if got.ID != fmt.Sprintf("%016x", b.id) || got.Name != "b" || got.Regions != 1 || got.RegionBytes != 100 ||
			got.Served["read"] != (stats.Count{N: 1, Bytes: 30}) || got.Pending["recv"] != 1 || got.Connected != 1 {
			t.Errorf("%+v", got)
		}
		got.Sent, got.Received, want.Sent, want.Received = 0, 0, 0, 0 // the answer itself
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("the peer tells\n%+v, it has\n%+v", got, want)
		}
		if back := stateOf(t, pa); back.Name != "a" || back.Done["read"].N != 1 {
			t.Errorf("the other way: %+v", back)
		}

		// It connects, and fails as other requests do.
		pb.mu.Lock()
		c := pb.session.conns[0]
		pb.mu.Unlock()
		cut(c)
		eventually(t, "the loss", func() bool { return a.Stats().Broken == 1 && b.Stats().Broken == 1 })
		if got := stateOf(t, pb); got.Sessions != 2 || got.Broken != 1 {
			t.Errorf("after a loss: %+v", got)
		}
		pb.Close()
		if _, err := pb.Stats(t.Context()); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

// A call for a state that does not come waits until its context ends, or for Config.Timeout.
func TestStateDoesNotCome(t *testing.T) {
	const id = 0x1112131415161718
	asked := make(chan struct{}, 2)
	info := rawServer(t, id, func(r *raw) {
		r.serve(func(h wire.Header, _ []byte) {
			if h.Op == wire.Inquire {
				asked <- struct{}{}
			}
		})
	})
	e := newEndpoint(t, newContext(t), Config{Conns: 1, Timeout: 50 * time.Millisecond})
	p := connect(t, e, info)
	var late *TimeoutError
	if _, err := p.Stats(t.Context()); !errors.As(err, &late) ||
		!strings.Contains(err.Error(), "state of endpoint raw") {
		t.Errorf("%v, want a TimeoutError", err)
	}
	<-asked
	e = newEndpoint(t, newContext(t), Config{Conns: 1, Timeout: patience})
	p = connect(t, e, info)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-asked
		cancel()
	}()
	if _, err := p.Stats(ctx); !errors.Is(err, ErrCancelled) {
		t.Errorf("%v, want ErrCancelled", err)
	}
}

// A client learns nothing of others. The end that it has connected to may ask it.
func TestClientsLearnNoState(t *testing.T) {
	server := newEndpoint(t, newContext(t), Config{Name: "server"})
	text, err := bootstrap.NewCredential(credential(t, testSecret).Key, "eve")
	if err != nil {
		t.Fatal(err)
	}
	client := newEndpoint(t, newContext(t), Config{Secret: text})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	p, err := client.Connect(ctx, server.Info())
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the session goes on
		if s, err := p.Stats(ctx); !errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), denied) ||
			!reflect.DeepEqual(s, stats.Endpoint{}) {
			t.Errorf("%+v, %v", s, err)
		}
	}
	if s := server.Stats(); s.Refused["refused"] != 2 || s.Broken != 0 {
		t.Errorf("%+v", s)
	}
	q, err := server.Accept(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if s := stateOf(t, q); s.Name != "eve" || s.Sessions != 1 {
		t.Errorf("%+v", s)
	}
}

// Inquiries do not keep a session that has nothing to do otherwise.
func TestInquiriesKeepNoSession(t *testing.T) {
	_, b, pb, _ := pair(t, Config{IdleTimeout: 50 * time.Millisecond})
	first := b.Stats().Sessions
	eventually(t, "another session", func() bool { return stateOf(t, pb).Sessions > first })
	if s := b.Stats(); s.Broken != 0 {
		t.Errorf("%+v", s)
	}
}

// An end that goes, and has nothing under way, leaves no session that looks lost.
func TestClosingLosesNoSession(t *testing.T) {
	eachGuard(t, []int{1, 3}, func(t *testing.T, cfg Config) {
		a, b, _, pa := pair(t, cfg)
		a.Close()
		eventually(t, "the end", func() bool { return !pa.connected() })
		if s := b.Stats(); s.Broken != 0 || s.Connected != 0 {
			t.Errorf("%+v", s)
		}
	})
	_, b, pb, pa := pair(t, Config{})
	f := pa.Recv(make([]byte, 1))
	pb.Close()
	if err := f.Wait(t.Context()); !errors.Is(err, ErrBroken) {
		t.Errorf("a recv from an end that has gone: %v", err)
	}
	if s := b.Stats(); s.Broken != 1 {
		t.Errorf("%+v", s)
	}
}

// A state that is wrong, or that was not asked for, ends its session, and nothing else.
func TestHostileStates(t *testing.T) {
	const id = 0x1112131415161718
	good := stats.Endpoint{Name: "raw", ID: "1112131415161718", Connected: 1}
	text := func(change func(*stats.Endpoint)) []byte {
		s := good
		change(&s)
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	state := func(b []byte) func(uint64) []byte {
		return func(id uint64) []byte { return frame(wire.State, id, nil, b...) }
	}
	for _, x := range []struct {
		name   string
		answer func(id uint64) []byte
		ok     bool
	}{
		{"good", state(text(func(*stats.Endpoint) {})), true},
		{"unknown field", state(bytes.Replace(text(func(*stats.Endpoint) {}), []byte("{"), []byte(`{"x":[1],`), 1)),
			true},
		{"nothing", state(nil), false},
		{"no JSON", state([]byte("state")), false},
		{"two", state(append(text(func(*stats.Endpoint) {}), "{}"...)), false},
		{"other types", state([]byte(`{"id":1}`)), false},
		{"deep", state(bytes.Repeat([]byte("["), wire.MaxState)), false},
		{"another endpoint", state(text(func(s *stats.Endpoint) { s.ID = "1112131415161719" })), false},
		{"no id", state(text(func(s *stats.Endpoint) { s.ID = "" })), false},
		{"a name that controls", state(text(func(s *stats.Endpoint) { s.Name = "a\u202eb" })), false},
		{"a reason that controls", state(text(func(s *stats.Endpoint) { s.Failed = map[string]uint64{"\x1b": 1} })),
			false},
		{"negative", state(text(func(s *stats.Endpoint) { s.Peers = -1 })), false},
		{"negative in a map", state(text(func(s *stats.Endpoint) { s.Pending = map[string]int{"read": -1} })), false},
		{"too long", func(id uint64) []byte {
			return wire.Header{Size: wire.MaxState + 1, Address: id, Op: wire.State}.Append(nil)
		}, false},
		{"of another request", func(id uint64) []byte { return frame(wire.State, id+1, nil, '{', '}') }, false},
		{"a region", func(id uint64) []byte {
			return frame(wire.Region, id, wire.Entry{Region: 1, Generation: 1}.Append(nil), 'r')
		}, false},
		{"done without a state", func(id uint64) []byte { return frame(wire.Done, id, outcomeOf(wire.OK, 0)) }, false},
		{"data", func(id uint64) []byte { return frame(wire.Data, id, wire.Words(nil, 0)) }, false},
		{"gone", func(id uint64) []byte { return frame(wire.Gone, id, wire.Words(nil, 1, 1), 'r') }, false},
	} {
		t.Run(x.name, func(t *testing.T) {
			info := rawServer(t, id, func(r *raw) {
				r.serve(func(h wire.Header, _ []byte) {
					if h.Op == wire.Inquire {
						r.Write(x.answer(h.Address))
					}
				})
			})
			e := newEndpoint(t, newContext(t), Config{Conns: 1})
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			p, err := e.Connect(ctx, info)
			if err != nil {
				t.Fatal(err)
			}
			s, err := p.Stats(ctx)
			switch {
			case x.ok && (err != nil || s.Connected != 1):
				t.Errorf("%+v, %v", s, err)
			case !x.ok && (!errors.Is(err, ErrBroken) || !errors.Is(err, wire.ErrFrame)):
				t.Errorf("%+v, %v, want ErrFrame", s, err)
			}
		})
	}
	t.Run("unasked", func(t *testing.T) {
		g := guard(t, 64<<10)
		r := dialRaw(t, g.e, testSecret, newID()).session(1)
		r.send(state(text(func(*stats.Endpoint) {}))(1))
		r.ended()
		g.works(t)
	})
	t.Run("answers that are not read", func(t *testing.T) {
		g := guard(t, 64<<10)
		r := dialRaw(t, g.e, testSecret, newID()).session(1)
		ask := bytes.Repeat(frame(wire.Inquire, 1, nil), 1000)
		r.SetWriteDeadline(time.Now().Add(patience))
		for {
			if _, err := r.Write(ask); err != nil {
				if errors.Is(err, context.DeadlineExceeded) {
					t.Error("the endpoint makes answers without an end")
				}
				break
			}
		}
		g.works(t)
	})
}

// The largest state that there can be fits into its frame.
func TestEveryStateFits(t *testing.T) {
	huge := stats.Count{N: math.MaxUint64, Bytes: math.MaxUint64}
	s := stats.Endpoint{Name: strings.Repeat("<", wire.MaxName), ID: "ffffffffffffffff", Waiting: huge, Offered: huge,
		Done: map[string]stats.Count{}, Pending: map[string]int{}, Failed: map[string]uint64{},
		Served: map[string]stats.Count{}, Refused: map[string]uint64{}, Modes: map[string]int{}, Peers: math.MaxInt,
		Connected: math.MaxInt, Conns: math.MaxInt, Sessions: math.MaxUint64, Broken: math.MaxUint64,
		Strangers: math.MaxUint64, Sent: math.MaxUint64, Received: math.MaxUint64, Regions: math.MaxInt,
		RegionBytes: math.MaxInt64}
	for k := OpRead; k <= OpRecv; k++ {
		s.Done[k.String()], s.Served[k.String()], s.Pending[k.String()] = huge, huge, math.MaxInt
	}
	for c := range causes {
		s.Failed[c.String()], s.Refused[c.String()] = math.MaxUint64, math.MaxUint64
	}
	for _, m := range modes {
		s.Modes[m.String()] = math.MaxInt
	}
	b, err := json.Marshal(s)
	if err != nil || len(b) > wire.MaxState {
		t.Errorf("%d bytes, %v; at most %d fit", len(b), err, wire.MaxState)
	}
	if back, err := stats.Parse(b); err != nil || !reflect.DeepEqual(back, s) {
		t.Errorf("%+v, %v", back, err)
	}
}

func TestPeersKnowTheirMode(t *testing.T) {
	c := newContext(t)
	none, sum, seal := Config{}, Config{Checksum: true}, Config{Seal: true}
	for _, x := range []struct {
		dialler, acceptor Config
		want              Mode
		text              string
	}{{none, none, Plain, "plain"}, {none, sum, Checked, "checked"}, {sum, none, Checked, "checked"},
		{sum, seal, Sealed, "sealed"}, {seal, none, Sealed, "sealed"}} {
		a, b := newEndpoint(t, c, x.dialler), newEndpoint(t, c, x.acceptor)
		p := connect(t, a, b.Info())
		q := accept(t, b)
		s := stateOf(t, p) // the other end has the session, too
		if s.Strangers != 0 {
			t.Errorf("%d connections count as refused that were made in another mode", s.Strangers)
		}
		if p.Mode() != x.want || q.Mode() != x.want || x.want.String() != x.text || len(s.Modes) != 1 ||
			s.Modes[x.text] != 1 {
			t.Errorf("%v and %v, %v, want %s", p.Mode(), q.Mode(), s.Modes, x.text)
		}
		p.Close()
		if p.Mode() != Unconnected || p.Mode().String() != "unconnected" {
			t.Errorf("after Close: %v", p.Mode())
		}
		eventually(t, "the end", func() bool { return q.Mode() == Unconnected })
	}
}
