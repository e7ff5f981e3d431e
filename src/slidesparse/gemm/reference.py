"""The reference backend: the slid 2:4 matrix times the lifted activations, in plain torch, on any device.

Every other backend is tested against this definition. INT8 products are exact: float32 has every integer up to
2^24, and 1024 products of two int8 numbers stay within 2^10 * 2^14, so blocks of 1024 columns go through a float
GEMM (fast on a CPU) without rounding and are summed in int32. On a GPU the sum is taken in float64.
"""

from __future__ import annotations

import torch

from slidesparse.gemm.backend import Backend, Operand, Problem, release
from slidesparse.lifting.layout import Layout
from slidesparse.weights.packed import PackedWeight

EXACT_BLOCK = 1024


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return ``x @ weight^T``: x [M, K], weight [out, K] -> [M, out], int32 and exact for int8, else float32."""
    if x.is_cuda:  # float64 has no TF32 mode that a user may have switched on, and Tensor Cores of its own
        exact = x.to(torch.float64) @ weight.to(torch.float64).T
        return exact.to(torch.int32 if x.dtype == torch.int8 else torch.float32)
    if x.dtype != torch.int8:
        return x.to(torch.float32) @ weight.to(torch.float32).T
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32, device=x.device)
    for start in range(0, x.shape[1], EXACT_BLOCK):
        block = slice(start, start + EXACT_BLOCK)
        total += (x[:, block].to(torch.float32) @ weight[:, block].to(torch.float32).T).to(torch.int32)
    return total


def apply_scales(
    accumulator: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``scale_x * (scale_w * accumulator) + bias`` [M, out], in float32, rounded once to the output type.

    ``scale_x`` and ``bias`` are applied in one fused multiply-add, as in vLLM's CUTLASS epilogue
    (csrc/cutlass_extensions/epilogue, ``ScaledEpilogueBias``): here in float64, whose product is exact.
    """
    y = accumulator.to(torch.float32)
    if scale_w is not None:
        y = scale_w * y
    if scale_x is not None and bias is not None:
        y = (scale_x.to(torch.float64) * y + bias.to(torch.float64)).to(torch.float32)
    elif scale_x is not None:
        y = scale_x * y
    elif bias is not None:
        y = y + bias.to(torch.float32)
    return y.to(out_dtype).contiguous()


class Reference(Backend):
    """The backend that multiplies slid weights by lifted activations exactly, and slowly."""

    name = "reference"
    accelerated = False
    layout = Layout(lifted=True)

    def why_not(self, problem: Problem) -> str | None:
        """Return None: every problem runs."""
        return None

    def library(self) -> str:
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return release("torch", torch.__version__)

    def prepare(self, packed: PackedWeight) -> Operand:
        """Return the slid matrix, zeros in place: [out, K']."""
        return (packed.columns(),)

    def columns(self, operand: Operand, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """See :class:`slidesparse.gemm.backend.Backend`; a subclass may have padded the rows."""
        return operand[0][: shape[0]]

    def matmul(
        self, x: torch.Tensor, scale_x: torch.Tensor | None, operand: Operand, scale_w: torch.Tensor | None,
        bias: torch.Tensor | None, out_features: int, out_dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """See :class:`slidesparse.gemm.backend.Backend`."""
        return apply_scales(product(x, operand[0]), scale_x, scale_w, bias, out_dtype)
