"""Every operation gives what Gloo gives, whatever the tensors look like."""

import itertools
import unittest

import harness
import torch
import torch.distributed as dist

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
COMPLEX = [torch.complex64, torch.complex128]
# Older versions of torch lack the second. Neither can do much more than change its type.
SMALL_COMPLEX = [torch.complex32, *([torch.bcomplex32] if hasattr(torch, "bcomplex32") else [])]
OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
BITS = [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]


def values(shape, dtype, rank):
    """Small whole numbers, whose sums and products all types hold."""
    count = 1
    for length in shape:
        count *= length
    x = (torch.arange(count) + rank) % 4
    return x.reshape(shape).to(torch.float32).to(dtype)


def layouts(shape, dtype, rank):
    """Yields tensors with the same values, in different memory."""
    x = values(shape, dtype, rank)
    yield "contiguous", x.clone()
    if x.dim() > 1:
        yield "transposed", x.t().contiguous().t()
    if x.dim() > 0 and x.numel() > 0:
        wide = torch.zeros([*shape[:-1], 2 * shape[-1]], dtype=torch.float32).to(dtype)
        strided = wide[..., ::2]
        strided.copy_(x)
        yield "strided", strided
    if x.is_floating_point() and x.element_size() > 1:
        yield "requires grad", x.clone().requires_grad_()


SHAPES = [(), (1,), (5,), (4, 6), (0,), (3, 0)]


def same(got, want, what):
    assert got.dtype == want.dtype and got.shape == want.shape, what
    got, want = got.detach(), want.detach()
    if got.dtype in FLOAT8:
        got, want = got.float(), want.float()
    if got.dtype in SMALL_COMPLEX:
        got, want = got.cfloat(), want.cfloat()
    assert torch.equal(got, want), f"{what}: {got}, want {want}"


def compare(rank, size, port):
    """Runs operations on groups of both backends."""
    harness.init(rank, size, port)
    gloo = dist.new_group(backend="gloo")
    tutti = dist.group.WORLD

    def both(what, make, operate):
        """make gives the tensors that operate(group, tensors) changes."""
        for shape in SHAPES:
            for dtype in [torch.float32, torch.int64, torch.bfloat16, torch.bool]:
                if gloo_lacks(what, dtype):
                    continue
                for (name, x), (_, y) in zip(layouts(shape, dtype, rank), layouts(shape, dtype, rank), strict=True):
                    mine, theirs = make(x), make(y.detach().contiguous())
                    label = f"{what} of {name} {dtype} {shape}"
                    try:
                        with torch.no_grad():
                            operate(tutti, mine)
                    except Exception as e:
                        raise AssertionError(label) from e
                    try:
                        with torch.no_grad():
                            operate(gloo, theirs)
                    except RuntimeError as e:
                        if "does not support" not in str(e):  # that of older versions lacks operations
                            raise
                        return
                    for a, b in zip(mine, theirs, strict=True):
                        same(a, b, label)

    both("broadcast", lambda x: [x], lambda g, t: dist.broadcast(t[0], 1, group=g))
    both("all_reduce", lambda x: [x], lambda g, t: dist.all_reduce(t[0], group=g))
    both(
        "all_gather",
        lambda x: [x, *(torch.zeros_like(x) for _ in range(size))],
        lambda g, t: dist.all_gather(t[1:], t[0], group=g),
    )
    both(
        "gather",
        lambda x: [x, *(torch.zeros_like(x) for _ in range(size))],
        lambda g, t: dist.gather(t[0], t[1:] if rank == 1 else None, dst=1, group=g),
    )
    both(
        "scatter",
        lambda x: [torch.zeros_like(x), *(values(x.shape, x.dtype, r) for r in range(size))],
        lambda g, t: dist.scatter(t[0], t[1:] if rank == 0 else None, src=0, group=g),
    )
    both(
        "reduce_scatter",
        lambda x: [x, *(values(x.shape, x.dtype, rank + r) for r in range(size))],
        lambda g, t: dist.reduce_scatter(t[0], t[1:], group=g),
    )
    both(
        "all_gather_into_tensor",
        lambda x: [x, torch.zeros([size * x.numel()], dtype=x.dtype)],
        lambda g, t: dist.all_gather_into_tensor(t[1], t[0].flatten(), group=g),
    )
    both(
        "reduce_scatter_tensor",
        lambda x: [torch.zeros([x.numel()], dtype=x.dtype), x.flatten().repeat(size)],
        lambda g, t: dist.reduce_scatter_tensor(t[0], t[1].flatten(), group=g),
    )
    both(
        "all_to_all_single",
        lambda x: [torch.zeros([size * x.numel()], dtype=x.dtype), x.flatten().repeat(size)],
        lambda g, t: dist.all_to_all_single(t[0], t[1], group=g),
    )

    def neighbours(g, t):
        request = dist.isend(t[0], (rank + 1) % size, group=g, tag=3)
        dist.recv(t[1], (rank - 1) % size, group=g, tag=3)
        request.wait()

    both("send and recv", lambda x: [x, torch.zeros_like(x)], neighbours)
    dist.destroy_process_group()


def gloo_lacks(what, dtype):
    return dtype == torch.bool and what in ("all_reduce", "reduce_scatter", "reduce_scatter_tensor")


def reductions(rank, size, port):
    """Compares reductions with sums made here: Gloo lacks some of them."""
    harness.init(rank, size, port)

    def expected(op, dtype):
        rows = torch.stack([values((7,), torch.float64, r) for r in range(size)])
        if op in BITS:
            rows = rows.long()
            x = rows[0]
            for row in rows[1:]:
                x = {BITS[0]: x & row, BITS[1]: x | row, BITS[2]: x ^ row}[op]
            return x.to(dtype)
        x = {
            dist.ReduceOp.SUM: rows.sum(0),
            dist.ReduceOp.AVG: rows.sum(0) / size,
            dist.ReduceOp.PRODUCT: rows.prod(0),
            dist.ReduceOp.MIN: rows.amin(0),
            dist.ReduceOp.MAX: rows.amax(0),
        }[op]
        return (
            (x.trunc() if not dtype.is_floating_point else x).to(torch.float32 if dtype in FLOAT8 else dtype).to(dtype)
        )

    for dtype in [*INTEGERS, torch.uint16, *FLOATS, *FLOAT8]:
        ops = [*OPS, dist.ReduceOp.AVG, *(BITS if not dtype.is_floating_point else [])]
        for op in ops:
            x = values((7,), dtype, rank)
            dist.all_reduce(x, op)
            same(x, expected(op, dtype), f"all_reduce {op} {dtype}")

            x = values((7,), dtype, rank)
            dist.reduce(x, 1, op)
            same(x, expected(op, dtype) if rank == 1 else values((7,), dtype, rank), f"reduce {op} {dtype}")

            out = torch.zeros(7).to(dtype)
            dist.reduce_scatter(out, [values((7,), dtype, rank) for _ in range(size)], op)
            same(out, expected(op, dtype), f"reduce_scatter {op} {dtype}")

    for dtype in [*COMPLEX, *SMALL_COMPLEX]:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            mine = (torch.full((3,), 1 + 2j) * (rank + 1)).to(dtype)
            want = torch.full((3,), (1 + 2j) * size * (size + 1) / 2 / (size if op == dist.ReduceOp.AVG else 1))
            x = mine.clone()
            dist.all_reduce(x, op)
            same(x, want.to(dtype), f"all_reduce {op} {dtype}")
            x = mine.clone()
            dist.reduce(x, 1, op)
            same(x, want.to(dtype) if rank == 1 else mine, f"reduce {op} {dtype}")
            x = torch.zeros(3, dtype=dtype)
            dist.reduce_scatter_tensor(x, mine.repeat(size), op)
            same(x, want.to(dtype), f"reduce_scatter_tensor {op} {dtype}")
        y = [torch.zeros(2, dtype=dtype) for _ in range(size)]
        dist.all_gather(y, torch.full((2,), -1j * rank).to(dtype))
        for r in range(size):
            same(y[r], torch.full((2,), -1j * r).to(dtype), f"all_gather {dtype}")

    # No other type is reduced as bytes, whose sums have no carries.
    for dtype in sorted({t for t in vars(torch).values() if isinstance(t, torch.dtype)}, key=str):
        x = torch.full((16,), 0x60, dtype=torch.uint8)
        try:
            dist.reduce(x.view(dtype), 0)
        except (RuntimeError, ValueError):  # torch cannot view or convert the type, or it cannot be reduced
            continue
        bytewise = torch.equal(x, torch.full((16,), 0x60 * size % 256, dtype=torch.uint8))
        assert bytewise == (rank == 0 and dtype in (torch.uint8, torch.int8)), f"reduce of {dtype}: {x}"

    flags = torch.tensor([rank == 0, True, False])
    for op, want in [
        ("SUM", [1, 1, 0]),
        ("MAX", [1, 1, 0]),
        ("BOR", [1, 1, 0]),
        ("PRODUCT", [0, 1, 0]),
        ("MIN", [0, 1, 0]),
        ("BAND", [0, 1, 0]),
    ]:
        x = flags.clone()
        dist.all_reduce(x, getattr(dist.ReduceOp, op))
        same(x, torch.tensor(want).bool(), f"all_reduce {op} of bool")
    for op, want in [("BAND", [1, 0]), ("BXOR", [1, 0]), ("BOR", [1, 1]), ("SUM", [1, 1]), ("MIN", [1, 0])]:
        x = torch.tensor([2 << rank, 0 if rank == 2 else 2 << rank], dtype=torch.uint8)  # any byte but 0 is true
        dist.all_reduce(x.view(torch.bool), getattr(dist.ReduceOp, op))
        same(x, torch.tensor(want, dtype=torch.uint8), f"all_reduce {op} of bool bytes")

    # What overflows is not the largest number.
    for dtype in FLOAT8:
        largest = torch.finfo(dtype).max
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist._make_nccl_premul_sum(2.0)):
            x = torch.tensor([largest, -largest, 1.0]).to(dtype)
            dist.all_reduce(x, op)
            assert x.float().isfinite().tolist() == [False, False, True], f"all_reduce {op} {dtype}: {x}"
        x = torch.sparse_coo_tensor([[0, 2]], torch.tensor([largest, 1.0]), (4,)).to(dtype)
        dist.all_reduce(x)
        x = x.to(torch.float32).to_dense()
        assert x.isfinite().tolist() == [False, True, True, True], f"all_reduce of a sparse tensor {dtype}: {x}"

    for factor, shape in itertools.product((0.5, torch.tensor([2.0]), torch.tensor([[2]])), ((3,), ())):
        x = torch.full(shape, rank + 1.0)
        dist.all_reduce(x, dist._make_nccl_premul_sum(factor))
        same(x, torch.full(shape, float(factor) * size * (size + 1) / 2), "all_reduce PREMUL_SUM")
    turn = dist.AllreduceOptions()
    turn.reduceOp = dist._make_nccl_premul_sum(torch.tensor(2j))
    for dtype in COMPLEX:
        x = torch.full((3,), rank + 1.0).to(dtype)
        dist.group.WORLD.allreduce([x], turn).wait()
        same(x, torch.full((3,), 1j * size * (size + 1)).to(dtype), f"all_reduce PREMUL_SUM {dtype}")
    for dtype in FLOAT8:
        x = torch.full((3,), rank + 1.0).to(dtype)
        dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
        same(x, torch.full((3,), 0.5 * size * (size + 1) / 2).to(dtype), f"all_reduce PREMUL_SUM {dtype}")

    with torch.inference_mode():
        x = torch.ones(3)
    dist.all_reduce(x)
    same(x, torch.full((3,), float(size)), "all_reduce of an inference tensor")
    if packed := getattr(torch, "float4_e2m1fn_x2", None):  # two numbers in a byte, with which torch cannot calculate
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist._make_nccl_premul_sum(2.0)):
            try:
                dist.all_reduce(torch.zeros(4, dtype=torch.uint8).view(packed), op)
                raise AssertionError("a sum of float4 was not refused")
            except ValueError as e:
                assert "cannot reduce tensors of type Float4_e2m1fn_x2" in str(e), e
    dist.destroy_process_group()


def lists(rank, size, port):
    """Uneven exchanges, coalesced operations, messages from any rank, objects, sparse tensors."""
    harness.init(rank, size, port)

    # Rank a sends a+b+1 elements to rank b.
    inputs = [torch.full((rank + b + 1,), 10.0 * rank + b) for b in range(size)]
    outputs = [torch.zeros(a + rank + 1) for a in range(size)]
    want = [torch.full((a + rank + 1,), 10.0 * a + rank) for a in range(size)]
    dist.all_to_all(outputs, inputs)
    for a in range(size):
        same(outputs[a], want[a], "all_to_all")
    out = torch.zeros(sum(len(x) for x in want))
    dist.all_to_all_single(out, torch.cat(inputs), [len(x) for x in want], [len(x) for x in inputs])
    same(out, torch.cat(want), "all_to_all_single")
    rows = torch.zeros(len(out), 2)
    dist.all_to_all_single(
        rows, torch.cat(inputs)[:, None].repeat(1, 2), [len(x) for x in want], [len(x) for x in inputs]
    )
    same(rows, torch.cat(want)[:, None].repeat(1, 2), "all_to_all_single of rows")

    for count in (10, 300_000):  # in one operation, and in one each
        xs = [torch.full((count,), rank + i + 0.0) for i in range(3)]
        dist.all_reduce_coalesced(xs)
        for i in range(3):
            same(xs[i], torch.full((count,), sum(r + i for r in range(size)) + 0.0), "all_reduce_coalesced")

    with dist._coalescing_manager(async_ops=True) as manager:
        a, b = torch.ones(3), torch.full((5,), 2.0)
        dist.all_reduce(a)
        dist.all_reduce(b)
    manager.wait()
    same(a, torch.full((3,), 1.0 * size), "coalesced")
    same(b, torch.full((5,), 2.0 * size), "coalesced")
    gathered = [torch.zeros(size * 2), torch.zeros(size * 3)]
    with dist._coalescing_manager():
        for g, n in zip(gathered, (2, 3), strict=True):
            dist.all_gather_into_tensor(g, torch.full((n,), float(rank)))
    for g, n in zip(gathered, (2, 3), strict=True):
        same(g, torch.arange(float(size)).repeat_interleave(n), "coalesced all_gather_into_tensor")
    scattered = [torch.zeros(2), torch.zeros(3)]
    with dist._coalescing_manager():
        for s in scattered:
            dist.reduce_scatter_tensor(s, torch.arange(float(size * len(s))))
    for s in scattered:
        first = rank * len(s)
        same(s, size * torch.arange(first, first + len(s)).float(), "coalesced reduce_scatter_tensor")

    # A source that overlaps its destination.
    x = torch.arange(float(size))
    dist.reduce_scatter_tensor(x[rank : rank + 1], x)
    assert x[rank] == size * rank, x
    x = torch.full((size,), float(rank))
    dist.all_gather_into_tensor(x, x[rank : rank + 1])
    same(x, torch.arange(float(size)), "all_gather_into_tensor in place")

    if rank == 0:
        seen = set()
        for _ in range(1, size):
            x = torch.zeros(2)
            source = dist.recv(x)
            same(x, torch.full((2,), float(source)), "recv")
            seen.add(source)
        assert seen == set(range(1, size)), seen
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    dist.barrier()  # rank 0 may receive from any rank until here

    ops = [dist.P2POp(dist.isend, torch.full((3,), float(rank)), (rank + 1) % size)]
    x = torch.zeros(3)
    ops.append(dist.P2POp(dist.irecv, x, (rank - 1) % size))
    for request in dist.batch_isend_irecv(ops):
        request.wait()
    same(x, torch.full((3,), float((rank - 1) % size)), "batch_isend_irecv")

    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * (100 * rank)})
    assert [o["rank"] for o in objects] == list(range(size)), objects
    box = ["from rank 1"] if rank == 1 else [None]
    dist.broadcast_object_list(box, src=1)
    assert box == ["from rank 1"]

    dense = torch.zeros(4, 2)
    dense[rank] = rank + 1
    dense[3] = 1
    x = dense.to_sparse(1)
    dist.all_reduce(x)
    want = torch.zeros(4, 2)
    for r in range(size):
        want[r] += r + 1
    want[3] += size
    same(x.to_dense(), want, "all_reduce of a sparse tensor")
    x = torch.ones(()).to_sparse()
    dist.all_reduce(x)
    same(x.to_dense(), torch.tensor(float(size)), "all_reduce of a sparse tensor without dimensions")
    # A sum that is rounded before the next 1 is added loses it.
    for dtype, most in [(torch.bfloat16, 256), (torch.float16, 2048), *((t, 16) for t in FLOAT8)]:
        mine = torch.tensor([most if rank == 0 else 1.0, 1.0]).to(dtype)
        x = torch.sparse_coo_tensor([[1, 1]], mine, (3,))
        dist.all_reduce(x)
        x = x.to(torch.float32).to_dense()
        same(x, torch.tensor([0, most + 2 * size - 1.0, 0]).to(dtype).float(), f"all_reduce of a sparse {dtype}")
    # float32 is sent for the types of the first two. The others differ in their numbers of
    # dimensions, or in the order of their lengths.
    for mine in (
        torch.ones(3).to_sparse().to(torch.float32 if rank == 0 else torch.bfloat16),
        torch.ones(3).to_sparse().to(torch.float32 if rank == 0 else torch.float16),
        torch.ones([2] * (1 + rank)).to_sparse(),
        torch.ones(2, 2).to_sparse(1 if rank == 0 else 2),
        torch.ones([2, 3] if rank == 0 else [3, 2]).to_sparse(),
    ):
        try:
            dist.all_reduce(mine)
        except ValueError as e:
            assert "different types" in str(e), e
        else:
            raise AssertionError(f"a sparse {mine.dtype}, {list(mine.shape)}, was added to another type or shape")

    work = dist.all_reduce(torch.ones(3), async_op=True)
    doubled = work.get_future().then(lambda f: f.value()[0] * 2)
    same(doubled.wait(), torch.full((3,), 2.0 * size), "future")
    assert work.is_completed() and work.is_success()
    same(work.result()[0], torch.full((3,), 1.0 * size), "result")
    dist.barrier()
    dist.destroy_process_group()


def uneven(rank, size, port):
    """Lists whose tensors have different shapes, one of them empty."""
    harness.init(rank, size, port)

    def forms(shapes, dtype, of):
        if (0, 2) in shapes:  # an empty tensor has fewer
            return [("contiguous", values(shapes[rank], dtype, of))]
        return layouts(shapes[rank], dtype, of)

    types = (torch.float32, torch.int64, torch.complex64, torch.float8_e5m2, torch.bool)
    for dtype, first in itertools.product(types, (0, 1)):
        shapes = [(first + r, 2) for r in range(size)]
        want = [values(shapes[r], dtype, r) for r in range(size)]
        for name, mine in forms(shapes, dtype, rank):
            outputs = [torch.zeros_like(x) for x in want]
            dist.all_gather(outputs, mine.detach())
            for got, theirs in zip(outputs, want, strict=True):
                same(got, theirs, f"all_gather of {name} {dtype}")
        whole = torch.zeros(sum(x.numel() for x in want)).to(dtype)
        parts = [part.view(x.shape) for part, x in zip(whole.split([x.numel() for x in want]), want, strict=True)]
        dist.all_gather(parts, want[rank])
        same(whole, torch.cat([x.flatten() for x in want]), f"all_gather of {dtype} in one memory")

        for name, output in forms(shapes, dtype, 0):
            parts = [values(shapes[r], dtype, rank) for r in range(size)]
            dist.reduce_scatter(output.detach(), parts, dist.ReduceOp.SUM)
            sums = torch.stack([values(shapes[rank], torch.float32, r) for r in range(size)]).sum(0)
            same(output.detach(), sums.to(dtype), f"reduce_scatter of {name} {dtype}")
            for r in range(size):
                same(parts[r], values(shapes[r], dtype, rank), "input of reduce_scatter")
    parts = [torch.full((r + 1,), rank + 1.0) for r in range(size)]
    dist.reduce_scatter(parts[rank], parts, dist._make_nccl_premul_sum(2.0))
    same(parts[rank], torch.full((rank + 1,), size * (size + 1.0)), "reduce_scatter in place, with a factor")

    x = torch.zeros(size)
    for name, call in (("all_gather", dist.all_gather), ("reduce_scatter", lambda o, i: dist.reduce_scatter(i, o))):
        try:
            call([torch.zeros(r) for r in range(size)], x)
            raise AssertionError(f"{name} took another shape than that of the rank's own")
        except ValueError as e:
            assert "invalid tensor size" in str(e), e
    dist.barrier()
    dist.destroy_process_group()


class Operations(unittest.TestCase):
    def test_operations_give_what_gloo_gives(self):
        harness.run(compare, 3)

    def test_reductions_of_all_types(self):
        harness.run(reductions, 3)

    def test_uneven_lists(self):
        harness.run(uneven, 3)

    def test_lists_coalesced_messages_objects_and_sparse(self):
        harness.run(lists, 3)


if __name__ == "__main__":
    unittest.main()
