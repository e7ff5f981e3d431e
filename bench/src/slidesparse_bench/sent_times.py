"""Times that somebody sent in (``slidesparse tune --share``): checked, and added to the tables that ship."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from slidesparse.base.typed_json import load_json
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import InputError
from slidesparse.gemm import BACKENDS, get_backend
from slidesparse.gemm.speed import DENSE_FORM, LayerSpeed, SpeedTable
from slidesparse.gemm.speed_files import (
    PACKAGED,
    digest,
    file_name,
    join_layers,
    load_speeds,
    parse_table,
    table_text,
)
from slidesparse.offline.tune import layer_name
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.quant import DTYPES

FEWEST_TOKENS = 3
"""Fewest M's of a layer: with fewer there is little to interpolate between."""

MOST_OPERATIONS = 2e16
"""Operations a second that no GPU reaches: a faster time is a mistake."""

SHARES = (0.2, 20.0)
"""Bounds of a packed form's time over the dense one's."""

FALL = 0.7
"""A time that falls below this share of that for fewer tokens is a mistake, or something else ran."""


def read(path: Path) -> SpeedTable:
    """Return the table of a file that somebody sent.

    Raises:
        InputError: It is no table, or :func:`faults` finds something; the first three are named.
    """
    try:
        table = parse_table(load_json(path))
    except FileNotFoundError:
        raise InputError(f"{path} is not there") from None
    found = list(faults(table))
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise InputError(f"times in {path}", got="; ".join(found[:3]) + more, needed="a table that can ship")
    return table


def faults(table: SpeedTable) -> Iterator[str]:
    """Yield why a table cannot ship, in words."""
    there = table.installation
    accelerated = {name for name in BACKENDS if get_backend(name).accelerated}
    if not re.fullmatch(r"[\w ().+/-]{3,80}", there.gpu):
        yield f"the GPU's name {there.gpu[:80]!r}"
    if not re.fullmatch(r"\d{1,2}\.\d", there.capability):
        yield f"compute capability {there.capability[:20]!r}"
    if there.driver is None or not re.fullmatch(r"\d+(\.\d+){1,2}", there.driver):
        yield f"driver {there.driver!r}"
    if unknown := sorted(there.libraries.keys() - accelerated - {DENSE_FORM}):
        yield f"unknown backends {', '.join(unknown)}"
    if (ours := there.libraries.get("hopper")) not in (None, get_backend("hopper").library()):
        yield f"times of {ours}, which is no longer the kernel in the package"
    if not table.layers:
        yield "no layers"
    for layer in table.layers:
        yield from (f"{layer_name(layer)}: {fault}" for fault in _layer_faults(layer, accelerated))


def _layer_faults(layer: LayerSpeed, accelerated: set[str]) -> Iterator[str]:
    if layer.dtype not in DTYPES:
        yield f"unknown type {layer.dtype!r}"
    if len(layer.tokens) < FEWEST_TOKENS:
        yield f"times at {len(layer.tokens)} numbers of tokens"
    if None in layer.us.get(DENSE_FORM, (None,)):
        yield "no dense time everywhere"
        return
    for name, times in layer.us.items():
        if name != DENSE_FORM and not _is_packed_key(name, accelerated):
            yield f"times of {name!r}"
        known = [(m, us) for m, us in zip(layer.tokens, times, strict=True) if us is not None]
        if not known:
            yield f"{name} has no time"
        if any(2 * m * layer.out * layer.columns / us > MOST_OPERATIONS / 1e6 for m, us in known):
            yield f"{name} is faster than any GPU"
        if any(us > after / FALL for (_, us), (_, after) in pairwise(known)):
            yield f"{name} takes less time for more tokens"
        shares = [us / dense for us, dense in zip(times, layer.us[DENSE_FORM], strict=True) if us and dense]
        if shares and not SHARES[0] <= min(shares) <= max(shares) <= SHARES[1]:
            yield f"{name} takes {min(shares):.2g} to {max(shares):.2g} of dense's time"


def _is_packed_key(name: str, accelerated: set[str]) -> bool:
    backend, _, pattern = name.partition(" ")
    try:
        parsed = Pattern.parse(pattern)
    except InputError:
        return False
    return backend in accelerated and str(parsed) == pattern and parsed != DENSE


def add_to_package(table: SpeedTable, folder: Path = PACKAGED) -> Path:
    """Add a table to those that ship, and return its file.

    The first table of a GPU is ``speed-GPU.json``, those of other installations have their digest in the name. Times of
    an installation that is there already are joined with its own, and the new ones count.
    """
    there = table.installation
    plain = folder / file_name(there.gpu)
    known = load_speeds(plain)
    free = known is None or known.installation == there
    path = plain if free else folder / file_name(there.gpu, digest(there))
    old = load_speeds(path)
    layers = table.layers if old is None else join_layers(old.layers, table.layers)
    replace_file(path, table_text(SpeedTable(there, layers)))
    return path
