"""The launch of a quantise-and-lift kernel: a pure function of the problem.

A row that stays in registers (:mod:`slidesparse.lifting.resident`) gets as few lanes as it fits in: every lane then has
many loads in flight, and the work of a row is spread over many columns. A walked row is read several times, and all
passes but the first should find it in L1, so the rows that a multiprocessor processes at once must fit there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from slidesparse.errors import InputError
from slidesparse.lifting.layout import ColumnOrder, LiftSpec
from slidesparse.lifting.prologue import ADDING
from slidesparse.lifting.variant import CHUNKS, LiftVariant
from slidesparse.weights.quant import QUANTISED

EARLY_CAPABILITY = (9, 0)
"""The first compute capability on which a kernel can start before the one before it has ended."""

WARPS = (1, 2, 4, 8, 16)
"""Warps that a program may have."""
MOST_WARPS = 64
"""Most warps of a multiprocessor, which limit its concurrent programs."""
L1_BYTES = 192 * 1024
"""Usable bytes of a multiprocessor's L1, of 256 KiB on an H200: 16 rows of 16 KiB at once ran at 70 % of the speed of
8."""
FEW_TOKENS = 512
"""Most rows for which latency decides and L1 is empty: a row gets all lanes that it can use."""
LOAD_BYTES = 16
"""Bytes of a lane's load of a row."""
WRITE_COLUMNS = 16
"""Packed columns of a lane's store: 16 bytes of 8-bit values."""
THREE_PROGRAMS = 40
"""Registers of a lane with which a multiprocessor's 65536 suffice for three programs of 16 warps. The compiler would
take a few more for FP8, and only two rows would be in flight: 7 % slower on an H200 at K = 18944."""
TWO_PROGRAMS = 64
"""Registers of a lane with which it suffices for two. Left to the compiler, SiLU * up of more than 24576 columns takes
124, and a multiprocessor reads nothing while its one row is computed: 773, not 562 us for 16384 rows of 27648."""
ONE_PROGRAM = 96
"""Registers of a lane above 28672 columns, where 64 would spill too much: 807, 712 and 938 us for 16384 rows of 29568
with 124, 96 and 64."""
RESIDENT_COLUMNS = 256
"""Input columns of a warp in a chunk: 8 a lane, a load of 16 bytes of a 16-bit type."""
FEWEST_WARPS = 2
"""Fewest warps of a program with its row in registers. In one warp the compiler gathers by shuffles instead of through
shared memory, with a shuffle, a compare and a select for each possible source register: 56 instructions a column of the
input at 6:8 and K = 2048, in place of 15."""


@dataclass(frozen=True)
class Launch:
    """The sizes of one launch.

    Attributes:
        read: Input columns of a step of reading, a power of two.
        write: Packed columns of a step of writing, a power of two.
        num_warps: Warps of a program, a power of two.
        registers: Most registers of a lane, a multiple of 8; 0 leaves them to the compiler.
    """

    read: int
    write: int
    num_warps: int
    registers: int = 0


@lru_cache(maxsize=4096)
def configure(tokens: int, order: ColumnOrder, itemsize: int, prologue: str, quantised: bool = True) -> Launch:
    """Choose the launch of a quantise-and-lift kernel, or of one that only lifts, for inputs of ``itemsize`` bytes.

    >>> configure(4096, ColumnOrder.identity(8192), 2, "none")
    Launch(read=1024, write=4096, num_warps=4, registers=0)
    """
    able = [warps for warps in WARPS if warps >= FEWEST_WARPS]
    fitting = [warps for warps in able if order.in_features <= CHUNKS * RESIDENT_COLUMNS * warps]
    if not quantised or order.k_offset % 2 or not fitting:
        return _walk(tokens, order, itemsize, prologue)
    return _resident(tokens, order, itemsize, prologue, fitting)


def _resident(tokens: int, order: ColumnOrder, itemsize: int, prologue: str, fitting: list[int]) -> Launch:
    most = max(WARPS)
    if tokens > FEW_TOKENS:
        # A kernel that also writes the sum has more to wait for: four times the lanes were 10 % faster on an H200.
        warps = min(fitting[0] * (4 if prologue in ADDING else 1), most)
    else:
        warps = max([w for w in fitting if RESIDENT_COLUMNS * w <= order.in_features], default=fitting[0])
    # With more than 6 chunks of a 16-bit type, or with a prologue, a lane needs more registers than that.
    light = prologue == "none" and itemsize == 2 and order.in_features <= 6 * RESIDENT_COLUMNS * warps
    stores = 1 if warps == most else 2
    registers = 0
    if warps == most and light:
        registers = THREE_PROGRAMS
    elif warps == most and prologue == "silu_mul" and tokens > FEW_TOKENS:
        registers = TWO_PROGRAMS if order.in_features <= 7 * RESIDENT_COLUMNS * warps else ONE_PROGRAM
    return Launch(RESIDENT_COLUMNS * warps, 32 * warps * WRITE_COLUMNS * stores, warps, registers)


def _walk(tokens: int, order: ColumnOrder, itemsize: int, prologue: str) -> Launch:
    row_bytes = order.in_features * itemsize * (2 if prologue == "silu_mul" else 1)
    useful = [warps for warps in WARPS if warps == 1 or 32 * warps * LOAD_BYTES <= row_bytes]
    cached = [warps for warps in useful if warps >= 4 and MOST_WARPS // warps * row_bytes <= L1_BYTES]
    warps = min(cached) if cached and tokens > FEW_TOKENS else max(useful)
    return Launch(32 * warps * LOAD_BYTES // itemsize, 32 * warps * WRITE_COLUMNS, warps)


@lru_cache
def starts_early(device: torch.device) -> bool:
    """Return whether a kernel on this device can start before the one before it has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= EARLY_CAPABILITY


def make_variant(spec: LiftSpec, launch: Launch, early: bool = False) -> LiftVariant:
    """Return the constants of a launch; ``early``: see :class:`LiftVariant`."""
    prologue, source, target, order, layout, activation_rounding = spec
    if target not in QUANTISED and target != source:
        raise InputError("type to lift to", got=target, needed="torch.int8, torch.float8_e4m3fn or the input's type")
    return LiftVariant(
        *order,  # type: ignore[arg-type] # mypy does not count them
        prologue=prologue,
        quant={torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(target, "none"),
        activation_rounding=activation_rounding,
        itemsize=target.itemsize,
        slabs=layout.slabs is not None,
        read=launch.read,
        write=launch.write,
        early=early,
    )
