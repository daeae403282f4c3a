//go:build cgo && linux

package executor

import (
	"sync"
	"testing"

	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/device/devicetest"
)

// gpus are eight GPUs of the fake driver, which all tests share until the process ends.
var gpus struct {
	once   sync.Once
	driver *fake.Driver
	open   []*cuda.Device
	err    error
}

func init() {
	devices["cuda"] = func(t *testing.T, rank int, _ uint64) devicetest.Harness {
		gpus.once.Do(func() {
			gpus.driver = fake.New(t, fake.Config{Devices: 8})
			d, err := cuda.LoadLibrary(gpus.driver.Path)
			for i := 0; err == nil && i < 8; i++ {
				var v *cuda.Device
				if v, err = d.Open(i); err == nil {
					gpus.open = append(gpus.open, v)
				}
			}
			gpus.err = err
		})
		if gpus.err != nil {
			t.Fatal(gpus.err)
		}
		return devicetest.Harness{Device: gpus.open[rank], Bytes: gpus.driver.Bytes}
	}
}
