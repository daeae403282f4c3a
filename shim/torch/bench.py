"""Measures Tutti beside Gloo from Python, in one run.

    python bench.py [--ranks 2 4] [--sizes 64 1M] [--ops all_reduce] [--rounds 7] [--json FILE]
    python bench.py --floor             64 bytes, calls back to back, beside torch's fake backend
    python bench.py --ddp               training steps of a small transformer under DDP

Each process holds a group of each backend. The backends take turns in every round. Every rank
writes the input, other numbers than for the call before, and reads the result after the call,
outside of all ranks' clocks: a barrier is before each call and behind it. The time of a call is
that of the slowest rank's median, counted from that rank's own beginning, also where ranks share
processors; a row has the median of the rounds. Sizes are those of the largest buffer of a rank.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  registers "fake"
import tutti_torch  # noqa: F401

BACKENDS = ["tutti", "gloo"]
OPS = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"]
SIZES = [64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
BUDGET = 0.03  # seconds of one round
FLOOR_BUDGET = 0.1
PLOTTED = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Call:
    """One operation on one size."""

    def __init__(self, op, size, dtype, ranks, rank):
        whole = max(size // dtype.itemsize, ranks)
        whole -= whole % ranks
        self.op, self.ranks, self.rank = op, ranks, rank
        self.writes = 0
        part = whole // ranks
        self.source = torch.empty(part if op == "all_gather_into_tensor" else whole, dtype=dtype)
        self.result = self.source
        if op != "all_reduce":
            self.result = torch.empty(part if op == "reduce_scatter_tensor" else whole, dtype=dtype)

    def write(self):
        """Writes the input, which differs from the one before, so that the last result is wrong now."""
        self.writes += 1
        self.source.fill_(self.rank + 1 + self.writes % 5)

    def run(self, group):
        if self.op == "all_reduce":
            dist.all_reduce(self.result, group=group)
        else:
            getattr(dist, self.op)(self.result, self.source, group=group)

    def check(self):
        """Reads the whole result."""
        parts = torch.arange(1, self.ranks + 1).view(-1, 1) + self.writes % 5
        if self.op in ("all_reduce", "reduce_scatter_tensor"):
            right = bool((self.result == parts.sum()).all())
        else:
            right = bool((self.result.view(self.ranks, -1) == parts).all())
        if not right:
            raise SystemExit(f"{self.op}: wrong result: {self.result}")


def slowest(values, control):
    times = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX, group=control)
    return times.tolist()


def touched(call, group, control, calls):
    """Returns the median time of calls in microseconds."""
    times = []
    for _ in range(calls):
        call.write()
        dist.barrier(group=control)
        begin = time.perf_counter_ns()
        call.run(group)
        times.append((time.perf_counter_ns() - begin) / 1e3)
        dist.barrier(group=control)
        call.check()
    return statistics.median(times)


def tight(call, group, calls, yields=False):
    """Returns the time of one of calls back to back in microseconds. With yields, each leaves the processor."""
    call.write()
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call.run(group)
        if yields:
            os.sched_yield()
    return (time.perf_counter_ns() - begin) / 1e3 / calls


def collectives(rank, ranks, options, groups, control):
    rows = []
    for op in options.ops:
        for dtype in (torch.float32, torch.bfloat16):
            if dtype is torch.bfloat16 and op not in ("all_reduce", "reduce_scatter_tensor"):
                continue  # bytes are bytes
            for size in options.sizes:
                call = Call(op, size, dtype, ranks, rank)
                calls = {}
                for name in BACKENDS:
                    (once,) = slowest([touched(call, groups[name], control, 3)], control)
                    calls[name] = max(3, min(300, int(BUDGET * 1e6 / once)))
                rounds = {name: [] for name in BACKENDS}
                for _ in range(options.rounds):
                    for name in BACKENDS:
                        rounds[name] += slowest([touched(call, groups[name], control, calls[name])], control)
                median = {name: statistics.median(times) for name, times in rounds.items()}
                name = str(dtype).removeprefix("torch.")
                row = {"op": PLOTTED.get(op, op), "dtype": name, "ranks": ranks, "bytes": size, "median_us": median}
                rows.append({"transport": "pytorch", **row})
                if rank == 0:
                    gloo, tutti = median["gloo"], median["tutti"]
                    print(f"{op:24} {name:9} {ranks} {size:9} {gloo:10.1f} {tutti:10.1f} {gloo / tutti:6.2f}")
                    sys.stdout.flush()
    return rows


def floor(rank, ranks, options, groups, control):
    """Compares 64 bytes with a backend that does nothing, and with one that does nothing but let a
    rank with the same processor run, as every backend has to that waits for one."""
    fake = dist.new_group(backend="fake")
    groups = {**groups, "fake": fake, "fake, yields": fake}
    call = Call("all_reduce", 64, torch.float32, ranks, rank)
    times = {name: [] for name in groups}
    for _ in range(options.rounds):
        for name, group in groups.items():
            # The processors need some milliseconds after the round of a backend that sleeps.
            yields = name == "fake, yields"
            calls = max(10, int(FLOOR_BUDGET * 1e6 / slowest([tight(call, group, 100, yields)], control)[0]))
            tight(call, group, calls // 2, yields)
            dist.barrier(group=control)
            times[name] += slowest([tight(call, group, calls, yields)], control)
    if rank == 0:
        for name in groups:
            median = statistics.median(times[name])
            print(f"all_reduce, 64 bytes, {ranks} ranks, back to back: {name:12} {median:8.2f} us", flush=True)
    return []


def ddp(rank, ranks, options, groups, control):
    """Trains a small transformer, a copy with each backend."""
    from torch import nn

    steps, width, words = 8, 192, 512
    models = {}
    for name in BACKENDS:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.0)
        encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        model = nn.Sequential(nn.Embedding(words, width), encoder, nn.Linear(width, words))
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=groups[name])
        models[name] = wrapped, torch.optim.SGD(wrapped.parameters(), 0.01)
    torch.manual_seed(rank)
    text = torch.randint(words, (4, 33))
    times = {name: [] for name in BACKENDS}
    for turn in range(options.rounds + 1):
        for name, (model, optimizer) in models.items():
            dist.barrier(group=control)
            begin = time.perf_counter_ns()
            for _ in range(steps):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:])
                loss.backward()
                optimizer.step()
            spent = slowest([(time.perf_counter_ns() - begin) / 1e6 / steps], control)
            if turn > 0:
                times[name] += spent
    if rank == 0:
        million = sum(p.numel() for p in models["gloo"][0].parameters()) / 1e6
        gloo, tutti = (statistics.median(times[name]) for name in ("gloo", "tutti"))
        print(f"DDP, {ranks} ranks, {million:.1f} M parameters, a step: ", end="")
        print(f"gloo {gloo:.1f} ms, tutti {tutti:.1f} ms, ratio {gloo / tutti:.2f}", flush=True)
    return []


def one_rank(rank, ranks, port, options, rows):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    groups = {"gloo": dist.group.WORLD, "tutti": dist.new_group(backend="tutti")}
    measure = floor if options.floor else ddp if options.ddp else collectives
    measured = measure(rank, ranks, options, groups, groups["tutti"])
    if rank == 0:
        rows.put(measured)
    dist.barrier(group=groups["tutti"])
    dist.destroy_process_group()


def save(path, rows):
    """Writes rows to a file, if there are any: --floor and --ddp have none, and leave those of another run."""
    if not rows:
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w") as f:
        json.dump({"machine": f"torch {torch.__version__}, {os.cpu_count()} cores", "rows": rows}, f, indent=1)


def size(text):
    unit = {"K": 10, "M": 20}.get(text[-1:].upper(), 0)
    return int(text[:-1] if unit else text) << unit


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=size, nargs="+", default=SIZES)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file for the rows, which tests/plots draws")
    parser.add_argument("--floor", action="store_true", help="compare 64 bytes with a backend that does nothing")
    parser.add_argument("--ddp", action="store_true", help="measure training steps instead")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    measured = []
    if not options.floor and not options.ddp:
        print(f"{'':24} {'':9} {'':1} {'bytes':>9} {'gloo us':>10} {'tutti us':>10} {'ratio':>6}")
    for ranks in options.ranks:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        rows = context.Queue()
        processes = [
            context.Process(target=one_rank, args=(rank, ranks, server.port, options, rows)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes) and rows.empty():
            time.sleep(0.05)
        if not rows.empty():
            measured += rows.get()
        for process in processes:
            process.join()
            if process.exitcode != 0:
                sys.exit(f"a rank ended with {process.exitcode}")
    if options.json:
        save(options.json, measured)


if __name__ == "__main__":
    main()
