"""Let the system write a file to its disk while more of it is being made, so that the last flush has little to do."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

STRIDE = 1 << 26
"""Bytes after which a flush begins, unless one is running."""


class EarlyFlush:
    """Flushes a file from a thread of its own; where that fails, the flush at the end reports it.

    Args:
        descriptor: The file, open as long as this is not closed.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.waiting = descriptor, 0
        self.running: Future[None] | None = None
        self.pool = ThreadPoolExecutor(1, "flush")

    def wrote(self, n_bytes: int) -> None:
        """Take note of bytes that were handed to the system."""
        self.waiting += n_bytes
        if self.waiting >= STRIDE and (self.running is None or self.running.done()):
            self.waiting = 0
            flush = getattr(os, "fdatasync", os.fsync)  # macOS has the second alone
            self.running = self.pool.submit(flush, self.descriptor)

    def close(self) -> None:
        """Wait for the flush that is running."""
        self.pool.shutdown(cancel_futures=True)
