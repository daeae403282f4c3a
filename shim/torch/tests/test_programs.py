"""Programs for torch.distributed that work unchanged."""

import copy
import unittest

import harness
import torch
import torch.distributed as dist
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


def groups(rank, size, port):
    """new_group, a mesh of two dimensions, split_group, functional collectives."""
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

    def test_fully_sharded_data_parallel(self):
        harness.run(fully_sharded, 2)

    def test_tensor_parallel(self):
        harness.run(tensor_parallel, 2)

    def test_groups_and_functional_collectives(self):
        harness.run(groups, 4)

    def test_data_loaders_with_worker_processes(self):
        harness.run(loaders, 2)


if __name__ == "__main__":
    unittest.main()
