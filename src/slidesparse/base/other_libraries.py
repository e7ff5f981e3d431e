"""Let other libraries work without a word, where a command wants only its own words on standard error."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from contextvars import ContextVar

_QUIET = ContextVar("other libraries are quiet", default=False)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Make every :func:`other_library` quiet while the block runs."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


@contextmanager
def other_library() -> Iterator[None]:
    """Mark a block in which another library may draw bars or print reports; its errors are raised as ever.

    Not every bar has a setting: compressed-tensors draws its own whatever the environment says.
    """
    if not _QUIET.get():
        yield
        return
    with redirect_stderr(io.StringIO()):
        yield
