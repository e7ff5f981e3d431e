"""Optional libraries: their import, and silence while a command prints its own output."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from slidesparse.errors import UnsupportedError

_QUIET = ContextVar("other libraries are quiet", default=False)

LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
"""Options with which transformers reads a folder: nothing is fetched, and no code in it runs."""

HF = 'pip install ".[hf]" in a checkout of slidesparse'
"""Remedy: install the libraries for models and checkpoints."""


def need(module: str, remedy: str = HF, *, what: str | None = None, needed: str | None = None) -> Any:
    """Import an optional library, or raise an UnsupportedError; the other arguments are parts of its message."""
    try:
        return import_module(module)
    except ImportError as error:
        what = f"{module} is not installed" if what is None else what
        raise UnsupportedError(what, got=error, needed=needed, remedy=remedy) from error


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence every :func:`other_library` while the block runs."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


@contextmanager
def other_library() -> Iterator[None]:
    """Mark a block in which another library may draw bars or print reports; its errors pass.

    Not every bar has a setting: compressed-tensors always draws its own.
    """
    if not _QUIET.get():
        yield
        return
    with redirect_stderr(io.StringIO()):
        yield


@contextmanager
def quiet_transformers(level: int = logging.ERROR) -> Iterator[None]:
    """Turn off the bars of transformers, if it is imported, and its messages below a level."""
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
