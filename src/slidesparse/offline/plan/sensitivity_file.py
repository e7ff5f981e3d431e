"""The file in which ``slidesparse plan`` keeps its measurements, line by line, so that a killed run goes on there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from slidesparse.base.counted import counted
from slidesparse.base.typed_json import decode, parse_json
from slidesparse.base.whole_file import kind_of
from slidesparse.errors import CheckpointError, InputError, SlideSparseError, first_line
from slidesparse.files.write_errors import write_errors
from slidesparse.offline.plan.sensitivity import Sensitivity

NOT_COMPARED = ("model", "ignore")
"""Keys of the first line that may differ: the weights are compared, and not their path; and a set of linears is pruned
alone, so it is the same to a measurement which others are left out."""


def sensitivity_file(out: Path) -> Path:
    """Return the path of a plan's measurements: ``plan.json`` -> ``plan.sensitivities.jsonl``."""
    return out.with_suffix(".sensitivities.jsonl")


@contextmanager
def opened_measurements(path: Path, about: Mapping[str, Any]) -> Iterator[SensitivityFile]:
    """Open a file of measurements, which no other run may have open; leave none without a measurement."""
    # The file is closed within: closing writes once more what a full disk did not take.
    with write_errors(path, "free some space and run again: it goes on from there"), _locked(path) as handle:
        file = SensitivityFile(handle, path, about)
        try:
            yield file
        except (KeyboardInterrupt, SlideSparseError) as error:
            if file.damages:
                count = counted(len(file.damages), "measurement")
                kept = f"{path} keeps {count}, and the same command goes on from there"
                error.args = (kept if isinstance(error, KeyboardInterrupt) else f"{error}; {kept}",)
            raise
        finally:
            if not file.damages:
                path.unlink(missing_ok=True)


class SensitivityFile:
    """Measurements in a file that grows line by line; the first line names the model, the text and the method.

    A file of another model, text or method is a CheckpointError; one without a measurement is begun anew.
    """

    def __init__(self, handle: BinaryIO, path: Path, about: Mapping[str, Any]) -> None:
        self.handle = handle
        self.damages: dict[tuple[tuple[str, ...], str], float] = {}
        content = handle.read()
        whole = content[: content.rfind(b"\n") + 1]  # a killed run may leave half a line
        try:
            lines = whole.decode("utf-8").split("\n")[:-1]
            found, *measured = [parse_json(line, f"line {i}") for i, line in enumerate(lines, 1)] or [{}]
            read = decode(tuple[Sensitivity, ...], measured, "measurements")
        except (InputError, UnicodeDecodeError) as error:
            why = str(error) if isinstance(error, InputError) else first_line(error)
            raise CheckpointError(f"{path} is damaged: {why}", remedy="remove it") from error
        self.damages = {(one.names, one.pattern): one.damage for one in read}
        if measured and (not isinstance(found, dict) or _compared(found) != _compared(json.loads(json.dumps(about)))):
            what = f"{path} was measured on another model, text or method, or by an older version"
            raise CheckpointError(what, remedy="remove it, or choose another --out")
        handle.truncate(len(whole) if measured else 0)
        handle.seek(0, os.SEEK_END)
        if not measured:
            self._append(about)

    def damages_of(self, sets: Sequence[Sequence[str]]) -> dict[tuple[str, str], float]:
        """Return (first linear of a set, pattern) -> damage, of these sets as they are."""
        wanted = {tuple(names) for names in sets}
        return {(names[0], pattern): damage for (names, pattern), damage in self.damages.items() if names in wanted}

    def add(self, found: Sensitivity) -> None:
        """Append a measurement, unless the file has it."""
        key = (found.names, found.pattern)
        if key not in self.damages:
            self._append(asdict(found))
            self.damages[key] = found.damage

    def _append(self, value: Mapping[str, Any]) -> None:
        self.handle.write(json.dumps(value).encode() + b"\n")
        self.handle.flush()


def _compared(about: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in about.items() if key not in NOT_COMPARED}


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    other = "remove it, or choose another --out"
    try:
        # Not waiting for anybody at the other end of a pipe, and not writing under a link.
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        why = "a link" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointError(f"{path} cannot be used", got=why, remedy=other) from error
    if not stat.S_ISREG(mode := os.fstat(number).st_mode):
        os.close(number)
        raise CheckpointError(f"{path} cannot be used", got=kind_of(mode), remedy=other)
    with os.fdopen(number, "r+b") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            what, remedy = f"another run is measuring into {path}", "wait for it, or choose another --out"
            raise CheckpointError(what, remedy=remedy) from error
        yield handle
