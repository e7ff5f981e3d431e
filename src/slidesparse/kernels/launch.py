"""How a kernel is launched: a pure function of the problem, and a table of measured exceptions.

The rule follows from the work of one lane (a *unit*, see :mod:`slidesparse.kernels.quantize_lift`). What was measured
to be faster than the rule is data, in ``launch.json`` beside this file::

    {"version": 1, "sm_90": [{"first": "none", "columns": 8192, "group": 8, "min_tokens": 1,
                              "tile": 256, "num_warps": 8, "held": true}]}

The entry of the largest ``min_tokens`` that the problem reaches counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from slidesparse.errors import InputError
from slidesparse.kernels.columns import UNIT_GROUPS, Columns

TABLE = Path(__file__).with_name("launch.json")
VERSION = 1

FP8_ARCH = 89
"""The first compute capability that converts to e4m3."""

TILES = (32, 64, 128, 256, 512)
"""Units that a program may hold at once, one a lane: up to 16 warps."""
HELD_WORDS = 80
"""32-bit registers of a lane that may hold its share of a row between the reduction and the quantisation."""
NORM_WORDS = 160
"""The same for a norm, which must hold its row: reading it a third time would cost more than spilling some of it."""
HELD_LOADS = 40
"""Loads of a lane that fill a held row; Triton's compile time grows with their square."""
USUAL = 256
"""The largest tile by choice (several programs on a multiprocessor overlap), and that of a row too long to hold."""
FEW_TOKENS = 512
"""Up to so many rows, latency counts more than idle lanes: one row gets all the lanes it can use."""


@dataclass(frozen=True)
class Launch:
    """How one launch is cut.

    Attributes:
        tile: Units that a program holds at once, a power of two.
        num_warps: Warps of a program, a power of two.
        held: The row, all its tiles, stays in registers; else it is read twice.
    """

    tile: int
    num_warps: int
    held: bool = True

    def __post_init__(self) -> None:
        for name, value, limit in (("tile", self.tile, 1 << 16), ("num_warps", self.num_warps, 32)):
            if type(value) is not int or not 0 < value <= limit or value & (value - 1):
                raise InputError(f"{name} of a launch", got=value, needed=f"a power of two up to {limit}")


@lru_cache(maxsize=4096)
def configure(arch: int, tokens: int, columns: Columns, itemsize: int, aligned: bool, first: str) -> Launch:
    """The launch of a quantise-and-lift kernel.

    Args:
        arch: Compute capability, 90 for an H200.
        tokens: Rows M.
        columns: The packed column order.
        itemsize: Bytes of an input value.
        aligned: Rows of the input start at multiples of 16 bytes.
        first: What the kernel does first (``none``, ``rms_norm``, ``add_rms_norm``, ``silu_mul``).

    >>> configure(80, 4096, Columns.identity(8192), 2, True, "none")
    Launch(tile=256, num_warps=8, held=True)
    """
    measured = [e for e in load_table(TABLE).get(arch, ()) if e.matches(tokens, columns, first)]
    if measured:
        return max(measured, key=lambda entry: entry.min_tokens).launch
    segments = (columns.dense_columns > 0) + (columns.slid_columns > 0)
    values = UNIT_GROUPS * columns.group * segments
    if "norm" in first:
        most = NORM_WORDS // (values * itemsize // 4)
    else:
        loads = values // columns.vector(itemsize, aligned)
        most = min(HELD_WORDS // (values * itemsize // 4), HELD_LOADS // loads)
    tiles = {tile: -(-columns.units // tile) for tile in TILES}
    fitting = [tile for tile in TILES if tiles[tile] <= most]
    if not fitting:
        return Launch(USUAL, USUAL // 32, held=False)
    if tokens <= FEW_TOKENS:
        tile = min(fitting, key=lambda tile: (tiles[tile], tile))
    else:
        tile = min(fitting, key=lambda tile: (tiles[tile] * tile, tile > USUAL, -tile))
    return Launch(tile, tile // 32)


@lru_cache
def device_arch(device: torch.device) -> int:
    """Compute capability of a device: 90 for an H200. In Triton's interpreter, which needs no GPU, the newest."""
    if device.type != "cuda":
        return 120
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


# -- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A measured launch: for ``columns`` input columns in groups of ``group``, from ``min_tokens`` rows on."""

    first: str
    columns: int
    group: int
    min_tokens: int
    launch: Launch

    def matches(self, tokens: int, columns: Columns, first: str) -> bool:
        """True when this entry speaks of such a problem."""
        same = (self.first, self.columns, self.group) == (first, columns.columns, columns.group)
        return same and tokens >= self.min_tokens


@lru_cache
def load_table(path: Path) -> dict[int, tuple[Entry, ...]]:
    """Read a table: compute capability -> entries.

    Raises:
        InputError: For anything but the form at the top of this file.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.pop("version", None) != VERSION:
        raise InputError(f"launch table {path.name}", needed=f"an object of version {VERSION}")
    table = {}
    for arch, entries in content.items():
        if not arch.startswith("sm_") or not arch[3:].isdecimal() or not isinstance(entries, list):
            raise InputError(f"launch table {path.name}", got=repr(arch), needed="sm_NN: a list of entries")
        table[int(arch[3:])] = tuple(_entry(path, entry) for entry in entries)
    return table


def _entry(path: Path, entry: object) -> Entry:
    kinds = {"first": str, "columns": int, "group": int, "min_tokens": int, "tile": int, "num_warps": int, "held": bool}
    if not isinstance(entry, Mapping) or {k: type(v) for k, v in entry.items()} != kinds:
        raise InputError(f"launch table {path.name}", got=entry, needed=f"exactly the keys {', '.join(kinds)}")
    launch = Launch(entry["tile"], entry["num_warps"], entry["held"])
    return Entry(entry["first"], entry["columns"], entry["group"], entry["min_tokens"], launch)
