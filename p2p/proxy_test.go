package p2p_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tutti/internal/leaktest"
	"tutti/p2p"
	"tutti/p2p/inproc"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// cluster is n proxies of one process that know each other.
func cluster(t interface{ Fatal(...any) }, n, window int, wrap func(p2p.Transport) p2p.Transport) []*p2p.Proxy {
	all := make([]*p2p.Proxy, n)
	id := func(r int) p2p.Identity { return p2p.Identity{Rank: r, Incarnation: uint64(r) + 1} }
	for r := range all {
		var tr p2p.Transport = inproc.New(inproc.Config{RingBytes: 16 << 10})
		if wrap != nil {
			tr = wrap(tr)
		}
		all[r] = p2p.New(p2p.Config{Self: id(r), Size: n, Secret: []byte("0123456789abcdef"), Window: window,
			Transports: []p2p.Transport{tr}, Threads: true,
			Oversubscribed: true, Resolve: func(_ context.Context, rank int) (p2p.Peer, error) {
				return p2p.Peer{Identity: id(rank), Endpoints: all[rank].Endpoints()}, nil
			}})
	}
	for _, p := range all {
		if _, err := p.Listen(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	return all
}

func closeAll(all []*p2p.Proxy) {
	for _, p := range all {
		p.Close()
	}
}

func ranks(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = i
	}
	return all
}

// known is the name of a channel that all ranks know.
func known(number uint64) p2p.Name { return p2p.Name{Number: number} }

func open(t interface{ Fatal(...any) }, p *p2p.Proxy, number uint64, n int) *p2p.Channel {
	c, err := p.Open(known(number), p2p.Epoch{}, ranks(n), nil, false)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func patient(ctx context.Context) *p2p.Wait {
	w := &p2p.Wait{}
	w.Reset(ctx, 20*time.Second, true)
	return w
}

// Random traffic on both lanes: everything arrives whole and in order, and the accounts of both
// ends agree at every quiet moment.
func TestAccountsOfBothEndsAgree(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const window = 32 << 10
		all := cluster(t, 2, window, nil)
		defer closeAll(all)
		var ordered, tagged [2]*p2p.Channel
		for r, p := range all {
			ordered[r], tagged[r] = open(t, p, 1, 2), open(t, p, 2, 2)
		}
		for range rapid.IntRange(1, 4).Draw(t, "rounds") {
			sizes := rapid.SliceOfN(rapid.IntRange(0, 60_000), 0, 8).Draw(t, "sizes")
			tags := rapid.SliceOfN(rapid.IntRange(0, 2), len(sizes), len(sizes)).Draw(t, "tags")
			backwards := rapid.Bool().Draw(t, "receive the highest tag first")
			lane := rapid.Bool().Draw(t, "tagged")
			var wg sync.WaitGroup
			errs := make(chan error, 64)
			payload := func(i int) []byte { return bytes.Repeat([]byte{byte(i + 1)}, sizes[i]) }
			wg.Add(2)
			go func() {
				defer wg.Done()
				p := all[0]
				reqs := make([]p2p.SendReq, len(sizes))
				p.Lock()
				defer p.Unlock()
				w := patient(context.Background())
				for i := range sizes {
					if lane {
						tagged[0].PostSend(&reqs[i], 1, uint64(tags[i]), 9, payload(i))
					} else if err := ordered[0].Send(w, 1, p2p.Token{Seq: 1}, payload(i)); err != nil {
						errs <- err
						return
					}
				}
				for i := range reqs {
					if lane {
						if err := tagged[0].WaitSend(w, &reqs[i]); err != nil {
							errs <- err
						}
					}
				}
			}()
			go func() {
				defer wg.Done()
				p := all[1]
				p.Lock()
				defer p.Unlock()
				w := patient(context.Background())
				check := func(i int, got []byte) {
					if !bytes.Equal(got, payload(i)) {
						errs <- fmt.Errorf("message %d is damaged or another one", i)
					}
				}
				if !lane {
					for i := range sizes {
						var r p2p.Recv
						ordered[1].PostRecv(&r, 0, p2p.Token{Seq: 1}, make([]byte, sizes[i]), i%2 == 0)
						if err := ordered[1].WaitRecv(w, &r); err != nil {
							errs <- err
							return
						}
						check(i, r.View())
						ordered[1].ReleaseRecv(&r)
					}
					return
				}
				for k := range 3 {
					tag := k
					if backwards {
						tag = 2 - k
					}
					for i := range sizes {
						if tags[i] != tag {
							continue
						}
						var r p2p.RecvReq
						buf := make([]byte, sizes[i])
						tagged[1].PostMsg(&r, 0, int64(tag), 9, buf)
						if err := tagged[1].WaitMsg(w, &r); err != nil {
							errs <- fmt.Errorf("tag %d, message %d: %w", tag, i, err)
							return
						}
						check(i, buf)
					}
				}
			}()
			wg.Wait()
			close(errs)
			for err := range errs {
				t.Fatal(err)
			}
			for _, c := range [][2]*p2p.Channel{ordered, tagged} {
				a, b := c[0].Ledger(1), c[1].Ledger(0)
				if a.Sent != b.Taken+b.Held {
					t.Fatalf("sent %d, taken %d and held %d", a.Sent, b.Taken, b.Held)
				}
				if a.Sent-a.Acked > uint32(a.Window) || b.Held > uint32(b.Window) || b.Told-a.Acked > b.Taken-a.Acked {
					t.Fatalf("the accounts disagree: %+v and %+v", a, b)
				}
			}
		}
	})
}

// However many dial each other at once, every pair ends with one link, the same at both ends.
func TestCrossingDialsMakeOneLink(t *testing.T) {
	const n = 12
	var made sync.Map
	all := cluster(t, n, 0, func(tr p2p.Transport) p2p.Transport { return &counting{Transport: tr, made: &made} })
	defer closeAll(all)
	var wg sync.WaitGroup
	for r, p := range all {
		wg.Add(1)
		go func() {
			defer wg.Done()
			c := open(t, p, 1, n)
			p.Lock()
			defer p.Unlock()
			w := patient(context.Background())
			recvs := make([]p2p.Recv, n)
			for d := 1; d < n; d++ {
				c.PostRecv(&recvs[(r+d)%n], (r+d)%n, p2p.Token{Seq: 1}, make([]byte, 8), false)
			}
			for d := 1; d < n; d++ {
				to := (r + d) % n
				if err := c.Send(w, to, p2p.Token{Seq: 1}, binary.LittleEndian.AppendUint64(nil,
					uint64(r*n+to))); err != nil {
					t.Errorf("rank %d to %d: %v", r, to, err)
					return
				}
			}
			for d := 1; d < n; d++ {
				from := (r + d) % n
				if err := c.WaitRecv(w, &recvs[from]); err != nil {
					t.Errorf("rank %d from %d: %v", r, from, err)
					return
				}
				if got := binary.LittleEndian.Uint64(recvs[from].View()); got != uint64(from*n+r) {
					t.Errorf("rank %d from %d: got %d", r, from, got)
				}
			}
		}()
	}
	wg.Wait()
	links := 0
	made.Range(func(_, _ any) bool { links++; return true })
	if links != n*(n-1)/2 {
		t.Errorf("%d dials became links among %d ranks, want %d", links, n, n*(n-1)/2)
	}
}

// counting notes successful dials.
type counting struct {
	p2p.Transport
	made *sync.Map
}

func (c *counting) Dial(ctx context.Context, to p2p.Identity, ep []byte) (p2p.Link, error) {
	l, err := c.Transport.Dial(ctx, to, ep)
	if err == nil {
		c.made.Store(l, true)
	}
	return l, err
}

// recorder is a transport that is told of memory, and remembers what it was told.
type recorder struct {
	p2p.Transport
	mu    sync.Mutex
	known map[uint64]p2p.Location
	twice bool
}

func (r *recorder) Register(reg *p2p.Region) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.twice = r.twice || r.known[reg.ID] != ""
	r.known[reg.ID] = reg.Loc()
}

func (r *recorder) Deregister(reg *p2p.Region) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.known[reg.ID] == "" || len(reg.Bytes()) == 0 {
		return errors.New("not registered, or freed before")
	}
	delete(r.known, reg.ID)
	return nil
}

// Transports are told of allocated memory from its beginning to its end.
func TestRegistrarsKnowAllocatedMemory(t *testing.T) {
	r := &recorder{known: map[uint64]p2p.Location{}}
	all := cluster(t, 1, 0, func(tr p2p.Transport) p2p.Transport {
		r.Transport = tr
		return r
	})
	defer closeAll(all)
	check := func(want ...*p2p.Region) {
		t.Helper()
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.known) != len(want) || r.twice {
			t.Fatalf("%d regions are known, want %d; twice: %v", len(r.known), len(want), r.twice)
		}
		for _, w := range want {
			if loc := r.known[w.ID]; loc != p2p.Anywhere {
				t.Errorf("region %x is at %q, want %q", w.ID, loc, p2p.Anywhere)
			}
		}
	}
	x, err := all[0].Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	y, err := all[0].AllocWritable(100)
	if err != nil {
		t.Fatal(err)
	}
	check(x, y)
	if err := all[0].FreeRegion(x); err != nil {
		t.Error(err)
	}
	check(y)
	if err := all[0].FreeRegion(y); err != nil {
		t.Error(err)
	}
	check()
}

// The engine's own memory has the wildcard location: with a GPU's, a transport would choose a path
// of GPUs for plain host memory.
func TestControlMemoryHasWildcardLocation(t *testing.T) {
	all := cluster(t, 1, 0, nil)
	defer closeAll(all)
	if r := all[0].Control(100); r.Loc() != p2p.Anywhere || r.Len() != 100 {
		t.Errorf("%d bytes at %q", r.Len(), r.Loc())
	}
}

// hostile is a transport whose one link delivers what a script says.
type hostile struct {
	host   p2p.Host
	script []byte
}

func (h *hostile) Name() string { return "hostile" }
func (h *hostile) Listen(_ context.Context, host p2p.Host) ([]byte, error) {
	h.host = host
	return []byte{1}, nil
}
func (h *hostile) Reaches([]byte) error { return nil }
func (h *hostile) Dial(context.Context, p2p.Identity, []byte) (p2p.Link, error) {
	return &scripted{script: h.script}, nil
}
func (h *hostile) Close() error { return nil }

type scripted struct {
	script []byte
	h      p2p.Header
	body   []byte
	have   bool
	whole  bool
	begun  uint32 // numbers of channels that it has opened in good order
	closed bool
}

const maxScripted = 4096

// See proxy.go.
const (
	frameEager = 5
	frameBeat  = 12
	frameOpen  = 13
	frameBegun = 15
	frameLost  = 16
)

func (s *scripted) Send(*p2p.Header, []byte) (bool, error) { return true, nil }
func (s *scripted) Flush() (bool, error)                   { return true, nil }
func (s *scripted) Recv() (*p2p.Header, []byte, error) {
	if !s.have && s.begun < 3 {
		s.h = p2p.Header{Kind: frameOpen, Chan: s.begun, Call: uint64(s.begun)}
		s.begun++
		s.have, s.whole = true, true
	}
	if !s.have {
		if len(s.script) < 16 {
			return nil, nil, fmt.Errorf("the script is over: %w", p2p.ErrPeerGone)
		}
		b := s.script
		s.script = s.script[16:]
		s.h = p2p.Header{Kind: b[0] % (frameLost + 1), Flags: b[1], Chan: uint32(b[2] % 5), Ack: uint32(b[3]),
			Len: uint32(binary.LittleEndian.Uint16(b[4:])) % maxScripted,
			Seq: uint64(b[6]), Call: uint64(b[7] % 4), Count: uint64(b[8] % 4),
			Off: uint64(binary.LittleEndian.Uint16(b[9:]))}
		s.body = make([]byte, s.h.Len)
		s.have, s.whole = true, b[11]%2 == 0
	}
	if s.whole {
		return &s.h, s.body, nil
	}
	return &s.h, nil, nil
}
func (s *scripted) Fill(dst []byte) (int, error) {
	n := min(len(dst), len(s.body), 100)
	copy(dst, s.body[:n])
	s.body = s.body[n:]
	return n, nil
}
func (s *scripted) Release()      { s.have = false }
func (s *scripted) MaxFrame() int { return maxScripted }
func (s *scripted) Arm() bool     { return true }
func (s *scripted) Disarm()       {}
func (s *scripted) Err() error    { return nil }
func (s *scripted) Close() error  { s.closed = true; return nil }

// Whatever frames a peer sends, the proxy neither panics nor hangs, and receives either what was
// asked for or an error.
func FuzzHostilePeer(f *testing.F) {
	f.Add([]byte{1, 1, 1, 0, 8, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0})
	f.Add(bytes.Repeat([]byte{6, 0, 2, 0, 0, 0, 1, 0, 1, 0, 9, 1, 0, 0, 0, 0}, 4))
	f.Fuzz(func(t *testing.T, script []byte) {
		if len(script) > 4096 {
			return
		}
		p := p2p.New(p2p.Config{Self: p2p.Identity{Rank: 0, Incarnation: 1}, Size: 2,
			Secret: []byte("0123456789abcdef"), Window: 32 << 10, Threads: true,
			Transports: []p2p.Transport{&hostile{script: script}},
			Resolve: func(context.Context, int) (p2p.Peer, error) {
				return p2p.Peer{Identity: p2p.Identity{Rank: 1, Incarnation: 2},
					Endpoints: map[string][]byte{"hostile": {1}}}, nil
			}})
		defer p.Close()
		if _, err := p.Listen(context.Background()); err != nil {
			t.Fatal(err)
		}
		ordered, tagged := open(t, p, 1, 2), open(t, p, 2, 2)
		p.Lock()
		defer p.Unlock()
		w := patient(context.Background())
		ordered.Begin(p2p.Token{Seq: 1}, false)
		buf := make([]byte, 300)
		var r p2p.Recv
		ordered.PostRecv(&r, 1, p2p.Token{Seq: 1}, buf[:8:8], true)
		var m p2p.RecvReq
		tagged.PostMsg(&m, p2p.AnySlot, p2p.AnyTag, 1, buf[100:200:200])
		var s p2p.SendReq
		tagged.PostSend(&s, 1, 3, 1, make([]byte, 20_000))
		if err := ordered.WaitRecv(w, &r); err == nil {
			if len(r.View()) != 8 {
				t.Errorf("a message of %d bytes where 8 were asked for", len(r.View()))
			}
			ordered.ReleaseRecv(&r)
		} else {
			ordered.Forget()
		}
		tagged.WaitMsg(w, &m)
		tagged.WaitSend(w, &s)
		if ferr := w.Waited(); ferr > 15*time.Second {
			t.Error("it hangs")
		}
	})
}

// accept has a host admit a peer, and take its link.
func accept(t *testing.T, h p2p.Host, peer p2p.Identity, l p2p.Link) {
	t.Helper()
	if err := h.Admit(peer); err != nil {
		t.Fatal(err)
	}
	h.Accepted(peer, l)
}

// seldom is a scripted link that counts how often it is told that its rank has a core of its own.
type seldom struct {
	scripted
	told int
}

func (s *seldom) SleepSeldom() { s.told++ }

// Links sleep seldom where the rank has a core of its own, whether that is known before they are
// made or later.
func TestPeersWithOwnCoresRarelySleep(t *testing.T) {
	for _, c := range []struct {
		name          string
		before, after bool // oversubscribed: when the link is made, and later
		first, then   bool // told
	}{
		{"known before", false, false, true, true},
		{"known later", true, false, false, true},
		{"never", true, true, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			peer := p2p.Identity{Rank: 1, Incarnation: 2}
			tr, link := &hostile{}, &seldom{}
			p := p2p.New(p2p.Config{Self: p2p.Identity{Rank: 0, Incarnation: 1}, Size: 2,
				Secret: []byte("0123456789abcdef"), Window: 32 << 10, Threads: true,
				Oversubscribed: c.before, Transports: []p2p.Transport{tr}, Resolve: func(context.Context,
					int) (p2p.Peer, error) {
					return p2p.Peer{Identity: peer}, nil
				}})
			defer p.Close()
			if _, err := p.Listen(t.Context()); err != nil {
				t.Fatal(err)
			}
			accept(t, tr.host, peer, link)
			if p.Linked(1) != peer.Incarnation {
				t.Fatal("the link is not up")
			}
			p.Lock()
			defer p.Unlock()
			if got := link.told > 0; got != c.first {
				t.Errorf("told when the link came up: %v, want %v", got, c.first)
			}
			p.SetOversubscribed(c.after)
			if got := link.told > 0; got != c.then {
				t.Errorf("told in the end: %v, want %v", got, c.then)
			}
		})
	}
}

// A rank that ends an operation while the link to a peer is full, and then does not wait for
// anything, has told the peer all the same.
func TestAbortPassesFullLink(t *testing.T) {
	all := cluster(t, 2, 512<<10, nil)
	defer closeAll(all)
	a, b := open(t, all[0], 1, 2), open(t, all[1], 1, 2)
	tok := p2p.Token{Seq: 1, Call: 1, Count: 1}
	// Make the link, then let rank 0 fill it while rank 1 takes nothing.
	var wg sync.WaitGroup
	wg.Go(func() {
		all[1].Lock()
		defer all[1].Unlock()
		var r p2p.Recv
		b.PostRecv(&r, 0, tok, make([]byte, 1), false)
		if err := b.WaitRecv(patient(context.Background()), &r); err != nil {
			t.Error(err)
		}
	})
	all[0].Lock()
	if err := a.Send(patient(context.Background()), 1, tok, []byte{1}); err != nil {
		t.Fatal(err)
	}
	all[0].Unlock()
	wg.Wait()
	all[0].Lock()
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	err := error(nil)
	for err == nil { // to the last byte
		err = a.Send(patient(ctx), 1, tok, []byte{1})
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("sending into a full link: %v", err)
	}
	a.Abort(errors.New("given up"), []byte("why"))
	all[0].Unlock()

	all[1].Lock()
	defer all[1].Unlock()
	w := patient(context.Background())
	var told *p2p.Aborted
	for err = nil; err == nil; {
		err = b.Probe(w)
	}
	if !errors.As(err, &told) || string(told.Payload) != "why" {
		t.Errorf("got %v, want what rank 0 aborted with", err)
	}
}

// The longest abort and the longest notice pass the smallest rings.
func TestLongestControlFramesPassSmallestRing(t *testing.T) {
	all := cluster(t, 2, 0, func(p2p.Transport) p2p.Transport { return inproc.New(inproc.Config{RingBytes: 1}) })
	defer closeAll(all)
	a, b := open(t, all[0], 1, 2), open(t, all[1], 1, 2)
	why, value := bytes.Repeat([]byte{1}, p2p.MaxAbort), bytes.Repeat([]byte{2}, p2p.MaxNotice)
	var heard []byte
	all[1].Lock()
	b.OnNotice(func(_, _ int, v []byte) { heard = v })
	all[1].Unlock()
	all[0].Lock()
	a.Notice([]int{1}, 0, value)
	a.Abort(errors.New("given up"), why)
	all[0].Unlock()
	all[1].Lock()
	defer all[1].Unlock()
	w := patient(context.Background())
	err := error(nil)
	for err == nil {
		if err = b.Reach(w, 0); b.Err() != nil {
			err = b.Err()
		}
	}
	if told := (*p2p.Aborted)(nil); !errors.As(err, &told) || !bytes.Equal(told.Payload, why) {
		t.Errorf("got %v, want what rank 0 aborted with", err)
	}
	if !bytes.Equal(heard, value) {
		t.Errorf("a notice of %d bytes, want %d", len(heard), len(value))
	}
}
