"""A c10d store as the store in which the ranks of a group meet."""

import ctypes
import itertools
import threading

import torch.distributed as dist

from . import api

_numbers = itertools.count(1)
_stores = {}  # by the number that the library gives back as ctx
_lock = threading.Lock()


class _Kept:
    """A store of the library.

    What ends a rank's keys may come when the store's host has ended: a TCPStore then takes one request that
    it need not answer, and torch writes a warning about others; a deletion in a FileStore whose file is
    gone waits for that until its timeout.
    """

    def __init__(self, store):
        self.store = store
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self.fragile = isinstance(store, (dist.TCPStore, dist.FileStore))

    def remove(self, key):
        """Gives a key an empty value, which stands for a missing one, or deletes it."""
        if self.fragile or not self._delete(key):
            self.store.set(key, b"")

    def _delete(self, key):
        """Returns False if the store cannot, and raises if the store has failed."""
        try:
            self.store.delete_key(key)
            return True
        except dist.DistError:
            raise
        except Exception:  # noqa: BLE001
            return False


def _value(data, length):
    return ctypes.string_at(data, length) if length else b""


def _fail(call, e):
    text = (str(e) or repr(e)).encode()[: call.error_cap - 1] + b"\0"
    ctypes.memmove(call.error, text, len(text))
    return api.EINTERNAL


def _guarded(function):
    """Turns a function of a kept store, a call and a key into a callback of the library.

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


# No value of the library: stores give it back for a missing key.
_NONE = b"\0"


def peek(store, key):
    """Returns the value of a key, empty if it has none.

    It does not wait, even if another rank deletes the key meanwhile, as check and get would.
    """
    value = store.compare_set(key, _NONE, _NONE)
    return b"" if value == _NONE else value


@_guarded
def _set(kept, call, key):
    if call.value_len:
        kept.store.set(key, _value(call.value, call.value_len))
    else:
        kept.remove(key)
    return b""


@_guarded
def _get(kept, call, key):
    return peek(kept.store, key)


@_guarded
def _compare_and_set(kept, call, key):
    expected, desired = _value(call.expected, call.expected_len), _value(call.value, call.value_len)
    return kept.store.compare_set(key, expected, desired)


@api.KVRelease
def _release(ctx):
    with _lock:
        _stores.pop(ctx, None)


def callbacks_of(store):
    """Returns callbacks over store, which they keep until their release is called."""
    number = next(_numbers)
    with _lock:
        _stores[number] = _Kept(store)
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
