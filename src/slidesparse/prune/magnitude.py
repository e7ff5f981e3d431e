"""Magnitude pruning: remove the smallest weights of every group."""

from __future__ import annotations

import torch

from slidesparse.prune.base import Linears, register_pruner
from slidesparse.prune.mask import magnitude_cost, masked, prune_masks
from slidesparse.weights.support import check_weight


class Magnitude:
    """Keep the largest weights of each group; no calibration."""

    name = "magnitude"
    needs_calibration = False

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """See :class:`slidesparse.prune.base.Pruner`."""
        for name, weight in linears.weights.items():
            check_weight(weight, name)
        masks = prune_masks([magnitude_cost(w) for w in linears.weights.values()], linears.pattern)
        return masked(linears.weights, masks)


register_pruner(Magnitude.name, Magnitude)
