"""The functions of libtutti.so. The library is opened when the first group is made."""

import ctypes
import os
import threading
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p

# What follows is that of tutti.h: the tests compare it.
ABI_MAJOR, ABI_MINOR = 1, 3

OK, EINVAL, ERANK, ETIMEOUT, EMISMATCH, ECLOSED, EABORTED = range(7)
EFORKED, EUNSUPPORTED, EINTERNAL, EBUSY, ECANCELED = 9, 10, 12, 13, 14

MAX_LISTED = 64
MAX_VALUE = 65536
HOST = ANY_RANK = -1

REPORT, SHRINK, RETRY, REPORT_ALWAYS = 0, 1, 2, -1

INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32, UINT64 = range(1, 9)
FLOAT32, FLOAT64, FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2, BOOL = range(9, 16)

SUM, PRODUCT, MIN, MAX, AVG, BIT_AND, BIT_OR, BIT_XOR = range(1, 9)

OP_BARRIER, OP_ALLREDUCE, OP_REDUCE_SCATTER, OP_ALLGATHER, OP_ALLGATHERV, OP_ALLTOALL, OP_ALLTOALLV = range(1, 8)
OP_BROADCAST, OP_REDUCE, OP_GATHER, OP_SCATTER, OP_SEND, OP_RECV = range(8, 14)


class ErrorInfo(ctypes.Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("code", c_int32),
        ("reporter", c_int32),
        ("overwritten", c_int32),
        ("epoch", c_uint64),
        ("ranks_total", c_uint32),
        ("ranks_listed", c_uint32),
        ("ranks", c_int32 * MAX_LISTED),
    ]


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


# The field from is a keyword of Python.
Status = type("Status", (ctypes.Structure,), {"_fields_": [("from", c_int32), ("tag", c_int32), ("count", c_uint64)]})

Check = CFUNCTYPE(c_int, c_void_p)

_HANDLES = POINTER(c_uint64)
FUNCTIONS = {
    "tutti_set_interrupt": [Check, c_void_p],
    "tutti_join": [POINTER(Config), _HANDLES],
    "tutti_store_open": [POINTER(Config), POINTER(KV)],
    "tutti_member_new": [POINTER(Config), _HANDLES],
    "tutti_member_handle": [c_uint64, c_char_p, c_uint64, POINTER(c_uint64)],
    "tutti_form": [c_uint64, c_char_p, POINTER(c_char_p), c_uint32, c_int64, _HANDLES],
    "tutti_member_close": [c_uint64],
    "tutti_close": [c_uint64],
    "tutti_rank": [c_uint64, POINTER(c_int32)],
    "tutti_size": [c_uint64, POINTER(c_int32)],
    "tutti_view": [c_uint64, POINTER(c_uint64), POINTER(c_int32), c_uint32, POINTER(c_uint32)],
    "tutti_start": [c_uint64, POINTER(Op), c_void_p],
    "tutti_work_test": [c_uint64],
    "tutti_work_wait": [c_uint64, c_int64],
    "tutti_work_error": [c_uint64, POINTER(ErrorInfo)],
    "tutti_work_error_text": [c_uint64, c_char_p, c_uint64, POINTER(c_uint64)],
    "tutti_work_status": [c_uint64, POINTER(Status)],
    "tutti_work_release": [c_uint64],
    "tutti_abort": [c_uint64, c_char_p],
    "tutti_recover": [c_uint64, c_int64],
    "tutti_admit": [c_uint64, c_int64, POINTER(c_int32)],
    "tutti_agree": [c_uint64, c_int32, c_int64, POINTER(c_int32)],
    "tutti_alloc": [c_uint64, c_uint64, POINTER(c_void_p)],
    "tutti_free": [c_void_p],
    "tutti_window_new": [c_uint64, c_uint64, c_int64, _HANDLES],
    "tutti_window_bytes": [c_uint64, POINTER(c_void_p), POINTER(c_uint64)],
    "tutti_window_map": [c_uint64, c_int32, c_int64, POINTER(c_void_p)],
    "tutti_window_put": [c_uint64, c_int32, c_uint64, c_void_p, c_uint64, c_int64],
    "tutti_window_signal": [c_uint64, c_int32, c_int32, c_int64],
    "tutti_window_wait_signal": [c_uint64, c_int32, c_int32, c_uint64, c_int64],
    "tutti_window_flush": [c_uint64, c_int32, c_int64],
    "tutti_window_close": [c_uint64, c_int64],
}

_lock = threading.Lock()
_path = "libtutti.so"
_library = None
_opener = 0


def set_library(path):
    """Sets the path of the library that open_library opens."""
    global _path
    _path = path


def open_library():
    """Opens the library, once, and returns its functions.

    It raises RuntimeError with what to do if that is not possible.
    """
    global _library, _opener
    with _lock:
        if _library is None:
            found = _open(_path)
            _opener, _library = os.getpid(), found
        return _library


def _open(path):
    hint = " (TUTTI_LIBRARY gives the path of Tutti's library)"
    try:
        found = ctypes.CDLL(path)
    except OSError as e:
        raise RuntimeError(f"cannot open {path}: {e}{_advice(str(e))}{hint}") from None
    try:
        found.tutti_abi_version.restype = c_uint32
        version = found.tutti_abi_version()
    except AttributeError:
        raise RuntimeError(f"{path} is not Tutti's library: it has no tutti_abi_version{hint}") from None
    major, minor = version >> 16, version & 0xFFFF
    if major != ABI_MAJOR or minor < ABI_MINOR:
        raise RuntimeError(
            f"{path} has version {major}.{minor} of the interface, and this program needs {ABI_MAJOR}.{ABI_MINOR}: "
            f"install the library that belongs to it, or build the program anew{hint}"
        )
    try:
        found.tutti_last_error.restype = c_char_p
        found.tutti_last_error.argtypes = []
        for name, types in FUNCTIONS.items():
            getattr(found, name).argtypes = types
    except AttributeError as e:
        raise RuntimeError(f"{path} lacks a function: it is damaged: {e}{hint}") from None
    return found


def _advice(message):
    """Returns what the dynamic linker's message means and what to do about it."""
    if "static TLS block" in message:
        return (
            ". The libraries of this process have used up the memory for thread-local variables of libraries that "
            "are opened late. Set LD_PRELOAD to the path of libtutti.so, or import it earlier, or raise "
            "GLIBC_TUNABLES=glibc.rtld.optional_static_tls=2048"
        )
    if any(word in message for word in ("initial-exec TLS", "libc.musl", "ld-linux", "libc.so.6")):
        return (
            ". This looks like musl (Alpine), on which a Go library cannot be opened while a program runs. Use an "
            "image with glibc 2.28 or later"
        )
    if "GLIBC_" in message:
        return ". The library was built on a newer system: build it on this one (make shim)"
    if "cannot open shared object file: No such file" in message:
        return ". Build it (make shim), and set LD_LIBRARY_PATH to its directory or give its path"
    return ""


def api():
    """Returns the functions of the library, which must be open."""
    return _library


def forked():
    """Reports whether this process is a forked child of the one that opened the library."""
    return _library is not None and _opener != os.getpid()


def last_error():
    """Returns the text of this thread's last failure."""
    return _library.tutti_last_error().decode(errors="replace")


def address(array, index=0):
    """Returns the address of an element of an array of ctypes, which must outlive its use."""
    return ctypes.addressof(array) + index * ctypes.sizeof(array._type_)
