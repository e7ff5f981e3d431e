"""Files of measured layer times: their paths, reading and writing.

    {"installation": {"gpu": "NVIDIA H200", "capability": "9.0", "driver": "580.159.04",
                      "libraries": {"dense": "vLLM 0.22, torch 2.11", "hopper": "slidesparse hopper-7"}},
     "layers": [{"dtype": "int8", "out": 4608, "columns": 3584, "tokens": [64, 1024, 16384],
                 "us": {"dense": [11.3, 52.9, 870.1], "hopper 2:4": [28.5, 55.7, null]}, "experts": null}],
     "wrong": [{"dtype": "int8", "out": 4608, "columns": 3584, "name": "hopper 2:4", "experts": null}]}

``"experts"`` is null of a linear; of a layer of experts it is a :class:`slidesparse.gemm.speed.Experts`:

    {"count": 64, "everywhere": 128, "top_k": 8, "down": null, "bits": 8}

A file in the user's cache folder has the times of one installation: a GPU, its driver and the libraries. A new driver,
a new revision of a kernel or another vLLM gets a file of its own. A file that cannot be read is not used, and the log
says so once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

from slidesparse.base.cache_folder import cache_folder
from slidesparse.base.file_lock import file_lock
from slidesparse.base.log import log_once
from slidesparse.base.typed_json import decode, load_json
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import InputError, system_words
from slidesparse.gemm.speed import Installation, LayerSpeed, SpeedTable, WrongForm

REMEDY = "delete it; the next start measures again"

WRITING_S = 10.0
"""Seconds to wait for a process that writes, which takes milliseconds. A hanging one costs times, not the file."""

_UNWRITTEN: dict[Path, SpeedTable] = {}
"""Tables that could not be written, for use in this process."""


def tuned_path(here: Installation) -> Path:
    """Return the path of the times measured here: ``speed-nvidia-h200-1a2b3c4d.json``."""
    there = [here.gpu, here.capability, here.driver, sorted(here.libraries.items())]
    digest = hashlib.sha256(json.dumps(there).encode()).hexdigest()[:8]
    return cache_folder() / f"speed-{re.sub('[^a-z0-9]+', '-', here.gpu.lower())}-{digest}.json"


def lock_path(here: Installation, gpu: str = "") -> Path:
    """Return the path of the lock for measurements on an installation, or on one ``gpu`` of it."""
    return tuned_path(here).with_suffix(f".{gpu}.lock" if gpu else ".lock")


def table_of(here: Installation) -> SpeedTable:
    """Return the times measured here, an empty table without any or where the file is damaged."""
    try:
        return load_speeds(tuned_path(here)) or SpeedTable(here)
    except InputError as error:
        log_once(f"slidesparse: these times are not used: {error}", logging.WARNING)
        return SpeedTable(here)


def load_speeds(path: Path) -> SpeedTable | None:
    """Return a file's table, None without a file; read once while the file is the same.

    Raises:
        InputError: It has not the form at the top of this file.
    """
    if path in _UNWRITTEN:
        return _UNWRITTEN[path]
    try:
        state = path.stat()
        return _read(path, (state.st_ino, state.st_mtime_ns, state.st_size))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except InputError as error:
        raise error.located(f"damaged {path}", REMEDY) from error
    except OSError as error:
        raise InputError(f"damaged {path}", got=system_words(error), remedy=REMEDY) from error


@lru_cache(maxsize=64)
def _read(path: Path, state: tuple[int, int, int]) -> SpeedTable:
    table: SpeedTable = decode(SpeedTable, load_json(path), "table")
    return table


def add_layers(here: Installation, layers: Iterable[LayerSpeed], wrong: Iterable[WrongForm] = ()) -> Path | None:
    """Add layers to the times measured here; newer times of the same M win.

    One process writes at a time. A damaged file is written anew.

    Returns:
        The path; None where it cannot be written: this process keeps the times, and the log gives the reason.
    """
    path = tuned_path(here)
    with file_lock(path.with_suffix(".writing"), WRITING_S):
        known = table_of(here)
        wrong_forms = tuple(dict.fromkeys((*known.wrong, *wrong)))
        table = SpeedTable(here, join_layers(known.layers, layers), wrong_forms)
        try:
            replace_file(path, json.dumps(asdict(table)))
        except OSError as error:
            _UNWRITTEN[path] = table
            log_once(
                "slidesparse: the times measured here cannot be kept, so the next start measures again:"
                f" {system_words(error)}",
                logging.WARNING,
            )
            return None
    _UNWRITTEN.pop(path, None)
    return path


def join_layers(older: Iterable[LayerSpeed], newer: Iterable[LayerSpeed]) -> tuple[LayerSpeed, ...]:
    """Join the layers of two tables, newer ones last; comparisons of the same forms become one."""
    kept = {_comparison(layer): layer for layer in older}
    for layer in newer:
        known = kept.pop(_comparison(layer), None)
        kept[_comparison(layer)] = layer if known is None else known.updated(layer)
    return tuple(kept.values())


def _comparison(layer: LayerSpeed) -> tuple[object, ...]:
    return layer.dtype, layer.out, layer.columns, layer.experts, frozenset(layer.us)
