//go:build linux

// The lifeline: see internal/lifeline.

#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"

struct keeper {
	int end;      // to keep
	bool keeps;   // written before ready
	sem_t ready;
};

static bool keep_only(unsigned fd)
{
#ifdef SYS_close_range // Linux 5.9
	return unshare(CLONE_FILES) == 0 && (fd == 0 || syscall(SYS_close_range, 0, fd - 1, 0) == 0) &&
	       syscall(SYS_close_range, fd + 1, UINT_MAX, 0) == 0;
#else
	return false;
#endif
}

// keep holds the writing end until the process ends.
static void *keep(void *arg)
{
	struct keeper *k = arg;
	bool keeps = k->keeps = keep_only((unsigned)k->end);

	sem_post(&k->ready); // *k may be gone by now
	while (keeps)
		pause();
	return NULL;
}

int tutti_lifeline(void)
{
	struct keeper k = {.end = -1};
	pthread_t thread;
	pthread_attr_t attr;
	sigset_t all, before;
	int pipe[2];
	bool started;

	if (pipe2(pipe, O_CLOEXEC | O_NONBLOCK) != 0)
		return -1;
	k.end = pipe[1];
	sem_init(&k.ready, 0, 0);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before); // which the thread inherits
	started = pthread_create(&thread, &attr, keep, &k) == 0;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attr);
	while (started && sem_wait(&k.ready) != 0) // interrupted by a signal
		;
	sem_destroy(&k.ready);
	close(pipe[1]); // this table's; the thread has its own
	if (!k.keeps) {
		close(pipe[0]);
		return -1;
	}
	return pipe[0];
}
