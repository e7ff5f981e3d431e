"""Let other libraries work without a word, where a command wants only its own words on standard error."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from contextvars import ContextVar
from typing import Any

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


@contextmanager
def quiet_transformers(level: int = logging.ERROR) -> Iterator[None]:
    """Keep transformers, where it is imported already, from drawing bars and from reporting less than a level."""
    loaded: Any = sys.modules.get("transformers")
    if loaded is None:
        yield
        return
    log = loaded.logging
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity(level)
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()
