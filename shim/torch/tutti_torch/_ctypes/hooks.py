"""Functions of the program that are called when operations end and when a group fails."""

import threading
import warnings
from collections import namedtuple
from datetime import timedelta

# That of torch cannot be made in Python.
WorkInfo = namedtuple("WorkInfo", "op_type seq time_started time_finished active_duration")


def _call(hook, kind, *arguments):
    try:
        hook(*arguments)
    except Exception as e:  # noqa: BLE001
        warnings.warn(f"tutti: {kind} has failed: {e!r}", RuntimeWarning, stacklevel=2)


class Hooks:
    """The hooks of one group. Their functions run on the thread that notices the event, without any
    lock of the backend. What they raise becomes a warning."""

    def __init__(self):
        self._lock = threading.RLock()
        self._failed, self._info = {}, None

    def add_failed(self, number, hook):
        """Names a function by a number that the caller chooses. Adding it again replaces the function."""
        with self._lock:
            self._failed[number] = hook

    def remove_failed(self, number):
        with self._lock:
            self._failed.pop(number, None)

    def set_info(self, hook):
        self._info = hook

    def clear(self):
        with self._lock:
            self._failed, self._info = {}, None

    def watches(self):
        """Reports whether a function wants to know of every end. Works are watched then."""
        return self._info is not None

    def failed(self):
        """Tells the functions that an operation or the group has failed."""
        with self._lock:
            hooks = list(self._failed.values())
        for hook in hooks:
            _call(hook, "an abort hook")

    def ended(self, op_type, seq, begun, over):
        """Tells the function that an operation has succeeded; the times are those of time.monotonic."""
        hook = self._info
        if hook is not None:
            times = [timedelta(seconds=seconds) for seconds in (begun, over, over - begun)]
            _call(hook, "a completion hook", WorkInfo(op_type, seq, *times))
