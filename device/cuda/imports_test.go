package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"tutti/device"
)

// table is a driver of imports that checks what it is told.
type table struct {
	next  uint64
	live  map[uint64]region // by address
	fails bool
}

var errTable = errors.New("the driver fails")

// closeAll does what closing the device does.
func closeAll(in *imports) error {
	in.stop()
	return in.end(in.close)
}

func (d *table) imports() *imports {
	d.live = map[uint64]region{}
	return newImports("cuda:0",
		func(r region) (uint64, error) {
			if d.fails {
				return 0, errTable
			}
			d.next += 1 << 20
			d.live[d.next] = r
			return d.next, nil
		},
		func(r region, at uint64) error {
			if d.live[at] != r {
				return fmt.Errorf("%#x is closed, but not open", at)
			}
			delete(d.live, at)
			if d.fails {
				return errTable
			}
			return nil
		}, free)
}

func free() bool { return false }

func handle(number, base, size uint64) region {
	return region{kind: kindIPC,
		IPCHandle: IPCHandle{Driver: [64]byte{byte(number)}, Number: number, Base: base, Size: size}}
}

// TestImports: an allocation is mapped once, and while it is used, also if its owner withdraws it
// or is gone.
func TestImports(t *testing.T) {
	var d table
	in := d.imports()
	take := func(owner uint64, h region) *Import {
		t.Helper()
		i, err := in.take(owner, h)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	mapped := func(what string, n int) {
		t.Helper()
		if len(d.live) != n {
			t.Errorf("%s: %d mappings, want %d", what, len(d.live), n)
		}
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
	}
	a := handle(1, 4096, 100)
	one, two := take(7, a), take(7, a)
	mapped("one allocation", 1)
	m, err := one.Memory(90, 10)
	if other, oerr := two.Memory(90, 10); err != nil || oerr != nil || other != m || m.Len() != 10 ||
		m.Loc() != "cuda:0" {
		t.Errorf("%v, %v; %v, %v", m, err, other, oerr)
	}
	for _, bad := range [][2]int{{91, 10}, {101, 0}, {0, 101}, {-1, 1}, {0, -1}} {
		if m, err := one.Memory(uint64(bad[0]), bad[1]); !errors.Is(err, device.ErrMemory) {
			t.Errorf("%v: %v, %v", bad, m, err)
		}
	}
	must(one.Release())
	must(one.Release())
	must(two.Release())
	mapped("not in use", 0)
	one = take(7, a)
	mapped("used again", 1)
	other := take(8, a)
	mapped("another owner's", 2)
	in.forget(func(k importKey) bool { return k.owner == 7 })
	mapped("its owner is gone, but it is used", 2)
	must(one.Release())
	mapped("not used any more", 1)
	b := handle(2, 4090, 7)
	// The first one must have been freed, to have memory at the same place.
	if _, err := in.take(8, b); !errors.Is(err, device.ErrLater) {
		t.Errorf("the first one is still used: %v, want %v", err, device.ErrLater)
	}
	mapped("the first one is still used", 1)
	must(other.Release())
	third := take(8, b)
	mapped("and now it is not", 1)
	in.forget(func(k importKey) bool { return k.owner == 8 && k.region == b })
	mapped("withdrawn, but used", 1)
	must(take(8, b).Release())
	mapped("another mapping", 1)
	must(third.Release())
	mapped("withdrawn", 0)
	d.fails = true
	if _, err := in.take(8, b); !errors.Is(err, errTable) {
		t.Error(err)
	}
	d.fails = false
	third = take(8, b)
	take(9, handle(3, 8192, 100))
	d.fails = true
	in.forget(func(k importKey) bool { return k.owner == 9 || k.owner == 8 })
	if err := third.Release(); !errors.Is(err, errTable) || !errors.Is(third.Release(), errTable) {
		t.Error(err)
	}
	d.fails = false
	must(closeAll(in))
	mapped("the end", 0)
	if _, err := in.take(8, b); !errors.Is(err, device.ErrClosed) {
		t.Error(err)
	}
	for _, h := range []region{{}, handle(1, 1<<63, 1<<63), handle(1, 0, 1<<63)} {
		if _, err := d.imports().take(1, h); !errors.Is(err, device.ErrMemory) {
			t.Errorf("%+v: %v", h, err)
		}
	}
}

// TestAnyImports: in any order of calls, what is used is mapped, and nothing else. Memory at the
// place of what is used waits.
func TestAnyImports(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var d table
		in := d.imports()
		in.held = func() bool { return true } // take waits for nothing
		type use struct {
			*Import
			h region
		}
		var uses []use
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			owner := uint64(rapid.IntRange(0, 1).Draw(t, "owner"))
			n := uint64(rapid.IntRange(1, 4).Draw(t, "handle"))
			h := handle(n, n/2*100, 100)
			switch rapid.IntRange(0, 5).Draw(t, "what") {
			case 0, 1:
				i, err := in.take(owner, h)
				if slices.ContainsFunc(uses, func(u use) bool { return u.h != h && u.h.Base == h.Base }) {
					if !errors.Is(err, device.ErrLater) {
						t.Fatalf("memory at the place of other: %v, want %v", err, device.ErrLater)
					}
					continue
				}
				if err != nil {
					t.Fatal(err)
				}
				uses = append(uses, use{i, h})
			case 2, 3:
				if len(uses) > 0 {
					k := rapid.IntRange(0, len(uses)-1).Draw(t, "which")
					if err := uses[k].Release(); err != nil {
						t.Fatal(err)
					}
					uses = slices.Delete(uses, k, k+1)
				}
			case 4:
				in.forget(func(k importKey) bool { return k.owner == owner })
			case 5:
				in.forget(func(k importKey) bool { return k.owner == owner && k.region == h })
			}
			for _, u := range uses {
				m, err := u.Memory(0, 100)
				if err != nil || d.live[m.Address()] != u.h {
					t.Fatalf("%v is used and not mapped: %v", u.h, err)
				}
			}
		}
		for _, u := range uses {
			if err := u.Release(); err != nil {
				t.Fatal(err)
			}
		}
		if len(in.dying)+len(in.mapped)+len(in.closing) != 0 || len(d.live) != 0 {
			t.Fatalf("%d mappings, %d known, %d dying", len(d.live), len(in.mapped), len(in.dying))
		}
		if err := closeAll(in); err != nil || len(d.live) != 0 {
			t.Fatalf("%v, %d left", err, len(d.live))
		}
	})
}

// TestImportsWhileUnmapping: while the driver unmaps an allocation, others are mapped, and it is
// mapped again; only memory at the same place waits, which has been allocated since.
func TestImportsWhileUnmapping(t *testing.T) {
	began, goes := make(chan struct{}), make(chan struct{})
	next := uint64(0)
	var unmapped atomic.Bool
	in := newImports("cuda:0", func(r region) (uint64, error) {
		if r.Number == 3 && !unmapped.Load() {
			t.Error("memory was mapped before what had been at its place was unmapped")
		}
		next++
		return next, nil
	}, func(_ region, at uint64) error {
		if at == 1 {
			close(began)
			<-goes
			unmapped.Store(true)
		}
		return nil
	}, free)
	take := func(r region) *Import {
		i, err := in.take(7, r)
		if err != nil {
			t.Error(err)
		}
		return i
	}
	one := take(handle(1, 4096, 100))
	released := make(chan error)
	go func() { released <- one.Release() }()
	<-began
	if err := take(handle(1, 4096, 100)).Release(); err != nil {
		t.Error(err)
	}
	all := []*Import{take(handle(2, 8192, 100))}
	other := handle(0, 4100, 100) // a descriptor, which is mapped elsewhere
	other.kind = kindDescriptor
	all = append(all, take(other))
	taken := make(chan *Import)
	go func() { taken <- take(handle(3, 4100, 100)) }()
	close(goes)
	if err := <-released; err != nil {
		t.Error(err)
	}
	for _, i := range append(all, <-taken) {
		if err := i.Release(); err != nil {
			t.Error(err)
		}
	}
	if err := closeAll(in); err != nil || len(in.mapped)+len(in.dying)+len(in.closing) != 0 {
		t.Errorf("%v, %d mappings are left", err, len(in.mapped)+len(in.dying)+len(in.closing))
	}
}

// TestImportGivesUp: memory at the place of what the driver does not unmap is refused for now, so
// that an operation for which the GPU waits goes on without it: at once if the GPU is known to wait
// for operations.
func TestImportGivesUp(t *testing.T) {
	for _, held := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			goes := make(chan struct{})
			in := newImports("cuda:0", func(region) (uint64, error) { return 1, nil },
				func(region, uint64) error { <-goes; return nil }, func() bool { return held })
			one, err := in.take(7, handle(1, 4096, 100))
			if err != nil {
				t.Fatal(err)
			}
			released := make(chan error)
			go func() { released <- one.Release() }()
			synctest.Wait()
			began := time.Now()
			if _, err := in.take(7, handle(2, 4096, 100)); !errors.Is(err, device.ErrLater) {
				t.Errorf("%v, want %v", err, device.ErrLater)
			}
			if took := time.Since(began); held != (took == 0) {
				t.Errorf("it took %v", took)
			}
			close(goes)
			if err := <-released; err != nil {
				t.Error(err)
			}
			two, err := in.take(7, handle(2, 4096, 100))
			if err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(two.Release(), closeAll(in)); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestImportWaitsForUses: memory at the place of what its process has freed is not opened while a
// use of that remains, whichever rank of the process and whichever group it is of. The driver would
// return the mapping of what was freed.
func TestImportWaitsForUses(t *testing.T) {
	x, y := handle(1, 4096, 100), handle(2, 4096, 50)
	far := y
	far.process++
	for name, owners := range map[string][2]uint64{"one rank": {7, 7}, "two ranks of a process": {7, 8}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var d table
				in := d.imports()
				take := func(owner uint64, r region) *Import {
					t.Helper()
					i, err := in.take(owner, r)
					if err != nil {
						t.Fatal(err)
					}
					return i
				}
				must := func(errs ...error) {
					t.Helper()
					if err := errors.Join(errs...); err != nil {
						t.Fatal(err)
					}
				}
				refused := func(limit time.Duration) {
					t.Helper()
					began, n := time.Now(), len(d.live)
					if _, err := in.take(owners[1], y); !errors.Is(err, device.ErrLater) {
						t.Fatalf("%v, want %v", err, device.ErrLater)
					}
					if took := time.Since(began); took != limit {
						t.Errorf("it took %v, want %v", took, limit)
					}
					if len(d.live) != n {
						t.Error("it was opened")
					}
				}
				one, two := take(owners[0], x), take(owners[0], x)
				must(one.Release())
				refused(releaseTime)
				refused(0)
				must(take(9, far).Release()) // another process has something else at its addresses
				must(two.Release())
				must(take(owners[1], y).Release())

				// The last use ends meanwhile.
				one = take(owners[0], x)
				time.AfterFunc(releaseTime/2, func() { one.Release() })
				must(take(owners[1], y).Release(), closeAll(in))
			})
		})
	}
}

// TestRefusedImport: what was mapped and is refused stands in the way of memory at its place until
// it is unmapped. Nobody waits for that but end, which returns its error.
func TestRefusedImport(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goes, held := make(chan struct{}), true
		errRefused := errors.New("refused")
		in := newImports("cuda:0", func(r region) (uint64, error) {
			if r.Size > 100 {
				return 1, errRefused
			}
			return 2, nil
		}, func(_ region, at uint64) error {
			if at == 1 {
				<-goes
				return errTable
			}
			return nil
		}, func() bool { return held })
		if _, err := in.take(7, handle(1, 4096, 200)); !errors.Is(err, errRefused) {
			t.Errorf("%v, want %v", err, errRefused)
		}
		if _, err := in.take(7, handle(2, 4096, 100)); !errors.Is(err, device.ErrLater) {
			t.Errorf("%v, want %v", err, device.ErrLater)
		}
		held = false
		time.AfterFunc(unmapTime/2, func() { close(goes) })
		if _, err := in.take(7, handle(2, 4096, 100)); err != nil {
			t.Error(err)
		}
		if err := closeAll(in); !errors.Is(err, errTable) {
			t.Errorf("%v, want %v", err, errTable)
		}
	})
}

func TestHandleEncoding(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := IPCHandle{Number: rapid.Uint64().Draw(t, "number"), Base: rapid.Uint64().Draw(t, "base"),
			Size: rapid.Uint64().Draw(t, "size")}
		copy(h.Driver[:], rapid.SliceOfN(rapid.Byte(), 64, 64).Draw(t, "driver"))
		b, err := h.AppendBinary([]byte("x"))
		if err != nil || b[0] != 'x' {
			t.Fatal(err)
		}
		var back IPCHandle
		if err := back.UnmarshalBinary(b[1:]); err != nil || back != h {
			t.Fatalf("%+v, %v", back, err)
		}
		short := rapid.IntRange(0, len(b)).Draw(t, "length")
		if err := back.UnmarshalBinary(bytes.Repeat([]byte{1}, short)); (err == nil) != (short == len(b)-1) {
			t.Fatalf("%d bytes: %v", short, err)
		}
	})
}
