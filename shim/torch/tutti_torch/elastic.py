"""Groups that go on when ranks die, and take replacements in."""

import os
from datetime import timedelta
from urllib.parse import parse_qs, urlparse

_OF_THE_GROUP = timedelta(0)


def _backend(group):
    import tutti_torch

    return tutti_torch._backend(group)


def recover(group=None, timeout=None):
    """Makes a group usable again after an operation failed by a timeout, a mismatch or a lost rank.

    A collective of all ranks that are left, which returns when all have called it. With on_failure
    "shrink" or "retry" it is not needed after the loss of a rank. In a group that met in a c10d store
    no rank can be removed: recover raises an error that names the lost one. timeout is a timedelta;
    the group's timeout counts besides.
    """
    _backend(group).recover(timeout or _OF_THE_GROUP)


def admit(group=None, timeout=None):
    """Takes in the ranks that wait to join, and returns their number, the same at every rank.

    A collective of all ranks, for a step boundary. The init_process_group of an admitted rank returns
    meanwhile; its first operation is the one that follows here.
    """
    backend = _backend(group)
    admitted = backend.admit(timeout or _OF_THE_GROUP)
    _count_groups(backend)  # with TUTTI_AUTO_ADMIT ranks may have come in before
    return admitted


def agree(yes, group=None, timeout=None):
    """Returns whether all ranks have given true: the same at every rank, even if ranks die meanwhile.

    A collective with an order of its own: it can follow an operation that has failed at some ranks, to
    decide whether all go on or repeat it.
    """
    return _backend(group).agree(bool(yes), timeout or _OF_THE_GROUP)


def ddp_hook(group, bucket):
    """A communication hook of DistributedDataParallel: averages gradients over the active ranks.

        model.register_comm_hook(None, tutti_torch.ddp_hook)

    Without it, DDP divides by the number of slots, lost ranks included. group is a process group, or
    None for the default one.
    """
    import torch.distributed as dist

    import tutti_torch

    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=group, async_op=True)
    return tutti_torch._load().first_result(work)


def _count_groups(backend):
    """Lets c10d number the next groups alike at all ranks: replacements have not made the earlier ones."""
    from torch.distributed.distributed_c10d import _world

    epoch = backend.view()[0]  # the same at all ranks when some have come in
    if epoch > 1:
        _world.group_count = max(_world.group_count, epoch << 32)  # no rank makes as many groups


def _environments(options, group):
    """Reports whether a group is the job that the environment describes, in a store that outlives ranks."""
    env = os.environ
    store = options.store or env.get("TUTTI_STORE")
    secret = env.get("TUTTI_SECRET") or env.get("TUTTI_SECRET_FILE")
    if group.global_ranks_in_group or not store or not secret:  # only new groups list their ranks
        return False
    here = (str(group.group_rank), str(group.group_size))
    return here in (
        (env.get("TUTTI_RANK"), env.get("TUTTI_SIZE")),
        (env.get("RANK"), env.get("WORLD_SIZE")),
    )


def _rendezvous(url, timeout=timedelta(minutes=5), **_):
    """The handler of init_method="tutti://": the job's own store, of which no rank is the host."""
    import tutti_torch

    given = {name: values[-1] for name, values in parse_qs(urlparse(url).query).items()}
    place = []
    for name, variable in (("rank", "RANK"), ("world_size", "WORLD_SIZE")):
        value = given.get(name) or os.environ.get(variable)
        if not value:
            raise ValueError(f"tutti://: {variable} is not set: start the program with tutti run, or give {name}")
        place.append(int(value))
    yield (tutti_torch._load().JobStore("", timeout), *place)
    raise RuntimeError("tutti://: ranks of a running job are replaced, and do not meet again")


def register_rendezvous():
    """Registers init_method="tutti://" with torch.distributed, once."""
    from torch.distributed.rendezvous import register_rendezvous_handler

    try:
        register_rendezvous_handler("tutti", _rendezvous)
    except RuntimeError:  # it is registered already
        pass
