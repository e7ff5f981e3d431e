"""The contract of a GEMM backend.

A backend computes, for activations ``X`` that :func:`slidesparse.ops.quantize_lift` has put into its layout::

    Y[M, out] = scale_x[M] * (scale_w[out] * (X @ W^T)) + bias[out]

with the product accumulated in int32 (INT8) or float32 (all others), the rest in float32 and one rounding to the output
type at the end. This is vLLM's order of operations (csrc/cutlass_extensions/epilogue, ``ScaledEpilogueBias``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from slidesparse.packed import PackedWeight
from slidesparse.pattern import Pattern

Operand: TypeAlias = tuple[torch.Tensor, ...]
"""What a backend's kernel reads of a weight, in the backend's own layout: plain tensors, which can be buffers."""


@dataclass(frozen=True)
class Problem:
    """What is to be multiplied, as far as a backend must know to say whether it can.

    Attributes:
        pattern: The weight's pattern.
        dtype: Type of weight and quantised activations.
        out_features: Rows of the weight.
        in_features: Columns of the weight, before lifting.
        device: Where.
    """

    pattern: Pattern
    dtype: torch.dtype
    out_features: int
    in_features: int
    device: torch.device


@dataclass(frozen=True)
class Layout:
    """How a backend wants the activations.

    Attributes:
        lifted: False for a backend that multiplies the unpacked weight.
        multiple: Columns of each segment are padded with zeros to a multiple of this.
    """

    lifted: bool = True
    multiple: int = 1

    def column_map(self, packed: PackedWeight) -> torch.Tensor:
        """The input column behind every column that the kernel reads, -1 for padding: int64 [K']."""
        if not self.lifted:
            return torch.arange(packed.shape[1], device=packed.device)
        return packed.column_map(self.multiple)


class Backend(Protocol):
    """A way to multiply. Stateless; whatever belongs to one weight is in its operand."""

    name: str
    accelerated: bool
    layout: Layout

    def why_not(self, problem: Problem) -> str | None:
        """Why this backend cannot run ``problem``, in one sentence, or None when it can."""
        ...

    def prepare(self, packed: PackedWeight) -> Operand:
        """Reorder a packed weight, once, into what the kernel reads."""
        ...

    def matmul(
        self,
        x: torch.Tensor,
        scale_x: torch.Tensor | None,
        operand: Operand,
        scale_w: torch.Tensor | None,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Multiply.

        Args:
            x: [M, K'] in the layout asked for, in the weight's type.
            scale_x: float32 [M, 1], or None for unquantised types.
            operand: From :meth:`prepare`.
            scale_w: float32 [out], or None for unquantised types.
            bias: [out], or None.
            out_dtype: bfloat16, float16 or float32.

        Returns:
            [M, out] in ``out_dtype``.
        """
        ...
