"""Find an order of a weight's columns in which a pattern takes less away.

A pattern of 2N columns leaves two weights out of each group of 2N neighbours. Where a small weight stands among large
ones it goes for nothing; where three small ones stand together, a large one of another group goes in the place of the
third. So columns are exchanged between groups as long as that lowers what the mask takes away, the sum over rows of the
two smallest scores of each group. Source: Pool and Yu, "Channel Permutations for N:M Sparsity" (2021), whose search
tries all pairs of groups; here groups are paired at random, and every pair exchanges the two columns that gain most.
"""

from __future__ import annotations

import torch

SWEEPS = 100
"""Times that all groups are paired at random."""

ROWS = 256
"""Rows that the search looks at, at most: time grows with them. On one random weight four times as many rows, in twice
as many sweeps, gained a tenth more."""

MOST_ITEMS = 1 << 26
"""Numbers of a tensor that the search makes at a time, 256 MB."""


def taken(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Return what a mask takes away of scores [rows, columns], whole groups only: float32, a single number."""
    groups: torch.Tensor = scores[:, : scores.shape[1] // group * group].unflatten(1, (-1, group))
    return groups.topk(2, -1, largest=False).values.sum()


def better_order(scores: torch.Tensor, group: int, seed: int) -> torch.Tensor:
    """Return an order of columns in which a mask takes no more away than now.

    Args:
        scores: float32 [rows, columns], not negative: what taking a weight away costs.
        group: Columns of a group, 2N; those past the last whole group stay where they are.
        seed: Of the pairs, and of the rows where there are more than :data:`ROWS`.

    Returns:
        int64 [columns]: the column that comes to each place.
    """
    draw = torch.Generator().manual_seed(seed)
    if len(scores) > ROWS:
        scores = scores[torch.randperm(len(scores), generator=draw)[:ROWS].to(scores.device)]
    device, count = scores.device, scores.shape[1] // group
    order = torch.arange(scores.shape[1], device=device)
    at_once = max(1, MOST_ITEMS // (len(scores) * group * group))
    for _ in range(SWEEPS if count > 1 else 0):
        pairs = torch.randperm(count, generator=draw)[: count // 2 * 2].view(-1, 2).to(device)
        for some in pairs.split(at_once):
            places = some.unsqueeze(-1) * group + torch.arange(group, device=device)  # [pairs, 2, group]
            columns = order[places]
            gains = exchange_gains(scores[:, columns[:, 0]], scores[:, columns[:, 1]])
            best, which = gains.flatten(1).max(1)
            pair = (best > 0).nonzero().flatten()
            x, y = places[pair, 0, which[pair] // group], places[pair, 1, which[pair] % group]
            order[x], order[y] = order[y], order[x]
    return order


def exchange_gains(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return how much less a mask takes away when column i of a group and column j of another change places.

    Args:
        a: float32 [rows, pairs, group], the scores of one group of each pair.
        b: The same of the other.

    Returns:
        float32 [pairs, group, group].
    """
    sum_a, high_a, now_a = _without_each(a)
    sum_b, high_b, now_b = _without_each(b)
    # Of two numbers and a third the two smallest are their sum less the largest.
    new_a = sum_a.unsqueeze(3) + b.unsqueeze(2) - torch.maximum(high_a.unsqueeze(3), b.unsqueeze(2))
    new_b = sum_b.unsqueeze(2) + a.unsqueeze(3) - torch.maximum(high_b.unsqueeze(2), a.unsqueeze(3))
    return (now_a + now_b).sum(0)[:, None, None] - new_a.sum(0) - new_b.sum(0)


def _without_each(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum of the two smallest of a group without each column, the larger of them, and the sum with all."""
    one, two, three = scores.topk(3, -1, largest=False).values.split(1, -1)
    # Where scores are equal it does not matter which of them is left out.
    low = torch.where(scores <= one, two, one)
    high = torch.where(scores <= two, three, two)
    return low + high, high, (one + two).squeeze(-1)
