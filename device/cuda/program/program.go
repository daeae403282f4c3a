//go:build cgo && linux

package program

/*
#cgo LDFLAGS: -ldl
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

#define FUNCTIONS(X) \
	X(init, "cuInit", (unsigned)) \
	X(device, "cuDeviceGet", (int *, int)) \
	X(retain, "cuDevicePrimaryCtxRetain", (void **, int)) \
	X(release, "cuDevicePrimaryCtxRelease_v2", (int)) \
	X(push, "cuCtxPushCurrent_v2", (void *)) \
	X(pop, "cuCtxPopCurrent_v2", (void **)) \
	X(stream, "cuStreamCreate", (void **, unsigned)) \
	X(destroy, "cuStreamDestroy_v2", (void *)) \
	X(query, "cuStreamQuery", (void *)) \
	X(mode, "cuThreadExchangeStreamCaptureMode", (int *)) \
	X(begin, "cuStreamBeginCapture_v2", (void *, int)) \
	X(end, "cuStreamEndCapture", (void *, void **)) \
	X(instantiate, "cuGraphInstantiateWithFlags", (void **, void *, unsigned long long)) \
	X(launch, "cuGraphLaunch", (void *, void *)) \
	X(graph_destroy, "cuGraphDestroy", (void *)) \
	X(exec_destroy, "cuGraphExecDestroy", (void *))

typedef struct {
#define FIELD(name, symbol, args) int (*name) args;
	FUNCTIONS(FIELD)
	int number;
	void *context;
} program;

static const char *load(const char *path, program *p)
{
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib)
		return dlerror();
#define TAKE(name, symbol, args) \
	if (!(p->name = (int (*) args)dlsym(lib, symbol))) \
		return dlerror();
	FUNCTIONS(TAKE)
	return NULL;
}

static int use(program *p, int ordinal)
{
	int r = p->init(0);
	r = r ? r : p->device(&p->number, ordinal);
	return r ? r : p->retain(&p->context, p->number);
}

static int unuse(program *p) { return p->release(p->number); }

// IN calls a function in the context. Another thread may be capturing a stream: most functions
// would then fail, and end that capture, unless this thread's mode is RELAXED, 2.
#define IN(call) \
	void *was; \
	int mode = 2, r = p->push(p->context); \
	if (r) \
		return r; \
	p->mode(&mode); \
	r = (call); \
	p->mode(&mode); \
	p->pop(&was); \
	return r

static int stream(program *p, uintptr_t *s) { IN(p->stream((void **)s, 1)); }
static int destroy(program *p, uintptr_t s) { IN(p->destroy((void *)s)); }
static int query(program *p, uintptr_t s) { IN(p->query((void *)s)); }
static int begin(program *p, uintptr_t s) { IN(p->begin((void *)s, 0)); } // GLOBAL, as PyTorch does

static int instantiate(program *p, uintptr_t s, void **graph)
{
	void *recorded;
	int r = p->end((void *)s, &recorded);
	if (r)
		return r;
	r = p->instantiate(graph, recorded, 0);
	p->graph_destroy(recorded);
	return r;
}

static int end(program *p, uintptr_t s, void **graph) { IN(instantiate(p, s, graph)); }
static int launch(program *p, void *graph, uintptr_t s) { IN(p->launch(graph, (void *)s)); }
static int drop(program *p, void *graph) { IN(p->exec_destroy(graph)); }
*/
import "C"

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"
	"unsafe"
)

// A Program uses one GPU. Its methods may be called by any goroutine.
type Program struct{ p *C.program }

// Open is New, and closes the program when the test ends.
func Open(tb testing.TB, path string, ordinal int) *Program {
	tb.Helper()
	p, err := New(path, ordinal)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := p.Close(); err != nil {
			tb.Error(err)
		}
	})
	return p
}

// New opens the driver's library at path, and uses the GPU with a number of the driver's until
// Close.
func New(path string, ordinal int) (*Program, error) {
	p := &Program{(*C.program)(C.calloc(1, C.sizeof_program))}
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	err := error(nil)
	if why := C.load(name, p.p); why != nil {
		err = errors.New(C.GoString(why))
	} else {
		err = failed(C.use(p.p, C.int(ordinal)), "use the GPU")
	}
	if err != nil {
		C.free(unsafe.Pointer(p.p))
		return nil, err
	}
	return p, nil
}

// Close ends the use of the GPU. Streams and graphs of the program have ended.
func (p *Program) Close() error {
	err := failed(C.unuse(p.p), "stop using the GPU")
	C.free(unsafe.Pointer(p.p))
	p.p = nil
	return err
}

func failed(r C.int, what string) error {
	if r == 0 {
		return nil
	}
	return fmt.Errorf("the driver cannot %s: error %d", what, int(r))
}

// Stream makes a stream that does not wait for the default stream.
func (p *Program) Stream() (stream uintptr, err error) {
	var s C.uintptr_t
	r := C.stream(p.p, &s)
	return uintptr(s), failed(r, "make a stream")
}

// Destroy ends a stream.
func (p *Program) Destroy(stream uintptr) error {
	return failed(C.destroy(p.p, C.uintptr_t(stream)), "destroy a stream")
}

// Finish waits until a stream has done its work, at most for limit.
func (p *Program) Finish(stream uintptr, limit time.Duration) error {
	const notReady = 600
	began := time.Now()
	for until := began.Add(limit); ; {
		switch r := C.query(p.p, C.uintptr_t(stream)); {
		case r != notReady:
			return failed(r, "do the work of a stream")
		case time.Now().After(until):
			return errors.New("the stream has not done its work")
		}
		if time.Since(began) > 5*time.Millisecond { // leave the processors to the kernels of the fake
			time.Sleep(50 * time.Microsecond)
		}
		runtime.Gosched()
	}
}

// Graph is work of a stream that was recorded.
type Graph struct {
	p    *Program
	exec unsafe.Pointer
}

// Capture records what f gives a stream. The goroutine keeps its thread meanwhile: the driver ends
// a capture only on the thread that has begun it.
func (p *Program) Capture(stream uintptr, f func() error) (*Graph, error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := failed(C.begin(p.p, C.uintptr_t(stream)), "begin a capture"); err != nil {
		return nil, err
	}
	err := f()
	g := &Graph{p: p}
	return g, errors.Join(err, failed(C.end(p.p, C.uintptr_t(stream), &g.exec), "make a graph"))
}

// Launch gives a stream the work.
func (g *Graph) Launch(stream uintptr) error {
	return failed(C.launch(g.p.p, g.exec, C.uintptr_t(stream)), "launch a graph")
}

// Close frees the graph. It does nothing if Capture has made none.
func (g *Graph) Close() error {
	if g.exec == nil {
		return nil
	}
	return failed(C.drop(g.p.p, g.exec), "free a graph")
}
