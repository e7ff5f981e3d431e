"""The sum of the outputs of each token's experts, weighted by its router."""

from __future__ import annotations

import torch

from slidesparse.base.device import runs_triton
from slidesparse.errors import InputError


def weighted_sum(x: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``sum over k of weights[t, k] * x[rows[t, k]]`` in float32, in the order of k, rounded once to x's type.

    A Triton kernel on a GPU, elsewhere torch, with the same bits: [M, N].

    Args:
        x: [P, N], contiguous, bfloat16, float16 or float32.
        rows: int64 [M, k], contiguous; -1 where a pair has no product.
        weights: float32 [M, k], contiguous.

    Raises:
        InputError: Shapes, types or devices do not fit each other.
    """
    fits = x.dim() == 2 and rows.dim() == 2 and rows.shape == weights.shape
    types = rows.dtype == torch.int64 and weights.dtype == torch.float32 and x.device == rows.device == weights.device
    if not fits or not types or not all(tensor.is_contiguous() for tensor in (x, rows, weights)):
        raise InputError(
            "products of experts to sum",
            got=f"{list(x.shape)}, rows {list(rows.shape)} {rows.dtype}, weights {list(weights.shape)} {weights.dtype}",
            needed="[P, N], int64 [M, k] and float32 [M, k] on one device, all contiguous",
        )
    if runs_triton(x.device):
        from slidesparse.lifting import expert_sum_kernel as kernel

        return kernel.weighted_sum(x, rows, weights)
    total = torch.zeros(rows.shape[0], x.shape[1], dtype=torch.float32, device=x.device)
    for row, weight in zip(rows.unbind(1), weights.unbind(1), strict=True):
        product = torch.where((row >= 0)[:, None], x[row.clamp(min=0)].to(torch.float32), 0)
        total = total + weight[:, None] * product
    return total.to(x.dtype)
