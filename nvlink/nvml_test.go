//go:build cgo && linux

package nvlink

import (
	"errors"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
)

func TestDevicesOfDGX(t *testing.T) {
	server := dgxa100.New()
	server.InitFunc = func() nvml.Return { return nvml.SUCCESS }
	server.ShutdownFunc = func() nvml.Return { return nvml.SUCCESS }
	for _, d := range server.Devices {
		d.(*dgxa100.Device).GetNvLinkStateFunc = func(l int) (nvml.EnableState, nvml.Return) {
			switch {
			case l < 12:
				return nvml.FEATURE_ENABLED, nvml.SUCCESS
			case l == 12:
				return nvml.FEATURE_DISABLED, nvml.SUCCESS
			}
			return 0, nvml.ERROR_INVALID_ARGUMENT
		}
	}
	s, err := devices(server)
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Devices) != 8 || s.Driver == "" || !strings.Contains(s.CUDA, ".") {
		t.Fatalf("got %d devices, driver %q, CUDA %q; want the 8 of a DGX A100", len(s.Devices), s.Driver, s.CUDA)
	}
	seen := map[string]bool{}
	for i, d := range s.Devices {
		if d.Index != i || d.Links != 12 || d.Memory < 39<<30 || !strings.Contains(d.Name, "A100") ||
			len(d.PCI) != len("0000:00:00.0") {
			t.Errorf("device %d: %+v", i, d)
		}
		if seen[d.UUID] {
			t.Errorf("UUID %s twice", d.UUID)
		}
		seen[d.UUID] = true
	}
	if len(server.ShutdownCalls()) != 1 {
		t.Error("the library was not shut down")
	}
}

func TestWithoutDriver(t *testing.T) {
	for ret, want := range map[nvml.Return]string{
		nvml.ERROR_LIBRARY_NOT_FOUND: "libnvidia-ml.so.1", nvml.ERROR_DRIVER_NOT_LOADED: "kernel driver",
		nvml.ERROR_UNKNOWN: "999",
	} {
		_, err := devices(&mock.Interface{InitFunc: func() nvml.Return { return ret }})
		if !errors.Is(err, ErrUnavailable) || !strings.Contains(err.Error(), want) {
			t.Errorf("Init %d: %v; want ErrUnavailable with %q", ret, err, want)
		}
	}
}

// TestThisMachine calls the real library, or finds that there is none, which must not crash.
func TestThisMachine(t *testing.T) {
	s, err := Devices()
	if err != nil && !errors.Is(err, ErrUnavailable) {
		t.Fatal(err)
	}
	t.Logf("%+v, %v", s, err)
}
