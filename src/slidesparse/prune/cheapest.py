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
    second, tied = _second(by_place)
    drop = (by_place <= second).movedim(0, -1).contiguous()
    drop.view(-1, groups.shape[-1])[tied] = by_definition(groups.reshape(-1, groups.shape[-1])[tied])
    return drop


def kept(groups: torch.Tensor) -> torch.Tensor:
    """Return what :func:`two_cheapest` leaves, as factors: int16 like ``groups``, 0 for the two of least cost, else 1.

    On a CPU it takes less time than bools and a product with them: comparing takes six times as long as subtracting.

    Args:
        groups: int16, from -1 to 32766, so that no difference of two is too large for the type.
    """
    if groups.device.type != "cpu" or groups.numel() <= FEW:
        return (~by_definition(groups)).to(torch.int16)
    by_place = groups.movedim(-1, 0).contiguous()
    second, tied = _second(by_place)
    keep = by_place.sub_(second).clamp_(0, 1).movedim(0, -1).contiguous()
    rows = groups.reshape(-1, groups.shape[-1])
    keep.view(rows.shape)[tied] = (~by_definition(rows[tied])).to(torch.int16)
    return keep


def _second(by_place: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the second cost of each group, and the flat indices of the groups whose third cost equals it.

    Args:
        by_place: [2N, out, n], contiguous.
    """
    least, second = torch.minimum(by_place[0], by_place[1]), torch.maximum(by_place[0], by_place[1])
    third, larger = torch.full_like(least, _largest(by_place.dtype)), torch.empty_like(least)
    for costs in by_place[2:]:
        torch.minimum(third, torch.maximum(second, costs, out=larger), out=third)
        torch.minimum(second, torch.maximum(least, costs, out=larger), out=second)
        torch.minimum(least, costs, out=least)
    return second, (third == second).view(-1).nonzero().view(-1)


def _largest(dtype: torch.dtype) -> float | int:
    return torch.inf if dtype.is_floating_point else torch.iinfo(dtype).max
