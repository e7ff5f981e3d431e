"""Prune the layers of a model with calibration, one layer at a time.

Only one layer's weights need be on the device. The samples go through layer 0, whose linears are pruned with the
statistics of their inputs; then they go through the pruned layer 0, whose outputs are the inputs of layer 1. So every
layer is calibrated on the inputs that it will really see, the damage of earlier layers included.

Where layers are matched (:mod:`slidesparse.models.match_layer`), the samples go through the dense layers as well, and
what these give is half of what a pruned layer is trained to give.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from slidesparse.errors import InputError, first_line
from slidesparse.models.expert_grams import (
    Inputs,
    add_layer_sums,
    empty_grams,
    in_parts,
    rounding_of,
    take_inputs,
    tokens_of,
)
from slidesparse.models.expert_weights import ExpertWeight, WatchExperts, only_experts
from slidesparse.models.hooks import hooked
from slidesparse.models.match_layer import Example, Matching, match_layer
from slidesparse.models.parts import is_language_model
from slidesparse.pattern import DENSE, Pattern
from slidesparse.prune import Linears, Pruner, output_error, rounding_error
from slidesparse.quant import dequantize, quantize_rows

Batch = Mapping[str, torch.Tensor]
"""Keyword arguments of the model's forward."""


@dataclass(frozen=True)
class SetLoss:
    """The loss that pruning causes in one set of linears that read the same input.

    Attributes:
        names: The linears.
        pattern: Their pattern.
        loss: Squared error of their outputs over their energy, on the calibration inputs, before matching.
        tokens: What the router sent to an expert; None for linears, which see all tokens.
        borrowed: The tokens that an expert borrowed from its layer.
        rounding: Squared error of the pruned linears' outputs over their energy when inputs are rounded to INT8, a
            token at a time; None for experts.
    """

    names: tuple[str, ...]
    pattern: str
    loss: float
    tokens: int | None = None
    borrowed: int = 0
    rounding: float | None = None


@dataclass
class Sample:
    """A batch on its way through the layers: the hidden state, and the other arguments of each layer."""

    hidden: torch.Tensor
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class LayerStore:
    """Loads a layer's weights and keeps the pruned ones; this one has them all in the model, where they stay."""

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
        """Keep the pruned weights of a layer, and what its sets lost."""


@dataclass(frozen=True)
class LayerList:
    """The repeated layers of a model.

    Attributes:
        name: The name of the ``nn.ModuleList`` that holds them, such as ``model.layers``.
        layers: The layers, in the order in which they run.
    """

    name: str
    layers: list[nn.Module]

    def items(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the name and module of every layer."""
        yield from ((f"{self.name}.{i}", layer) for i, layer in enumerate(self.layers))


def find_layer_list(model: nn.Module, linears: Iterable[str]) -> LayerList:
    """Return the list of layers that holds all linears to be pruned.

    Raises:
        InputError: There is none; the error names linears outside the list that holds most of them.
    """
    names = list(linears)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    inside = {layer_list: [name for name in names if name.startswith(f"{layer_list}.")] for layer_list in lists}
    best = max(inside, key=lambda layer_list: len(inside[layer_list]), default=None)
    if best is None or not inside[best]:
        raise InputError(
            f"cannot calibrate {type(model).__name__} layer by layer",
            got="no list of layers with linears to prune",
            needed="a model whose layers are in one nn.ModuleList",
            remedy="use --method magnitude",
        )
    outside = [name for name in names if name not in inside[best]]
    if outside:
        raise InputError(
            f"calibration goes through {best} only, and {len(outside)} linears are outside",
            got=", ".join(outside[:3]),
            remedy="put them on the ignore list, or use --method magnitude",
        )
    return LayerList(best, list(lists[best]))


def stack_around(model: nn.Module, layer_list: LayerList) -> tuple[str, nn.Module]:
    """Return the innermost model around the layers that takes token numbers, with its name; it may be ``model`` itself.

    Of a model of text and images it is the language model, so that nothing but text is needed to run it.
    """
    name = layer_list.name
    while name:
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
        if is_language_model(module):
            return name, module
    return "", model


class _Recorded(Exception):
    """Ends a forward pass once the arguments of the last layer are recorded; no error."""


@torch.no_grad()
def record_inputs(model: nn.Module, layer_list: LayerList, batches: Iterable[Batch]) -> list[Sample]:
    """Run the modules of the stack before the layers, and record the hidden state and each layer's other arguments.

    The layers themselves do not run: they may have no weights yet.

    Args:
        model: A model in which the parameters that are used before the layers are filled.
        layer_list: From :func:`find_layer_list`.
        batches: Inputs.
    """
    samples: list[Sample] = []
    _, stack = stack_around(model, layer_list)

    def stand_in(index: int) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if index == 0:
                samples.append(Sample(hidden))
            samples[-1].arguments.append((args, kwargs))
            if index + 1 == len(layer_list.layers):
                raise _Recorded
            return hidden

        return forward

    with _forwards(layer_list.layers, [stand_in(index) for index in range(len(layer_list.layers))]):
        for batch in batches:
            before = len(samples)
            try:
                stack(**batch)
            except _Recorded:
                pass
            except torch.cuda.OutOfMemoryError:
                raise
            except Exception as error:  # a stack that is no plain chain can stumble over the stand-ins in any way
                raise InputError(
                    f"cannot calibrate {type(model).__name__} layer by layer",
                    got=first_line(error),
                    needed="layers that take a hidden state and return the next",
                    remedy="use --method magnitude",
                ) from error
            if len(samples) != before + 1 or len(samples[-1].arguments) != len(layer_list.layers):
                raise InputError(
                    f"{type(model).__name__} does not run {layer_list.name} one after the other",
                    remedy="use --method magnitude",
                )
    return samples


@torch.no_grad()
def run_around(model: nn.Module, layer_list: LayerList, batch: Batch) -> torch.Tensor:
    """Return what the stack gives for a batch when its layers give what they read; they may have no weights yet."""
    _, stack = stack_around(model, layer_list)

    def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden

    with _forwards(layer_list.layers, [forward] * len(layer_list.layers)):
        found: torch.Tensor = stack(**batch)[0]
    return found


@contextmanager
def _forwards(layers: Sequence[nn.Module], forwards: Sequence[Callable[..., torch.Tensor]]) -> Iterator[None]:
    for layer, forward in zip(layers, forwards, strict=True):
        layer.forward = forward
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own shows again


def run_layer(layer: nn.Module, sample: Sample, index: int, hidden: torch.Tensor | None = None) -> torch.Tensor:
    """Return the hidden state that a layer computes from a sample's, or from another one in its place."""
    args, kwargs = sample.arguments[index]
    out = layer(sample.hidden if hidden is None else hidden, *args, **kwargs)
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found


PruneLayer = Callable[..., tuple[dict[str, torch.Tensor], list[SetLoss]]]
"""Takes the layer, its index, the sets, its linears by name, patterns, method, samples and store; returns the pruned
weights by name, and the loss of each set."""


def prune_layers(
    model: nn.Module,
    layer_list: LayerList,
    sets: Sequence[Sequence[str]],
    patterns: Mapping[str, Pattern],
    pruner: Pruner,
    samples: Sequence[Sample],
    store: LayerStore | None = None,
    prune_layer: PruneLayer | None = None,
    experts: Mapping[str, ExpertWeight] | None = None,
    matching: Matching | None = None,
) -> Iterator[list[SetLoss]]:
    """Prune the linears of all layers in place, layer by layer; yield the losses of each layer after it.

    Args:
        model: The whole model.
        layer_list: Its layers, from :func:`find_layer_list`.
        sets: Linears that read one input, from :func:`slidesparse.models.sparsify.sets_to_prune`.
        patterns: Linear -> pattern; ``DENSE`` ones are left alone.
        pruner: The method.
        samples: From :func:`record_inputs`; each layer replaces their hidden states.
        store: Loads the layers' weights, and keeps the pruned ones.
        prune_layer: Prunes the linears of one layer; None: on all samples, in this process.
        experts: Weights of experts by name, each of which is a set of its own.
        matching: How each layer's outputs are matched with the dense model's on the samples; None: they are not. Layers
            whose experts are pruned cannot be matched.
    """
    store, prune_layer, experts = store or LayerStore(), prune_layer or _prune_layer, experts or {}
    dense = [] if matching is None else [sample.hidden for sample in samples]
    with torch.no_grad():
        for index, (name, layer) in enumerate(layer_list.items()):
            store.load(name, layer)
            here = [list(names) for names in sets if names[0].startswith(f"{name}.") and patterns[names[0]] != DENSE]
            linears: dict[str, Any] = {
                linear: experts[linear] if linear in experts else model.get_submodule(linear)
                for names in here
                for linear in names
            }
            if matching is not None:
                dense = [run_layer(layer, sample, index, hidden) for sample, hidden in zip(samples, dense, strict=True)]
            pruned = store.finished(name)
            losses: list[SetLoss] = []
            if pruned is None:
                examples = [] if matching is None or not here else _examples(layer, index, samples, dense)
                pruned, losses = prune_layer(layer, index, here, linears, patterns, pruner, samples, store)
                if matching is not None and examples:
                    _fill(linears, pruned)
                    pruned = _matched(layer, linears, pruned, examples, matching)
                store.keep(name, pruned, losses)
            _fill(linears, pruned)
            for sample in samples:
                sample.hidden = run_layer(layer, sample, index)
            store.release(name, layer)
            yield losses


def _fill(linears: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    for name, weight in weights.items():
        linears[name].weight.data.copy_(weight)


def _examples(layer: nn.Module, index: int, samples: Sequence[Sample], dense: Sequence[torch.Tensor]) -> list[Example]:
    """Return what a layer reads, and what it shall give once it is pruned; it still is dense.

    That is the mean of what the dense model gives there and of what the dense layer makes of the inputs as they are.
    The first alone asks a layer to undo what the layers before have lost, which it learns by heart from little text.
    """
    return [
        Example(sample.hidden, sample.arguments[index], (wanted + run_layer(layer, sample, index)) / 2)
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


def _prune_layer(
    layer: nn.Module,
    index: int,
    sets: Sequence[Sequence[str]],
    linears: Mapping[str, Any],
    patterns: Mapping[str, Pattern],
    pruner: Pruner,
    samples: Sequence[Sample],
    store: LayerStore,
) -> tuple[dict[str, torch.Tensor], list[SetLoss]]:
    pruned: dict[str, torch.Tensor] = {}
    losses = []
    for part in in_parts(sets, only_experts(linears)):
        grams = collect_grams(layer, index, {names[0]: linears[names[0]] for names in part}, samples)
        for names in part:
            inputs = take_inputs(names[0], linears[names[0]], grams)
            new, loss = prune_set(names, linears, patterns[names[0]], pruner, inputs, store)
            losses.append(loss)
            pruned |= new
    return pruned, losses


def prune_set(
    names: Sequence[str],
    linears: Mapping[str, Any],
    pattern: Pattern,
    pruner: Pruner,
    inputs: Inputs,
    store: LayerStore,
) -> tuple[dict[str, torch.Tensor], SetLoss]:
    """Return the pruned weights of a set of linears that read one input, and what the set lost."""
    originals = {name: store.weight(name, linears[name]) for name in names}
    new = pruner.prune(Linears(originals, pattern, inputs.gram))
    loss = output_error(originals, new, inputs.gram)
    rounding = None if inputs.rounding is None else rounding_error(new, inputs.gram, inputs.rounding)
    return new, SetLoss(tuple(names), str(pattern), loss, inputs.tokens, inputs.borrowed, rounding)


def collect_grams(
    layer: nn.Module, index: int, linears: Mapping[str, nn.Linear | ExpertWeight], samples: Iterable[Sample]
) -> dict[str, torch.Tensor]:
    """Return ``sum x x^T`` over all tokens that each linear reads, float32 [in, in] by name.

    With each comes what rounding costs: see :func:`slidesparse.models.expert_grams.rounding_of`.
    For experts there are counts and sums in place of it: see :mod:`slidesparse.models.expert_grams`.

    Raises:
        InputError: A linear is never called.
    """
    experts = only_experts(linears)
    grams: dict[str, torch.Tensor] = empty_grams(experts)

    def collect(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].detach().flatten(0, -2).to(torch.float32)
            if name not in grams:
                grams[name] = torch.zeros(x.shape[1], x.shape[1], device=x.device)
                grams[rounding_of(name)] = torch.zeros(1, 1, device=x.device)
            grams[name].addmm_(x.T, x)
            grams[rounding_of(name)] += (x - dequantize(*quantize_rows(x, torch.int8))).square().sum()

        return hook

    def see(name: str, x: torch.Tensor) -> None:
        wide = x.to(torch.float32)
        grams[name].addmm_(wide.T, wide)
        grams[tokens_of(name)] += len(x)

    plain = {name: linear for name, linear in linears.items() if isinstance(linear, nn.Module)}
    hooks = (linear.register_forward_pre_hook(collect(name)) for name, linear in plain.items())
    with hooked(hooks), WatchExperts(experts, see) if experts else nullcontext():
        for sample in samples:
            run_layer(layer, sample, index)
    silent = [name for name in plain if name not in grams]
    if silent:
        raise InputError(f"{silent[0]} is never called, so it cannot be calibrated", remedy="put it on the ignore list")
    add_layer_sums(grams, experts)
    return grams
