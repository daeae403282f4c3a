package endpoint

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/endpoint/internal/wire"
	"tutti/internal/trust"
	"tutti/mem"
)

// middle is an attacker between two endpoints, or a network that damages what it carries.
type middle struct {
	t    testing.TB
	l    net.Listener
	to   string
	wg   sync.WaitGroup
	mu   sync.Mutex
	edit edit
	said [][2][]byte // on each connection, by the dialler and by the acceptor
	all  []net.Conn
}

// edit changes bytes at an offset of what the dialler (0) or the acceptor (1) says.
type edit func(way, off int, b []byte)

// Where the dialler's and the acceptor's first bytes after the handshake are, if nothing is
// refused.
var past = [2]int{8 + 32 + 32 + 32 + 32 + 32, 8 + 32 + 32 + 4}

// between returns an Info of e that leads through an attacker.
func between(t testing.TB, e *Endpoint, change edit) (*middle, Info) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &middle{t: t, l: l, to: e.Info().Addrs[0], edit: change}
	m.wg.Go(m.serve)
	t.Cleanup(func() {
		l.Close()
		m.cut()
		m.wg.Wait()
	})
	info := e.Info()
	info.Addrs = []string{l.Addr().String()}
	return m, info
}

// cut closes the connections.
func (m *middle) cut() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.all {
		c.Close()
	}
	m.all = nil
}

func (m *middle) change(f edit) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.edit = f
}

// last returns what was said on the last connection, and how many there were.
func (m *middle) last() (said [2][]byte, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n = len(m.said)
	said = m.said[n-1]
	return [2][]byte{bytes.Clone(said[0]), bytes.Clone(said[1])}, n
}

func (m *middle) serve() {
	for {
		c, err := m.l.Accept()
		if err != nil {
			return
		}
		s, err := net.Dial("tcp", m.to)
		if err != nil {
			c.Close()
			continue
		}
		m.mu.Lock()
		n := len(m.said)
		m.said = append(m.said, [2][]byte{})
		m.all = append(m.all, c, s)
		m.mu.Unlock()
		for way, x := range [2][2]net.Conn{{c, s}, {s, c}} {
			m.wg.Go(func() {
				m.carry(n, way, x[0], x[1])
				x[0].Close()
				x[1].Close()
			})
		}
	}
}

func (m *middle) carry(n, way int, from, to net.Conn) {
	buf := make([]byte, 64<<10)
	for off := 0; ; {
		k, err := from.Read(buf)
		if err != nil {
			return
		}
		m.mu.Lock()
		said := &m.said[n][way]
		*said = append(*said, buf[:min(k, max(0, 4<<20-len(*said)))]...)
		if m.edit != nil {
			m.edit(way, off, buf[:k])
		}
		m.mu.Unlock()
		off += k
		if _, err := to.Write(buf[:k]); err != nil {
			return
		}
	}
}

// flip is an edit of one bit.
func flip(way, at int, bit byte) edit {
	return func(w, off int, b []byte) {
		if w == way && off <= at && at < off+len(b) {
			b[at-off] ^= bit
		}
	}
}

// modeSeen says what the first bytes after the handshake are.
func modeSeen(t *testing.T, b []byte) wire.Mode {
	t.Helper()
	g, err := wire.NewGuard(wire.Checked, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	hello := func(b []byte) bool { // sealed bytes are random, so that one byte may be any opcode
		h := wire.Decode(b)
		return h.Op == wire.Hello && h.Size < 1<<16
	}
	switch _, err := g.In.Size(b); {
	case err != nil && hello(b):
		return wire.Plain
	case err == nil && hello(b[wire.RecordHeader:]):
		return wire.Checked
	case err == nil:
		return wire.Sealed
	}
	t.Fatalf("%x is neither a frame nor a record", b[:40])
	return 0
}

// A connection has the stronger of the guards that its two ends ask for, whichever dials. A third
// party can read what is moved only if it is not sealed.
func TestEitherEndAsksForGuards(t *testing.T) {
	for i, server := range guards {
		for j, client := range guards {
			t.Run(server.name+" "+client.name, func(t *testing.T) {
				server.cfg.Name = "b"
				client.cfg.Conns = 2
				b := newEndpoint(t, newContext(t), server.cfg)
				a := newEndpoint(t, newContext(t), client.cfg)
				m, info := between(t, b, nil)
				p := connect(t, a, info)
				marker := []byte("what no other process should know")
				data := bytes.Clone(marker)
				r, err := b.Register("r", mem.Host(data, mem.Anywhere), RegionConfig{Rights: Read | Write})
				if err != nil {
					t.Fatal(err)
				}
				got := make([]byte, len(data))
				wait(t, p.Read(got, "r", 0))
				wait(t, p.Write(marker, "r", 0))
				wait(t, p.Send(marker))
				r.Unregister()
				if !bytes.Equal(got, marker) || !bytes.Equal(data, marker) {
					t.Errorf("read %q, wrote %q", got, data)
				}
				want := wire.Mode(max(i, j))
				m.mu.Lock()
				said := bytes.Join([][]byte{m.said[len(m.said)-2][0], m.said[len(m.said)-2][1]}, nil)
				m.mu.Unlock()
				if seen := bytes.Contains(said, marker); seen != (want != wire.Sealed) {
					t.Errorf("the data is seen on the way: %v", seen)
				}
				last, n := m.last()
				for way := range last {
					if mode := modeSeen(t, last[way][past[way]:]); mode != want {
						t.Errorf("the connection is %v, want %v", mode, want)
					}
				}
				if want := 2 + min(max(i-j, 0), 1); n != want {
					t.Errorf("%d connections were made, want %d", n, want)
				}
			})
		}
	}
}

// A change of what is moved ends the session, with an error that says whose and why, and is not
// seen in memory. The next operation connects again.
func TestChangesOnTheWayAreNoticed(t *testing.T) {
	for _, g := range guards[1:] {
		t.Run(g.name, func(t *testing.T) {
			g.cfg.Name = "b"
			b := newEndpoint(t, newContext(t), g.cfg)
			a := newEndpoint(t, newContext(t), Config{})
			m, info := between(t, b, nil)
			p := connect(t, a, info)
			const n = 1 << 20
			region := make([]byte, n)
			_, err := b.Register("r", mem.Host(region, mem.Anywhere), RegionConfig{Rights: Read | Write})
			if err != nil {
				t.Fatal(err)
			}
			ones := bytes.Repeat([]byte{1}, n)
			wait(t, p.Write(ones, "r", 0))
			for round := range 10 {
				for way, kind := range []Kind{OpWrite, OpRead} {
					buf := make([]byte, n) // read: zeros become ones
					if kind == OpWrite {
						buf = bytes.Repeat([]byte{1}, n) // ones become ones
					}
					left := 1000 + round*n/10
					m.change(func(w, _ int, b []byte) {
						if w != way || left < 0 {
							return
						}
						if left < len(b) {
							b[left] ^= 0x40
						}
						left -= len(b)
					})
					err := p.Start(Op{Kind: kind, Local: mem.Host(buf, mem.Anywhere), Region: "r"}).Wait(t.Context())
					if !errors.Is(err, ErrBroken) || !strings.Contains(err.Error(), "endpoint b") {
						t.Fatalf("%v with a bit changed: %v", kind, err)
					}
					if kind == OpRead && !errors.Is(err, wire.ErrRecord) { // of a write the other end knows
						t.Errorf("%v with a bit changed: %v, want %v", kind, err, wire.ErrRecord)
					}
					m.change(nil)
					zeros := bytes.Count(buf, []byte{0})
					if zeros+bytes.Count(buf, []byte{1}) != n || kind == OpRead && zeros == 0 {
						t.Errorf("%v: bytes that were not sent are in memory, or all have come", kind)
					}
					got := make([]byte, n)
					wait(t, p.Read(got, "r", 0)) // connects
					if !bytes.Equal(got, ones) {
						t.Fatal("bytes that were not sent are in the region")
					}
				}
			}
		})
	}
}

// An attacker on the way that changes anything of a handshake prevents the connection, and gets no
// other one: neither end goes on with less than it has asked for.
func TestDowngradedHandshakeFails(t *testing.T) {
	for _, x := range []struct {
		name           string
		server, client Config
	}{
		{"the dialler asks", Config{}, Config{Seal: true}},
		{"the acceptor asks", Config{Seal: true}, Config{}},
		{"both ask", Config{Seal: true}, Config{Seal: true}},
	} {
		t.Run(x.name, func(t *testing.T) {
			x.client.DialTimeout = 500 * time.Millisecond // reached where a length is changed
			b := newEndpoint(t, newContext(t), x.server)
			a := newEndpoint(t, newContext(t), x.client)
			m, info := between(t, b, nil)
			try := func(what string, at int, e edit) {
				t.Helper()
				m.change(e)
				if _, err := a.Connect(t.Context(), info); err == nil {
					t.Fatalf("%s, byte %d: the connection was made", what, at)
				}
				if peers := b.Peers(); len(peers) > 0 {
					t.Fatalf("%s, byte %d: the acceptor has %v", what, at, peers)
				}
				m.cut()
			}
			for way, what := range []string{"dialler", "acceptor"} {
				for at := range past[way] {
					if testing.Short() && at%5 > 0 {
						continue
					}
					try(what, at, flip(way, at, 1<<(at%8)))
				}
			}
			// What an attacker would choose: Extra without its mode, and another code of refusal.
			mode := past[0] - 8 + 1
			for _, bit := range []byte{1, 2, 3} {
				try("Extra", mode, flip(0, mode, bit))
			}
			code := past[1] - 4
			for _, bit := range []byte{codeSealed, codeSealed ^ codeChecked, codeSealed ^ codeFull} {
				try("code", code, flip(1, code, bit))
			}
			m.change(nil)
			x.client.DialTimeout = 0
			p := connect(t, newEndpoint(t, newContext(t), x.client), info)
			wait(t, p.Send(nil))
			last, _ := m.last()
			if mode := modeSeen(t, last[0][past[0]:]); mode != wire.Sealed {
				t.Errorf("without an attacker the connection is %v", mode)
			}
		})
	}
}

// Records that an attacker adds after it has forwarded a handshake are refused.
func TestSealedConnectionIsNotTakenOver(t *testing.T) {
	b := newEndpoint(t, newContext(t), Config{Seal: true})
	r, err := tryMode(t, b, wire.Sealed)
	if err != nil {
		t.Fatal(err)
	}
	r.send(hello(1, 0, 1))
	if _, _, err := r.next(); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a frame on a sealed connection is answered: %v", err)
	}
	// The records of another connection, with the same secret, are not those of this one.
	records := func(s *trust.Session) wire.Guard {
		g, err := guardOf(wire.Sealed, s, true)
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	one, err := tryMode(t, b, wire.Sealed)
	if err != nil {
		t.Fatal(err)
	}
	two, err := tryMode(t, b, wire.Sealed)
	if err != nil {
		t.Fatal(err)
	}
	record := records(one.session).Out.Append(nil, hello(1, 0, 1))
	two.send(record)
	if _, err := two.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a record of another connection is answered: %v", err)
	}
	one.send(record)
	if _, err := one.Read(make([]byte, 1)); err != nil {
		t.Errorf("the record is not answered where it belongs: %v", err)
	}
}

// proved is a connection whose ends have agreed on keys.
type proved struct {
	*raw
	session *trust.Session
}

// tryMode is tryRaw for a connection of a mode.
func tryMode(t testing.TB, e *Endpoint, m wire.Mode) (proved, error) {
	t.Helper()
	c, err := net.Dial("tcp", e.Info().Addrs[0])
	if err != nil {
		return proved{}, err
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	s, err := trust.Client(c, credential(t, testSecret).Key, purpose, trust.Hello{FromIncarnation: newID(),
		Extra: extra(m, false)}, m == wire.Sealed)
	return proved{&raw{t, c}, s}, err
}

// A dialler that cannot have what the acceptor wants is told so, and what to do about it.
func TestRefusedModes(t *testing.T) {
	for i, g := range guards {
		b := newEndpoint(t, newContext(t), g.cfg)
		for m := wire.Plain; m <= wire.Sealed+1; m++ {
			_, err := tryMode(t, b, m)
			var r *trust.Refusal
			refused := errors.As(err, &r)
			switch {
			case m > wire.Sealed:
				if !refused || r.Code != codeOther {
					t.Errorf("%s: mode %d: %v", g.name, m, err)
				}
			case int(m) >= i:
				if err != nil {
					t.Errorf("%s: %v: %v", g.name, m, err)
				}
			case !refused || wanted(r) != wire.Mode(i) ||
				!strings.Contains(r.Text, []string{"", "Checksum", "Seal"}[i]):
				t.Errorf("%s: %v: %v", g.name, m, err)
			}
		}
	}
}

// A dialler does not follow an acceptor that refuses for ever, and takes no less than it asked for.
func TestRefusalsEnd(t *testing.T) {
	var mu sync.Mutex
	var modes []wire.Mode
	code := uint8(0)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	acceptor := &trust.Acceptor{Listener: l, Secret: credential(t, testSecret).Key, Purpose: purpose, Timeout: patience,
		Agree: true, Admit: func(_ net.Conn, h trust.Hello) error {
			mu.Lock()
			defer mu.Unlock()
			m, _, _ := modeOf(h.Extra)
			modes = append(modes, m)
			return &trust.Refusal{Code: code, Text: "no"}
		}, Accepted: func(c net.Conn, _ trust.Hello, _ *trust.Session) { c.Close() }}
	var wg sync.WaitGroup
	wg.Go(acceptor.Serve)
	defer wg.Wait()
	defer acceptor.Close()
	for _, x := range []struct {
		cfg  Config
		code uint8
		want []wire.Mode
	}{
		{Config{}, codeChecked, []wire.Mode{wire.Plain, wire.Checked}},
		{Config{}, codeSealed, []wire.Mode{wire.Plain, wire.Sealed}},
		{Config{Seal: true}, codeChecked, []wire.Mode{wire.Sealed}},
		{Config{Seal: true}, codeSealed, []wire.Mode{wire.Sealed}},
		{Config{Checksum: true}, codeOther, []wire.Mode{wire.Checked}},
	} {
		mu.Lock()
		modes, code = nil, x.code
		mu.Unlock()
		a := newEndpoint(t, newContext(t), x.cfg)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, err := a.Connect(ctx, Info{ID: 7, Addrs: []string{l.Addr().String()}})
		cancel()
		mu.Lock()
		if !errors.Is(err, ErrRefused) || !slices.Equal(modes, x.want) {
			t.Errorf("code %d: %v, after %v, want %v", x.code, err, modes, x.want)
		}
		mu.Unlock()
	}
}

// The bytes of a whole connection, played again to the end that they were said to, are refused in
// the handshake, whichever end that is: nothing of what they wrote, sent or asked for happens
// again. Where connections are sealed they are not understood after another handshake either.
func TestReplayedBytesAreRefused(t *testing.T) {
	for _, g := range guards {
		t.Run(g.name, func(t *testing.T) {
			g.cfg.Conns = 1
			server, client := g.cfg, g.cfg
			server.Name, client.DialTimeout = "b", patience/2
			b := newEndpoint(t, newContext(t), server)
			a := newEndpoint(t, newContext(t), client)
			m, info := between(t, b, nil)
			data := shared(t, 10)
			copy(data, "----------")
			region, err := b.Register("r", mem.Host(data, mem.Anywhere), RegionConfig{Rights: Read | Write})
			if err != nil {
				t.Fatal(err)
			}
			p := connect(t, a, info)
			q := accept(t, b)
			got := make([]byte, len(data))
			wait(t, p.Write([]byte("first"), "r", 0))
			wait(t, p.Send([]byte("message")))
			wait(t, p.Read(got, "r", 0))
			wait(t, q.Recv(got))
			p.Close()
			until(t, "the acceptor has seen the end", func() bool { return !q.connected() })
			said, _ := m.last()
			m.cut()
			for way := range said {
				if len(said[way]) <= past[way] {
					t.Fatalf("%d bytes were recorded of end %d", len(said[way]), way)
				}
			}
			// Another peer uses the region meanwhile.
			now := newEndpoint(t, newContext(t), client)
			other := connect(t, now, b.Info())
			wait(t, other.Write([]byte("later"), "r", 0))
			accept(t, b)
			before := b.Stats()
			reads, writes := region.Traffic()
			unchanged := func(what string) {
				t.Helper()
				after := b.Stats()
				if r, w := region.Traffic(); r != reads || w != writes || string(data) != "later-----" {
					t.Errorf("%s: the region has %q, %d bytes were read and %d written, before %d and %d", what, data,
						r, w, reads, writes)
				}
				if after.Waiting != before.Waiting || after.Sessions != before.Sessions || after.Peers != before.Peers {
					t.Errorf("%s: there are %d messages, %d sessions and %d peers, before %d, %d and %d", what,
						after.Waiting.N, after.Sessions, after.Peers, before.Waiting.N, before.Sessions, before.Peers)
				}
			}
			for _, x := range []struct {
				name string
				step int // bytes that are said at once
			}{{"at once", len(said[0])}, {"byte by byte", 1}, {"in pieces", 40}} {
				c, err := net.Dial("tcp", b.Info().Addrs[0])
				if err != nil {
					t.Fatal(err)
				}
				c.SetDeadline(time.Now().Add(patience))
				for part := range slices.Chunk(said[0], x.step) {
					if _, err := c.Write(part); err != nil {
						break // it is closed
					}
				}
				answer, err := io.ReadAll(c)
				if errors.Is(err, os.ErrDeadlineExceeded) || len(answer) > past[1] {
					t.Errorf("%s: %d bytes are the answer, the handshake has %d: %v", x.name, len(answer), past[1], err)
				}
				c.Close()
				unchanged(x.name)
			}
			// What the acceptor said does not prove another one.
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			defer wg.Wait()
			defer l.Close()
			wg.Go(func() {
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					c.Write(said[1])
					io.Copy(io.Discard, c)
					c.Close()
				}
			})
			info.Addrs = []string{l.Addr().String()}
			if _, err := a.Connect(t.Context(), info); !errors.Is(err, ErrAuth) {
				t.Errorf("the dialler hears an old connection: %v, want %v", err, ErrAuth)
			}
			if g.cfg.Seal {
				info.Addrs = []string{m.l.Addr().String()}
				m.change(func(way, off int, b []byte) {
					if at := max(off, past[0]); way == 0 && at < off+len(b) {
						copy(b[at-off:], said[0][min(at, len(said[0])):])
					}
				})
				if _, err := a.Connect(t.Context(), info); !errors.Is(err, ErrBroken) {
					t.Errorf("after another handshake: %v, want %v", err, ErrBroken)
				}
				unchanged("after another handshake")
				m.change(nil)
			}
			// The endpoint works, also for the end that was recorded.
			info = b.Info()
			p = connect(t, a, info)
			wait(t, p.Write([]byte("last"), "r", 6))
			wait(t, other.Read(got, "r", 0))
			if string(got) != "later-last" {
				t.Errorf("the region has %q", got)
			}
		})
	}
}
