"""Random calls with wrong arguments raise Python exceptions, and the group stays usable.

TUTTI_TEST_SEED gives the first seed, TUTTI_TEST_CALLS the number of calls.
"""

import os
import random
import signal
import subprocess
import sys
import unittest

import harness
import torch
import torch.distributed as dist

C10D = torch._C._distributed_c10d
SEED = int(os.environ.get("TUTTI_TEST_SEED", "1"))
CALLS = int(os.environ.get("TUTTI_TEST_CALLS", "400"))
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
    torch.quint8,
    torch.bits8,
]
OPERATIONS = [
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall_base",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
    "allocate_tensor",
    "split",
    "shrink",
    "new_window",
    "monitored_barrier",
]


class Maker:
    """Makes arguments, most of them wrong."""

    def __init__(self, seed, size):
        self.random = random.Random(seed)
        self.size = size

    def pick(self, *choices):
        return self.random.choice(choices)

    def number(self):
        return self.pick(
            0,
            1,
            -1,
            self.size - 1,
            self.size,
            7,
            2**31 - 1,
            -(2**31),
            2**31,
            2**63 - 1,
            -(2**63),
            2**64,
            None,
            "1",
            1.5,
        )

    def tensor(self):
        r = self.random
        kind = r.randrange(12)
        shape = [r.choice([0, 1, 2, 3, 6]) for _ in range(r.randrange(4))]
        dtype = r.choice(DTYPES[: -2 if kind else None])
        if kind == 0:
            return self.pick(None, 1.0, [1.0], "tensor", torch.device("cpu"))
        if kind == 1:
            return torch.zeros(4, 4).to_sparse()
        if kind == 2:
            return torch.empty(4, device="meta")
        if kind == 3:
            return torch.zeros(2, 3).t()[:, :1].expand(3, 4)
        if kind == 4:
            return torch.nn.Parameter(torch.ones(3))
        if kind == 5:
            return torch.zeros(4, 4).to_sparse_csr()
        if kind == 6:
            return torch.empty(0)
        if kind == 7:
            return torch.sparse_coo_tensor(torch.tensor([[0, 9]]), torch.ones(2), (10,))
        if dtype == torch.quint8:
            return torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)
        if dtype == torch.bits8:
            return torch.empty(3, dtype=torch.uint8).view(torch.bits8)
        x = torch.zeros(shape).to(dtype)
        return x.conj() if dtype == torch.complex64 else x

    def tensors(self):
        count = self.pick(0, 1, 1, 1, self.size, self.size + 1)
        same = self.tensor()
        return [same if self.pick(True, False) else self.tensor() for _ in range(count)]

    def lists(self):
        return [self.tensors() for _ in range(self.pick(0, 1, 1, self.size))]

    def splits(self):
        return [self.pick(0, 1, 2, 3, -1, 2**62, 2**63 - 1) for _ in range(self.pick(0, 1, self.size, self.size + 1))]

    def options(self, kind):
        options = kind()
        for name in ("rootRank", "rootTensor"):
            if hasattr(options, name) and self.pick(True, False):
                number = self.number()
                if isinstance(number, int) and abs(number) < 2**63:
                    setattr(options, name, number)
        if hasattr(options, "reduceOp") and self.pick(True, False):
            kinds = [dist.ReduceOp.BAND, dist.ReduceOp.AVG, dist.ReduceOp.SUM]
            options.reduceOp = self.pick(dist._make_nccl_premul_sum(2.0), *map(dist.ReduceOp, kinds))
        return options

    def arguments(self, name):
        if name == "split":
            return dist.HashStore(), [self.number() for _ in range(2)], None
        if name == "shrink":
            return [self.number() for _ in range(self.pick(0, 1, 3))], self.pick(0, 1, 2, -1)
        if name == "new_window":
            return (self.tensor(),)
        if name == "monitored_barrier":
            return (self.pick(None, -1, "x", 2**70),)
        if name == "allocate_tensor":
            return (self.number(),)
        if name in ("send", "recv"):
            return self.tensors(), self.number(), self.number()
        if name == "recv_anysource":
            return self.tensors(), self.number()
        if name in ("broadcast", "allreduce", "reduce", "allreduce_coalesced"):
            kind = {
                "broadcast": dist.BroadcastOptions,
                "reduce": dist.ReduceOptions,
                "allreduce": dist.AllreduceOptions,
                "allreduce_coalesced": dist.AllreduceCoalescedOptions,
            }[name]
            return self.tensors(), self.options(kind)
        if name in ("_allgather_base", "_reduce_scatter_base"):
            kind = C10D.AllgatherOptions if "gather" in name else dist.ReduceScatterOptions
            return self.tensor(), self.tensor(), self.options(kind)
        if name in ("alltoall", "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"):
            return self.tensors(), self.tensors()
        if name == "alltoall_base":
            return self.tensor(), self.tensor(), self.splits(), self.splits()
        if name in ("scatter", "reduce_scatter"):
            kind = dist.ScatterOptions if name == "scatter" else dist.ReduceScatterOptions
            return self.tensors(), self.lists(), self.options(kind)
        kind = dist.GatherOptions if name == "gather" else C10D.AllgatherOptions
        return self.lists(), self.tensors(), self.options(kind)


ALLOWED = (ValueError, RuntimeError, TypeError, NotImplementedError, IndexError, OverflowError)


def alone(seed, calls):
    """Calls the backend of a group of one rank, so that calls with right arguments end too."""
    from datetime import timedelta

    dist.init_process_group("tutti", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    group.set_timeout(timedelta(milliseconds=200))  # of calls that wait for what never comes
    backend = group._get_backend(torch.device("cpu"))
    raised = 0
    for i in range(calls):
        maker = Maker(seed + i, 1)
        name = maker.pick(*OPERATIONS)
        target = maker.pick(group, backend)
        if not hasattr(target, name):
            continue
        values = maker.arguments(name)
        print(f"seed {seed + i}: {name}", flush=True)
        try:
            work = getattr(target, name)(*values)
            if isinstance(work, dist.Work):
                work.wait()
        except ALLOWED as e:
            raised += 1
            assert str(e).strip(), f"seed {seed + i}: {name} says nothing"
            assert "INTERNAL ASSERT" not in str(e), f"seed {seed + i}: {name}: {e}"
        del values
        if i % 50 == 0:
            x = torch.full((5,), 3.0)
            dist.all_reduce(x)
            assert x[0] == 3
    assert raised > calls // 3, f"only {raised} of {calls} calls were refused"
    x = torch.full((5,), 3.0)
    dist.all_reduce(x)
    assert x[0] == 3
    dist.destroy_process_group()
    for i in range(calls // 10 if harness.has("shutdown") else 0):
        maker = Maker(seed + i, 1)
        name = maker.pick(*OPERATIONS)
        if name in ("split", "shrink") or not hasattr(backend, name):
            continue
        try:
            result = getattr(backend, name)(*maker.arguments(name))
        except ALLOWED:
            continue
        assert not isinstance(result, dist.Work), f"seed {seed + i}: {name} was accepted by a closed group"
    print("done", flush=True)


def together(rank, size, port, seed, calls):
    """Arguments that are wrong at every rank: nothing is sent. They may differ."""
    harness.init(rank, size, port)
    group = dist.group.WORLD
    x = torch.ones(4)
    wrong = [
        lambda m: group.broadcast([x, torch.ones(m.random.randrange(6))]),
        lambda m: group.allreduce([m.pick(torch.zeros(2, device="meta"), torch.zeros(3).to_sparse_csr())]),
        lambda m: group.reduce([x], m.options(dist.ReduceOptions), 1),
        lambda m: group.allgather([[x] * (size + 1)], [x]),
        lambda m: group._allgather_base(torch.ones(m.random.randrange(4 * size)), x),
        lambda m: group._reduce_scatter_base(x, torch.ones(m.random.randrange(4 * size))),
        lambda m: group.alltoall_base(x, x, [5] * size, m.splits()),
        lambda m: group.alltoall([x] * (size - 1), [x] * size),
        lambda m: group.send([x], m.pick(rank, -1, -2, size, 2**31 - 1), 0).wait(),
        lambda m: group.recv([x], m.pick(rank, -1, -2, size), 0).wait(),
        lambda m: group.send([x], (rank + 1) % size, m.pick(-1, -3)).wait(),
        lambda m: group.recv([x], (rank + 1) % size, m.pick(-1, -3)).wait(),
        lambda m: group.recv_anysource([x], m.pick(-1, -3)).wait(),
        lambda m: group.scatter([x], [[x] * (size + 1)]),
        lambda m: (
            group.gather([[x] * (size - 1)], [x], dist.GatherOptions()) if rank == 0 else group.gather([[x]], [x])
        ),
    ]
    for i in range(calls):
        maker = Maker(seed + 1000 * rank + i, size)
        call = maker.random.randrange(len(wrong))
        try:
            wrong[call](maker)
            raise AssertionError(f"wrong call {call} with seed {seed + 1000 * rank + i} was accepted")
        except ALLOWED:
            pass
        if i % 20 == 0:
            y = torch.full((3,), float(rank))
            dist.all_reduce(y)
            assert y[0] == sum(range(size)), y
    dist.barrier()
    dist.destroy_process_group()


EXIT = """
import sys, threading
sys.path.insert(0, {tests!r})
import harness, torch, torch.distributed as dist, tutti_torch
rank = int(sys.argv[1])
harness.init(rank, 2, {port})
x = torch.ones(1000)
dist.all_reduce(x)
if rank == 0:
    {way}
else:
    try:
        dist.all_reduce(x)
    except dist.DistBackendError as e:
        assert "rank 0" in str(e), e
        sys.exit(3)
"""

# Operations that do not synchronize, in several groups, are the last ones.
GROUPS = """
import sys
sys.path.insert(0, {tests!r})
import harness, torch, torch.distributed as dist, tutti_torch
rank = int(sys.argv[1])
harness.init(rank, 2, {port})
def alone():
    return tutti_torch.ProcessGroupTutti(dist.HashStore(), 0, 1, tutti_torch.Options())
groups, others = [], []
for i in range(6):
    others += [alone() for _ in range(3 * rank)]
    del others[:2]  # addresses in another order
    groups.append(dist.new_group([0, 1]))
for i, group in enumerate(groups):
    dist.broadcast(torch.ones(10), i % 2, group=group)
"""

# How an interpreter may end with operations under way, and its exit code.
WAYS = {
    "returns": ("works = [dist.irecv(x, 1), dist.isend(x, 1)]", 0),
    "drops its works": ("dist.irecv(torch.ones(5), 1); dist.isend(torch.ones(5), 1)", 0),
    "raises": ("work = dist.irecv(x, 1); raise KeyError('the program fails')", 1),
    "has callbacks": ("work = dist.irecv(x, 1); f = work.get_future().then(lambda f: print('called'))", 0),
    "drops a group in a callback": (
        "others = [tutti_torch.ProcessGroupTutti(dist.HashStore(), 0, 1, tutti_torch.Options())]; "
        "work = dist.irecv(x, 1); f = work.get_future().then(lambda f: others.clear())",
        0,
    ),
    "exits": ("work = dist.irecv(x, 1); sys.exit(5)", 5),
    "has a thread that waits": ("threading.Thread(target=lambda: dist.recv(x, 1), daemon=True).start()", 0),
    "has hooks": ("dist.group.WORLD._register_on_completion_hook(print); work = dist.irecv(x, 1)", 0),
}


class Arguments(unittest.TestCase):
    def test_wrong_arguments_raise(self):
        code = f"import sys; sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r}); "
        code += f"import test_arguments; test_arguments.alone({SEED}, {CALLS})"
        child = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=harness.LIMIT,
        )
        last = child.stdout.strip().splitlines()[-3:]
        if child.returncode < 0:
            self.fail(f"{signal.Signals(-child.returncode).name} after {last}:\n{child.stderr[-3000:]}")
        self.assertEqual(child.returncode, 0, f"{last}\n{child.stderr[-3000:]}")
        self.assertEqual(last[-1], "done")

    def test_wrong_arguments_leave_the_ranks_in_step(self):
        harness.run(together, 3, SEED, 120)

    def run_ranks(self, program, **names):
        """Runs a program as two ranks, and returns their exit codes and outputs."""
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        program = program.format(tests=os.path.dirname(os.path.abspath(__file__)), port=server.port, **names)
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for rank in range(2)
        ]
        try:
            texts = [rank.communicate(timeout=harness.LIMIT)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        del server
        return [rank.returncode for rank in ranks], texts

    def test_interpreter_ends_with_operations_under_way(self):
        for name, (way, code) in WAYS.items():
            with self.subTest(name):
                codes, texts = self.run_ranks(EXIT, way=way)
                self.assertEqual(codes, [code, 3], texts)

    def test_interpreter_ends_with_several_groups(self):
        codes, texts = self.run_ranks(GROUPS)
        self.assertEqual(codes, [0, 0], texts)
        for text in texts:
            self.assertNotIn("was closed before all ranks had come", text)


if __name__ == "__main__":
    unittest.main()
