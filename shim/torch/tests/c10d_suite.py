"""PyTorch's own tests of its backends, for tutti.

The installed torch has them in torch/testing/_internal/distributed/distributed_test.py. What they
say of gloo is read as tutti here, so that the cases which they reserve for gloo run too. Gloo itself
cannot make a group then, so that nothing is left to it. With TUTTI_SUITE=gloo the module has the
tests as they are.
"""

import datetime
import importlib.util
import os
import re
import sys
import types
import unittest.mock

BACKEND = os.environ.setdefault("TUTTI_SUITE", "tutti")
os.environ["BACKEND"] = BACKEND
os.environ.setdefault("WORLD_SIZE", "3")
os.environ.setdefault("INIT_METHOD", "env://")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("TEMP_DIR", "/tmp/tutti-c10d-suite")
os.makedirs(os.environ["TEMP_DIR"], exist_ok=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

torch.set_num_threads(1)

# Cases that cannot pass for a backend which is not torch's own, and why.
DIFFERENT = {
    "test_ddp_logging_data_cpu": "DDP's logging data call every backend that is not torch's own `custom`",
}

if BACKEND == "tutti":
    import tutti_torch  # noqa: F401

    gloo = dist.distributed_c10d.ProcessGroupGloo

    def _no_gloo(*arguments, **keywords):
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch checks by itself, over gloo, whether the ranks
        # agree before it calls the backend.
        if sys._getframe(1).f_code.co_name != "_create_process_group_wrapper":
            raise AssertionError("a group of gloo was made")
        return gloo(*arguments, **keywords)

    dist.distributed_c10d.ProcessGroupGloo = _no_gloo
    features = common_distributed.DistTestCases.backend_feature
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        features[feature] = features[feature] | {BACKEND}


def _cases():
    """Returns the module distributed_test with the backend's name for gloo's."""
    path = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test").origin
    with open(path) as f:
        source = f.read()
    if BACKEND != "gloo":
        source = re.sub(r"\bdist\.Backend\.GLOO\b|\"gloo\"", f'"{BACKEND}"', source)
    module = types.ModuleType("c10d_cases")
    module.__file__ = path
    sys.modules["c10d_cases"] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module


cases = _cases()

if os.environ.get("TUTTI_TORCH_CTYPES") == "1":
    # The profiler shows c10d's operations, and none of a backend in Python.
    for name in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        setattr(cases, name, [backend for backend in getattr(cases, name) if backend != BACKEND])


class Suite(cases.TestDistBackend, cases.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        # Forked ranks need not import torch again. They have the environment of the server that
        # forks them.
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["c10d_suite"])

        def process(target, name, args, kwargs):
            return context.Process(
                target=target, name=name, args=args, kwargs={**kwargs, "environment": {**os.environ}}
            )

        self._start_processes(process)

    def _barrier(self, *arguments, **keywords):
        # The processes meet by a file. torch's 10 seconds are short on a busy machine.
        super()._barrier(*arguments, **{"timeout": 60, **keywords})

    def test_barrier_timeout_full_group(self):
        # With torch's second the group must also form within it, which a busy machine may not do.
        timeout = datetime.timedelta(seconds=5)
        _, group, _ = self._init_full_group_test(timeout=timeout)
        self._test_barrier_timeout(group, timeout)

    def test_monitored_barrier_gloo(self):
        # Two barriers must succeed within torch's 2 seconds, which a busy machine may not do.
        with unittest.mock.patch.object(cases, "timedelta", lambda seconds: datetime.timedelta(seconds=5 * seconds)):
            super().test_monitored_barrier_gloo()

    @classmethod
    def _run(cls, rank, test_name, file_name, pipe, environment, **kwargs):
        os.environ.clear()
        os.environ.update(environment)
        super()._run(rank, test_name, file_name, pipe, **kwargs)
