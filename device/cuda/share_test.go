//go:build cgo && linux

package cuda

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"tutti/device"
	"tutti/device/cuda/fake"
)

// Keys of this process lead to the memory itself, those of other GPUs too. A key lasts as long as
// its allocation.
func TestKeyLastsAsLongAsAllocation(t *testing.T) {
	for name, c := range map[string]fake.Config{"descriptors": {}, "IPC": {NoVMM: true}} {
		t.Run(name, func(t *testing.T) { keyLasts(t, c) })
	}
}

func keyLasts(t *testing.T, c fake.Config) {
	f, v := open(t, c)
	other, err := v.gpu.d.Open(1)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	m, err := v.Alloc(10000)
	if err != nil {
		t.Fatal(err)
	}
	key, offset, err := v.Share(m.Slice(100, 50))
	if err != nil || offset != 100 || len(key) > device.MaxKey {
		t.Fatalf("offset %d, %d bytes, %v", offset, len(key), err)
	}
	again, _, err := v.Share(m.Slice(0, 1))
	if err != nil || !bytes.Equal(key, again) {
		t.Errorf("another key of the same allocation: %v", err)
	}
	s, err := v.Import(1, key)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := s.Memory(100, 50); err != nil || got != m.Slice(100, 50) {
		t.Errorf("%v, %v, want the memory itself", got, err)
	}
	if _, err := s.Memory(mustDecode(t, key).Size-1, 2); !errors.Is(err, device.ErrMemory) {
		t.Errorf("bytes behind the allocation: %v", err)
	}
	if err := s.Release(true); err != nil {
		t.Error(err)
	}
	theirs, err := other.Alloc(64)
	if err != nil {
		t.Fatal(err)
	}
	far, _, err := other.Share(theirs)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		i, err := v.Import(1, far)
		if err != nil {
			t.Fatal(err)
		}
		if i.Path() != peerAccess || s.Path() != sameGPU {
			t.Errorf("the paths are %q and %q", i.Path(), s.Path())
		}
	}
	if n := f.Calls()["cuIpcOpenMemHandle_v2"]; n != 0 {
		t.Errorf("memory of this process was mapped %d times", n)
	}
	for _, bad := range [][]byte{nil, key[:20], key[:len(key)-1], append(bytes.Clone(key), 0),
		append([]byte{9}, key[1:]...)} {
		if _, err := v.Import(1, bad); !errors.Is(err, device.ErrMemory) {
			t.Errorf("a key of %d bytes: %v", len(bad), err)
		}
	}
	if !v.Lasts(key) || other.Lasts(key[:5]) {
		t.Error("a key does not last, or a part of one does")
	}
	if err := v.Free(m); err != nil {
		t.Fatal(err)
	}
	if v.Lasts(key) {
		t.Error("a key lasts longer than its allocation")
	}
}

// A GPU to whose memory the driver gives no access is told apart from other failures.
func TestKeysOfIsolatedGPUs(t *testing.T) {
	_, v := open(t, fake.Config{Isolated: true})
	other, err := v.gpu.d.Open(1)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	m, err := other.Alloc(64)
	if err != nil {
		t.Fatal(err)
	}
	key, _, err := other.Share(m)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := v.Import(1, key); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("memory of a GPU without access: %v", err)
	}
	if _, err := other.Import(1, key); err != nil {
		t.Errorf("memory of the GPU itself: %v", err)
	}
}

// Memory on a GPU is reached while a Device of it is open in the process.
func TestKeysOfClosedGPUs(t *testing.T) {
	f, v := open(t, fake.Config{NoVMM: true})
	var others [2]*Device
	for i := range others {
		var err error
		others[i], err = v.gpu.d.Open(1)
		must(t, err)
	}
	key, _, err := others[0].Share(alloc(t, others[0], 64))
	must(t, err, others[1].Close())
	_, err = v.Import(1, key)
	must(t, err, others[0].Close())
	if n := f.Census().Contexts; n != 1 {
		t.Errorf("%d contexts are retained, want that of the GPU that is open", n)
	}
	_, err = v.Import(1, key)
	if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "not open") {
		t.Errorf("memory of a GPU that was closed: %v", err)
	}
}
