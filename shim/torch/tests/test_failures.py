"""What goes wrong is a Python exception that says what, and never a crash or a hang."""

import ctypes
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import unittest

import harness
import torch
import torch.distributed as dist
import tutti_torch
from test_guest import PythonStore


def raises(kind, text, function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except kind as e:
        assert text in str(e), f"{e!r} lacks {text!r}"
        return str(e)
    raise AssertionError(f"{function} did not raise {kind}")


def arguments(rank, size, port):
    """Wrong arguments at every rank: nothing is sent, and the group stays usable."""
    harness.init(rank, size, port)
    group = dist.group.WORLD
    x = torch.ones(4)
    raises(ValueError, "BAND", dist.all_reduce, x, dist.ReduceOp.BAND)
    raises(ValueError, "AVG", dist.all_reduce, x.bool(), dist.ReduceOp.AVG)
    half, turn = dist._make_nccl_premul_sum(0.5), dist._make_nccl_premul_sum(torch.tensor(1j))
    for wrong, factor in ((x.int(), half), (x.to(torch.uint16), half), (x.bool(), half), (x, turn)):
        raises(ValueError, "PREMUL_SUM multiplies", dist.all_reduce, wrong, factor)
        assert torch.equal(wrong.float(), x), wrong
    raises(ValueError, "single tensor", group.allreduce, [x, x])
    raises(ValueError, "the root is 7", group.broadcast, x, 7)
    raises(ValueError, "the root is -1", group.reduce, x, -1)
    raises(ValueError, "invalid tensor size", group.allgather, [[torch.ones(5) for _ in range(size)]], [x])
    raises(ValueError, "invalid tensor type", group.allgather, [[x.int() for _ in range(size)]], [x])
    raises(ValueError, f"each of the {size} ranks", group.allgather, [[x]], [x])
    raises(ValueError, f"each of the {size} ranks", group.reduce_scatter, [x], [[x]])
    raises(ValueError, "expected", group._allgather_base, torch.ones(4 * size + 1), x)
    raises(ValueError, "expected", group._reduce_scatter_base, x, torch.ones(3))
    raises(ValueError, "splits", group.alltoall_base, x, x, [1], [1])
    raises(ValueError, "dim 0", group.alltoall_base, x, x, [1] * size, [2] * size)
    once = torch.ones(1).expand(4)  # its elements share memory
    raises(ValueError, "share memory", dist.all_reduce, once)
    raises(ValueError, "share memory", dist.all_reduce_coalesced, [x, once])
    raises(ValueError, "share memory", dist.all_gather, [once] * size, x)
    raises(ValueError, "share memory", dist.recv, once, (rank + 1) % size)
    for elements in (2**61, 2**61 + 1):  # their bytes do not fit into 64 bits
        raises(ValueError, "fit in memory", tutti_torch.empty, elements, dtype=torch.float64)
    raises(ValueError, "itself", lambda: group.send([x], rank, 0).wait())
    raises(ValueError, f"the rank is {size + 3}, expected 0 to {size - 1}", group.send, [x], size + 3, 0)
    raises(ValueError, f"the rank is -1, expected 0 to {size - 1}", dist.recv, x, -1)  # not any rank
    raises(ValueError, "the tag is -1", dist.recv, x, (rank + 1) % size, None, -1)  # not any tag
    raises(ValueError, "the tag is -1", dist.recv, x, None, None, -1)
    if rank == 0:
        raises(ValueError, "empty input on non-root", group.scatter, x, [x] * size, 1)
    dist.all_reduce(x)
    assert x[0] == size
    dist.destroy_process_group()
    raises(ValueError, "", dist.all_reduce, x)
    if harness.has("shutdown"):
        raises(RuntimeError, "shut down", group.allreduce, [x])


def refused(rank, size, port):
    """An operation that does not start writes nothing to its outputs, and counts as no success."""
    harness.init(rank, size, port)
    group, ended = dist.group.WORLD, []
    group._register_on_completion_hook(ended.append)
    library = ctypes.CDLL(tutti_torch._library())
    library.tutti_close.argtypes = [ctypes.c_uint64]
    library.tutti_close(1 << 60 | 1 << 32)  # the handle of the first group of this process: no other one is valid
    wide = torch.full((4, 2), 7.0)  # its columns are not contiguous, and so gathered in other memory
    raises(ValueError, "no group", group.allgather, [[wide[:, 0]]], [torch.ones(4)])
    assert torch.all(wide == 7), wide
    assert not ended, ended
    dist.destroy_process_group()


def in_child(group, size, called, works):
    """Calls of a group of the parent, and of its works under way. It does not return."""
    try:
        signal.alarm(30)  # ends a child that hangs
        backend = group._get_backend(torch.device("cpu"))
        calls = [getattr(backend, name) for name in ("get_error", "memory_stats", "suspend") if harness.has(name)]
        calls += [group._wait_for_pending_works, tutti_torch.recover, *(work.wait for work in works)]
        calls += [works[0].is_completed, works[0].get_future, lambda: tutti_torch.failed_ranks(works[0])]
        for call in [*calls, group.abort] if harness.has("abort") else calls:
            raises(RuntimeError, "fork", call)
        wide, x = torch.full((4, size), 7.0), torch.ones(4)
        outputs = list(wide.unbind(1))
        raises(RuntimeError, "fork", dist.all_gather, outputs, x, async_op=True)
        assert torch.all(wide == 7), wide
        assert not called, called
        raises(RuntimeError, "fork", dist.all_reduce, x)
        raises(RuntimeError, "fork", group.monitored_barrier)
        dist.destroy_process_group()  # has no effect on the parent's
        assert not called, called
        os._exit(0)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(1)


def forked(rank, size, port):
    """Operations of a forked child raise, and leave the works of the parent alone."""
    harness.init(rank, size, port)
    group, called = dist.group.WORLD, []
    dist.barrier()
    if rank == 0:
        works = [dist.irecv(torch.ones(4), 1)]
        future = works[0].get_future().then(lambda _: called.append("future"))
        if harness.has("new_window"):
            window = group.new_window(torch.zeros(1))
            works.append(window.wait_signal(1, True))
        if harness.has("register_abort_hook"):
            group.register_abort_hook(1, lambda: called.append("hook"))
        child = os.fork()
        if child == 0:
            in_child(group, size, called, works)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not called, called
        dist.barrier()
        future.wait()
        assert called == ["future"], called
        for work in works:
            work.wait()
    else:
        window = group.new_window(torch.zeros(1)) if harness.has("new_window") else None
        dist.barrier()
        dist.send(torch.ones(4), 0)
        if window is not None:
            window.signal(0, False)
    dist.destroy_process_group()


def idle():
    """Reports whether no other thread of this process runs, or could."""
    for task in os.listdir("/proc/self/task"):
        if int(task) == threading.get_native_id():
            continue
        try:
            with open(f"/proc/self/task/{task}/stat") as f:
                state = f.read().rpartition(")")[2].split()[0]
        except OSError:  # it has ended
            continue
        if state == "R":
            return False
    return True


def raise_late(rank, port, call):
    """Makes a call at ranks 0 and 1. At rank 0 a signal handler raises while it waits, but only when it
    has succeeded at both. Returns what rank 1 gets.

    Nothing says when it has at rank 0. So much time passes there in which the process has nothing to do, and
    the store answers.
    """
    peer = harness.store(port)
    if rank == 1:
        peer.wait(["go"])
        result = call()
        peer.set("done", "")
        return result

    def handler(*_):
        peer.set("go", "")
        peer.wait(["done"])
        moments = 0
        while moments < 200:
            time.sleep(0.01)
            peer.add("moments", 1)
            moments += idle()
        raise KeyError("late")

    harness.handle_later(handler)
    raises(KeyError, "late", call)
    return None


def agrees_late(rank, size, port):
    harness.init(rank, size, port)
    raise_late(rank, port, lambda: tutti_torch.agree(True))
    dist.all_reduce(x := torch.ones(4))
    assert x[0] == size
    dist.destroy_process_group()


def recovers_late(rank, size, port):
    """A group that has recovered has no error any more."""
    harness.init(rank, size, port)
    raises(dist.DistBackendError, "elements", dist.all_reduce, torch.ones(3 + rank))
    raise_late(rank, port, tutti_torch.recover)
    if harness.has("get_error"):
        error = dist.group.WORLD._get_backend(torch.device("cpu")).get_error()
        assert error == torch._C._distributed_c10d.ErrorType.SUCCESS, error
    dist.all_reduce(x := torch.ones(4))
    assert x[0] == size
    dist.destroy_process_group()


def recovers_unnoticed(rank, size, port):
    """The error of an operation before a recovery, which the program learns after it, is none of the group."""
    harness.init(rank, size, port)
    if rank == 0:
        first, second = (dist.all_reduce(torch.ones(3), async_op=True) for _ in range(2))
        harness.meet(port, "rank 0 has started", size)
        while not second.is_completed():  # then the first is over too
            time.sleep(0.001)
    else:
        harness.meet(port, "rank 0 has started", size)
        raises(dist.DistBackendError, "3 elements", dist.all_reduce, torch.ones(4))
    tutti_torch.recover()
    if rank == 0:
        raises(dist.DistBackendError, "4 elements", first.wait)
    error = dist.group.WORLD._get_backend(torch.device("cpu")).get_error()
    assert error == torch._C._distributed_c10d.ErrorType.SUCCESS, error
    dist.all_reduce(x := torch.ones(4))
    assert x[0] == size
    dist.destroy_process_group()


def handler_calls(rank, size, port):
    """A signal handler makes a call that waits, in another one. That one still ends when a handler raises."""
    harness.init(rank, size, port)
    group = dist.new_group(range(size))
    if rank == 0:

        def second(*_):
            raise KeyError("second")

        def first(*_):
            assert tutti_torch.agree(True, group)
            harness.handle_later(second)

        harness.handle_later(first)
        raises(KeyError, "second", tutti_torch.agree, True)
    else:
        tutti_torch.agree(True, group)
    harness.meet(port, "over", size)
    dist.destroy_process_group()


def joins_late(rank, size, port):
    part = dist.PrefixStore("late", harness.store(port))
    group = raise_late(rank, port, lambda: tutti_torch.ProcessGroupTutti(part, rank, size, tutti_torch.Options()))
    if rank == 1:  # the other has closed its group
        raises(dist.DistBackendError, "rank 0", lambda: group.allreduce([torch.ones(4)]).wait())
    harness.meet(port, "over", size)


def mismatch(rank, size, port):
    """Different operations: all ranks get an error that describes both calls."""
    harness.init(rank, size, port)
    if rank == 0:
        text = raises(dist.DistBackendError, "", dist.all_reduce, torch.ones(3))
    else:
        text = raises(dist.DistBackendError, "", dist.all_reduce, torch.ones(5))
    assert "3 elements" in text and "5 elements" in text, text
    dist.destroy_process_group()


def late(rank, size, port):
    """A rank that does not come is named, and so it is by monitored_barrier, after which all go on."""
    from datetime import timedelta

    harness.init(rank, size, port)
    if rank == 0:
        raises(
            dist.DistBackendError,
            "Rank 1 failed to pass monitoredBarrier in 200 ms",
            dist.group.WORLD.monitored_barrier,
            timedelta(milliseconds=200),
        )
        raises(
            dist.DistBackendError,
            "Ranks 1, 2 failed to pass",
            dist.group.WORLD.monitored_barrier,
            timedelta(milliseconds=200),
            True,
        )
        dist.barrier()
        harness.store(port).wait(["rank 1 has come", "rank 2 is through"])
        options = dist.BarrierOptions()
        options.timeout = timedelta(seconds=5)
        text = raises(dist.DistBackendError, "timed out", lambda: dist.group.WORLD.barrier(options).wait())
        assert "waiting for rank 2" in text and "waiting for rank 1" not in text, text
    elif rank == 1:
        dist.barrier()
        work = dist.barrier(async_op=True)
        harness.store(port).set("rank 1 has come", "")
        raises(dist.DistBackendError, "rank 2", work.wait)
    else:
        dist.barrier()
        harness.store(port).set("rank 2 is through", "")
        harness.store(port).wait(["over"])
    if rank == 0:
        harness.store(port).set("over", "")
    dist.destroy_process_group()


def forgets(rank, size, port):
    """The keys of a monitored barrier that all ranks have left do not stay, nor those of one that failed."""
    from datetime import timedelta

    harness.init(rank, size, port)
    dist.barrier()
    group, common = dist.group.WORLD, harness.store(port)
    before = common.num_keys()
    dist.barrier()
    for turn in range(6):
        if turn != 3:
            group.monitored_barrier()
        elif rank == 0:
            raises(dist.DistBackendError, "Rank 1 failed", group.monitored_barrier, timedelta(milliseconds=200))
        else:
            if rank == 1:
                dist.barrier()
            raises(dist.DistBackendError, "rank 1 did not come", group.monitored_barrier)
        if turn != 3 or rank != 1:
            dist.barrier()
        left = common.num_keys()
        dist.barrier()
        assert left == before or turn == 3 and rank != 1, (turn, left, before)
    dist.destroy_process_group()


def overlap(rank, size, port):
    """A monitored barrier in a signal handler takes nothing from the one that it interrupts."""
    from datetime import timedelta

    harness.init(rank, size, port)
    group, common, limit = dist.group.WORLD, harness.store(port), timedelta(seconds=30)
    harness.meet(port, "begin", size)
    began = common.num_keys()
    dist.barrier()
    if rank == 1:
        before = common.num_keys()

        def handler(*_):
            common.set("handles", "")
            group.monitored_barrier(limit)
            common.wait(["rank 0 has left"])

        def interrupt():  # once the barrier has told of this rank: rank 0 sets nothing yet
            store = harness.store(port)
            while store.num_keys() == before:
                time.sleep(0.01)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)

        signal.signal(signal.SIGALRM, handler)
        threading.Thread(target=interrupt).start()
        group.monitored_barrier(limit)
    else:
        common.wait(["handles"])
        group.monitored_barrier(limit)
        group.monitored_barrier(limit)
        common.set("rank 0 has left", "")
    dist.barrier()
    set_here = ["handles", "rank 0 has left"]
    assert common.num_keys() == began + len(set_here), (common.num_keys(), began)
    dist.barrier()
    dist.destroy_process_group()


class NoDeletion(PythonStore):
    """A store that cannot delete."""

    asked = 0

    def delete_key(self, key):
        self.asked += 1
        raise NotImplementedError("no deletion")

    deleteKey = delete_key  # noqa: N815  the name that C++ looks for


def keeps(rank, size, port):
    """A store that cannot delete fails no monitored barrier, and is asked once."""
    store = NoDeletion(port)
    dist.init_process_group("tutti", store=store, rank=rank, world_size=size)
    for _ in range(4):
        dist.group.WORLD.monitored_barrier()
    assert store.asked == (1 if rank == 0 else 0), store.asked
    dist.destroy_process_group()


def recovers(rank, size, port):
    """A group over a c10d store is usable again after a mismatch and a timeout, without the loss of a rank."""
    from datetime import timedelta

    harness.init(rank, size, port)
    group = dist.group.WORLD
    for elements in (3 + rank % 2, 7):
        if elements != 7:
            text = raises(dist.DistBackendError, "all_reduce", dist.all_reduce, torch.ones(elements))
            assert "3 elements" in text and "4 elements" in text and "rank 1" in text, text
        else:
            harness.meet(port, "through", size)  # the timeout would fail a rank that is still in an operation
            options = dist.AllreduceOptions()
            options.timeout = timedelta(milliseconds=200)
            if rank == 1:
                harness.store(port).wait(["0", "2"])  # the others have given up
            else:
                text = raises(dist.DistBackendError, "rank 1", lambda: group.allreduce([torch.ones(7)], options).wait())
                harness.store(port).set(str(rank), "")
        tutti_torch.recover()
        x = torch.ones(5)
        dist.all_reduce(x)
        assert x[0] == size
    assert tutti_torch.active_ranks() == [0, 1, 2]
    dist.destroy_process_group()


def irreplaceable(rank, size, port):
    """A group over a c10d store cannot recover from the loss of a rank, and says so."""
    harness.init(rank, size, port)
    dist.barrier()
    harness.meet(port, "through", size)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    raises(dist.DistBackendError, "rank 2", dist.barrier)
    raises(dist.DistBackendError, "rank 2", tutti_torch.recover)
    dist.destroy_process_group()


def dies(rank, size, port):
    """A rank that is killed is named by the others."""
    harness.init(rank, size, port)
    x = torch.ones(1000)
    dist.all_reduce(x)
    harness.meet(port, "through", size)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(x, async_op=True)
    raises(dist.DistBackendError, "rank 2", work.wait)
    assert tutti_torch.failed_ranks(work) == [2], tutti_torch.failed_ranks(work)
    dist.destroy_process_group()


# It writes without a buffer: one that a signal handler interrupts refuses what the handler writes.
INTERRUPTED = """
import os, signal, sys
import torch, torch.distributed as dist, tutti_torch
sys.path.insert(0, {tests!r})
import harness
signal.signal(signal.SIGINT, signal.default_int_handler)  # Python's own, also where a shell ignores it
def handled(number, frame):
    names = []
    while frame:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    os.write(1, f"handled in {{' '.join(names)}}\\n".encode())

signal.signal(signal.SIGUSR1, handled)
harness.init(0, 2, {port})
x = torch.ones(4)
dist.all_reduce(x)
for _ in range({times}):
    try:
        os.write(1, b"ready\\n")
        {wait}
    except KeyboardInterrupt:
        os.write(1, b"interrupted\\n")
os._exit(7)
"""

INTERRUPTS = 5

PEER = """
import sys, torch, torch.distributed as dist, tutti_torch
sys.path.insert(0, {tests!r})
import harness
harness.init(1, 2, {port})
dist.all_reduce(torch.ones(4))
sys.stdin.read()
import os
os._exit(0)
"""


def dies_in_a_part(rank, size, port):
    """The error of a group that has not all ranks says which ones of the job it has."""
    harness.init(rank, size, port)
    parts = [dist.new_group([1, 2]), dist.split_group(split_ranks=[[1, 2]])]
    if rank == 2:
        harness.meet(port, "ready", size)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(torch.ones(10), group=part, async_op=True) for part in parts if rank == 1]
    harness.meet(port, "ready", size)
    for part, work in zip(parts, works):  # noqa: B905  rank 0 has none
        text = raises(dist.DistBackendError, "rank 1 ", work.wait)
        assert text.endswith(f" (group {part.group_name}: its ranks are 1 and 2 of the job)"), text
        text = raises(dist.DistBackendError, "rank 1 ", dist.barrier, part)
        assert text.endswith(f" (group {part.group_name}: its ranks are 1 and 2 of the job)"), text
    text = raises(dist.DistBackendError, "rank 2 ", dist.barrier)
    assert "of the job" not in text, text
    dist.destroy_process_group()


def large_part(rank, size, port):
    """The error of a large group tells the places of the ranks that it names."""
    options = tutti_torch.Options()
    options.group_name, options.global_ranks_in_group = "7", list(range(100, 100 + size))
    group = tutti_torch.ProcessGroupTutti(harness.store(port), rank, size, options)
    if rank == size - 1:
        group.shutdown()
    else:
        text = raises(dist.DistBackendError, "rank 8 ", lambda: group.barrier(dist.BarrierOptions()).wait())
        assert text.endswith(f" (group 7: its ranks {rank} and 8 are 10{rank} and 108 of the job)"), text
    harness.meet(port, "over", size)
    group.shutdown()


def logs(rank, size, port):
    """The library's messages tell the job and the rank."""
    os.environ["TUTTI_LOG"] = "debug"
    with tempfile.TemporaryFile("w+") as messages:
        before = os.dup(2)
        os.dup2(messages.fileno(), 2)
        harness.init(rank, size, port)
        dist.destroy_process_group()
        os.dup2(before, 2)
        messages.seek(0)
        text = messages.read()
    assert re.search(rf'msg="link up" job=torch-\w+ rank={rank} ', text), text


class Failures(unittest.TestCase):
    def test_wrong_arguments_raise_and_leave_the_group_usable(self):
        harness.run(arguments, 3)

    @unittest.skipUnless(harness.has("_register_on_completion_hook"), "this torch has no such hooks")
    def test_refused_operation_leaves_no_trace(self):
        harness.run(refused, 1)

    def test_forked_child_leaves_the_works_of_its_parent_alone(self):
        harness.run(forked, 2)

    def test_handler_raises_after_an_agreement(self):
        harness.run(agrees_late, 2)

    def test_handler_raises_after_a_recovery(self):
        harness.run(recovers_late, 2)

    @unittest.skipUnless(harness.has("get_error"), "this torch has no get_error")
    def test_recovery_before_an_error_is_noticed(self):
        harness.run(recovers_unnoticed, 2)

    def test_handler_makes_a_call_that_waits(self):
        harness.run(handler_calls, 2)

    def test_handler_raises_after_a_group_is_joined(self):
        harness.run(joins_late, 2)

    def test_different_calls_are_described(self):
        harness.run(mismatch, 2)

    def test_late_ranks_are_named(self):
        harness.run(late, 3)

    def test_keys_of_monitored_barriers_do_not_stay(self):
        harness.run(forgets, 3)

    def test_monitored_barriers_overlap(self):
        harness.run(overlap, 2)

    def test_monitored_barriers_over_a_store_that_cannot_delete(self):
        harness.run(keeps, 2)

    def test_group_recovers_from_mismatch_and_timeout(self):
        harness.run(recovers, 3)

    def test_killed_rank_is_named(self):
        harness.run(dies, 3, killed=[2])

    def test_lost_rank_of_a_fixed_group_is_named_by_recover(self):
        harness.run(irreplaceable, 3, killed=[2])

    @unittest.skipUnless(harness.has("reconfigure"), "this version of torch does not tell backends about their group")
    def test_error_says_which_group_it_is_of(self):
        harness.run(dies_in_a_part, 3, killed=[2])

    @unittest.skipUnless(harness.has("reconfigure"), "this version of torch does not tell backends about their group")
    def test_error_of_a_large_group(self):
        harness.run(large_part, 9)

    def test_messages_tell_the_rank(self):
        harness.run(logs, 2)

    def interrupt(self, wait):
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        names = {"tests": os.path.dirname(os.path.abspath(__file__)), "port": server.port}
        names |= {"wait": wait, "times": INTERRUPTS}
        start = lambda code, **keywords: subprocess.Popen(  # noqa: E731
            [sys.executable, "-c", textwrap.dedent(code).format(**names)], stdout=subprocess.PIPE, text=True, **keywords
        )
        peer = start(PEER, stdin=subprocess.PIPE)
        waiting = start(INTERRUPTED)
        limit = threading.Timer(harness.LIMIT, waiting.kill)  # ends its output
        limit.start()
        try:
            spent = []
            for _ in range(INTERRUPTS):
                self.assertEqual(waiting.stdout.readline(), "ready\n")
                where = []
                while not {"all_reduce", "recv"} & set(where):  # the wait has not begun
                    waiting.send_signal(signal.SIGUSR1)
                    where = waiting.stdout.readline().split()
                    self.assertEqual(where[:2], ["handled", "in"])
                begin = time.monotonic()
                waiting.send_signal(signal.SIGINT)
                self.assertEqual(waiting.stdout.readline(), "interrupted\n")
                spent.append(time.monotonic() - begin)
            print(f"seconds from the signal to the exception: {statistics.median(spent):.3f}")
            self.assertEqual(waiting.wait(harness.LIMIT), 7)
        finally:
            limit.cancel()
            waiting.kill()
            peer.stdin.close()
            peer.wait(harness.LIMIT)
            peer.stdout.close()
            waiting.stdout.close()
            waiting.wait()

    def test_interrupt_ends_a_wait(self):
        self.interrupt("dist.all_reduce(x)")

    def test_interrupt_ends_the_wait_for_a_message(self):
        self.interrupt("dist.recv(x, 1)")


if __name__ == "__main__":
    unittest.main()
