package endpoint

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/devicetest"
	"tutti/mem"
)

// gpu is a device of a test, which fails on request.
type gpu struct {
	*devicetest.Late
	t      testing.TB
	left   atomic.Int64 // copies before it fails
	copies func()       // called before each; nil: nothing is
}

var errGPU = errors.New("the device fell off the bus")

func (g *gpu) Stream() (device.Stream, error) {
	s, err := g.Late.Stream()
	return gpuStream{s, g}, err
}

type gpuStream struct {
	device.Stream
	g *gpu
}

func (s gpuStream) Copy(dst, src mem.Memory) error {
	if s.g.left.Add(-1) < 0 {
		return errGPU
	}
	if s.g.copies != nil {
		s.g.copies()
	}
	return s.Stream.Copy(dst, src)
}

// memory returns device memory with these bytes.
func (g *gpu) memory(b []byte) mem.Memory {
	g.t.Helper()
	m, err := g.Alloc(len(b))
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() {
		if err := g.Free(m); err != nil {
			g.t.Error(err)
		}
	})
	copy(g.Bytes(m), b)
	return m
}

// gpuPair returns connected endpoints of two programs with a device each.
func gpuPair(t testing.TB, cfg Config) (a, b *Endpoint, pb, pa *Peer, ga, gb *gpu) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	begin := func(name string, seed uint64) (*Endpoint, *gpu) {
		g := &gpu{Late: devicetest.NewLate("cuda:0", seed, 100*time.Microsecond), t: t}
		g.left.Store(1 << 40)
		c, err := NewContext(ContextConfig{Loops: 2, Devices: []device.Device{g}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			if _, host := g.Allocated(); host != 0 {
				t.Errorf("%d allocations of host memory are left", host)
			}
		})
		cfg.Name = name
		return newEndpoint(t, c, cfg), g
	}
	a, ga = begin("a", 1)
	b, gb = begin("b", 2)
	pb, err := a.Connect(ctx, b.Info())
	if err != nil {
		t.Fatal(err)
	}
	if pa, err = b.Accept(ctx); err != nil {
		t.Fatal(err)
	}
	return a, b, pb, pa, ga, gb
}

func TestMemoryOfDevices(t *testing.T) {
	eachGuard(t, []int{1, 3}, func(t *testing.T, cfg Config) {
		_, b, p, back, ga, gb := gpuPair(t, cfg)
		data := gb.memory(make([]byte, 4<<20))
		r, err := b.Register("data", data, RegionConfig{Rights: Read | Write})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Unregister()
		for i, n := range sizes {
			off, want := int64(i*13), pattern(n, uint64(i))
			src, dst := ga.memory(want), ga.memory(make([]byte, n))
			wait(t, p.Start(Op{Kind: OpWrite, Local: src, Region: "data", Offset: off}))
			if got := gb.Bytes(data)[off:][:n]; !bytes.Equal(got, want) {
				t.Fatalf("a write of %d bytes: they differ", n)
			}
			wait(t, p.Start(Op{Kind: OpRead, Local: dst, Region: "data", Offset: off}))
			if !bytes.Equal(ga.Bytes(dst), want) {
				t.Fatalf("a read of %d bytes: they differ", n)
			}
			host := make([]byte, n)
			wait(t, p.Read(host, "data", off))
			if !bytes.Equal(host, want) {
				t.Fatalf("a read of %d bytes to host memory: they differ", n)
			}
			for _, early := range []bool{false, true} {
				got := gb.memory(make([]byte, n))
				recv := Op{Kind: OpRecv, Local: got, Exact: true}
				if early {
					send := p.Start(Op{Kind: OpSend, Local: src})
					wait(t, back.Start(recv))
					wait(t, send)
				} else {
					f := back.Start(recv)
					wait(t, p.Start(Op{Kind: OpSend, Local: src}))
					wait(t, f)
				}
				if !bytes.Equal(gb.Bytes(got), want) {
					t.Fatalf("a message of %d bytes (early %t): they differ", n, early)
				}
			}
		}
	})
}

// Operations with host and device memory at both ends, many at a time, some cancelled, while other
// memory is registered and unregistered.
func TestMemoryOfDevicesUnderLoad(t *testing.T) {
	eachGuard(t, []int{2}, func(t *testing.T, cfg Config) {
		_, b, p, _, ga, gb := gpuPair(t, cfg)
		const lane = 600 << 10
		workers, rounds := 8, 16
		if testing.Short() {
			rounds = 6
		}
		data := gb.memory(make([]byte, workers*lane))
		r, err := b.Register("data", data, RegionConfig{Rights: Read | Write})
		if err != nil {
			t.Fatal(err)
		}
		defer r.Unregister()
		var all sync.WaitGroup
		for w := range workers {
			local := ga.memory(make([]byte, lane))
			all.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(w), 3))
				for i := range rounds {
					n, off := 1+rng.IntN(lane), int64(w*lane)
					want := pattern(n, rng.Uint64())
					src, dst := mem.Host(want, mem.Anywhere), mem.Host(make([]byte, n), mem.Anywhere)
					if rng.IntN(2) == 0 {
						copy(ga.Bytes(local), want)
						src = local.Slice(0, n)
					}
					ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
					f := p.Start(Op{Kind: OpWrite, Local: src, Region: "data", Offset: off})
					if rng.IntN(4) == 0 {
						f.Cancel() // and write it again
						f = p.Start(Op{Kind: OpWrite, Local: src, Region: "data", Offset: off})
					}
					err := f.Wait(ctx)
					toDevice := rng.IntN(2) == 0
					if toDevice {
						dst = local.Slice(0, n)
						clear(ga.Bytes(dst))
					}
					if err == nil {
						err = p.Start(Op{Kind: OpRead, Local: dst, Region: "data", Offset: off}).Wait(ctx)
					}
					cancel()
					if err != nil {
						t.Errorf("round %d of %d: %v", i, w, err)
						return
					}
					got := dst
					if toDevice {
						got = mem.Host(ga.Bytes(dst), mem.Anywhere)
					}
					if !bytes.Equal(got.Bytes(), want) {
						t.Errorf("round %d of %d: %d bytes differ", i, w, n)
						return
					}
				}
			})
		}
		for i := range rounds {
			name := fmt.Sprint("extra", i)
			m := gb.memory(make([]byte, 300<<10))
			x, err := b.Register(name, m, RegionConfig{})
			if err != nil {
				t.Fatal(err)
			}
			f := p.Read(make([]byte, m.Len()), name, 0)
			x.Unregister()
			if err := f.Wait(t.Context()); err != nil && !errors.Is(err, ErrStale) && !errors.Is(err, ErrNoRegion) {
				t.Error(err)
			}
		}
		all.Wait()
	})
}

// A device that fails ends the operations that need it, at either end, and nothing else.
func TestFailingDevices(t *testing.T) {
	eachGuard(t, []int{1}, func(t *testing.T, cfg Config) {
		_, b, p, back, ga, gb := gpuPair(t, cfg)
		for i, n := range []int{100, 20 << 10, 2 << 20} {
			remote, local := gb.memory(make([]byte, n)), ga.memory(make([]byte, n))
			host := make([]byte, n)
			name := fmt.Sprint("data", i)
			for suffix, m := range map[string]mem.Memory{"": remote, "host": mem.Host(make([]byte, n), mem.Anywhere)} {
				if _, err := b.Register(name+suffix, m, RegionConfig{Rights: Read | Write}); err != nil {
					t.Fatal(err)
				}
			}
			for after := range int64(3) {
				if after > 0 && n < 1<<20 {
					continue // one copy is all
				}
				fails := func(g *gpu, what string, f *Future, is error) {
					t.Helper()
					ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
					defer cancel()
					err := f.Wait(ctx)
					g.left.Store(1 << 40)
					if err == nil || is != nil && !errors.Is(err, is) || !strings.Contains(err.Error(), "device") &&
						!strings.Contains(err.Error(), "cuda:0") && is == nil {
						t.Errorf("%s of %d bytes, failure %d: %v", what, n, after, err)
					}
				}
				ga.left.Store(after)
				fails(ga, "read", p.Start(Op{Kind: OpRead, Local: local, Region: name + "host"}), errGPU)
				ga.left.Store(after)
				fails(ga, "write", p.Start(Op{Kind: OpWrite, Local: local, Region: name + "host"}), errGPU)
				gb.left.Store(after)
				fails(gb, "read of a region", p.Read(host, name, 0), ErrFailed)
				gb.left.Store(after)
				fails(gb, "write to a region", p.Write(host, name, 0), ErrFailed)

				recv := back.Recv(make([]byte, n))
				ga.left.Store(after)
				fails(ga, "send", p.Start(Op{Kind: OpSend, Local: local}), errGPU)
				recv.Cancel()
				gb.left.Store(after)
				f := back.Start(Op{Kind: OpRecv, Local: remote})
				send := p.Send(host)
				fails(gb, "recv", f, errGPU)
				send.Cancel()
			}
		}
		f := back.Recv(make([]byte, 3)) // everything still works
		wait(t, p.Send([]byte("end")))
		wait(t, f)
	})
}

// A peer that closes while it serves a read has lost the connection, not unregistered the region:
// what it sends last does not say so.
func TestReadsOfPeersThatCloseAreNotStale(t *testing.T) {
	eachGuard(t, []int{1}, func(t *testing.T, cfg Config) {
		_, b, p, back, _, gb := gpuPair(t, cfg)
		data := pattern(2<<20, 1)
		if _, err := b.Register("data", gb.memory(data), RegionConfig{}); err != nil {
			t.Fatal(err)
		}
		gb.copies = sync.OnceFunc(func() { back.Close() }) // within the first of several frames
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := p.Read(make([]byte, len(data)), "data", 0).Wait(ctx); !errors.Is(err, ErrBroken) {
			t.Errorf("the read ends with %v", err)
		}
		if n := b.Stats().Refused["stale"]; n != 0 {
			t.Errorf("it has refused %d operations because of that", n)
		}
	})
}

// A write that is repeated over another session is not overtaken by what is left of the first one.
func TestWriteOverAnotherSession(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, b, pb, _, _, gb := gpuPair(t, Config{Conns: 1})
	const n = 64 << 10
	to := gb.memory(make([]byte, n))
	// The device takes one copy at a time, so that the second write has another way to the memory.
	for name, m := range map[string]mem.Memory{"r": to, "same": mem.Host(gb.Bytes(to), mem.Anywhere)} {
		if _, err := b.Register(name, m, RegionConfig{Rights: Write}); err != nil {
			t.Fatal(err)
		}
	}
	held, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	gb.copies = func() {
		once.Do(func() {
			close(held)
			<-goOn
		})
	}
	first := pb.Write(bytes.Repeat([]byte{1}, n), "r", 0)
	<-held
	pb.mu.Lock()
	cut(pb.session.conns[0])
	pb.mu.Unlock()
	if err := first.Wait(ctx); !errors.Is(err, ErrBroken) {
		t.Fatalf("the first write: %v", err)
	}
	time.AfterFunc(200*time.Millisecond, func() { close(goOn) })
	again := pb.Write(bytes.Repeat([]byte{2}, n), "same", 0)
	if err := again.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	select {
	case <-goOn:
	default:
		t.Error("the second write has ended, and the first one is still being placed")
	}
	if got := gb.Bytes(to); !bytes.Equal(got, bytes.Repeat([]byte{2}, n)) {
		t.Errorf("the memory begins with %d, want 2", got[0])
	}
}

func TestUnknownDevice(t *testing.T) {
	a, _, p, _ := pair(t, Config{})
	m := mem.Device(4096, 10, "cuda:7")
	if _, err := a.Register("data", m, RegionConfig{}); !errors.Is(err, errors.ErrUnsupported) {
		t.Error(err)
	}
	if err := p.Start(Op{Kind: OpSend, Local: m}).Wait(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
		t.Error(err)
	}
	d := devicetest.NewLate("cuda:0", 1, 0)
	if _, err := NewContext(ContextConfig{Devices: []device.Device{d, d}}); err == nil {
		t.Error("two devices at one location")
	}
}
