//go:build linux

// The public functions.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"
#include "_cgo_export.h"

#define SLICE_NS 50000000 // between calls of an interrupt check

// ---- Threads and failures ----

static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static _Atomic bool keyed;

static void make_key(void)
{
	if (pthread_key_create(&key, free) == 0)
		atomic_store(&keyed, true);
}

struct thread *tutti_peek(void)
{
	return atomic_load_explicit(&keyed, memory_order_acquire) ? pthread_getspecific(key) : NULL;
}

struct thread *tutti_thread(void)
{
	struct thread *t;

	if (!atomic_load_explicit(&keyed, memory_order_acquire)) {
		pthread_once(&key_once, make_key);
		if (!atomic_load(&keyed))
			return NULL;
	}
	t = pthread_getspecific(key);
	if (t == NULL) {
		t = calloc(1, sizeof *t);
		if (t != NULL && pthread_setspecific(key, t) != 0) {
			free(t);
			t = NULL;
		}
	}
	return t;
}

static void clear(struct failure *f, int code)
{
	f->info.struct_size = sizeof f->info;
	f->info.code = code;
	f->info.reporter = -1;
	f->info.overwritten = 0;
	f->info.epoch = 0;
	f->info.ranks_total = f->info.ranks_listed = 0;
	f->text[0] = 0;
}

// fail records a failure of this thread and returns its code.
__attribute__((format(printf, 2, 3))) static int fail(int code, const char *format, ...)
{
	struct thread *t = tutti_thread();
	va_list args;

	if (t != NULL) {
		clear(&t->last, code);
		va_start(args, format);
		vsnprintf(t->last.text, sizeof t->last.text, format, args);
		va_end(args);
	}
	return code;
}

static int forked(void)
{
	return fail(TUTTI_EFORKED, "this process is the child of a fork: the group belongs to its parent; use it only "
	                           "there, or start the child by exec");
}

// missing refuses a call whose argument what is NULL.
static int missing(const char *what)
{
	return tutti_forked() ? forked() : fail(TUTTI_EINVAL, "%s is NULL", what);
}

// ENTER begins a function that enters Go: t is the thread's state.
#define ENTER(t) \
	struct thread *t; \
	if (tutti_forked()) \
		return forked(); \
	if ((t = tutti_thread()) == NULL) \
		return TUTTI_ENOMEM;

// Go's floating-point mode rounds to nearest, traps nothing and keeps subnormals. The caller's may
// be another one, and sums would depend on the thread that makes them.
#if defined(__x86_64__)
#define GO_MODE 0x1f80
#define MODE_BITS 0xffc0 // the others of MXCSR tell what has happened
static inline uint64_t get_mode(void) { return __builtin_ia32_stmxcsr(); }
static inline void set_mode(uint64_t mode) { __builtin_ia32_ldmxcsr((unsigned)mode); }
#elif defined(__aarch64__)
#define GO_MODE 0
#define MODE_BITS (~(uint64_t)0)
static inline uint64_t get_mode(void)
{
	uint64_t mode;

	__asm__ volatile("mrs %0, fpcr" : "=r"(mode));
	return mode;
}
static inline void set_mode(uint64_t mode) { __asm__ volatile("msr fpcr, %0" ::"r"(mode)); }
#else
#define GO_MODE 0
#define MODE_BITS 0
static inline uint64_t get_mode(void) { return GO_MODE; }
static inline void set_mode(uint64_t mode) { (void)mode; }
#endif

static uint64_t loading; // the mode of the thread that loads the library

// The Go runtime's threads inherit the mode of the thread that loads the library. These
// constructors are called before and after that of Go: the first has a priority, and Go's object is
// linked before this one.
__attribute__((constructor(101))) static void begin_loading(void)
{
	loading = get_mode();
	if ((loading & MODE_BITS) != GO_MODE)
		set_mode(GO_MODE);
}

__attribute__((constructor)) static void end_loading(void)
{
	if ((loading & MODE_BITS) != GO_MODE)
		set_mode(loading);
}

static void enter(struct thread *t);

// GO makes a call in Go and gives its result.
#define GO(t, f) \
	({ \
		if (!(t)->entered) \
			enter(t); \
		uint64_t mode_ = get_mode(); \
		int code_; \
		if ((mode_ & MODE_BITS) != GO_MODE) \
			set_mode(GO_MODE); \
		(t)->depth++; \
		code_ = (f); \
		(t)->depth--; \
		if ((mode_ & MODE_BITS) != GO_MODE) \
			set_mode(mode_); \
		code_; \
	})

// enter makes a thread one that Go knows, and keeps the signals that it blocks blocked. Go unblocks
// some in such a thread, SIGCHLD among them. It needs only the one that it sends and those of
// faults.
static void enter(struct thread *t)
{
	static const int needed[] = {SIGURG, SIGSEGV, SIGBUS, SIGFPE};
	sigset_t mask;
	size_t i;

	t->entered = true;
	pthread_sigmask(SIG_SETMASK, NULL, &mask);
	(void)GO(t, (goEnter(), 0));
	for (i = 0; i < sizeof needed / sizeof *needed; i++)
		sigdelset(&mask, needed[i]);
	pthread_sigmask(SIG_SETMASK, &mask, NULL);
}

// adopt copies a structure of the caller, which begins with its size, to one of full size, which is
// zeroed. It refuses fields that the library does not know, unless they are 0, after it has copied
// the others.
static int adopt(void *to, size_t full, const void *from, size_t least, const char *what)
{
	uint32_t given;
	size_t i;

	memset(to, 0, full);
	if (from == NULL)
		return fail(TUTTI_EINVAL, "%s is NULL", what);
	memcpy(&given, from, sizeof given);
	if (given < least || given > 65536)
		return fail(TUTTI_EINVAL, "%s.struct_size is %u, want sizeof(%s), at least %zu", what, given, what, least);
	memcpy(to, from, given < full ? given : full);
	for (i = full; i < given; i++) {
		if (((const unsigned char *)from)[i] != 0)
			return fail(TUTTI_EUNSUPPORTED, "%s has fields that this library (%s) does not know, and they are not 0",
			            what, tutti_version());
	}
	return TUTTI_OK;
}

// The sizes of the structures of version 1.0.
#define LEAST_OP (offsetof(tutti_op, status) + sizeof(tutti_status *))
#define LEAST_CONFIG (offsetof(tutti_config, memory_limit) + sizeof(int64_t))
#define LEAST_KV (offsetof(tutti_kv, release) + sizeof(void *))
#define LEAST_INFO sizeof(tutti_error_info)

const char *tutti_last_error(void)
{
	struct thread *t = tutti_peek();

	return t == NULL ? "" : t->last.text;
}

static int give_info(const tutti_error_info *from, tutti_error_info *info)
{
	uint32_t size;

	if (info == NULL)
		return fail(TUTTI_EINVAL, "info is NULL");
	size = info->struct_size;
	if (size < LEAST_INFO || size > 65536)
		return fail(TUTTI_EINVAL, "info.struct_size is %u, want sizeof(tutti_error_info)", size);
	memset(info, 0, size);
	memcpy(info, from, sizeof *from);
	info->struct_size = size;
	return TUTTI_OK;
}

int tutti_last_error_info(tutti_error_info *info)
{
	struct thread *t = tutti_peek();
	struct failure none;

	if (t != NULL && t->last.info.struct_size != 0)
		return give_info(&t->last.info, info);
	clear(&none, TUTTI_OK);
	return give_info(&none.info, info);
}

const char *tutti_code_name(int code)
{
	switch (code) {
	case TUTTI_OK: return "TUTTI_OK";
	case TUTTI_EINVAL: return "TUTTI_EINVAL";
	case TUTTI_ERANK: return "TUTTI_ERANK";
	case TUTTI_ETIMEOUT: return "TUTTI_ETIMEOUT";
	case TUTTI_EMISMATCH: return "TUTTI_EMISMATCH";
	case TUTTI_ECLOSED: return "TUTTI_ECLOSED";
	case TUTTI_EABORTED: return "TUTTI_EABORTED";
	case TUTTI_EEVICTED: return "TUTTI_EEVICTED";
	case TUTTI_EISOLATED: return "TUTTI_EISOLATED";
	case TUTTI_EFORKED: return "TUTTI_EFORKED";
	case TUTTI_EUNSUPPORTED: return "TUTTI_EUNSUPPORTED";
	case TUTTI_ENOMEM: return "TUTTI_ENOMEM";
	case TUTTI_EINTERNAL: return "TUTTI_EINTERNAL";
	case TUTTI_EBUSY: return "TUTTI_EBUSY";
	case TUTTI_ECANCELED: return "TUTTI_ECANCELED";
	}
	return "unknown";
}

// ---- The library ----

#ifndef TUTTI_VERSION
#define TUTTI_VERSION "devel"
#endif

const char *tutti_version(void)
{
	return TUTTI_VERSION;
}

uint32_t tutti_abi_version(void)
{
	return TUTTI_ABI_MAJOR << 16 | TUTTI_ABI_MINOR;
}

// has_driver reports whether the CUDA driver is installed. It does not initialize it.
static int has_driver(void)
{
	static _Atomic int known; // 1: no, 2: yes
	int answer = atomic_load(&known);

	if (answer == 0 && tutti_forked())
		return 0;
	if (answer == 0) {
		answer = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != NULL ? 2 : 1;
		atomic_store(&known, answer);
	}
	return answer == 2;
}

// has_device reports whether buffers may be in the memory of the CUDA device with a number, which
// it opens.
static int has_device(const char *number)
{
	struct thread *t;
	char *end;
	long n = strtol(number, &end, 10);

	if (*number < '0' || *number > '9' || *end != 0 || n > INT32_MAX || tutti_forked() || (t = tutti_thread()) == NULL)
		return 0;
	return GO(t, goHasDevice((int32_t)n));
}

int tutti_has(const char *feature)
{
	static const char *const features[] = {"float8", "bfloat16", "windows", "elastic", "uniform", "shm", "tcp",
	                                       "members"};
	size_t i;

	for (i = 0; feature != NULL && i < sizeof features / sizeof *features; i++) {
		if (strcmp(feature, features[i]) == 0)
			return 1;
	}
	if (feature != NULL && strncmp(feature, "cuda:", 5) == 0)
		return has_device(feature + 5);
	return feature != NULL && (strcmp(feature, "cuda") == 0 || strcmp(feature, "streams") == 0) && has_driver();
}

int tutti_set_interrupt(int (*check)(void *ctx), void *ctx)
{
	ENTER(t)
	t->check = check;
	t->ctx = ctx;
	return TUTTI_OK;
}

// ---- Calls that may wait ----

static long futex(_Atomic uint32_t *word, int op, uint32_t value, const struct timespec *timeout)
{
	return syscall(SYS_futex, word, op | FUTEX_PRIVATE_FLAG, value, timeout, NULL, 0);
}

void tutti_wake(void *word)
{
	_Atomic uint32_t *done = word;

	atomic_store_explicit(done, 1, memory_order_release);
	futex(done, FUTEX_WAKE, INT_MAX, NULL); // *done may be gone by now, which is harmless
}

// checked runs a call of a thread that has a check: a goroutine runs it, and the thread waits.
static int checked(struct thread *t, struct call *c)
{
	static const struct timespec slice = {.tv_nsec = SLICE_NS};
	struct failure failure; // t->last may change in the check
	uint64_t id;
	bool cancelled = false;

	c->failure = &failure;
	(void)GO(t, (id = goBegin(c), 0));
	while (atomic_load_explicit(&c->done, memory_order_acquire) == 0) {
		if (futex(&c->done, FUTEX_WAIT, 0, cancelled ? NULL : &slice) == 0 || cancelled)
			continue;
		if (t->check != NULL && t->check(t->ctx) != 0) {
			cancelled = true;
			(void)GO(t, (goCancel(id), 0));
		}
	}
	if (c->code != TUTTI_OK)
		memcpy(&t->last, &failure, offsetof(struct failure, text) + strlen(failure.text) + 1);
	return c->code;
}

// run makes a call.
static int run(struct call *c)
{
	ENTER(t)
	if (t->check != NULL)
		return checked(t, c);
	c->failure = &t->last;
	return GO(t, goCall(c));
}

// run_settled makes a call that begins or ends the use of signals.
static int run_settled(struct call *c)
{
	struct sigaction usr1;
	int code;

	sigaction(SIGUSR1, NULL, &usr1);
	code = run(c);
	tutti_settle(&usr1);
	return code;
}

// ---- Joining ----

// adopt_config copies a configuration of the caller and its store. After a failure *kv is what was
// understood of the store.
static int adopt_config(tutti_config *full, tutti_kv *kv, const tutti_config *config)
{
	int code, other;

	memset(full, 0, sizeof *full);
	memset(kv, 0, sizeof *kv);
	if (config == NULL)
		return TUTTI_OK;
	code = adopt(full, sizeof *full, config, LEAST_CONFIG, "tutti_config");
	if (full->kv == NULL)
		return code;
	other = adopt(kv, sizeof *kv, full->kv, LEAST_KV, "tutti_kv");
	full->kv = kv;
	if (code != TUTTI_OK || other != TUTTI_OK)
		return other != TUTTI_OK ? other : code;
	if (kv->set == NULL || kv->get == NULL || kv->compare_and_set == NULL)
		return fail(TUTTI_EINVAL, "tutti_kv: set, get or compare_and_set is NULL");
	return TUTTI_OK;
}

int tutti_join(const tutti_config *config, tutti_group *group)
{
	tutti_config full;
	tutti_kv kv;
	struct call c = {.kind = CALL_JOIN, .arg = &full};
	int code;

	if (tutti_forked())
		return forked();
	code = adopt_config(&full, &kv, config);
	if (group != NULL)
		*group = 0;
	else if (code == TUTTI_OK)
		code = fail(TUTTI_EINVAL, "group is NULL");
	if (code == TUTTI_OK && tutti_thread() == NULL)
		code = TUTTI_ENOMEM;
	if (code != TUTTI_OK) { // else Go releases the store
		if (kv.release != NULL)
			kv.release(kv.ctx);
		return code;
	}
	tutti_neighbours();
	code = run_settled(&c);
	*group = c.out;
	return code;
}

static int store_ask(void *ctx, int kind, tutti_kv_call *call)
{
	struct thread *t;

	if (tutti_forked()) {
		if (call->error != NULL && call->error_cap > 0)
			snprintf(call->error, call->error_cap,
				"this process is the child of a fork: the store belongs to its parent");
		return TUTTI_EFORKED;
	}
	if ((t = tutti_thread()) == NULL)
		return TUTTI_ENOMEM;
	return GO(t, goStore((uintptr_t)ctx, kind, call));
}

static int store_set(void *ctx, tutti_kv_call *call)
{
	return store_ask(ctx, STORE_SET, call);
}

static int store_get(void *ctx, tutti_kv_call *call)
{
	return store_ask(ctx, STORE_GET, call);
}

static int store_wait(void *ctx, tutti_kv_call *call)
{
	return store_ask(ctx, STORE_WAIT, call);
}

static int store_compare_and_set(void *ctx, tutti_kv_call *call)
{
	return store_ask(ctx, STORE_COMPARE_AND_SET, call);
}

static void store_release(void *ctx)
{
	struct thread *t;

	if (!tutti_forked() && (t = tutti_thread()) != NULL)
		(void)GO(t, (goStoreRelease((uintptr_t)ctx), 0));
}

int tutti_store_open(const tutti_config *config, tutti_kv *store)
{
	tutti_config full;
	tutti_kv kv;
	struct call c = {.kind = CALL_STORE_OPEN, .arg = &full};
	int code;

	if (tutti_forked())
		return forked();
	if (store == NULL || store->struct_size != sizeof *store)
		return fail(TUTTI_EINVAL, "store is NULL, or its struct_size is not sizeof(tutti_kv)");
	code = adopt_config(&full, &kv, config);
	if (code != TUTTI_OK)
		return code;
	c.timeout_ns = full.timeout_ns;
	code = run_settled(&c);
	if (code != TUTTI_OK)
		return code;
	store->ctx = (void *)(uintptr_t)c.out;
	store->set = store_set;
	store->get = store_get;
	store->wait = store_wait;
	store->compare_and_set = store_compare_and_set;
	store->release = store_release;
	return TUTTI_OK;
}

int tutti_local(uint32_t n, const tutti_config *config, tutti_group *groups)
{
	tutti_config full;
	tutti_kv kv;
	int code;
	ENTER(t)

	if (groups == NULL)
		return fail(TUTTI_EINVAL, "groups is NULL");
	code = adopt_config(&full, &kv, config);
	if (code != TUTTI_OK)
		return code;
	tutti_neighbours();
	return GO(t, goLocal(n, &full, groups, &t->last));
}

int tutti_split(tutti_group group, int32_t color, int32_t key_, int64_t timeout_ns, tutti_group *sub)
{
	struct call c = {.kind = CALL_SPLIT, .handle = group, .a = color, .b = key_, .timeout_ns = timeout_ns};
	int code;

	if (sub == NULL)
		return missing("sub");
	code = run(&c);
	*sub = c.out;
	return code;
}

int tutti_close(tutti_group group)
{
	struct sigaction usr1;
	int code;
	ENTER(t)

	if (group == 0)
		return TUTTI_OK;
	sigaction(SIGUSR1, NULL, &usr1);
	code = GO(t, goClose(group, &t->last));
	tutti_settle(&usr1);
	return code;
}

// ---- Members ----

int tutti_member_new(const tutti_config *config, tutti_member *member)
{
	tutti_config full;
	tutti_kv kv;
	struct call c = {.kind = CALL_MEMBER_NEW, .arg = &full};
	int code;

	if (member == NULL)
		return missing("member");
	*member = 0;
	if (tutti_forked())
		return forked();
	code = adopt_config(&full, &kv, config);
	if (code != TUTTI_OK)
		return code;
	tutti_neighbours();
	code = run_settled(&c);
	*member = c.out;
	return code;
}

int tutti_member_handle(tutti_member member, char *text, uint64_t cap, uint64_t *len)
{
	ENTER(t)
	if (text == NULL && cap > 0)
		return fail(TUTTI_EINVAL, "text is NULL");
	return GO(t, goMemberHandle(member, text, cap, len, &t->last));
}

int tutti_form(tutti_member member, const char *uuid, const char *const *handles, uint32_t n, int64_t timeout_ns,
               tutti_group *group)
{
	struct call c = {.kind = CALL_MEMBER_FORM, .handle = member, .data = (void *)uuid, .arg = handles, .n = n,
	                 .timeout_ns = timeout_ns};
	int code;

	if (group == NULL || uuid == NULL || (handles == NULL && n > 0))
		return missing(group == NULL ? "group" : uuid == NULL ? "uuid" : "handles");
	*group = 0;
	code = run_settled(&c);
	*group = c.out;
	return code;
}

int tutti_member_close(tutti_member member)
{
	ENTER(t)
	return member == 0 ? TUTTI_OK : GO(t, goMemberClose(member, &t->last));
}

// ---- About a group ----

int tutti_rank(tutti_group group, int32_t *rank)
{
	ENTER(t)
	if (rank == NULL)
		return fail(TUTTI_EINVAL, "rank is NULL");
	return GO(t, goPlace(group, rank, NULL, NULL, NULL, &t->last));
}

int tutti_size(tutti_group group, int32_t *size)
{
	ENTER(t)
	if (size == NULL)
		return fail(TUTTI_EINVAL, "size is NULL");
	return GO(t, goPlace(group, NULL, size, NULL, NULL, &t->last));
}

int tutti_local_rank(tutti_group group, int32_t *rank, int32_t *size)
{
	ENTER(t)
	return GO(t, goPlace(group, NULL, NULL, rank, size, &t->last));
}

int tutti_view(tutti_group group, uint64_t *epoch, int32_t *ranks, uint32_t cap, uint32_t *n)
{
	ENTER(t)
	return GO(t, goView(group, epoch, ranks, ranks != NULL ? cap : 0, n, &t->last));
}

int tutti_topology(tutti_group group, char *text, uint64_t cap, uint64_t *len)
{
	ENTER(t)
	if (text == NULL && cap > 0)
		return fail(TUTTI_EINVAL, "text is NULL");
	return GO(t, goTopology(group, text, cap, len, &t->last));
}

int tutti_set_algorithm(tutti_group group, const char *name)
{
	ENTER(t)
	if (name == NULL)
		return fail(TUTTI_EINVAL, "name is NULL");
	return GO(t, goSetAlgorithm(group, (char *)name, &t->last));
}

// ---- Operations ----

// whole returns op if it has the size that the library knows, else a copy of that size in full.
static const tutti_op *whole(const tutti_op *op, tutti_op *full)
{
	if (op != NULL && op->struct_size == sizeof *op)
		return op;
	return adopt(full, sizeof *full, op, LEAST_OP, "tutti_op") == TUTTI_OK ? full : NULL;
}

int tutti_do(tutti_group group, const tutti_op *op)
{
	tutti_op full;
	ENTER(t)

	op = whole(op, &full);
	if (op == NULL)
		return t->last.info.code;
	if (t->check != NULL) {
		struct call c = {.kind = CALL_DO, .handle = group, .arg = op};
		return checked(t, &c);
	}
	return GO(t, goDo(group, (tutti_op *)op, &t->last));
}

int tutti_start(tutti_group group, const tutti_op *op, tutti_work *work)
{
	tutti_op full;
	ENTER(t)

	if (work == NULL)
		return fail(TUTTI_EINVAL, "work is NULL");
	*work = 0;
	op = whole(op, &full);
	if (op == NULL)
		return t->last.info.code;
	return GO(t, goStart(group, (tutti_op *)op, work, &t->last));
}

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// wait_sliced is goWait for a thread that has a check. TUTTI_ECANCELED: the check ended the wait.
static int wait_sliced(struct thread *t, tutti_work work, int64_t timeout_ns, struct failure *f)
{
	int64_t begin = now(), left = timeout_ns;
	int code;

	for (;;) {
		code = GO(t, goWait(work, left < 0 || left > SLICE_NS ? SLICE_NS : left, f));
		if (code != TUTTI_EBUSY)
			return code;
		if (timeout_ns >= 0 && (left = timeout_ns - (now() - begin)) <= 0)
			return TUTTI_EBUSY;
		if (t->check != NULL && t->check(t->ctx) != 0)
			return fail(TUTTI_ECANCELED, "the wait was interrupted; the operation runs on");
	}
}

int tutti_run(tutti_group group, const tutti_op *op, int64_t wait_ns, tutti_work *work)
{
	struct failure failure; // of the operation, which is not one of this call
	tutti_op full;
	int code;
	ENTER(t)

	if (work == NULL)
		return fail(TUTTI_EINVAL, "work is NULL");
	*work = 0;
	op = whole(op, &full);
	if (op == NULL)
		return t->last.info.code;
	if (t->check == NULL || (wait_ns >= 0 && wait_ns <= SLICE_NS))
		return GO(t, goRun(group, (tutti_op *)op, wait_ns, work, &t->last));
	code = GO(t, goRun(group, (tutti_op *)op, SLICE_NS, work, &t->last));
	if (code != TUTTI_EBUSY)
		return code;
	code = wait_sliced(t, *work, wait_ns < 0 ? -1 : wait_ns - SLICE_NS, &failure);
	if (code != TUTTI_OK)
		return code == TUTTI_ECANCELED ? code : TUTTI_EBUSY;
	tutti_work_release(*work);
	*work = 0;
	return TUTTI_OK;
}

// ---- Works ----

_Atomic(struct work *) tutti_chunks[WORK_CHUNKS];

struct work *tutti_add_works(uint32_t chunk)
{
	struct work *all = calloc(WORKS_IN_CHUNK, sizeof *all);

	atomic_store_explicit(&tutti_chunks[chunk], all, memory_order_release);
	return all;
}

// find returns the work of a handle, NULL if it is invalid.
static struct work *find(tutti_work work)
{
	uint32_t index = (uint32_t)work, generation = work >> 32 & 0xfffffff;
	struct work *chunk;

	if (work >> 60 != KIND_WORK || index / WORKS_IN_CHUNK >= WORK_CHUNKS || generation % 2 == 0)
		return NULL;
	chunk = atomic_load_explicit(&tutti_chunks[index / WORKS_IN_CHUNK], memory_order_acquire);
	if (chunk == NULL)
		return NULL;
	chunk += index % WORKS_IN_CHUNK;
	return atomic_load_explicit(&chunk->generation, memory_order_acquire) == generation ? chunk : NULL;
}

static int unknown_work(tutti_work work)
{
	return fail(TUTTI_EINVAL, "%#llx is no work, or one that was released", (unsigned long long)work);
}

// state returns the code of a work, TUTTI_EBUSY while it runs. After a failure it describes that as
// this thread's last.
static int state(tutti_work work)
{
	struct work *w = find(work);
	uint32_t word;

	if (w == NULL)
		return unknown_work(work);
	word = atomic_load_explicit(&w->word, memory_order_acquire);
	if (word == 0)
		return TUTTI_EBUSY;
	if (word == 1 + TUTTI_OK)
		return TUTTI_OK;
	ENTER(t)
	return GO(t, goOutcome(work, &t->last));
}

const uint32_t *tutti_work_word(tutti_work work)
{
	struct work *w;

	if (tutti_forked()) {
		forked();
		return NULL;
	}
	w = find(work);
	if (w == NULL) {
		unknown_work(work);
		return NULL;
	}
	return (const uint32_t *)&w->word;
}

int tutti_work_test(tutti_work work)
{
	return tutti_forked() ? forked() : state(work);
}

int tutti_work_wait(tutti_work work, int64_t timeout_ns)
{
	int code;
	ENTER(t)

	code = state(work);
	if (code != TUTTI_EBUSY)
		return code;
	if (t->check == NULL)
		return GO(t, goWait(work, timeout_ns, &t->last));
	return wait_sliced(t, work, timeout_ns, &t->last);
}

int tutti_work_error(tutti_work work, tutti_error_info *info)
{
	struct failure failure;
	int code;
	ENTER(t)

	clear(&failure, TUTTI_OK);
	code = GO(t, goOutcome(work, &failure));
	if (code == TUTTI_EBUSY)
		return code;
	if (find(work) == NULL)
		return unknown_work(work);
	return give_info(&failure.info, info);
}

int tutti_work_error_text(tutti_work work, char *text, uint64_t cap, uint64_t *len)
{
	struct failure failure;
	size_t n;
	int code;
	ENTER(t)

	if (text == NULL && cap > 0)
		return fail(TUTTI_EINVAL, "text is NULL");
	clear(&failure, TUTTI_OK);
	code = GO(t, goOutcome(work, &failure));
	if (code == TUTTI_EBUSY)
		return code;
	if (find(work) == NULL)
		return unknown_work(work);
	n = strlen(failure.text);
	if (len != NULL)
		*len = n;
	if (cap > 0) {
		if (n > cap - 1)
			n = cap - 1;
		memcpy(text, failure.text, n);
		text[n] = 0;
	}
	return TUTTI_OK;
}

int tutti_work_status(tutti_work work, tutti_status *status)
{
	ENTER(t)
	if (status == NULL)
		return fail(TUTTI_EINVAL, "status is NULL");
	return GO(t, goResult(work, status, NULL, &t->last));
}

int tutti_work_result_here(tutti_work work, int32_t *here)
{
	ENTER(t)
	if (here == NULL)
		return fail(TUTTI_EINVAL, "here is NULL");
	return GO(t, goResult(work, NULL, here, &t->last));
}

int tutti_work_release(tutti_work work)
{
	ENTER(t)
	return work == 0 ? TUTTI_OK : GO(t, goRelease(work, &t->last));
}

// ---- Membership ----

int tutti_abort(tutti_group group, const char *reason)
{
	ENTER(t)
	return GO(t, goAbort(group, (char *)(reason == NULL ? "" : reason), &t->last));
}

int tutti_recover(tutti_group group, int64_t timeout_ns)
{
	struct call c = {.kind = CALL_RECOVER, .handle = group, .timeout_ns = timeout_ns};

	return run(&c);
}

int tutti_admit(tutti_group group, int64_t timeout_ns, int32_t *admitted)
{
	struct call c = {.kind = CALL_ADMIT, .handle = group, .timeout_ns = timeout_ns};
	int code = run(&c);

	if (admitted != NULL)
		*admitted = (int32_t)c.out;
	return code;
}

int tutti_evict(tutti_group group, int32_t rank, int64_t timeout_ns)
{
	struct call c = {.kind = CALL_EVICT, .handle = group, .a = rank, .timeout_ns = timeout_ns};

	return run(&c);
}

int tutti_rejoin(tutti_group group, int64_t timeout_ns, tutti_group *again)
{
	struct call c = {.kind = CALL_REJOIN, .handle = group, .timeout_ns = timeout_ns};
	int code;

	if (again == NULL)
		return missing("again");
	code = run_settled(&c);
	*again = c.out;
	return code;
}

int tutti_agree(tutti_group group, int32_t yes, int64_t timeout_ns, int32_t *all)
{
	struct call c = {.kind = CALL_AGREE, .handle = group, .a = yes, .timeout_ns = timeout_ns};
	int code;

	if (all == NULL)
		return missing("all");
	code = run(&c);
	*all = (int32_t)c.out;
	return code;
}

// ---- Memory ----

int tutti_alloc(tutti_group group, uint64_t bytes, void **memory)
{
	ENTER(t)
	if (memory == NULL)
		return fail(TUTTI_EINVAL, "memory is NULL");
	return GO(t, goAlloc(group, bytes, (uint64_t *)(void *)memory, &t->last));
}

int tutti_free(void *memory)
{
	ENTER(t)
	return memory == NULL ? TUTTI_OK : GO(t, goFree((uint64_t)(uintptr_t)memory, &t->last));
}

// ---- Windows ----

int tutti_window_new(tutti_group group, uint64_t bytes, int64_t timeout_ns, tutti_window *window)
{
	struct call c = {.kind = CALL_WINDOW_NEW, .handle = group, .n = bytes, .timeout_ns = timeout_ns};
	int code;

	if (window == NULL)
		return missing("window");
	code = run(&c);
	*window = c.out;
	return code;
}

int tutti_window_bytes(tutti_window window, void **data, uint64_t *bytes)
{
	ENTER(t)
	return GO(t, goWindowBytes(window, (uint64_t *)(void *)data, bytes, &t->last));
}

int tutti_window_map(tutti_window window, int32_t rank, int64_t timeout_ns, const void **data)
{
	struct call c = {.kind = CALL_WINDOW_MAP, .handle = window, .a = rank, .timeout_ns = timeout_ns};
	int code;

	if (data == NULL)
		return missing("data");
	code = run(&c);
	*data = (const void *)(uintptr_t)c.out;
	return code;
}

static int transfer(int kind, tutti_window window, int32_t rank, uint64_t offset, void *data, uint64_t bytes,
                    int32_t counter, int64_t timeout_ns)
{
	struct call c = {.kind = kind, .handle = window, .a = rank, .b = counter, .offset = offset, .data = data,
	                 .n = bytes, .timeout_ns = timeout_ns};

	if (data == NULL && bytes > 0)
		return missing("the memory");
	return run(&c);
}

int tutti_window_put(tutti_window window, int32_t rank, uint64_t offset, const void *src, uint64_t bytes,
                     int64_t timeout_ns)
{
	return transfer(CALL_WINDOW_PUT, window, rank, offset, (void *)src, bytes, 0, timeout_ns);
}

int tutti_window_put_signal(tutti_window window, int32_t rank, uint64_t offset, const void *src, uint64_t bytes,
                            int32_t counter, int64_t timeout_ns)
{
	return transfer(CALL_WINDOW_PUT_SIGNAL, window, rank, offset, (void *)src, bytes, counter, timeout_ns);
}

int tutti_window_get(tutti_window window, int32_t rank, uint64_t offset, void *dst, uint64_t bytes,
                     int64_t timeout_ns)
{
	return transfer(CALL_WINDOW_GET, window, rank, offset, dst, bytes, 0, timeout_ns);
}

int tutti_window_signal(tutti_window window, int32_t rank, int32_t counter, int64_t timeout_ns)
{
	return transfer(CALL_WINDOW_SIGNAL, window, rank, 0, NULL, 0, counter, timeout_ns);
}

int tutti_window_wait_signal(tutti_window window, int32_t rank, int32_t counter, uint64_t n, int64_t timeout_ns)
{
	struct call c = {.kind = CALL_WINDOW_WAIT_SIGNAL, .handle = window, .a = rank, .b = counter, .n = n,
	                 .timeout_ns = timeout_ns};

	return run(&c);
}

int tutti_window_flush(tutti_window window, int32_t rank, int64_t timeout_ns)
{
	return transfer(CALL_WINDOW_FLUSH, window, rank, 0, NULL, 0, 0, timeout_ns);
}

int tutti_window_refresh(tutti_window window, int64_t timeout_ns)
{
	return transfer(CALL_WINDOW_REFRESH, window, 0, 0, NULL, 0, 0, timeout_ns);
}

int tutti_window_close(tutti_window window, int64_t timeout_ns)
{
	if (window == 0)
		return tutti_forked() ? forked() : TUTTI_OK;
	return transfer(CALL_WINDOW_CLOSE, window, 0, 0, NULL, 0, 0, timeout_ns);
}

// ---- A store's callbacks ----

int tutti_kv_run(int (*f)(void *, tutti_kv_call *), void *ctx, tutti_kv_call *call)
{
	return f(ctx, call);
}

void tutti_kv_done(void (*release)(void *), void *ctx)
{
	release(ctx);
}
