//go:build cgo && linux

package pg

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/program"
	"tutti/mem"
)

// mostPending is how many operations of a stream the driver takes before its calls wait.
const mostPending = 1024

// crowded returns a stream of the program that waits for a word, with room for some operations
// behind that. end ends it.
func (r packetRank) crowded(t *testing.T, words []mem.Memory, room int) (s device.Stream, end func() error, err error) {
	p := program.Open(t, r.f.Path, r.d.Info().Ordinal)
	handle, err := p.Stream()
	if err != nil {
		return nil, nil, err
	}
	s, end = r.d.Borrow(handle), func() error { return p.Destroy(handle) }
	err = s.WaitValue(words[0], 1)
	for i := 0; err == nil && i < mostPending-1-room; i++ {
		err = s.WriteValue(words[1], 1)
	}
	if err != nil {
		return nil, nil, errors.Join(err, end())
	}
	return s, end, nil
}

// A call that gives work to a stream of the program waits while the stream is full. The rank goes
// on with other operations meanwhile, in this and other groups, and has the call's result when the
// stream has come to it.
func TestFullStreams(t *testing.T) {
	const long = 1 << 20
	sum := func(n int, start bool) func(ctx context.Context, g *Group, b Buffer) error {
		return func(ctx context.Context, g *Group, b Buffer) error {
			b.Count = n
			op := AllReduceOp{Dst: b, Op: BitOr}
			if start {
				return g.Start(op).Wait(ctx)
			}
			return g.Do(ctx, op)
		}
	}
	message := func(tag int, start bool) func(ctx context.Context, g *Group, b Buffer) error {
		return func(ctx context.Context, g *Group, b Buffer) error {
			op := Operation(SendOp{X: b, To: 1, Tag: tag})
			if g.Rank() == 1 {
				op = RecvOp{X: b, From: 0, Tag: tag}
			}
			if start {
				return g.Start(op).Wait(ctx)
			}
			return g.Do(ctx, op)
		}
	}
	for name, c := range map[string]struct {
		call func(ctx context.Context, g *Group, b Buffer) error
		cfg  Config
	}{
		"short":                         {sum(64, false), Config{}},
		"short, started":                {sum(64, true), Config{}},
		"long":                          {sum(long, false), Config{}},
		"long, copied":                  {sum(long, false), Config{PeerDevices: "off"}},
		"long, started":                 {sum(long, true), Config{}},
		"message":                       {message(9, false), Config{}},
		"message, started":              {message(9, true), Config{}},
		"long, started in little space": {sum(long, true), Config{StagingLimit: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			onPackets(t, 2, fake.Config{Devices: 2}, c.cfg, func(ctx context.Context, r packetRank) error {
				sub, err := r.Split(ctx, 0, r.Rank())
				if err != nil {
					return err
				}
				defer sub.Close()
				var all [3]mem.Memory
				for i := range all {
					if all[i], err = r.d.Alloc(long); err != nil {
						return err
					}
					defer r.d.Free(all[i])
					clear(r.f.Bytes(all[i]))
					r.f.Bytes(all[i])[5] = 1 << r.Rank()
				}
				words, free, err := device.Words(r.d, 2)
				if err != nil {
					return err
				}
				defer free()
				defer words[0].Word(0).Store(1)
				short := AllReduceOp{Dst: DeviceBuffer(all[1].Slice(0, 64), Uint8, nil), Op: BitOr}
				if err := r.Do(ctx, short); err != nil { // connects
					return err
				}
				var s device.Stream
				if r.Rank() == 0 {
					full, end, err := r.crowded(t, words, 0)
					if err != nil {
						return err
					}
					defer end()
					s = full
				}
				called := make(chan error, 1)
				go func() { called <- c.call(ctx, r.Group, DeviceBuffer(all[0], Uint8, s)) }()
				if !r.f.Until(t, "the call waits", func(n fake.Census) bool { return n.Blocked == 1 }) {
					return errors.New("it does not")
				}
				errs := []error{
					sub.Barrier(ctx),
					sub.Do(ctx, short),
					sub.Do(ctx, AllReduceOp{Dst: DeviceBuffer(all[1], Uint8, nil), Op: BitOr}),
					sub.Start(AllReduceOp{Dst: DeviceBuffer(all[1], Uint8, nil), Op: BitOr}).Wait(ctx),
					message(8, true)(ctx, r.Group, DeviceBuffer(all[2], Uint8, nil)),
				}
				if err := errors.Join(errs...); err != nil {
					return fmt.Errorf("while the call waits: %w", err)
				}
				if err := sub.Barrier(ctx); err != nil {
					return err
				}
				words[0].Word(0).Store(1)
				if err := <-called; err != nil {
					return err
				}
				want := byte(3)
				if strings.HasPrefix(name, "message") {
					want = 1
				}
				if got := r.f.Bytes(all[0])[5]; got != want {
					return fmt.Errorf("%d, want %d", got, want)
				}
				return nil
			})
		})
	}
}

// A blocking call is given up while its stream has no room for more than what has begun it: it
// returns, other operations go on, and its host memory is free again when the stream has passed it.
func TestGivenUpOnAFullStream(t *testing.T) {
	const n = 1 << 20
	for what, room := range map[string]int{"allreduce": 3, "recv": 2} { // for what begins the call
		t.Run(what, func(t *testing.T) {
			cfg := Config{PeerDevices: "off"}
			onPackets(t, 2, fake.Config{Devices: 2}, cfg, func(ctx context.Context, r packetRank) error {
				sub, err := r.Split(ctx, 0, r.Rank())
				if err != nil {
					return err
				}
				defer sub.Close()
				m, err := r.d.Alloc(n)
				if err != nil {
					return err
				}
				defer r.d.Free(m)
				if r.Rank() == 1 {
					return errors.Join(sub.Barrier(ctx), sub.Barrier(ctx))
				}
				words, free, err := device.Words(r.d, 2)
				if err != nil {
					return err
				}
				defer free()
				defer words[0].Word(0).Store(1)
				s, end, err := r.crowded(t, words, room)
				if err != nil {
					return err
				}
				defer end()
				bounded, cancel := context.WithCancel(ctx)
				defer cancel()
				before := r.f.Census().Events
				called := make(chan error, 1)
				go func() {
					if b := DeviceBuffer(m, Uint8, s); what == "recv" {
						called <- r.Do(bounded, RecvOp{X: b, From: 1, Tag: 9})
					} else {
						called <- r.Do(bounded, AllReduceOp{Dst: b, Op: Sum})
					}
				}()
				// The event is the last of what begins the call.
				if !r.f.Until(t, "the call has begun", func(n fake.Census) bool { return n.Events > before }) {
					return errors.New("it has not")
				}
				cancel()
				if err := <-called; !errors.As(err, new(*TimeoutError)) {
					return fmt.Errorf("%v, want that it is given up", err)
				}
				if err := sub.Barrier(ctx); err != nil {
					return err
				}
				vacant := func() bool {
					r.job.staging.mu.Lock()
					defer r.job.staging.mu.Unlock()
					for _, b := range r.job.staging.pools[r.d.Location()].buffers {
						if !b.vacant() {
							return false
						}
					}
					return true
				}
				if vacant() {
					return errors.New("host memory that the stream has yet to use is free")
				}
				words[0].Word(0).Store(1)
				if err := reach(ctx, s); err != nil {
					return err
				}
				if !vacant() {
					return errors.New("host memory that the stream has used is not free")
				}
				return sub.Barrier(ctx)
			})
		})
	}
}

// Start of a short vector on a stream returns although an earlier one without a stream waits for a
// rank, which comes only then.
func TestStartBehindOneThatWaits(t *testing.T) {
	returned := make(chan struct{})
	onPackets(t, 2, fake.Config{Devices: 2}, Config{}, func(ctx context.Context, r packetRank) error {
		s, m, op, err := r.begun(ctx)
		if err != nil {
			return err
		}
		defer s.Close()
		loose := AllReduceOp{Dst: DeviceBuffer(m, Uint32, nil), Op: Sum}
		if r.Rank() == 1 {
			<-returned
		}
		works := []*Work{r.Start(loose), r.Start(op), r.Start(loose), r.Start(op)}
		if r.Rank() == 0 {
			close(returned)
		}
		for _, w := range works {
			if err := w.Wait(ctx); err != nil {
				return err
			}
		}
		if got := r.value(m); got != 2<<len(works) {
			return fmt.Errorf("%d, want %d", got, 2<<len(works))
		}
		return nil
	})
}

// The streams of a rank share one queue of the device with a stream of the program, which waits: an
// operation whose result does not come to the device ends in time, on this rank only. Closing its
// group does not wait for the stream either.
func TestAStreamInTheWayOfAResult(t *testing.T) {
	const n, limit = 1 << 20, 10 * time.Second
	late := make(chan struct{})
	onPackets(t, 2, fake.Config{Queues: 1}, Config{PeerDevices: "off"}, func(ctx context.Context, r packetRank) error {
		sub, err := r.Split(ctx, 0, r.Rank())
		if err != nil {
			return err
		}
		if r.Rank() == 1 { // on the host
			<-late
			err := sub.Do(ctx, AllReduceOp{Dst: BufferOf(make([]uint8, n)), Op: Sum})
			return errors.Join(err, r.Barrier(ctx), sub.Close(), r.Barrier(ctx))
		}
		m, err := r.d.Alloc(n)
		if err != nil {
			return err
		}
		defer r.d.Free(m)
		words, free, err := device.Words(r.d, 1)
		if err != nil {
			return err
		}
		defer free()
		s, err := r.d.Stream()
		if err != nil {
			return err
		}
		defer s.Close()
		defer words[0].Word(0).Store(1)
		w := sub.StartWithin(limit, AllReduceOp{Dst: DeviceBuffer(m, Uint8, nil), Op: Sum})
		if err := s.WaitValue(words[0], 1); err != nil {
			return err
		}
		close(late)
		err = w.Wait(ctx)
		if !errors.As(err, new(*TimeoutError)) || !strings.Contains(err.Error(), "whose stream is held up") {
			return fmt.Errorf("%v, want that the stream is held up", err)
		}
		return errors.Join(r.Barrier(ctx), sub.Close(), r.Barrier(ctx))
	})
}
