/* Collectives of any MPI, measured as measure.h says. */
#include "measure.h"

#include <mpi.h>
#include <signal.h>

static void call(void *arg) {
  task *t = (task *)arg;
  const void *src = t->in_place && (t->op == ALLREDUCE || t->rank == 0) ? MPI_IN_PLACE : t->src;
  int count = (int)t->count, part = (int)t->part;
  switch (t->op) {
  case ALLREDUCE: MPI_Allreduce(src, t->dst, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
  case REDUCE:
    /* Ranks that are not the root send what prepare put into dst, if in place, else src: the same values. */
    MPI_Reduce(src, t->dst, count, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
    break;
  case REDUCE_SCATTER: MPI_Reduce_scatter_block(t->src, t->dst, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
  case ALLGATHER: MPI_Allgather(t->src, part, MPI_FLOAT, t->dst, part, MPI_FLOAT, MPI_COMM_WORLD); break;
  case ALLTOALL: MPI_Alltoall(t->src, part, MPI_FLOAT, t->dst, part, MPI_FLOAT, MPI_COMM_WORLD); break;
  case BROADCAST: MPI_Bcast(t->dst, count, MPI_FLOAT, 0, MPI_COMM_WORLD); break;
  default: break;
  }
}

static double slowest(void *arg, double x) {
  (void)arg;
  MPI_Allreduce(MPI_IN_PLACE, &x, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return x;
}

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
    subject b = {call, slowest, &t};
    call(&t);
    long bad = (long)slowest(&t, (double)wrong(&t, t.dst));
    quiet(&t);
    timing r = measure(&b, &s);
    if (rank == 0) report(op_names[s.op], "default", t.in_place, n, t.count * sizeof(float), r, bad);
    finish(&t);
  }
  /* MPICH over UCX's tcp now and then hangs here, for good. Everything has been measured and printed by now. */
  signal(SIGALRM, give_up);
  alarm(3);
  MPI_Finalize();
  return 0;
}
