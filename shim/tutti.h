/*
 * tutti.h: the C interface of Tutti, process groups and their collectives.
 *
 *     tutti_group g;
 *     if (tutti_join(NULL, &g) != TUTTI_OK)            // rank, size, store: from the environment
 *         errx(1, "%s", tutti_last_error());
 *     tutti_allreduce(g, x, n, TUTTI_FLOAT32, TUTTI_SUM);
 *     tutti_close(g);
 *
 * Link with libtutti.so (pkg-config tutti), or open it with dlopen. docs/c.md describes
 * building, fork, signals, thread-local storage, musl and trust. The documentation of the Go
 * package tutti/pg describes the semantics of groups: order, deadlines, lost ranks, what an
 * error leaves in buffers.
 *
 * Return values. A function that returns int returns TUTTI_OK (0) or another TUTTI_E... code, but
 * tutti_has.
 * The calling thread's last failure is described by tutti_last_error and tutti_last_error_info.
 * A function that succeeds leaves that description as it was.
 *
 * Handles. Groups, members, works and windows are numbers. 0 is never a handle. A handle that was
 * closed or released, or that never was one, gives TUTTI_EINVAL.
 *
 * Threads. All functions may be called from any thread, and concurrently. Ranks must agree on
 * the order of the collectives of a group: see tutti_do.
 *
 * Fork. The child of a fork cannot use Tutti: every function that returns int returns
 * TUTTI_EFORKED there, and does nothing else, but tutti_has and tutti_last_error_info. Releasing
 * and closing do nothing. A child that calls exec can use Tutti.
 *
 * Times are in nanoseconds. The group's timeout (tutti_config.timeout_ns) bounds all calls that
 * wait for ranks. A timeout_ns above 0 bounds a call besides; 0 and negative ones do not, unless
 * a function says otherwise.
 *
 * Structures that may grow begin with their size, which the caller sets to sizeof. A library
 * that knows more fields than the caller takes the missing ones as 0. A library that knows fewer
 * requires the unknown ones to be 0.
 *
 * Nothing here throws, and no callback may throw or call longjmp.
 */
#ifndef TUTTI_H
#define TUTTI_H

#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this interface: the major number changes when programs have to be changed, the
 * minor one when something is added. */
#define TUTTI_ABI_MAJOR 1
#define TUTTI_ABI_MINOR 3

#if defined(__GNUC__)
#define TUTTI_API __attribute__((visibility("default")))
#else
#define TUTTI_API
#endif

/* ---- Codes ---- */

enum {
	TUTTI_OK = 0,
	TUTTI_EINVAL = 1,       /* invalid argument or handle: nothing was sent, the group is usable */
	TUTTI_ERANK = 2,        /* a rank died, left or cannot be reached */
	TUTTI_ETIMEOUT = 3,     /* the time was up: the text names the ranks that were waited for */
	TUTTI_EMISMATCH = 4,    /* two ranks called different operations: the text describes both */
	TUTTI_ECLOSED = 5,      /* the group, or the window, was closed here */
	TUTTI_EABORTED = 6,     /* a rank called tutti_abort */
	TUTTI_EEVICTED = 7,     /* the others have removed this rank: see tutti_rejoin */
	TUTTI_EISOLATED = 8,    /* this rank cannot reach the store that decides which ranks remain */
	TUTTI_EFORKED = 9,      /* this process is a forked child */
	TUTTI_EUNSUPPORTED = 10,/* this library, machine or group cannot do it */
	TUTTI_ENOMEM = 11,      /* no memory */
	TUTTI_EINTERNAL = 12,   /* any other failure, such as a store that cannot be reached */
	TUTTI_EBUSY = 13,       /* tutti_work_wait, tutti_work_test: the operation still runs */
	TUTTI_ECANCELED = 14    /* the check of tutti_set_interrupt ended the call */
};

/* Returns the name of a code, "TUTTI_ERANK", or "unknown". The text is constant. */
TUTTI_API const char *tutti_code_name(int code);

/* Details of an error. */
#define TUTTI_MAX_LISTED 64
typedef struct tutti_error_info {
	uint32_t struct_size;
	int32_t code;
	int32_t reporter;    /* the rank that noticed; -1: not known, or no rank */
	int32_t overwritten; /* TUTTI_ERANK: the operation worked in place, and its input is lost */
	uint64_t epoch;      /* TUTTI_ERANK: of the view */
	/* The ranks that failed (TUTTI_ERANK), were waited for (TUTTI_ETIMEOUT) or disagree
	 * (TUTTI_EMISMATCH). Of more than TUTTI_MAX_LISTED ranks the first are listed. */
	uint32_t ranks_total;
	uint32_t ranks_listed;
	int32_t ranks[TUTTI_MAX_LISTED];
} tutti_error_info;

/* Returns the text of this thread's last failure, "" if there was none. It stays valid and the
 * same until this thread's next failure, or its end. It works in a forked child. */
TUTTI_API const char *tutti_last_error(void);

/* Fills info with details of this thread's last failure. The code is TUTTI_OK if there was none. */
TUTTI_API int tutti_last_error_info(tutti_error_info *info);

/* ---- The library ---- */

/* Returns the library's version, "v1.2.3" or "devel". The text is constant. */
TUTTI_API const char *tutti_version(void);

/* Returns the version of the interface that the library implements: major << 16 | minor. A
 * program that opens the library with dlopen should refuse another major version than
 * TUTTI_ABI_MAJOR, and a smaller minor one than TUTTI_ABI_MINOR. */
TUTTI_API uint32_t tutti_abi_version(void);

/* Returns 1 if the library has a feature, else 0: "float8", "bfloat16", "windows", "elastic"
 * (shrink, retry, admit, rejoin), "uniform", "shm", "tcp", "members", "cuda" and "streams" (buffers
 * in the memory of CUDA devices, in the order of streams: the CUDA driver is installed), "cuda:0",
 * "cuda:1" and so on (the library can use the memory of that device: it opens it). */
TUTTI_API int tutti_has(const char *feature);

/* Sets a function that blocking calls of this thread call about every 50 ms while they wait;
 * NULL removes it. It runs on this thread without any lock, so that it may acquire an
 * interpreter's lock and run signal handlers. If it returns a value other than 0, the call ends
 * with TUTTI_ECANCELED, or with its outcome if that comes first. An operation that tutti_do ran
 * then counts as timed out at all ranks; tutti_run and tutti_work_wait leave theirs running.
 *
 * It applies to tutti_join, tutti_store_open, tutti_member_new, tutti_form, tutti_split,
 * tutti_recover, tutti_admit, tutti_evict, tutti_rejoin, tutti_agree, tutti_do, tutti_run,
 * tutti_work_wait, and functions of windows that wait. With a check, tutti_do and calls of windows
 * cost some microseconds more. */
TUTTI_API int tutti_set_interrupt(int (*check)(void *ctx), void *ctx);

/* ---- Joining ---- */

typedef uint64_t tutti_group;

/* A request to a store of the host program. The store is a map from keys to values that all
 * ranks see. An empty value stands for a missing one. */
#define TUTTI_MAX_VALUE 65536
typedef struct tutti_kv_call {
	uint32_t struct_size;
	uint32_t error_cap;
	const char *key;         /* 1 to 256 bytes, with a final NUL */
	const void *value;       /* set, compare_and_set: the value to store */
	uint64_t value_len;
	const void *expected;    /* compare_and_set: the value that the key must have */
	uint64_t expected_len;
	int64_t timeout_ns;      /* the callback must return in this time; it is never 0 or negative */
	void *result;            /* get, wait, compare_and_set: where to write the value */
	uint64_t result_cap;     /* at least TUTTI_MAX_VALUE */
	uint64_t result_len;     /* to be set to the value's length; it is 0 before */
	char *error;             /* room for a text, with a final NUL, of a failure */
} tutti_kv_call;

/* The callbacks of a store. They return TUTTI_OK, TUTTI_ETIMEOUT when timeout_ns has passed, or
 * another code after writing a text to error. They are called on threads of the library,
 * possibly several at a time, and may block until the timeout: a wait blocks none of the others.
 * They must not call functions of this header. */
typedef struct tutti_kv {
	uint32_t struct_size;
	uint32_t reserved;
	void *ctx;
	/* Sets key to value. */
	int (*set)(void *ctx, tutti_kv_call *call);
	/* Gives the value of key, length 0 if it has none. It does not wait. */
	int (*get)(void *ctx, tutti_kv_call *call);
	/* Gives the value of key as soon as it has one. NULL: the library calls get repeatedly. */
	int (*wait)(void *ctx, tutti_kv_call *call);
	/* Sets key to value if its value is expected (length 0: if it has none), atomically, and gives
	 * the resulting value. */
	int (*compare_and_set)(void *ctx, tutti_kv_call *call);
	/* Called once when no other callback runs or will be called any more: after the last group that
	 * was made with this store was closed, or after tutti_join has failed. It may be called before
	 * or soon after that call returns, on any thread. A tutti_join that returns TUTTI_EFORKED, or
	 * refuses the size of a structure, does not call it; nor does another function that is given a
	 * store. May be NULL. */
	void (*release)(void *ctx);
} tutti_kv;

/* on_failure. TUTTI_REPORT stands for what TUTTI_ON_FAILURE says, if that is set;
 * TUTTI_REPORT_ALWAYS does not. (The latter since 1.3.) */
enum { TUTTI_REPORT_ALWAYS = -1, TUTTI_REPORT = 0, TUTTI_SHRINK = 1, TUTTI_RETRY = 2 };
enum { TUTTI_TIMEOUT_REPORTS = 0, TUTTI_TIMEOUT_EVICTS = 1, TUTTI_TIMEOUT_EVICTS_ALONE = 2 }; /* on_timeout */

/* How a process joins its group. All fields may be 0: the environment or the default then
 * counts. Fields that are set win over the environment. The fields are those of pg.Config in Go.
 * Strings and the structures that kv points to are copied: they may change after the call. */
typedef struct tutti_config {
	uint32_t struct_size;
	int32_t size;              /* number of ranks; 0: the environment says it, and the rank */
	int32_t rank;              /* 0 to size-1; a larger one joins a running job */
	int32_t max_size;          /* to how many ranks the job may grow */
	const char *job;           /* the job's name */
	const char *store;         /* the store's address, "etcd://host:port" */
	const char *store_user;
	const char *store_password;
	const tutti_kv *kv;        /* a store of the program, used instead. The job is fixed: on_failure
	                              must be TUTTI_REPORT or TUTTI_REPORT_ALWAYS, auto_admit 0,
	                              max_size 0 or size */
	const void *secret;        /* the job's secret, at least 16 bytes */
	uint64_t secret_len;
	const char *transport;     /* "auto", or some of "shm", "rdma", "tcp", with commas, the preferred first */
	const char *interfaces;    /* network interfaces: names and CIDRs */
	const char *ports;         /* "0", "29500" or "29500-29600" */
	const char *algorithm;
	const char *tuning;        /* path of a table of algorithms, or "off" */
	const char *log_dir;       /* for flight records */
	const char *metrics;       /* HOST:PORT to serve metrics at */
	const char *log_level;     /* "debug", "info", "warn", "error" or "off": messages on standard error */
	int64_t timeout_ns;        /* bounds every operation, and tutti_join; negative: no bound */
	int64_t window_ns;
	int64_t lease_ttl_ns;
	int32_t on_failure;        /* TUTTI_REPORT, ... */
	int32_t on_timeout;        /* TUTTI_TIMEOUT_REPORTS, ... */
	int32_t uniform;           /* 1: every collective has the same outcome at all survivors */
	int32_t auto_admit;        /* 1: waiting ranks are admitted between operations */
	int32_t progress;          /* 1: frames are received while the program computes */
	/* The number of threads that run Go code at a time. It applies to the whole process; the first
	 * tutti_join, tutti_local, tutti_member_new or tutti_store_open that gives one sets it, unless
	 * the environment had GOMAXPROCS when the library was loaded. As long as none has given one, it
	 * is 4, or the number of cores if that is less. */
	int32_t max_procs;
	/* The soft limit of Go's heap in bytes, in the same way; the environment's variable is
	 * GOMEMLIMIT. Not given: 1 GiB. Memory of tutti_alloc and of windows does not count. */
	int64_t memory_limit;
} tutti_config;

/* Makes this process a rank of its job, and *group the group of all ranks. It returns when every
 * rank has joined. config may be NULL: everything comes from the environment, as it is at the
 * time of the call. The fields mean what pg.Config says. A process may be a rank of several
 * jobs. */
TUTTI_API int tutti_join(const tutti_config *config, tutti_group *group);

/* Opens the job's own store for the program: a map that all its ranks see, and that outlives them.
 * config says which, as for tutti_join: store, store_user, store_password, job and secret count, or
 * the environment. The functions are written to *store, whose struct_size is to be set before. They
 * may be called from any thread, until release; release closes the store, and removes no key. The
 * keys are the program's: Tutti uses none of them. They go with the job. A key has 1 to 248 bytes,
 * a value at most TUTTI_MAX_VALUE. While the store cannot be reached, get, set and wait try again
 * until their timeout_ns, so that a set may happen twice; compare_and_set fails, and may have
 * happened. (Since 1.1.) */
TUTTI_API int tutti_store_open(const tutti_config *config, tutti_kv *store);

/* Makes n ranks inside this process, for tests and for programs that are parallel in threads:
 * groups[0] to groups[n-1]. Of config, which may be NULL, algorithm, timeout_ns, log_level,
 * max_procs and memory_limit count. */
TUTTI_API int tutti_local(uint32_t n, const tutti_config *config, tutti_group *groups);

/* A member: this process in groups whose membership the program decides. No store is involved.
 * The program gives the same list of handles to all members that shall form a group. */
typedef uint64_t tutti_member;

/* Makes a member, which listens for others. config, which may be NULL, must give no size, rank,
 * job or store. Every connection proves to know its secret. A process may have several members. */
TUTTI_API int tutti_member_new(const tutti_config *config, tutti_member *member);

/* Writes the member's handle to text, printable characters, at most cap bytes with the final
 * NUL. *len, if not NULL, is set to the length of the whole handle without the NUL. The handle
 * does not reveal the secret, and is of no use without it. */
TUTTI_API int tutti_member_handle(tutti_member member, char *text, uint64_t cap, uint64_t *len);

/* Makes a group of the members with n handles, of which this is one: handles[i] is rank i. All
 * of them call it with the same uuid, 1 to 128 printable bytes, and the same handles in the same
 * order. It returns when all have. A member uses a uuid once, even if the call fails.
 * TUTTI_EINVAL: the uuid was used by a member, or the handles are invalid. TUTTI_EMISMATCH: two
 * members have different handles. TUTTI_ERANK, TUTTI_ETIMEOUT: a member has ended, failed, or did
 * not come. The text names it. The group ends with the first lost rank. */
TUTTI_API int tutti_form(tutti_member member, const char *uuid, const char *const *handles, uint32_t n,
                         int64_t timeout_ns, tutti_group *group);

/* Withdraws the handle. A tutti_form under way fails with TUTTI_ECLOSED. Groups that were formed
 * stay until they are closed. Closing 0 does nothing. */
TUTTI_API int tutti_member_close(tutti_member member);

/* Divides the group: ranks with the same color (>= 0) form a subgroup, ordered by key and among
 * equal keys by rank. A rank with a negative color gets *sub = 0. It is a collective. Each
 * subgroup is closed separately. */
TUTTI_API int tutti_split(tutti_group group, int32_t color, int32_t key, int64_t timeout_ns, tutti_group *sub);

/* Leaves the group. Operations under way end with TUTTI_ECLOSED. If other ranks may not have begun
 * the last operation, as after a broadcast of which this rank is the root, tutti_close first waits
 * until they have: at most 10 seconds and the group's timeout, and not after a failure or
 * tutti_abort. A rank that begins the operation after that gets TUTTI_ERANK. The handle becomes
 * invalid; works of the group stay valid until they are released. It returns in bounded time. If
 * the ranks have met through their launcher, without a store, rank 0 serves the job's store: its
 * last tutti_close waits until the others have left, at most for the group's timeout, without a
 * bound if that is none. After a tutti_rejoin that has failed, that of the group of all ranks
 * does. Closing 0 does nothing. */
TUTTI_API int tutti_close(tutti_group group);

/* ---- About a group ---- */

TUTTI_API int tutti_rank(tutti_group group, int32_t *rank);

/* The number of slots. It grows when the job does. */
TUTTI_API int tutti_size(tutti_group group, int32_t *size);

/* The rank's place among the ranks of the group on this machine, and their number. */
TUTTI_API int tutti_local_rank(tutti_group group, int32_t *rank, int32_t *size);

/* Gives the view in which the latest call on the group ended: its epoch, and the active ranks,
 * ascending, of which at most cap are written to ranks; *n is their number. epoch, ranks and n
 * may be NULL; cap does not count if ranks is. */
TUTTI_API int tutti_view(tutti_group group, uint64_t *epoch, int32_t *ranks, uint32_t cap, uint32_t *n);

/* Writes a line that describes how the ranks are distributed and linked to text, at most cap
 * bytes with the final NUL. *len, if not NULL, is set to the length of the whole text without
 * the NUL. */
TUTTI_API int tutti_topology(tutti_group group, char *text, uint64_t cap, uint64_t *len);

/* Forces an algorithm for later collectives, "auto" for none: see Group.SetAlgorithm in Go. */
TUTTI_API int tutti_set_algorithm(tutti_group group, const char *name);

/* ---- Operations ---- */

enum { /* data types */
	TUTTI_INT8 = 1,
	TUTTI_INT16 = 2,
	TUTTI_INT32 = 3,
	TUTTI_INT64 = 4,
	TUTTI_UINT8 = 5,
	TUTTI_UINT16 = 6,
	TUTTI_UINT32 = 7,
	TUTTI_UINT64 = 8,
	TUTTI_FLOAT32 = 9,
	TUTTI_FLOAT64 = 10,
	TUTTI_FLOAT16 = 11,    /* IEEE 754 binary16 */
	TUTTI_BFLOAT16 = 12,
	TUTTI_FLOAT8_E4M3 = 13,/* OCP E4M3 without infinity (torch.float8_e4m3fn): no reduction but TUTTI_SUM */
	TUTTI_FLOAT8_E5M2 = 14,/* OCP E5M2: no reduction but TUTTI_SUM */
	TUTTI_BOOL = 15        /* one byte, 0 or 1: sum and max are or, product and min are and; no average */
};

enum { /* reductions */
	TUTTI_SUM = 1,
	TUTTI_PRODUCT = 2,
	TUTTI_MIN = 3,
	TUTTI_MAX = 4,
	TUTTI_AVG = 5,         /* the sum divided by the number of active ranks, of integers cut towards 0 */
	TUTTI_BIT_AND = 6,
	TUTTI_BIT_OR = 7,
	TUTTI_BIT_XOR = 8
};

enum { /* kinds of operations: see the functions below for their fields */
	TUTTI_OP_BARRIER = 1,
	TUTTI_OP_ALLREDUCE = 2,
	TUTTI_OP_REDUCE_SCATTER = 3,
	TUTTI_OP_ALLGATHER = 4,
	TUTTI_OP_ALLGATHERV = 5,
	TUTTI_OP_ALLTOALL = 6,
	TUTTI_OP_ALLTOALLV = 7,
	TUTTI_OP_BROADCAST = 8,
	TUTTI_OP_REDUCE = 9,
	TUTTI_OP_GATHER = 10,
	TUTTI_OP_SCATTER = 11,
	TUTTI_OP_SEND = 12,
	TUTTI_OP_RECV = 13
};

#define TUTTI_HOST (-1)
#define TUTTI_ANY_RANK (-1)
#define TUTTI_ANY_TAG (-1)

/* Typed memory.
 *
 * Memory of a CUDA device may be in the buffers of collectives and messages, not of windows. All
 * buffers of an operation are in memory of one device, which is in its primary context, as that of
 * the CUDA runtime. The operation runs in the order of tutti_op.stream: it sees the results of work
 * that the stream was given before, and work that it is given later sees those of the operation. So
 * neither needs a wait. A message is in that order too: a send behind a receive of the same stream
 * begins when that has its message. tutti_do returns when the stream has the result, tutti_start at
 * once; the buffers may be freed when the work has ended. After an error later work of the stream
 * finds anything in dst. If the stream has not come to an operation a second after its failure,
 * that ends; the stream still passes it when it comes, and the buffers must exist until then.
 *
 * An allreduce of up to 128 KiB, and an allgather, a reduce-scatter or an alltoall of less than 32
 * KiB, all parts together, need no host if the group has 2 to 8 ranks on one machine, each with a
 * GPU that the process used when it joined, and no auto_admit. They are in the memory of GPUs at
 * all ranks then, or at none, on one GPU of each, and the first one in a view waits for all ranks,
 * also in tutti_start. After one was run, a stream that is being captured into a graph
 * (cudaStreamBeginCapture) takes collectives of any length by tutti_start, if all parts are of
 * equal length, and no messages. Each launch of the graph is the operation then, and has no result
 * after the group has entered another view; the next operation says so. Each view of a group in
 * which a graph was captured keeps up to 6 MiB of a GPU's memory while the process lives.
 *
 * TUTTI_EUNSUPPORTED: there is no driver, or no such device. (Since 1.2.) */
typedef struct tutti_buffer {
	void *data;
	uint64_t count;  /* elements */
	int32_t dtype;
	int32_t device;  /* TUTTI_HOST, or the number of a CUDA device */
} tutti_buffer;

/* What a receive has received. */
typedef struct tutti_status {
	int32_t from;
	int32_t tag;
	uint64_t count;  /* elements */
} tutti_status;

/* An operation. Fields that its kind does not use are ignored. */
typedef struct tutti_op {
	uint32_t struct_size;
	int32_t kind;
	int32_t reduction;
	int32_t peer;      /* the root; send: to; receive: from */
	int32_t tag;       /* messages: 0 to 2^31-1 */
	uint32_t flags;    /* 0 */
	tutti_buffer dst;
	tutti_buffer src;
	const int64_t *src_counts; /* elements by rank; counts_len of them. They are copied */
	const int64_t *dst_counts;
	uint64_t counts_len;
	void *stream;      /* device buffers: the CUDA stream in whose order the operation runs, NULL for the
	                      default stream */
	int64_t timeout_ns;
	tutti_status *status; /* tutti_do of a receive: set to what was received; may be NULL */
} tutti_op;

typedef uint64_t tutti_work;

/* Runs an operation, and returns when it has ended. All ranks of a group call the same
 * collectives in the same order; those run one at a time. Messages are not part of the order.
 * timeout_ns bounds the call from its beginning, in addition to the group's timeout; if it is
 * not above 0, the group's counts alone.
 *
 * After a return with any code nothing accesses the buffers. */
TUTTI_API int tutti_do(tutti_group group, const tutti_op *op);

/* Begins an operation and returns without waiting for a peer. The buffers belong to the
 * operation until it has ended. *work must be released. If timeout_ns is above 0 it bounds the
 * operation instead of the group's timeout, a collective from the beginning of its run, a
 * message from the call; if it is negative, nothing bounds it.
 *
 * An error in the arguments either is returned, and *work is 0 then, or ends the work at once. */
TUTTI_API int tutti_start(tutti_group group, const tutti_op *op, tutti_work *work);

/* tutti_start, and a tutti_work_wait of at most wait_ns, in one call. TUTTI_OK: the operation has
 * ended well, and *work is 0. TUTTI_EBUSY, which does not count as a failure: it runs on, or has
 * failed; *work is its handle, which must be released. TUTTI_ECANCELED: the check of
 * tutti_set_interrupt ended the wait; *work is its handle as well. Any other code: an error in the
 * arguments, and *work is 0. (Since 1.2.) */
TUTTI_API int tutti_run(tutti_group group, const tutti_op *op, int64_t wait_ns, tutti_work *work);

/* ---- Works ---- */

/* Returns the work's completion word: 0 while the operation runs, then 1 + its code. Any thread
 * may poll it with an acquire load, without a call. It stays valid until the work is released.
 * NULL: the handle is invalid, or the process a forked child. An operation makes progress
 * without a wait, but a small one up to a millisecond late. */
TUTTI_API const uint32_t *tutti_work_word(tutti_work work);

/* Returns TUTTI_EBUSY while the operation runs, then its code. It does not enter Go unless the
 * operation has failed. TUTTI_EBUSY does not count as a failure for tutti_last_error. */
TUTTI_API int tutti_work_test(tutti_work work);

/* Waits until the operation has ended, at most timeout_ns (0: not at all, like tutti_work_test,
 * but the operation is urged on; negative: no limit), and returns its code. TUTTI_EBUSY, which
 * does not count as a failure: time is up, and the operation runs on. Several threads may wait. */
TUTTI_API int tutti_work_wait(tutti_work work, int64_t timeout_ns);

/* Fills info with details of the outcome. TUTTI_EBUSY: the operation still runs. */
TUTTI_API int tutti_work_error(tutti_work work, tutti_error_info *info);

/* Writes the text of the outcome to text, "" after success, at most cap bytes with the final
 * NUL. *len, if not NULL, is set to the length of the whole text. TUTTI_EBUSY: the operation
 * still runs. */
TUTTI_API int tutti_work_error_text(tutti_work work, char *text, uint64_t cap, uint64_t *len);

/* Fills status with what a receive has received. TUTTI_EBUSY: the operation still runs. */
TUTTI_API int tutti_work_status(tutti_work work, tutti_status *status);

/* Sets *here to 1 if this rank has the operation's result, even if the outcome is an error
 * because its confirmation failed (tutti_config.uniform), else to 0. TUTTI_EBUSY: the operation
 * still runs. */
TUTTI_API int tutti_work_result_here(tutti_work work, int32_t *here);

/* Releases the handle. The operation goes on if it still runs: its buffers must stay. Releasing
 * 0 does nothing. */
TUTTI_API int tutti_work_release(tutti_work work);

/* ---- Membership ---- */

/* Fails the group on all ranks with TUTTI_EABORTED; reason becomes part of the text. It does not
 * wait. The group must still be closed. */
TUTTI_API int tutti_abort(tutti_group group, const char *reason);

/* Brings the group into a usable view after an operation has failed. A collective of all
 * survivors (ULFM: shrink). */
TUTTI_API int tutti_recover(tutti_group group, int64_t timeout_ns);

/* Admits the ranks that wait to join. A collective, for a step boundary. *admitted, if not NULL,
 * is the number of ranks that came in, the same at every rank. */
TUTTI_API int tutti_admit(tutti_group group, int64_t timeout_ns, int32_t *admitted);

/* Removes a rank from the job, alive or not. Any single rank may call it. The job's only active
 * rank stays: TUTTI_EINVAL. */
TUTTI_API int tutti_evict(tutti_group group, int32_t rank, int64_t timeout_ns);

/* Joins the job again, after an eviction, in the same slot. It closes all groups of this rank,
 * but their handles must still be closed. *again is the new group of all ranks. After a failure
 * it may be called again. */
TUTTI_API int tutti_rejoin(tutti_group group, int64_t timeout_ns, tutti_group *again);

/* A fault-tolerant agreement (MPI_Comm_agree): *all is 1 if all ranks that took part gave yes !=
 * 0, else 0; the same at every rank that returns TUTTI_OK. A collective with its own order. */
TUTTI_API int tutti_agree(tutti_group group, int32_t yes, int64_t timeout_ns, int32_t *all);

/* ---- Memory ---- */

/* Allocates bytes of zeroed memory that is registered with the group's transports: collectives
 * on it copy nothing where the links allow that. All ranks should allocate the same sizes. It
 * stays usable as plain memory after tutti_close. */
TUTTI_API int tutti_alloc(tutti_group group, uint64_t bytes, void **memory);

/* Frees memory of tutti_alloc, also after the group was closed. No operation may be using it.
 * NULL does nothing. */
TUTTI_API int tutti_free(void *memory);

/* ---- Windows: one-sided operations ---- */

typedef uint64_t tutti_window;
#define TUTTI_WINDOW_COUNTERS 16

/* Makes a window with a zeroed part of bytes at every rank (MPI_Win_allocate). A collective. */
TUTTI_API int tutti_window_new(tutti_group group, uint64_t bytes, int64_t timeout_ns, tutti_window *window);

/* Gives this rank's part. data and bytes may be NULL. It must not be used after
 * tutti_window_close. */
TUTTI_API int tutti_window_bytes(tutti_window window, void **data, uint64_t *bytes);

/* Gives the part of a rank of this machine as read-only memory: TUTTI_EUNSUPPORTED for others. The
 * memory stays until tutti_window_close, or until tutti_window_refresh has found another part at
 * rank, also after the rank has died. */
TUTTI_API int tutti_window_map(tutti_window window, int32_t rank, int64_t timeout_ns, const void **data);

/* Begins to copy bytes at src to offset of rank's part. src must not change before
 * tutti_window_flush has returned. */
TUTTI_API int tutti_window_put(tutti_window window, int32_t rank, uint64_t offset, const void *src, uint64_t bytes,
                               int64_t timeout_ns);

/* A put that adds one to this rank's counter (0 to TUTTI_WINDOW_COUNTERS-1) at rank after src is
 * placed. */
TUTTI_API int tutti_window_put_signal(tutti_window window, int32_t rank, uint64_t offset, const void *src,
                                      uint64_t bytes, int32_t counter, int64_t timeout_ns);

/* Copies bytes from offset of rank's part to dst, and returns when they are there. */
TUTTI_API int tutti_window_get(tutti_window window, int32_t rank, uint64_t offset, void *dst, uint64_t bytes,
                               int64_t timeout_ns);

/* Adds one to this rank's counter at rank, after the data of all earlier puts to it. */
TUTTI_API int tutti_window_signal(tutti_window window, int32_t rank, int32_t counter, int64_t timeout_ns);

/* Waits until rank has signalled counter at this rank n times. */
TUTTI_API int tutti_window_wait_signal(tutti_window window, int32_t rank, int32_t counter, uint64_t n,
                                       int64_t timeout_ns);

/* Waits until all puts and signals to rank have ended, and returns the error of the first one
 * that failed. After a put has failed or was given up, every tutti_window_flush to its rank
 * returns that error, and tutti_window_signal and tutti_window_put_signal to it fail.
 * tutti_window_refresh ends this, if one of these calls has returned the error before. */
TUTTI_API int tutti_window_flush(tutti_window window, int32_t rank, int64_t timeout_ns);

/* Adds the parts of ranks that came in, while those call tutti_window_new. A collective. Memory of
 * tutti_window_map of a rank that has another part now must not be used any more. */
TUTTI_API int tutti_window_refresh(tutti_window window, int64_t timeout_ns);

/* Releases this rank's part. Waits of other threads for signals, and for puts, end with
 * TUTTI_ECLOSED. It waits until no peer is writing to it; after TUTTI_ETIMEOUT the handle stays
 * valid and the call may be repeated. Closing 0 does nothing. */
TUTTI_API int tutti_window_close(tutti_window window, int64_t timeout_ns);

/* ---- Descriptions of operations, and blocking calls ----
 *
 * tutti_op_X describes operation X, for tutti_do and tutti_start. tutti_X runs it. They are
 * inline: they use no function of the library but tutti_do. TUTTI_NO_HELPERS leaves tutti_X out.
 *
 * Counts are in elements. With N ranks, a buffer of "N parts" holds a part for each rank, by
 * rank.
 */

static inline tutti_buffer tutti_host_buffer(const void *data, uint64_t count, int32_t dtype)
{
	tutti_buffer b;
	b.data = (void *)(uintptr_t)data;
	b.count = count;
	b.dtype = dtype;
	b.device = TUTTI_HOST;
	return b;
}

/* Memory of a CUDA device, by the device's number for the driver: see tutti_op.stream. */
static inline tutti_buffer tutti_device_buffer(const void *data, uint64_t count, int32_t dtype, int32_t device)
{
	tutti_buffer b = tutti_host_buffer(data, count, dtype);
	b.device = device;
	return b;
}

static inline tutti_op tutti_op_of(int32_t kind, tutti_buffer dst, tutti_buffer src)
{
	tutti_op op;
	memset(&op, 0, sizeof op);
	op.struct_size = (uint32_t)sizeof op;
	op.kind = kind;
	op.dst = dst;
	op.src = src;
	return op;
}

/* Ends when every rank has begun it. */
static inline tutti_op tutti_op_barrier(void)
{
	tutti_buffer none = tutti_host_buffer(NULL, 0, TUTTI_UINT8);
	return tutti_op_of(TUTTI_OP_BARRIER, none, none);
}

/* Combines src of all ranks, count elements, in dst of every rank. src may be dst. */
static inline tutti_op tutti_op_allreduce(void *dst, const void *src, uint64_t count, int32_t dtype, int32_t reduction)
{
	tutti_op op = tutti_op_of(TUTTI_OP_ALLREDUCE, tutti_host_buffer(dst, count, dtype),
	                          tutti_host_buffer(src, count, dtype));
	op.reduction = reduction;
	return op;
}

/* Combines src of all ranks, N parts of count elements, and leaves part r in dst of rank r. They
 * must not overlap. */
static inline tutti_op tutti_op_reduce_scatter(void *dst, const void *src, uint64_t count, uint64_t ranks,
                                               int32_t dtype, int32_t reduction)
{
	tutti_op op = tutti_op_of(TUTTI_OP_REDUCE_SCATTER, tutti_host_buffer(dst, count, dtype),
	                          tutti_host_buffer(src, count * ranks, dtype));
	op.reduction = reduction;
	return op;
}

/* Collects src of every rank, count elements, in dst, N parts. src may be this rank's part of
 * dst. */
static inline tutti_op tutti_op_allgather(void *dst, const void *src, uint64_t count, uint64_t ranks, int32_t dtype)
{
	return tutti_op_of(TUTTI_OP_ALLGATHER, tutti_host_buffer(dst, count * ranks, dtype),
	                   tutti_host_buffer(src, count, dtype));
}

/* Collects src of every rank, counts[r] elements of rank r, packed in dst. counts is the same on
 * all ranks. */
static inline tutti_op tutti_op_allgatherv(void *dst, uint64_t dst_count, const void *src, uint64_t src_count,
                                           const int64_t *counts, uint64_t ranks, int32_t dtype)
{
	tutti_op op = tutti_op_of(TUTTI_OP_ALLGATHERV, tutti_host_buffer(dst, dst_count, dtype),
	                          tutti_host_buffer(src, src_count, dtype));
	op.dst_counts = counts;
	op.counts_len = ranks;
	return op;
}

/* Sends part r of src to rank r, and puts what rank r sent into part r of dst: N parts of count
 * elements each. They must not overlap. */
static inline tutti_op tutti_op_alltoall(void *dst, const void *src, uint64_t count, uint64_t ranks, int32_t dtype)
{
	return tutti_op_of(TUTTI_OP_ALLTOALL, tutti_host_buffer(dst, count * ranks, dtype),
	                   tutti_host_buffer(src, count * ranks, dtype));
}

/* The same with src_counts[r] elements for rank r and dst_counts[r] from it, packed. */
static inline tutti_op tutti_op_alltoallv(void *dst, const int64_t *dst_counts, const void *src,
                                          const int64_t *src_counts, uint64_t ranks, int32_t dtype)
{
	uint64_t in = 0, out = 0, r;
	tutti_op op;
	for (r = 0; r < ranks; r++) {
		in += (uint64_t)src_counts[r];
		out += (uint64_t)dst_counts[r];
	}
	op = tutti_op_of(TUTTI_OP_ALLTOALLV, tutti_host_buffer(dst, out, dtype), tutti_host_buffer(src, in, dtype));
	op.src_counts = src_counts;
	op.dst_counts = dst_counts;
	op.counts_len = ranks;
	return op;
}

/* Copies x of root to x of every rank. */
static inline tutti_op tutti_op_broadcast(void *x, uint64_t count, int32_t dtype, int32_t root)
{
	tutti_buffer b = tutti_host_buffer(x, count, dtype);
	tutti_op op = tutti_op_of(TUTTI_OP_BROADCAST, b, b);
	op.peer = root;
	return op;
}

/* Combines x of all ranks in x of root. */
static inline tutti_op tutti_op_reduce(void *x, uint64_t count, int32_t dtype, int32_t reduction, int32_t root)
{
	tutti_buffer b = tutti_host_buffer(x, count, dtype);
	tutti_op op = tutti_op_of(TUTTI_OP_REDUCE, b, b);
	op.reduction = reduction;
	op.peer = root;
	return op;
}

/* Collects src of every rank, count elements, in dst of root, N parts. Elsewhere dst is not
 * used. */
static inline tutti_op tutti_op_gather(void *dst, const void *src, uint64_t count, uint64_t ranks, int32_t dtype,
                                       int32_t root)
{
	tutti_op op = tutti_op_of(TUTTI_OP_GATHER, tutti_host_buffer(dst, dst ? count * ranks : 0, dtype),
	                          tutti_host_buffer(src, count, dtype));
	op.peer = root;
	return op;
}

/* Gives part r of root's src, N parts, to rank r in dst, count elements. Elsewhere src is not
 * used. */
static inline tutti_op tutti_op_scatter(void *dst, const void *src, uint64_t count, uint64_t ranks, int32_t dtype,
                                        int32_t root)
{
	tutti_op op = tutti_op_of(TUTTI_OP_SCATTER, tutti_host_buffer(dst, count, dtype),
	                          tutti_host_buffer(src, src ? count * ranks : 0, dtype));
	op.peer = root;
	return op;
}

/* Sends x to a rank under a tag. */
static inline tutti_op tutti_op_send(const void *x, uint64_t count, int32_t dtype, int32_t to, int32_t tag)
{
	tutti_buffer b = tutti_host_buffer(x, count, dtype);
	tutti_op op = tutti_op_of(TUTTI_OP_SEND, b, b);
	op.peer = to;
	op.tag = tag;
	return op;
}

/* Receives a message of exactly count elements from a rank (or TUTTI_ANY_RANK) under a tag (or
 * TUTTI_ANY_TAG). */
static inline tutti_op tutti_op_recv(void *x, uint64_t count, int32_t dtype, int32_t from, int32_t tag)
{
	tutti_buffer b = tutti_host_buffer(x, count, dtype);
	tutti_op op = tutti_op_of(TUTTI_OP_RECV, b, b);
	op.peer = from;
	op.tag = tag;
	return op;
}

#ifndef TUTTI_NO_HELPERS

static inline int tutti_barrier(tutti_group g)
{
	tutti_op op = tutti_op_barrier();
	return tutti_do(g, &op);
}

/* In place. */
static inline int tutti_allreduce(tutti_group g, void *x, uint64_t count, int32_t dtype, int32_t reduction)
{
	tutti_op op = tutti_op_allreduce(x, x, count, dtype, reduction);
	return tutti_do(g, &op);
}

/* count is that of dst. */
static inline int tutti_reduce_scatter(tutti_group g, void *dst, const void *src, uint64_t count, uint64_t ranks,
                                       int32_t dtype, int32_t reduction)
{
	tutti_op op = tutti_op_reduce_scatter(dst, src, count, ranks, dtype, reduction);
	return tutti_do(g, &op);
}

/* count is that of src. */
static inline int tutti_allgather(tutti_group g, void *dst, const void *src, uint64_t count, uint64_t ranks,
                                  int32_t dtype)
{
	tutti_op op = tutti_op_allgather(dst, src, count, ranks, dtype);
	return tutti_do(g, &op);
}

static inline int tutti_allgatherv(tutti_group g, void *dst, uint64_t dst_count, const void *src, uint64_t src_count,
                                   const int64_t *counts, uint64_t ranks, int32_t dtype)
{
	tutti_op op = tutti_op_allgatherv(dst, dst_count, src, src_count, counts, ranks, dtype);
	return tutti_do(g, &op);
}

/* count is that of one part. */
static inline int tutti_alltoall(tutti_group g, void *dst, const void *src, uint64_t count, uint64_t ranks,
                                 int32_t dtype)
{
	tutti_op op = tutti_op_alltoall(dst, src, count, ranks, dtype);
	return tutti_do(g, &op);
}

static inline int tutti_alltoallv(tutti_group g, void *dst, const int64_t *dst_counts, const void *src,
                                  const int64_t *src_counts, uint64_t ranks, int32_t dtype)
{
	tutti_op op = tutti_op_alltoallv(dst, dst_counts, src, src_counts, ranks, dtype);
	return tutti_do(g, &op);
}

static inline int tutti_broadcast(tutti_group g, void *x, uint64_t count, int32_t dtype, int32_t root)
{
	tutti_op op = tutti_op_broadcast(x, count, dtype, root);
	return tutti_do(g, &op);
}

static inline int tutti_reduce(tutti_group g, void *x, uint64_t count, int32_t dtype, int32_t reduction, int32_t root)
{
	tutti_op op = tutti_op_reduce(x, count, dtype, reduction, root);
	return tutti_do(g, &op);
}

/* count is that of one part. */
static inline int tutti_gather(tutti_group g, void *dst, const void *src, uint64_t count, uint64_t ranks,
                               int32_t dtype, int32_t root)
{
	tutti_op op = tutti_op_gather(dst, src, count, ranks, dtype, root);
	return tutti_do(g, &op);
}

/* count is that of one part. */
static inline int tutti_scatter(tutti_group g, void *dst, const void *src, uint64_t count, uint64_t ranks,
                                int32_t dtype, int32_t root)
{
	tutti_op op = tutti_op_scatter(dst, src, count, ranks, dtype, root);
	return tutti_do(g, &op);
}

static inline int tutti_send(tutti_group g, const void *x, uint64_t count, int32_t dtype, int32_t to, int32_t tag)
{
	tutti_op op = tutti_op_send(x, count, dtype, to, tag);
	return tutti_do(g, &op);
}

/* status may be NULL. */
static inline int tutti_recv(tutti_group g, void *x, uint64_t count, int32_t dtype, int32_t from, int32_t tag,
                             tutti_status *status)
{
	tutti_op op = tutti_op_recv(x, count, dtype, from, tag);
	op.status = status;
	return tutti_do(g, &op);
}

#endif /* TUTTI_NO_HELPERS */

/* ---- The functions, for programs that open the library with dlopen ----
 *
 *     #define X(name) decltype(&name) name##_p;
 *     struct { TUTTI_FUNCTIONS(X) } api;
 */
#define TUTTI_FUNCTIONS(X) \
	X(tutti_code_name) X(tutti_last_error) X(tutti_last_error_info) X(tutti_version) X(tutti_abi_version) \
	X(tutti_has) X(tutti_set_interrupt) X(tutti_join) X(tutti_store_open) X(tutti_local) \
	X(tutti_member_new) X(tutti_member_handle) X(tutti_form) X(tutti_member_close) \
	X(tutti_split) X(tutti_close) X(tutti_rank) \
	X(tutti_size) X(tutti_local_rank) X(tutti_view) X(tutti_topology) X(tutti_set_algorithm) X(tutti_do) \
	X(tutti_start) X(tutti_run) X(tutti_work_word) X(tutti_work_test) X(tutti_work_wait) X(tutti_work_error) \
	X(tutti_work_error_text) X(tutti_work_status) X(tutti_work_result_here) X(tutti_work_release) X(tutti_abort) \
	X(tutti_recover) X(tutti_admit) X(tutti_evict) X(tutti_rejoin) X(tutti_agree) X(tutti_alloc) X(tutti_free) \
	X(tutti_window_new) X(tutti_window_bytes) X(tutti_window_map) X(tutti_window_put) X(tutti_window_put_signal) \
	X(tutti_window_get) X(tutti_window_signal) X(tutti_window_wait_signal) X(tutti_window_flush) \
	X(tutti_window_refresh) X(tutti_window_close)

#ifdef __cplusplus
}
#endif

#endif /* TUTTI_H */
