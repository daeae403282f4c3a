"""What happens to a group besides its operations: it is made smaller, suspended, watched."""

import hashlib

from . import api, groups
from .groups import entry
from .interrupt import SLICE
from .store import another
from .window import Window
from .work import C10D, error_of, milliseconds, refuse_if_forked

# The flag of shrink that ends operations under way: SHRINK_ABORT of torch.distributed.
_SHRINK_ABORT = 1


class _Extension:
    """Time that is added to the timeouts of operations until the first of them has ended."""

    def __init__(self, time):
        self.time, self.first = time, None


class Lifecycle:
    """A part of Backend."""

    @property
    def supports_splitting(self):
        return True

    @property
    def supports_shrinking(self):
        return True

    @property
    def supports_window(self):
        return True

    @property
    def supports_abort_hooks(self):
        return True

    @property
    def supports_completion_hooks(self):
        return False  # torch lets Python neither register nor forward them

    def split(self, store, ranks, opts):
        ranks = list(ranks)
        if not all(isinstance(rank, int) for rank in ranks):
            raise TypeError(f"tutti split: the ranks are {ranks}, expected numbers")
        if self._rank not in ranks:
            return groups.not_member()
        return self._part(store, ranks, opts)

    def _part(self, store, ranks, opts):
        """Makes the group of some ranks of this one, of which this rank is one."""
        options, places = self._options_beside(opts), self._options.global_ranks_in_group
        if places:
            options.global_ranks_in_group = [places[rank] for rank in ranks]
        return type(self)(store, ranks.index(self._rank), len(ranks), options)

    def merge(self, store, opts, rank, size):
        if not isinstance(store, C10D.Store):
            raise TypeError(f"tutti merge: expected a store, got {type(store).__name__}")
        return type(self)(store, rank, size, self._options_beside(opts))

    def _options_beside(self, opts):
        """Returns the options of another group of the process, for which c10d gives these."""
        options = (opts if isinstance(opts, type(self._options)) else self._options).copy()
        if opts is not None:
            options._timeout = opts._timeout
        options.part_from(self._options, self._closed)  # c10d gives a copy of these if the program gives none
        options.environment = False  # the new group is not the job of the environment
        options.enable_reconfigure = False  # it has its members
        options.group_name = "" if opts is None else opts.group_name
        options.global_ranks_in_group = []
        return options

    @entry
    def shrink(self, ranks_to_exclude, shrink_flags, opts_override):
        """The remaining ranks make a new group, in a part of the store that the excluded ranks do not know."""
        excluded = set(ranks_to_exclude)
        if not excluded:
            raise ValueError("tutti shrink: there are no ranks to exclude, expected at least one")
        for rank in sorted(excluded):
            if not 0 <= rank < self._size:
                raise ValueError(f"tutti shrink: a rank to exclude is {rank}, expected 0 to {self._size - 1}")
        if self._rank in excluded:
            raise ValueError(
                f"tutti shrink: rank {self._rank} excludes itself: only the ranks that remain call shrink"
            )
        if shrink_flags & ~_SHRINK_ABORT:
            raise ValueError(
                f"tutti shrink: the flags are {shrink_flags}, expected SHRINK_DEFAULT or SHRINK_ABORT"
            )
        if shrink_flags & _SHRINK_ABORT:
            self.abort()
        with self._lock:
            self._shrinks += 1
            place = f"{self._prefix}shrunk/{self._shrinks}"
        remaining = [rank for rank in range(self._size) if rank not in excluded]
        # It is as long for any number of ranks: stores bound their keys.
        ranks = "".join(f"-{rank}" for rank in remaining)
        place += "-" + hashlib.sha1(ranks.encode(), usedforsecurity=False).hexdigest()
        store = C10D.PrefixStore(place, another(self._store))
        return self._part(store, remaining, opts_override)

    def suspend(self):
        """All ranks call suspend, and later resume.

        In between the group has no memory and no connections, and its operations fail.
        """
        refuse_if_forked()
        if any(not work.poll() for work in self._running.all()):
            raise RuntimeError("tutti suspend: an operation is under way: wait for it first")
        with self._lock:
            if self._closed:
                raise RuntimeError("tutti suspend: the process group was shut down")
            if self._outlives:
                raise RuntimeError(
                    "tutti suspend: a group that goes on without lost ranks cannot be suspended, because its ranks "
                    "would be lost: destroy the group, and make it again"
                )
            if self._formed:
                raise RuntimeError(
                    "tutti suspend: a group that reconfigure has made cannot be suspended: reconfigure it when it is "
                    "needed again"
                )
            if self._suspended:
                return
            if not self._group:
                raise RuntimeError("tutti suspend: the process group has no members yet: call reconfigure")
            self._suspended = True
            group, self._group = self._group, 0
        api.api().tutti_close(group)

    def resume(self):
        refuse_if_forked()
        with self._lock:
            if self._closed:
                raise RuntimeError("tutti resume: the process group was shut down")
            if not self._suspended:
                return
        self._join()
        with self._lock:
            if not self._closed:
                self._running.recovered()
                self._suspended = False
                return
        api.api().tutti_close(self._group)  # _close may have come before the join had made it
        raise error_of(api.ECLOSED, "tutti resume: the process group was shut down")

    def memory_stats(self):
        refuse_if_forked()
        under_way = [work for work in self._running.all() if not work.poll()]
        return {
            "operations": len(under_way),
            "operation_bytes": sum(work.held() for work in under_way),
            "window_bytes": self._window_bytes.value,
        }

    def new_window(self, tensor=None):
        group = self._handle("tutti new_window")

        def same():
            if self._handle("tutti window") != group:
                raise error_of(
                    api.ECLOSED,
                    "tutti window: the process group was made anew since new_window: make another window",
                )
            return group

        barrier = lambda: self.barrier(C10D.BarrierOptions()).wait()  # noqa: E731
        window = Window(same, self._rank, self._size, self._options._timeout, barrier, self._window_bytes)
        if tensor is not None:
            window.tensor_register(tensor, True)
        return window

    def _wait_for_pending_works(self):
        refuse_if_forked()
        for work in self._running.all():
            while not (work.await_(SLICE) and self._running.await_removal(work, SLICE)):
                pass

    def _enable_collectives_timing(self):
        pass  # always on

    def _register_on_completion_hook(self, hook):
        if self._running.hooks.watches():
            raise RuntimeError("tutti: the group has an on-completion hook already, expected one at most")
        own, self.hook_in_python = self.hook_in_python, None
        self._running.hooks.set_info(own or hook)

    def register_abort_hook(self, hook_id, hook):
        if not callable(hook) or not isinstance(hook_id, int):
            raise TypeError(f"tutti register_abort_hook: expected a number and a function, got {hook_id!r}, {hook!r}")
        self._running.hooks.add_failed(hook_id, hook)

    def unregister_abort_hook(self, hook_id):
        self._running.hooks.remove_failed(hook_id)

    # The names that C++ looks for.
    registerAbortHook = register_abort_hook  # noqa: N815
    unregisterAbortHook = unregister_abort_hook  # noqa: N815

    def _add_ephemeral_timeout(self, timeout):
        added = milliseconds(timeout)
        with self._lock:
            self._extensions.append(_Extension(added))

    def _extend(self, task):
        """Adds to the timeout of a task what is to be added. The lock is held."""
        self._extensions = [e for e in self._extensions if e.first is None or not e.first.over()]
        for extension in self._extensions:
            if task.limit > 0:
                task.limit += extension.time
                task.timeout = task.limit
