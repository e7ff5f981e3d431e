"""Measure how much worse a model predicts when one set of its linears is pruned to one pattern; ``plan`` chooses by it.

The measure is the mean over tokens of the Kullback-Leibler divergence from the dense model's prediction to that of the
model with this set alone pruned, in nats. To second order it equals the growth of the loss on text from the dense model
itself; unlike the loss it cannot be negative, and it is zero only when no prediction moved. A plan assumes that the
damages of different sets add up, which is an approximation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from slidesparse.errors import InputError
from slidesparse.models.layerwise import Batch, collect_grams, find_layer_list, record_inputs, run_layer
from slidesparse.pattern import DENSE, Pattern
from slidesparse.prune import Linears, Pruner


@dataclass(frozen=True)
class Sensitivity:
    """The damage that one pattern does in one set.

    Attributes:
        names: Linears that read one input; they are fused when served, and so share a pattern.
        pattern: The pattern, as text.
        damage: Divergence from the dense model, in nats a token.

    Raises:
        InputError: There are no linears, the pattern is none, or the damage is negative, NaN or Inf.
    """

    names: tuple[str, ...]
    pattern: str
    damage: float

    def __post_init__(self) -> None:
        if not self.names:
            raise InputError("linears of a measurement", got="none", needed="one or more")
        Pattern.parse(self.pattern)
        if not 0 <= self.damage < math.inf:
            raise InputError(f"damage of {self.names[0]}", got=self.damage, needed="a number from 0 on")


@torch.no_grad()
def measure_sensitivities(
    model: Any,
    sets: Sequence[Sequence[str]],
    patterns: Sequence[Pattern],
    pruner: Pruner,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    known: Mapping[tuple[str, str], float] | None = None,
) -> Iterator[Sensitivity]:
    """Prune every set to every pattern in turn, the rest of the model dense, and compare the model's predictions.

    Args:
        model: A causal language model in memory; it is as before when the iterator ends.
        sets: Linears that read one input.
        patterns: The patterns to try; ``DENSE`` needs no measuring and is skipped.
        pruner: The method that will prune.
        batches: Inputs whose statistics the method sees.
        held_out: Inputs on which predictions are compared.
        known: (first linear of a set, pattern) -> damage that was measured before.

    Yields:
        A sensitivity for every set and pattern, layer by layer.

    Raises:
        InputError: A divergence is NaN or Inf.
    """
    known = known or {}
    layer_list = find_layer_list(model, [name for names in sets for name in names])
    samples = record_inputs(model, layer_list, batches)
    dense = [F.log_softmax(model(**batch).logits.to(torch.float32), -1) for batch in held_out]
    for index, (layer_name, layer) in enumerate(layer_list.items()):
        here = [tuple(names) for names in sets if names[0].startswith(f"{layer_name}.")]
        grams = collect_grams(layer, index, {names[0]: model.get_submodule(names[0]) for names in here}, samples)
        for sample in samples:
            sample.hidden = run_layer(layer, sample, index)
        for names in here:
            gram = grams.pop(names[0])
            for pattern in patterns:
                if pattern == DENSE:
                    continue
                damage = known.get((names[0], str(pattern)))
                if damage is None:
                    damage = _damage(model, names, pattern, pruner, gram, held_out, dense)
                yield Sensitivity(names, str(pattern), damage)


def _damage(
    model: Any,
    names: Sequence[str],
    pattern: Pattern,
    pruner: Pruner,
    gram: torch.Tensor,
    held_out: Sequence[Batch],
    dense: Sequence[torch.Tensor],
) -> float:
    weights = {name: model.get_submodule(name).weight for name in names}
    originals = {name: weight.detach().clone() for name, weight in weights.items()}
    for name, pruned in pruner.prune(Linears(originals, pattern, gram)).items():
        weights[name].data.copy_(pruned)
    try:
        return mean_divergence(dense, lambda i: model(**held_out[i]).logits)
    finally:
        for name, original in originals.items():
            weights[name].data.copy_(original)


def mean_divergence(dense: Sequence[torch.Tensor], logits: Callable[[int], torch.Tensor]) -> float:
    """Return the mean over tokens of ``sum p (log p - log q)``.

    Args:
        dense: Log-probabilities ``log p`` of every batch, float32 [..., vocabulary].
        logits: Number of a batch -> logits of ``q``, like ``dense``.

    Raises:
        InputError: It is NaN or Inf.
    """
    total, tokens = 0.0, 0
    for i, log_p in enumerate(dense):
        log_q = F.log_softmax(logits(i).to(torch.float32), -1)
        total += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
        tokens += log_p.shape[:-1].numel()
    if not math.isfinite(total):
        raise InputError("the model's predictions are NaN or Inf", remedy="check the checkpoint with slidesparse eval")
    return max(total / tokens, 0.0)
