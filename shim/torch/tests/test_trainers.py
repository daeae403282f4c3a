"""Trainers from PyPI, which know nothing of Tutti."""

import importlib.util
import os
import tempfile
import unittest

import harness
import torch
import torch.distributed as dist
from torch import nn

ROWS = 22  # not a multiple of the batches of all ranks


def data():
    generator = torch.Generator().manual_seed(3)
    return torch.randn(ROWS, 8, generator=generator), torch.arange(float(ROWS))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def accelerated(rank, size, port, directory):
    """Training with accelerate: gradients accumulate, metrics are gathered, the state is saved."""
    # accelerate takes an existing group. If it makes one for CPUs, that is always of gloo.
    harness.init(rank, size, port)

    def no_gloo(*_, **__):
        raise AssertionError("a group of gloo was made")

    dist.distributed_c10d.ProcessGroupGloo = no_gloo
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list, gather_object, set_seed
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == size and accelerator.process_index == rank
    set_seed(4)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    loader = DataLoader(TensorDataset(*data()), batch_size=4, num_workers=1)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    assert isinstance(net, nn.parallel.DistributedDataParallel)
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = nn.functional.mse_loss(net(x).squeeze(1), y / ROWS)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    seen = [accelerator.gather_for_metrics(y) for _, y in loader]
    assert torch.equal(torch.cat(seen).sort().values, data()[1]), seen

    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    everywhere = accelerator.gather(flat[None])
    assert all(torch.equal(other, flat) for other in everywhere), "the models have diverged"
    assert not torch.equal(flat, torch.cat([p.detach().flatten() for p in network().parameters()]))
    assert accelerator.reduce(torch.tensor([float(rank)]), "sum").item() == sum(range(size))
    padded = accelerator.pad_across_processes(torch.ones(rank + 1), dim=0)
    assert len(padded) == size
    assert gather_object([{"rank": rank}]) == [{"rank": r} for r in range(size)]
    assert broadcast_object_list([rank], from_process=1) == [1]

    accelerator.save_state(directory)
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    accelerator.load_state(directory)
    assert torch.equal(torch.cat([p.detach().flatten() for p in net.parameters()]), flat)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    if dist.is_initialized():
        dist.destroy_process_group()


class Trainers(unittest.TestCase):
    @unittest.skipUnless(importlib.util.find_spec("accelerate"), "needs accelerate: make deps-torch installs it")
    def test_accelerate(self):
        with tempfile.TemporaryDirectory() as directory:
            harness.run(accelerated, 2, directory)


if __name__ == "__main__":
    unittest.main()
