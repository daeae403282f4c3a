"""Groups whose members the program names: reconfigure of c10d."""

import ctypes
import hashlib
import os
import secrets

from . import api, groups
from .groups import entry
from .interrupt import blocking
from .store import without_prefixes
from .work import OpType, Task, Work, called, check, error_of, milliseconds

# How long reconfigure waits for each operation of the old group, in seconds: the library bounds
# their end itself.
_CLOSE = 10

# The key under which the processes that share a store agree on the secret of their members.
_SECRET = "tutti/members/secret"


class Reconfigure:
    """A part of Backend."""

    @property
    def supports_reconfigure(self):
        return True

    def _own_member(self):
        """Returns the member of this process; the first call makes it."""
        with self._lock:
            if self._closed:
                raise error_of(api.ECLOSED, "tutti reconfigure: the process group was shut down")
            if self._member:
                return self._member
        api.open_library()
        config = self._config(True, member=True)  # the groups that it forms listen too
        if not os.environ.get("TUTTI_SECRET") and not os.environ.get("TUTTI_SECRET_FILE"):
            # The first one to come makes it.
            secret = without_prefixes(self._store).compare_set(_SECRET, "", secrets.token_hex(32))
            config.secret, config.secret_len = secret, len(secret)
        member = ctypes.c_uint64()
        try:
            check(*blocking(api.api().tutti_member_new, ctypes.byref(config), ctypes.byref(member)))
        except BaseException:
            api.api().tutti_member_close(member)  # a signal handler has raised meanwhile
            raise
        with self._lock:
            closed = self._closed
            if not closed and not self._member:
                self._member, member = member.value, ctypes.c_uint64()
                self._member_timeout = config.timeout_ns // 1_000_000
            own = self._member
        api.api().tutti_member_close(member)  # _close has come, or another thread was faster
        if closed:
            raise error_of(api.ECLOSED, "tutti reconfigure: the process group was shut down")
        return own

    def get_reconfigure_handle(self):
        own, length = self._own_member(), ctypes.c_uint64()
        called(api.api().tutti_member_handle(own, None, 0, ctypes.byref(length)))
        handle = ctypes.create_string_buffer(length.value + 1)
        called(api.api().tutti_member_handle(own, handle, len(handle), ctypes.byref(length)))
        return handle.value.decode()

    def _check_place(self, handles):
        """Refuses to become another rank, or a rank of another number of ranks."""
        own = self.get_reconfigure_handle()
        place = handles.index(own) if handles.count(own) == 1 else self._rank
        if (place, len(handles)) != (self._rank, self._size) and handles.count(own) == 1:
            raise error_of(
                api.EUNSUPPORTED,
                f"tutti reconfigure: this process, rank {self._rank} of {self._size}, would become rank {place} of "
                f"{len(handles)}. Without the C++ module it must keep its rank and the size of the group, because "
                "torch lets no backend in Python change them: build it with `python -m tutti_torch.build`",
            )

    @entry
    def reconfigure(self, opts):
        """The members whose handles are given become the group.

        The new group is made before the old one ends, so that an error leaves that as it was.
        """
        own, uuid = self._own_member(), str(opts.uuid)
        handles = sorted(opts.handles) if isinstance(opts.handles, (set, frozenset)) else list(opts.handles)
        self._check_place(handles)
        texts = (ctypes.c_char_p * len(handles))(*(handle.encode() for handle in handles))
        timeout = self._options._timeout if opts.timeout is None else opts.timeout
        limit, fresh = milliseconds(timeout) * 1_000_000, ctypes.c_uint64()
        form = api.api().tutti_form
        with self._lock:
            self._forming += 1
        try:
            try:
                code, text = blocking(form, own, uuid.encode(), texts, len(handles), limit, ctypes.byref(fresh))
            finally:
                with self._lock:
                    self._forming -= 1
                    closed, aborted = self._closed, self._member != own
            if code != api.OK and (closed or aborted):
                how = "shut down" if closed else "aborted"
                raise error_of(api.ECLOSED, f"tutti reconfigure: the process group was {how}")
            check(code, "tutti reconfigure: " + text)
        except BaseException:
            api.api().tutti_close(fresh)  # a signal handler has raised meanwhile
            raise
        with self._lock:
            old, closed = fresh.value, self._closed
            if not closed:
                old, self._group = self._group, fresh.value
                self._running.recovered()
                self._joined = self._member_timeout
                # Other groups may have the uuid, and the store: handles[0] is in none of them.
                first = hashlib.sha1(handles[0].encode(), usedforsecurity=False)
                self._prefix = f"tutti/members/{uuid}/{first.hexdigest()}/"
                self._seq = self._barriers = self._shrinks = 0
                self._formed, self._suspended, self._outlives = True, False, False
                self._options.global_ranks_in_group = []  # they are not known
                self._running.name("", [], self._rank)
        api.api().tutti_close(old)  # ends its operations
        if closed:
            raise error_of(api.ECLOSED, "tutti reconfigure: the process group was shut down")
        for work in self._running.all():
            work.await_(_CLOSE)
        work = Work(0, Task(OpType.UNKNOWN, "tutti:reconfigure"), self._ordered, self._running)
        work.poll()  # it is over
        return groups.made(work)
