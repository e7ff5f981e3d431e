"""Write a folder so that it is either complete under its name or not there at all.

``NAME.partial``, writable by this user alone, is the working folder::

    plan.json    everything that decides the output
    output/      becomes NAME
    finished/    for every finished file of output/: its size and the digests of its tensors
    kept/        other files from which a run goes on (layers that calibration has pruned)
    failed       the error with which the last run ended, if it ended with one

It stays when a run is killed. A second run with the same record checks the finished files against their digests and
takes them over. A run with another record refuses, so that hours of work are not lost; only after an error does it
replace the earlier run, since other options are the usual remedy. Where nothing is finished, nothing is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slidesparse.base.counted import counted
from slidesparse.base.log import LOG
from slidesparse.base.ranks import LostRank, Ranks
from slidesparse.base.typed_json import decode
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import CheckpointError, InputError, SlideSparseError
from slidesparse.files.json_files import read_json, write_json
from slidesparse.files.stored import Stored
from slidesparse.files.tensor_reader import TensorReader
from slidesparse.files.write_errors import locked, require_space, write_errors

RECORD, OUTPUT, FINISHED, KEPT, FAILED = "plan.json", "output", "finished", "kept", "failed"

LAYOUT = 2
"""Version of the working folder, part of every record: a run does not resume from another version."""


class Workplace:
    """The working folder in which an output is written.

    Attributes:
        path: ``NAME.partial``.
        output: The folder that becomes ``NAME``; a run that writes a file sets its path here.
        kept: Folder of intermediate files from which a run resumes.
        describe: Describes the kept files in the line of a run that ends early; a command may set its own.
        is_shared: Whether other processes may still write here when an error ends this one, which then removes nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.output, self.kept, self.notes = path, path / OUTPUT, path / KEPT, path / FINISHED
        self.describe: Callable[[], str] = lambda: counted(self.files(), "finished file")
        self.is_shared = False

    def finish(self, name: str, digests: Mapping[str, str]) -> None:
        """Record that a file of the output is complete, with the digests of its tensors."""
        size = (self.output / name).stat().st_size
        write_json(self.notes / f"{name}.json", {"bytes": size, "digests": dict(digests)})

    def is_finished(self, name: str, tensors: Mapping[str, Stored]) -> bool:
        """Return whether an earlier run has finished a file of the output, and the file is still intact.

        Reads all of the file, and compares its tensors, types, shapes and data.
        """
        path, note = self.output / name, self.notes / f"{name}.json"
        if not note.exists():
            return False
        try:
            noted, reader = read_json(note), TensorReader(path)
            digests = decode(dict[str, str], noted.get("digests"), "digests")
            same = (path.stat().st_size, reader.stored, set(digests)) == (noted["bytes"], dict(tensors), set(tensors))
            if same and not path.is_symlink() and all(reader.digest(one) == digests[one] for one in tensors):
                return True
        except (SlideSparseError, KeyError) as error:
            LOG.warning("%s", error)
        LOG.warning("%s is not what an earlier run wrote, and is written again", path)
        return False

    def files(self) -> int:
        """Return the number of files from which another run can resume; 0 once the output has its name."""
        if not self.output.exists():
            return 0
        return sum(path.is_file() and path.suffix != ".tmp" for at in (self.notes, self.kept) for path in at.rglob("*"))

    def size(self) -> int:
        """Return the bytes of the output so far."""
        return sum(path.lstat().st_size for path in self.output.rglob("*"))


@contextmanager
def staged(destination: Path, source: Path, record: Mapping[str, Any], n_bytes: int) -> Iterator[Workplace]:
    """Open a working folder, whose output becomes ``destination`` when the block ends without an exception.

    Args:
        destination: Must not exist.
        source: The folder of the data; ``destination`` must be neither this folder nor inside it.
        record: Everything that decides the output, ready for JSON; runs with equal records can use each other's files.
        n_bytes: Size of the output, checked against the free space.

    Raises:
        CheckpointError: The destination exists, another run is writing it, the record differs or the disk is full.
    """
    destination = new_folder(destination, source)
    work = Workplace(partial_folder(destination))
    made = _make(work.path)
    with locked(work.path, "writing"), write_errors(work.path, "free some space and run again: it resumes"):
        try:  # only here: who has no lock removes nothing
            stored = _as_stored(record)
            _refuse_another_run(work, stored)
            with _left_in_order(work, destination):
                _begin(work, stored)
                require_space(destination, n_bytes - work.size())
                yield work
                _keep_modes(work.output, source)
                _sync_all(work.output)
                work.output.rename(destination)  # fails where something else has made it meanwhile
                _sync(destination.parent)
            shutil.rmtree(work.path, ignore_errors=True)
        finally:
            for folder in made:
                with contextlib.suppress(OSError):
                    folder.rmdir()  # only where it is empty


@contextmanager
def staged_together(
    ranks: Ranks, destination: Path, source: Path, record: Mapping[str, Any], n_bytes: int
) -> Iterator[Workplace]:
    """Open one working folder for all processes, which all machines must see: see :func:`staged`.

    The first process makes the folder, holds its lock, and gives the output its name when every process has left the
    block without an exception.

    Raises:
        LostRank: Another process has ended.
        CheckpointError: As :func:`staged`; or a process does not see the working folder.
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
        with _with_what_is_kept(work, destination):
            _require_alike(ranks, work, record)
            yield work
            ranks.wait()
    ranks.wait()  # the folder has its name


def _require_alike(ranks: Ranks, work: Workplace, record: Mapping[str, Any]) -> None:
    """Refuse processes with another record or folder, in all of them and before any has written a file."""
    records = ranks.gather(_as_stored(record))  # the first process comes when its record is written
    path = work.path / RECORD
    seen = ranks.gather(path.exists() and read_json(path) == records[0])
    for rank, (theirs, sees) in enumerate(zip(records, seen, strict=True)):
        if theirs != records[0]:
            raise InputError(
                f"rank {rank} was started otherwise than rank 0",
                got=f"a difference in {', '.join(_differences(records[0], theirs))}",
                needed="the same options, text and source, and one version and kind of device, for every process",
            )
        if not sees:
            raise CheckpointError(
                f"rank {rank} does not see what rank 0 writes in {work.path}",
                needed="a folder that all machines share",
            )


def bytes_to_write(destination: Path, record: Callable[[], Mapping[str, Any]], n_bytes: int) -> int:
    """Return the bytes that :func:`staged` would still write, or raise its errors, but for space and permissions.

    Raises:
        CheckpointError: The folder cannot be made, or another run is writing it or has left unfinished files.
    """
    work = Workplace(partial_folder(destination))
    _require_unlinked(work.path)
    if not os.path.lexists(work.path):
        return n_bytes
    with locked(work.path, "writing"), write_errors(work.path, "free some space and run again"):
        _refuse_another_run(work, _as_stored(record()))
        return n_bytes - work.size()


def new_folder(destination: Path, source: Path) -> Path:
    """Return the absolute path of a folder to make, and refuse impossible ones.

    Raises:
        CheckpointError: It has no name (``foo/..``), exists, is the source, lies inside it or below a file.
    """
    if destination.name in ("", ".."):
        raise CheckpointError(f"destination {destination} is no name for a new folder", remedy="choose a name")
    # Not Path.resolve(), which raises where links form a loop.
    real, source = Path(os.path.realpath(destination.parent)) / destination.name, Path(os.path.realpath(source))
    followed = Path(os.path.realpath(real))
    if source in (followed, *followed.parents, Path(os.path.realpath(partial_folder(real)))):
        raise CheckpointError(f"destination {destination} is the source or lies inside it", needed="another folder")
    if os.path.lexists(real):
        raise CheckpointError(f"destination {destination} exists", remedy="remove it or choose another name")
    try:
        os.lstat(partial_folder(real))
    except FileNotFoundError:
        return real
    except OSError as error:  # below a file, or too long
        shown = os.fsencode(destination).decode("utf-8", "backslashreplace")
        raise CheckpointError(f"destination {shown:.300} cannot be made", got=error.strerror) from error
    return real


def partial_folder(destination: Path) -> Path:
    """Return the working folder of a destination."""
    return destination.with_name(f"{destination.name}.partial")


def _make(partial: Path) -> list[Path]:
    """Create the working folder, and return all new folders, innermost first."""
    made: list[Path] = []
    try:
        _require_unlinked(partial)
        folder = partial
        while not os.path.lexists(folder):
            made, folder = [*made, folder], folder.parent
        partial.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {partial}", got=error.strerror) from error
    return made


def _require_unlinked(partial: Path) -> None:
    """Refuse a working folder that is a link or no folder."""
    if partial.is_symlink() or (partial.exists() and not partial.is_dir()):
        kind = "a link" if partial.is_symlink() else "no folder"
        raise CheckpointError(f"{partial} is {kind}", remedy=f"remove {partial} and run again")


def _as_stored(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as the working folder stores it."""
    stored: dict[str, Any] = json.loads(json.dumps({"layout": LAYOUT, **record}))
    return stored


def _refuse_another_run(work: Workplace, record: dict[str, Any]) -> None:
    """Refuse a working folder in which another run has work to lose; ``record`` is as stored."""
    path, again = work.path / RECORD, f"remove {work.path} and run again"
    try:
        known = read_json(path) if path.exists() else None
    except CheckpointError as error:
        raise CheckpointError.of(error, again) from error
    if known is None and all(found.suffix == ".tmp" for found in work.path.iterdir()):
        return
    if known is None or (known != record and work.files() and not (work.path / FAILED).exists()):
        raise CheckpointError(
            f"{work.path} holds the unfinished output of another run",
            got=None if known is None else f"a difference in {', '.join(_differences(known, record))}",
            remedy=again if known is None else f"repeat that run, choose another destination, or remove {work.path}",
        )


def _differences(record: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the differing entries of two records; options one by one.

    >>> _differences({"options": {"pattern": "6:8", "match": 0}}, {"options": {"pattern": "4:6", "match": 0}})
    ['pattern']
    """
    options = [one["options"] for one in (record, other) if isinstance(one.get("options"), dict)]
    names = _differing(*options) if len(options) == 2 else []
    return names + [key for key in _differing(record, other) if not names or key != "options"]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [key for key in dict.fromkeys((*one, *other)) if one.get(key, ...) != other.get(key, ...)]


def _begin(work: Workplace, record: dict[str, Any]) -> None:
    """Remove the left-overs of an earlier run, and write the record."""
    for leftover in work.path.rglob("*.tmp"):
        if leftover.is_symlink() or not leftover.is_dir():
            leftover.unlink()
    path = work.path / RECORD
    if path.exists() and read_json(path) != record:
        _clear(work.path)
    (work.path / FAILED).unlink(missing_ok=True)
    write_json(path, record)
    for folder in (work.output, work.notes, work.kept):
        folder.mkdir(exist_ok=True)


@contextmanager
def _left_in_order(work: Workplace, destination: Path) -> Iterator[None]:
    """Remove the working folder after an exception if nothing is finished; else mention it in the message."""
    try:
        with _with_what_is_kept(work, destination):
            yield
    except BaseException:
        for _ in range(2):  # a signal may come meanwhile, and the exception ends the command anyway
            with contextlib.suppress(OSError, KeyboardInterrupt):
                if not destination.exists() and not work.files() and not work.is_shared:
                    _clear(work.path)
                    work.path.rmdir()
                break
        raise


def _what_is_kept(work: Workplace) -> str | None:
    """Describe the kept files of a run that ends early; None: there are none."""
    try:
        if not work.files():
            return None
        words = work.describe()
    except Exception:  # such as of a damaged file: report the error that ended the run
        words = "what was finished"
    return f"{work.path} keeps {words}"


@contextmanager
def _with_what_is_kept(work: Workplace, destination: Path) -> Iterator[None]:
    """Mention kept files in an exception's message, and note there that an error ended the run."""
    try:
        yield
    except BaseException as error:
        try:
            _mention_what_is_kept(error, work, destination)
        except KeyboardInterrupt as signal:  # a signal that came meanwhile, and ends the run in place of the error
            _mention_what_is_kept(signal, work, destination)
            raise
        raise


def _mention_what_is_kept(error: BaseException, work: Workplace, destination: Path) -> None:
    if destination.exists():  # complete
        return
    kept = _what_is_kept(work)
    if isinstance(error, KeyboardInterrupt):
        line = f"{kept}, and the same command goes on from there" if kept else f"nothing of {destination} was kept"
        error.args = (line,)
    elif kept and isinstance(error, LostRank):
        error.args = (f"{error}; {kept}: the same command goes on from there",)
    elif kept and isinstance(error, SlideSparseError):
        after = "once that is mended, the same command goes on from there, and another one begins anew"
        error.args = (f"{error}; {kept}: {after}",)
    if kept and isinstance(error, Exception) and not isinstance(error, OSError | LostRank):
        replace_file(work.path / FAILED, f"{error}\n".encode("utf-8", "backslashreplace"))


def _clear(partial: Path) -> None:
    for path in partial.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _keep_modes(output: Path, source: Path) -> None:
    """Let nobody read a file of the output who could not read the source's: that of its name, or config.json."""
    for path in (output, *output.rglob("*")):
        known = (source / path.relative_to(output), source / "config.json", source)
        for like in [one for one in known if one.exists() and one.is_dir() == path.is_dir()][:1]:
            path.chmod(path.stat().st_mode & 0o777 & (like.stat().st_mode | 0o700))


def _sync_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
