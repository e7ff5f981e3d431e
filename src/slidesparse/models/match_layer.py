"""Train the kept weights of a pruned layer, so that its outputs come nearer to those of the dense model.

Pruning methods look at one linear at a time. They cannot see how the errors of a layer's linears add up in its output,
or how inputs drift once earlier layers are pruned. So a pruned layer is trained for some hundred steps: the kept
weights move, and zeros stay zero. Norms and biases stay too: training them gained nothing.

Sources, which train layer by layer too: Guo et al., "EBFT: Effective and Block-Wise Fine-Tuning for Sparse LLMs"
(2024), and Yang et al., "Wanda++: Pruning Large Language Models via Regional Gradients" (2025).
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
"""Peak learning rate, as a share of the root mean square of the layer's kept weights."""

WARM_UP = 10
"""Steps of linear warm-up, before the learning rate falls along a cosine."""

BETAS = (0.9, 0.95)
"""Adam's; the second is lower than usual, since there are few steps."""

EPSILON = 1e-12
"""Adam's; far below any gradient."""

GRADIENT = 1 / 64
"""Root mean square of an output's gradient at the start. FP16 needs it: sums over thousands of tokens stay finite, and
small ones do not vanish."""


@dataclass(frozen=True)
class Matching:
    """Options of matching: ``steps`` for each layer, of one example each, in the order that ``seed`` decides."""

    steps: int
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """A layer's hidden state, its other arguments by position and by name, and the wanted output."""

    hidden: torch.Tensor
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    wanted: torch.Tensor


@torch.no_grad()
def match_layer(
    layer: nn.Module, free: Mapping[str, torch.dtype], examples: Sequence[Example], matching: Matching
) -> dict[str, torch.Tensor]:
    """Return better values for the pruned weights of a layer, in the types in which they are stored.

    A layer whose outputs came no nearer keeps its weights. Rounding to 8 bits comes later.
    """
    training = _Training(layer, free)
    before = training.stored()
    training.run(examples, matching)
    after = training.stored()
    # Written so that NaN is not taken.
    return after if training.error(after, examples) < training.error(before, examples) else before


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
        """Return the factor that scales gradients of outputs to :data:`GRADIENT`: FP16 would round a mean's to 0."""
        error, count = self.error(self.stored(), examples), sum(example.wanted.numel() for example in examples)
        size = math.sqrt(error / count)
        return GRADIENT / (2 * size) if 0 < size < math.inf else 1.0

    def _held(self) -> dict[str, torch.Tensor]:
        """Return the weights; pruned ones are zero and get no gradient."""
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
