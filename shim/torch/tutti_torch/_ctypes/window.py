"""One-sided operations: the methods of c10d's Window over a window of Tutti."""

import contextlib
import ctypes
import threading
import time
import weakref

import torch
import torch.distributed as dist

from . import api
from .interrupt import SLICE, blocking
from .tensors import name_of, raw
from .work import C10D, NO_TIMEOUT, again, called, check, error_of, milliseconds, refuse_if_forked, uses

# How long the end of a window waits for peers that write to it, in milliseconds, the first time and
# later.
_CLOSE, _AGAIN = 10_000, 10

# The windows whose close has failed, as arguments of _close. They keep their memory.
_failed = []


def _close(handle, size, counter, limit=_CLOSE):
    """Closes a window, and has counter count its bytes until it is closed."""
    if api.forked():
        return
    if api.api().tutti_window_close(handle, limit * 1_000_000) == api.OK:
        counter.add(-size)
    else:
        _failed.append((handle, size, counter))


def _end(handle, size, counter):
    close_windows_again()
    _close(handle, size, counter)


def close_windows_again():
    """Closes the windows of this process again whose close has failed, because a peer was in the middle of
    an access. It does not wait as the first close has.

    A finalizer may call it within another call, and so it takes no lock.
    """
    again = []
    while _failed:
        with contextlib.suppress(IndexError):
            again.append(_failed.pop())
    for arguments in again:
        _close(*arguments, _AGAIN)


def memory_of(address, size, dtype, owner):
    """Returns a tensor over memory, and what the memory's life depends on: it refers to owner."""
    buffer = (ctypes.c_char * size).from_address(address)
    buffer.owner = owner
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype), buffer


class Counter:
    """A number that several threads change."""

    def __init__(self):
        self._lock, self.value = threading.RLock(), 0

    def add(self, difference):
        with self._lock:
            self.value += difference


class _Memory:
    """The memory of a window, and the tensor that was moved to it."""

    def __init__(self, handle, tensor, owning, counter, ranks):
        data = ctypes.c_void_p()
        called(api.api().tutti_window_bytes(handle, ctypes.byref(data), None))
        self.handle, self.bytes, self.dtype, self.address = handle, tensor.nbytes, tensor.dtype, data.value
        self.waits = [_Waits() for _ in range(ranks)]
        # The window lasts as long as a tensor over it does.
        self.flat, self.life = memory_of(data.value, tensor.nbytes, tensor.dtype, None)
        weakref.finalize(self.life, _end, handle, tensor.nbytes, counter).atexit = False
        counter.add(tensor.nbytes)
        self.old = tensor.detach()  # has the tensor's own memory
        self.strong = tensor if owning else None
        self.weak = weakref.ref(tensor)
        with raw():
            self.flat.copy_(self.old.view(-1))
            tensor.data = self.flat.view(tensor.shape)

    def restore(self):
        """Gives the tensor its own memory, with what the window has. If an operation under way uses the
        window's, the tensor stays there."""
        tensor = self.weak()
        if tensor is not None and tensor.data_ptr() == self.address and not uses(tensor):
            with raw():
                self.old.view(-1).copy_(self.flat)
                tensor.data = self.old


class _Waits:
    """The waits for the signals of one rank.

    The first of them waits for the signal after those that others have ended with, so that one that
    fails takes none from those behind it.
    """

    def __init__(self):
        self._changed, self._open, self._ended = threading.Condition(), [], 0

    def enter(self, wait):
        """Adds a wait, any object, behind the others."""
        with self._changed:
            self._open.append(wait)

    def number(self, wait, end):
        """Returns the number of the signal that a wait is for, when it is the first; 0 at the end, or
        if the wait was removed."""
        left = None if end is None else max(0, end - time.monotonic())
        with self._changed:
            self._changed.wait_for(lambda: wait not in self._open or self._open[0] is wait, left)
            return self._ended + 1 if wait in self._open[:1] else 0

    def leave(self, wait, signalled):
        """Removes a wait, if that was not done yet. signalled: it has ended with its signal."""
        with self._changed:
            if wait in self._open:
                self._open.remove(wait)
                self._ended += signalled
                self._changed.notify_all()


class _Errand(C10D.Work):
    """An operation that has ended, or that is on a thread of its own."""

    def __init__(self, title):
        super().__init__()
        self._title, self._over, self._error = title, threading.Event(), None
        self._first = torch.futures.Future()
        self._future = self._first.then(self._value)
        self._thread = None

    def _value(self, _):
        if self._error is not None:
            raise again(self._error)
        return []

    def run(self, body):
        """Runs body and notes its end."""
        try:
            body()
        except Exception as e:  # noqa: BLE001
            self._error = e.with_traceback(None)
        self._over.set()
        self._first.set_result(None)

    def start(self, body):
        self._thread = threading.Thread(target=self.run, args=(body,), name=self._title, daemon=True)
        self._thread.start()

    def join(self):
        if self._thread is not None and self._thread is not threading.current_thread() and not api.forked():
            self._thread.join()

    def wait(self, timeout=NO_TIMEOUT):
        if not self._over.is_set():
            refuse_if_forked()
        limit = 0 if timeout is None else milliseconds(timeout)
        end = time.monotonic() + limit / 1000
        while not self._over.wait(min(SLICE, max(0, end - time.monotonic())) if limit else SLICE):
            if limit and time.monotonic() >= end:
                raise dist.DistBackendError(
                    f"{self._title}: the wait timed out after {max(0, limit)} ms; the operation continues"
                )
        if self._error is not None:
            raise again(self._error)
        return True

    def synchronize(self):
        self.wait()

    def is_completed(self):
        return self._over.is_set()

    def is_success(self):
        return self._error is None

    def exception(self):
        return self._error

    def result(self):
        return []

    def get_future(self):
        return self._future


class Window:
    """Makes the memory of a tensor accessible to the other ranks.

    tensor_register moves the tensor to memory of Tutti, and tensor_deregister moves it back. Tensors
    that share its memory cannot be moved with it: torch lets Python give memory to a tensor, not to a
    storage. Those that are made in between keep the window's memory, which lasts as long as they do.
    """

    def __init__(self, group, rank, size, timeout, barrier, counter):
        """group is a function that returns the group, or raises an error if that is not usable any more.
        barrier is another, one of the group. counter counts the memory of the group's windows."""
        self._group, self._rank, self._size, self._timeout = group, rank, size, timeout
        self._barrier, self._counter = barrier, counter
        self._lock = threading.RLock()
        self._memory, self._errands = None, []

    def __del__(self):
        if not api.forked() and hasattr(self, "_errands"):
            self._finish_errands()
            self._restore()

    def tensor_register(self, tensor, owning=True):
        what = "tutti window: "
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{what}expected a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ValueError(f"{what}the tensor must be a dense one in host memory")
        if not tensor.is_contiguous() or not tensor.nbytes or tensor.nbytes != tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{what}the tensor must be contiguous, not empty, and not part of a larger one: clone it"
            )
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"{what}the tensor must not be a conjugated or negated view, whose memory has other values: clone it"
            )
        if not tensor.data_ptr():
            raise ValueError(f"{what}the tensor has no memory, as in FakeTensorMode")
        group = self._group()
        with self._lock:
            if self._memory is not None:
                raise ValueError(f"{what}a tensor is registered already: call tensor_deregister first")
        if torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2:  # the tensor, and what asks
            raise ValueError(
                f"{what}other tensors use the memory of this one, and would stay with it, because torch does not let "
                "Python move a storage: clone it, make views after it was registered, or build the C++ module with "
                "`python -m tutti_torch.build`"
            )
        close_windows_again()
        handle, limit = ctypes.c_uint64(), milliseconds(self._timeout) * 1_000_000
        try:
            check(*blocking(api.api().tutti_window_new, group, tensor.nbytes, limit, ctypes.byref(handle)))
        except BaseException:
            _close(handle.value, 0, self._counter)  # a signal handler has raised meanwhile
            raise
        memory = _Memory(handle.value, tensor, owning, self._counter, self._size)
        with self._lock:
            self._memory = memory
        try:
            self._barrier()  # every rank's values are there before another one puts
        except BaseException:
            self._restore()
            raise

    def tensor_deregister(self):
        self._memory_for("tensor_deregister", self._rank)
        self._finish_errands()
        self._barrier()  # no rank puts any more
        self._restore()

    def _restore(self):
        with self._lock:
            memory, self._memory = self._memory, None
        if memory is not None:
            memory.restore()

    def _memory_for(self, what, rank):
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"tutti window {what}: the rank is {rank!r}, expected a number")
        if not 0 <= rank < self._size:
            raise ValueError(f"tutti window {what}: the rank is {rank}, expected 0 to {self._size - 1}")
        with self._lock:
            if self._memory is None:
                raise ValueError(
                    f"tutti window {what}: no tensor is registered: call tensor_register at all ranks first"
                )
            return self._memory

    def _nanoseconds(self, opts):
        timeout = self._timeout if opts is None or milliseconds(opts.timeout) == -1 else opts.timeout
        return milliseconds(timeout) * 1_000_000

    def _finish_errands(self):
        with self._lock:
            errands, self._errands = self._errands, []
        for errand in errands:
            errand.join()  # its timeout bounds it

    def _run(self, title, async_op, body):
        errand = _Errand(title)
        if async_op:
            errand.start(body)
            with self._lock:
                self._errands = [other for other in self._errands if not other.is_completed()] + [errand]
            return errand
        errand.run(body)
        errand.wait()  # raises its error
        return errand

    def put(self, tensor, dst_rank, target_offset_nelems, async_op, opts=None):
        window = self._memory_for("put", dst_rank)
        if not isinstance(tensor, torch.Tensor) or not isinstance(target_offset_nelems, int):
            raise TypeError("tutti window put: expected a tensor and an offset")
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise ValueError("tutti window put: the tensor must be a dense one in host memory")
        if tensor.dtype != window.dtype:
            raise ValueError(
                f"tutti window put: the tensor has type {name_of(tensor.dtype)}, expected that of the registered one, "
                f"{name_of(window.dtype)}"
            )
        elements = window.bytes // tensor.element_size()
        if not 0 <= target_offset_nelems <= elements - tensor.numel():
            raise ValueError(
                f"tutti window put: {tensor.numel()} elements at offset {target_offset_nelems} do not fit into the "
                f"{elements} elements of the window"
            )
        source, limit = tensor.detach().resolve_conj().resolve_neg().contiguous(), self._nanoseconds(opts)
        offset = target_offset_nelems * tensor.element_size()
        put, flush = api.api().tutti_window_put, api.api().tutti_window_flush
        begun = threading.Event()
        try:
            if source.numel() > 0:  # begun here: signals that follow come after it
                arguments = (window.handle, dst_rank, offset, source.data_ptr(), source.nbytes, limit)
                check(*blocking(put, *arguments, succeeded=begun.set))
            return self._run("tutti:put", async_op, self._flush(window, dst_rank, limit, source))
        except BaseException as e:
            if begun.is_set():  # it ends before source goes
                no_thread = async_op and isinstance(e, RuntimeError)
                flush(window.handle, dst_rank, limit if no_thread else 1)  # else it is given up at once
            raise

    def _flush(self, window, rank, limit, source=None):
        """Returns a function that waits until what was begun has ended; source is memory of it."""

        def body(source=source):
            check(*blocking(api.api().tutti_window_flush, window.handle, rank, limit))

        return body

    def map_remote_tensor(self, rank):
        """Returns a tensor with the memory of another rank of this machine, which cannot be written: a
        write ends the process with SIGSEGV."""
        window = self._memory_for("map_remote_tensor", rank)
        data = ctypes.c_void_p(window.address)
        if rank != self._rank:
            limit = milliseconds(self._timeout) * 1_000_000
            check(*blocking(api.api().tutti_window_map, window.handle, rank, limit, ctypes.byref(data)))
        tensor, _ = memory_of(data.value, window.bytes, window.dtype, window.life)
        return tensor

    def signal(self, peer_rank, async_op, opts=None):
        """Adds a signal for a rank. It comes after the data of all earlier puts to the rank."""
        window, limit = self._memory_for("signal", peer_rank), self._nanoseconds(opts)
        check(*blocking(api.api().tutti_window_signal, window.handle, peer_rank, 0, limit))
        return self._run("tutti:signal", async_op, self._flush(window, peer_rank, limit))

    def wait_signal(self, peer_rank, async_op, opts=None):
        """Waits for a signal: the n-th wait for a rank ends with its n-th signal."""
        refuse_if_forked()  # the waits before this one may be the parent's
        window, limit = self._memory_for("wait_signal", peer_rank), self._nanoseconds(opts)
        end = time.monotonic() + limit / 1e9 if limit > 0 else None
        waits, wait = window.waits[peer_rank], object()

        def body():
            code = api.ECANCELED
            try:
                n = waits.number(wait, end)
                if n == 0:
                    raise error_of(
                        api.ETIMEOUT,
                        f"tutti:wait_signal: the timeout of {limit // 1_000_000} ms has passed: earlier waits for rank "
                        f"{peer_rank} have not ended",
                    )
                left = limit if end is None else max(1, int((end - time.monotonic()) * 1e9))
                code, text = blocking(api.api().tutti_window_wait_signal, window.handle, peer_rank, 0, n, left)
                check(code, text)
            finally:
                waits.leave(wait, code == api.OK)

        try:
            waits.enter(wait)
            return self._run("tutti:wait_signal", async_op, body)
        except BaseException:  # there may be no thread
            waits.leave(wait, False)
            raise

    def get_attr(self, peer_rank):
        self._memory_for("get_attr", peer_rank)
        return C10D.WindowAttr()
