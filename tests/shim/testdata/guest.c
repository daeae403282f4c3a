/* Opens the library while it runs, and checks what that does to the process. The arguments are the
 * library's path and the part. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tutti_dl.h"
#include "test.h"

static tutti_dl api;
static const char *library;

static void load(void)
{
	char why[1024];
	void *handle;

	if (tutti_dl_open(&api, library, why, sizeof why) != 0)
		FAIL("%s", why);
	handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
	TRUE(handle != NULL);
	TRUE(dlsym(handle, "goCall") == NULL && dlsym(handle, "crosscall2") == NULL);
	TRUE(strlen(api.tutti_version()) > 0);
	/* Closing it does not unload it: the Go runtime has threads. */
	TRUE(dlclose(handle) == 0 && dlclose(handle) == 0);
	TRUE(dlopen(library, RTLD_NOW | RTLD_NOLOAD) != NULL);
}

#define tutti_code_name(code) api.tutti_code_name(code)
#define tutti_last_error() api.tutti_last_error()

static tutti_group g;
static int32_t rank, size;

static void join(const tutti_config *config)
{
	OK(api.tutti_join(config, &g));
	OK(api.tutti_rank(g, &rank));
	OK(api.tutti_size(g, &size));
}

static void sum(void)
{
	int32_t x = 1;
	tutti_op op = tutti_op_allreduce(&x, &x, 1, TUTTI_INT32, TUTTI_SUM);

	OK(api.tutti_do(g, &op));
	TRUE(x == size);
}

static int entries(const char *path)
{
	DIR *d = opendir(path);
	int n = 0;

	TRUE(d != NULL);
	while (readdir(d) != NULL)
		n++;
	closedir(d);
	return n - 3; /* ., .. and the directory itself, or so */
}

/* sockets returns how many of this process's descriptors are sockets or shared memory. */
static int sockets(void)
{
	char path[64], file[256];
	int fd, n = 0;

	for (fd = 0; fd < 1024; fd++) {
		ssize_t len;
		snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
		len = readlink(path, file, sizeof file - 1);
		if (len > 0) {
			file[len] = 0;
			n += strncmp(file, "socket:", 7) == 0 || strstr(file, "memfd:") != NULL;
		}
	}
	return n;
}

/* ---- fork ---- */

static tutti_work started;
static void *memory;
static tutti_window window;

/* forked calls every function in a forked child. */
static void forked(void)
{
	tutti_op op = tutti_op_barrier();
	tutti_error_info info = {.struct_size = sizeof info};
	tutti_config config = {.struct_size = sizeof config, .size = 1};
	static const int taken[] = {SIGSEGV, SIGPIPE, SIGURG, SIGUSR1};
	struct sigaction a;
	size_t i;
	tutti_status status;
	tutti_group out;
	int32_t n;
	uint64_t u;
	void *p;
	const void *q;

	for (i = 0; i < sizeof taken / sizeof *taken; i++) {
		TRUE(sigaction(taken[i], NULL, &a) == 0);
		if (a.sa_handler != SIG_DFL)
			FAIL("signal %d has a handler", taken[i]);
	}
#define NO(call) CODE(TUTTI_EFORKED, api.call)
	NO(tutti_do(g, &op));
	SAYS("child of a fork");
	OK(api.tutti_last_error_info(&info));
	TRUE(info.code == TUTTI_EFORKED);
	TRUE(api.tutti_has("tcp") == 1 && strlen(api.tutti_version()) > 0 && api.tutti_abi_version() > 0);
	NO(tutti_start(g, &op, &started));
	NO(tutti_run(g, &op, 0, &started));
	NO(tutti_set_interrupt(NULL, NULL));
	NO(tutti_join(&config, &out));
	NO(tutti_join(NULL, NULL));
	NO(tutti_local(1, NULL, &out));
	NO(tutti_split(g, 0, 0, 0, &out));
	NO(tutti_member_new(NULL, &out));
	NO(tutti_member_handle(g, NULL, 0, NULL));
	NO(tutti_form(g, "u", NULL, 0, 0, &out));
	NO(tutti_member_close(g));
	NO(tutti_close(g));
	NO(tutti_close(0));
	NO(tutti_rank(g, &n));
	NO(tutti_size(g, &n));
	NO(tutti_local_rank(g, &n, &n));
	NO(tutti_view(g, &u, &n, 1, NULL));
	NO(tutti_topology(g, NULL, 0, &u));
	NO(tutti_set_algorithm(g, "auto"));
	TRUE(api.tutti_work_word(started) == NULL);
	NO(tutti_work_test(started));
	NO(tutti_work_wait(started, -1));
	NO(tutti_work_error(started, &info));
	NO(tutti_work_error_text(started, NULL, 0, &u));
	NO(tutti_work_status(started, &status));
	NO(tutti_work_result_here(started, &n));
	NO(tutti_work_release(started));
	NO(tutti_abort(g, "no"));
	NO(tutti_recover(g, 0));
	NO(tutti_admit(g, 0, &n));
	NO(tutti_evict(g, 0, 0));
	NO(tutti_rejoin(g, 0, &out));
	NO(tutti_agree(g, 1, 0, &n));
	NO(tutti_alloc(g, 8, &p));
	NO(tutti_free(memory));
	NO(tutti_window_new(g, 8, 0, &out));
	NO(tutti_window_bytes(window, &p, &u));
	NO(tutti_window_map(window, 0, 0, &q));
	NO(tutti_window_put(window, 0, 0, "x", 1, 0));
	NO(tutti_window_put_signal(window, 0, 0, "x", 1, 0, 0));
	NO(tutti_window_get(window, 0, 0, &n, 1, 0));
	NO(tutti_window_signal(window, 0, 0, 0));
	NO(tutti_window_wait_signal(window, 0, 0, 1, 0));
	NO(tutti_window_flush(window, 0, 0));
	NO(tutti_window_refresh(window, 0));
	NO(tutti_window_close(window, 0));
}

static void reap(pid_t child)
{
	int status;

	TRUE(child > 0 && waitpid(child, &status, 0) == child);
	if (status != 0)
		FAIL("a child ended with status %#x", (unsigned)status);
}

/* sheds checks that children have only the host's own sockets and shared memory, count of them. One
 * child may keep a connection that a thread of the library was opening or closing when it was
 * forked. A later child does not. */
static void sheds(int count)
{
	int tries, status;
	pid_t child;

	for (tries = 0; tries < 100; tries++) {
		child = fork();
		if (child == 0)
			_exit(sockets() == count ? 0 : 1);
		TRUE(child > 0 && waitpid(child, &status, 0) == child);
		if (status == 0)
			return;
	}
	FAIL("children have more than the %d sockets of the host", count);
}

static void *threaded(void *count)
{
	pid_t child = fork();

	if (child == 0) {
		forked();
		_exit(0);
	}
	reap(child);
	sheds(*(int *)count);
	return NULL;
}

static void fork_(void)
{
	int before = sockets(), i, x = 1;
	pthread_t thread;
	pid_t child;
	tutti_op op = tutti_op_recv(&x, 1, TUTTI_INT32, TUTTI_ANY_RANK, 0);

	load();
	join(NULL);
	OK(api.tutti_start(g, &op, &started));
	OK(api.tutti_alloc(g, 100000, &memory));
	OK(api.tutti_window_new(g, 4096, 0, &window));
	for (i = 0; i < 5; i++) {
		sum();
		TRUE(sockets() > before);
		sheds(before);
		child = fork();
		if (child == 0) {
			forked();
			child = fork(); /* a child of the child */
			if (child == 0) {
				forked();
				exit(0); /* with destructors */
			}
			reap(child);
			exit(0);
		}
		sum(); /* beside the child */
		reap(child);
		child = (pid_t)syscall(SYS_fork); /* without handlers of pthread_atfork */
		if (child == 0) {
			op = tutti_op_barrier();
			_exit(api.tutti_do(g, &op) == TUTTI_EFORKED ? 0 : 1);
		}
		reap(child);
		TRUE(pthread_create(&thread, NULL, threaded, &before) == 0);
		sum();
		pthread_join(thread, NULL);
	}
	if (rank == 0) {
		char *argv[] = {(char *)"guest", (char *)library, (char *)"single", NULL};
		child = fork();
		if (child == 0) { /* exec makes a process that can join */
			clearenv();
			execv("/proc/self/exe", argv);
			_exit(1);
		}
		reap(child);
	}
	sum();
	OK(api.tutti_free(memory));
	OK(api.tutti_window_close(window, 0));
	OK(api.tutti_close(g));
	OK(api.tutti_work_release(started));
}

static void single(void)
{
	load();
	join(NULL);
	TRUE(size == 1);
	OK(api.tutti_close(g));
}

/* ---- signals ---- */

static const int asynchronous[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGCHLD, SIGUSR1, SIGUSR2, SIGALRM, SIGWINCH,
                                   SIGURG, SIGPIPE, SIGIO, SIGCONT};
#define ASYNCHRONOUS (sizeof asynchronous / sizeof *asynchronous)

static _Atomic int seen[NSIG], elsewhere;
static pthread_t self;

static void on_signal(int sig)
{
	seen[sig]++;
	if (!pthread_equal(self, pthread_self()) && sig != SIGCHLD && sig != SIGURG)
		elsewhere++;
}

static void install(int sig, void (*f)(int), int flags)
{
	struct sigaction a;

	memset(&a, 0, sizeof a);
	a.sa_handler = f;
	a.sa_flags = flags;
	TRUE(sigaction(sig, &a, NULL) == 0);
}

/* send sends each signal to the process, and checks that this thread's handler runs. */
static void send_all(void)
{
	struct timespec pause = {.tv_nsec = 1000000};
	size_t i;

	for (i = 0; i < ASYNCHRONOUS; i++) {
		int sig = asynchronous[i], had = seen[sig];

		TRUE(kill(getpid(), sig) == 0);
		while (seen[sig] == had)
			nanosleep(&pause, NULL);
	}
	TRUE(elsewhere == 0);
}

/* threads_block checks that all threads but this one block the signals, so that they come here. The
 * Go runtime never blocks SIGCHLD and SIGURG. */
static void threads_block(void)
{
	DIR *d = opendir("/proc/self/task");
	struct dirent *e;
	int n = 0;

	TRUE(d != NULL);
	while ((e = readdir(d)) != NULL) {
		char path[300], line[256];
		unsigned long long blocked = 0;
		FILE *f;
		size_t i;

		if (e->d_name[0] == '.' || atoi(e->d_name) == getpid())
			continue;
		snprintf(path, sizeof path, "/proc/self/task/%s/status", e->d_name);
		f = fopen(path, "r");
		if (f == NULL)
			continue; /* it has ended */
		while (fgets(line, sizeof line, f) != NULL)
			sscanf(line, "SigBlk: %llx", &blocked);
		fclose(f);
		for (i = 0; i < ASYNCHRONOUS; i++) {
			if (asynchronous[i] != SIGURG && asynchronous[i] != SIGCHLD && (blocked >> (asynchronous[i] - 1) & 1) == 0)
				FAIL("thread %s does not block signal %d", e->d_name, asynchronous[i]);
		}
		n++;
	}
	closedir(d);
	TRUE(n > 1);
}

static void *send_one(void *sig)
{
	struct timespec pause = {.tv_nsec = 20000000};

	nanosleep(&pause, NULL);
	TRUE(kill(getpid(), *(int *)sig) == 0);
	return NULL;
}

static int was_seen(void *sig)
{
	return seen[*(int *)sig] > 0;
}

static void signals(void)
{
	sigset_t before, after;
	struct sigaction a;
	pthread_t sender;
	size_t i;
	int had, sig = SIGINT, x;
	tutti_op op;
	tutti_config config = {.struct_size = sizeof config, .size = 1, .log_dir = getenv("LOGS")};

	self = pthread_self();
	pthread_sigmask(SIG_SETMASK, NULL, &before);
	for (i = 0; i < ASYNCHRONOUS; i++)
		install(asynchronous[i], on_signal, 0);
	load();
	pthread_sigmask(SIG_SETMASK, NULL, &after);
	for (x = 1; x < NSIG; x++) /* pthread_sigmask leaves the end of a sigset_t as it was */
		TRUE(sigismember(&before, x) == sigismember(&after, x));
	send_all();
	join(&(tutti_config){.struct_size = sizeof config, .size = 1});
	threads_block();
	OK(api.tutti_close(g));
	join(&config);
	send_all();
	for (i = 0; i < ASYNCHRONOUS; i++) {
		TRUE(sigaction(asynchronous[i], NULL, &a) == 0);
		TRUE((a.sa_flags & SA_ONSTACK) != 0); /* a thread in Go may have a small stack */
		if (asynchronous[i] != SIGPIPE && asynchronous[i] != SIGURG)
			TRUE(a.sa_handler == on_signal);
	}
	had = seen[SIGUSR1];
	for (i = 0; i < ASYNCHRONOUS; i++)
		install(asynchronous[i], on_signal, SA_RESTART);
	send_all();
	OK(api.tutti_close(g));
	send_all();
	TRUE(seen[SIGUSR1] == had + 2);
	sigaction(SIGUSR1, NULL, &a);
	TRUE(a.sa_handler == on_signal);

	/* A signal ends a wait. */
	OK(api.tutti_local(1, NULL, &g));
	OK(api.tutti_close(g));
	tutti_group two[2];
	OK(api.tutti_local(2, NULL, two));
	seen[sig] = 0;
	OK(api.tutti_set_interrupt(was_seen, &sig));
	op = tutti_op_recv(&x, 1, TUTTI_INT32, 1, 0);
	TRUE(pthread_create(&sender, NULL, send_one, &sig) == 0);
	CODE(TUTTI_ECANCELED, api.tutti_do(two[0], &op));
	pthread_join(sender, NULL);
	OK(api.tutti_set_interrupt(NULL, NULL));
	TRUE(elsewhere == 0);
	OK(api.tutti_close(two[0]));
	OK(api.tutti_close(two[1]));
}

/* blocks checks that this thread blocks the signals of a set after a call. */
static void *blocks(void *want)
{
	sigset_t mask;
	int sig;

	OK(api.tutti_rank(g, &rank));
	pthread_sigmask(SIG_SETMASK, NULL, &mask);
	for (sig = 1; sig < NSIG; sig++)
		if (sigismember(&mask, sig) != sigismember(want, sig))
			FAIL("signal %d: blocked %d, want %d", sig, sigismember(&mask, sig), sigismember(want, sig));
	return NULL;
}

/* masks checks that threads of the host keep their masks. */
static void masks(void)
{
	sigset_t mask;
	pthread_t thread;

	sigemptyset(&mask);
	sigaddset(&mask, SIGCHLD);
	sigaddset(&mask, SIGPROF);
	sigaddset(&mask, SIGRTMIN);
	sigaddset(&mask, SIGUSR2);
	pthread_sigmask(SIG_SETMASK, &mask, NULL);
	load();
	join(&(tutti_config){.struct_size = sizeof(tutti_config), .size = 1});
	blocks(&mask);
	TRUE(pthread_create(&thread, NULL, blocks, &mask) == 0);
	pthread_join(thread, NULL);
	OK(api.tutti_close(g));
}

/* files checks that the limit of open files stays, here and in children, unless a job needs more. */
static void files(void)
{
	tutti_config large = {.struct_size = sizeof(tutti_config), .size = 64, .job = "j", .secret = "0123456789abcdef",
	                      .secret_len = 16, .store = "etcd://127.0.0.1:1", .timeout_ns = 1000000};
	struct rlimit set = {1024, 4096}, now;
	char *argv[] = {(char *)"sh", (char *)"-c", (char *)"test `ulimit -n` = 1024", NULL};
	pid_t child;

	TRUE(setrlimit(RLIMIT_NOFILE, &set) == 0);
	load();
	join(&(tutti_config){.struct_size = sizeof(tutti_config), .size = 1});
	TRUE(getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur == set.rlim_cur && now.rlim_max == set.rlim_max);
	TRUE(posix_spawn(&child, "/bin/sh", NULL, NULL, argv, environ) == 0);
	reap(child);
	set.rlim_cur = 20;
	TRUE(setrlimit(RLIMIT_NOFILE, &set) == 0);
	TRUE(api.tutti_join(&large, &g) != TUTTI_OK);
	TRUE(getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur > 64 && now.rlim_cur < 1024 && now.rlim_max == 4096);
	set.rlim_max = 20;
	TRUE(setrlimit(RLIMIT_NOFILE, &set) == 0);
	CODE(TUTTI_EINTERNAL, api.tutti_join(&large, &g));
	SAYS("may have 20 open files");
}

/* dies runs f in a new process image and returns the signal that ended it. */
static int dies(const char *part)
{
	pid_t child = fork();
	int status;

	if (child == 0) {
		struct rlimit none = {0, 0};
		setrlimit(RLIMIT_CORE, &none);
		execl("/proc/self/exe", "guest", library, part, NULL);
		_exit(1);
	}
	TRUE(waitpid(child, &status, 0) == child);
	return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
}

static void on_fault(int sig)
{
	_exit(100 + sig);
}

static int again;

/* on_fault_once is for a handler with SA_RESETHAND, which runs with the mask that it asks for. */
static void on_fault_once(int sig)
{
	static int had;
	sigset_t mask;

	if (had++ > 0)
		_exit(1);
	pthread_sigmask(SIG_SETMASK, NULL, &mask);
	if (!sigismember(&mask, sig) || !sigismember(&mask, SIGUSR1) || sigismember(&mask, SIGUSR2))
		_exit(2);
	if (again)
		raise(sig);
}

static void fault(void)
{
	*(volatile int *)16 = 1;
}

/* faults checks that faults of the host end in the host's handlers, or as they would without the
 * library. */
static void faults(void)
{
	TRUE(dies("fault") == SIGSEGV);
	TRUE(dies("fault-handled-before") == -(100 + SIGSEGV));
	TRUE(dies("fault-handled-after") == -(100 + SIGSEGV));
	TRUE(dies("fault-once") == SIGSEGV);
	TRUE(dies("fault-once-raise") == SIGSEGV);
	TRUE(dies("sent") == SIGSEGV);
	TRUE(dies("pipe") == SIGPIPE);
	TRUE(dies("pipe-ignored") == -7);
	TRUE(dies("pipe-handled") == -(100 + SIGPIPE));
	TRUE(dies("term") == SIGTERM);
}

static void faulting(const char *part)
{
	int pipes[2];
	struct sigaction a;

	if (strcmp(part, "fault-handled-before") == 0)
		install(SIGSEGV, on_fault, 0);
	if (strncmp(part, "fault-once", 10) == 0) {
		again = strcmp(part, "fault-once-raise") == 0;
		a = (struct sigaction){.sa_handler = on_fault_once, .sa_flags = SA_RESETHAND};
		sigaddset(&a.sa_mask, SIGUSR1);
		TRUE(sigaction(SIGSEGV, &a, NULL) == 0);
	}
	if (strcmp(part, "pipe-ignored") == 0)
		signal(SIGPIPE, SIG_IGN);
	if (strcmp(part, "pipe-handled") == 0)
		install(SIGPIPE, on_fault, 0);
	load();
	clearenv();
	join(NULL);
	sum();
	if (strcmp(part, "fault-handled-after") == 0)
		install(SIGSEGV, on_fault, 0);
	if (strncmp(part, "fault", 5) == 0)
		fault();
	if (strcmp(part, "sent") == 0)
		kill(getpid(), SIGSEGV);
	if (strcmp(part, "term") == 0)
		kill(getpid(), SIGTERM);
	TRUE(pipe(pipes) == 0);
	close(pipes[0]);
	if (write(pipes[1], "x", 1) < 0 && errno == EPIPE) {
		sigaction(SIGPIPE, NULL, &a);
		TRUE(a.sa_handler == SIG_IGN);
		_exit(7);
	}
	FAIL("%s: still alive", part);
}

/* ---- cycles ---- */

struct use {
	long memory; /* KiB */
	int threads, descriptors;
};

static struct use use(void)
{
	FILE *f = fopen("/proc/self/status", "r");
	char line[256];
	struct use u = {0, 0, entries("/proc/self/fd")};

	TRUE(f != NULL);
	while (fgets(line, sizeof line, f) != NULL) {
		sscanf(line, "VmRSS: %ld", &u.memory);
		sscanf(line, "Threads: %d", &u.threads);
	}
	fclose(f);
	return u;
}

/* use_after is use, when there are no more descriptors than before: a thread of the library may be
 * closing some. It does not wait for ever. */
static struct use use_after(const struct use *before)
{
	static const struct timespec pause = {.tv_nsec = 10000000};
	struct use u = use();
	int i;

	for (i = 0; i < 1000 && u.descriptors > before->descriptors; i++) {
		nanosleep(&pause, NULL);
		u = use();
	}
	return u;
}

/* most is how much memory is no leak, in KiB: threads that the Go runtime has added meanwhile have
 * stacks, and what malloc keeps for them. */
static long most(const struct use *before, const struct use *after)
{
	int threads = after->threads - before->threads;

	return before->memory + 8192 + 64L * (threads > 0 ? threads : 0);
}

static void cycle(int n)
{
	static tutti_config config = {.struct_size = sizeof config, .size = 1, .log_level = "off"};
	tutti_group two[2];
	tutti_work works[2];
	float x[2][100];
	int i, k;

	for (i = 0; i < n; i++) {
		join(&config);
		sum();
		OK(api.tutti_close(g));
		OK(api.tutti_local(2, &config, two));
		for (k = 0; k < 2; k++) {
			tutti_op op = tutti_op_allreduce(x[k], x[k], 100, TUTTI_FLOAT32, TUTTI_SUM);
			OK(api.tutti_start(two[k], &op, &works[k]));
		}
		for (k = 0; k < 2; k++) {
			OK(api.tutti_work_wait(works[k], -1));
			OK(api.tutti_work_release(works[k]));
		}
		for (k = 0; k < 2; k++)
			OK(api.tutti_close(two[k]));
	}
}

static void cycles(void)
{
	struct use warm, end;

	load();
	cycle(300);
	warm = use();
	cycle(1000);
	end = use_after(&warm);
	printf("%ld KiB, %d threads, %d descriptors; 1,000 cycles later %ld KiB, %d threads, %d descriptors\n", warm.memory,
	       warm.threads, warm.descriptors, end.memory, end.threads, end.descriptors);
	TRUE(end.descriptors <= warm.descriptors);
	TRUE(end.threads <= warm.threads + 500); /* the Go runtime adds some on a busy machine */
	TRUE(end.memory < most(&warm, &end));
}

/* ---- calls ---- */

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* hot makes many calls of the same kinds. The test counts the garbage collections between the two
 * lines that it writes. */
static void hot(void)
{
	enum { N = 100000 };
	const int64_t minute = 60000000000;
	tutti_group two[2];
	tutti_work works[2];
	float x[2][16] = {{0}};
	int64_t begin = 0;
	int i, k;

	load();
	join(&(tutti_config){.struct_size = sizeof(tutti_config), .size = 1});
	OK(api.tutti_local(2, NULL, two));
	for (i = -1000; i < N; i++) {
		if (i == 0) {
			fprintf(stderr, "begin\n");
			begin = now();
		}
		tutti_op op = tutti_op_allreduce(x[0], x[0], 16, TUTTI_FLOAT32, TUTTI_MAX);
		OK(api.tutti_do(g, &op));
		op.timeout_ns = minute;
		OK(api.tutti_do(g, &op));
		op.timeout_ns = 0;
		for (k = 0; k < 2; k++) {
			op.dst.data = op.src.data = x[k];
			OK(api.tutti_start(two[k], &op, &works[k]));
		}
		for (k = 0; k < 2; k++) {
			OK(api.tutti_work_wait(works[k], k == 0 ? -1 : minute));
			OK(api.tutti_work_release(works[k]));
		}
	}
	fprintf(stderr, "end: %lld ns for each of %d rounds\n", (long long)(now() - begin) / N, N);
	OK(api.tutti_close(two[0]));
	OK(api.tutti_close(two[1]));
	OK(api.tutti_close(g));
}

/* ---- other ---- */

static void second(void)
{
	if (dlopen(getenv("OTHER"), RTLD_NOW | RTLD_LOCAL) == NULL)
		FAIL("%s", dlerror());
	single();
}

/* refused checks that the loader says what to do about libraries that it cannot open. The library
 * is not one of them here. */
static void refused(void)
{
	static const struct {
		const char *message, *advice;
	} texts[] = {
		{"/x/libtutti.so: cannot allocate memory in static TLS block", "LD_PRELOAD"},
		{"Error relocating /x/libtutti.so: : initial-exec TLS resolves to dynamic definition in /x/libtutti.so",
		 "musl"},
		{"Error loading shared library ld-linux-x86-64.so.2: No such file or directory (needed by /x/libtutti.so)",
		 "musl"},
		{"/lib/x86_64-linux-gnu/libc.so: version `GLIBC_2.99' not found (required by /x/libtutti.so)", "newer system"},
	};
	char why[1024], path[512];
	size_t i;

	for (i = 0; i < sizeof texts / sizeof *texts; i++) {
		tutti_dl_explain("/x/libtutti.so", texts[i].message, why, sizeof why);
		TRUE(strstr(why, texts[i].message) != NULL && strstr(why, texts[i].advice) != NULL);
	}
	TRUE(tutti_dl_open(&api, "/nowhere/libtutti.so", why, sizeof why) == -1 && strstr(why, "make shim") != NULL);
	TRUE(tutti_dl_open(&api, "libm.so.6", why, sizeof why) == -1 && strstr(why, "not Tutti's") != NULL);
	snprintf(path, sizeof path, "%s/old.so", getenv("IMPOSTERS"));
	TRUE(tutti_dl_open(&api, path, why, sizeof why) == -1 && strstr(why, "version 0.7") != NULL);
	snprintf(path, sizeof path, "%s/small.so", getenv("IMPOSTERS"));
	TRUE(tutti_dl_open(&api, path, why, sizeof why) == -1 && strstr(why, "no function") != NULL);
	for (i = 2048; i >= 4; i /= 2) { /* they leave no static TLS */
		snprintf(path, sizeof path, "%s/greedy-%zu.so", getenv("IMPOSTERS"), i);
		dlopen(path, RTLD_NOW);
	}
	TRUE(tutti_dl_open(&api, library, why, sizeof why) == -1);
	if (strstr(why, "LD_PRELOAD") == NULL)
		FAIL("%s", why);
}

/* threads that come and go leave nothing. */
static void *one_thread(void *arg)
{
	(void)arg;
	CODE(TUTTI_EINVAL, api.tutti_close(99));
	sum();
	return NULL;
}

static void threads(void)
{
	struct use warm, end;
	pthread_t thread;
	int i;

	load();
	join(&(tutti_config){.struct_size = sizeof(tutti_config), .size = 1});
	for (i = 0; i < 1000; i++) {
		if (i == 300)
			warm = use();
		TRUE(pthread_create(&thread, NULL, one_thread, NULL) == 0);
		pthread_join(thread, NULL);
	}
	end = use();
	TRUE(end.threads <= warm.threads + 350); /* as in cycles; one that stays for each thread makes 700 */
	TRUE(end.memory < most(&warm, &end));
	TRUE(tutti_last_error()[0] == 0); /* that of this thread */
	OK(api.tutti_close(g));
}

/* ---- Floating-point mode ---- */

#if defined(__x86_64__)
#define FLUSH 0x9fc0 /* flush subnormals to zero, and take them for zero */
#define KEEP 0x1f80
static unsigned mode(void) { return __builtin_ia32_stmxcsr() & 0xffc0; }
static void set_mode(void) { __builtin_ia32_ldmxcsr(FLUSH); }
#elif defined(__aarch64__)
#define FLUSH (1 << 24)
#define KEEP 0
static unsigned mode(void)
{
	unsigned long m;

	__asm__ volatile("mrs %0, fpcr" : "=r"(m));
	return (unsigned)m;
}
static void set_mode(void) { __asm__ volatile("msr fpcr, %0" ::"r"((unsigned long)FLUSH)); }
#else
#define FLUSH 0
#define KEEP 0
static unsigned mode(void) { return FLUSH; }
static void set_mode(void) {}
#endif

/* subnormals sums floats that this thread takes for zeros. */
static void subnormals(void)
{
	enum { N = 100000, SMALL = 0x100 }; /* bits of a subnormal */
	uint32_t *x = malloc(N * sizeof *x);
	struct timespec moment = {.tv_nsec = 50000000};
	uint32_t n;
	int i, way;

	set_mode();
	load();
	TRUE(mode() == FLUSH);
	join(NULL);
	for (way = 0; way < 3; way++) {
		for (n = 4; n <= N; n *= 25000) {
			tutti_op op = tutti_op_allreduce(x, x, n, TUTTI_FLOAT32, TUTTI_SUM);
			tutti_work work;

			for (i = 0; i < (int)n; i++)
				x[i] = SMALL;
			if (way == 0) {
				OK(api.tutti_do(g, &op));
			} else {
				OK(api.tutti_start(g, &op, &work));
				if (way == 2)
					nanosleep(&moment, NULL); /* a thread of the library does it meanwhile */
				OK(api.tutti_work_wait(work, -1));
			}
			TRUE(mode() == FLUSH);
			for (i = 0; i < (int)n; i++)
				TRUE(x[i] == SMALL * (uint32_t)size);
		}
	}
	OK(api.tutti_close(g));
	free(x);
}

static _Atomic int entered, flushing;

/* The Go runtime calls this in a thread that enters Go for the first time. Threads that the runtime
 * starts there inherit the thread's mode. */
int pthread_getattr_np(pthread_t thread, pthread_attr_t *attr)
{
	int (*next)(pthread_t, pthread_attr_t *) = (int (*)(pthread_t, pthread_attr_t *))dlsym(RTLD_NEXT, __func__);

	entered++;
	flushing += mode() != KEEP;
	return next(thread, attr);
}

static int never(void *ctx)
{
	(void)ctx;
	return 0;
}

static void *enter(void *check)
{
	int32_t all;

	set_mode();
	if (check != NULL)
		OK(api.tutti_set_interrupt(never, NULL));
	OK(api.tutti_agree(g, 1, -1, &all));
	TRUE(mode() == FLUSH);
	return NULL;
}

/* entries_keep checks that calls of threads that flush subnormals enter Go in a mode that keeps them. */
static void entries_keep(void)
{
	pthread_t thread;
	int i;

	load();
	join(&(tutti_config){.struct_size = sizeof(tutti_config), .size = 1});
	for (i = 0; i < 2; i++) { /* without an interrupt check, and with one */
		int had = entered;

		TRUE(pthread_create(&thread, NULL, enter, i == 0 ? NULL : &g) == 0);
		pthread_join(thread, NULL);
		TRUE(entered > had && flushing == 0);
	}
	OK(api.tutti_close(g));
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*f)(void);
	} parts[] = {{"fork", fork_}, {"single", single}, {"signals", signals}, {"masks", masks}, {"files", files},
	             {"faults", faults}, {"cycles", cycles},
	             {"second", second}, {"threads", threads}, {"hot", hot},
	             {"subnormals", subnormals}, {"entries-keep", entries_keep},
	             {"refused", refused}};
	size_t i;

	TRUE(argc == 3);
	library = argv[1];
	for (i = 0; i < sizeof parts / sizeof *parts; i++) {
		if (strcmp(argv[2], parts[i].name) == 0) {
			parts[i].f();
			return 0;
		}
	}
	faulting(argv[2]);
	return 0;
}
