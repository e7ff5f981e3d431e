"""Round weights to integers so that outputs stay near, not each weight.

Rounding to nearest makes an error in each weight that has nothing to do with the others'. Outputs need not suffer from
it: with ``G = sum x x^T`` over the inputs and errors ``d`` of a row, in steps of its scale, their squared error is
``d G d^T``, and an error in one weight can make up for those in others. Coordinate descent (Behdin et al., "QuantEase",
2023) goes through the columns and takes from each integer what makes that sum least, ``rint((d G)_j / G_jj)``: no step
makes outputs worse than rounding to nearest does.

Scales do not change: a row's largest weight stays where it is. So do zeros, whatever pattern they follow.
"""

from __future__ import annotations

import torch

from slidesparse.prune.base import Linears, Pruner
from slidesparse.prune.gram import checked_gram
from slidesparse.prune.sparsegpt import DAMPING
from slidesparse.weights.quant import INT8_MAX, SIX_BIT_MAX, Rounding

PASSES = 4
"""How often all columns are gone through; later passes gain next to nothing."""

BLOCK = 128
"""Columns whose steps reach the other columns together, in one product."""

AT_ONCE = 2**27
"""Weights that are rounded at a time; there are four float32 matrices of this size."""


class RoundedForOutputs:
    """A pruning method whose weights are rounded so that quantising them as INT8 takes less from the outputs.

    Args:
        method: The method; the calibration that it may need is needed here.
        recipe: How they will be quantised.
    """

    needs_calibration = True

    def __init__(self, method: Pruner, recipe: Rounding) -> None:
        self.name, self.method = method.name, method
        self.most = SIX_BIT_MAX if recipe == "6bit" else INT8_MAX

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """See :class:`slidesparse.prune.base.Pruner`."""
        gram = checked_gram(linears)
        return {name: self.round(weight, gram) for name, weight in self.method.prune(linears).items()}

    def round(self, weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
        """Round a weight that is pruned: see :func:`round_for_outputs`."""
        return round_for_outputs(weight, gram, self.most, DAMPING * float(gram.diagonal().mean(dtype=torch.float64)))


def round_for_outputs(weight: torch.Tensor, gram: torch.Tensor, most: float, damping: float) -> torch.Tensor:
    """Return a weight that is a multiple of each row's scale, ``absmax / most``, but for the rounding of its type.

    Quantising it to nearest gives these multiples: 8 bits of significand tell 127 steps apart.

    Args:
        weight: [out, in], bfloat16, float16 or float32.
        gram: ``sum over tokens of x x^T``, float32 [in, in].
        most: The largest integer: 127 for INT8, 31 for six bits.
        damping: What is added to the diagonal of ``gram``, so that no weight is moved for inputs that are hardly there.
    """
    rows = max(AT_ONCE // weight.shape[1], 1)
    damped = gram.clone()
    damped.diagonal().add_(damping)
    return torch.cat([_rounded(part, damped, most) for part in weight.split(rows)])


def _rounded(weight: torch.Tensor, gram: torch.Tensor, most: float) -> torch.Tensor:
    wide = weight.to(torch.float32)
    absmax = wide.abs().amax(1, keepdim=True)
    scale = torch.where(absmax == 0, 1.0, absmax / most)
    exact = wide / scale
    integers = exact.round()
    free = (wide != 0) & (wide.abs() < absmax)
    errors, diagonal = (integers - exact) @ gram, gram.diagonal()
    for _ in range(PASSES):
        moved = False
        for start in range(0, weight.shape[1], BLOCK):
            part = slice(start, min(start + BLOCK, weight.shape[1]))
            steps = _descend(integers[:, part], errors[:, part], gram[part, part], diagonal[part], free[:, part], most)
            if bool(steps.any()):
                errors += steps @ gram[part]
                moved = True
        if not moved:
            break
    return (integers * scale).to(weight.dtype)


def _descend(
    integers: torch.Tensor,
    errors: torch.Tensor,
    gram: torch.Tensor,
    diagonal: torch.Tensor,
    free: torch.Tensor,
    most: float,
) -> torch.Tensor:
    """Take steps in some columns, and return them; ``integers`` change in place."""
    before, errors = integers.clone(), errors.clone()
    for column in range(integers.shape[1]):
        own = integers[:, column]
        wanted = (own - (errors[:, column] / diagonal[column]).round()).clamp_(-most, most)
        step = torch.where(free[:, column], wanted - own, 0.0)
        own += step
        errors.addr_(step, gram[column])
    return integers - before
