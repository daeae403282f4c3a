//go:build cgo && linux

package nvlink

import (
	"fmt"
	"strings"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// Devices lists the machine's GPUs. It asks the driver, which may take a second if no other process
// uses it. An error that wraps ErrUnavailable means that there is no driver; a machine with a
// driver and without GPUs is no error.
func Devices() (System, error) { return devices(nvml.New()) }

func devices(lib nvml.Interface) (s System, err error) {
	if ret := lib.Init(); ret != nvml.SUCCESS {
		return s, fmt.Errorf("%w: %s", ErrUnavailable, explain(ret))
	}
	defer lib.Shutdown()
	if v, ret := lib.SystemGetDriverVersion(); ret == nvml.SUCCESS {
		s.Driver = v
	}
	if v, ret := lib.SystemGetCudaDriverVersion(); ret == nvml.SUCCESS {
		s.CUDA = fmt.Sprintf("%d.%d", v/1000, v%1000/10)
	}
	n, ret := lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return s, fmt.Errorf("count the GPUs: %v", ret)
	}
	for i := range n {
		d, ret := lib.DeviceGetHandleByIndex(i)
		if ret != nvml.SUCCESS {
			return s, fmt.Errorf("GPU %d: %v", i, ret)
		}
		// Unsupported properties stay empty: virtual GPUs and old drivers do not report all of
		// them.
		o := Device{Index: i}
		o.Name, _ = d.GetName()
		o.UUID, _ = d.GetUUID()
		if p, ret := d.GetPciInfo(); ret == nvml.SUCCESS {
			o.PCI = busID(p)
		}
		if m, ret := d.GetMemoryInfo(); ret == nvml.SUCCESS {
			o.Memory = m.Total
		}
		for l := range nvml.NVLINK_MAX_LINKS {
			if up, ret := d.GetNvLinkState(l); ret == nvml.SUCCESS && up == nvml.FEATURE_ENABLED {
				o.Links++
			}
		}
		s.Devices = append(s.Devices, o)
	}
	return s, nil
}

// explain describes a failed Init.
func explain(ret nvml.Return) string {
	switch ret {
	case nvml.ERROR_LIBRARY_NOT_FOUND:
		return "libnvidia-ml.so.1 was not found"
	case nvml.ERROR_DRIVER_NOT_LOADED:
		return "the kernel driver is not loaded"
	case nvml.ERROR_NO_PERMISSION:
		return "no permission to use /dev/nvidiactl"
	case nvml.ERROR_LIB_RM_VERSION_MISMATCH:
		return "libnvidia-ml and the kernel driver have different versions"
	}
	return fmt.Sprintf("its initialisation returned %d", ret)
}

// busID formats the address like the rest of the system, with a domain of four digits.
func busID(p nvml.PciInfo) string {
	return strings.ToLower(fmt.Sprintf("%04x:%02x:%02x.0", p.Domain, p.Bus, p.Device))
}
