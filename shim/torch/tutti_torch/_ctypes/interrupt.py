"""Waiting so that signal handlers run, and end the wait if they raise."""

import itertools
import threading

from . import api

SLICE = 0.05  # seconds of a wait without a look at signals

_numbers = itertools.count(1)
_raised = set()  # the numbers of calls that a handler has ended


@api.Check
def _check(number):
    return 1 if number in _raised else 0


def _end(over):
    """Waits until a call that was interrupted has ended, although a handler may raise meanwhile."""
    ended = False
    while not ended:
        try:
            ended = over.wait()
        except BaseException:  # noqa: BLE001
            pass


def blocking(function, *arguments, succeeded=None):
    """Calls a function of the library that may wait, and returns its code and the text of a failure.

    On the main thread another thread makes the call, while this one runs signal handlers. If one
    raises, the call ends, and then the exception continues. What the call has made by then is in its
    arguments. succeeded is called after a success, also if a handler raises meanwhile.
    """

    def make():
        code = function(*arguments)
        text = "" if code == api.OK else api.last_error()
        if code == api.OK and succeeded is not None:
            succeeded()
        return code, text

    if threading.current_thread() is not threading.main_thread():
        return make()
    number, outcome, over = next(_numbers), [], threading.Event()
    begun = threading.Lock()  # taken by who comes first: the call, or a handler that raises before it

    def call():
        if not begun.acquire(blocking=False):
            return
        library = api.api()
        library.tutti_set_interrupt(_check, number)
        try:
            outcome.append(make())
        except BaseException as e:  # noqa: BLE001  an argument is not what ctypes wants
            outcome.append(e)
        finally:
            library.tutti_set_interrupt(api.Check(), None)
            over.set()

    try:
        threading.Thread(target=call, name="tutti call", daemon=True).start()
        over.wait()
    except BaseException:
        _raised.add(number)
        if not begun.acquire(blocking=False):
            _end(over)
        raise
    finally:
        _raised.discard(number)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
