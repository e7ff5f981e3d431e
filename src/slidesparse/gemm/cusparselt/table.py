"""What a search found: the fastest cuSPARSELt algorithm per shape, in one JSON file of the user's cache folder.

    {"version": 1, "records": [{"gpu": "NVIDIA H200", "library": "0.8.0", "out": 4608, "columns": 5376, "rows": 1024,
      "dtype": "int8", "accumulator": "int32", "algorithm": {"id": 7, "split_k": 1, "split_k_mode": 0},
      "time_us": 21.3, "default_us": 24.0, "tried": [{"id": 0, ..., "time_us": 24.0, "fault": null}, ...]}]}

The file is ``$XDG_CACHE_HOME/slidesparse/cusparselt-tune.json`` (``~/.cache`` without the variable). Without a record
the library's own default runs; a null algorithm says that it won.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from slidesparse.base.cache_folder import cache_folder, replace_file
from slidesparse.errors import InputError

VERSION = 1

REACH = 2.0
"""A record serves row counts within this factor of its own: beyond it another tile shape usually wins."""


@dataclass(frozen=True)
class Algorithm:
    """What selects a kernel of the library.

    Attributes:
        id: Its number, 0 .. CONFIG_MAX_ID - 1.
        split_k: Slices of K; -1 lets a Hopper kernel choose (segment-K).
        split_k_mode: cusparseLtSplitKMode_t; 0 leaves it as the library sets it.
    """

    id: int
    split_k: int = 1
    split_k_mode: int = 0

    def __str__(self) -> str:
        return f"id {self.id}, split_k {self.split_k}, mode {self.split_k_mode}"


@dataclass(frozen=True)
class Trial:
    """One algorithm of a search.

    Attributes:
        algorithm: Which.
        time_us: Time of one GEMM, or None when it did not run.
        fault: Why it is out of the race, or None.
    """

    algorithm: Algorithm
    time_us: float | None
    fault: str | None


@dataclass(frozen=True)
class Key:
    """What a record is about.

    Attributes:
        gpu: Name of the device.
        library: Version of cuSPARSELt.
        out: Rows of the weight, padded.
        columns: Columns of the 2:4 segment, padded.
        dtype: Type of the operands.
        accumulator: Type of the product.
    """

    gpu: str
    library: str
    out: int
    columns: int
    dtype: str
    accumulator: str


@dataclass(frozen=True)
class Record:
    """The outcome of one search.

    Attributes:
        key: Of what.
        rows: Tokens, as padded (:func:`slidesparse.gemm.cusparselt.backend.token_bucket`).
        best: The winner's algorithm; None when the library's default won.
        time_us: Its time.
        default_us: The time of the library's default.
        trials: Everything that was tried.
    """

    key: Key
    rows: int
    best: Algorithm | None
    time_us: float
    default_us: float
    trials: tuple[Trial, ...]


Table = tuple[Record, ...]


def table_path() -> Path:
    """Where the records are."""
    return cache_folder() / "cusparselt-tune.json"


def nearest(table: Table, key: Key, rows: int) -> Record | None:
    """The record of this key that is nearest in rows, within :data:`REACH`, or None."""

    def distance(record: Record) -> float:
        return abs(math.log2(record.rows / rows))

    known = [record for record in table if record.key == key and distance(record) <= math.log2(REACH)]
    return min(known, key=distance) if known else None


# -- the file ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def load_table(path: Path) -> Table:
    """The records of a file, none when it does not exist. Read once a process.

    Raises:
        InputError: For anything but the form at the top of this file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ()
    try:
        content = json.loads(text)
    except ValueError as error:
        raise _damaged(path, f"no JSON: {error}") from error
    if not isinstance(content, dict) or set(content) != {"version", "records"} or content["version"] != VERSION:
        raise _damaged(path, f"not an object of version {VERSION}")
    if not isinstance(content["records"], list):
        raise _damaged(path, "records are no list")
    try:
        return tuple(_record(entry) for entry in content["records"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, str(error)) from error


def add_records(path: Path, records: Iterable[Record]) -> None:
    """Write records into a file, in the place of older ones of the same key and rows; a reader sees old or new."""
    added = {(record.key, record.rows): record for record in records}
    load_table.cache_clear()
    kept = [record for record in load_table(path) if (record.key, record.rows) not in added]
    content = {"version": VERSION, "records": [_entry(record) for record in (*kept, *added.values())]}
    replace_file(path, json.dumps(content, indent=1))
    load_table.cache_clear()


def _damaged(path: Path, got: str) -> InputError:
    return InputError(f"damaged search results in {path}", got=got, remedy="delete the file and run slidesparse tune")


def _entry(record: Record) -> dict[str, Any]:
    return {
        **asdict(record.key),
        "rows": record.rows,
        "algorithm": None if record.best is None else asdict(record.best),
        "time_us": record.time_us,
        "default_us": record.default_us,
        "tried": [{**asdict(t.algorithm), "time_us": t.time_us, "fault": t.fault} for t in record.trials],
    }


def _record(entry: object) -> Record:
    names = [field.name for field in fields(Key)]
    entry = _object(entry, [*names, "rows", "algorithm", "time_us", "default_us", "tried"])
    texts, numbers = ("gpu", "library", "dtype", "accumulator"), ("out", "columns", "rows")
    _check(all(type(entry[name]) is str for name in texts), f"{', '.join(texts)} are no texts")
    _check(all(type(entry[name]) is int and entry[name] > 0 for name in numbers), f"{', '.join(numbers)}: not positive")
    _check(isinstance(entry["tried"], list), "tried is no list")
    return Record(
        key=Key(**{name: entry[name] for name in names}),
        rows=entry["rows"],
        best=None if entry["algorithm"] is None else _algorithm(_object(entry["algorithm"], _ALGORITHM)),
        time_us=_time(entry["time_us"]),
        default_us=_time(entry["default_us"]),
        trials=tuple(_trial(trial) for trial in entry["tried"]),
    )


_ALGORITHM = [field.name for field in fields(Algorithm)]


def _trial(entry: object) -> Trial:
    entry = _object(entry, [*_ALGORITHM, "time_us", "fault"])
    fault, time_us = entry["fault"], entry["time_us"]
    _check(fault is None or type(fault) is str, "fault is no text")
    return Trial(_algorithm(entry), None if time_us is None else _time(time_us), fault)


def _algorithm(entry: Mapping[str, Any]) -> Algorithm:
    _check(all(type(entry[name]) is int for name in _ALGORITHM), "an algorithm is three whole numbers")
    return Algorithm(**{name: entry[name] for name in _ALGORITHM})


def _time(value: object) -> float:
    if type(value) not in (int, float) or not 0 < float(str(value)) < math.inf:
        raise ValueError(f"{value!r} is no time")
    return float(str(value))


def _object(entry: object, names: list[str]) -> dict[str, Any]:
    if not isinstance(entry, dict) or set(entry) != set(names):
        raise ValueError(f"needed exactly the keys {', '.join(names)}")
    return entry


def _check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)
