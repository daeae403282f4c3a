r"""Data-parallel training that goes on when a rank dies, and takes a replacement in: after make torch

    PYTHONPATH=shim/torch go run ./cmd/tutti run -n 3 --on-failure shrink --max-restarts 1 -- \
        ~/.cache/tutti/torch-2.15.0/bin/python examples/torch_elastic.py

Rank 1 kills itself (DIES=0 for another one). The others go on at once, with their processes, model
and optimizer. tutti run starts the rank again; it takes its slot and gets the others' state.
"""

import os
import signal

import torch
import torch.distributed as dist
import tutti_torch
from torch.nn.parallel import DistributedDataParallel

STEPS, DEATH = 100, 20
DIES = int(os.environ.get("DIES", "1"))

dist.init_process_group("tutti", init_method="tutti://")  # a replacement returns when the others admit it
rank, size = dist.get_rank(), dist.get_world_size()
torch.set_num_threads(1)
torch.manual_seed(0)
teacher = torch.nn.Linear(32, 8)
net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
torch.manual_seed(1 + rank)  # each rank draws inputs of its own
# DDP's own collectives, of its construction and of its second step, are off: a replacement would be
# alone in them.
model = DistributedDataParallel(net, init_sync=False, find_unused_parameters=True)
model.register_comm_hook(None, tutti_torch.ddp_hook)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
step = torch.zeros(1, dtype=torch.long)


def catch_up():
    """Takes over all of the state of a rank that has made the most steps, or nothing if that one dies."""
    steps = torch.full((size,), -1)
    dist.all_gather_into_tensor(steps, step)  # an empty slot stays -1
    root = int(steps.argmax())
    state = [net.state_dict(), optimizer.state_dict()]
    dist.broadcast_object_list(state, root)  # what has not come as a whole changes nothing
    net.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    step.copy_(steps[root])


fresh = True  # this rank, or another one, may lack the state
sums = torch.zeros(2)  # of the losses, and of the ranks
while step < STEPS or (sums[1] < size and step < 1000 * STEPS):
    try:
        fresh = fresh or tutti_torch.admit() > 0
        if fresh:
            catch_up()
            print(f"rank {rank} begins at step {int(step)} with ranks {tutti_torch.active_ranks()}", flush=True)
        fresh = False
        optimizer.zero_grad()
        inputs = torch.randn(64, 32)
        loss = (model(inputs) - teacher(inputs)).square().mean()
        if step == DEATH and rank == DIES and "TUTTI_RESTART" not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        sums = torch.tensor([loss.item(), 1.0])
        dist.all_reduce(sums)
        done = True
    except dist.DistBackendError as lost:
        print(f"rank {rank} repeats step {int(step)}: {lost}", flush=True)
        done = False
    if tutti_torch.agree(done):  # the step may have succeeded at some ranks only
        optimizer.step()
        step += 1
        if step % 20 == 0 and step <= STEPS:
            print(f"rank {rank} step {int(step)}: loss {sums[0] / sums[1]:.4f} of {int(sums[1])} ranks", flush=True)
    else:
        fresh = True

state = sum(parameter.double().sum() for parameter in net.parameters())
print(f"rank {rank} ends after step {int(step)}: loss {sums[0] / sums[1]:.4f}, state {state:.9f}")
dist.destroy_process_group()
