"""Signals that end a command: with one line, the status that a shell expects, and nothing half done.

A signal raises an exception, so that temporary files are removed and the line can mention kept files. During imports a
library may swallow the exception or replace it, which is handled here too. This module imports little, since it must be
loaded before anything can be interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from slidesparse.errors import SlideSparseError

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "hung up"}

PATIENCE = 1.0
"""Seconds in which further signals are ignored, since they often come in groups. After that the next one ends all."""


class Interrupted(KeyboardInterrupt):
    """A signal, of this ``number``, that ends a command; its arguments describe kept files."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def describe(error: KeyboardInterrupt) -> str:
    """Describe an interruption, and kept files or the error that was ending the command already, in one line."""
    word = WORDS[signal.Signals(error.number)] if isinstance(error, Interrupted) else WORDS[signal.SIGINT]
    ending = error.__context__ if error.__cause__ is None and isinstance(error.__context__, SlideSparseError) else None
    return "; ".join([word, *map(str, error.args or filter(None, [ending]))])


class Signals:
    """Turns the signals of the block into :class:`Interrupted`.

    Signals that were ignored before, as under nohup, still are. Outside the main thread nothing changes. A process that
    ends after the block (``to_the_end``) cannot be interrupted during exit.

    Attributes:
        received: The exception of the first signal, or None.
        reporting: Whether an error is being reported, which a first signal lets end.
    """

    def __init__(self, *, to_the_end: bool) -> None:
        self.to_the_end, self.reporting = to_the_end, False
        self.received: Interrupted | None = None
        self.at, self.process = 0.0, os.getpid()
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self.hook, sys.unraisablehook = sys.unraisablehook, self._lost
        for number in WORDS:
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN):
                try:
                    signal.signal(number, self._handle)
                except ValueError:  # not in the main thread
                    break
                self.before[number] = before
        return self

    def __exit__(self, *error: object) -> None:
        sys.unraisablehook = self.hook
        for number, before in self.before.items():
            # Ignored, not handled: Python drops its handlers during exit.
            signal.signal(number, signal.SIG_IGN if self.to_the_end and number != signal.SIGTERM else before)

    def exit_status(self) -> int:
        """Return the status of a command that a signal has ended: 128 and its number."""
        return 128 + (self.received.number if self.received is not None else signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:  # in a forked child: as if there were no handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.received is None:
            self.received, self.at = Interrupted(number), time.monotonic()
            if self.reporting:
                return
            raise self.received
        if time.monotonic() - self.at > PATIENCE:
            self._leave_now()

    def _lost(self, information: Any) -> None:
        """Handle a signal's exception that some code could not raise; Python would print it and go on."""
        if self.received is not None and isinstance(information.exc_value, KeyboardInterrupt):
            self._leave_now()
        self.hook(information)

    def _leave_now(self) -> None:
        if self.received is not None:
            os.write(2, f"slidesparse: {describe(self.received)}\n".encode())
        os._exit(self.exit_status())
