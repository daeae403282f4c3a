//go:build linux

// What keeps the Go runtime from disturbing its host.

#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "internal.h"

// ---- Signals ----
//
// When the library is loaded, the Go runtime starts threads and installs handlers for SIGSEGV,
// SIGBUS, SIGFPE, SIGPIPE and SIGURG.
//
// Its threads run with all signals blocked that can be (SIGCHLD, SIGPROF and SIGRTMIN cannot),
// because they inherit the mask of the thread that loads the library: before the runtime's
// constructor another one blocks all signals, and one after it restores the mask. So other
// asynchronous signals reach threads of the host only.
//
// After the constructor, handle is put before Go's handlers. It gives Go the signals of threads
// that are in Go, and all others to what the host had installed. Handlers that the host installs
// later replace handle, as they would replace any other.

static const int taken[] = {SIGSEGV, SIGBUS, SIGFPE, SIGPIPE, SIGURG};
#define TAKEN (sizeof taken / sizeof *taken)

static sigset_t before;             // the mask of the thread that loads the library
static struct sigaction host[NSIG]; // what the host had installed when the library was loaded
static struct sigaction golang[NSIG];
static _Atomic bool spent[NSIG];    // the host's handler had SA_RESETHAND, and has run

static bool handles(const struct sigaction *a)
{
	return (a->sa_flags & SA_SIGINFO) != 0 || (a->sa_handler != SIG_DFL && a->sa_handler != SIG_IGN);
}

static void invoke(const struct sigaction *a, int sig, siginfo_t *info, void *context)
{
	if ((a->sa_flags & SA_SIGINFO) != 0)
		a->sa_sigaction(sig, info, context);
	else
		a->sa_handler(sig);
}

// invoke_host runs the host's handler for a signal, with the signals blocked that the host wants.
// It returns false if there is none, or none any more.
static bool invoke_host(int sig, siginfo_t *info, void *context)
{
	const struct sigaction *a = &host[sig];
	sigset_t mask;

	if (!handles(a) || ((a->sa_flags & SA_RESETHAND) != 0 && atomic_exchange(&spent[sig], true)))
		return false;
	sigorset(&mask, &((ucontext_t *)context)->uc_sigmask, &a->sa_mask);
	if ((a->sa_flags & SA_NODEFER) == 0)
		sigaddset(&mask, sig);
	pthread_sigmask(SIG_SETMASK, &mask, NULL);
	invoke(a, sig, info, context);
	return true;
}

// runs_go reports whether the interrupted thread may be running code of Go: it is in a call of this
// library, or its mask is that of a thread of Go.
static bool runs_go(void *context)
{
	static const int blocked[] = {SIGHUP, SIGINT, SIGQUIT, SIGALRM, SIGTERM, SIGUSR2, SIGWINCH};
	const sigset_t *mask = &((ucontext_t *)context)->uc_sigmask;
	struct thread *t = tutti_peek();
	size_t i;

	if (t != NULL && t->depth > 0)
		return true;
	for (i = 0; i < sizeof blocked / sizeof *blocked; i++) {
		if (sigismember(mask, blocked[i]) != 1)
			return false;
	}
	return true;
}

static void handle(int sig, siginfo_t *info, void *context)
{
	int saved = errno;

	if (sig == SIGURG) { // Go sends it to its threads, to interrupt loops
		bool own = info->si_code == SI_TKILL && info->si_pid == getpid();
		if (own || !invoke_host(sig, info, context))
			invoke(&golang[sig], sig, info, context);
	} else if (sig == SIGPIPE && runs_go(context)) {
		// The write fails with EPIPE.
	} else if (sig != SIGPIPE && runs_go(context)) {
		invoke(&golang[sig], sig, info, context);
	} else if (!invoke_host(sig, info, context) && (host[sig].sa_handler != SIG_IGN || info->si_code > 0)) {
		// The default ends the process. A fault occurs again after the return, and cannot be
		// ignored.
		signal(sig, SIG_DFL);
		if (info->si_code <= 0 || sig == SIGPIPE)
			raise(sig);
	}
	errno = saved;
}

// give_back restores the host's disposition of a signal if handle or Go has it.
static void give_back(int sig)
{
	static const struct sigaction standard; // SIG_DFL
	struct sigaction a;

	if (sigaction(sig, NULL, &a) != 0 || (a.sa_flags & SA_SIGINFO) == 0)
		return;
	if (a.sa_sigaction == handle)
		sigaction(sig, spent[sig] ? &standard : &host[sig], NULL);
	else if (a.sa_sigaction == golang[SIGSEGV].sa_sigaction) // the host does not handle it
		sigaction(sig, handles(&host[sig]) ? &standard : &host[sig], NULL);
}

struct rlimit tutti_files;

__attribute__((constructor(101))) static void before_go(void)
{
	sigset_t all;
	int sig;

	getrlimit(RLIMIT_NOFILE, &tutti_files);
	for (sig = 1; sig < NSIG; sig++)
		sigaction(sig, NULL, &host[sig]);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
}

static void take_over(void)
{
	struct sigaction a;
	size_t i;

	for (i = 0; i < TAKEN; i++) {
		int sig = taken[i];

		sigaction(sig, NULL, &golang[sig]);
		if (sig == SIGPIPE && !handles(&host[sig]) && host[sig].sa_handler == SIG_IGN) {
			sigaction(sig, &host[sig], NULL);
			continue;
		}
		if (sig == SIGURG && !handles(&host[sig]))
			continue;
		a = golang[sig];
		a.sa_flags |= SA_SIGINFO | SA_ONSTACK;
		a.sa_sigaction = handle;
		sigaction(sig, &a, NULL);
	}
}

static bool of_host(const struct sigaction *a)
{
	return handles(a) && a->sa_sigaction != golang[SIGSEGV].sa_sigaction;
}

bool tutti_handles_usr1(void)
{
	struct sigaction a;

	return sigaction(SIGUSR1, NULL, &a) == 0 && of_host(&a);
}

// tutti_settle is called after calls in which the runtime may have installed or removed a handler
// for SIGUSR1, which was usr1 before: while flight records are kept it makes the library write
// them, unless the host handled it when the library was given its configuration. Handlers of the
// host must run on the alternate stack, because a thread that is in Go may have a small stack: they
// may have been installed after the runtime looked.
void tutti_settle(const struct sigaction *usr1)
{
	struct sigaction a;
	int sig;

	if (usr1->sa_sigaction != golang[SIGSEGV].sa_sigaction)
		host[SIGUSR1] = *usr1;
	if (of_host(usr1))
		sigaction(SIGUSR1, usr1, NULL);
	for (sig = 1; sig < NSIG; sig++) {
		if (sigaction(sig, NULL, &a) == 0 && handles(&a) && (a.sa_flags & SA_ONSTACK) == 0) {
			a.sa_flags |= SA_ONSTACK;
			sigaction(sig, &a, NULL);
		}
	}
}

// ---- Fork ----
//
// A child of fork has one thread, and the Go runtime cannot run in it. The page below is cleared in
// it, even if it was made by the system call alone. It also loses the parent's descriptors, because
// peers of the parent wait for their end: see close_descriptors.

static _Atomic uint32_t *alive; // 1, in a page that is cleared in a child
static _Atomic uint32_t child;  // 1 in a child, for kernels that cannot clear pages
static _Atomic int epoll = -1;

bool tutti_forked(void)
{
	return (alive != NULL && atomic_load_explicit(alive, memory_order_relaxed) == 0) ||
	       atomic_load_explicit(&child, memory_order_relaxed) != 0;
}

void tutti_watch(int epfd)
{
	atomic_store(&epoll, epfd);
}

// number appends a decimal number to text and returns the new end.
static char *number(char *end, unsigned n)
{
	char digits[12], *d = digits;

	do
		*d++ = '0' + n % 10;
	while ((n /= 10) != 0);
	while (d > digits)
		*end++ = *--d;
	*end = 0;
	return end;
}

static char *append(char *end, const char *text)
{
	while (*text != 0)
		*end++ = *text++;
	*end = 0;
	return end;
}

// field returns the number in base after name in line; false if there is none.
static bool field(const char *line, const char *name, unsigned base, uint64_t *n)
{
	const char *c = strstr(line, name);
	bool any = false;

	if (c == NULL)
		return false;
	for (c += strlen(name); *c == ' ' || *c == '\t'; c++)
		;
	for (*n = 0;; c++, any = true) {
		unsigned digit = *c >= '0' && *c <= '9' ? *c - 48u : *c >= 'a' && *c <= 'f' ? *c - 87u : 16;

		if (digit >= base)
			return any;
		*n = *n * base + digit;
	}
}

static void close_watched(int epfd, int depth);

// close_line closes the descriptor that a line of an epoll instance's information describes, and
// what that watches itself: "tfd:       12 events:       19 data: 7f3a pos:0 ino:227cbe1 sdev:9".
// The number may have another file by now, if the one that was watched is still open elsewhere.
static void close_line(const char *line, int depth)
{
	struct stat st;
	uint64_t fd, inode;

	if (!field(line, "tfd:", 10, &fd) || !field(line, "ino:", 16, &inode) || fd > INT_MAX)
		return;
	if (fstat((int)fd, &st) != 0 || st.st_ino != inode)
		return;
	if (depth > 0)
		close_watched((int)fd, depth - 1);
	else
		close((int)fd);
}

// close_watched closes epfd and, if it is an epoll instance, what it watches, as /proc tells. Go's
// instance watches connections, listeners, and other instances that do.
static void close_watched(int epfd, int depth)
{
	char path[64], block[512], line[160];
	int file;
	size_t len = 0;
	ssize_t n, i;

	number(append(path, "/proc/self/fdinfo/"), (unsigned)epfd);
	file = open(path, O_RDONLY | O_CLOEXEC);
	if (file >= 0) {
		while ((n = read(file, block, sizeof block)) > 0) {
			for (i = 0; i < n; i++) {
				if (block[i] != '\n') {
					if (len < sizeof line - 1)
						line[len++] = block[i];
					continue;
				}
				line[len] = 0;
				len = 0;
				close_line(line, depth);
			}
		}
		close(file);
	}
	close(epfd);
}

// ours reports whether a file is shared memory of the library, which Go's epoll instance does not
// watch.
static bool ours(const char *file)
{
	static const char memory[] = "/memfd:tutti";

	return strncmp(file, memory, sizeof memory - 1) == 0;
}

struct entry { // of getdents64
	uint64_t inode;
	int64_t next;
	unsigned short size;
	unsigned char type;
	char name[];
};

// close_others closes what ours reports.
static void close_others(void)
{
	char block[4096] __attribute__((aligned(8))), path[64], file[256];
	int directory = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	long n, at;

	if (directory < 0)
		return;
	while ((n = syscall(SYS_getdents64, directory, block, sizeof block)) > 0) {
		for (at = 0; at < n;) {
			const struct entry *e = (const struct entry *)(block + at);
			ssize_t len;

			at += e->size;
			if (e->name[0] < '0' || e->name[0] > '9')
				continue;
			append(append(path, "/proc/self/fd/"), e->name);
			len = readlink(path, file, sizeof file - 1);
			if (len <= 0)
				continue;
			file[len] = 0;
			if (ours(file))
				close(atoi(e->name));
		}
	}
	close(directory);
}

// forked runs in a child, on the thread that called fork. Only functions that are safe in signal
// handlers may be called here.
static void forked(void)
{
	int saved = errno, epfd = atomic_exchange(&epoll, -1);
	size_t i;

	if (atomic_exchange(&child, 1) == 0) {
		for (i = 0; i < TAKEN; i++)
			give_back(taken[i]);
		give_back(SIGUSR1);
		if (epfd >= 0) {
			close_watched(epfd, 2);
			close_others();
		}
	}
	errno = saved;
}

static void mark_process(void)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *p = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p != MAP_FAILED && madvise(p, page, MADV_WIPEONFORK) == 0) {
		alive = p;
		atomic_store(alive, 1);
	}
	pthread_atfork(NULL, NULL, forked);
}

// ---- Other Go runtimes ----

#define WARNED 16
static _Atomic uintptr_t warned[WARNED]; // base addresses of objects

// go_note reports whether a segment of notes has a Go build ID.
static bool go_note(const char *p, size_t size)
{
	while (size >= sizeof(ElfW(Nhdr))) {
		const ElfW(Nhdr) *n = (const ElfW(Nhdr) *)p;
		size_t name = (n->n_namesz + 3u) & ~3u, all = sizeof *n + name + ((n->n_descsz + 3u) & ~3u);

		if (n->n_namesz == 4 && n->n_type == 4 && memcmp(p + sizeof *n, "Go\0", 4) == 0)
			return true;
		if (all > size)
			return false;
		p += all;
		size -= all;
	}
	return false;
}

static int neighbour(struct dl_phdr_info *o, size_t size, void *unused)
{
	bool go = false, own = false;
	uintptr_t self = (uintptr_t)&neighbour, zero, key;
	int i, j;

	(void)size;
	(void)unused;
	for (i = 0; i < o->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &o->dlpi_phdr[i];
		uintptr_t at = o->dlpi_addr + p->p_vaddr;

		if (p->p_type == PT_LOAD && self >= at && self < at + p->p_memsz)
			own = true;
		for (j = 0; p->p_type == PT_NOTE && j < o->dlpi_phnum; j++) { // it is loaded
			const ElfW(Phdr) *in = &o->dlpi_phdr[j];

			if (in->p_type == PT_LOAD && p->p_vaddr >= in->p_vaddr &&
			    p->p_vaddr + p->p_memsz <= in->p_vaddr + in->p_memsz && go_note((const char *)at, p->p_memsz))
				go = true;
		}
	}
	if (!go || own)
		return 0;
	key = (uintptr_t)o->dlpi_phdr;
	for (i = 0; i < WARNED; i++) {
		zero = 0;
		if (atomic_compare_exchange_strong(&warned[i], &zero, key)) {
			char text[512];
			const char *name = o->dlpi_name == NULL || *o->dlpi_name == 0 ? "the program itself" : o->dlpi_name;
			int n = snprintf(text, sizeof text, "tutti: %s brings a second Go runtime into this process; the two share "
			                                    "signal handlers, and crashes may follow: see docs/c.md\n", name);

			n = n < (int)sizeof text ? n : (int)sizeof text - 1;
			if (write(STDERR_FILENO, text, (size_t)n) < 0)
				return 0;
			return 0;
		}
		if (zero == key)
			return 0;
	}
	return 0;
}

void tutti_neighbours(void)
{
	dl_iterate_phdr(neighbour, NULL);
}

// This runs after the constructor of the Go runtime, which has no priority and is linked first.
__attribute__((constructor)) static void loaded(void)
{
	take_over();
	mark_process();
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	tutti_neighbours();
}
