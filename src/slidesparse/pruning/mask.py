"""Masks that prune at the least cost.

A *cost* is a non-negative number for every weight: the growth of the output's squared error if that weight alone is
removed. For magnitude pruning it is ``w^2``, for Wanda ``(w * norm of the input column)^2``. Ties are broken by
position (the later weight is removed), so a mask depends on its costs alone, on every device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from slidesparse.weights.pattern import DENSE, Pattern
from slidesparse.weights.support import check_weight, grouped, is_nonzero


def prune_mask(weight: torch.Tensor, pattern: Pattern | str) -> torch.Tensor:
    """Return the mask of the largest weights: bool [out, in], at most ``keep`` in every group.

    Args:
        weight: [out, in], any supported type.
        pattern: The pattern; groups are aligned to column 0.

    >>> prune_mask(torch.tensor([[4.0, 3, 2, 1, 5, 6, 7, 8]]), "6:8").int().tolist()
    [[1, 1, 0, 0, 1, 1, 1, 1]]
    """
    check_weight(weight)
    return kept_by(magnitude_cost(weight), Pattern.parse(pattern))


def magnitude_cost(weight: torch.Tensor) -> torch.Tensor:
    """Return the cost ``w^2``, float32 [out, in], zero for zeros only."""
    return positive_where(is_nonzero(weight), weight.to(torch.float32).square())


def positive_where(nonzero: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """Return a cost that is positive and finite for every non-zero weight: float32 like ``cost``.

    Squares of tiny weights vanish in float32 and would tie with zeros; those of huge ones overflow.
    """
    limits = torch.finfo(torch.float32)
    return cost.clamp(limits.tiny, limits.max).mul_(nonzero)  # where() takes ten times as long on a CPU


def kept_by(cost: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Return the mask of least cost: float32 [out, in], non-negative and finite -> bool [out, in]."""
    # Without gradients: a mask has none, and torch refuses to write a result that would have one into given memory.
    return ~cheapest(cost.detach().to(torch.float32), pattern)


def masked(weights: Mapping[str, torch.Tensor], masks: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with +0 where their masks are False."""
    return {
        name: torch.where(mask, weight, torch.zeros((), dtype=weight.dtype))
        for (name, weight), mask in zip(weights.items(), masks, strict=True)
    }


def cheapest(cost: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Return the two cheapest weights of every group, none for ``DENSE``: float32 [out, in] -> bool."""
    if pattern == DENSE:
        return torch.zeros_like(cost, dtype=torch.bool)
    # Padding costs less than anything, so it never displaces a weight.
    return two_cheapest(grouped(cost, pattern, fill=-1.0)).flatten(1)[:, : cost.shape[1]]


def two_cheapest(groups: torch.Tensor) -> torch.Tensor:
    """Return the two cheapest entries of every group, the later of equals: bool like ``groups`` [out, n, 2N].

    Args:
        groups: float32, without NaN and Inf.
    """
    flipped = groups.flip(-1)  # argmin returns the first of equals
    first = flipped.argmin(-1, keepdim=True)
    second = flipped.scatter(-1, first, torch.inf).argmin(-1, keepdim=True)
    drop = torch.zeros_like(flipped, dtype=torch.bool)
    return drop.scatter_(-1, first, True).scatter_(-1, second, True).flip(-1)
