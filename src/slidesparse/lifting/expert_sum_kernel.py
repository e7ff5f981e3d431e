"""The sum of the outputs of each token's experts, weighted by its router: the last step of a mixture.

    y[t] = sum over k of weight[t, k] * x[row[t, k]]

in float32, in the order of k, rounded once: the same bits every time. Bytes moved an output: 2 k in, 2 out.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from slidesparse.base.torch_private import empty
from slidesparse.base.triton_launcher import Launcher

COLUMNS = 1024
NUM_WARPS = 4


@triton.jit(do_not_specialize=["tokens"])
def weighted_sum_kernel(x, row_ptr, weight_ptr, y, tokens, columns, K: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum ``COLUMNS`` columns of one token, see the top of this file; rows of -1 are skipped."""
    blocks = tl.cdiv(columns, COLUMNS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    token = (tl.program_id(0) // blocks).to(tl.int64)
    inside = column < columns
    total = tl.full((COLUMNS,), 0.0, tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_ptr + token * K + k)
        weight = tl.load(weight_ptr + token * K + k)
        value = tl.load(x + row * columns + column, mask=inside & (row >= 0), other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(y + token * columns + column, total.to(y.dtype.element_ty), mask=inside)


def weighted_sum(x: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum by the kernel; arguments as of :func:`lifting.expert_sum.weighted_sum`, checked by it."""
    tokens, k = rows.shape
    index = x.get_device()
    y = empty(tokens, x.shape[1], x.dtype, index)
    if y.numel():
        launcher = _launcher(x.dtype, k, x.device)
        programs = tokens * -(-x.shape[1] // COLUMNS)
        launcher.run(programs, index, (x, rows, weights, y), (tokens,), (x.shape[1],))
    return y


@lru_cache(maxsize=64)
def _launcher(dtype: torch.dtype, k: int, device: torch.device) -> Launcher:
    """Return the launcher for a type of products and a number of experts a token, on one device."""
    return Launcher(weighted_sum_kernel, (k, COLUMNS), num_warps=NUM_WARPS, enable_fp_fusion=False)
