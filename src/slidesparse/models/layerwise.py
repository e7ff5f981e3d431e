"""Prune the layers of a model with calibration, one layer at a time.

Only one layer's weights need be on the device. The samples go through layer 0, whose linears are pruned with the
statistics of their inputs; then they go through the pruned layer 0, whose outputs are the inputs of layer 1. So every
layer is calibrated on the inputs that it will really see, the damage of earlier layers included.

Where layers are matched (:mod:`slidesparse.models.match_layer`), the samples go through the dense layers as well,
whose outputs are half of a pruned layer's target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from slidesparse.models.expert_weights import ExpertWeight
from slidesparse.models.grams import Inputs
from slidesparse.models.layer_stack import LayerList, Sample, advance, run_layer
from slidesparse.models.match_layer import Example, Matching, match_layer
from slidesparse.pruning import Linears, Pruner, output_error, rounding_error
from slidesparse.weights.pattern import Pattern


@dataclass(frozen=True)
class SetLoss:
    """The loss that pruning causes in one set of linears that read the same input.

    Attributes:
        names: The linears.
        pattern: Their pattern.
        loss: Squared error of their outputs over their energy, on the calibration inputs, before matching.
        tokens: Number of tokens sent to an expert; None for linears, which see all tokens.
        borrowed: Number of tokens that an expert borrowed from its layer.
        rounding: Squared error of the pruned linears' outputs over their energy when inputs are rounded to INT8, a
            token at a time; None for experts.
        weights: The same when the pruned weights are rounded for their outputs, all tokens counted alike; None where
            they are not.
    """

    names: tuple[str, ...]
    pattern: str
    loss: float
    tokens: int | None = None
    borrowed: int = 0
    rounding: float | None = None
    weights: float | None = None


class LayerStore:
    """Loads a layer's weights and keeps the pruned ones; here all are in the model, and stay there."""

    def load(self, name: str, layer: nn.Module) -> None:
        """Make a layer ready to run."""

    def release(self, name: str, layer: nn.Module) -> None:
        """Free the weights of a layer that is done."""

    def weight(self, name: str, linear: nn.Linear | ExpertWeight) -> torch.Tensor:
        """Return the weight to prune: [out, in], in the type in which it is stored."""
        return linear.weight.detach()

    def finished(self, name: str) -> dict[str, torch.Tensor] | None:
        """Return the pruned weights of a layer that an earlier run finished; None when there was none."""
        return None

    def keep(self, name: str, weights: dict[str, torch.Tensor], losses: Sequence[SetLoss]) -> None:
        """Keep the pruned weights of a layer, and the losses of its sets."""


WeightOf = Callable[[str, Any], torch.Tensor]
"""Returns the weight [out, in] to prune, in the type in which it is stored, of a linear's name and the linear."""

PruneLayer = Callable[..., tuple[dict[str, torch.Tensor], list[SetLoss]]]
"""Takes the layer, its index, the sets, its linears by name, patterns, method, samples and a :data:`WeightOf`; returns
the pruned weights by name, and the loss of each set."""


def prune_layers(
    model: nn.Module,
    layer_list: LayerList,
    sets: Sequence[Sequence[str]],
    patterns: Mapping[str, Pattern],
    pruner: Pruner,
    samples: Sequence[Sample],
    prune_layer: PruneLayer,
    store: LayerStore | None = None,
    experts: Mapping[str, ExpertWeight] | None = None,
    matching: Matching | None = None,
    rounder: Pruner | None = None,
) -> Iterator[list[SetLoss]]:
    """Prune the linears of all layers in place, layer by layer; yield the losses of each layer after it.

    Args:
        model: The whole model.
        layer_list: Its layers, from :func:`find_layer_list`.
        sets: Linears that read one input, from :func:`slidesparse.models.sparsify.sets_to_prune`.
        patterns: Linear -> pattern; ``DENSE`` ones are rounded only.
        pruner: The method.
        samples: From :func:`record_inputs`; each layer replaces their hidden states.
        prune_layer: :meth:`slidesparse.models.shared_layers.SharedLayers.prune_layer`.
        store: Loads the layers' weights, and keeps the pruned ones; None: all are in the model.
        experts: Weights of experts by name, each of which is a set of its own.
        matching: Trains each layer's outputs to match the dense model's on the samples; None: no matching. Layers with
            pruned experts cannot be matched.
        rounder: Rounds each layer's weights in the end; None: no rounding.
    """
    store, experts = store or LayerStore(), experts or {}
    dense = [] if matching is None else [sample.fork() for sample in samples]
    with torch.no_grad():
        for index, (name, layer) in enumerate(layer_list.items()):
            store.load(name, layer)
            here = [list(names) for names in sets if names[0].startswith(f"{name}.")]
            inside = (linear for names in here for linear in names)
            linears: dict[str, Any] = {linear: experts.get(linear) or model.get_submodule(linear) for linear in inside}
            advance(layer, index, dense)
            pruned = store.finished(name)
            losses: list[SetLoss] = []
            if pruned is None:
                examples = [] if matching is None or not here else _examples(layer, index, samples, dense)
                pruned, losses = prune_layer(layer, index, here, linears, patterns, pruner, samples, store.weight)
                if matching is not None and examples:
                    _fill(linears, pruned)
                    pruned = _matched(layer, linears, pruned, examples, matching)
                if rounder is not None and here:
                    _fill(linears, pruned)
                    exact = partial(_already_pruned, pruned)
                    pruned, rounded = prune_layer(layer, index, here, linears, patterns, rounder, samples, exact)
                    losses = [replace(one, weights=by.loss) for one, by in zip(losses, rounded, strict=True)]
                del examples  # their memory is the next layer's, whose dense run comes first
                store.keep(name, pruned, losses)
            _fill(linears, pruned)
            advance(layer, index, samples)
            store.release(name, layer)
            yield losses


def _already_pruned(weights: Mapping[str, torch.Tensor], name: str, _: Any) -> torch.Tensor:
    return weights[name]


def _fill(linears: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        linears[name].weight.data.copy_(weight)


def _examples(layer: nn.Module, index: int, samples: Sequence[Sample], dense: Sequence[Sample]) -> list[Example]:
    """Return the inputs of a layer, still dense, and the targets of its outputs once it is pruned.

    A target is the mean of the dense model's hidden state there and of the dense layer's output on the actual inputs.
    The first alone asks a layer to undo the losses of earlier layers, and it overfits to do so on little text.
    Each is halved before they are added, since the sum could overflow in FP16.
    """
    return [
        Example(sample.hidden, sample.inputs(index), wanted.hidden / 2 + run_layer(layer, sample, index) / 2)
        for sample, wanted in zip(samples, dense, strict=True)
    ]


def _matched(
    layer: nn.Module,
    linears: Mapping[str, Any],
    pruned: Mapping[str, torch.Tensor],
    examples: Sequence[Example],
    matching: Matching,
) -> dict[str, torch.Tensor]:
    """Return a pruned layer's weights after matching its outputs, in the types in which they were pruned."""
    leaf_of = {id(module): leaf for leaf, module in layer.named_modules()}
    free = {f"{leaf_of[id(linears[name])]}.weight": weight.dtype for name, weight in pruned.items()}
    return dict(zip(pruned, match_layer(layer, free, examples, matching).values(), strict=True))


def prune_set(
    names: Sequence[str],
    linears: Mapping[str, Any],
    pattern: Pattern,
    pruner: Pruner,
    inputs: Inputs,
    weight_of: WeightOf,
) -> tuple[dict[str, torch.Tensor], SetLoss]:
    """Return the pruned weights of a set of linears that read one input, and the set's loss."""
    originals = {name: weight_of(name, linears[name]) for name in names}
    new = pruner.prune(Linears(originals, pattern, inputs.gram))
    loss = output_error(originals, new, inputs.gram)
    rounding = None if inputs.rounding is None else rounding_error(new, inputs.gram, inputs.rounding)
    return new, SetLoss(tuple(names), str(pattern), loss, inputs.tokens, inputs.borrowed, rounding)
