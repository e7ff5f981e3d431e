"""Write one folder with several processes: the first creates the working folder and renames the output.

All processes write into the working folder of :mod:`slidesparse.files.staging`, which all machines must see. Only the
first holds its lock. A file gets its name when it is complete, so that a killed process leaves nothing half-written,
and the next run takes over all finished files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slidesparse.base.ranks import Ranks
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.json_files import read_json
from slidesparse.files.staging import (
    RECORD,
    Workplace,
    as_stored,
    differences,
    new_folder,
    partial_folder,
    staged,
    with_what_is_kept,
)


@contextmanager
def staged_together(
    ranks: Ranks,
    destination: Path,
    source: Path,
    record: Mapping[str, Any],
    n_bytes: int,
) -> Iterator[Workplace]:
    """Open one working folder for all processes: see :func:`slidesparse.files.staging.staged`.

    The output gets its name when every process has left the block without an exception.

    Raises:
        LostRank: Another process has ended.
        CheckpointError: As :func:`~slidesparse.files.staging.staged`; or a process does not see the working folder.
        InputError: A process was started with other options or another source.
    """
    if ranks.is_first:
        with staged(destination, source, record, n_bytes) as work:
            _require_alike(ranks, work, record)
            work.is_shared = ranks.world > 1
            yield work
            ranks.wait()
    else:
        work = Workplace(partial_folder(new_folder(destination, source)))
        with with_what_is_kept(work, destination):
            _require_alike(ranks, work, record)
            yield work
            ranks.wait()
    ranks.wait()  # the folder has its name


def _require_alike(ranks: Ranks, work: Workplace, record: Mapping[str, Any]) -> None:
    """Refuse processes with another record or folder, in all of them and before any has written a file."""
    records = ranks.gather(as_stored(record))  # the first process comes when its record is written
    path = work.path / RECORD
    seen = ranks.gather(path.exists() and read_json(path) == records[0])
    for rank, (theirs, sees) in enumerate(zip(records, seen, strict=True)):
        if theirs != records[0]:
            raise InputError(
                f"rank {rank} was started otherwise than rank 0",
                got=f"another {', '.join(differences(records[0], theirs))}",
                needed="the same options, text and source, and one version and kind of device, for every process",
            )
        if not sees:
            raise CheckpointError(
                f"rank {rank} does not see what rank 0 writes in {work.path}",
                needed="a folder that all machines share",
            )
