"""The one tolerance table of the suite.

A result may differ from the exact product of the same operands for three reasons, and for nothing else:

1. accumulation: the GEMM adds products in a finite type. The error scales with ``sum |x w|``, not with the result;
2. the scales and the bias are applied in float32, one rounding each;
3. the result is rounded once to the output type.
"""

from __future__ import annotations

import torch

ACCUMULATION = {
    # int32 holds every sum of int8 products exactly.
    torch.int8: 0.0,
    # float32 accumulation of K products errs by at most K * 2^-24 * sum |x w|; the suite uses K <= 1024 here. Products
    # of two values of these types are exact in float32 (but for float32 itself: half an ulp, inside the slack).
    torch.float8_e4m3fn: 1024 * 2.0**-24,
    torch.bfloat16: 1024 * 2.0**-24,
    torch.float16: 1024 * 2.0**-24,
    torch.float32: 1024 * 2.0**-24,
}
"""Weight type -> allowed error of the accumulator, relative to ``sum |x w|``."""

FP8_TENSOR_CORE = 2.0**-11
"""Allowed error of an accumulator that Hopper's FP8 Tensor Cores summed, relative to ``sum |x w|``.

They align the products of a step with the accumulator and keep 13 bits below the largest exponent, truncated. Simulated
so on random operands (steps of 32, K <= 1024; 2:4 steps of 64, K' <= 1536), the worst of 10^5 outputs is 2.7 * 2^-13
off. A single lost product is 1 / K of ``sum |x w|``, twice the tolerance at K = 1024.
"""

OUTPUT_ROUNDING = {
    # Half an ulp of 8, 11 and 24 significant bits.
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
}
"""Output type -> relative error of one rounding to nearest."""

EPILOGUE = 4 * 2.0**-24
"""Accumulator to float32, two scales and a bias: one float32 rounding each, relative to ``sum |x w| + |bias|``."""

SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}
"""Output type -> its smallest subnormal; below the normal range a rounding errs by at most half of it."""


def assert_product(
    y: torch.Tensor,
    exact: torch.Tensor,
    magnitude: torch.Tensor,
    weight_dtype: torch.dtype,
    accumulation: float | None = None,
) -> None:
    """Check a product against its exact value.

    Args:
        y: What was computed, in its output type.
        exact: float64, like ``y``: scales and bias included.
        magnitude: float64, like ``y``: the same with every product's and the bias's absolute value.
        weight_dtype: Type of the operands.
        accumulation: Allowed error of the accumulator, relative to ``magnitude``; None for the type's own.
    """
    if accumulation is None:
        accumulation = ACCUMULATION[weight_dtype]
    slack = (accumulation + EPILOGUE) * magnitude
    allowed = slack + OUTPUT_ROUNDING[y.dtype] * (exact.abs() + slack) + SMALLEST[y.dtype]
    error = (y.to(torch.float64) - exact).abs()
    excess = (error / allowed).max().item() if error.numel() else 0.0
    assert excess <= 1, f"error {excess:.3g} times what {weight_dtype} -> {y.dtype} allows"
