"""tutti run as the launcher of PyTorch programs, and what tutti status and flight records say of them."""

import glob
import os
import tempfile
import unittest

import launched

STATUS = """
import json, subprocess
def status(*flags):
    done = subprocess.run([os.environ["TUTTI"], "status", *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 3), done
    return done.stdout
def snapshots():
    # Those of ranks that have left, or that do not answer, are missing.
    return {r["rank"]: r["snapshot"] for r in json.loads(status("--json"))["ranks"] if "snapshot" in r}
"""

ENVIRONMENT = """
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert os.environ["LOCAL_RANK"] == os.environ["RANK"] and os.environ["LOCAL_WORLD_SIZE"] == "2"
for backend in ("tutti", "gloo", "tutti", "tutti"):  # one after the other, in one store
    dist.init_process_group(backend)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == size
    pair = dist.new_group([0, 1])
    dist.all_reduce(x, group=pair)
    assert x.item() == 2 * size
    dist.monitored_barrier() if backend == "gloo" else dist.group.WORLD.monitored_barrier()
    dist.destroy_process_group()
print("launched")
"""

STUCK = (
    STATUS
    + """
dist.init_process_group("tutti")
rank = dist.get_rank()
dist.barrier()
if rank == 1:
    end = time.monotonic() + 60
    while True:
        seen = snapshots().get(0)
        running = seen and seen["groups"][0].get("running")
        wanted = running and running["kind"] == "allreduce" and "waits_for" in running
        if wanted or time.monotonic() > end:
            break
    assert wanted and running["bytes"] == 4000 and running["waits_for"] == [1], running
    text = status()
    assert "allreduce" in text and "rank" in text, text
dist.all_reduce(torch.ones(1000))
dist.barrier()
print("seen")
dist.destroy_process_group()
"""
)

# Rank 1 waits in a further group for rank 2, which is late, and rank 0 for both.
ELSEWHERE = (
    STATUS
    + """
dist.init_process_group("tutti")
rank = dist.get_rank()
pair = dist.new_group([1, 2])
if rank == 2:
    end, text = time.monotonic() + 60, ""
    while text.count("! rank 2 has not entered allreduce") != text.count("! ") or " of job torch-" not in text:
        assert time.monotonic() < end, text
        text = status()
if rank != 0:
    dist.all_reduce(torch.ones(3), group=pair)
dist.all_reduce(torch.ones(3))
print("seen")
dist.destroy_process_group()
"""
)

LATE = """
from datetime import timedelta
dist.init_process_group("tutti")
rank = dist.get_rank()
dist.barrier()
store = dist.distributed_c10d._get_default_store()
store.set(f"through {rank}", "")
store.wait([f"through {r}" for r in range(3)])  # the timeout would fail a rank that is still in the barrier
if rank != 2:
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=5)
    late = lambda: dist.group.WORLD.allreduce([torch.ones(5)], options).wait()
    text = raises(dist.DistBackendError, "timed out", late)
    assert "rank 2" in text, text
    store.add("late", 1)
else:
    while store.add("late", 0) < 2:
        time.sleep(0.01)
    try:
        dist.all_reduce(torch.ones(5))
    except dist.DistBackendError:
        pass
tutti_torch.recover()
dist.all_reduce(x := torch.ones(5))
assert x[0] == 3
print("recovered")
dist.destroy_process_group()
"""

EMPTY = (
    STATUS
    + """
dist.init_process_group("tutti")
rank, n = dist.get_rank(), 1 << 20

def sent():
    dist.barrier()
    end = time.monotonic() + 60
    while len(ranks := snapshots()) < 2:
        assert time.monotonic() < end, ranks
    dist.barrier()  # no rank leaves while the other looks
    return sum(link["bytes_sent"] for seen in ranks.values() for link in seen["links"])

def through_links(tensor):
    tensor.fill_(rank + 1)
    begin = sent()
    dist.all_reduce(tensor)
    assert tensor.eq(3).all()
    return sent() - begin

own = tutti_torch.empty(n)
assert own.shape == (n,) and own.dtype == torch.float32
copied, direct = through_links(torch.empty(n)), through_links(own)
assert copied >= 4 * n, copied
assert direct < 4096, f"{direct} bytes of {4 * n} went through the links"
backend = dist.group.WORLD._get_backend(torch.device("cpu"))
if hasattr(backend, "supports_tensor_alloc"):  # not in all versions of torch
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    assert not backend.supports_tensor_alloc(torch.device("cuda", 0))
other = backend.allocate_tensor(n, dtype=torch.float32, device=torch.device("cpu"))
assert through_links(other) < 4096
print("no copies")
dist.destroy_process_group()
own.fill_(1)  # it stays memory
"""
)


class Launcher(unittest.TestCase):
    def test_programs_find_what_torchrun_sets(self):
        out, _ = launched.run(2, [], ENVIRONMENT)
        self.assertEqual(out.count("launched"), 2)

    def test_status_names_the_rank_that_others_wait_for(self):
        out, _ = launched.run(2, [], STUCK, environment={"TUTTI": launched.TUTTI})
        self.assertEqual(out.count("seen"), 2)

    def test_status_names_the_rank_that_is_waited_for_in_a_further_group(self):
        out, _ = launched.run(3, [], ELSEWHERE, environment={"TUTTI": launched.TUTTI})
        self.assertEqual(out.count("seen"), 3, out)

    def test_flight_records_and_recovery_after_a_timeout(self):
        with tempfile.TemporaryDirectory() as logs:
            out, _ = launched.run(3, ["--log-dir", logs], LATE)
            self.assertEqual(out.count("recovered"), 3)
            records = glob.glob(os.path.join(logs, "flight-rank[01]-*.json"))
            self.assertEqual(len({os.path.basename(r).split("-")[1] for r in records}), 2, os.listdir(logs))
            for record in records:
                with open(record) as f:
                    text = f.read()
                self.assertIn('"allreduce"', text)
                self.assertIn("timed out", text)

    def test_memory_of_the_library_is_not_copied(self):
        out, _ = launched.run(2, [], EMPTY, environment={"TUTTI": launched.TUTTI})
        self.assertEqual(out.count("no copies"), 2)


if __name__ == "__main__":
    unittest.main()
