//go:build cgo && linux

package doctor

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"tutti/device/cuda"
	"tutti/device/cuda/fake"
	"tutti/nvlink/nvlinktest"
)

func TestCUDA(t *testing.T) {
	for name, c := range map[string]struct {
		config fake.Config
		fails  string
		state  State
		detail string
	}{
		"two GPUs": {fake.Config{}, "", Found,
			"CUDA 12.9; cuda:0: fake GPU 0, 1 GiB, compute capability 9.0; cuda:1"},
		"no GPU":          {fake.Config{None: true}, "", Missing, "CUDA 12.9, no GPU"},
		"no operations":   {fake.Config{NoMemoryOps: true}, "", Found, "waits for words by kernels"},
		"no descriptors":  {fake.Config{NoDescriptors: true}, "", Found, "9.0, memory has no descriptors"},
		"an old one":      {fake.Config{Devices: 1, Major: 6}, "", Warning, "compute capability 6.0"},
		"a broken driver": {fake.Config{}, "cuInit", Warning, "CUDA_ERROR_NOT_SUPPORTED"},
		"GPUs without a name": {fake.Config{}, "cuDeviceGetName", Warning,
			"CUDA 12.9, but cuda: ask cuda:0 for its name"},
	} {
		f := fake.New(t, c.config)
		if c.fails != "" {
			f.Fail(c.fails, 1, fake.NotSupported)
		}
		o := cudaDriver(cuda.LoadLibrary(f.Path))
		if o.state != c.state || !strings.Contains(o.detail, c.detail) || (o.advice != "") == (o.state == Found) {
			t.Errorf("%s: %+v; want %s with %q", name, o, c.state, c.detail)
		}
	}
	o := cudaDriver(nil, fmt.Errorf("%w: libcuda.so.1 is not there", cuda.ErrUnavailable))
	if o.state != Missing || !strings.Contains(o.detail, "libcuda.so.1") {
		t.Errorf("no driver: %+v", o)
	}
}

// TestCUDANumbers: CUDA's devices are found among NVML's by their UUIDs or addresses, in whichever
// order.
func TestCUDANumbers(t *testing.T) {
	f := fake.New(t, fake.Config{})
	d, err := cuda.LoadLibrary(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	all, err := d.Devices()
	if err != nil {
		t.Fatal(err)
	}
	s := nvlinktest.CubeMesh()
	s.GPUs[6].UUID, s.GPUs[1].PCI = "GPU-"+all[0].UUID, all[1].PCI
	h := withGPUs(t, s, nil)
	h.CUDA = func() (*cuda.Driver, error) { return d, nil }
	v, err := h.View()
	if err != nil || !slices.Equal(v.CUDA[6], []int{0}) || !slices.Equal(v.CUDA[1], []int{1}) || v.CUDA[0] != nil {
		t.Errorf("%v, %v", v.CUDA, err)
	}
}
