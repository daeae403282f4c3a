"""The backend "tutti" of c10d: joining and leaving, and operations."""

import contextlib
import ctypes
import os
import secrets
import threading
import time
import weakref
from datetime import timedelta

import torch
import torch.distributed as dist

from . import api, groups
from .elastic import Elastic
from .groups import entry
from .interrupt import blocking
from .lifecycle import Lifecycle
from .reconfigure import Reconfigure
from .store import another, callbacks_of, peek
from .tensors import (
    READ,
    READ_WRITE,
    WRITE,
    Staged,
    check_alike,
    check_dense,
    only,
    overflow,
    overlap,
    raw,
    reduction_of,
    wire_of,
)
from .window import Counter, close_windows_again
from .work import (
    C10D,
    Completer,
    OpType,
    Running,
    Task,
    Together,
    Work,
    check,
    error_of,
    milliseconds,
    refuse_if_forked,
)

# Coalesced tensors of up to this many bytes in all are reduced in one operation.
_FLATTEN = 1 << 20

# What the description of a rank's sparse tensor begins with if there is no such rank.
_EMPTY_SLOT = -1

# How long close waits for each operation, in seconds: the library bounds their end itself.
CLOSE = 10

# The key under which rank 0 publishes the secret of the turn in which it meets the others, and
# those under which each of them keeps the last turn that it has taken. Without a turn under way
# _TURN is missing, or _NO_TURN after a failure.
_TURN, _TURNS, _NO_TURN = "tutti/turn", "tutti/turns/", "0"

# How many digits of a secret, which are hexadecimal, are the turn: it is a number of a store.
_TURN_DIGITS = 15

# How long rank 0 of a monitored barrier may take to publish its outcome, in seconds.
_ANSWER = 5

_MESSAGES = (OpType.SEND, OpType.RECV, OpType.RECVANYSOURCE)

_backends = []  # weak references, in the order in which they were made

# Backends of which torch may hold only the part in C++, as its wrapper for
# TORCH_DISTRIBUTED_DEBUG=DETAIL does. They stay until they are closed.
_held = set()

class Options(C10D.Backend.Options):
    """What init_process_group takes as pg_options.

    An empty text stands for the environment's value or the default: the fields are those of
    tutti_config in tutti.h.
    """

    store = ""  # "etcd://host:port" instead of the c10d store
    transport = ""
    interfaces = ""
    ports = ""
    algorithm = ""
    log_dir = ""
    metrics = ""
    on_failure = ""  # "report", "shrink", "retry"
    uniform = False
    max_procs = 0
    # The group is the job that the environment describes, in a store that outlives its ranks, and
    # not one that these ranks agree on in the c10d store.
    environment = False

    def __init__(self, timeout=timedelta(minutes=30)):
        super().__init__("tutti", timeout)

    def __setattr__(self, name, value):
        if not hasattr(type(self), name):
            raise AttributeError(f"Options has no field {name}")
        if name in _FIELDS and type(value) is not type(_FIELDS[name]):
            raise TypeError(f"Options.{name} is {value!r}, expected {type(_FIELDS[name]).__name__}")
        super().__setattr__(name, value)

    def copy(self):
        """Returns an independent copy."""
        other = Options(self._timeout)
        for name in (*_FIELDS, "enable_reconfigure", "group_name", "global_ranks_in_group"):
            setattr(other, name, getattr(self, name))
        return other

    def part_from(self, other, closed=False):
        """Takes out what these options have from those of another group of the process and cannot share with
        it: its port and the address of its metrics, unless it is closed, and the store, in which only the
        job of the environment and groups that go on without lost ranks meet."""
        if not closed and _single(self.ports) and self.ports == other.ports:
            self.ports = ""
        if not closed and self.metrics == other.metrics:
            self.metrics = ""
        if not _outlives(_mode_of(self)) and self.store == other.store:
            self.store = ""


_FIELDS = {name: value for name, value in vars(Options).items() if type(value) in (str, bool, int) and name[0] != "_"}


def _on_failure_of(name):
    modes = {"": api.REPORT, "report": api.REPORT_ALWAYS, "shrink": api.SHRINK, "retry": api.RETRY}
    if name not in modes:
        raise ValueError(f'tutti: on_failure is "{name}", expected report, shrink or retry')
    return modes[name]


def _mode_of(options):
    """Returns what a group with these options does when a rank is lost."""
    return options.on_failure or os.environ.get("TUTTI_ON_FAILURE", "").strip().lower()


def _outlives(mode):
    """Reports whether a group goes on without lost ranks."""
    return mode != "end" and _on_failure_of(mode) > api.REPORT


def _single(ports):
    """Reports whether ports name a port of which a process has but one."""
    return ports not in ("", "0") and "-" not in ports


def _or_null(text):
    return text.encode() or None


def _op(kind, **fields):
    return api.Op(kind=kind, **fields)


def _restore_after(task, staged):
    """Adds what task needs to write staged back."""
    if staged.copied:
        task.after.append(staged.restore)


def _reduced(tensor, how, use):
    """Prepares the input of a reduction."""
    if how.factor is None:
        return Staged(tensor, use, how.as_type)
    staged = Staged(tensor, use, how.as_type or tensor.dtype)  # a copy
    with raw():
        staged.memory.mul_(how.factor)
    return staged


def _scatter_into(task, how, output, source):
    """Adds to task the reduction of source, a part for each rank, to output."""
    if how.factor is not None:
        source.copy()
        with raw():
            source.memory.mul_(how.factor)
    target = Staged(output, WRITE, how.as_type)
    if overlap(source, target):
        source.copy()
    buffers = {"dst": target.buffer(how.wire), "src": source.buffer(how.wire)}
    task.ops.append(_op(api.OP_REDUCE_SCATTER, reduction=how.op, **buffers))
    task.keep += [source.memory, target.memory]
    _restore_after(task, target)


def _reduce_each(task, how, output, parts, rank):
    """Adds to task the reduction of a part for each rank to that rank, and of this rank's to output."""
    target, staged = Staged(output, WRITE, how.as_type), [_reduced(tensor, how, READ) for tensor in parts]
    staged[rank].copy()  # the sum is written to it
    task.after.append(lambda: target.memory.copy_(staged[rank].memory))
    for r, part in enumerate(staged):
        buffer = part.buffer(how.wire)
        task.ops.append(_op(api.OP_REDUCE, dst=buffer, src=buffer, reduction=how.op, peer=r))
        task.keep.append(part.memory)
    _restore_after(task, target)


def _sums_of(dtype):
    """Returns the type in which numbers of a type are added up."""
    part = dtype.to_real()
    if not part.is_floating_point or part.itemsize > 2:
        return dtype
    return torch.complex64 if dtype.is_complex else torch.float32


def _hash_of(shape):
    """Returns a hash of a shape, the same as that of the C++ module: FNV-1a, without its last bit."""
    result = 14695981039346656037
    for length in shape:
        result = (result ^ length) * 1099511628211 % 2**64
    return result >> 1


def _uneven(tensors):
    """Reports whether tensors have different shapes."""
    return any(tensor.shape != tensors[0].shape for tensor in tensors)


def _exchange(task, target, source, wire, to, sources):
    """Adds to task an exchange of parts of different lengths, in elements of a tensor."""
    if overlap(source, target):
        source.copy()
    op = _op(api.OP_ALLTOALLV if to else api.OP_ALLTOALL, dst=target.buffer(wire), src=source.buffer(wire))
    for name, counts in (("src_counts", to), ("dst_counts", sources)):
        setattr(op, name, _counts(count * wire[1] for count in counts))
    op.counts_len = len(to)
    task.ops.append(op)
    task.keep += [source.memory, target.memory]
    _restore_after(task, target)


def _counts(counts):
    counts = list(counts)
    return (ctypes.c_int64 * len(counts))(*counts)


def _message(kind, title, op, tensors, use, what, peer, tag):
    if not 0 <= tag < 2**31:
        raise ValueError(f"tutti {what}: the tag is {tag}, expected 0 to {2**31 - 1}")
    tensor = only(what, tensors)
    staged = Staged(tensor, use)
    buffer = staged.buffer(wire_of(tensor.dtype))
    task = Task(kind, title, [_op(op, dst=buffer, src=buffer, peer=peer, tag=tag)], [staged.memory], outputs=[tensors])
    _restore_after(task, staged)
    return task


def _exist():
    """Reports whether this process has a group."""
    return any(one is not None and not one._closed for one in [reference() for reference in list(_backends)])


class Backend(Elastic, Lifecycle, Reconfigure, C10D.Backend):
    """The backend of a group, over Tutti's library. It may be used by several threads."""

    def __init__(self, store, rank, size, options):
        """Joins the group of the ranks that make a Backend over the same store.

        It returns when all have. With Options.enable_reconfigure it joins no group: reconfigure does.
        """
        super().__init__(rank, size)
        groups_completed()
        self._rank, self._size, self._options, self._store = rank, size, options, another(store)
        self._further = _exist()
        self._prefix = ""  # of this group's keys in the store
        self._outlives = False  # the group goes on without lost ranks
        self._joined = 0  # what the group was made with, in milliseconds; set_timeout leaves it
        self._member_timeout = 0  # that of the member, and of groups that it forms
        self._group = 0  # there is none

        self._lock = threading.RLock()
        self._coalesced = None
        self._closed = self._suspended = self._formed = False
        self._seq = self._barriers = self._shrinks = 0
        self._deletes = True  # the store does
        self._extensions, self._member = [], 0
        self._forming = 0  # calls of reconfigure that wait for other members
        self.hook_in_python = None

        self._window_bytes, self._running = Counter(), Running()
        if len(options.global_ranks_in_group) == size:
            self._running.name(options.group_name, options.global_ranks_in_group, rank)
        # Futures of collectives, which end in their order, and of messages.
        self._ordered, self._unordered = Completer(True), Completer(False)
        if options.enable_reconfigure:
            self._own_member()
        else:
            self._join()
        _backends.append(weakref.ref(self, _backends.remove))
        if dist.get_debug_level() == dist.DebugLevel.DETAIL:
            _held.add(self)

    def __del__(self):
        if hasattr(self, "_unordered"):
            self._close()

    def getBackendName(self):  # noqa: N802
        return "tutti"

    @property
    def options(self):
        return self._options

    # -- Joining and leaving --

    def _wait_for(self, key, end, ready=None):
        """Waits until the store has the key or, if ready is given, until that holds."""
        pause = 0.001
        while not (ready() if ready else self._store.check([key])):
            if time.monotonic() >= end:
                raise dist.DistBackendError(f"no value of {key} in the store")
            time.sleep(pause)  # a store has no wait that signals end
            pause = min(2 * pause, 0.02)

    def _config(self, further, member=False):
        """Returns what a group and a member have in common.

        further says that the process listens elsewhere too: a single port of the environment is not for it.
        member says that it is for a member, whose groups end with the first lost rank and listen beside it.
        """
        options = self._options
        ports, on_failure = options.ports, _on_failure_of(options.on_failure)
        if further and not ports and _single(os.environ.get("TUTTI_PORT", "")) or member and _single(ports):
            ports = "0"
        return api.Config(
            struct_size=ctypes.sizeof(api.Config),
            transport=_or_null(options.transport),
            interfaces=_or_null(options.interfaces),
            ports=_or_null(ports),
            algorithm=_or_null(options.algorithm),
            log_dir=_or_null(options.log_dir),
            metrics=_or_null(options.metrics),
            timeout_ns=milliseconds(options._timeout) * 1_000_000,
            on_failure=api.REPORT_ALWAYS if member else on_failure,
            uniform=int(options.uniform),
            max_procs=options.max_procs,
        )

    def _meet(self, timeout):
        """Meets the other ranks in the store, and returns what they agree on."""
        # Each attempt of rank 0 is a turn. The others take another one than the last that they have
        # taken, which may be there still. A store may hold the keys of earlier groups of these
        # ranks.
        store, own, turn = self._store, f"{_TURNS}{self._rank}", 0
        if self._rank == 0:
            secret = secrets.token_hex(48).encode()
        else:
            secret, last = b"", store.add(own, 0)

            def begun():
                nonlocal secret, turn
                secret = peek(store, _TURN)
                turn = int(secret[:_TURN_DIGITS] or b"0", 16)
                return turn not in (0, last)

            try:
                self._wait_for(_TURN, time.monotonic() + timeout / 1000, begun)
            except dist.DistBackendError:
                raise dist.DistBackendError(
                    f"rank {self._rank}: rank 0 has not come to the store in {timeout} ms"
                ) from None
        self._prefix = f"tutti/{secret[:_TURN_DIGITS].decode()}/"
        if self._rank == 0:
            store.set(_TURN, secret)
        else:
            store.set(own, str(turn))
        return secret

    def _withdraw(self, job, joined):
        """The join after _meet is over, with or without success: no rank that comes later takes that turn.

        job is its name, if the store has its keys and no other has that.
        """
        if self._rank != 0 or not self._prefix:
            return
        if joined and self._erase([_TURN]):  # all have taken the turn, and none finds it again
            # Those of the library, which reads them only before the ranks meet.
            own = [f"/tutti/{job}/size", f"/tutti/{job}/terms"] if job else []
            self._erase([*(f"{_TURNS}{rank}" for rank in range(1, self._size)), *own])
            return
        with contextlib.suppress(Exception):  # the program gets the outcome of the join
            self._store.set(_TURN, _NO_TURN)

    def _erase(self, keys):
        """Deletes keys in the store, and returns whether it could.

        After an error the keys stay, and later calls delete nothing.
        """
        if not self._deletes:
            return False
        try:
            for key in keys:
                self._store.delete_key(key)
        except Exception:  # noqa: BLE001
            self._deletes = False
        return self._deletes

    def _join(self):
        api.open_library()
        options, env = self._options, os.environ
        timeout = self._joined = milliseconds(options._timeout)
        mode = _mode_of(options)
        self._outlives = _outlives(mode)
        if self._outlives and not (options.store or env.get("TUTTI_STORE")):
            raise ValueError(
                f'tutti: on_failure "{mode}" needs a store that knows which ranks are alive, which c10d\'s does not: '
                f"start the program with tutti run --on-failure {mode}, or set TUTTI_STORE or Options.store to that "
                "of an etcd"
            )
        config = self._config(self._further)
        config.size, config.rank = self._size, self._rank
        # A rank that comes into a running job cannot agree on anything with the others in the c10d
        # store.
        secret = b"" if options.environment and self._outlives else self._meet(timeout)
        if not options.environment:
            config.job = b"torch-" + secret[:24]
            # The store that tutti run serves wants the secret of the environment.
            if not self._outlives or not (env.get("TUTTI_SECRET") or env.get("TUTTI_SECRET_FILE")):
                config.secret, config.secret_len = secret[24:], len(secret) - 24
        if options.environment or self._outlives or options.store:
            config.store = _or_null(options.store)
        else:
            config.kv = ctypes.pointer(callbacks_of(another(self._store)))
        group, joined = ctypes.c_uint64(), False
        try:
            try:
                check(*blocking(api.api().tutti_join, ctypes.byref(config), ctypes.byref(group)))
                joined = True
            finally:
                self._withdraw(config.job.decode() if config.kv else "", joined)
        except BaseException:
            api.api().tutti_close(group)  # a signal handler has raised meanwhile
            raise
        self._group = group.value

    def _gathered(self):
        """The parts of empty slots are left as they were, so that a copy needs what was there. In a
        group that ends with the first lost rank there are none."""
        return READ_WRITE if self._outlives else WRITE

    def _close(self):
        if api.forked():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            _held.discard(self)
            group, member, self._member = self._group, self._member, 0
        api.api().tutti_close(group)  # ends all operations
        api.api().tutti_member_close(member)
        for work in self._running.all():
            work.await_(CLOSE)
        self._ordered.stop()
        self._unordered.stop()
        self._running.hooks.clear()
        close_windows_again()

    def shutdown(self):
        self._close()

    def abort(self):
        refuse_if_forked()
        with self._lock:
            if self._closed:
                return
            group, member = self._group, 0
            if not group and self._forming:
                # The calls of reconfigure that wait for other members end. Their handle is no
                # longer of use.
                member, self._member = self._member, 0
        if not group:
            api.api().tutti_member_close(member)
            return
        self._running.hooks.failed()
        api.api().tutti_abort(group, f"rank {self._rank} has aborted the process group".encode())

    def get_error(self):
        refuse_if_forked()
        kind = C10D.ErrorType
        kinds = {
            api.OK: kind.SUCCESS,
            api.ETIMEOUT: kind.TIMEOUT,
            api.ERANK: kind.REMOTE_ERROR,
            api.EABORTED: kind.REMOTE_ERROR,
        }
        return kinds.get(self._running.error(), kind.COMM_ERROR)

    def _timeout_of(self, timeout):
        """Returns a timeout of options in milliseconds."""
        limit = milliseconds(timeout)
        return milliseconds(self._options._timeout) if limit == -1 else limit

    def _set_timeout(self, task, timeout=timedelta(milliseconds=-1)):
        task.limit = self._timeout_of(timeout)
        task.timeout = 0 if task.limit == self._joined else task.limit

    def set_timeout(self, timeout):
        milliseconds(timeout)
        with self._lock:
            self._options._timeout = timeout

    @property
    def supports_coalescing(self):
        # Else c10d opens a coalescing for a batch of messages, which needs none, and leaves it open
        # if one of them fails. The inherited method asks this property.
        return False

    def perform_nocolor_split(self, device):
        """c10d calls it at ranks that are not in a new group: only NCCL needs them."""

    def _get_sequence_number_for_group(self):
        with self._lock:
            return self._seq

    def _set_sequence_number_for_group(self):
        pass

    # -- Starting operations --

    def _handle(self, title):
        """Returns the group, or raises an error that says why there is none."""
        group = self._group
        if self._closed:
            raise error_of(api.ECLOSED, f"{title}: the process group was shut down")
        if self._suspended:
            raise error_of(api.ECLOSED, f"{title}: the process group is suspended: call resume")
        if not group:
            raise error_of(api.ECLOSED, f"{title}: the process group has no members yet: call reconfigure")
        return group

    def _begin(self, task):
        message = task.type in _MESSAGES
        refuse_if_forked()
        self._running.reap()
        with self._lock:  # collectives start in the order of their numbers
            group = self._handle(task.title)
            if not message:
                self._seq += 1
            self._extend(task)
            work = Work(self._seq, task, self._unordered if message else self._ordered, self._running)
            work.start(group)
            for extension in self._extensions:
                extension.first = extension.first or work
            if self._coalesced is not None:
                self._coalesced.append(work)
        return work

    def _launch(self, task, timeout=timedelta(milliseconds=-1)):
        self._set_timeout(task, timeout)
        return groups.made(self._begin(task))

    def start_coalescing(self):
        with self._lock:
            self._coalesced = []

    _start_coalescing = start_coalescing

    def end_coalescing(self):
        with self._lock:
            works, self._coalesced = self._coalesced or [], None
        return groups.made(Together(works))

    _end_coalescing = end_coalescing

    # -- Operations --

    def _root(self, what, opts):
        if not 0 <= opts.rootRank < self._size:
            raise ValueError(f"tutti {what}: the root is {opts.rootRank}, expected 0 to {self._size - 1}")
        if getattr(opts, "rootTensor", 0) != 0:
            raise ValueError(f"tutti {what}: the root tensor is {opts.rootTensor}, expected 0")
        return opts.rootRank == self._rank

    def _check_lists(self, what, ones, lists, uneven=False):
        """Checks that there is one list of a tensor for each rank, all of the type of the single tensor of
        ones. Its shape is that of all, or, if they may be uneven, that of this rank's."""
        one = only(what, ones)
        if len(lists) != 1:
            raise ValueError(f"tutti {what}: requires a single list of tensors for the ranks, got {len(lists)}")
        if len(lists[0]) != self._size:
            raise ValueError(
                f"tutti {what}: requires a tensor for each of the {self._size} ranks, got a list of {len(lists[0])}"
            )
        check_alike(what, one, lists[0], not uneven)
        own = lists[0][self._rank]
        if own.shape != one.shape:
            raise ValueError(
                f"tutti {what}: invalid tensor size at index {self._rank}, which is of this rank: expected "
                f"{list(one.shape)}, got {list(own.shape)}"
            )

    @staticmethod
    def _check_pairs(what, outputs, inputs):
        if len(outputs) != len(inputs):
            raise ValueError(f"tutti {what}: {len(outputs)} outputs and {len(inputs)} inputs")

    @entry
    def broadcast(self, tensors, opts):
        tensor, root = only("broadcast", tensors), self._root("broadcast", opts)
        staged = Staged(tensor, READ if root else WRITE)
        buffer = staged.buffer(wire_of(tensor.dtype))
        op = _op(api.OP_BROADCAST, dst=buffer, src=buffer, peer=opts.rootRank)
        task = Task(OpType.BROADCAST, "tutti:broadcast", [op], [staged.memory], outputs=[tensors])
        if not root:
            _restore_after(task, staged)
        return self._launch(task, opts.timeout)

    def _reduce_in_place(self, task, how, staged):
        buffer = staged.buffer(how.wire)
        task.ops.append(_op(api.OP_ALLREDUCE, dst=buffer, src=buffer, reduction=how.op))
        task.keep.append(staged.memory)
        _restore_after(task, staged)

    @entry
    def allreduce(self, tensors, opts):
        if len(tensors) == 1 and isinstance(tensors[0], torch.Tensor) and tensors[0].layout == torch.sparse_coo:
            return self._allreduce_sparse(tensors, opts)
        tensor = only("all_reduce", tensors)
        how = reduction_of("all_reduce", opts.reduceOp, tensor.dtype)
        task = Task(OpType.ALLREDUCE, "tutti:all_reduce", outputs=[tensors])
        self._reduce_in_place(task, how, _reduced(tensor, how, READ_WRITE))
        return self._launch(task, opts.timeout)

    @entry
    def allreduce_coalesced(self, tensors, opts):
        what = "all_reduce_coalesced"
        if not tensors:
            raise ValueError(f"tutti {what}: requires tensors")
        check_alike(what, tensors[0], tensors, False)
        how = reduction_of(what, opts.reduceOp, tensors[0].dtype)
        if sum(tensor.nbytes for tensor in tensors) <= _FLATTEN and how.factor is None:
            parts = [Staged(tensors, READ_WRITE, how.as_type)]
        else:
            parts = [_reduced(tensor, how, READ_WRITE) for tensor in tensors]
        task = Task(OpType.ALLREDUCE_COALESCED, "tutti:all_reduce_coalesced", outputs=[tensors])
        for part in parts:
            self._reduce_in_place(task, how, part)
        return self._launch(task, opts.timeout)

    @entry
    def reduce(self, tensors, opts):
        tensor, root = only("reduce", tensors), self._root("reduce", opts)
        how = reduction_of("reduce", opts.reduceOp, tensor.dtype)
        staged = _reduced(tensor, how, READ_WRITE if root else READ)
        buffer = staged.buffer(how.wire)
        op = _op(api.OP_REDUCE, dst=buffer, src=buffer, reduction=how.op, peer=opts.rootRank)
        task = Task(OpType.REDUCE, "tutti:reduce", [op], [staged.memory], outputs=[tensors])
        if root:
            _restore_after(task, staged)
        return self._launch(task, opts.timeout)

    def _gather_lists(self, source, parts):
        """Returns the memory that stands for parts, which source is gathered in."""
        target = Staged(parts, self._gathered())
        if not target.copied and overlap(source, target) and source.memory.data_ptr() != parts[self._rank].data_ptr():
            source.copy()
        return target

    @entry
    def allgather(self, outputs, inputs, opts):
        self._check_lists("all_gather", inputs, outputs, uneven=True)
        wire, source = wire_of(inputs[0].dtype), Staged(inputs[0], READ)
        target = self._gather_lists(source, outputs[0])
        op = _op(api.OP_ALLGATHER, dst=target.buffer(wire), src=source.buffer(wire))
        if _uneven(outputs[0]):
            op.kind, op.counts_len = api.OP_ALLGATHERV, self._size
            op.dst_counts = _counts(output.numel() * wire[1] for output in outputs[0])
        task = Task(OpType.ALLGATHER, "tutti:all_gather", [op], [source.memory, target.memory], outputs=outputs)
        _restore_after(task, target)
        return self._launch(task, opts.timeout)

    def _gather_into(self, task, what, output, tensor):
        """Adds to task the gathering of tensor in output."""
        check_dense(what, tensor)
        check_alike(what, tensor, [output], False)
        if output.numel() != tensor.numel() * self._size:
            raise ValueError(
                f"tutti {what}: the output has {output.numel()} elements, expected {tensor.numel() * self._size}: "
                f"{tensor.numel()} for each of the {self._size} ranks"
            )
        wire, source, target = wire_of(tensor.dtype), Staged(tensor, READ), Staged(output, self._gathered())
        own = target.memory.data_ptr() + self._rank * source.memory.nbytes
        if overlap(source, target) and source.memory.data_ptr() != own:
            source.copy()
        task.ops.append(_op(api.OP_ALLGATHER, dst=target.buffer(wire), src=source.buffer(wire)))
        task.keep += [source.memory, target.memory]
        _restore_after(task, target)

    @entry
    def all_gather_single(self, output, tensor, opts):
        task = Task(OpType._ALLGATHER_BASE, "tutti:_all_gather_base", outputs=[[output]])
        self._gather_into(task, "all_gather_into_tensor", output, tensor)
        return self._launch(task, opts.timeout)

    @entry
    def all_gather_single_coalesced(self, outputs, inputs, opts):
        what = "all_gather_into_tensor_coalesced"
        self._check_pairs(what, outputs, inputs)
        task = Task(OpType.COALESCED, "tutti:all_gather_into_tensor_coalesced", outputs=[outputs])
        for output, tensor in zip(outputs, inputs, strict=True):
            self._gather_into(task, what, output, tensor)
        return self._launch(task, opts.timeout)

    @entry
    def allgather_coalesced(self, outputs, inputs, opts):
        what = "all_gather_coalesced"
        if not inputs:
            raise ValueError(f"tutti {what}: requires tensors")
        if len(outputs) != self._size:
            raise ValueError(f"tutti {what}: requires a list for each of the {self._size} ranks, got {len(outputs)}")
        for tensors in outputs:
            if len(tensors) != len(inputs):
                raise ValueError(
                    f"tutti {what}: a list of outputs has {len(tensors)} tensors, expected {len(inputs)}"
                )
        task = Task(OpType.ALLGATHER_COALESCED, "tutti:all_gather_coalesced", outputs=outputs)
        for i, tensor in enumerate(inputs):
            parts = [tensors[i] for tensors in outputs]
            check_dense(what, tensor)
            check_alike(what, tensor, parts, True)
            wire, source, target = wire_of(tensor.dtype), Staged(tensor, READ), Staged(parts, self._gathered())
            if overlap(source, target):
                source.copy()
            task.ops.append(_op(api.OP_ALLGATHER, dst=target.buffer(wire), src=source.buffer(wire)))
            task.keep += [source.memory, target.memory]
            _restore_after(task, target)
        return self._launch(task, opts.timeout)

    @entry
    def gather(self, outputs, inputs, opts):
        return self._gather(outputs, inputs, opts)

    def _gather(self, outputs, inputs, opts):
        tensor, root = only("gather", inputs), self._root("gather", opts)
        wire, source = wire_of(tensor.dtype), Staged(tensor, READ)
        op = _op(api.OP_GATHER, dst=api.Buffer(None, 0, wire[0], api.HOST), peer=opts.rootRank)
        task = Task(OpType.GATHER, "tutti:gather", [op], outputs=outputs)
        if root:
            self._check_lists("gather", inputs, outputs)
            target = self._gather_lists(source, outputs[0])
            op.dst = target.buffer(wire)
            task.keep.append(target.memory)
            _restore_after(task, target)
        elif outputs:
            raise ValueError("tutti gather: requires empty output on non-root")
        op.src = source.buffer(wire)
        task.keep.append(source.memory)
        return self._launch(task, opts.timeout)

    def gather_single(self, output, input, opts=None):  # noqa: A002  the name of c10d
        """torch does not forward it to backends in Python: C++ cannot call it."""
        what, opts, outputs = "gather_into_tensor", opts or C10D.GatherOptions(), []
        if self._root(what, opts):
            check_dense(what, input)
            check_alike(what, input, [output], False)
            if output.numel() != input.numel() * self._size or not output.is_contiguous():
                raise ValueError(
                    f"tutti {what}: the output has {output.numel()} elements, expected "
                    f"{input.numel() * self._size} contiguous ones"
                )
            flat = output.view(self._size, input.numel())
            outputs = [[flat[r].view(input.shape) for r in range(self._size)]]
        return self._gather(outputs, [input], opts)

    gather_into_tensor = gather_single

    @entry
    def scatter(self, outputs, inputs, opts):
        output, root = only("scatter", outputs), self._root("scatter", opts)
        wire, target = wire_of(output.dtype), Staged(output, WRITE)
        op = _op(api.OP_SCATTER, dst=target.buffer(wire), src=api.Buffer(None, 0, wire[0], api.HOST))
        op.peer = opts.rootRank
        task = Task(OpType.SCATTER, "tutti:scatter", [op], [target.memory], outputs=[outputs])
        if root:
            self._check_lists("scatter", outputs, inputs)
            source = Staged(inputs[0], READ)
            own = inputs[0][self._rank].data_ptr()
            if not source.copied and overlap(source, target) and target.memory.data_ptr() != own:
                source.copy()
            op.src = source.buffer(wire)
            task.keep.append(source.memory)
        elif inputs:
            raise ValueError("tutti scatter: requires empty input on non-root")
        _restore_after(task, target)
        return self._launch(task, opts.timeout)

    @entry
    def reduce_scatter(self, outputs, inputs, opts):
        self._check_lists("reduce_scatter", outputs, inputs, uneven=True)
        how = reduction_of("reduce_scatter", opts.reduceOp, outputs[0].dtype)
        task = Task(OpType.REDUCE_SCATTER, "tutti:reduce_scatter", outputs=[outputs])
        if _uneven(inputs[0]):
            _reduce_each(task, how, outputs[0], inputs[0], self._rank)
        else:
            _scatter_into(task, how, outputs[0], Staged(inputs[0], READ, how.as_type))
        return self._launch(task, opts.timeout)

    def _scatter_single(self, task, what, output, tensor, opts):
        check_dense(what, output)
        check_alike(what, output, [tensor], False)
        if tensor.numel() != output.numel() * self._size:
            raise ValueError(
                f"tutti {what}: the input has {tensor.numel()} elements, expected {output.numel() * self._size}: "
                f"{output.numel()} for each of the {self._size} ranks"
            )
        how = reduction_of(what, opts.reduceOp, output.dtype)
        _scatter_into(task, how, output, Staged(tensor, READ, how.as_type))

    @entry
    def reduce_scatter_single(self, output, tensor, opts):
        task = Task(OpType._REDUCE_SCATTER_BASE, "tutti:_reduce_scatter_base", outputs=[[output]])
        self._scatter_single(task, "reduce_scatter_tensor", output, tensor, opts)
        return self._launch(task, opts.timeout)

    @entry
    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        what = "reduce_scatter_tensor_coalesced"
        self._check_pairs(what, outputs, inputs)
        task = Task(OpType.COALESCED, "tutti:reduce_scatter_tensor_coalesced", outputs=[outputs])
        for output, tensor in zip(outputs, inputs, strict=True):
            self._scatter_single(task, what, output, tensor, opts)
        return self._launch(task, opts.timeout)

    def _counts_of(self, which, splits, tensor):
        """Returns the number of elements for each rank of splits, which divide the first dimension."""
        what = "tutti all_to_all_single: "
        rows = tensor.shape[0] if tensor.dim() else tensor.numel()
        row = tensor.numel() // rows if rows else 0
        if not splits:
            if rows % self._size:
                raise ValueError(
                    f"{what}the first dimension of the {which} is {rows}, which does not divide equally across the "
                    f"group of {self._size} ranks"
                )
            return [rows // self._size * row] * self._size
        if len(splits) != self._size:
            raise ValueError(
                f"{what}there are {len(splits)} splits of the {which}, expected one for each of the {self._size} ranks"
            )
        for i, split in enumerate(splits):
            if split < 0:
                raise ValueError(f"{what}split {i} of the {which} is {split}, expected 0 or more")
        if sum(splits) != rows:
            raise ValueError(
                f"{what}the splits of the {which} doesn't match total dim 0 size: their sum is {sum(splits)}, the "
                f"first dimension is {rows}"
            )
        return [split * row for split in splits]

    @entry
    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts):
        check_dense("all_to_all_single", tensor)
        check_alike("all_to_all_single", tensor, [output], False)
        to, sources = self._counts_of("input", input_splits, tensor), self._counts_of("output", output_splits, output)
        if not input_splits and not output_splits:
            if tensor.numel() != output.numel():
                raise ValueError(
                    f"tutti all_to_all_single: the output has {output.numel()} elements, the input {tensor.numel()}: "
                    "without splits they must be equal"
                )
            to = sources = []
        task = Task(OpType.ALLTOALL_BASE, "tutti:all_to_all", outputs=[[output]])
        target, source = Staged(output, self._gathered()), Staged(tensor, READ)
        _exchange(task, target, source, wire_of(tensor.dtype), to, sources)
        return self._launch(task, opts.timeout)

    @entry
    def alltoall(self, outputs, inputs, opts):
        what = "all_to_all"
        for tensors in (inputs, outputs):
            if len(tensors) != self._size:
                raise ValueError(
                    f"tutti {what}: requires a tensor for each of the {self._size} ranks, got a list of {len(tensors)}"
                )
            check_alike(what, inputs[0], tensors, False)
        to, sources = ([tensor.numel() for tensor in tensors] for tensors in (inputs, outputs))
        task = Task(OpType.ALLTOALL, "tutti:all_to_all", outputs=[outputs])
        target, source = Staged(outputs, self._gathered()), Staged(inputs, READ)
        _exchange(task, target, source, wire_of(inputs[0].dtype), to, sources)
        return self._launch(task, opts.timeout)

    def _check_peer(self, what, peer):
        if not 0 <= peer < self._size:
            raise ValueError(f"tutti {what}: the rank is {peer}, expected 0 to {self._size - 1}")

    @entry
    def send(self, tensors, to, tag):
        self._handle("tutti:send")
        self._check_peer("send", to)
        return self._launch(_message(OpType.SEND, "tutti:send", api.OP_SEND, tensors, READ, "send", to, tag))

    @entry
    def recv(self, tensors, source, tag):
        self._handle("tutti:recv")
        self._check_peer("recv", source)  # api.ANY_RANK is for recv_anysource alone
        return self._launch(_message(OpType.RECV, "tutti:recv", api.OP_RECV, tensors, WRITE, "recv", source, tag))

    @entry
    def recv_anysource(self, tensors, tag):
        kind, title = OpType.RECVANYSOURCE, "tutti:recvAnySource"
        return self._launch(_message(kind, title, api.OP_RECV, tensors, WRITE, "recv", api.ANY_RANK, tag))

    @entry
    def barrier(self, opts):
        return self._launch(Task(OpType.BARRIER, "tutti:barrier", [_op(api.OP_BARRIER)]), opts.timeout)

    def monitored_barrier(self, timeout=timedelta(milliseconds=-1), wait_all_ranks=False):
        """The ranks report to rank 0 in the store, so that the group stays usable when one does not come.

        In a group that goes on without lost ranks, rank 0 may be one of those. C++ gives options, not a timeout.
        """
        refuse_if_forked()
        timeout = getattr(timeout, "timeout", timeout)
        if self._outlives:
            opts = C10D.BarrierOptions()
            opts.timeout = timeout
            self.barrier(opts).wait()
            return
        limit = self._timeout_of(timeout)
        if limit >= 2**62:
            raise ValueError(f"tutti monitored_barrier: the timeout of {limit} ms is too long")
        with self._lock:
            self._barriers += 1
            prefix = f"{self._prefix}barriers/{self._barriers}/"
        try:
            self._meet_in_barrier(prefix, limit, wait_all_ranks)
        finally:
            self._leave_barrier(prefix)

    def _meet_in_barrier(self, prefix, limit, wait_all_ranks):
        end, outcome = time.monotonic() + limit / 1000, prefix + "outcome"
        self._store.set(prefix + str(self._rank), "here")
        if self._rank != 0:
            self._monitored(prefix + "0", outcome, limit, end)
            return
        if limit <= 0 and self._size > 1:
            raise dist.DistBackendError(f"Rank 0 timed out in monitoredBarrier after {limit} ms")
        missing = []
        for rank in range(1, self._size):
            try:
                self._wait_for(prefix + str(rank), end)
            except dist.DistBackendError:
                missing.append(str(rank))
                if not wait_all_ranks:
                    break
        ranks = ", ".join(missing)
        self._store.set(outcome, ranks or "ok")
        if missing:
            plural = "s" if len(missing) > 1 else ""
            raise dist.DistBackendError(f"[Rank 0]: Rank{plural} {ranks} failed to pass monitoredBarrier in {limit} ms")

    def _leave_barrier(self, prefix):
        """Counts this rank among those that have left a monitored barrier, with or without an error.

        The last one deletes the keys: no other asks for them again. They stay if a rank does not come, or
        the store fails.
        """
        left = prefix + "left"
        try:
            if not self._deletes or self._store.add(left, 1) < self._size:
                return
        except Exception:  # noqa: BLE001  the program gets the outcome of the barrier
            return
        self._erase([left, prefix + "outcome", *(f"{prefix}{rank}" for rank in range(self._size))])

    def _monitored(self, first, outcome, limit, end):
        """Waits for what rank 0 says of a monitored barrier."""
        # The beginning is that of Gloo's text.
        failed = (
            f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
            "send/recv from rank 0: "
        )
        for key in (first, outcome):
            try:
                self._wait_for(key, end)
            except dist.DistBackendError:
                raise dist.DistBackendError(f"{failed}it has not answered in {limit} ms") from None
            end = time.monotonic() + limit / 1000 + _ANSWER  # rank 0 may have come later
        ranks = self._store.get(outcome).decode()
        if ranks != "ok":
            plural = "s" if "," in ranks else ""
            raise dist.DistBackendError(f"{failed}rank{plural} {ranks} did not come")

    @entry
    def allreduce_sparse(self, tensors, opts):
        return self._allreduce_sparse(tensors, opts)

    def _allreduce_sparse(self, tensors, opts):
        """The indices and the values of all ranks are gathered and added up by rank."""
        what, title = "all_reduce of a sparse tensor", "tutti:sparse_all_reduce"
        if len(tensors) != 1 or tensors[0].layout != torch.sparse_coo:
            raise ValueError(f"tutti {what}: requires a single tensor with layout Sparse")
        if getattr(opts.reduceOp, "op", opts.reduceOp).name != "SUM":
            raise ValueError(f"tutti {what}: only works with ReduceOp.SUM")
        tensor, size = tensors[0], self._size
        with raw():
            own = tensor.cpu().to(_sums_of(tensor.dtype)).coalesce()
            indices, values = own.indices().contiguous(), own.values().contiguous()
            reduction_of(what, opts.reduceOp, tensor.dtype)
            # What each rank has: sparse and dense dimensions, elements, type, a hash of the shape.
            # It is as long at all ranks, whatever their tensors are.
            shape = [own.sparse_dim(), own.dense_dim(), own._nnz(), *wire_of(tensor.dtype), _hash_of(own.shape)]
            mine = torch.tensor(shape)
            theirs = torch.full((size, len(shape)), _EMPTY_SLOT)
        meta = Task(OpType._ALLREDUCE_SPARSE, title)
        self._gather_into(meta, what, theirs, mine)
        self._set_timeout(meta, opts.timeout)
        self._begin(meta).wait()
        elements = []
        for r, row in enumerate(theirs.tolist()):
            if row[0] == _EMPTY_SLOT:
                elements.append(0)
                continue
            if row[:2] + row[3:] != shape[:2] + shape[3:]:
                raise ValueError(
                    f"tutti {what}: the tensors of ranks {self._rank} and {r} have different types, shapes or "
                    "numbers of sparse dimensions"
                )
            elements.append(row[2])

        dense = list(own.shape[own.sparse_dim() :])
        width = 1
        for length in dense:
            width *= length
        total = sum(elements)
        all_indices = torch.empty(total * own.sparse_dim(), dtype=torch.int64)
        all_values = torch.empty(total * width, dtype=values.dtype)
        task = Task(OpType._ALLREDUCE_SPARSE, title, outputs=[tensors])
        for to, source, per in ((all_indices, indices, own.sparse_dim()), (all_values, values, width)):
            wire = wire_of(source.dtype)
            op = _op(api.OP_ALLGATHERV, dst=Staged(to, WRITE).buffer(wire), src=Staged(source, READ).buffer(wire))
            op.dst_counts, op.counts_len = _counts(n * per * wire[1] for n in elements), size
            task.ops.append(op)
            task.keep += [to, source]

        def add():
            sparse, at, result = own.sparse_dim(), 0, None
            for n in elements:
                part = torch.sparse_coo_tensor(
                    all_indices.narrow(0, at * sparse, n * sparse).view(sparse, n),
                    all_values.narrow(0, at * width, n * width).view(n, *dense),
                    own.shape,
                )
                result = part if result is None else result + part
                at += n
            result = result.coalesce()
            overflow(result._values(), tensor.dtype)
            tensor.copy_(result.to(tensor.device))

        task.after.append(add)
        work = self._launch(task, opts.timeout)
        work.wait()
        return groups.made(work)


_completed = threading.Lock()


def groups_completed():
    """Has ProcessGroup give the works of this backend, once."""
    if _completed.acquire(blocking=False):
        groups.install(Backend)


def close_all():
    """Closes the groups of this process. It is called when the interpreter ends."""
    if api.forked():
        return
    # All ranks make their groups in the same order. A close may wait for the other ranks.
    for reference in list(_backends):
        if (backend := reference()) is not None:
            backend.shutdown()
