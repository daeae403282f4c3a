//go:build cgo && linux

package cuda

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/device/cuda/program"
	"tutti/internal/files"
	"tutti/internal/handoff"
	"tutti/internal/proctest"
	"tutti/mem"
)

// asPhysicalOwner is set to the configuration of the driver in a process that owns memory.
const asPhysicalOwner = "CUDA_TEST_PHYSICAL_OWNER"

// physicalBytes is more than a granule, and no multiple of it.
const physicalBytes = 100_000

// An ownerSetup is what a process that owns memory has.
type ownerSetup struct {
	Fake   fake.Config
	Clique string
}

// TestPhysicalOwner is the other process of the tests below. It does what it is told to.
func TestPhysicalOwner(t *testing.T) {
	text := os.Getenv(asPhysicalOwner)
	if text == "" {
		return
	}
	var setup ownerSetup
	must(t, json.Unmarshal([]byte(text), &setup))
	f, d := start(t, setup.Fake)
	v, err := d.OpenIn(setup.Clique, 0)
	must(t, err)
	var m mem.Memory
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch command := in.Text(); command {
		case "allocate":
			m = alloc(t, v, physicalBytes)
			copy(f.Bytes(m), pattern(m.Len()))
			key, offset, err := v.Share(m.Slice(100, 9000))
			must(t, err)
			fmt.Printf("ipc %x %d\n", key, offset)
		case "free":
			must(t, v.Free(m))
			fmt.Println("ipc freed")
		case "read":
			fmt.Printf("ipc %x\n", f.Bytes(m)[100:110])
		case "exports":
			fmt.Println("ipc", f.Calls()["cuMemExportToShareableHandle"])
		case "descriptors":
			n, _ := files.Open()
			fmt.Println("ipc", n)
		default:
			t.Fatalf("command %q", command)
		}
	}
}

func startPhysicalOwner(t *testing.T, setup ownerSetup) *owner {
	t.Helper()
	text, err := json.Marshal(setup)
	must(t, err)
	cmd := proctest.Again([]string{asPhysicalOwner + "=" + string(text), "TMPDIR=" + t.TempDir()},
		"-test.run=^TestPhysicalOwner$", "-test.timeout=2m")
	return &owner{proctest.RunPiped(t, cmd), t}
}

// share has the process allocate memory. It returns a key of it, and where the part begins that it
// has shared.
func (o *owner) share() (key []byte, offset uint64) {
	o.t.Helper()
	words := o.ask("allocate")
	key, err := hex.DecodeString(words[0])
	must(o.t, err)
	_, err = fmt.Sscan(words[1], &offset)
	must(o.t, err)
	return key, offset
}

// A reader looks at memory of another process by a stream.
type reader struct {
	t     *testing.T
	f     *fake.Driver
	s     device.Stream
	local mem.Memory
}

func newReader(t *testing.T, f *fake.Driver, v *Device) *reader {
	t.Helper()
	return &reader{t, f, newStreamOf(t, v), alloc(t, v, 9000)}
}

func (r *reader) read(s device.Shared, offset uint64) []byte {
	r.t.Helper()
	m, err := s.Memory(offset, 9000)
	must(r.t, err)
	clear(r.f.Bytes(r.local))
	must(r.t, errors.Join(r.s.Copy(r.local, m), wait(r.s)))
	return r.f.Bytes(r.local)
}

func (r *reader) sees(s device.Shared, offset uint64) {
	r.t.Helper()
	if !bytes.Equal(r.read(s, offset), pattern(physicalBytes)[100:9100]) {
		r.t.Error("other bytes were read")
	}
}

func kindOf(t *testing.T, v *Device, m mem.Memory) byte {
	t.Helper()
	k, _, err := v.Share(m)
	must(t, err)
	return k[0]
}

// Memory has the handles that its device offers, whatever its size.
func TestKindsOfHandles(t *testing.T) {
	all := [8]int{1, 1}
	for name, c := range map[string]struct {
		fake   fake.Config
		clique string
		kind   byte
	}{
		"descriptors":            {fake.Config{}, "", kindDescriptor},
		"a fabric":               {fake.Config{Cliques: all}, "a", kindFabric},
		"a fabric and no clique": {fake.Config{Cliques: all}, "", kindDescriptor},
		"a clique and no fabric": {fake.Config{}, "a", kindDescriptor},
		"no VMM":                 {fake.Config{NoVMM: true, Cliques: all}, "a", kindIPC},
		"no descriptors":         {fake.Config{NoDescriptors: true, Cliques: all}, "a", kindIPC},
	} {
		t.Run(name, func(t *testing.T) {
			f, d := start(t, c.fake)
			v, err := d.OpenIn(c.clique, 0)
			must(t, err)
			small, large := kindOf(t, v, alloc(t, v, 1000)), kindOf(t, v, alloc(t, v, physicalBytes))
			x, err := v.NewExchange(t.Context(), 0, 2)
			must(t, err)
			inbox, _, err := x.Inbox()
			must(t, err)
			if small != c.kind || large != c.kind || inbox[0] != c.kind {
				t.Errorf("kinds %d, %d and of an inbox %d", small, large, inbox[0])
			}
			must(t, v.Close())
			f.Empty(t)
		})
	}
}

// A finder opens GPUs in the cliques that the program knows of.
func TestFinderKnowsCliques(t *testing.T) {
	_, d := start(t, fake.Config{Devices: 2, Cliques: [8]int{1, 1}})
	finder := &Finder{Driver: func() (*Driver, error) { return d, nil }, Clique: func(i Info) string {
		if i.Ordinal == 0 || i.UUID == "" {
			return ""
		}
		return "a"
	}}
	for ordinal, want := range []byte{kindDescriptor, kindFabric} {
		v, err := finder.Device(ordinal)
		must(t, err)
		if kind := kindOf(t, v, alloc(t, v, physicalBytes)); kind != want {
			t.Errorf("GPU %d: kind %d", ordinal, kind)
		}
	}
	for _, ordinal := range []int{-1, 2} {
		if _, err := finder.Device(ordinal); err == nil {
			t.Errorf("GPU %d is not there, and was opened", ordinal)
		}
	}
	must(t, finder.Close())
}

// A driver that refuses handles when memory is allocated has memory all the same. Other failures
// are returned.
func TestHandlesAreRefused(t *testing.T) {
	f, d := start(t, fake.Config{Cliques: [8]int{1}})
	v, err := d.OpenIn("a", 0)
	must(t, err)
	f.Fail("cuMemCreate", 1, fake.OutOfMemory)
	if _, err := v.Alloc(physicalBytes); err == nil || !strings.Contains(err.Error(), "cuMemCreate") ||
		!strings.Contains(err.Error(), "allocate 131072 bytes") {
		t.Errorf("no memory: %v", err)
	}
	for _, call := range []string{"cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"} {
		f.Fail(call, 1, fake.InvalidValue)
		_, err := v.Alloc(physicalBytes)
		if e, ok := errors.AsType[*Error](err); !ok || e.Call != call || e.Name != "CUDA_ERROR_INVALID_VALUE" {
			t.Errorf("%s fails: %v", call, err)
		}
		if n := f.Census(); n.Physical != 0 || n.Reserved != 0 {
			t.Errorf("%s fails: %+v", call, n)
		}
	}
	if kind := kindOf(t, v, alloc(t, v, physicalBytes)); kind != kindFabric {
		t.Errorf("kind %d", kind)
	}
	f.Fail("cuMemCreate", 1, fake.NotPermitted) // as without the rights for the fabric
	if kind := kindOf(t, v, alloc(t, v, physicalBytes)); kind != kindDescriptor {
		t.Errorf("kind %d without a fabric", kind)
	}
	f.Fail("cuMemCreate", 1, fake.NotSupported)
	m := alloc(t, v, physicalBytes)
	if kind := kindOf(t, v, m); kind != kindIPC {
		t.Errorf("kind %d without descriptors", kind)
	}
	if n := f.Calls()["cuMemCreate"]; kindOf(t, v, alloc(t, v, physicalBytes)) != kindIPC ||
		f.Calls()["cuMemCreate"] != n {
		t.Error("what was refused is tried again")
	}
	must(t, v.Close())
	f.Empty(t)
}

// A process reads and writes the memory of another one, which is mapped once. It stays while it is
// mapped, although its owner has freed it or has died. No descriptor is left in either.
func TestDescriptorsBetweenProcesses(t *testing.T) {
	f, v := open(t, fake.Config{})
	o := startPhysicalOwner(t, ownerSetup{})
	key, offset := o.share()
	theirs := o.ask("descriptors")[0]
	if key[0] != kindDescriptor || offset != 100 {
		t.Fatalf("kind %d, offset %d", key[0], offset)
	}
	r := newReader(t, f, v)
	take := func(key []byte) device.Shared {
		t.Helper()
		s, err := v.Import(1, key)
		must(t, err)
		return s
	}
	imported := func(n int) {
		t.Helper()
		if got := f.Census().Imported; got != n {
			t.Errorf("%d allocations are mapped, want %d", got, n)
		}
	}
	must(t, take(key).Release(true)) // the poller's descriptors are there from now on
	imported(0)
	before, _ := files.Open()
	one, two := take(key), take(key)
	imported(1)
	if n := f.Calls()["cuMemImportFromShareableHandle"]; n != 2 {
		t.Errorf("%d handles were imported", n)
	}
	r.sees(one, offset)
	r.sees(two, offset)
	m, err := two.Memory(offset, 10)
	must(t, err)
	copy(f.Bytes(r.local), "0123456789")
	must(t, errors.Join(r.s.Copy(m, r.local.Slice(0, 10)), wait(r.s)))
	if got := o.ask("read")[0]; got != hex.EncodeToString([]byte("0123456789")) {
		t.Errorf("the owner reads %s", got)
	}
	for late := time.Now().Add(patience); ; { // the owner closes them after it has sent the message
		got := o.ask("descriptors")[0]
		if got == theirs {
			break
		}
		if time.Now().After(late) {
			t.Fatalf("the owner has %s descriptors, %s before", got, theirs)
		}
	}
	must(t, errors.Join(one.Release(false), two.Release(false)))
	imported(0)

	// The owner frees it. What is mapped stays as it was.
	one = take(key)
	o.ask("free")
	if got := r.read(one, offset); !bytes.Equal(got[10:], pattern(physicalBytes)[110:9100]) {
		t.Error("what is mapped has changed")
	}
	must(t, one.Release(true))
	imported(0)
	if _, err := v.Import(1, key); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("memory that was freed: %v", err)
	}
	again, _ := o.share()
	if bytes.Equal(again, key) {
		t.Error("another allocation has the same key")
	}
	more, _ := o.share()
	o.ask("free")
	var refused *handoff.RefusedError
	if _, err := v.Import(1, more); !errors.As(err, &refused) {
		t.Errorf("memory that was freed, of a process that has other memory: %v", err)
	}
	if after, _ := files.Open(); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
	one = take(again)
	r.sees(one, offset)

	// The owner dies.
	o.Kill()
	r.sees(one, offset)
	v.Forget(1)
	imported(1)
	must(t, one.Release(false))
	imported(0)
	if _, err := v.Import(2, again); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("memory of a process that is gone: %v", err)
	}
	if after, _ := files.Open(); after > before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

// Keys that say something else than there is, and calls that fail, leave neither mappings nor
// descriptors behind.
func TestDescriptorsRefuse(t *testing.T) {
	f, v := open(t, fake.Config{})
	o := startPhysicalOwner(t, ownerSetup{})
	b, _ := o.share()
	s, err := v.Import(1, b)
	must(t, err)
	must(t, s.Release(true))
	before, _ := files.Open()
	known := f.Census()
	for name, change := range map[string]func(k *key){
		"a granule too much": func(k *key) { k.Size += 64 << 10 },
		"no whole granules":  func(k *key) { k.Size -= 4096 },
		"too much":           func(k *key) { k.Size = 1 << 60 },
		"nothing":            func(k *key) { k.Size = 0 },
		"beyond all":         func(k *key) { k.Base = 1<<64 - 1 },
		"another token":      func(k *key) { k.token[3]++ },
		"another server":     func(k *key) { k.server++ },
		"a fabric":           func(k *key) { k.kind = kindFabric; k.token[0]++ },
	} {
		k, err := decode(b)
		must(t, err)
		change(&k)
		bad, err := k.encode()
		must(t, err)
		_, err = v.Import(1, bad)
		if k.token == mustDecode(t, b).token && k.server == mustDecode(t, b).server && k.Size != 1<<60 &&
			!errors.Is(err, device.ErrMemory) || err == nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, call := range []string{"cuMemImportFromShareableHandle", "cuMemAddressReserve", "cuMemMap",
		"cuMemSetAccess", "cuMemRelease"} {
		f.Fail(call, 1, fake.OutOfMemory)
		_, err := v.Import(1, b)
		if e, ok := errors.AsType[*Error](err); !ok || e.Call != call || e.Name != "CUDA_ERROR_OUT_OF_MEMORY" {
			t.Errorf("%s fails: %v", call, err)
		}
	}
	if got := f.Census(); got != known {
		t.Errorf("%+v, want %+v", got, known)
	}
	m := alloc(t, v, physicalBytes)
	f.Fail("cuCtxSynchronize", 1, fake.OutOfMemory)
	if err := v.Free(m); err == nil {
		t.Error("cuCtxSynchronize fails: no error")
	}
	for _, call := range []string{"cuMemUnmap", "cuMemAddressFree"} {
		s, err := v.Import(1, b)
		must(t, err)
		f.Fail(call, 1, fake.OutOfMemory)
		if err := s.Release(true); err == nil {
			t.Errorf("%s fails: no error", call)
		}
	}
	if after, _ := files.Open(); after != before {
		t.Errorf("%d descriptors, %d before", after, before)
	}
}

func mustDecode(t *testing.T, b []byte) key {
	t.Helper()
	k, err := decode(b)
	must(t, err)
	return k
}

// Handles of the fabric are used between GPUs of one clique only, and where they do not work the
// descriptor is.
func TestHandlesOfFabricAreForTheClique(t *testing.T) {
	o := startPhysicalOwner(t, ownerSetup{fake.Config{Devices: 3, Cliques: [8]int{1, 1, 2}}, "one"})
	f, d := start(t, fake.Config{Devices: 3, Cliques: [8]int{1, 1, 2}})
	key, offset := o.share()
	if key[0] != kindFabric {
		t.Fatalf("kind %d", key[0])
	}
	exports := 1 // of the handle of the fabric
	for _, c := range []struct {
		name    string
		ordinal int
		clique  string
		fails   bool
		by      int // descriptors
	}{
		{"the same clique", 1, "one", false, 0},
		{"the same GPU", 0, "one", false, 0},
		{"another clique", 2, "two", false, 1},
		{"no clique", 1, "", false, 1},
		{"the same clique, without the rights", 1, "one", true, 1},
		{"a clique that it is not in", 2, "one", false, 1},
	} {
		v, err := d.OpenIn(c.clique, c.ordinal)
		must(t, err)
		if c.fails {
			f.Fail("cuMemImportFromShareableHandle", 1, fake.NotPermitted)
		}
		s, err := v.Import(1, key)
		must(t, err)
		newReader(t, f, v).sees(s, offset)
		must(t, s.Release(false))
		exports += c.by
		if got := o.ask("exports")[0]; got != fmt.Sprint(exports) {
			t.Errorf("%s: %s exports, want %d", c.name, got, exports)
			_, err := fmt.Sscan(got, &exports)
			must(t, err)
		}
		must(t, v.Close())
	}
	f.Empty(t)
}

// A device has no access to memory of another device of its process, or that it has not imported,
// and work on it fails.
func TestAccessOfOtherDevices(t *testing.T) {
	f, v := open(t, fake.Config{})
	other, err := v.gpu.d.Open(1)
	must(t, err)
	t.Cleanup(func() { must(t, other.Close()) })
	theirs, own := alloc(t, other, physicalBytes), alloc(t, v, physicalBytes)
	copy(f.Bytes(theirs), pattern(physicalBytes))
	there := mem.Device(theirs.Address(), theirs.Len(), v.Location())
	err = newStreamOf(t, v).Copy(own, there)
	if e, ok := errors.AsType[*Error](err); !ok || e.Name != "CUDA_ERROR_ILLEGAL_ADDRESS" {
		t.Errorf("memory that was not imported: %v", err)
	}
	key, _, err := other.Share(theirs)
	must(t, err)
	s, err := v.Import(1, key)
	must(t, err)
	if s.Path() != peerAccess {
		t.Errorf("the path is %q", s.Path())
	}
	m, err := s.Memory(0, physicalBytes)
	must(t, err)
	stream := newStreamOf(t, v)
	must(t, errors.Join(stream.Copy(own, m), wait(stream)))
	if !bytes.Equal(f.Bytes(own), pattern(physicalBytes)) {
		t.Error("other bytes were read")
	}
	if n := f.Calls()["cuMemImportFromShareableHandle"]; n != 0 {
		t.Errorf("memory of this process was mapped %d times", n)
	}
	if !other.Lasts(key) || v.Lasts(key) {
		t.Error("a key does not last, or is another device's")
	}
	must(t, other.Free(theirs))
	if other.Lasts(key) {
		t.Error("a key lasts longer than its memory")
	}
	if _, err := v.Import(1, key); !errors.Is(err, device.ErrMemory) {
		t.Errorf("memory of this process that was freed: %v", err)
	}
}

// Memory that was freed stays while a stream of another device of the process may load from it:
// until the use is released, or that device is closed. Nothing is imported again, and the memory is
// the program's no more.
func TestFreedMemoryStaysForOtherDevices(t *testing.T) {
	for _, gpus := range []int{1, 2} {
		for _, end := range []string{"released", "released after its owner was closed", "closed", "closed first"} {
			t.Run(fmt.Sprintf("%d GPUs, %s", gpus, end), func(t *testing.T) {
				f, d := start(t, fake.Config{Devices: 2})
				t.Cleanup(func() { f.Empty(t) })
				v, err := d.Open(0)
				must(t, err)
				owner, err := d.Open(gpus - 1)
				must(t, err)
				theirs, mine := alloc(t, owner, physicalBytes), alloc(t, v, physicalBytes)
				copy(f.Bytes(theirs), pattern(physicalBytes))
				key, _, err := owner.Share(theirs)
				must(t, err)
				one, err := v.Import(1, key)
				must(t, err)
				two, err := v.Import(2, key)
				must(t, err)
				from, err := one.Memory(0, physicalBytes)
				must(t, err)
				if end == "closed first" {
					must(t, v.Close(), one.Release(false))
					if f.Census().Reserved != 1 {
						t.Error("closing a device has unmapped memory that its owner has not freed")
					}
					must(t, owner.Free(theirs), owner.Close())
					return
				}
				must(t, owner.Free(theirs))
				if _, err := v.Import(1, key); !errors.Is(err, device.ErrMemory) || owner.Lasts(key) {
					t.Errorf("memory that was freed lasts: %v", err)
				}
				if end == "released after its owner was closed" {
					must(t, owner.Close())
				}
				s := newStreamOf(t, v)
				must(t, s.Copy(mine, from), wait(s))
				if !bytes.Equal(f.Bytes(mine), pattern(physicalBytes)) {
					t.Error("other bytes were read")
				}
				if end != "closed" {
					must(t, one.Release(true), one.Release(true))
					if f.Census().Reserved != 2 {
						t.Error("the memory was unmapped while it is used")
					}
					must(t, two.Release(true))
					if f.Census().Reserved != 1 {
						t.Error("the last use has not unmapped the memory")
					}
				}
				must(t, v.Close(), owner.Close())
			})
		}
	}
}

// What was allocated by a Device is shared by another one of the same GPU, until it is freed.
func TestAnotherDeviceOfTheGPUShares(t *testing.T) {
	_, v := open(t, fake.Config{})
	again, err := v.gpu.d.Open(0)
	must(t, err)
	t.Cleanup(func() { must(t, again.Close()) })
	m := alloc(t, v, physicalBytes)
	key, offset, err := again.Share(m.Slice(10, 20))
	must(t, err)
	if offset != 10 || key[0] != kindDescriptor || !again.Lasts(key) || !v.Lasts(key) {
		t.Errorf("kind %d at %d", key[0], offset)
	}
	if _, _, err := again.Share(mem.Device(m.Address()+physicalBytes, 1<<20, m.Loc())); !errors.Is(err,
		device.ErrMemory) {
		t.Errorf("more than there is: %v", err)
	}
	s, err := again.Import(1, key)
	must(t, err)
	if got, err := s.Memory(10, 20); err != nil || got != m.Slice(10, 20) {
		t.Errorf("%v, %v", got, err)
	}
	must(t, v.Free(m))
	if again.Lasts(key) {
		t.Error("a key lasts longer than its memory")
	}
}

// A GPU to whose memory the driver gives no access is told apart from other failures, in this
// process and in another one.
func TestDescriptorsOfIsolatedGPUs(t *testing.T) {
	o := startPhysicalOwner(t, ownerSetup{Fake: fake.Config{Isolated: true}})
	theirs, _ := o.share()
	f, d := start(t, fake.Config{Isolated: true})
	var all []*Device
	for i := range 2 {
		v, err := d.Open(i)
		must(t, err)
		all = append(all, v)
	}
	near, _, err := all[0].Share(alloc(t, all[0], physicalBytes))
	must(t, err)
	waiting, err := all[1].Stream() // for something that comes after Import
	must(t, err)
	word, free, err := device.Words(all[1], 1)
	must(t, err)
	must(t, waiting.WaitValue(word[0], 1))
	for _, key := range [][]byte{near, theirs} {
		if _, err := all[1].Import(1, key); !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("memory of a GPU without access: %v", err)
		}
		s, err := all[0].Import(1, key)
		must(t, err)
		must(t, s.Release(false))
	}
	word[0].Word(0).Store(1)
	must(t, waiting.Close())
	must(t, free())
	for _, v := range all {
		must(t, v.Close())
	}
	f.Empty(t)
}

// Any bytes are a key or an error, and a key is what it was made of.
func TestKeyEncoding(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		fill := func(b []byte, name string) {
			copy(b, rapid.SliceOfN(rapid.Byte(), len(b), len(b)).Draw(t, name))
		}
		k := key{name: rapid.StringN(0, 36, 36).Draw(t, "name")}
		k.kind = byte(rapid.IntRange(kindIPC, kindFabric).Draw(t, "kind"))
		k.process = rapid.Uint64().Draw(t, "process")
		k.Base, k.Size = rapid.Uint64().Draw(t, "base"), rapid.Uint64().Draw(t, "size")
		if k.kind != kindDescriptor {
			fill(k.Driver[:], "driver")
		}
		if k.kind == kindIPC {
			k.Number = rapid.Uint64().Draw(t, "number")
		} else {
			k.server = rapid.Uint64().Draw(t, "server")
			fill(k.token[:], "token")
		}
		if k.kind == kindFabric {
			fill(k.clique[:], "clique")
		}
		b, err := k.encode()
		if err != nil || len(b) > device.MaxKey {
			t.Fatalf("%d bytes, %v", len(b), err)
		}
		if back, err := decode(b); err != nil || back != k {
			t.Fatalf("%+v, %v", back, err)
		}
		any := rapid.SliceOfN(rapid.Byte(), 0, 200).Draw(t, "bytes")
		if k, err := decode(any); err == nil {
			if again, err := k.encode(); err != nil || !bytes.Equal(again, any) {
				t.Fatalf("%x became %x, %v", any, again, err)
			}
		}
	})
}

// While the program captures a stream, memory that is freed stays mapped. It is unmapped with what
// is freed afterwards, or when a device of the GPU is closed. What was imported is unmapped at
// once, because no work uses it.
func TestUnmappingDuringCaptures(t *testing.T) {
	f, v := open(t, fake.Config{})
	again, err := v.gpu.d.Open(0)
	must(t, err)
	p := program.Open(t, f.Path, 0)
	q, err := p.Stream()
	must(t, err)
	capture := func(valid bool, f func() error) {
		t.Helper()
		var err error
		g, failed := p.Capture(q, func() error { err = f(); return nil })
		if must(t, err); (failed == nil) != valid {
			t.Errorf("a capture during which memory was unmapped: %v, want valid %v", failed, valid)
		}
		must(t, g.Close())
	}
	mapped := func(what string, imported, reserved int) {
		t.Helper()
		if n := f.Census(); n.Imported != imported || n.Reserved != reserved {
			t.Errorf("%s: %d imports at %d reservations, want %d at %d", what, n.Imported, n.Reserved,
				imported, reserved)
		}
	}
	key, _ := startPhysicalOwner(t, ownerSetup{}).share()
	s, err := v.Import(1, key)
	must(t, err)
	one, two, three := alloc(t, v, physicalBytes), alloc(t, v, physicalBytes), alloc(t, v, physicalBytes)
	four := alloc(t, v, physicalBytes)
	alloc(t, again, physicalBytes)
	capture(true, func() error { return s.Release(true) })
	mapped("released during a capture", 0, 5)
	capture(false, func() error { return v.Free(one) })
	mapped("freed during a capture", 0, 5)
	must(t, v.Free(two))
	mapped("freed after it", 0, 3)
	capture(false, func() error {
		err := again.Close()
		if e, ok := errors.AsType[*Error](err); !ok || e.Code != fake.CaptureUnsupported ||
			!strings.Contains(err.Error(), "end the capture") {
			t.Errorf("closing a device during a capture: %v", err)
		}
		return nil
	})
	mapped("closed during a capture", 0, 3)
	f.Fail("cuCtxSynchronize", 1, fake.CaptureInvalidated)
	must(t, v.Free(three))
	mapped("freed during a capture that has failed", 0, 3)
	f.Fail("cuCtxSynchronize", 1, fake.CaptureImplicit)
	must(t, v.Free(four))
	mapped("freed while a stream that waits for the default one is captured", 0, 3)
	must(t, p.Destroy(q))
}
