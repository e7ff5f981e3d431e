"""The user's cache folder, which keeps searches and measurements of this machine.

What lies in it is run (compiled kernels) or believed (measured times). So it is taken only where nobody else can write.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from functools import lru_cache
from pathlib import Path

from slidesparse.base.log import log_once
from slidesparse.errors import UnsupportedError

REMEDY = "set XDG_CACHE_HOME to a folder that you own and nobody else can write"


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/slidesparse``; ``~/.cache`` without the variable. The folder exists, with mode 0700.

    Where there is no such folder that is the user's own, a warning says so once, and the folder is a fresh one that
    nobody else can enter and that goes when the process ends.
    """
    folder = _wanted()
    refusal = _refusal(folder)
    if folder is not None and refusal is None:
        return folder
    log_once(f"nothing is kept for the next start, since {refusal}; {REMEDY}", logging.WARNING)
    return _temporary()


def lasting_cache_folder() -> Path:
    """Return :func:`cache_folder` for what must be there tomorrow; an UnsupportedError where it would not be."""
    folder = _wanted()
    refusal = _refusal(folder)
    if folder is None or refusal is not None:
        raise UnsupportedError("there is no folder to keep measurements in", got=refusal, remedy=REMEDY)
    return folder


def _wanted() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slidesparse"
    except RuntimeError:  # a container under an arbitrary user, who has no home
        return None


@lru_cache(maxsize=8)
def _refusal(folder: Path | None) -> str | None:
    """Make a folder if it is not there, close it to others, and return why it cannot be trusted, if it cannot."""
    if folder is None:
        return "the user has no home"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.parent.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            return f"anybody can replace the folders in {folder.parent}"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is a link or a file"
        of_root = status.st_uid == 0 and not status.st_mode & 0o022  # as in an image: root could change us, too
        if status.st_uid != os.geteuid() and not of_root:
            return f"{folder} belongs to another user"
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            folder.chmod(0o700)
        if (planted := _of_others(folder, is_open=bool(status.st_mode & 0o077))) is not None:
            return f"another user has written {planted}, or may"
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror})"
    return None


def _of_others(folder: Path, is_open: bool) -> Path | None:
    """Return something in a folder that is neither the user's own nor root's, or that others could write.

    In a folder that is not open to others, files are out of reach, and so is what a group may write: a umask of 002
    leaves that. It may have been open before, so a folder in it that everybody may write is not taken.
    """
    for where, folders, files in os.walk(folder):
        for path in (Path(where, name) for name in (*folders, *files)):
            status = path.lstat()
            writers = 0o022 if is_open else 0o002 * stat.S_ISDIR(status.st_mode)
            if status.st_uid not in (0, os.geteuid()) or path.is_symlink() or status.st_mode & writers:
                return path
    return None


@lru_cache(maxsize=1)
def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="slidesparse-"))  # a new name, mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
