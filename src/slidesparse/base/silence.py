"""Whether this process leaves its error to another one of the same run, which says it for all."""

from __future__ import annotations

_SILENT = [False]


def silence() -> None:
    """Say nothing more of errors: another process of the run says what ended it."""
    _SILENT[0] = True


def is_silent() -> bool:
    """Return whether :func:`silence` was called."""
    return _SILENT[0]
