"""The backend without its C++ module: the same operations in Python over ctypes, slower.

It is used where no module was compiled for the installed torch. It lacks options, windows, shrink,
suspend, hooks, tensors in Tutti's memory, failed_ranks, source ranks, monitored_barrier, sparse
tensors and PREMUL_SUM.
"""

import ctypes
import os
import secrets
import threading
import time
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p

import torch
import torch.distributed as dist

C10D = torch._C._distributed_c10d
ABI_MAJOR = 1
OK, EINVAL, EINTERNAL, EBUSY = 0, 1, 12, 13
HOST = ANY_RANK = -1
SLICE = 50_000_000  # nanoseconds of a wait without a look at signals
BARRIER, ALLREDUCE, REDUCE_SCATTER, ALLGATHER, ALLTOALLV = 1, 2, 3, 4, 7
BROADCAST, REDUCE, GATHER, SCATTER, SEND, RECV = 8, 9, 10, 11, 12, 13

# The numbers of tutti.h. Other types are moved as bytes.
WIRES = {
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.uint8: 5,
    torch.uint16: 6,
    torch.uint32: 7,
    torch.uint64: 8,
    torch.float32: 9,
    torch.float64: 10,
    torch.float16: 11,
    torch.bfloat16: 12,
    torch.float8_e4m3fn: 13,
    torch.float8_e5m2: 14,
    torch.bool: 15,
}
REDUCTIONS = {"SUM": 1, "PRODUCT": 2, "MIN": 3, "MAX": 4, "AVG": 5, "BAND": 6, "BOR": 7, "BXOR": 8}


class KVCall(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("error_cap", c_uint32),
        ("key", c_char_p),
        ("value", c_void_p),
        ("value_len", c_uint64),
        ("expected", c_void_p),
        ("expected_len", c_uint64),
        ("timeout_ns", c_int64),
        ("result", c_void_p),
        ("result_cap", c_uint64),
        ("result_len", c_uint64),
        ("error", c_void_p),
    ]


KVFunction = CFUNCTYPE(c_int, c_void_p, POINTER(KVCall))
KVRelease = CFUNCTYPE(None, c_void_p)


class KV(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("ctx", c_void_p),
        ("set", KVFunction),
        ("get", KVFunction),
        ("wait", KVFunction),
        ("compare_and_set", KVFunction),
        ("release", KVRelease),
    ]


class Config(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("size", c_int32),
        ("rank", c_int32),
        ("max_size", c_int32),
        ("job", c_char_p),
        ("store", c_char_p),
        ("store_user", c_char_p),
        ("store_password", c_char_p),
        ("kv", POINTER(KV)),
        ("secret", c_char_p),
        ("secret_len", c_uint64),
        ("transport", c_char_p),
        ("interfaces", c_char_p),
        ("ports", c_char_p),
        ("algorithm", c_char_p),
        ("tuning", c_char_p),
        ("log_dir", c_char_p),
        ("metrics", c_char_p),
        ("log_level", c_char_p),
        ("timeout_ns", c_int64),
        ("window_ns", c_int64),
        ("lease_ttl_ns", c_int64),
        ("on_failure", c_int32),
        ("on_timeout", c_int32),
        ("uniform", c_int32),
        ("auto_admit", c_int32),
        ("progress", c_int32),
        ("max_procs", c_int32),
        ("memory_limit", c_int64),
    ]


class Buffer(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("count", c_uint64), ("dtype", c_int32), ("device", c_int32)]


class Op(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_int32),
        ("reduction", c_int32),
        ("peer", c_int32),
        ("tag", c_int32),
        ("flags", c_uint32),
        ("dst", Buffer),
        ("src", Buffer),
        ("src_counts", POINTER(c_int64)),
        ("dst_counts", POINTER(c_int64)),
        ("counts_len", c_uint64),
        ("stream", c_void_p),
        ("timeout_ns", c_int64),
        ("status", c_void_p),
    ]


class Status(ctypes.Structure):
    _fields_ = [("source", c_int32), ("tag", c_int32), ("count", c_uint64)]


_library = None
_opened = threading.Lock()


def library(path):
    """Opens libtutti.so, once."""
    global _library
    with _opened:
        if _library is None:
            try:
                found = ctypes.CDLL(path)
                version = found.tutti_abi_version()
            except (OSError, AttributeError) as e:
                raise RuntimeError(
                    f"{e} (TUTTI_LIBRARY gives the path of Tutti's library: make shim builds it)"
                ) from None
            if version >> 16 != ABI_MAJOR:
                raise RuntimeError(f"{path} has version {version >> 16} of the interface, expected {ABI_MAJOR}")
            found.tutti_last_error.restype = c_char_p
            for name, types in {
                "tutti_join": [POINTER(Config), POINTER(c_uint64)],
                "tutti_close": [c_uint64],
                "tutti_abort": [c_uint64, c_char_p],
                "tutti_view": [c_uint64, POINTER(c_uint64), POINTER(c_int32), c_uint32, POINTER(c_uint32)],
                "tutti_start": [c_uint64, POINTER(Op), POINTER(c_uint64)],
                "tutti_work_wait": [c_uint64, c_int64],
                "tutti_work_test": [c_uint64],
                "tutti_work_error_text": [c_uint64, c_void_p, c_uint64, c_void_p],
                "tutti_work_status": [c_uint64, POINTER(Status)],
                "tutti_work_release": [c_uint64],
            }.items():
                getattr(found, name).argtypes = types
            _library = found
        return _library


def failure(code, text):
    return (ValueError if code == EINVAL else dist.DistBackendError)(text)


def callbacks(store):
    """Returns the callbacks over a c10d store."""

    def guarded(function):
        def call(_, request):
            request = request[0]
            try:
                result = function(request, request.key.decode())
                if result is not None:
                    if len(result) > request.result_cap:
                        raise ValueError(f"the value of {request.key} has {len(result)} bytes")
                    ctypes.memmove(request.result, bytes(result), len(result))
                    request.result_len = len(result)
                return OK
            except Exception as e:  # noqa: BLE001
                text = str(e).encode()[: request.error_cap - 1] + b"\0"
                ctypes.memmove(request.error, text, len(text))
                return EINTERNAL

        return KVFunction(call)

    def value(data, length):
        return ctypes.string_at(data, length) if length else b""

    kv = KV()
    kv.struct_size = ctypes.sizeof(KV)
    kv.set = guarded(lambda r, key: store.set(key, value(r.value, r.value_len)))
    kv.get = guarded(lambda r, key: store.get(key) if store.check([key]) else b"")
    kv.compare_and_set = guarded(
        lambda r, key: store.compare_set(key, value(r.expected, r.expected_len), value(r.value, r.value_len))
    )
    return kv


class Work(C10D.Work):
    """One operation, or several of which each is started at once."""

    def __init__(self, backend, title, handles, keep, after, outputs):
        super().__init__()
        self._backend, self._title, self._handles = backend, title, handles
        self._keep, self._after, self._outputs = keep, after, outputs
        self._lock, self._over, self._error, self._future = threading.RLock(), False, None, None
        self.source = -1

    def _finish(self):
        with self._lock:
            if self._over:
                return
            for handle in self._handles:
                code = _library.tutti_work_test(handle)
                if code != OK and self._error is None:
                    text = ctypes.create_string_buffer(4096)
                    _library.tutti_work_error_text(handle, text, len(text), None)
                    self._error = failure(code, f"{self._title}: {text.value.decode(errors='replace')}")
                status = Status()
                if code == OK and _library.tutti_work_status(handle, byref(status)) == OK:
                    self.source = status.source
                _library.tutti_work_release(handle)
            if self._error is None:
                with torch.no_grad():
                    for function in self._after:
                        function()
            self._keep = self._after = None
            self._over = True
            self._backend.running.discard(self)

    def poll(self):
        if not self._over:
            with self._lock:
                if not self._over and all(_library.tutti_work_test(handle) != EBUSY for handle in self._handles):
                    self._finish()
        return self._over

    def wait(self, timeout=None):
        limit = timeout.total_seconds() if timeout else 0
        end = time.monotonic() + limit if limit > 0 else None
        while not self._over:
            for handle in self._handles:
                # Only the end of the work releases its handles, and another thread may end it.
                if _library.tutti_work_wait(handle, SLICE) == EBUSY:
                    break
            self.poll()
            if not self._over and end is not None and time.monotonic() >= end:
                raise dist.DistBackendError(f"{self._title}: the wait timed out; the operation continues")
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self):
        return self.poll()

    def is_success(self):
        return self._over and self._error is None

    def exception(self):
        return self._error

    def source_rank(self):
        return self.source

    _source_rank = source_rank

    def result(self):
        return [x for x in self._outputs if isinstance(x, torch.Tensor)] or list(self._outputs[0])

    def synchronize(self):
        self.wait()

    def get_future(self):
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                threading.Thread(target=self._mark, args=(self._future,), daemon=True).start()
            return self._future

    def _mark(self, future):
        try:
            self.wait()
        except Exception as e:  # noqa: BLE001
            future.set_exception(e)
        else:
            future.set_result(self._outputs)


class Backend(C10D.Backend):
    """The backend of a group, over Tutti's library."""

    def __init__(self, store, rank, size, timeout, path):
        super().__init__(rank, size)
        self._tutti, self._rank, self._size, self._timeout = library(path), rank, size, timeout.total_seconds()
        self._group, self._closed, self.running, self._seq = c_uint64(), False, set(), 0
        self._coalesced = None
        self._store = store.clone() if hasattr(store, "clone") else store
        prefix = f"tutti/{self._store.add(f'tutti/turns/{rank}', 1)}/"
        if rank == 0:
            self._store.set(prefix + "secret", secrets.token_hex(48))
        self._store.wait([prefix + "secret"], timeout)
        agreed = self._store.get(prefix + "secret")
        self._kv = callbacks(self._store)  # the callbacks live as long as the backend
        config = Config(
            struct_size=ctypes.sizeof(Config),
            size=size,
            rank=rank,
            job=b"torch-" + agreed[:24],
            secret=agreed[24:],
            secret_len=len(agreed) - 24,
            timeout_ns=int(self._timeout * 1e9),
            kv=ctypes.pointer(self._kv),
        )
        self._check(self._tutti.tutti_join(byref(config), byref(self._group)))
        _groups.add(self)

    def _check(self, code):
        if code != OK:
            raise failure(code, self._tutti.tutti_last_error().decode(errors="replace"))

    def getBackendName(self):  # noqa: N802
        return "tutti"

    def name(self):
        return "tutti"

    @property
    def supports_coalescing(self):
        return True

    def view(self):
        epoch, n, ranks = c_uint64(), c_uint32(), (c_int32 * self._size)()
        self._check(self._tutti.tutti_view(self._group, byref(epoch), ranks, self._size, byref(n)))
        return epoch.value, list(ranks[: n.value])

    def abort(self):
        if not self._closed:
            self._tutti.tutti_abort(self._group, f"rank {self._rank} has aborted the process group".encode())

    def shutdown(self):
        if self._closed:
            return
        self._closed = True
        _groups.discard(self)
        self._tutti.tutti_close(self._group)
        for work in list(self.running):
            try:
                work.wait()
            except Exception:  # noqa: BLE001
                pass

    # -- What tensors become --

    @staticmethod
    def _only(what, tensors):
        if len(tensors) != 1:
            raise ValueError(f"tutti {what}: requires a single tensor, got {len(tensors)}")
        return tensors[0]

    @staticmethod
    def _dense(what, like, *tensors):
        for t in tensors:
            if t.layout != torch.strided or t.is_quantized or t.device.type not in ("cpu", "cuda"):
                raise ValueError(f"tutti {what}: requires dense tensors on cpu or cuda")
            if t.dtype != like.dtype:
                raise ValueError(f"tutti {what}: invalid tensor type {t.dtype}, expected {like.dtype}")

    def _parts(self, what, one, parts):
        if len(parts) != self._size:
            raise ValueError(f"tutti {what}: requires a tensor for each of the {self._size} ranks, got {len(parts)}")
        self._dense(what, one, *parts)
        for part in parts:
            if part.shape != one.shape:
                raise ValueError(f"tutti {what}: invalid tensor size {list(part.shape)}, expected {list(one.shape)}")

    @staticmethod
    def _memory(tensor, dtype=None):
        """Returns contiguous host memory with the values of tensor: its own, if that is possible."""
        return tensor.detach().resolve_conj().resolve_neg().to("cpu", dtype or tensor.dtype).contiguous()

    @staticmethod
    def _buffer(memory):
        wire = memory
        if memory.is_complex():
            wire = torch.view_as_real(memory)
        if wire.dtype in WIRES:
            return Buffer(memory.data_ptr(), wire.numel(), WIRES[wire.dtype], HOST)
        return Buffer(memory.data_ptr(), memory.nbytes, WIRES[torch.uint8], HOST)

    def _reduction(self, what, op, dtype):
        """Returns the number of a reduction, and the type in which elements are reduced."""
        name = next((n for n in REDUCTIONS if op == getattr(dist.ReduceOp, n)), None)
        bits = name in ("BAND", "BOR", "BXOR")
        if (
            name is None
            or (bits and (dtype.is_floating_point or dtype.is_complex))
            or (name == "AVG" and dtype == torch.bool)
        ):
            raise ValueError(f"tutti {what}: cannot use {op} with {dtype}")
        if dtype.is_complex and name not in ("SUM", "AVG"):
            raise ValueError(f"tutti {what}: cannot use {op} with {dtype}: expected SUM or AVG")
        if not dtype.is_complex and dtype not in WIRES and not (dtype.is_floating_point and dtype.itemsize == 1):
            raise ValueError(f"tutti {what}: cannot reduce {dtype}")
        if dtype == torch.bool:  # a sum is "any", a product is "all"
            return REDUCTIONS[{"SUM": "MAX", "PRODUCT": "MIN"}.get(name, name)], torch.uint8
        narrow = dtype.is_floating_point and dtype.itemsize == 1 and (name != "SUM" or dtype not in WIRES)
        return REDUCTIONS[name], torch.float32 if narrow else dtype

    # -- Starting operations --

    def _launch(self, title, ops, outputs, timeout=None):
        """Starts ops, tuples of fields, memory to keep, and functions that put results into tensors."""
        for work in list(self.running):
            work.poll()
        if self._closed:
            raise dist.DistBackendError(f"tutti:{title}: the process group was shut down")
        self._seq += 1
        limit = int(timeout.total_seconds() * 1e9) if timeout is not None and timeout.total_seconds() > 0 else 0
        handles, keep, after = [], [], []
        work = Work(self, f"tutti:{title}", handles, keep, after, outputs)
        for fields, memory, functions in ops:
            op = Op(struct_size=ctypes.sizeof(Op), timeout_ns=limit, **fields)
            handle = c_uint64()
            code = self._tutti.tutti_start(self._group, byref(op), byref(handle))
            if code != OK:
                error = failure(code, f"tutti:{title}: {self._tutti.tutti_last_error().decode(errors='replace')}")
                if handles:
                    self.running.add(work)
                raise error
            handles.append(handle.value)
            keep.extend(memory)
            after.extend(functions)
        self.running.add(work)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    @staticmethod
    def _unless_own(tensor, memory):
        return (
            []
            if memory.data_ptr() == tensor.data_ptr() and memory.dtype == tensor.dtype
            else [lambda: tensor.copy_(memory)]
        )

    def _root(self, what, root):
        if not 0 <= root < self._size:
            raise ValueError(f"tutti {what}: the root is {root}, expected 0 to {self._size - 1}")
        return root

    def _in_place(self, what, tensor, kind, reduction=0, peer=0, tag=0, dtype=None, write=True):
        self._dense(what, tensor, tensor)
        memory = self._memory(tensor, dtype)
        buffer = self._buffer(memory)
        after = self._unless_own(tensor, memory) if write else []
        return (
            {"kind": kind, "reduction": reduction, "peer": peer, "tag": tag, "dst": buffer, "src": buffer},
            [memory],
            after,
        )

    # -- Operations --

    def barrier(self, opts=None):
        return self._launch("barrier", [({"kind": BARRIER}, [], [])], [], getattr(opts, "timeout", None))

    def broadcast(self, tensors, opts):
        root = self._root("broadcast", opts.rootRank)
        tensor = self._only("broadcast", tensors)
        op = self._in_place("broadcast", tensor, BROADCAST, peer=root, write=root != self._rank)
        return self._launch("broadcast", [op], tensors, opts.timeout)

    def allreduce(self, tensors, opts):
        self._only("all_reduce", tensors)
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(self, tensors, opts):
        ops = []
        for tensor in tensors:
            self._dense("all_reduce", tensors[0], tensor)
            reduction, dtype = self._reduction("all_reduce", opts.reduceOp, tensor.dtype)
            ops.append(self._in_place("all_reduce", tensor, ALLREDUCE, reduction, dtype=dtype))
        return self._launch("all_reduce", ops, tensors, opts.timeout)

    def reduce(self, tensors, opts):
        root = self._root("reduce", opts.rootRank)
        tensor = self._only("reduce", tensors)
        reduction, dtype = self._reduction("reduce", opts.reduceOp, tensor.dtype)
        op = self._in_place("reduce", tensor, REDUCE, reduction, root, dtype=dtype, write=root == self._rank)
        return self._launch("reduce", [op], tensors, opts.timeout)

    def _scatter_back(self, parts, memory):
        def copy():
            for part, values in zip(parts, memory.split([p.numel() for p in parts]), strict=True):
                part.copy_(values.view(part.shape))

        return copy

    def _flat(self, parts):
        return torch.cat([self._memory(part).reshape(-1) for part in parts])

    def _room(self, parts):
        return torch.empty(sum(p.numel() for p in parts), dtype=parts[0].dtype)

    def _gather(self, what, parts, tensor):
        self._parts(what, tensor, parts)
        source, target = self._memory(tensor), self._room(parts)
        fields = {"kind": ALLGATHER, "dst": self._buffer(target), "src": self._buffer(source)}
        return fields, [source, target], [self._scatter_back(parts, target)]

    def allgather(self, outputs, inputs, opts=None):
        tensor = self._only("all_gather", inputs)
        return self._launch(
            "all_gather", [self._gather("all_gather", self._only("all_gather", outputs), tensor)], outputs
        )

    def allgather_coalesced(self, outputs, inputs, opts=None):
        ops = [self._gather("all_gather_coalesced", [o[i] for o in outputs], x) for i, x in enumerate(inputs)]
        return self._launch("all_gather_coalesced", ops, outputs)

    def _sizes(self, what, large, small):
        self._dense(what, small, small, large)
        if large.numel() != small.numel() * self._size:
            raise ValueError(
                f"tutti {what}: the larger tensor has {large.numel()} elements, expected "
                f"{small.numel() * self._size}: {small.numel()} for each of the {self._size} ranks"
            )

    def _copied(self, tensor):
        return self._memory(tensor).clone()

    def all_gather_single_coalesced(self, outputs, inputs, opts=None):
        ops = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._sizes("all_gather_into_tensor", output, tensor)
            source, target = self._copied(tensor), self._memory(output)
            fields = {"kind": ALLGATHER, "dst": self._buffer(target), "src": self._buffer(source)}
            ops.append((fields, [source, target], self._unless_own(output, target)))
        return self._launch("all_gather_into_tensor", ops, outputs)

    def all_gather_single(self, output, tensor, opts=None):
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def gather(self, outputs, inputs, opts):
        root, tensor = self._root("gather", opts.rootRank), self._only("gather", inputs)
        self._dense("gather", tensor, tensor)
        source, keep, after = self._memory(tensor), [], []
        fields = {
            "kind": GATHER,
            "peer": root,
            "src": self._buffer(source),
            "dst": Buffer(None, 0, self._buffer(source).dtype, HOST),
        }
        if root == self._rank:
            parts = self._only("gather", outputs)
            self._parts("gather", tensor, parts)
            target = self._room(parts)
            fields["dst"], keep, after = self._buffer(target), [target], [self._scatter_back(parts, target)]
        elif outputs:
            raise ValueError("tutti gather: requires empty output on non-root")
        return self._launch("gather", [(fields, [source, *keep], after)], outputs, opts.timeout)

    def scatter(self, outputs, inputs, opts):
        root, tensor = self._root("scatter", opts.rootRank), self._only("scatter", outputs)
        self._dense("scatter", tensor, tensor)
        target, keep = self._memory(tensor), []
        fields = {
            "kind": SCATTER,
            "peer": root,
            "dst": self._buffer(target),
            "src": Buffer(None, 0, self._buffer(target).dtype, HOST),
        }
        if root == self._rank:
            parts = self._only("scatter", inputs)
            self._parts("scatter", tensor, parts)
            source = self._flat(parts)
            fields["src"], keep = self._buffer(source), [source]
        elif inputs:
            raise ValueError("tutti scatter: requires empty input on non-root")
        return self._launch(
            "scatter", [(fields, [target, *keep], self._unless_own(tensor, target))], outputs, opts.timeout
        )

    def _scatter(self, output, source, opts):
        reduction, dtype = self._reduction("reduce_scatter", opts.reduceOp, output.dtype)
        source, target = source.to(dtype), torch.empty(output.numel(), dtype=dtype)
        fields = {
            "kind": REDUCE_SCATTER,
            "reduction": reduction,
            "dst": self._buffer(target),
            "src": self._buffer(source),
        }
        return fields, [source, target], [lambda: output.copy_(target.view(output.shape))]

    def reduce_scatter(self, outputs, inputs, opts):
        output, parts = self._only("reduce_scatter", outputs), self._only("reduce_scatter", inputs)
        self._parts("reduce_scatter", output, parts)
        return self._launch("reduce_scatter", [self._scatter(output, self._flat(parts), opts)], outputs, opts.timeout)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts):
        ops = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._sizes("reduce_scatter_tensor", tensor, output)
            ops.append(self._scatter(output, self._copied(tensor), opts))
        return self._launch("reduce_scatter_tensor", ops, outputs, opts.timeout)

    def reduce_scatter_single(self, output, tensor, opts):
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def _counts(self, which, splits, tensor):
        rows = tensor.shape[0] if tensor.dim() else tensor.numel()
        row = tensor.numel() // rows if rows else 0
        if not splits:
            if rows % self._size:
                raise ValueError(
                    f"tutti all_to_all_single: the first dimension of the {which} is {rows}, which does not "
                    f"divide equally across the group of {self._size} ranks"
                )
            splits = [rows // self._size] * self._size
        if len(splits) != self._size or min(splits) < 0 or sum(splits) != rows:
            raise ValueError(
                f"tutti all_to_all_single: the splits of the {which} are {list(splits)}, expected one for each "
                f"of the {self._size} ranks, with the sum {rows}"
            )
        return [split * row for split in splits]

    def _exchange(self, source, target, to, sources, after, outputs):
        per = self._buffer(source).count // source.numel() if source.numel() else 1
        if target.numel():
            per = self._buffer(target).count // target.numel()
        to, sources = ((c_int64 * self._size)(*(per * n for n in counts)) for counts in (to, sources))
        fields = {
            "kind": ALLTOALLV,
            "dst": self._buffer(target),
            "src": self._buffer(source),
            "src_counts": to,
            "dst_counts": sources,
            "counts_len": self._size,
        }
        return self._launch("all_to_all", [(fields, [source, target], after)], outputs)

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=None):
        self._dense("all_to_all_single", tensor, tensor, output)
        to, sources = self._counts("input", input_splits, tensor), self._counts("output", output_splits, output)
        source, target = self._copied(tensor), self._memory(output)
        return self._exchange(source, target, to, sources, self._unless_own(output, target), [output])

    def alltoall(self, outputs, inputs, opts=None):
        for parts in (outputs, inputs):
            if len(parts) != self._size:
                raise ValueError(
                    f"tutti all_to_all: requires a tensor for each of the {self._size} ranks, got {len(parts)}"
                )
            self._dense("all_to_all", inputs[0], *parts)
        source, target = self._flat(inputs), self._room(outputs)
        to, sources = ([p.numel() for p in parts] for parts in (inputs, outputs))
        return self._exchange(source, target, to, sources, [self._scatter_back(outputs, target)], outputs)

    def _message(self, what, kind, tensors, peer, tag):
        tensor = self._only(what, tensors)
        if not -(2**31) <= peer < 2**31 or not 0 <= tag < 2**31:
            raise ValueError(
                f"tutti {what}: the rank is {peer} and the tag {tag}, expected a rank of the group and a tag >= 0"
            )
        op = self._in_place(what, tensor, kind, peer=peer, tag=tag, write=kind == RECV)
        return self._launch(what, [op], tensors)

    def send(self, tensors, to, tag):
        return self._message("send", SEND, tensors, to, tag)

    def recv(self, tensors, source, tag):
        return self._message("recv", RECV, tensors, source, tag)

    def recv_anysource(self, tensors, tag):
        return self._message("recv", RECV, tensors, ANY_RANK, tag)

    def start_coalescing(self):
        self._coalesced = []

    def end_coalescing(self):
        works, self._coalesced = self._coalesced, None
        return Together(works)


class Together(C10D.Work):
    """The work of several works."""

    def __init__(self, works):
        super().__init__()
        self._works = works

    def wait(self, timeout=None):
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self):
        return all([work.poll() for work in self._works])

    def get_future(self):
        return torch.futures.collect_all([work.get_future() for work in self._works])


_groups = set()
_pid = os.getpid()


def close_all():
    """Closes the groups of this process. It is called when the interpreter ends."""
    if os.getpid() == _pid:
        for group in list(_groups):
            group.shutdown()


def failed_ranks(work):
    raise TypeError("failed_ranks needs the C++ module: build it with `python -m tutti_torch.build`")


ProcessGroupTutti = Backend
