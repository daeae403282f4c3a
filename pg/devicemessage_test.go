package pg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/mem"
)

// smallPiece is the size of pieces in tests.
const smallPiece = 16 << 10

// SetPiece sets the least size of the pieces that are copied from and to devices.
func (g *Group) SetPiece(n int) { g.devices.piece = n }

// pieceOf returns n bytes that belong to a message.
func pieceOf(n, message int) []byte {
	rng := rand.NewChaCha8([32]byte{byte(message), byte(message >> 8), byte(n)})
	b := make([]byte, n)
	rng.Read(b)
	return b
}

func hostMemory(b []byte) mem.Memory { return mem.Host(b, mem.Anywhere) }

// Messages between memories of devices and of the host arrive whole, blocking and started, with a
// stream and without one, short and in pieces. The stream's order holds though no goroutine waits
// for it: what is written to the source behind a send is not sent, and what is read of the
// destination behind a receive is the message.
func TestMessagesOnDevices(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 50*time.Microsecond)
	messagesOn(t, d)
	if blocks, host := d.Allocated(); blocks > 0 || host > 0 {
		t.Errorf("%d allocations of the device's memory and %d of the host's are left", blocks, host)
	}
}

// How a message of messagesOn is given.
const (
	onHost = iota
	doAlone
	doOrdered
	startAlone
	startOrdered
	allWays
)

func messagesOn(t *testing.T, d device.Device) {
	sizes := []int{1, 1000, 40_000, 200_001}
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		g.SetPiece(smallPiece)
		s, m, release, err := streamWith(d, sizes[len(sizes)-1])
		if err != nil {
			return err
		}
		defer release()
		for i := range len(sizes) * allWays * allWays {
			n, from, to := sizes[i%len(sizes)], i/len(sizes)%allWays, i/len(sizes)/allWays
			way, recv := from, g.Rank() == 1-i%2
			if recv {
				way = to
			}
			what := fmt.Sprintf("message %d of %d bytes, way %d to way %d, recv %v", i, n, from, to, recv)
			x, data := m.Slice(0, n), pieceOf(n, i)
			b, raw := DeviceBuffer(x, Uint8, nil), make([]byte, n)
			if way == doOrdered || way == startOrdered {
				b.Stream = s
			}
			if way == onHost {
				b = BufferOf(raw)
			}
			if !recv {
				copy(raw, data)
				if err := s.Copy(x, hostMemory(bytes.Clone(data))); err != nil {
					return err
				}
			}
			if b.Stream == nil {
				if err := reach(ctx, s); err != nil {
					return err
				}
			}
			var op Operation = SendOp{X: b, To: 1 - g.Rank(), Tag: i % 3}
			if recv {
				op = RecvOp{X: b, From: []int{1 - g.Rank(), AnyRank}[i%2], Tag: []int{i % 3, AnyTag}[i/2%2]}
			}
			var w *Work
			if way < startAlone {
				err = g.Do(ctx, op)
			} else {
				w = g.Start(op)
				if way == startAlone {
					err = w.Wait(ctx)
				}
			}
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			got := hostMemory(make([]byte, n))
			if recv {
				err = s.Copy(got, x)
			} else if way == startOrdered {
				err = s.Copy(x, hostMemory(make([]byte, n)))
			}
			if err == nil {
				err = reach(ctx, s)
			}
			if err == nil && w != nil {
				err = w.Wait(ctx)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", what, err)
			}
			if w != nil && recv && w.Status() != (Status{1 - g.Rank(), i % 3, n}) {
				return fmt.Errorf("%s: %+v", what, w.Status())
			}
			if way == onHost {
				got = hostMemory(raw)
			}
			if recv && !bytes.Equal(got.Bytes(), data) {
				return fmt.Errorf("%s: other bytes than were sent", what)
			}
		}
		return g.Barrier(ctx)
	})
}

// hold has a stream wait until let is called.
func hold(d device.Device, s device.Stream) (let func(), err error) {
	words, _, err := device.Words(d, 1)
	if err == nil {
		err = s.WaitValue(words[0], 1)
	}
	return func() { words[0].Word(0).Store(1) }, err
}

// A message whose stream has not come to it keeps its place before a later one with its tag, and
// holds up none with another, nor those of another group.
func TestMessagesOfLateStreamsKeepTheirOrder(t *testing.T) {
	for _, n := range []int{8, 100_000} {
		d := devicetest.NewLate("cuda:0", 7, 0)
		each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
			other, err := g.Split(ctx, 0, -g.Rank())
			if err != nil {
				return err
			}
			defer other.Close()
			to := 1 - g.Rank()
			if g.Rank() == 1 {
				early, x, first, second := []byte{0}, []byte{0}, make([]byte, n), make([]byte, n)
				for _, err := range []error{
					g.DoRecvInto(ctx, early, to, 8), Send(ctx, g, early, to, 9), // then the stream is let go
					other.DoRecvInto(ctx, x, g.Rank(), 7),
					g.DoRecvInto(ctx, first, to, 7), g.DoRecvInto(ctx, second, to, 7),
				} {
					if err != nil {
						return err
					}
				}
				if early[0] != 3 || x[0] != 4 || !bytes.Equal(first, pieceOf(n, 1)) ||
					!bytes.Equal(second, pieceOf(n, 2)) {
					return errors.New("the messages are not what was sent, or in another order")
				}
				return g.Barrier(ctx)
			}
			g.SetPiece(smallPiece)
			s, m, release, err := streamWith(d, n)
			if err != nil {
				return err
			}
			defer release()
			let, err := hold(d, s)
			if err != nil {
				return err
			}
			if err := s.Copy(m, hostMemory(pieceOf(n, 1))); err != nil {
				return err
			}
			works := []*Work{
				g.Start(SendOp{X: DeviceBuffer(m, Uint8, s), To: to, Tag: 7}),
				g.Start(SendOp{X: BufferOf(pieceOf(n, 2)), To: to, Tag: 7}),
				g.Start(SendOp{X: BufferOf([]byte{3}), To: to, Tag: 8}),
				other.Start(SendOp{X: BufferOf([]byte{4}), To: g.Rank(), Tag: 7}),
			}
			if err := g.DoRecvInto(ctx, []byte{0}, to, 9); err != nil {
				return err
			}
			if works[0].at.Load().over {
				return errors.New("a message of which the data is not here has ended")
			}
			let()
			for _, w := range works {
				if err := w.Wait(ctx); err != nil {
					return err
				}
			}
			return g.Barrier(ctx)
		})
	}
}

// DoRecvInto receives bytes.
func (g *Group) DoRecvInto(ctx context.Context, x []byte, from, tag int) error {
	return g.Do(ctx, RecvOp{X: BufferOf(x), From: from, Tag: tag})
}

// gated is a device of which the streams come to copy number n only when they are let.
type gated struct {
	device.Device
	n    int
	word mem.Memory
}

type gatedStream struct {
	device.Stream
	d  *gated
	at int
}

func (d *gated) Stream() (device.Stream, error) {
	s, err := d.Device.Stream()
	return &gatedStream{Stream: s, d: d}, err
}

func (s *gatedStream) Copy(dst, src mem.Memory) error {
	if s.at++; s.at-1 == s.d.n {
		if err := s.Stream.WaitValue(s.d.word, 1); err != nil {
			return err
		}
	}
	return s.Stream.Copy(dst, src)
}

// The pieces of a message are sent as they come from the device, and copied to the device as they
// arrive: the first are there while the sender's stream is held up before the last.
func TestPiecesOverlapTheWire(t *testing.T) {
	const pieces, n = 5, 5 * smallPiece
	for _, blocking := range []bool{true, false} {
		late := devicetest.NewLate("cuda:0", 7, 0)
		words, _, err := device.Words(late, 1)
		if err != nil {
			t.Fatal(err)
		}
		each(t, 2, Config{Devices: device.List{late}}, func(ctx context.Context, g *Group) error {
			g.SetPiece(smallPiece)
			var d device.Device = late
			if g.Rank() == 0 {
				d = &gated{late, pieces, words[0]} // one copy brings the data to the device
			}
			s, m, release, err := streamWith(d, n)
			if err != nil {
				return err
			}
			defer release()
			data, b := pieceOf(n, 1), DeviceBuffer(m, Uint8, s)
			if g.Rank() == 0 {
				if err := s.Copy(m, hostMemory(data)); err != nil {
					return err
				}
				w := g.Start(SendOp{X: b, To: 1})
				err := w.Wait(ctx)
				return errors.Join(err, g.Barrier(ctx))
			}
			done := make(chan error, 1)
			go func() {
				if op := (RecvOp{X: b, From: 0}); blocking {
					done <- g.Do(ctx, op)
				} else {
					done <- g.Start(op).Wait(ctx)
				}
			}()
			passed := func() bool { // all pieces but the last
				x := &g.job.staging
				x.mu.Lock()
				defer x.mu.Unlock()
				p := x.pools[late.Location()]
				return p != nil && len(p.buffers) == 1 && p.buffers[0].words[wordPassed].Word(0).Load() >= pieces
			}
			for end := time.Now().Add(20 * time.Second); !passed(); time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					return errors.New("the first pieces do not come to the device")
				}
			}
			if there := late.Bytes(m)[:(pieces-1)*smallPiece]; !bytes.Equal(there, data[:len(there)]) {
				return errors.New("the first pieces are not what was sent")
			}
			if len(done) > 0 {
				return errors.New("the receive has ended before the message was sent")
			}
			words[0].Word(0).Store(1)
			if err := <-done; err != nil {
				return err
			}
			got := hostMemory(make([]byte, n))
			if err := s.Copy(got, m); err != nil {
				return err
			}
			if err := reach(ctx, s); err != nil {
				return err
			}
			if !bytes.Equal(got.Bytes(), data) {
				return errors.New("other bytes than were sent")
			}
			return g.Barrier(ctx)
		})
	}
}

// A canary is memory of a Late device that has a pattern, which nothing may change. It looks by a
// stream of its own, so that it does not wait for work that another stream has left to do.
type canary struct {
	s       device.Stream
	m       mem.Memory
	pattern []byte
}

func (c *canary) set(ctx context.Context) error {
	if err := c.s.Copy(c.m, hostMemory(c.pattern)); err != nil {
		return err
	}
	return reach(ctx, c.s)
}

func (c *canary) get(ctx context.Context) ([]byte, error) {
	got := make([]byte, c.m.Len())
	if err := c.s.Copy(hostMemory(got), c.m); err != nil {
		return nil, err
	}
	return got, reach(ctx, c.s)
}

func (c *canary) check(ctx context.Context, after string) error {
	got, err := c.get(ctx)
	if err == nil && !bytes.Equal(got, c.pattern) {
		err = fmt.Errorf("the memory was written after %s", after)
	}
	return err
}

// Receives that are cancelled at random moments lose no message, and nothing is written to the
// device's memory after they have ended.
func TestCancelledMessagesOnDevices(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 20*time.Microsecond)
	messages := 60
	if testing.Short() {
		messages = 30
	}
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		g.SetPiece(smallPiece)
		sizes, pause, given := rand.New(rand.NewPCG(3, 4)), rand.New(rand.NewPCG(5, 6)), 0
		for i := range messages {
			n := []int{1 + sizes.IntN(1000), 20_000, 40_000 + sizes.IntN(100_000)}[i%3]
			s, m, release, err := streamWith(d, n)
			if err != nil {
				return err
			}
			defer release()
			b, data := DeviceBuffer(m, Uint8, s), pieceOf(n, i)
			if g.Rank() == 0 {
				if err := s.Copy(m, hostMemory(data)); err != nil {
					return err
				}
				if i == 0 { // it is sent when a receive has been given up
					if err := g.Barrier(ctx); err != nil {
						return err
					}
				}
				if err := g.Do(ctx, SendOp{X: b, To: 1, Tag: 5}); err != nil {
					return fmt.Errorf("message %d: %w", i, err)
				}
				continue
			}
			own, err := d.Stream()
			if err != nil {
				return err
			}
			defer own.Close()
			c := &canary{own, m, bytes.Repeat([]byte{0xc5}, n)}
			for try := 0; ; try++ {
				if err := c.set(ctx); err != nil {
					return err
				}
				within, cancel := ctx, context.CancelFunc(func() {})
				if try < 10 {
					within, cancel = context.WithTimeout(ctx, time.Duration(pause.IntN(300))*time.Microsecond)
				}
				op := RecvOp{X: b, From: AnyRank, Tag: AnyTag}
				if try%2 == 0 {
					_, err = g.DoRecv(within, op)
				} else if try < 10 {
					err = g.StartWithin(time.Duration(1+pause.IntN(300))*time.Microsecond, op).Wait(ctx)
				} else {
					err = g.Start(op).Wait(ctx)
				}
				cancel()
				if err == nil {
					break
				}
				var late *TimeoutError
				if !errors.As(err, &late) {
					return fmt.Errorf("message %d: got %v, want a *TimeoutError", i, err)
				}
				if given++; given == 1 {
					if err := g.Barrier(ctx); err != nil {
						return err
					}
				}
				if err := c.set(ctx); err != nil {
					return err
				}
				if err := errors.Join(reach(ctx, s), c.check(ctx, "a receive had ended")); err != nil {
					return fmt.Errorf("message %d: %w", i, err)
				}
			}
			got, err := c.get(ctx)
			if err != nil {
				return err
			}
			if !bytes.Equal(got, data) {
				return fmt.Errorf("message %d: other bytes than were sent", i)
			}
		}
		return g.Barrier(ctx)
	})
}

// A message of another length or type than its receive is an *ArgumentError. The stream goes on,
// and a blocking receive leaves the memory as it was.
func TestMessagesOfAnotherLengthOnDevices(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 0)
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		sizes := []int{60, 68, 60_000, 100_000}
		s, m, release, err := streamWith(d, 64_000)
		if err != nil {
			return err
		}
		defer release()
		own, err := d.Stream()
		if err != nil {
			return err
		}
		defer own.Close()
		for i, n := range sizes {
			for _, start := range []bool{false, true} {
				if g.Rank() == 0 {
					if err := Send(ctx, g, make([]byte, n), 1, i); err != nil {
						return err
					}
					continue
				}
				c := &canary{own, m, bytes.Repeat([]byte{0xc5}, 64_000)}
				if err := c.set(ctx); err != nil {
					return err
				}
				op := RecvOp{X: DeviceBuffer(m.Slice(0, 64*(1+i/2*999)), Uint8, s), From: 0, Tag: i}
				if start {
					err = g.Start(op).Wait(ctx)
				} else {
					err = g.Do(ctx, op)
				}
				var bad *ArgumentError
				if !errors.As(err, &bad) || !strings.Contains(bad.Got, fmt.Sprint(n)) {
					return fmt.Errorf("a message of %d bytes: %v", n, err)
				}
				if err = nil; start { // void
					err = c.set(ctx)
				}
				if err = errors.Join(err, reach(ctx, s), c.check(ctx, "a message of another length")); err != nil {
					return err
				}
			}
		}
		return g.Barrier(ctx)
	})
}

// A stream that does not come bounds its messages by their time, names no peer, and Close waits for
// it not at all. When it comes it passes.
func TestMessagesOfStreamsThatDoNotCome(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 0)
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		to := 1 - g.Rank()
		if g.Rank() == 1 {
			x := []byte{0}
			if err := Send(ctx, g, []byte{5}, to, 1); err != nil {
				return err
			}
			if err := g.DoRecvInto(ctx, x, to, 2); err != nil || x[0] != 7 { // not the one that was given up
				return fmt.Errorf("%d, %v", x[0], err)
			}
			return g.Barrier(ctx)
		}
		s, m, release, err := streamWith(d, 1)
		if err != nil {
			return err
		}
		defer release()
		let, err := hold(d, s)
		if err != nil {
			return err
		}
		b := DeviceBuffer(m, Uint8, s)
		within, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
		defer cancel()
		for what, err := range map[string]error{
			"send":          g.StartWithin(50*time.Millisecond, SendOp{X: b, To: to, Tag: 2}).Wait(ctx),
			"receive":       g.StartWithin(50*time.Millisecond, RecvOp{X: b, From: to, Tag: 1}).Wait(ctx),
			"blocking send": g.Do(within, SendOp{X: b, To: to, Tag: 2}),
			"blocking recv": g.Do(within, RecvOp{X: b, From: to, Tag: 1}),
		} {
			var late *TimeoutError
			if !errors.As(err, &late) || !strings.Contains(late.Call, "stream") || len(late.Missing) > 0 {
				return fmt.Errorf("a %s of a stream that does not come: %v", what, err)
			}
		}
		if err := Send(ctx, g, []byte{7}, to, 2); err != nil {
			return err
		}
		if err := g.Barrier(ctx); err != nil {
			return err
		}
		waiting := []*Work{g.Start(SendOp{X: b, To: to}), g.Start(RecvOp{X: b, From: to})}
		began := time.Now()
		if err := g.Close(); err != nil {
			return err
		}
		if took := time.Since(began); took > 5*time.Second {
			return fmt.Errorf("Close took %v", took)
		}
		for _, w := range waiting {
			if err := w.Wait(ctx); !errors.Is(err, ErrClosed) && !errors.As(err, new(*RankError)) {
				return fmt.Errorf("a message of a closed group: %v", err)
			}
		}
		let()
		return reach(ctx, s)
	})
}

// A stream that fails ends its messages with its error, and the group goes on.
func TestMessagesOfStreamsThatFail(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 0)
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		to := 1 - g.Rank()
		s, m, release, err := streamWith(d, 100)
		if err != nil {
			return err
		}
		defer release()
		if g.Rank() == 0 {
			if _, err := hold(d, s); err != nil {
				return err
			}
			b := DeviceBuffer(m, Uint8, s)
			one := DeviceBuffer(m.Slice(0, 1), Uint8, s)
			works := []*Work{g.Start(SendOp{X: one, To: to, Tag: 1}), g.Start(RecvOp{X: b, From: to, Tag: 2})}
			if err := s.Close(); err != nil {
				return err
			}
			works = append(works, g.Start(SendOp{X: one, To: to, Tag: 1}))
			for i, w := range works {
				if err := w.Wait(ctx); !errors.Is(err, device.ErrClosed) {
					return fmt.Errorf("message %d of a stream that was closed: %v", i, err)
				}
			}
			return Send(ctx, g, []byte{9}, to, 1)
		}
		x := []byte{0}
		if err := Send(ctx, g, make([]byte, 100), to, 2); err != nil {
			return err
		}
		if err := g.DoRecvInto(ctx, x, to, 1); err != nil || x[0] != 9 {
			return fmt.Errorf("%d, %v", x[0], err)
		}
		return nil
	})
}

// A receive of which the stream has a part fails when the sender takes its message back; one of
// which it has nothing waits for the next message.
func TestMessagesThatAreTakenBack(t *testing.T) {
	late := devicetest.NewLate("cuda:0", 7, 0)
	const n = 4 * smallPiece
	for _, begun := range []int{0, 2} {
		words, _, err := device.Words(late, 1)
		if err != nil {
			t.Fatal(err)
		}
		var once sync.WaitGroup
		once.Add(1)
		each(t, 2, Config{Devices: device.List{late}}, func(ctx context.Context, g *Group) error {
			g.SetPiece(smallPiece)
			var d device.Device = late
			if g.Rank() == 0 {
				d = &gated{late, begun, words[0]}
			}
			s, m, release, err := streamWith(d, n)
			if err != nil {
				return err
			}
			defer release()
			if g.Rank() == 0 {
				cancelled := g.Start(SendOp{X: DeviceBuffer(m, Uint8, s), To: 1})
				once.Wait() // the receiver has what there is
				p := g.job.proxy
				p.Lock()
				g.msgs.Drop(cancelled.at.Load().msg.s, context.Canceled)
				p.Unlock()
				words[0].Word(0).Store(1)
				if err := cancelled.Wait(ctx); !errors.Is(err, context.Canceled) {
					return err
				}
				if err := Send(ctx, g, pieceOf(n, 2), 1, 0); err != nil {
					return err
				}
				return g.Barrier(ctx)
			}
			w := g.Start(RecvOp{X: DeviceBuffer(m, Uint8, s), From: 0})
			v := w.at.Load().msg.device.v
			for end := time.Now().Add(20 * time.Second); v.words[wordOver].Word(0).Load() < v.base+uint64(begun); {
				if time.Now().After(end) {
					return errors.New("the first pieces do not arrive")
				}
				time.Sleep(time.Millisecond)
			}
			once.Done()
			err = w.Wait(ctx)
			var lost *RankError
			switch {
			case begun == 0 && err != nil:
				return err
			case begun > 0 && (!errors.As(err, &lost) || lost.Rank != 0 || !errors.Is(err, errTakenBack)):
				return fmt.Errorf("a message that was taken back: %v", err)
			case begun > 0:
				if err := reach(ctx, s); err != nil {
					return err
				}
				if err := g.Do(ctx, RecvOp{X: DeviceBuffer(m, Uint8, s), From: 0}); err != nil {
					return err
				}
			}
			c := &canary{s, m, pieceOf(n, 2)}
			if err := c.check(ctx, "the next message"); err != nil {
				return err
			}
			return g.Barrier(ctx)
		})
	}
}

// Many messages that wait on streams need no goroutine each.
func TestManyMessagesOnDevices(t *testing.T) {
	const many = 300
	d := devicetest.NewLate("cuda:0", 7, 0)
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		s, m, release, err := streamWith(d, 4*many)
		if err != nil {
			return err
		}
		defer release()
		var works []*Work
		if g.Rank() == 0 {
			var all []byte
			for i := range many {
				all = append(all, byte(i), byte(i>>8), 3, 4)
			}
			if err := s.Copy(m, hostMemory(all)); err != nil {
				return err
			}
		}
		for i := range many {
			x := DeviceBuffer(m.Slice(4*i, 4), Uint8, s)
			if g.Rank() == 0 {
				works = append(works, g.Start(SendOp{X: x, To: 1, Tag: i % 7}))
			} else {
				works = append(works, g.Start(RecvOp{X: x, From: 0, Tag: i % 7}))
			}
		}
		for i, w := range works {
			if err := w.Wait(ctx); err != nil {
				return fmt.Errorf("message %d: %w", i, err)
			}
		}
		got := make([]byte, 4*many)
		if err := s.Copy(hostMemory(got), m); err != nil {
			return err
		}
		if err := reach(ctx, s); err != nil {
			return err
		}
		for i := range many {
			if !bytes.Equal(got[4*i:4*i+4], []byte{byte(i), byte(i >> 8), 3, 4}) {
				return fmt.Errorf("message %d: %x", i, got[4*i:4*i+4])
			}
		}
		return g.Barrier(ctx)
	})
}

// A message that ends while the group's goroutine is about to poll its stream ends once.
func TestMessagesOnDevicesEndOnce(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 0)
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		if g.Rank() == 1 {
			return g.Barrier(ctx)
		}
		s, m, release, err := streamWith(d, 50_000)
		if err != nil {
			return err
		}
		defer release()
		w := g.Start(SendOp{X: DeviceBuffer(m, Uint8, s), To: 1})
		done, c := w.Done(), w.at.Load().msg.device
		if err := reach(ctx, s); err != nil {
			return err
		}
		p, times := g.job.proxy, 0
		w.OnEnd(func(error) { times++ })
		p.Lock()
		g.msgs.Drop(c.m.s, context.Canceled)
		p.Unlock()
		<-done
		for watching := true; watching && ctx.Err() == nil; runtime.Gosched() { // looks are of one goroutine
			p.Lock()
			watching = g.devices.watching
			p.Unlock()
		}
		if _, over := c.look(nil); !over || times != 1 {
			return fmt.Errorf("over %v, ended %d times", over, times)
		}
		return g.Barrier(ctx)
	})
}
