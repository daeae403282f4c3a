//go:build cgo && linux

package cuda

import (
	"bytes"
	"errors"
	"testing"

	"tutti/device"
	"tutti/device/cuda/fake"
	"tutti/nvlink"
)

// Keys of this process lead to the memory itself, those of other GPUs only by a path that the
// topology has. A key lasts as long as its allocation.
func TestKeys(t *testing.T) {
	f, v := open(t, fake.Config{})
	system := nvlink.System{}
	v.topology = func() (nvlink.System, error) { return system, nil }
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
	if _, err := s.Memory(9999, 2); !errors.Is(err, device.ErrMemory) {
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
	if _, err := v.Import(1, far); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("memory of a GPU that is not in the topology: %v", err)
	}
	reach := nvlink.Pair{Read: nvlink.Yes, Write: nvlink.Yes}
	system = nvlink.System{GPUs: []nvlink.GPU{{UUID: v.info.UUID}, {Place: nvlink.Place{PCI: other.info.PCI}}},
		Pairs: [][]nvlink.Pair{{{}, reach}, {reach, {}}}}
	if _, err := v.Import(1, far); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("memory of a GPU that the topology does not know by its name: %v", err)
	}
	system.GPUs[1].UUID = other.info.UUID
	for range 2 {
		if _, err := v.Import(1, far); err != nil {
			t.Fatal(err)
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
