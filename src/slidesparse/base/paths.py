"""Validation of paths, before anything is read or written there."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from slidesparse.errors import InputError


def usable_path(path: str | os.PathLike[str], name: str = "path") -> Path:
    """Return a path that every library accepts; nothing need exist there. ``name`` is its name in errors.

    Raises:
        InputError: Not a path, empty, not UTF-8 (which libraries and JSON files need), with NUL, or a circle of links.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InputError(name, got=type(path).__name__, needed="a path, as text")
    text = os.fspath(path)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{name} is not UTF-8", got=text, remedy="rename it") from error
    if not text:
        raise InputError(name, got="an empty path", needed="the name of a file or a folder")
    if "\0" in text:
        raise InputError(name, got=repr(text), needed="a name without NUL")
    try:
        Path(text).resolve()
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            os.lstat(text)  # refuses a name that is too long
    except RuntimeError as error:  # Python 3.13 has an OSError in its place
        raise InputError(f"{name} {text} cannot be used", got="links that lead in circles") from error
    except OSError as error:
        raise InputError(f"{name} {text:.80} cannot be used", got=error.strerror) from error
    return Path(text)
