"""Measured times of whole layers, and the backend that they show to be the fastest for each number of tokens.

    {"version": 1, "gpu": "NVIDIA H200", "libraries": {"dense": "vLLM 0.22", "cusparselt": "cuSPARSELt 0.8"},
     "layers": [{"dtype": "int8", "out": 4608, "columns": 3584, "tokens": [64, 1024, 16384],
                 "us": {"dense": [11.3, 52.9, 870.1], "cusparselt 2:4": [28.5, 55.7, null]}}]}

There is one file a GPU: the package has some in ``speed_tables``, and ``slidesparse tune`` writes its own into the
user's cache folder, which goes before the package's. A packed form is judged by its time over the dense time of the
same comparison, quantisation and scales included. Times measured with the installed libraries are preferred; where
there are none, those of other versions are used, and the choice names both versions.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from slidesparse.base.cache_folder import cache_folder
from slidesparse.base.typed_json import decode, load_json
from slidesparse.base.whole_file import replace_file
from slidesparse.errors import InputError
from slidesparse.gemm.spec import Route

VERSION = 1

PACKAGED = Path(__file__).parent / "speed_tables"

SIZE_REACH = 2.0
"""A measured layer stands in for others whose sizes are within this factor of its own; the nearest one is taken."""

MARGIN = 0.98
"""A packed form is worth its extra memory when it takes at most this share of the dense time; the noise of a comparison
is of that size too."""

DENSE = "dense"

T = TypeVar("T")


@dataclass(frozen=True)
class LayerSpeed:
    """The times of one linear layer.

    Attributes:
        dtype: ``int8``, ``fp8``, ``bf16``, ...
        out: Rows of the weight.
        columns: Columns of the weight, before lifting.
        tokens: The numbers of tokens M, ascending.
        us: ``dense``, or backend and pattern (``cusparselt 6:8``) -> microseconds at each M, None where it has none.
    """

    dtype: str
    out: int
    columns: int
    tokens: tuple[int, ...]
    us: dict[str, tuple[float | None, ...]]

    def __post_init__(self) -> None:
        if min(self.out, self.columns, *self.tokens, 1) < 1 or not self.tokens:
            raise InputError(
                "sizes of a measured layer", got=(self.out, self.columns, self.tokens), needed="at least 1"
            )
        if list(self.tokens) != sorted(set(self.tokens)):
            raise InputError("tokens of a measured layer", got=self.tokens, needed="ascending numbers")
        for name, times in self.us.items():
            if len(times) != len(self.tokens) or not all(us is None or 0 < us < math.inf for us in times):
                raise InputError(f"times of {name}", got=times, needed="one for each of the tokens, above zero")

    def at(self, name: str, tokens: int) -> float | None:
        """Return the microseconds at one of the measured M; None where it has no time of that name there."""
        return self.us[name][self.tokens.index(tokens)] if name in self.us else None

    def of_size(self, out: int, columns: int) -> LayerSpeed:
        """Return the times of a layer of another size, if time grew with the number of weights."""
        factor = out * columns / (self.out * self.columns)
        us = {name: tuple(None if t is None else t * factor for t in times) for name, times in self.us.items()}
        return replace(self, out=out, columns=columns, us=us)

    def distance(self, out: int, columns: int) -> float:
        """Return how far another layer's size is: the larger difference of rows or of columns, in octaves."""
        return max(abs(math.log2(self.out / out)), abs(math.log2(self.columns / columns)))


@dataclass(frozen=True)
class SpeedTable:
    """The measured layers of one GPU, as a file has them.

    Attributes:
        gpu: Name of the device.
        libraries: Backend -> :meth:`slidesparse.gemm.backend.Backend.library` on the machine that measured.
        layers: The times.
        version: Version of the format.
    """

    gpu: str
    libraries: dict[str, str]
    layers: tuple[LayerSpeed, ...]
    version: int = VERSION


@dataclass(frozen=True)
class MeasuredLayer:
    """A measured layer, and whether its times come from other versions of the libraries.

    Attributes:
        layer: The layer, its times by backend alone (``cusparselt``, not ``cusparselt 6:8``).
        others: Libraries of these times that have another version here: pairs (there, here), each once.
    """

    layer: LayerSpeed
    others: tuple[tuple[str, str], ...] = ()

    def describe(self) -> str:
        """Return ``measured at 64x64 with torch 2.11; this is torch 2.14``; no libraries where they are the same."""
        where = f"measured at {self.layer.out}x{self.layer.columns}"
        if not self.others:
            return where
        there, here = (" and ".join(dict.fromkeys(names)) for names in zip(*self.others, strict=True))
        return f"{where} with {there}; this is {here}"


def times_key(backend: str, pattern: str) -> str:
    """Return the name of a layer's times in the file."""
    return DENSE if backend == DENSE else f"{backend} {pattern}"


def find_nearest(
    tables: Sequence[SpeedTable], libraries: Mapping[str, str], dtype: str, pattern: str, out: int, columns: int
) -> MeasuredLayer | None:
    """Find the measured layer of this type and pattern that is nearest in size, within :data:`SIZE_REACH`.

    A layer measured with this machine's libraries goes before all others; then the layer of which fewer backends have
    another version here.

    Args:
        tables: Tables of this GPU; the first one is taken on a tie.
        libraries: The backends to compare, with their libraries here. If dense is one of them, a layer without a dense
            time is left out.
        dtype: Type of the weight.
        pattern: Its pattern.
        out: Its rows.
        columns: Its columns.

    Returns:
        None when no layer has a packed time. Where another table has times of the same backends at the same size, they
        are added below the fewest tokens of the layer found and above the most: a user who measured a few numbers of
        tokens keeps the packaged times of the others.
    """
    found = [
        MeasuredLayer(replace(layer, us=times), _other_versions(table, libraries, times))
        for table in tables
        for layer in table.layers
        if layer.dtype == dtype
        and layer.distance(out, columns) <= math.log2(SIZE_REACH)
        and _is_comparable(
            times := _times(layer, pattern, (name for name in libraries if name in table.libraries)), libraries
        )
    ]
    if not found:
        return None
    found.sort(key=lambda measured: (len(measured.others), measured.layer.distance(out, columns)))
    best = found[0]
    for other in found[1:]:
        best = _extended(best, other)
    return best


def _times(layer: LayerSpeed, pattern: str, backends: Iterable[str]) -> dict[str, tuple[float | None, ...]]:
    """Return a layer's times at one pattern by backend, those that it has."""
    keys = {name: times_key(name, pattern) for name in backends}
    return {name: layer.us[filed] for name, filed in keys.items() if filed in layer.us}


def _is_comparable(times: Mapping[str, object], libraries: Mapping[str, str]) -> bool:
    """Whether there is a packed time, and a dense one where dense is to be compared."""
    return bool(times.keys() - {DENSE}) and (DENSE in times or DENSE not in libraries)


def _other_versions(
    table: SpeedTable, libraries: Mapping[str, str], backends: Iterable[str]
) -> tuple[tuple[str, str], ...]:
    """Return the libraries of these backends that differ between a table and this machine: (there, here)."""
    pairs = ((table.libraries[name], libraries[name]) for name in backends)
    return tuple((there, here) for there, here in pairs if there != here)


def _extended(measured: MeasuredLayer, more: MeasuredLayer) -> MeasuredLayer:
    """Return a layer with the times of another one, of the same size and backends, past its own numbers of tokens."""
    layer, other = measured.layer, more.layer
    below = [i for i, m in enumerate(other.tokens) if m < layer.tokens[0]]
    above = [i for i, m in enumerate(other.tokens) if m > layer.tokens[-1]]
    alike = (layer.out, layer.columns, layer.us.keys()) == (other.out, other.columns, other.us.keys())
    if not alike or not (below or above):
        return measured

    def joined(own: tuple[T, ...], others: tuple[T, ...]) -> tuple[T, ...]:
        return *(others[i] for i in below), *own, *(others[i] for i in above)

    us = {name: joined(times, other.us[name]) for name, times in layer.us.items()}
    longer = replace(layer, tokens=joined(layer.tokens, other.tokens), us=us)
    return MeasuredLayer(longer, tuple(dict.fromkeys((*measured.others, *more.others))))


def switching(layer: LayerSpeed) -> tuple[Route, ...]:
    """Return routes that are dense, except in ranges of M at both of whose ends a backend is faster by :data:`MARGIN`.

    The ends of a range are neighbouring measured M. Below the fewest tokens measured and above the most, that one
    measurement decides; a measured M itself belongs to the neighbouring range whose backend is the faster one there. Of
    several faster backends the one with the smaller product of times at the ends is taken.

    Args:
        layer: The layer of a :func:`find_nearest`.
    """

    def best(ends: Sequence[int]) -> str:
        shares = {name: [_share(times[i], layer.us[DENSE][i]) for i in ends] for name, times in layer.us.items()}
        won = {name: math.prod(both) for name, both in shares.items() if max(both) <= MARGIN}
        return min(won, key=lambda name: won[name], default=DENSE)

    last = len(layer.tokens) - 1
    between = [best([0]), *(best([i, i + 1]) for i in range(last)), best([last])]
    ranges = [(0, between[0])]
    for i, tokens in enumerate(layer.tokens):
        at = min(between[i + 1], between[i], key=lambda name: _share(layer.us[name][i], layer.us[DENSE][i]))
        ranges += [(tokens, at), (tokens + 1, between[i + 1])]
    routes: list[Route] = []
    for first, name in ranges:
        if not routes or routes[-1].backend != name:
            routes.append(Route(first, name))
    return tuple(routes)


def fastest(layer: LayerSpeed) -> str | None:
    """Return the packed form with the smallest product of times over all M; None when none has all of them."""
    logs = {
        name: sum(math.log(us) for us in times if us)
        for name, times in layer.us.items()
        if name != DENSE and None not in times
    }
    return min(logs, key=lambda name: logs[name], default=None)


def _share(us: float | None, dense: float | None) -> float:
    return math.inf if us is None or dense is None else us / dense


# -- the files -----------------------------------------------------------------------------------------------------


def tuned_path(gpu: str) -> Path:
    """Return the path at which ``slidesparse tune`` keeps the times of this GPU."""
    return cache_folder() / file_name(gpu)


def file_name(gpu: str) -> str:
    """Return the name of the file of a GPU's table.

    >>> file_name("NVIDIA H200")
    'speed-nvidia-h200.json'
    """
    return f"speed-{re.sub('[^a-z0-9]+', '-', gpu.lower())}.json"


def tables_for(gpu: str) -> list[SpeedTable]:
    """Return the user's table of a GPU and the package's, those that there are."""
    paths = (tuned_path(gpu), PACKAGED / file_name(gpu))
    return [table for path in paths if (table := load_speeds(path)) is not None and table.gpu == gpu]


@lru_cache(maxsize=8)
def load_speeds(path: Path) -> SpeedTable | None:
    """Return a file's table, None when there is no file; read once a process.

    Raises:
        InputError: For anything but the form at the top of this file.
    """
    try:
        table: SpeedTable = decode(SpeedTable, load_json(path), "table")
        if table.version != VERSION:
            raise InputError("version of the table", got=table.version, needed=str(VERSION))
    except FileNotFoundError:
        return None
    except InputError as error:
        raise InputError(f"damaged {path}", got=error, remedy="delete it and run slidesparse tune") from error
    return table


def add_layers(path: Path, gpu: str, libraries: Mapping[str, str], layers: Iterable[LayerSpeed]) -> SpeedTable:
    """Write layers into a table, replacing older ones of the same type and size.

    Layers measured with another version of a library are dropped: times of two runs must not be compared.
    """
    load_speeds.cache_clear()
    old = load_speeds(path)
    added = {(layer.dtype, layer.out, layer.columns): layer for layer in layers}
    kept = old.layers if old is not None and (old.gpu, old.libraries) == (gpu, libraries) else ()
    rest = [layer for layer in kept if (layer.dtype, layer.out, layer.columns) not in added]
    table = SpeedTable(gpu, dict(libraries), (*rest, *added.values()))
    replace_file(path, _text(table))
    load_speeds.cache_clear()
    return table


def _text(table: SpeedTable) -> str:
    """Return a table as JSON with a line for each list of times."""
    head = {"version": table.version, "gpu": table.gpu, "libraries": table.libraries}
    layers = ",\n".join(map(_layer_text, table.layers))
    return json.dumps(head)[:-1] + f', "layers": [\n{layers}\n]}}\n'


def _layer_text(layer: LayerSpeed) -> str:
    head = {"dtype": layer.dtype, "out": layer.out, "columns": layer.columns, "tokens": layer.tokens}
    times = ",\n".join(f"  {json.dumps(name)}: {json.dumps(us)}" for name, us in layer.us.items())
    return json.dumps(head)[:-1] + f', "us": {{\n{times}}}}}'
