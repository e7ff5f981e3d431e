"""The fastest cuSPARSELt algorithm of every searched shape, in one JSON file of the user's cache folder.

    {"version": 2, "records": [{"gpu": "NVIDIA H200", "library": "0.8.0", "out": 4608, "columns": 5376, "rows": 1024,
      "dtype": "int8", "algorithm": {"id": 7, "split_k": 1, "split_k_mode": 0}, "time_us": 21.3, "default_us": 24.0}]}

The file is ``$XDG_CACHE_HOME/slidesparse/cusparselt-tune.json`` (``~/.cache`` without the variable). Without a record,
and with a null algorithm, the library's default runs. A file that cannot be read is not used, the log says so once, and
the next search writes it anew. Writers lock ``cusparselt-tune.lock`` in the same folder.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from slidesparse.base.cache_folder import cache_folder
from slidesparse.base.file_lock import file_lock
from slidesparse.base.log import log_once
from slidesparse.base.typed_json import decode, load_json
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import InputError

VERSION = 2

ROWS_REACH = 2.0
"""Largest factor between a record's rows and a shape's: beyond it another tile is usually the fastest."""

WRITING_S = 60.0
"""Seconds to wait for a process that writes records, which takes milliseconds. A hanging one costs its own records."""


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


class Key(NamedTuple):
    """The GPU, library, weight and type of a record; see :class:`AlgorithmRecord`."""

    gpu: str
    library: str
    out: int
    columns: int
    dtype: str


@dataclass(frozen=True)
class AlgorithmRecord:
    """The outcome of one search.

    Attributes:
        gpu: Name of the device.
        library: Version of cuSPARSELt.
        out: Rows of the weight, padded.
        columns: Columns K', padded.
        dtype: Type of the operands.
        rows: Tokens, padded (:func:`slidesparse.gemm.cusparselt.backend.token_bucket`).
        algorithm: The fastest one; None for the library's default.
        time_us: Its time; ``default_us`` that of the library's default. Both only inform.
    """

    gpu: str
    library: str
    out: int
    columns: int
    dtype: str
    rows: int
    algorithm: Algorithm | None
    time_us: float
    default_us: float

    def __post_init__(self) -> None:
        if min(self.out, self.columns, self.rows) < 1:
            raise InputError("sizes of a search", got=[self.out, self.columns, self.rows], needed="at least 1")

    @property
    def key(self) -> Key:
        """The GPU, library, weight and type."""
        return Key(self.gpu, self.library, self.out, self.columns, self.dtype)


AlgorithmTable = tuple[AlgorithmRecord, ...]


@dataclass(frozen=True)
class _StoredTable:
    version: int
    records: AlgorithmTable

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise InputError("version of the table", got=self.version, needed=str(VERSION))


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
    """Return the records of a file, none if there is no such file or it is damaged; it is read once a process."""
    try:
        table: _StoredTable = decode(_StoredTable, load_json(path), "table")
        return table.records
    except FileNotFoundError:
        return ()
    except InputError as error:
        located = error.located(f"damaged search results in {path}", "delete the file and run slidesparse tune")
        log_once(f"slidesparse: these search results are not used: {located}", logging.WARNING)
        return ()


def add_record(path: Path, record: AlgorithmRecord) -> None:
    """Write a record into a file atomically, replacing an older one of the same key and rows.

    Raises:
        OSError: The file cannot be written.
    """
    with file_lock(path.with_suffix(".lock"), WRITING_S):  # else two searches would lose each other's records
        load_algorithms.cache_clear()
        kept = [known for known in load_algorithms(path) if (known.key, known.rows) != (record.key, record.rows)]
        replace_file(path, json.dumps(asdict(_StoredTable(VERSION, (*kept, record))), indent=1))
        load_algorithms.cache_clear()
