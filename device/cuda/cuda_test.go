//go:build cgo && linux

package cuda

import (
	"testing"

	"tutti/device/cuda/fake"
	"tutti/device/devicetest"
	"tutti/internal/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// start returns a fake driver and a library that is open.
func start(t *testing.T, c fake.Config) (*fake.Driver, *Driver) {
	t.Helper()
	f := fake.New(t, c)
	d, err := LoadLibrary(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	return f, d
}

// open returns the first GPU of a fake driver, and tests in the end that closing it frees
// everything.
func open(t *testing.T, c fake.Config) (*fake.Driver, *Device) {
	t.Helper()
	f, d := start(t, c)
	v, err := d.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := v.Close(); err != nil {
			t.Error(err)
		}
		f.Empty(t)
	})
	return f, v
}

// ways are the two ways to wait for words.
var ways = map[string]fake.Config{"memory operations": {}, "kernels": {NoMemoryOps: true}}

func TestSuite(t *testing.T) {
	for name, c := range ways {
		t.Run(name, func(t *testing.T) {
			devicetest.Suite(t, func(t *testing.T) devicetest.Harness {
				f, v := open(t, c)
				return devicetest.Harness{Device: v, Bytes: f.Bytes}
			})
		})
	}
}
