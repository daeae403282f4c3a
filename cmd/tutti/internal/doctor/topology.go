package doctor

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tutti/cmd/tutti/internal/topology"
	"tutti/device/cuda"
	"tutti/nvlink"
	"tutti/rdma"
)

func (h *Host) gpus() (nvlink.System, error) {
	if h.GPUs != nil {
		return h.GPUs()
	}
	return nvlink.Read(os.DirFS(filepath.Join("/", h.Root, "sys")))
}

func (h *Host) cuda() (*cuda.Driver, error) {
	if h.CUDA != nil {
		return h.CUDA()
	}
	return cuda.Load()
}

// connections says how the GPUs are connected with each other and with RDMA devices.
func connections(_ context.Context, h *Host) outcome {
	v, err := h.View()
	switch {
	case errors.Is(err, nvlink.ErrUnavailable):
		return missing("no GPU is known", "")
	case err != nil:
		return warn(err.Error(), "look at nvidia-smi and dmesg")
	case len(v.GPUs) == 0:
		return missing("no GPU", "")
	}
	o := found(v.Summary())
	if problems, advice := v.Problems(); len(problems) > 0 {
		o = warn(strings.Join(append([]string{o.detail}, problems...), "; "), strings.Join(advice, "; "))
	}
	o.view = &v
	return o
}

// View returns the GPUs, the RDMA devices that TUTTI_RDMA_DEVICES allows, and the numbers that CUDA
// has for the GPUs. It asks the drivers, like Run. An error that wraps nvlink.ErrUnavailable means
// that there is no driver.
func (h *Host) View() (v topology.View, err error) {
	if v.System, err = h.gpus(); err != nil {
		return v, err
	}
	if f, err := rdma.ParseDevices(rdmaOptions(h).RDMADevices); err == nil { // rdmaDevice says what is wrong
		v.NICs = slices.DeleteFunc(slices.Clone(v.NICs), func(n nvlink.NIC) bool {
			for port := range max(1, len(h.list(filepath.Join(infiniband, n.Name, "ports")))) {
				if f.Allows(rdma.DevicePort{Device: n.Name, Port: port + 1}) {
					return false
				}
			}
			return true
		})
	}
	d, err := h.cuda()
	if err != nil {
		return v, nil
	}
	devices, err := d.Devices()
	if err != nil {
		return v, nil
	}
	v.CUDA = make([][]int, len(v.GPUs))
	for _, i := range devices {
		if spot, ok := v.Find(i.UUID, i.PCI); ok {
			v.CUDA[spot.GPU] = append(v.CUDA[spot.GPU], i.Ordinal)
		}
	}
	return v, nil
}
