"""The four linears between two attentions, for tests: as one operator, and one by one."""

from __future__ import annotations

import torch

from slidesparse import ops
from slidesparse.gemm.spec import LinearSpec, chain_text, parse_weight
from slidesparse.lifting.prologue import Prologue

EPS = 1e-6

Weight = tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None, str]
"""The last arguments of an operator: tensors of all forms, scale, bias, spec."""


def linear_spec(prologue: Prologue, given: Weight) -> LinearSpec:
    _, scale, bias, spec = given
    eps = EPS if "norm" in prologue else 0.0
    return LinearSpec(prologue, eps, scale is not None, bias is not None, parse_weight(spec))


def chained(weights: list[Weight], gains: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """Tensors and text of the four linears between two attentions."""
    tensors, specs = [], []
    prologues: list[tuple[Prologue, torch.Tensor | None]]
    prologues = [("none", None), ("add_rms_norm", gains[0]), ("silu_mul", None), ("add_rms_norm", gains[1])]
    for (prologue, norm_weight), given in zip(prologues, weights, strict=True):
        own, scale, bias, _ = given
        tensors += [*own, *(tensor for tensor in (scale, bias, norm_weight) if tensor is not None)]
        specs.append(linear_spec(prologue, given))
    return tensors, chain_text(specs)


def one_by_one(
    x: torch.Tensor, residual: torch.Tensor, gains: list[torch.Tensor], weights: list[Weight]
) -> tuple[torch.Tensor, torch.Tensor]:
    o, gate_up, down, qkv = weights
    y = ops.linear(x, *o)
    y, residual = ops.add_rms_norm_linear(y, residual, gains[0], EPS, *gate_up)
    y = ops.silu_mul_linear(y, *down)
    return ops.add_rms_norm_linear(y, residual, gains[1], EPS, *qkv)
