"""What c10d's Backend has besides operations, on the methods of the backend and of the group."""

import contextlib
import itertools
import os
import signal
import threading
import time
import unittest
import unittest.mock
from datetime import timedelta

import harness
import torch
import torch.distributed as dist
import tutti_torch
from test_failures import raises
from test_guest import PythonStore
from torch._subclasses.fake_tensor import FakeTensorMode


def backend(group=None):
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu"))


def windows(rank, size, port):
    """Puts, signals and mappings of a tensor at every rank."""
    harness.init(rank, size, port)
    assert dist.group.WORLD.supports_window and backend().supports_window
    tensor = torch.full((size, 1000), -1.0)
    alias = tensor[rank]
    if harness.FALLBACK:  # torch does not let Python move a storage
        raises(ValueError, "other tensors use the memory", dist.group.WORLD.new_window, tensor)
        alias = None
    window = dist.group.WORLD.new_window(tensor)
    assert backend().memory_stats()["window_bytes"] == tensor.nbytes
    assert torch.all(tensor[rank] == -1), "the values have not moved"
    right, left = (rank + 1) % size, (rank - 1) % size
    for turn in range(3):
        for a_sync in (False, True):
            value = 10.0 * turn + rank
            works = [
                window.put(torch.full((1000,), value), right, 1000 * rank, a_sync),
                window.signal(right, a_sync),
                window.wait_signal(left, a_sync),
            ]
            for work in works:
                assert work.wait()
            assert torch.all(tensor[left] == 10.0 * turn + left), tensor[left]
            # The left rank may put again when this one has seen its values.
            window.signal(left, False)
            window.wait_signal(right, False)
    assert alias is None or alias.data_ptr() == tensor[rank].data_ptr()
    row = torch.ones(1000)
    assert window.get_attr(right).access_type == torch._C._distributed_c10d.WindowAccessType.UNIFIED
    dist.barrier()
    theirs = window.map_remote_tensor(right).view(size, 1000)
    assert torch.all(theirs[rank] == 20.0 + rank) and torch.all(theirs[right] == -1)
    dist.all_reduce(tensor)  # it is still an ordinary tensor

    future = window.wait_signal(left, True).get_future()
    window.signal(right, False)
    future.wait()

    raises(ValueError, "the rank is 7", window.put, row, 7, 0, False)
    raises(ValueError, "do not fit", window.put, row, right, size * 1000 - 999, False)
    raises(ValueError, "do not fit", window.put, row, right, -1, False)
    raises(ValueError, "type", window.put, row.int(), right, 0, False)
    raises(ValueError, "already", window.tensor_register, tensor)
    raises(ValueError, "clone it", backend().new_window, tensor)
    raises(ValueError, "clone it", backend().new_window, tensor[:, :10])
    raises(ValueError, "conjugated", backend().new_window, torch.ones(2, dtype=torch.complex64).conj())
    raises(ValueError, "negated", backend().new_window, torch._neg_view(torch.ones(2)))
    with FakeTensorMode():
        fake = torch.ones(2)
    raises(ValueError, "no memory", backend().new_window, fake)
    raises(ValueError, "the rank is -1", window.map_remote_tensor, -1)
    options = torch._C._distributed_c10d.WaitSignalOptions()
    options.timeout = timedelta(milliseconds=100)
    raises(dist.DistBackendError, "", window.wait_signal, left, False, options)
    dist.barrier()
    window.signal(right, False)
    window.wait_signal(left, False)  # the wait that has failed does not count

    want = tensor.clone()
    dist.barrier()
    window.tensor_deregister()
    assert torch.equal(tensor, want)
    raises(ValueError, "no tensor is registered", window.put, row, right, 0, False)
    window.tensor_register(tensor, False)
    window.put(torch.ones(1), right, 0, False)
    dist.barrier()
    assert tensor[0, 0] == 1
    del theirs, window
    tensor += 1  # in memory of its own again
    assert tensor[0, 0] == 2
    assert backend().memory_stats()["window_bytes"] == 0, backend().memory_stats()
    kept, empty = backend().new_window(tensor), backend().new_window()
    if rank == 0:
        work = dist.barrier(async_op=True)
        raises(dist.DistBackendError, "timed out after 0 ms", work.wait, timedelta(seconds=-5))
        harness.store(port).set("waited", "1")
    else:  # comes after that wait
        harness.store(port).get("waited")
        work = dist.barrier(async_op=True)
    work.wait()
    dist.destroy_process_group()
    raises(dist.DistBackendError, "tutti window: the process group was shut down", empty.tensor_register, torch.ones(1))
    tensor += 1
    raises(dist.DistBackendError, "", kept.put, torch.ones(1), right, 0, False)


def window_of_a_stopped_peer(rank, size, port):
    """A window that a stopped peer writes to keeps its memory, and counts, until it can be closed."""
    os.environ.update(TUTTI_TRANSPORT="shm", TUTTI_WINDOW="1m")
    harness.init(rank, size, port)
    common, elements = harness.store(port), 1 << 24
    if rank == 1:
        common.set("pid", str(os.getpid()))
    peer, bytes_now = int(common.get("pid")), lambda: backend().memory_stats()["window_bytes"]

    def ends_in_a_put(turn):
        """Returns whether the peer was in the middle of an access when the window ended."""
        tensor = torch.zeros(elements)
        window = backend().new_window(tensor)
        if rank == 1:
            with contextlib.suppress(dist.DistBackendError):  # the window has ended
                for value in itertools.count(1):
                    window.put(torch.full((elements,), float(value)), 0, 0, False)
            return common.get(f"ended {turn}") == b"True"
        while tensor[0] == tensor[-1]:
            pass
        os.kill(peer, signal.SIGSTOP)
        del window
        stuck = bytes_now() > 0
        assert bytes_now() == (tensor.nbytes if stuck else 0), bytes_now()
        os.kill(peer, signal.SIGCONT)
        common.set(f"ended {turn}", str(stuck))
        return stuck

    assert any(ends_in_a_put(turn) for turn in range(8)), "the peer was never in the middle of an access"
    harness.meet(port, "through", size)  # the peer's access is over
    window = backend().new_window(torch.zeros(10))
    assert bytes_now() == 40, bytes_now()
    del window
    assert bytes_now() == 0, bytes_now()
    harness.meet(port, "closed", size)
    dist.destroy_process_group()


def window_ends_in_use(rank, size, port):
    """Operations under way of any group use the memory of a window that ends."""
    harness.init(rank, size, port)
    common = harness.store(port)
    for i, group in enumerate((None, dist.new_group(range(size)))):
        tensor = torch.zeros(1 << 20)
        window = dist.group.WORLD.new_window(tensor)
        if rank == 0:
            work = dist.irecv(tensor, 1, group=group)
            del window
            common.set(f"ended {i}", "")
            work.wait()
            assert torch.all(tensor == 1), tensor
            del tensor, work
            assert backend().memory_stats()["window_bytes"] == 0, backend().memory_stats()
        else:
            common.wait([f"ended {i}"])
            dist.send(torch.ones(1 << 20), 0, group=group)
    source, target = torch.ones(1 << 20), torch.zeros(1 << 20)
    of_source, of_target = (dist.group.WORLD.new_window(tensor) for tensor in (source, target))
    if rank == 0:
        work = of_target.put(source, 1, 0, True)
        del of_source
        work.wait()
    dist.barrier()
    assert torch.all(target == rank), target
    dist.destroy_process_group()


def puts_views(rank, size, port):
    """Views whose elements are not what their memory has."""
    harness.init(rank, size, port)
    tensor = torch.zeros(4, dtype=torch.complex64)
    window = dist.group.WORLD.new_window(tensor)
    z = torch.tensor([1 + 2j, 3 - 4j])
    if rank == 0:
        window.put(z.conj(), 1, 0, False)
        window.put(torch._neg_view(z), 1, 2, False)
    dist.barrier()
    if rank == 1:
        assert tensor.tolist() == [1 - 2j, 3 + 4j, -1 - 2j, -3 + 4j], tensor
    dist.barrier()
    dist.destroy_process_group()


def waits_in_order(rank, size, port):
    """A wait for a signal that fails takes none from the waits behind it, which end in their order."""
    harness.init(rank, size, port, timeout=timedelta(seconds=20))
    window = dist.group.WORLD.new_window(torch.zeros(1))
    if rank == 0:
        options = torch._C._distributed_c10d.WaitSignalOptions()
        options.timeout = timedelta(milliseconds=200)
        first, second = window.wait_signal(1, True, options), window.wait_signal(1, True)
        third = window.wait_signal(1, True, options)
        raises(dist.DistBackendError, "", first.wait)
        raises(dist.DistBackendError, "earlier waits for rank 1", third.wait)
        assert not second.is_completed()
        harness.meet(port, "the first has failed", size)
        second.wait()  # ends with the only signal
        raises(dist.DistBackendError, "", window.wait_signal, 1, False, options)
        harness.meet(port, "the second has ended", size)
        window.wait_signal(1, False)
    else:
        harness.meet(port, "the first has failed", size)
        window.signal(0, False)
        harness.meet(port, "the second has ended", size)
        window.signal(0, False)
    dist.barrier()
    dist.destroy_process_group()


def over_tcp(rank, size, port, elements):
    """Returns a window of a group whose puts wait until their target calls the library."""
    options = tutti_torch.Options(timedelta(seconds=20))
    options.transport = "tcp"
    harness.init(rank, size, port, pg_options=options, timeout=timedelta(seconds=20))
    return dist.group.WORLD.new_window(torch.zeros(elements))


def put_without_a_thread(rank, size, port):
    """A put for which there can be no thread has ended when it raises: its source may change."""
    n = 16 << 20
    window = over_tcp(rank, size, port, n)
    if rank == 0:
        x, start = torch.ones(n), threading.Thread.start

        def starts(thread):
            if thread.name == "tutti:put":
                raise RuntimeError("can't start new thread")
            start(thread)

        with unittest.mock.patch("threading.Thread.start", starts):
            raises(RuntimeError, "can't start", window.put, x, 1, 0, True)
        x.zero_()
        window.signal(1, False)
    else:
        window.wait_signal(0, False)
        got = window.map_remote_tensor(1)
        assert torch.all(got == 1), f"{int((got != 1).sum())} elements were put late"
    dist.barrier()
    dist.destroy_process_group()


def windows_are_interrupted(rank, size, port):
    """A handler that raises ends a put whose target does not take earlier ones, and waits for a signal,
    which then do not count."""
    window = over_tcp(rank, size, port, 1 << 20)
    if rank == 0:

        def handler(*_):
            raise KeyboardInterrupt

        def puts():
            for _ in range(1000):
                window.put(x, 1, 0, True)

        x = torch.ones(1 << 20)
        harness.handle_later(handler)
        raises(KeyboardInterrupt, "", puts)  # one that waits for its target raises another error, after 20 s
        harness.handle_later(handler)
        raises(KeyboardInterrupt, "", window.wait_signal, 1, False)
        first = window.wait_signal(1, True)
        harness.handle_later(handler)
        raises(KeyboardInterrupt, "", window.wait_signal, 1, False)  # behind the first
        harness.meet(port, "over", size)
        first.wait()
    else:
        harness.meet(port, "over", size)
        window.signal(0, False)
    dist.barrier()
    dist.destroy_process_group()


def call_that_has_begun_is_interrupted(rank, size, port):
    """A handler that raises while the thread of a call starts waits for the end of a call that has begun, also if
    a handler raises again."""
    from tutti_torch._ctypes import interrupt

    harness.init(rank, size, port)
    begun, ended, again = threading.Event(), threading.Event(), []
    start, wait = threading.Thread.start, threading.Event.wait

    def call():
        begun.set()
        while not interrupt._raised:
            time.sleep(0.001)
        ended.set()
        return 0

    def starts(thread):
        start(thread)
        begun.wait()
        again.append(KeyError())
        raise KeyboardInterrupt

    def waits(event, timeout=None):
        if again:
            raise again.pop()
        return wait(event, timeout)

    patch = unittest.mock.patch
    with patch("threading.Thread.start", starts), patch("threading.Event.wait", waits):
        raises(KeyboardInterrupt, "", interrupt.blocking, call)
    assert ended.is_set(), "the call goes on"
    dist.destroy_process_group()


def windows_are_interrupted_between_calls(rank, size, port):
    """A handler that raises before or after the thread of a call has begun ends the call: a put reads its
    source no more, and a wait for a signal does not count."""
    n = 16 << 20
    window = over_tcp(rank, size, port, n)
    start = threading.Thread.start

    def interrupted(name, begins, function, *arguments):
        def starts(thread):
            if thread.name != name or begins:
                start(thread)
            if thread.name == name:
                raise KeyboardInterrupt

        with unittest.mock.patch("threading.Thread.start", starts):
            raises(KeyboardInterrupt, "", function, *arguments)

    if rank == 0:
        for begins in (False, True):
            interrupted("tutti:wait_signal", begins, window.wait_signal, 1, True)
        for begins in (False, True):
            interrupted("tutti call", begins, window.wait_signal, 1, False)
        harness.meet(port, "waits", size)
        window.wait_signal(1, False)
        x = torch.ones(n)
        interrupted("tutti:put", False, window.put, x, 1, 0, True)
        x.fill_(2)
        raises(dist.DistBackendError, "", window.signal, 1, False)  # it would come after the put
    else:
        harness.meet(port, "waits", size)
        window.signal(0, False)
    harness.meet(port, "puts", size)
    dist.barrier()
    if rank == 1:
        got = window.map_remote_tensor(1)
        assert not torch.any(got == 2), "the put was not over"
    dist.destroy_process_group()


def window_in_callback(rank, size, port):
    """A callback of a window's operation uses the window while another thread does."""
    harness.init(rank, size, port)
    right, left = (rank + 1) % size, (rank - 1) % size
    window = dist.group.WORLD.new_window(torch.zeros(1))
    begun = threading.Event()

    def callback(_):
        begun.set()
        time.sleep(0.3)  # the other thread is in its call
        window.signal(right, True)

    future = window.wait_signal(left, True).get_future().then(callback)  # only the window keeps the work
    dist.barrier()
    window.signal(right, False)
    assert begun.wait(harness.LIMIT)
    window.signal(right, True).wait()
    future.wait()
    for _ in range(2):
        window.wait_signal(left, False)
    dist.barrier()
    window.tensor_deregister()
    dist.destroy_process_group()


def shrinks(rank, size, port):
    """The remaining ranks go on in a smaller group, after a rank has left and after one has failed."""
    harness.init(rank, size, port)
    group = dist.group.WORLD
    raises(ValueError, "excludes itself", backend().shrink, [rank])
    raises(ValueError, "0 to 3", backend().shrink, [size])
    raises(ValueError, "at least one", backend().shrink, [])
    if rank == 1:
        dist.destroy_process_group()
        return
    smaller = dist.shrink_group([1])
    assert smaller.size() == size - 1 and dist.get_rank() == [0, None, 1, 2][rank]
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == 0 + 2 + 3, x
    del group
    harness.meet(port, "through", size - 1)  # an abort also ends what another rank is not through with
    # Operations of a group that waits for a rank are ended.
    if rank == 3:
        harness.store(port).wait(["over"])
        dist.destroy_process_group()
        return
    work = dist.all_reduce(x, async_op=True)
    smaller = dist.shrink_group([2], shrink_flags=1)
    raises(dist.DistBackendError, "abort", work.wait)
    dist.all_reduce(x)
    assert smaller.size() == 2
    dist.barrier()
    if rank == 0:
        harness.store(port).set("over", "")
    dist.destroy_process_group()


def names_shrunk(rank, size, port):
    """The keys of a smaller group are as long as those of a smaller one still: stores bound them."""
    keys = []

    class Listed(PythonStore):
        def set(self, key, value):
            keys.append(key)
            super().set(key, value)

    store = Listed(port)
    dist.init_process_group("tutti", store=store, rank=rank, world_size=size)
    own, groups = backend(), []
    for excluded in ([2], [1, 2]):
        if rank not in excluded:
            groups.append(own.shrink(excluded, 0, None))
    if rank == 0:
        turns = [key for key in keys if "shrunk/" in key and key.endswith("/turn")]
        assert len(turns) == 2 and len(turns[0]) == len(turns[1]), turns
    harness.meet(port, "shrunk", size)
    dist.destroy_process_group()


def suspends(rank, size, port):
    harness.init(rank, size, port, timeout=timedelta(seconds=20))
    x = torch.ones(10)
    dist.all_reduce(x)
    for _ in range(2):
        backend().suspend()
        backend().suspend()
        calls = [dist.barrier, backend().new_window]
        for call in (*calls, tutti_torch.active_ranks, tutti_torch.admit, tutti_torch.recover):
            raises(dist.DistBackendError, "call resume", call)
        raises(dist.DistBackendError, "call resume", tutti_torch.agree, True)
        raises(dist.DistBackendError, "call resume", tutti_torch.empty, 3)
        backend().resume()
        dist.all_reduce(x)
    assert x[0] == size**3
    dist.barrier()
    if rank == 0:
        work = dist.irecv(x, 1)
        raises(RuntimeError, "under way", backend().suspend)
        assert backend().memory_stats()["operations"] == 1
        assert backend().memory_stats()["operation_bytes"] == x.nbytes
        dist.barrier()
        work.wait()
    else:
        dist.barrier()
        dist.send(x, 0)
    # A group that has failed can be used again.
    assert backend().get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    try:
        dist.all_reduce(torch.ones(3 + rank))
        raise AssertionError("different sizes were accepted")
    except dist.DistBackendError:
        pass
    assert backend().get_error() == torch._C._distributed_c10d.ErrorType.COMM_ERROR
    backend().suspend()
    backend().resume()
    assert backend().get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    dist.all_reduce(x)
    dist.destroy_process_group()

    alone = tutti_torch.ProcessGroupTutti(dist.HashStore(), 0, 1, tutti_torch.Options())
    alone.shutdown()
    raises(RuntimeError, "shut down", alone.suspend)


def closed_while_resuming(rank, size, port):
    """A group that is shut down while it is resumed is closed: the others do not wait for it."""
    harness.init(rank, size, port, timeout=timedelta(seconds=20))
    dist.barrier()
    suspended, peer = backend(), harness.store(port)
    suspended.suspend()
    harness.meet(port, "suspended", size)
    if rank == 0:
        outcome = []

        def resume():
            try:
                outcome.append(suspended.resume())
            except RuntimeError as e:
                outcome.append(str(e))

        before = peer.num_keys()
        thread = threading.Thread(target=resume)
        thread.start()
        while peer.num_keys() <= before + 1 and thread.is_alive():  # it meets, registers, and waits for the other rank
            time.sleep(0.001)
        suspended.shutdown()
        peer.set("closed", "")
        thread.join()
        assert "shut down" in str(outcome), outcome
    else:
        peer.wait(["closed"])
        suspended.resume()
        raises(dist.DistBackendError, "rank 0", dist.all_reduce, torch.ones(1))
    harness.meet(port, "over", size)
    dist.destroy_process_group()


def resumes_again(rank, size, port):
    """Ranks whose resume has failed meet when they call it again, also one that was late."""
    harness.init(rank, size, port, timeout=timedelta(seconds=20))
    dist.barrier()
    for failing in ((0,), (0, 1), (1, 2)):
        backend().suspend()
        if rank in failing:
            backend().set_timeout(timedelta(seconds=1))
            raises(dist.DistBackendError, "rank ", backend().resume)
            backend().set_timeout(timedelta(seconds=20))
        harness.meet(port, f"failed {failing}", size)
        backend().resume()
        dist.barrier()
    dist.destroy_process_group()


def hooks(rank, size, port):
    harness.init(rank, size, port, timeout=timedelta(seconds=20))
    group = dist.group.WORLD
    before, after, done = [], [], []
    group.register_pre_hook(1, lambda a: before.append((a.name, a.op_id)))
    group.register_post_hook(1, lambda a: after.append(a.op_id))
    assert group.supports_abort_hooks and group.supports_completion_hooks != harness.FALLBACK
    ended = threading.Event()

    def completed(info):
        ended.set()
        time.sleep(0.05 * len(done))  # the second one is late: it must be waited for
        done.append(info.seq)

    group._register_on_completion_hook(completed)
    raises(RuntimeError, "already", group._register_on_completion_hook, completed)
    assert group._has_hooks()
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert ended.wait(harness.LIMIT), "a hook waits until the program asks for the end"
    work.wait()
    group._wait_for_pending_works()
    assert work._get_duration() > 0 and work._get_sequence_number() == done[0]
    dist.barrier()
    group._wait_for_pending_works()
    assert len(done) == len(before) == len(after) == 2, (done, before, after)
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)

    failed, kept = threading.Event(), []
    group.register_abort_hook(7, failed.set)
    group.register_abort_hook(8, lambda: kept.append("removed"))
    group.unregister_abort_hook(8)

    def broken():
        raise KeyError("a hook that fails")

    group.register_abort_hook(9, broken)
    x = torch.ones(3)
    harness.meet(port, "through", size)
    if rank == 0:
        backend().abort()
    else:
        work = dist.all_reduce(x, async_op=True)
    assert failed.wait(harness.LIMIT), "no abort hook has run"
    assert not kept
    dist.destroy_process_group()


def children(rank, size, port):
    """Groups of a part of the ranks, and groups that are joined."""
    harness.init(rank, size, port)
    assert backend().supports_splitting and backend().supports_shrinking
    part = dist.PrefixStore(f"half-{rank // 2}", harness.store(port))
    half = backend().split(part, [0, 1] if rank < 2 else [3, 2], backend().options)
    assert (half.rank(), half.size()) == ([0, 1, 1, 0][rank], 2)
    x = torch.tensor([float(rank)])
    half.allreduce([x]).wait()
    assert x.item() == (1 if rank < 2 else 5), x
    options = tutti_torch.Options(timeout=timedelta(seconds=9))
    assert options._timeout == timedelta(seconds=9) and options.backend == "tutti"
    whole = half.merge(dist.PrefixStore("whole", harness.store(port)), options, rank, size)
    assert whole.options._timeout == timedelta(seconds=9)
    x = torch.tensor([float(rank)])
    whole.allreduce([x]).wait()
    assert x.item() == 6, x
    assert (
        backend().split(dist.PrefixStore("some", harness.store(port)), [(rank + 1) % size], backend().options) is None
    )

    merged = dist.group.WORLD.merge_remote_group(
        dist.PrefixStore("merged", harness.store(port)), size, timedelta(seconds=20), "merged"
    )
    x = torch.tensor([float(rank)])
    merged.allreduce([x]).wait()
    assert x.item() == 6, x
    for closed in (half, whole):
        closed.shutdown()
        raises(RuntimeError, "shut down", closed.allreduce, [x])
    dist.destroy_process_group()


def timeouts(rank, size, port):
    """The timeout of the group, and one that is longer for a while."""
    harness.init(rank, size, port)
    group = dist.group.WORLD
    peer = harness.store(port)
    if rank == 0:
        group.set_timeout(timedelta(milliseconds=100))
        text = raises(dist.DistBackendError, "100 ms", lambda: backend().recv([torch.ones(1)], 1, 5).wait())
        assert "rank 1" in text, text
        backend()._add_ephemeral_timeout(timedelta(seconds=30))
        work = backend().recv([torch.ones(1)], 1, 6)
        assert work.timeout == timedelta(milliseconds=30_100), work.timeout
        peer.set("ready", "")
        work.wait()
        assert backend().recv([torch.ones(1)], 1, 7).timeout == timedelta(milliseconds=100)
    else:
        peer.wait(["ready"])
        dist.send(torch.ones(1), 0, tag=6)
        dist.send(torch.ones(1), 0, tag=7)
    group.set_timeout(timedelta(seconds=20))
    backend().monitored_barrier()
    group.monitored_barrier()
    dist.destroy_process_group()


def nested_futures(rank, size, port):
    """A callback of a future waits for the future of an operation that it starts, and so does that one's."""
    harness.init(rank, size, port)
    peer = harness.store(port)

    def after(turn):
        if rank > 0:  # so that the future of rank 0 is asked for before the end
            peer.wait([f"asked/{turn}"])
        x = torch.ones(1)
        future = dist.all_reduce(x, async_op=True).get_future()
        if turn < 3:
            future = future.then(lambda _: after(turn + 1))
        if rank == 0:
            peer.set(f"asked/{turn}", "")
        future.wait()
        assert x.item() == size
        return turn

    after(0)
    dist.destroy_process_group()


def futures_in_a_row(rank, size, port):
    """Callbacks start further operations and do not wait for them: no threads are left over."""
    harness.init(rank, size, port)
    peer = harness.store(port)
    over, turns = threading.Event(), 200

    def after(turn):
        if turn == turns:
            over.set()
            return
        if rank > 0:
            peer.wait([f"asked/{turn}"])
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda _: after(turn + 1))
        if rank == 0:
            peer.set(f"asked/{turn}", "")

    dist.all_reduce(torch.ones(1))
    threads = len(os.listdir("/proc/self/task"))
    after(0)
    assert over.wait(harness.LIMIT)
    # Go keeps the threads that it starts while others block, more of them on a busy machine.
    assert len(os.listdir("/proc/self/task")) < threads + turns // 2
    dist.destroy_process_group()


def futures_of_one_callback(rank, size, port):
    """The works that one callback starts share a thread."""
    harness.init(rank, size, port)
    peer = harness.store(port)
    works, many = [], 200

    def start(_):
        if rank > 0:
            peer.wait(["started"])
        works.extend(dist.all_reduce(torch.ones(1), async_op=True) for _ in range(many))
        before = len(os.listdir("/proc/self/task"))
        futures = [work.get_future() for work in works]
        if rank == 0:
            assert len(os.listdir("/proc/self/task")) < before + many // 2  # see futures_in_a_row
            peer.set("started", "")
        for future in futures:
            future.wait()

    if rank > 0:
        peer.wait(["asked"])
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(start)
    if rank == 0:
        peer.set("asked", "")
    future.wait()
    assert len(works) == many
    dist.destroy_process_group()


def polled_while_starting(rank, size, port):
    """An operation is not over when another thread asks before it has started."""
    from tutti_torch._ctypes import api

    harness.init(rank, size, port)
    dist.barrier()
    start = api.api().tutti_start

    def starts(*arguments):
        asks = threading.Thread(target=backend().memory_stats)
        asks.start()
        asks.join()
        return start(*arguments)

    x = torch.ones(5)
    with unittest.mock.patch.object(api.api(), "tutti_start", starts):
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            harness.meet(port, "rank 0 has started", size)
        else:
            harness.meet(port, "rank 0 has started", size)
            work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert x[0] == size, x
    dist.destroy_process_group()


def threads_that_cannot_start(rank, size, port):
    """A future for which there can be no thread is an error, and can be asked for again."""
    harness.init(rank, size, port)
    if rank == 0:
        work = dist.irecv(torch.ones(1), 1)
        with unittest.mock.patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
            raises(RuntimeError, "can't start", work.get_future)
        future = work.get_future()
        harness.meet(port, "asked", size)
        future.wait()
    else:
        harness.meet(port, "asked", size)
        dist.send(torch.ones(1), 0)
    dist.barrier()
    dist.destroy_process_group()


def bound_to_a_device(rank, size, port):
    """Groups of a part of the ranks, when the default group is bound to a device."""
    harness.init(rank, size, port, device_id=torch.device("cpu:0"))
    for members in ([0], [0, 1]):
        group = dist.new_group(members)
        if rank in members:
            dist.all_reduce(x := torch.ones(1), group=group)
            assert x.item() == len(members)
    mesh = dist.device_mesh.init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))
    for name, want in (("a", size), ("b", 1)):
        dist.all_reduce(x := torch.ones(1), group=mesh.get_group(name))
        assert x.item() == want
    dist.destroy_process_group()


def batches(rank, size, port):
    """A batch of messages with a wrong argument leaves the group as it was."""
    harness.init(rank, size, port)
    other = (rank + 1) % size
    once = torch.ones(1).expand(4)  # its elements share memory
    batch = [dist.P2POp(dist.isend, torch.ones(4), other), dist.P2POp(dist.irecv, once, other)]
    raises(ValueError, "share memory", dist.batch_isend_irecv, batch)
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == size, x
    dist.all_gather_into_tensor(gathered := torch.zeros(size), torch.ones(1))
    assert gathered.sum() == size, gathered
    dist.recv(y := torch.zeros(4), other)  # the batch's send has begun
    assert y.sum() == 4, y
    dist.barrier()
    dist.destroy_process_group()


def inherited_options(rank, size, port):
    """Groups for which the program gives no options have those of the default group."""
    given = tutti_torch.Options()
    given.algorithm, given.transport, given.max_procs = "ring", "tcp", 1
    harness.init(rank, size, port, pg_options=given)
    own = tutti_torch.Options()
    own.algorithm = "tree"
    wanted = {dist.new_group(): ("ring", "tcp", 1), dist.new_group(pg_options=own): ("tree", "", 0)}
    mesh = dist.device_mesh.init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b"))
    wanted[mesh.get_group("b")] = ("ring", "tcp", 1)
    for group, want in wanted.items():
        options = backend(group).options
        assert (options.algorithm, options.transport, options.max_procs) == want, (options.algorithm, want)
    dist.destroy_process_group()
    harness.init(rank, size, port)
    assert backend().options.algorithm == "", "the options of a group that is gone"
    dist.destroy_process_group()

    # What two groups of a process cannot share is left out. These options come too late for the
    # default group.
    harness.init(rank, size, port, pg_options=given)
    late = backend().options
    late.ports, late.metrics, late.store = "29500", "127.0.0.1:9400", "etcd://127.0.0.1:1"
    groups = [dist.new_group()]
    if harness.has("split"):
        groups.append(dist.split_group(split_ranks=[list(range(size))]))
    for group in groups:
        options = backend(group).options
        assert (options.algorithm, options.ports, options.metrics, options.store) == ("ring", "", "", "")
        dist.all_reduce(x := torch.ones(1), group=group)
        assert x.item() == size
    dist.destroy_process_group()

    def parted(closed=False, **fields):
        for name, value in fields.items():
            setattr(late, name, value)
        options = late.copy()
        options.part_from(late, closed)
        return options.ports, options.metrics, options.store

    at, site = late.metrics, late.store
    assert parted(closed=True) == ("29500", at, "")
    for mode, store in (("report", ""), ("shrink", site), ("retry", site)):
        assert parted(on_failure=mode) == ("", "", store), mode
    for ports in ("0", "29500-29600"):
        assert parted(ports=ports) == (ports, "", site)

    if harness.has("reconfigure"):
        harness.init(rank, size, port, pg_options=given, enable_reconfigure=True)
        group = dist.new_group()
        assert backend(group).options.algorithm == "ring"
        dist.all_reduce(x := torch.ones(1), group=group)
        assert x.item() == size
        dist.destroy_process_group()


def one_port(rank, size, port):
    """A single port of the environment is that of the first group of a process."""
    with harness.reserved_port("") as free:
        os.environ.update(TUTTI_PORT=str(free), TUTTI_TRANSPORT="shm")
        for _ in range(2):
            harness.init(rank, size, port, timeout=timedelta(seconds=20))
            for group in (None, dist.new_group(), dist.new_group(pg_options=tutti_torch.Options())):
                if harness.has("suspend"):
                    backend(group).suspend()
                    backend(group).resume()
                dist.all_reduce(x := torch.ones(1), group=group)
                assert x.item() == size
            dist.destroy_process_group()
        if harness.has("reconfigure"):
            harness.init(rank, size, port, enable_reconfigure=True)
            assert dist._get_reconfigure_handle()
            dist.destroy_process_group()


def grows(rank, size, port):
    """A later group over the same store has a rank that had no part in the first, and that comes first."""
    common = dist.PrefixStore("grows", harness.store(port))
    options = tutti_torch.Options()
    options._timeout = timedelta(seconds=20)
    if rank < 2:
        tutti_torch.ProcessGroupTutti(common, rank, 2, options).shutdown()
        common.set(f"first {rank}", "")
    common.wait(["first 0", "first 1"])
    if rank == 0:
        common.wait(["tutti/turns/2"])
    group = tutti_torch.ProcessGroupTutti(common, rank, size, options)
    group.barrier().wait()
    group.shutdown()


class Keys:
    """Counts the keys that come to a TCPStore while ranks do something. Rank 0 has the number."""

    def __init__(self, rank, size, port, name):
        self.common, self.rank, self.size, self.port, self.name = harness.store(port), rank, size, port, name

    def __enter__(self):
        self.before = self.count("begins")
        return self

    def count(self, name):
        """Returns the number of keys when all ranks have come here. The others wait for rank 0."""
        harness.meet(self.port, f"{self.name} {name}", self.size)
        keys = None
        if self.rank == 0:
            keys = self.common.num_keys()
            self.common.set(f"{self.name} {name}, counted", "")
        self.common.wait([f"{self.name} {name}, counted"])
        return keys

    def __exit__(self, kind, *_):
        if kind is None:
            keys, own = self.count("ends"), 3  # "begins, counted", and two of the meeting at the end
            self.came = keys - self.before - own if self.rank == 0 else None


def leaves_no_keys(rank, size, port):
    """A group that was shut down has no keys in the store, whatever it has done there."""
    common = PythonStore(port)

    def join(name, seconds=20):
        options = tutti_torch.Options()
        options._timeout = timedelta(seconds=seconds)
        return tutti_torch.ProcessGroupTutti(dist.PrefixStore(name, common), rank, size, options)

    with Keys(rank, size, port, "group") as keys:
        for _ in range(2):  # the second time in the place of the first
            group = join("one")
            for _ in range(2):
                group.monitored_barrier(timedelta(seconds=20))
                if harness.has("suspend"):
                    group.suspend()
                    group.resume()
            if harness.has("shrink") and rank < size - 1:
                group.shrink([size - 1], 0, None).shutdown()
            group.shutdown()
    assert rank != 0 or keys.came == 0, keys.came

    with Keys(rank, size, port, "retry") as keys:
        if rank == 0:
            raises(dist.DistBackendError, "rank 1", join, "other", 5)  # enough to set the job's keys
        harness.meet(port, "rank 0 has failed", size)
        join("other").shutdown()
    # Those of the meeting, and the size and the terms of the job that did not come to be.
    assert rank != 0 or keys.came == 2 + 2, keys.came


def new_groups_leave_no_keys(rank, size, port):
    """Groups of new_group that were destroyed have left nothing in the store of the default group.

    In a TCPStore they leave the keys of the library's records, one for each rank.
    """
    for store, left in ((PythonStore(port), 0), (harness.store(port), size)):
        dist.init_process_group("tutti", store=store, rank=rank, world_size=size)
        name = type(store).__name__
        with Keys(rank, size, port, name) as keys:
            for _ in range(3):
                dist.all_reduce(x := torch.ones(1), group=(group := dist.new_group()))
                assert x.item() == size
                group.monitored_barrier()
                dist.destroy_process_group(group)
                del group
        assert rank != 0 or keys.came == 3 * left, (name, keys.came)
        dist.destroy_process_group()


def details(rank, size, port):
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL the backend is within one of torch."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    harness.init(rank, size, port)
    assert not isinstance(backend(), tutti_torch.ProcessGroupTutti)
    assert tutti_torch.active_ranks() == [0]
    assert tutti_torch.agree(True)
    assert tutti_torch.empty(3).shape == (3,)
    gloo = dist.new_group(backend="gloo")
    raises(ValueError, "cpu:gloo", tutti_torch.active_ranks, gloo)
    dist.destroy_process_group()


def for_cuda(rank, size, port):
    """Functions that take a group find a backend that is not for tensors on the CPU."""
    harness.init(rank, size, port, backend="cpu:gloo,cuda:tutti")
    assert tutti_torch.active_ranks() == list(range(size))
    dist.destroy_process_group()


def needs(name):
    return unittest.skipUnless(harness.has(name), f"this torch has no Backend.{name}")


class Backend(unittest.TestCase):
    @needs("new_window")
    def test_windows(self):
        harness.run(windows, 2)
        harness.run(windows, 3)

    @needs("new_window")
    def test_window_that_a_stopped_peer_writes_to(self):
        harness.run(window_of_a_stopped_peer, 2)

    @needs("new_window")
    def test_window_that_ends_while_an_operation_uses_it(self):
        harness.run(window_ends_in_use, 2)

    @needs("new_window")
    def test_put_of_views(self):
        harness.run(puts_views, 2)

    @needs("new_window")
    def test_waits_for_signals_end_in_their_order(self):
        harness.run(waits_in_order, 2)

    @needs("new_window")
    @unittest.skipUnless(harness.FALLBACK, "the C++ module starts threads of its own")
    def test_put_without_a_thread(self):
        harness.run(put_without_a_thread, 2)

    @needs("new_window")
    def test_windows_are_interrupted(self):
        harness.run(windows_are_interrupted, 2)

    @unittest.skipUnless(harness.FALLBACK, "the C++ module makes calls on the thread of its caller")
    def test_call_that_has_begun_is_interrupted(self):
        harness.run(call_that_has_begun_is_interrupted, 1)

    @needs("new_window")
    @unittest.skipUnless(harness.FALLBACK, "the C++ module starts threads of its own")
    def test_windows_are_interrupted_between_calls(self):
        harness.run(windows_are_interrupted_between_calls, 2)

    @needs("new_window")
    def test_callback_uses_its_window(self):
        harness.run(window_in_callback, 2)

    def test_callback_waits_for_another_future(self):
        harness.run(nested_futures, 2)

    def test_callbacks_start_operations(self):
        harness.run(futures_in_a_row, 2)

    def test_one_callback_starts_many_operations(self):
        harness.run(futures_of_one_callback, 2)

    @unittest.skipUnless(harness.FALLBACK, "the C++ module gives works to others when they have started")
    def test_operation_that_starts_is_not_over(self):
        harness.run(polled_while_starting, 2)

    @unittest.skipUnless(harness.FALLBACK, "the C++ module starts threads of its own")
    def test_threads_that_cannot_start(self):
        harness.run(threads_that_cannot_start, 2)

    @needs("split")
    def test_groups_when_bound_to_a_device(self):
        harness.run(bound_to_a_device, 2)

    def test_batch_with_a_wrong_argument(self):
        harness.run(batches, 2)

    def test_options_of_the_default_group(self):
        harness.run(inherited_options, 2)

    def test_single_port_of_the_environment(self):
        harness.run(one_port, 2)

    def test_group_with_details(self):
        harness.run(details, 1)

    def test_group_for_cuda(self):
        harness.run(for_cuda, 2)

    @needs("shrink")
    def test_shrink(self):
        harness.run(shrinks, 4)

    @needs("shrink")
    def test_keys_of_a_shrunk_group(self):
        harness.run(names_shrunk, 3)

    @needs("suspend")
    def test_suspend_and_resume(self):
        harness.run(suspends, 2)

    def test_larger_group_over_the_store_of_an_earlier_one(self):
        harness.run(grows, 3)

    def test_group_leaves_no_keys(self):
        harness.run(leaves_no_keys, 3)

    def test_new_group_leaves_no_keys(self):
        harness.run(new_groups_leave_no_keys, 2)

    @needs("suspend")
    def test_resume_after_a_failed_one(self):
        harness.run(resumes_again, 3)

    @needs("suspend")
    def test_shutdown_while_resuming(self):
        harness.run(closed_while_resuming, 2)

    @needs("register_abort_hook")
    def test_hooks(self):
        harness.run(hooks, 2)

    @needs("merge")
    def test_split_and_merge(self):
        harness.run(children, 4)

    @needs("_add_ephemeral_timeout")
    def test_timeouts(self):
        harness.run(timeouts, 2)


if __name__ == "__main__":
    unittest.main()
