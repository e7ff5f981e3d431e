"""Write a folder so that it is either complete under its name or not there at all.

Files are written into ``NAME.partial``, which stays when a run is killed; a second run with the same plan keeps the
finished files, and one with another plan refuses. At the end everything is flushed and the folder is renamed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slidesparse.errors import CheckpointError
from slidesparse.files.checkpoint import read_json, write_json

PLAN_FILE = "slidesparse-plan.json"


@contextmanager
def staged(destination: Path, source: Path, plan: Mapping[str, Any], n_bytes: int) -> Iterator[tuple[Path, set[str]]]:
    """Give a working folder that becomes ``destination`` when the block ends without an exception.

    Args:
        destination: Must not exist.
        source: The folder of the data; ``destination`` may neither be it nor lie inside.
        plan: Everything that decides the output, ready for JSON; runs with equal plans can use each other's files.
        n_bytes: Size of the output, checked against the free space.

    Yields:
        The working folder, and the names of the finished files in it.

    Raises:
        CheckpointError: The destination exists, another run is writing it, the plan differs or the disk is full.
    """
    destination, source = destination.absolute(), source.resolve()
    if destination.resolve() == source or source in destination.resolve().parents:
        raise CheckpointError(f"destination {destination} is the source or lies inside it", needed="another folder")
    if os.path.lexists(destination):
        raise CheckpointError(f"destination {destination} exists", remedy="remove it or choose another name")
    partial = destination.with_name(destination.name + ".partial")
    if partial.resolve() == source:
        raise CheckpointError(f"{partial} is the source and the place to work in", remedy="choose another destination")
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {partial}", got=error.strerror) from error
    with locked(partial, "writing"), _no_space_is_ours(partial):
        plan_path = partial / PLAN_FILE
        untouched = not any(partial.iterdir())
        if not untouched and (not plan_path.exists() or read_json(plan_path) != json.loads(json.dumps(plan))):
            raise CheckpointError(
                f"{partial} holds the unfinished output of another run (other options or another source)",
                remedy=f"remove {partial} and run again",
            )
        finished = {path.name for path in partial.glob("*.safetensors")}
        needed = n_bytes - sum((partial / name).stat().st_size for name in finished)
        free = shutil.disk_usage(partial).free
        if needed > free:
            raise CheckpointError(
                f"not enough space for {destination}", got=f"{free / 1e9:.1f} GB free", needed=f"{needed / 1e9:.1f} GB"
            )
        for leftover in partial.rglob("*.tmp"):
            if not leftover.is_dir():
                leftover.unlink()
        write_json(plan_path, plan)
        yield partial, finished
        for path in (path for path in partial.rglob("*") if path.is_file()):
            _sync(path)
        _sync(partial)
        partial.rename(destination)
        (destination / PLAN_FILE).unlink()
        _sync(destination.parent)


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Hold a folder's lock for a block, or refuse: ``another run is packing FOLDER``.

    Raises:
        CheckpointError: Another process, or another block of this one, holds it.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise CheckpointError(f"another run is {doing} {folder}", remedy="wait for it") from error
    finally:
        os.close(handle)


@contextmanager
def _no_space_is_ours(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise CheckpointError(
            f"the disk of {folder} is full", got=error.strerror, remedy="free some space and run again: it resumes"
        ) from error


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
