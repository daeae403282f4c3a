//go:build cgo && linux

package cuda

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/internal/proctest"
	"tutti/mem"
)

// asOwner is set in the environment of a process that owns memory.
const asOwner = "CUDA_TEST_OWNER"

// TestOwner is the other process of TestIPC: it allocates memory, writes handles of it, and does
// what it is told to.
func TestOwner(t *testing.T) {
	if os.Getenv(asOwner) == "" {
		return
	}
	f, v := open(t, fake.Config{NoVMM: true})
	var m mem.Memory
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		var err error
		switch command := in.Text(); command {
		case "allocate":
			if m, err = v.Alloc(10000); err != nil {
				t.Fatal(err)
			}
			copy(f.Bytes(m), pattern(m.Len()))
			h, offset, err := v.ExportIPC(m.Slice(100, 9000))
			if err != nil {
				t.Fatal(err)
			}
			b, err := h.AppendBinary(nil)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Printf("ipc %x %d\n", b, offset)
		case "free":
			if err := v.Free(m); err != nil {
				t.Fatal(err)
			}
			fmt.Println("ipc freed")
		case "read":
			fmt.Printf("ipc %x\n", f.Bytes(m)[100:110])
		default:
			t.Fatalf("command %q", command)
		}
	}
}

func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i * 7)
	}
	return b
}

// owner is a process that owns memory.
type owner struct {
	*proctest.Child
	t *testing.T
}

func startOwner(t *testing.T) *owner {
	t.Helper()
	// TMPDIR is where it leaves its files if it is killed.
	cmd := proctest.Again([]string{asOwner + "=1", "TMPDIR=" + t.TempDir()}, "-test.run=^TestOwner$",
		"-test.timeout=2m")
	return &owner{proctest.RunPiped(t, cmd), t}
}

// ask gives a command and returns the words of the answer.
func (o *owner) ask(command string) []string {
	o.t.Helper()
	o.Tell(command)
	for {
		if words := strings.Fields(o.Hear()); len(words) > 1 && words[0] == "ipc" {
			return words[1:]
		}
	}
}

// allocate has the process allocate memory. It returns a handle of 9000 bytes, and where they
// begin.
func (o *owner) allocate() (h IPCHandle, offset uint64) {
	o.t.Helper()
	words := o.ask("allocate")
	b, err := hex.DecodeString(words[0])
	if err == nil {
		err = h.UnmarshalBinary(b)
	}
	if err == nil {
		_, err = fmt.Sscan(words[1], &offset)
	}
	if err != nil {
		o.t.Fatal(err)
	}
	return h, offset
}

// TestIPC: a process reads and writes the memory of another one, until that withdraws it or is
// gone; then nothing is left of it.
func TestIPC(t *testing.T) {
	f, v := open(t, fake.Config{})
	o := startOwner(t)
	h, offset := o.allocate()
	s, err := v.Stream()
	if err != nil {
		t.Fatal(err)
	}
	local, err := v.Alloc(9000)
	if err != nil {
		t.Fatal(err)
	}
	read := func(i *Import) []byte {
		t.Helper()
		m, err := i.Memory(offset, 9000)
		if err != nil {
			t.Fatal(err)
		}
		clear(f.Bytes(local))
		if err := errors.Join(s.Copy(local, m), wait(s)); err != nil {
			t.Fatal(err)
		}
		return f.Bytes(local)
	}
	take := func(h IPCHandle) *Import {
		t.Helper()
		i, err := v.ImportIPC(1, h)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	imported := func(n int) {
		t.Helper()
		if got := f.Census().Imported; got != n {
			t.Errorf("%d allocations are mapped, want %d", got, n)
		}
	}
	one, two := take(h), take(h)
	imported(1)
	if n := f.Calls()["cuIpcOpenMemHandle_v2"]; n != 1 {
		t.Errorf("%d openings", n)
	}
	if !bytes.Equal(read(one), pattern(10000)[100:9100]) || !bytes.Equal(read(two), pattern(10000)[100:9100]) {
		t.Error("other bytes were read")
	}
	m, err := two.Memory(offset, 10)
	if err != nil {
		t.Fatal(err)
	}
	copy(f.Bytes(local), "0123456789")
	if err := errors.Join(s.Copy(m, local.Slice(0, 10)), wait(s)); err != nil {
		t.Fatal(err)
	}
	if got := o.ask("read")[0]; got != hex.EncodeToString([]byte("0123456789")) {
		t.Errorf("the owner reads %s", got)
	}
	if err := errors.Join(one.Release(), two.Release()); err != nil {
		t.Fatal(err)
	}
	imported(0)

	// The owner withdraws, frees and allocates again.
	one = take(h)
	v.WithdrawIPC(1, h)
	imported(1)
	if err := one.Release(); err != nil {
		t.Fatal(err)
	}
	imported(0)
	o.ask("free")
	if _, err := v.ImportIPC(1, h); err == nil {
		t.Error("memory that was freed was mapped")
	}
	again, at := o.allocate()
	if again == h || at != offset {
		t.Error("another allocation has the same handle")
	}
	one = take(again)
	if !bytes.Equal(read(one), pattern(10000)[100:9100]) {
		t.Error("other bytes were read")
	}

	// The owner dies.
	o.Kill()
	if !bytes.Equal(read(one), pattern(10000)[100:9100]) {
		t.Error("what is mapped has changed")
	}
	v.ForgetIPC(1)
	imported(1)
	if err := one.Release(); err != nil {
		t.Fatal(err)
	}
	imported(0)
	if _, err := v.ImportIPC(2, again); err == nil {
		t.Error("memory of a process that is gone was mapped")
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
}

// TestIPCRefuses: handles that name nothing, or less than they say, and calls that fail, leave
// nothing behind. The cleanup of open checks that; what is still mapped then is unmapped by Close.
func TestIPCRefuses(t *testing.T) {
	f, v := open(t, fake.Config{NoVMM: true})
	own, err := v.Alloc(1000)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := v.ExportIPC(mem.Host(make([]byte, 8), mem.Anywhere)); !errors.Is(err, device.ErrMemory) {
		t.Errorf("host memory: %v", err)
	}
	if _, _, err := v.ExportIPC(own.Slice(0, 0)); !errors.Is(err, device.ErrMemory) {
		t.Errorf("no memory: %v", err)
	}
	if _, _, err := v.ExportIPC(mem.Device(own.Address()+ipcBlock-100, 200, v.Location())); !errors.Is(err,
		device.ErrMemory) {
		t.Errorf("more than there is: %v", err)
	}
	h, offset, err := v.ExportIPC(own.Slice(10, 20))
	if err != nil || offset != 10 || h.Base != own.Address() || h.Size != ipcBlock || h.Number == 0 {
		t.Fatalf("%+v at %d, %v", h, offset, err)
	}
	if _, err := v.ImportIPC(1, h); err == nil {
		t.Error("a process has mapped its own memory")
	}
	for call, unsupported := range map[string]bool{"cuMemGetAddressRange_v2": false, "cuPointerGetAttribute": false,
		"cuIpcGetMemHandle": true} {
		f.Fail(call, 1, fake.NotSupported)
		_, _, err := v.ExportIPC(own)
		if _, ok := errors.AsType[*Error](err); !ok || errors.Is(err, errors.ErrUnsupported) != unsupported {
			t.Errorf("%s fails: %v", call, err)
		}
	}
	o := startOwner(t)
	theirs, _ := o.allocate()
	large, garbage := theirs, theirs
	large.Size = 2 * ipcBlock
	garbage.Driver[0]++
	if _, err := v.ImportIPC(1, large); !errors.Is(err, device.ErrMemory) {
		t.Errorf("a handle that says too much: %v", err)
	}
	if _, err := v.ImportIPC(1, garbage); err == nil {
		t.Error("a handle that is none was mapped")
	}
	for _, call := range []string{"cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"} {
		f.Fail(call, 1, fake.OutOfMemory)
		if _, err := v.ImportIPC(1, theirs); err == nil {
			t.Errorf("%s fails: no error", call)
		}
		f.Until(t, call+" fails, and nothing is mapped", func(n fake.Census) bool { return n.Imported == 0 })
	}
	f.Fail("cuIpcOpenMemHandle_v2", 1, fake.AlreadyMapped)
	if _, err := v.ImportIPC(1, theirs); !errors.Is(err, device.ErrLater) {
		t.Errorf("a block that is mapped already: %v", err)
	}
	i, err := v.ImportIPC(1, theirs)
	if err != nil {
		t.Fatal(err)
	}
	f.Fail("cuIpcCloseMemHandle", 1, fake.OutOfMemory)
	if err := i.Release(); err == nil {
		t.Error("a failed unmapping is no error")
	}
	if _, err := v.ImportIPC(1, theirs); err != nil { // Close unmaps it
		t.Error(err)
	}
}

// Memory of the program that may be in a block with other memory is not shared, because the handle
// would be one of the block.
func TestIPCRefusesPartsOfBlocks(t *testing.T) {
	_, v := open(t, fake.Config{})
	for n, whole := range map[uint64]bool{1000: false, 1 << 20: false, ipcBlock: true, ipcBlock + 512: true,
		10 * ipcBlock: true} {
		at, err := v.gpu.alloc(n)
		must(t, err)
		key, offset, err := v.Share(mem.Device(at+10, 100, v.Location()))
		switch {
		case whole && (err != nil || key[0] != kindIPC || offset != 10):
			t.Errorf("%d bytes: offset %d, %v", n, offset, err)
		case !whole && (!errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "or more")):
			t.Errorf("%d bytes: %v", n, err)
		}
		must(t, v.gpu.free(at))
	}
}

// Import does not wait for the work on the GPU, which may wait for its caller, when a handle says
// more than there is.
func TestIPCRefusesWithoutWaiting(t *testing.T) {
	f, v := open(t, fake.Config{})
	h, _ := startOwner(t).allocate()
	h.Size = 2 * ipcBlock
	s, word := newStreamOf(t, v), wordsOf(t, v, 1)[0]
	must(t, s.WaitValue(word, 1))
	refused := make(chan error, 1)
	go func() {
		_, err := v.ImportIPC(1, h)
		refused <- err
	}()
	select {
	case err := <-refused:
		if !errors.Is(err, device.ErrMemory) {
			t.Errorf("a handle that says too much: %v", err)
		}
	case <-time.After(patience):
		t.Error("Import waits for the work on the GPU")
	}
	word.Word(0).Store(1)
	f.Until(t, "it is unmapped", func(n fake.Census) bool { return n.Imported == 0 })
}
