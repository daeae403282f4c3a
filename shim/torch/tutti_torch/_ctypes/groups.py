"""What torch's classes for backends in Python leave out.

torch forwards calls of a ProcessGroup to a backend in Python through trampolines, and gives the
program an object of its own instead of the work that the backend has returned: it forwards wait and
get_future, and answers everything else itself, is_completed with False for ever. The methods of
ProcessGroup that return works give those of the backend here, and those that torch does not forward
call it. Groups of other backends, and calls from C++, are as they were.
"""

import functools
import threading

import torch

C10D = torch._C._distributed_c10d

# Methods that return works.
_WORKS = [
    "broadcast",
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "allgather",
    "all_gather_single",
    "_allgather_base",
    "allgather_coalesced",
    "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_single",
    "_reduce_scatter_base",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
    "reconfigure",
    "_end_coalescing",
]

# Methods that torch does not forward.
_DIRECT = ["gather_single", "gather_into_tensor", "new_window", "_add_ephemeral_timeout"]

_WANTED = object()


class _Thread(threading.local):
    """What the calls of a thread know of each other."""

    entering = None  # the method of a backend that torch is about to call
    splitting = False  # in split_group
    made = None  # the work that the backend has made, _WANTED before, None if it is not wanted


_thread = _Thread()


class NotMember(Exception):
    """A process is not one of those that a part of a group has."""


def not_member():
    """Answers split at a process that is not in the part. torch takes no None from Python there."""
    if _thread.splitting:
        raise NotMember


def made(work):
    """Gives the work that the backend returns to the calls that want it."""
    if _thread.made is not None:
        _thread.made = work
    return work


def entry(method):
    """Makes a method of the backend take what the method of c10d's Backend takes.

    torch converts and checks the arguments of a call from Python, resolves overloads, and calls the
    method again, with those that a backend in C++ would get.
    """
    name = method.__name__
    inherited = getattr(C10D.Backend, name)

    @functools.wraps(method)
    def call(self, *arguments, **keywords):
        if _thread.entering == (id(self), name):
            _thread.entering = None
            return method(self, *arguments)
        outer, work = _thread.made, None
        _thread.entering, _thread.made = (id(self), name), _WANTED
        try:
            result = inherited(self, *arguments, **keywords)
            work = None if _thread.made is _WANTED else _thread.made
        finally:
            _thread.entering, _thread.made = None, outer
        return result if work is None else made(work)

    return call


def _gives_works(name):
    original = getattr(C10D.ProcessGroup, name)

    @functools.wraps(original)
    def call(self, *arguments, **keywords):
        outer, _thread.made = _thread.made, _WANTED
        try:
            result = original(self, *arguments, **keywords)
            return result if result is None or _thread.made is _WANTED else _thread.made
        finally:
            _thread.made = outer

    return call


def _backend_of(group, kind):
    """Returns the group's backend for CPU tensors if it is of a kind, else None."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # there is none
        return None
    return backend if isinstance(backend, kind) else None


def _direct(name, kind):
    original = getattr(C10D.ProcessGroup, name)

    @functools.wraps(original)
    def call(self, *arguments, **keywords):
        backend = _backend_of(self, kind)
        return (original if backend is None else getattr(type(backend), name))(
            self if backend is None else backend, *arguments, **keywords
        )

    return call


def install(kind):
    """Completes ProcessGroup for backends of a kind, a class in Python."""
    group = C10D.ProcessGroup
    for name in _WORKS:
        setattr(group, name, _gives_works(name))
    for name in _DIRECT:
        setattr(group, name, _direct(name, kind))

    registers = group._register_on_completion_hook

    @functools.wraps(registers)
    def register(self, hook):
        # What torch makes of the hook wants a WorkInfo of C++, which Python cannot make.
        backend = _backend_of(self, kind)
        if backend is not None:
            backend.hook_in_python = hook
        registers(self, hook)

    group._register_on_completion_hook = register

    splits = group.split_group

    @functools.wraps(splits)
    def split_group(self, *arguments, **keywords):
        outer, _thread.splitting = _thread.splitting, True
        try:
            return splits(self, *arguments, **keywords)
        except NotMember:
            return None
        finally:
            _thread.splitting = outer

    group.split_group = split_group

    supports = group.supports_abort_hooks
    group.supports_abort_hooks = property(
        lambda self: _backend_of(self, kind) is not None or supports.__get__(self), doc=supports.__doc__
    )
