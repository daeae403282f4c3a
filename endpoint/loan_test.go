package endpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"tutti/mem"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// long is the length of a message that does not go at once.
const long = maxMessage + 1

// messengers returns two connected endpoints, of which each one's long messages go by RDMA.
func messengers(t testing.TB, r RDMA) (a, b *Endpoint, pb, pa *Peer) {
	t.Helper()
	ra, rb := devices(r)
	b = newEndpoint(t, newContext(t), Config{Name: "b", RDMA: rb})
	a = newEndpoint(t, newContext(t), Config{Name: "a", RDMA: ra})
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var err error
	if pb, err = a.Connect(ctx, b.Info()); err != nil {
		t.Fatal(err)
	}
	if pa, err = b.Accept(ctx); err != nil {
		t.Fatal(err)
	}
	warmSends(t, pb, pa)
	warmSends(t, pa, pb)
	return a, b, pb, pa
}

// warmSends sends messages from p to q until they go by RDMA.
func warmSends(t testing.TB, p, q *Peer) {
	t.Helper()
	before := directOf(p, OpSend)
	until(t, "RDMA", func() bool {
		pass(t, p, q, make([]byte, long), make([]byte, long))
		return directOf(p, OpSend) > before
	})
}

// pass sends a message from p to q.
func pass(t testing.TB, p, q *Peer, msg, buf []byte) Result {
	t.Helper()
	f, g := p.Send(msg), q.Recv(buf)
	wait(t, g)
	wait(t, f)
	return g.Result(0)
}

func messagesAreDirect(t *testing.T, r RDMA) {
	a, b, p, q := messengers(t, r)
	sends, recvs := directOf(p, OpSend), directOf(q, OpRecv)
	want := uint64(0)
	for i, n := range sizes {
		msg, buf := pattern(n, uint64(i+2)), make([]byte, n)
		if res := pass(t, p, q, msg, buf); res.N != int64(n) || !bytes.Equal(msg, buf) {
			t.Fatalf("a message of %d bytes: %+v, or other bytes", n, res)
		}
		if n >= long {
			want++
		}
	}
	sends, recvs = directOf(p, OpSend)-sends, directOf(q, OpRecv)-recvs
	if sends != want || recvs != want {
		t.Errorf("%d sends and %d recvs by RDMA, want %d", sends, recvs, want)
	}
	if x, y := a.Stats(), b.Stats(); x.Direct["send"].N < want || y.Direct["recv"].N < want || x.Detours+y.Detours > 0 {
		t.Errorf("states %+v and %+v", x, y)
	}
	loansEnd(t, p)
}

// loansEnd waits until the peer can read no memory of messages any more.
func loansEnd(t testing.TB, p *Peer) {
	t.Helper()
	until(t, "the end of loans", func() bool { return loansOf(p) == 0 })
}

func loansOf(p *Peer) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session == nil || p.session.path == nil {
		return 0
	}
	return len(p.session.path.loans)
}

// Messages of all sizes arrive in the order of the sends, over several connections and by RDMA.
func messagesKeepTheirOrder(t *testing.T, r RDMA) {
	_, _, p, q := messengers(t, r)
	const n = 300
	rng := rand.New(rand.NewPCG(1, 2))
	msgs := make([][]byte, n)
	var sends, recvs []Op
	bufs := make([][]byte, n)
	for i := range msgs {
		size := []int{3, 5000, long, 3 * long, 1<<20 + 9}[rng.IntN(5)]
		msgs[i], bufs[i] = pattern(size, uint64(i)), make([]byte, size)
		sends = append(sends, Op{Kind: OpSend, Local: mem.Host(msgs[i], mem.Anywhere)})
		recvs = append(recvs, Op{Kind: OpRecv, Local: mem.Host(bufs[i], mem.Anywhere), Exact: true})
	}
	f := p.Batch(sends)
	g := q.Batch(recvs)
	wait(t, g)
	wait(t, f)
	for i := range msgs {
		if !bytes.Equal(msgs[i], bufs[i]) {
			t.Fatalf("message %d has other bytes", i)
		}
	}
	if loansEnd(t, p); directOf(p, OpSend) < n/4 {
		t.Errorf("only %d sends by RDMA", directOf(p, OpSend))
	}
}

func messagesByRDMAAreTruncatedOrExact(t *testing.T, r RDMA) {
	a, b, p, q := messengers(t, r)
	msg := pattern(3*long, 1)
	for _, n := range []int{0, 1, 100, long, len(msg) - 1} {
		guarded := bytes.Repeat([]byte{0xc7}, n+64)
		if res := pass(t, p, q, msg, guarded[:n:n]); res.N != int64(n) || res.Total != int64(len(msg)) {
			t.Errorf("a message truncated to %d: %+v", n, res)
		}
		if !bytes.Equal(guarded[:n], msg[:n]) || bytes.Count(guarded[n:], []byte{0xc7}) != 64 {
			t.Errorf("truncated to %d: other bytes, or some beyond", n)
		}
		f := p.Send(msg)
		g := q.Start(Op{Kind: OpRecv, Local: mem.Host(make([]byte, n), mem.Anywhere), Exact: true})
		if err := g.Wait(t.Context()); !errors.Is(err, ErrSize) {
			t.Errorf("a message of another size than %d: %v", n, err)
		}
		wait(t, f)
	}
	if n := a.Stats().Detours + b.Stats().Detours; n > 0 {
		t.Errorf("the path failed %d times", n)
	}
}

// A message that lies in a region which the peer may read is not registered, and others are.
func messagesFromRegions(t *testing.T, r RDMA) {
	a, _, p, q := messengers(t, r)
	data := sharedPattern(t, 4*long)
	for name, c := range map[string]struct {
		rights mem.Rights
		own    bool
	}{"read": {Read, false}, "write": {Write, true}, "both": {Read | Write, false}} {
		region, err := a.Register(name, mem.Host(data, mem.Anywhere), RegionConfig{Rights: c.rights})
		if err != nil {
			t.Fatal(err)
		}
		for i, msg := range [][]byte{data, data[13:][:long], data[len(data)-long:]} {
			f := p.Send(msg)
			until(t, "a loan", func() bool { return loansOf(p) == 1 })
			p.mu.Lock()
			for l := range p.session.path.loans {
				if (l.mr != nil) != c.own {
					t.Errorf("%s: message %d has a registration of its own: %t", name, i, l.mr != nil)
				}
			}
			p.mu.Unlock()
			buf := make([]byte, len(msg))
			wait(t, q.Recv(buf))
			if wait(t, f); !bytes.Equal(buf, msg) {
				t.Fatalf("%s: message %d has other bytes", name, i)
			}
			loansEnd(t, p)
		}
		// The end of the region is not that of the message.
		f := p.Send(data[:long])
		until(t, "a loan", func() bool { return loansOf(p) == 1 })
		region.Unregister()
		buf := make([]byte, long)
		wait(t, q.Recv(buf))
		if wait(t, f); !bytes.Equal(buf, data[:long]) {
			t.Fatalf("%s: the message has other bytes", name)
		}
		warmSends(t, p, q)
		loansEnd(t, p)
	}
}

// A recv that is given up is not written any more, and a send that is given up not read: the next
// messages are as sent.
func messagesByRDMAAreGivenUp(t *testing.T, r RDMA) {
	_, _, p, q := messengers(t, r)
	rng := rand.New(rand.NewPCG(3, 4))
	count := map[string]int{}
	for round := 0; round < 300 || round < 3000 && len(count) < 2; round++ {
		msg, buf := bytes.Repeat([]byte{1}, 4*long), make([]byte, 4*long)
		f, g := p.Send(msg), q.Recv(buf)
		victim := f
		if round%2 == 0 {
			victim = g
		}
		time.Sleep(time.Duration(rng.IntN(1000)) * time.Microsecond) // they are under way in some rounds
		victim.Cancel()
		if victim == f {
			for i := range msg { // it is the program's again
				msg[i] = 2
			}
		} else {
			clear(buf)
		}
		marker := p.Send([]byte("marker"))
		if err := g.Wait(t.Context()); err == nil && victim == f {
			if res := g.Result(0); res.N == int64(len("marker")) {
				count["nothing"]++
				if err := f.Err(); !errors.Is(err, ErrCancelled) {
					t.Errorf("a send that has not happened: %v", err)
				}
				continue
			}
			if bytes.Count(buf, []byte{1}) != len(buf) {
				t.Fatalf("round %d: a message has bytes from after its send was given up", round)
			}
		}
		word := make([]byte, 4*long)
		for {
			h := q.Recv(word)
			wait(t, h)
			if n := h.Result(0).N; n == int64(len("marker")) {
				break
			} else if g.Err() == nil || bytes.Count(word[:n], []byte{1}) != len(msg) {
				t.Fatalf("round %d: a message comes twice, or changed", round)
			}
		}
		wait(t, marker)
		if err := f.Wait(t.Context()); err != nil && !errors.Is(err, ErrCancelled) {
			t.Fatal(err)
		}
		count[fmt.Sprint("send ", f.Err() == nil, ", recv ", g.Err() == nil)]++
		if victim == g && g.Err() != nil && bytes.Count(buf, []byte{0}) != len(buf) {
			t.Fatalf("round %d: memory was written after its recv was given up", round)
		}
	}
	t.Log(count)
	if loansEnd(t, p); len(count) < 2 {
		t.Errorf("nothing was given up: %v", count)
	}
	warmSends(t, p, q)
}

// An operation that the device cannot end is ended nonetheless, and its memory is not accessed
// afterwards.
func TestGivenUpMessagesOverRDMA(t *testing.T) {
	f, r := newFabric(t, soft.Config{})
	r.Settings.Timeout = unanswered
	a, b, p, q := messengers(t, r)
	region := sharedPattern(t, 4*long)
	if _, err := a.Register("r", mem.Host(region, mem.Anywhere), RegionConfig{}); err != nil {
		t.Fatal(err)
	}
	for _, c := range []string{"send", "recv", "send from a region"} {
		msg, buf := pattern(4*long, 1), make([]byte, 4*long)
		if c == "send from a region" {
			msg = region
		}
		f.SetPort("soft0", 1, false) // what is under way stays under way
		send, recv := p.Send(msg), q.Recv(buf)
		until(t, "the read", func() bool {
			q.mu.Lock()
			defer q.mu.Unlock()
			return len(q.session.path.aboard) == 1
		})
		if c == "recv" {
			recv.Cancel()
			clear(buf)
		} else {
			send.Cancel()
			clear(msg) // it is the program's again
		}
		f.SetPort("soft0", 1, true)
		if c == "recv" {
			if err := send.Wait(t.Context()); !errors.Is(err, ErrCancelled) {
				t.Errorf("%s: a send without a recv: %v", c, err)
			}
			if bytes.Count(buf, []byte{0}) != len(buf) {
				t.Errorf("%s: memory was written after its recv was given up", c)
			}
		} else if err := recv.Wait(t.Context()); !errors.Is(err, ErrCancelled) {
			t.Errorf("%s: a recv without a message: %v", c, err)
		}
		if a.Stats().Detours+b.Stats().Detours == 0 {
			t.Errorf("%s: no path was given up", c)
		}
		warmSends(t, p, q)
		loansEnd(t, p)
	}
}

func TestDeadlinesOfMessagesOverRDMA(t *testing.T) {
	f, r := newFabric(t, soft.Config{})
	r.Settings.Timeout = unanswered
	_, _, p, q := messengers(t, r)
	f.SetPort("soft0", 1, false)
	send := p.Start(Op{Kind: OpSend, Local: mem.Host(make([]byte, long), mem.Anywhere), Timeout: 5 * time.Millisecond})
	recv := q.Start(Op{Kind: OpRecv, Local: mem.Host(make([]byte, long), mem.Anywhere), Timeout: 5 * time.Millisecond})
	for _, x := range []*Future{send, recv} {
		if err := x.Wait(t.Context()); !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, ErrCancelled) {
			t.Error(err)
		}
	}
	if !errors.Is(send.Err(), os.ErrDeadlineExceeded) && !errors.Is(recv.Err(), os.ErrDeadlineExceeded) {
		t.Error(send.Err(), recv.Err())
	}
	f.SetPort("soft0", 1, true)
	warmSends(t, p, q)
	loansEnd(t, p)
}

// A message is not read over queue pairs that were connected after it was announced: it may have
// been given up since.
func TestMessagesAreNotReadOverLaterQueuePairs(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	_, b, p, q := messengers(t, r)
	msg, buf := pattern(long, 1), make([]byte, long)
	f := p.Send(msg)
	until(t, "the message", func() bool { return b.Stats().Offered.N == 1 })
	q.mu.Lock()
	path := q.session.path
	q.mu.Unlock()
	path.cut()
	warmSends(t, q, p) // the other way: there is a path again
	until(t, "a path", func() bool { return q.Path() == PathDirect })
	before := directOf(q, OpRecv)
	wait(t, q.Recv(buf))
	if wait(t, f); !bytes.Equal(buf, msg) || directOf(q, OpRecv) > before {
		t.Errorf("other bytes, or %d messages by RDMA", directOf(q, OpRecv)-before)
	}
	warmSends(t, p, q)
}

// Messages are registered for the peer in turn, and at most so many of them.
func TestLoansAreBounded(t *testing.T) {
	f, r := newFabric(t, soft.Config{})
	_, _, p, q := messengers(t, r)
	_, _, before := f.Objects()
	const n = 3 * maxLoans
	msg := pattern(long, 1)
	fs := make([]*Future, n)
	for i := range fs {
		fs[i] = p.Send(msg)
	}
	until(t, "loans", func() bool { return loansOf(p) == maxLoans })
	if _, _, now := f.Objects(); now-before != maxLoans {
		t.Errorf("%d messages are registered, want %d", now-before, maxLoans)
	}
	fs[n-1].Cancel() // one that waits
	for _, f := range fs[:n-1] {
		buf := make([]byte, long)
		wait(t, q.Recv(buf))
		if wait(t, f); !bytes.Equal(buf, msg) {
			t.Fatal("other bytes")
		}
	}
	loansEnd(t, p)
}

// Messages arrive once, and in order, while ports go down and come back.
func TestMessagesWhilePortsGoDown(t *testing.T) {
	f, r := newFabric(t, soft.Config{Late: 3})
	a, b, p, q := messengers(t, r)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	const deep = 6
	for i, x := range [][2]*Peer{{p, q}, {q, p}} {
		size := func(n uint64) int { return []int{100, long, 2 * long, 5 * long}[(n*7+uint64(i))%4] }
		total := make(chan uint64, 1)
		wg.Go(func() {
			var fs []*Future
			n := uint64(0)
			for over := false; !over || len(fs) > 0; {
				select {
				case <-stop:
					over = true
				default:
				}
				if !over {
					fs = append(fs, x[0].Send(pattern(size(n), n)))
					n++
				}
				if over || len(fs) == deep {
					if err := fs[0].Wait(t.Context()); err != nil {
						t.Error(err)
					}
					fs = fs[1:]
				}
			}
			wait(t, x[0].Send(nil)) // the end
			total <- n
		})
		wg.Go(func() {
			n := uint64(0)
			for buf := make([]byte, 5*long); ; n++ {
				g := x[1].Recv(buf)
				if err := g.Wait(t.Context()); err != nil {
					t.Error(err)
					return
				}
				got := buf[:g.Result(0).N]
				if len(got) == 0 {
					break
				}
				if want := pattern(size(n), n); !bytes.Equal(got, want) {
					t.Errorf("message %d of %d bytes is not as sent", n, len(want))
					return
				}
			}
			if want := <-total; n != want {
				t.Errorf("%d messages, want %d", n, want)
			}
		})
	}
	detours := func() uint64 { return a.Stats().Detours + b.Stats().Detours }
	for i := range 4 {
		device := [...]string{"soft0", "soft1"}[i%2]
		before := detours()
		f.SetPort(device, 1, false)
		until(t, "a detour", func() bool { return detours() > before })
		f.SetPort(device, 1, true)
		sent := directOf(p, OpSend)
		until(t, "RDMA", func() bool {
			return directOf(p, OpSend) > sent && p.Path() == PathDirect && q.Path() == PathDirect
		})
	}
	close(stop)
	wg.Wait()
}

// Memory that cannot be registered is sent, and received, by TCP.
func TestMessagesThatCannotBeRegistered(t *testing.T) {
	var mu sync.Mutex
	bad := ""
	_, r := newFabric(t, soft.Config{Faults: soft.Faults{Call: func(device, call string) syscall.Errno {
		mu.Lock()
		defer mu.Unlock()
		if device == bad && call == fmt.Sprintf("register %d bytes", 2*long) {
			return syscall.ENOMEM
		}
		return 0
	}}})
	_, _, p, q := messengers(t, r)
	for _, device := range []string{"soft0", "soft1"} {
		mu.Lock()
		bad = device
		mu.Unlock()
		msg, buf := pattern(2*long, 1), make([]byte, 2*long)
		before := directOf(p, OpSend)
		if pass(t, p, q, msg, buf); !bytes.Equal(msg, buf) {
			t.Fatal("other bytes")
		}
		if n := directOf(p, OpSend) - before; n != 0 {
			t.Errorf("%d sends by RDMA without memory for it at %s", n, device)
		}
		before = directOf(p, OpSend)
		if pass(t, p, q, msg[:long], buf); directOf(p, OpSend) == before {
			t.Errorf("the path is not used any more")
		}
	}
	loansEnd(t, p)
}

// A peer that restarts gets the messages that are sent to the new one.
func TestMessagesToAPeerThatRestarts(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	a, b, p, q := messengers(t, r)
	fs := []*Future{p.Send(pattern(long, 1)), p.Send(pattern(long, 2))}
	wait(t, q.Recv(make([]byte, long)))
	wait(t, fs[0])
	b.Close()
	if err := fs[1].Wait(t.Context()); !errors.Is(err, ErrBroken) {
		t.Errorf("a send to a peer that ended: %v", err)
	}
	_, rb := devices(r)
	b = newEndpoint(t, newContext(t), Config{Name: "b", RDMA: rb})
	p = connect(t, a, b.Info())
	warmSends(t, p, accept(t, b))
}

// Messages end with either end.
func TestCloseEndsMessagesOverRDMA(t *testing.T) {
	for _, near := range []bool{true, false} {
		for _, reading := range []bool{true, false} {
			f, r := newFabric(t, soft.Config{})
			r.Settings.Timeout = unanswered
			a, b, p, q := messengers(t, r)
			f.SetPort("soft0", 1, false)
			send := p.Send(make([]byte, long))
			var recv *Future
			if reading {
				recv = q.Recv(make([]byte, long))
				until(t, "the read", func() bool {
					q.mu.Lock()
					defer q.mu.Unlock()
					return len(q.session.path.aboard) == 1
				})
			}
			if near {
				a.Close()
			} else {
				b.Close()
			}
			err := send.Wait(t.Context())
			if near && !errors.Is(err, ErrClosed) || !near && !errors.Is(err, ErrBroken) {
				t.Errorf("closed here: %t: %v", near, err)
			}
			if reading && recv.Wait(t.Context()) == nil {
				t.Error("a recv from an endpoint that is closed has got a message")
			}
		}
	}
}

// Guarded connections, and ends without a device, lend nothing.
func TestGuardedMessagesUseNoRDMA(t *testing.T) {
	_, r := newFabric(t, soft.Config{})
	for name, cfg := range map[string]Config{"checksum": {Checksum: true, RDMA: r}, "sealed": {Seal: true, RDMA: r},
		"no device": {}} {
		b := newEndpoint(t, newContext(t), cfg)
		a := newEndpoint(t, newContext(t), Config{RDMA: r})
		p := connect(t, a, b.Info())
		q := accept(t, b)
		for i := range 20 {
			msg, buf := pattern(long, uint64(i)), make([]byte, long)
			if pass(t, p, q, msg, buf); !bytes.Equal(msg, buf) {
				t.Fatal("other bytes")
			}
			if pass(t, q, p, msg, buf); !bytes.Equal(msg, buf) {
				t.Fatal("other bytes")
			}
		}
		if n := directOf(p, OpSend) + directOf(q, OpSend); n > 0 && !*allDirect {
			t.Errorf("%s: %d sends by RDMA", name, n)
		}
	}
}

// The key of a message's memory is not given to other memory while the peer may read.
func TestKeysOfMessagesAreNotGivenAgain(t *testing.T) {
	_, r := newFabric(t, soft.Config{ReuseKeys: true})
	a, _, p, q := messengers(t, r)
	first := p.Send(pattern(long, 1)) // that is not received yet
	until(t, "a loan", func() bool { return loansOf(p) == 1 })
	second := p.Send(pattern(long, 2))
	until(t, "a loan", func() bool { return loansOf(p) == 2 })
	p.mu.Lock()
	var key uint32
	lent := second.results[0].task
	for l := range p.session.path.loans {
		if l.task == lent {
			key = l.key
		}
	}
	p.mu.Unlock()
	second.Cancel() // its memory is not registered any more; the peer says nothing before it comes to it
	d, err := a.card.Domain("")
	if err != nil {
		t.Fatal(err)
	}
	again := func(n int) (found bool) {
		for range n {
			g, err := d.Register(mem.Host(make([]byte, 100), mem.Anywhere), nil, rdma.RemoteRead, false)
			if err != nil {
				t.Fatal(err)
			}
			defer g.Close()
			found = found || g.RemoteKey() == key
		}
		return found
	}
	until(t, "the end of the registration", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return lent.flight == nil
	})
	if again(10) {
		t.Fatal("other memory has the key of a message that the peer may read")
	}
	wait(t, q.Recv(make([]byte, long)))
	wait(t, first)
	pass(t, p, q, nil, nil) // behind the second one
	loansEnd(t, p)
	if !again(50) { // it lies below those of the first call
		t.Error("the key is withheld although the peer does not read any more")
	}
	if err := d.Release(); err != nil {
		t.Fatal(err)
	}
}
