// Gloo's collectives over its tcp transport, measured as measure.h says.
//
//   gloo OP SIZES IN_PLACE REPS BUDGET_US DEADLINE_S TOUCH TICK_US RANK RANKS STORE_DIRECTORY SPIN
//
// The driver starts one process for each rank; they meet in a directory. Where Gloo has several
// algorithms, each is a variant, and the fastest counts: for allreduce the ring (its default, what
// PyTorch runs), bcube and the older halving-doubling, the last with SPIN=1 also over connections
// that poll without an event thread ("sync"). reduce_scatter exists only in the older form, which
// works in place and leaves the result at the start.
#include "measure.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/alltoall.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/reduce.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/tcp/device.h>

using context = std::shared_ptr<gloo::rendezvous::Context>;
using function = std::function<void()>;

static context connect(int rank, int n, const char *dir, const char *name,
                       std::shared_ptr<gloo::transport::Device> device, bool sync) {
  gloo::rendezvous::FileStore files(dir);
  gloo::rendezvous::PrefixStore store(name, files);
  auto c = std::make_shared<gloo::rendezvous::Context>(rank, n);
  c->setTimeout(std::chrono::seconds(30));
  c->connectFullMesh(store, device);
  for (int i = 0; sync && i < n; i++)
    if (i != rank) c->getPair(i)->setSync(true, true);
  return c;
}

// An agreement between the ranks about the slowest, outside of what is measured.
struct agreement {
  context c;
  function run;
  task *t;
  float *out;
};

static void call(void *arg) { static_cast<agreement *>(arg)->run(); }

static void maxima(void *arg, double *x, size_t n) {
  gloo::AllreduceOptions o(static_cast<agreement *>(arg)->c);
  o.setOutput(x, n);
  o.setReduceFunction(static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::max<double>));
  o.setTag(1);
  gloo::allreduce(o);
}

static double slowest(void *arg, double x) {
  maxima(arg, &x, 1);
  return x;
}

static void barrier(void *arg) {
  gloo::BarrierOptions o(static_cast<agreement *>(arg)->c);
  o.setTag(2);
  gloo::barrier(o);
}

static void write_one(void *arg, long nr) { write_input(static_cast<agreement *>(arg)->t, nr); }

static long read_one(void *arg, long nr) {
  auto a = static_cast<agreement *>(arg);
  return wrong(a->t, a->out, nr);
}

static const auto sum = static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>);

// The ways in which Gloo can do t, each with the buffer in which its result appears.
struct way {
  std::string name;
  function run;
  float *out;
};

static std::vector<way> ways(task &t, const context &c, const context &spinning) {
  std::vector<way> w;
  auto halving = [&](const char *name, const context &on) {
    auto a = std::make_shared<gloo::AllreduceHalvingDoubling<float>>(on, std::vector<float *>{t.dst}, int(t.count));
    w.push_back({name, [a] { a->run(); }, t.dst});
  };
  switch (t.op) {
  case ALLREDUCE:
    for (auto algorithm : {gloo::AllreduceOptions::Algorithm::RING, gloo::AllreduceOptions::Algorithm::BCUBE}) {
      auto o = std::make_shared<gloo::AllreduceOptions>(c);
      o->setAlgorithm(algorithm);
      if (!t.in_place) o->setInput(t.src, t.count);
      o->setOutput(t.dst, t.count);
      o->setReduceFunction(sum);
      const char *name = algorithm == gloo::AllreduceOptions::Algorithm::RING ? "ring" : "bcube";
      w.push_back({name, [o] { gloo::allreduce(*o); }, t.dst});
    }
    if (t.in_place) {
      halving("halving-doubling", c);
      if (spinning) halving("halving-doubling-sync", spinning);
    }
    break;
  case REDUCE: {
    auto o = std::make_shared<gloo::ReduceOptions>(c);
    if (!t.in_place) o->setInput(t.src, t.count);
    o->setOutput(t.dst, t.count);
    o->setRoot(0);
    o->setReduceFunction(sum);
    w.push_back({"default", [o] { gloo::reduce(*o); }, t.dst});
    break;
  }
  case REDUCE_SCATTER: {
    auto add = [&](const char *name, const context &on) {
      auto a = std::make_shared<gloo::ReduceScatterHalvingDoubling<float>>(
          on, std::vector<float *>{t.src}, int(t.count), std::vector<int>(size_t(t.n), int(t.part)));
      w.push_back({name, [a] { a->run(); }, t.src});
    };
    add("halving-doubling", c);
    if (spinning) add("halving-doubling-sync", spinning);
    break;
  }
  case ALLGATHER: {
    auto o = std::make_shared<gloo::AllgatherOptions>(c);
    o->setInput(t.src, t.part);
    o->setOutput(t.dst, t.count);
    w.push_back({"default", [o] { gloo::allgather(*o); }, t.dst});
    break;
  }
  case ALLTOALL: {
    auto o = std::make_shared<gloo::AlltoallOptions>(c);
    o->setInput(t.src, t.count);
    o->setOutput(t.dst, t.count);
    w.push_back({"default", [o] { gloo::alltoall(*o); }, t.dst});
    break;
  }
  case BROADCAST: {
    auto o = std::make_shared<gloo::BroadcastOptions>(c);
    o->setOutput(t.dst, t.count);
    o->setRoot(0);
    w.push_back({"default", [o] { gloo::broadcast(*o); }, t.dst});
    break;
  }
  case BARRIER: {
    auto o = std::make_shared<gloo::BarrierOptions>(c);
    o->setTag(3);
    w.push_back({"default", [o] { gloo::barrier(*o); }, t.dst});
    break;
  }
  default: break;
  }
  return w;
}

int main(int argc, char **argv) {
  settings s = parse(argc, argv);
  if (argc < 13) {
    fprintf(stderr, "gloo: rank, ranks, directory and spin are missing\n");
    return 2;
  }
  int rank = atoi(argv[9]), n = atoi(argv[10]);
  auto device = gloo::transport::tcp::CreateDevice("127.0.0.1");
  context c = connect(rank, n, argv[11], "plain", device, false), spinning;
  if (atoi(argv[12])) spinning = connect(rank, n, argv[11], "sync", device, true);
  for (int i = 0; i < s.nsizes; i++) {
    // Algorithms of the older form take slots, and buffers, at construction: fresh ones for each
    // way.
    task probe = prepare(&s, s.sizes[i], rank, n);
    size_t kinds = ways(probe, c, spinning).size();
    finish(&probe);
    for (size_t k = 0; k < kinds; k++) {
      task t = prepare(&s, s.sizes[i], rank, n);
      {
        way w = ways(t, c, spinning)[k];
        agreement a{c, w.run, &t, w.out};
        subject b = {call, slowest, write_one, read_one, barrier, maxima, &a};
        w.run();
        long bad = long(slowest(&a, double(wrong(&t, w.out, 0))));
        quiet(&t);
        timing r = measure(&b, &s);
        bad += long(slowest(&a, double(r.wrong)));
        if (rank == 0) report(&s, op_names[s.op], w.name.c_str(), t.in_place, n, t.count * sizeof(float), r, bad);
        slowest(&a, 0);
      }
      finish(&t);
    }
  }
  return 0;
}
