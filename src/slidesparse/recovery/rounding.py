"""Quantisation-aware training: weights and activations are rounded in training as when served.

Forward, a linear multiplies its weight, quantised per output channel, and its inputs, quantised per token
(:mod:`weights.quant`), in BF16, which holds all values of INT8 and FP8 exactly. Backward, gradients pass the rounding
unchanged (the straight-through estimator, arXiv 1308.3432).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slidesparse.recovery.loss import wide_product
from slidesparse.weights.quant import Quantised, Rounding, quantize_rows, quantize_rows_to_six_bits


def round_linears_(model: nn.Module, linears: Mapping[str, Rounding], dtype: torch.dtype) -> None:
    """Make linears of a model round to int8 or float8_e4m3fn, in place: name -> rounding of the weight."""
    for name, rounding in linears.items():
        linear: Any = model.get_submodule(name)
        linear.forward = _rounded(linear, dtype, rounding)


def _rounded(linear: Any, dtype: torch.dtype, rounding: Rounding) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _RoundedProduct.apply(x.reshape(-1, x.shape[-1]), linear.weight, dtype, rounding)
        out = out if linear.bias is None else out + linear.bias
        return out.view(*x.shape[:-1], -1).to(x.dtype)

    return forward


def quantised_weight(weight: torch.Tensor, dtype: torch.dtype, rounding: Rounding) -> Quantised:
    """Return the weight as ``prune`` would store it."""
    return quantize_rows_to_six_bits(weight) if rounding == "6bit" else quantize_rows(weight, dtype)


class _RoundedProduct(torch.autograd.Function):
    """``round(x) @ round(weight).T`` in float32: x [tokens, K], weight [out, K]."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, rounding: Rounding
    ) -> torch.Tensor:
        rows, columns = quantize_rows(x, dtype), quantised_weight(weight, dtype, rounding)
        ctx.save_for_backward(*rows, weight)
        ctx.dtype, ctx.rounding, ctx.kind = dtype, rounding, x.dtype
        product = wide_product(rows.values.to(x.dtype), columns.values.to(x.dtype).t())
        return product * rows.scale * columns.scale.t()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        values, scale, weight = ctx.saved_tensors
        slope = slope.to(ctx.kind)
        rounded = quantised_weight(weight, ctx.dtype, ctx.rounding)
        of_x = slope @ (rounded.values.float() * rounded.scale).to(ctx.kind) if ctx.needs_input_grad[0] else None
        of_weight = slope.t() @ (values.float() * scale).to(ctx.kind) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None, None
