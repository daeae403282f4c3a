//go:build cgo && linux

package cuda

import (
	"os"
	"testing"

	"tutti/device/cuda/fake"
	"tutti/kernels"
	"tutti/mem"
)

// While a stream waits for a word, another kernel is launched on it for the first time, and a copy
// is enqueued on a second stream. If the wait is a kernel that is resident, and the driver loads
// kernels when they are launched, the launch waits for the resident kernel and the copy for the
// load: a goroutine that is to write the word after the copy never does. That is so for devices
// that are opened without loading all kernels. Waiting by memory operations avoids it as well.
func TestResidentKernelAndLoading(t *testing.T) {
	for name, c := range map[string]struct {
		preload, operations, eager bool
		hangs                      bool
	}{
		"loaded when launched, waiting by kernels":              {hangs: true},
		"loaded when opened, waiting by kernels":                {preload: true},
		"loaded by the driver at once, waiting by kernels":      {eager: true},
		"loaded when launched, waiting by memory operations":    {operations: true},
		"loaded when opened, waiting by memory operations":      {preload: true, operations: true},
		"loaded by the driver at once, waiting by them as well": {eager: true, operations: true},
	} {
		t.Run(name, func(t *testing.T) {
			if t.Setenv("CUDA_MODULE_LOADING", "LAZY"); c.eager {
				t.Setenv("CUDA_MODULE_LOADING", "EAGER")
			}
			f, d := start(t, fake.Config{NoMemoryOps: !c.operations})
			v, err := d.open("", 0, c.preload, os.Getenv)
			must(t, err)
			t.Cleanup(func() { must(t, v.Close()); f.Empty(t) })
			gate := wordsOf(t, v, 1)[0]
			a, b := newStreamOf(t, v), newStreamOf(t, v)
			x, y := alloc(t, v, 64), alloc(t, v, 64)
			must(t, a.WaitValue(gate, 1))
			defer gate.Word(0).Store(1) // also after a failure
			if !c.operations {
				f.Until(t, "the kernel is resident", func(n fake.Census) bool { return n.Resident == 1 })
			}
			launched, copied := make(chan error, 1), make(chan error, 1)
			go func() { launched <- a.Reduce(kernels.Sum, kernels.Float32, x, []mem.Memory{x, x}, 0) }()
			if c.hangs {
				if !f.Until(t, "the launch waits", func(n fake.Census) bool { return n.Loading == 1 }) {
					return
				}
			} else {
				must(t, <-launched)
			}
			go func() { copied <- b.Copy(y.Slice(0, 8), y.Slice(8, 8)) }()
			if c.hangs {
				if !f.Until(t, "the copy waits for it", func(n fake.Census) bool { return n.Delayed == 1 }) {
					return
				}
				select {
				case err := <-launched:
					t.Errorf("the launch has ended: %v", err)
				case err := <-copied:
					t.Errorf("the copy has been taken: %v", err)
				default:
				}
				gate.Word(0).Store(1)
				must(t, <-launched)
			}
			must(t, <-copied, wait(b))
			if n := f.Census(); !c.hangs && !c.operations && n.Resident != 1 {
				t.Errorf("the copy was done, with %d kernels resident: want the one that waits", n.Resident)
			}
			gate.Word(0).Store(1)
			must(t, wait(a))
		})
	}
}
