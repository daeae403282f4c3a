package pg

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/mem"
)

// deviceCase is an operation of one rank, on buffers at dst and src of a number of elements each.
type deviceCase struct {
	name     string
	dst, src int
	within   int // elements from dst's beginning to src's, if src is in dst; else below 0
	op       func(dst, src Buffer) Operation
}

// deviceCases returns every collective for a rank of a group of n.
func deviceCases(rank, n, count, root int) (all []deviceCase) {
	add := func(name string, dst, src, within int, op func(dst, src Buffer) Operation) {
		all = append(all, deviceCase{name, dst, src, within, op})
	}
	at := func(has bool, n int) int {
		if has {
			return n
		}
		return 0
	}
	is := rank == root
	var counts, sends, recvs []int
	packed, sent, received, before := 0, 0, 0, 0
	for r := range n {
		counts = append(counts, count/(r+1))
		sends, recvs = append(sends, rank+r), append(recvs, r+rank)
		packed, sent, received = packed+counts[r], sent+sends[r], received+recvs[r]
		if r < rank {
			before += counts[r]
		}
	}
	add("allreduce", count, count, -1, func(d, s Buffer) Operation { return AllReduceOp{Dst: d, Src: s, Op: Sum} })
	add("allreduce in place", count, count, 0, func(d, _ Buffer) Operation { return AllReduceOp{Dst: d, Op: Avg} })
	add("reducescatter", count, n*count, -1,
		func(d, s Buffer) Operation { return ReduceScatterOp{Dst: d, Src: s, Op: Max} })
	add("allgather", n*count, count, -1, func(d, s Buffer) Operation { return AllGatherOp{Dst: d, Src: s} })
	add("allgather in place", n*count, count, rank*count,
		func(d, s Buffer) Operation { return AllGatherOp{Dst: d, Src: s} })
	add("allgatherv", packed, counts[rank], -1,
		func(d, s Buffer) Operation { return AllGatherVOp{Dst: d, Src: s, Counts: counts} })
	add("allgatherv in place", packed, counts[rank], before,
		func(d, s Buffer) Operation { return AllGatherVOp{Dst: d, Src: s, Counts: counts} })
	add("alltoall", n*count, n*count, -1, func(d, s Buffer) Operation { return AllToAllOp{Dst: d, Src: s} })
	add("alltoallv", received, sent, -1,
		func(d, s Buffer) Operation { return AllToAllVOp{Dst: d, Src: s, SendCounts: sends, RecvCounts: recvs} })
	add("broadcast", count, 0, -1, func(d, _ Buffer) Operation { return BroadcastOp{X: d, Root: root} })
	add("reduce", count, 0, -1, func(d, _ Buffer) Operation { return ReduceOp{X: d, Root: root, Op: Sum} })
	add("gather", at(is, n*count), count, -1,
		func(d, s Buffer) Operation { return GatherOp{Dst: d, Src: s, Root: root} })
	add("scatter", count, at(is, n*count), -1,
		func(d, s Buffer) Operation { return ScatterOp{Dst: d, Src: s, Root: root} })
	return all
}

// bufferAt describes elements at m.
func bufferAt(m mem.Memory, n int, s device.Stream) Buffer {
	if n == 0 {
		return Buffer{DType: Float32}
	}
	if m.Loc().Host() {
		return Buffer{Ptr: unsafe.Pointer(unsafe.SliceData(m.Bytes())), Count: n, DType: Float32}
	}
	return DeviceBuffer(m, Float32, s)
}

// Every collective on a device's memory does what it does on the host's: blocking and started, in
// the order of a stream and without one. The order of streams holds, though no goroutine waits for
// them.
func TestOperationsOnDevices(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 50*time.Microsecond)
	operateOn(t, 3, func(int) device.Device { return d })
	if blocks, host := d.Allocated(); blocks > 0 || host > 0 {
		t.Errorf("%d allocations of the device's memory and %d of the host's are left", blocks, host)
	}
}

// operateOn runs every collective on n ranks, each with its device, all at the same location.
func operateOn(t *testing.T, n int, of func(rank int) device.Device) {
	counts := []int{1, 1000, 20_000}
	if !testing.Short() {
		counts = append(counts, 300_000)
	}
	operateWith(t, n, counts, of)
}

// operateWith is operateOn for these counts. It runs all cases, or these ones, by Start alone.
func operateWith(t *testing.T, n int, counts []int, of func(rank int) device.Device, only ...string) {
	for _, count := range counts {
		each(t, n, Config{Devices: device.List{of(0)}}, func(ctx context.Context, g *Group) error {
			d := of(g.Rank())
			s, err := d.Stream()
			if err != nil {
				return err
			}
			defer s.Close()
			var kept []mem.Memory
			alloc := func(n int) (mem.Memory, error) {
				m, err := d.Alloc(4 * n)
				kept = append(kept, m)
				return m, err
			}
			defer func() {
				for _, m := range kept {
					d.Free(m)
				}
			}()
			for i, c := range deviceCases(g.Rank(), n, count, count%n) {
				first := 0
				if len(only) > 0 {
					if first = 2; !slices.Contains(only, c.name) {
						continue
					}
				}
				for mode := first; mode < 3; mode++ { // Do, Do with a stream, Start with a stream
					size := c.dst
					if c.within < 0 {
						size += c.src
					}
					from := c.dst // where the source is
					if c.within >= 0 {
						from = c.within
					}
					there, err := alloc(size)
					if err != nil {
						return err
					}
					rng := rand.New(rand.NewPCG(uint64(count), uint64(i*n+g.Rank())))
					data := make([]float32, size)
					for i := range data {
						data[i] = float32(rng.IntN(1000))
					}
					raw := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), 4*size)
					here := mem.Host(raw, mem.Anywhere)
					first := mem.Host(bytes.Clone(here.Bytes()), mem.Anywhere)
					if err := g.Do(ctx, c.op(bufferAt(here.Slice(0, 4*c.dst), c.dst, nil),
						bufferAt(here.Slice(4*from, 4*c.src), c.src, nil))); err != nil {
						return fmt.Errorf("%s on the host: %w", c.name, err)
					}
					if err := s.Copy(there, first); err != nil {
						return err
					}
					var on device.Stream
					if mode > 0 {
						on = s
					} else if err := reach(ctx, s); err != nil {
						return err
					}
					op := c.op(bufferAt(there.Slice(0, 4*c.dst), c.dst, on),
						bufferAt(there.Slice(4*from, 4*c.src), c.src, on))
					var w *Work
					if mode < 2 {
						if err := g.Do(ctx, op); err != nil {
							return fmt.Errorf("%s: %w", c.name, err)
						}
					} else {
						w = g.Start(op)
					}
					got := mem.Host(make([]byte, 4*size), mem.Anywhere)
					if err := s.Copy(got, there); err != nil {
						return err
					}
					if err := reach(ctx, s); err != nil {
						return err
					}
					if w != nil {
						if err := w.Wait(ctx); err != nil {
							return fmt.Errorf("%s: %w", c.name, err)
						}
					}
					if !bytes.Equal(got.Bytes(), here.Bytes()) {
						return fmt.Errorf("%s of %d elements, mode %d: the result differs from that on the host",
							c.name, count, mode)
					}
				}
			}
			return nil
		})
	}
}

// reach waits until a stream has done all its work.
func reach(ctx context.Context, s device.Stream) error {
	e, err := s.Record()
	if err != nil {
		return err
	}
	return e.Wait(ctx)
}

// streamWith returns a stream of d and n bytes of its memory; release ends both.
func streamWith(d device.Device, n int) (s device.Stream, m mem.Memory, release func(), err error) {
	if s, err = d.Stream(); err != nil {
		return nil, m, nil, err
	}
	if m, err = d.Alloc(n); err != nil {
		return nil, m, nil, errors.Join(err, s.Close())
	}
	return s, m, func() { d.Free(m); s.Close() }, nil
}

// onLate runs f with a device that has delays: one through whose host memory operations of n bytes
// go, and one that ranks load from in place.
func onLate(t *testing.T, pause time.Duration, f func(t *testing.T, d *devicetest.Late, n int)) {
	t.Run("copied", func(t *testing.T) { f(t, devicetest.NewLate("cuda:0", 7, pause), 4000) })
	t.Run("direct", func(t *testing.T) {
		d := devicetest.NewLate("cuda:0", 7, pause)
		d.Lend()
		f(t, d, 256<<10)
	})
}

// An operation that fails lets the stream go on. One in place that has not begun leaves its buffer
// as it was.
func TestFailedOperationsReleaseStreams(t *testing.T) {
	onLate(t, 0, testFailedOperationsReleaseStreams)
}

func testFailedOperationsReleaseStreams(t *testing.T, d *devicetest.Late, n int) {
	each(t, 2, Config{Devices: device.List{d}, Timeout: 100 * time.Millisecond},
		func(ctx context.Context, g *Group) error {
			if g.Rank() == 1 { // it does not come
				return nil
			}
			s, m, release, err := streamWith(d, n)
			if err != nil {
				return err
			}
			defer release()
			want := bytes.Repeat([]byte{5}, n)
			if err := s.Copy(m, mem.Host(want, mem.Anywhere)); err != nil {
				return err
			}
			b := DeviceBuffer(m, Float32, s)
			works := []*Work{g.Start(AllReduceOp{Dst: b, Op: Sum}), g.Start(AllReduceOp{Dst: b, Op: Max})}
			got := mem.Host(make([]byte, n), mem.Anywhere)
			if err := s.Copy(got, m); err != nil {
				return err
			}
			if err := reach(ctx, s); err != nil {
				return err
			}
			for _, w := range works {
				if err := w.Wait(ctx); err == nil {
					return errors.New("an operation without its peer has ended well")
				}
			}
			if !bytes.Equal(got.Bytes(), want) {
				return errors.New("the failed operations have changed the buffer")
			}
			return nil
		})
}

// Nothing is written to the device's memory after an operation has failed to which the stream had
// come.
func TestFailedOperationsLeaveTheMemoryAlone(t *testing.T) {
	onLate(t, 200*time.Microsecond, testFailedOperationsLeaveTheMemoryAlone)
}

func testFailedOperationsLeaveTheMemoryAlone(t *testing.T, d *devicetest.Late, n int) {
	each(t, 2, Config{Devices: device.List{d}, Timeout: 20 * time.Millisecond},
		func(ctx context.Context, g *Group) error {
			if g.Rank() == 1 { // it does not come
				return nil
			}
			g.devices.grace = time.Minute // the stream goes on, if only at its leisure
			s, m, release, err := streamWith(d, n)
			if err != nil {
				return err
			}
			defer release()
			own, err := d.Stream()
			if err != nil {
				return err
			}
			defer own.Close()
			c := &canary{own, m, bytes.Repeat([]byte{5}, n)}
			for i := range 20 {
				op := AllReduceOp{Dst: DeviceBuffer(m, Float32, s), Op: Sum}
				if i%2 == 0 {
					err = g.Do(ctx, op)
				} else {
					err = g.Start(op).Wait(ctx)
				}
				if err == nil {
					return errors.New("an operation without its peer has ended well")
				}
				if err := errors.Join(c.set(ctx), reach(ctx, s), c.check(ctx, "an operation had failed")); err != nil {
					return err
				}
			}
			return nil
		})
}

// An operation of which only the confirmation fails has its result on the device if LocalSuccess
// says so, also where the stream gets the result when it is there.
func TestUnconfirmedResultIsOnTheDevice(t *testing.T) {
	const n, absent = 4000, 2
	for name, c := range map[string]struct{ stream, heldUp bool }{
		"a stream":         {stream: true},
		"no stream":        {},
		"a stream held up": {heldUp: true}, // that of the group
	} {
		t.Run(name, func(t *testing.T) {
			late := devicetest.NewLate("cuda:0", 7, 0)
			var d device.Device = late
			words, _, err := device.Words(late, 1)
			if err != nil {
				t.Fatal(err)
			}
			if c.heldUp {
				d = &gated{late, 0, words[0]}
			}
			each(t, 3, Config{Devices: device.List{d}, Uniform: true}, func(ctx context.Context, g *Group) error {
				if g.Rank() == absent {
					return nil
				}
				if !c.heldUp {
					g.devices.grace = time.Minute
				}
				s, m, release, err := streamWith(late, n)
				if err != nil {
					return err
				}
				defer release()
				if err := errors.Join(s.Copy(m, hostMemory(bytes.Repeat([]byte{byte(g.Rank())}, n))),
					reach(ctx, s)); err != nil {
					return err
				}
				b := DeviceBuffer(m, Uint8, nil)
				if c.stream || g.Rank() == 1 {
					b.Stream = s
				}
				w := g.Start(BroadcastOp{X: b, Root: 1})
				for confirms := g.Rank() == 1; !confirms; runtime.Gosched() {
					g.job.proxy.Lock()
					confirms = slices.Contains(g.run.Awaits(), absent) || w.at.Load() == nil || w.at.Load().over
					g.job.proxy.Unlock()
				}
				if g.Rank() == 0 {
					g.Abort(errors.New("not confirmed"))
				}
				err, here := w.Wait(ctx), w.LocalSuccess()
				if !errors.Is(err, ErrAborted) || g.Rank() == 0 && here == c.heldUp {
					return fmt.Errorf("%v, want the abort; the result is here: %t", err, here)
				}
				if got := late.Bytes(m); here && bytes.Count(got, []byte{1}) != n {
					return fmt.Errorf("%d of %d bytes are not the result", n-bytes.Count(got, []byte{1}), n)
				}
				return nil
			})
		})
	}
}

// A stream that does not come bounds its operation by its time, and Close by nothing.
func TestStreamsThatDoNotCome(t *testing.T) { onLate(t, 0, testStreamsThatDoNotCome) }

func testStreamsThatDoNotCome(t *testing.T, d *devicetest.Late, n int) {
	linked := meeting(2) // else one may have closed the group before the other knows of its timeout
	each(t, 2, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		if err := linked(g.Barrier(ctx)); err != nil {
			return err
		}
		s, m, release, err := streamWith(d, n)
		if err != nil {
			return err
		}
		defer release()
		words, free, err := device.Words(d, 1)
		if err != nil {
			return err
		}
		defer free()
		if g.Rank() == 0 {
			if err := s.WaitValue(words[0], 1); err != nil {
				return err
			}
		}
		b := DeviceBuffer(m, Float32, s)
		late := g.StartWithin(50*time.Millisecond, AllReduceOp{Dst: b, Op: Sum})
		var timeout *TimeoutError
		if err := late.Wait(ctx); !errors.As(err, &timeout) {
			return fmt.Errorf("the operation of a stream that does not come: %v, want a *TimeoutError", err)
		}
		waiting := g.Start(AllReduceOp{Dst: b, Op: Sum})
		if err := g.Close(); err != nil {
			return err
		}
		if err := waiting.Wait(ctx); err == nil {
			return errors.New("an operation of a closed group has ended well")
		}
		words[0].Word(0).Store(1)
		return reach(ctx, s)
	})
}

// Memory of unknown devices, of two places and of two streams is refused, and nothing waits.
func TestDeviceArguments(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 0)
	other := devicetest.NewLate("cuda:1", 7, 0)
	each(t, 1, Config{Devices: device.List{d}}, func(ctx context.Context, g *Group) error {
		s, err := d.Stream()
		if err != nil {
			return err
		}
		defer s.Close()
		s2, err := d.Stream()
		if err != nil {
			return err
		}
		defer s2.Close()
		a, err := d.Alloc(64)
		if err != nil {
			return err
		}
		b, err := d.Alloc(64)
		if err != nil {
			return err
		}
		c, err := other.Alloc(64)
		if err != nil {
			return err
		}
		on := func(m mem.Memory, s device.Stream) Buffer { return DeviceBuffer(m, Float32, s) }
		for want, op := range map[string]Operation{
			"Config.Devices": AllReduceOp{Dst: on(c, nil), Op: Sum},
			"one location":   AllReduceOp{Dst: on(a, s), Src: BufferOf(make([]float32, 16)), Op: Sum},
			"one stream":     AllReduceOp{Dst: on(a, s), Src: on(b, s2), Op: Sum},
			"overlapping":    AllToAllOp{Dst: on(a, s), Src: on(a, s)},
		} {
			for _, err := range []error{g.Do(ctx, op), g.Start(op).Wait(ctx)} {
				var bad *ArgumentError
				if !errors.As(err, &bad) {
					return fmt.Errorf("%s: %v, want an *ArgumentError", want, err)
				}
				if !strings.Contains(err.Error(), want) {
					return fmt.Errorf("%v does not say %q", err, want)
				}
			}
		}
		return reach(ctx, s)
	})
}

// The end of a visit, which is told more than once, does not open or close the next one.
func TestVisitsOpenOnlyThemselves(t *testing.T) {
	words, _, err := device.Words(device.NewHost(), bufferWords)
	if err != nil {
		t.Fatal(err)
	}
	first, again := visit{words: words, at: 1}, visit{words: words, at: 1}
	second := visit{words: words, base: 1, at: 2}
	for i, step := range []struct {
		end  *visit
		want uint64
	}{{&first, 1}, {&first, 1}, {&second, 2}, {&again, 2}} {
		step.end.end()
		if got := words[wordOver].Word(0).Load(); got != step.want {
			t.Errorf("after step %d: %d, want %d", i, got, step.want)
		}
	}
}

// Long vectors are combined, and copied back, while later pieces come from the device: the first
// are at one rank's device while the other's stream is held up before its last. There the operation
// ends with that of the other, too.
func TestPiecesOverlapCollectives(t *testing.T) {
	const pieces, n = 8, 10 << 20 // of which a block of 8 MiB is complete without the last piece
	enough := errors.New("enough")
	for _, lets := range []bool{true, false} {
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
			if err := s.Copy(m, hostMemory(bytes.Repeat([]byte{byte(1 + g.Rank())}, n))); err != nil {
				return err
			}
			w := g.Start(AllReduceOp{Dst: DeviceBuffer(m, Uint8, s), Op: Sum})
			v := w.at.Load().visit
			if g.Rank() == 1 {
				const there = 6
				for end := time.Now().Add(20 * time.Second); v.word(wordPassed) < v.value(v.out, there-1); {
					if time.Now().After(end) {
						return errors.New("the first pieces do not come to the device")
					}
					time.Sleep(time.Millisecond)
				}
				if got := late.Bytes(m)[:v.out[there-1]]; bytes.Count(got, []byte{3}) != len(got) {
					return errors.New("the first pieces are not the sum")
				}
				if lets {
					words[0].Word(0).Store(1)
				} else {
					g.Abort(enough)
				}
			}
			switch err := w.Wait(ctx); {
			case !lets && !errors.Is(err, ErrAborted):
				return fmt.Errorf("an operation that was aborted: %v", err)
			case lets && err != nil:
				return err
			}
			words[0].Word(0).Store(1)
			if err := reach(ctx, s); err != nil {
				return err
			}
			if lets && bytes.Count(late.Bytes(m), []byte{3}) != n {
				return errors.New("the result is not the sum")
			}
			return nil
		})
	}
}

// Started operations on vectors of several blocks have the same result on a device as on the host.
func TestLongOperationsOnDevices(t *testing.T) {
	d := devicetest.NewLate("cuda:0", 7, 0)
	only := []string{"broadcast"}
	if !testing.Short() {
		only = append(only, "allreduce", "allgather in place", "reducescatter")
	}
	operateWith(t, 2, []int{2_200_000}, func(int) device.Device { return d }, only...)
}
