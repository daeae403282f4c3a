package endpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"tutti/endpoint/internal/card"
	"tutti/endpoint/internal/wire"
	"tutti/mem"
	"tutti/rdma/soft"
)

// player is an end with RDMA that a test plays. It answers what belongs to the path.
type player struct {
	*raw
	domain *card.Domain
	line   *card.Line
	frames chan played // that do not belong to the path
	joined chan played
}

type played struct {
	h    wire.Header
	body []byte
}

// newPlayer connects a player to e, which sees it as the peer.
func newPlayer(t *testing.T, e *Endpoint, r RDMA) (*player, *Peer) {
	t.Helper()
	p := &player{raw: dialDirect(t, e, testSecret), frames: make(chan played, 100), joined: make(chan played, maxOwed)}
	var joins atomic.Uint64
	p.domain, p.line = rawLine(t, r, func(ctx context.Context, request []byte) ([]byte, error) {
		n := joins.Add(1)
		p.send(frame(wire.Join, n, nil, request...))
		for {
			select {
			case f := <-p.joined:
				if f.h.Address == n { // not the late answer to another one
					return f.body, nil
				}
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	})
	over := make(chan struct{})
	go func() {
		defer close(over)
		defer close(p.frames)
		for {
			h, body, err := p.next()
			if err != nil {
				return
			}
			switch h.Op {
			case wire.Join:
				reply, err := p.line.Handle(body)
				if err != nil {
					t.Error(err)
				}
				p.Write(frame(wire.Joined, h.Address, nil, reply...))
			case wire.Joined:
				p.joined <- played{h, body}
			case wire.Claim:
				p.Write(frame(wire.Key, h.Address, wire.Words(nil, 0, 0)))
			case wire.Key:
			case wire.Fence:
				p.line.Cut()
				p.Write(frame(wire.Fenced, h.Address, nil))
			default:
				p.frames <- played{h, body}
			}
		}
	}()
	t.Cleanup(func() {
		p.Close()
		<-over
	})
	return p, p.accepted(e)
}

// get returns the next frame, which is of op.
func (p *player) get(op wire.Opcode) played {
	p.t.Helper()
	f, ok := <-p.frames
	if !ok || f.h.Op != op {
		p.t.Fatalf("got %v (%t), want %v", f.h.Op, ok, op)
	}
	return f
}

// ended fails unless the other end closes the connection.
func (p *player) ended() {
	p.t.Helper()
	for range p.frames {
	}
}

// register registers memory for the other end to read.
func (p *player) register(b []byte) card.Registration {
	p.t.Helper()
	g, err := p.domain.Register(mem.Host(b, mem.Anywhere), nil, card.Read, false)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() {
		if err := g.Close(); err != nil {
			p.t.Error(err)
		}
	})
	return g
}

func lend(seq, n, address, key uint64) []byte {
	return frame(wire.Lend, seq, wire.Words(nil, n, address, key))
}

// pieces answers Pulls of a message until it was taken, and returns their number.
func (p *player) pieces(msg []byte) (pulls int) {
	p.t.Helper()
	for f := range p.frames {
		if f.h.Op == wire.Taken {
			return pulls
		}
		pulls++
		off, n := wire.Word(f.body, 0), wire.Word(f.body, 1)
		p.send(frame(wire.Piece, f.h.Address, wire.Words(nil, off), msg[off:][:n]...),
			frame(wire.Sent, f.h.Address, nil))
	}
	p.t.Fatal("the connection has ended")
	return 0
}

// lends sends messages to q until they are read by RDMA, and returns the number of the last one.
func (p *player) lends(q *Peer, g card.Registration, msg []byte) (seq uint64) {
	p.t.Helper()
	n := uint64(len(msg))
	p.send(frame(wire.Offer, 1, wire.Words(nil, n)))
	for seq = 1; ; {
		f := q.Recv(make([]byte, n))
		pulls := p.pieces(msg)
		if wait(p.t, f); pulls == 0 {
			return seq
		}
		seq++
		p.send(lend(seq, n, g.Address, uint64(g.RemoteKey())))
	}
}

// What a sender must not say of a message ends its connection.
func TestHostileLoans(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	e := newEndpoint(t, newContext(t), Config{RDMA: r})
	msg := pattern(long, 1)
	p, _ := newPlayer(t, e, r)
	p.send(lend(1, long, 4096, 1))
	if p.ended(); t.Failed() {
		t.Fatal("a message that is lent, and was not asked for")
	}
	for name, f := range map[string]func(seq uint64, g card.Registration) []byte{
		"a long key":    func(seq uint64, g card.Registration) []byte { return lend(seq+1, long, g.Address, 1<<32) },
		"beyond memory": func(seq uint64, g card.Registration) []byte { return lend(seq+1, long, 1<<64-long+1, 1) },
		"too long":      func(seq uint64, g card.Registration) []byte { return lend(seq+1, wire.MaxSize+1, 0, 1) },
		"the same number": func(seq uint64, g card.Registration) []byte {
			return lend(seq, long, g.Address, uint64(g.RemoteKey()))
		},
		"a number too many": func(seq uint64, g card.Registration) []byte {
			return lend(seq+2, long, g.Address, uint64(g.RemoteKey()))
		},
		"pieces that were not asked for": func(seq uint64, g card.Registration) []byte {
			return append(lend(seq+1, long, g.Address, uint64(g.RemoteKey())),
				frame(wire.Piece, seq+1, wire.Words(nil, 0), 1)...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, q := newPlayer(t, e, r)
			g := p.register(msg)
			seq := p.lends(q, g, msg)
			p.send(f(seq, g))
			p.ended()
		})
	}
}

// Memory that is not as it was announced costs the path, and the message is pulled.
func TestLoansThatCannotBeRead(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	e := newEndpoint(t, newContext(t), Config{RDMA: r})
	msg := pattern(2*long, 1)
	for name, c := range map[string]func(seq uint64, g card.Registration) []byte{
		"another key": func(seq uint64, g card.Registration) []byte {
			return lend(seq, 2*long, g.Address, uint64(g.RemoteKey()^1))
		},
		"another address": func(seq uint64, g card.Registration) []byte {
			return lend(seq, 2*long, g.Address+1, uint64(g.RemoteKey()))
		},
	} {
		t.Run(name, func(t *testing.T) {
			p, q := newPlayer(t, e, r)
			g := p.register(msg)
			seq := p.lends(q, g, msg) + 1
			detours := e.Stats().Detours
			p.send(c(seq, g))
			buf := make([]byte, len(msg))
			f := q.Recv(buf)
			if n := p.pieces(msg); n == 0 {
				t.Error("it was taken without being pulled")
			}
			if wait(t, f); !bytes.Equal(buf, msg) {
				t.Error("other bytes")
			}
			if n := e.Stats().Detours - detours; n != 1 {
				t.Errorf("%d paths were lost", n)
			}
		})
	}
}

// A message that is lent has no memory here, and there are at most so many.
func TestFloodOfLoans(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	e := newEndpoint(t, newContext(t), Config{RDMA: r})
	msg := pattern(long, 1)
	p, q := newPlayer(t, e, r)
	seq := p.lends(q, p.register(msg), msg)
	before := heap()
	for range maxRequests + 1 {
		seq++
		p.send(lend(seq, wire.MaxSize, 4096, 1))
	}
	p.ended()
	if now := heap(); now > before+window {
		t.Errorf("%d bytes for messages that are not received", now-before)
	}
}

// lent has e lend a message to a player that wants it.
func (p *player) lent(q *Peer, msg []byte) (f *Future, seq, address uint64, key uint32) {
	p.t.Helper()
	p.send(frame(wire.Claim, 9, wire.Words(nil, 0, 0)), frame(wire.Claim, 9, wire.Words(nil, 0, 0)))
	for {
		f = q.Send(msg)
		x, ok := <-p.frames
		if !ok {
			p.t.Fatal("the connection has ended")
		}
		if x.h.Op == wire.Lend {
			return f, x.h.Address, wire.Word(x.body, 1), uint32(wire.Word(x.body, 2))
		}
		p.send(frame(wire.Taken, x.h.Address, outcomeOf(wire.OK, 0)))
		wait(p.t, f)
	}
}

// read reads memory of the other end by RDMA.
func (p *player) read(b []byte, address uint64, key uint32) error {
	k, err := p.line.Open(soon(p.t))
	if err != nil {
		return err
	}
	return k.Move([]card.Request{{Local: mem.Host(b, mem.Anywhere), Remote: address, Key: key}})
}

func soon(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	return ctx
}

// A receiver reads a message while its send has not ended, and nothing else.
func TestReceiversReadOnlyWhatIsLent(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(p *player, f *Future, seq uint64)
		want error
	}{
		"taken": {func(p *player, f *Future, seq uint64) {
			p.send(frame(wire.Taken, seq, outcomeOf(wire.OK, long)))
		}, nil},
		"refused": {func(p *player, f *Future, seq uint64) {
			p.send(frame(wire.Taken, seq, outcomeOf(wire.Cancelled, 0)))
		}, ErrCancelled},
		"given up, and never answered": {func(p *player, f *Future, seq uint64) { f.Cancel() }, ErrCancelled},
		"pulled": {func(p *player, f *Future, seq uint64) {
			p.send(frame(wire.Pull, seq, wire.Words(nil, 0, long)))
			for p.get(wire.Piece); (<-p.frames).h.Op != wire.Sent; {
			}
			p.send(frame(wire.Taken, seq, outcomeOf(wire.OK, long)))
		}, nil},
	} {
		for _, inRegion := range []bool{false, true} {
			t.Run(fmt.Sprint(name, " ", inRegion), func(t *testing.T) {
				_, r := newFabric(t, soft.Config{})
				e := newEndpoint(t, newContext(t), Config{RDMA: r})
				msg := sharedPattern(t, 2*long)
				if inRegion {
					if _, err := e.Register("r", mem.Host(msg, mem.Anywhere), RegionConfig{}); err != nil {
						t.Fatal(err)
					}
				}
				p, q := newPlayer(t, e, r)
				f, seq, address, key := p.lent(q, msg[:long])
				b := make([]byte, long)
				if err := p.read(b, address, key); err != nil || !bytes.Equal(b, msg[:long]) {
					t.Fatalf("%v, or other bytes", err)
				}
				c.end(p, f, seq)
				if err := f.Wait(t.Context()); !errors.Is(err, c.want) {
					t.Errorf("%v, want %v", err, c.want)
				}
				if err := p.read(b, address, key); !inRegion && err == nil {
					t.Error("memory was read after the end of its send")
				} else if inRegion && c.want == nil && err != nil {
					t.Errorf("the region is not registered any more: %v", err)
				}
			})
		}
	}
}

// The memory of a message cannot be written, nor what lies beside it read.
func TestLoansAreOfTheMessageAlone(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	e := newEndpoint(t, newContext(t), Config{RDMA: r})
	all := sharedPattern(t, 3*long)
	want := bytes.Clone(all)
	for _, c := range []card.Request{
		{Write: true, Local: mem.Host(make([]byte, 1), mem.Anywhere), Remote: 0},
		{Local: mem.Host(make([]byte, 1), mem.Anywhere), Remote: long},
		{Local: mem.Host(make([]byte, 1), mem.Anywhere), Remote: 1<<64 - 1},
	} {
		p, q := newPlayer(t, e, r)
		f, _, address, key := p.lent(q, all[long:][:long])
		k, err := p.line.Open(soon(t))
		if err != nil {
			t.Fatal(err)
		}
		c.Remote, c.Key = c.Remote+address, key
		if err := k.Move([]card.Request{c}); err == nil || !bytes.Equal(all, want) {
			t.Errorf("%+v: %v, or the message has changed", c, err)
		}
		f.Cancel()
		p.Close()
	}
}

// A receiver that never answers costs a send its time, and nothing else.
func TestUntakenLoans(t *testing.T) {
	f, r := newFabric(t, soft.Config{})
	e := newEndpoint(t, newContext(t), Config{RDMA: r})
	p, q := newPlayer(t, e, r)
	x, _, _, _ := p.lent(q, make([]byte, long))
	_, _, before := f.Objects()
	y := q.Start(Op{Kind: OpSend, Local: mem.Host(make([]byte, long), mem.Anywhere), Timeout: time.Millisecond})
	if err := y.Wait(t.Context()); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	x.Cancel()
	if _, _, now := f.Objects(); now != before-1 {
		t.Errorf("%d memory regions, want %d", now, before-1)
	}
	if n := e.Stats().Detours; n > 0 {
		t.Errorf("%d paths were lost", n)
	}
}

// An end without RDMA asks for no messages to be lent.
func TestClaimOfMessagesNeedsRDMA(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	e := newEndpoint(t, newContext(t), Config{RDMA: r})
	x := dialRaw(t, e, testSecret, newID()).session(1)
	x.send(frame(wire.Claim, 3, wire.Words(nil, 0, 0)))
	_, body := x.expect(wire.Done)
	if o, err := wire.DecodeOutcome(body); err != nil || o.Code != wire.Stale {
		t.Errorf("%+v, %v", o, err)
	}
}
