"""Programs for torch.distributed that work unchanged."""

import copy
import os
import shutil
import tempfile
import unittest
import unittest.mock

import harness
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn


def model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batch(step, rows):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def train(net, optimizer, rank, size, steps=5):
    """Trains on this rank's rows of each batch, and returns the losses."""
    losses = []
    for step in range(steps):
        x, y = (t.chunk(size)[rank] for t in batch(step, 4 * size))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def alone(size):
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(5):
        x, y = batch(step, 4 * size)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return net


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def data_parallel(rank, size, port):
    from torch.nn.parallel import DistributedDataParallel

    harness.init(rank, size, port)
    net = DistributedDataParallel(model())
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank, size)
    for got, want in zip(net.module.parameters(), alone(size).parameters(), strict=True):
        close(got, want)

    hooked = DistributedDataParallel(model())
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    hooked.register_comm_hook(None, default_hooks.bf16_compress_hook)
    losses = train(hooked, torch.optim.SGD(hooked.parameters(), lr=0.1), rank, size)
    assert all(loss < 10 for loss in losses), losses
    dist.destroy_process_group()


def hooks_that_wait(rank, size, port):
    """Communication hooks of DDP whose callbacks wait for further operations. They give what Gloo's give."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook, quantization_hooks
    from torch.nn.parallel import DistributedDataParallel

    harness.init(rank, size, port)
    gloo = dist.new_group(backend="gloo")

    def trained(group, hook, state):
        net = DistributedDataParallel(model(), process_group=group)
        net.register_comm_hook(state, hook)
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank, size)
        return list(net.parameters())

    def quantized(group):
        return trained(group, quantization_hooks.quantization_pertensor_hook, group)

    def power(group):
        return trained(
            group, powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
        )

    for hooked in (quantized, power):
        for got, want in zip(hooked(dist.group.WORLD), hooked(gloo), strict=True):
            close(got, want)
    dist.destroy_process_group()


def fully_sharded(rank, size, port):
    from torch.distributed.fsdp import fully_shard

    harness.init(rank, size, port)
    net = copy.deepcopy(model())
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank, size)
    for got, want in zip(net.parameters(), alone(size).parameters(), strict=True):
        close(got.full_tensor(), want.detach())
    dist.destroy_process_group()


def tensor_parallel(rank, size, port):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    harness.init(rank, size, port)
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    torch.manual_seed(2)
    for p in net.parameters():
        nn.init.normal_(p)
    want = net(batch(0, 4)[0])
    parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    close(net(batch(0, 4)[0]), want)
    dist.destroy_process_group()


def sharded_and_tensor_parallel(rank, size, port):
    """A mesh of two dimensions: sharded along one, tensor parallel along the other."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    harness.init(rank, size, port)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
    net = model()
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(net, mesh=mesh["dp"])
    train(net, torch.optim.SGD(net.parameters(), lr=0.1, foreach=False), mesh["dp"].get_local_rank(), 2)
    for got, want in zip(net.parameters(), alone(2).parameters(), strict=True):
        close(got.full_tensor(), want.detach())
    dist.destroy_process_group()


def stages(rank, size, port):
    """A stage of a model at each rank, with two schedules, and a pipeline by hand."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    harness.init(rank, size, port)
    whole = model()
    mine = [whole[:2], whole[2:4], whole[4:]][rank]
    x, y = batch(0, 12)
    want = nn.functional.mse_loss(whole(x), y)
    want.backward()
    gradients = [p.grad.clone() for p in mine.parameters()]
    for schedule in (ScheduleGPipe, Schedule1F1B):
        mine.zero_grad()
        stage = PipelineStage(mine, rank, size, torch.device("cpu"))
        pipeline = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        losses = []
        if rank == 0:
            pipeline.step(x)
        elif rank == size - 1:
            pipeline.step(target=y, losses=losses)
            close(torch.stack(losses).mean(), want)
        else:
            pipeline.step()
        for p, gradient in zip(mine.parameters(), gradients, strict=True):
            close(p.grad, gradient)

    # The same with isend and irecv.
    mine.zero_grad()
    pending = []
    inputs, outputs = [], []
    for x_micro, y_micro in zip(x.chunk(4), y.chunk(4), strict=True):
        if rank > 0:
            x_micro = torch.empty(len(x_micro), 16)
            dist.irecv(x_micro, rank - 1).wait()
            x_micro.requires_grad_()
        out = mine(x_micro)
        if rank < size - 1:
            pending.append(dist.isend(out.detach(), rank + 1))
        else:
            out = nn.functional.mse_loss(out, y_micro) / 4
        inputs.append(x_micro)
        outputs.append(out)
    for x_micro, out in zip(inputs, outputs, strict=True):
        if rank == size - 1:
            out.backward()
        else:
            gradient = torch.empty_like(out)
            dist.recv(gradient, rank + 1, tag=1)
            out.backward(gradient)
        if rank > 0:
            pending.append(dist.isend(x_micro.grad, rank - 1, tag=1))
    for work in pending:
        work.wait()
    for p, gradient in zip(mine.parameters(), gradients, strict=True):
        close(p.grad, gradient)
    dist.destroy_process_group()


def checkpoints(rank, size, port, directory):
    """A sharded model is saved and loaded: by as many ranks, by fewer, and while a group trains."""
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    harness.init(rank, size, port)

    def sharded(group):
        torch.manual_seed(rank)  # not the saved values
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        fully_shard(net, mesh=dist.device_mesh.DeviceMesh.from_group(group, "cpu"))
        return net, torch.optim.Adam(net.parameters(), lr=0.1)

    def load(net, optimizer, name, group):
        model_state, optimizer_state = get_state_dict(net, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        checkpoint.load(state, checkpoint_id=f"{directory}/{name}", process_group=group)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    net, optimizer = sharded(dist.group.WORLD)
    train(net, optimizer, rank, size)
    want = [p.full_tensor().clone() for p in net.parameters()]
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    checkpoint.save(state, checkpoint_id=f"{directory}/blocking")
    beside = dist.new_group(list(range(size)))
    saving = checkpoint.async_save(state, checkpoint_id=f"{directory}/async", process_group=beside)
    train(net, optimizer, rank, size, steps=2)  # async_save has copied the state
    saving.result(timeout=harness.LIMIT)
    for name in ("blocking", "async"):
        for members in (list(range(size)), [0, 1]):
            group = dist.new_group(members)
            if rank in members:
                net, optimizer = sharded(group)
                load(net, optimizer, name, group)
                for got, saved in zip(net.parameters(), want, strict=True):
                    close(got.full_tensor(), saved)
    dist.destroy_process_group()


def compiled(rank, size, port, backend):
    """Functional collectives, and collectives in place, in compiled graphs."""
    import torch.distributed._functional_collectives as functional

    harness.init(rank, size, port)
    all_gather = getattr(functional, "all_gather_single", functional.all_gather_tensor)
    reduce_scatter = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)

    @torch.compile(backend=backend, fullgraph=True)
    def exchange(x):
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        gathered = all_gather(total + rank, 0, dist.group.WORLD)
        scattered = reduce_scatter(gathered, "avg", 0, dist.group.WORLD)
        swapped = functional.all_to_all_single(gathered, None, None, dist.group.WORLD)
        x = x + 1
        dist.all_reduce(x)
        return total, gathered, scattered, swapped, x + 1

    x = torch.arange(4.0)
    for _ in range(2):
        total, gathered, scattered, swapped, after = exchange(x)
        close(total, 2 * size * x)
        close(gathered, torch.cat([2 * size * x + r for r in range(size)]))
        close(scattered, gathered.chunk(size)[rank])
        close(swapped, torch.cat([gathered.chunk(size)[rank]] * size))
        close(after, size * (x + 1) + 1)
    dist.destroy_process_group()


def compiled_training(rank, size, port):
    from torch.nn.parallel import DistributedDataParallel

    harness.init(rank, size, port)
    net = torch.compile(DistributedDataParallel(model()), backend="aot_eager")
    train(net, torch.optim.SGD(net.parameters(), lr=0.1), rank, size)
    for got, want in zip(net.parameters(), alone(size).parameters(), strict=True):
        close(got, want)
    dist.destroy_process_group()


def objects(rank, size, port):
    """Collectives of Python objects, in the whole group and in another one."""
    harness.init(rank, size, port)
    odd = dist.new_group([2, 1])
    for group, members in ((dist.group.WORLD, list(range(size))), (odd, [1, 2])):
        if rank not in members:
            continue
        mine = {"rank": rank, "text": "x" * (1000 * rank)}
        everything = [{"rank": r, "text": "x" * (1000 * r)} for r in members]
        got = [None] * len(members)
        dist.all_gather_object(got, mine, group=group)
        assert sorted(o["rank"] for o in got) == members, got
        got = [None] * len(members) if rank == members[-1] else None
        dist.gather_object(mine, got, dst=members[-1], group=group)
        assert got is None or sorted(o["rank"] for o in got) == members, got
        got = [None]
        dist.scatter_object_list(got, everything if rank == members[0] else None, src=members[0], group=group)
        assert got[0]["rank"] in members, got
        got = everything if rank == members[0] else [None] * len(members)
        dist.broadcast_object_list(got, src=members[0], group=group)
        assert got == everything, got
        if rank == members[0]:
            dist.send_object_list(everything, dst=members[1], group=group)
        elif rank == members[1]:
            got = [None] * len(members)
            assert dist.recv_object_list(got, src=members[0], group=group) == members[0]
            assert got == everything, got
    dist.destroy_process_group()


def splits(rank, size, port):
    """split_group, and slices of a mesh, flattened and joined."""
    harness.init(rank, size, port)
    half = dist.split_group(split_ranks=[[0, 1], [3, 2]], group_desc="halves")
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=half)
    assert x.item() == (1 if rank < 2 else 5), x
    assert dist.get_rank(half) == [0, 1, 1, 0][rank], dist.get_rank(half)
    only = dist.split_group(parent_pg=half, split_ranks=[[1, 0]])
    x = torch.tensor([float(rank)])
    dist.broadcast(x, group=only, group_src=0)
    assert x.item() == (1 if rank < 2 else 2), x
    outside = dist.split_group(split_ranks=[[0, 1, 2]])
    assert (rank == 3) == (outside == dist.GroupMember.NON_GROUP_MEMBER), outside

    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    for names, want in ((("a",), (rank % 2) * 2 + 2), (("b",), (rank // 2) * 4 + 1)):
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=mesh[names].get_group())
        assert x.item() == want, (names, x)
    flat = mesh["a", "b"]._flatten("ab")
    x = torch.tensor([float(rank)])
    dist.all_reduce(x, group=flat.get_group())
    assert x.item() == 6, x
    dist.destroy_process_group()


def devices(rank, size, port):
    """A backend for each kind of device, on a machine without GPUs: as with gloo."""
    outcomes = []
    for cpu in ("gloo", "tutti"):
        try:
            harness.init(rank, size, port, backend=f"cpu:{cpu},cuda:nccl")
            x = torch.ones(2)
            dist.all_reduce(x)
            assert x[0] == size
            dist.barrier()
            outcomes.append((dist.get_backend(), dist.get_backend_config().replace(cpu, "")))
            dist.destroy_process_group()
        except Exception as e:  # noqa: BLE001
            outcomes.append((type(e), str(e).replace(cpu, "")))
    gloo, tutti = outcomes
    if "Connection closed by peer" in gloo[1]:  # the other rank has failed before gloo was connected
        assert tutti[0] is gloo[0] and "nccl" in tutti[1], outcomes
    else:
        assert tutti == gloo, outcomes
    harness.init(rank, size, port, backend="cpu:tutti,cuda:tutti")
    dist.barrier()
    dist.destroy_process_group()
    return [str(o) for o in outcomes]


def groups(rank, size, port):
    """new_group, a mesh of two dimensions, functional collectives, the same store again."""
    import torch.distributed._functional_collectives as functional

    harness.init(rank, size, port)
    pair = dist.new_group([0, 1])
    if rank < 2:
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x, group=pair)
        assert x.item() == 3
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("a", "b"))
    x = torch.ones(3)
    dist.all_reduce(x, group=mesh["b"].get_group())
    assert x[0] == size // 2
    x = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert (x + 0)[0] == size
    gathered = functional.all_gather_tensor(torch.tensor([float(rank)]), 0, dist.group.WORLD)
    assert torch.equal(gathered + 0, torch.arange(float(size)))
    dist.destroy_process_group()

    # The same store again.
    for _ in range(3):
        harness.init(rank, size, port)
        dist.barrier()
        dist.destroy_process_group()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, i):
        return torch.tensor([float(i)])


def loaders(rank, size, port):
    """Worker processes, however they are started, while the group is in use."""
    from torch.utils.data import DataLoader

    harness.init(rank, size, port)
    for method in ("fork", "spawn", "forkserver"):
        total = torch.zeros(1)
        for x in DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method):
            y = x.sum().reshape(1)
            dist.all_reduce(y)
            total += y
        assert total.item() == size * sum(range(40)), (method, total)
    dist.destroy_process_group()


class Programs(unittest.TestCase):
    def test_distributed_data_parallel(self):
        harness.run(data_parallel, 3)

    def test_hooks_that_wait(self):
        harness.run(hooks_that_wait, 2)

    @unittest.skipUnless(hasattr(fsdp, "fully_shard"), "this torch has no fsdp.fully_shard")
    def test_fully_sharded_data_parallel(self):
        harness.run(fully_sharded, 2)

    def test_tensor_parallel(self):
        harness.run(tensor_parallel, 2)

    @unittest.skipUnless(hasattr(fsdp, "fully_shard"), "this torch has no fsdp.fully_shard")
    def test_sharded_and_tensor_parallel(self):
        harness.run(sharded_and_tensor_parallel, 4)

    @unittest.skipUnless(hasattr(fsdp, "fully_shard"), "stages of this torch need their inputs beforehand")
    def test_pipeline_stages(self):
        harness.run(stages, 3)

    @unittest.skipUnless(hasattr(fsdp, "fully_shard"), "this torch has no fsdp.fully_shard")
    def test_checkpoints(self):
        with tempfile.TemporaryDirectory() as directory:
            harness.run(checkpoints, 3, directory)

    def test_compiled_graphs(self):
        harness.run(compiled, 2, "aot_eager")

    @unittest.skipUnless(shutil.which(os.environ.get("CXX", "g++")), "needs a C++ compiler")
    def test_compiled_code(self):
        with tempfile.TemporaryDirectory() as directory:
            with unittest.mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=directory):
                harness.run(compiled, 2, "inductor")

    def test_compiled_training(self):
        harness.run(compiled_training, 2)

    def test_object_collectives(self):
        harness.run(objects, 3)

    @unittest.skipUnless(harness.has("split"), "split_group of this torch needs an accelerator")
    def test_split_groups_and_meshes(self):
        harness.run(splits, 4)

    def test_a_backend_for_each_device(self):
        harness.run(devices, 2)

    def test_groups_and_functional_collectives(self):
        harness.run(groups, 4)

    def test_data_loaders_with_worker_processes(self):
        harness.run(loaders, 2)


if __name__ == "__main__":
    unittest.main()
