"""Groups whose members the program names: torch's reconfigure."""

import os
import signal
import time
import unittest
from datetime import timedelta

import harness
import torch
import torch.distributed as dist
import tutti_torch
from test_failures import raise_late, raises
from test_guest import PythonStore


def start(rank, size, port):
    """Makes a group that has no members yet, and returns the handles of all ranks, by rank."""
    harness.init(rank, size, port, timeout=timedelta(seconds=20), **{"enable_reconfigure": True})
    assert dist._supports_reconfigure()
    return share(rank, size, port, "handle", dist._get_reconfigure_handle())


def share(rank, size, port, name, text):
    """Returns the texts that all ranks give, by rank."""
    store = harness.store(port)
    store.set(f"{name}/{rank}", text)
    return [store.get(f"{name}/{r}").decode() for r in range(size)]


def works(rank, size):
    """Checks that this rank is rank of size, and that all of them reduce."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size), (dist.get_rank(), dist.get_world_size())
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == size * (size + 1) / 2, x
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    assert [p.item() for p in parts] == list(range(size)), parts


def forms(rank, size, port):
    handles = start(rank, size, port)
    raises(RuntimeError, "call reconfigure", dist.all_reduce, torch.ones(1))
    assert dist._reconfigure(1, handles).wait()
    works(rank, size)
    assert dist._reconfigure(2, handles[::-1]).wait()  # the order of a list gives the ranks
    works(size - 1 - rank, size)
    assert dist._reconfigure(3, set(handles)).wait()
    works(sorted(handles).index(handles[rank]), size)
    dist.barrier()
    dist.destroy_process_group()
    raises(ValueError, "", dist.all_reduce, torch.ones(1))


def without_members(rank, size, port):
    """What a group without members cannot do is an error that says so, and the group can be given some."""
    handles, group = start(rank, size, port), dist.group.WORLD
    backend = group._get_backend(torch.device("cpu"))
    calls = [
        lambda: tutti_torch.agree(True),
        lambda: tutti_torch.empty(3),
        lambda: group.new_window(torch.ones(1)),
        lambda: backend.send([torch.ones(1)], 1, 0),
        lambda: backend.recv([torch.ones(1)], 1, 0),
        dist.barrier,
        tutti_torch.active_ranks,
        tutti_torch.admit,
        tutti_torch.recover,
    ]
    if not harness.FALLBACK:
        calls.append(lambda: backend.mem_allocator)
    for call in calls:
        raises(dist.DistBackendError, "call reconfigure", call)
    raises(RuntimeError, "call reconfigure", backend.suspend)
    backend.resume()
    raises(dist.DistBackendError, "call reconfigure", dist.barrier)
    dist._reconfigure(1, handles)
    works(rank, size)
    dist.destroy_process_group()


def from_a_group(rank, size, port):
    """A group that was made in the usual way can be reconfigured too."""
    harness.init(rank, size, port)
    works(rank, size)
    handles = share(rank, size, port, "handle", dist._get_reconfigure_handle())
    dist._reconfigure(7, handles[1:] + handles[:1])
    works((rank + size - 1) % size, size)
    dist.destroy_process_group()


def divided(rank, size, port):
    """A group that was reconfigured can be divided over the store, as any other."""
    handles = start(rank, size, port)
    dist._reconfigure(1, handles)
    works(rank, size)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    part = backend.split(dist.PrefixStore("part", harness.store(port)), [2, 0], backend.options)
    if rank == 1:
        assert part is None
    else:
        x = torch.tensor([rank + 1.0])
        part.allreduce([x]).wait()
        assert (x.item(), part.rank(), part.size()) == (4.0, int(rank == 0), 2), (x, part.rank(), part.size())
        part.shutdown()
    group = dist.new_group([0, 1])
    if rank < 2:
        x = torch.ones(1)
        dist.all_reduce(x, group=group)
        assert x.item() == 2
    dist.destroy_process_group()


def reused(rank, size, port):
    """A uuid is used once. The group stays as it was."""
    handles = start(rank, size, port)
    dist._reconfigure(1, handles)
    for again in (handles, handles[::-1], [handles[rank]]):
        raises(ValueError, "used already", dist._reconfigure, 1, again)
    works(rank, size)
    raises(ValueError, "handles[0]", dist._reconfigure, 2, ["nonsense"])
    raises(ValueError, "handles[0] too", dist._reconfigure, 2, [handles[rank]] * 2)
    raises(ValueError, "this member's too", dist._reconfigure, 2, [handles[(rank + 1) % size]])
    raises(ValueError, "number of handles", dist._reconfigure, 2, [])
    works(rank, size)
    dist.destroy_process_group()


def disjoint(rank, size, port):
    """Two groups form at the same time, merge, and divide in another way."""
    handles = start(rank, size, port)
    if rank < 2:
        dist._reconfigure(1, handles[:2])
        works(rank, 2)
    else:
        dist._reconfigure(1, handles[2:])
        works(rank - 2, size - 2)
    dist._reconfigure(2, handles)
    works(rank, size)
    if rank == 0:
        dist._reconfigure(3, handles[:1])
        works(0, 1)
    else:
        dist._reconfigure(3, handles[1:])
        works(rank - 1, size - 1)
    dist.destroy_process_group()


def same_uuid(rank, size, port):
    """Two groups with the same uuid, of processes that share a store, do not see each other's barriers."""
    harness.init(rank % 2, 2, port, timeout=timedelta(seconds=20), enable_reconfigure=True)
    handles = share(rank, size, port, "handle", dist._get_reconfigure_handle())
    dist._reconfigure(1, handles[:2] if rank < 2 else handles[2:])
    works(rank % 2, 2)
    if rank >= 2:
        dist.group.WORLD.monitored_barrier()
    harness.meet(port, "those have passed", size)
    if rank == 1:  # rank 0 does not come
        raises(
            dist.DistBackendError,
            "has not answered",
            dist.group.WORLD.monitored_barrier,
            timedelta(milliseconds=200),
        )
    harness.meet(port, "over", size)
    dist.destroy_process_group()


def shrunk(rank, size, port):
    """Ranks shrink a group together although one of them has shrunk the group that it was in before."""
    handles = start(rank, size, port)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    dist._reconfigure(1, handles)
    if rank == 0:
        backend.shrink([1, 2]).shutdown()
    dist._reconfigure(2, handles)
    if rank < 2:
        part = backend.shrink([2])
        part.allreduce([x := torch.ones(1)]).wait()
        assert x.item() == 2, x
        part.shutdown()
    dist.destroy_process_group()


def after_abort(rank, size, port):
    handles = start(rank, size, port)
    dist._reconfigure(1, handles)
    works(rank, size)
    harness.meet(port, "through", size)
    if rank == 1:
        dist.group.WORLD.abort()
    raises(dist.DistBackendError, "aborted", dist.barrier)
    dist._reconfigure(2, handles)
    works(rank, size)
    dist.destroy_process_group()


def after_timeout(rank, size, port):
    handles = start(rank, size, port)
    if rank == 0:  # the others do not come
        text = raises(
            dist.DistBackendError,
            "rank 1 is member",
            dist._reconfigure,
            1,
            handles,
            timeout=timedelta(seconds=5),
        )
        assert "rank 2 is member" in text, text
    share(rank, size, port, "over", "1")
    if rank != 0:  # they are told that it has given up
        raises(dist.DistBackendError, "gave up", dist._reconfigure, 1, handles)
    dist._reconfigure(2, handles)
    works(rank, size)
    harness.meet(port, "through", size)  # the timeout would fail a rank that is still in an operation
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(milliseconds=200)
        raises(dist.DistBackendError, "timed out", lambda: dist.group.WORLD.allreduce([torch.ones(1)], options).wait())
    share(rank, size, port, "late", "1")
    dist._reconfigure(3, handles)
    works(rank, size)
    dist.destroy_process_group()


def after_set_timeout(rank, size, port):
    """The timeout that was set bounds a group that forms afterwards, and not that of its member."""
    handles = start(rank, size, port)
    dist.group.WORLD.set_timeout(timedelta(milliseconds=300))
    dist._reconfigure(1, handles, timeout=timedelta(seconds=20))
    harness.meet(port, "formed", size)
    if rank == 0:
        begin = time.monotonic()
        raises(dist.DistBackendError, "the timeout of 300 ms has passed", dist.all_reduce, torch.ones(1))
        raises(dist.DistBackendError, "timed out", tutti_torch.recover)
        raises(dist.DistBackendError, "timed out", tutti_torch.agree, True)
        assert time.monotonic() - begin < 10, "the timeout of the member was used"
    harness.meet(port, "over", size)
    dist.destroy_process_group()


def different(rank, size, port):
    """Members with different lists get errors, and can form a group afterwards."""
    handles = start(rank, size, port)
    text = raises(dist.DistBackendError, "", dist._reconfigure, 1, handles[::-1] if rank == 0 else handles)
    if rank == 0:
        assert "ranks disagree" in text, text
    dist._reconfigure(2, handles)
    works(rank, size)
    dist.destroy_process_group()


def dies(rank, size, port):
    """A member is killed in a group: the others go on without it, and then with a new one."""
    handles = start(rank, size, port)
    dist._reconfigure(1, handles)
    works(rank, size)
    harness.meet(port, "through", size)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raises(dist.DistBackendError, "rank 1", lambda: [dist.barrier() for _ in range(10)])
    raises(dist.DistBackendError, "rank 1", dist._reconfigure, 2, handles)
    left = [handles[0], handles[2]]
    dist._reconfigure(3, left)
    works(left.index(handles[rank]), 2)
    dist.destroy_process_group()


def interrupted(rank, size, port):
    """A signal handler that raises ends the wait for the other members. They are told."""
    handles = start(rank, size, port)
    if rank == 0:

        def handler(*_):
            raise KeyboardInterrupt

        harness.handle_later(handler)
        raises(KeyboardInterrupt, "", dist._reconfigure, 1, handles)
    share(rank, size, port, "over", "1")
    if rank != 0:
        raises(dist.DistBackendError, "gave up", dist._reconfigure, 1, handles)
    dist._reconfigure(2, handles)
    works(rank, size)
    dist.group.WORLD.monitored_barrier(timedelta(seconds=60))
    dist.destroy_process_group()


def ended_while_it_waits(rank, size, port, how, text):
    """A wait for the other members ends when the group does."""
    handles = start(rank, size, port)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if rank == 0:
        harness.handle_later(lambda *_: getattr(backend, how)())
        raises(dist.DistBackendError, text, dist._reconfigure, 1, handles)
    share(rank, size, port, "over", "1")
    if rank != 0:
        raises(dist.DistBackendError, "rank 0", dist._reconfigure, 1, handles)
    if how == "abort":
        handles = share(rank, size, port, "another", dist._get_reconfigure_handle())
        dist._reconfigure(2, handles)
        works(rank, size)
    dist.destroy_process_group()


class Ends(PythonStore):
    """A store that destroys the group when members agree on a secret, as a signal handler may then."""

    def compare_set(self, key, expected, desired):
        dist.destroy_process_group()
        return super().compare_set(key, expected, desired)


def ended_meanwhile(rank, size, port):
    """A group is destroyed while its member is made."""
    store = Ends(port)
    dist.init_process_group("tutti", store=store, rank=rank, world_size=size)
    raises(dist.DistBackendError, "shut down", dist._get_reconfigure_handle)


def forms_late(rank, size, port):
    """A signal handler raises when the new group has been made. It is closed, and the old one remains."""
    handles = start(rank, size, port)
    dist._reconfigure(1, handles)
    raise_late(rank, port, lambda: dist._reconfigure(2, handles))
    dist._reconfigure(3, handles)
    works(rank, size)
    dist.barrier()
    dist.destroy_process_group()


def options(rank, size, port):
    """Members that share no store need a secret of the environment."""
    os.environ["TUTTI_SECRET"] = "a secret that all processes have"
    opts = tutti_torch.Options()
    opts.transport = "tcp"
    dist.init_process_group(
        "tutti", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True, pg_options=opts
    )
    handles = share(rank, size, port, "handle", dist._get_reconfigure_handle())
    dist._reconfigure(1, handles)
    works(rank, size)
    dist.destroy_process_group()


def merged(rank, size, port):
    """Groups of new_group become groups of each other's processes."""
    harness.init(rank, size, port, timeout=timedelta(seconds=20))
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    handles = share(rank, size, port, "handle", dist._get_reconfigure_handle(group))
    mine = [0, 3] if rank in (0, 3) else [2, 1]
    dist._reconfigure(1, [handles[r] for r in mine], group)
    dist.all_reduce(x := torch.tensor([float(rank)]), group=group)
    assert x.item() == 3, x
    if not harness.FALLBACK:  # a process keeps its rank and the size of the group
        dist._reconfigure(2, handles, group)
        dist.all_reduce(x := torch.tensor([float(rank)]), group=group)
        assert x.item() == 6, x
    dist.destroy_process_group()


def own_options(rank, size, port):
    """What the options say of the group itself does not concern its members."""
    with harness.reserved_port("") as free:
        opts = tutti_torch.Options()
        opts.ports, opts.transport = str(free), "shm"
        harness.init(rank, size, port, timeout=timedelta(seconds=20), pg_options=opts)
        handles = share(rank, size, port, "handle", dist._get_reconfigure_handle())
        for uuid in (1, 2):
            dist._reconfigure(uuid, handles)
            works(rank, size)
        dist.destroy_process_group()
    opts = tutti_torch.Options()
    opts.on_failure = "retry"
    harness.init(rank, size, port, timeout=timedelta(seconds=20), pg_options=opts, enable_reconfigure=True)
    dist._reconfigure(1, share(rank, size, port, "another", dist._get_reconfigure_handle()))
    works(rank, size)
    dist.destroy_process_group()


keeps_place = harness.needs_module("a process keeps its rank and the size of the group")


@unittest.skipUnless(hasattr(dist, "_reconfigure"), "this torch has no reconfigure")
class Reconfigure(unittest.TestCase):
    @keeps_place
    def test_handles_give_the_ranks(self):
        harness.run(forms, 3)

    def test_group_without_members(self):
        harness.run(without_members, 1)

    @keeps_place
    def test_usual_group_is_reconfigured(self):
        harness.run(from_a_group, 3)

    def test_reconfigured_group_is_divided(self):
        harness.run(divided, 3)

    @keeps_place
    def test_wrong_arguments_leave_the_group_as_it_was(self):
        harness.run(reused, 3)

    @keeps_place
    def test_disjoint_groups_form_at_once_and_merge(self):
        harness.run(disjoint, 3)

    def test_groups_with_the_same_uuid(self):
        harness.run(same_uuid, 4)

    def test_shrink_in_one_of_the_groups_before(self):
        harness.run(shrunk, 3)

    def test_after_an_abort(self):
        harness.run(after_abort, 3)

    def test_after_a_timeout(self):
        harness.run(after_timeout, 3)

    def test_timeout_that_was_set_before(self):
        harness.run(after_set_timeout, 2)

    def test_after_an_interrupt(self):
        harness.run(interrupted, 3)

    def test_handler_raises_after_the_group_is_made(self):
        harness.run(forms_late, 2)

    def test_group_that_ends_while_its_member_is_made(self):
        harness.run(ended_meanwhile, 1)

    def test_abort_while_it_waits_for_members(self):
        harness.run(ended_while_it_waits, 2, "abort", "aborted")

    def test_shutdown_while_it_waits_for_members(self):
        harness.run(ended_while_it_waits, 2, "shutdown", "shut down")

    def test_groups_of_new_group_are_merged(self):
        harness.run(merged, 4)

    def test_options_of_the_group_itself(self):
        harness.run(own_options, 2)

    @keeps_place
    def test_different_lists(self):
        harness.run(different, 3)

    @keeps_place
    def test_without_a_common_store(self):
        harness.run(options, 3)

    @keeps_place
    def test_after_a_death(self):
        harness.run(dies, 3, killed=[1])


if __name__ == "__main__":
    unittest.main()
