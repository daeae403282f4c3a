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


def blocking(function, *arguments):
    """Calls a function of the library that may wait, and returns its code and the text of a failure.

    On the main thread another thread makes the call, while this one runs signal handlers. If one
    raises, the call ends, and then the exception continues. What the call has made by then is in its
    arguments.
    """
    if threading.current_thread() is not threading.main_thread():
        code = function(*arguments)
        return code, "" if code == api.OK else api.last_error()
    number, outcome, over = next(_numbers), [], threading.Event()

    def call():
        library = api.api()
        library.tutti_set_interrupt(_check, number)
        try:
            code = function(*arguments)
            outcome.append((code, "" if code == api.OK else api.last_error()))
        except BaseException as e:  # noqa: BLE001  an argument is not what ctypes wants
            outcome.append(e)
        finally:
            library.tutti_set_interrupt(api.Check(), None)
            over.set()

    threading.Thread(target=call, name="tutti call", daemon=True).start()
    try:
        over.wait()
    except BaseException:
        _raised.add(number)
        over.wait()
        raise
    finally:
        _raised.discard(number)
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
