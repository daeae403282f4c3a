/* What every program here shares, so that all peers are measured alike: the arguments, the test
 * pattern and its check, the timing loop and the output line. C99, and C++ for Gloo.
 *
 *   PROGRAM OP SIZES IN_PLACE REPS BUDGET_US DEADLINE_S TOUCH TICK_US
 *
 * OP is a collective, SIZES comma-separated bytes, IN_PLACE 0 or 1 (allreduce and reduce only). The
 * program ends itself after DEADLINE_S, whatever became of the process that started it. With TOUCH
 * 1 every rank writes its input before each call and reads its result after it, as programs do; 2
 * says that the ranks share processors, too; with 0 calls follow each other at once. TICK_US is the
 * interval of the times at which ranks begin a call together. "bytes" is the largest buffer of a
 * rank, as in nccl-tests: the vector for allreduce, reduce and broadcast; the whole input for
 * reduce_scatter; the whole output for allgather; the whole input, which is as long as the output,
 * for alltoall; for put what a rank puts to the next; a barrier has none. */
#ifndef MEASURE_H
#define MEASURE_H
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum op { ALLREDUCE, REDUCE, REDUCE_SCATTER, ALLGATHER, ALLTOALL, BROADCAST, PUT, BARRIER, OPS };
static const char *const op_names[OPS] = {"allreduce", "reduce", "reduce_scatter", "allgather",
                                          "alltoall", "broadcast", "put", "barrier"};

typedef struct {
  enum op op;
  long sizes[64];
  int nsizes, in_place, reps, touch;
  double budget; /* seconds that one repetition may take */
  double tick;   /* seconds */
} settings;

static inline settings parse(int argc, char **argv) {
  settings s;
  memset(&s, 0, sizeof s);
  if (argc < 9) {
    fprintf(stderr, "usage: %s OP SIZES IN_PLACE REPS BUDGET_US DEADLINE_S TOUCH TICK_US\n", argv[0]);
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
  s.tick = atof(argv[8]) * 1e-6;
  if (s.nsizes == 0 || s.sizes[0] <= 0 || s.reps < 1 || s.budget <= 0 || s.tick <= 0) {
    fprintf(stderr, "%s: sizes, repetitions, budget and tick are to be positive\n", argv[0]);
    exit(2);
  }
  alarm((unsigned)atoi(argv[6]));
  s.touch = atoi(argv[7]);
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

/* One collective on one rank. n ranks; count elements in all ("bytes" / 4), part = count / n. src
 * and dst are as long as the operation wants, but never shorter than count, so that a library may
 * use them as scratch. */
typedef struct {
  enum op op;
  int in_place, rank, n;
  size_t count, part;
  float *src, *dst;
} task;

/* Element i of the data of rank in call number nr, times a scale of (rank + 1) or their sum: small
 * integers, whose sums are exact, so that the check is for equality. They repeat with period 5 and
 * differ from call to call. */
enum { PERIOD = 4095 };

static inline const float *pattern(size_t from) {
  static float table[PERIOD + 5];
  if (table[0] == 0)
    for (int i = 0; i < PERIOD + 5; i++) table[i] = (float)(i % 5 + 1);
  return table + from % 5;
}

static inline void fill(float *x, size_t n, float scale, size_t from) {
  const float *p = pattern(from);
  for (size_t at = 0; at < n; at += PERIOD) {
    size_t len = n - at < PERIOD ? n - at : PERIOD;
    for (size_t i = 0; i < len; i++) x[at + i] = scale * p[i];
  }
}

static inline long differ(const float *x, size_t n, float scale, size_t from) {
  const float *p = pattern(from);
  long bad = 0;
  for (size_t at = 0; at < n; at += PERIOD) {
    size_t len = n - at < PERIOD ? n - at : PERIOD;
    int b = 0;
    for (size_t i = 0; i < len; i++) b += x[at + i] != scale * p[i];
    bad += b;
  }
  return bad;
}

/* Writes the input of call number nr. */
static inline void write_input(task *t, long nr) {
  float *in = t->in_place || t->op == BROADCAST ? t->dst : t->src;
  if (t->op == BARRIER || (t->op == BROADCAST && t->rank != 0)) return;
  fill(in, t->op == ALLGATHER ? t->part : t->count, (float)(t->rank + 1), (size_t)nr);
}

static inline task prepare(const settings *s, long bytes, int rank, int n) {
  task t;
  t.op = s->op;
  t.in_place = s->in_place;
  t.rank = rank;
  t.n = n;
  t.part = (size_t)bytes / sizeof(float) / (size_t)n;
  if (t.part == 0) t.part = 1;
  t.count = t.op == ALLREDUCE || t.op == REDUCE || t.op == BROADCAST || t.op == PUT
                ? (size_t)bytes / sizeof(float)
                : t.part * (size_t)n;
  if (t.count == 0) t.count = 1;
  t.src = buffer(t.count);
  t.dst = buffer(t.count);
  write_input(&t, 0);
  return t;
}

/* Reads the result of call number nr, which is in out, and says how many elements are wrong. */
static inline long wrong(const task *t, const float *out, long nr) {
  float all = (float)(t->n * (t->n + 1) / 2);
  size_t from = (size_t)nr, part = t->part;
  long bad = 0;
  switch (t->op) {
  case ALLREDUCE: return differ(out, t->count, all, from);
  case REDUCE: return t->rank == 0 ? differ(out, t->count, all, from) : 0;
  case REDUCE_SCATTER: return differ(out, part, all, from + (size_t)t->rank * part);
  case ALLGATHER:
    for (int r = 0; r < t->n; r++) bad += differ(out + (size_t)r * part, part, (float)(r + 1), from);
    return bad;
  case ALLTOALL:
    for (int r = 0; r < t->n; r++)
      bad += differ(out + (size_t)r * part, part, (float)(r + 1), from + (size_t)t->rank * part);
    return bad;
  case BROADCAST: return differ(out, t->count, 1, from);
  case PUT: return differ(out, t->count, (float)((t->rank + t->n - 1) % t->n + 1), from);
  case BARRIER: return 0;
  default: return 1;
  }
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
  void (*call)(void *);                      /* the collective, once */
  double (*slowest)(void *, double);         /* maximum over ranks of x, and a barrier; 0 only before a measurement */
  void (*write)(void *, long);               /* writes the input of call number nr, from 1 */
  long (*read)(void *, long);                /* reads its result and says how many elements are wrong */
  void (*barrier)(void *);                   /* returns when all ranks have called it */
  void (*maxima)(void *, double *, size_t);  /* for each element the maximum over ranks */
  void *arg;
} subject;

typedef struct {
  double usec; /* a call: best repetition, slowest rank */
  long iters;
  int reps;
  long wrong; /* elements that were read here */
  long single_copies; /* copies between processes that the kernel made */
} timing;

enum { MAX_TOUCHED = 1 << 16 };

static inline int ascending(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

/* Calls back to back. */
static inline double tight(const subject *b, long iters, double *usec) {
  b->slowest(b->arg, 0);
  double t = now();
  for (long i = 0; i < iters; i++) b->call(b->arg);
  double d = b->slowest(b->arg, now() - t + 1e-12);
  *usec = d / (double)iters * 1e6;
  return d;
}

/* Returns at the next tick of the machine's clock but one. Ranks that leave a barrier one after the
   other begin the next call together. Until shortly before, threads of the library may have the
   processor, for the other ranks may still wait in the barrier for what they do. */
static inline void together(double tick) {
  const double spin = 10e-6;
  double until = ((double)(long)(now() / tick) + 2) * tick;
  while (now() < until - spin) sched_yield();
  while (now() < until) continue;
}

/* As programs use it: only the calls are on the clock, and the median call counts. If each rank has
   a processor, they begin together, and a call takes as long as its slowest rank. If they share
   processors, each begins when it gets one, and a call takes from the first rank's beginning to the
   last rank's end: a late rank finds what others have done meanwhile. The data of no two calls in a
   row are alike. */
static inline double touched(const subject *b, const settings *s, long iters, double *usec, long *bad) {
  int share = s->touch == 2;
  static double times[MAX_TOUCHED], begun[MAX_TOUCHED];
  static long nr;
  double began = now();
  for (long i = 0; i < iters; i++) {
    b->write(b->arg, ++nr);
    b->barrier(b->arg);
    if (!share) together(s->tick);
    double t = now();
    b->call(b->arg);
    times[i] = now() - (share ? 0 : t);
    begun[i] = -t;
    *bad += b->read(b->arg, nr);
  }
  double d = now() - began + 1e-12;
  b->maxima(b->arg, times, (size_t)iters);
  if (share) {
    b->maxima(b->arg, begun, (size_t)iters);
    for (long i = 0; i < iters; i++) times[i] += begun[i];
  }
  b->maxima(b->arg, &d, 1);
  qsort(times, (size_t)iters, sizeof *times, ascending);
  *usec = (times[(iters - 1) / 2] + times[iters / 2]) / 2 * 1e6;
  return d;
}

static inline double timed(const subject *b, const settings *s, long iters, double *usec, long *bad) {
  return s->touch ? touched(b, s, iters, usec, bad) : tight(b, iters, usec);
}

/* How many calls take the budget if iters of them take d. */
static inline long filling(const settings *s, long iters, double d, long most) {
  double n = (double)iters * s->budget / d;
  return n < 1 ? 1 : n > (double)most ? most : (long)n;
}

/* Warm up for a quarter of the budget, double the number of calls meanwhile and until it takes an
 * eighth, then repeat for the budget each time. A repetition that takes less than half of it, since
 * something had disturbed that search, does not count, and more calls are made next. Every decision
 * hangs on the slowest rank's time, which all ranks know, so all make the same number of calls.
 * tutti bench does the same (cmd/tutti/internal/bench). Only here is a call that is itself far over
 * budget repeated fewer times. */
static inline timing measure(const subject *b, const settings *s) {
  timing r = {1e30, 1, 0, 0, 0};
  long most = s->touch ? MAX_TOUCHED : 1 << 24;
  double usec, d, warm = 0, spent = 0;
  for (;;) {
    d = timed(b, s, r.iters, &usec, &r.wrong);
    if ((warm >= s->budget / 4 && d >= s->budget / 8) || r.iters >= most / 4) break;
    warm += d;
    if (d < s->budget / 8) r.iters *= 2;
  }
  r.iters = filling(s, r.iters, d, most);
  while (r.reps < s->reps && (r.reps == 0 || spent < 2 * s->reps * s->budget)) {
    d = timed(b, s, r.iters, &usec, &r.wrong);
    if (d < s->budget / 2 && r.iters < most) { /* at least twice as many next */
      r.iters = filling(s, r.iters, d, most);
      continue;
    }
    spent += d;
    r.reps++;
    if (usec < r.usec) r.usec = usec;
  }
  return r;
}

static inline void report(const settings *s, const char *op, const char *variant, int in_place, int ranks,
                          size_t bytes, timing r, long bad) {
  printf("{\"op\":\"%s\",\"dtype\":\"float32\",\"ranks\":%d,\"bytes\":%zu,\"time_us\":%.4f,\"in_place\":%s,"
         "\"touch\":%s,\"variant\":\"%s\",\"iters\":%ld,\"reps\":%d,\"wrong\":%ld,"
         "\"single_copies\":%ld}\n",
         op, ranks, bytes, r.usec, in_place ? "true" : "false", s->touch ? "true" : "false", variant, r.iters,
         r.reps, bad, r.single_copies);
  fflush(stdout);
}
#endif
