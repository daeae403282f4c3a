//go:build cgo && linux

package fakegpu

import (
	"testing"

	"tutti/device/cuda"
	"tutti/device/cuda/fake"
)

// Open returns the GPU with a number of a fake driver that is configured by c, and the driver. The
// GPU is closed when the test has ended. The test fails if something is left in it then.
func Open(tb testing.TB, number int, c fake.Config) (*cuda.Device, *fake.Driver) {
	tb.Helper()
	f := fake.New(tb, c)
	driver, err := cuda.LoadLibrary(f.Path)
	if err != nil {
		tb.Fatal(err)
	}
	d, err := driver.Open(number)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := d.Close(); err != nil {
			tb.Error(err)
		}
		f.Empty(tb)
	})
	return d, f
}
