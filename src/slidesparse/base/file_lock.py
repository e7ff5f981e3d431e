"""A lock between processes, on a file of its own; the system frees it when its holder ends in any way.

The package ``filelock`` is not used: up to 3.20 it takes a file system without locks for a lock that is held, and later
it leaves a file there that outlives a killed process. Importing it takes a quarter of a second.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_S = 0.05


@contextmanager
def file_lock(
    path: Path,
    wait_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[bool]:
    """Hold a lock while the block runs, if it is free within ``wait_s`` seconds.

    Where the file cannot be made, or its file system has no locks, nothing is locked.

    Args:
        path: The lock's file; it and its folder are made, and the file stays.
        wait_s: Seconds to wait; 0 tries once.
        clock: Returns seconds.
        sleep: Waits for some seconds.

    Yields:
        False where another process holds the lock.
    """
    descriptor = None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        yield descriptor is None or _is_locked(descriptor, clock() + wait_s, clock, sleep)
    finally:
        if descriptor is not None:
            os.close(descriptor)  # frees it


def _is_locked(descriptor: int, end: float, clock: Callable[[], float], sleep: Callable[[float], None]) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if clock() >= end:
                return False
            sleep(POLL_S)
        except OSError:  # no locks here
            return True
