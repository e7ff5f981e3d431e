"""The user's cache folder, for compiled kernels and measured times of this machine.

Its contents are run or believed, so it is used only where nobody else can write.
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

REMEDY = "set XDG_CACHE_HOME to a folder that you own and nobody else can write"


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/slidesparse``; ``~/.cache`` without the variable. The folder exists, with mode 0700.

    Where the user has no such folder of their own, a warning says so once. The folder is then a private one that is
    deleted when the process ends.
    """
    folder = _wanted()
    refusal = _refusal(folder)
    if folder is not None and refusal is None:
        return folder
    log_once(f"nothing is kept for the next start, since {refusal}; {REMEDY}", logging.WARNING)
    return _temporary()


def _wanted() -> Path | None:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "slidesparse"
    except RuntimeError:  # a container under an arbitrary user, who has no home
        return None


@lru_cache(maxsize=8)
def _refusal(folder: Path | None) -> str | None:
    """Make a folder, close it to others, and return the reason why it cannot be trusted, or None."""
    if folder is None:
        return "the user has no home"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return f"{folder} is a link or a file"
        of_root = status.st_uid == 0 and not status.st_mode & 0o022  # as in an image: root can change anything
        if status.st_uid != os.geteuid() and not of_root:
            return f"{folder} belongs to another user"
        if status.st_mode & 0o077 and status.st_uid == os.geteuid():
            folder.chmod(0o700)
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror})"
    return None


@lru_cache(maxsize=1)
def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="slidesparse-"))  # a new name, mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
