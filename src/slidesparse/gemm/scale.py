"""Scales and bias of a GEMM's accumulators: one launch, one rounding to the output type.

    y[m, n] = scale_x[m] * (scale_w[n] * acc[m, n]) + bias[n]

in float32, with one fused multiply-add where there are both ``scale_x`` and a bias, bit for bit as
:func:`slidesparse.gemm.reference.apply_scales`. A program computes ``ROWS`` rows of ``COLUMNS`` columns.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from slidesparse.base.torch_private import empty
from slidesparse.base.triton_launcher import Launcher
from slidesparse.weights.support import check_vector

ROWS = 4
COLUMNS = 1024
"""Columns of a program, 8 for each of 128 lanes: a lane stores 16 bytes of bf16."""
NUM_WARPS = 4


@triton.jit(do_not_specialize=["tokens"])
def scale_kernel(
    acc, scale_x, scale_w, bias, y, tokens, columns, acc_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Scale accumulators, see the top of this file. The scales and ``bias`` may be None."""
    blocks = tl.cdiv(columns, COLUMNS)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    if scale_w is not None:
        of_column = tl.load(scale_w + column, mask=inside)
    if bias is not None:
        added = tl.load(bias + column, mask=inside).to(tl.float32)
    first = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    for r in tl.static_range(ROWS):
        row = first + r
        mask = inside & (row < tokens)
        value = tl.load(acc + row * acc_stride + column, mask=mask).to(tl.float32)
        if scale_w is not None:
            value = of_column * value
        if scale_x is not None:
            of_token = tl.load(scale_x + row, mask=row < tokens)
            value = of_token * value if bias is None else tl.fma(value, tl.broadcast_to(of_token, value.shape), added)
        elif bias is not None:
            value = value + added
        tl.store(y + row * columns + column, value.to(y.dtype.element_ty), mask=mask)


def scale_rows(
    acc: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    tokens: int,
    out_features: int,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Apply scales and bias to accumulators: [M, out] in ``out_dtype``, bfloat16, float16 or float32.

    Args:
        acc: int32, float32 or bfloat16 [>= M, >= out]; padding past M and out is never read.
        scale_x: float32 [M, 1] or None.
        scale_w: float32 [out] or None.
        bias: [out], float, or None.
        tokens: M.
        out_features: out.
        out_dtype: Type of the result.

    Raises:
        InputError: A vector has another length, strides or device.
    """
    index = acc.get_device()
    check_vector("token scales for accumulators", scale_x, tokens, acc.device)
    check_vector("channel scales for accumulators", scale_w, out_features, acc.device)
    check_vector("bias for accumulators", bias, out_features, acc.device)
    y = empty(tokens, out_features, out_dtype, index)
    if not y.numel():
        return y
    tensors = acc, scale_x, scale_w, bias, y
    types = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
    launcher = _launcher(types, acc.device)
    programs = -(-tokens // ROWS) * -(-out_features // COLUMNS)
    launcher.run(programs, index, tensors, (tokens,), (out_features, acc.stride(0)))
    return y


@lru_cache(maxsize=256)
def _launcher(types: tuple[torch.dtype | None, ...], device: torch.device) -> Launcher:
    """Return the launcher for the types of all tensors, on one device."""
    # The fused multiply-add is written out; nothing else may be fused.
    return Launcher(scale_kernel, (ROWS, COLUMNS), num_warps=NUM_WARPS, enable_fp_fusion=False)
