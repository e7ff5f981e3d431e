"""Write one folder with several processes: the first makes the place of work and gives the folder its name.

All processes write into the place of :mod:`slidesparse.files.staging`, which must be in a folder that all machines see.
Only the first holds its lock. A file gets its name when it is complete, whoever writes it, so that a killed process
leaves nothing half-written, and the next run takes over what any of them finished.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slidesparse.base.ranks import Ranks
from slidesparse.errors import CheckpointError, InputError
from slidesparse.files.json_files import read_json
from slidesparse.files.staging import (
    RECORD,
    OptionName,
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
    as_written: OptionName = str,
) -> Iterator[Workplace]:
    """Give all processes one place to write in: see :func:`slidesparse.files.staging.staged`.

    The output gets its name when every process has left the block without an exception.

    Raises:
        FailedRank: Another process ended with an error.
        LostRank: Another process is gone.
        CheckpointError: As of :func:`~slidesparse.files.staging.staged`; or a process does not see the place of work.
        InputError: A process was started with other options or another source.
    """
    if ranks.is_first:
        with staged(destination, source, record, n_bytes, as_written) as work:
            ranks.gather(as_stored(record))
            with _stopped_together(ranks):
                ranks.wait()  # for the checks of the others
                yield work
                ranks.wait()
    else:
        theirs = ranks.gather(as_stored(record))[0]
        work = Workplace(partial_folder(new_folder(destination, source)))
        with _stopped_together(ranks), with_what_is_kept(work, destination):  # counts before others clear up
            if theirs != as_stored(record):
                raise InputError(
                    f"rank {ranks.rank} was started otherwise than rank 0",
                    got=f"another {', '.join(differences(theirs, as_stored(record), as_written))}",
                    needed="the same options, text and source, and one version and kind of device, for every process",
                )
            _require_visible(ranks, work, record)
            ranks.wait()
            yield work
            ranks.wait()
    ranks.wait()  # the folder has its name


@contextmanager
def _stopped_together(ranks: Ranks) -> Iterator[None]:
    """After an error, wait until no process writes any more: the first one clears up."""
    try:
        yield
    except BaseException as error:
        ranks.fail(error)
        ranks.wait_until_all_stopped(error)
        raise


def _require_visible(ranks: Ranks, work: Workplace, record: Mapping[str, Any]) -> None:
    path = work.path / RECORD
    if not os.path.exists(path) or read_json(path) != as_stored(record):
        raise CheckpointError(
            f"rank {ranks.rank} does not see what rank 0 writes in {work.path}",
            needed="a folder that all machines share",
        )
