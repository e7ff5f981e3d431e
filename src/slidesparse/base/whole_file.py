"""Reading of whole files, and atomic writing."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from secrets import token_hex

from slidesparse.base.readable_size import readable_size
from slidesparse.errors import InputError, printable

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags of :func:`os.open` that make a file, and never open an existing file or a link."""


def readable_name(name: str | os.PathLike[str]) -> str:
    r"""Return a file name as text for JSON in UTF-8; other bytes are written as ``\xff``.

    >>> readable_name("caf\udce9.txt")
    'caf\\xe9.txt'
    """
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))


def require_size(path: Path, largest: int) -> None:
    """Raise an InputError for a file of more bytes than ``largest``."""
    if (size := path.stat().st_size) > largest:
        raise InputError(f"{path} is too large", got=readable_size(size), needed=f"at most {readable_size(largest)}")


def read_whole(path: Path, largest: int) -> bytes:
    """Return the contents of a file.

    Raises:
        FileNotFoundError: There is no such file.
        InputError: It has more bytes than ``largest``, or cannot be read.
    """
    try:
        require_size(path, largest)
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read", got=error.strerror) from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers, and a crash, see the old content or the new one.

    A link under the file's name is replaced, not followed; a file keeps its mode. Folders above it are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(temporary, NEW_FILE, 0o666), "wb") as file:
            if path.is_file() and not path.is_symlink():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode) & 0o777)
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
