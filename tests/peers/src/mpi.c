/* Collectives and puts of any MPI, measured as measure.h says. */
#include "measure.h"

#include <mpi.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* The copies between processes that the kernel makes for the library: these functions take the
   place of those of the C library. */
static long single_copies;

ssize_t process_vm_readv(pid_t pid, const struct iovec *here, unsigned long nhere, const struct iovec *there,
                         unsigned long nthere, unsigned long flags) {
  ssize_t n = syscall(SYS_process_vm_readv, pid, here, nhere, there, nthere, flags);
  if (n > 0) single_copies++;
  return n;
}

ssize_t process_vm_writev(pid_t pid, const struct iovec *here, unsigned long nhere, const struct iovec *there,
                          unsigned long nthere, unsigned long flags) {
  ssize_t n = syscall(SYS_process_vm_writev, pid, here, nhere, there, nthere, flags);
  if (n > 0) single_copies++;
  return n;
}

/* What a put is made to: the data, and behind it at FLAG a number that the target polls. */
static struct {
  MPI_Win win;
  char *mem;
  MPI_Aint flag;
  long nr;
} window;

static void make_window(task *t) {
  window.flag = (MPI_Aint)((t->count * sizeof(float) + 63) / 64 * 64);
  window.nr = 0;
  MPI_Win_allocate(window.flag + 64, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window.mem, &window.win);
  memset(window.mem, 0, (size_t)window.flag + 64);
  free(t->dst);
  t->dst = (float *)window.mem;
  MPI_Win_lock_all(0, window.win);
  MPI_Barrier(MPI_COMM_WORLD);
}

static void free_window(task *t) {
  MPI_Win_unlock_all(window.win);
  MPI_Win_free(&window.win);
  t->dst = NULL;
}

/* Returns when what the rank before has put is here. */
static void await_put(void) {
  volatile long *flag = (volatile long *)(window.mem + window.flag);
  int any;
  while (*flag < window.nr) {
    MPI_Iprobe(MPI_ANY_SOURCE, 1, MPI_COMM_WORLD, &any, MPI_STATUS_IGNORE); /* makes progress */
    MPI_Win_sync(window.win);
  }
}

/* Once round the ring: each rank puts the data to the next, and then the number of the call, when
   it has seen what the one before has put. */
static void put(task *t) {
  int to = (t->rank + 1) % t->n, count = (int)t->count;
  window.nr++;
  if (t->rank != 0) await_put();
  MPI_Put(t->src, count, MPI_FLOAT, to, 0, count, MPI_FLOAT, window.win);
  MPI_Win_flush(to, window.win);
  MPI_Put(&window.nr, 1, MPI_LONG, to, window.flag, 1, MPI_LONG, window.win);
  MPI_Win_flush(to, window.win);
  if (t->rank == 0) await_put();
}

static void call(void *arg) {
  task *t = (task *)arg;
  const void *src = !t->in_place ? t->src : t->op == ALLREDUCE || t->rank == 0 ? MPI_IN_PLACE : t->dst;
  int count = (int)t->count, part = (int)t->part;
  switch (t->op) {
  case ALLREDUCE: MPI_Allreduce(src, t->dst, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
  case REDUCE:
    MPI_Reduce(src, t->rank == 0 ? t->dst : NULL, count, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
    break;
  case REDUCE_SCATTER: MPI_Reduce_scatter_block(t->src, t->dst, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
  case ALLGATHER: MPI_Allgather(t->src, part, MPI_FLOAT, t->dst, part, MPI_FLOAT, MPI_COMM_WORLD); break;
  case ALLTOALL: MPI_Alltoall(t->src, part, MPI_FLOAT, t->dst, part, MPI_FLOAT, MPI_COMM_WORLD); break;
  case BROADCAST: MPI_Bcast(t->dst, count, MPI_FLOAT, 0, MPI_COMM_WORLD); break;
  case PUT: put(t); break;
  case BARRIER: MPI_Barrier(MPI_COMM_WORLD); break;
  default: break;
  }
}

static double slowest(void *arg, double x) {
  (void)arg;
  MPI_Allreduce(MPI_IN_PLACE, &x, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return x;
}

static void barrier(void *arg) {
  (void)arg;
  MPI_Barrier(MPI_COMM_WORLD);
}

static void maxima(void *arg, double *x, size_t n) {
  (void)arg;
  MPI_Allreduce(MPI_IN_PLACE, x, (int)n, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
}

static void write_one(void *arg, long nr) { write_input((task *)arg, nr); }

static long read_one(void *arg, long nr) { return wrong((task *)arg, ((task *)arg)->dst, nr); }

static void give_up(int sig) {
  (void)sig;
  _exit(0);
}

int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  settings s = parse(argc, argv);
  int rank, n;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &n);
  for (int i = 0; i < s.nsizes; i++) {
    task t = prepare(&s, s.sizes[i], rank, n);
    subject b = {call, slowest, write_one, read_one, barrier, maxima, &t};
    if (s.op == PUT) make_window(&t);
    single_copies = 0;
    call(&t);
    long bad = (long)slowest(&t, (double)wrong(&t, t.dst, 0));
    quiet(&t);
    timing r = measure(&b, &s);
    bad += (long)slowest(&t, (double)r.wrong);
    r.single_copies = (long)slowest(&t, (double)single_copies);
    if (s.op == PUT) r.usec /= n;
    if (rank == 0) report(&s, op_names[s.op], "default", t.in_place, n, t.count * sizeof(float), r, bad);
    if (s.op == PUT) free_window(&t);
    finish(&t);
  }
  /* MPICH over UCX's tcp now and then hangs here, for good. Everything has been measured and
     printed by now. */
  signal(SIGALRM, give_up);
  alarm(3);
  MPI_Finalize();
  return 0;
}
