"""Rounding of weights to six bits or FP8 that minimises the error of outputs, not of each weight.

Columns are rounded one after the other, and the error of each moves the later columns, by SparseGPT's factor: Frantar
et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2023). Columns with the
largest inputs come first, while all others can still compensate.

Scales do not change: a row's largest weight stays where it is. So do zeros, whatever pattern they follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from slidesparse.pruning.base import Linears, Pruner
from slidesparse.pruning.gram import checked_gram
from slidesparse.pruning.sparsegpt import BLOCK, SparseGPT, inverse_factor
from slidesparse.weights.quant import FP8_MAX, SIX_BIT_MAX, Rounding


class Grid(NamedTuple):
    """The values of a row, in units of its scale: the largest one, and the rounding below it."""

    most: float
    rounded: Callable[[torch.Tensor], torch.Tensor]

    def nearest(self, units: torch.Tensor) -> torch.Tensor:
        """Return the nearest value of each number."""
        return self.rounded(units.clamp(-self.most, self.most))


SIX_BITS = Grid(SIX_BIT_MAX, torch.round)
FP8 = Grid(FP8_MAX, lambda units: units.to(torch.float8_e4m3fn).to(torch.float32))


class RoundForOutputs:
    """Rounds pruned weights to a grid so that quantisation changes outputs less."""

    name = "rounding"
    needs_calibration = True

    def __init__(self, grid: Grid = SIX_BITS) -> None:
        self.grid = grid

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """See :class:`slidesparse.pruning.base.Pruner`. Existing zeros stay."""
        gram, weights = checked_gram(linears), linears.weights
        order = gram.diagonal().argsort(descending=True, stable=True)
        factor, _ = inverse_factor(gram[order[:, None], order], ", ".join(weights))
        stacked = torch.cat([*weights.values()])[:, order]  # a column of all takes as many launches as of one
        rounded = round_for_outputs(stacked, factor, self.grid)[:, order.argsort()].split([*map(len, weights.values())])
        return {name: one.to(weights[name].dtype) for name, one in zip(weights, rounded, strict=True)}


def rounder_after(pruner: Pruner, dtype: torch.dtype, rounding: Rounding) -> RoundForOutputs | None:
    """Return what rounds to six bits or FP8 after SparseGPT, else None: INT8 gains nothing (docs/log/rounding.md)."""
    grid = FP8 if dtype == torch.float8_e4m3fn else SIX_BITS if rounding == "6bit" else None
    return RoundForOutputs(grid) if grid is not None and isinstance(pruner, SparseGPT) else None


def round_for_outputs(weight: torch.Tensor, factor: torch.Tensor, grid: Grid = SIX_BITS) -> torch.Tensor:
    """Return a weight of a grid's values times each row's scale, ``absmax / most``, rounded to its type.

    Quantisation to nearest recovers these values: 8 bits of significand distinguish 127 steps.

    Args:
        weight: [out, in], bfloat16, float16 or float32.
        factor: From :func:`slidesparse.pruning.sparsegpt.inverse_factor`, of the same order of columns.
        grid: Six bits or FP8. INT8 gains nothing.
    """
    wide, columns, diagonal = weight.to(torch.float32), weight.shape[1], factor.diagonal()
    absmax = wide.abs().amax(1, keepdim=True)
    scale = torch.where(absmax == 0, 1.0, absmax / grid.most)
    current = wide / scale
    nearest = grid.nearest(current)
    stays = (wide == 0) | (wide.abs() == absmax)
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        errors = torch.zeros_like(current[:, start:end])
        for column in range(start, end):
            rounded = torch.where(stays[:, column], nearest[:, column], grid.nearest(current[:, column]))
            error = (current[:, column] - rounded) / diagonal[column]
            current[:, column:end] -= torch.outer(error, factor[column, column:end])
            current[:, column] = rounded
            errors[:, column - start] = error
        current[:, end:] -= errors @ factor[start:end, end:]
    return (current * scale).to(weight.dtype)
