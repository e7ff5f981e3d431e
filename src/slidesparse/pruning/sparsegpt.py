"""SparseGPT: remove weights column by column, compensate in later columns, then solve for the kept weights.

Source: Frantar and Alistarh, "SparseGPT: Massive Language Models Can Be Accurately Pruned in One-Shot" (2023). With
``H = sum x x^T + damping`` and ``U`` the upper Cholesky factor of ``H^-1``, removing ``w_j`` while the columns after
``j`` are free costs ``(w_j / U_jj)^2`` and moves these columns by ``-(w_j / U_jj) U_j,``. The two cheapest weights of a
group are removed when the sweep reaches it, after the updates by earlier groups.

Groups are aligned to column 0 of the whole weight. Blocks of the sweep turn many thin updates into one matrix product,
and end where groups end. Kept weights are then solved for anew, unlike in the source
(:mod:`slidesparse.pruning.solve_kept`).
"""

from __future__ import annotations

import torch

from slidesparse.base.log import LOG
from slidesparse.errors import InputError
from slidesparse.pruning.base import Linears
from slidesparse.pruning.gram import checked_gram
from slidesparse.pruning.mask import cheapest, positive_where
from slidesparse.pruning.solve_kept import better_rows, solve_kept
from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.support import is_nonzero

DAMPING = 0.01
"""Share of the mean of H's diagonal that is added to it, against dead or nearly dependent inputs."""

DAMPINGS = (DAMPING, 10 * DAMPING, 100 * DAMPING)
"""Dampings to try, in order, until the damped matrix is positive definite."""

BLOCK = 128
"""Approximate number of columns whose updates are applied together."""


class SparseGPT:
    """Remove the weights of each group that the others can best replace, and change the others."""

    name = "sparsegpt"
    needs_calibration = True

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """See :class:`slidesparse.pruning.base.Pruner`. Existing zeros stay."""
        weights, gram = linears.weights, checked_gram(linears)
        if linears.pattern == DENSE:  # to be rounded only
            return dict(weights)
        factor, damping = inverse_factor(gram, ", ".join(weights))
        stacked = torch.cat([weight.to(torch.float32) for weight in weights.values()])
        swept = sweep(stacked, factor, linears.pattern)
        del factor  # solving needs its memory
        solved = solve_kept(stacked, swept, gram, damping)
        rows = [len(weight) for weight in weights.values()]
        pruned = {}
        for (name, weight), first, second in zip(weights.items(), swept.split(rows), solved.split(rows), strict=True):
            pruned[name] = better_rows(weight, _as_stored(first, weight.dtype), _as_stored(second, weight.dtype), gram)
        return pruned


def _as_stored(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a weight in a type, clamped to its range, which compensation can leave in FP16."""
    limits = torch.finfo(dtype)
    return weight.clamp(limits.min, limits.max).to(dtype)


def inverse_factor(gram: torch.Tensor, name: str = "weight") -> tuple[torch.Tensor, float]:
    """Return ``U`` with ``U^T U = (gram + damping)^-1``, upper triangular, float32 [in, in], and the damping.

    It is computed in float64: the condition of a gram matrix is the square of its inputs'. Where float32 sums of very
    different inputs are not positive definite, the damping is ten times as large, then a hundred times, with a warning.

    Raises:
        InputError: The largest damping does not help, so ``gram`` is no gram matrix.
    """
    mean = float(gram.diagonal().mean(dtype=torch.float64))
    for share in DAMPINGS:
        damped = gram.to(torch.float64, copy=True)
        damped.diagonal().add_(share * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped  # at 405B each of these takes 23 GB
        if int(failed):
            continue
        if share > DAMPING:
            LOG.warning(
                "the Hessian of %s is not positive definite: damped by %g of its mean, not %g", name, share, DAMPING
            )
        inverse = torch.cholesky_inverse(lower)
        del lower
        upper: torch.Tensor = torch.linalg.cholesky(inverse, upper=True)
        return upper.to(torch.float32), share * mean
    raise InputError(
        f"the Hessian of {name} is not positive definite",
        got=f"it fails at column {int(failed)}",
        remedy="use more calibration text, or --method wanda",
    )


def sweep(weight: torch.Tensor, factor: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Prune a weight from its first column to its last, with updates of all later columns.

    Args:
        weight: float32 [out, in], the rows of all linears that read one input.
        factor: From :func:`inverse_factor`.
        pattern: The pattern.

    Returns:
        float32 [out, in].
    """
    columns, size = weight.shape[1], pattern.group
    current, zero = weight.clone(), ~is_nonzero(weight)
    diagonal = factor.diagonal()
    per_block = max(BLOCK // size, 1) * size
    for start in range(0, columns, per_block):
        end = min(start + per_block, columns)
        errors = torch.zeros_like(current[:, start:end])
        for first in range(start, end, size):
            last = min(first + size, end)
            drop = zero[:, first:last]
            cost = positive_where(~drop, (current[:, first:last] / diagonal[first:last]).square())
            drop = drop | cheapest(cost, pattern)
            for column in range(first, last):
                removed = torch.where(drop[:, column - first], current[:, column] / diagonal[column], 0.0)
                errors[:, column - start] = removed
                current[:, column:last] -= torch.outer(removed, factor[column, column:last])
            current[:, first:last].masked_fill_(drop, 0.0)
            current[:, last:end] -= errors[:, first - start : last - start] @ factor[first:last, last:end]
        current[:, end:] -= errors @ factor[start:end, end:]
    return current
