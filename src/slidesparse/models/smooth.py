"""Move outliers from activations into weights before both become 8 bits, without changing what a layer computes.

A few channels of a norm's output may be a hundred times as large as the others. They set the scale of every token, so
that the other channels round to few steps. Dividing channel ``j`` of the norm's weight by ``s_j`` and multiplying
column ``j`` of all linears that read it by ``s_j`` leaves every product as it was. Source: Xiao et al., "SmoothQuant:
Accurate and Efficient Post-Training Quantization for Large Language Models" (2023),
``s_j = max |x_j|^a / max |w_j|^(1 - a)``. Of several strengths ``a`` the best is taken: that with the smallest error of
the rounded products on some tokens, or no factors where none is better.

Inside a gated MLP the same is possible without a norm: ``down`` reads the output of ``up`` times a number for each
channel, so row ``j`` of ``up`` is divided, whose own scale takes that factor in without loss.

Here ``s_j`` is rounded to a power of two, and one common power is taken out, which scales of tokens and rows absorb
anyway. So folding is exact in BF16 and float32: a layer whose outputs do not stay the same bit for bit, as that of a
norm that multiplies by ``1 + weight``, is left alone. Zeros stay zeros. FP16 has few exponents: values below 2^-14 are
rounded to a multiple of 2^-24. So layers of an FP16 model are tried in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slidesparse.models.hooks import hooked
from slidesparse.models.targets import input_sets
from slidesparse.weights.quant import Quantised, dequantize

MOST = 6
"""Largest exponent of a factor: 64 either way, so that FP16 stays far from its limits."""

STRENGTHS = (0.5, 0.25, 0.75)
"""Strengths that are tried. Weights of six bits bear less than those of eight, and inputs of ``down`` need more."""

Quantise = Callable[[torch.Tensor], Quantised]
"""Rounds the rows of a matrix."""


@dataclass(frozen=True)
class Fold:
    """The writer of some channels, and all their readers.

    Attributes:
        writer: The name of a norm, or of a linear whose output is multiplied channel by channel before it is read.
        linears: The linears that read the channels; nothing else does.
    """

    writer: str
    linears: tuple[str, ...]


def find_folds(model: nn.Module, run: Callable[[], object]) -> list[Fold]:
    """Return the norms whose output only linears read, in the model's order.

    Args:
        model: May be on the meta device: only the identity of tensors is used.
        run: Runs the model once, on any input.
    """
    leaves = {name: module for name, module in model.named_modules() if not any(module.children())}
    written: dict[int, str] = {}
    readers: dict[int, list[str]] = {}
    alive: list[torch.UntypedStorage] = []  # a tensor that is freed could lend its identity to another

    def storage_of(tensor: torch.Tensor) -> int:
        alive.append(tensor.untyped_storage())
        return id(alive[-1])

    def reads(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    readers.setdefault(storage_of(value), []).append(name)

        return hook

    def writes(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, out: Any) -> None:
            if isinstance(out, torch.Tensor):
                written[storage_of(out)] = name

        return hook

    norms = {name for name, leaf in leaves.items() if _is_norm(leaf)}
    before = (leaf.register_forward_pre_hook(reads(name), with_kwargs=True) for name, leaf in leaves.items())
    after = (leaves[name].register_forward_hook(writes(name)) for name in norms)
    with hooked(before), hooked(after), torch.no_grad():
        run()
    folds = {norm: Fold(norm, tuple(dict.fromkeys(readers.get(storage, ())))) for storage, norm in written.items()}
    return [folds[name] for name in leaves if name in folds and _reach_all(leaves, folds[name])]


def find_inner_folds(linears: dict[str, nn.Linear], model: nn.Module, run: Callable[[], object]) -> list[Fold]:
    """Return the linears that may write the channels of another one by their shapes: up and down, gate and down.

    A trial decides later: ``gate`` fails, since no power of two passes through its activation unchanged.

    Args:
        linears: Linears that may be scaled, in the model's order.
        model: May be on the meta device.
        run: Runs the model once, on any input.
    """
    sets = input_sets(model, linears, run)
    place = {name: number for number, name in enumerate(linears)}
    return [
        Fold(writer, (reader,))
        for reader, linear in linears.items()
        for writer in _nearest_writers(reader, linears, sets, place)
        if linears[writer].out_features == linear.in_features
    ]


def _nearest_writers(
    reader: str, linears: dict[str, nn.Linear], sets: Sequence[Sequence[str]], place: dict[str, int]
) -> Sequence[str]:
    """Return the last linears before a reader whose rows are all its channels; or one that joins two such.

    A joined one cannot be scaled, and those before it do not write the reader's channels.
    """
    channels = linears[reader].in_features
    fitting = [
        names
        for names in sets
        if place[names[-1]] < place[reader]
        and [linears[name].out_features for name in names] in ([channels] * len(names), [2 * channels])
    ]
    return max(fitting, key=lambda names: place[names[0]], default=())


def _reach_all(modules: Mapping[str, nn.Module], one: Fold) -> bool:
    """Return whether only linears read a norm's output, and all of its channels as they are."""
    readers, weight = [modules[name] for name in one.linears], modules[one.writer].get_parameter("weight")
    return bool(readers) and all(isinstance(r, nn.Linear) and r.in_features == len(weight) for r in readers)


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module has a weight for each channel, and no other parameter but a bias."""
    names = {name: parameter.dim() for name, parameter in module.named_parameters(recurse=False)}
    return names.get("weight") == 1 and set(names) <= {"weight", "bias"} and set(names.values()) == {1}


def exponents(largest_input: torch.Tensor, weights: Iterable[torch.Tensor], strength: float = 0.5) -> torch.Tensor:
    """Return the exponent of each channel's factor, int8 [in]; most are 0.

    Args:
        largest_input: The largest absolute input of each channel, [in].
        weights: Weights of all readers, [out, in] each.
        strength: How far outliers move from inputs, at 0, into weights, at 1.
    """
    largest_weight = torch.stack([weight.abs().amax(0).to(torch.float32) for weight in weights]).amax(0)
    largest_input = largest_input.to(torch.float32)
    share = largest_input.pow(strength) / largest_weight.pow(1 - strength)
    alive = torch.isfinite(share) & (share > 0)
    powers = torch.where(alive, torch.log2(torch.where(alive, share, 1.0)), 0.0).round()
    if bool(alive.any()):
        powers = torch.where(alive, powers - powers[alive].median(), 0.0)
    return powers.clamp(-MOST, MOST).to(torch.int8)


@torch.no_grad()
def best_exponents(
    inputs: torch.Tensor,
    largest_input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    of_inputs: Quantise,
    of_weights: Quantise,
) -> torch.Tensor:
    """Return the exponents with the least rounding error of the readers' outputs: int8 [in], or all 0.

    Args:
        inputs: Some tokens of their inputs, [tokens, in].
        largest_input: The largest absolute input of each channel, over all tokens.
        weights: Weights of all readers, [out, in] each.
        of_inputs: Rounds inputs as the server will.
        of_weights: Rounds weights.
    """
    wide, wides = inputs.to(torch.float32), [weight.to(torch.float32) for weight in weights]

    def loss(powers: torch.Tensor) -> float:
        factors = torch.exp2(powers.to(torch.float32))
        rounded = dequantize(*of_inputs(wide / factors))
        return sum(
            float((rounded @ dequantize(*of_weights(weight * factors)).T - wide @ weight.T).square().sum())
            for weight in wides
        )

    tried = [exponents(largest_input, weights, strength) for strength in STRENGTHS]
    return min([torch.zeros_like(tried[0]), *tried], key=loss)


@torch.no_grad()
def fold(modules: Mapping[str, nn.Module], one: Fold, powers: torch.Tensor) -> None:
    """Divide the writer of the channels by the factors, and multiply the columns of its readers, in place."""
    factors = torch.exp2(powers.to(torch.float32))
    for parameter in modules[one.writer].parameters(recurse=False):
        parameter.div_(factors.to(parameter).view(-1, *[1] * (parameter.dim() - 1)))
    for name in one.linears:
        weight: Any = modules[name].weight
        weight.mul_(factors.to(weight))
