"""Run what may never return, in a thread that can be left alone: a library that waits for a server, say."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_LEFT = [False]


def run_apart(work: Callable[[], T], seconds: float | None = None, goes_on: Callable[[], bool] = lambda: False) -> T:
    """Return what a function returns, or raise what it raises; leave it where it takes too long.

    A signal is answered while the function runs, whatever it waits for. What is left goes on by itself, so it must
    leave nothing that a kill would not leave.

    Raises:
        TimeoutError: It takes longer than ``seconds``, where there is a limit, and ``goes_on``, which is asked whenever
            so many have passed, says that it does not go on.
    """
    returned: list[T] = []
    raised: list[BaseException] = []
    finished = threading.Event()  # Thread.is_alive() is false after an interrupted join, in Python 3.11

    def note() -> None:
        try:
            returned.append(work())
        except BaseException as error:  # passed on to whoever waits
            raised.append(error)
        finally:
            finished.set()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(note,), daemon=True)
    try:  # a signal may come while the thread starts
        thread.start()
        while not finished.wait(seconds) and goes_on():
            pass
    finally:
        _LEFT[0] = _LEFT[0] or not finished.is_set()
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return returned[0]


def something_is_left() -> bool:
    """Return whether work was left alone: a process that ends in Python's usual way may wait for its threads."""
    return _LEFT[0]
