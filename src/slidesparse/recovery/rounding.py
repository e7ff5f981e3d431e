"""Round weights and activations inside of training, as they are rounded where the model is served.

Forward, a linear multiplies what :mod:`weights.quant` makes of its weight (per output channel) and of its inputs
(per token), in BF16: that holds the values of INT8 and FP8 exactly. Backward, rounding passes gradients as if it were
not there (the straight-through estimator, Bengio 2013).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from slidesparse.recovery.loss import wide_product
from slidesparse.weights.quant import Quantised, Rounding, quantize_rows, quantize_rows_to_six_bits


def round_linears_(model: nn.Module, linears: Mapping[str, Rounding], dtype: torch.dtype) -> None:
    """Let linears of a model round to int8 or float8_e4m3fn, in place: name -> how its weight is rounded."""
    for name, recipe in linears.items():
        linear: Any = model.get_submodule(name)
        linear.forward = _rounded(linear, dtype, recipe)


def _rounded(linear: Any, dtype: torch.dtype, recipe: Rounding) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _RoundedProduct.apply(x.reshape(-1, x.shape[-1]), linear.weight, dtype, recipe)
        out = out if linear.bias is None else out + linear.bias
        return out.view(*x.shape[:-1], -1).to(x.dtype)

    return forward


def quantised_weight(weight: torch.Tensor, dtype: torch.dtype, recipe: Rounding) -> Quantised:
    """Return a weight as ``prune`` would store it."""
    return quantize_rows_to_six_bits(weight) if recipe == "6bit" else quantize_rows(weight, dtype)


class _RoundedProduct(torch.autograd.Function):
    """``round(x) @ round(weight).T`` in float32: x [tokens, K], weight [out, K]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, recipe: Rounding) -> torch.Tensor:
        rows, columns = quantize_rows(x, dtype), quantised_weight(weight, dtype, recipe)
        ctx.save_for_backward(*rows, weight)
        ctx.dtype, ctx.recipe, ctx.kind = dtype, recipe, x.dtype
        product = wide_product(rows.values.to(x.dtype), columns.values.to(x.dtype).t())
        return product * rows.scale * columns.scale.t()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> Any:
        values, scale, weight = ctx.saved_tensors
        slope = slope.to(ctx.kind)
        rounded = quantised_weight(weight, ctx.dtype, ctx.recipe)
        of_x = slope @ (rounded.values.float() * rounded.scale).to(ctx.kind) if ctx.needs_input_grad[0] else None
        of_weight = slope.t() @ (values.float() * scale).to(ctx.kind) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None, None
