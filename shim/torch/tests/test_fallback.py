"""Without the C++ module, over ctypes: the same operations."""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

import harness
import torch

PROGRAM = """
import sys, warnings
sys.path.insert(0, {package!r})
sys.path.insert(1, {tests!r})
import harness
import test_fallback

if __name__ == "__main__":
    harness.run(test_fallback.{function}, 3)
"""


def operations(rank, size, port):
    import test_operations

    import tutti_torch

    test_operations.compare(rank, size, port)
    assert not hasattr(tutti_torch._implementation(), "Options"), "there is a C++ module"


def reductions(rank, size, port):
    import torch.distributed as dist
    from test_operations import BITS, FLOAT8, FLOATS, INTEGERS, OPS, same, values

    harness.init(rank, size, port)
    for dtype in [*INTEGERS, *FLOATS, *FLOAT8, torch.bool, torch.complex64]:
        sums = torch.stack([values((7,), torch.float32, r).to(dtype).to(torch.float32) for r in range(size)]).sum(0)
        x = values((7,), dtype, rank)
        dist.all_reduce(x)
        same(x, sums.to(dtype), f"all_reduce of {dtype}")
        if dtype.is_complex:
            continue
        for op in [*OPS, *(BITS if not dtype.is_floating_point else [])]:
            dist.reduce(values((7,), dtype, rank), 1, op)
    dist.destroy_process_group()


def works(rank, size, port):
    """Futures, coalesced operations, messages from any rank, objects, errors, and a training."""
    from datetime import timedelta

    import torch.distributed as dist
    import tutti_torch
    from test_failures import raises
    from test_operations import same
    from test_programs import data_parallel

    data_parallel(rank, size, port)
    harness.init(rank, size, port, timeout=timedelta(seconds=20))
    assert tutti_torch.active_ranks() == list(range(size))
    work = dist.all_reduce(torch.ones(3), async_op=True)
    same(work.get_future().wait()[0], torch.full((3,), float(size)), "future")
    work.wait()
    with dist._coalescing_manager(async_ops=True) as manager:
        a, b = torch.ones(3), torch.full((5,), 2.0)
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    same(b, torch.full((5,), 2.0 * size), "coalesced")
    if rank == 0:
        received = torch.zeros(2)
        for _ in range(1, size):
            x = torch.zeros(2)
            dist.irecv(x, tag=9).wait()
            received += x
        assert torch.all(received == sum(range(size))), received
    else:
        dist.send(torch.full((2,), float(rank)), 0, tag=9)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == list(range(size)), objects
    out = torch.zeros(size)
    dist.all_to_all_single(out, torch.full((size,), float(rank)), [1] * size, [1] * size)
    same(out, torch.arange(float(size)), "all_to_all_single")
    raises(ValueError, "cannot use", dist.all_reduce, torch.ones(3), dist.ReduceOp.BAND)
    raises(ValueError, "the root is 7", dist.group.WORLD.broadcast, torch.ones(3), 7)
    text = raises(dist.DistBackendError, "", dist.all_reduce, torch.ones(3 if rank == 0 else 5))
    assert "3 elements" in text and "5 elements" in text, text
    dist.destroy_process_group()


@unittest.skipUnless(harness.has("new_window"), "this torch has no backends in Python")
class Fallback(unittest.TestCase):
    def run_without_module(self, function):
        tests = os.path.dirname(os.path.abspath(__file__))
        source = os.path.join(tests, "..", "tutti_torch")
        with tempfile.TemporaryDirectory() as directory:
            package = os.path.join(directory, "tutti_torch")
            os.mkdir(package)
            for path in glob.glob(os.path.join(source, "*.py")):
                shutil.copy(path, package)
            program = os.path.join(directory, "program.py")
            with open(program, "w") as f:
                f.write(PROGRAM.format(package=directory, tests=tests, function=function))
            library = os.environ.get("TUTTI_LIBRARY") or os.path.join(tests, "..", "..", "..", "bin", "libtutti.so")
            environment = {**os.environ, "TUTTI_LIBRARY": library, "PYTHONPATH": directory}
            done = subprocess.run(
                [sys.executable, program], env=environment, capture_output=True, text=True, timeout=2 * harness.LIMIT
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertIn("works over ctypes, which is slower", done.stderr)
            self.assertIn("python -m tutti_torch.build", done.stderr)

    def test_operations(self):
        self.run_without_module("operations")

    def test_reductions(self):
        self.run_without_module("reductions")

    def test_works_messages_and_training(self):
        self.run_without_module("works")


if __name__ == "__main__":
    unittest.main()
