"""Magnitude pruning: remove the smallest weights of every group."""

from __future__ import annotations

import torch

from slidesparse.pruning.base import Linears
from slidesparse.pruning.mask import kept_by, magnitude_cost, masked
from slidesparse.weights.support import check_weight


class Magnitude:
    """Keep the largest weights of each group; no calibration."""

    name = "magnitude"
    needs_calibration = False

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """See :class:`slidesparse.pruning.base.Pruner`."""
        for name, weight in linears.weights.items():
            check_weight(weight, name)
        masks = (kept_by(magnitude_cost(w), linears.pattern) for w in linears.weights.values())
        return masked(linears.weights, masks)
