"""What calibration knows of the inputs of linears: sums over the tokens of a text, collected while a layer runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from slidesparse.errors import InputError
from slidesparse.models.expert_grams import Inputs, add_layer_sums, empty_grams, expert_inputs, tokens_of
from slidesparse.models.expert_weights import ExpertWeight, WatchExperts, only_experts
from slidesparse.models.hooks import hooked
from slidesparse.models.layer_stack import Sample, run_layer
from slidesparse.weights.quant import dequantize, quantize_rows


def rounding_of(name: str) -> str:
    """Return the name of the squared error of a linear's inputs in INT8 next to a gram matrix, as a matrix [1, 1]."""
    return f"{name} rounding"


def collect_grams(
    layer: nn.Module, index: int, linears: Mapping[str, nn.Linear | ExpertWeight], samples: Iterable[Sample]
) -> dict[str, torch.Tensor]:
    """Return ``sum x x^T`` over all tokens that each linear reads, float32 [in, in] by name.

    With each comes what rounding costs: see :func:`rounding_of`.
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


def take_inputs(name: str, linear: object, grams: dict[str, torch.Tensor]) -> Inputs:
    """Take the inputs of a set of linears out of the sums of a layer."""
    gram = grams.pop(name)
    if not isinstance(linear, ExpertWeight):
        return Inputs(gram, rounding=float(grams.pop(rounding_of(name))))
    tokens, layer_tokens = (int(grams[tokens_of(key)]) for key in (name, linear.layer))
    return expert_inputs(name, gram, tokens, grams[linear.layer], layer_tokens)
