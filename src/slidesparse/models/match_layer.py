"""Train what pruning left of a layer, so that the layer's outputs come nearer to those of the dense model.

Pruning methods look at one linear at a time. What they cannot see is how the errors of a layer's linears meet in its
output, and how inputs drift once the layers before are pruned. So a pruned layer is trained for some hundred steps:
the kept weights move, and zeros stay zero. Norms and biases stay too: training them gained nothing.

The sources of the idea train one layer after the other too: Guo et al., "EBFT: Effective and Block-Wise Fine-Tuning for
Sparse LLMs" (2024), and Yang et al., "Wanda++: Pruning Large Language Models via Regional Gradients" (2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slidesparse.weights.support import is_nonzero

RATE = 0.004
"""Largest step of a number, as a share of the root mean square of the layer's kept weights: so the scale of weights
does not matter."""

WARM_UP = 10
"""Steps in which the rate grows, since Adam knows little of the gradients at first. Then it falls along a cosine."""

BETAS = (0.9, 0.95)
"""Adam's: the second is lower than usual, since there are few steps."""

EPSILON = 1e-12
"""Adam's: far below any gradient, of which single weights have tiny ones."""

GRADIENT = 1 / 64
"""Root mean square of an output's gradient at the beginning. Adam does not mind, but FP16 does: sums over thousands of
tokens stay finite, and small ones do not vanish."""


@dataclass(frozen=True)
class Matching:
    """How layers are matched: ``steps`` for each, of one example each, in an order that ``seed`` decides."""

    steps: int
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """A hidden state that a layer reads, its other arguments by position and by name, and the hidden state wanted."""

    hidden: torch.Tensor
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    wanted: torch.Tensor


@torch.no_grad()
def match_layer(
    layer: nn.Module, free: Mapping[str, torch.dtype], examples: Sequence[Example], matching: Matching
) -> dict[str, torch.Tensor]:
    """Return better values for the pruned weights of a layer, in the types in which they are stored.

    A layer whose outputs came no nearer with the values in these types keeps those that it has. Rounding to 8 bits
    comes after that.
    """
    training = _Training(layer, free)
    begin = training.stored()
    training.run(examples, matching)
    found = training.stored()
    # Written so that a layer which ran into NaN is not taken.
    return found if training.error(found, examples) < training.error(begin, examples) else begin


class _Training:
    """The pruned weights of a layer in float32, and its other parameters as they are."""

    def __init__(self, layer: nn.Module, free: Mapping[str, torch.dtype]) -> None:
        self.layer, self.types = layer, free
        self.now = {name: value.detach() for name, value in layer.named_parameters()}
        self.values = {name: self.now[name].to(torch.float32, copy=True).requires_grad_() for name in free}
        self.kept = {name: is_nonzero(self.now[name]) for name in free}

    def stored(self) -> dict[str, torch.Tensor]:
        """Return the weights in the types in which they are stored."""
        return {name: value.to(self.types[name]) for name, value in self._held().items()}

    def error(self, stored: Mapping[str, torch.Tensor], examples: Sequence[Example]) -> float:
        """Return the squared error of the layer's outputs with some values of the weights."""
        return math.fsum(float(self._squared_error(stored, example)) for example in examples)

    def run(self, examples: Sequence[Example], matching: Matching) -> None:
        """Take all steps."""
        factor = self._factor(examples)
        rate = RATE * self._size()
        optimiser = torch.optim.Adam(self.values.values(), lr=rate, betas=BETAS, eps=EPSILON)
        generator = torch.Generator().manual_seed(matching.seed)
        order: list[int] = []
        for step in range(matching.steps):
            order = order or torch.randperm(len(examples), generator=generator).tolist()
            for group in optimiser.param_groups:
                group["lr"] = rate * _share(step, matching.steps)
            optimiser.zero_grad()
            with torch.enable_grad():
                example = examples[order.pop()]
                (factor * self._squared_error(self._held(), example)).backward()
            optimiser.step()

    def _factor(self, examples: Sequence[Example]) -> float:
        """Return what makes gradients of outputs :data:`GRADIENT` in size: FP16 would round those of a mean to 0."""
        error, count = self.error(self.stored(), examples), sum(example.wanted.numel() for example in examples)
        size = math.sqrt(error / count)
        return GRADIENT / (2 * size) if 0 < size < math.inf else 1.0

    def _held(self) -> dict[str, torch.Tensor]:
        """Return the weights, of which pruned ones are zero and get no gradient."""
        return {name: value * self.kept[name] for name, value in self.values.items()}

    def _squared_error(self, weights: Mapping[str, torch.Tensor], example: Example) -> torch.Tensor:
        running = {name: value.to(self.now[name].dtype) for name, value in weights.items()}
        args, kwargs = example.arguments
        out = torch.func.functional_call(self.layer, {**self.now, **running}, (example.hidden, *args), kwargs)
        hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return (hidden.to(torch.float32) - example.wanted.to(torch.float32)).square().sum()

    def _size(self) -> float:
        """Return the root mean square of all kept weights."""
        squares = math.fsum(float(self.now[name].to(torch.float32).square().sum()) for name in self.kept)
        return math.sqrt(squares / max(sum(int(kept.sum()) for kept in self.kept.values()), 1))


def _share(step: int, steps: int) -> float:
    return min(1.0, (step + 1) / WARM_UP) * (1 + math.cos(math.pi * step / steps)) / 2
