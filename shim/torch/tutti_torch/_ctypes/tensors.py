"""How tensors travel: as which elements, and from which memory."""

from dataclasses import dataclass

import torch

from . import api

READ, WRITE, READ_WRITE = 1, 2, 3

_WIRES = {
    torch.int8: (api.INT8, 1),
    torch.int16: (api.INT16, 1),
    torch.int32: (api.INT32, 1),
    torch.int64: (api.INT64, 1),
    torch.uint8: (api.UINT8, 1),
    torch.uint16: (api.UINT16, 1),
    torch.uint32: (api.UINT32, 1),
    torch.uint64: (api.UINT64, 1),
    torch.float32: (api.FLOAT32, 1),
    torch.float64: (api.FLOAT64, 1),
    torch.float16: (api.FLOAT16, 1),
    torch.bfloat16: (api.BFLOAT16, 1),
    torch.float8_e4m3fn: (api.FLOAT8_E4M3, 1),
    torch.float8_e5m2: (api.FLOAT8_E5M2, 1),
    torch.bool: (api.BOOL, 1),
}

_REDUCTIONS = {
    "SUM": api.SUM,
    "AVG": api.AVG,
    "PRODUCT": api.PRODUCT,
    "MIN": api.MIN,
    "MAX": api.MAX,
    "BAND": api.BIT_AND,
    "BOR": api.BIT_OR,
    "BXOR": api.BIT_XOR,
    "PREMUL_SUM": api.SUM,
}

# The names of types in C++, which texts of errors have.
_NAMES = {
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.uint16: "UInt16",
    torch.uint32: "UInt32",
    torch.uint64: "UInt64",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.bfloat16: "BFloat16",
    getattr(torch, "bcomplex32", None): "BComplex32",  # older versions lack it
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
_LAYOUTS = {
    torch.sparse_coo: "Sparse",
    torch.sparse_csr: "SparseCsr",
    torch.sparse_csc: "SparseCsc",
    torch.sparse_bsr: "SparseBsr",
    torch.sparse_bsc: "SparseBsc",
}

# Copies are written like those of Gloo: unseen by autograd.
raw = torch._C._AutoDispatchBelowADInplaceOrView


def wire_of(dtype):
    """Returns the elements as which a data type is moved, and how many stand for one of a tensor."""
    part = dtype.to_real()
    if part != dtype:  # a complex number is two others
        wire, per = wire_of(part)
        return wire, 2 * per
    return _WIRES.get(dtype) or (api.UINT8, dtype.itemsize)


def name_of(dtype):
    name = str(dtype).removeprefix("torch.")
    return _NAMES.get(dtype) or name[:1].upper() + name[1:]


def _is_float8(dtype):
    return str(dtype).startswith("torch.float8")


@dataclass
class Reduction:
    """How elements of a tensor are reduced."""

    op: int
    wire: tuple
    as_type: torch.dtype | None = None  # in which they are reduced, if it is another one
    factor: torch.Tensor | None = None  # multiplies the input


def reduction_of(what, op, dtype):
    """Returns how op reduces tensors of a type; what is the operation's name."""
    name = getattr(op, "op", op).name
    if name not in _REDUCTIONS:
        raise ValueError(f"tutti {what}: unknown reduction {int(getattr(op, 'op', op))}")
    r = Reduction(_REDUCTIONS[name], wire_of(dtype))
    if name == "PREMUL_SUM":
        factor = op.factor
        own = isinstance(factor, torch.Tensor)
        r.factor = factor.cpu().reshape(()) if own else torch.tensor(factor, dtype=torch.float64)
        if not dtype.is_complex and (not dtype.is_floating_point or r.factor.is_complex()):
            raise ValueError(
                f"tutti {what}: ReduceOp.PREMUL_SUM multiplies floating-point tensors by a real number, and complex "
                f"ones by any, got a tensor of type {name_of(dtype)} and a factor of type {name_of(r.factor.dtype)}"
            )
    bits = r.op in (api.BIT_AND, api.BIT_OR, api.BIT_XOR)
    integral = dtype in _WIRES and not dtype.is_floating_point and dtype != torch.bool
    packed = dtype.is_floating_point and dtype.itemsize == 1 and not _is_float8(dtype)  # as float4
    known = (dtype.is_floating_point and not packed and not bits) or integral
    if dtype == torch.bool:  # a sum is "any", a product is "all"
        known = r.op != api.AVG
    elif dtype.is_complex:
        known = r.op in (api.SUM, api.AVG) and r.wire[0] != api.UINT8  # not bytes, as types that wire_of does not know
    elif _is_float8(dtype) and (r.wire[0] == api.UINT8 or r.op != api.SUM or r.factor is not None):
        r.as_type = torch.float32
        r.wire = wire_of(torch.float32)
    if not known:
        raise ValueError(f"tutti {what}: ReduceOp.{name} cannot reduce tensors of type {name_of(dtype)}")
    return r


def check_dense(what, tensor):
    """Raises ValueError unless tensor is dense and on a device that what can use."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tutti {what}: expected a tensor, got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        layout = _LAYOUTS.get(tensor.layout, tensor.layout)
        raise ValueError(f"tutti {what}: only supports dense tensors, got one with layout {layout}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"tutti {what}: the tensor is on {tensor.device}, expected cpu or cuda")


def only(what, tensors):
    """Returns the tensor of a list that has exactly one, which is dense."""
    if len(tensors) != 1:
        raise ValueError(f"tutti {what}: requires a single tensor, got {len(tensors)}")
    check_dense(what, tensors[0])
    return tensors[0]


def check_alike(what, like, tensors, shapes):
    """Raises ValueError unless all tensors are dense and have like's type and, if shapes is true, shape."""
    for i, tensor in enumerate(tensors):
        check_dense(what, tensor)
        if tensor.dtype != like.dtype:
            raise ValueError(
                f"tutti {what}: invalid tensor type at index {i}: expected {name_of(like.dtype)}, "
                f"got {name_of(tensor.dtype)}"
            )
        if shapes and tensor.shape != like.shape:
            raise ValueError(
                f"tutti {what}: invalid tensor size at index {i}: expected {list(like.shape)}, got {list(tensor.shape)}"
            )


def _direct(tensor):
    """Reports whether an operation can use the memory of tensor."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _check_output(tensor):
    """Raises ValueError if elements of an output share memory, as those of an expanded tensor."""
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(f"tutti: elements of an output with strides {list(tensor.stride())} share memory: clone it")


def _joined(parts):
    """Returns the memory of parts as one tensor if they lie one after the other, else None."""
    if not parts:
        return None
    first, count = parts[0], 0
    for part in parts:
        if (
            not _direct(part)
            or part.untyped_storage()._cdata != first.untyped_storage()._cdata
            or part.storage_offset() != first.storage_offset() + count
            or part.dtype != first.dtype
        ):
            return None
        count += part.numel()
    return first if len(parts) == 1 else first.as_strided((count,), (1,))


class Staged:
    """Contiguous host memory that stands for a tensor, or for several of one type one after the other."""

    def __init__(self, tensors, use, as_type=None):
        """Takes the tensors' own memory if possible, else makes a copy.

        The copy holds their elements if use says that they are read. It raises ValueError if elements
        that are to be written share memory.
        """
        with raw():
            if isinstance(tensors, torch.Tensor):
                own = tensors if _direct(tensors) else None
                parts, shape, dtype = [tensors], tensors.shape, tensors.dtype
            else:
                own, parts = _joined(tensors), list(tensors)
                shape = (sum(part.numel() for part in parts),)
                dtype = parts[0].dtype if parts else torch.uint8
            self.copied = own is None or as_type is not None
            self._tensors = []
            if not self.copied:
                self.memory = own
                return
            if use & WRITE:
                for part in parts:
                    _check_output(part)
                self._tensors = parts
            self.memory = torch.empty(shape, dtype=as_type or dtype)
            if use & READ:
                for part, place in self._places(parts):
                    place.copy_(part)

    def _places(self, tensors):
        """Yields each tensor with its part of the memory."""
        flat, at = self.memory.view(-1), 0
        for tensor in tensors:
            yield tensor, flat.narrow(0, at, tensor.numel()).view(tensor.shape)
            at += tensor.numel()

    def copy(self):
        """Replaces the memory by a copy."""
        if not self.copied:
            with raw():
                self.memory = self.memory.clone()
            self.copied = True

    def buffer(self, wire):
        count = self.memory.numel()
        return api.Buffer(self.memory.data_ptr() if count else None, count * wire[1], wire[0], api.HOST)

    def restore(self):
        """Writes the memory to the tensors, if it is a copy."""
        if self._tensors:
            overflow(self.memory, self._tensors[0].dtype)
        for tensor, place in self._places(self._tensors):
            tensor.copy_(place)


def overflow(values, dtype):
    """Makes values NaN that a type is too small for, if it has no infinity: torch would make them its largest."""
    if dtype == getattr(torch, "float8_e4m3fn", None) and values.dtype != dtype:
        values.masked_fill_(values.abs() > 464, float("nan"))  # 464 is rounded to 448


def overlap(a, b):
    """Reports whether two pieces of memory share a byte."""
    a0, b0 = a.memory.data_ptr(), b.memory.data_ptr()
    return a0 < b0 + b.memory.nbytes and b0 < a0 + a.memory.nbytes
