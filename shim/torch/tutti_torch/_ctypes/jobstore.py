"""The job's own store as a store of c10d."""

import ctypes
import hashlib
import math
import os
import secrets
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from . import api
from .interrupt import blocking
from .work import check, milliseconds

# Seconds of a wait, and of another request that may be repeated, without a look at signals.
_SLICE, _REQUEST = 0.1, 1
_LONGEST = 8  # of requests whose answers take long

# The most bytes of a key of the library's store. A hash stands for a longer one.
_LONGEST_KEY = 248

# A stored value begins with one of these bytes, because an empty one counts as missing. A sum has
# some random bytes then, so that ranks that write the same sum at the same time differ.
_VALUE, _SUM = b"=", b"+"
_RANDOM = 8

_DEFAULT = timedelta(seconds=300)

# Connections, one for each job and address, and the stores that C++ may still use, of which it
# keeps only a part. Both stay until the process ends.
_connections, _stores = {}, []


def _shown(value):
    return value[1 + _RANDOM :] if value[:1] == _SUM else value[1:]


def _bytes(value):
    return value.encode() if isinstance(value, str) else bytes(value)


def _name(key):
    """Returns the key of the library's store, the same as that of the C++ module."""
    name = _bytes(key)
    if len(name) <= _LONGEST_KEY:
        return name
    return b"sha1/" + hashlib.sha1(name, usedforsecurity=False).hexdigest().encode()


def _end(timeout):
    """Returns when a wait that begins now ends. It never does if timeout is 0."""
    return time.monotonic() + timeout.total_seconds() if timeout else math.inf


def _connect(address, timeout):
    """Returns the functions of the store of the job that the environment describes."""
    names = ("STORE", "STORE_USER", "STORE_PASSWORD", "JOB", "SECRET", "SECRET_FILE")
    key = (address, os.getpid(), *(os.environ.get(f"TUTTI_{name}") for name in names))
    if key not in _connections:
        config = api.Config(
            struct_size=ctypes.sizeof(api.Config),
            store=address.encode() or None,
            timeout_ns=max(0, milliseconds(timeout)) * 1_000_000,
        )
        kv = api.KV(struct_size=ctypes.sizeof(api.KV))
        try:
            check(*blocking(api.api().tutti_store_open, ctypes.byref(config), ctypes.byref(kv)))
        except BaseException:
            if kv.release:  # a signal handler has raised meanwhile
                kv.release(kv.ctx)
            raise
        _connections[key] = kv
    return _connections[key]


class JobStore(torch._C._distributed_c10d.Store):
    """A map that the ranks of a job share, in the store that TUTTI_STORE names.

    No rank hosts it, so that it outlives all of them. address overrides TUTTI_STORE unless it is
    empty.
    """

    def __init__(self, address="", timeout=_DEFAULT):
        super().__init__()
        self.set_timeout(timeout)
        api.open_library()
        self._kv = _connect(address, timeout)
        _stores.append(self)

    def clone(self):
        return self

    def _ask(self, function, key, seconds, value=b"", expected=b""):
        """Makes a request, and returns the result; None when time is up."""
        room, why = ctypes.create_string_buffer(api.MAX_VALUE), ctypes.create_string_buffer(512)
        value, expected = (ctypes.create_string_buffer(text, len(text)) for text in (value, expected))
        call = api.KVCall(
            struct_size=ctypes.sizeof(api.KVCall),
            error_cap=len(why),
            key=_name(key),
            value=ctypes.addressof(value),
            value_len=len(value),
            expected=ctypes.addressof(expected),
            expected_len=len(expected),
            timeout_ns=max(1, int(seconds * 1e9)),
            result=ctypes.addressof(room),
            result_cap=len(room),
            error=ctypes.addressof(why),
        )
        code = function(self._kv.ctx, ctypes.byref(call))
        if code == api.OK:
            return room.raw[: call.result_len]
        if code != api.ETIMEOUT:
            raise dist.DistStoreError(f"the job's store, key {key}: {why.value.decode(errors='replace')}")
        return None

    def _repeat(self, function, key, pace, longest, end, value=b""):
        """Makes a request again until it has a result; None: it has none at the end.

        The first time it waits pace seconds for an answer, and then twice as long each time, at most longest."""
        while True:  # Python runs the handlers of signals in between
            result = self._ask(function, key, min(pace, end - time.monotonic()), value)
            if result is not None or time.monotonic() >= end:
                return result
            pace = min(2 * pace, longest)

    def _request(self, function, key, value=b"", expected=None):
        """Makes a request that does not wait for other ranks. It is repeated unless expected is given."""
        timeout = self.timeout if self.timeout > timedelta(0) else _DEFAULT
        if expected is None:
            result = self._repeat(function, key, _REQUEST, _LONGEST, _end(timeout), value)
        else:  # a compare and set, which may have happened
            result = self._ask(function, key, timeout.total_seconds(), value, expected)
        if result is None:
            raise dist.DistStoreError(f"the job's store, key {key}: no answer in {milliseconds(timeout)} ms")
        return result

    def _await(self, key, timeout, end):
        """Waits for a key, and returns its stored value."""
        result = self._repeat(self._kv.wait, key, _SLICE, _SLICE, end)
        if result is None:
            raise dist.DistStoreError(
                f"wait timeout after {milliseconds(timeout)} ms for key {key} in the job's store"
            )
        return result

    def _peek(self, key):
        """Returns the stored value of key, empty if there is none."""
        return self._request(self._kv.get, key)

    def _exchange(self, key, expected, desired):
        """Sets the stored value of key to desired if it is expected, and returns the resulting one."""
        return self._request(self._kv.compare_and_set, key, desired, expected)

    def set(self, key, value):
        self._request(self._kv.set, key, _VALUE + _bytes(value))

    def compare_set(self, key, expected, desired):
        """As TCPStore: an empty expected value stands for a missing key, and a missing key for which
        another one is expected gives the expected one."""
        expected, desired = _bytes(expected), _bytes(desired)
        now = self._peek(key)
        while True:
            if expected if not now else _shown(now) != expected:
                return _shown(now) if now else expected
            then = self._exchange(key, now, _VALUE + desired)
            if _shown(then) == desired:
                return desired
            now = then

    def get(self, key):
        return _shown(self._await(key, self.timeout, _end(self.timeout)))

    def add(self, key, value):
        now = self._peek(key)
        while True:
            total = int(_shown(now) or b"0") + value
            desired = _SUM + secrets.token_bytes(_RANDOM) + str(total).encode()
            then = self._exchange(key, now, desired)
            if then == desired:
                return total
            now = then

    def delete_key(self, key):
        now = self._peek(key)
        return bool(now) and not self._exchange(key, now, b"")

    deleteKey = delete_key  # noqa: N815  the name that C++ looks for

    def check(self, keys):
        return all(self._peek(key) for key in keys)

    def num_keys(self):
        raise NotImplementedError("the job's store does not count its keys")

    getNumKeys = num_keys  # noqa: N815

    def wait(self, keys, timeout=None):
        timeout = self.timeout if timeout is None else timeout
        end = _end(timeout)
        for key in keys:
            self._await(key, timeout, end)
