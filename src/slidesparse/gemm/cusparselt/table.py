"""The fastest cuSPARSELt algorithm of every searched shape, in one JSON file of the user's cache folder.

    {"version": 1, "records": [{"gpu": "NVIDIA H200", "library": "0.8.0", "out": 4608, "columns": 5376, "rows": 1024,
      "dtype": "int8", "accumulator": "int32", "algorithm": {"id": 7, "split_k": 1, "split_k_mode": 0},
      "time_us": 21.3, "default_us": 24.0, "tried": [{"id": 0, ..., "time_us": 24.0, "fault": null}, ...]}]}

The file is ``$XDG_CACHE_HOME/slidesparse/cusparselt-tune.json`` (``~/.cache`` without the variable). Without a record,
and with a null algorithm, the library's default runs. A file that cannot be read is not used, the log says so once, and
the next search writes it anew. Writers lock ``cusparselt-tune.lock`` in the same folder.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from slidesparse.base.cache_folder import cache_folder
from slidesparse.base.file_lock import file_lock
from slidesparse.base.log import log_once
from slidesparse.base.typed_json import decode, load_json
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import InputError, UnsupportedError

VERSION = 1

ROWS_REACH = 2.0
"""Largest factor between a record's rows and a shape's: beyond it another tile is usually the fastest."""

LOCK_S = 60.0
"""Seconds to wait for a process that writes records, which takes milliseconds."""


@dataclass(frozen=True)
class Algorithm:
    """The numbers that select a kernel of the library.

    Attributes:
        id: The kernel's number, 0 .. CONFIG_MAX_ID - 1.
        split_k: Slices of K; -1 lets a Hopper kernel choose (segment-K).
        split_k_mode: cusparseLtSplitKMode_t; 0: the library's default.
    """

    id: int
    split_k: int = 1
    split_k_mode: int = 0

    def __str__(self) -> str:
        return f"id {self.id}, split_k {self.split_k}, mode {self.split_k_mode}"


@dataclass(frozen=True)
class Trial:
    """One :class:`Algorithm` of a search: the time of one GEMM, or the reason of its rejection."""

    id: int
    split_k: int
    split_k_mode: int
    time_us: float | None
    fault: str | None

    def __post_init__(self) -> None:
        if self.time_us is not None:
            _check_time("a tried algorithm", self.time_us)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm."""
        return Algorithm(self.id, self.split_k, self.split_k_mode)


class Key(NamedTuple):
    """The GPU, library, weight and types of a record; see :class:`AlgorithmRecord`."""

    gpu: str
    library: str
    out: int
    columns: int
    dtype: str
    accumulator: str


@dataclass(frozen=True)
class AlgorithmRecord:
    """The outcome of one search.

    Attributes:
        gpu: Name of the device.
        library: Version of cuSPARSELt.
        out: Rows of the weight, padded.
        columns: Columns K', padded.
        dtype: Type of the operands.
        accumulator: Type of the product.
        rows: Tokens, padded (:func:`slidesparse.gemm.cusparselt.backend.token_bucket`).
        algorithm: The fastest one; None for the library's default.
        time_us: Its time; ``default_us`` that of the library's default.
        tried: Every algorithm that was tried.
    """

    gpu: str
    library: str
    out: int
    columns: int
    dtype: str
    accumulator: str
    rows: int
    algorithm: Algorithm | None
    time_us: float
    default_us: float
    tried: tuple[Trial, ...]

    def __post_init__(self) -> None:
        if min(self.out, self.columns, self.rows) < 1:
            raise InputError("sizes of a search", got=[self.out, self.columns, self.rows], needed="at least 1")
        _check_time("the fastest algorithm", self.time_us)
        _check_time("the library's default", self.default_us)

    @property
    def key(self) -> Key:
        """The GPU, library, weight and types."""
        return Key(self.gpu, self.library, self.out, self.columns, self.dtype, self.accumulator)


AlgorithmTable = tuple[AlgorithmRecord, ...]


@dataclass(frozen=True)
class _StoredTable:
    version: int
    records: AlgorithmTable

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise InputError("version of the table", got=self.version, needed=str(VERSION))


def _check_time(whose: str, time_us: float) -> None:
    if not 0 < time_us < math.inf:
        raise InputError(f"time of {whose}", got=time_us, needed="microseconds, above zero")


def table_path() -> Path:
    """Return the path of the file of records."""
    return cache_folder() / "cusparselt-tune.json"


def nearest_record(table: AlgorithmTable, key: Key, rows: int) -> AlgorithmRecord | None:
    """Return the record of a key that is nearest in rows, within :data:`ROWS_REACH`, or None."""

    def distance(record: AlgorithmRecord) -> float:
        return abs(math.log2(record.rows / rows))

    known = [record for record in table if record.key == key and distance(record) <= math.log2(ROWS_REACH)]
    return min(known, key=distance) if known else None


@lru_cache(maxsize=4)
def load_algorithms(path: Path) -> AlgorithmTable:
    """Return the records of a file, none if it does not exist; it is read once a process.

    Raises:
        InputError: It has not the form at the top of this file.
    """
    try:
        table: _StoredTable = decode(_StoredTable, load_json(path), "table")
        return table.records
    except FileNotFoundError:
        return ()
    except InputError as error:
        raise error.located(f"damaged search results in {path}", "delete the file and run slidesparse tune") from error


def known_algorithms(path: Path) -> AlgorithmTable:
    """Return the records of a file; none from one that :func:`load_algorithms` refuses."""
    try:
        return load_algorithms(path)
    except InputError as error:
        log_once(f"slidesparse: these search results are not used: {error}", logging.WARNING)
        return ()


def add_records(path: Path, records: Iterable[AlgorithmRecord]) -> None:
    """Write records into a file atomically, replacing older ones of the same key and rows.

    Raises:
        UnsupportedError: Another process keeps the file's lock.
        OSError: The file cannot be written.
    """
    added = {(record.key, record.rows): record for record in records}
    with file_lock(path.with_suffix(".lock"), LOCK_S) as held:  # else two searches would lose each other's records
        if not held:
            raise UnsupportedError(
                f"{path} is in use", got=f"a process that has held its lock for {LOCK_S:g} s", remedy="end it"
            )
        load_algorithms.cache_clear()
        kept = [record for record in known_algorithms(path) if (record.key, record.rows) not in added]
        table = _StoredTable(VERSION, (*kept, *added.values()))
        replace_file(path, json.dumps(asdict(table), indent=1))
        load_algorithms.cache_clear()
