"""Obstacles to a write: a lock of another run, a full disk, a folder without write permission."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slidesparse.base.readable_size import readable_size
from slidesparse.errors import CheckpointError


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Hold a folder's lock for a block.

    Raises:
        CheckpointError: Another process, or another block of this one, holds it, or has just removed the folder.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.exists(folder) or not os.path.samestat(os.fstat(handle), os.stat(folder)):
            raise CheckpointError(f"another run was {doing} {folder} and has just ended", remedy="run again")
        yield
    except BlockingIOError as error:
        raise CheckpointError(f"another run is {doing} {folder}", remedy="wait for it") from error
    finally:
        os.close(handle)


@contextmanager
def write_errors(where: Path, remedy: str) -> Iterator[None]:
    """Explain errors of writing to a disk or a folder.

    Raises:
        CheckpointError: The disk or the user's quota is full, a file is larger than allowed, or permission is missing.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(f"the disk of {where} is full", got=error.strerror, remedy=remedy) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise CheckpointError(f"cannot use {error.filename or where}", got=error.strerror) from error
        if error.errno == errno.EFBIG:
            raise CheckpointError(
                f"cannot write {where}",
                got=error.strerror,
                needed="a file system and a limit (ulimit -f) that allow files of this size",
            ) from error
        raise


def require_space(path: Path, needed: int) -> None:
    """Raise a CheckpointError where the disk of a path, which need not exist, has too little space."""
    free = shutil.disk_usage(innermost_folder(path.parent)).free
    if needed > free:
        raise CheckpointError(
            f"not enough space for {path}",
            got=f"{readable_size(free)} free",
            needed=readable_size(needed),
            remedy="free some space and run again",
        )


def innermost_folder(path: Path) -> Path:
    """Return the innermost existing folder of a path."""
    path = path.absolute()
    while not os.path.exists(path):
        path = path.parent
    return path
