"""The two entries of least cost in every group, the later of equals: by definition, and fast on a CPU."""

from __future__ import annotations

import torch

FEW = 1 << 12
"""Entries up to which the definition is as fast: it takes fewer operations."""


def two_cheapest(groups: torch.Tensor) -> torch.Tensor:
    """Return the two entries of least cost in every group, the later of equals: bool like ``groups`` [out, n, 2N].

    Args:
        groups: float32 or int16, without NaN and below the largest number of the type.
    """
    if groups.device.type != "cpu" or groups.numel() <= FEW:
        return by_definition(groups)
    return by_position(groups)


def by_definition(groups: torch.Tensor) -> torch.Tensor:
    """See :func:`two_cheapest`."""
    flipped = groups.flip(-1)  # argmin returns the first of equals
    first = flipped.argmin(-1, keepdim=True)
    second = flipped.scatter(-1, first, _largest(groups.dtype)).argmin(-1, keepdim=True)
    drop = torch.zeros_like(flipped, dtype=torch.bool)
    return drop.scatter_(-1, first, True).scatter_(-1, second, True).flip(-1)


def by_position(groups: torch.Tensor) -> torch.Tensor:
    """See :func:`two_cheapest`. Finds the least three costs of each group, from one position of all groups at a time.

    So an instruction compares many groups. Where the third cost equals the second, the definition decides: in some
    groups of a thousand.
    """
    by_place = groups.movedim(-1, 0).contiguous()
    least, second = torch.minimum(by_place[0], by_place[1]), torch.maximum(by_place[0], by_place[1])
    third = torch.full_like(least, _largest(groups.dtype))
    for costs in by_place[2:]:
        third = torch.minimum(third, torch.maximum(second, costs))
        second = torch.minimum(second, torch.maximum(least, costs))
        least = torch.minimum(least, costs)
    drop = (by_place <= second).movedim(0, -1).contiguous()
    tied = (third == second).nonzero(as_tuple=True)
    if len(tied[0]):
        drop[tied] = by_definition(groups[tied])
    return drop


def _largest(dtype: torch.dtype) -> float | int:
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max
