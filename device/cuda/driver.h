// What the Go files call of the CUDA driver. The types are opaque here and no header of CUDA is
// needed. Every function that takes a context makes it current for the call, and the caller's one
// again afterwards: goroutines change threads, and the threads of other programs in the process
// have contexts of their own. Functions return a CUresult, 0 for success.
#ifndef TUTTI_CUDA_H
#define TUTTI_CUDA_H

#include <stddef.h>
#include <stdint.h>

typedef struct tutti_cuda tutti_cuda; // the functions of an open library

enum { TUTTI_CUDA_NAME = 256, TUTTI_CUDA_UUID = 16, TUTTI_CUDA_PCI = 32, TUTTI_CUDA_LOG = 4096 };

// The names and values of cuda.h.
enum {
	TUTTI_CUDA_NOT_INITIALIZED = 3,
	TUTTI_CUDA_NO_DEVICE = 100,
	TUTTI_CUDA_NOT_READY = 600,
	TUTTI_CUDA_NOT_SUPPORTED = 801,
};

#pragma GCC visibility push(hidden)

// tutti_cuda_open opens a library and looks its functions up. It returns 0, or -1 with the reason
// in why. The library stays open.
int tutti_cuda_open(const char *path, tutti_cuda **lib, char *why, size_t n);

// tutti_cuda_loaded reports whether the process has opened and initialized a library.
int tutti_cuda_loaded(const char *path);

const char *tutti_cuda_error_name(tutti_cuda *l, int result); // NULL if the driver knows none
const char *tutti_cuda_error_text(tutti_cuda *l, int result);

int tutti_cuda_init(tutti_cuda *l);
int tutti_cuda_version(tutti_cuda *l, int *version);
int tutti_cuda_count(tutti_cuda *l, int *n);
int tutti_cuda_device(tutti_cuda *l, int ordinal, int *device);
// Whether the process has the primary context of a device; 0 if the driver cannot tell.
int tutti_cuda_active(tutti_cuda *l, int device, int *active);
int tutti_cuda_name(tutti_cuda *l, int device, char *name); // TUTTI_CUDA_NAME bytes
int tutti_cuda_memory(tutti_cuda *l, int device, uint64_t *bytes);
int tutti_cuda_uuid(tutti_cuda *l, int device, unsigned char *uuid); // TUTTI_CUDA_UUID bytes
int tutti_cuda_pci(tutti_cuda *l, int device, char *address);	     // TUTTI_CUDA_PCI bytes
int tutti_cuda_attribute(tutti_cuda *l, int device, int attribute, int *value);
int tutti_cuda_retain(tutti_cuda *l, int device, void **context);
int tutti_cuda_release(tutti_cuda *l, int device);
// Whether the library has cuStreamWaitValue64_v2 and cuStreamWriteValue64_v2.
int tutti_cuda_has_memory_operations(tutti_cuda *l);

// The image ends with a zero byte. The compiler's messages go to log.
int tutti_cuda_module_load(tutti_cuda *l, void *context, const char *image, void **module, char *log);
int tutti_cuda_module_unload(tutti_cuda *l, void *context, void *module);
// Finds a function without loading it.
int tutti_cuda_function(tutti_cuda *l, void *context, void *module, const char *name, void **function);
// Loads a function onto the device.
int tutti_cuda_function_load(tutti_cuda *l, void *context, void *function);

int tutti_cuda_alloc(tutti_cuda *l, void *context, size_t n, uint64_t *at);
int tutti_cuda_free(tutti_cuda *l, void *context, uint64_t at);
// Makes a DMA buffer of the pages that have the allocation of the byte at an address, and says
// where that byte is in it.
int tutti_cuda_export(tutti_cuda *l, void *context, uint64_t at, uint64_t page, int *fd, uint64_t *offset);
// Has later work of the context see what other devices have written.
int tutti_cuda_flush(tutti_cuda *l, void *context);
// Whether the library has the functions for these two.
int tutti_cuda_has_export(tutti_cuda *l);
int tutti_cuda_has_flush(tutti_cuda *l);
// Handles by which other processes map an allocation.
struct tutti_cuda_ipc { // CUipcMemHandle
	char bytes[64];
};
// Whether the library has the functions for these handles.
int tutti_cuda_has_ipc(tutti_cuda *l);
// The allocation of an address; and the number that no other allocation of the process has had, 0
// if the driver has none.
int tutti_cuda_allocation(tutti_cuda *l, void *context, uint64_t at, uint64_t *base, uint64_t *n);
int tutti_cuda_allocation_number(tutti_cuda *l, void *context, uint64_t at, uint64_t *id);
int tutti_cuda_ipc_get(tutti_cuda *l, void *context, uint64_t base, struct tutti_cuda_ipc *handle);
// Maps the allocation of another process for the context's GPU, which gets access to the memory of
// the allocation's one. at is its first byte.
int tutti_cuda_ipc_open(tutti_cuda *l, void *context, const struct tutti_cuda_ipc *handle, uint64_t *at);
int tutti_cuda_ipc_close(tutti_cuda *l, void *context, uint64_t at);

// Memory that has handles for other processes, of the types in CUmemAllocationHandleType: 1 is a
// descriptor, 8 one of the fabric. n is a multiple of the granularity. A handle of the process is
// not 0, and keeps the memory until it is released; so does a mapping.
struct tutti_cuda_fabric { // CUmemFabricHandle
	char bytes[64];
};
// Whether the library has the functions for it.
int tutti_cuda_has_physical(tutti_cuda *l);
int tutti_cuda_granularity(tutti_cuda *l, void *context, int device, int types, int rdma, size_t *n);
int tutti_cuda_create(tutti_cuda *l, void *context, int device, int types, int rdma, size_t n, uint64_t *handle);
int tutti_cuda_release_handle(tutti_cuda *l, void *context, uint64_t handle);
int tutti_cuda_reserve(tutti_cuda *l, void *context, size_t n, uint64_t *at);
int tutti_cuda_unreserve(tutti_cuda *l, void *context, uint64_t at, size_t n);
int tutti_cuda_map(tutti_cuda *l, void *context, uint64_t at, size_t n, uint64_t handle);
int tutti_cuda_unmap(tutti_cuda *l, void *context, uint64_t at, size_t n);
// Has a device read and write what is mapped.
int tutti_cuda_give_access(tutti_cuda *l, void *context, uint64_t at, size_t n, int device);
int tutti_cuda_export_descriptor(tutti_cuda *l, void *context, uint64_t handle, int *fd);
int tutti_cuda_export_fabric(tutti_cuda *l, void *context, uint64_t handle, struct tutti_cuda_fabric *fabric);
int tutti_cuda_import_descriptor(tutti_cuda *l, void *context, int fd, uint64_t *handle);
int tutti_cuda_import_fabric(tutti_cuda *l, void *context, const struct tutti_cuda_fabric *fabric, uint64_t *handle);
// Waits until all work of a context has ended.
int tutti_cuda_synchronize(tutti_cuda *l, void *context);

// Gives the GPU of a context access to the memory of another one's, which need not be the first
// time.
int tutti_cuda_enable_peer(tutti_cuda *l, void *context, void *peer);
// Pinned memory that every device of the process can use.
int tutti_cuda_alloc_host(tutti_cuda *l, void *context, size_t n, void **at);
int tutti_cuda_free_host(tutti_cuda *l, void *context, void *at);
int tutti_cuda_host_address(tutti_cuda *l, void *context, void *at, uint64_t *device);

// A stream is a CUstream as a number: 1 and 2 are streams, too. Those that are created do not wait
// for the context's default stream. Events measure no time.
int tutti_cuda_stream_create(tutti_cuda *l, void *context, uintptr_t *stream);
int tutti_cuda_stream_destroy(tutti_cuda *l, void *context, uintptr_t stream);
int tutti_cuda_stream_query(tutti_cuda *l, void *context, uintptr_t stream);
// The status is not 0 if the stream's work goes into a graph.
int tutti_cuda_stream_captured(tutti_cuda *l, void *context, uintptr_t stream, int *status);
int tutti_cuda_event_create(tutti_cuda *l, void *context, void **event);
int tutti_cuda_event_destroy(tutti_cuda *l, void *context, void *event);
int tutti_cuda_event_record(tutti_cuda *l, void *context, void *event, uintptr_t stream);
int tutti_cuda_event_query(tutti_cuda *l, void *context, void *event);

int tutti_cuda_copy(tutti_cuda *l, void *context, uintptr_t stream, uint64_t dst, uint64_t src, size_t n);
int tutti_cuda_wait(tutti_cuda *l, void *context, uintptr_t stream, uint64_t word, uint64_t value);
int tutti_cuda_write(tutti_cuda *l, void *context, uintptr_t stream, uint64_t word, uint64_t value);
// The function takes one parameter, a struct by value, which is copied before the call returns.
int tutti_cuda_launch(tutti_cuda *l, void *context, uintptr_t stream, void *function, unsigned grid, unsigned block,
		      unsigned shared, void *params);

#pragma GCC visibility pop

#endif
