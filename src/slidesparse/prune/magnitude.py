"""Magnitude pruning: remove the smallest weights of every group."""

from __future__ import annotations

import torch

from slidesparse.base.row_blocks import row_blocks
from slidesparse.prune.base import Linears, register_pruner
from slidesparse.prune.cheapest import kept, two_cheapest
from slidesparse.prune.mask import magnitude_cost, magnitude_order, masked, prune_masks
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import as_bits, check_weight, grouped


class Magnitude:
    """Keep the largest weights of each group; no calibration."""

    name = "magnitude"
    needs_calibration = False

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """See :class:`slidesparse.prune.base.Pruner`."""
        for name, weight in linears.weights.items():
            check_weight(weight, name)
        if linears.pattern.is_uniform:  # each row by itself
            return {name: self._by_rows(weight, linears.pattern) for name, weight in linears.weights.items()}
        masks = prune_masks([magnitude_cost(w) for w in linears.weights.values()], linears.pattern)
        return masked(linears.weights, masks)

    def _by_rows(self, weight: torch.Tensor, pattern: Pattern) -> torch.Tensor:
        pruned = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for rows in row_blocks(weight):
            pruned[rows] = self.prune_rows(weight[rows], pattern)
        return pruned

    def prune_rows(self, rows: torch.Tensor, pattern: Pattern) -> torch.Tensor:
        """See :class:`slidesparse.prune.base.RowPruner`."""
        order = magnitude_order(rows)
        groups = grouped(order, pattern, fill=-1)
        keep = kept(groups) if order.dtype == torch.int16 else ~two_cheapest(groups)
        # Bits times 0 or 1: a weight that goes becomes +0, whatever its sign.
        return (as_bits(rows) * keep.flatten(1)[:, : rows.shape[1]]).view(rows.dtype)


register_pruner(Magnitude.name, Magnitude)
