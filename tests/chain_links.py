"""The four linears between two attentions, for tests: as one operator, and one by one."""

from __future__ import annotations

import torch

from slidesparse import ops
from slidesparse.gemm.chain import Link, links_to_text
from slidesparse.gemm.spec import parse_switch

EPS = 1e-6

Weight = tuple[list[torch.Tensor], torch.Tensor | None, torch.Tensor | None, str]
"""The last arguments of an operator: tensors of all forms, scale, bias, switch."""


def link(first: str, given: Weight) -> Link:
    _, scale, bias, switch = given
    return Link(first, EPS if "norm" in first else 0.0, scale is not None, bias is not None, parse_switch(switch))


def chained(weights: list[Weight], gains: list[torch.Tensor]) -> tuple[list[torch.Tensor], str]:
    """Tensors and text of the four linears between two attentions."""
    tensors, links = [], []
    firsts = [("none", None), ("add_rms_norm", gains[0]), ("silu_mul", None), ("add_rms_norm", gains[1])]
    for (first, gain), given in zip(firsts, weights, strict=True):
        own, scale, bias, _ = given
        tensors += [*own, *(tensor for tensor in (scale, bias, gain) if tensor is not None)]
        links.append(link(first, given))
    return tensors, links_to_text(links)


def one_by_one(
    x: torch.Tensor, residual: torch.Tensor, gains: list[torch.Tensor], weights: list[Weight]
) -> tuple[torch.Tensor, torch.Tensor]:
    o, gate_up, down, qkv = weights
    y = ops.linear(x, *o)
    y, residual = ops.add_rms_norm_linear(y, residual, gains[0], EPS, *gate_up)
    y = ops.silu_mul_linear(y, *down)
    return ops.add_rms_norm_linear(y, residual, gains[1], EPS, *qkv)
