package endpoint

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"tutti/bootstrap"
	"tutti/endpoint/internal/wire"
	"tutti/internal/files"
	"tutti/internal/plain"
	"tutti/internal/proctest"
	"tutti/internal/trust"
	"tutti/mem"
)

// patience bounds what must happen at some time.
const patience = 20 * time.Second

// raw is one end of a connection that sends and receives frames as a test says.
type raw struct {
	t testing.TB
	net.Conn
}

func credential(t testing.TB, text string) bootstrap.Credential {
	t.Helper()
	k, err := bootstrap.ParseCredential(text)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// dialRaw connects to e and proves the credential, as the endpoint with identity id.
func dialRaw(t testing.TB, e *Endpoint, secret string, id uint64) *raw {
	t.Helper()
	r, err := tryRaw(t, e, secret, id)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func tryRaw(t testing.TB, e *Endpoint, secret string, id uint64) (*raw, error) {
	t.Helper()
	return tryExtra(t, e, secret, id, protocol)
}

// tryExtra is tryRaw with something else in the handshake's Extra.
func tryExtra(t testing.TB, e *Endpoint, secret string, id, extra uint64) (*raw, error) {
	t.Helper()
	k := credential(t, secret)
	var c net.Conn
	err := trust.Redial(t.Context(), func() (err error) {
		if c, err = net.Dial("tcp", e.Info().Addrs[0]); err != nil {
			return err
		}
		c.SetDeadline(time.Now().Add(patience))
		_, err = trust.Client(c, k.Key, purpose, trust.Hello{Client: k.Client, FromIncarnation: id,
			ToIncarnation: e.id, Extra: extra}, false)
		if err != nil {
			c.Close()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { c.Close() })
	return &raw{t, c}, nil
}

// frame returns a frame.
func frame(op wire.Opcode, address uint64, ext []byte, payload ...byte) []byte {
	switch op {
	case wire.Put, wire.Data, wire.Message, wire.Piece:
		ext = append(slices.Clip(ext), make([]byte, wire.BulkSize-len(ext))...)
	}
	b := wire.Header{Size: uint64(len(ext) + len(payload)), Address: address, Op: op}.Append(nil)
	return append(append(b, ext...), payload...)
}

func hello(session uint64, index, count int) []byte { return helloNamed(session, index, count, "raw") }

func helloNamed(session uint64, index, count int, name string) []byte {
	return frame(wire.Hello, session, wire.Greeting{Version: wire.Version, Index: uint8(index), Count: uint8(count),
		Requests: maxRequests, Window: window, Message: maxMessage, Endpoint: 1}.Append(nil), []byte(name)...)
}

func outcomeOf(code wire.Code, n uint64) []byte {
	return wire.Outcome{Code: code, Bytes: n}.Append(nil)
}

// send sends frames.
func (r *raw) send(frames ...[]byte) {
	r.t.Helper()
	if _, err := r.Write(bytes.Join(frames, nil)); err != nil {
		r.t.Fatal(err)
	}
}

// next receives a frame.
func (r *raw) next() (h wire.Header, body []byte, err error) {
	r.SetReadDeadline(time.Now().Add(patience))
	var b [wire.HeaderSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return h, nil, err
	}
	h = wire.Decode(b[:])
	if h.Size > 1<<24 {
		return h, nil, fmt.Errorf("frame of %d bytes", h.Size)
	}
	body = make([]byte, h.Size)
	_, err = io.ReadFull(r, body)
	return h, body, err
}

// expect receives a frame of op.
func (r *raw) expect(op wire.Opcode) (h wire.Header, body []byte) {
	r.t.Helper()
	h, body, err := r.next()
	if err != nil || h.Op != op {
		r.t.Fatalf("got %v, %v, want %v", h.Op, err, op)
	}
	return h, body
}

// ended fails unless the other end closes the connection.
func (r *raw) ended() {
	r.t.Helper()
	for {
		if _, _, err := r.next(); err != nil {
			var late net.Error
			if errors.As(err, &late) && late.Timeout() {
				r.t.Error("the endpoint did not end the connection")
			}
			return
		}
	}
}

// session makes a session of one connection.
func (r *raw) session(id uint64) *raw {
	r.t.Helper()
	r.send(hello(id, 0, 1))
	r.expect(wire.Hello)
	return r
}

// find looks a region up.
func (r *raw) find(name string) wire.Entry {
	r.t.Helper()
	r.send(frame(wire.Lookup, 1<<40, nil, []byte(name)...))
	_, body := r.expect(wire.Region)
	e, err := wire.DecodeEntry(body)
	if err != nil {
		r.t.Fatal(err)
	}
	return e
}

func (r *raw) accepted(e *Endpoint) *Peer {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	p, err := e.Accept(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

// rawServer accepts connections for an endpoint with identity id, and gives them to serve.
func rawServer(t testing.TB, id uint64, serve func(*raw)) Info {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	a := &trust.Acceptor{Listener: l, Secret: credential(t, testSecret).Key, Purpose: purpose, Clients: true,
		Timeout: patience, Admit: func(net.Conn, trust.Hello) error { return nil },
		Accepted: func(c net.Conn, _ trust.Hello, _ *trust.Session) {
			t.Cleanup(func() { c.Close() })
			wg.Go(func() { serve(&raw{t, c}) })
		}}
	wg.Go(a.Serve)
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { a.Close() })
	return Info{ID: id, Name: "raw", Addrs: []string{l.Addr().String()}}
}

// answer greets as the accepting end of a session.
func (r *raw) answer() bool {
	h, body, err := r.next()
	if err != nil {
		return false
	}
	g, err := wire.DecodeGreeting(body)
	if err != nil {
		return false
	}
	_, err = r.Write(hello(h.Address, int(g.Index), int(g.Count)))
	return err == nil
}

// serve greets as answer does, and gives what comes to handle until the connection ends.
func (r *raw) serve(handle func(h wire.Header, body []byte)) {
	if !r.answer() {
		return
	}
	for {
		h, body, err := r.next()
		if err != nil {
			return
		}
		handle(h, body)
	}
}

// guarded is an endpoint with a region in the middle of an array, and a peer that works.
type guarded struct {
	e     *Endpoint
	all   []byte // 4 KiB, the region and 4 KiB
	peer  *Peer  // the endpoint as an honest peer sees it
	honor []byte
}

func guard(t testing.TB, n int) *guarded {
	t.Helper()
	_, e, p, _ := pair(t, Config{})
	g := &guarded{e: e, all: bytes.Repeat([]byte{0xa5}, n+8192), peer: p, honor: make([]byte, 4096)}
	for name, m := range map[string]struct {
		b []byte
		c RegionConfig
	}{
		"data": {g.all[4096:][:n:n], RegionConfig{Rights: Read | Write}},
		"locked": {bytes.Repeat([]byte{0x5a}, 4096), RegionConfig{Rights: Read,
			Clients: map[string]mem.Rights{"eve": 0}}},
		"honor": {g.honor, RegionConfig{Rights: Read | Write}},
	} {
		if _, err := e.Register(name, mem.Host(m.b, mem.Anywhere), m.c); err != nil {
			t.Fatal(err)
		}
	}
	return g
}

// works fails unless the honest peer can write and read, and nothing but the range of the region
// has changed.
func (g *guarded) works(t testing.TB, changed ...int) {
	t.Helper()
	src, dst := pattern(len(g.honor), rand.Uint64()), make([]byte, len(g.honor))
	wait(t, g.peer.Write(src, "honor", 0))
	wait(t, g.peer.Read(dst, "honor", 0))
	if !bytes.Equal(src, dst) {
		t.Fatal("another peer reads what it has not written")
	}
	for _, p := range g.e.Peers() { // the race detector does not see what sockets order
		p.mu.Lock()
		_ = p.session
		p.mu.Unlock()
	}
	for i, b := range g.all {
		if b != 0xa5 && (len(changed) == 0 || i < 4096+changed[0] || i >= 4096+changed[1]) {
			t.Fatalf("byte %d of the region has changed", i-4096)
		}
	}
}

// TestEndsWithoutSecretAreRefused: ends that do not know the secret.
func TestEndsWithoutSecretAreRefused(t *testing.T) {
	g := guard(t, 64<<10)
	r := rand.New(rand.NewPCG(1, 2))
	dial := func() net.Conn {
		c, err := net.Dial("tcp", g.e.Info().Addrs[0])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		c.SetDeadline(time.Now().Add(patience))
		return c
	}
	for n := range 100 {
		c := dial()
		b := make([]byte, r.IntN(1000))
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		if n%2 == 0 {
			b = append([]byte("tutti/3\n"), b...)
		}
		c.Write(b)
	}
	for _, text := range []string{"ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100"} {
		if _, err := tryRaw(t, g.e, text, 7); !errors.Is(err, trust.ErrAuth) {
			t.Errorf("a wrong secret: %v", err)
		}
	}
	k := credential(t, testSecret).Key
	for _, h := range []trust.Hello{{FromIncarnation: 9, ToIncarnation: g.e.id + 2, Extra: protocol},
		{ToIncarnation: g.e.id, Extra: protocol},
		{FromIncarnation: g.e.id, Extra: protocol}, {FromIncarnation: 9, Extra: protocol + 1}} {
		var refused *trust.Refusal
		if _, err := trust.Client(dial(), k, purpose, h, false); !errors.As(err, &refused) {
			t.Errorf("%+v: %v", h, err)
		}
	}
	if _, err := trust.Client(dial(), k, "another purpose", trust.Hello{FromIncarnation: 9},
		false); !errors.Is(err, trust.ErrAuth) {
		t.Errorf("another purpose: %v", err)
	}
	g.works(t)
}

// helloOf is hello of another version of the frames, of which the rest need not make sense here.
func helloOf(version uint16, session uint64) []byte {
	ext := bytes.Repeat([]byte{0xff}, wire.HelloSize)
	binary.LittleEndian.PutUint16(ext, version)
	return frame(wire.Hello, session, ext, []byte("later")...)
}

// TestOtherVersionIsTold: both ends learn the version of the other one, and nothing else ends.
func TestOtherVersionIsTold(t *testing.T) {
	var mu sync.Mutex
	var log strings.Builder
	e := newEndpoint(t, newContext(t), Config{Logger: slog.New(slog.NewTextHandler(writer(func(b []byte) {
		mu.Lock()
		defer mu.Unlock()
		log.Write(b)
	}), nil))})
	const tries = 20
	for n := range uint64(tries) {
		r := dialRaw(t, e, testSecret, newID())
		r.send(helloOf(wire.Version+1, n))
		h, body := r.expect(wire.Hello)
		if g, err := wire.DecodeGreeting(body); h.Address != n || err != nil || g.Endpoint != e.id {
			t.Errorf("the answer is session %d of %+v, %v", h.Address, g, err)
		}
		if _, _, err := r.next(); err == nil {
			t.Error("the connection goes on")
		}
	}
	want := fmt.Sprintf("frames are of version %d, this one's of version %d", wire.Version+1, wire.Version)
	until(t, "the warnings", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return strings.Count(log.String(), want) >= 5
	})
	until(t, "the end of all connections", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return len(e.greeters) == 0 && len(e.unsaid) == 0
	})
	mu.Lock()
	if n := strings.Count(log.String(), "level=WARN"); n != 5 {
		t.Errorf("%d warnings, want 5:\n%s", n, &log)
	}
	mu.Unlock()
	if len(e.Peers()) != 0 {
		t.Errorf("there are the peers %v", e.Peers())
	}
	// An endpoint that dials says so, too.
	for _, id := range []uint64{0, newID()} {
		info := rawServer(t, id, func(r *raw) {
			if h, _, err := r.next(); err == nil {
				r.Write(helloOf(wire.Version+1, h.Address))
			}
			r.Close()
		})
		_, err := e.Connect(t.Context(), info)
		if !errors.Is(err, ErrVersion) || errors.Is(err, wire.ErrFrame) ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("identity %x: %v", id, err)
		}
	}
}

// A Hello whose name is none ends the connection, whichever end sends it.
func TestNamesInHello(t *testing.T) {
	const bad = "line\nfeed"
	e := newEndpoint(t, newContext(t), Config{})
	for _, session := range []uint64{0, 1} {
		r := dialRaw(t, e, testSecret, newID())
		r.send(helloNamed(session, 0, 1, bad))
		r.ended()
	}
	for name, want := range map[string]bool{"": true, bad: false} {
		info := rawServer(t, newID(), func(r *raw) {
			if h, _, err := r.next(); err == nil {
				r.Write(helloNamed(h.Address, 0, 1, name))
			}
		})
		d := newEndpoint(t, newContext(t), Config{Conns: 1, Timeout: patience})
		if _, err := d.Connect(t.Context(), info); (err == nil) != want {
			t.Errorf("an acceptor that is called %q: %v", name, err)
		}
	}
}

// An endpoint has as many connections as its context has loops, and not more than there may be.
func TestManyLoops(t *testing.T) {
	c, err := NewContext(ContextConfig{Loops: wire.MaxConns + 1})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	e, err := New(c, Config{Secret: testSecret, Interfaces: "127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	e.Close()
}

// writer is a function that gets what is written.
type writer func([]byte)

func (w writer) Write(b []byte) (int, error) {
	w(b)
	return len(b), nil
}

// TestMalformedFrames: each ends its connection, and nothing else.
func TestMalformedFrames(t *testing.T) {
	g := guard(t, 64<<10)
	words := func(v ...uint64) []byte { return wire.Words(nil, v...) }
	rangeOf := func(e wire.Entry, off, total uint64) []byte {
		return wire.Range{Region: e.Region, Generation: e.Generation, Offset: off, Total: total}.Append(nil)
	}
	giant := func(op wire.Opcode, size uint64) []byte {
		return wire.Header{Size: size, Address: 1, Op: op}.Append(nil)
	}
	long := func(n uint64) []byte {
		return append(giant(wire.Message, wire.BulkSize+n), make([]byte, wire.BulkSize)...)
	}
	for name, f := range map[string]func(e wire.Entry) [][]byte{
		"raw write": func(wire.Entry) [][]byte { return [][]byte{frame(wire.RawWrite, 0, nil, 1, 2, 3)} },
		"raw read": func(wire.Entry) [][]byte {
			return [][]byte{frame(wire.RawRead, 0, nil, 1, 2, 3, 4, 5, 6,
				7, 8)}
		},
		"unknown opcode": func(wire.Entry) [][]byte { return [][]byte{giant(0xff, 0)} },
		"giant ping":     func(wire.Entry) [][]byte { return [][]byte{giant(wire.Ping, 1<<63)} },
		"giant get":      func(wire.Entry) [][]byte { return [][]byte{giant(wire.Get, 1<<64-1)} },
		"giant put":      func(wire.Entry) [][]byte { return [][]byte{giant(wire.Put, 1<<64-1)} },
		"giant message":  func(wire.Entry) [][]byte { return [][]byte{long(wire.MaxMessage + 1)} },
		"long message":   func(wire.Entry) [][]byte { return [][]byte{long(maxMessage + 1)} },
		"giant lookup":   func(wire.Entry) [][]byte { return [][]byte{giant(wire.Lookup, 256)} },
		"short put":      func(wire.Entry) [][]byte { return [][]byte{giant(wire.Put, wire.BulkSize-1)} },
		"another hello":  func(wire.Entry) [][]byte { return [][]byte{hello(77, 0, 1)} },
		"data":           func(wire.Entry) [][]byte { return [][]byte{frame(wire.Data, 1, words(0), 1, 2)} },
		"done":           func(wire.Entry) [][]byte { return [][]byte{frame(wire.Done, 1, outcomeOf(wire.OK, 0))} },
		"done, bad code": func(wire.Entry) [][]byte {
			return [][]byte{frame(wire.Done, 1, []byte{200, 0, 0, 0, 0,
				0, 0, 0, 0})}
		},
		"region": func(e wire.Entry) [][]byte {
			return [][]byte{frame(wire.Region, 1, e.Append(nil),
				[]byte("x")...)}
		},
		"taken":         func(wire.Entry) [][]byte { return [][]byte{frame(wire.Taken, 1, outcomeOf(wire.OK, 0))} },
		"taken 0":       func(wire.Entry) [][]byte { return [][]byte{frame(wire.Taken, 0, outcomeOf(wire.OK, 0))} },
		"credit":        func(wire.Entry) [][]byte { return [][]byte{frame(wire.Credit, 1, nil)} },
		"pull":          func(wire.Entry) [][]byte { return [][]byte{frame(wire.Pull, 1, words(0, 1))} },
		"piece":         func(wire.Entry) [][]byte { return [][]byte{frame(wire.Piece, 1, words(0), 1)} },
		"sent":          func(wire.Entry) [][]byte { return [][]byte{frame(wire.Sent, 1, nil)} },
		"message 2":     func(wire.Entry) [][]byte { return [][]byte{frame(wire.Message, 2, nil, 1)} },
		"message 0":     func(wire.Entry) [][]byte { return [][]byte{frame(wire.Message, 0, nil, 1)} },
		"message twice": func(wire.Entry) [][]byte { m := frame(wire.Message, 1, nil, 1); return [][]byte{m, m} },
		"dropped 5":     func(wire.Entry) [][]byte { return [][]byte{frame(wire.Dropped, 5, nil)} },
		"key":           func(wire.Entry) [][]byte { return [][]byte{frame(wire.Key, 1, words(0, 0))} },
		"fence":         func(wire.Entry) [][]byte { return [][]byte{frame(wire.Fence, 1, nil)} },
		"fenced":        func(wire.Entry) [][]byte { return [][]byte{frame(wire.Fenced, 1, nil)} },
		"joined":        func(wire.Entry) [][]byte { return [][]byte{frame(wire.Joined, 1, nil)} },
		"giant join":    func(wire.Entry) [][]byte { return [][]byte{giant(wire.Join, wire.MaxJoin+1)} },
		"revoke":        func(wire.Entry) [][]byte { return [][]byte{frame(wire.Revoke, 1, words(1, 1))} },
		"revoked":       func(wire.Entry) [][]byte { return [][]byte{frame(wire.Revoked, 1, nil)} },
		"huge offer":    func(wire.Entry) [][]byte { return [][]byte{frame(wire.Offer, 1, words(wire.MaxSize+1))} },
		"put beyond total": func(e wire.Entry) [][]byte {
			return [][]byte{frame(wire.Put, 1, rangeOf(e, 0, 8), 0xa5, 0xa5, 0xa5, 0xa5),
				frame(wire.Put, 1, rangeOf(e, 4, 8), bytes.Repeat([]byte{0}, 5)...)}
		},
		"put, another total": func(e wire.Entry) [][]byte {
			return [][]byte{frame(wire.Put, 1, rangeOf(e, 0, 8), 0xa5), frame(wire.Put, 1, rangeOf(e, 4, 9), 0)}
		},
		"put without bytes": func(e wire.Entry) [][]byte { return [][]byte{frame(wire.Put, 1, rangeOf(e, 0, 8))} },
		"put after get": func(e wire.Entry) [][]byte {
			return [][]byte{frame(wire.Put, 1, rangeOf(e, 0, 8), 0xa5), frame(wire.Get, 1, rangeOf(e, 0, 8))}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := dialRaw(t, g.e, testSecret, newID()).session(1)
			r.send(f(r.find("data"))...)
			r.ended()
			g.works(t)
		})
	}
	t.Run("put on two connections", func(t *testing.T) {
		id := newID()
		a, b := dialRaw(t, g.e, testSecret, id), dialRaw(t, g.e, testSecret, id)
		a.send(hello(1, 0, 2))
		a.expect(wire.Hello)
		b.send(hello(1, 1, 2))
		b.expect(wire.Hello)
		e := a.find("data")
		a.send(frame(wire.Put, 1, rangeOf(e, 0, 8), 0xa5))
		a.find("data") // it is there
		b.send(frame(wire.Put, 1, rangeOf(e, 1, 8), 0))
		a.ended()
		b.ended()
		g.works(t)
	})
}

// TestOutsideRegions: no request reaches what it may not.
func TestOutsideRegions(t *testing.T) {
	const n = 64 << 10
	g := guard(t, n)
	eve, err := bootstrap.NewCredential(credential(t, testSecret).Key, "eve")
	if err != nil {
		t.Fatal(err)
	}
	r := dialRaw(t, g.e, testSecret, newID()).session(1)
	e, locked := r.find("data"), r.find("locked")
	at := func(e wire.Entry, off, total uint64) wire.Range {
		return wire.Range{Region: e.Region, Generation: e.Generation, Offset: off, Total: total}
	}
	other := at(e, 0, 1)
	other.Generation++
	none := at(e, 0, 1)
	none.Region = 1 << 50
	for i, x := range []struct {
		x    wire.Range
		code wire.Code
	}{{at(e, n, 1), wire.Bounds}, {at(e, n-1, 2), wire.Bounds}, {at(e, 1<<64-1, 1), wire.Bounds},
		{at(e, 1<<64-1, 2), wire.Bounds}, {at(e, 1<<63, 1<<62), wire.Bounds}, {other, wire.Stale}, {none, wire.Stale}} {
		for _, op := range []wire.Opcode{wire.Get, wire.Put} {
			var payload []byte
			if op == wire.Put {
				payload = make([]byte, min(x.x.Total, 2))
				x.x.Total = uint64(len(payload))
				if x.code == wire.Bounds && x.x.Offset == n-1 || x.x.Offset < n {
					payload = payload[:x.x.Total]
				}
			}
			r.send(frame(op, uint64(i+10), x.x.Append(nil), payload...))
			_, body := r.expect(wire.Done)
			if o, _ := wire.DecodeOutcome(body); o.Code != x.code {
				t.Errorf("%v of %+v: code %d, want %d", op, x.x, o.Code, x.code)
			}
		}
	}
	r.send(frame(wire.Put, 90, at(locked, 0, 1).Append(nil), 0))
	if _, body := r.expect(wire.Done); wire.Code(body[0]) != wire.Rights {
		t.Errorf("a write to what may be read: code %d", body[0])
	}
	// A later frame of a write is outside.
	r.send(frame(wire.Put, 91, at(e, 0, 8).Append(nil), 0xa5), frame(wire.Put, 91, at(e, n-3, 8).Append(nil),
		make([]byte, 7)...))
	if _, body := r.expect(wire.Done); wire.Code(body[0]) != wire.Bounds {
		t.Errorf("a write whose second part is outside: code %d", body[0])
	}
	// A client without rights does not even learn that the region is there.
	c := dialRaw(t, g.e, eve, newID()).session(1)
	c.send(frame(wire.Lookup, 1, nil, []byte("locked")...))
	if _, body := c.expect(wire.Done); wire.Code(body[0]) != wire.NoRegion {
		t.Errorf("lookup by a client without rights: code %d", body[0])
	}
	c.send(frame(wire.Get, 2, at(locked, 0, 1).Append(nil)))
	if _, body := c.expect(wire.Done); wire.Code(body[0]) != wire.NoRegion {
		t.Errorf("get by a client without rights: code %d", body[0])
	}
	c.send(frame(wire.List, 3, wire.Limit(nil, 1<<32-1)))
	for {
		h, body, err := c.next()
		if err != nil || h.Op == wire.Done {
			break
		}
		if string(body[wire.EntrySize:]) == "locked" {
			t.Error("a client without rights sees the region in the list")
		}
	}
	g.works(t)
}

// TestClaimedIdentity: a client that says that it is another's endpoint gets a Peer of its own, and
// the other one keeps its connection.
func TestClaimedIdentity(t *testing.T) {
	a, e, p, _ := pair(t, Config{})
	eve, err := bootstrap.NewCredential(credential(t, testSecret).Key, "eve")
	if err != nil {
		t.Fatal(err)
	}
	r := dialRaw(t, e, eve, a.id).session(1)
	q := r.accepted(e)
	if q.Client() != "eve" || q.Name() != "eve" {
		t.Errorf("the client's peer is %q, %v", q.Client(), q)
	}
	buf := make([]byte, 10)
	f := q.Recv(buf)
	wait(t, p.Send([]byte("honest")))
	r.send(frame(wire.Message, 1, nil, []byte("evil")...))
	wait(t, f)
	if string(buf[:f.Result(0).N]) != "evil" {
		t.Errorf("the client's message is %q", buf)
	}
	k := credential(t, eve)
	c, err := net.Dial("tcp", e.Info().Addrs[0])
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(patience))
	if _, err := trust.Client(c, k.Key, purpose, trust.Hello{Client: "adam", FromIncarnation: 9, Extra: protocol},
		false); !errors.Is(err, trust.ErrAuth) {
		t.Errorf("another client's name: %v", err)
	}
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// flood sends a frame again and again without receiving, at most total bytes, and fails if the heap
// grows by more than limit. An endpoint that ends the connection or does not receive more is right.
func flood(t *testing.T, c net.Conn, total int, limit uint64, next func(b []byte, i int) []byte) {
	t.Helper()
	before := heap()
	var b []byte
	i := 0
	for sent := 0; sent < total; {
		b = b[:0]
		for len(b) < 1<<20 {
			b = next(b, i)
			i++
		}
		c.SetWriteDeadline(time.Now().Add(2 * time.Second))
		n, err := c.Write(b)
		sent += n
		if now := heap(); now > before+limit {
			t.Errorf("after %d frames, %d bytes, the heap has grown from %d to %d KiB", i, sent, before>>10, now>>10)
			return
		}
		if err != nil {
			return
		}
	}
}

// The memory that a peer costs which does not receive what it asks for has a bound. What it asks
// for would be hundreds of megabytes; what garbage collection has left to do counts too.
func TestFloodsCostBoundedMemory(t *testing.T) {
	const limit = 64 << 20
	for _, x := range []struct {
		name string
		next func(e wire.Entry) func(b []byte, i int) []byte
	}{
		{"ping", func(wire.Entry) func([]byte, int) []byte {
			return func(b []byte, i int) []byte { return append(b, frame(wire.Ping, uint64(i), nil)...) }
		}},
		{"lookup", func(wire.Entry) func([]byte, int) []byte {
			return func(b []byte, i int) []byte {
				return append(b, frame(wire.Lookup, uint64(i+2), nil, []byte("data")...)...)
			}
		}},
		{"list", func(wire.Entry) func([]byte, int) []byte {
			return func(b []byte, i int) []byte {
				return append(b, frame(wire.List, uint64(i+2), wire.Limit(nil, 1024))...)
			}
		}},
		{"stale get", func(wire.Entry) func([]byte, int) []byte {
			x := wire.Range{Region: 99, Total: 1}.Append(nil)
			return func(b []byte, i int) []byte { return append(b, frame(wire.Get, uint64(i+2), x)...) }
		}},
		{"get", func(e wire.Entry) func([]byte, int) []byte {
			x := wire.Range{Region: e.Region, Generation: e.Generation, Total: 64 << 10}.Append(nil)
			return func(b []byte, i int) []byte { return append(b, frame(wire.Get, uint64(i+2), x)...) }
		}},
		{"empty put", func(e wire.Entry) func([]byte, int) []byte {
			x := wire.Range{Region: e.Region, Generation: e.Generation}.Append(nil)
			return func(b []byte, i int) []byte { return append(b, frame(wire.Put, uint64(i+2), x)...) }
		}},
		{"dropped", func(wire.Entry) func([]byte, int) []byte {
			return func(b []byte, i int) []byte { return append(b, frame(wire.Dropped, uint64(i+1), nil)...) }
		}},
		{"empty messages", func(wire.Entry) func([]byte, int) []byte {
			return func(b []byte, i int) []byte { return append(b, frame(wire.Message, uint64(i+1), nil)...) }
		}},
		{"offers", func(wire.Entry) func([]byte, int) []byte {
			return func(b []byte, i int) []byte {
				return append(b, frame(wire.Offer, uint64(i+1), wire.Words(nil, 1<<40))...)
			}
		}},
	} {
		t.Run(x.name, func(t *testing.T) {
			g := guard(t, 64<<10)
			for i := range 500 {
				if _, err := g.e.Register(fmt.Sprintf("%0200d", i), mem.Host(g.honor, mem.Anywhere),
					RegionConfig{}); err != nil {
					t.Fatal(err)
				}
			}
			r := dialRaw(t, g.e, testSecret, newID()).session(1)
			flood(t, r, 40<<20, limit, x.next(r.find("data")))
			r.Close()
			g.works(t)
		})
	}
	t.Run("who are you", func(t *testing.T) {
		g := guard(t, 64<<10)
		r := dialRaw(t, g.e, testSecret, newID())
		h := hello(0, 0, 1)
		flood(t, r, 80<<20, limit, func(b []byte, _ int) []byte { return append(b, h...) })
		r.Close()
		g.works(t)
	})
	t.Run("pulls of one byte that are not read", func(t *testing.T) {
		g := guard(t, 64<<10)
		r := dialRaw(t, g.e, testSecret, newID()).session(1)
		p := acceptID(t, g.e, "raw")
		src := make([]byte, 8<<20)
		f := p.Send(src)
		defer f.Cancel()
		r.expect(wire.Offer)
		flood(t, r, 30<<20, limit, func(b []byte, i int) []byte {
			return append(b, frame(wire.Pull, 1, wire.Words(nil, uint64(i), 1))...)
		})
		r.Close()
		g.works(t)
	})
}

// A message may be pulled in any number of parts, but for those that are pulled at a time.
func TestPullsOfOneMessage(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{})
	const parts, part = 5 * wire.MaxConns, 100_000
	src := pattern(parts*part, 1)
	pull := func(seq uint64, i int) []byte {
		return frame(wire.Pull, seq, wire.Words(nil, uint64(i*part), part))
	}
	r := dialRaw(t, e, testSecret, newID()).session(1)
	p := r.accepted(e)
	f := p.Send(src)
	r.expect(wire.Offer)
	for i := range parts {
		r.send(pull(1, i))
		var got []byte
		for h, body, err := r.next(); h.Op != wire.Sent; h, body, err = r.next() {
			if err != nil || h.Op != wire.Piece {
				t.Fatalf("part %d: %v, %v", i, h.Op, err)
			}
			got = append(got, body[wire.BulkSize:]...)
		}
		if !bytes.Equal(got, src[i*part:][:part]) {
			t.Fatalf("part %d has other bytes", i)
		}
	}
	r.send(frame(wire.Taken, 1, wire.Outcome{Code: wire.OK, Bytes: uint64(len(src))}.Append(nil)))
	wait(t, f)
}

// acceptID accepts peers until one with the name comes.
func acceptID(t testing.TB, e *Endpoint, name string) *Peer {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		p, err := e.Accept(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if p.Name() == name {
			return p
		}
	}
}

// TestSendsWithoutReceiver: messages that are not received are kept within a bound.
func TestSendsWithoutReceiver(t *testing.T) {
	_, _, p, _ := pair(t, Config{Timeout: 5 * time.Second})
	before := heap()
	ops := make([]Op, 1000)
	for i := range ops {
		ops[i] = Op{Kind: OpSend, Local: mem.Host(nil, mem.Anywhere)}
	}
	for i := range 300 {
		f := p.Batch(ops)
		if err := f.Wait(t.Context()); err != nil {
			break // it waits for the receiver
		}
		if i%50 == 49 {
			if now := heap(); now > before+16<<20 {
				t.Fatalf("%d empty messages, which are not received, take %d KiB of memory", (i+1)*len(ops),
					(now-before)>>10)
			}
		}
	}
}

// TestMailOfManySessions: messages that are not received stay within the window if their sender
// connects again and again.
func TestMailOfManySessions(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{})
	before := heap()
	msg := make([]byte, maxMessage)
	id := newID()
	for i := range 16 {
		r := dialRaw(t, e, testSecret, id).session(uint64(i + 1))
		n := window / maxMessage
		for j := range n {
			if _, err := r.Write(frame(wire.Message, uint64(j+1), nil, msg...)); err != nil {
				break // it sends more than it may
			}
		}
		for range n {
			if _, _, err := r.next(); err != nil {
				break
			}
		}
		r.Close()
	}
	if now := heap(); now > before+24<<20 {
		t.Errorf("%d KiB of messages are kept, the window has %d", (now-before)>>10, window>>10)
	}
}

// TestWindowBesideASession: messages that an earlier session has take room from the next one, also
// if that begins before the end of the earlier one.
func TestWindowBesideASession(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{})
	id := newID()
	first := dialRaw(t, e, testSecret, id).session(1)
	msg := make([]byte, maxMessage)
	left, seq := window, uint64(0)
	for left > 0 {
		n := min(len(msg), left-int(wire.Cost(0)))
		seq++
		first.send(frame(wire.Message, seq, nil, msg[:n]...))
		left -= int(wire.Cost(uint64(n)))
	}
	if n := len(first.settled()); n != int(seq) {
		t.Fatalf("%d of %d messages are taken", n, seq)
	}
	r := dialRaw(t, e, testSecret, id)
	r.send(hello(2, 0, 1))
	_, body := r.expect(wire.Hello)
	if g, err := wire.DecodeGreeting(body); err != nil || g.Window != 0 || g.Message != 0 {
		t.Errorf("beside a session with %d bytes of messages: window %d, messages of %d bytes, %v; want none", window,
			g.Window, g.Message, err)
	}
}

// TestWindowsOfAClient: the peers of a client share memory for messages, and take none from ranks.
func TestWindowsOfAClient(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{})
	windowOf := func(secret string) (*raw, int64) {
		r := dialRaw(t, e, secret, newID())
		r.send(hello(1, 0, 1))
		_, body := r.expect(wire.Hello)
		g, err := wire.DecodeGreeting(body)
		if err != nil {
			t.Fatal(err)
		}
		return r, int64(g.Window)
	}
	eve := clientSecret(t, "eve")
	var raws []*raw
	for n := int64(1); n <= 40; n++ {
		r, got := windowOf(eve)
		if want := min(window, 16*window/n); got != want {
			t.Errorf("peer %d of a client has a window of %d bytes, want %d", n, got, want)
		}
		raws = append(raws, r)
	}
	for _, secret := range []string{testSecret, clientSecret(t, "adam")} {
		if _, got := windowOf(secret); got != window {
			t.Errorf("beside the peers of a client another has a window of %d bytes, want %d", got, window)
		}
	}
	// A program that starts its processes anew is not hurt: those that have ended take nothing.
	for _, r := range raws {
		r.Close()
	}
	until(t, "the end of the client's sessions", func() bool {
		return !slices.ContainsFunc(e.Peers(), func(p *Peer) bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.client == "eve" && p.session != nil
		})
	})
	if _, got := windowOf(eve); got != window {
		t.Errorf("after its peers have ended, one of a client has a window of %d bytes, want %d", got, window)
	}
}

// TestWatchesOfASession: a session has few, others are refused, and one that has ended makes room.
func TestWatchesOfASession(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{})
	r := dialRaw(t, e, testSecret, newID()).session(1)
	for id := range uint64(1024) {
		r.send(frame(wire.Watch, 1+id, nil))
	}
	for id := range uint64(1024 - maxWatches) {
		h, body := r.expect(wire.Done)
		o, err := wire.DecodeOutcome(body)
		if why := body[wire.OutcomeSize:]; h.Address != 1+maxWatches+id || err != nil || o.Code != wire.Busy ||
			string(why) != "16 watches of the session are open" {
			t.Fatalf("watch %d: %v, %v, %q, want %d to be busy", h.Address, o, err, why, 1+maxWatches+id)
		}
	}
	r.send(frame(wire.Cancel, 1, nil))
	r.expect(wire.Done)
	r.send(frame(wire.Watch, 5000, nil), frame(wire.Watch, 5001, nil))
	if h, _ := r.expect(wire.Done); h.Address != 5001 {
		t.Errorf("watch %d is refused, want 5001", h.Address)
	}
	if _, err := e.Register("r", mem.Host(make([]byte, 1), mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	told := map[uint64]bool{}
	for range maxWatches {
		h, _ := r.expect(wire.Region)
		told[h.Address] = true
	}
	if len(told) != maxWatches || !told[5000] {
		t.Errorf("a region is reported to watches %v", told)
	}
}

// TestWatchBeyondTheBound: it fails before it has given a region, until another one ends.
func TestWatchBeyondTheBound(t *testing.T) {
	_, b, p, _ := pair(t, Config{})
	if _, err := b.Register("r", mem.Host(make([]byte, 1), mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	watch := func() (RegionEvent, func(), error) {
		t.Helper()
		next, stop := iter.Pull2(p.Watch(patient(t)))
		t.Cleanup(stop)
		ev, err, ok := next()
		if !ok {
			t.Fatal("a watch without an event and an error")
		}
		return ev, stop, err
	}
	var stop func()
	for range maxWatches {
		var err error
		if _, stop, err = watch(); err != nil {
			t.Fatal(err)
		}
	}
	if ev, _, err := watch(); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "16 watches") {
		t.Errorf("a watch too many: %v, %v, want that there are 16", ev, err)
	}
	stop()
	if ev, _, err := watch(); err != nil || ev.Name != "r" {
		t.Errorf("a watch in the place of another one: %v, %v", ev, err)
	}
}

// TestIdleConnections: connections that say nothing do not keep others out, and cost little memory
// and no processor time.
func TestIdleConnections(t *testing.T) {
	n := 1000
	if limit, known := files.Limit(); known && int(limit) < 2*n+500 { // the Go runtime has raised it
		n = max(int(limit)-500, 0) / 2
		t.Logf("a process may have %d descriptors here: %d connections", limit, n)
	}
	g := guard(t, 4096)
	before := heap()
	for i := range n {
		switch i % 3 {
		case 0:
			c, err := net.Dial("tcp", g.e.Info().Addrs[0])
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		case 1:
			dialRaw(t, g.e, testSecret, newID())
		case 2:
			dialRaw(t, g.e, testSecret, newID()).session(1)
		}
	}
	if now := heap(); now > before+uint64(n)*(100<<10) {
		t.Errorf("%d idle connections take %d KiB", n, (now-before)>>10)
	}
	g.works(t)
	dialRaw(t, g.e, testSecret, newID()).session(1)
	// The least of several looks: the tests before may have left something to do.
	const look = 200 * time.Millisecond
	least := look
	for i := 0; i < 20 && least > look/10; i++ {
		used := processorTime(t)
		time.Sleep(look)
		least = min(least, processorTime(t)-used)
	}
	if least > look/10 {
		t.Errorf("%d idle connections use the processor for %v of %v", n, least, look)
	}
}

// processorTime returns how long this process has used processors.
func processorTime(t *testing.T) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// TestConnectWithFewDescriptors: an end without descriptors says so, and goes on when there are
// some.
func TestConnectWithFewDescriptors(t *testing.T) {
	c := newContext(t)
	a := newEndpoint(t, c, Config{Conns: 2, DialTimeout: 200 * time.Millisecond})
	none := newEndpoint(t, c, Config{Conns: 2})
	b := newEndpoint(t, newContext(t), Config{})
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	for free := range 8 {
		few := limit
		few.Cur = uint64(proctest.Descriptors() + 20)
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
			t.Fatal(err)
		}
		var held []*os.File
		for {
			f, err := os.Open(".")
			if err != nil {
				break
			}
			held = append(held, f)
		}
		give := func(n int) {
			for _, f := range held[:n] {
				f.Close()
			}
			held = held[n:]
		}
		give(min(free, len(held)))
		from := a
		if free == 0 { // it has to come as far as to see it
			from = none
		}
		p, err := from.Connect(t.Context(), b.Info())
		give(len(held))
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
			t.Fatal(err)
		}
		if free == 0 && (err == nil || !strings.Contains(err.Error(), "RLIMIT_NOFILE")) {
			t.Errorf("without descriptors: %v", err)
		}
		if err != nil && !errors.Is(err, ErrBroken) {
			t.Errorf("with %d descriptors: %v", free, err)
		}
		until(t, "a connection", func() bool {
			p, err = a.Connect(t.Context(), b.Info())
			return err == nil
		})
		wait(t, p.Send(nil))
		p.Close()
	}
}

// A peer that ends a read with too few bytes breaks the session, and with it the read.
func TestShortAnswerToReadBreaksSession(t *testing.T) {
	info := rawServer(t, 5, func(r *raw) {
		r.serve(func(h wire.Header, _ []byte) {
			switch h.Op {
			case wire.Lookup:
				r.Write(frame(wire.Region, h.Address, wire.Entry{Region: 1, Generation: 1, Len: 1 << 20,
					Rights: 3}.Append(nil), []byte("data")...))
			case wire.Get:
				r.Write(frame(wire.Done, h.Address, outcomeOf(wire.OK, 10)))
			}
		})
	})
	a := newEndpoint(t, newContext(t), Config{Conns: 1, Timeout: time.Hour})
	p := connect(t, a, info)
	f := p.Read(make([]byte, 10), "data", 0)
	ends(t, f)
	if err := f.Err(); !errors.Is(err, ErrBroken) {
		t.Errorf("the read: %v", err)
	}
}

// ends fails unless a future ends soon.
func ends(t *testing.T, f *Future) {
	t.Helper()
	select {
	case <-f.Done():
	case <-time.After(patience / 2):
		t.Fatal("the operation does not end")
	}
}

// TestLookupWithoutRegion: a lookup that ends well without a region breaks the session.
func TestLookupWithoutRegion(t *testing.T) {
	info := rawServer(t, 5, func(r *raw) {
		if !r.answer() {
			return
		}
		if h, _, err := r.next(); err == nil {
			r.Write(frame(wire.Done, h.Address, outcomeOf(wire.OK, 0)))
		}
		r.next()
	})
	a := newEndpoint(t, newContext(t), Config{Conns: 1, Timeout: time.Hour})
	p := connect(t, a, info)
	f := p.Read(make([]byte, 10), "data", 0)
	ends(t, f)
	if err := f.Err(); !errors.Is(err, ErrBroken) {
		t.Errorf("the read: %v", err)
	}
}

// Names that change how a terminal shows them, or what stands beside them.
var badNames = []string{"a\n", "\x1b[2J", "\u009b2J", "\xff", "\x9b2J", "a\u202eb", "\u2066a", "\u200f", "a\u2028b"}

func TestNamesThatMislead(t *testing.T) {
	c := newContext(t)
	e := newEndpoint(t, c, Config{})
	clean := func(what string, err error) {
		t.Helper()
		if text := fmt.Sprint(err); err == nil || !utf8.ValidString(text) ||
			strings.ContainsFunc(text, plain.Controls) {
			t.Errorf("%s: %q", what, text)
		}
	}
	for _, name := range badNames {
		if _, err := e.Register(name, mem.Host(nil, mem.Anywhere), RegionConfig{}); !errors.Is(err, ErrName) {
			t.Errorf("region %q: %v", name, err)
		} else {
			clean("Register", err)
		}
		if x, err := New(c, Config{Name: name, Secret: testSecret}); !errors.Is(err, ErrName) {
			t.Errorf("endpoint %q: %v", name, err)
			x.Close()
		} else {
			clean("New", err)
		}
		// In a Hello, and in a list of regions.
		r := dialRaw(t, e, testSecret, newID())
		r.send(frame(wire.Hello, 1, wire.Greeting{Version: wire.Version, Count: 1, Requests: 1}.Append(nil),
			[]byte(name)...))
		r.ended()
		info := rawServer(t, 5, func(r *raw) {
			if !r.answer() {
				return
			}
			if h, _, err := r.next(); err == nil {
				r.Write(frame(wire.Region, h.Address, wire.Entry{Region: 1, Generation: 1}.Append(nil),
					[]byte(name)...))
			}
			r.next()
		})
		p, err := newEndpoint(t, c, Config{Conns: 1}).Connect(t.Context(), info)
		if err != nil {
			t.Fatal(err)
		}
		_, err = p.Regions(t.Context(), "", 0)
		if !errors.Is(err, ErrBroken) {
			t.Errorf("region %q: %v", name, err)
		}
		clean("Regions", err)
	}
	for _, host := range []string{"a\x1b", "\u202ea", "\x9b", "é"} {
		if i, err := ParseInfo(host + ":1"); err == nil {
			t.Errorf("host %q: %v", host, i)
		} else {
			clean("ParseInfo", err)
		}
	}
	for _, name := range []string{"weights", "a b", "é", "重み", "a/b=c", "👩‍🔬"} {
		if _, err := e.Register(name, mem.Host(nil, mem.Anywhere), RegionConfig{}); err != nil {
			t.Errorf("region %q: %v", name, err)
		}
	}
}

// TestCloseEndsOrphans: Close ends an operation of a session that was never complete.
func TestCloseEndsOrphans(t *testing.T) {
	for _, name := range []string{"peer", "endpoint"} {
		t.Run(name, func(t *testing.T) {
			e := newEndpoint(t, newContext(t), Config{Timeout: time.Hour})
			r := dialRaw(t, e, testSecret, newID())
			r.send(hello(1, 0, 2)) // the second connection does not come
			r.expect(wire.Hello)
			p := r.accepted(e)
			p.mu.Lock()
			s := p.coming
			p.mu.Unlock()
			f := p.Recv(make([]byte, 100))
			r.send(frame(wire.Ping, 1, nil), wire.Bulk(nil, wire.Message, 1, 100), []byte("a part"))
			r.expect(wire.Pong)
			if name == "peer" {
				p.Close()
			} else {
				e.Close()
			}
			ends(t, f)
			if err := f.Err(); !errors.Is(err, ErrClosed) {
				t.Errorf("the recv: %v", err)
			}
			if _, _, err := r.next(); err == nil {
				t.Error("a frame after Close")
			} else if late := net.Error(nil); errors.As(err, &late) && late.Timeout() {
				t.Error("the connection is open after Close")
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			if !errors.Is(s.err, ErrClosed) { // but because the second connection was late
				t.Errorf("the session: %v", s.err)
			}
		})
	}
}

func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !f(); {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
		runtime.Gosched()
		time.Sleep(100 * time.Microsecond)
	}
}

// TestOfferBeforeLastConnection: a message that comes before the session is complete gets to a recv
// that waits.
func TestOfferBeforeLastConnection(t *testing.T) {
	for _, x := range []struct {
		name  string
		frame []byte
		want  wire.Opcode
	}{{"offer", frame(wire.Offer, 1, wire.Words(nil, 10)), wire.Pull},
		{"long message", frame(wire.Message, 1, nil, make([]byte, 200)...), wire.Taken}} {
		t.Run(x.name, func(t *testing.T) {
			e := newEndpoint(t, newContext(t), Config{Timeout: patience / 2})
			id := newID()
			a, b := dialRaw(t, e, testSecret, id), dialRaw(t, e, testSecret, id)
			a.send(hello(1, 0, 2))
			a.expect(wire.Hello)
			p := a.accepted(e)
			f := p.Recv(make([]byte, 100))
			a.send(x.frame, frame(wire.Ping, 1, nil))
			for {
				if h, _, err := a.next(); err != nil {
					t.Fatal(err)
				} else if h.Op == wire.Pong {
					break
				}
			}
			b.send(hello(1, 1, 2))
			b.expect(wire.Hello)
			if x.want == wire.Pull {
				a.expect(wire.Pull)
				a.send(frame(wire.Piece, 1, wire.Words(nil, 0), make([]byte, 10)...), frame(wire.Sent, 1, nil))
			}
			wait(t, f)
		})
	}
}

// TestRecvGivenUpWhileMessageArrives: a message that is answered with success is not lost because
// the recv that it was meant for was given up while it arrived.
func TestRecvGivenUpWhileMessageArrives(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{Timeout: patience / 2})
	r := dialRaw(t, e, testSecret, newID()).session(1)
	p := r.accepted(e)
	r.send(wire.Bulk(nil, wire.Message, 1, 10), []byte("01234"))
	eventually(t, "the message is arriving", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.session.arrivals) == 1
	})
	f := p.Recv(make([]byte, 10)) // it gets the message that is arriving
	f.Cancel()
	r.send([]byte("56789"))
	_, body := r.expect(wire.Taken)
	if wire.Code(body[0]) != wire.OK {
		return
	}
	r.send(frame(wire.Message, 2, nil, []byte("second")...))
	buf := make([]byte, 10)
	f = p.Recv(buf)
	wait(t, f)
	if got := string(buf[:f.Result(0).N]); got != "0123456789" {
		t.Errorf("the sender was told that its first message has arrived, the next recv got %q", got)
	}
}

// TestUnansweredOperationsFreeMemory: operations that have timed out leave no memory behind,
// however many there were.
func TestUnansweredOperationsFreeMemory(t *testing.T) {
	for _, x := range []struct {
		name   string
		lookup bool // is answered
		op     Op
		count  int // in a batch
		size   int
	}{{"lookups", false, Op{Kind: OpRead, Region: "data"}, 1000, 2048},
		{"reads", true, Op{Kind: OpRead, Region: "data"}, 1000, 2048},
		{"writes", true, Op{Kind: OpWrite, Region: "data"}, 1000, 2048},
		{"sends", true, Op{Kind: OpSend}, 1000, 2048},
		{"long sends", true, Op{Kind: OpSend}, 2, 1 << 20}} {
		t.Run(x.name, func(t *testing.T) {
			info := rawServer(t, 5, func(r *raw) {
				r.serve(func(h wire.Header, _ []byte) {
					if h.Op == wire.Lookup && x.lookup {
						r.Write(frame(wire.Region, h.Address, wire.Entry{Region: 1, Generation: 1, Len: 1 << 20,
							Rights: 3}.Append(nil), []byte("data")...))
					}
				})
			})
			a := newEndpoint(t, newContext(t), Config{Conns: 1})
			p := connect(t, a, info)
			before := heap()
			for range 50 {
				ops := make([]Op, x.count)
				for j := range ops {
					ops[j] = x.op
					ops[j].Local = mem.Host(make([]byte, x.size), mem.Anywhere)
					ops[j].Timeout = time.Millisecond
				}
				f := p.Batch(ops)
				ends(t, f)
			}
			// 1,024 requests may be under way.
			if now := heap(); now > before+16<<20 {
				t.Errorf("%d operations that have ended leave %d KiB", 50*x.count, (now-before)>>10)
			}
			runtime.KeepAlive(p)
		})
	}
}

// TestUnansweredQueriesAreForgotten: calls that have ended, and operations on regions that are not
// known, leave nothing among the queries that do not fit.
func TestUnansweredQueriesAreForgotten(t *testing.T) {
	over, cancel := context.WithCancel(t.Context())
	cancel()
	for name, ask := range map[string]func(p *Peer, i int){
		"calls": func(p *Peer, i int) { p.Lookup(over, "data") },
		"watches": func(p *Peer, i int) {
			for range p.Watch(over) {
			}
		},
		"reads": func(p *Peer, i int) { p.Read(make([]byte, 1), fmt.Sprint(i), 0).Wait(over) },
	} {
		t.Run(name, func(t *testing.T) {
			p, _ := liar(t, 1)
			p.mu.Lock()
			p.session.theirs.Requests = 1
			p.mu.Unlock()
			for i := range 1000 {
				ask(p, i)
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			if n := p.session.asking.len(); n > 100 { // operations are forgotten by the dozen
				t.Errorf("%d queries wait", n)
			}
		})
	}
}

// TestManyRequestsAndMessages: as many requests and messages as an end may have under way do not
// break the session.
func TestManyRequestsAndMessages(t *testing.T) {
	_, b, p, q := pair(t, Config{Conns: 1})
	data := make([]byte, 1<<20)
	if _, err := b.Register("data", mem.Host(data, mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	wait(t, p.Read(make([]byte, 1), "data", 0))
	msg := make([]byte, maxMessage+1)
	var sends, reads []Op
	for range maxRequests {
		sends = append(sends, Op{Kind: OpSend, Local: mem.Host(msg, mem.Anywhere)})
		reads = append(reads, Op{Kind: OpRead, Region: "data", Local: mem.Host(make([]byte, 32<<10), mem.Anywhere)})
	}
	s, r := p.Batch(sends), p.Batch(reads)
	wait(t, r)
	buf := make([]byte, len(msg))
	for range sends {
		wait(t, q.Recv(buf))
	}
	wait(t, s)
}

// TestUnregisterFile: after Unregister nothing is read from the file, and reads under way fail with
// ErrStale.
func TestUnregisterFile(t *testing.T) {
	g := guard(t, 4096)
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const n = 64 << 20
	if err := f.Truncate(n); err != nil {
		t.Fatal(err)
	}
	reg, err := g.e.RegisterFile("file", f, 0, n, RegionConfig{})
	if err != nil {
		t.Fatal(err)
	}
	r := dialRaw(t, g.e, testSecret, newID()).session(1)
	x := r.find("file")
	r.send(frame(wire.Get, 1, wire.Range{Region: x.Region, Generation: x.Generation, Total: n}.Append(nil)))
	r.expect(wire.Data)
	reg.Unregister()
	if _, err := f.WriteAt(bytes.Repeat([]byte{1}, 1<<20), n-1<<20); err != nil { // the file is the program's again
		t.Fatal(err)
	}
	f.Close()
	for {
		h, body, err := r.next()
		if err != nil {
			t.Fatalf("the session ended: %v", err)
		}
		if h.Op == wire.Done {
			if code := wire.Code(body[0]); code == wire.OK || code == wire.Failed {
				t.Errorf("the read ended with code %d", code)
			}
			return
		}
		if off := binary.LittleEndian.Uint64(body); off >= n-1<<20 && bytes.IndexByte(body[wire.BulkSize:], 1) >= 0 {
			t.Fatal("the file was read after Unregister")
		}
	}
}

// TestCloseEndsConnect: Close ends a Connect that waits for a peer's identity, and leaves no
// connection.
func TestCloseEndsConnect(t *testing.T) {
	gone := make(chan error, 1)
	there := make(chan bool)
	info := rawServer(t, 5, func(r *raw) {
		r.next()
		there <- true
		_, _, err := r.next()
		gone <- err
	})
	info.ID = 0
	e := newEndpoint(t, newContext(t), Config{DialTimeout: time.Hour})
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	connected := make(chan error, 1)
	go func() {
		_, err := e.Connect(ctx, info)
		connected <- err
	}()
	<-there
	e.Close()
	select {
	case err := <-connected:
		if !errors.Is(err, ErrClosed) || errors.Is(err, ErrBroken) {
			t.Errorf("Connect ended with %v", err)
		}
	case <-time.After(patience / 2):
		t.Error("Connect goes on after Close")
		cancel()
		<-connected
	}
	<-gone
}

// TestConnectIsCancelled: a Connect whose context ends says so, whether it knows the peer's
// identity or not, and whether it waits for the proof or for the identity.
func TestConnectIsCancelled(t *testing.T) {
	m := newMute(t)
	there := make(chan bool, 1)
	proved := rawServer(t, 5, func(r *raw) {
		there <- true
		r.next()
		r.next() // until the dialler closes it
	})
	e := newEndpoint(t, newContext(t), Config{DialTimeout: time.Hour, Conns: 1})
	why := errors.New("enough")
	for _, info := range []Info{{ID: 7, Addrs: m.Addrs}, m.Info, proved, {Addrs: proved.Addrs}} {
		came := there
		if info.Addrs[0] == m.Addrs[0] {
			came = m.came
		}
		ctx, cancel := context.WithCancelCause(t.Context())
		connected := make(chan error, 1)
		go func() {
			_, err := e.Connect(ctx, info)
			connected <- err
		}()
		<-came
		cancel(why)
		if err := <-connected; !errors.Is(err, ErrCancelled) || !errors.Is(err, why) || errors.Is(err, ErrBroken) {
			t.Errorf("Connect to %v ended with %v", info, err)
		}
	}
}

// mute is an address that takes connections and sends nothing on them.
type mute struct {
	Info           // without an ID
	came chan bool // gets a value for each connection
}

func newMute(t testing.TB) mute {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := mute{Info{Addrs: []string{l.Addr().String()}}, make(chan bool, 16)}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { c.Close() })
			s.came <- true
		}
	})
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { l.Close() })
	return s
}

// TestCloseEndsWhatWaitsForAConnection: what waits for a connection when its peer, or the endpoint,
// is closed ends at once, with ErrClosed.
func TestCloseEndsWhatWaitsForAConnection(t *testing.T) {
	m := newMute(t)
	for name, end := range map[string]func(*Endpoint, *Peer) error{
		"peer":     func(_ *Endpoint, p *Peer) error { return p.Close() },
		"endpoint": func(e *Endpoint, _ *Peer) error { return e.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			e := newEndpoint(t, newContext(t), Config{Timeout: time.Hour, DialTimeout: time.Hour})
			ended := make(chan error, 4)
			go func() {
				_, err := e.Connect(t.Context(), Info{ID: 7, Addrs: m.Addrs})
				ended <- err
			}()
			<-m.came
			p := e.Peers()[0]
			send, read := p.Send(nil), p.Read(nil, "r", 0)
			go func() {
				_, err := p.Lookup(t.Context(), "r")
				ended <- err
			}()
			go func() { ended <- send.Wait(t.Context()) }()
			go func() { ended <- read.Wait(t.Context()) }()
			if err := end(e, p); err != nil {
				t.Fatal(err)
			}
			for range cap(ended) {
				select {
				case err := <-ended:
					if !errors.Is(err, ErrClosed) || errors.Is(err, ErrBroken) {
						t.Errorf("it ended with %v", err)
					}
				case <-time.After(patience):
					t.Fatal("a call goes on")
				}
			}
			if err := p.Send(nil).Wait(t.Context()); !errors.Is(err, ErrClosed) {
				t.Errorf("a later send: %v", err)
			}
			if _, err := p.Lookup(t.Context(), "r"); !errors.Is(err, ErrClosed) || errors.Is(err, ErrBroken) {
				t.Errorf("a later lookup: %v", err)
			}
		})
	}
}

// TestPeerClosedWhileConnecting: a peer that was closed does not connect afterwards.
func TestPeerClosedWhileConnecting(t *testing.T) {
	there, on := make(chan bool), make(chan bool)
	gone := make(chan error, 1)
	info := rawServer(t, 5, func(r *raw) {
		there <- true
		<-on
		r.answer()
		_, _, err := r.next()
		gone <- err
	})
	e := newEndpoint(t, newContext(t), Config{Conns: 1})
	connected := make(chan error, 1)
	go func() {
		_, err := e.Connect(t.Context(), info)
		connected <- err
	}()
	<-there
	e.Peers()[0].Close()
	close(on)
	if err := <-connected; err == nil {
		t.Error("Connect succeeded with a peer that is closed")
	}
	e.Close()
	if err := <-gone; errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the connection is open after Close of the endpoint")
	}
}

// TestSessionsDisplaceEachOther: sessions that are made while others of the same peer break do not
// block.
func TestSessionsDisplaceEachOther(t *testing.T) {
	// No Cleanup closes them: if the test fails, Close would not return.
	c, err := NewContext(ContextConfig{Loops: 1})
	if err != nil {
		t.Fatal(err)
	}
	e, err := New(c, Config{Secret: testSecret, Interfaces: "127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan bool)
	var wg sync.WaitGroup
	id := newID()
	for range 4 {
		wg.Go(func() {
			for range 500 {
				r, err := tryRaw(t, e, testSecret, id)
				if err != nil {
					return
				}
				r.Write(hello(rand.Uint64()|1, 0, 2)) // the second connection does not come
				r.next()
				r.Close()
			}
		})
	}
	go func() {
		wg.Wait()
		e.Close()
		c.Close()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(3 * patience):
		buf := make([]byte, 1<<20)
		t.Fatalf("the endpoint does nothing any more:\n%s", buf[:runtime.Stack(buf, true)])
	}
}

// TestUnevenParts: sizes that several connections cannot share evenly.
func TestUnevenParts(t *testing.T) {
	for conns := 2; conns <= 4; conns++ {
		_, b, p, q := pair(t, Config{Conns: conns})
		for _, n := range []int{stripe, stripe + 1, stripe + stripe/2 + 1, stripe + stripe/2 + 2, 2*stripe + 3,
			3*stripe + 1, 3*stripe - 1} {
			src, dst, data := pattern(n, uint64(n)), make([]byte, n), make([]byte, n)
			src[n-1] = 1
			to, err := b.Register(fmt.Sprint("to ", n), mem.Host(data, mem.Anywhere), RegionConfig{Rights: Write})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := b.Register(fmt.Sprint("from ", n), mem.Host(src, mem.Anywhere), RegionConfig{}); err != nil {
				t.Fatal(err)
			}
			wait(t, p.Write(src, to.Name(), 0))
			to.Unregister()
			if !bytes.Equal(src, data) {
				t.Errorf("%d connections: a write of %d bytes succeeded, and not all are there", conns, n)
			}
			if wait(t, p.Read(dst, fmt.Sprint("from ", n), 0)); !bytes.Equal(src, dst) {
				t.Errorf("%d connections: a read of %d bytes succeeded, and not all are there", conns, n)
			}
			clear(dst)
			f := p.Send(src)
			if err := q.Recv(dst).Wait(t.Context()); err != nil || !bytes.Equal(src, dst) {
				t.Fatalf("%d connections, a message of %d bytes: %v", conns, n, err)
			}
			wait(t, f)
		}
	}
}

// TestMessageOfIncompleteSession: a message on a session that is not complete yet does not overtake
// those of the one before.
func TestMessageOfIncompleteSession(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{Timeout: patience / 2})
	id := newID()
	before := dialRaw(t, e, testSecret, id).session(1)
	p := before.accepted(e)
	after := dialRaw(t, e, testSecret, id)
	after.send(hello(2, 0, 2))
	after.expect(wire.Hello)
	bufs := [][]byte{make([]byte, 10), make([]byte, 10)}
	f := []*Future{p.Recv(bufs[0]), p.Recv(bufs[1])}
	after.send(frame(wire.Message, 1, nil, []byte("second")...), frame(wire.Ping, 1, nil))
	for {
		if h, _, err := after.next(); err != nil {
			t.Fatal(err)
		} else if h.Op == wire.Pong {
			break
		}
	}
	before.send(frame(wire.Message, 1, nil, []byte("first")...))
	if err := f[0].Wait(t.Context()); err == nil && string(bufs[0][:f[0].Result(0).N]) == "second" {
		if err := f[1].Wait(t.Context()); err == nil {
			t.Errorf("%q was received after %q", bufs[1][:f[1].Result(0).N], bufs[0][:f[0].Result(0).N])
		}
	}
	f[1].Cancel()
}

// settled fails unless all frames that were sent are handled. It returns the outcomes of messages
// that have come meanwhile.
func (r *raw) settled() (taken []wire.Code) {
	r.t.Helper()
	r.send(frame(wire.Ping, 1, nil))
	for {
		h, body, err := r.next()
		switch {
		case err != nil:
			r.t.Fatal(err)
		case h.Op == wire.Taken:
			taken = append(taken, wire.Code(body[0]))
		case h.Op == wire.Pong:
			return taken
		}
	}
}

// TestMessageOfSessionThatIsNeverComplete: a message whose sender was told that it has arrived is
// received, also if its session ends before all of its connections are there.
func TestMessageOfSessionThatIsNeverComplete(t *testing.T) {
	check := func(t *testing.T, p *Peer, told bool, next *raw) {
		buf := make([]byte, 10)
		f := p.Recv(buf)
		next.send(frame(wire.Message, 1, nil, []byte("second")...))
		if wait(t, f); told && string(buf[:f.Result(0).N]) != "first" {
			t.Errorf("the sender was told that its first message has arrived, the next recv got %q",
				buf[:f.Result(0).N])
		}
	}
	t.Run("accepted", func(t *testing.T) {
		e := newEndpoint(t, newContext(t), Config{Timeout: patience / 2})
		id := newID()
		r := dialRaw(t, e, testSecret, id)
		r.send(hello(1, 0, 2))
		r.expect(wire.Hello)
		p := r.accepted(e)
		r.send(frame(wire.Message, 1, nil, []byte("first")...))
		told := len(r.settled()) > 0
		r.Close()
		check(t, p, told, dialRaw(t, e, testSecret, id).session(2))
	})
	// The accepting end can have greeted on all connections, and send, before the dialling one has
	// read the last greeting.
	t.Run("dialled", func(t *testing.T) {
		e := newEndpoint(t, newContext(t), Config{Conns: 2, Timeout: patience / 2})
		first, told := make(chan *raw, 1), make(chan bool, 1)
		info := rawServer(t, 1, func(r *raw) {
			h, body, err := r.next()
			if err != nil {
				return
			}
			if g, err := wire.DecodeGreeting(body); err != nil || g.Index == 0 {
				r.send(hello(h.Address, 0, 2))
				first <- r
				return
			}
			r0 := <-first
			r0.send(frame(wire.Message, 1, nil, []byte("first")...))
			told <- len(r0.settled()) > 0
			r0.Close()
		})
		if _, err := e.Connect(t.Context(), info); !errors.Is(err, ErrBroken) {
			t.Fatalf("Connect: %v, want %v", err, ErrBroken)
		}
		next := dialRaw(t, e, testSecret, 1).session(2)
		eventually(t, "the peer is known", func() bool { return len(e.Peers()) == 1 })
		check(t, e.Peers()[0], <-told, next)
	})
}

// TestMessagesOfIncompleteSessionsAreBounded: a session that is not complete takes no more messages
// than one that is, also if they are given up.
func TestMessagesOfIncompleteSessionsAreBounded(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{})
	r := dialRaw(t, e, testSecret, newID())
	r.send(hello(1, 0, 2))
	r.expect(wire.Hello)
	var frames [][]byte
	for i := range maxRequests {
		frames = append(frames, frame(wire.Dropped, uint64(i+1), nil))
	}
	r.send(frames...)
	r.settled()
	r.send(frame(wire.Dropped, maxRequests+1, nil))
	r.ended()
}

// TestMessagesOfCompleteSessionsAreTold: the sender of messages that came before the session was
// complete is told of them when it is.
func TestMessagesOfCompleteSessionsAreTold(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{Timeout: patience / 2})
	id := newID()
	a, b := dialRaw(t, e, testSecret, id), dialRaw(t, e, testSecret, id)
	a.send(hello(1, 0, 2))
	a.expect(wire.Hello)
	p := a.accepted(e)
	const n = maxRequests // as many as may be under way at once
	for i := range n {
		a.send(frame(wire.Message, uint64(i+1), nil, byte(i)))
	}
	told := len(a.settled())
	b.send(hello(1, 1, 2))
	b.expect(wire.Hello)
	for ; told < n; told++ {
		h, body := a.expect(wire.Taken)
		if h.Address != uint64(told+1) || wire.Code(body[0]) != wire.OK {
			t.Fatalf("message %d ended with %v, want %d with success", h.Address, wire.Code(body[0]), told+1)
		}
	}
	for i := range n {
		buf := make([]byte, 1)
		if wait(t, p.Recv(buf)); buf[0] != byte(i) {
			t.Fatalf("message %d is of %d", i, buf[0])
		}
	}
	a.send(frame(wire.Message, n+1, nil, 1)) // what was told does not count any more
	a.expect(wire.Taken)
}

// TestDialledSessionThatIsCompleteTooLate: connections whose last greeting comes after the peer has
// made a session of its own do not displace it, for it is the later one: nothing of theirs comes
// after what came on it.
func TestDialledSessionThatIsCompleteTooLate(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{Conns: 1, Timeout: patience / 2})
	ready, late := make(chan bool), make(chan bool)
	info := rawServer(t, 1, func(r *raw) {
		h, _, err := r.next()
		if err != nil {
			return
		}
		close(ready)
		<-late
		r.send(hello(h.Address, 0, 1), frame(wire.Message, 1, nil, []byte("old")...))
		r.ended()
	})
	connected := make(chan error, 1)
	go func() {
		_, err := e.Connect(t.Context(), info)
		connected <- err
	}()
	<-ready
	now := dialRaw(t, e, testSecret, 1).session(2)
	p := e.Peers()[0]
	buf := make([]byte, 10)
	now.send(frame(wire.Message, 1, nil, []byte("new")...))
	f := p.Recv(buf)
	wait(t, f)
	if got := string(buf[:f.Result(0).N]); got != "new" {
		t.Fatalf("got %q", got)
	}
	close(late)
	if err := <-connected; err != nil {
		t.Errorf("Connect: %v, and there is a session", err)
	}
	f = p.Recv(buf)
	now.send(frame(wire.Message, 2, nil, []byte("newer")...))
	if err := f.Wait(t.Context()); err != nil || string(buf[:f.Result(0).N]) != "newer" {
		t.Errorf("after \"new\" comes %q, %v", buf[:f.Result(0).N], err)
	}
}

// TestConnectAgainAfterCrossing: an end whose connection the peer refuses for one of its own dials
// again when none comes: the peer may only not have noticed the end of the session before.
func TestConnectAgainAfterCrossing(t *testing.T) {
	e := newEndpoint(t, newContext(t), Config{Conns: 1})
	crossed := make(chan struct{}, 1)
	crossed <- struct{}{}
	connect(t, e, rawServer(t, 1, func(r *raw) {
		select {
		case <-crossed:
			r.next()
			r.send(frame(wire.Bye, 0, nil))
			r.Close()
		default:
			r.serve(func(wire.Header, []byte) {})
		}
	}))
}
