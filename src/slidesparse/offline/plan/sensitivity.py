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
from torch import nn

from slidesparse.errors import InputError
from slidesparse.models.expert_weights import ExpertWeight, only_experts
from slidesparse.models.grams import collect_grams, in_parts, take_inputs
from slidesparse.models.layer_stack import Batch, Sample, advance, find_layer_list, record_inputs, run_rest, try_record
from slidesparse.models.layerwise import prune_layers
from slidesparse.prune import Linears, Pruner
from slidesparse.weights.pattern import DENSE, Pattern

TOKENS_AT_ONCE = 16
"""Tokens whose predictions are in float32 at a time: with 152,000 words a copy takes 10 MB, and a window's 1.2 GB. Few
enough that the memory of the last ones is used again: on a CPU new memory took most of the time."""


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
    wanted: Mapping[tuple[str, ...], Sequence[Pattern]],
    pruner: Pruner,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    experts: Mapping[str, ExpertWeight] | None = None,
) -> Iterator[Sensitivity]:
    """Prune every set to every pattern in turn, the rest of the model dense, and compare the model's predictions.

    Args:
        model: A causal language model in memory; it is as before when the iterator ends.
        wanted: Linears that read one input, or the names under which the weights of all experts of a layer are pruned
            -> the patterns to try, none of them dense, and those of experts uniform; there may be none.
        pruner: The method that will prune.
        batches: Inputs whose statistics the method sees, if it needs calibration.
        held_out: Inputs on which predictions are compared.
        experts: Weights of the experts among the sets, by name.

    Yields:
        A sensitivity for every set and pattern, layer by layer.

    Raises:
        InputError: A divergence is NaN or Inf.
    """
    experts = experts or {}
    layer_list = find_layer_list(model, [name for names in wanted for name in names])
    samples = record_inputs(model, layer_list, batches) if pruner.needs_calibration else []
    before = try_record(model, layer_list, held_out)
    dense = [model(**batch).logits for batch in held_out]

    def predict(i: int) -> Any:
        return run_rest(model, layer_list, held_out[i], before[i], index) if before else model(**held_out[i])

    for index, (layer_name, layer) in enumerate(layer_list.items()):
        here = [names for names, some in wanted.items() if some and names[0].startswith(f"{layer_name}.")]
        sets = [several for names in here for several in _together(names, experts)]
        linears = (name for several in sets for name in several)
        weights: dict[str, Any] = {name: experts.get(name) or model.get_submodule(name) for name in linears}
        of_layer = _grams(layer, index, weights, sets, samples)
        for names in here:
            together = _together(names, experts)
            of_set = of_layer or _grams(layer, index, weights, together, samples)
            shared: dict[str, Any] | None = {} if len(together) == 1 else None  # all experts' would take much memory
            for pattern in wanted[names]:
                new: dict[str, torch.Tensor] = {}
                for part in in_parts(together, only_experts(weights)):
                    grams = of_set or _grams(layer, index, weights, part, samples)
                    for several in part:
                        own = {name: weights[name].weight for name in several}
                        new |= pruner.prune(Linears(own, pattern, grams.get(several[0]), shared))
                damage = _damage(weights, new, lambda: mean_divergence(dense, lambda i: predict(i).logits))
                yield Sensitivity(names, str(pattern), damage)
        advance(layer, index, [*samples, *before])


def _grams(
    layer: nn.Module, index: int, weights: Mapping[str, Any], sets: Sequence[Sequence[str]], samples: Sequence[Sample]
) -> dict[str, torch.Tensor]:
    """Return gram matrices of inputs by first name; none without text, or where memory does not hold all of them."""
    heads = {names[0]: weights[names[0]] for names in sets}
    if not samples or not heads or len(in_parts(sets, only_experts(heads))) > 1:
        return {}
    sums = collect_grams(layer, index, heads, samples)
    return {head: take_inputs(head, one, sums).gram for head, one in heads.items()}


@torch.no_grad()
def damage_together(
    model: Any,
    sets: Sequence[Sequence[str]],
    patterns: Mapping[str, Pattern],
    pruner: Pruner,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    experts: Mapping[str, ExpertWeight] | None = None,
) -> float:
    """Prune a model in place as a plan says, and return the divergence of all of it from the dense model."""
    experts = experts or {}
    dense = [model(**batch).logits for batch in held_out]
    alone = [several for names in sets for several in _together(names, experts)]
    of_all = {name: patterns[names[0]] for names in sets for several in _together(names, experts) for name in several}
    if pruner.needs_calibration:
        layer_list = find_layer_list(model, of_all)
        samples = record_inputs(model, layer_list, batches)
        for _ in prune_layers(model, layer_list, alone, of_all, pruner, samples, experts=experts):
            pass
    else:
        for several in (one for one in alone if of_all[one[0]] != DENSE):
            weights = {name: (experts.get(name) or model.get_submodule(name)).weight for name in several}
            for name, pruned in pruner.prune(Linears(weights, of_all[several[0]])).items():
                weights[name].data.copy_(pruned)
    return mean_divergence(dense, lambda i: model(**held_out[i]).logits)


def _together(names: Sequence[str], experts: Mapping[str, ExpertWeight]) -> list[tuple[str, ...]]:
    """Return what a method sees together of a set: all linears of it, and every expert alone."""
    alone: list[tuple[str, ...]] = [(name,) for name, one in experts.items() if one.layer in names]
    return alone or [tuple(names)]


def _damage(weights: Mapping[str, Any], pruned: dict[str, torch.Tensor], divergence: Callable[[], float]) -> float:
    _exchange(weights, pruned)
    try:
        return divergence()
    finally:
        _exchange(weights, pruned)


def _exchange(weights: Mapping[str, Any], others: dict[str, torch.Tensor]) -> None:
    """Exchange weights of a model for others, one at a time."""
    for name, other in others.items():
        own = weights[name].weight
        others[name] = own.detach().clone()
        own.data.copy_(other)


def mean_divergence(dense: Sequence[torch.Tensor], logits: Callable[[int], torch.Tensor]) -> float:
    """Return the mean over tokens of ``sum p (log p - log q)``.

    Its terms have both signs, and nearly cancel where the models hardly differ. Since probabilities sum to 1, it is
    ``sum p (exp(d) - 1 - d)`` with ``d = log q - log p``: no term is negative, so float32 keeps its digits.

    Args:
        dense: Logits of ``p`` of every batch [..., vocabulary], in the type in which the model gives them.
        logits: Number of a batch -> logits of ``q``, like ``dense``.

    Raises:
        InputError: It is NaN or Inf.
    """
    total, tokens = 0.0, 0
    for i, of_p in enumerate(dense):
        several = (one.flatten(0, -2).split(TOKENS_AT_ONCE) for one in (of_p, logits(i)))
        pairs = list(zip(*several, strict=True))
        near = float(sum(_divergence(*pair) for pair in pairs))
        total += near if math.isfinite(near) else float(sum(_divergence(*pair, far=True) for pair in pairs))
        tokens += of_p.shape[:-1].numel()
    if not math.isfinite(total):
        raise InputError("the model's predictions are NaN or Inf", remedy="check the checkpoint with slidesparse eval")
    return max(total / tokens, 0.0)


def _divergence(of_p: torch.Tensor, of_q: torch.Tensor, *, far: bool = False) -> torch.Tensor:
    """Return the sum over some tokens, float64; Inf or NaN where ``exp(d)`` is too large, unless this is looked at."""
    log_p, log_q = (F.log_softmax(logits, -1, dtype=torch.float32) for logits in (of_p, of_q))
    d, p = log_q - log_p, log_p.exp_()
    terms = d.expm1().sub_(d).mul_(p)
    if far:
        terms = torch.where(d < 1, terms, log_q.exp() - p - p * d)
    return terms.sum(-1).sum(dtype=torch.float64)
