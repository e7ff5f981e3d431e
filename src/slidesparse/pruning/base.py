"""The interface of pruning methods.

A method is called once for every set of linears that read one input (q, k and v; gate and up; or one alone). It takes
their weights and, if it needs calibration, statistics of that input, and returns the pruned weights. It may change kept
values, as SparseGPT does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from slidesparse.weights.pattern import Pattern


@dataclass(frozen=True)
class Linears:
    """Linears that read the same input.

    Attributes:
        weights: Name -> weight [out_i, in], float, unpruned.
        pattern: Their common pattern.
        input_gram: ``sum over tokens of x x^T``, float32 [in, in], for methods that need calibration: SparseGPT's
            Hessian, with Wanda's squared column norms on its diagonal.
    """

    weights: Mapping[str, torch.Tensor]
    pattern: Pattern
    input_gram: torch.Tensor | None = None


class Pruner(Protocol):
    """A pruning method."""

    name: str
    needs_calibration: bool

    def prune(self, linears: Linears) -> dict[str, torch.Tensor]:
        """Return the pruned weights by name, in their types and shapes; removed weights are exactly zero."""
        ...
