"""The Hopper backend for few tokens: it spreads the 2:4 form into dense fragments, so activations are not lifted.

It reads the same tensor as :class:`slidesparse.gemm.hopper.backend.Hopper`, which a layer keeps once: 0.94 bytes a
weight at 6:8. The dense products cost what they cost a dense kernel, so this pays where bytes count more than products,
and where the lifted product wastes more than it saves. ``gemm/hopper/spread.cuh`` says how weights are spread, and why
the columns of activations are dealt to four lanes.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from slidesparse.gemm.backend import Operand, Problem
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.launch import load_kernels
from slidesparse.gemm.hopper.tiles import SPREAD_TILES, spread_tiles
from slidesparse.gemm.hopper.weights import SLABS, sparse_steps
from slidesparse.layout import SLAB_BYTES, Layout
from slidesparse.packed import PackedWeight
from slidesparse.pattern import WINDOW, Pattern
from slidesparse.quant import QUANTISED

CHUNK = 16
"""Kept values of 8 bits that a lane reads of a slab: four lanes read 64, a slab's."""

MOST_SLABS = 5
"""Slabs of a round that a thread can hold in registers."""


def lane_slabs(pattern: Pattern) -> int:
    """Return the slabs of a round: the fewest of which a lane's part is whole groups and whole instructions.

    >>> [lane_slabs(Pattern(keep, keep + 2)) for keep in (2, 4, 6, 8, 10, 12, 14)]
    [1, 1, 3, 2, 5, 3, 7]
    """
    slabs = 1
    while CHUNK * slabs % pattern.keep or CHUNK * slabs // pattern.keep * pattern.group % 8:
        slabs += 1
    return slabs


def lane_columns(pattern: Pattern) -> int:
    """Return the columns of a lane in a round, before lifting.

    >>> [lane_columns(Pattern(keep, keep + 2)) for keep in (2, 4, 6, 8, 10, 12)]
    [32, 24, 64, 40, 96, 56]
    """
    return CHUNK * lane_slabs(pattern) // pattern.keep * pattern.group


class Spread(Hopper):
    """The backend that multiplies unlifted activations by the 2:4 segment, in one launch."""

    name = "spread"
    layout = Layout(lifted=False, multiple=1, slabs=SLABS, deal=lane_columns)
    reads = "hopper"

    def why_not(self, problem: Problem) -> str | None:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        if (reason := super().why_not(problem)) is not None:
            return reason
        if problem.dtype not in QUANTISED:
            return "it spreads 8-bit weights only"
        return why_not_dealt(problem.pattern, problem.in_features)

    def prepare(self, packed: PackedWeight) -> Operand:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        operand = self.adopt((torch.empty(0, device=packed.device), sparse_steps(packed)), packed)
        if operand[1].is_cuda:
            torch.cuda.current_stream(operand[1].device).synchronize()
        return operand

    def adopt(self, operand: Operand, packed: PackedWeight) -> Operand:
        """See :class:`slidesparse.gemm.backend.Backend`; an empty tensor says how many windows a group has."""
        windows = packed.pattern.group // 2 - 1
        return torch.empty(0, windows, dtype=torch.uint8, device=packed.device), operand[1]

    def warm_up(self, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device, pattern: Pattern) -> None:
        """See :class:`slidesparse.gemm.backend.Backend`; it loads every tile of the pattern."""
        index = torch.cuda.current_device() if device.index is None else device.index
        load_kernels(spread_tiles(pattern.group // 2 - 1), dtype, out_dtype, index)


@lru_cache(maxsize=1024)
def why_not_dealt(pattern: Pattern, in_features: int, k_offset: int = 0) -> str | None:
    """Say why the columns of a weight cannot be dealt to lanes, in one sentence; None when they can.

    >>> why_not_dealt(Pattern(6, 8), 3584), why_not_dealt(Pattern(4, 6), 3584)
    (None, None)
    >>> why_not_dealt(Pattern(6, 8), 128)
    'it takes rounds of 3 slabs, and the weight has 2'
    """
    if not pattern.is_uniform or pattern.keep >= pattern.group:
        return "it takes uniform patterns only"
    slabs = lane_slabs(pattern)
    if slabs > MOST_SLABS:
        return f"a thread cannot hold what it would spread of {pattern}"
    groups = -(-(k_offset + in_features) // pattern.group)
    have = -(-groups * (pattern.group // 2 - 1) * WINDOW // SLAB_BYTES)
    return f"it takes rounds of {slabs} slabs, and the weight has {have}" if have % slabs else None
