/* What every program here shares, so that all peers are measured alike: the arguments, the test pattern and its check, the timing loop and the
 * output line. C99, and C++ for Gloo.
 *
 *   PROGRAM OP SIZES IN_PLACE REPS BUDGET_US DEADLINE_S
 *
 * OP is a collective, SIZES comma-separated bytes, IN_PLACE 0 or 1 (allreduce and reduce only). The program ends itself after DEADLINE_S, whatever
 * became of whoever started it. "bytes" is the largest buffer of a rank, as in nccl-tests: the vector for allreduce, reduce and broadcast; the whole
 * input for reduce_scatter; the whole output for allgather; the whole input, which is as long as the output, for alltoall. */
#ifndef MEASURE_H
#define MEASURE_H
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum op { ALLREDUCE, REDUCE, REDUCE_SCATTER, ALLGATHER, ALLTOALL, BROADCAST, OPS };
static const char *const op_names[OPS] = {"allreduce", "reduce", "reduce_scatter", "allgather", "alltoall", "broadcast"};

typedef struct {
  enum op op;
  long sizes[64];
  int nsizes, in_place, reps;
  double budget; /* seconds that one repetition may take */
} settings;

static inline settings parse(int argc, char **argv) {
  settings s;
  memset(&s, 0, sizeof s);
  if (argc < 7) {
    fprintf(stderr, "usage: %s OP SIZES IN_PLACE REPS BUDGET_US DEADLINE_S\n", argv[0]);
    exit(2);
  }
  int op = 0;
  while (op < OPS && strcmp(argv[1], op_names[op]) != 0) op++;
  if (op == OPS) {
    fprintf(stderr, "%s: unknown operation %s\n", argv[0], argv[1]);
    exit(2);
  }
  s.op = (enum op)op;
  for (char *p = argv[2]; *p && s.nsizes < 64;) {
    s.sizes[s.nsizes++] = strtol(p, &p, 10);
    if (*p == ',') p++;
    else break;
  }
  s.in_place = atoi(argv[3]) && (s.op == ALLREDUCE || s.op == REDUCE);
  s.reps = atoi(argv[4]);
  s.budget = atof(argv[5]) * 1e-6;
  if (s.nsizes == 0 || s.sizes[0] <= 0 || s.reps < 1 || s.budget <= 0) {
    fprintf(stderr, "%s: sizes, repetitions and budget are to be positive\n", argv[0]);
    exit(2);
  }
  alarm((unsigned)atoi(argv[6]));
  return s;
}

static inline double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline float *buffer(size_t floats) {
  void *p = NULL;
  if (posix_memalign(&p, 4096, floats * sizeof(float) + 4096) != 0) {
    fprintf(stderr, "out of memory for %zu floats\n", floats);
    exit(1);
  }
  memset(p, 0, floats * sizeof(float));
  return (float *)p;
}

/* One collective on one rank. n ranks; count elements in all ("bytes" / 4), part = count / n. src and dst are as long as the operation wants, but
 * never shorter than count, so that a library may use them as scratch. */
typedef struct {
  enum op op;
  int in_place, rank, n;
  size_t count, part;
  float *src, *dst;
} task;

/* Small integers: their sums are exact, so the check is for equality. */
static inline float pattern(int rank, size_t i) { return (float)((rank + 1) * (int)(i % 5 + 1)); }

static inline task prepare(const settings *s, long bytes, int rank, int n) {
  task t;
  t.op = s->op;
  t.in_place = s->in_place;
  t.rank = rank;
  t.n = n;
  t.part = (size_t)bytes / sizeof(float) / (size_t)n;
  if (t.part == 0) t.part = 1;
  t.count = t.op == ALLREDUCE || t.op == REDUCE || t.op == BROADCAST ? (size_t)bytes / sizeof(float) : t.part * (size_t)n;
  if (t.count == 0) t.count = 1;
  t.src = buffer(t.count);
  t.dst = buffer(t.count);
  size_t in = t.op == ALLGATHER ? t.part : t.count;
  for (size_t i = 0; i < in; i++) t.src[i] = pattern(rank, i);
  if (t.in_place || (t.op == BROADCAST && rank == 0)) memcpy(t.dst, t.src, t.count * sizeof(float));
  return t;
}

/* How many elements of out are not what one call on prepare's buffers gives. */
static inline long wrong(const task *t, const float *out) {
  long bad = 0;
  size_t len = t->op == REDUCE_SCATTER ? t->part : t->op == REDUCE && t->rank != 0 ? 0 : t->count;
  float all = (float)(t->n * (t->n + 1) / 2);
  for (size_t i = 0; i < len; i++) {
    float want = 0;
    switch (t->op) {
    case ALLREDUCE:
    case REDUCE: want = all * pattern(0, i); break;
    case REDUCE_SCATTER: want = all * pattern(0, (size_t)t->rank * t->part + i); break;
    case ALLGATHER: want = pattern((int)(i / t->part), i % t->part); break;
    case ALLTOALL: want = pattern((int)(i / t->part), (size_t)t->rank * t->part + i % t->part); break;
    case BROADCAST: want = pattern(0, i); break;
    default: break;
    }
    bad += out[i] != want;
  }
  return bad;
}

/* From here on the data are zeros: repeated sums in place neither overflow nor become denormal. */
static inline void quiet(task *t) {
  memset(t->src, 0, t->count * sizeof(float));
  memset(t->dst, 0, t->count * sizeof(float));
}

static inline void finish(task *t) {
  free(t->src);
  free(t->dst);
}

typedef struct {
  void (*call)(void *);               /* the collective, once */
  double (*slowest)(void *, double);  /* maximum over ranks of x, and a barrier; 0 only before a measurement */
  void *arg;
} subject;

typedef struct {
  double usec; /* a call: best repetition, slowest rank */
  long iters;
  int reps;
} timing;

static inline double timed(const subject *b, long iters) {
  b->slowest(b->arg, 0);
  double t = now();
  for (long i = 0; i < iters; i++) b->call(b->arg);
  return b->slowest(b->arg, now() - t + 1e-12);
}

/* Warm up, double the number of calls until it takes an eighth of the budget, then repeat for the budget each time. Every decision hangs on the
 * slowest rank's time, which all ranks know, so all make the same number of calls. A call that is itself far over budget is repeated fewer times. */
static inline timing measure(const subject *b, const settings *s) {
  timing r = {1e30, 1, 0};
  double d = timed(b, 2), spent = 0;
  for (;;) {
    d = timed(b, r.iters);
    if (d >= s->budget / 8 || r.iters >= 1L << 22) break;
    r.iters *= 2;
  }
  double n = (double)r.iters * s->budget / d;
  r.iters = n < 1 ? 1 : n > 1 << 24 ? 1 << 24 : (long)n;
  while (r.reps < s->reps && (r.reps == 0 || spent < 2 * s->reps * s->budget)) {
    d = timed(b, r.iters);
    spent += d;
    r.reps++;
    if (d / (double)r.iters * 1e6 < r.usec) r.usec = d / (double)r.iters * 1e6;
    if (d < s->budget / 2 && r.iters < 1 << 24) r.iters = (long)((double)r.iters * s->budget / d); /* something had disturbed the calibration */
  }
  return r;
}

static inline void report(const char *op, const char *variant, int in_place, int ranks, size_t bytes, timing r, long bad) {
  printf("{\"op\":\"%s\",\"dtype\":\"float32\",\"ranks\":%d,\"bytes\":%zu,\"time_us\":%.4f,\"in_place\":%s,\"variant\":\"%s\","
         "\"iters\":%ld,\"reps\":%d,\"wrong\":%ld}\n",
         op, ranks, bytes, r.usec, in_place ? "true" : "false", variant, r.iters, r.reps, bad);
  fflush(stdout);
}
#endif
