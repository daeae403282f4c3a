//go:build cgo && linux

package cuda

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/kernels"
	"tutti/mem"
)

// patience bounds waits that end at once unless the test fails.
const patience = 30 * time.Second

// wait waits for all work of a stream.
func wait(s device.Stream) error {
	e, err := s.Record()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return e.Wait(ctx)
}

// use opens a device, uses all of it, and closes it. It returns the first error.
func use(d *Driver) (err error) {
	if _, err := d.Devices(); err != nil {
		return err
	}
	v, err := d.Open(0)
	if err != nil {
		return err
	}
	defer func() { err = first([]error{err, v.Close()}) }()
	words, free, err := device.Words(v, 2)
	if err != nil {
		return err
	}
	const n = stagingSize + 1000
	large, err := v.AllocHost(n)
	if err != nil {
		return err
	}
	var m [2]mem.Memory
	for i := range m {
		if m[i], err = v.Alloc(n); err != nil {
			return err
		}
	}
	if _, _, err := v.Share(m[0]); err != nil {
		return err
	}
	s, err := v.Stream()
	if err != nil {
		return err
	}
	in, out := bytes.Repeat([]byte{3}, n), make([]byte, n)
	for _, f := range []func() error{
		func() error { return s.WaitValue(words[0], 1) },
		func() error { return s.Copy(m[0], mem.Host(in, mem.Anywhere)) },
		func() error { return s.Copy(large, m[0]) },
		func() error { return s.Copy(m[1], large) },
		func() error { return s.Reduce(kernels.Sum, kernels.Uint8, m[0], m[:], 0) },
		func() error { return s.WriteValue(words[1], 1) },
		func() error { return s.Copy(mem.Host(out, mem.Anywhere), m[0]) },
	} {
		if err := f(); err != nil {
			return err
		}
	}
	words[0].Word(0).Store(1)
	if err := wait(s); err != nil {
		return err
	}
	if words[1].Word(0).Load() != 1 || !bytes.Equal(out, bytes.Repeat([]byte{6}, n)) {
		return errors.New("other results")
	}
	if err := usePlaces(v, s, m, words[1]); err != nil {
		return err
	}
	if err := s.WaitValue(words[0], 2); err != nil { // Close has to end that
		return err
	}
	if err := s.Close(); err != nil {
		return err
	}
	for _, f := range []func() error{
		free,
		func() error { return v.FreeHost(large) },
		func() error { return v.Free(m[0]) },
	} {
		if err := f(); err != nil {
			return err
		}
	}
	return nil // Close frees m[1]
}

// usePlaces reserves places of s, and adds m[1] to m[0].
func usePlaces(v *Device, s device.Stream, m [2]mem.Memory, word mem.Memory) error {
	r, err := v.Reserve(s, device.Places{N: 2, Bytes: m[0].Len(), Op: kernels.Sum, DType: kernels.Uint8})
	if err != nil {
		return err
	}
	defer r.Close()
	if err := r.Reduce(kernels.Sum, kernels.Uint8, m[0], m[:], 0); err != nil {
		return err
	}
	if err := r.WriteValue(word, 2); err != nil {
		return err
	}
	if err := wait(r); err != nil {
		return err
	}
	if word.Word(0).Load() != 2 {
		return errors.New("the word was not written")
	}
	if err := r.Close(); err != nil {
		return err
	}
	return wait(s)
}

// Every call of the driver fails once, at every place that makes it. Its error is returned, with
// its name; nothing hangs, and everything is freed.
func TestEveryFailure(t *testing.T) {
	for name, c := range ways {
		t.Run(name, func(t *testing.T) {
			f, d := start(t, c)
			before := f.Calls()
			if err := use(d); err != nil {
				t.Fatal(err)
			}
			f.Empty(t)
			count := f.Calls()
			for call := range count {
				count[call] -= before[call]
			}
			for call, n := range count {
				// A context that cannot be made current cannot be cleaned up either. Nothing
				// depends on what was current before.
				stuck, ignored := call == "cuCtxPushCurrent_v2", call == "cuCtxPopCurrent_v2"
				for k := 1; k <= n; k++ {
					if k > 12 && k <= n-12 || testing.Short() && k%8 != 1 && k != n { // mostly once for each kernel
						continue
					}
					code := 999
					if call == fake.Work {
						code = fake.IllegalAddress
					}
					f, d := f, d
					if stuck {
						f, d = start(t, c)
					}
					f.Fail(call, k, code)
					err := use(d)
					happened := f.Forget() == 0
					e, ok := errors.AsType[*Error](err)
					old := call == "cuDeviceGetAttribute" && (k-1)%11 >= 3 || // a driver that does not know these
						call == "cuDeviceGetUuid_v2" || call == "cuDeviceGetPCIBusId"
					switch {
					case !happened && err != nil, happened && !ok && !ignored && !old:
						t.Fatalf("call %d of %s failed: %v", k, call, err)
					case ok && (e.Code != code || e.Name == "" || e.Doing == "" || !strings.HasPrefix(e.Call, "cu")):
						t.Fatalf("call %d of %s failed: %+v", k, call, e)
					}
					if !stuck && !f.Empty(t) {
						t.Fatalf("call %d of %s failed", k, call)
					}
				}
			}
		})
	}
}

// Work that fails ends its stream: every later call and every event that was not reached returns
// the error, those that were reached do not.
func TestWorkFails(t *testing.T) {
	f, v := open(t, fake.Config{})
	s, err := v.Stream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	m, err := v.Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	reached, err := s.Record()
	if err == nil {
		err = reached.Wait(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	f.Fail(fake.Work, 1, fake.IllegalAddress)
	if err := s.Copy(m.Slice(0, 50), m.Slice(50, 50)); err != nil {
		t.Fatal(err)
	}
	after, err := s.Record()
	known := err == nil // else the work has failed before the call, which the driver refuses
	if known {
		err = after.Wait(t.Context())
	}
	for what, err := range map[string]error{"the event": err, "a copy": s.Copy(m, m), "a record": wait(s)} {
		e, ok := errors.AsType[*Error](err)
		if !ok || e.Name != "CUDA_ERROR_ILLEGAL_ADDRESS" ||
			!strings.Contains(err.Error(), "cannot use this GPU any more") {
			t.Errorf("%s after work that failed: %v", what, err)
		}
	}
	if !reached.Done() || reached.Wait(t.Context()) != nil {
		t.Error("an event that was reached has failed")
	}
	if err := s.Close(); err != nil && known {
		t.Errorf("closing a stream whose failure is known: %v", err)
	}
	// The context is the process's: the code that has opened the device before the failure closes
	// it.
	if err := v.Close(); err == nil {
		t.Error("closing a device whose context has failed returned no error")
	}
}

// A call that was refused is not followed by others, and what was taken before it is done.
func TestCallIsRefused(t *testing.T) {
	f, v := open(t, fake.Config{})
	s, err := v.Stream()
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	m, err := v.Alloc(100)
	if err != nil {
		t.Fatal(err)
	}
	copy(f.Bytes(m), strings.Repeat("ab", 50))
	if err := s.Copy(m.Slice(1, 1), m.Slice(0, 1)); err != nil {
		t.Fatal(err)
	}
	before, err := s.Record()
	if err != nil {
		t.Fatal(err)
	}
	f.Fail("cuMemcpyAsync", 1, fake.OutOfMemory)
	err = s.Copy(m.Slice(3, 1), m.Slice(0, 1))
	if e, ok := errors.AsType[*Error](err); !ok || e.Name != "CUDA_ERROR_OUT_OF_MEMORY" ||
		!strings.Contains(err.Error(), "copy 1 bytes on cuda:0: cuMemcpyAsync") {
		t.Fatalf("a copy that the driver refuses: %v", err)
	}
	if again := s.Copy(m.Slice(5, 1), m.Slice(0, 1)); again != err {
		t.Errorf("the next copy: %v, want %v", again, err)
	}
	if err := before.Wait(t.Context()); err != nil {
		t.Errorf("the event before it: %v", err)
	}
	if got := string(f.Bytes(m)[:6]); got != "aaabab" {
		t.Errorf("the memory has %q", got)
	}
}

// Without a driver, without GPUs, or with ones that do not work, the error says so.
func TestUnavailable(t *testing.T) {
	missing := t.TempDir() + "/libcuda.so.1"
	if _, err := LoadLibrary(missing); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), missing) {
		t.Errorf("a library that is not there: %v", err)
	}
	if _, err := LoadLibrary("libc.so.6"); !errors.Is(err, ErrUnavailable) ||
		!strings.Contains(err.Error(), "has no cu") {
		t.Errorf("a library that is another one: %v", err)
	}
	f := fake.New(t, fake.Config{})
	f.Fail("cuInit", 1, 803)
	if _, err := LoadLibrary(f.Path); !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), "(803)") {
		t.Errorf("a driver of another version than the kernel's: %v", err)
	}
	_, d := start(t, fake.Config{None: true})
	if all, err := d.Devices(); len(all) != 0 || err != nil {
		t.Errorf("a machine without GPUs: %v, %v", all, err)
	}
	_, d = start(t, fake.Config{Devices: 3})
	all, err := d.Devices()
	if major, minor := d.Version(); len(all) != 3 || err != nil || major != 12 || minor != 9 {
		t.Fatalf("CUDA %d.%d, %+v, %v", major, minor, all, err)
	}
	want := Info{Ordinal: 2, Name: "fake GPU 2", UUID: "fafafafa-fafa-fafa-fafa-fafafafafa02", PCI: "0000:1c:00.0",
		Memory: 1 << 30, Major: 9, SMs: 2, MemoryOps: true, Ordered: true, VMM: true}
	if all[2] != want {
		t.Errorf("%+v, want %+v", all[2], want)
	}
	f, d = start(t, fake.Config{})
	f.Fail("cuDeviceGetUuid_v2", 1, fake.NotSupported)
	f.Fail("cuDeviceGetPCIBusId", 2, fake.NotSupported)
	if all, err = d.Devices(); err != nil || all[0].UUID != "" || all[0].PCI == "" || all[1].UUID == "" ||
		all[1].PCI != "" {
		t.Errorf("a driver that does not tell where its GPUs are: %+v, %v", all, err)
	}
	for _, n := range []int{-1, 3} {
		_, err := d.Open(n)
		if e, ok := errors.AsType[*Error](err); !ok || e.Name != "CUDA_ERROR_INVALID_DEVICE" ||
			!strings.Contains(err.Error(), fmt.Sprintf("cuda:%d", n)) {
			t.Errorf("device %d of 3: %v", n, err)
		}
	}
}

// The driver's compiler says why it refuses kernels, and the error has that.
func TestKernelsAreRefused(t *testing.T) {
	f, d := start(t, fake.Config{})
	f.Fail("cuModuleLoadDataEx", 1, 218)
	_, err := d.Open(0)
	if err == nil || !strings.Contains(err.Error(), "CUDA_ERROR_INVALID_PTX") ||
		!strings.Contains(err.Error(), "ptxas fatal") {
		t.Errorf("kernels that the driver refuses: %v", err)
	}
	f.Empty(t)
}
