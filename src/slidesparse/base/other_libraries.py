"""Ask for other libraries, and let them work without a word where a command wants only its own words."""

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
"""How transformers reads a folder: nothing is fetched, and no code that lies there runs."""

HF = 'pip install ".[hf]" in a checkout of slidesparse'
"""How to install what models and checkpoints need."""


def need(module: str, remedy: str = HF, *, what: str | None = None, needed: str | None = None) -> Any:
    """Import an optional library; an UnsupportedError says how to install it, and ``what`` cannot go on without it."""
    try:
        return import_module(module)
    except ImportError as error:
        what = f"{module} is not installed" if what is None else what
        raise UnsupportedError(what, got=error, needed=needed, remedy=remedy) from error


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
