package p2p_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"tutti/p2p"
)

// tagged opens channel 2 for messages at every proxy.
func tagged(t interface{ Fatal(...any) }, all []*p2p.Proxy) []*p2p.Channel {
	cs := make([]*p2p.Channel, len(all))
	for r, p := range all {
		c, err := p.Open(p2p.Name{Number: 2}, p2p.Epoch{}, ranks(len(all)), nil, true)
		if err != nil {
			t.Fatal(err)
		}
		cs[r] = c
	}
	return cs
}

// A receive that is cancelled at any moment loses nothing: the next one gets the whole message, and
// the sender's request is done only when a receive has the message. A cancelled send leaves nothing
// behind. Later messages keep their order.
func TestCancelledMessagesAreWholeOrNot(t *testing.T) {
	const window = 64 << 10
	all := cluster(t, 2, window, nil)
	defer closeAll(all)
	cs := tagged(t, all)
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 100 {
		sizes := []int{rng.IntN(8 << 10), 20<<10 + rng.IntN(200<<10), rng.IntN(8 << 10), 40 << 10}
		payload := func(i int) []byte { return bytes.Repeat([]byte{byte(round + i + 1)}, sizes[i]) }
		var wg sync.WaitGroup
		wg.Go(func() {
			all[0].Lock()
			defer all[0].Unlock()
			reqs := make([]p2p.SendReq, len(sizes))
			for i := range sizes {
				cs[0].PostSend(&reqs[i], 1, 7, 1, payload(i))
			}
			for i := range reqs {
				if err := cs[0].WaitSend(patient(context.Background()), &reqs[i]); err != nil {
					t.Errorf("round %d: sending message %d: %v", round, i, err)
				}
			}
		})
		pauses := make([]time.Duration, 20)
		for i := range pauses {
			pauses[i] = time.Duration(rng.IntN(60)) * time.Microsecond
		}
		all[1].Lock()
		for i := range sizes {
			for try := 0; ; try++ {
				ctx, cancel := context.Background(), context.CancelFunc(func() {})
				if try < len(pauses) {
					ctx, cancel = context.WithTimeout(ctx, pauses[try])
				}
				var r p2p.RecvReq
				buf := make([]byte, sizes[i])
				cs[1].PostMsg(&r, 0, 7, 1, buf)
				err := cs[1].WaitMsg(patient(ctx), &r)
				cancel()
				if err == nil {
					if !bytes.Equal(buf, payload(i)) {
						t.Errorf("round %d: message %d is not what was sent", round, i)
					}
					break
				}
				copied := bytes.Clone(buf)
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Fatalf("round %d: message %d: %v", round, i, err)
				}
				if !bytes.Equal(copied, buf) {
					t.Errorf("round %d: the buffer of a receive that had ended was written", round)
				}
			}
		}
		all[1].Unlock()
		wg.Wait()
		if t.Failed() {
			return
		}
	}
	a, b := cs[0].Ledger(1), cs[1].Ledger(0)
	if a.Sent != b.Taken+b.Held || b.Held != 0 {
		t.Errorf("sent %d, taken %d, held %d", a.Sent, b.Taken, b.Held)
	}
}

// A receive from any rank that no rank is left for names one that was lost, not one that has closed
// the channel or its whole proxy.
func TestAnyReceiveNamesTheLostRank(t *testing.T) {
	for lost := 1; lost <= 2; lost++ {
		for _, all := range []bool{false, true} {
			t.Run(fmt.Sprintf("rank %d is lost, the other closes all %v", lost, all), func(t *testing.T) {
				x := cluster(t, 3, 64<<10, nil)
				defer closeAll(x)
				cs := tagged(t, x)
				receive := func() error {
					x[0].Lock()
					defer x[0].Unlock()
					var r p2p.RecvReq
					cs[0].PostMsg(&r, p2p.AnySlot, p2p.AnyTag, 0, make([]byte, 1))
					return cs[0].WaitMsg(patient(t.Context()), &r)
				}
				for r := 1; r < 3; r++ { // that links them
					x[r].Lock()
					var s p2p.SendReq
					cs[r].PostSend(&s, 0, 5, 0, []byte{1})
					err := cs[r].WaitSend(patient(t.Context()), &s)
					x[r].Unlock()
					if err == nil {
						err = receive()
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				cs[3-lost].Close()
				if all {
					x[3-lost].Close()
				}
				var err error
				x[0].Lock()
				there := func() bool { return !cs[0].Closed(3-lost) || all && x[0].Down(3-lost) == nil }
				for w := patient(t.Context()); err == nil && there(); {
					err = x[0].Progress(w)
				}
				x[0].Unlock()
				if err != nil {
					t.Fatal(err)
				}
				x[0].MarkDead(lost, uint64(lost)+1, p2p.ErrPeerGone)
				var of *p2p.PeerError
				if err := receive(); !errors.As(err, &of) || of.Rank != lost || !errors.Is(err, p2p.ErrPeerGone) {
					t.Errorf("%v, want an error that says that rank %d is gone", err, lost)
				}
			})
		}
	}
}

// A message that arrives in the very look in which its receive gives up is received.
func TestMessageArrivesAsReceiveIsCancelled(t *testing.T) {
	all := cluster(t, 2, 64<<10, nil)
	defer closeAll(all)
	cs := tagged(t, all)
	const messages = 100
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		all[0].Lock()
		defer all[0].Unlock()
		for i := range messages {
			var s p2p.SendReq
			cs[0].PostSend(&s, 1, 7, 1, []byte{byte(i)})
			if err := cs[0].WaitSend(patient(context.Background()), &s); err != nil {
				t.Errorf("sending message %d: %v", i, err)
				return
			}
		}
	})
	over, cancel := context.WithCancel(context.Background())
	cancel()
	all[1].Lock()
	defer all[1].Unlock()
	for i, end := 0, time.Now().Add(20*time.Second); i < messages; {
		var r p2p.RecvReq
		buf := []byte{0}
		cs[1].PostMsg(&r, p2p.AnySlot, 7, 1, buf)
		switch err := cs[1].WaitMsg(patient(over), &r); {
		case err == nil && int(buf[0]) != i:
			t.Errorf("message %d after %d", buf[0], i-1)
			return
		case err == nil:
			i++
		case !errors.Is(err, context.Canceled) || time.Now().After(end):
			t.Errorf("message %d: %v", i, err)
			return
		default: // the link may have to come up
			all[1].Unlock()
			runtime.Gosched()
			all[1].Lock()
		}
	}
}

// A sender that takes a message back while it is received leaves the receive to the next message.
func TestReceiveSurvivesCancelledSend(t *testing.T) {
	all := cluster(t, 2, 64<<10, nil)
	defer closeAll(all)
	cs := tagged(t, all)
	const size = 1 << 20
	var wg sync.WaitGroup
	for round := range 50 {
		wg.Go(func() {
			all[0].Lock()
			defer all[0].Unlock()
			var s p2p.SendReq
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(round)*20*time.Microsecond)
			defer cancel()
			cs[0].PostSend(&s, 1, 7, 1, bytes.Repeat([]byte{1}, size))
			if err := cs[0].WaitSend(patient(ctx), &s); err != nil && !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			cs[0].PostSend(&s, 1, 8, 1, bytes.Repeat([]byte{2}, size))
			if err := cs[0].WaitSend(patient(context.Background()), &s); err != nil {
				t.Error(err)
			}
		})
		wg.Go(func() {
			all[1].Lock()
			defer all[1].Unlock()
			var r p2p.RecvReq
			buf := make([]byte, size)
			for r.Tag != 8 {
				cs[1].PostMsg(&r, 0, p2p.AnyTag, 1, buf)
				if err := cs[1].WaitMsg(patient(context.Background()), &r); err != nil {
					t.Error(err)
					return
				}
				if bytes.Count(buf, []byte{byte(r.Tag - 6)}) != size {
					t.Errorf("the message with tag %d is not what was sent", r.Tag)
				}
			}
		})
		wg.Wait()
		if t.Failed() {
			t.Fatal(fmt.Sprint("round ", round))
		}
	}
}

// A message whose bytes come later keeps its place among those of its tag, and holds up no other.
// What has come is sent while the rest is awaited, and the receiver is told.
func TestMessagesWhoseBytesComeLater(t *testing.T) {
	for _, size := range []int{1, 1000, 300 << 10} {
		all := cluster(t, 2, 64<<10, nil)
		cs := tagged(t, all)
		a, b := follows(t, all[0], cs[0]), follows(t, all[1], cs[1])
		var s [3]p2p.SendReq
		var r [3]p2p.RecvReq
		buf := make([]byte, size)
		a.Lock()
		cs[0].PostLater(&s[0], 1, 7, 0, buf)
		cs[0].Follow(&s[0], 0, func(err error) { a.ended <- err })
		a.Unlock()
		a.send(&s[1], 1, 7, []byte{2})
		a.send(&s[2], 1, 8, bytes.Repeat([]byte{3}, 100<<10))
		got := make(chan int, 1000)
		b.Lock()
		first := make([]byte, size)
		cs[1].PostMsg(&r[0], 0, 7, 0, first)
		r[0].OnMore(func(n int) { got <- n })
		cs[1].Follow(&r[0], 0, func(err error) { b.ended <- err })
		b.Unlock()
		other := b.recv(&r[1], 0, 8, 100<<10, 0)
		there, here := a.attend(context.Background()), b.attend(context.Background())
		if err := b.end(); err != nil || other[0] != 3 {
			t.Fatalf("the message of another tag: %v", err)
		}
		if len(got) > 0 {
			t.Fatal("bytes of a message have arrived before they were there")
		}
		half := size / 2
		fill := func(from, to int) {
			a.Lock()
			for i := from; i < to; i++ {
				buf[i] = byte(1 + i%251)
			}
			cs[0].Filled(&s[0], to)
			a.Unlock()
		}
		if fill(0, half); half > 0 {
			for n, end := 0, time.After(20*time.Second); n < half; {
				select {
				case n = <-got:
				case <-end:
					t.Fatal("the first half does not arrive")
				}
			}
		}
		fill(half, size)
		if err := b.end(); err != nil {
			t.Fatal(err)
		}
		for i := range first {
			if first[i] != byte(1+i%251) {
				t.Fatalf("byte %d of %d is %d", i, size, first[i])
			}
		}
		second := b.recv(&r[2], 0, 7, 1, 0)
		if err := b.end(); err != nil || second[0] != 2 {
			t.Fatalf("the message behind it: %d, %v", second[0], err)
		}
		for range s {
			if err := a.end(); err != nil {
				t.Error(err)
			}
		}
		pass(t, there)
		pass(t, here)
		closeAll(all)
	}
}

// A receiver that gives up such a message in its middle, or a sender that takes it back, leaves it
// whole or not at all.
func TestMessagesWhoseBytesComeLaterAreWholeOrNot(t *testing.T) {
	const size, half = 300 << 10, 100 << 10
	all := cluster(t, 2, 64<<10, nil)
	defer closeAll(all)
	cs := tagged(t, all)
	a, b := follows(t, all[0], cs[0]), follows(t, all[1], cs[1])
	buf := make([]byte, size)
	post := func(s *p2p.SendReq, fill byte) {
		a.Lock()
		defer a.Unlock()
		cs[0].PostLater(s, 1, 7, 0, buf)
		cs[0].Follow(s, 0, func(err error) { a.ended <- err })
		copy(buf, bytes.Repeat([]byte{fill}, half))
		cs[0].Filled(s, half)
	}
	got := make(chan int, 1000)
	receive := func(r *p2p.RecvReq) []byte {
		b.Lock()
		defer b.Unlock()
		to := make([]byte, size)
		cs[1].PostMsg(r, 0, 7, 0, to)
		r.OnMore(func(n int) { got <- n })
		cs[1].Follow(r, 0, func(err error) { b.ended <- err })
		return to
	}
	until := func(want int) {
		t.Helper()
		for end := time.After(20 * time.Second); ; {
			select {
			case n := <-got:
				if n == want {
					return
				}
			case <-end:
				t.Fatalf("%d bytes do not arrive", want)
			}
		}
	}
	mine := errors.New("mine")
	var s [2]p2p.SendReq
	var r [2]p2p.RecvReq
	post(&s[0], 1)
	receive(&r[0])
	there, here := a.attend(context.Background()), b.attend(context.Background())
	until(half)
	b.Lock()
	cs[1].Drop(&r[0], mine) // the receiver gives up
	cs[1].Drop(&r[0], nil)  // has ended
	b.Unlock()
	if err := b.end(); err != mine {
		t.Fatal(err)
	}
	pass(t, here)
	to := receive(&r[1])
	here = b.attend(context.Background())
	until(half) // again
	a.Lock()
	cs[0].Drop(&s[0], mine) // the sender takes it back
	cs[0].Filled(&s[0], size)
	a.Unlock()
	if err := a.end(); err != mine {
		t.Fatal(err)
	}
	until(0)
	pass(t, there)
	post(&s[1], 2)
	there = a.attend(context.Background())
	until(half)
	a.Lock()
	copy(buf, bytes.Repeat([]byte{2}, size))
	cs[0].Filled(&s[1], size)
	a.Unlock()
	for _, f := range []*follower{a, b} {
		if err := f.end(); err != nil {
			t.Fatal(err)
		}
	}
	if bytes.Count(to, []byte{2}) != size {
		t.Error("the receive has not got the second message as a whole")
	}
	pass(t, there)
	pass(t, here)
}
