"""Masks that prune at the least cost.

A *cost* is a non-negative number for every weight: the growth of the output's squared error when that weight alone is
removed. For magnitude pruning it is ``w^2``, for Wanda ``(w * norm of the input column)^2``. The rule below is the same
for both, and ties are broken by position (the later weight is removed), so a mask depends on its costs alone, on every
device.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from slidesparse.errors import InputError
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import check_weight, grouped, is_nonzero, require_dense


def prune_mask(weight: torch.Tensor, pattern: Pattern | str, cost: torch.Tensor | None = None) -> torch.Tensor:
    """Return the weights to keep: bool [out, in], at most ``keep`` in every group that follows the pattern.

    Args:
        weight: [out, in], any supported type.
        pattern: Uniform or partial; groups are aligned to column 0.
        cost: float32 [out, in], the cost of removing each weight; ``w^2`` (magnitude pruning) when None.

    >>> prune_mask(torch.tensor([[4.0, 3, 2, 1, 5, 6, 7, 8]]), "6:8").int().tolist()
    [[1, 1, 0, 0, 1, 1, 1, 1]]
    """
    check_weight(weight)
    return prune_masks([cost_of(weight, cost)], pattern)[0]


def cost_of(weight: torch.Tensor, cost: torch.Tensor | None) -> torch.Tensor:
    """Return a cost after checking that it fits a weight, or what magnitude pruning says when it is None.

    Raises:
        InputError: It has another shape, no values, or is no number.
    """
    if cost is None:
        return magnitude_cost(weight)
    require_dense(cost, "pruning cost")
    if cost.is_complex() or cost.dtype == torch.bool or cost.is_meta:
        raise InputError("pruning cost", got=f"{cost.dtype} on {cost.device}", needed="float32 with values")
    if cost.shape != weight.shape:
        raise InputError("pruning cost", got=list(cost.shape), needed=f"{list(weight.shape)}, as the weight")
    return cost.to(torch.float32)


def magnitude_cost(weight: torch.Tensor) -> torch.Tensor:
    """Return ``w^2``, float32 [out, in], zero for zeros only."""
    return positive_where(is_nonzero(weight), weight.to(torch.float32).square())


def positive_where(nonzero: torch.Tensor, cost: torch.Tensor) -> torch.Tensor:
    """Return a cost that is positive and finite for every weight that is not zero: float32 like ``cost``.

    Squares of tiny weights vanish in float32: they would tie with zeros and be removed. Those of huge ones overflow.
    """
    limits = torch.finfo(torch.float32)
    return cost.clamp(limits.tiny, limits.max).mul_(nonzero)  # where() takes ten times as long on a CPU


def prune_masks(costs: Sequence[torch.Tensor], pattern: Pattern | str) -> list[torch.Tensor]:
    """Return the masks of linears that read the same input, one for each cost.

    With a uniform pattern they are independent. With a partial one all of them prune the same column groups, those
    whose pruning costs least over all rows of all linears; else a fused layer (q, k, v; gate, up) would keep hardly any
    group that follows the pattern.

    Args:
        costs: float32 [out_i, in] each, one ``in`` for all, non-negative and finite.
        pattern: Uniform or partial.

    Returns:
        bool [out_i, in] each.
    """
    pattern = Pattern.parse(pattern)
    columns = {cost.shape[-1] for cost in costs}
    if len(columns) != 1:
        raise InputError("linears that read one input differ in columns", got=sorted(columns), needed="one number")
    for cost in costs:
        check_cost(cost)
    # Padding costs less than anything, so it is left out first and never displaces a weight.
    # Without gradients: a mask has none, and torch refuses to write a result that would have one into given memory.
    by_group = [grouped(cost.detach().to(torch.float32), pattern, fill=-1.0) for cost in costs]
    drops = [two_cheapest(groups) for groups in by_group]
    if not pattern.is_uniform:
        follows = cheapest_groups(by_group, drops, pattern)
        drops = [drop & follows.unsqueeze(-1) for drop in drops]
    return [~drop.flatten(1)[:, : cost.shape[1]] for drop, cost in zip(drops, costs, strict=True)]


def masked(weights: Mapping[str, torch.Tensor], masks: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return weights with +0 where their masks are False."""
    return {
        name: torch.where(mask, weight, torch.zeros((), dtype=weight.dtype))
        for (name, weight), mask in zip(weights.items(), masks, strict=True)
    }


def check_cost(cost: torch.Tensor) -> None:
    """Refuse costs that are negative, NaN or Inf."""
    if cost.numel() and not bool((cost.amin() >= 0) & (cost.amax() <= torch.finfo(torch.float32).max)):  # no NaN either
        raise InputError("a pruning cost is negative, NaN or Inf", needed="finite costs >= 0")


def cheapest_groups(groups: list[torch.Tensor], drops: list[torch.Tensor], pattern: Pattern) -> torch.Tensor:
    """Return the share of column groups whose pruning costs least over all rows of all weights: bool [n].

    The choice is the same on every device. A group of a row has two costs, whose sum has one rounding in any order; the
    rows are summed on the CPU, since a sum over many rows depends on its order.
    """
    n = groups[0].shape[1]
    total = torch.zeros(n, dtype=torch.float64, device="cpu")  # others set a default device
    for group, drop in zip(groups, drops, strict=True):
        total += torch.where(drop, group.clamp(min=0), 0.0).sum(2, dtype=torch.float64).cpu().sum(0)
    follows = torch.zeros(n, dtype=torch.bool, device="cpu")
    follows[total.argsort(stable=True)[: pattern.following(n)]] = True
    return follows.to(groups[0].device)


def two_cheapest(groups: torch.Tensor) -> torch.Tensor:
    """Return the two entries of least cost in every group, the later of equals: bool like ``groups`` [out, n, 2N].

    Args:
        groups: float32, without NaN and Inf.
    """
    flipped = groups.flip(-1)  # argmin returns the first of equals
    first = flipped.argmin(-1, keepdim=True)
    second = flipped.scatter(-1, first, torch.inf).argmin(-1, keepdim=True)
    drop = torch.zeros_like(flipped, dtype=torch.bool)
    return drop.scatter_(-1, first, True).scatter_(-1, second, True).flip(-1)
