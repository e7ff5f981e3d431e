"""Find out whether a folder could be written, without writing anything: what a run would say, before it is begun."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slidesparse.errors import CheckpointError
from slidesparse.files.staging import Workplace, as_stored, partial_folder, refuse_another_run, require_unlinked
from slidesparse.files.write_errors import innermost_folder, locked, write_errors


def bytes_to_write(destination: Path, plan: Callable[[], Mapping[str, Any]], n_bytes: int) -> int:
    """Return how many bytes :func:`slidesparse.files.staging.staged` would still write, or raise what it would raise.

    The space on the disk is not compared. Nor is the owner of a place of work that others may write: that takes a file.

    Args:
        destination: As :func:`slidesparse.files.staging.new_folder` returns it.
        plan: Returns everything that decides the output. It is called only where an earlier run has left something.
        n_bytes: Size of the output.

    Raises:
        CheckpointError: The folder cannot be made, or another run is writing it or has left unfinished files.
    """
    work = Workplace(partial_folder(destination))
    require_unlinked(work.path)
    if not os.path.lexists(work.path):
        where = innermost_folder(work.path)
        if not os.access(where, os.W_OK | os.X_OK):
            raise CheckpointError(f"cannot make {work.path}", got=_why_closed(where))
        return n_bytes
    if not os.access(work.path, os.R_OK | os.W_OK | os.X_OK):
        raise CheckpointError(f"cannot use {work.path}", got=_why_closed(work.path))
    with locked(work.path, "writing"), write_errors(work.path, "free some space and run again"):
        refuse_another_run(work, as_stored(plan()))
        return n_bytes - work.size()


def _why_closed(folder: Path) -> str:
    """Return the system's words for why nothing can be made in a folder."""
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    return os.strerror(errno.EROFS if read_only else errno.EACCES)
