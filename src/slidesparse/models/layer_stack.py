"""The repeated layers of a model, and running them one at a time.

The modules before the layers run once, to record the hidden state and the other arguments of each layer. From then on
any one layer can run on its own, so that only its weights need be in memory.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from slidesparse.base.counted import counted
from slidesparse.errors import InputError, first_line
from slidesparse.models.hooks import hooked
from slidesparse.models.parts import is_language_model

Batch = Mapping[str, torch.Tensor]
"""Keyword arguments of the model's forward; without a cache, which layers that run again would go on filling."""

LayerOutput = Callable[[torch.Tensor, int], object]
"""Makes a layer's output of a hidden state and the layer's number."""

LEFT_DENSE = "leave them at dense (--layer NAME=dense)"
"""Remedy for linears outside of the layers."""

BY_MAGNITUDE = "use --method magnitude"
"""Remedy where calibration does not work."""

CHAIN = "layers that take a hidden state and return the next"


@dataclass(frozen=True)
class PassedThrough:
    """Placeholder for a layer's second output among the arguments of later ones, such as tokens to attend to."""

    layer: int


@dataclass
class Sample:
    """A batch on its way through the layers.

    Attributes:
        hidden: The hidden state.
        arguments: The other arguments of each layer, by position and by name.
        passed: Second outputs of layers, as long as later layers read them. GLM-5 passes on the indices of 2048 tokens
            for each token, int32: 8 KiB, next to 12 KiB of hidden state. Two layers' are in memory.
    """

    hidden: torch.Tensor
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    passed: dict[PassedThrough, Any] = field(default_factory=dict)

    def inputs(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a layer's other arguments."""
        args, kwargs = self.arguments[index]
        return tuple(self._present(one) for one in args), {name: self._present(one) for name, one in kwargs.items()}

    def _present(self, one: Any) -> Any:
        return self.passed[one] if isinstance(one, PassedThrough) else one

    def keep_second(self, index: int, second: Any) -> None:
        """Keep a layer's second output, and drop those that neither it nor later layers read."""
        later = [one for args, kwargs in self.arguments[index:] for one in (*args, *kwargs.values())]
        read = {one for one in later if isinstance(one, PassedThrough)}
        passed = self.passed | {PassedThrough(index): second}
        self.passed = {one: value for one, value in passed.items() if one in read}

    def fork(self) -> Sample:
        """Return a copy that can go through other layers.

        Layers pass things on in dicts and lists among their arguments, such as the keys and values that later layers
        of Gemma 3n and Gemma 4 read. So the copy has dicts and lists of its own, and shares tensors.
        """
        copies: dict[int, Any] = {}
        return Sample(self.hidden, _own_containers(self.arguments, copies), _own_containers(self.passed, copies))


def _own_containers(value: Any, copies: dict[int, Any]) -> Any:
    """Copy nested dicts and lists; ``copies`` keeps one that several layers share a single one."""
    if type(value) is tuple:
        return tuple(_own_containers(one, copies) for one in value)
    if not isinstance(value, list | MutableMapping):
        return value
    if id(value) not in copies:
        own = copies[id(value)] = copy.copy(value)
        for key in range(len(own)) if isinstance(own, list) else list(own):
            own[key] = _own_containers(own[key], copies)
    return copies[id(value)]


@dataclass(frozen=True)
class LayerList:
    """The repeated layers of a model, in the order in which they run, and the name of their ``nn.ModuleList``."""

    name: str
    layers: list[nn.Module]

    def items(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the name and module of every layer."""
        yield from ((f"{self.name}.{i}", layer) for i, layer in enumerate(self.layers))


def find_layer_list(model: nn.Module, linears: Iterable[str]) -> LayerList:
    """Return the list of layers that holds all linears to be pruned; an InputError names those outside of it."""
    names = list(linears)
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    inside = {layer_list: [name for name in names if name.startswith(f"{layer_list}.")] for layer_list in lists}
    best = max(inside, key=lambda layer_list: len(inside[layer_list]), default=None)
    if best is None or not inside[best]:
        raise _cannot_calibrate(
            model, "no list of layers with linears to prune", "a model whose layers are in one nn.ModuleList"
        )
    outside = [name for name in names if name not in inside[best]]
    if outside:
        raise InputError(
            f"pruning layer by layer goes through {best} only",
            got=f"{counted(len(outside), 'linear')} outside of it: {', '.join(outside[:3])}",
            remedy=f"put them on the ignore list (--ignore), or {LEFT_DENSE}, or {BY_MAGNITUDE}",
        )
    return LayerList(best, list(lists[best]))


def require_single_passes(model: nn.Module, layer_list: LayerList, run: Callable[[], object] | None) -> None:
    """Raise an InputError for layers that run several times in a pass, as ALBERT's: calibration would see only one."""
    if run is None:
        return
    names = {layer: name for name, layer in layer_list.items()}
    passes = Counter[str]()

    def count(layer: nn.Module, _: object) -> None:
        passes[names[layer]] += 1

    try:
        with hooked(layer.register_forward_pre_hook(count) for layer in names), torch.no_grad():
            run()
    except InputError:
        return
    for name, times in passes.items():
        if times > 1:
            raise _cannot_calibrate(
                model, f"{name}, which runs {times} times", "layers that run once in a forward pass"
            )


def _cannot_calibrate(model: nn.Module, got: str, needed: str) -> InputError:
    return InputError(
        f"cannot calibrate {type(model).__name__} layer by layer", got=got, needed=needed, remedy=BY_MAGNITUDE
    )


def stack_around(model: nn.Module, layer_list: LayerList) -> tuple[str, nn.Module]:
    """Return the innermost model around the layers that takes token numbers, with its name; it may be ``model`` itself.

    In a multimodal model it is the language model, which runs on text alone.
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
    """
    _, stack = stack_around(model, layer_list)
    samples: list[Sample] = []
    for batch in batches:
        recorded = _record(model, partial(_recorded, stack, layer_list, batch))
        if [len(sample.arguments) for sample in recorded] != [len(layer_list.layers)]:
            raise InputError(
                f"{type(model).__name__} does not run {layer_list.name} one after the other", remedy=BY_MAGNITUDE
            )
        samples += recorded
    return samples


OUTPUTS: tuple[LayerOutput, ...] = (
    lambda hidden, _: hidden,
    lambda hidden, _: (hidden,),
    lambda hidden, index: (hidden, PassedThrough(index)),
)
"""Forms of a layer's output, tried in turn: which one a stack reads shows only with weights."""


def _record(model: nn.Module, run: Callable[[LayerOutput], list[Sample]]) -> list[Sample]:
    """Run a stack with the first of :data:`OUTPUTS` that it can read; one that reads more is no plain chain."""
    errors: list[Exception] = []
    for output in OUTPUTS:
        try:
            return run(output)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a stack that is no plain chain can fail on the stand-ins in any way
            errors.append(error)
    raise _cannot_calibrate(model, first_line(errors[0]), CHAIN) from errors[0]


def _recorded(stack: nn.Module, layer_list: LayerList, batch: Batch, output: LayerOutput) -> list[Sample]:
    samples: list[Sample] = []

    def stand_in(index: int) -> Callable[..., object]:
        def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> object:
            if index == 0:
                samples.append(Sample(hidden))
            _require_handed_on(samples[-1].hidden, hidden, [*args, *kwargs.values()])
            samples[-1].arguments.append((args, kwargs))
            if index + 1 == len(layer_list.layers):
                raise _Recorded
            return output(hidden, index)

        return forward

    with _forwards(layer_list.layers, stand_in), suppress(_Recorded):
        stack(**batch)
    return samples


def _require_handed_on(given: torch.Tensor, hidden: torch.Tensor, others: Iterable[object]) -> None:
    """Refuse a hidden state that the stack changed, or unpacked as if it were a tuple.

    T5's unpacks three outputs, which a batch of three text windows allows too. BLOOM's takes the first of several.
    DeBERTa's may add a convolution to its first layer's output.
    """
    memory = given.untyped_storage().data_ptr()
    tensors = (one for one in others if isinstance(one, torch.Tensor))
    for one in (hidden, *(one for one in tensors if one.untyped_storage().data_ptr() == memory)):
        if one.shape != given.shape:
            raise ValueError(f"a layer reads {list(one.shape)} of a hidden state {list(given.shape)}")
    if hidden.data_ptr() != given.data_ptr():
        raise ValueError("a layer reads something else than the layer before it gives")


@contextmanager
def _forwards(layers: Sequence[nn.Module], forward: Callable[[int], Callable[..., object]]) -> Iterator[None]:
    own = [vars(layer).get("forward") for layer in layers]  # as accelerate's hooks have; others have the class's
    for index, layer in enumerate(layers):
        layer.forward = forward(index)
    try:
        yield
    finally:
        for layer, one in zip(layers, own, strict=True):
            del layer.forward
            if one is not None:
                layer.forward = one


def run_layer(layer: nn.Module, sample: Sample, index: int) -> torch.Tensor:
    """Return the hidden state that a layer computes from a sample's; the sample keeps its second output."""
    args, kwargs = sample.inputs(index)
    out = layer(sample.hidden, *args, **kwargs)
    if isinstance(out, tuple) and len(out) > 1:
        sample.keep_second(index, out[1])
    hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return hidden


def advance(layer: nn.Module, index: int, samples: Iterable[Sample]) -> None:
    """Run a layer on all samples, and replace their hidden states by its outputs."""
    for sample in samples:
        sample.hidden = run_layer(layer, sample, index)
