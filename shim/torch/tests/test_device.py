"""Tensors on a device are in the order of its streams, and the host waits for none of them.

The device is one of tests, over the fake CUDA driver: see device.cpp.
"""

import itertools
import os
import signal
import threading
import time
import unittest
from datetime import timedelta

import device
import harness
import launched
import torch
import torch.distributed as dist
import tutti_torch

DEVICE = "privateuseone"


def init(rank, size, port, refuses=False, **options):
    device.load(rank)
    if refuses:
        device.fail("cuModuleLoadDataEx", 999)  # Tutti's kernels cannot be loaded
    harness.init(rank, size, port, backend=f"cpu:tutti,{DEVICE}:tutti", **options)


def on(tensor):
    return tensor.to(f"{DEVICE}:{device.number}")


def same(got, want, what):
    got = got.cpu()
    assert got.dtype == want.dtype and torch.equal(got.double(), want.double()), f"{what}: {got}, want {want}"


def until(condition):
    while not condition():
        time.sleep(0.001)


def cases(rank, size):
    """Yields names, tensors, and operations on these, which return a work or None."""
    small = torch.arange(24) + rank
    parts = torch.arange(size * 24) + rank
    large = torch.arange(300_000) % 97 + rank

    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.int8, torch.bfloat16, torch.float8_e5m2):
            x = (small % 4).float().to(dtype)
            yield f"all_reduce {op} {dtype}", [x], lambda t, a, op=op: dist.all_reduce(t[0], op, async_op=a)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        yield f"all_reduce {op}", [small], lambda t, a, op=op: dist.all_reduce(t[0], op, async_op=a)
    average = dist.ReduceOp.AVG
    yield "all_reduce AVG", [small.float()], lambda t, a: dist.all_reduce(t[0], average, async_op=a)
    twice = dist._make_nccl_premul_sum(2.0)
    yield "all_reduce PREMUL_SUM", [small.float()], lambda t, a: dist.all_reduce(t[0], twice, async_op=a)
    yield "all_reduce bool", [small % 3 == 0], lambda t, a: dist.all_reduce(t[0], async_op=a)
    yield "all_reduce of much", [large.float()], lambda t, a: dist.all_reduce(t[0], async_op=a)
    yield "all_reduce of none", [small[:0]], lambda t, a: dist.all_reduce(t[0], async_op=a)
    yield (
        "all_reduce_coalesced",
        [small, small + 1],
        lambda t, a: dist.group.WORLD.allreduce_coalesced(t),
    )
    yield "reduce", [small], lambda t, a: dist.reduce(t[0], 1, async_op=a)
    yield "broadcast", [small], lambda t, a: dist.broadcast(t[0], 1, async_op=a)
    yield (
        "all_gather_into_tensor",
        [torch.zeros_like(parts), small],
        lambda t, a: dist.all_gather_into_tensor(t[0], t[1], async_op=a),
    )
    yield (
        "all_gather",
        [small, *(torch.zeros_like(small) for _ in range(size))],
        lambda t, a: dist.all_gather(t[1:], t[0], async_op=a),
    )
    yield (
        "gather",
        [small, *(torch.zeros_like(small) for _ in range(size))],
        lambda t, a: dist.gather(t[0], t[1:] if rank == 0 else None, 0, async_op=a),
    )
    yield (
        "scatter",
        [torch.zeros_like(small), *(small + r for r in range(size))],
        lambda t, a: dist.scatter(t[0], t[1:] if rank == 0 else None, 0, async_op=a),
    )
    yield (
        "reduce_scatter_tensor",
        [torch.zeros_like(small), parts],
        lambda t, a: dist.reduce_scatter_tensor(t[0], t[1], async_op=a),
    )
    yield (
        "reduce_scatter",
        [torch.zeros_like(small), *(small + r for r in range(size))],
        lambda t, a: dist.reduce_scatter(t[0], t[1:], async_op=a),
    )
    yield (
        "uneven all_gather",
        [torch.arange(rank + 2.0), *(torch.zeros(r + 2) for r in range(size))],
        lambda t, a: dist.all_gather(t[1:], t[0], async_op=a),
    )
    yield (
        "uneven reduce_scatter",
        [torch.zeros(rank + 2), *(torch.arange(r + 2.0) + rank for r in range(size))],
        lambda t, a: dist.reduce_scatter(t[0], t[1:], async_op=a),
    )
    yield (
        "all_to_all_single",
        [torch.zeros_like(parts), parts],
        lambda t, a: dist.all_to_all_single(t[0], t[1], async_op=a),
    )
    # Rank r gives r + s elements to rank s: rank 0 gives itself none.
    counts = [rank + r for r in range(size)]
    yield (
        "uneven all_to_all_single",
        [torch.zeros(sum(counts)), torch.arange(sum(counts)) + 100.0 * rank],
        lambda t, a: dist.all_to_all_single(t[0], t[1], counts, counts, async_op=a),
    )
    # Only the last rank gives anything.
    sends = [5 * (rank == size - 1)] * size
    takes = [0] * (size - 1) + [5]
    yield (
        "all_to_all_single from one rank",
        [torch.zeros(sum(takes)), torch.arange(sum(sends)) + 1.0],
        lambda t, a: dist.all_to_all_single(t[0], t[1], takes, sends, async_op=a),
    )
    yield (
        "all_to_all",
        [*(torch.zeros_like(small) for _ in range(size)), *(small + r for r in range(size))],
        lambda t, a: dist.all_to_all(t[:size], t[size:], async_op=a),
    )

    def around(t, a):
        """All ranks begin with the receive, which must not hold up the send."""
        right, left = (rank + 1) % size, (rank - 1) % size
        works = [dist.irecv(t[1], left, tag=3), dist.isend(t[0], right, tag=3)]
        for work in works if a else reversed(works):
            work.wait()

    yield "isend and irecv", [small, torch.zeros_like(small)], around
    yield "isend and irecv of much", [large, torch.zeros_like(large)], around

    def batch(t, a):
        right, left = (rank + 1) % size, (rank - 1) % size
        operations = [dist.P2POp(dist.irecv, t[1], left), dist.P2POp(dist.isend, t[0], right)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    yield "batch_isend_irecv", [small, torch.zeros_like(small)], batch

    def coalesced(t, a):
        with dist._coalescing_manager(device=t[0].device, async_ops=a) as manager:
            for x in t:
                dist.all_reduce(x)
        return manager if a else None

    yield "coalescing manager", [small, small * 2], coalesced


def strided(x):
    """Returns a tensor with the values of x that is not contiguous."""
    wide = torch.zeros([*x.shape, 2], dtype=x.dtype, device=x.device)
    wide.select(-1, 0).copy_(x)
    return wide.select(-1, 0)


def results(rank, size, port, refuses):
    """Operations on tensors of the device do what those on tensors of the host do."""
    init(rank, size, port, refuses)
    for name, tensors, operation in cases(rank, size):
        for layout in (lambda x: x, strided):
            for waits in (False, True):
                mine, theirs = [layout(on(x)) for x in tensors], [x.clone() for x in tensors]
                for t in (mine, theirs):
                    work = operation(t, not waits)
                    if work is not None:
                        work.wait()
                for got, want in zip(mine, theirs, strict=True):
                    same(got, want, name)
    # The test itself copies in another way.
    assert (device.calls("cuMemcpyAsync") == 0) == refuses
    dist.destroy_process_group()


def order(rank, size, port):
    """An operation comes after what the stream was given before, and before what it is given after wait. The
    host goes on."""
    init(rank, size, port)
    dist.all_reduce(on(torch.ones(1)))  # ranks have met
    for name, tensors, operation in cases(rank, size):
        if name.startswith("batch") or "PREMUL" in name:
            continue
        for layout in (lambda x: x, strided):
            for waits in (False, True):
                want = [x.clone() for x in tensors]
                work = operation(want, False)
                if work is not None:
                    work.wait()
                mine = [layout(on(torch.zeros_like(x))) for x in tensors]
                after = [torch.zeros_like(x) for x in mine]
                inputs = [on(x) for x in tensors]
                on(torch.ones(1)).cpu()
                gate = device.Gate()
                for x, y in zip(mine, inputs, strict=True):
                    x.copy_(y)  # behind the gate
                work = operation(mine, not waits)
                if work is not None:
                    work.wait()
                for x, y in zip(after, mine, strict=True):
                    x.copy_(y)
                assert not device.idle(), name
                gate.open()
                for got, w in zip(after, want, strict=True):
                    same(got, w, name)
    dist.destroy_process_group()


def graphs(rank, size, port):
    """Graphs repeat the operations whose ranks give and get as much as each other."""
    init(rank, size, port)
    dist.all_reduce(on(torch.ones(1)))  # prepares graphs
    done = 0
    for name, tensors, operation in cases(rank, size):
        if "isend" in name or "coalesc" in name:  # they are on other streams
            continue
        mine = [on(torch.zeros_like(x)) for x in tensors]
        on(torch.ones(1)).cpu()
        if name.startswith(("uneven all", "all_to_all_single from")):
            try:
                device.Graph(lambda op=operation, t=mine: op(t, False))
                raise AssertionError(f"{name} is in a graph")
            except RuntimeError as e:
                assert "being captured" in str(e), e
            continue
        graph = device.Graph(lambda op=operation, t=mine: op(t, False))
        for launch in range(3):
            want = [(t.float() + launch % 2).to(t.dtype) for t in tensors]
            for x, y in zip(mine, want, strict=True):
                x.copy_(y)
            on(torch.ones(1)).cpu()  # the stream has done that
            graph.launch()
            work = operation(want, False)
            if work is not None:
                work.wait()
            for got, w in zip(mine, want, strict=True):
                same(got, w, name)
        done += 1
    assert done > 20, done
    dist.barrier()
    dist.destroy_process_group()


def beside(rank, size, port):
    """With async_op, the stream goes on beside the operation until wait."""
    init(rank, size, port)
    dist.all_reduce(on(torch.ones(1)))
    x, y = on(torch.full((10_000,), float(rank))), on(torch.zeros(8))
    if rank == 0:
        gate = device.Gate()
    work = dist.all_reduce(x, async_op=True)
    if rank == 0:
        assert not work.is_completed()
        harness.meet(port, "the others have gone on", size)
        assert not work.is_completed()
        gate.open()
    else:
        y.fill_(5)
        assert y.cpu().sum() == 40
        assert not work.is_completed()
        work.wait()
        y.copy_(x[:8])
        assert not device.idle()
        harness.meet(port, "the others have gone on", size)
    work.wait()
    want = size * (size - 1) // 2
    y.copy_(x[:8])
    assert torch.equal(y.cpu(), torch.full((8,), float(want)))
    until(work.is_completed)
    assert work.is_success() and work.exception() is None

    # Large and small ones, with and without async_op: no call waits for a stream.
    tensors = [on(torch.ones(n)) for n in (10_000, 4, 10_000, 4)]
    gate = device.Gate()
    works = [dist.all_reduce(t, async_op=n % 2 == 0) for n, t in enumerate(tensors)]
    assert not device.idle()
    gate.open()
    for work, tensor in zip(works, tensors, strict=True):
        if work is not None:
            work.wait()
        assert torch.equal(tensor.cpu(), torch.full(tensor.shape, float(size)))

    # Two streams: the operations of each are behind its own work, and in the order of the calls.
    first, second = device.new_stream(), device.new_stream()
    a, b = on(torch.zeros(5000)), on(torch.zeros(5000))
    b.cpu()  # the stream on which they were made has done that
    with device.stream(first):
        gate = device.Gate()
        a.fill_(rank + 1.0)
        one = dist.all_reduce(a, async_op=True)
    with device.stream(second):
        b.fill_(rank + 2.0)
        two = dist.all_reduce(b, async_op=True)
        two.wait()
        b.add_(b)
        assert not device.idle(second)
    gate.open()
    with device.stream(second):
        assert torch.equal(b.cpu(), torch.full((5000,), 2.0 * (want + 2 * size)))
    with device.stream(first):
        one.wait()
        assert torch.equal(a.cpu(), torch.full((5000,), float(want + size)))

    # One stream waits for an operation that was started on another.
    with device.stream(first):
        gate = device.Gate()
        a.fill_(rank)
        one = dist.all_reduce(a, async_op=True)
    with device.stream(second):
        one.wait()
        b.copy_(a)
    assert not device.idle(second)
    gate.open()
    with device.stream(second):
        assert torch.equal(b.cpu(), torch.full((5000,), float(want)))
    dist.destroy_process_group()


def several(rank, size, port):
    """Coalesced operations on tensors of several devices, or of the host and a device, are of the host."""
    init(rank, size, port)
    dist.all_reduce(on(torch.ones(1)))  # ranks have met
    group, twice = dist.group.WORLD, dist.AllreduceCoalescedOptions()
    twice.reduceOp = dist._make_nccl_premul_sum(2.0)
    total = size * (size + 1.0) / 2
    places = [f"{DEVICE}:{device.number}", f"{DEVICE}:3", "cpu"]

    def made(shape, value):
        return [torch.full(shape, value).to(place) for place in chosen]

    for turn, chosen in enumerate((places[:2], places[1:], places)):
        for count, name in itertools.product((40, 300_000), ("reduced", "twice", "gathered", "lists", "scattered")):
            inputs = made((size * count,) if name == "scattered" else (count,), rank + 1.0)
            outputs, want = inputs, torch.full((count,), 2 * total if name == "twice" else total)
            if name in ("gathered", "lists"):
                want = torch.arange(1.0, size + 1).repeat_interleave(count)
            if rank != 0:  # until then no operation ends
                harness.meet(port, f"rank 0 has begun {turn} {count} {name}", size)
            if name == "reduced":
                work = group.allreduce_coalesced(inputs)
            elif name == "twice":
                work = group.allreduce_coalesced(inputs, twice)
            elif name == "gathered":
                outputs = made((size * count,), 0.0)
                work = group.allgather_into_tensor_coalesced(outputs, inputs)
            elif name == "lists":
                lists = [made((count,), 0.0) for _ in range(size)]
                work = group.allgather_coalesced(lists, inputs)
                outputs = None
            else:
                outputs = made((count,), 0.0)
                work = group.reduce_scatter_tensor_coalesced(outputs, inputs)
            if rank == 0:
                # Else the program goes on in the order of one of the streams.
                assert not work.get_future().done(), (chosen, count, name)
                harness.meet(port, f"rank 0 has begun {turn} {count} {name}", size)
            work.wait()
            assert work.is_completed()
            if outputs is None:
                outputs = [torch.cat([part.cpu() for part in parts]) for parts in zip(*lists, strict=True)]
            for got in outputs:
                same(got, want, f"{name} {count} on {chosen}")
    dist.barrier()
    dist.destroy_process_group()


def groups(rank, size, port):
    """Receives hold up neither sends nor receives of other groups, although groups draw from one pool of streams."""
    init(rank, size, port, timeout=timedelta(seconds=20))
    several, peer = [dist.new_group() for _ in range(4)], 1 - rank
    works = [dist.irecv(on(torch.zeros(5000)), peer, group=group) for group in several]
    works += [dist.isend(on(torch.ones(5000)), peer, group=group) for group in several]
    for work in works:
        until(work.is_completed)
        work.wait()
    # The next stream of the pool is that of the first group, the others are free.
    for group in several[1:]:
        dist.destroy_process_group(group)
    first, second = several[0], dist.new_group()
    if rank == 0:
        works = [dist.irecv(on(torch.zeros(5000)), 1, group=group) for group in (first, second)]
        until(works[1].is_completed)
        works[1].wait()
    else:
        dist.send(on(torch.ones(5000)), 0, group=second)
    dist.barrier()
    if rank == 0:
        works[0].wait()
    else:
        dist.send(on(torch.ones(5000)), 0, group=first)
    dist.barrier()
    dist.destroy_process_group()


def freed(rank, size, port):
    """The memory of a tensor that the program has dropped is not used again before the end."""
    init(rank, size, port)
    dist.all_reduce(on(torch.ones(1)))
    for contiguous in (True, False):
        for wait in (True, False):
            out = on(torch.zeros(size * 5000))
            x = on(torch.zeros(5000))
            gates = [device.Gate()] if rank == 0 else []
            x.fill_(rank + 1)
            x = x if contiguous else strided(x)
            work = dist.all_gather_into_tensor(out, x, async_op=True)
            del x
            if wait:
                work.wait()
            else:  # the others come by gates, so that nothing has been read yet
                with device.stream(device.new_stream()):
                    again = [on(torch.full((5000 * n,), -1.0)) for n in (1, 1, 2, 2)]
                del again
            for gate in gates:
                gate.open()
            if not wait:
                work.wait()
            again = [on(torch.full((5000 * n,), -1.0)) for n in (1, 1, 2, 2)]
            want = torch.arange(1.0, size + 1).repeat_interleave(5000)
            assert torch.equal(out.cpu(), want)
            del again, work
    # Nor is the copy of an output that is not contiguous.
    parts = [on(torch.full((5000 + r,), rank + 1.0)) for r in range(size)]
    out = strided(on(torch.zeros(5000 + rank)))
    out.cpu()
    gates = [device.Gate()] if rank == 0 else []
    work = dist.reduce_scatter(out, parts, async_op=True)
    with device.stream(device.new_stream()):
        again = [on(torch.full((5000 + rank,), -1.0)) for _ in range(3)]
        for x in again:
            x.cpu()
    for gate in gates:
        gate.open()
    work.wait()
    assert torch.equal(out.cpu(), torch.full((5000 + rank,), size * (size + 1) / 2))
    assert all(torch.equal(x.cpu(), torch.full((5000 + rank,), -1.0)) for x in again)
    del again, work
    # A receive into memory that is dropped does not write to what uses it next.
    for count, layout in ((5000, lambda x: x), (10_000, strided)):
        x = layout(on(torch.zeros(5000)))
        x.cpu()
        if rank == 0:
            work = dist.irecv(x, 1)
            del x
            again = [on(torch.full((count,), 7.0)) for _ in range(3)]
            harness.meet(port, f"rank 0 has dropped it {count}", size)
            until(work.is_completed)
            assert all(torch.equal(x.cpu(), torch.full((count,), 7.0)) for x in again)
        else:
            harness.meet(port, f"rank 0 has dropped it {count}", size)
            if rank == 1:
                dist.send(x, 0)
    dist.barrier()
    dist.destroy_process_group()


def futures(rank, size, port):
    """Futures are there at once, and what uses their values is behind the operation on its stream."""
    init(rank, size, port)
    dist.all_reduce(on(torch.ones(1)))
    want = float(size * (size + 1) // 2)
    x, y = on(torch.zeros(5000)), on(torch.zeros(5000))
    gate = device.Gate()
    x.fill_(rank + 1)
    work = dist.all_reduce(x, async_op=True)
    then = work.get_future().then(lambda future: y.copy_(future.value()[0]))
    then.wait()
    assert not work.is_completed() and not device.idle()
    gate.open()
    assert torch.equal(y.cpu(), torch.full((5000,), want))
    assert torch.equal(work.result()[0].cpu(), torch.full((5000,), want))

    # Sends and receives, any rank, a wait with a limit: those are waits of the host.
    if rank == 0:
        senders = set()
        for _ in range(size - 1):
            senders.add(dist.recv(x))
            assert x.cpu()[0] == 1
        assert senders == set(range(1, size))
        gate = device.Gate()
        work = dist.broadcast(x, 0, async_op=True)
        try:
            work.wait(timeout=torch.distributed.distributed_c10d.timedelta(milliseconds=20))
            raise AssertionError("the wait has ended")
        except RuntimeError as e:
            assert "timed out" in str(e), e
        gate.open()
    else:
        dist.send(on(torch.ones(5000)), 0)
        work = dist.broadcast(x, 0, async_op=True)
    work.wait(timeout=torch.distributed.distributed_c10d.timedelta(seconds=60))
    assert work.is_completed()
    dist.destroy_process_group()


def hooks(rank, size, port):
    """DistributedDataParallel's hook, and completion hooks."""
    init(rank, size, port)
    x = on(torch.full((5000,), float(rank)))
    seen = []
    backend = dist.group.WORLD._get_backend(torch.device(DEVICE))
    backend._register_on_completion_hook(lambda info: seen.append(info.op_type))
    dist.all_reduce(x)
    backend._wait_for_pending_works()
    assert len(seen) == 1, seen
    assert tutti_torch.active_ranks() == list(range(size))
    dist.destroy_process_group()


def death(rank, size, port, transport):
    """A rank dies among operations on streams: these go on, and the error names the rank."""
    os.environ["TUTTI_TRANSPORT"] = transport
    init(rank, size, port)
    backend = dist.group.WORLD._get_backend(torch.device(DEVICE))
    x, y = on(torch.ones(5000)), on(torch.ones(100_000))
    dist.all_reduce(x)
    x.cpu()
    if rank == size - 1:
        harness.meet(port, "the others have begun", size)
        os.kill(os.getpid(), signal.SIGKILL)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, async_op=True), dist.irecv(x, size - 1)]
    for work in works:
        work.wait()
    y.add_(1)
    harness.meet(port, "the others have begun", size)
    y.cpu()  # the stream was released
    for work in works:
        until(work.is_completed)
    for work in works:
        assert not work.is_success()
        try:
            work.wait()
            raise AssertionError("the operation has not failed")
        except dist.DistBackendError as e:
            assert f"rank {size - 1}" in str(e), e
    if harness.has("get_error"):
        assert backend.get_error() == torch._C._distributed_c10d.ErrorType.REMOTE_ERROR
    for _ in range(2):
        try:
            work = dist.all_reduce(y, async_op=True)
            until(work.is_completed)
            work.wait()
            raise AssertionError("a later operation has not failed")
        except dist.DistBackendError as e:
            assert f"rank {size - 1}" in str(e), e
    dist.destroy_process_group()


def aborted(rank, size, port):
    """Operations end although their streams have not come to them. The streams still use the memory."""
    init(rank, size, port)
    backend = dist.group.WORLD._get_backend(torch.device(DEVICE))
    x = on(torch.ones(5000))
    dist.all_reduce(x)
    x.cpu()
    gate = device.Gate()
    x.fill_(5)
    work = dist.all_reduce(x, async_op=True)
    del x
    harness.meet(port, "all have begun", size)
    backend.abort()
    until(work.is_completed)
    try:
        work.wait()
        raise AssertionError("the operation has not failed")
    except dist.DistBackendError as e:
        assert "has aborted" in str(e), e
    del work
    other = device.new_stream()
    with device.stream(other):
        again = [on(torch.full((5000,), 7.0)) for _ in range(3)]
        again[-1].cpu()
    assert not device.idle()
    gate.open()
    until(lambda: all(device.idle(number) for number in range(other)))
    assert all(torch.equal(x.cpu(), torch.full((5000,), 7.0)) for x in again)
    dist.destroy_process_group()


def meeting(rank, size, port):
    """A thread waits for the other ranks in the first small operation: abort ends that."""
    init(rank, size, port)
    backend = dist.group.WORLD._get_backend(torch.device(DEVICE))
    x = on(torch.ones(1))
    if rank == 0:
        errors = []

        def operate():
            try:
                dist.all_reduce(x)
            except dist.DistBackendError as e:
                errors.append(str(e))

        thread = threading.Thread(target=operate)
        thread.start()
        until(lambda: device.calls("cuMemCreate") > 0)
        backend.abort()
        thread.join()
        assert "has aborted" in errors[0], errors
    harness.meet(port, "rank 0 has aborted", size)
    dist.destroy_process_group()


def replaced(rank, size, port):
    """A thread waits for the other ranks in the first small operation: reconfigure without them ends that."""
    init(rank, size, port)
    x = on(torch.ones(1))
    if rank == 0:
        handle, errors = dist._get_reconfigure_handle(), []

        def operate():
            try:
                dist.all_reduce(x)
            except dist.DistBackendError as e:
                errors.append(str(e))

        thread = threading.Thread(target=operate)
        thread.start()
        until(lambda: device.calls("cuMemCreate") > 0)
        dist._reconfigure(1, [handle])
        thread.join()
        assert "closed" in errors[0], errors
        dist.all_reduce(y := on(torch.full((1,), 2.0)))
        same(y, torch.full((1,), 2.0), "all_reduce of one")
    harness.meet(port, "rank 0 has gone on", size)
    dist.destroy_process_group()


def missed(rank, size, port):
    """The program goes on before an operation fails: the next one tells it."""
    init(rank, size, port)
    x = on(torch.ones(5000))
    dist.all_reduce(x)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        work.wait()
    harness.meet(port, "rank 0 has gone on", size)
    if rank == 1:
        work = dist.all_reduce(x[:4500], async_op=True)
    until(work.is_completed)
    x.cpu()  # the stream was released
    try:
        dist.all_reduce(x) if rank == 0 else work.wait()
        raise AssertionError("the operation has not failed")
    except dist.DistBackendError as e:
        assert "5000 elements" in str(e) and "4500 elements" in str(e), e
    tutti_torch.recover()
    x.fill_(1)
    dist.all_reduce(x)
    assert x.cpu()[0] == size
    # After a recovery the next operation tells no failure before it, also one not noticed yet.
    if rank == 0:
        dist.all_reduce(x, async_op=True).wait()
    harness.meet(port, "rank 0 has gone on again", size)
    if rank == 1:
        work = dist.all_reduce(x[:4500], async_op=True)
        try:
            work.wait()
        except dist.DistBackendError as e:  # it may have failed by now
            assert "5000 elements" in str(e) and "4500 elements" in str(e), e
    x.cpu()  # waits for the stream
    tutti_torch.recover()
    x.fill_(1)
    dist.all_reduce(x)
    assert x.cpu()[0] == size
    dist.destroy_process_group()


# The last rank dies while the others have started an operation of COUNT elements, which devices do
# in packets, or which goes through the host. The group goes on without it.
SHRUNK = f"""
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
import device
device.load(int(os.environ["RANK"]))
dist.init_process_group("cpu:tutti,{DEVICE}:tutti", init_method="tutti://")
""" + """
rank, size, count = dist.get_rank(), dist.get_world_size(), int(os.environ["COUNT"])
lost, left = size - 1, list(range(size - 1))
def on(x):
    return x.to(f"privateuseone:{rank}")
def sums(ranks):
    for n in (4, 100_000):
        x = on(torch.full((n,), rank + 1.0))
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert torch.equal(x.cpu(), torch.full((n,), float(sum(r + 1 for r in ranks)))), (n, x)
sums(range(size))
store = dist.distributed_c10d._get_default_store()
if rank == lost:
    store.wait([f"begun {r}" for r in left])
    die()
x = on(torch.ones(count))
work = dist.all_reduce(x, async_op=True)
store.set(f"begun {rank}", "")
while not work.is_completed():
    time.sleep(0.001)
failed = outlives(lost, work.wait)
assert tutti_torch.failed_ranks(work) == ([lost] if failed else [])
assert failed or torch.equal(x.cpu(), torch.full((count,), float(len(left)))), x
x.cpu()  # the stream was released
tutti_torch.recover()
assert tutti_torch.active_ranks() == left, tutti_torch.active_ranks()
sums(left)
out = on(torch.full((size, 5000), -7.0))
dist.all_gather_into_tensor(out, on(torch.full((5000,), float(rank))))
assert out.cpu()[:, 0].tolist() == [*map(float, left), -7.0], out  # the empty slot is as it was
dist.barrier()
print("through")
dist.destroy_process_group()
"""


@harness.needs_module("tensors on devices are copied through the host")
@unittest.skipUnless(device.possible(), "this version of torch does not give the handles of streams")
class Device(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        device.make()

    def test_results_are_those_of_the_host(self):
        harness.run(results, 3, False)

    def test_results_through_the_host_if_the_library_refuses_the_device(self):
        harness.run(results, 3, True)

    def test_operations_are_in_the_order_of_the_stream(self):
        harness.run(order, 3)

    def test_graphs(self):
        harness.run(graphs, 3)

    def test_streams_go_on_beside_operations(self):
        harness.run(beside, 3)

    def test_coalesced_operations_on_several_devices(self):
        harness.run(several, 2)

    def test_groups_do_not_hold_up_each_other(self):
        harness.run(groups, 2)

    def test_memory_that_was_dropped(self):
        harness.run(freed, 3)

    def test_futures_and_waits_of_the_host(self):
        harness.run(futures, 3)

    def test_hooks(self):
        harness.run(hooks, 2)

    def test_death_of_a_rank(self):
        for transport in ("shm", "tcp"):
            harness.run(death, 3, transport, killed=[2])

    def test_groups_go_on_without_a_rank_that_died(self):
        for count in (4, 100_000):
            out, _ = launched.run(3, ["--on-failure", "shrink"], SHRUNK, environment={"COUNT": str(count)})
            self.assertEqual(out.count("through"), 2, out)

    def test_operations_end_before_streams_come_to_them(self):
        harness.run(aborted, 2)

    def test_abort_while_a_thread_waits_in_the_start_of_an_operation(self):
        harness.run(meeting, 2)

    @unittest.skipUnless(hasattr(dist, "_reconfigure"), "this torch has no reconfigure")
    def test_reconfigure_while_a_thread_waits_in_the_start_of_an_operation(self):
        harness.run(replaced, 2)

    def test_failure_that_the_program_did_not_wait_for(self):
        harness.run(missed, 2)


if __name__ == "__main__":
    unittest.main()
