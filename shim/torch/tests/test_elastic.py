"""Groups go on when ranks die, and take replacements in."""

import ast
import contextlib
import copy
import inspect
import os
import re
import signal
import statistics
import subprocess
import unittest
import unittest.mock

import harness
import launched
import measure_kill
import torch
import tutti_torch

SHRINK = ("--on-failure", "shrink")

INIT = """
dist.init_process_group("tutti", init_method="tutti://")
rank, size = dist.get_rank(), dist.get_world_size()
"""

# Rank DIES is lost, and what the operations do without it.
HOLE = (
    INIT
    + """
lost = int(os.environ["DIES"])
dist.barrier()
loses(lost)
x = torch.ones(3)
work = dist.all_reduce(x, async_op=True)
left = [r for r in range(size) if r != lost]
if outlives(lost, work.wait):
    assert tutti_torch.failed_ranks(work) == [lost]
else:
    assert tutti_torch.failed_ranks(work) == [] and x.tolist() == [2.0] * 3, x
tutti_torch.recover()  # as the next operation would
assert tutti_torch.active_ranks() == left, tutti_torch.active_ranks()
assert dist.get_world_size() == size

x = torch.full((3,), rank + 1.0)
dist.all_reduce(x)
assert x.tolist() == [sum(r + 1 for r in left)] * 3
dist.all_reduce(mean := torch.full((3,), float(rank)), dist.ReduceOp.AVG)
assert mean.tolist() == [sum(left) / len(left)] * 3, mean

own = torch.full((2,), rank, dtype=torch.int16)
want = [[r, r] if r != lost else [-7, -7] for r in range(size)]  # the empty slot is as it was
def empty(*shape):
    return torch.full(shape, -7, dtype=torch.int16)
dist.all_gather_into_tensor(out := empty(size, 2), own)
assert out.tolist() == want
dist.all_gather_into_tensor(wide := empty(2, 2 * size).t().contiguous().t()[:, ::2].t(), own)  # not contiguous
assert wide.tolist() == want, wide
outs = [empty(2) for _ in range(size)]
dist.all_gather(outs, own)
assert [o.tolist() for o in outs] == want
outs = [empty(2) for _ in range(size)]
dist.gather(own, outs if rank == left[0] else None, dst=left[0])
assert rank != left[0] or [o.tolist() for o in outs] == want
dist.all_to_all_single(out := empty(size, 2), own.repeat(size, 1))
assert out.tolist() == want
outs = [empty(2) for _ in range(size)]
dist.all_to_all(outs, [own] * size)
assert [o.tolist() for o in outs] == want
dist.all_to_all_single(out := empty(size, 2), own.repeat(size, 1), [1] * size, [1] * size)
assert out.tolist() == want
dist.reduce_scatter_tensor(part := torch.zeros(2), torch.arange(2.0 * size))
assert part.tolist() == [(2 * rank + i) * len(left) for i in range(2)]
dist.scatter(part, [torch.full((2,), float(r)) for r in range(size)] if rank == left[0] else None, src=left[0])
assert part.tolist() == [rank, rank]
dist.broadcast(x := torch.full((1,), rank), left[-1])
assert x.item() == left[-1]
raises(dist.DistBackendError, "the root is not active", dist.broadcast, x, lost)
net = torch.nn.Linear(1, 1, bias=False)
ddp = torch.nn.parallel.DistributedDataParallel(net, init_sync=False, find_unused_parameters=True)
ddp.register_comm_hook(None, tutti_torch.ddp_hook)
ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
assert net.weight.grad.item() == sum(r + 1 for r in left) / len(left), net.weight.grad  # of the active ranks
from datetime import timedelta
store = dist.distributed_c10d._get_default_store()
if rank == left[0]:
    raises(dist.DistBackendError, f"rank {left[1]}", dist.group.WORLD.monitored_barrier, timedelta(milliseconds=200))
    store.set("late", "")
else:
    store.wait(["late"])
tutti_torch.recover()
dist.group.WORLD.monitored_barrier()
sparse = torch.sparse_coo_tensor([[rank]], [1.0], (size,))
dist.all_reduce(sparse)
assert sparse.to_dense().tolist() == [float(r in left) for r in range(size)]
dist.barrier()
print("through")
dist.destroy_process_group()
"""
)

# Two losses one after the other; each is replaced, with the others' state.
REPLACED = (
    INIT
    + """
life = int(os.environ.get("TUTTI_RESTART", "0"))
done = torch.zeros(1, dtype=torch.long)
if not restarted:
    dist.distributed_c10d._world.group_count += 10_000  # as if they had made many groups
if restarted:
    assert tutti_torch.active_ranks() == [0, 1, 2]
    dist.broadcast(done, src=1 if rank == 0 else 0)
pid = os.getpid()
for lost in (0, 2):
    if done > (0 if lost == 0 else 1) or (rank == lost and restarted):
        continue
    dist.barrier()
    loses(lost)
    outlives(lost, dist.barrier)
    while tutti_torch.admit() == 0:
        pass
    done += 1
    dist.broadcast(done, src=1 if lost == 0 else 0)
    assert os.getpid() == pid
dist.all_reduce(total := torch.ones(1))
assert total.item() == 3
assert done.item() == 2, done
dist.all_reduce(total, group=dist.new_group([0, 1, 2]))  # c10d counts groups
assert total.item() == 9
pair = dist.new_group([0, 1], use_local_synchronization=True) if rank < 2 else None
dist.all_reduce(total, group=pair) if pair else None
assert total.item() == (18 if pair else 9)
print("rank", rank, "ends", tutti_torch.active_ranks())
dist.destroy_process_group()
"""
)

# A replacement comes in within an operation, and admit finds none that waits.
CAME_IN = (
    INIT
    + """
if not restarted:
    dist.barrier()
    loses(1)
    outlives(1, dist.barrier)
total = torch.zeros(1)
while total.item() != 3:
    dist.all_reduce(total := torch.ones(1))
assert tutti_torch.admit() == 0
dist.all_reduce(total, group=dist.new_group([0, 1, 2]))
assert total.item() == 9
print("through")
dist.destroy_process_group()
"""
)

AGREED = (
    INIT
    + """
dist.barrier()
assert tutti_torch.agree(True) is True
assert tutti_torch.agree(rank != 1) is False
if rank == 2:
    die()
assert tutti_torch.agree(True) in (True, False)  # while rank 2 dies
assert tutti_torch.agree(True) is True
print("agreed")
dist.destroy_process_group()
"""
)

RETRY = (
    INIT
    + """
dist.barrier()
source = torch.full((1000,), rank + 1.0)
out = torch.zeros(size, 1000)
loses(1)
dist.all_gather_into_tensor(out, source)  # runs again without rank 1: there is no error
assert out[:, 0].tolist()[0::2] == [1.0, 3.0], out[:, 0]
print("retried")
dist.destroy_process_group()
"""
)

SUBGROUP = (
    INIT
    + """
from datetime import timedelta
lost = int(os.environ["DIES"])
left = [r for r in range(size) if r != lost]
pair = dist.new_group(left)
trio = dist.new_group([0, 1, 2])
trio.monitored_barrier()
dist.barrier()
loses(lost)
outlives(lost, dist.all_reduce, torch.ones(1), group=trio)
dist.all_reduce(x := torch.ones(1), group=trio)
assert x.item() == 2 and tutti_torch.active_ranks(trio) == left
trio.monitored_barrier(timedelta(seconds=60))
dist.all_reduce(x := torch.ones(1), group=pair)
assert x.item() == 2 and tutti_torch.active_ranks(pair) == [0, 1]  # ranks of the group
print("subgroups go on")
dist.destroy_process_group()
"""
)

STORE = """
store = tutti_torch._load().JobStore()
from datetime import timedelta
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert not store.check(["nothing"])
raises(dist.DistStoreError, "timeout", store.wait, ["nothing"], timedelta(milliseconds=50))
for _ in range(50):
    store.add("count", 1)
store.add("ready", 1)
while store.add("ready", 0) < size:
    pass
assert store.get("count") == str(50 * size).encode()
if rank == 0:
    store.set("empty", "")
    assert store.compare_set("cas", "", "a") == b"a"
    assert store.compare_set("cas", "b", "c") == b"a"
    assert store.compare_set("cas", "a", "d") == b"d"
    assert store.compare_set("none", "b", "c") == b"b"
    assert store.delete_key("cas") and not store.delete_key("cas")
    store.set("go", bytes(range(256)))
assert store.get("go") == bytes(range(256))
assert store.get("empty") == b""
long = "k" * 300
store.set(f"{long}{rank}", str(rank))
store.wait([f"{long}{r}" for r in range(size)])
assert [store.get(f"{long}{r}") for r in range(size)] == [str(r).encode() for r in range(size)]
raises(dist.DistStoreError, "too long", store.set, "long", "x" * 70000)
print("stored")
"""

# Groups that were destroyed have left nothing in the job's store.
FORGETS = """
class Seen(dist.Store):  # keeps the names of keys
    def __init__(self):
        super().__init__()
        self.inner, self.keys = tutti_torch._load().JobStore(), set()

    def see(self, method, key, *arguments):
        self.keys.add(key)
        return getattr(self.inner, method)(key, *arguments)

    def set(self, key, value): self.see("set", key, value)
    def get(self, key): return self.see("get", key)
    def add(self, key, amount): return self.see("add", key, amount)
    def compare_set(self, *arguments): return self.see("compare_set", *arguments)
    def delete_key(self, key): return self.see("delete_key", key)
    deleteKey = delete_key  # the name that C++ looks for
    def check(self, keys): return self.inner.check(keys)
    def wait(self, keys, *timeout): self.inner.wait(keys, *timeout)

store, rank, size = Seen(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("tutti", store=store, rank=rank, world_size=size)
for _ in range(3):
    group = dist.new_group()
    dist.all_reduce(x := torch.ones(1), group=group)
    group.monitored_barrier()
    dist.destroy_process_group(group)
dist.destroy_process_group()
store.inner.add("ended", 1)
while store.inner.add("ended", 0) < size:
    time.sleep(0.01)
for name in ("/turn", "/turns/1", "/outcome", "/left", "/size", "/terms", f"/ranks/{rank}"):
    assert any(key.endswith(name) for key in store.keys), (name, store.keys)
left = [key for key in store.keys if store.inner.check([key])]
assert not left, left
print("forgotten")
"""

# The test ends the store after "opened".
AWAY = """
from datetime import timedelta
store = tutti_torch._load().JobStore(timeout=timedelta(seconds=90))
store.set("key", "value")
assert store.get("key") == b"value"
print("opened", flush=True)
sys.stdin.readline()

def handler(*_):
    raise KeyboardInterrupt

def soon_interrupted(request):  # on a busy machine perhaps before it makes the request
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    request()

signal.signal(signal.SIGALRM, handler)
begin = time.monotonic()
for request in (lambda: store.set("key", "x"), lambda: store.get("key"), lambda: store.check(["key"]),
                lambda: store.add("count", 1)):
    raises(KeyboardInterrupt, "", soon_interrupted, request)
assert time.monotonic() - begin < 60, "a request has waited for the store"
store.set_timeout(timedelta(seconds=2))
raises(dist.DistStoreError, "no answer in 2000 ms", store.set, "key", "x")
raises(dist.DistStoreError, "wait timeout after 2000 ms", store.get, "key")
"""


# The group's own on_failure, and not that of the environment.
REPORTS = """
options = tutti_torch.Options()
options.on_failure = "report"
dist.init_process_group("tutti", init_method="tutti://", pg_options=options)
dist.barrier()
loses(1)
for _ in range(2):  # until recover
    raises(dist.DistBackendError, "rank 1", dist.all_reduce, torch.ones(1))
tutti_torch.recover()
dist.all_reduce(x := torch.ones(1))
assert x.item() == 2, x
print("reported")
"""

# A job in a site's etcd, without a launcher: the test starts the replacement.
SITE = (
    INIT
    + """
restarted = "LATE" in os.environ
step = torch.zeros(1, dtype=torch.long)
if restarted:
    assert tutti_torch.active_ranks() == [0, 1, 2]
else:
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == 3
    step += 1
    loses(0)
    outlives(0, dist.barrier)
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == 2, x  # the same processes go on
    while tutti_torch.admit() == 0:
        pass
dist.broadcast(step, src=1)
dist.all_reduce(x := torch.ones(1))
print(rank, step.item(), x.item(), tutti_torch.active_ranks())
dist.destroy_process_group()
"""
)


HAS_INIT_SYNC = "init_sync" in inspect.signature(torch.nn.parallel.DistributedDataParallel.__init__).parameters
needs_init_sync = unittest.skipUnless(HAS_INIT_SYNC, "DDP of this version of torch has no init_sync")


EXAMPLE = os.path.join(launched.ROOT, "examples", "torch_elastic.py")

# The example, whose ranks also print the loss that they begin with, before it is that of all.
WATCHED = f"""
import runpy
all_reduce, seen = dist.all_reduce, []

def watch(tensor, *arguments, **keywords):
    if tensor.shape == (2,) and not seen and not restarted:
        seen.append(tensor)
        print(f"rank {{dist.get_rank()}} has a loss of {{tensor[0]:.9f}}", flush=True)
    return all_reduce(tensor, *arguments, **keywords)

dist.all_reduce = watch
runpy.run_path({EXAMPLE!r}, run_name="__main__")
"""


class Life:
    """A rank that runs the catch_up of the example, and what that uses of torch.distributed.

    It has made step steps; steps has those of all ranks. The root, which is made with None, notes in sent
    what it broadcasts. Other ranks get what is in sent, and then the root is lost.
    """

    def __init__(self, step, steps, sent):
        self.steps, self.place, self.root = torch.tensor(steps), 0, sent is None
        self.sent = [] if self.root else sent
        torch.manual_seed(0)
        self.net = torch.nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        for _ in range(step):
            self.optimizer.zero_grad()
            self.net(torch.ones(2)).sum().backward()
            self.optimizer.step()
        self.step = torch.tensor([step])
        with open(EXAMPLE) as f:
            [function] = [part for part in ast.parse(f.read()).body if getattr(part, "name", "") == "catch_up"]
        scope = {"torch": torch, "dist": self, "size": len(steps)}
        scope |= {"net": self.net, "optimizer": self.optimizer, "step": self.step}
        exec(compile(ast.Module([function], []), EXAMPLE, "exec"), scope)
        self.catch_up = scope["catch_up"]

    def state(self):
        return repr((self.step, self.net.state_dict(), self.optimizer.state_dict()))

    def all_gather_into_tensor(self, output, _):
        output.copy_(self.steps)

    def broadcast(self, tensor, _):
        if self.root:
            self.sent.append(tensor.clone())
        elif self.place < len(self.sent):
            tensor.copy_(self.sent[self.place])
            self.place += 1
        else:
            tensor.fill_(-7)  # a part of it may have come
            raise ConnectionError("the root is lost")

    def broadcast_object_list(self, objects, _):
        if self.root:
            self.sent.append(copy.deepcopy(objects))
        elif self.place < len(self.sent):
            objects[:] = copy.deepcopy(self.sent[self.place])
            self.place += 1
        else:
            raise ConnectionError("the root is lost")


class Elastic(unittest.TestCase):
    @needs_init_sync
    def test_operations_leave_empty_slots_as_they_were(self):
        for lost in (0, 1):  # rank 0 too: it hosts no store
            with self.subTest(lost=lost):
                out, _ = launched.run(3, SHRINK, HOLE, environment={"DIES": str(lost)})
                self.assertEqual(out.count("through"), 2)

    def test_lost_ranks_are_replaced_one_after_the_other(self):
        out, _ = launched.run(3, [*SHRINK, "--max-restarts", "1"], REPLACED)
        for rank in range(3):
            self.assertIn(f"rank {rank} ends [0, 1, 2]", out)

    def test_group_of_a_replacement_that_has_come_in_by_itself(self):
        out, _ = launched.run(3, [*SHRINK, "--auto-admit", "--max-restarts", "1"], CAME_IN)
        self.assertEqual(out.count("through"), 3)

    def test_rank_is_replaced_in_an_etcd_of_the_site(self):
        with launched.etcd() as address, contextlib.ExitStack() as ended:
            secret = subprocess.run([launched.TUTTI, "secret"], capture_output=True, text=True, check=True).stdout
            site = {"TUTTI_STORE": address, "TUTTI_JOB": "site", "TUTTI_SECRET": secret.strip()}
            site["TUTTI_ON_FAILURE"] = "shrink"

            def start(rank, **more):
                process = launched.alone(rank, 3, SITE, {**site, **more})
                ended.callback(process.communicate)
                ended.callback(process.kill)
                return process

            processes = [start(rank) for rank in range(3)]
            self.assertEqual(processes[0].wait(harness.LIMIT), -signal.SIGKILL)
            processes[0] = start(0, LATE="1")
            for rank, process in enumerate(processes):
                out, _ = process.communicate(timeout=harness.LIMIT)
                self.assertEqual((process.returncode, out), (0, f"{rank} 1 3.0 [0, 1, 2]\n"))

    def test_ranks_agree_while_one_dies(self):
        out, _ = launched.run(3, SHRINK, AGREED)
        self.assertEqual(out.count("agreed"), 2)

    def test_retry_hides_the_loss(self):
        out, _ = launched.run(3, ["--on-failure", "retry"], RETRY)
        self.assertEqual(out.count("retried"), 2)

    def test_report_wins_over_the_environment(self):
        out, _ = launched.run(3, SHRINK, REPORTS)
        self.assertEqual(out.count("reported"), 2)

    def test_subgroups_go_on(self):
        for lost in (1, 0):
            with self.subTest(lost=lost):
                out, _ = launched.run(3, SHRINK, SUBGROUP, environment={"DIES": str(lost)})
                self.assertEqual(out.count("subgroups go on"), 2)

    def test_store_of_the_job(self):
        out, _ = launched.run(3, [], STORE)
        self.assertEqual(out.count("stored"), 3)

    def test_groups_leave_nothing_in_the_store_of_the_job(self):
        out, _ = launched.run(2, [], FORGETS)
        self.assertEqual(out.count("forgotten"), 2)

    def test_requests_to_a_store_that_is_away_are_interrupted(self):
        with contextlib.ExitStack() as ended:
            with launched.etcd() as address:
                site = {"TUTTI_STORE": address, "TUTTI_JOB": "away", "TUTTI_SECRET": "x" * 64}
                process = launched.alone(0, 1, AWAY, site, stdin=subprocess.PIPE)
                ended.callback(process.communicate)
                ended.callback(process.kill)
                self.assertEqual(process.stdout.readline(), "opened\n")
            process.communicate("\n", timeout=harness.LIMIT)
            self.assertEqual(process.returncode, 0)

    @needs_init_sync
    def test_example(self):
        for lost in (1, 0):
            with self.subTest(lost=lost):
                out, err = launched.run(3, [*SHRINK, "--max-restarts", "1"], WATCHED, environment={"DIES": str(lost)})
                losses = dict(re.findall(r"rank (\d) has a loss of (.*)", out))
                self.assertEqual(len(set(losses.values())), 3, f"ranks have the same inputs: {losses}")
                # Ranks that notice the loss between two operations go on without an error.
                if "repeats step 20" in out:
                    self.assertIn("begins at step 20 with ranks " + str([r for r in range(3) if r != lost]), out)
                ends = re.findall(r"rank \d ends after step (\d+): loss ([0-9.]+), state (.*)", out)
                self.assertEqual(len(ends), 3, out)
                self.assertEqual(len({state for _, _, state in ends}), 1, "the replacement has another model")
                begins = [int(step) for step in re.findall(r"begins at step (\d+) with ranks \[0, 1, 2\]", out)]
                self.assertGreaterEqual(max(begins), 20, "the replacement began anew")
                self.assertLess(float(ends[0][1]), 0.01)

    def test_example_takes_over_a_whole_state_or_nothing(self):
        root = Life(5, [0, 5, 5], None)
        root.catch_up()
        self.assertGreater(len(root.sent), 0)
        for steps, made in ((5, "another rank"), (0, "a replacement")):
            for lives in range(len(root.sent) + 1):
                with self.subTest(f"{made}, and the root dies after {lives} of {len(root.sent)} broadcasts"):
                    other = Life(steps, [0, 5, 5], root.sent[:lives])
                    before = other.state()
                    if lives < len(root.sent):
                        self.assertRaises(ConnectionError, other.catch_up)
                        self.assertEqual(other.state(), before)
                    else:
                        other.catch_up()
                        self.assertEqual(other.state(), root.state())

    def test_kills_of_every_rank(self):
        with unittest.mock.patch.dict(os.environ, TUTTI_LEASE="20s"):
            times = measure_kill.measure(4, 1024)  # every rank once
        self.assertLess(statistics.median(times), 15000, "milliseconds: they waited for the end of a lease")

    def test_shrink_without_a_store_is_refused(self):
        harness.run(refused, 2)


def refused(rank, size, port):
    options = tutti_torch.Options()
    options.on_failure = "shrink"
    try:
        harness.init(rank, size, port, pg_options=options)
    except ValueError as e:
        assert "tutti run" in str(e), e
    else:
        raise AssertionError("a group over a c10d store cannot outlive ranks")


if __name__ == "__main__":
    unittest.main()
