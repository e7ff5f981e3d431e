"""Read a file whole without waiting for anybody, and write one so that it is there whole, or as it was before."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from secrets import token_hex

from slidesparse.base.readable_size import readable_size
from slidesparse.errors import InputError, printable

NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
"""Flags of :func:`os.open` that make a file and never open one that is there, nor one under a link."""

MAX_HOLES = 1 << 30
"""Most bytes that a file may promise without having them on disk; a file system that compresses has smaller files."""


def kind_of(mode: int) -> str:
    """Return what a file of this mode is, for a message: ``a file``, ``a folder``, ``a pipe``, ...

    >>> kind_of(stat.S_IFIFO | 0o644)
    'a pipe'
    """
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def readable_name(name: str | os.PathLike[str]) -> str:
    r"""Return a file name as text that JSON in UTF-8 can hold, with what is not UTF-8 in it as ``\xff``.

    >>> readable_name("caf\udce9.txt")
    'caf\\xe9.txt'
    """
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))


def require_regular(path: Path, largest: int | None = None) -> int:
    """Return the size of a file, and refuse everything else that may be under its name.

    A pipe would be waited for, perhaps for ever, and a device has no end.

    Raises:
        FileNotFoundError: There is nothing.
        InputError: It is a pipe, a socket, a device or a folder, is larger than that, or cannot be looked at.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read", got=error.strerror) from error
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} cannot be read", got=kind_of(status.st_mode), needed="a file")
    if largest is not None and status.st_size > largest:
        needed = f"at most {readable_size(largest)}"
        raise InputError(f"{path} is too large", got=readable_size(status.st_size), needed=needed)
    return status.st_size


def require_no_holes(path: Path) -> None:
    """Raise an InputError for a file that promises over :data:`MAX_HOLES` bytes that are not on disk."""
    status = path.stat()
    on_disk = status.st_blocks * 512
    if status.st_size - on_disk > MAX_HOLES:
        got = f"{readable_size(status.st_size)}, {readable_size(on_disk)} of them on disk"
        raise InputError(f"{path} has large holes", got=got, remedy="remove it")


def read_regular(path: Path, largest: int) -> bytes:
    """Return the contents of a file: see :func:`require_regular`."""
    require_regular(path, largest)
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read", got=error.strerror) from error


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new one, and a crash leaves one of them.

    A link under the file's name is replaced, not followed. Folders above it are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{token_hex(8)}.tmp")
    try:
        with os.fdopen(os.open(temporary, NEW_FILE, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
