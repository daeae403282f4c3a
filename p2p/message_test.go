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
		c, err := p.Open(p2p.Name{Number: 2}, p2p.Epoch{}, ranks(len(all)), true)
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
