//go:build cgo && linux

package cuda

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/kernels"
	"tutti/mem"
)

// must ends the test if there is an error.
func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func newStreamOf(t *testing.T, v *Device) device.Stream {
	t.Helper()
	s, err := v.Stream()
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

func alloc(t *testing.T, v *Device, n int) mem.Memory {
	t.Helper()
	m, err := v.Alloc(n)
	must(t, err)
	return m
}

func wordsOf(t *testing.T, v *Device, n int) []mem.Memory {
	t.Helper()
	words, free, err := device.Words(v, n)
	must(t, err)
	t.Cleanup(func() { must(t, free()) })
	return words
}

// ordinary returns host memory that is not pinned, and that the race detector does not watch: it
// knows nothing of the order that words make.
func ordinary(t *testing.T, n int) mem.Memory {
	t.Helper()
	size := (n/os.Getpagesize() + 1) * os.Getpagesize()
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	must(t, err)
	t.Cleanup(func() { must(t, unix.Munmap(b)) })
	return mem.Host(b[:n], mem.Anywhere)
}

// A driver is opened by threads that have other contexts, which are current again after each call.
func TestContextsAreRestored(t *testing.T) {
	f, v := open(t, fake.Config{})
	s := newStreamOf(t, v)
	must(t, s.Copy(alloc(t, v, 10), alloc(t, v, 10)), wait(s))
	if n := f.Calls(); n["cuCtxPushCurrent_v2"] == 0 || n["cuCtxPushCurrent_v2"] != n["cuCtxPopCurrent_v2"] {
		t.Errorf("%d contexts were made current, %d were taken away again", n["cuCtxPushCurrent_v2"],
			n["cuCtxPopCurrent_v2"])
	}
}

// Memory of the device cannot be accessed by the host, or a test would not notice that code does.
func TestDeviceMemoryIsNotTheHosts(t *testing.T) {
	_, v := open(t, fake.Config{})
	m := alloc(t, v, 100)
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if recover() == nil {
			t.Error("the host has read memory of the device")
		}
	}()
	at := uintptr(m.Address())
	_ = **(**byte)(unsafe.Pointer(&at))
}

// TestMemoriesInOrder moves data between memories of all kinds, in programs of random copies,
// reductions and waits, which a stream must do in order.
func TestMemoriesInOrder(t *testing.T) {
	for name, c := range ways {
		t.Run(name, func(t *testing.T) {
			f, v := open(t, c)
			r := rand.New(rand.NewPCG(1, 2))
			for _, size := range []int{1, 8, 1000, stagingSize / 2, stagingSize/2 + 1, stagingSize*2 + 5} {
				s := newStreamOf(t, v)
				gate := wordsOf(t, v, 1)[0]
				var cells []mem.Memory
				for i := range 9 {
					switch i % 3 {
					case 0:
						cells = append(cells, alloc(t, v, size))
					case 1:
						m, err := v.AllocHost(size)
						must(t, err)
						cells = append(cells, m)
					case 2:
						cells = append(cells, ordinary(t, size))
					}
				}
				at := func(i int) []byte {
					if i%3 == 0 {
						return f.Bytes(cells[i])
					}
					return cells[i].Bytes()
				}
				want := make([][]byte, len(cells))
				for i := range cells {
					want[i] = bytes.Repeat([]byte{byte(17*i + 1)}, size)
				}
				waits := uint64(1)
				must(t, s.WaitValue(gate, waits)) // the memories are filled
				for range 60 {
					a, b := r.IntN(9), r.IntN(9)
					switch r.IntN(4) {
					case 0:
						a, b = a/3*3, b/3*3
						must(t, s.Reduce(kernels.Sum, kernels.Uint8, cells[a], []mem.Memory{cells[a], cells[b]}, 0))
						want[a] = slices.Clone(want[a])
						for i := range want[a] {
							want[a][i] += want[b][i]
						}
					case 1:
						waits++
						must(t, s.WaitValue(gate, waits))
					default:
						must(t, s.Copy(cells[a], cells[b]))
						want[a] = want[b]
					}
				}
				for i := range cells {
					copy(at(i), bytes.Repeat([]byte{byte(17*i + 1)}, size))
				}
				for i := range waits {
					gate.Word(0).Store(i + 1)
				}
				must(t, wait(s))
				for i := range cells {
					if !bytes.Equal(at(i), want[i]) {
						t.Fatalf("%d bytes: memory %d holds other bytes", size, i)
					}
				}
			}
		})
	}
}

// A copy from ordinary memory reads it when the stream has come to it, one to ordinary memory has
// written it when an event says so; neither makes the caller wait.
func TestOrdinaryMemoryBehindAWord(t *testing.T) {
	_, v := open(t, fake.Config{})
	s, words := newStreamOf(t, v), wordsOf(t, v, 2)
	const n, rounds = stagingSize + 3, 20
	m, in, out := alloc(t, v, n), ordinary(t, n), ordinary(t, n)
	for i := uint64(1); i <= rounds; i++ {
		must(t, s.WaitValue(words[0], i), s.Copy(m, in), s.Copy(out, m), s.WriteValue(words[1], i))
	}
	for i := uint64(1); i <= rounds; i++ {
		copy(in.Bytes(), bytes.Repeat([]byte{byte(i)}, n))
		words[0].Word(0).Store(i)
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		for words[1].Word(0).Load() < i {
			must(t, ctx.Err())
		}
		cancel()
		if !bytes.Equal(out.Bytes(), in.Bytes()) {
			t.Fatalf("round %d: other bytes", i)
		}
	}
}

// A stream that is closed in the middle of copies of ordinary memory touches it no more.
func TestCloseDuringCopies(t *testing.T) {
	f, v := open(t, fake.Config{})
	const n = 4 * stagingSize
	for round := range 20 {
		s, err := v.Stream()
		must(t, err)
		m, in, out := alloc(t, v, n), ordinary(t, n), ordinary(t, n)
		must(t, s.Copy(m, in), s.Copy(out, m), s.Copy(in, out))
		e, err := s.Record()
		must(t, err)
		for range round {
			e.Done()
		}
		must(t, s.Close())
		if err := e.Wait(t.Context()); err != nil && !errors.Is(err, device.ErrClosed) || !e.Done() {
			t.Fatalf("the event: %v", err)
		}
		mine := bytes.Repeat([]byte{byte(round + 1)}, n)
		for _, b := range [][]byte{in.Bytes(), out.Bytes(), f.Bytes(m)} {
			copy(b, mine)
		}
		other := newStreamOf(t, v)
		must(t, wait(other))
		for _, b := range [][]byte{in.Bytes(), out.Bytes(), f.Bytes(m)} {
			if !bytes.Equal(b, mine) {
				t.Fatal("memory was written after Close")
			}
		}
		must(t, v.Free(m))
	}
}

// A word that a stream has waited for may be freed before the stream is closed, whether the stream
// has more to do or not: Close does not store to what is allocated then. Afterwards the word's
// memory is given again.
func TestCloseLeavesFreedWords(t *testing.T) {
	for name, c := range ways {
		for k := range 4 {
			busy, marked := k&1 != 0, k&2 != 0
			t.Run(fmt.Sprintf("%s, busy: %v, marked: %v", name, busy, marked), func(t *testing.T) {
				_, v := open(t, c)
				more, _, err := device.Words(v, 2)
				must(t, err)
				words, free, err := device.Words(v, 1)
				must(t, err)
				s, err := v.Stream()
				must(t, err, s.WaitValue(words[0], 5))
				if marked {
					_, err = s.Record()
				}
				must(t, err, s.WriteValue(more[0], 1))
				if busy {
					must(t, s.WaitValue(more[1], 1))
				}
				words[0].Word(0).Store(5)
				for more[0].Word(0).Load() == 0 {
					runtime.Gosched()
				}
				must(t, free())
				other, freeOther, err := device.Words(v, 1)
				must(t, err, s.Close())
				if n := other[0].Word(0).Load(); n != 0 {
					t.Errorf("Close has stored %d", n)
				}
				must(t, freeOther())
				again := false
				for range 8 { // beside what the stream itself has freed
					w, _, err := device.Words(v, 1)
					must(t, err)
					again = again || &w[0].Bytes()[0] == &words[0].Bytes()[0]
				}
				if !again {
					t.Error("the memory of the word is lost")
				}
			})
		}
	}
}

// Streams that wait for words that are not written are released by Close, and the device works on.
// So are those that an open device has when it is closed.
func TestCloseReleases(t *testing.T) {
	for name, c := range ways {
		t.Run(name, func(t *testing.T) {
			_, v := open(t, c)
			words, _, err := device.Words(v, 3)
			must(t, err)
			var events []device.Event
			for i, w := range words {
				s, err := v.Stream()
				must(t, err, s.WaitValue(w, 7))
				for range 3 * betweenMarkers { // more than are remembered without a marker
					must(t, s.WaitValue(words[(i+1)%3], 9))
				}
				e, err := s.Record()
				must(t, err)
				events = append(events, e)
				if i < 2 {
					must(t, s.Close())
				}
			}
			for i, e := range events[:2] {
				if err := e.Wait(t.Context()); !errors.Is(err, device.ErrClosed) {
					t.Errorf("event %d: %v", i, err)
				}
			}
			s := newStreamOf(t, v)
			must(t, s.Copy(alloc(t, v, 10), alloc(t, v, 10)), wait(s))
			must(t, v.Close(), v.Close())
			if err := events[2].Wait(t.Context()); err != nil && !errors.Is(err, device.ErrClosed) {
				t.Errorf("an event of a device that was closed: %v", err)
			}
			if _, err := v.Stream(); !errors.Is(err, device.ErrClosed) {
				t.Errorf("a stream of a device that was closed: %v", err)
			}
			if _, err := v.Alloc(1); !errors.Is(err, device.ErrClosed) {
				t.Errorf("memory of a device that was closed: %v", err)
			}
			if _, err := v.AllocHost(1); !errors.Is(err, device.ErrClosed) {
				t.Errorf("pinned memory of a device that was closed: %v", err)
			}
		})
	}
}

// Words that the GPU cannot reach or compare are refused.
func TestWordsAreRefused(t *testing.T) {
	_, v := open(t, fake.Config{})
	s, word := newStreamOf(t, v), wordsOf(t, v, 1)[0]
	own, err := v.AllocHost(24)
	must(t, err)
	for what, m := range map[string]mem.Memory{
		"a word of the Go heap": mem.Host(make([]byte, 8), mem.Anywhere),
		"a word that straddles": own.Slice(4, 8),
		"two words":             own.Slice(8, 16),
	} {
		if err := errors.Join(s.WaitValue(m, 1), s.WriteValue(m, 1)); !errors.Is(err, device.ErrMemory) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if s.WaitValue(word, 1<<63) == nil || s.WriteValue(word, 1<<63) == nil {
		t.Error("a value that the GPU takes for a small one was taken")
	}
}

// Pinned memory is disjoint and aligned, and is used again: the same use once more needs nothing
// from the driver.
func TestPinnedMemory(t *testing.T) {
	f, v := open(t, fake.Config{})
	pin(t, v)
	before := f.Calls()["cuMemHostAlloc"]
	pin(t, v)
	if n := f.Calls()["cuMemHostAlloc"] - before; n > 0 {
		t.Errorf("%d more chunks of pinned memory", n)
	}
	if err := v.FreeHost(alloc(t, v, 8)); !errors.Is(err, device.ErrMemory) {
		t.Errorf("freeing memory of the device as the host's: %v", err)
	}
}

// What is freed goes back to the driver beyond what is kept for other blocks, whatever their sizes.
func TestFreePinnedMemoryIsBounded(t *testing.T) {
	f, v := open(t, fake.Config{})
	v.host.most = 4 << 20
	was := f.Census().HostBlocks
	for size := largestBlock * 2; size <= 4<<20; size *= 2 {
		var all []mem.Memory
		for range 4 << 20 / size {
			m, err := v.AllocHost(size)
			must(t, err)
			all = append(all, m)
		}
		for _, m := range all {
			must(t, v.FreeHost(m))
		}
	}
	f.Until(t, "the rest is freed", func(n fake.Census) bool { return n.HostBlocks-was == 4<<20/(largestBlock*2) })
	before := f.Calls()["cuMemHostAlloc"]
	m, err := v.AllocHost(largestBlock * 2)
	must(t, err)
	must(t, v.FreeHost(m))
	if f.Calls()["cuMemHostAlloc"] != before {
		t.Error("nothing was kept")
	}
}

// pin allocates and frees pinned memory.
func pin(t *testing.T, v *Device) {
	r := rand.New(rand.NewPCG(3, 4))
	type piece struct {
		m    mem.Memory
		fill byte
	}
	var all []piece
	check := func(p piece) {
		t.Helper()
		if i := slices.IndexFunc(p.m.Bytes(), func(b byte) bool { return b != p.fill }); i >= 0 {
			t.Fatalf("byte %d of %d belongs to other memory too", i, p.m.Len())
		}
	}
	for i := range 2000 {
		if len(all) > 0 && r.IntN(2) == 0 {
			k := r.IntN(len(all))
			check(all[k])
			must(t, v.FreeHost(all[k].m))
			if err := v.FreeHost(all[k].m); !errors.Is(err, device.ErrMemory) {
				t.Fatalf("freeing twice: %v", err)
			}
			all = slices.Delete(all, k, k+1)
			continue
		}
		n := 1 + r.IntN(1<<(1+r.IntN(19)))
		m, err := v.AllocHost(n)
		must(t, err)
		if a := uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes()))); a%smallestBlock != 0 || m.Len() != n {
			t.Fatalf("%d bytes at %#x, want %d at a multiple of %d", m.Len(), a, n, smallestBlock)
		}
		p := piece{m, byte(i)}
		for k := range m.Bytes() {
			m.Bytes()[k] = p.fill
		}
		all = append(all, p)
	}
	for _, p := range all {
		check(p)
		must(t, v.FreeHost(p.m))
	}
}

// Large blocks have an eighth more than they need at most.
func TestLargeBlocksWasteLittle(t *testing.T) {
	for n := largestBlock + 1; n < 64<<20; n += n/50 + 1 {
		if c := class(n); c < n || c > n+n/8 || class(c) != c {
			t.Errorf("%d bytes take a block of %d", n, c)
		}
	}
}

// FreeHost does not wait for the work on the GPU, which may wait for the caller; nor has it the
// driver free anything, whose other calls may wait until the work has ended.
func TestFreeHostDoesNotWait(t *testing.T) {
	f, v := open(t, fake.Config{LockedFrees: true})
	s, word := newStreamOf(t, v), wordsOf(t, v, 1)[0]
	must(t, s.WaitValue(word, 1))
	raised := make(chan error, 1)
	go func() { raised <- raiseBesideFrees(f, v, word) }()
	select {
	case err := <-raised:
		must(t, err, wait(s))
	case <-time.After(patience):
		t.Error("calls of the driver wait for a stream that waits for them")
		word.Word(0).Store(1)
		<-raised
	}
	if n := f.Calls()["cuMemFreeHost"]; n > 0 {
		t.Errorf("the driver has freed %d chunks", n)
	}
}

// raiseBesideFrees has a stream write a word, after pinned memory was used and freed.
func raiseBesideFrees(f *fake.Driver, v *Device, word mem.Memory) error {
	chunks := 0
	for i := range 3 {
		for _, n := range []int{largestBlock, largestBlock + 1, 1 << 20, 5 << 20} {
			m, err := v.AllocHost(n)
			if err = errors.Join(err, v.FreeHost(m)); err != nil {
				return err
			}
		}
		now := f.Census().HostBlocks
		if i > 0 && now != chunks {
			return fmt.Errorf("%d chunks of pinned memory, and then %d", chunks, now)
		}
		chunks = now
	}
	s, err := v.Stream() // which needs the driver
	if err != nil {
		return err
	}
	return errors.Join(s.WriteValue(word, 1), wait(s))
}

// A stream that waits takes any number of operations without waiting itself, and does them in
// order.
func TestManyOperations(t *testing.T) {
	f, v := open(t, fake.Config{})
	s, words := newStreamOf(t, v), wordsOf(t, v, 2)
	const rounds = 3000
	m, one, in := alloc(t, v, 8), alloc(t, v, 8), ordinary(t, 3*stagingSize)
	large := alloc(t, v, 3*stagingSize)
	clear(f.Bytes(m))
	copy(f.Bytes(one), []byte{1, 0, 0, 0, 0, 0, 0, 0})
	must(t, s.WaitValue(words[0], 1))
	for i := range uint64(rounds) {
		must(t, s.Reduce(kernels.Sum, kernels.Uint64, m, []mem.Memory{m, one}, 0), s.WriteValue(words[1], i+1))
		if i%1000 == 0 {
			must(t, s.Copy(large, in))
		}
	}
	if words[1].Word(0).Load() != 0 {
		t.Error("a stream has passed a word that has not come")
	}
	words[0].Word(0).Store(1)
	must(t, wait(s))
	if n := f.Bytes(m); int(n[0])|int(n[1])<<8 != rounds || words[1].Word(0).Load() != rounds {
		t.Errorf("%d operations: the sum is %v, the word %d", rounds, n, words[1].Word(0).Load())
	}
}

// What a stream holds back when it is closed, or when the driver has refused something, is dropped.
func TestManyOperationsAreDropped(t *testing.T) {
	f, v := open(t, fake.Config{})
	word := wordsOf(t, v, 1)[0]
	m := alloc(t, v, 8)
	for _, fails := range []bool{false, true} {
		s, err := v.Stream()
		must(t, err, s.WaitValue(word, 1))
		if fails {
			f.Fail("cuMemcpyAsync", 700, fake.OutOfMemory)
		}
		for range 2000 {
			must(t, s.Copy(m.Slice(0, 4), m.Slice(4, 4)))
		}
		e, err := s.Record()
		must(t, err)
		if fails {
			word.Word(0).Store(1)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			if x, ok := errors.AsType[*Error](e.Wait(ctx)); !ok || x.Code != fake.OutOfMemory {
				t.Errorf("an event behind a refused operation: %v", x)
			}
			cancel()
		}
		must(t, s.Close())
		if err := e.Wait(t.Context()); err == nil || !fails && !errors.Is(err, device.ErrClosed) {
			t.Errorf("an event of a stream that was closed: %v", err)
		}
		word.Word(0).Store(0)
	}
}

// A device is closed whose streams hold each other up: each is behind words that the others wait
// for.
func TestCloseWithOneQueue(t *testing.T) {
	for name, c := range ways {
		t.Run(name, func(t *testing.T) {
			c.Queues = 1
			_, v := open(t, c)
			words, _, err := device.Words(v, 6)
			must(t, err)
			var events []device.Event
			for i := range words {
				s, err := v.Stream()
				must(t, err, s.WaitValue(words[i], 1), s.WriteValue(words[(i+3)%6], 1))
				e, err := s.Record()
				must(t, err)
				events = append(events, e)
			}
			must(t, v.Close())
			for _, e := range events {
				if err := e.Wait(t.Context()); err != nil && !errors.Is(err, device.ErrClosed) || !e.Done() {
					t.Errorf("an event: %v", err)
				}
			}
		})
	}
}

// A driver that does not tell how far a stream is, because the program captures another one, is
// asked again: the stream has neither failed nor ended.
func TestStreamsOutlastCaptures(t *testing.T) {
	f, v := open(t, fake.Config{})
	word := wordsOf(t, v, 1)[0]
	s, err := v.Stream()
	must(t, err, s.WaitValue(word, 1))
	e, err := s.Record()
	must(t, err)
	f.Fail("cuEventQuery", 1, fake.CaptureUnsupported)
	word.Word(0).Store(1)
	if err := e.Wait(t.Context()); err != nil {
		t.Errorf("an event: %v", err)
	}
	s, err = v.Stream()
	must(t, err, s.WaitValue(word, 2))
	f.Fail("cuStreamQuery", 1, fake.CaptureUnsupported)
	if err := s.Close(); err != nil {
		t.Errorf("the end of a stream: %v", err)
	}
	if n := f.Forget(); n > 0 {
		t.Errorf("%d questions were not asked", n)
	}
}

// Close does not wait for the end of a capture, which may be its caller's to end.
func TestCloseDuringCaptures(t *testing.T) {
	f, v := open(t, fake.Config{})
	defer f.Forget()
	for _, code := range []int{fake.CaptureUnsupported, fake.CaptureInvalidated} {
		f.Fail("cuStreamQuery", -1, code)
		synctest.Test(t, func(t *testing.T) {
			s, err := v.Stream()
			must(t, err)
			began := time.Now()
			e, ok := errors.AsType[*Error](s.Close())
			if took := time.Since(began); !ok || e.Code != code || took < captureTime || took > 2*captureTime {
				t.Errorf("after %v: %v", took, e)
			}
		})
		f.Forget()
	}
}

// Close of a stream that has refused work says so if it is not known whether the rest has ended.
func TestCloseTellsThatWorkMayGoOn(t *testing.T) {
	f, v := open(t, fake.Config{})
	s, err := v.Stream()
	must(t, err)
	f.Fail("cuEventCreate", 1, fake.OutOfMemory)
	if _, err := s.Record(); err == nil {
		t.Fatal("the stream has made an event without memory")
	}
	f.Fail("cuStreamQuery", 1, fake.OutOfMemory)
	if err := s.Close(); err == nil {
		t.Error("Close ends well, and does not know whether the work has")
	}
	if n := f.Forget(); n > 0 {
		t.Errorf("%d calls did not fail", n)
	}
}
