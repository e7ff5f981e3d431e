"""Round weights to six bits or FP8 so that outputs stay near, not each weight.

Rounding to nearest makes an error in each weight that has nothing to do with the others'. So columns are rounded one
after the other, and what each loses moves the columns that are still to come, by the factor that SparseGPT uses:
Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2023). Columns with
the largest inputs come first, while all others can still make up for them.

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
    """The values that a row can have, in units of its scale: the largest one, and what rounds to one up to it."""

    most: float
    rounded: Callable[[torch.Tensor], torch.Tensor]

    def nearest(self, units: torch.Tensor) -> torch.Tensor:
        """Return the nearest value of each number."""
        return self.rounded(units.clamp(-self.most, self.most))


SIX_BITS = Grid(SIX_BIT_MAX, torch.round)
FP8 = Grid(FP8_MAX, lambda units: units.to(torch.float8_e4m3fn).to(torch.float32))


class RoundForOutputs:
    """Rounds pruned weights so that quantising them to the values of a grid takes less from the outputs."""

    name = "rounding"
    needs_calibration = True

    def __init__(self, grid: Grid = SIX_BITS) -> None:
        self.grid = grid

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """See :class:`slidesparse.pruning.base.Pruner`. Existing zeros stay."""
        gram, weights = checked_gram(linears), linears.weights
        order = gram.diagonal().argsort(descending=True, stable=True)
        factor, _ = inverse_factor(gram[order[:, None], order], ", ".join(weights))
        back = order.argsort()
        return {name: round_for_outputs(one[:, order], factor, self.grid)[:, back] for name, one in weights.items()}


def rounder_after(pruner: Pruner, dtype: torch.dtype, rounding: Rounding) -> RoundForOutputs | None:
    """Return the step that rounds what a method pruned; None for floats, for plain INT8 and after other methods.

    INT8 gains nothing (docs/log/rounding.md).
    """
    grid = FP8 if dtype == torch.float8_e4m3fn else SIX_BITS if rounding == "6bit" else None
    return RoundForOutputs(grid) if grid is not None and isinstance(pruner, SparseGPT) else None


def round_for_outputs(weight: torch.Tensor, factor: torch.Tensor, grid: Grid = SIX_BITS) -> torch.Tensor:
    """Return a weight of a grid's values times each row's scale, ``absmax / most``, but for the rounding of its type.

    Quantising it to nearest gives these values: 8 bits of significand tell 127 steps apart.

    Args:
        weight: [out, in], bfloat16, float16 or float32.
        factor: From :func:`slidesparse.pruning.sparsegpt.inverse_factor`, of the same order of columns.
        grid: That of six bits or FP8. INT8 gains nothing.
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
            wanted = grid.nearest(current[:, column])
            wanted = torch.where(stays[:, column], nearest[:, column], wanted)
            error = (current[:, column] - wanted) / diagonal[column]
            current[:, column:end] -= torch.outer(error, factor[column, column:end])
            current[:, column] = wanted
            errors[:, column - start] = error
        current[:, end:] -= errors @ factor[start:end, end:]
    return (current * scale).to(weight.dtype)
