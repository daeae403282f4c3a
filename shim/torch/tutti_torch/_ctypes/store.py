"""A c10d store as the store in which the ranks of a group meet."""

import ctypes
import itertools
import threading

import torch.distributed as dist

from . import api

_numbers = itertools.count(1)
_stores = {}  # by the number that the library gives back as ctx
_lock = threading.Lock()


def _value(data, length):
    return ctypes.string_at(data, length) if length else b""


def _fail(call, e):
    text = (str(e) or repr(e)).encode()[: call.error_cap - 1] + b"\0"
    ctypes.memmove(call.error, text, len(text))
    return api.EINTERNAL


def _guarded(function):
    """Turns a function of a store, a call and a key into a callback of the library.

    The callbacks live as long as the process: the library may be within one while it is replaced.
    """

    @api.KVFunction
    def callback(ctx, pointer):
        call = pointer[0]
        try:
            result = function(_stores[ctx], call, call.key.decode())
            if len(result) > call.result_cap:
                raise ValueError(
                    f"the value of {call.key.decode()} has {len(result)} bytes, more than {call.result_cap}"
                )
            ctypes.memmove(call.result, bytes(result), len(result))
            call.result_len = len(result)
            return api.OK
        except Exception as e:  # noqa: BLE001
            return _fail(call, e)

    return callback


@_guarded
def _set(store, call, key):
    store.set(key, _value(call.value, call.value_len))
    return b""


@_guarded
def _get(store, call, key):
    return store.get(key) if store.check([key]) else b""


@_guarded
def _compare_and_set(store, call, key):
    return store.compare_set(key, _value(call.expected, call.expected_len), _value(call.value, call.value_len))


@api.KVRelease
def _release(ctx):
    with _lock:
        _stores.pop(ctx, None)


def callbacks_of(store):
    """Returns callbacks over store, which they keep until their release is called."""
    number = next(_numbers)
    with _lock:
        _stores[number] = store
    return api.KV(
        struct_size=ctypes.sizeof(api.KV),
        ctx=number,
        set=_set,
        get=_get,
        compare_and_set=_compare_and_set,
        release=_release,
    )


def another(store):
    """Returns another connection to the same store if it can be had.

    A client that waits in the store blocks the others of its connection.
    """
    try:
        return store.clone()
    except Exception:  # noqa: BLE001  a store in Python, for example
        return store


def without_prefixes(store):
    """Returns the store that is behind prefixes, which torch gives each group."""
    return store._underlying_non_prefix_store if isinstance(store, dist.PrefixStore) else store
