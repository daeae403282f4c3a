//go:build cgo && linux

package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/fakegpu"
	"tutti/mem"
	"tutti/p2p"
	"tutti/p2p/linktest"
	"tutti/rdma"
	"tutti/rdma/soft"
)

// gpu is a GPU of a fake driver.
type gpu struct {
	*fake.Driver
	*cuda.Device
}

func newGPU(t *testing.T, c fake.Config) *gpu {
	t.Helper()
	d, f := fakegpu.Open(t, 0, c)
	return &gpu{f, d}
}

// exports returns how often memory of the GPU was exported.
func (g *gpu) exports() int { return g.Calls()["cuMemGetHandleForAddressRange"] }

// open returns a function as ports.open does, whose transports reach the memory of g.
func (g *gpu) open(p ports, f *soft.Fabric, ring int) func(testing.TB) p2p.Transport {
	open := p.open(f, ring)
	return func(tb testing.TB) p2p.Transport {
		t := open(tb).(*Transport)
		t.cfg.Exporter = func(loc mem.Location) (rdma.Exporter, error) {
			if loc != g.Location() {
				return nil, fmt.Errorf("there is no device at %s", loc)
			}
			return g.Device, nil
		}
		return t
	}
}

// sides returns the ends of a link whose ring is up.
func (g *gpu) sides(t *testing.T, p ports, f *soft.Fabric) (x, y *linktest.Side) {
	t.Helper()
	x, y = linktest.Sides(t, g.open(p, f, minRing))
	raised(t, x.End, y.End)
	return x, y
}

// refusing returns a fabric whose devices refuse DMA buffers while errno is not 0, and how often
// they were asked.
func refusing(t *testing.T, cfg soft.Config) (f *soft.Fabric, errno *atomic.Uint32, asked *atomic.Int64) {
	errno = new(atomic.Uint32)
	f, asked = countCalls(t, cfg, func(call string) bool { return strings.HasSuffix(call, "of a DMA buffer") },
		func(string) syscall.Errno { return syscall.Errno(errno.Load()) })
	return f, errno, asked
}

// Puts from memory of a GPU and gets to it are as those of the host's.
func TestMemoryOfGPUs(t *testing.T) {
	g := newGPU(t, fake.Config{DMABuf: true})
	overRails(t, func(t *testing.T, p ports) {
		f := soft.New(soft.Config{Seed: 41, Devices: 4, Late: 3})
		t.Cleanup(f.Close)
		linktest.RunDevice(t, g, g.open(p, f, minRing))
	})
}

// onGPU is memory of a GPU, what it is put to, and the means for it.
type onGPU struct {
	*testing.T
	x     *linktest.Side
	local mem.Memory
	to    *mem.Remote
	there []byte
	round int
}

func newOnGPU(t *testing.T, g *gpu, x, y *linktest.Side, n int) *onGPU {
	r := y.Alloc(t, n)
	o := &onGPU{t, x, linktest.Alloc(t, g, make([]byte, n)), y.Expose(t, r, 0, n, mem.Read|mem.Write), r.Bytes(), 0}
	place(t, x, make([]byte, leastMove), o.to) // so that the keys are there
	return o
}

// begin begins a put of other bytes than the ones before, and move waits for its end.
func (o *onGPU) begin(g *gpu) (id uint64, want []byte) {
	o.Helper()
	o.round++
	want = pattern(o.local.Len(), o.round)
	copy(g.Bytes(o.local), want)
	id, err := o.x.Start(func(id uint64) error { return o.x.Rma.Put(id, o.local, o.to, 0, p2p.Signal{}) })
	if err != nil {
		o.Fatal(err)
	}
	return id, want
}

func (o *onGPU) move(g *gpu) error {
	o.Helper()
	id, want := o.begin(g)
	err := o.x.Await(id, nil)
	if err == nil && !bytes.Equal(o.there, want) {
		o.Fatal("other bytes have arrived")
	}
	return err
}

// until moves until that has the outcome.
func (o *onGPU) until(g *gpu, moved bool) {
	o.Helper()
	for late := time.Now().Add(linktest.Patience); ; {
		err := o.move(g)
		if err == nil == moved {
			return
		}
		if time.Now().After(late) {
			o.Fatalf("no put ends so: %v", err)
		}
	}
}

// What cannot be registered ends at once, and memory of that GPU is not tried again, until the RDMA
// device comes back as another one.
func TestMemoryOfGPUsThatIsRefused(t *testing.T) {
	for name, c := range map[string]struct {
		fake  fake.Config
		errno syscall.Errno
	}{
		"by the GPU":                    {fake.Config{}, 0},
		"by the device":                 {fake.Config{DMABuf: true}, syscall.ENOMEM},
		"by a device without the calls": {fake.Config{DMABuf: true}, syscall.EOPNOTSUPP},
	} {
		t.Run(name, func(t *testing.T) {
			g := newGPU(t, c.fake)
			f, errno, asked := refusing(t, soft.Config{Seed: 42})
			errno.Store(uint32(c.errno))
			x, y := g.sides(t, ports{}, f)
			o := newOnGPU(t, g, x, y, 1<<20)
			_, _, before := f.Objects()
			for range 5 {
				err := o.move(g)
				if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "cuda:0") {
					t.Fatalf("memory that is refused: %v", err)
				}
			}
			if _, _, n := f.Objects(); n != before || asked.Load() > 1 || g.exports() > 1 {
				t.Errorf("%d registrations more; asked %d times, exported %d times", n-before, asked.Load(),
					g.exports())
			}
			place(t, x, make([]byte, leastMove), o.to) // memory of the host
			errno.Store(0)
			f.Remove("soft1")
			f.Restore("soft1")
			if c.fake.DMABuf {
				o.until(g, true)
			}
		})
	}
}

// Memory that is no region is registered for each operation. A region is registered once with each
// device, also with one that was removed and is back, until Deregister.
func TestRegionsOfGPUs(t *testing.T) {
	g := newGPU(t, fake.Config{DMABuf: true})
	f, _, asked := refusing(t, soft.Config{Seed: 43, Late: 3})
	x, y := g.sides(t, ports{}, f)
	o := newOnGPU(t, g, x, y, 1<<20)
	moves := func(n int) int {
		t.Helper()
		before := asked.Load()
		for range n {
			if err := o.move(g); err != nil {
				t.Fatal(err)
			}
		}
		if a, e := asked.Load()-before, g.exports(); int64(e) != asked.Load() {
			t.Errorf("%d registrations, %d exports", a, e)
		}
		return int(asked.Load() - before)
	}
	_, _, before := f.Objects()
	if n := moves(3); n != 3 {
		t.Errorf("3 operations have registered their memory %d times", n)
	}
	if _, _, n := f.Objects(); n != before {
		t.Errorf("%d registrations are left", n-before)
	}
	r := mem.NewRegion(7, o.local, false, false, nil)
	reg := x.Node.T.(p2p.Registrar)
	reg.Register(r)
	if n := moves(3); n != 1 {
		t.Errorf("3 operations have registered a region %d times", n)
	}
	f.Remove("soft1")
	f.Restore("soft1")
	o.until(g, true)
	if n := moves(3); n > 1 {
		t.Errorf("3 operations have registered a region %d times after the device was back", n)
	}
	if err := reg.Deregister(r); err != nil {
		t.Error(err)
	}
	for late := time.Now().Add(linktest.Patience); ; { // the lanes change meanwhile
		raised(t, x.End, y.End)
		if _, _, n := f.Objects(); n <= before {
			break
		}
		if time.Now().After(late) {
			t.Fatal("the region is registered after Deregister")
		}
	}
	if n := moves(2); n != 2 {
		t.Errorf("2 operations have registered their memory %d times", n)
	}
}

// An operation whose device is lost ends, and its memory is not used afterwards. So does one that
// is cancelled, at each time.
func TestMemoryOfGPUsEnds(t *testing.T) {
	g := newGPU(t, fake.Config{DMABuf: true})
	f := soft.New(soft.Config{Seed: 44, Late: 3})
	t.Cleanup(f.Close)
	x, y := g.sides(t, ports{}, f)
	_, _, before := f.Objects()
	o := newOnGPU(t, g, x, y, 1<<20)
	lost := 0
	for turns := 0; turns < 16 || lost == 0; turns++ {
		o.until(g, true)
		id, _ := o.begin(g)
		for range turns {
			if err := x.Turn(); err != nil {
				t.Fatal(err)
			}
		}
		if turns%2 == 0 {
			f.Remove("soft1")
			f.Restore("soft1")
			switch err := x.Await(id, nil); {
			case errors.Is(err, errors.ErrUnsupported):
				lost++
			case err != nil:
				t.Fatalf("a device was lost: %v", err)
			}
			continue
		}
		x.Rma.Cancel(id)
		copy(g.Bytes(o.local), make([]byte, o.local.Len()))
		if err := x.Await(id, nil); err != nil && !errors.Is(err, p2p.ErrCancelled) {
			t.Fatal(err)
		}
	}
	if err := y.Withdraw(o.to); err != nil {
		t.Fatal(err)
	}
	for late := time.Now().Add(linktest.Patience); ; {
		raised(t, x.End, y.End)
		_, _, n := f.Objects()
		if n <= before {
			return
		}
		if time.Now().After(late) {
			t.Fatalf("%d registrations are left of %d", n, before)
		}
	}
}

// A get that was cancelled writes nothing to the memory afterwards.
func TestCancelledGetToGPU(t *testing.T) {
	g := newGPU(t, fake.Config{DMABuf: true})
	f := soft.New(soft.Config{Seed: 45, Late: 3})
	t.Cleanup(f.Close)
	x, y := g.sides(t, ports{}, f)
	o := newOnGPU(t, g, x, y, 1<<20)
	copy(o.there, bytes.Repeat([]byte{1}, len(o.there)))
	cancelled := 0
	for turns := 0; turns < 16 || cancelled == 0; turns++ {
		o.until(g, true)
		id, err := x.Start(func(id uint64) error { return x.Rma.Get(id, o.local, o.to, 0) })
		for range turns {
			err = errors.Join(err, x.Turn())
		}
		if err != nil {
			t.Fatal(err)
		}
		x.Rma.Cancel(id)
		want := pattern(o.local.Len(), 1000+turns)
		copy(g.Bytes(o.local), want)
		switch err := x.Await(id, nil); {
		case errors.Is(err, p2p.ErrCancelled):
			cancelled++
		case err != nil:
			t.Fatal(err)
		}
		for range 200 {
			if err := errors.Join(x.Turn(), y.Turn()); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(g.Bytes(o.local), want) {
			t.Fatal("the memory was written after Cancel")
		}
	}
}
