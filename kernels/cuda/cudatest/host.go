//go:build cgo && linux

package cudatest

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

struct kernel {
	const char *name;
	size_t params;
	void (*run)(const void *params, unsigned grid, unsigned block, unsigned shared);
};

static const struct kernel *kernels;
static unsigned *workers;

static const char *load(const char *path) {
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (lib == NULL)
		return dlerror();
	kernels = dlsym(lib, "tutti_host_kernels");
	workers = dlsym(lib, "tutti_host_workers");
	return kernels == NULL || workers == NULL ? dlerror() : NULL;
}

static const struct kernel *at(size_t i) { return kernels[i].name == NULL ? NULL : &kernels[i]; }

static void run(const struct kernel *k, const void *params, unsigned grid, unsigned block,
	unsigned shared) {
	k->run(params, grid, block, shared);
}

static void set_workers(unsigned n) { *workers = n; }
*/
import "C"

import (
	"sync"
	"testing"
	"unsafe"

	"tutti/kernels/cuda"
)

// A Host runs launches on the host. Their addresses are those of host memory that the garbage
// collector does not move.
type Host struct {
	kernels map[string]*C.struct_kernel
}

var (
	mu     sync.Mutex
	loaded map[string]*C.struct_kernel
)

// Load compiles and loads the kernels, once in a process, and has this many threads run the blocks
// of a launch.
func Load(tb testing.TB, workers int) *Host {
	tb.Helper()
	mu.Lock()
	defer mu.Unlock()
	if loaded == nil {
		path := C.CString(Build(tb))
		defer C.free(unsafe.Pointer(path))
		if why := C.load(path); why != nil {
			tb.Fatalf("loading the kernels: %s", C.GoString(why))
		}
		loaded = make(map[string]*C.struct_kernel)
		for i := C.size_t(0); C.at(i) != nil; i++ {
			k := C.at(i)
			loaded[C.GoString(k.name)] = k
		}
	}
	C.set_workers(C.uint(workers))
	return &Host{loaded}
}

// TB is what a Host needs of a test; rapid's tests have it too.
type TB interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// Params returns the bytes of the parameter of each kernel, by the kernel's name.
func (h *Host) Params() map[string]int {
	sizes := make(map[string]int)
	for name, k := range h.kernels {
		sizes[name] = int(k.params)
	}
	return sizes
}

// Run runs launches, one after the other, and returns when all have ended.
func (h *Host) Run(tb TB, launches ...cuda.Launch) {
	tb.Helper()
	for _, l := range launches {
		k := h.kernels[l.Function]
		if k == nil || int(k.params) != len(l.Params) {
			tb.Fatalf("there is no kernel %s with a parameter of %d bytes", l.Function, len(l.Params))
		}
		if l.Grid > 0 {
			C.run(k, unsafe.Pointer(&l.Params[0]), C.uint(l.Grid), C.uint(l.Block), C.uint(l.Shared))
		}
	}
}
