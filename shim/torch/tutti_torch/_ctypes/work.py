"""Works of c10d over works of Tutti."""

import collections
import contextlib
import copy
import ctypes
import threading
import time
import warnings
import weakref
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from . import api
from .hooks import Hooks
from .interrupt import SLICE
from .tensors import raw

C10D = torch._C._distributed_c10d
OpType = C10D.OpType
NO_TIMEOUT = timedelta(0)

# How long a Completer waits for one work before it looks at the others, in seconds.
_ORDERED, _UNORDERED = 0.1, 0.001


# The most ranks that an error lists to say which group it is of.
_LISTED = 8


def _listed(numbers):
    """Returns numbers as "4, 5 and 6"."""
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def error_of(code, text):
    """Returns the exception that c10d uses for a code: ValueError for an argument, else DistBackendError."""
    return (ValueError if code == api.EINVAL else dist.DistBackendError)(text)


def check(code, text):
    """Raises the exception for the outcome of a call, unless it is OK."""
    if code != api.OK:
        raise error_of(code, text)


def called(code):
    """Raises the exception for the code that a call of this thread has returned, unless it is OK."""
    if code != api.OK:
        raise error_of(code, api.last_error())


def refuse_if_forked():
    """Raises in a forked child: the works, and who holds the locks, are those of the parent."""
    if api.forked():
        called(api.api().tutti_rank(0, None))


def again(error):
    """Returns a copy of an exception, to be raised.

    One that is kept must not refer to the frames of those that have caught it, and so to tensors.
    """
    try:
        return copy.copy(error)
    except Exception:  # noqa: BLE001  one of the program's that cannot be copied
        return error.with_traceback(None)


def milliseconds(timeout):
    """Returns a timedelta in whole milliseconds."""
    if not isinstance(timeout, timedelta):
        raise TypeError(f"tutti: a timeout is {timeout!r}, expected a datetime.timedelta")
    return timeout // timedelta(milliseconds=1)


@dataclass
class Task:
    """What an operation is made of."""

    type: OpType
    title: str  # "tutti:all_reduce"
    ops: list = field(default_factory=list)  # run one after the other
    keep: list = field(default_factory=list)  # the memory of ops
    after: list = field(default_factory=list)  # functions that put results into outputs
    outputs: list = field(default_factory=list)  # lists of tensors: what the future gives
    limit: int = 0  # how long the operation may run, in milliseconds
    timeout: int = 0  # the same, 0 if it is the group's


class Work(C10D.Work):
    """One Task under way. It may be used by several threads."""

    def __init__(self, seq, task, completer, running):
        """completer marks futures: that of collectives or that of messages of the group."""
        super().__init__()
        self._seq, self._task, self._completer, self._running = seq, task, completer, running
        self._handles = (ctypes.c_uint64 * len(task.ops))()
        self._begun, self._ended = time.monotonic(), None
        self._lock = threading.RLock()
        self._concluding = self._over = self._refused = False
        self._starting = bool(task.ops)  # there are operations that the library does not know yet
        self._era = running.era()
        self._code, self._source, self._failed, self._error, self._future = api.OK, -1, [], None, None

    def start(self, group):
        """Starts the operations, and adds the work to running. It raises if one cannot be started."""
        library, task = api.api(), self._task
        if not task.ops:
            return
        try:
            # A signal handler may raise anywhere. The memory of what has begun by then is kept.
            self._running.add(self)
            for i, op in enumerate(task.ops):
                op.struct_size = ctypes.sizeof(op)
                op.timeout_ns = max(0, task.timeout) * 1_000_000
                code = library.tutti_start(group, ctypes.byref(op), api.address(self._handles, i))
                if code != api.OK:
                    raise error_of(code, self._running.of_group(code, api.last_error(), []))
            self._starting = False
        except BaseException:
            self._refused, self._starting = True, False
            self.poll()
            raise
        task.ops = []
        if self._running.hooks.watches():
            self._completer.add(self)

    def _refuse_if_parents(self):
        """Raises in a forked child, unless the end was noticed before."""
        if not self._over:
            refuse_if_forked()

    def poll(self):
        """Reports whether the operation is over. It does not wait."""
        if self._over or self._starting:
            return self._over
        if any(handle and api.api().tutti_work_test(handle) == api.EBUSY for handle in self._handles):
            return False
        self._finish()
        return self._over

    def await_(self, seconds):
        """Waits at most this long, and reports whether the operation is over."""
        end = time.monotonic() + seconds
        for handle in self._handles:
            if self._over or self._starting:
                return self._over
            left = max(0, int((end - time.monotonic()) * 1e9))
            if handle and api.api().tutti_work_wait(handle, left) == api.EBUSY:
                return False
        return self.poll()

    def over(self):
        """Reports whether the end of the operation has been noticed."""
        return self._over

    def held(self):
        """Returns the bytes of the operation's memory, 0 when it is over."""
        with self._lock:
            return sum(tensor.nbytes for tensor in self._task.keep)

    def uses(self, storage):
        """Reports whether the operation uses a storage, which is an address of C++; False when it is over."""
        with self._lock:
            return any(tensor.untyped_storage()._cdata == storage for tensor in self._task.keep)

    def wait(self, timeout=NO_TIMEOUT):
        self._refuse_if_parents()
        limit = 0 if timeout is None else milliseconds(timeout)
        end = time.monotonic() + limit / 1000
        while not self._over:
            if self.await_(min(SLICE, max(0, end - time.monotonic())) if limit else SLICE):
                break
            if limit and time.monotonic() >= end:
                raise dist.DistBackendError(
                    f"{self._task.title}: the wait timed out after {max(0, limit)} ms; the operation continues"
                )
        if self._error is not None:
            raise again(self._error)
        return True

    def _conclude(self):
        """Notes the outcome, and writes the results. It may be repeated."""
        library, task = api.api(), self._task
        self._code, self._error = api.OK, None
        for handle in self._handles:
            if not handle:
                continue
            self._code = library.tutti_work_test(handle)
            if self._code == api.OK:
                continue
            info = api.ErrorInfo(struct_size=ctypes.sizeof(api.ErrorInfo))
            if library.tutti_work_error(handle, ctypes.byref(info)) == api.OK:
                self._failed = list(info.ranks[: min(info.ranks_listed, api.MAX_LISTED)])
            self._running.failed(self._era, self._code)
            text = ctypes.create_string_buffer(4096)
            library.tutti_work_error_text(handle, text, len(text), None)
            late = f"the timeout of {task.limit} ms has passed: " if self._code == api.ETIMEOUT else ""
            text = f"{task.title}: {late}{text.value.decode(errors='replace')}"
            self._error = error_of(self._code, self._running.of_group(self._code, text, self._failed))
            break
        if self._code == api.OK and task.type in (OpType.RECV, OpType.RECVANYSOURCE) and len(self._handles):
            status = api.Status()
            if library.tutti_work_status(self._handles[0], ctypes.byref(status)) == api.OK:
                self._source = getattr(status, "from")
        if self._code == api.OK and not self._refused:
            try:
                with raw():
                    for function in task.after:
                        function()
            except Exception as e:  # noqa: BLE001
                self._code, self._error = api.EINTERNAL, e.with_traceback(None)

    def _finish(self):
        keep = None
        with self._lock:
            if self._over or self._concluding:
                return
            self._concluding = True
            try:
                self._conclude()
                self._ended = time.monotonic()
                keep, after = self._task.keep, self._task.after
                self._task.keep, self._task.after = [], []
                self._over = True
            finally:
                self._concluding = False
            self._release()
        del keep, after  # without the lock: destructors of tensors may run anything
        if self._refused:
            self._running.remove(self)
            return
        self.mark()
        with self._running.finishing(self):
            if self._code == api.OK:
                self._running.hooks.ended(self._task.type, self._seq, self._begun, self._ended)
            elif self._code != api.EINVAL:
                self._running.hooks.failed()
        self._running.remove(self)

    def _release(self):
        for i, handle in enumerate(self._handles):
            self._handles[i] = 0
            api.api().tutti_work_release(handle)

    def __del__(self):
        self._release()  # what an exception of a signal handler has left

    def mark(self):
        """Marks the future, if there is one and the operation is over."""
        with self._lock:
            future = self._future
        if future is None or not self._over or future[0].done():
            return
        try:
            future[0].set_result(None)
        except RuntimeError as e:
            if not future[0].done():  # else another thread was faster
                warnings.warn(
                    f"a callback of the future of {self._task.title} has failed: {e}", RuntimeWarning, stacklevel=2
                )

    def _value(self, _):
        """Gives the future's value. What it raises is the future's error, for C++ too."""
        if self._error is not None:
            raise again(self._error)
        outputs = self._task.outputs
        return outputs if len(outputs) > 1 else outputs[0] if outputs else []

    def get_future(self):
        self._refuse_if_parents()
        with self._lock:
            if self._future is None:
                first = torch.futures.Future()
                if not self._over:
                    self._completer.add(self)  # raises if there can be no thread
                self._future = first, first.then(self._value)
            future = self._future[1]
        self.mark()
        return future

    def is_completed(self):
        self._refuse_if_parents()
        return self.poll()

    def is_success(self):
        return self._over and self._error is None

    def exception(self):
        return self._error if self._over else None

    def source_rank(self):
        if self._task.type not in (OpType.RECV, OpType.RECVANYSOURCE):
            raise RuntimeError("sourceRank is only defined for receives")
        if not self._over:
            raise RuntimeError("sourceRank is known when the receive has ended: call wait first")
        return self._source

    _source_rank = source_rank

    def result(self):
        if not self.is_completed():
            raise RuntimeError("the operation has not ended: call wait before result")
        return self.result_tensors()

    def result_tensors(self):
        """Returns the tensors that have the result when the operation has ended."""
        return [tensor for tensors in self._task.outputs for tensor in tensors]

    def synchronize(self):
        self.wait()

    def block_current_stream(self):
        self.wait()

    def abort(self):
        raise RuntimeError("a work of tutti cannot be aborted by itself: abort its process group")

    def _get_op_type(self):
        return int(self._task.type.value)

    def _get_duration(self):
        if not self._over:
            raise RuntimeError("the duration is known when the operation has ended: call wait first")
        return (self._ended - self._begun) * 1000

    def _get_sequence_number(self):
        return self._seq

    @property
    def timeout(self):
        return timedelta(milliseconds=self._task.limit)

    def failed_ranks(self):
        return list(self._failed) if self._over else []


def failed_ranks(work):
    """Returns the ranks that failed, were waited for or disagree. The operation must be over."""
    if not isinstance(work, Work):
        raise TypeError("failed_ranks expects a work of an operation of the tutti backend")
    if not work.is_completed():
        raise ValueError("failed_ranks: the operation has not ended: call wait first")
    return work.failed_ranks()


def first_result(work):
    """Returns a future of the first tensor of a result, for a communication hook of DDP.

    A future of Python would turn an error into a RuntimeError. So this one does not fail: the error is
    raised at the end of the backward pass, after DDP has finished with it, as an error of a future is.
    """
    engine = torch.autograd.Variable._execution_engine
    future, tensor = work.get_future(), work.result_tensors()[0] if isinstance(work, Work) else None
    if tensor is None:
        return future.then(lambda ended: ended.value()[0])
    engine.queue_callback(lambda: engine.queue_callback(work.wait))  # DDP queues its own in between
    return future.then(lambda _: tensor)


class Together(C10D.Work):
    """The work of several works."""

    def __init__(self, works):
        super().__init__()
        self._works = works

    def is_completed(self):
        return all([work.is_completed() for work in self._works])

    def is_success(self):
        return all(work.is_success() for work in self._works)

    def exception(self):
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def result(self):
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self):
        self.wait()

    def wait(self, timeout=NO_TIMEOUT):
        limit = 0 if timeout is None else milliseconds(timeout)
        end = time.monotonic() + limit / 1000
        for work in self._works:
            left = max(1, int((end - time.monotonic()) * 1000)) if limit else 0
            work.wait(timedelta(milliseconds=left))
        return True

    def get_future(self):
        futures = torch.futures.collect_all([work.get_future() for work in self._works])

        def value(ended):
            for one in ended.value():
                one.value()  # raises the error of a future that has failed
            return self.result()

        return futures.then(value)


_runnings = []  # weak references to those of this process


def uses(tensor):
    """Reports whether an operation under way of a group of this process uses the storage of tensor."""
    storage = tensor.untyped_storage()._cdata
    runnings = [running for running in [one() for one in list(_runnings)] if running is not None]
    for running in runnings:
        for work in running.all():
            work.poll()  # callbacks may start operations, which are looked at below
    return any(work.uses(storage) for running in runnings for work in running.all())


class Running:
    """Holds works, and so the memory of their operations, until they have ended: the program may have
    dropped them."""

    def __init__(self):
        self.hooks = Hooks()
        self._lock = threading.RLock()
        self._removed = threading.Condition(self._lock)
        self._works = {}  # in the order of their start
        self._errors, self._era = {}, 0  # the first by era
        self._full = 64  # the length at which reap looks at all of them
        self._local = threading.local()
        self._group, self._ranks, self._rank = "", [], 0
        _runnings.append(weakref.ref(self, _runnings.remove))

    def name(self, group, ranks, rank):
        """Says what the program calls the group, what its ranks are in the job, [] if that is not known, and
        which one this process is. The default group has no name, and the ranks of the job."""
        known = group or ranks != list(range(len(ranks)))
        self._group, self._ranks, self._rank = group, ranks if known else [], rank

    def of_group(self, code, text, ranks):
        """Returns the text of an error, and after it which ranks of the job the group has, unless that is the
        default group, or the error one of an argument. Of a large group it tells those of ranks."""
        places = self._ranks
        if not places or code == api.EINVAL:
            return text
        text += f" (group {self._group}: " if self._group else " ("
        if len(places) <= _LISTED:
            return f"{text}its ranks are {_listed(places)} of the job)"
        ranks = sorted({*ranks, self._rank})[:_LISTED]
        which, are = ("rank", "is") if len(ranks) == 1 else ("ranks", "are")
        return f"{text}its {which} {_listed(ranks)} {are} {_listed([places[r] for r in ranks])} of the job)"

    def add(self, work):
        with self._lock:
            self._works[id(work)] = work

    def remove(self, work):
        with self._lock:
            if self._works.pop(id(work), None) is not None:
                self._removed.notify_all()

    @contextlib.contextmanager
    def finishing(self, work):
        """Surrounds the hooks of a work, on the thread that runs them."""
        outer, self._local.work = getattr(self._local, "work", None), work
        try:
            yield
        finally:
            self._local.work = outer

    def await_removal(self, work, seconds):
        """Waits until a work was removed, which follows its hooks, but not longer than this; False: it
        was not. It does not wait in a hook of the work itself."""
        if getattr(self._local, "work", None) is work:
            return True
        with self._lock:
            return self._removed.wait_for(lambda: id(work) not in self._works, seconds)

    def reap(self):
        """Finishes works that have ended."""
        with self._lock:
            works = list(self._works.values())
        thorough = len(works) >= self._full
        for work in works:
            if work.poll():
                self.remove(work)  # another thread may be finishing it
            elif not thorough:
                break
        if thorough:
            with self._lock:
                self._full = max(64, 2 * len(self._works))

    def all(self):
        with self._lock:
            return list(self._works.values())

    def error(self):
        """Returns the code of the first operation that failed, other than for its arguments."""
        return self._errors.get(self._era, api.OK)

    def failed(self, era, code):
        """An operation that was begun in this era has failed."""
        if code != api.EINVAL:
            self._errors.setdefault(era, code)

    def recovered(self):
        """Forgets the failures, those that are not known yet too: the group is usable again. A new era begins."""
        self._era += 1  # takes no lock: a signal handler may wait for it in a call that holds one

    def era(self):
        return self._era


class _Thread(threading.local):
    # The number of callbacks of works of Completers within which the thread is: 0 unless it is one
    # of a Completer.
    callbacks = 0


_thread = _Thread()


class Completer:
    """Marks futures of works that have ended. It has a thread once it has a work.

    That thread runs the callbacks of the futures. A callback may wait for works that it adds, so these have
    another thread, and those that their callbacks add a further one.
    """

    def __init__(self, ordered):
        """Works of an ordered Completer end in the order in which they are added, except those that callbacks
        add, which are in an order of their own."""
        self._ordered = ordered
        self._changed = threading.Condition()
        # Works by the number of callbacks in which they are added, one within the other. Each entry
        # has a thread, which takes it away at its end.
        self._works = {}
        self._thread = None  # that of self._works[0]
        self._stopping = False

    def add(self, work):
        depth = _thread.callbacks
        with self._changed:
            if depth not in self._works:
                self._works[depth] = collections.deque()
                thread = threading.Thread(target=self._run, args=[depth], name="tutti futures", daemon=True)
                try:
                    thread.start()
                except BaseException:
                    del self._works[depth]
                    raise
                if depth == 0:
                    self._thread = thread
            self._works[depth].append(work)
            self._changed.notify_all()

    def stop(self):
        """Ends the threads when the works that were added have ended. It waits for that, except in a
        callback."""
        with self._changed:
            self._stopping = True
            thread = self._thread
            self._changed.notify_all()
        if _thread.callbacks > 0:
            return
        if thread is not None:
            thread.join()
        with self._changed:
            self._changed.wait_for(lambda: not self._works)

    def _run(self, depth):
        _thread.callbacks = depth + 1
        try:
            self._complete(depth)
        except BaseException:
            self._end(depth)
            raise

    def _end(self, depth):
        with self._changed:
            del self._works[depth]
            self._changed.notify_all()

    def _complete(self, depth):
        while True:
            with self._changed:
                everything = self._works[depth]
                if depth == 0:  # the others are short-lived, so that a chain of callbacks leaves no threads
                    self._changed.wait_for(lambda: self._stopping or everything)
                if not everything:
                    self._end(depth)
                    return
                works = list(everything)
            works[0].await_(_ORDERED if self._ordered else _UNORDERED)
            ended = [work for work in works if work.poll()]
            with self._changed:
                for work in ended:
                    everything.remove(work)
            for work in ended:
                work.mark()
            del works, ended
            work = None  # noqa: F841  destructors of tensors run now, not with the next work
