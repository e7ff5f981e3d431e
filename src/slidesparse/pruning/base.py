"""The interface of pruning methods.

A method is called once for every set of linears that read the same input (q, k and v; gate and up; or one alone). It
takes their weights and, if it needs calibration, statistics of that common input, and returns the pruned weights. It
may change the values that it keeps, as SparseGPT does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from slidesparse.base.arguments import shown
from slidesparse.errors import InputError
from slidesparse.weights.pattern import Pattern


@dataclass(frozen=True)
class Linears:
    """Linears that read the same input.

    Attributes:
        weights: Name -> weight [out_i, in], float, unpruned.
        pattern: The pattern that all of them get.
        input_gram: ``sum over tokens of x x^T``, float32 [in, in], for methods that need calibration; its diagonal
            holds the squared column norms that Wanda reads, and the whole matrix is SparseGPT's Hessian.
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


METHODS: dict[str, Callable[[], Pruner]] = {}
"""Name -> constructor of every known method."""


def register_pruner(name: str, make: Callable[[], Pruner]) -> None:
    """Make a method known under ``name``."""
    METHODS[name] = make


def get_pruner(name: str) -> Pruner:
    """Return the method of that name.

    Raises:
        InputError: Listing the known names.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise InputError("unknown pruning method", got=shown(name), needed=f"one of {', '.join(METHODS)}")
    return METHODS[name]()
