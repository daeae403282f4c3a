//go:build ignore

// A fake libcuda.so.1, for tests only. It has the functions that package cuda calls, with these
// properties of the real library:
//
//   - Addresses of device memory cannot be accessed by the host: a load or a store is a
//     segmentation fault. The contents are elsewhere (fake_bytes), in a file that takes the place
//     of a DMA buffer, if the test says that there are such buffers.
//   - Streams do their work in order, each in a thread, or in one of a limited number of threads:
//     then a stream that waits holds up others, as in the queues of the hardware. Events, waits for
//     words and writes of words are work of streams.
//   - Kernels are those of the host compilation of package kernels/cuda. Their parameter is scanned
//     for addresses of device memory, which are replaced by those of the contents. So is the memory
//     of a place, when its kernel begins. Their threads run one after the other. A kernel in
//     packets has PACKET_THREADS at most: each waits for those of other ranks, so with one for each
//     packet a call would take a turn of every rank for each packet.
//   - A kernel is loaded when it is launched first, when its attributes are asked for, or by
//     cuFuncLoad; with CUDA_MODULE_LOADING=EAGER together with its module. Loading waits until no
//     kernel runs, and copies that are enqueued meanwhile wait for the load.
//   - A stream that is captured records its kernels, copies and functions of the host into a graph,
//     and refuses other work. A graph is launched any number of times. Meanwhile nothing waits for
//     the context, in any mode of the thread: cuCtxSynchronize fails, and so does the capture. So
//     does every call that the real library may take for unsafe, unless the thread's mode is
//     RELAXED. The thread that has begun a capture ends it.
//   - Functions of the host are work of streams. They may call the library; the real one forbids
//     that.
//   - A stream takes 1024 operations; the calls that give it more wait until it has done some.
//   - Kernels access the memory of another device of the process after cuCtxEnablePeerAccess only.
//   - Freeing waits until all streams of the context have done their work. If the test says so,
//     all other calls wait meanwhile: the real library may hold a lock.
//   - Memory of cuMemAlloc begins at a multiple of 2 MiB, unless it is smaller: then it is a part
//     of such a block. Its IPC handle is one of the block. A process maps a block once, and is told
//     the block where it asks for the allocation.
//   - After work of a stream has failed, every call that concerns the context returns its error.
//   - An IPC handle leads other processes with this library to an allocation: to the file of its
//     contents. The process that has made the handle cannot open it. Memory that is freed while
//     another process has it mapped has other contents from then on; that of a process that is gone
//     stays as it is. A second opening returns the first one's address.
//   - Memory of cuMemCreate has sizes that are multiples of a granule, and no IPC handle. It lives
//     while it has handles, here or in another process, or is mapped. A device accesses a mapping
//     after cuMemSetAccess only: other work on it fails, as on addresses that are only reserved. A
//     descriptor of it is one of the file of its contents. A fabric handle leads to that file, in
//     the same clique. Unmapping does not wait for work.
//
// Copies from and to host memory that is not pinned are refused: the real driver makes the caller
// wait for the stream, which package cuda must not do.
//
// A parameter of 8 bytes that looks like an address of device memory, and is none, is replaced too.
// Functions with the prefix fake_ are the test's. The state is that of the loaded file: copies of
// it in different places are different drivers.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PACKET_THREADS 61
#define EXPORT __attribute__((visibility("default")))

enum { // CUresult
	OK = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	NOT_INITIALIZED = 3,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	INVALID_CONTEXT = 201,
	INVALID_PTX = 218,
	INVALID_HANDLE = 400,
	NOT_FOUND = 500,
	NOT_READY = 600,
	NOT_PERMITTED = 800,
	ILLEGAL_ADDRESS = 700,
	ALREADY_MAPPED = 208,
	PEER_UNSUPPORTED = 217,
	ALREADY_ENABLED = 704,
	LAUNCH_FAILED = 719,
	CAPTURE_UNSUPPORTED = 900,
	CAPTURE_INVALIDATED = 901,
	CAPTURE_IMPLICIT = 906,
	CAPTURE_WRONG_THREAD = 908,
	NOT_SUPPORTED = 801,
};

static const struct {
	int code;
	const char *name, *text;
} errors[] = {
	{OK, "CUDA_SUCCESS", "no error"},
	{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{INVALID_PTX, "CUDA_ERROR_INVALID_PTX", "a PTX JIT compilation failed"},
	{INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	{NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
	{ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	{ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
	{PEER_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
	{ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
	{LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	{NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
	{NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	{CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
	 "operation not permitted when stream is capturing"},
	{CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
	 "operation failed due to a previous error during capture"},
	{CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
	 "operation would make the legacy stream depend on a capturing blocking stream"},
	{CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
	 "attempt to terminate a thread-local capture sequence from another thread"},
};

struct tutti_host_kernel {
	const char *name;
	size_t params;
	void (*run)(const void *params, unsigned grid, unsigned block, unsigned shared);
};

enum { MAX_DEVICES = 8, MAX_FAULTS = 8, MAX_CALLS = 112, MAX_PARAMS = 4096,
       PLACE = 472, // bytes of a place
       BLOCK = 2 << 20 }; // of which cuMemAlloc gives parts

typedef struct shelf { // the addresses of a block
	uintptr_t at;
	size_t used;
	int parts; // that are allocated
} shelf;

typedef struct context {
	int device, references, error; // error: of work that has failed
	int resident, loading;	       // kernels that run; loads that wait for them
	int working, busy;	       // work that streams have not done; of it, what they do now
	int delayed;		       // copies that wait for a load
	int captures;		       // streams that are captured into graphs
	struct stream *standard;       // the default stream, from its first use
	shelf *filled;		       // of which the next parts are
} context;

typedef struct physical { // memory of cuMemCreate, with handles here
	struct physical *next;
	int file, device, types, handles, mappings;
	int imported; // of a handle of another process, or of this one
	size_t n;
} physical;

typedef struct reservation { // addresses
	struct reservation *next;
	uintptr_t at;
	size_t n;
} reservation;

typedef struct block { // memory
	struct block *next;
	context *context;
	uintptr_t at;
	size_t n, mapped;
	unsigned char *contents; // == at for pinned memory
	int file;		 // of the contents; -1 for pinned memory
	uint64_t number;	 // no other block of the process has had it
	int opened;		 // of another process: how often; else 0
	shelf *of_shelf;	 // that it is a part of; else NULL
	int owner;		 // with opened: the process, and where its block is there and the
	uintptr_t owners_block;	 // memory in it
	size_t offset;
	int exported;		 // other processes may have it mapped
	physical *of;		 // what cuMemMap has mapped; else NULL
	unsigned access;	 // to it: a bit for each device
} block;

typedef struct module {
	context *context;
	char *image;
} module;

typedef struct function {
	struct function *next;
	module *module;
	const struct tutti_host_kernel *kernel;
	int loaded;
} function;

typedef struct event {
	context *context;
	uint64_t recorded, reached;
	int pending, destroyed; // pending: streams are to reach it
} event;

enum kind { COPY, KERNEL, WAIT, WRITE, EVENT, HOST };

struct stream;

typedef struct work {
	struct work *next;
	struct stream *stream;
	enum kind kind;
	void *dst, *src;
	size_t n;
	uint64_t *word, value;
	event *event;
	void (*host)(void *);
	const struct tutti_host_kernel *kernel;
	unsigned grid, block, shared;
	int error; // it fails
	_Alignas(16) unsigned char params[];
} work;

typedef struct queue { // of the hardware: what is in it is done in order
	pthread_t thread;
	work *first, **last;
	int streams, ended;
} queue;

typedef struct stream {
	context *context;
	queue *queue;
	int pending, destroyed, capturing;
	long thread; // that has begun to capture it
	struct graph *graph; // that gets its work while it is captured; NULL: the test says that it is
} stream;

typedef struct graph { // work, in the order of a stream
	context *context;
	work *first, **last;
} graph;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed; // anything
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int initialized, devices = 2, memory_operations = 1, capability = 9, queue_limit, dma_buffers, ordering = 100;
static int isolated; // the devices have no access to each other's memory
static int locked_frees, freeing; // calls wait while one frees; one does
static int vmm = 1, descriptors = 1, cliques[MAX_DEVICES]; // of the fabric; 0: none
static queue *shared[64]; // with a limit
static int created; // streams
static context contexts[MAX_DEVICES];
static block *blocks;
static physical *physicals;
static reservation *reservations;
static function *functions;
static void *kernels_library;
static const struct tutti_host_kernel *kernels;
static int modules, queues, events, blocked;
static struct {
	char call[48];
	int in, code;
} faults[MAX_FAULTS];
static struct {
	const char *call;
	int n;
} calls[MAX_CALLS];

static _Thread_local context *stack[16];
static _Thread_local int depth;

static void prepare(void)
{
	pthread_condattr_t a;
	pthread_condattr_init(&a);
	pthread_condattr_setclock(&a, CLOCK_MONOTONIC);
	pthread_cond_init(&changed, &a);
}

static void await(void) { pthread_cond_wait(&changed, &lock); }

// enter counts a call, and returns the error that the test wants of it. With the lock.
static int enter(const char *call)
{
	for (int i = 0; i < MAX_CALLS; i++) {
		if (!calls[i].call)
			calls[i].call = call;
		if (!strcmp(calls[i].call, call)) {
			calls[i].n++;
			break;
		}
	}
	for (int i = 0; i < MAX_FAULTS; i++)
		if (faults[i].in && !strcmp(faults[i].call, call) && (faults[i].in < 0 || --faults[i].in == 0))
			return faults[i].code;
	return OK;
}

// BEGIN takes the lock, which END gives back. Between them result is what the function returns.
#define BEGIN                                                                                             \
	pthread_once(&once, prepare);                                                                     \
	pthread_mutex_lock(&lock);                                                                        \
	while (freeing)                                                                                   \
		await();                                                                                  \
	int result = enter(__func__)
#define END                                                                                               \
	pthread_cond_broadcast(&changed);                                                                 \
	pthread_mutex_unlock(&lock);                                                                      \
	return result
// BEGIN_IN is BEGIN of a function that needs a context, c.
#define BEGIN_IN                                                                                          \
	BEGIN;                                                                                            \
	context *c = depth ? stack[depth - 1] : NULL;                                                     \
	if (!result)                                                                                      \
		result = !c ? INVALID_CONTEXT : c->error

// Whether the context of a device accesses the memory of another's.
static unsigned char peers[MAX_DEVICES][MAX_DEVICES];

static block *find(uintptr_t at, size_t n)
{
	for (block *b = blocks; b; b = b->next)
		if (at >= b->at && at - b->at <= b->n && n <= b->n - (at - b->at))
			return b;
	return NULL;
}

// contents returns where the host finds memory, NULL if it is not allocated.
static void *contents(uintptr_t at, size_t n)
{
	block *b = find(at, n);
	return b ? b->contents + (at - b->at) : NULL;
}

// accesses reports whether work of a context may use memory. Memory of cuMemAlloc on another device
// is told apart by kernels only.
static int accesses(context *c, uintptr_t at, size_t n)
{
	block *b = find(at, n);
	return !b || !b->of || b->access & 1u << c->device;
}

// addresses reserves n bytes of addresses from a multiple of BLOCK on. NULL: there are none.
static void *addresses(size_t n)
{
	char *all = mmap(NULL, n + BLOCK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (all == MAP_FAILED)
		return NULL;
	size_t before = -(uintptr_t)all % BLOCK;
	if (before)
		munmap(all, before);
	munmap(all + before + n, BLOCK - before);
	return all + before;
}

// place finds addresses for memory of a device.
static void *place(block *b, context *c)
{
	if (b->mapped > BLOCK)
		return addresses(b->mapped);
	if (!c->filled || c->filled->used + b->mapped > BLOCK) {
		void *at = addresses(BLOCK);
		if (!at)
			return NULL;
		c->filled = calloc(1, sizeof *c->filled);
		c->filled->at = (uintptr_t)at;
	}
	b->of_shelf = c->filled;
	void *at = (void *)(c->filled->at + c->filled->used);
	c->filled->used += b->mapped;
	c->filled->parts++;
	return at;
}

// leave_place gives the addresses back.
static void leave_place(block *b, context *c)
{
	shelf *s = b->of_shelf;
	if (!s)
		munmap((void *)b->at, b->mapped);
	else if (--s->parts == 0) {
		munmap((void *)s->at, BLOCK);
		if (c->filled == s)
			c->filled = NULL;
		free(s);
	}
}

static block *add(context *c, size_t n, int host)
{
	block *b = calloc(1, sizeof *b);
	b->mapped = (n + 8191) & ~(size_t)4095; // a page more, between allocations
	b->file = host ? -1 : memfd_create("device memory", MFD_CLOEXEC);
	if (!host && (b->file < 0 || ftruncate(b->file, b->mapped))) {
		if (b->file >= 0)
			close(b->file);
		free(b);
		return NULL;
	}
	b->contents = mmap(NULL, b->mapped, PROT_READ | PROT_WRITE,
			   host ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, b->file, 0);
	void *at = b->contents == MAP_FAILED ? NULL : host ? b->contents : place(b, c);
	if (!at) {
		if (b->contents != MAP_FAILED)
			munmap(b->contents, b->mapped);
		if (!host)
			close(b->file);
		free(b);
		return NULL;
	}
	memset(b->contents, 0xA5, n);
	static uint64_t numbers;
	b->number = ++numbers;
	b->context = c, b->at = (uintptr_t)at, b->n = n, b->next = blocks;
	return blocks = b;
}

// The mode of a thread, 0 is GLOBAL and 2 RELAXED; how many streams are captured, in mode GLOBAL;
// and whether a function that is not allowed meanwhile was called.
static _Thread_local int capture_mode;
static int captures, spoilt;

// unsafe returns an error for a function that must not be called while a stream is captured, unless
// the thread's mode is RELAXED. With the lock.
static int unsafe(void)
{
	if (!captures || capture_mode == 2)
		return 0;
	spoilt = 1;
	return CAPTURE_UNSUPPORTED;
}

static int discard(uintptr_t at, context *c, int host)
{
	for (block **p = &blocks; *p; p = &(*p)->next) {
		block *b = *p;
		if (b->at != at || b->context != c || ((uintptr_t)b->contents == at) != host || b->opened || b->of)
			continue;
		if (b->exported)
			memset(b->contents, 0xDD, b->n);
		*p = b->next;
		munmap(b->contents, b->mapped);
		if (!host) {
			leave_place(b, c);
			close(b->file);
		}
		free(b);
		return OK;
	}
	return INVALID_VALUE;
}

// rest waits until a context has no work, or after an error until nothing is under way. With the
// lock.
static void rest(context *c)
{
	while (c->busy > 0 || (c->working > 0 && !c->error))
		await();
}

// rest_to_free is rest of a call that frees memory.
static void rest_to_free(context *c)
{
	freeing = locked_frees;
	rest(c);
	freeing = 0;
}

EXPORT int cuInit(unsigned flags)
{
	BEGIN;
	if (!result)
		result = flags ? INVALID_VALUE : devices ? OK : NO_DEVICE;
	if (!result)
		initialized = 1;
	END;
}

EXPORT int cuDriverGetVersion(int *v)
{
	BEGIN;
	if (!result)
		*v = 12090;
	END;
}

EXPORT int cuGetErrorName(int code, const char **s)
{
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].code == code)
			return *s = errors[i].name, OK;
	return *s = NULL, INVALID_VALUE;
}

EXPORT int cuGetErrorString(int code, const char **s)
{
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].code == code)
			return *s = errors[i].text, OK;
	return *s = NULL, INVALID_VALUE;
}

EXPORT int cuDeviceGetCount(int *n)
{
	BEGIN;
	if (!result)
		result = initialized ? OK : NOT_INITIALIZED;
	if (!result)
		*n = devices;
	END;
}

EXPORT int cuDeviceGet(int *device, int ordinal)
{
	BEGIN;
	if (!result)
		result = !initialized ? NOT_INITIALIZED : ordinal < 0 || ordinal >= devices ? INVALID_DEVICE : OK;
	if (!result)
		*device = ordinal;
	END;
}

EXPORT int cuDeviceGetName(char *name, int n, int device)
{
	BEGIN;
	if (!result)
		snprintf(name, n, "fake GPU %d", device);
	END;
}

EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
	BEGIN;
	if (!result) {
		memset(uuid, 0xfa, 16);
		uuid[15] = device;
	}
	END;
}

EXPORT int cuDeviceGetPCIBusId(char *address, int n, int device)
{
	BEGIN;
	if (!result)
		snprintf(address, n, "0000:%02X:00.0", 0x1A + device);
	END;
}

EXPORT int cuDeviceTotalMem_v2(size_t *n, int device)
{
	BEGIN;
	if (!result)
		result = device < devices ? OK : INVALID_DEVICE;
	if (!result)
		*n = (size_t)1 << 30;
	END;
}

EXPORT int cuDeviceGetAttribute(int *v, int attribute, int device)
{
	BEGIN;
	if (!result)
		result = device < devices ? OK : INVALID_DEVICE;
	if (!result)
		switch (attribute) {
		case 16: // MULTIPROCESSOR_COUNT
			*v = 2;
			break;
		case 75: // COMPUTE_CAPABILITY_MAJOR
			*v = capability;
			break;
		case 76: // COMPUTE_CAPABILITY_MINOR
			*v = 0;
			break;
		case 102: // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
			*v = vmm;
			break;
		case 103: // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
			*v = descriptors;
			break;
		case 110: // GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
			*v = dma_buffers;
			break;
		case 117: // GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
			*v = 1;
			break;
		case 118: // GPU_DIRECT_RDMA_WRITES_ORDERING
			*v = ordering;
			break;
		case 122: // CAN_USE_64_BIT_STREAM_MEM_OPS
			*v = memory_operations;
			break;
		case 124: // DMA_BUF_SUPPORTED
			*v = dma_buffers;
			break;
		case 128: // HANDLE_TYPE_FABRIC_SUPPORTED
			*v = cliques[device] != 0;
			break;
		default:
			result = INVALID_VALUE;
		}
	END;
}

static void leave(stream *s);

EXPORT int cuDevicePrimaryCtxRetain(void **c, int device)
{
	BEGIN;
	if (!result)
		result = device < devices ? OK : INVALID_DEVICE;
	if (!result) {
		contexts[device].device = device;
		contexts[device].references++;
		*c = &contexts[device];
	}
	END;
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
	BEGIN;
	if (!result)
		result = device < devices ? OK : INVALID_DEVICE;
	if (!result)
		*flags = 0, *active = contexts[device].references > 0;
	END;
}

EXPORT int cuCtxEnablePeerAccess(void *peer, unsigned flags)
{
	BEGIN_IN;
	context *p = peer;
	if (!result && (flags || p == c || !p->references))
		result = INVALID_CONTEXT;
	if (!result && isolated)
		result = PEER_UNSUPPORTED;
	if (!result && peers[c->device][p->device])
		result = ALREADY_ENABLED;
	if (!result)
		peers[c->device][p->device] = 1;
	END;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
	BEGIN;
	if (result == OK || contexts[device].references > 0) // what the test wants to fail is done all the same
		contexts[device].references--;
	if (contexts[device].references == 0) {
		rest(&contexts[device]);
		if (contexts[device].standard) {
			contexts[device].standard->destroyed = 1;
			leave(contexts[device].standard);
		}
		memset(&contexts[device], 0, sizeof contexts[device]);
		for (int i = 0; i < MAX_DEVICES; i++)
			peers[device][i] = peers[i][device] = 0;
	}
	END;
}

EXPORT int cuCtxPushCurrent_v2(void *c)
{
	BEGIN;
	if (!result)
		result = depth < 16 && ((context *)c)->references > 0 ? OK : INVALID_CONTEXT;
	if (!result)
		stack[depth++] = c;
	END;
}

EXPORT int cuCtxPopCurrent_v2(void **c)
{
	BEGIN;
	if (depth == 0)
		result = INVALID_CONTEXT;
	else
		*c = stack[--depth];
	END;
}

// load loads a kernel, when none runs. With the lock.
static void load(function *f)
{
	context *c = f->module->context;
	if (f->loaded)
		return;
	c->loading++;
	pthread_cond_broadcast(&changed);
	while (c->resident > 0)
		await();
	c->loading--;
	f->loaded = 1;
	pthread_cond_broadcast(&changed);
}

EXPORT int cuModuleLoadDataEx(void **m, const void *image, unsigned n, int *options, void **values)
{
	BEGIN_IN;
	const char *s = image;
	for (unsigned i = 0; i + 1 < n && (result == INVALID_PTX || !strstr(s, ".version")); i++)
		if (options[i] == 5 && options[i + 1] == 6) // JIT_ERROR_LOG_BUFFER
			snprintf(values[i], (uintptr_t)values[i + 1], "ptxas fatal: what the fake driver was told to say");
	if (!result && !strstr(s, ".version"))
		result = INVALID_PTX;
	if (!result) {
		module *o = calloc(1, sizeof *o);
		o->context = c;
		o->image = strdup(s);
		modules++;
		*m = o;
	}
	END;
}

EXPORT int cuModuleUnload(void *m)
{
	BEGIN_IN;
	module *o = m;
	if (c)
		rest(c);
	for (function **p = &functions; *p;) {
		function *f = *p;
		if (f->module == o) {
			*p = f->next;
			free(f);
		} else
			p = &f->next;
	}
	free(o->image);
	free(o);
	modules--;
	END;
}

EXPORT int cuModuleGetFunction(void **found, void *m, const char *name)
{
	BEGIN_IN;
	module *o = m;
	char entry[256];
	snprintf(entry, sizeof entry, ".entry %s(", name);
	const struct tutti_host_kernel *k = kernels;
	while (k && k->name && strcmp(k->name, name))
		k++;
	if (!result && (!strstr(o->image, entry) || !k || !k->name))
		result = NOT_FOUND;
	if (!result) {
		function *f = calloc(1, sizeof *f);
		f->module = o, f->kernel = k, f->next = functions;
		functions = f;
		*found = f;
		const char *eager = getenv("CUDA_MODULE_LOADING");
		if (eager && !strcmp(eager, "EAGER"))
			f->loaded = 1;
	}
	END;
}

EXPORT int cuFuncGetAttribute(int *v, int attribute, void *f)
{
	BEGIN_IN;
	if (!result) {
		load(f);
		*v = attribute == 4 ? 32 : 0; // NUM_REGS
	}
	END;
}

EXPORT int cuFuncLoad(void *f)
{
	BEGIN_IN;
	if (!result)
		load(f);
	END;
}

EXPORT int cuMemAlloc_v2(uint64_t *at, size_t n)
{
	BEGIN_IN;
	result = result ? result : unsafe();
	if (!result && !n)
		result = INVALID_VALUE;
	block *b = result ? NULL : add(c, n, 0);
	if (!result && !b)
		result = OUT_OF_MEMORY;
	if (!result)
		*at = b->at;
	END;
}

EXPORT int cuMemFree_v2(uint64_t at)
{
	BEGIN_IN;
	int forbidden = unsafe();
	if (c && !forbidden) {
		rest_to_free(c);
		int r = discard(at, c, 0);
		result = result ? result : r;
	}
	result = forbidden ? forbidden : result;
	END;
}

EXPORT int cuMemGetAddressRange_v2(uint64_t *base, size_t *n, uint64_t at)
{
	BEGIN_IN;
	block *b = find(at, 1);
	if (!result && (!b || b->file < 0))
		result = INVALID_VALUE;
	if (!result)
		*base = b->at - b->offset, *n = b->opened && !b->of && b->n < BLOCK ? BLOCK : b->n;
	END;
}

EXPORT int cuPointerGetAttribute(void *v, int attribute, uint64_t at)
{
	BEGIN_IN;
	block *b = find(at, 1);
	if (!result && (!b || attribute != 7)) // BUFFER_ID
		result = INVALID_VALUE;
	if (!result)
		*(uint64_t *)v = b->number;
	END;
}

// What the 64 bytes of a handle are.
typedef struct {
	char magic[8];
	int32_t process, file, device;
	uint64_t inode, size, block, offset;
	char padding[8];
} ipc_handle;

EXPORT int cuIpcGetMemHandle(ipc_handle *h, uint64_t at)
{
	BEGIN_IN;
	block *b = find(at, 1);
	struct stat s;
	if (!result && (!b || b->file < 0 || b->opened || b->of || b->at != at || fstat(b->file, &s)))
		result = INVALID_VALUE;
	if (!result) {
		memset(h, 0, sizeof *h);
		memcpy(h->magic, "fake IPC", 8);
		h->process = getpid(), h->file = b->file, h->device = b->context->device, h->inode = s.st_ino, h->size = b->n;
		h->block = b->of_shelf ? b->of_shelf->at : b->at, h->offset = b->at - h->block;
		b->exported = 1;
	}
	END;
}

EXPORT int cuIpcOpenMemHandle_v2(uint64_t *at, ipc_handle h, unsigned flags)
{
	BEGIN_IN;
	struct stat s;
	if (!result && (memcmp(h.magic, "fake IPC", 8) || flags != 1)) // LAZY_ENABLE_PEER_ACCESS
		result = INVALID_VALUE;
	if (!result && h.process == getpid())
		result = INVALID_CONTEXT;
	if (!result && isolated && h.device != c->device)
		result = PEER_UNSUPPORTED;
	for (block *b = blocks; !result && b; b = b->next)
		if (b->opened && b->context == c && !fstat(b->file, &s) && s.st_ino == h.inode) {
			b->opened++;
			*at = b->at;
			END;
		}
	for (block *b = blocks; !result && b; b = b->next)
		if (b->opened && !b->of && b->context == c && b->owner == h.process && b->owners_block == h.block &&
		    h.size < BLOCK)
			result = ALREADY_MAPPED;
	int file = -1;
	if (!result) {
		char path[64];
		snprintf(path, sizeof path, "/proc/%d/fd/%d", h.process, h.file);
		file = open(path, O_RDWR | O_CLOEXEC);
		if (file < 0 || fstat(file, &s) || s.st_ino != h.inode)
			result = INVALID_HANDLE; // freed, or of a process that is gone
	}
	block *b = result ? NULL : calloc(1, sizeof *b);
	if (b) {
		b->mapped = s.st_size;
		b->contents = mmap(NULL, b->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		void *reserved = addresses(b->mapped + h.offset);
		if (b->contents == MAP_FAILED || !reserved)
			abort();
		b->owner = h.process, b->owners_block = h.block, b->offset = h.offset;
		b->context = c, b->at = (uintptr_t)reserved + h.offset, b->n = h.size, b->file = file;
		b->opened = 1, b->next = blocks;
		blocks = b;
		*at = b->at;
	} else if (file >= 0)
		close(file);
	END;
}

EXPORT int cuIpcCloseMemHandle(uint64_t at)
{
	BEGIN_IN;
	if (c)
		rest_to_free(c);
	int found = 0;
	for (block **p = &blocks; *p; p = &(*p)->next) {
		block *b = *p;
		if (b->at != at || b->context != c || !b->opened || b->of)
			continue;
		found = 1;
		if (--b->opened == 0) { // what the test wants to fail is done all the same
			*p = b->next;
			munmap(b->contents, b->mapped);
			munmap((void *)(b->at - b->offset), b->mapped + b->offset);
			close(b->file);
			free(b);
		}
		break;
	}
	if (!result && !found)
		result = INVALID_VALUE;
	END;
}

// The granule of the sizes of memory of cuMemCreate.
enum { GRANULE = 64 << 10 };

enum { DESCRIPTOR = 1, FABRIC = 8 }; // CUmemAllocationHandleType

typedef struct { // CUmemAllocationProp
	int type, types;
	struct {
		int type, id;
	} location;
	void *metadata;
	struct {
		unsigned char compression, rdma;
		unsigned short usage;
		unsigned char reserved[4];
	} flags;
} properties;

typedef struct { // CUmemAccessDesc
	int type, id, flags;
} access_of;

// What follows the contents of memory of cuMemCreate in its file.
typedef struct {
	char magic[8];
	int32_t device, types;
	uint64_t size;
} trailer;

// What the 64 bytes of a fabric handle are.
typedef struct {
	char magic[8];
	int32_t process, file, clique;
	uint64_t inode;
	char padding[32];
} fabric_handle;

static int refused(const properties *p)
{
	if (!vmm)
		return NOT_SUPPORTED;
	if (p->type != 1 || p->location.type != 1 || p->location.id < 0 || p->location.id >= devices || p->metadata ||
	    p->flags.compression || p->flags.usage || p->types & ~(DESCRIPTOR | FABRIC)) // PINNED, DEVICE
		return INVALID_VALUE;
	if ((p->types & DESCRIPTOR && !descriptors) || (p->types & FABRIC && !cliques[p->location.id]) ||
	    (p->flags.rdma && !dma_buffers))
		return NOT_SUPPORTED;
	return OK;
}

EXPORT int cuMemGetAllocationGranularity(size_t *n, const properties *p, int option)
{
	BEGIN_IN;
	if (!result)
		result = option ? INVALID_VALUE : refused(p); // MINIMUM
	if (!result)
		*n = GRANULE;
	END;
}

// hold adds memory with one handle, in a file that belongs to it from now on.
static physical *hold(int file, const trailer *t, int imported)
{
	physical *p = calloc(1, sizeof *p);
	p->file = file, p->device = t->device, p->types = t->types, p->n = t->size, p->imported = imported;
	p->handles = 1;
	p->next = physicals;
	return physicals = p;
}

static physical *held(uint64_t handle)
{
	for (physical *p = physicals; p; p = p->next)
		if ((uint64_t)(uintptr_t)p == handle && p->handles > 0)
			return p;
	return NULL;
}

// spare frees memory that has neither handles nor mappings.
static void spare(physical *o)
{
	for (physical **p = &physicals; *p; p = &(*p)->next)
		if (*p == o && !o->handles && !o->mappings) {
			*p = o->next;
			close(o->file);
			free(o);
			return;
		}
}

EXPORT int cuMemCreate(uint64_t *handle, size_t n, const properties *p, unsigned long long flags)
{
	BEGIN_IN;
	if (!result)
		result = !n || n % GRANULE || flags ? INVALID_VALUE : refused(p);
	if (!result && n > (size_t)1 << 30)
		result = OUT_OF_MEMORY;
	if (!result) {
		trailer t = {"fake VMM", p->location.id, p->types, n};
		int file = memfd_create("device memory with handles", MFD_CLOEXEC);
		void *all = MAP_FAILED;
		if (file >= 0 && !ftruncate(file, n + 4096) && pwrite(file, &t, sizeof t, n) == sizeof t)
			all = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		if (all == MAP_FAILED) {
			if (file >= 0)
				close(file);
			result = OUT_OF_MEMORY;
		} else {
			memset(all, 0xA5, n);
			munmap(all, n);
			*handle = (uint64_t)(uintptr_t)hold(file, &t, 0);
		}
	}
	END;
}

EXPORT int cuMemRelease(uint64_t handle)
{
	BEGIN_IN;
	physical *p = held(handle);
	if (p) { // what the test wants to fail is done all the same
		p->handles--;
		spare(p);
	} else if (!result)
		result = INVALID_VALUE;
	END;
}

EXPORT int cuMemAddressReserve(uint64_t *at, size_t n, size_t alignment, uint64_t wanted, unsigned long long flags)
{
	BEGIN_IN;
	if (!result && (!n || n % GRANULE || alignment || wanted || flags))
		result = INVALID_VALUE;
	void *first = MAP_FAILED;
	if (!result) // a page more, between reservations
		first = mmap(NULL, n + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (!result && first == MAP_FAILED)
		result = OUT_OF_MEMORY;
	if (!result) {
		reservation *r = calloc(1, sizeof *r);
		r->at = (uintptr_t)first, r->n = n, r->next = reservations;
		reservations = r;
		*at = r->at;
	}
	END;
}

static reservation *reserved(uintptr_t at, size_t n)
{
	for (reservation *r = reservations; r; r = r->next)
		if (at >= r->at && at - r->at < r->n && n <= r->n - (at - r->at))
			return r;
	return NULL;
}

// overlaps reports whether a part of a range is mapped by cuMemMap.
static int overlaps(uintptr_t at, size_t n)
{
	for (block *b = blocks; b; b = b->next)
		if (b->of && at < b->at + b->n && b->at < at + n)
			return 1;
	return 0;
}

EXPORT int cuMemAddressFree(uint64_t at, size_t n)
{
	BEGIN_IN;
	int found = 0;
	for (reservation **p = &reservations; *p && !found; p = &(*p)->next) {
		reservation *r = *p;
		if (r->at != at || r->n != n || overlaps(at, n))
			continue;
		*p = r->next;
		munmap((void *)r->at, r->n + 4096);
		free(r);
		found = 1;
		break;
	}
	if (!result && !found)
		result = INVALID_VALUE;
	END;
}

EXPORT int cuMemMap(uint64_t at, size_t n, size_t offset, uint64_t handle, unsigned long long flags)
{
	BEGIN_IN;
	physical *p = held(handle);
	if (!result && (!p || offset || flags || !n || n % GRANULE || n > p->n || !reserved(at, n) || overlaps(at, n)))
		result = INVALID_VALUE;
	void *contents = MAP_FAILED;
	if (!result)
		contents = mmap(NULL, p->n + 4096, PROT_READ | PROT_WRITE, MAP_SHARED, p->file, 0);
	if (!result && contents == MAP_FAILED)
		result = OUT_OF_MEMORY;
	if (!result) {
		block *b = calloc(1, sizeof *b);
		b->context = &contexts[p->device];
		b->contents = contents, b->at = at, b->n = n, b->mapped = p->n + 4096, b->file = p->file;
		b->opened = p->imported, b->of = p, b->next = blocks;
		blocks = b;
		p->mappings++;
	}
	END;
}

EXPORT int cuMemUnmap(uint64_t at, size_t n)
{
	BEGIN_IN;
	int found = 0;
	for (block **q = &blocks; *q; q = &(*q)->next) {
		block *b = *q;
		if (!b->of || b->at != at || b->n != n)
			continue;
		*q = b->next;
		munmap(b->contents, b->mapped); // work that uses it is a segmentation fault
		b->of->mappings--;
		spare(b->of);
		free(b);
		found = 1;
		break;
	}
	if (!result && !found)
		result = INVALID_VALUE;
	END;
}

EXPORT int cuMemSetAccess(uint64_t at, size_t n, const access_of *list, size_t count)
{
	BEGIN_IN;
	block *b = find(at, n);
	if (!result && (!b || !b->of || b->at != at || b->n != n || !count))
		result = INVALID_VALUE;
	for (size_t i = 0; i < count && !result; i++) {
		if (list[i].type != 1 || list[i].flags != 3) // DEVICE, READWRITE
			result = INVALID_VALUE;
		else if (list[i].id < 0 || list[i].id >= devices || (isolated && list[i].id != b->of->device))
			result = INVALID_DEVICE;
		else
			b->access |= 1u << list[i].id;
	}
	END;
}

EXPORT int cuMemExportToShareableHandle(void *to, uint64_t handle, int type, unsigned long long flags)
{
	BEGIN_IN;
	physical *p = held(handle);
	struct stat s;
	if (!result && (!p || flags || !(p->types & type) || (type != DESCRIPTOR && type != FABRIC) || fstat(p->file, &s)))
		result = INVALID_VALUE;
	if (!result && type == DESCRIPTOR && (*(int *)to = dup(p->file)) < 0)
		result = OUT_OF_MEMORY;
	if (!result && type == FABRIC) {
		fabric_handle h = {"fake FAB", getpid(), p->file, cliques[p->device], s.st_ino};
		memcpy(to, &h, sizeof h);
	}
	END;
}

EXPORT int cuMemImportFromShareableHandle(uint64_t *handle, void *from, int type)
{
	BEGIN_IN;
	int file = -1;
	struct stat s;
	trailer t;
	if (!result && type == DESCRIPTOR && (file = fcntl((int)(intptr_t)from, F_DUPFD_CLOEXEC, 0)) < 0)
		result = INVALID_VALUE;
	if (!result && type == FABRIC) {
		fabric_handle h;
		memcpy(&h, from, sizeof h);
		char path[64];
		snprintf(path, sizeof path, "/proc/%d/fd/%d", h.process, h.file);
		if (memcmp(h.magic, "fake FAB", 8))
			result = INVALID_VALUE;
		else if (!cliques[c->device] || h.clique != cliques[c->device])
			result = NOT_PERMITTED;
		else if ((file = open(path, O_RDWR | O_CLOEXEC)) < 0 || fstat(file, &s) || s.st_ino != h.inode)
			result = INVALID_HANDLE;
	}
	if (!result && file < 0)
		result = INVALID_VALUE;
	if (!result && (fstat(file, &s) || s.st_size < 4096 || pread(file, &t, sizeof t, s.st_size - 4096) != sizeof t ||
			memcmp(t.magic, "fake VMM", 8) || t.size != (uint64_t)s.st_size - 4096 || !(t.types & type)))
		result = INVALID_VALUE;
	if (!result)
		*handle = (uint64_t)(uintptr_t)hold(file, &t, 1);
	else if (file >= 0)
		close(file);
	END;
}

EXPORT int cuCtxSynchronize(void)
{
	BEGIN_IN;
	if (!result && c->captures) {
		spoilt = 1;
		result = CAPTURE_UNSUPPORTED;
	} else if (c) {
		rest(c);
		result = result ? result : c->error;
	}
	END;
}

EXPORT int cuMemGetHandleForAddressRange(void *handle, uint64_t at, size_t n, int type, unsigned long long flags)
{
	BEGIN_IN;
	block *b = find(at, 1);
	if (!result && (!dma_buffers || type != 1)) // DMA_BUF_FD
		result = NOT_SUPPORTED;
	// A descriptor of the file of the contents is one of the whole of them.
	if (!result && (!b || b->file < 0 || at != b->at || n % 4096 || n > b->mapped - 4096 || flags))
		result = INVALID_VALUE;
	if (!result && (*(int *)handle = fcntl(b->file, F_DUPFD_CLOEXEC, 0)) < 0)
		result = OUT_OF_MEMORY;
	END;
}

EXPORT int cuFlushGPUDirectRDMAWrites(int target, int scope)
{
	BEGIN_IN;
	if (!result && (target != 0 || scope != 100)) // CURRENT_CTX, TO_OWNER
		result = INVALID_VALUE;
	END;
}

EXPORT int cuMemHostAlloc(void **at, size_t n, unsigned flags)
{
	BEGIN_IN;
	result = result ? result : unsafe();
	if (!result && (!n || flags != 3)) // PORTABLE, DEVICEMAP
		result = INVALID_VALUE;
	block *b = result ? NULL : add(c, n, 1);
	if (!result && !b)
		result = OUT_OF_MEMORY;
	if (!result)
		*at = (void *)b->at;
	END;
}

EXPORT int cuMemFreeHost(void *at)
{
	BEGIN_IN;
	int forbidden = unsafe();
	if (c && !forbidden) {
		rest_to_free(c);
		int r = discard((uintptr_t)at, c, 1);
		result = result ? result : r;
	}
	result = forbidden ? forbidden : result;
	END;
}

EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *device, void *at, unsigned flags)
{
	BEGIN_IN;
	if (!result && (flags || !find((uintptr_t)at, 1)))
		result = INVALID_VALUE;
	if (!result)
		*device = (uintptr_t)at;
	END;
}

// translate replaces the addresses of device memory among n bytes by those of the contents, if work
// of a context may use them.
static int translate(context *c, void *bytes, size_t n)
{
	for (uint64_t *word = bytes, at; n >= sizeof at; n -= sizeof at, word++) {
		memcpy(&at, word, sizeof at);
		void *to = contents(at, 0);
		block *b = find(at, 0);
		if (b && b->of ? !accesses(c, at, 0) :
		    to ? b->file >= 0 && b->context != c && !peers[c->device][b->context->device] :
			 reserved(at, 0) != NULL)
			return ILLEGAL_ADDRESS;
		if (to)
			memcpy(word, &to, sizeof to);
	}
	return OK;
}

static int ends_in(const struct tutti_host_kernel *k, const char *end)
{
	size_t n = strlen(k->name), m = strlen(end);
	return n > m && !strcmp(k->name + n - m, end);
}

// placed reports whether the parameter of a kernel is the address of a place.
static int placed(const struct tutti_host_kernel *k) { return ends_in(k, "_placed"); }

// look has a kernel read its place: a copy, with the addresses of the contents.
static int look(context *c, work *w)
{
	uint64_t at;
	memcpy(&at, w->params, sizeof at);
	void *copy = w->params + sizeof at;
	memcpy(copy, (void *)at, PLACE);
	memcpy(w->params, &copy, sizeof copy);
	return translate(c, copy, PLACE);
}

// perform does work. Without the lock.
static void perform(context *c, const work *w)
{
	switch (w->kind) {
	case COPY:
		memmove(w->dst, w->src, w->n);
		break;
	case KERNEL:
		w->kernel->run(w->params, w->grid, w->block, w->shared);
		break;
	case HOST:
		w->host(w->dst);
		break;
	case WRITE:
		__atomic_store_n(w->word, w->value, __ATOMIC_SEQ_CST);
		break;
	case WAIT:
		for (int n = 0; (int64_t)(__atomic_load_n(w->word, __ATOMIC_SEQ_CST) - w->value) < 0; n++) {
			if (__atomic_load_n(&c->error, __ATOMIC_SEQ_CST))
				return; // the context has ended
			struct timespec t = {0, 20000};
			n < 100 ? sched_yield() : nanosleep(&t, NULL);
		}
	case EVENT:
		break;
	}
}

// forget frees an event that was destroyed and that no stream is to reach. With the lock.
static void forget(event *e)
{
	if (e->destroyed && !e->pending)
		free(e);
}

// leave frees a stream that was destroyed and has no work. With the lock.
static void leave(stream *s)
{
	if (!s->destroyed || s->pending)
		return;
	s->queue->ended = --s->queue->streams == 0;
	for (int i = 0; s->queue->ended && i < queue_limit; i++)
		if (shared[i] == s->queue)
			shared[i] = NULL;
	free(s);
}

static void *run(void *arg)
{
	queue *q = arg;
	pthread_mutex_lock(&lock);
	for (;;) {
		work *w = q->first;
		if (!w && q->ended)
			break;
		if (!w) {
			await();
			continue;
		}
		stream *s = w->stream;
		context *c = s->context;
		if (!(q->first = w->next))
			q->last = &q->first;
		if (!c->error && w->error)
			c->error = w->error;
		if (!c->error && w->kind == KERNEL && placed(w->kernel))
			c->error = look(c, w);
		if (!c->error) {
			c->busy++;
			c->resident += w->kind == KERNEL;
			pthread_cond_broadcast(&changed);
			pthread_mutex_unlock(&lock);
			perform(c, w);
			pthread_mutex_lock(&lock);
			c->resident -= w->kind == KERNEL;
			c->busy--;
			if (w->kind == EVENT)
				w->event->reached++;
		}
		if (w->kind == EVENT) {
			w->event->pending--;
			forget(w->event);
		}
		free(w);
		s->pending--;
		c->working--;
		leave(s);
		pthread_cond_broadcast(&changed);
	}
	free(q);
	queues--;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	return NULL;
}

static work *new_work(enum kind kind, size_t params)
{
	work *w = calloc(1, sizeof *w + params);
	w->kind = kind;
	return w;
}

// give gives work to a stream. With the lock.
static void give(stream *s, work *w)
{
	if (s->pending >= 1024) {
		blocked++;
		while (s->pending >= 1024)
			await();
		blocked--;
	}
	w->error = enter("work");
	w->stream = s;
	*s->queue->last = w;
	s->queue->last = &w->next;
	s->pending++;
	s->context->working++;
}

// refuses reports whether a stream is captured by a test that has no graph. With the lock.
static int refuses(const stream *s) { return s->capturing && !s->graph; }

// submit gives work to a stream, or to the graph that records it. With the lock.
static void submit(stream *s, work *w)
{
	if (s->graph) {
		*s->graph->last = w;
		s->graph->last = &w->next;
	} else
		give(s, w);
}

// new_stream makes a stream. With the lock.
static stream *new_stream(context *c)
{
	queue *own = NULL, **q = queue_limit ? &shared[created % queue_limit] : &own;
	created++;
	if (!*q) {
		*q = calloc(1, sizeof **q);
		(*q)->last = &(*q)->first;
		if (pthread_create(&(*q)->thread, NULL, run, *q))
			abort();
		pthread_detach((*q)->thread);
		queues++;
	}
	stream *s = calloc(1, sizeof *s);
	s->context = c;
	s->queue = *q;
	s->queue->streams++;
	return s;
}

// stream_of returns the stream with a handle: 0 and 1 are the context's default stream. With the
// lock.
static stream *stream_of(context *c, void *handle)
{
	if ((uintptr_t)handle > 1)
		return handle;
	if (!c->standard)
		c->standard = new_stream(c);
	return c->standard;
}

EXPORT int cuStreamCreate(void **found, unsigned flags)
{
	BEGIN_IN;
	result = result ? result : unsafe();
	if (!result && flags != 1) // NON_BLOCKING
		result = INVALID_VALUE;
	if (!result)
		*found = new_stream(c);
	END;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode)
{
	int was = capture_mode;
	capture_mode = *mode;
	*mode = was;
	return 0;
}

EXPORT int cuStreamIsCapturing(void *s, int *status)
{
	BEGIN_IN;
	if (!result)
		*status = stream_of(c, s)->capturing;
	END;
}

EXPORT int cuStreamDestroy_v2(void *s)
{
	BEGIN_IN;
	int forbidden = unsafe();
	if (!forbidden) {
		((stream *)s)->destroyed = 1; // it ends when its work is done
		leave(s);
	}
	result = forbidden ? forbidden : result;
	END;
}

EXPORT int cuStreamQuery(void *s)
{
	BEGIN_IN;
	result = result ? result : unsafe();
	if (!result && stream_of(c, s)->pending)
		result = NOT_READY;
	END;
}

EXPORT int cuEventCreate(void **found, unsigned flags)
{
	BEGIN_IN;
	if (!result && flags != 2) // DISABLE_TIMING
		result = INVALID_VALUE;
	if (!result) {
		event *e = calloc(1, sizeof *e);
		e->context = c;
		events++;
		*found = e;
	}
	END;
}

EXPORT int cuEventDestroy_v2(void *e)
{
	BEGIN_IN;
	((event *)e)->destroyed = 1;
	forget(e);
	events--;
	END;
}

EXPORT int cuEventRecord(void *e, void *s)
{
	BEGIN_IN;
	if (!result && stream_of(c, s)->capturing)
		result = CAPTURE_UNSUPPORTED;
	if (!result) {
		work *w = new_work(EVENT, 0);
		w->event = e;
		((event *)e)->recorded++;
		((event *)e)->pending++;
		give(stream_of(c, s), w);
	}
	END;
}

EXPORT int cuEventQuery(void *e)
{
	BEGIN_IN;
	event *o = e;
	result = result ? result : unsafe();
	if (!result && o->reached < o->recorded)
		result = NOT_READY;
	END;
}

EXPORT int cuStreamBeginCapture_v2(void *s, int mode)
{
	BEGIN_IN;
	if (!result && (mode != 0 || (uintptr_t)s <= 1 || stream_of(c, s)->capturing)) // GLOBAL
		result = INVALID_VALUE;
	if (!result) {
		graph *g = calloc(1, sizeof *g);
		g->context = c;
		g->last = &g->first;
		stream_of(c, s)->graph = g;
		stream_of(c, s)->capturing = 1;
		stream_of(c, s)->thread = syscall(SYS_gettid);
		captures++, c->captures++;
	}
	END;
}

EXPORT int cuStreamEndCapture(void *s, void **found)
{
	BEGIN_IN;
	if (!result && !stream_of(c, s)->graph)
		result = INVALID_VALUE;
	if (!result && stream_of(c, s)->thread != syscall(SYS_gettid))
		result = CAPTURE_WRONG_THREAD;
	if (!result) {
		*found = stream_of(c, s)->graph;
		stream_of(c, s)->graph = NULL;
		stream_of(c, s)->capturing = 0;
		result = spoilt ? CAPTURE_INVALIDATED : 0;
		c->captures--;
		if (--captures == 0)
			spoilt = 0;
	}
	END;
}

static work *copy_work(const work *w)
{
	size_t n = sizeof *w + (w->kernel ? w->kernel->params : 0);
	return memcpy(malloc(n), w, n);
}

EXPORT int cuGraphInstantiateWithFlags(void **found, void *from, unsigned long long flags)
{
	BEGIN_IN;
	result = result ? result : unsafe();
	if (!result && flags)
		result = INVALID_VALUE;
	if (!result) {
		graph *g = calloc(1, sizeof *g);
		g->context = c;
		g->last = &g->first;
		for (work *w = ((graph *)from)->first; w; w = w->next) {
			*g->last = copy_work(w);
			g->last = &(*g->last)->next;
		}
		*g->last = NULL;
		*found = g;
	}
	END;
}

EXPORT int cuGraphLaunch(void *from, void *s)
{
	BEGIN_IN;
	result = result ? result : unsafe();
	if (!result && stream_of(c, s)->capturing)
		result = CAPTURE_UNSUPPORTED;
	for (work *w = ((graph *)from)->first; w && !result; w = w->next) {
		work *again = copy_work(w);
		again->next = NULL;
		give(stream_of(c, s), again);
	}
	END;
}

static void end_graph(graph *g)
{
	for (work *w = g->first, *next; w; w = next) {
		next = w->next;
		free(w);
	}
	free(g);
}

EXPORT int cuGraphDestroy(void *g)
{
	BEGIN_IN;
	end_graph(g);
	END;
}

EXPORT int cuGraphExecDestroy(void *g)
{
	BEGIN_IN;
	int forbidden = unsafe();
	if (!forbidden)
		end_graph(g);
	result = forbidden ? forbidden : result;
	END;
}

EXPORT int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t n, void *s)
{
	BEGIN_IN;
	if (!result && refuses(stream_of(c, s)))
		result = CAPTURE_UNSUPPORTED;
	if (!result) {
		c->delayed++;
		pthread_cond_broadcast(&changed);
		while (c->loading > 0)
			await();
		c->delayed--;
		void *to = contents(dst, n), *from = contents(src, n);
		if (!to || !from)
			result = INVALID_VALUE;
		else if (!accesses(c, dst, n) || !accesses(c, src, n))
			result = ILLEGAL_ADDRESS;
		else {
			work *w = new_work(COPY, 0);
			w->dst = to, w->src = from, w->n = n;
			submit(stream_of(c, s), w);
		}
	}
	END;
}

EXPORT int cuLaunchHostFunc(void *s, void (*f)(void *), void *arg)
{
	BEGIN_IN;
	if (!result && refuses(stream_of(c, s)))
		result = CAPTURE_UNSUPPORTED;
	if (!result) {
		work *w = new_work(HOST, 0);
		w->host = f, w->dst = arg;
		submit(stream_of(c, s), w);
	}
	END;
}

static int word_work(stream *s, enum kind kind, uint64_t at, uint64_t v, unsigned flags)
{
	uint64_t *word = contents(at, 8);
	if (!memory_operations)
		return NOT_SUPPORTED;
	if (s->capturing)
		return CAPTURE_UNSUPPORTED;
	if (!word || at % 8 || flags)
		return INVALID_VALUE;
	work *w = new_work(kind, 0);
	w->word = word, w->value = v;
	give(s, w);
	return OK;
}

EXPORT int cuStreamWaitValue64_v2(void *s, uint64_t at, uint64_t v, unsigned flags)
{
	BEGIN_IN;
	if (!result)
		result = word_work(stream_of(c, s), WAIT, at, v, flags);
	END;
}

EXPORT int cuStreamWriteValue64_v2(void *s, uint64_t at, uint64_t v, unsigned flags)
{
	BEGIN_IN;
	if (!result)
		result = word_work(stream_of(c, s), WRITE, at, v, flags);
	END;
}

EXPORT int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
			  unsigned shared, void *s, void **params, void **extra)
{
	BEGIN_IN;
	function *k = f;
	if (!result && (!x || y != 1 || z != 1 || !bx || bx > 1024 || by != 1 || bz != 1 || extra || shared > 48 << 10 ||
			k->kernel->params > MAX_PARAMS))
		result = INVALID_VALUE;
	stream *to_stream = result ? NULL : stream_of(c, s);
	if (!result && refuses(to_stream))
		result = CAPTURE_UNSUPPORTED;
	if (!result) {
		load(k);
		work *w = new_work(KERNEL, k->kernel->params + (placed(k->kernel) ? PLACE : 0));
		w->kernel = k->kernel;
		w->grid = x, w->block = bx, w->shared = shared;
		if (ends_in(k->kernel, "_packets"))
			w->grid = 1, w->block = x * bx < PACKET_THREADS ? x * bx : PACKET_THREADS;
		memcpy(w->params, params[0], k->kernel->params);
		result = translate(c, w->params, k->kernel->params);
		if (result)
			free(w);
		else
			submit(to_stream, w);
	}
	END;
}

// fake_configure sets what the machine has. Before cuInit.
EXPORT void fake_configure(int n, int operations, int major, int limit, int buffers, int order, int apart, int locked)
{
	locked_frees = locked;
	isolated = apart;
	dma_buffers = buffers;
	ordering = order;
	queue_limit = limit;
	devices = n;
	capability = major;
	memory_operations = operations;
}

// fake_handles sets which handles the memory of cuMemCreate has. Before cuInit.
EXPORT void fake_handles(int manages, int files, const int *clique)
{
	vmm = manages;
	descriptors = files;
	memcpy(cliques, clique, sizeof cliques);
}

// fake_kernels loads the host compilation of the kernels. It returns NULL, or an error.
EXPORT const char *fake_kernels(const char *path)
{
	if (!(kernels_library = dlopen(path, RTLD_NOW | RTLD_LOCAL)))
		return dlerror();
	kernels = dlsym(kernels_library, "tutti_host_kernels");
	return kernels ? NULL : "the library has no tutti_host_kernels";
}

// fake_fail has the k-th call of a function from now on return an error. "work" is what streams are
// given: that fails when the stream has come to it, and with it the context. k = -1 has all calls
// fail. k = 0 forgets all of these orders that were not carried out, and returns their number.
EXPORT int fake_fail(const char *call, int k, int code)
{
	int left = 0;
	pthread_mutex_lock(&lock);
	for (int i = 0; k == 0 && i < MAX_FAULTS; i++) {
		left += faults[i].in != 0;
		faults[i].in = 0;
	}
	for (int i = 0; k != 0 && i < MAX_FAULTS; i++)
		if (faults[i].in == 0) {
			snprintf(faults[i].call, sizeof faults[i].call, "%s", call);
			faults[i].in = k, faults[i].code = code;
			break;
		}
	pthread_mutex_unlock(&lock);
	return left;
}

// fake_capture begins or ends that the work of a stream goes into a graph.
EXPORT void fake_capture(uintptr_t s, int on)
{
	pthread_mutex_lock(&lock);
	((stream *)s)->capturing = on;
	pthread_mutex_unlock(&lock);
}

// fake_calls returns the i-th function that was called, and how often. NULL: there are no more.
EXPORT const char *fake_calls(int i, int *n)
{
	pthread_mutex_lock(&lock);
	const char *s = i < MAX_CALLS ? calls[i].call : NULL;
	*n = s ? calls[i].n : 0;
	pthread_mutex_unlock(&lock);
	return s;
}

// fake_bytes returns the contents of memory of a device, NULL if it is not allocated.
EXPORT void *fake_bytes(uint64_t at, size_t n)
{
	pthread_mutex_lock(&lock);
	void *p = contents(at, n);
	pthread_mutex_unlock(&lock);
	return p;
}

// What there is at the moment.
typedef struct {
	int contexts, device_blocks, imported, physical, reserved, host_blocks, modules, streams, events; // objects
	int resident, loading, delayed; // kernels that run, loads that wait for them, copies that wait for loads
	int blocked; // calls that wait for a full stream
} census;

EXPORT void fake_census(census *n)
{
	memset(n, 0, sizeof *n);
	pthread_mutex_lock(&lock);
	for (int i = 0; i < MAX_DEVICES; i++) {
		n->contexts += contexts[i].references;
		n->resident += contexts[i].resident;
		n->loading += contexts[i].loading;
		n->delayed += contexts[i].loading ? contexts[i].delayed : 0;
	}
	for (block *b = blocks; b; b = b->next)
		b->opened ? n->imported++ : (uintptr_t)b->contents == b->at ? n->host_blocks++ : n->device_blocks++;
	for (physical *p = physicals; p; p = p->next)
		n->physical++;
	for (reservation *r = reservations; r; r = r->next)
		n->reserved++;
	n->modules = modules, n->streams = queues, n->events = events, n->blocked = blocked;
	pthread_mutex_unlock(&lock);
}
