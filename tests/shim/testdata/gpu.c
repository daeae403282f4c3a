/* Operations on the memory of CUDA devices, in the order of streams of the program, with the driver
 * that the linker finds: the fake one of device/cuda/fake, whose kernels are in the file KERNELS. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>

#include "test.h"

enum { N = 5000, NOT_READY = 600, PINNED = 3 };

/* What the program uses of the driver: the names that the library exports. */
#define DRIVER(X) \
	X(cuInit, (unsigned)) \
	X(cuDevicePrimaryCtxRetain, (void **, int)) \
	X(cuDevicePrimaryCtxRelease_v2, (int)) \
	X(cuCtxPushCurrent_v2, (void *)) \
	X(cuMemAlloc_v2, (uint64_t *, size_t)) \
	X(cuMemFree_v2, (uint64_t)) \
	X(cuMemHostAlloc, (void **, size_t, unsigned)) \
	X(cuMemFreeHost, (void *)) \
	X(cuStreamCreate, (void **, unsigned)) \
	X(cuStreamDestroy_v2, (void *)) \
	X(cuStreamQuery, (void *)) \
	X(cuMemcpyAsync, (uint64_t, uint64_t, size_t, void *)) \
	X(cuStreamWaitValue64_v2, (void *, uint64_t, uint64_t, unsigned))
#define FIELD(name, args) int(*name) args;
static struct {
	DRIVER(FIELD)
} cu;

#define CU(call) \
	do { \
		int result_ = (call); \
		if (result_ != 0) \
			FAIL("%s is %d", #call, result_); \
	} while (0)

static void *library;

static void *look_up(const char *name)
{
	void *found = dlsym(library, name);

	if (found == NULL)
		FAIL("%s", dlerror());
	return found;
}

static tutti_group g;
static int32_t rank, size;
static int device;

/* finish waits until a stream has done its work. */
static void finish(void *stream)
{
	int result;

	while ((result = cu.cuStreamQuery(stream)) == NOT_READY)
		sched_yield();
	CU(result);
}

/* in_order has operations between copies of the same stream, with no wait between them. */
static void in_order(void *stream)
{
	int32_t *in, *out;
	uint64_t x, y;
	tutti_work sum, all;
	tutti_op op;
	int i, r, ranks = size * (size - 1) / 2;

	CU(cu.cuMemHostAlloc((void **)&in, N * 4, PINNED));
	CU(cu.cuMemHostAlloc((void **)&out, N * 4 * 2, PINNED));
	CU(cu.cuMemAlloc_v2(&x, N * 4));
	CU(cu.cuMemAlloc_v2(&y, N * 4 * (size_t)size));
	for (i = 0; i < N; i++)
		in[i] = rank * N + i;
	CU(cu.cuMemcpyAsync(x, (uintptr_t)in, N * 4, stream));

	op = tutti_op_of(TUTTI_OP_ALLREDUCE, tutti_device_buffer((void *)x, N, TUTTI_INT32, device),
	                 tutti_device_buffer((void *)x, N, TUTTI_INT32, device));
	op.reduction = TUTTI_SUM;
	op.stream = stream;
	OK(tutti_start(g, &op, &sum));
	CU(cu.cuMemcpyAsync((uintptr_t)out, x, N * 4, stream));

	op = tutti_op_of(TUTTI_OP_ALLGATHER, tutti_device_buffer((void *)y, (uint64_t)N * size, TUTTI_INT32, device),
	                 tutti_device_buffer((void *)x, N, TUTTI_INT32, device));
	op.stream = stream;
	OK(tutti_start(g, &op, &all));
	CU(cu.cuMemcpyAsync((uintptr_t)(out + N), y + (size - 1) * N * 4, N * 4, stream));
	finish(stream);
	for (i = 0; i < N; i++)
		TRUE(out[i] == ranks * N + size * i && out[N + i] == out[i]);
	OK(tutti_work_wait(sum, -1));
	OK(tutti_work_wait(all, -1));
	OK(tutti_work_release(sum));
	OK(tutti_work_release(all));

	/* Blocking calls. */
	for (r = 0; r < size; r++) {
		op = tutti_op_of(TUTTI_OP_BROADCAST, tutti_device_buffer((void *)x, N, TUTTI_INT32, device),
		                 tutti_device_buffer((void *)x, N, TUTTI_INT32, device));
		op.stream = stream;
		op.peer = r;
		CU(cu.cuMemcpyAsync(x, (uintptr_t)in, N * 4, stream));
		OK(tutti_do(g, &op));
		CU(cu.cuMemcpyAsync((uintptr_t)out, x, N * 4, stream));
		finish(stream);
		for (i = 0; i < N; i++)
			TRUE(out[i] == r * N + i);
	}
	CU(cu.cuMemFree_v2(x));
	CU(cu.cuMemFree_v2(y));
	CU(cu.cuMemFreeHost(in));
	CU(cu.cuMemFreeHost(out));
}

/* messages go around the ranks, in the order of the stream: what follows a send does not change it. */
static void messages(void *stream)
{
	int32_t *in, *out, right = (rank + 1) % size, left = (rank + size - 1) % size;
	uint64_t x, y;
	tutti_work sent, got;
	tutti_status status;
	tutti_op send, receive;
	int i, n;

	CU(cu.cuMemHostAlloc((void **)&in, N * 4, PINNED));
	CU(cu.cuMemHostAlloc((void **)&out, N * 4, PINNED));
	CU(cu.cuMemAlloc_v2(&x, N * 4));
	CU(cu.cuMemAlloc_v2(&y, N * 4));
	for (n = 1; n <= N; n += N - 1) {
		send = tutti_op_of(TUTTI_OP_SEND, tutti_host_buffer(NULL, 0, TUTTI_INT32),
		                   tutti_device_buffer((void *)x, (uint64_t)n, TUTTI_INT32, device));
		receive = tutti_op_of(TUTTI_OP_RECV, tutti_device_buffer((void *)y, (uint64_t)n, TUTTI_INT32, device),
		                      tutti_host_buffer(NULL, 0, TUTTI_INT32));
		send.stream = receive.stream = stream;
		send.peer = right;
		receive.peer = left;
		send.tag = receive.tag = 7;
		for (i = 0; i < n; i++)
			in[i] = rank * N + i;
		CU(cu.cuMemcpyAsync(x, (uintptr_t)in, (size_t)n * 4, stream));
		OK(tutti_start(g, &send, &sent));
		CU(cu.cuMemcpyAsync(x, y, (size_t)n * 4, stream));
		OK(tutti_start(g, &receive, &got));
		CU(cu.cuMemcpyAsync((uintptr_t)out, y, (size_t)n * 4, stream));
		finish(stream);
		for (i = 0; i < n; i++)
			TRUE(out[i] == left * N + i);
		OK(tutti_work_wait(sent, -1));
		OK(tutti_work_wait(got, -1));
		OK(tutti_work_release(sent));
		OK(tutti_work_release(got));

		/* Blocking calls. */
		CU(cu.cuMemcpyAsync(x, (uintptr_t)in, (size_t)n * 4, stream));
		receive.peer = TUTTI_ANY_RANK;
		receive.tag = TUTTI_ANY_TAG;
		receive.status = &status;
		if (rank == 0)
			OK(tutti_do(g, &send));
		OK(tutti_do(g, &receive));
		if (rank != 0)
			OK(tutti_do(g, &send));
		TRUE(status.from == left && status.tag == 7 && status.count == (uint64_t)n);
		CU(cu.cuMemcpyAsync((uintptr_t)out, y, (size_t)n * 4, stream));
		finish(stream);
		for (i = 0; i < n; i++)
			TRUE(out[i] == left * N + i);
		OK(tutti_barrier(g));
	}
	CU(cu.cuMemFree_v2(x));
	CU(cu.cuMemFree_v2(y));
	CU(cu.cuMemFreeHost(in));
	CU(cu.cuMemFreeHost(out));
}

/* behind has an operation behind work that does not end yet. */
static void behind(void *stream)
{
	volatile uint64_t *word;
	uint64_t x;
	tutti_work work;
	tutti_op op;

	CU(cu.cuMemHostAlloc((void **)&word, 8, PINNED));
	CU(cu.cuMemAlloc_v2(&x, 64));
	*word = 0;
	CU(cu.cuStreamWaitValue64_v2(stream, (uintptr_t)word, 1, 0));
	op = tutti_op_of(TUTTI_OP_ALLREDUCE, tutti_device_buffer((void *)x, 16, TUTTI_INT32, device),
	                 tutti_device_buffer((void *)x, 16, TUTTI_INT32, device));
	op.reduction = TUTTI_MAX;
	op.stream = stream;
	OK(tutti_start(g, &op, &work));
	CODE(TUTTI_EBUSY, tutti_work_wait(work, 20000000));
	TRUE(cu.cuStreamQuery(stream) == NOT_READY);
	*word = 1;
	OK(tutti_work_wait(work, -1));
	finish(stream);
	OK(tutti_work_release(work));
	CU(cu.cuMemFree_v2(x));
	CU(cu.cuMemFreeHost((void *)word));
}

/* refused has operations that cannot be. The group is as usable as before. */
static void refused(void *stream)
{
	void (*capture)(uintptr_t, int) = (void (*)(uintptr_t, int))look_up("fake_capture");
	int32_t host[16] = {0};
	uint64_t x;
	tutti_work work;
	tutti_op op;

	CU(cu.cuMemAlloc_v2(&x, 64));
	op = tutti_op_of(TUTTI_OP_ALLREDUCE, tutti_device_buffer((void *)x, 16, TUTTI_INT32, device),
	                 tutti_host_buffer(host, 16, TUTTI_INT32));
	op.reduction = TUTTI_MAX;
	op.stream = stream;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	SAYS("one location");
	op.src = tutti_device_buffer((void *)x, 16, TUTTI_INT32, 7);
	CODE(TUTTI_EUNSUPPORTED, tutti_do(g, &op));
	SAYS("src is memory of CUDA device 7");
	CODE(TUTTI_EUNSUPPORTED, tutti_start(g, &op, &work));
	op.src = op.dst;
	capture((uintptr_t)stream, 1);
	CODE(TUTTI_EUNSUPPORTED, tutti_do(g, &op));
	SAYS("captured");
	capture((uintptr_t)stream, 0);
	OK(tutti_do(g, &op));
	op.kind = TUTTI_OP_SEND;
	op.peer = (rank + 1) % size;
	op.src.device = 7;
	CODE(TUTTI_EUNSUPPORTED, tutti_do(g, &op));
	SAYS("src is memory of CUDA device 7");
	op.src.device = device;
	op.peer = rank;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	SAYS("this rank itself");
	op.peer = (rank + 1) % size;
	capture((uintptr_t)stream, 1);
	CODE(TUTTI_EUNSUPPORTED, tutti_do(g, &op));
	SAYS("captured");
	OK(tutti_start(g, &op, &work));
	CODE(TUTTI_EUNSUPPORTED, tutti_work_wait(work, -1));
	OK(tutti_work_release(work));
	capture((uintptr_t)stream, 0);
	CU(cu.cuMemFree_v2(x));
}

/* loads returns how many kernels were loaded. */
static int loads(void)
{
	const char *(*calls)(int, int *) = (const char *(*)(int, int *))look_up("fake_calls"), *name;
	int i, n;

	for (i = 0; (name = calls(i, &n)) != NULL; i++)
		if (strcmp(name, "cuFuncLoad") == 0)
			return n;
	return 0;
}

int main(void)
{
	void *context, *streams[3] = {NULL};
	int i, loaded;

	TRUE(tutti_has("cuda") == 1 && tutti_has("streams") == 1);
	library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	if (library == NULL)
		FAIL("%s", dlerror());
#define LOOK_UP(name, args) *(void **)&cu.name = look_up(#name);
	DRIVER(LOOK_UP)
	const char *(*kernels)(const char *) = (const char *(*)(const char *))look_up("fake_kernels");
	TRUE(kernels(getenv("KERNELS")) == NULL);

	TRUE(tutti_has("cuda:0") == 1 && tutti_has("cuda:1") == 1);
	TRUE(tutti_has("cuda:7") == 0 && tutti_has("cuda:") == 0 && tutti_has("cuda:x") == 0 && tutti_has("cuda:-1") == 0);
	device = atoi(getenv("TUTTI_RANK")) % 2;
	CU(cu.cuInit(0));
	CU(cu.cuDevicePrimaryCtxRetain(&context, device));
	OK(tutti_join(NULL, &g));
	loaded = loads();
	TRUE(loaded > 0); /* for the device that the program uses */
	OK(tutti_rank(g, &rank));
	OK(tutti_size(g, &size));
	CU(cu.cuCtxPushCurrent_v2(context));
	for (i = 1; i < 3; i++)
		CU(cu.cuStreamCreate(&streams[i], 1));
	for (i = 0; i < 3; i++) { /* 0 is the default stream */
		in_order(streams[i]);
		messages(streams[i]);
		behind(streams[i]);
	}
	refused(streams[1]);
	in_order(streams[1]);
	TRUE(loads() == loaded);
	OK(tutti_close(g));
	for (i = 1; i < 3; i++)
		CU(cu.cuStreamDestroy_v2(streams[i]));
	CU(cu.cuDevicePrimaryCtxRelease_v2(device));
	return 0;
}
