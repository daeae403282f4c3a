"""A process that has a group keeps what Python has installed, and what it had before the group."""

import ctypes
import faulthandler
import os
import signal
import tempfile
import threading
import time
import unittest
from datetime import timedelta

import harness
import torch
import torch.distributed as dist

# 1000 make the measurement of docs/pytorch.md.
CYCLES = int(os.environ.get("TUTTI_TEST_CYCLES", "200"))


def killed():
    os.kill(os.getpid(), signal.SIGSEGV)


def reads_nothing():
    ctypes.string_at(0)


def crash(rank, size, port, path, early, how):
    """Crashes while a group lives; faulthandler was enabled before or after its making."""
    with open(path, "w") as report:
        if early:
            faulthandler.enable(report)
        harness.init(rank, size, port)
        dist.all_reduce(x := torch.ones(4))
        assert x[0] == size
        if not early:
            faulthandler.enable(report)
        how()


def footprint():
    """Returns the resident memory, the threads and the descriptors of this process."""
    with open("/proc/self/statm") as f:
        pages = int(f.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def cycles(rank, size, port, directory, n):
    """Makes and destroys a group n times, and returns the footprint after each fifth of the cycles.

    The stores are files: some connections to a TCPStore take seconds where no resolver answers.
    """
    seen = []
    for i in range(n):
        store = dist.FileStore(os.path.join(directory, str(i)), size)
        dist.init_process_group("tutti", store=store, rank=rank, world_size=size)
        dist.all_reduce(x := torch.ones(4))
        assert x[0] == size
        dist.destroy_process_group()
        if (i + 1) % (n // 5) == 0:
            seen.append(footprint())
    for _ in range(1000):  # a thread may be closing descriptors yet
        if seen[-1][2] <= seen[0][2]:
            break
        time.sleep(0.01)
        seen[-1] = footprint()
    return seen


class PythonStore(dist.Store):
    """A store of which each method runs Python, and the next one only after it."""

    def __init__(self, port):
        super().__init__()
        self.inner, self.busy, self.threads = harness.store(port), threading.Lock(), set()

    def ask(self, method, *arguments):
        self.threads.add(threading.get_ident())
        with self.busy:
            return getattr(self.inner, method)(*arguments)

    def set(self, key, value):
        self.ask("set", key, value)

    def get(self, key):
        self.wait([key])
        return self.ask("get", key)

    def compare_set(self, key, expected, desired):
        return self.ask("compare_set", key, expected, desired)

    def add(self, key, amount):
        return self.ask("add", key, amount)

    def check(self, keys):
        return self.ask("check", keys)

    def delete_key(self, key):
        return self.ask("delete_key", key)

    deleteKey = delete_key  # noqa: N815  the name that C++ looks for

    def wait(self, keys, timeout=timedelta(seconds=60)):
        end = time.monotonic() + timeout.total_seconds()
        while not self.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"timeout waiting for {keys}")


def over_python(rank, size, port):
    """Makes groups over a store in Python, while another thread of Python computes."""
    over = threading.Event()

    def compute():
        while not over.is_set():
            sum(range(1000))

    computing = threading.Thread(target=compute)
    computing.start()
    try:
        store = PythonStore(port)
        dist.init_process_group("tutti", store=store, rank=rank, world_size=size)
        assert len(store.threads) > 1, "the library has not asked the store"
        dist.all_reduce(x := torch.ones(4))
        assert x[0] == size
        pair = dist.new_group(list(range(size)))
        dist.all_reduce(x, group=pair)
        assert x[0] == size * size
        pair.monitored_barrier()
        # A wait releases the GIL: the thread that the other rank's operation depends on runs.
        work = dist.all_reduce(x, async_op=True) if rank == 0 else None
        later = threading.Thread(target=lambda: dist.all_reduce(x))
        if rank == 0:
            work.wait()
        else:
            later.start()
            later.join()
        assert x[0] == size * size * size
        dist.destroy_process_group()
    finally:
        over.set()
        computing.join()


class Guest(unittest.TestCase):
    def test_store_in_python(self):
        harness.run(over_python, 2)

    def test_faulthandler_reports_a_crash(self):
        with tempfile.TemporaryDirectory() as directory:
            for early in (True, False):
                for how in (killed, reads_nothing):
                    with self.subTest(early=early, how=how.__name__):
                        path = os.path.join(directory, f"{early}-{how.__name__}")
                        server, processes, _ = harness.start(crash, 1, path, early, how)
                        processes[0].join(harness.LIMIT)
                        processes[0].kill()
                        self.assertEqual(processes[0].exitcode, -signal.SIGSEGV)
                        with open(path) as f:
                            report = f.read()
                        self.assertIn("Fatal Python error: Segmentation fault", report)
                        self.assertIn(f"in {how.__name__}\n", report)
                        self.assertIn("in crash\n", report)
                        del server

    def test_groups_that_end_leave_nothing_behind(self):
        with tempfile.TemporaryDirectory() as directory:
            footprints = harness.run(cycles, 2, directory, CYCLES)
        for rank, seen in enumerate(footprints):
            memory, threads, descriptors = zip(*seen, strict=True)
            with self.subTest(rank=rank, memory=memory, threads=threads, descriptors=descriptors):
                # Go keeps the threads that it starts while others block, more on a busy machine.
                self.assertLess(threads[-1], threads[0] + CYCLES // 2)
                self.assertLessEqual(descriptors[-1], descriptors[0])
                self.assertLess(memory[-1], memory[0] + (8 << 20))


if __name__ == "__main__":
    unittest.main()
