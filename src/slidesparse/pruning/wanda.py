"""Wanda: remove the weights with the smallest products with their inputs.

Source of the score: Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (2024): ``|w|``
times the norm of the input column over the calibration tokens. Its square is the growth of the output's squared error
if that weight alone is removed.
"""

from __future__ import annotations

import torch

from slidesparse.pruning.base import Linears
from slidesparse.pruning.gram import checked_gram
from slidesparse.pruning.mask import kept_by, masked, positive_where
from slidesparse.weights.support import is_nonzero


class Wanda:
    """Keep the weights of each group that matter most to the output, unchanged."""

    name = "wanda"
    needs_calibration = True

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """See :class:`slidesparse.pruning.base.Pruner`."""
        squared_norms = checked_gram(linears).diagonal()
        masks = (kept_by(wanda_cost(w, squared_norms), linears.pattern) for w in linears.weights.values())
        return masked(linears.weights, masks)


def wanda_cost(weight: torch.Tensor, squared_norms: torch.Tensor) -> torch.Tensor:
    """Return ``w^2`` times the squared norm of its input: float32 [out, in], zero for zero weights only.

    Args:
        weight: float [out, in].
        squared_norms: float32 [in].
    """
    # A weight of an input without activations is free to remove, yet costs more than a zero.
    return positive_where(is_nonzero(weight), weight.to(torch.float32).square() * squared_norms)
