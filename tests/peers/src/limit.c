/* How fast this machine moves the bytes that an allreduce on shared memory has to move, with
 * nothing else to do: no flags, no waiting for a peer. Among n ranks every rank reads S bytes and
 * writes S bytes (n = 2: 2*S reads and 2*S writes in all, 4*S moved).
 *
 *   limit allreduce SIZES 0 REPS BUDGET_US DEADLINE_S TOUCH TICK_US RANKS
 *
 * n processes at once, each on a core of its own where there are enough, on memory that all of them
 * map. Variants: "copy", each process copies S bytes with memcpy; "sum", each process adds up its
 * nth part of n vectors and stores it to all n, which is what the collective does. "warm" works on
 * the same buffers again and again, "cold" walks through more memory than the caches hold, and
 * "cross" has every process take, call by call, the part that another wrote before, so that all
 * data move between caches (and, alone of them, it waits for the others in each call). With TOUCH
 * "warm" is measured so: before each call every process writes its own vector, and after it reads
 * it. */
#define _GNU_SOURCE
#include "measure.h"

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <signal.h>

enum { MAX_RANKS = 64, BLOCK = 1024 };
static const size_t arena_min = (size_t)256 << 20;

typedef struct {
  _Atomic int arrived, generation;
  double start[MAX_RANKS], end[MAX_RANKS];
} meeting;

typedef struct {
  meeting *m;
  int rank, n, sum, cold, cross;
  size_t calls;
  size_t count, stride, slots, at; /* floats; stride between two buffers of one slot */
  float *arena;
} mover;

static void meet(mover *v) {
  int g = atomic_load(&v->m->generation);
  if (atomic_fetch_add(&v->m->arrived, 1) == v->n - 1) {
    atomic_store(&v->m->arrived, 0);
    atomic_store(&v->m->generation, g + 1);
    return;
  }
  for (int i = 0; atomic_load(&v->m->generation) == g; i++)
    if (i > 1000) sched_yield();
}

/* From the first start to the last end, by the clock that all processes of a machine share: these
 * ranks never wait for each other, so with more of them than cores some start when others are done,
 * and none of them alone has seen how long it took. */
static double slowest(void *arg, double x) {
  mover *v = (mover *)arg;
  if (x == 0) {
    meet(v);
    v->m->start[v->rank] = now();
    return 0;
  }
  v->m->end[v->rank] = now();
  meet(v);
  double start = v->m->start[0], end = v->m->end[0];
  for (int i = 1; i < v->n; i++) {
    if (v->m->start[i] < start) start = v->m->start[i];
    if (v->m->end[i] > end) end = v->m->end[i];
  }
  meet(v);
  return end - start;
}

static void barrier(void *arg) { meet((mover *)arg); }

static void maxima(void *arg, double *x, size_t n) {
  mover *v = (mover *)arg;
  for (size_t i = 0; i < n; i++) {
    v->m->start[v->rank] = x[i];
    meet(v);
    for (int r = 0; r < v->n; r++)
      if (v->m->start[r] > x[i]) x[i] = v->m->start[r];
    meet(v);
  }
}

/* The vector that this process writes, and the one that it reads. */
static float *own(mover *v, int result) {
  return v->arena + (size_t)(v->sum ? v->rank : 2 * v->rank + result) * v->stride;
}

static void write_one(void *arg, long nr) {
  mover *v = (mover *)arg;
  fill(own(v, 0), v->count, (float)(v->rank + 1), (size_t)nr);
}

static long read_one(void *arg, long nr) {
  mover *v = (mover *)arg;
  meet(v); /* all have stored their parts */
  return differ(own(v, 1), v->count, v->sum ? (float)(v->n * (v->n + 1) / 2) : (float)(v->rank + 1), (size_t)nr);
}

static void add2(float *restrict a, float *restrict b, size_t len) {
  for (size_t i = 0; i < len; i++) a[i] = b[i] = a[i] + b[i];
}

static void call(void *arg) {
  mover *v = (mover *)arg;
  size_t buffers = (size_t)v->n * (v->sum ? 1 : 2);
  float *slot = v->arena + v->at * buffers * v->stride;
  if (v->cold && ++v->at == v->slots) v->at = 0;
  if (!v->sum) {
    memcpy(slot + (size_t)(2 * v->rank + 1) * v->stride, slot + (size_t)(2 * v->rank) * v->stride,
           v->count * sizeof(float));
    return;
  }
  size_t n = (size_t)v->n, part = (size_t)v->rank;
  if (v->cross) {
    part = (part + v->calls++) % n;
    meet(v);
  }
  size_t lo = v->count * part / n, hi = v->count * (part + 1) / n;
  if (v->n == 2) {
    add2(slot + lo, slot + v->stride + lo, hi - lo);
    return;
  }
  float acc[BLOCK];
  for (size_t i = lo; i < hi; i += BLOCK) {
    size_t len = hi - i < BLOCK ? hi - i : BLOCK;
    memcpy(acc, slot + i, len * sizeof(float));
    for (int r = 1; r < v->n; r++) {
      const float *from = slot + (size_t)r * v->stride + i;
      for (size_t k = 0; k < len; k++) acc[k] += from[k];
    }
    for (int r = 0; r < v->n; r++) memcpy(slot + (size_t)r * v->stride + i, acc, len * sizeof(float));
  }
}

static void rank_main(const settings *s, meeting *m, float *arena, size_t arena_bytes, int rank, int n) {
  if (n <= sysconf(_SC_NPROCESSORS_ONLN)) {
    cpu_set_t may, one;
    CPU_ZERO(&one);
    if (sched_getaffinity(0, sizeof may, &may) == 0) {
      int k = rank;
      for (int c = 0; c < CPU_SETSIZE; c++)
        if (CPU_ISSET(c, &may) && k-- == 0) CPU_SET(c, &one);
      if (CPU_COUNT(&one) == 1) sched_setaffinity(0, sizeof one, &one);
    }
  }
  for (int i = 0; i < s->nsizes; i++)
    for (int kind = 0; kind < 5; kind++) {
      mover v = {.m = m, .rank = rank, .n = n, .sum = kind & 1 || kind == 4,
                 .cold = kind == 2 || kind == 3, .cross = kind == 4, .arena = arena};
      v.count = (size_t)s->sizes[i] / sizeof(float);
      v.stride = (v.count + 15) / 16 * 16;
      v.slots = arena_bytes / (v.stride * sizeof(float) * (size_t)n * (v.sum ? 1 : 2));
      subject b = {call, slowest, write_one, read_one, barrier, maxima, &v};
      settings how = *s;
      how.touch = s->touch && !v.cold && !v.cross;
      timing r = measure(&b, &how);
      double bad = (double)r.wrong;
      maxima(&v, &bad, 1);
      static const char *const names[] = {"copy-warm", "sum-warm", "copy-cold", "sum-cold", "sum-cross"};
      if (rank == 0) report(s, "limit", names[kind], 1, n, v.count * sizeof(float), r, (long)bad);
    }
}

int main(int argc, char **argv) {
  settings s = parse(argc, argv);
  int n = argc > 9 ? atoi(argv[9]) : 2;
  if (n < 1 || n > MAX_RANKS) {
    fprintf(stderr, "limit: 1 to %d ranks, not %d\n", MAX_RANKS, n);
    return 2;
  }
  size_t bytes = arena_min;
  for (int i = 0; i < s.nsizes; i++) {
    size_t need = ((size_t)s.sizes[i] + 64) * 2 * (size_t)n;
    if (need > bytes) bytes = need;
  }
  char *p = (char *)mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) {
    fprintf(stderr, "limit: %zu bytes of shared memory: %s\n", bytes, strerror(errno));
    return 1;
  }
  memset(p, 0, bytes + 4096);
  pid_t parent = getpid();
  unsigned left = alarm(0); /* a fork does not inherit the alarm */
  alarm(left);
  for (int r = 1; r < n; r++) {
    pid_t pid = fork();
    if (pid < 0) {
      fprintf(stderr, "limit: fork: %s\n", strerror(errno));
      return 1;
    }
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) return 1;
      alarm(left);
      rank_main(&s, (meeting *)p, (float *)(p + 4096), bytes, r, n);
      return 0;
    }
  }
  rank_main(&s, (meeting *)p, (float *)(p + 4096), bytes, 0, n);
  int bad = 0, st;
  for (int r = 1; r < n; r++)
    if (wait(&st) < 0 || st != 0) bad = 1;
  return bad;
}
