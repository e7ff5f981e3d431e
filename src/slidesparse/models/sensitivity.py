"""What pruning one set of linears to one pattern does to a model: measured once, for ``plan`` to choose by.

The measure is the mean over calibration tokens of the Kullback-Leibler divergence from the dense model's prediction to
that of the model with this set alone pruned, in nats. To second order it is what the loss grows by on text from the
dense model itself; unlike the loss it cannot be negative, and it is zero only when no prediction moved. Damages of
different sets are taken to add up, which is the approximation that a plan rests on.
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
    """What one pattern costs one set.

    Attributes:
        names: Linears that read one input; they are fused when served, and so share a pattern.
        pattern: As text.
        damage: Nats a token.
    """

    names: tuple[str, ...]
    pattern: str
    damage: float


@torch.no_grad()
def measure_sensitivities(
    model: Any,
    sets: Sequence[Sequence[str]],
    patterns: Sequence[Pattern],
    pruner: Pruner,
    batches: Sequence[Batch],
    judged: Sequence[Batch],
    known: Mapping[tuple[str, str], float] | None = None,
) -> Iterator[Sensitivity]:
    """Prune every set to every pattern in turn, the rest of the model dense, and see what the model says then.

    Args:
        model: A causal language model in memory; it is as before when the iterator ends.
        sets: Linears that read one input.
        patterns: To try; ``DENSE`` needs no measuring and is skipped.
        pruner: The method that will prune.
        batches: Inputs whose statistics the method sees.
        judged: Inputs on which predictions are compared.
        known: (first linear of a set, pattern) -> damage, measured already.

    Yields:
        One for every set and pattern, layer by layer.

    Raises:
        InputError: When a divergence is NaN or Inf.
    """
    known = known or {}
    layer_list = find_layer_list(model, [name for names in sets for name in names])
    samples = record_inputs(model, layer_list, batches)
    dense = [F.log_softmax(model(**batch).logits.to(torch.float32), -1) for batch in judged]
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
                    damage = _damage(model, names, pattern, pruner, gram, judged, dense)
                yield Sensitivity(names, str(pattern), damage)


def _damage(
    model: Any,
    names: Sequence[str],
    pattern: Pattern,
    pruner: Pruner,
    gram: torch.Tensor,
    judged: Sequence[Batch],
    dense: Sequence[torch.Tensor],
) -> float:
    weights = {name: model.get_submodule(name).weight for name in names}
    originals = {name: weight.detach().clone() for name, weight in weights.items()}
    for name, pruned in pruner.prune(Linears(originals, pattern, gram)).items():
        weights[name].data.copy_(pruned)
    try:
        return mean_divergence(dense, lambda i: model(**judged[i]).logits)
    finally:
        for name, original in originals.items():
            weights[name].data.copy_(original)


def mean_divergence(dense: Sequence[torch.Tensor], logits: Callable[[int], torch.Tensor]) -> float:
    """Mean over tokens of ``sum p (log p - log q)``.

    Args:
        dense: Log-probabilities ``log p`` of every batch, float32 [..., vocabulary].
        logits: Number of a batch -> logits of ``q``, like ``dense``.

    Raises:
        InputError: When it is NaN or Inf.
    """
    total, tokens = 0.0, 0
    for i, log_p in enumerate(dense):
        log_q = F.log_softmax(logits(i).to(torch.float32), -1)
        total += float((log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64))
        tokens += log_p.shape[:-1].numel()
    if not math.isfinite(total):
        raise InputError("the model's predictions are NaN or Inf", remedy="check the checkpoint with slidesparse eval")
    return max(total / tokens, 0.0)
