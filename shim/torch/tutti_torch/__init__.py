"""The PyTorch backend of Tutti.

    import torch.distributed as dist
    import tutti_torch                      # or nothing: an installed package registers itself

    dist.init_process_group("tutti")

Importing this package registers the backend "tutti" for CPU and CUDA tensors. It starts no threads
and does not open Tutti's library: the first group does, or the first store of tutti://.
"""

import os

from .elastic import _count_groups, _environments, admit, agree, ddp_hook, recover, register_rendezvous

__all__ = [
    "Options",
    "active_ranks",
    "admit",
    "agree",
    "ddp_hook",
    "empty",
    "failed_ranks",
    "recover",
    "register",
]

_glue = None


def _library():
    """Returns the path of libtutti.so."""
    path = os.environ.get("TUTTI_LIBRARY")
    if path:
        return path
    here = os.path.dirname(os.path.abspath(__file__))
    for path in (os.path.join(here, "libtutti.so"), os.path.join(here, "..", "..", "..", "bin", "libtutti.so")):
        if os.path.exists(path):
            return os.path.normpath(path)
    return "libtutti.so"  # wherever the dynamic linker finds it


def _load():
    """Returns the C++ module that was compiled for the installed torch, or the package with the same names
    in Python if there is none. torch must be able to have backends in Python then."""
    global _glue
    if _glue is None:
        import atexit

        from . import _versions

        try:
            found = _versions.load()
        except _versions.Missing as e:
            found = _without_module(e)
        _glue = found
        _glue.set_library(_library())
        atexit.register(_glue.close_all)
    return _glue


def _without_module(why):
    import warnings

    from torch._C import _distributed_c10d

    if "new_window" not in vars(_distributed_c10d.Backend):  # it cannot be a base class in Python
        raise why
    warnings.warn(f"{why} Without it tutti works over ctypes, which is slower.", RuntimeWarning, stacklevel=4)
    from . import _ctypes

    return _ctypes


def _default_options(glue):
    """Returns the options of a group for which the program gives none: those of the default group, if that
    is of tutti, except what the two cannot share."""
    import torch.distributed as dist

    try:
        default = _backend() if dist.is_initialized() else None
    except ValueError:  # it is of other backends
        default = None
    if default is None:
        return glue.Options()
    options = default.options.copy()
    options.part_from(default.options)
    if hasattr(options, "enable_reconfigure"):
        options.enable_reconfigure = False  # it has its members
    return options


def _create(backend_options, options=None):
    """Makes the group's backend, for torch.distributed.Backend.register_backend."""
    glue = _load()
    options = options.copy() if isinstance(options, glue.Options) else _default_options(glue)
    options._timeout = backend_options.timeout
    options.environment = _environments(options, backend_options)
    if hasattr(options, "global_ranks_in_group"):  # for errors: the default group has no name
        ranks = backend_options.global_ranks_in_group
        options.group_name = backend_options.group_id if ranks else ""
        options.global_ranks_in_group = ranks or list(range(backend_options.group_size))
    if getattr(backend_options, "enable_reconfigure", False):
        options.enable_reconfigure = True
    backend = glue.ProcessGroupTutti(
        backend_options.store, backend_options.group_rank, backend_options.group_size, options
    )
    if options.environment:
        _count_groups(backend)
    return backend


def register():
    """Registers the backend "tutti" with torch.distributed, once."""
    import torch.distributed as dist

    if not dist.is_available() or "tutti" in dist.Backend.backend_list:
        return
    dist.Backend.register_backend("tutti", _create, extended_api=True, devices=["cpu", "cuda"])
    register_rendezvous()
    # Newer versions record the operations of backends that they do not know, with a stack trace of
    # each. Tutti records its operations itself.
    recording = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    asked = os.environ.get("TORCH_FR_BUFFER_SIZE") or os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    if isinstance(recording, set) and not asked:
        recording.add("tutti")


def _autoload():
    """The entry point of torch.backends. An exception here would break every import of torch."""
    try:
        register()
    except Exception as e:  # noqa: BLE001
        import warnings

        warnings.warn(f"tutti_torch could not register its backend: {e}", RuntimeWarning, stacklevel=2)


def _backend(group=None):
    import torch
    import torch.distributed as dist

    group = group or dist.group.WORLD
    if group is None:
        raise ValueError("the default process group does not exist: call init_process_group")
    others = []
    for device in ("cpu", "cuda"):
        try:
            backend = group._get_backend(torch.device(device))
        except RuntimeError:  # the group has none
            continue
        while hasattr(backend, "wrapped_pg"):  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            backend = backend.wrapped_pg
        if isinstance(backend, _load().ProcessGroupTutti):
            return backend
        others.append(f"{device}:{backend.name()}")
    found = ", ".join(others) or "none for CPU or CUDA tensors"
    raise ValueError(f"the group's backends are {found}, expected tutti")


def active_ranks(group=None):
    """Returns the ranks of the group that its operations include, ascending."""
    return _backend(group).view()[1]


def failed_ranks(work):
    """Returns the ranks that made an operation fail: those that were lost or did not come in time.

    work is what an operation with async_op=True returned. The operation must be over.
    """
    return _load().failed_ranks(work)


def empty(*size, dtype=None, group=None):
    """Returns an uninitialised CPU tensor in Tutti's memory, on which collectives copy nothing.

    Every rank of the group should allocate the same sizes in the same order. It is for tensors that
    live long.
    """
    import math

    import torch

    if len(size) == 1 and not isinstance(size[0], int):
        size = tuple(size[0])
    dtype = dtype or torch.get_default_dtype()
    flat = _backend(group).allocate_tensor(math.prod(size), dtype=dtype, device=torch.device("cpu"))
    return flat.view(size)


def __getattr__(name):
    if name in ("Options", "ProcessGroupTutti"):
        return getattr(_load(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_autoload()
