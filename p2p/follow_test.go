package p2p_test

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"tutti/p2p"
)

// follower is a rank that follows messages.
type follower struct {
	t *testing.T
	*p2p.Proxy
	c     *p2p.Channel
	ended chan error // outcomes, in the order of the ends
}

func follows(t *testing.T, p *p2p.Proxy, c *p2p.Channel) *follower {
	return &follower{t, p, c, make(chan error, 1000)}
}

// recv follows a receive, and returns its buffer.
func (f *follower) recv(r *p2p.RecvReq, from int, tag int64, n int, limit time.Duration) []byte {
	f.Lock()
	defer f.Unlock()
	buf := make([]byte, n)
	f.c.PostMsg(r, from, tag, 0, buf)
	f.c.Follow(r, limit, func(err error) { f.ended <- err })
	return buf
}

func (f *follower) send(s *p2p.SendReq, to int, tag uint64, buf []byte) {
	f.Lock()
	defer f.Unlock()
	f.c.PostSend(s, to, tag, 0, buf)
	f.c.Follow(s, 0, func(err error) { f.ended <- err })
}

// attend calls Attend, until it returns or the test ends.
func (f *follower) attend(ctx context.Context) (over chan struct{}) {
	over = make(chan struct{})
	go func() {
		f.Lock()
		defer f.Unlock()
		f.c.Attend(ctx)
		close(over)
	}()
	return over
}

// end returns the next outcome.
func (f *follower) end() error {
	f.t.Helper()
	select {
	case err := <-f.ended:
		return err
	case <-time.After(20 * time.Second):
		f.t.Fatal("no followed message ends")
		return nil
	}
}

// still checks that n messages are followed, and that no outcome is left.
func (f *follower) still(n int) {
	f.t.Helper()
	f.Lock()
	defer f.Unlock()
	if got := f.c.Followed(); got != n || len(f.ended) != 0 {
		f.t.Fatalf("%d messages are followed, want %d; %d have ended", got, n, len(f.ended))
	}
}

func pass(t *testing.T, over chan struct{}) {
	t.Helper()
	select {
	case <-over:
	case <-time.After(20 * time.Second):
		t.Fatal("Attend has no message left, and does not return")
	}
}

// Followed messages end with the outcome that WaitSend and WaitMsg would return, whichever
// goroutine polls.
func TestFollowedMessagesEnd(t *testing.T) {
	all := cluster(t, 2, 64<<10, nil)
	defer closeAll(all)
	cs := tagged(t, all)
	a, b := follows(t, all[0], cs[0]), follows(t, all[1], cs[1])
	var r [3]p2p.RecvReq
	first, any := a.recv(&r[0], 1, 1, 100, 0), a.recv(&r[1], p2p.AnySlot, 2, 200<<10, 0)
	a.recv(&r[2], p2p.AnySlot, 3, 7, 0)
	a.still(3)
	over := a.attend(context.Background())

	var s [3]p2p.SendReq
	long := bytes.Repeat([]byte{2}, 200<<10)
	b.send(&s[0], 0, 3, make([]byte, 8)) // has another length than the receive
	b.send(&s[1], 0, 1, bytes.Repeat([]byte{1}, 100))
	b.send(&s[2], 0, 2, long)
	there := b.attend(context.Background())
	wrong := 0
	for range r {
		if err := a.end(); errors.Is(err, p2p.ErrWrongSize) {
			wrong++
		} else if err != nil {
			t.Error(err)
		}
	}
	for range s {
		if err := b.end(); err != nil {
			t.Error(err)
		}
	}
	pass(t, over)
	pass(t, there)
	if wrong != 1 {
		t.Errorf("%d receives had a wrong length", wrong)
	}
	if !bytes.Equal(first, bytes.Repeat([]byte{1}, 100)) || !bytes.Equal(any, long) {
		t.Error("the messages are not what was sent")
	}
	a.still(0)
}

// A time limit ends its message and no other one; a message that comes later goes to the next
// receive.
func TestFollowedMessagesEndInTime(t *testing.T) {
	all := cluster(t, 2, 0, nil)
	defer closeAll(all)
	cs := tagged(t, all)
	a, b := follows(t, all[0], cs[0]), follows(t, all[1], cs[1])
	var late, next, last p2p.RecvReq
	buf := a.recv(&late, 1, 5, 1, time.Hour)
	over := a.attend(context.Background())
	a.recv(&next, 1, 6, 1, 20*time.Millisecond)
	if err := a.end(); !errors.Is(err, p2p.ErrTimeout) {
		t.Errorf("got %v, want %v", err, p2p.ErrTimeout)
	}
	a.still(1)
	again := a.recv(&last, 1, 6, 1, time.Hour)
	a.still(2)
	var s [2]p2p.SendReq
	b.send(&s[0], 0, 6, []byte{6})
	b.send(&s[1], 0, 5, []byte{5})
	there := b.attend(context.Background())
	for range 2 {
		if err := a.end(); err != nil {
			t.Error(err)
		}
	}
	pass(t, over)
	pass(t, there)
	if buf[0] != 5 || again[0] != 6 {
		t.Errorf("got %d and %d", buf[0], again[0])
	}
}

// Followed messages end when their peer, their channel, their proxy or the context of Attend does.
func TestFollowedMessagesFail(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for what, c := range map[string]struct {
		end  func(a, b *follower)
		want error
	}{
		"the peer ends":     {func(_, b *follower) { b.Proxy.Close() }, p2p.ErrPeerGone},
		"the peer closes":   {func(_, b *follower) { b.c.Close() }, nil},
		"the channel ends":  {func(a, _ *follower) { a.c.Close() }, p2p.ErrClosed},
		"the proxy ends":    {func(a, _ *follower) { a.Proxy.Close() }, p2p.ErrClosed},
		"the context ends":  {func(_, _ *follower) { cancel() }, context.Canceled},
		"the peer has died": {func(a, _ *follower) { a.MarkDead(1, 0, p2p.ErrPeerGone) }, p2p.ErrPeerGone},
	} {
		t.Run(what, func(t *testing.T) {
			all := cluster(t, 2, 64<<10, nil)
			defer closeAll(all)
			cs := tagged(t, all)
			a, b := follows(t, all[0], cs[0]), follows(t, all[1], cs[1])
			bounds := context.Background()
			if c.want == context.Canceled {
				bounds = ctx
			}
			var warm [2]p2p.SendReq
			var in [2]p2p.RecvReq
			a.recv(&in[0], 1, 9, 1, 0)
			over := a.attend(bounds)
			b.send(&warm[0], 0, 9, []byte{1})
			pass(t, b.attend(context.Background()))
			b.end()
			a.end()
			pass(t, over)

			var r [3]p2p.RecvReq
			var s [40]p2p.SendReq
			a.recv(&r[0], 1, 1, 100, time.Hour)
			a.recv(&r[1], p2p.AnySlot, 2, 100, 0)
			a.recv(&r[2], 1, p2p.AnyTag, 100, 0)
			for i := range s { // more than the credit, and one that is announced
				a.send(&s[i], 1, 3, make([]byte, []int{4 << 10, 40 << 10}[i/39]))
			}
			over = a.attend(bounds)
			c.end(a, b)
			failed := 0
			for range len(r) + len(s) {
				err := a.end()
				if err != nil {
					failed++
				}
				if err != nil && c.want != nil && !errors.Is(err, c.want) {
					t.Errorf("got %v, want %v", err, c.want)
				}
			}
			if failed < len(r)+2 { // short messages within the credit have been sent
				t.Errorf("%d messages failed", failed)
			}
			pass(t, over)
			a.still(0)
		})
	}
}
