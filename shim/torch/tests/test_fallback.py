"""Without the C++ module, over ctypes: the same.

`make test-torch FALLBACK=1` runs all tests without the module. A part of them runs here, and what is
particular to it.
"""

import ctypes
import os
import re
import subprocess
import sys
import unittest

import harness
import torch
import torch.distributed as dist
import tutti_torch
from test_failures import raises

HERE = os.path.dirname(os.path.abspath(__file__))
HEADER = os.path.join(HERE, "..", "..", "tutti.h")

PART = [
    "test_arguments.Arguments.test_wrong_arguments_raise",
    "test_arguments.Arguments.test_interpreter_ends_with_several_groups",
    "test_backend.Backend.test_batch_with_a_wrong_argument",
    "test_backend.Backend.test_call_that_has_begun_is_interrupted",
    "test_backend.Backend.test_callback_waits_for_another_future",
    "test_backend.Backend.test_group_with_details",
    "test_backend.Backend.test_groups_when_bound_to_a_device",
    "test_backend.Backend.test_hooks",
    "test_backend.Backend.test_operation_that_starts_is_not_over",
    "test_backend.Backend.test_options_of_the_default_group",
    "test_backend.Backend.test_put_of_views",
    "test_backend.Backend.test_put_without_a_thread",
    "test_backend.Backend.test_shrink",
    "test_backend.Backend.test_shutdown_while_resuming",
    "test_backend.Backend.test_split_and_merge",
    "test_backend.Backend.test_suspend_and_resume",
    "test_backend.Backend.test_timeouts",
    "test_backend.Backend.test_waits_for_signals_end_in_their_order",
    "test_backend.Backend.test_window_that_ends_while_an_operation_uses_it",
    "test_backend.Backend.test_windows",
    "test_backend.Backend.test_windows_are_interrupted",
    "test_backend.Backend.test_windows_are_interrupted_between_calls",
    "test_elastic.Elastic.test_requests_to_a_store_that_is_away_are_interrupted",
    "test_elastic.Elastic.test_store_of_the_job",
    "test_elastic.Elastic.test_subgroups_go_on",
    "test_failures.Failures.test_forked_child_leaves_the_works_of_its_parent_alone",
    "test_failures.Failures.test_handler_raises_after_a_recovery",
    "test_failures.Failures.test_interrupt_ends_a_wait",
    "test_failures.Failures.test_keys_of_monitored_barriers_do_not_stay",
    "test_failures.Failures.test_late_ranks_are_named",
    "test_failures.Failures.test_monitored_barriers_over_a_store_that_cannot_delete",
    "test_failures.Failures.test_monitored_barriers_overlap",
    "test_failures.Failures.test_recovery_before_an_error_is_noticed",
    "test_failures.Failures.test_wrong_arguments_raise_and_leave_the_group_usable",
    "test_fallback.Alone",
    "test_operations.Operations.test_lists_coalesced_messages_objects_and_sparse",
    "test_operations.Operations.test_reductions_of_all_types",
    "test_operations.Operations.test_uneven_lists",
    "test_programs.Programs.test_distributed_data_parallel",
    "test_programs.Programs.test_hooks_that_wait",
    "test_reconfigure.Reconfigure.test_after_an_interrupt",
    "test_reconfigure.Reconfigure.test_group_that_ends_while_its_member_is_made",
    "test_reconfigure.Reconfigure.test_group_without_members",
    "test_reconfigure.Reconfigure.test_groups_with_the_same_uuid",
    "test_reconfigure.Reconfigure.test_shrink_in_one_of_the_groups_before",
    "test_reconfigure.Reconfigure.test_timeout_that_was_set_before",
]


def python_has_backends():
    """Reports whether the backends of this torch can be written in Python."""
    return harness.has("new_window")


def mixed(rank, size, port):
    """Ranks with the module and a rank without it make a group."""
    if rank == 1:
        os.environ["TUTTI_TORCH_CTYPES"] = "1"
    harness.init(rank, size, port)
    assert tutti_torch._load().__name__.endswith("_ctypes") == (rank == 1)
    group = dist.group.WORLD
    dist.all_reduce(x := torch.ones(5))
    assert x[0] == size
    dist.all_reduce_coalesced(xs := [torch.ones(3), torch.ones(300_000)])
    assert xs[0][0] == xs[1][0] == size
    dist.all_reduce(sparse := torch.sparse_coo_tensor([[rank]], [1.0], (size,)))
    assert sparse.to_dense().tolist() == [1.0] * size
    group.monitored_barrier()
    window = group.new_window(torch.zeros(size))
    window.signal((rank + 1) % size, False)
    window.wait_signal((rank - 1) % size, False)
    window.tensor_deregister()
    dist.all_reduce(x, group=dist.new_group([0, 1])) if rank < 2 else dist.new_group([0, 1])
    if rank < 2:
        smaller = group._get_backend(torch.device("cpu")).shrink([2], 0, None)
        smaller.barrier(dist.BarrierOptions()).wait()
    dist.barrier()
    dist.destroy_process_group()


@unittest.skipUnless(python_has_backends(), "this torch has no backends in Python")
@unittest.skipIf(harness.FALLBACK, "all tests run without the module")
class Fallback(unittest.TestCase):
    def test_part_of_the_tests(self):
        done = subprocess.run(
            [sys.executable, "-m", "unittest", "-v", *PART],
            cwd=HERE,
            env={**os.environ, "TUTTI_TORCH_CTYPES": "1"},
            capture_output=True,
            text=True,
            timeout=8 * harness.LIMIT,
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("works over ctypes, which is slower", done.stderr)

    def test_ranks_with_and_without_the_module(self):
        harness.run(mixed, 3)

    def test_names_are_those_of_the_module(self):
        from tutti_torch import _ctypes

        module = tutti_torch._load()
        self.assertTrue(module.__name__.split(".")[-1].startswith("_glue_"), "the module itself is not in use")
        public = lambda of: {name for name in dir(of) if not name.startswith("_")}  # noqa: E731
        self.assertLessEqual(public(module), public(_ctypes))
        for name in ("Options", "ProcessGroupTutti", "JobStore"):
            self.assertEqual(public(getattr(module, name)) - public(getattr(_ctypes, name)), set())
        for name in public(module.Options):
            if not callable(getattr(module.Options, name)):
                self.assertEqual(getattr(_ctypes.Options(), name), getattr(module.Options(), name), name)


def limits(rank, size, port):
    """What torch does not let a backend in Python do raises errors, which say so."""
    harness.init(rank, size, port)
    assert tutti_torch._load().__name__ == "tutti_torch._ctypes"
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    raises(RuntimeError, "torch lets no backend in Python", lambda: backend.mem_allocator)
    assert not dist.group.WORLD.supports_completion_hooks
    store = harness.store(port)
    store.set(f"handle/{rank}", dist._get_reconfigure_handle())
    handles = [store.get(f"handle/{r}").decode() for r in range(size)]
    for wrong in (handles[::-1], [handles[rank]]):
        raises(dist.DistBackendError, "must keep its rank", dist._reconfigure, 1, wrong)
    dist._reconfigure(1, handles)
    work = dist.all_reduce(x := torch.ones(1), async_op=True)
    assert work.get_future().wait()[0].item() == x.item() == size
    # A future of Python has the text of an error, not its type.
    work = dist.all_reduce(torch.ones(1 + rank), async_op=True)
    raises(RuntimeError, f"{size} elements", work.get_future().wait)
    raises(dist.DistBackendError, f"{size} elements", work.wait)
    dist.destroy_process_group()


def unharmed(rank, size, port):
    """Works of other backends stay torch's own."""
    harness.init(rank, size, port)
    gloo = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1))
    work = dist.all_reduce(x := torch.ones(1), group=gloo, async_op=True)
    work.wait()
    assert x.item() == size and work.is_completed() and type(work) is not type(dist.barrier(async_op=True))
    assert not gloo.supports_window and not gloo.supports_abort_hooks
    dist.barrier()
    dist.destroy_process_group()


def releases(rank, size, port):
    """Works, and the memory of their tensors, go without the collector of cycles."""
    import gc
    import weakref

    harness.init(rank, size, port)
    gc.collect()
    gc.disable()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for fails in (False, True):
        x = torch.ones(1000 + (rank if fails else 0))
        work = dist.all_reduce(x, async_op=True) if fails else backend.allreduce([x])
        gone = [weakref.ref(work), weakref.ref(x)]
        try:
            work.wait()
        except dist.DistBackendError:
            assert fails
        del work, x
        assert [ref() for ref in gone] == [None, None], f"kept after {'a failure' if fails else 'a success'}: {gone}"
    dist.destroy_process_group()


@unittest.skipUnless(harness.FALLBACK, "runs without the module: see test_part_of_the_tests")
class Alone(unittest.TestCase):
    def test_limits_are_errors(self):
        harness.run(limits, 2)

    def test_other_backends_are_as_they_were(self):
        harness.run(unharmed, 2)

    def test_works_and_tensors_are_released(self):
        harness.run(releases, 2)


@unittest.skipUnless(python_has_backends(), "this torch has no backends in Python")
class Header(unittest.TestCase):
    """What api.py says of tutti.h is true."""

    def setUp(self):
        from tutti_torch._ctypes import api

        self.api = api
        with open(HEADER) as f:
            self.text = re.sub(r"/\*.*?\*/", "", f.read(), flags=re.S)

    def test_numbers(self):
        numbers = dict(re.findall(r"\bTUTTI_(\w+) = (-?\d+)", self.text))
        numbers |= dict(re.findall(r"#define TUTTI_(\w+) \(?(-?\d+)\)?$", self.text, re.M))
        mine = {name: value for name, value in vars(self.api).items() if name.isupper() and isinstance(value, int)}
        self.assertGreater(len(mine), 50)
        self.assertEqual(mine, {name: int(numbers[name]) for name in mine})

    def test_structures(self):
        api = self.api
        names = {
            "error_info": api.ErrorInfo,
            "kv_call": api.KVCall,
            "kv": api.KV,
            "config": api.Config,
            "buffer": api.Buffer,
            "op": api.Op,
            "status": api.Status,
        }
        sizes = {"int32_t": 4, "uint32_t": 4, "int64_t": 8, "uint64_t": 8, "tutti_buffer": ctypes.sizeof(api.Buffer)}
        for name, structure in names.items():
            body = re.search(rf"typedef struct tutti_{name} {{(.*?)}} tutti_{name};", self.text, re.S).group(1)
            fields = []
            for declaration in filter(None, map(str.strip, body.split(";"))):
                field = r"(.*?)\(?\*?(\w+)(?:\)\(.*\)|\[(\w+)\])?$"
                kind, field, count = re.match(field, declaration, re.S).groups()
                pointer = "*" in declaration
                length = api.MAX_LISTED if count else 1
                fields.append((field, 8 if pointer else length * sizes[kind.strip()]))
            mine = [(field, ctypes.sizeof(kind)) for field, kind in structure._fields_]
            self.assertEqual(mine, fields, name)

    def test_functions(self):
        prototypes = dict(re.findall(r"TUTTI_API [^;{]*?\b(tutti_\w+)\((.*?)\);", self.text, re.S))
        for name, types in self.api.FUNCTIONS.items():
            flat = re.sub(r"\([^()]*\)", "", prototypes[name])  # the arguments of arguments
            self.assertEqual(len(types), flat.count(",") + 1, name)


if __name__ == "__main__":
    unittest.main()
