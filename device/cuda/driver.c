//go:build cgo && linux

// The calls of the CUDA driver that package cuda makes. The library is opened at run time. Its
// functions are looked up by the names that it exports, which are not always those of cuda.h: the
// header renames most functions that have changed once to their newest version, and a library has
// the old ones under the old names. So cuMemAlloc without _v2 takes addresses of 32 bits, and
// cuStreamWaitValue64 without _v2 is refused unless the kernel's module was told to allow it.

#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef uint64_t pointer; // CUdeviceptr

struct properties { // CUmemAllocationProp
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
};

struct access { // CUmemAccessDesc
	int type, id, flags;
};

// X(field, symbol, arguments): what every driver since CUDA 11 has.
#define FUNCTIONS(X)                                                                                      \
	X(get_error_name, "cuGetErrorName", (int, const char **))                                         \
	X(get_error_string, "cuGetErrorString", (int, const char **))                                     \
	X(init, "cuInit", (unsigned))                                                                     \
	X(driver_get_version, "cuDriverGetVersion", (int *))                                              \
	X(device_get_count, "cuDeviceGetCount", (int *))                                                  \
	X(device_get, "cuDeviceGet", (int *, int))                                                        \
	X(device_get_name, "cuDeviceGetName", (char *, int, int))                                         \
	X(device_total_mem, "cuDeviceTotalMem_v2", (size_t *, int))                                       \
	X(device_get_attribute, "cuDeviceGetAttribute", (int *, int, int))                                \
	X(retain, "cuDevicePrimaryCtxRetain", (void **, int))                                             \
	X(release, "cuDevicePrimaryCtxRelease_v2", (int))                                                 \
	X(push, "cuCtxPushCurrent_v2", (void *))                                                          \
	X(pop, "cuCtxPopCurrent_v2", (void **))                                                           \
	X(module_load, "cuModuleLoadDataEx", (void **, const void *, unsigned, int *, void **))           \
	X(module_unload, "cuModuleUnload", (void *))                                                      \
	X(module_get_function, "cuModuleGetFunction", (void **, void *, const char *))                    \
	X(func_get_attribute, "cuFuncGetAttribute", (int *, int, void *))                                 \
	X(mem_alloc, "cuMemAlloc_v2", (pointer *, size_t))                                                \
	X(mem_free, "cuMemFree_v2", (pointer))                                                            \
	X(mem_host_alloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                  \
	X(mem_free_host, "cuMemFreeHost", (void *))                                                       \
	X(mem_host_get_device_pointer, "cuMemHostGetDevicePointer_v2", (pointer *, void *, unsigned))     \
	X(stream_create, "cuStreamCreate", (void **, unsigned))                                           \
	X(stream_destroy, "cuStreamDestroy_v2", (void *))                                                 \
	X(stream_query, "cuStreamQuery", (void *))                                                        \
	X(event_create, "cuEventCreate", (void **, unsigned))                                             \
	X(event_destroy, "cuEventDestroy_v2", (void *))                                                   \
	X(event_record, "cuEventRecord", (void *, void *))                                                \
	X(event_query, "cuEventQuery", (void *))                                                          \
	X(memcpy_async, "cuMemcpyAsync", (pointer, pointer, size_t, void *))                              \
	X(launch_kernel, "cuLaunchKernel", (void *, unsigned, unsigned, unsigned, unsigned, unsigned,     \
					    unsigned, unsigned, void *, void **, void **))
// What newer ones have; NULL without it.
#define OPTIONAL(X)                                                                                       \
	X(mem_get_address_range, "cuMemGetAddressRange_v2", (pointer *, size_t *, pointer))               \
	X(mem_get_handle, "cuMemGetHandleForAddressRange",                                                \
	  (void *, pointer, size_t, int, unsigned long long))                                             \
	X(flush_writes, "cuFlushGPUDirectRDMAWrites", (int, int))                                         \
	X(ipc_get_handle, "cuIpcGetMemHandle", (struct tutti_cuda_ipc *, pointer))                        \
	X(ipc_open_handle, "cuIpcOpenMemHandle_v2", (pointer *, struct tutti_cuda_ipc, unsigned))         \
	X(ipc_close_handle, "cuIpcCloseMemHandle", (pointer))                                             \
	X(mem_granularity, "cuMemGetAllocationGranularity", (size_t *, const struct properties *, int))   \
	X(mem_create, "cuMemCreate", (uint64_t *, size_t, const struct properties *, unsigned long long)) \
	X(mem_release, "cuMemRelease", (uint64_t))                                                        \
	X(mem_reserve, "cuMemAddressReserve", (pointer *, size_t, size_t, pointer, unsigned long long))   \
	X(mem_unreserve, "cuMemAddressFree", (pointer, size_t))                                           \
	X(mem_map, "cuMemMap", (pointer, size_t, size_t, uint64_t, unsigned long long))                   \
	X(mem_unmap, "cuMemUnmap", (pointer, size_t))                                                     \
	X(mem_set_access, "cuMemSetAccess", (pointer, size_t, const struct access *, size_t))             \
	X(mem_export, "cuMemExportToShareableHandle", (void *, uint64_t, int, unsigned long long))        \
	X(mem_import, "cuMemImportFromShareableHandle", (uint64_t *, void *, int))                        \
	X(synchronize, "cuCtxSynchronize", (void))                                                        \
	X(enable_peer_access, "cuCtxEnablePeerAccess", (void *, unsigned))                                \
	X(pointer_get_attribute, "cuPointerGetAttribute", (void *, int, pointer))                         \
	X(device_get_uuid, "cuDeviceGetUuid", (unsigned char *, int))                                     \
	X(device_get_instance_uuid, "cuDeviceGetUuid_v2", (unsigned char *, int))                         \
	X(device_get_pci_bus_id, "cuDeviceGetPCIBusId", (char *, int, int))                               \
	X(primary_state, "cuDevicePrimaryCtxGetState", (int, unsigned *, int *))                          \
	X(func_load, "cuFuncLoad", (void *))                                                              \
	X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *))                                     \
	X(stream_is_capturing, "cuStreamIsCapturing", (void *, int *))                                    \
	X(stream_wait_value, "cuStreamWaitValue64_v2", (void *, pointer, uint64_t, unsigned))             \
	X(stream_write_value, "cuStreamWriteValue64_v2", (void *, pointer, uint64_t, unsigned))

struct tutti_cuda {
#define FIELD(name, symbol, args) int(*name) args;
	FUNCTIONS(FIELD)
	OPTIONAL(FIELD)
};

int tutti_cuda_open(const char *path, tutti_cuda **lib, char *why, size_t n)
{
	void *h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!h) {
		snprintf(why, n, "%s", dlerror());
		return -1;
	}
	tutti_cuda *l = calloc(1, sizeof *l);
	if (!l) {
		snprintf(why, n, "no memory");
		return -1;
	}
#define TAKE(name, symbol, args) l->name = (int(*) args)dlsym(h, symbol);
#define REQUIRE(name, symbol, args)                                                                       \
	TAKE(name, symbol, args)                                                                          \
	if (!l->name) {                                                                                   \
		snprintf(why, n, "%s has no %s: install a driver of CUDA 11 or newer", path, symbol);     \
		free(l);                                                                                  \
		return -1;                                                                                \
	}
	FUNCTIONS(REQUIRE)
	OPTIONAL(TAKE)
	*lib = l;
	return 0;
}

int tutti_cuda_loaded(const char *path)
{
	void *h = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
	if (!h)
		return 0;
	int n, (*count)(int *) = (int (*)(int *))dlsym(h, "cuDeviceGetCount");
	int loaded = count && count(&n) == 0; // not before cuInit
	dlclose(h);
	return loaded;
}

const char *tutti_cuda_error_name(tutti_cuda *l, int result)
{
	const char *s = NULL;
	return l->get_error_name(result, &s) ? NULL : s;
}

const char *tutti_cuda_error_text(tutti_cuda *l, int result)
{
	const char *s = NULL;
	return l->get_error_string(result, &s) ? NULL : s;
}

int tutti_cuda_init(tutti_cuda *l) { return l->init(0); }
int tutti_cuda_version(tutti_cuda *l, int *version) { return l->driver_get_version(version); }
int tutti_cuda_count(tutti_cuda *l, int *n) { return l->device_get_count(n); }
int tutti_cuda_device(tutti_cuda *l, int ordinal, int *device) { return l->device_get(device, ordinal); }

int tutti_cuda_active(tutti_cuda *l, int device, int *active)
{
	unsigned flags;
	*active = 0;
	return l->primary_state ? l->primary_state(device, &flags, active) : 0;
}

int tutti_cuda_name(tutti_cuda *l, int device, char *name) { return l->device_get_name(name, TUTTI_CUDA_NAME, device); }

int tutti_cuda_memory(tutti_cuda *l, int device, uint64_t *bytes)
{
	size_t n = 0;
	int r = l->device_total_mem(&n, device);
	*bytes = n;
	return r;
}

int tutti_cuda_uuid(tutti_cuda *l, int device, unsigned char *uuid)
{
	int (*f)(unsigned char *, int) = l->device_get_instance_uuid ? l->device_get_instance_uuid : l->device_get_uuid;
	return f ? f(uuid, device) : TUTTI_CUDA_NOT_SUPPORTED;
}

int tutti_cuda_pci(tutti_cuda *l, int device, char *address)
{
	return l->device_get_pci_bus_id ? l->device_get_pci_bus_id(address, TUTTI_CUDA_PCI, device) :
					  TUTTI_CUDA_NOT_SUPPORTED;
}

int tutti_cuda_attribute(tutti_cuda *l, int device, int attribute, int *value)
{
	return l->device_get_attribute(value, attribute, device);
}

int tutti_cuda_retain(tutti_cuda *l, int device, void **context) { return l->retain(context, device); }
int tutti_cuda_release(tutti_cuda *l, int device) { return l->release(device); }
int tutti_cuda_has_memory_operations(tutti_cuda *l) { return l->stream_wait_value && l->stream_write_value; }

// IN calls a function with the context current. The thread's former one is current afterwards: that
// fails only if the function has changed the stack of contexts, which none does. While the program
// captures a stream, most functions would end the capture unless the thread's mode is RELAXED, 2;
// none of them uses what the capture is about.
#define IN(context, call)                                                                                 \
	do {                                                                                              \
		void *was;                                                                                \
		int mode = 2, result = l->push(context);                                                  \
		if (result)                                                                               \
			return result;                                                                    \
		if (l->capture_mode)                                                                      \
			l->capture_mode(&mode);                                                           \
		result = (call);                                                                          \
		if (l->capture_mode)                                                                      \
			l->capture_mode(&mode);                                                           \
		l->pop(&was);                                                                             \
		return result;                                                                            \
	} while (0)

int tutti_cuda_module_load(tutti_cuda *l, void *context, const char *image, void **module, char *log)
{
	int options[] = {5, 6}; // CU_JIT_ERROR_LOG_BUFFER, and its size
	void *values[] = {log, (void *)(uintptr_t)TUTTI_CUDA_LOG};
	IN(context, l->module_load(module, image, 2, options, values));
}

int tutti_cuda_module_unload(tutti_cuda *l, void *context, void *module) { IN(context, l->module_unload(module)); }

int tutti_cuda_function(tutti_cuda *l, void *context, void *module, const char *name, void **function)
{
	IN(context, l->module_get_function(function, module, name));
}

// A query of an attribute loads a function in every driver with lazy loading; cuFuncLoad says so by
// its name, where it exists.
static int load(tutti_cuda *l, void *function)
{
	int registers, result = l->func_get_attribute(&registers, 4, function); // CU_FUNC_ATTRIBUTE_NUM_REGS
	return result || !l->func_load ? result : l->func_load(function);
}

int tutti_cuda_function_load(tutti_cuda *l, void *context, void *function) { IN(context, load(l, function)); }

int tutti_cuda_alloc(tutti_cuda *l, void *context, size_t n, uint64_t *at) { IN(context, l->mem_alloc(at, n)); }
int tutti_cuda_free(tutti_cuda *l, void *context, uint64_t at) { IN(context, l->mem_free(at)); }

int tutti_cuda_has_export(tutti_cuda *l) { return l->mem_get_address_range && l->mem_get_handle; }
int tutti_cuda_has_flush(tutti_cuda *l) { return l->flush_writes != NULL; }

// The driver wants whole pages of the host. An allocation that ends within one has all of it: the
// GPU's pages are larger.
static int export(tutti_cuda *l, uint64_t at, uint64_t page, int *fd, uint64_t *offset)
{
	pointer base;
	size_t n;
	int result = l->mem_get_address_range(&base, &n, at);
	if (result)
		return result;
	pointer first = base & ~(page - 1), beyond = (base + n + page - 1) & ~(page - 1);
	*offset = at - first;
	return l->mem_get_handle(fd, first, beyond - first, 1, 0); // CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
}

int tutti_cuda_export(tutti_cuda *l, void *context, uint64_t at, uint64_t page, int *fd, uint64_t *offset)
{
	IN(context, export(l, at, page, fd, offset));
}

int tutti_cuda_flush(tutti_cuda *l, void *context)
{
	// CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
	IN(context, l->flush_writes(0, 100));
}

int tutti_cuda_has_ipc(tutti_cuda *l)
{
	return l->mem_get_address_range && l->ipc_get_handle && l->ipc_open_handle && l->ipc_close_handle;
}

static int allocation(tutti_cuda *l, uint64_t at, uint64_t *base, uint64_t *n)
{
	size_t size = 0;
	int result = l->mem_get_address_range(base, &size, at);
	*n = size;
	return result;
}

int tutti_cuda_allocation(tutti_cuda *l, void *context, uint64_t at, uint64_t *base, uint64_t *n)
{
	IN(context, allocation(l, at, base, n));
}

static int number(tutti_cuda *l, uint64_t at, uint64_t *id)
{
	*id = 0;
	return l->pointer_get_attribute ? l->pointer_get_attribute(id, 7, at) : 0; // CU_POINTER_ATTRIBUTE_BUFFER_ID
}

int tutti_cuda_allocation_number(tutti_cuda *l, void *context, uint64_t at, uint64_t *id)
{
	IN(context, number(l, at, id));
}

int tutti_cuda_ipc_get(tutti_cuda *l, void *context, uint64_t base, struct tutti_cuda_ipc *handle)
{
	IN(context, l->ipc_get_handle(handle, base));
}

int tutti_cuda_ipc_open(tutti_cuda *l, void *context, const struct tutti_cuda_ipc *handle, uint64_t *at)
{
	IN(context, l->ipc_open_handle(at, *handle, 1)); // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
}

int tutti_cuda_ipc_close(tutti_cuda *l, void *context, uint64_t at) { IN(context, l->ipc_close_handle(at)); }

int tutti_cuda_has_physical(tutti_cuda *l)
{
	return l->mem_granularity && l->mem_create && l->mem_release && l->mem_reserve && l->mem_unreserve && l->mem_map &&
	       l->mem_unmap && l->mem_set_access && l->mem_export && l->mem_import && l->synchronize;
}

// The types of CU_MEM_ALLOCATION_TYPE_PINNED and CU_MEM_LOCATION_TYPE_DEVICE are both 1.
static struct properties properties_of(int device, int types, int rdma)
{
	struct properties p = {.type = 1, .types = types, .location = {1, device}, .flags = {.rdma = rdma}};
	return p;
}

int tutti_cuda_granularity(tutti_cuda *l, void *context, int device, int types, int rdma, size_t *n)
{
	struct properties p = properties_of(device, types, rdma);
	IN(context, l->mem_granularity(n, &p, 0)); // CU_MEM_ALLOC_GRANULARITY_MINIMUM
}

int tutti_cuda_create(tutti_cuda *l, void *context, int device, int types, int rdma, size_t n, uint64_t *handle)
{
	struct properties p = properties_of(device, types, rdma);
	IN(context, l->mem_create(handle, n, &p, 0));
}

int tutti_cuda_release_handle(tutti_cuda *l, void *context, uint64_t handle) { IN(context, l->mem_release(handle)); }

int tutti_cuda_reserve(tutti_cuda *l, void *context, size_t n, uint64_t *at)
{
	IN(context, l->mem_reserve(at, n, 0, 0, 0));
}

int tutti_cuda_unreserve(tutti_cuda *l, void *context, uint64_t at, size_t n)
{
	IN(context, l->mem_unreserve(at, n));
}

int tutti_cuda_map(tutti_cuda *l, void *context, uint64_t at, size_t n, uint64_t handle)
{
	IN(context, l->mem_map(at, n, 0, handle, 0));
}

int tutti_cuda_unmap(tutti_cuda *l, void *context, uint64_t at, size_t n) { IN(context, l->mem_unmap(at, n)); }

int tutti_cuda_give_access(tutti_cuda *l, void *context, uint64_t at, size_t n, int device)
{
	struct access a = {1, device, 3}; // CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE
	IN(context, l->mem_set_access(at, n, &a, 1));
}

int tutti_cuda_export_descriptor(tutti_cuda *l, void *context, uint64_t handle, int *fd)
{
	IN(context, l->mem_export(fd, handle, 1, 0));
}

int tutti_cuda_export_fabric(tutti_cuda *l, void *context, uint64_t handle, struct tutti_cuda_fabric *fabric)
{
	IN(context, l->mem_export(fabric, handle, 8, 0));
}

int tutti_cuda_import_descriptor(tutti_cuda *l, void *context, int fd, uint64_t *handle)
{
	IN(context, l->mem_import(handle, (void *)(intptr_t)fd, 1));
}

int tutti_cuda_import_fabric(tutti_cuda *l, void *context, const struct tutti_cuda_fabric *fabric, uint64_t *handle)
{
	IN(context, l->mem_import(handle, (void *)fabric, 8));
}

int tutti_cuda_synchronize(tutti_cuda *l, void *context) { IN(context, l->synchronize()); }

static int enable_peer(tutti_cuda *l, void *peer)
{
	int result = l->enable_peer_access ? l->enable_peer_access(peer, 0) : 801; // CUDA_ERROR_NOT_SUPPORTED
	return result == 704 ? 0 : result;					   // CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
}

int tutti_cuda_enable_peer(tutti_cuda *l, void *context, void *peer) { IN(context, enable_peer(l, peer)); }

int tutti_cuda_alloc_host(tutti_cuda *l, void *context, size_t n, void **at)
{
	IN(context, l->mem_host_alloc(at, n, 1 | 2)); // CU_MEMHOSTALLOC_PORTABLE, _DEVICEMAP
}

int tutti_cuda_free_host(tutti_cuda *l, void *context, void *at) { IN(context, l->mem_free_host(at)); }

int tutti_cuda_host_address(tutti_cuda *l, void *context, void *at, uint64_t *device)
{
	IN(context, l->mem_host_get_device_pointer(device, at, 0));
}

int tutti_cuda_stream_create(tutti_cuda *l, void *context, uintptr_t *stream)
{
	IN(context, l->stream_create((void **)stream, 1)); // CU_STREAM_NON_BLOCKING
}

int tutti_cuda_stream_destroy(tutti_cuda *l, void *context, uintptr_t stream)
{
	IN(context, l->stream_destroy((void *)stream));
}

int tutti_cuda_stream_query(tutti_cuda *l, void *context, uintptr_t stream)
{
	IN(context, l->stream_query((void *)stream));
}

int tutti_cuda_stream_captured(tutti_cuda *l, void *context, uintptr_t stream, int *status)
{
	*status = 0;
	if (!l->stream_is_capturing)
		return 0;
	IN(context, l->stream_is_capturing((void *)stream, status));
}

int tutti_cuda_event_create(tutti_cuda *l, void *context, void **event)
{
	IN(context, l->event_create(event, 2)); // CU_EVENT_DISABLE_TIMING
}

int tutti_cuda_event_destroy(tutti_cuda *l, void *context, void *event) { IN(context, l->event_destroy(event)); }

int tutti_cuda_event_record(tutti_cuda *l, void *context, void *event, uintptr_t stream)
{
	IN(context, l->event_record(event, (void *)stream));
}

int tutti_cuda_event_query(tutti_cuda *l, void *context, void *event) { IN(context, l->event_query(event)); }

int tutti_cuda_copy(tutti_cuda *l, void *context, uintptr_t stream, uint64_t dst, uint64_t src, size_t n)
{
	IN(context, l->memcpy_async(dst, src, n, (void *)stream));
}

int tutti_cuda_wait(tutti_cuda *l, void *context, uintptr_t stream, uint64_t word, uint64_t value)
{
	IN(context, l->stream_wait_value((void *)stream, word, value, 0)); // CU_STREAM_WAIT_VALUE_GEQ
}

int tutti_cuda_write(tutti_cuda *l, void *context, uintptr_t stream, uint64_t word, uint64_t value)
{
	IN(context, l->stream_write_value((void *)stream, word, value, 0)); // with a memory barrier before it
}

int tutti_cuda_launch(tutti_cuda *l, void *context, uintptr_t stream, void *function, unsigned grid, unsigned block,
		      unsigned shared, void *params)
{
	void *args[] = {params};
	IN(context, l->launch_kernel(function, grid, 1, 1, block, 1, 1, shared, (void *)stream, args, NULL));
}
