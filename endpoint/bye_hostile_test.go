package endpoint

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"tutti/endpoint/internal/wire"
	"tutti/internal/trust"
	"tutti/mem"
)

// After Bye a session has nothing but its end: what comes nevertheless is dropped.
func TestFramesAfterBye(t *testing.T) {
	for name, f := range map[string][]byte{
		"message": frame(wire.Message, 1, nil, 'x'),
		"offer":   frame(wire.Offer, 1, words(64)),
		"dropped": frame(wire.Dropped, 1, nil),
		"lookup":  frame(wire.Lookup, 1, nil, []byte("data")...),
		"put":     frame(wire.Put, 1, nil),
		"watch":   frame(wire.Watch, 1, nil),
		"stay":    frame(wire.Stay, 0, nil),
	} {
		t.Run(name, func(t *testing.T) {
			g := guard(t, 4096)
			r := dialRaw(t, g.e, testSecret, newID()).session(1)
			r.send(frame(wire.Bye, 0, nil))
			r.expect(wire.Bye)
			r.send(f)
			g.works(t)
			r.send(frame(wire.Bye, 0, nil))
			r.ended()
		})
	}
}

// words returns the extension of a frame.
func words(w ...uint64) []byte { return wire.Words(nil, w...) }

// Bye ends a session that is not complete.
func TestByeBeforeLastConnection(t *testing.T) {
	g := guard(t, 4096)
	id := newID()
	r := dialRaw(t, g.e, testSecret, id)
	r.send(hello(1, 0, 2))
	r.expect(wire.Hello)
	p := r.accepted(g.e)
	r.send(frame(wire.Bye, 0, nil))
	if h, _, err := r.next(); err == nil {
		t.Errorf("%v is the answer to Bye, want the end", h.Op)
	}
	second := dialRaw(t, g.e, testSecret, id)
	second.send(hello(1, 1, 2))
	second.ended()
	f := p.Send(nil)
	ends(t, f)
	if err := f.Err(); !errors.Is(err, ErrBroken) {
		t.Errorf("a send: %v", err)
	}
	g.works(t)
}

// The connection with number 1 of a session comes while the one with number 0 has only begun.
func TestSecondConnectionComesFirst(t *testing.T) {
	g := guard(t, 4096)
	id := newID()
	if _, _, err := g.e.enter(peerID{"", id}, "raw", 1, wire.Greeting{Count: 2}, false); err != nil {
		t.Fatal(err)
	}
	r := dialRaw(t, g.e, testSecret, id)
	r.send(hello(1, 1, 2), frame(wire.Join, 1, nil))
	r.ended()
	g.works(t)
}

// A peer that says Bye and does not close its connections keeps none but the last.
func TestByeWithoutEnd(t *testing.T) {
	g := guard(t, 4096)
	id := newID()
	var last *raw
	for i := range 5 {
		r := dialRaw(t, g.e, testSecret, id).session(uint64(i + 1))
		r.send(frame(wire.Bye, 0, nil))
		r.expect(wire.Bye)
		if last != nil {
			last.ended()
		}
		last = r
	}
	g.e.Close()
	last.ended()
}

// silent serves a session without answers, and tells of Bye.
func silent(r *raw, bye chan<- *raw) {
	r.serve(func(h wire.Header, _ []byte) {
		if h.Op == wire.Bye {
			bye <- r
		}
	})
}

// What was started while Bye had no answer goes on another connection when the first is lost.
func TestLossBeforeAnswerToBye(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{IdleTimeout: 20 * time.Millisecond})
	byes, sent, first := make(chan *raw, 1), make(chan []byte, 1), make(chan struct{}, 1)
	first <- struct{}{}
	info := rawServer(t, newID(), func(r *raw) {
		select {
		case <-first:
			silent(r, byes)
			return
		default:
		}
		r.serve(func(h wire.Header, body []byte) {
			if h.Op == wire.Message {
				sent <- body[wire.BulkSize:]
			}
		})
	})
	p := connect(t, e, info)
	r := <-byes
	p.Send([]byte("late"))
	r.Close()
	select {
	case got := <-sent:
		if string(got) != "late" {
			t.Errorf("the peer has %q", got)
		}
	case <-time.After(patience):
		t.Error("the message does not arrive")
	}
}

// A recv that was started while Bye had no answer gets a message of the next session, however the
// first one ends.
func TestRecvBeforeAnswerToBye(t *testing.T) {
	check := func(t *testing.T, f *Future, buf []byte) {
		t.Helper()
		if wait(t, f); string(buf[:f.Result(0).N]) != "next" {
			t.Errorf("got %q", buf)
		}
	}
	next := frame(wire.Message, 1, nil, []byte("next")...)
	for name, end := range map[string]func(*raw){
		"Bye":     func(r *raw) { r.send(frame(wire.Bye, 0, nil)); r.ended() },
		"at once": func(*raw) {},
		"loss":    func(r *raw) { r.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			e := newEndpoint(t, newContext(t), Config{IdleTimeout: 20 * time.Millisecond})
			id := newID()
			r := dialRaw(t, e, testSecret, id).session(1)
			p := r.accepted(e)
			r.expect(wire.Bye)
			buf := make([]byte, 10)
			f := p.Recv(buf)
			end(r)
			dialRaw(t, e, testSecret, id).session(2).send(next)
			check(t, f, buf)
		})
	}
}

// Calls are bounded by Config.Timeout while Bye has no answer.
func TestCallsBeforeAnswerToBye(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{IdleTimeout: 20 * time.Millisecond, Timeout: 200 * time.Millisecond})
	byes := make(chan *raw, 8)
	p := connect(t, e, rawServer(t, newID(), func(r *raw) { silent(r, byes) }))
	<-byes
	var late *TimeoutError
	if _, err := p.Stats(context.Background()); !errors.As(err, &late) {
		t.Errorf("Stats: %v", err)
	}
	if _, err := p.Regions(context.Background(), "", 0); !errors.As(err, &late) {
		t.Errorf("Regions: %v", err)
	}
}

// A peer that ends a watch by itself, or lists without end, breaks its session.
func TestAnswersThatDoNotEnd(t *testing.T) {
	for name, answers := range map[string]func(r *raw, h wire.Header){
		"watch": func(r *raw, h wire.Header) {
			r.send(frame(wire.Done, h.Address, outcomeOf(wire.OK, 0)))
		},
		"list": func(r *raw, h wire.Header) {
			if h.Op == wire.List {
				x := wire.Entry{Region: 1, Generation: 1, Len: 1, Rights: uint8(Read)}.Append(nil)
				r.send(frame(wire.Region, h.Address, x, 'a'), frame(wire.Region, h.Address, x, 'a'))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := newEndpoint(t, newContext(t), Config{})
			p := connect(t, e, rawServer(t, newID(), func(r *raw) {
				r.serve(func(h wire.Header, _ []byte) {
					if h.Op == wire.Watch || h.Op == wire.List {
						answers(r, h)
					}
				})
			}))
			var last error
			for _, err := range p.Watch(patient(t)) {
				last = err
			}
			if !errors.Is(last, ErrBroken) {
				t.Errorf("the watch ended with %v", last)
			}
		})
	}
}

func patient(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// Operations of a peer that made room for another one end, and say why.
func TestEvictedPeer(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{MaxPeers: 1})
	a := dialRaw(t, e, testSecret, newID()).session(1)
	p := a.accepted(e)
	a.Close()
	until(t, "the end of the first", func() bool { return !p.connected() })
	dialRaw(t, e, testSecret, newID()).session(1)
	f := p.Start(Op{Kind: OpRecv, Local: mem.Host(make([]byte, 1), mem.Anywhere), Timeout: NoTimeout})
	ends(t, f)
	if err := f.Err(); !errors.Is(err, ErrClosed) {
		t.Errorf("the recv: %v", err)
	}
}

// A connection whose handshake ends when its session is broken already is closed.
func TestConnectionOfBrokenSession(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{Conns: 2})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	accepted, breaks := make(chan *raw, 2), make(chan struct{}, 1)
	var first atomic.Pointer[raw]
	a := &trust.Acceptor{Listener: l, Secret: credential(t, testSecret).Key, Purpose: purpose, Clients: true,
		Timeout: patience,
		Admit: func(net.Conn, trust.Hello) error {
			if r := first.Load(); r != nil { // the second one's handshake
				r.Conn.(*net.TCPConn).CloseWrite()
				r.ended()
				breaks <- struct{}{}
			}
			return nil
		},
		Accepted: func(c net.Conn, _ trust.Hello, _ *trust.Session) {
			t.Cleanup(func() { c.Close() })
			r := &raw{t, c}
			if first.CompareAndSwap(nil, r) {
				r.answer()
			}
			accepted <- r
		}}
	go a.Serve()
	defer a.Close()
	_, err = e.Connect(patient(t), Info{ID: newID(), Name: "raw", Addrs: []string{l.Addr().String()}})
	if !errors.Is(err, ErrBroken) {
		t.Error(err)
	}
	<-breaks
	<-accepted
	(<-accepted).ended()
}
