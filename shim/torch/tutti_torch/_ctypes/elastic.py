"""Membership of a group, and memory for its collectives."""

import ctypes
import weakref
from datetime import timedelta

import torch

from . import api
from .interrupt import blocking
from .window import memory_of
from .work import called, check, milliseconds


class Elastic:
    """A part of Backend. A timeout of 0 is the group's."""

    def view(self):
        """Returns the number of the view, and its ranks."""
        group = self._handle("tutti active_ranks")
        epoch, n, ranks = ctypes.c_uint64(), ctypes.c_uint32(), (ctypes.c_int32 * self._size)()
        called(api.api().tutti_view(group, ctypes.byref(epoch), ranks, self._size, ctypes.byref(n)))
        return epoch.value, list(ranks[: min(n.value, self._size)])

    def _bound_of(self, timeout):
        """Returns what bounds a call, in nanoseconds, besides the timeout that the group was made with."""
        limit = milliseconds(timeout)
        if limit <= 0:
            limit = milliseconds(self._options._timeout)
        return 0 if limit == self._joined else max(0, limit) * 1_000_000

    def recover(self, timeout=timedelta(0)):
        group, recovered = self._handle("tutti recover"), self._running.recovered
        check(*blocking(api.api().tutti_recover, group, self._bound_of(timeout), succeeded=recovered))

    def admit(self, timeout=timedelta(0)):
        """Returns how many ranks came in."""
        group, admitted = self._handle("tutti admit"), ctypes.c_int32()
        check(*blocking(api.api().tutti_admit, group, self._bound_of(timeout), ctypes.byref(admitted)))
        return admitted.value

    def agree(self, yes, timeout=timedelta(0)):
        group, every = self._handle("tutti agree"), ctypes.c_int32()
        agree = api.api().tutti_agree
        check(*blocking(agree, group, int(yes), self._bound_of(timeout), ctypes.byref(every)))
        return every.value != 0

    def supports_tensor_alloc(self, device):
        """device is its number where torch forwards the call, as to a backend in C++."""
        if isinstance(device, int):
            return device < 0  # the CPU has none
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size, *, dtype, device):
        """Returns memory on which collectives copy nothing, as a tensor of one dimension."""
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"tutti allocateTensor: the size is {size!r}, expected a number")
        nbytes = size * dtype.itemsize
        if not 0 <= nbytes < 2**63:
            raise ValueError(
                f"tutti allocateTensor: the size is {size}, expected 0 or more elements that fit in memory"
            )
        if torch.device(device).type != "cpu":
            raise ValueError(f"tutti allocateTensor: the device is {device}, expected cpu")
        if nbytes == 0:
            return torch.empty(size, dtype=dtype)
        memory = ctypes.c_void_p()
        called(api.api().tutti_alloc(self._handle("tutti allocateTensor"), nbytes, ctypes.byref(memory)))
        tensor, life = memory_of(memory.value, nbytes, dtype, None)
        weakref.finalize(life, api.api().tutti_free, memory).atexit = False  # a tensor may outlive the group
        return tensor

    @property
    def mem_allocator(self):
        raise RuntimeError(
            "tutti mem_allocator: torch lets no backend in Python give an allocator: use allocate_tensor, or build the "
            "C++ module with `python -m tutti_torch.build`"
        )
