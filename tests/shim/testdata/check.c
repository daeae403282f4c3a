/* Calls every function of the library. The argument says which part. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "test.h"

static tutti_group g;
static int32_t rank, size;

static void join(const tutti_config *config)
{
	OK(tutti_join(config, &g));
	OK(tutti_rank(g, &rank));
	OK(tutti_size(g, &size));
}

static int32_t element(int r, int i)
{
	return r * 1000 + i;
}

/* run runs an operation: it blocks, is started and waited for, or both in one call. */
static void run(tutti_op op, int how)
{
	tutti_work work;
	const uint32_t *word;

	if (how == 0) {
		OK(tutti_do(g, &op));
		return;
	}
	if (how >= 4) { /* the operation may or may not end in the call */
		static const int64_t waits[] = {-1, 0, 1000, 200000000};
		int code = tutti_run(g, &op, waits[how - 4], &work);

		TRUE(code == TUTTI_OK || (how > 4 && code == TUTTI_EBUSY));
		TRUE((code == TUTTI_OK) == (work == 0));
		if (code == TUTTI_OK)
			return;
		how = 1;
	} else {
		OK(tutti_start(g, &op, &work));
	}
	word = tutti_work_word(work);
	TRUE(word != NULL);
	if (how == 1) {
		OK(tutti_work_wait(work, -1));
	} else if (how == 2) {
		while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == 0)
			sched_yield();
	} else {
		int code;
		while ((code = tutti_work_wait(work, 1000000)) == TUTTI_EBUSY)
			;
		OK(code);
	}
	TRUE(__atomic_load_n(word, __ATOMIC_ACQUIRE) == 1 + TUTTI_OK);
	OK(tutti_work_test(work));
	OK(tutti_work_release(work));
	CODE(TUTTI_EINVAL, tutti_work_test(work));
}

/* collectives checks every collective with parts of n elements. */
static void collectives(int n, int how)
{
	int32_t *part = calloc((size_t)n, 4), *all = calloc((size_t)n * size, 4), *out = calloc((size_t)n * size, 4);
	int64_t *counts = calloc((size_t)size, 8), *back = calloc((size_t)size, 8);
	int i, r, at, root = size - 1, sum = size * (size - 1) / 2;

	run(tutti_op_barrier(), how);

	for (i = 0; i < n; i++)
		part[i] = element(rank, i);
	run(tutti_op_allreduce(out, part, (uint64_t)n, TUTTI_INT32, TUTTI_SUM), how);
	for (i = 0; i < n; i++)
		TRUE(out[i] == 1000 * sum + size * i && part[i] == element(rank, i));

	run(tutti_op_allgather(all, part, (uint64_t)n, (uint64_t)size, TUTTI_INT32), how);
	for (r = 0; r < size; r++)
		for (i = 0; i < n; i++)
			TRUE(all[r * n + i] == element(r, i));

	run(tutti_op_reduce_scatter(part, all, (uint64_t)n, (uint64_t)size, TUTTI_INT32, TUTTI_MAX), how);
	for (i = 0; i < n; i++)
		TRUE(part[i] == element(rank, i));

	for (r = 0; r < size; r++)
		for (i = 0; i < n; i++)
			all[r * n + i] = element(rank, i) + 100000 * r;
	run(tutti_op_alltoall(out, all, (uint64_t)n, (uint64_t)size, TUTTI_INT32), how);
	for (r = 0; r < size; r++)
		for (i = 0; i < n; i++)
			TRUE(out[r * n + i] == element(r, i) + 100000 * rank);

	for (r = 0; r < size; r++)
		counts[r] = r < n ? r + 1 : n; /* of rank r */
	run(tutti_op_allgatherv(out, (uint64_t)(size * (size + 1) / 2), part, (uint64_t)counts[rank], counts,
	                        (uint64_t)size, TUTTI_INT32), how);
	for (r = 0, at = 0; r < size; r++)
		for (i = 0; i < counts[r]; i++)
			TRUE(out[at++] == element(r, i));

	for (r = 0; r < size; r++) {
		counts[r] = (rank + r) % 3;
		back[r] = (r + rank) % 3;
	}
	for (r = 0, at = 0; r < size; r++)
		for (i = 0; i < counts[r]; i++)
			all[at++] = element(rank, i) + 100000 * r;
	run(tutti_op_alltoallv(out, back, all, counts, (uint64_t)size, TUTTI_INT32), how);
	for (r = 0, at = 0; r < size; r++)
		for (i = 0; i < back[r]; i++)
			TRUE(out[at++] == element(r, i) + 100000 * rank);

	for (i = 0; i < n; i++)
		part[i] = rank == root ? 7 * i : 0;
	run(tutti_op_broadcast(part, (uint64_t)n, TUTTI_INT32, root), how);
	for (i = 0; i < n; i++)
		TRUE(part[i] == 7 * i);

	for (i = 0; i < n; i++)
		part[i] = element(rank, i);
	run(tutti_op_reduce(part, (uint64_t)n, TUTTI_INT32, TUTTI_MIN, root), how);
	for (i = 0; i < n; i++)
		TRUE(part[i] == element(rank == root ? 0 : rank, i));

	for (i = 0; i < n; i++)
		part[i] = element(rank, i);
	run(tutti_op_gather(rank == root ? all : NULL, part, (uint64_t)n, (uint64_t)size, TUTTI_INT32, root), how);
	for (r = 0; r < size && rank == root; r++)
		for (i = 0; i < n; i++)
			TRUE(all[r * n + i] == element(r, i));

	memset(part, 0, (size_t)n * 4);
	run(tutti_op_scatter(part, rank == root ? all : NULL, (uint64_t)n, (uint64_t)size, TUTTI_INT32, root), how);
	for (i = 0; i < n; i++)
		TRUE(part[i] == element(rank, i));
	free(part);
	free(all);
	free(out);
	free(counts);
	free(back);
}

/* floats checks data types that C lacks. */
static void floats(void)
{
	uint16_t bf16[4] = {0x3f80, 0x4000, 0x3f80, 0x4000}; /* 1, 2, 1, 2 */
	uint16_t f16[2] = {0x3c00, 0x4000};                  /* 1, 2 */
	uint8_t f8[2] = {0x38, 0x38};                        /* 1, 1 in E4M3 */
	uint8_t flags[2] = {rank == 0, 1};

	OK(tutti_allreduce(g, bf16, 4, TUTTI_BFLOAT16, TUTTI_AVG));
	TRUE(bf16[0] == 0x3f80 && bf16[3] == 0x4000);
	OK(tutti_allreduce(g, f16, 2, TUTTI_FLOAT16, TUTTI_MAX));
	TRUE(f16[0] == 0x3c00 && f16[1] == 0x4000);
	OK(tutti_allreduce(g, f8, 2, TUTTI_FLOAT8_E4M3, TUTTI_SUM));
	TRUE(size != 2 || f8[0] == 0x40);
	OK(tutti_broadcast(g, flags, 2, TUTTI_BOOL, 0));
	TRUE(flags[0] == 1);
}

static void messages(void)
{
	int32_t to = (rank + 1) % size, from = (rank + size - 1) % size, x = rank, y = -1;
	tutti_status status;
	tutti_work send, recv;
	tutti_op op;

	op = tutti_op_recv(&y, 1, TUTTI_INT32, TUTTI_ANY_RANK, TUTTI_ANY_TAG);
	OK(tutti_start(g, &op, &recv));
	op = tutti_op_send(&x, 1, TUTTI_INT32, to, 42);
	OK(tutti_start(g, &op, &send));
	OK(tutti_work_wait(send, -1));
	OK(tutti_work_wait(recv, -1));
	OK(tutti_work_status(recv, &status));
	TRUE(y == from && status.from == from && status.tag == 42 && status.count == 1);
	OK(tutti_work_release(send));
	OK(tutti_work_release(recv));

	if (rank == 0) {
		OK(tutti_send(g, &x, 1, TUTTI_INT32, to, 1));
		OK(tutti_recv(g, &y, 1, TUTTI_INT32, from, 1, &status));
	} else {
		OK(tutti_recv(g, &y, 1, TUTTI_INT32, from, 1, &status));
		OK(tutti_send(g, &x, 1, TUTTI_INT32, to, 1));
	}
	TRUE(y == from && status.from == from && status.tag == 1);

	/* A receive without a message ends in time, names the rank, and leaves the group usable. */
	op = tutti_op_recv(&y, 1, TUTTI_INT32, from, 9);
	op.timeout_ns = 20000000;
	CODE(TUTTI_ETIMEOUT, tutti_do(g, &op));
	OK(tutti_start(g, &op, &recv));
	CODE(TUTTI_ETIMEOUT, tutti_work_wait(recv, -1));
	tutti_error_info info = {.struct_size = sizeof info};
	OK(tutti_work_error(recv, &info));
	TRUE(info.code == TUTTI_ETIMEOUT && info.ranks_total == 1 && info.ranks[0] == from);
	OK(tutti_work_release(recv));
}

static void queries(void)
{
	int32_t ranks[8], local, locals, yes;
	uint64_t epoch, len;
	uint32_t n;
	char text[256], small[5];
	tutti_group sub;

	OK(tutti_view(g, &epoch, ranks, 8, &n));
	TRUE((int)n == size && ranks[size - 1] == size - 1);
	OK(tutti_view(g, NULL, NULL, 8, &n));
	TRUE((int)n == size);
	OK(tutti_local_rank(g, &local, &locals));
	TRUE(local == rank && locals == size);
	OK(tutti_topology(g, text, sizeof text, &len));
	TRUE(len == strlen(text) && len > 5);
	OK(tutti_topology(g, small, sizeof small, &len));
	TRUE(strlen(small) == 4 && strncmp(small, text, 4) == 0 && len > 5);

	OK(tutti_split(g, rank % 2, -rank, 0, &sub));
	int32_t mine, others;
	OK(tutti_rank(sub, &mine));
	OK(tutti_size(sub, &others));
	TRUE(others == (size + 1 - rank % 2) / 2 && mine == others - 1 - rank / 2);
	OK(tutti_barrier(sub));
	OK(tutti_close(sub));
	CODE(TUTTI_EINVAL, tutti_barrier(sub));
	OK(tutti_split(g, rank == 0 ? 0 : -1, 0, 0, &sub));
	TRUE((rank == 0) == (sub != 0));
	OK(tutti_close(sub));

	OK(tutti_agree(g, 1, 0, &yes));
	TRUE(yes == 1);
	OK(tutti_agree(g, rank != 0, 0, &yes));
	TRUE(yes == 0);
	OK(tutti_set_algorithm(g, "ring"));
	OK(tutti_barrier(g));
	OK(tutti_set_algorithm(g, "auto"));
	CODE(TUTTI_EINVAL, tutti_set_algorithm(g, "nonsense"));
}

/* await_signal waits for a signal that does not come until the window is closed. */
static _Atomic int waiting;

static int waits(void *ctx)
{
	static int calls;

	(void)ctx;
	if (++calls == 3) /* the first may come before the wait has begun */
		waiting = 1;
	return 0;
}

static void *await_signal(void *window)
{
	OK(tutti_set_interrupt(waits, NULL));
	CODE(TUTTI_ECLOSED, tutti_window_wait_signal((tutti_window)(uintptr_t)window, (rank + 1) % size, 5, 1, 0));
	OK(tutti_set_interrupt(NULL, NULL));
	return NULL;
}

static void memory(void)
{
	pthread_t waiter;
	int32_t *x, i;
	void *p;
	char *part, got[4] = "";
	uint64_t bytes;
	tutti_window w;
	int32_t to = (rank + 1) % size, from = (rank + size - 1) % size;

	OK(tutti_alloc(g, 400000, &p));
	x = p;
	for (i = 0; i < 100000; i++)
		x[i] = i + rank;
	OK(tutti_allreduce(g, x, 100000, TUTTI_INT32, TUTTI_MAX));
	TRUE(x[99999] == 99999 + size - 1);
	OK(tutti_barrier(g));
	OK(tutti_free(p));
	CODE(TUTTI_EINVAL, tutti_free(p));
	SAYS("tutti_alloc");
	OK(tutti_free(NULL));

	OK(tutti_window_new(g, 4096, 0, &w));
	OK(tutti_window_bytes(w, &p, &bytes));
	part = p;
	TRUE(bytes == 4096 && part[4095] == 0); /* the peer may have put to other places by now */
	OK(tutti_window_put(w, to, 8, "abc", 4, 0));
	OK(tutti_window_signal(w, to, 0, 0));
	OK(tutti_window_put_signal(w, to, 16, "xyz", 4, 1, 0));
	OK(tutti_window_flush(w, to, 0));
	OK(tutti_window_wait_signal(w, from, 0, 1, 0));
	TRUE(strcmp(part + 8, "abc") == 0);
	OK(tutti_window_wait_signal(w, from, 1, 1, 0));
	TRUE(strcmp(part + 16, "xyz") == 0);
	OK(tutti_window_get(w, to, 16, got, 4, 0));
	OK(tutti_barrier(g));
	CODE(TUTTI_ETIMEOUT, tutti_window_wait_signal(w, from, 5, 1, 10000000));
	CODE(TUTTI_EINVAL, tutti_window_put(w, to, 4094, "abc", 4, 0));
	CODE(TUTTI_EINVAL, tutti_window_put(w, to, UINT64_MAX, "abc", 4, 0));
	CODE(TUTTI_EINVAL, tutti_window_put(w, size, 0, "abc", 4, 0));
	CODE(TUTTI_EINVAL, tutti_window_signal(w, to, TUTTI_WINDOW_COUNTERS, 0));
	OK(tutti_window_refresh(w, 0));
	OK(tutti_barrier(g));
	TRUE(pthread_create(&waiter, NULL, await_signal, (void *)(uintptr_t)w) == 0);
	while (!waiting)
		sched_yield();
	OK(tutti_window_close(w, 0));
	pthread_join(waiter, NULL);
	CODE(TUTTI_EINVAL, tutti_window_flush(w, to, 0));
	CODE(TUTTI_EINVAL, tutti_window_bytes(w, &p, NULL));
}

/* interrupt checks that a check ends a call, and that it runs on the calling thread. */
static pthread_t caller;
static _Atomic int checks;

static int never(void *ctx)
{
	(void)ctx;
	checks++;
	TRUE(pthread_equal(caller, pthread_self()));
	return 0;
}

static int always(void *ctx)
{
	TRUE(*(int *)ctx == 77);
	checks++;
	return 1;
}

/* once interrupts the first wait. */
static int once(void *ctx)
{
	int first = *(int *)ctx == 77;

	*(int *)ctx = 0;
	return first;
}

static void interrupt(void)
{
	int ctx = 77, y, z = 0;
	int32_t peer = (rank + 1) % size;
	tutti_work recv, ran, failed;
	tutti_error_info info = {.struct_size = sizeof info};
	tutti_op op = tutti_op_recv(&y, 1, TUTTI_INT32, peer, 3);

	caller = pthread_self();
	OK(tutti_set_interrupt(never, NULL));
	op.timeout_ns = 1000000000;
	CODE(TUTTI_ETIMEOUT, tutti_do(g, &op));
	TRUE(checks > 0);
	op.timeout_ns = 0;
	OK(tutti_start(g, &op, &recv));
	CODE(TUTTI_EBUSY, tutti_work_wait(recv, 120000000));
	OK(tutti_barrier(g));

	OK(tutti_set_interrupt(always, &ctx));
	checks = 0;
	CODE(TUTTI_ECANCELED, tutti_work_wait(recv, -1));
	TRUE(checks == 1);
	op = tutti_op_recv(&y, 1, TUTTI_INT32, peer, 4);
	CODE(TUTTI_ECANCELED, tutti_do(g, &op));
	TRUE(checks == 2);

	/* tutti_run gives the handle of an operation whose wait was interrupted. */
	OK(tutti_set_interrupt(once, &ctx));
	op = tutti_op_recv(&z, 1, TUTTI_INT32, peer, 5);
	op.timeout_ns = 10000000000; /* for a library that loses it */
	CODE(TUTTI_ECANCELED, tutti_run(g, &op, -1, &ran));
	TRUE(ran != 0 && ctx == 0);
	CODE(TUTTI_EBUSY, tutti_work_test(ran));
	op = tutti_op_recv(&y, 1, TUTTI_INT32, peer, 6);
	op.timeout_ns = 120000000; /* a failure of the operation is its own */
	CODE(TUTTI_EBUSY, tutti_run(g, &op, -1, &failed));
	OK(tutti_last_error_info(&info));
	TRUE(info.code == TUTTI_ECANCELED);
	CODE(TUTTI_ETIMEOUT, tutti_work_test(failed));
	OK(tutti_work_release(failed));
	OK(tutti_set_interrupt(NULL, NULL));
	OK(tutti_barrier(g)); /* no message comes before its recv was interrupted */
	OK(tutti_send(g, &y, 1, TUTTI_INT32, (rank + size - 1) % size, 3));
	OK(tutti_work_wait(recv, -1));
	OK(tutti_work_release(recv));
	OK(tutti_send(g, &y, 1, TUTTI_INT32, (rank + size - 1) % size, 5));
	OK(tutti_work_wait(ran, -1));
	OK(tutti_work_release(ran));
}

/* unused checks that fields that an operation does not use may hold anything. */
static void unused(void)
{
	static const tutti_buffer junk = {.count = UINT64_MAX, .dtype = 200, .device = 1 << 20};
	int32_t mine = rank, all[64] = {0};
	tutti_op op;
	tutti_work w;
	int i, root;

	TRUE(size <= 64);
	op = tutti_op_of(TUTTI_OP_BARRIER, junk, junk);
	op.reduction = op.tag = op.peer = -77;
	op.counts_len = 3;
	OK(tutti_do(g, &op));
	op = tutti_op_broadcast(all, 1, TUTTI_INT32, 0);
	op.src = junk;
	op.reduction = 1 << 20;
	OK(tutti_start(g, &op, &w));
	OK(tutti_work_wait(w, -1));
	OK(tutti_work_release(w));
	for (root = 0; root < size; root++) {
		op = tutti_op_gather(all, &mine, 1, (uint64_t)size, TUTTI_INT32, root);
		if (rank != root)
			op.dst = junk;
		op.reduction = -1;
		OK(tutti_do(g, &op));
		for (i = 0; rank == root && i < size; i++)
			TRUE(all[i]++ == i);
		op = tutti_op_scatter(&mine, all, 1, (uint64_t)size, TUTTI_INT32, root);
		if (rank != root)
			op.src = junk;
		op.reduction = -1;
		OK(tutti_do(g, &op));
		TRUE(mine-- == rank + 1);
	}
}

static void ops(void)
{
	static const int counts[] = {1, 1000, 300000};
	int how, i;

	join(NULL);
	for (how = 0; how < 8; how++)
		for (i = 0; i < 3; i++)
			collectives(counts[i] < size ? size : counts[i], how);
	for (i = 0; i < 100; i++) /* bound calls */
		collectives(size, i % 4);
	unused();
	floats();
	messages();
	queries();
	memory();
	interrupt();
	OK(tutti_barrier(g));
	OK(tutti_close(g));
}

/* overlap starts many operations before it waits for any, from two threads. */
static void *poll_word(void *word)
{
	while (__atomic_load_n((uint32_t *)word, __ATOMIC_ACQUIRE) == 0)
		sched_yield();
	return NULL;
}

static void overlap(void)
{
	enum { N = 1000 };
	static tutti_work works[N];
	static int32_t x[N];
	pthread_t poller;
	tutti_op op;
	int i, round;

	join(NULL);
	for (round = 0; round < 3; round++) {
		for (i = 0; i < N; i++) {
			x[i] = i;
			op = tutti_op_allreduce(&x[i], &x[i], 1, TUTTI_INT32, TUTTI_SUM);
			OK(tutti_start(g, &op, &works[i]));
		}
		TRUE(pthread_create(&poller, NULL, poll_word, (void *)(uintptr_t)tutti_work_word(works[N - 1])) == 0);
		pthread_join(poller, NULL);
		for (i = 0; i < N; i++) {
			OK(tutti_work_test(works[i]));
			TRUE(x[i] == i * size);
			OK(tutti_work_release(works[i]));
		}
	}
	/* Released while it runs. */
	op = tutti_op_allreduce(x, x, N, TUTTI_INT32, TUTTI_SUM);
	OK(tutti_start(g, &op, works));
	OK(tutti_work_release(works[0]));
	OK(tutti_barrier(g));
	TRUE(x[1] == size * size);
	/* Rank 0 has an operation that is ended by the close of rank 1, and rank 1 one that its own close ends. */
	op = tutti_op_recv(x, 1, TUTTI_INT32, !rank, 5);
	OK(tutti_start(g, &op, works));
	if (rank == 0)
		CODE(TUTTI_ERANK, tutti_work_wait(works[0], -1));
	OK(tutti_close(g));
	if (rank == 1)
		CODE(TUTTI_ECLOSED, tutti_work_wait(works[0], -1));
	OK(tutti_work_release(works[0]));
}

/* bad calls with invalid arguments. */
static void bad(void)
{
	static const uint64_t handles[] = {0, 1, 42, UINT64_MAX, UINT64_C(1) << 60, UINT64_C(2) << 60, UINT64_C(3) << 60,
	                                   UINT64_C(0x2000000100000000), UINT64_C(0x20000001ffffffff)};
	tutti_config config = {.struct_size = sizeof config, .size = 1, .timeout_ns = 5000000000};
	tutti_kv kv = {.struct_size = sizeof kv};
	tutti_error_info info = {.struct_size = sizeof info};
	struct {
		tutti_config c;
		uint64_t more[4];
	} later = {.c = config};
	tutti_op op;
	tutti_work w;
	tutti_group two[2], again;
	int32_t x[4] = {0}, n;
	uint64_t u;
	void *p;
	size_t i;

	TRUE(tutti_last_error()[0] == 0);
	OK(tutti_last_error_info(&info));
	TRUE(info.code == TUTTI_OK);
	for (i = 0; i < sizeof handles / sizeof *handles; i++) {
		uint64_t h = handles[i];
		CODE(TUTTI_EINVAL, tutti_barrier(h));
		TRUE(strlen(tutti_last_error()) > 10);
		op = tutti_op_barrier();
		CODE(TUTTI_EINVAL, tutti_run(h, &op, -1, &w));
		CODE(TUTTI_EINVAL, tutti_start(h, &op, &w));
		TRUE(w == 0 && tutti_work_word(h) == NULL);
		CODE(TUTTI_EINVAL, tutti_work_test(h));
		CODE(TUTTI_EINVAL, tutti_work_wait(h, 0));
		CODE(TUTTI_EINVAL, tutti_work_error(h, &info));
		CODE(TUTTI_EINVAL, tutti_work_error_text(h, NULL, 0, &u));
		CODE(h == 0 ? TUTTI_OK : TUTTI_EINVAL, tutti_work_release(h));
		CODE(h == 0 ? TUTTI_OK : TUTTI_EINVAL, tutti_close(h));
		CODE(h == 0 ? TUTTI_OK : TUTTI_EINVAL, tutti_window_close(h, 0));
		CODE(h == 0 ? TUTTI_OK : TUTTI_EINVAL, tutti_member_close(h));
		CODE(TUTTI_EINVAL, tutti_form(h, "u", NULL, 0, 0, &again));
		CODE(TUTTI_EINVAL, tutti_rank(h, &n));
		CODE(TUTTI_EINVAL, tutti_view(h, NULL, NULL, 0, NULL));
		CODE(TUTTI_EINVAL, tutti_recover(h, 0));
		CODE(TUTTI_EINVAL, tutti_abort(h, "x"));
		CODE(TUTTI_EINVAL, tutti_alloc(h, 8, &p));
		CODE(TUTTI_EINVAL, tutti_split(h, 0, 0, 0, &again));
		CODE(TUTTI_EINVAL, tutti_window_get(h, 0, 0, x, 4, 0));
	}
	OK(tutti_last_error_info(&info));
	TRUE(info.code == TUTTI_EINVAL && info.ranks_total == 0 && info.reporter == -1);
	info.struct_size = 4;
	CODE(TUTTI_EINVAL, tutti_last_error_info(&info));
	CODE(TUTTI_EINVAL, tutti_last_error_info(NULL));

	CODE(TUTTI_EINVAL, tutti_join(&config, NULL));
	config.struct_size = 8;
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	SAYS("struct_size");
	config.struct_size = sizeof config;
	for (config.on_failure = 9; config.on_failure > -3; config.on_failure -= 11) { /* 9, -2 */
		CODE(TUTTI_EINVAL, tutti_join(&config, &g));
		SAYS("on_failure");
	}
	config.on_failure = 0;
	for (config.uniform = 3; config.uniform >= -1; config.uniform -= 4) {
		CODE(TUTTI_EINVAL, tutti_join(&config, &g));
		SAYS("uniform");
	}
	config.uniform = 0;
	config.auto_admit = 2;
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	SAYS("auto_admit");
	config.auto_admit = 0;
	config.progress = 2;
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	SAYS("progress");
	config.progress = 0;
	config.max_procs = -3;
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	SAYS("max_procs is -3");
	config.max_procs = 0;
	config.memory_limit = -1;
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	SAYS("memory_limit is -1");
	config.memory_limit = 0;
	config.job = "two words";
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	SAYS("two words");
	config.job = NULL;
	config.on_failure = TUTTI_REPORT_ALWAYS;
	config.rank = 3;
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	config.on_failure = 0;
	config.rank = 0;
	config.transport = "pigeon";
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	SAYS("pigeon");
	config.transport = NULL;
	config.algorithm = "magic";
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	SAYS("magic");
	config.algorithm = NULL;
	config.ports = "29500-";
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	SAYS("29500-29600");
	config.ports = NULL;
	config.interfaces = "10.0.0.0/99";
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	config.interfaces = NULL;
	config.size = 2;
	config.secret = "short";
	config.secret_len = 5;
	config.job = "j";
	config.store = "etcd://127.0.0.1:1";
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	SAYS("5 bytes");
	config.secret = "a secret of this test alone";
	config.secret_len = strlen(config.secret);
	config.store = "etcd:127.0.0.1";
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	CODE(TUTTI_EINVAL, tutti_store_open(&config, &kv));
	SAYS("etcd:127.0.0.1");
	config.store = "tutti://127.0.0.1:1";
	config.job = "two words";
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	CODE(TUTTI_EINVAL, tutti_store_open(&config, &kv));
	SAYS("two words");
	config.job = "j";
	config.secret_len = 15;
	CODE(TUTTI_EINVAL, tutti_store_open(&config, &kv));
	SAYS("15 bytes");
	config.size = 1;
	config.job = config.store = NULL;
	config.secret = NULL;
	config.secret_len = 0;
	config.log_level = "loud";
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	config.log_level = NULL;

	/* A structure of a later version: its new fields must be 0. */
	later.c.struct_size = sizeof later;
	later.more[2] = 1;
	CODE(TUTTI_EUNSUPPORTED, tutti_join(&later.c, &g));
	TRUE(g == 0);
	later.more[2] = 0;
	join(&later.c);
	TRUE(rank == 0 && size == 1);

	CODE(TUTTI_EINVAL, tutti_do(g, NULL));
	op = tutti_op_allreduce(x, x, 4, TUTTI_INT32, TUTTI_SUM);
	op.struct_size = 8;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	op.struct_size = sizeof op;
	op.kind = 99;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	op.kind = TUTTI_OP_ALLREDUCE;
	op.flags = 1;
	CODE(TUTTI_EUNSUPPORTED, tutti_do(g, &op));
	op.flags = 0;
	op.reduction = 77;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	op.reduction = TUTTI_SUM;
	op.dst.dtype = 200;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	op.dst.dtype = TUTTI_FLOAT32;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	op.dst.dtype = TUTTI_INT32;
	op.dst.count = UINT64_MAX;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	op.dst.count = 3;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	op.dst.count = 4;
	op.dst.data = NULL;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	op.dst.data = x;
	op.dst.device = 1 << 20;
	CODE(TUTTI_EUNSUPPORTED, tutti_do(g, &op));
	SAYS("CUDA device 1048576");
	TRUE(tutti_has("tcp") == 1 && tutti_has("telepathy") == 0 && tutti_has(NULL) == 0);
	CODE(TUTTI_EUNSUPPORTED, tutti_start(g, &op, &w));
	op.dst.device = -7;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	op.dst.device = TUTTI_HOST;
	OK(tutti_do(g, &op));
	op.kind = TUTTI_OP_ALLTOALLV;
	op.counts_len = 1;
	CODE(TUTTI_EINVAL, tutti_do(g, &op));
	CODE(TUTTI_EINVAL, tutti_send(g, x, 1, TUTTI_INT32, 0, 0)); /* itself */
	CODE(TUTTI_EINVAL, tutti_send(g, x, 1, TUTTI_INT32, 5, 0));
	CODE(TUTTI_EINVAL, tutti_send(g, x, 1, TUTTI_INT32, 5, -3));
	CODE(TUTTI_EINVAL, tutti_broadcast(g, x, 1, TUTTI_INT32, 1));
	CODE(TUTTI_EINVAL, tutti_reduce(g, x, 4, TUTTI_BOOL, TUTTI_AVG, 0));
	CODE(TUTTI_EINVAL, tutti_rank(g, NULL));
	CODE(TUTTI_EINVAL, tutti_alloc(g, 0, &p));
	CODE(TUTTI_EINVAL, tutti_alloc(g, UINT64_MAX, &p));
	CODE(TUTTI_EINVAL, tutti_set_algorithm(g, "magic"));
	CODE(TUTTI_EINVAL, tutti_window_bytes(g, &p, NULL)); /* a group is no window */
	CODE(TUTTI_EINVAL, tutti_work_test(g));

	/* An error of a work is its own. */
	op = tutti_op_broadcast(x, 1, TUTTI_INT32, 4);
	OK(tutti_start(g, &op, &w));
	OK(tutti_barrier(g));
	CODE(TUTTI_EINVAL, tutti_work_wait(w, -1));
	char text[8];
	OK(tutti_work_error_text(w, text, sizeof text, &u));
	TRUE(strlen(text) == 7 && u > 7);
	CODE(TUTTI_EINVAL, tutti_work_status(w, &(tutti_status){0}));
	OK(tutti_work_result_here(w, &n));
	TRUE(n == 0);
	OK(tutti_work_release(w));
	CODE(TUTTI_EINVAL, tutti_work_release(w));
	CODE(TUTTI_EBUSY, tutti_run(g, &op, -1, &w));
	CODE(TUTTI_EINVAL, tutti_work_test(w));
	OK(tutti_work_release(w));
	OK(tutti_close(g));
	CODE(TUTTI_EINVAL, tutti_close(g));
	CODE(TUTTI_EINVAL, tutti_barrier(g));

	/* Abort ends what runs. */
	OK(tutti_local(2, NULL, two));
	op = tutti_op_recv(x, 1, TUTTI_INT32, 1, 0);
	OK(tutti_start(two[0], &op, &w));
	CODE(TUTTI_EBUSY, tutti_work_test(w));
	CODE(TUTTI_EBUSY, tutti_work_error(w, &(tutti_error_info){.struct_size = sizeof info}));
	OK(tutti_abort(two[1], "enough is enough"));
	CODE(TUTTI_EABORTED, tutti_work_wait(w, -1));
	SAYS("enough is enough");
	OK(tutti_work_release(w));
	OK(tutti_close(two[0]));
	OK(tutti_close(two[1]));
	CODE(TUTTI_EINVAL, tutti_local(0, NULL, two));

	/* No machine has as much memory. */
	OK(tutti_local(1, NULL, two));
	CODE(TUTTI_ENOMEM, tutti_window_new(two[0], UINT64_C(1) << 48, 0, &w));
	CODE(TUTTI_ENOMEM, tutti_alloc(two[0], UINT64_C(1) << 48, &p));
	OK(tutti_close(two[0]));
}

/* lives reports whether a process has not ended. */
static int lives(int pid)
{
	char path[64], state = 0;
	FILE *f;

	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	f = fopen(path, "r");
	if (f == NULL)
		return 0;
	TRUE(fscanf(f, "%*d (%*[^)]) %c", &state) == 1);
	fclose(f);
	return state != 'Z' && state != 'X';
}

/* lost checks what survivors learn of a killed rank, which has forked children that live on. */
static void lost(void)
{
	tutti_error_info info = {.struct_size = sizeof info};
	int32_t x = 1, ranks[8], child[2] = {0};
	int code, i, ready[2];
	char byte;
	uint32_t n;

	join(NULL);
	for (i = 0; i < 10; i++)
		OK(tutti_allreduce(g, &x, 1, TUTTI_INT32, TUTTI_MAX));
	TRUE(pipe(ready) == 0);
	if (rank == 1) {
		for (i = 0; i < 2; i++) {
			child[i] = fork();
			TRUE(child[i] >= 0);
			if (child[i] == 0) {
				/* What the tests start is killed with the rank: its group, and what has its mark. */
				char *mark = getenv("PROCTEST_MARK");
				if (mark != NULL)
					memset(mark, 0, strlen(mark));
				TRUE(setsid() > 0);
				alarm(60);
				TRUE(write(ready[1], "x", 1) == 1);
				close(1); /* the test reads it to its end */
				close(2);
				pause();
				_exit(0);
			}
			TRUE(read(ready[0], &byte, 1) == 1);
		}
	}
	OK(tutti_broadcast(g, child, 2, TUTTI_INT32, 1));
	if (rank == 1) { /* it dies when the others are through with the broadcast */
		for (i = 0; i < size; i++)
			if (i != rank)
				OK(tutti_recv(g, &x, 1, TUTTI_INT32, i, 0, NULL));
		raise(SIGKILL);
	}
	code = tutti_send(g, &x, 1, TUTTI_INT32, 1, 0);
	if (code != TUTTI_OK) /* the rank has died before it has confirmed this */
		CODE(TUTTI_ERANK, code);
	/* The timeout is shorter than the lease: only the end of the links tells in time. */
	code = tutti_barrier(g);
	CODE(TUTTI_ERANK, code);
	TRUE(lives(child[0]) && lives(child[1]));
	OK(tutti_last_error_info(&info));
	TRUE(info.code == TUTTI_ERANK && info.ranks_total == 1 && info.ranks[0] == 1 && info.reporter >= 0);
	SAYS("rank 1 failed");
	OK(tutti_recover(g, 0));
	OK(tutti_view(g, NULL, ranks, 8, &n));
	TRUE((int)n == size - 1 && ranks[0] == 0 && ranks[1] == 2);
	x = 1;
	OK(tutti_allreduce(g, &x, 1, TUTTI_INT32, TUTTI_SUM));
	TRUE(x == size - 1);
	if (rank == 0) {
		kill(child[0], SIGKILL);
		kill(child[1], SIGKILL);
	}
	OK(tutti_close(g));
}

/* mismatch checks that both ranks are named. */
static void mismatch(void)
{
	tutti_error_info info = {.struct_size = sizeof info};
	int32_t x[2] = {0};

	join(NULL);
	CODE(TUTTI_EMISMATCH, tutti_allreduce(g, x, 1 + (uint64_t)rank, TUTTI_INT32, TUTTI_SUM));
	OK(tutti_last_error_info(&info));
	TRUE(info.ranks_total == 2 && info.ranks[0] + info.ranks[1] == 1);
	OK(tutti_recover(g, 0));
	OK(tutti_allreduce(g, x, 1, TUTTI_INT32, TUTTI_SUM));
	OK(tutti_close(g));
}

/* late checks a timeout that names the missing rank and leaves the group usable. */
static void late(void)
{
	tutti_error_info info = {.struct_size = sizeof info};
	tutti_work w = 0;
	int32_t x = 0;
	tutti_op op = tutti_op_barrier();

	join(NULL);
	op.timeout_ns = 100000000;
	if (rank == 0) {
		OK(tutti_start(g, &op, &w));
		CODE(TUTTI_ETIMEOUT, tutti_work_wait(w, -1));
		OK(tutti_work_error(w, &info));
		TRUE(info.ranks_total == 1 && info.ranks[0] == 1);
		OK(tutti_work_release(w));
		OK(tutti_send(g, &x, 1, TUTTI_INT32, 1, 0));
	} else {
		OK(tutti_recv(g, &x, 1, TUTTI_INT32, 0, 0, NULL));
	}
	OK(tutti_recover(g, 0));
	OK(tutti_barrier(g));
	OK(tutti_close(g));
}

/* form has this rank form a group with the members of all ranks, from the first one on in order. */
static int form(tutti_member m, const char *uuid, char (*all)[2048], int first, int64_t timeout_ns, tutti_group *out)
{
	const char *handles[16];
	int i;

	for (i = 0; i < size; i++)
		handles[i] = all[(first + i) % size];
	return tutti_form(m, uuid, handles, (uint32_t)size, timeout_ns, out);
}

/* members checks groups that are given by handles. */
static void members(void)
{
	static const char secret[] = "the secret of the members";
	static char all[16][2048], mine[2048];
	tutti_config config = {.struct_size = sizeof config, .secret = secret, .secret_len = sizeof secret};
	tutti_error_info info = {.struct_size = sizeof info};
	tutti_member m, wrong;
	tutti_group formed;
	uint64_t len;
	int32_t r, n, x = 1;
	int code;

	join(NULL);
	TRUE(tutti_has("members") == 1);
	CODE(TUTTI_EINVAL, tutti_member_new(&config, NULL));
	config.size = 2;
	CODE(TUTTI_EINVAL, tutti_member_new(&config, &wrong));
	TRUE(wrong == 0);
	config.size = 0;
	OK(tutti_member_new(&config, &m));
	OK(tutti_member_handle(m, mine, 8, &len));
	TRUE(strlen(mine) == 7 && len > 7 && len < sizeof mine);
	OK(tutti_member_handle(m, mine, sizeof mine, &len));
	TRUE(strlen(mine) == len);
	OK(tutti_allgather(g, all, mine, sizeof mine, (uint64_t)size, TUTTI_UINT8));

	CODE(TUTTI_EINVAL, tutti_form(m, NULL, NULL, 0, 0, &formed));
	CODE(TUTTI_EINVAL, tutti_form(m, "", NULL, 0, 0, &formed));
	CODE(TUTTI_EINVAL, tutti_form(m, "a", NULL, 0, 0, &formed));
	CODE(TUTTI_EINVAL, tutti_form(m, "a", (const char *[]){NULL}, 1, 0, &formed));
	SAYS("handles[0]");
	CODE(TUTTI_EINVAL, tutti_form(m, "a", (const char *[]){"x"}, 1, 0, &formed));
	SAYS("handles[0]");
	CODE(TUTTI_EINVAL, tutti_form(g, "a", (const char *[]){mine}, 1, 0, &formed));
	SAYS("no member");

	OK(form(m, "a", all, 1, 0, &formed)); /* rank 1 becomes rank 0 */
	OK(tutti_rank(formed, &r));
	OK(tutti_size(formed, &n));
	TRUE(r == (rank + size - 1) % size && n == size);
	OK(tutti_allreduce(formed, &x, 1, TUTTI_INT32, TUTTI_SUM));
	TRUE(x == size);
	OK(tutti_close(formed));
	CODE(TUTTI_EINVAL, form(m, "a", all, 1, 0, &formed));
	TRUE(formed == 0);
	SAYS("used already");

	code = form(m, "b", all, rank == 0 ? 1 : 0, 0, &formed); /* rank 0 has another order */
	if (code != TUTTI_EMISMATCH && (code != TUTTI_ERANK || rank == 0))
		FAIL("different handles: %s: %s", tutti_code_name(code), tutti_last_error());
	OK(tutti_barrier(g));
	if (rank != 0) {
		code = form(m, "c", all, 0, 5000000000, &formed);
		TRUE(code == TUTTI_ETIMEOUT || code == TUTTI_ERANK);
		SAYS("rank 0");
		OK(tutti_last_error_info(&info));
		TRUE(info.ranks_total > 0);
	}
	OK(tutti_barrier(g));
	OK(form(m, "d", all, 0, 0, &formed));
	OK(tutti_member_close(m)); /* the group stays */
	OK(tutti_barrier(formed));
	OK(tutti_close(formed));
	CODE(TUTTI_EINVAL, form(m, "e", all, 0, 0, &formed));
	CODE(TUTTI_EINVAL, tutti_member_handle(m, mine, sizeof mine, NULL));
	OK(tutti_close(g));
}

/* A store over a file that all ranks see: pairs of lines, the key and the value in hex. */
struct filestore {
	char path[256];
	_Atomic int running, calls, released;
};

static void hex(const void *data, uint64_t n, char *to)
{
	for (uint64_t i = 0; i < n; i++)
		sprintf(to + 2 * i, "%02x", ((const unsigned char *)data)[i]);
	to[2 * n] = 0;
}

/* Finds key's last value: it writes it to call->result. Returns a locked file, positioned at its
 * end. */
static FILE *look(struct filestore *s, tutti_kv_call *call)
{
	static _Thread_local char line[300000];
	FILE *f = fopen(s->path, "a+");

	TRUE(f != NULL && flock(fileno(f), LOCK_EX) == 0);
	call->result_len = 0;
	rewind(f);
	while (fgets(line, sizeof line, f) != NULL) {
		int same;
		line[strcspn(line, "\n")] = 0;
		same = strcmp(line, call->key) == 0;
		TRUE(fgets(line, sizeof line, f) != NULL);
		if (!same)
			continue;
		call->result_len = strcspn(line, "\n") / 2;
		TRUE(call->result_len <= call->result_cap);
		for (uint64_t i = 0; i < call->result_len; i++) {
			unsigned byte;
			TRUE(sscanf(line + 2 * i, "%2x", &byte) == 1);
			((unsigned char *)call->result)[i] = (unsigned char)byte;
		}
	}
	return f;
}

static void put(FILE *f, tutti_kv_call *call)
{
	static _Thread_local char text[2 * TUTTI_MAX_VALUE + 1];

	hex(call->value, call->value_len, text);
	TRUE(fprintf(f, "%s\n%s\n", call->key, text) > 0);
}

static void enter(struct filestore *s, tutti_kv_call *call)
{
	TRUE(call->struct_size == sizeof *call && call->timeout_ns > 0 && call->result_cap >= TUTTI_MAX_VALUE);
	TRUE(s->released == 0);
	s->running++;
	s->calls++;
}

static int store_set(void *ctx, tutti_kv_call *call)
{
	struct filestore *s = ctx;
	FILE *f;

	enter(s, call);
	f = look(s, call);
	put(f, call);
	fclose(f);
	s->running--;
	return TUTTI_OK;
}

static int store_get(void *ctx, tutti_kv_call *call)
{
	struct filestore *s = ctx;

	enter(s, call);
	fclose(look(s, call));
	s->running--;
	return TUTTI_OK;
}

static int store_wait(void *ctx, tutti_kv_call *call)
{
	struct filestore *s = ctx;
	struct timespec pause = {.tv_nsec = 2000000};
	int64_t left = call->timeout_ns;

	enter(s, call);
	for (;; left -= pause.tv_nsec) {
		fclose(look(s, call));
		if (call->result_len > 0 || left <= 0)
			break;
		nanosleep(&pause, NULL);
	}
	s->running--;
	return call->result_len > 0 ? TUTTI_OK : TUTTI_ETIMEOUT;
}

static int store_cas(void *ctx, tutti_kv_call *call)
{
	struct filestore *s = ctx;
	FILE *f;

	enter(s, call);
	f = look(s, call);
	if (call->result_len == call->expected_len && memcmp(call->result, call->expected, call->expected_len) == 0) {
		put(f, call);
		memcpy(call->result, call->value, call->value_len);
		call->result_len = call->value_len;
	}
	fclose(f);
	s->running--;
	return TUTTI_OK;
}

static int store_broken(void *ctx, tutti_kv_call *call)
{
	enter(ctx, call);
	((struct filestore *)ctx)->running--;
	snprintf(call->error, call->error_cap, "the disk is on fire");
	return TUTTI_EINTERNAL;
}

/* store_late says that its time was up, when none has passed. */
static int store_late(void *ctx, tutti_kv_call *call)
{
	struct filestore *s = ctx;

	(void)call;
	__atomic_add_fetch(&s->calls, 1, __ATOMIC_SEQ_CST);
	return TUTTI_ETIMEOUT;
}

static void store_release(void *ctx)
{
	struct filestore *s = ctx;

	TRUE(s->running == 0 && s->released == 0);
	s->released = 1;
}

static void released(struct filestore *s)
{
	struct timespec pause = {.tv_nsec = 1000000};

	while (s->released == 0)
		nanosleep(&pause, NULL);
}

static void on_usr1(int sig)
{
	(void)sig;
}

/* keeps ends a wait in which the program's handler of SIGUSR1 is still installed. */
static int keeps(void *ctx)
{
	struct sigaction a;

	TRUE(sigaction(SIGUSR1, NULL, &a) == 0 && a.sa_handler == on_usr1);
	return always(ctx);
}

/* refuses checks that tutti_join refuses a configuration and releases its store. */
static void refuses(int code, struct filestore *s, const tutti_config *config, tutti_group *group)
{
	s->released = 0;
	CODE(code, tutti_join(config, group));
	TRUE(s->released == 1);
}

static void kv(void)
{
	static struct filestore s, broken;
	tutti_kv store = {sizeof store, 0, &s, store_set, store_get, store_wait, store_cas, store_release};
	tutti_config config = {.struct_size = sizeof config, .kv = &store, .timeout_ns = 20000000000};
	tutti_group sub;
	int32_t x = 1;

	snprintf(s.path, sizeof s.path, "%s", getenv("STORE_FILE"));
	if (getenv("WITHOUT_WAIT") != NULL)
		store.wait = NULL;
	join(&config);
	OK(tutti_allreduce(g, &x, 1, TUTTI_INT32, TUTTI_SUM));
	TRUE(x == size && s.calls > 2);
	OK(tutti_split(g, 0, 0, 0, &sub));
	OK(tutti_barrier(g));
	OK(tutti_close(g));
	TRUE(s.released == 0);
	OK(tutti_barrier(sub));
	OK(tutti_close(sub));
	released(&s);

	/* A check ends a join that no other rank comes to. */
	static struct filestore lonely;
	int ctx = 77;
	lonely = s;
	lonely.released = 0;
	store.ctx = &lonely;
	config.job = "lonely";
	config.size = 2;
	config.secret = "0123456789abcdef";
	config.secret_len = 16;
	if (rank == 0) {
		signal(SIGUSR1, on_usr1);
		config.log_dir = getenv("LOGS");
		OK(tutti_set_interrupt(keeps, &ctx));
		CODE(TUTTI_ECANCELED, tutti_join(&config, &g));
		config.log_dir = NULL;
		OK(tutti_set_interrupt(NULL, NULL));
		released(&lonely);
	}

	store.ctx = &broken;
	store.set = store.get = store.wait = store.compare_and_set = store_broken;
	CODE(TUTTI_EINTERNAL, tutti_join(&config, &g));
	SAYS("the disk is on fire");
	released(&broken);

	/* A callback whose time is up at once is not called without pause. */
	static struct filestore impatient;
	store.ctx = &impatient;
	store.set = store.get = store.wait = store.compare_and_set = store_late;
	config.timeout_ns = 300000000;
	CODE(TUTTI_ETIMEOUT, tutti_join(&config, &g));
	released(&impatient);
	TRUE(impatient.calls > 1 && impatient.calls < 1000);
	config.timeout_ns = 20000000000;
	store.ctx = &broken;
	store.set = store.get = store.wait = store.compare_and_set = store_broken;

	/* Lost and later ranks want a store that tells which ranks are alive. */
	for (config.size = 1; config.size < 3; config.size++) {
		config.on_failure = TUTTI_SHRINK;
		refuses(TUTTI_EINVAL, &broken, &config, &g);
		SAYS("on_failure is TUTTI_SHRINK");
		config.on_failure = 0;
		config.auto_admit = 1;
		refuses(TUTTI_EINVAL, &broken, &config, &g);
		SAYS("auto_admit is 1");
		config.auto_admit = 0;
		config.max_size = 4;
		refuses(TUTTI_EINVAL, &broken, &config, &g);
		SAYS("max_size is 4");
		config.max_size = 0;
		config.job = "a/b\n";
		refuses(TUTTI_EINVAL, &broken, &config, &g);
		SAYS("join: Job");
		config.job = "lonely";
	}

	/* Each refusal releases the store, too. */
	struct {
		tutti_config c;
		uint64_t more;
	} later = {.c = config, .more = 1};

	later.c.struct_size = sizeof later;
	refuses(TUTTI_EUNSUPPORTED, &broken, &later.c, &g);
	refuses(TUTTI_EINVAL, &broken, &config, NULL);
	config.on_failure = 9;
	refuses(TUTTI_EINVAL, &broken, &config, &g);
	store.get = NULL;
	refuses(TUTTI_EINVAL, &broken, &config, &g);
	refuses(TUTTI_EUNSUPPORTED, &broken, &later.c, &g);

	/* A store that is not understood is not touched, and another function leaves it to the program. */
	broken.released = 0;
	store.struct_size = 8;
	CODE(TUTTI_EINVAL, tutti_join(&config, &g));
	store.struct_size = sizeof store;
	CODE(TUTTI_EINVAL, tutti_member_new(&config, &g));
	TRUE(broken.released == 0);
	if (fork() == 0)
		_exit(tutti_join(&config, &g) == TUTTI_EFORKED && broken.released == 0 ? 0 : 1);
	int status = -1;
	TRUE(wait(&status) > 0 && status == 0);
}

/* ask makes a request to a store that the library has opened, and compares the resulting value. */
static int ask(int (*f)(void *, tutti_kv_call *), tutti_kv *store, const char *key, const char *value,
               const char *expected, const char *result)
{
	static char answer[TUTTI_MAX_VALUE], why[256];
	tutti_kv_call call = {.struct_size = sizeof call, .error_cap = sizeof why, .key = key, .value = value,
	                      .value_len = strlen(value), .expected = expected, .expected_len = strlen(expected),
	                      .timeout_ns = 10000000000, .result = answer, .result_cap = sizeof answer, .error = why};
	int code;

	if (result == NULL)
		call.timeout_ns = 20000000;
	code = f(store->ctx, &call);
	if (code == TUTTI_OK && result != NULL)
		TRUE(call.result_len == strlen(result) && memcmp(answer, result, call.result_len) == 0);
	if (code != TUTTI_OK)
		TRUE(strlen(why) > 0);
	return code;
}

/* jobstore uses the job's store without being a rank. */
static void jobstore(void)
{
	static char much[TUTTI_MAX_VALUE + 2], key[248 + 2];
	tutti_kv store = {.struct_size = sizeof store};
	tutti_config config = {.struct_size = sizeof config, .kv = &store};
	char answer[8], why[256];
	const tutti_kv_call whole = {.struct_size = sizeof whole, .error_cap = sizeof why, .key = "incomplete", .value = "x",
	                             .value_len = 1, .timeout_ns = 10000000000, .result = answer,
	                             .result_cap = sizeof answer, .error = why};
	tutti_kv_call incomplete[] = {whole, whole, whole, whole};
	size_t i;

	CODE(TUTTI_EINVAL, tutti_store_open(NULL, NULL));
	OK(tutti_store_open(NULL, &store));
	config.kv = &store;
	CODE(TUTTI_EINVAL, tutti_store_open(&config, &store));
	SAYS("kv is set");
	rank = atoi(getenv("RANK"));
	TRUE(ask(store.get, &store, "none", "", "", "") == TUTTI_OK);
	TRUE(ask(store.wait, &store, "none", "", "", NULL) == TUTTI_ETIMEOUT);
	if (rank == 0) {
		TRUE(ask(store.compare_and_set, &store, "turn", "a", "z", "") == TUTTI_OK);
		TRUE(ask(store.compare_and_set, &store, "turn", "a", "", "a") == TUTTI_OK);
		TRUE(ask(store.compare_and_set, &store, "turn", "b", "x", "a") == TUTTI_OK);
		TRUE(ask(store.compare_and_set, &store, "turn", "b", "a", "b") == TUTTI_OK);
		TRUE(ask(store.set, &store, "gone", "x", "", "") == TUTTI_OK);
		TRUE(ask(store.set, &store, "gone", "", "", "") == TUTTI_OK);
		TRUE(ask(store.set, &store, "word", "hello", "", "") == TUTTI_OK);
	}
	TRUE(ask(store.wait, &store, "word", "", "", "hello") == TUTTI_OK);
	TRUE(ask(store.get, &store, "turn", "", "", "b") == TUTTI_OK);
	TRUE(ask(store.get, &store, "gone", "", "", "") == TUTTI_OK);
	memset(much, 'x', sizeof much - 1);
	TRUE(ask(store.set, &store, "much", much, "", "") == TUTTI_EINVAL);
	TRUE(ask(store.get, &store, "", "", "", "") == TUTTI_EINVAL);
	memset(key, 'k', sizeof key - 1);
	TRUE(ask(store.get, &store, key, "", "", "") == TUTTI_EINVAL);
	TRUE(ask(store.get, &store, key + 1, "", "", "") == TUTTI_OK);
	incomplete[0].value = NULL;
	incomplete[1].expected_len = 1;
	incomplete[2].result = NULL;
	incomplete[3].error = NULL;
	for (i = 0; i < 4; i++)
		TRUE(store.compare_and_set(store.ctx, &incomplete[i]) == TUTTI_EINVAL);
	TRUE(ask(store.get, &store, "incomplete", "", "", "") == TUTTI_OK);
	if (fork() == 0)
		_exit(ask(store.get, &store, "word", "", "", "") == TUTTI_EFORKED &&
		      store.get(store.ctx, &incomplete[3]) == TUTTI_EFORKED ? 0 : 1);
	int status = -1;
	TRUE(wait(&status) > 0 && status == 0);
	store.release(store.ctx);
	TRUE(ask(store.get, &store, "word", "", "", "") == TUTTI_EINVAL);
}

/* fuzz runs operations with arbitrary fields: they end with some code, and touch nothing but
 * their buffers. */
static uint64_t seed = 20261122;

static uint32_t any(uint32_t n)
{
	seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (uint32_t)(seed >> 33) % n;
}

static void fuzz(void)
{
	static const uint64_t counts[] = {0, 1, 2, 16, UINT64_C(1) << 60, UINT64_C(1) << 63, UINT64_MAX};
	static const int32_t ints[] = {-1, 0, 1, 2, 3, INT32_MAX, INT32_MIN};
	long page = sysconf(_SC_PAGESIZE);
	char *memory = mmap(NULL, 2 * (size_t)page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int64_t *lens = malloc(16);
	int codes[16] = {0}, i;

	TRUE(memory != MAP_FAILED && mprotect(memory + page, (size_t)page, PROT_NONE) == 0);
	memory += page - 3 * 128; /* three buffers of at most 16 elements */
	join(&(tutti_config){.struct_size = sizeof(tutti_config), .size = 1});
	for (i = 0; i < 20000; i++) {
		tutti_op op = {.struct_size = sizeof op};
		tutti_buffer *buffers[] = {&op.dst, &op.src};
		tutti_work work = 0;
		size_t k;
		int code;

		for (k = 0; k < 2; k++) {
			tutti_buffer *b = buffers[k];
			b->count = counts[any(7)];
			b->data = any(10) == 0 ? NULL : memory + 128 * any(3);
			b->dtype = any(20) == 0 ? ints[any(7)] : (int32_t)any(17);
			b->device = any(20) == 0 ? ints[any(7)] : TUTTI_HOST;
		}
		if (any(2) == 0)
			op.src = op.dst;
		op.kind = any(20) == 0 ? ints[any(7)] : (int32_t)any(15);
		op.reduction = any(20) == 0 ? ints[any(7)] : (int32_t)any(10);
		op.peer = any(2) == 0 ? 0 : ints[any(7)];
		op.tag = ints[any(7)];
		op.flags = any(20) == 0;
		op.timeout_ns = op.kind == TUTTI_OP_RECV ? 10000 : -(int64_t)any(2);
		lens[0] = any(2) == 0 ? (int64_t)op.src.count : (int64_t)any(3) - 1;
		lens[1] = INT64_MIN;
		op.src_counts = any(10) == 0 ? NULL : lens;
		op.dst_counts = any(10) == 0 ? NULL : lens;
		op.counts_len = any(3);
		if (any(2) == 0) {
			code = tutti_do(g, &op);
		} else {
			code = tutti_start(g, &op, &work);
			if (code == TUTTI_OK)
				code = tutti_work_wait(work, -1);
			OK(tutti_work_release(work));
		}
		if (code < 0 || code == TUTTI_EINTERNAL || code > TUTTI_ECANCELED)
			FAIL("operation %d of kind %d: %s", i, op.kind, tutti_last_error());
		codes[code]++;
		tutti_work_test(work + any(3));
		tutti_close(g + 1 + any(100));
	}
	if (codes[TUTTI_OK] < 1000 || codes[TUTTI_EINVAL] < 1000 || codes[TUTTI_EUNSUPPORTED] < 100)
		FAIL("%d are OK, %d invalid, %d unsupported", codes[TUTTI_OK], codes[TUTTI_EINVAL], codes[TUTTI_EUNSUPPORTED]);
	OK(tutti_barrier(g));
	OK(tutti_close(g));
	free(lens);
}

/* concurrent has several threads use the same groups. */
static tutti_group both[2];

static void *busy(void *arg)
{
	int32_t tag = (int32_t)(intptr_t)arg, x, y, i;
	tutti_work send, recv;
	tutti_op op;

	for (i = 0; i < 500; i++) {
		x = i;
		y = -1;
		op = tutti_op_recv(&y, 1, TUTTI_INT32, 0, tag);
		OK(tutti_start(both[1], &op, &recv));
		op = tutti_op_send(&x, 1, TUTTI_INT32, 1, tag);
		OK(tutti_start(both[0], &op, &send));
		OK(tutti_work_release(send)); /* x stays until the message has arrived */
		OK(tutti_work_wait(recv, i % 2 == 0 ? -1 : 10000000000));
		TRUE(y == i);
		OK(tutti_work_release(recv));
		CODE(TUTTI_EINVAL, tutti_work_release(recv));
		SAYS("released");
	}
	return NULL;
}

static void concurrent(void)
{
	pthread_t threads[4];
	int i;

	OK(tutti_local(2, NULL, both));
	for (i = 0; i < 4; i++)
		TRUE(pthread_create(&threads[i], NULL, busy, (void *)(intptr_t)i) == 0);
	for (i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
	OK(tutti_close(both[0]));
	OK(tutti_close(both[1]));
}

/* together calls tutti_admit until all ranks are active, in a view that is not older than epoch. */
static void together(uint64_t epoch)
{
	uint64_t at = 0;
	uint32_t n = 0;
	int code;

	while (at < epoch || (int)n < size) {
		code = tutti_admit(g, 0, NULL);
		if (code != TUTTI_OK)
			CODE(TUTTI_ERANK, code);
		OK(tutti_view(g, &at, NULL, 0, &n));
	}
}

static void all_sum(void)
{
	int32_t x = 1;

	OK(tutti_allreduce(g, &x, 1, TUTTI_INT32, TUTTI_SUM));
	TRUE(x == size);
}

/* replace waits for the replacement of a killed rank. */
static void replace(void)
{
	int32_t x = 0;
	int code, i;

	join(NULL);
	if (getenv("TUTTI_PGTEST_SECOND") == NULL) {
		OK(tutti_barrier(g));
		/* Nobody waits for the barrier's last message any more when the rank dies. */
		if (rank == 2) {
			for (i = 0; i < 2; i++)
				OK(tutti_recv(g, &x, 1, TUTTI_INT32, i, 0, NULL));
			raise(SIGKILL);
		}
		code = tutti_send(g, &x, 1, TUTTI_INT32, 2, 0);
		if (code != TUTTI_OK) /* the rank has died before it has confirmed this */
			CODE(TUTTI_ERANK, code);
		code = tutti_barrier(g);
		if (code != TUTTI_OK) /* the barrier had begun when the loss was noticed */
			CODE(TUTTI_ERANK, code);
		together(3); /* the second view is without the rank */
	}
	all_sum();
	OK(tutti_close(g));
}

/* evict removes a live rank, which rejoins. */
static void evict(void)
{
	tutti_group old;
	int32_t n;
	int code;

	join(NULL);
	code = tutti_barrier(g);
	/* Rank 2 may be evicted while others wait for the barrier's last message. */
	TRUE(code == TUTTI_OK || rank == 2 || (rank == 1 && code == TUTTI_ERANK));
	if (rank == 0) {
		CODE(TUTTI_EINVAL, tutti_evict(g, 99, 0));
		OK(tutti_evict(g, 2, 0));
	}
	if (rank == 2) {
		while ((code = tutti_admit(g, 0, &n)) == TUTTI_OK || code == TUTTI_ERANK)
			;
		CODE(TUTTI_EEVICTED, code);
		old = g;
		OK(tutti_rejoin(old, 0, &g));
		TRUE(g != old);
		OK(tutti_close(old));
	} else {
		together(3);
	}
	all_sum();
	OK(tutti_close(g));
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*f)(void);
	} parts[] = {{"ops", ops}, {"overlap", overlap}, {"bad", bad}, {"lost", lost}, {"mismatch", mismatch},
	             {"late", late}, {"kv", kv}, {"jobstore", jobstore}, {"replace", replace}, {"members", members},
	             {"evict", evict}, {"fuzz", fuzz}, {"concurrent", concurrent}};
	size_t i;

	for (i = 0; argc == 2 && i < sizeof parts / sizeof *parts; i++) {
		if (strcmp(argv[1], parts[i].name) == 0) {
			parts[i].f();
			return 0;
		}
	}
	FAIL("usage: %s PART", argv[0]);
}
