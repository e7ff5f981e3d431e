"""The two entries of least cost in every group, the later of equals."""

from __future__ import annotations

import torch


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
