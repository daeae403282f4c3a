package endpoint

import (
	"bytes"
	"testing"
	"time"

	"tutti/endpoint/internal/wire"
	"tutti/mem"
)

// liar is a peer of p whose operations it ends too early.
func liar(t *testing.T, conns int) (p *Peer, raws []*raw) {
	t.Helper()
	greeted := make([]chan *raw, conns)
	for i := range greeted {
		greeted[i] = make(chan *raw, 1)
	}
	info := rawServer(t, 5, func(r *raw) {
		h, body, err := r.next()
		if err != nil {
			return
		}
		if g, err := wire.DecodeGreeting(body); err == nil {
			r.Write(hello(h.Address, int(g.Index), int(g.Count)))
			greeted[g.Index] <- r
		}
	})
	p = connect(t, newEndpoint(t, newContext(t), Config{Conns: conns}), info)
	for _, c := range greeted {
		raws = append(raws, <-c)
	}
	p.mu.Lock()
	p.known = map[string]RemoteRegion{"data": {Name: "data", Len: 1 << 40, Rights: Read | Write, id: 1, generation: 1}}
	p.mu.Unlock()
	return p, raws
}

// until receives frames until one of op comes.
func (r *raw) until(op wire.Opcode) wire.Header {
	r.t.Helper()
	for {
		h, _, err := r.next()
		if err != nil {
			r.t.Fatalf("%v, want %v", err, op)
		}
		if h.Op == op {
			return h
		}
	}
}

// stuck waits until the sockets of all connections of p are full, and stay so.
func stuck(p *Peer) {
	for before, now, full := uint64(0), uint64(1), false; before != now || !full; {
		time.Sleep(100 * time.Millisecond)
		p.mu.Lock()
		full = true
		for _, c := range p.session.conns {
			full = full && stalled(c)
		}
		_, out := p.session.trafficLocked()
		p.mu.Unlock()
		before, now = now, out
	}
}

// TestReadThatEndsWhileItsBytesArrive: what arrives later does not get to the memory of another
// read.
func TestReadThatEndsWhileItsBytesArrive(t *testing.T) {
	p, raws := liar(t, 2)
	data := func(id uint64, payload []byte) []byte {
		return frame(wire.Data, id, wire.Words(nil, 0), payload...)
	}
	junk := bytes.Repeat([]byte{0xff}, 100)
	f := p.Read(make([]byte, len(junk)), "data", 0)
	h := raws[0].until(wire.Get)
	b := data(h.Address, junk)
	raws[0].send(b[:len(b)-90])
	eventually(t, "the bytes are arriving", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return f.results[0].task.first[0].arriving
	})
	raws[1].send(frame(wire.Done, h.Address, outcomeOf(wire.OK, uint64(len(junk)))))
	ends(t, f)
	got, want := make([]byte, len(junk)), pattern(len(junk), 1)
	f = p.Read(got, "data", 0)
	h = raws[0].until(wire.Get)
	raws[0].send(b[len(b)-90:], frame(wire.Ping, 1, nil))
	raws[0].until(wire.Pong)
	p.mu.Lock() // the race detector does not see what sockets order
	if !bytes.Equal(got, make([]byte, len(got))) {
		t.Error("a read has got bytes of the one before")
	}
	p.mu.Unlock()
	raws[0].send(data(h.Address, want), frame(wire.Done, h.Address, outcomeOf(wire.OK, uint64(len(want)))))
	if wait(t, f); !bytes.Equal(got, want) {
		t.Error("a read has got other bytes")
	}
}

// TestWriteOrSendThatEndsBeforeItGoes: neither its memory nor that of the next one goes in its
// place.
func TestWriteOrSendThatEndsBeforeItGoes(t *testing.T) {
	for _, kind := range []Kind{OpWrite, OpSend} {
		t.Run(kind.String(), func(t *testing.T) {
			p, raws := liar(t, 1)
			r := raws[0]
			start := func(b byte) *Future {
				op := Op{Kind: kind, Local: mem.Host(bytes.Repeat([]byte{b}, 64), mem.Anywhere)}
				if kind == OpWrite {
					op.Region = "data"
				}
				return p.Start(op)
			}
			long := p.Write(make([]byte, 64<<20), "data", 0) // more than the sockets take
			stuck(p)
			early, next := start(0x11), start(0x22)
			p.mu.Lock()
			done, sent, id := wire.Done, wire.Put, early.results[0].task.first[0].id
			if kind == OpSend {
				done, sent, id = wire.Taken, wire.Message, early.results[0].task.seq
			}
			p.mu.Unlock()
			r.send(frame(done, id, outcomeOf(wire.OK, 64)))
			wait(t, early)
			last := start(0x33)
			var order []byte
			for ponged := false; !ponged; {
				h, body, err := r.next()
				if err != nil {
					t.Fatal(err)
				}
				ponged = h.Op == wire.Pong
				if h.Op != sent || h.Address < id || h.Address > id+2 {
					continue
				}
				order = append(order, body[len(body)-1])
				if b := byte(0x11 * (h.Address - id + 1)); !bytes.HasSuffix(body, bytes.Repeat([]byte{b}, 64)) {
					t.Fatalf("%d sends % x", h.Address-id, body)
				}
				if h.Address == id+2 {
					r.send(frame(wire.Ping, 1, nil))
				}
			}
			if !bytes.Equal(order, []byte{0x22, 0x33}) {
				t.Errorf("% x is sent, want 22 33", order)
			}
			r.send(frame(done, id+1, outcomeOf(wire.OK, 64)), frame(done, id+2, outcomeOf(wire.OK, 64)))
			wait(t, next)
			wait(t, last)
			long.Cancel()
		})
	}
}

// TestCancelledWriteBeginsNothing: the parts of a write that wait for room stay where they are when
// the write is cancelled, and another part makes room.
func TestCancelledWriteBeginsNothing(t *testing.T) {
	p, _ := liar(t, 2)
	p.mu.Lock()
	p.session.theirs.Requests = 3
	p.mu.Unlock()
	long := p.Write(make([]byte, 64<<20), "data", 0) // two requests, more than the sockets take
	stuck(p)
	f := p.Write(make([]byte, 2<<20), "data", 0)
	requests := func() (open, waiting int) {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.session.requests), p.session.backlog.len()
	}
	if n, waiting := requests(); n != 3 || waiting != 1 {
		t.Fatalf("%d requests are open and %d wait, want 3 and 1", n, waiting)
	}
	f.Cancel()
	if n, waiting := requests(); n != 2 || waiting != 0 {
		t.Errorf("%d requests are open and %d wait after a write was cancelled of which nothing was sent, want 2 and 0",
			n, waiting)
	}
	long.Cancel()
}
