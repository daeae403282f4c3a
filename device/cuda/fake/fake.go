//go:build cgo && linux

package fake

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct {
	int contexts, device_blocks, imported, physical, reserved, host_blocks;
	int modules, streams, events, resident, loading, delayed, blocked;
} census;

typedef struct {
	void (*configure)(int, int, int, int, int, int, int, int);
	void (*handles)(int, int, const int *);
	const char *(*kernels)(const char *);
	int (*fail)(const char *, int, int);
	const char *(*calls)(int, int *);
	void *(*bytes)(uint64_t, size_t);
	void (*count)(census *);
	void (*capture)(uintptr_t, int);
} functions;

static const char *load(const char *path, functions *f)
{
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib)
		return dlerror();
	f->configure = dlsym(lib, "fake_configure");
	f->handles = dlsym(lib, "fake_handles");
	f->kernels = dlsym(lib, "fake_kernels");
	f->fail = dlsym(lib, "fake_fail");
	f->calls = dlsym(lib, "fake_calls");
	f->bytes = dlsym(lib, "fake_bytes");
	f->count = dlsym(lib, "fake_census");
	f->capture = dlsym(lib, "fake_capture");
	return f->capture ? NULL : dlerror();
}

static void configure(functions *f, int n, int operations, int major, int queues, int buffers,
		      int ordering, int isolated, int locked)
{
	f->configure(n, operations, major, queues, buffers, ordering, isolated, locked);
}
static void handles(functions *f, int vmm, int descriptors, const int *cliques)
{
	f->handles(vmm, descriptors, cliques);
}
static const char *kernels(functions *f, const char *path) { return f->kernels(path); }
static int fail(functions *f, const char *call, int k, int code) { return f->fail(call, k, code); }
static const char *calls(functions *f, int i, int *n) { return f->calls(i, n); }
static void *bytes(functions *f, uint64_t at, size_t n) { return f->bytes(at, n); }
static void count(functions *f, census *n) { f->count(n); }
static void capture(functions *f, uintptr_t s, int on) { f->capture(s, on); }
*/
import "C"

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unsafe"

	"tutti/internal/compiled"
	"tutti/kernels/cuda/cudatest"
	"tutti/mem"
)

// Driver is a library that was built and loaded.
type Driver struct {
	Path string // of the library, for cuda.LoadLibrary
	f    C.functions
}

// library is the source of the library.
var library = compiled.Source{Variable: "CC", Compiler: "cc", Dir: "device/cuda/fake", Files: "fake.c",
	Args: strings.Fields("-shared -fPIC -pthread -fvisibility=hidden -O1 -g -Wall fake.c -ldl"),
	Name: "libcuda", Suffix: ".so.1"}

// New returns a driver of its own, with the kernels of package kernels/cuda. It stays loaded. The
// test is skipped without a compiler.
func New(tb testing.TB, c Config) *Driver {
	tb.Helper()
	d, err := Load(tb.TempDir(), Files{library.Build(tb), cudatest.Build(tb)}, c)
	if err != nil {
		tb.Fatal(err)
	}
	return d
}

// Make makes the files of drivers, unless they are there already. Without a compiler the error
// wraps compiled.ErrNoCompiler.
func Make(ctx context.Context) (f Files, err error) {
	if f.Library, err = library.Make(ctx); err == nil {
		f.Kernels, err = cudatest.Make(ctx)
	}
	return f, err
}

// Load is New for what is no test, or for processes that a test starts: the driver is a copy of the
// library in dir, which may be removed when package cuda has loaded it, too.
func Load(dir string, from Files, c Config) (*Driver, error) {
	d := &Driver{Path: filepath.Join(dir, "libcuda.so.1")}
	built, err := os.ReadFile(from.Library)
	if err == nil {
		err = os.WriteFile(d.Path, built, 0o755)
	}
	if err != nil {
		return nil, err
	}
	path, kernels := C.CString(d.Path), C.CString(from.Kernels)
	defer C.free(unsafe.Pointer(path))
	defer C.free(unsafe.Pointer(kernels))
	if why := C.load(path, &d.f); why != nil {
		return nil, errors.New(C.GoString(why))
	}
	devices, operations, major := C.int(2), C.int(1), C.int(9)
	if c.Devices > 0 {
		devices = C.int(c.Devices)
	}
	if c.None {
		devices = 0
	}
	if c.NoMemoryOps {
		operations = 0
	}
	if c.Major > 0 {
		major = C.int(c.Major)
	}
	dmaBuf, ordering := C.int(0), C.int(100)
	if c.DMABuf {
		dmaBuf = 1
	}
	if c.Unordered {
		ordering = 0
	}
	isolated := C.int(0)
	if c.Isolated {
		isolated = 1
	}
	locked := C.int(0)
	if c.LockedFrees {
		locked = 1
	}
	C.configure(&d.f, devices, operations, major, C.int(c.Queues), dmaBuf, ordering, isolated, locked)
	vmm, descriptors, cliques := C.int(1), C.int(1), [maxDevices]C.int{}
	if c.NoVMM {
		vmm = 0
	}
	if c.NoDescriptors {
		descriptors = 0
	}
	for i, n := range c.Cliques {
		cliques[i] = C.int(n)
	}
	C.handles(&d.f, vmm, descriptors, &cliques[0])
	if why := C.kernels(&d.f, kernels); why != nil {
		return nil, errors.New(C.GoString(why))
	}
	return d, nil
}

// Fail has the k-th call of a function from now on return an error. k is 1 for the next one, and -1
// for all until Forget.
func (d *Driver) Fail(call string, k, code int) {
	s := C.CString(call)
	defer C.free(unsafe.Pointer(s))
	C.fail(&d.f, s, C.int(k), C.int(code))
}

// Forget forgets the failures that have not happened yet, and returns their number.
func (d *Driver) Forget() int {
	s := C.CString("")
	defer C.free(unsafe.Pointer(s))
	return int(C.fail(&d.f, s, 0, 0))
}

// Calls returns how often each function was called.
func (d *Driver) Calls() map[string]int {
	all := map[string]int{}
	for i := C.int(0); ; i++ {
		var n C.int
		s := C.calls(&d.f, i, &n)
		if s == nil {
			return all
		}
		all[C.GoString(s)] = int(n)
	}
}

// Bytes returns the contents of device memory. It panics if they are not allocated.
func (d *Driver) Bytes(m mem.Memory) []byte {
	if m.Len() == 0 {
		return nil
	}
	p := C.bytes(&d.f, C.uint64_t(m.Address()), C.size_t(m.Len()))
	if p == nil {
		panic("fake: bytes of memory that is not allocated")
	}
	return unsafe.Slice((*byte)(p), m.Len())
}

// Census counts what there is.
func (d *Driver) Census() Census {
	var n C.census
	C.count(&d.f, &n)
	return Census{int(n.contexts), int(n.device_blocks), int(n.imported), int(n.physical), int(n.reserved),
		int(n.host_blocks), int(n.modules), int(n.streams), int(n.events), int(n.resident), int(n.loading),
		int(n.delayed), int(n.blocked)}
}

// Capture begins or ends that the work of a stream goes into a graph.
func (d *Driver) Capture(stream uintptr, on bool) {
	v := C.int(0)
	if on {
		v = 1
	}
	C.capture(&d.f, C.uintptr_t(stream), v)
}

// Until waits until the census fulfils a condition. It fails the test, and returns false, if that
// takes half a minute.
func (d *Driver) Until(tb testing.TB, what string, is func(Census) bool) bool {
	tb.Helper()
	for until := time.Now().Add(30 * time.Second); !is(d.Census()); {
		if time.Now().After(until) {
			tb.Errorf("%s: not within 30 s: %+v", what, d.Census())
			return false
		}
		time.Sleep(100 * time.Microsecond)
	}
	return true
}

// Empty fails the test, and returns false, unless everything that was made has been freed.
func (d *Driver) Empty(tb testing.TB) bool {
	tb.Helper()
	return d.Until(tb, "everything is freed", func(c Census) bool { return c == Census{} })
}
