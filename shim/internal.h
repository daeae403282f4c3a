// What entry.c, guest.c and the Go files share.
#ifndef TUTTI_INTERNAL_H
#define TUTTI_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>

#include "tutti.h"

#define HIDDEN __attribute__((visibility("hidden")))

// failure describes an error. Go fills in a part of it: see describe in errors.go.
struct failure {
	tutti_error_info info;
	char text[4096];
};

// thread is what the library keeps for a thread of the host.
struct thread {
	int depth;                // of calls that are in Go
	bool entered;             // it has been in Go
	int (*check)(void *ctx);  // see tutti_set_interrupt
	void *ctx;
	struct failure last;
};

// The kinds of handles, their high four bits.
enum { KIND_GROUP = 1, KIND_WORK = 2, KIND_WINDOW = 3, KIND_MEMBER = 4, KIND_STORE = 5 };

// Calls that may wait, for goCall.
enum {
	CALL_JOIN,
	CALL_MEMBER_NEW,
	CALL_MEMBER_FORM,
	CALL_STORE_OPEN,
	CALL_SPLIT,
	CALL_RECOVER,
	CALL_ADMIT,
	CALL_EVICT,
	CALL_REJOIN,
	CALL_AGREE,
	CALL_DO,
	CALL_WINDOW_NEW,
	CALL_WINDOW_MAP,
	CALL_WINDOW_PUT,
	CALL_WINDOW_PUT_SIGNAL,
	CALL_WINDOW_GET,
	CALL_WINDOW_SIGNAL,
	CALL_WINDOW_WAIT_SIGNAL,
	CALL_WINDOW_FLUSH,
	CALL_WINDOW_REFRESH,
	CALL_WINDOW_CLOSE
};

// Requests to a store that the host has opened, for goStore.
enum { STORE_SET, STORE_GET, STORE_WAIT, STORE_COMPARE_AND_SET };

// call is a call that may wait. It is run on its thread or, if that has a check, by a goroutine
// while the thread waits for done.
struct call {
	int32_t kind;
	int32_t code;
	uint64_t handle;
	int64_t timeout_ns;
	int64_t a, b;            // integer arguments: ranks, colors, counters
	uint64_t offset, n;
	void *data;              // of a put or get; the uuid
	const void *arg;         // tutti_config or tutti_op, of full size; the n handles
	uint64_t out;            // the result
	struct failure *failure;
	_Atomic uint32_t done;
};

// work is the part of a work that C sees. It is never freed.
struct work {
	_Atomic uint32_t word;       // 0, then 1 + code
	_Atomic uint32_t generation; // of the handle; odd: in use
};

#define WORKS_IN_CHUNK 256
#define WORK_CHUNKS 16384

extern HIDDEN _Atomic(struct work *) tutti_chunks[WORK_CHUNKS];

// tutti_add_works publishes another chunk of works and returns it, NULL if there is no memory.
HIDDEN struct work *tutti_add_works(uint32_t chunk);

// tutti_forked reports whether this process is a forked child.
HIDDEN bool tutti_forked(void);

// tutti_thread returns this thread's state, NULL if there is no memory for it.
HIDDEN struct thread *tutti_thread(void);

// tutti_peek returns this thread's state if it has one. It may be called in a signal handler.
HIDDEN struct thread *tutti_peek(void);

// tutti_wake wakes the thread that waits for *done.
HIDDEN void tutti_wake(void *done);

// tutti_files is the limit of open files before the Go runtime changed it.
extern HIDDEN struct rlimit tutti_files;

struct sigaction;

// tutti_handles_usr1 reports whether the host handles SIGUSR1.
HIDDEN bool tutti_handles_usr1(void);

// tutti_settle restores the host's handler of SIGUSR1, and makes its handlers run on the alternate
// stack, after a call that may have changed the former.
HIDDEN void tutti_settle(const struct sigaction *usr1);

// tutti_watch makes a forked child close the descriptors that the epoll instance epfd watches.
HIDDEN void tutti_watch(int epfd);

// tutti_lifeline starts a thread that keeps the writing end of a pipe until the process begins to
// end, and returns the reading end; -1 if the system cannot do that.
HIDDEN int tutti_lifeline(void);

// tutti_neighbours warns about other Go runtimes in the process, once about each.
HIDDEN void tutti_neighbours(void);

// Calls of a store's callbacks, which Go cannot make itself.
HIDDEN int tutti_kv_run(int (*f)(void *, tutti_kv_call *), void *ctx, tutti_kv_call *call);
HIDDEN void tutti_kv_done(void (*release)(void *), void *ctx);

#endif
