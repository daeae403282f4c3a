package p2p_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/inproc"
	"tutti/p2p/shm"
)

// muted is a link whose peer never answers anything; fails says that the peer is gone.
type muted struct {
	scripted
	fails *atomic.Bool
	asked chan struct{}
}

func (m *muted) Recv() (*p2p.Header, []byte, error) {
	if m.fails.Load() {
		return nil, nil, fmt.Errorf("it is gone: %w", p2p.ErrPeerGone)
	}
	return nil, nil, nil
}
func (m *muted) Arm() bool { return false }
func (m *muted) Map(uint64) (*p2p.Mapping, error) {
	select {
	case m.asked <- struct{}{}:
	default:
	}
	if m.fails.Load() {
		return nil, p2p.ErrPeerGone
	}
	return nil, nil
}

type mutedTransport struct {
	hostile
	link *muted
}

func (h *mutedTransport) Dial(context.Context, p2p.Identity, []byte) (p2p.Link, error) {
	return h.link, nil
}

// TestMapEnds: waiting for a peer to share memory ends with the operation's deadline, with the
// peer, with the channel, and with Close.
func TestMapEnds(t *testing.T) {
	abort := errors.New("aborted")
	for name, c := range map[string]struct {
		do   func(p *p2p.Proxy, c *p2p.Channel, m *muted, cancel func())
		want error
	}{
		"cancelled": {func(_ *p2p.Proxy, _ *p2p.Channel, _ *muted, cancel func()) { cancel() }, context.Canceled},
		"deadline":  {func(*p2p.Proxy, *p2p.Channel, *muted, func()) {}, p2p.ErrTimeout},
		"gone": {func(p *p2p.Proxy, _ *p2p.Channel, m *muted, _ func()) { m.fails.Store(true); p.Wake() },
			p2p.ErrPeerGone},
		"aborted": {func(p *p2p.Proxy, c *p2p.Channel, _ *muted, _ func()) {
			p.Lock()
			c.Abort(abort, nil)
			p.Unlock()
		}, abort},
		"closed": {func(p *p2p.Proxy, _ *p2p.Channel, _ *muted, _ func()) { p.Close() }, p2p.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			m := &muted{fails: &atomic.Bool{}, asked: make(chan struct{}, 1)}
			p := p2p.New(p2p.Config{Self: p2p.Identity{Rank: 0, Incarnation: 1}, Size: 2,
				Secret: []byte("0123456789abcdef"), Threads: true,
				Transports: []p2p.Transport{&mutedTransport{link: m}},
				Resolve: func(context.Context, int) (p2p.Peer, error) {
					return p2p.Peer{Identity: p2p.Identity{Rank: 1, Incarnation: 2},
						Endpoints: map[string][]byte{"hostile": {1}}}, nil
				}})
			defer p.Close()
			if _, err := p.Listen(t.Context()); err != nil {
				t.Fatal(err)
			}
			ch := open(t, p, 1, 2)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			timeout := time.Minute
			if name == "deadline" {
				timeout = 50 * time.Millisecond
			}
			failed := make(chan error, 1)
			go func() {
				p.Lock()
				defer p.Unlock()
				var w p2p.Wait
				w.Reset(ctx, timeout, false)
				_, err := ch.Map(&w, 1, 5)
				failed <- err
			}()
			select {
			case <-m.asked:
			case err := <-failed: // before the ranks were linked
				failed <- err
			}
			c.do(p, ch, m, cancel)
			select {
			case err := <-failed:
				if !errors.Is(err, c.want) {
					t.Errorf("%v, want %v", err, c.want)
				}
				var peer *p2p.PeerError
				if name == "gone" && (!errors.As(err, &peer) || peer.Rank != 1) {
					t.Errorf("%v does not name the peer", err)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("it does not return")
			}
		})
	}
}

// unmapping is a link over which nothing can be mapped, because of err.
type unmapping struct {
	p2p.Link
	err *atomic.Pointer[error]
}

func (u unmapping) Map(uint64) (*p2p.Mapping, error) { return nil, *u.err.Load() }

// TestMapDoesNotBlameThePeer: neither what a link cannot do nor what this process lacks is a
// failure of the peer. What the peer answers is.
func TestMapDoesNotBlameThePeer(t *testing.T) {
	var now atomic.Pointer[error]
	for name, wrap := range map[string]func(p2p.Link) p2p.Link{
		"unmapping": func(l p2p.Link) p2p.Link { return unmapping{l, &now} },
		"no mapper": func(l p2p.Link) p2p.Link { return struct{ p2p.Link }{l} },
	} {
		t.Run(name, func(t *testing.T) {
			all := cluster(t, 2, 0, func(tr p2p.Transport) p2p.Transport { return &wrapping{tr, wrap} })
			defer closeAll(all)
			p, q := members(t, all)
			ctx, cancel := context.WithCancel(t.Context())
			served := make(chan error, 1)
			go func() { // p takes part until q is done
				served <- with(p, func(*p2p.Wait) error {
					for w := patient(ctx); ; {
						if err := p.Progress(w); err != nil {
							return err
						}
					}
				})
			}()
			look := func(err error) error {
				now.Store(&err)
				return with(q, func(w *p2p.Wait) error {
					_, err := q.c.Map(w, 0, 5)
					return err
				})
			}
			for err, blames := range map[error]bool{
				fmt.Errorf("%w: %w", p2p.ErrShortage, syscall.EMFILE): false,
				fmt.Errorf("no such way: %w", errors.ErrUnsupported):  false,
				fmt.Errorf("it refuses: %w", p2p.ErrNoRegion):         true,
				fmt.Errorf("no valid region: %w", p2p.ErrProtocol):    true,
			} {
				if name == "no mapper" {
					err, blames = errors.ErrUnsupported, false
				}
				got := look(err)
				if !errors.Is(got, err) || errors.As(got, new(*p2p.PeerError)) != blames {
					t.Errorf("%v: %v, which is a *PeerError: %v", err, got, !blames)
				}
			}
			cancel()
			if err := <-served; !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
}

// TestMapNeedsExposure: peers map writable memory only while a range of it is exposed for reading.
func TestMapNeedsExposure(t *testing.T) {
	each(t, func(t *testing.T, p, q party) {
		look := func(r *p2p.Region) (byte, error) {
			q.Lock()
			defer q.Unlock()
			m, err := q.c.Map(patient(t.Context()), 0, r.ID)
			if err != nil {
				return 0, err
			}
			defer m.Release()
			return m.Mem[5], nil
		}
		alloc := func(how func(int) (*p2p.Region, error)) *p2p.Region {
			t.Helper()
			r, err := how(100)
			if err != nil {
				t.Fatal(err)
			}
			r.Bytes()[5] = 7
			return r
		}
		expose := func(r *p2p.Region, rights mem.Rights) *mem.Remote {
			t.Helper()
			x, err := p.Expose(r, 16, 32, rights)
			if err != nil {
				t.Fatal(err)
			}
			return x
		}
		withdraw := func(x *mem.Remote) {
			t.Helper()
			if err := p.Withdraw(t.Context(), x); err != nil {
				t.Fatal(err)
			}
		}
		if v, err := look(alloc(p.Alloc)); errors.Is(err, errors.ErrUnsupported) {
			return // it maps nothing
		} else if v != 7 || err != nil {
			t.Errorf("memory of Alloc: %d, %v", v, err)
		}
		for _, exposed := range []mem.Rights{0, mem.Write | mem.Signal, mem.Read} {
			r := alloc(p.AllocWritable)
			if exposed != 0 {
				x := expose(r, exposed)
				if _, err := look(r); exposed != mem.Read && !errors.Is(err, p2p.ErrNoRegion) {
					t.Errorf("exposed with rights %v: %v", exposed, err)
				}
				if exposed == mem.Read { // nobody has mapped it
					r = alloc(p.AllocWritable)
					withdraw(expose(r, exposed))
				}
				withdraw(x)
			}
			if _, err := look(r); !errors.Is(err, p2p.ErrNoRegion) {
				t.Errorf("not exposed, having been with rights %v: %v", exposed, err)
			}
		}
		r := alloc(p.AllocWritable)
		x := expose(r, mem.Read)
		if v, err := look(r); v != 7 || err != nil {
			t.Errorf("exposed for reading: %d, %v", v, err)
		}
		withdraw(x)
	})
}

// exposing is a transport that exposes memory, or fails to with err. Withdraw waits until ctx ends.
type exposing struct {
	hostile
	name      string
	err       error
	withdrawn int
}

func (e *exposing) Name() string                                    { return e.name }
func (e *exposing) Expose(*mem.Region, *mem.Remote) ([]byte, error) { return []byte{1}, e.err }
func (e *exposing) Withdraw(ctx context.Context, _ *mem.Remote) error {
	e.withdrawn++
	if ctx.Done() == nil {
		return errors.New("this would wait for ever")
	}
	<-ctx.Done()
	return ctx.Err()
}

// TestExposeThatFailsDoesNotWait: what other transports have exposed is withdrawn, but no peer that
// accesses other memory is waited for.
func TestExposeThatFailsDoesNotWait(t *testing.T) {
	why := errors.New("it cannot")
	good, bad := &exposing{name: "good"}, &exposing{name: "bad", err: why}
	p := p2p.New(p2p.Config{Self: p2p.Identity{Rank: 0, Incarnation: 1}, Size: 1, Secret: []byte("0123456789abcdef"),
		Transports: []p2p.Transport{good, bad}})
	defer p.Close()
	r, err := p.AllocWritable(64)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Expose(r, 0, 64, mem.Read); !errors.Is(err, why) || strings.Contains(err.Error(), "wait") ||
		good.withdrawn != 1 {
		t.Errorf("it is withdrawn %d times; %v", good.withdrawn, err)
	}
}

// TestMemoryThatIsNotThere: more memory than the system gives is an error, also where the memory is
// of the Go heap, or shared and not counted before it is written.
func TestMemoryThatIsNotThere(t *testing.T) {
	sizes := []int{1 << 50, 1 << 56}
	if mem.Fits(1<<46) != nil { // which has room in the addresses of a process
		sizes = append(sizes, 1<<46)
	}
	for name, transports := range map[string][]p2p.Transport{"plain": nil, "inproc": {inproc.New(inproc.Config{})},
		"shm": {shm.New(shm.Config{})}} {
		t.Run(name, func(t *testing.T) {
			p := p2p.New(p2p.Config{Self: p2p.Identity{Rank: 0, Incarnation: 1}, Size: 1,
				Secret: []byte("0123456789abcdef"), Transports: transports})
			defer p.Close()
			for _, alloc := range []func(int) (*p2p.Region, error){p.Alloc, p.AllocWritable} {
				for _, n := range sizes {
					if _, err := alloc(n); !errors.Is(err, syscall.ENOMEM) {
						t.Errorf("%d bytes: %v", n, err)
					}
				}
			}
		})
	}
}
