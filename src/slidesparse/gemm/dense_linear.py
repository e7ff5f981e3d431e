"""A whole linear on a dense kernel: quantise, then multiply, with little more than allocations between the two.

What ``auto`` leaves dense for some numbers of tokens runs here, in a model whose host may be the slower side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from slidesparse.base.torch_private import empty_here
from slidesparse.support import is_vector

if TYPE_CHECKING:
    from slidesparse.kernels.lift import Call  # needs Triton

Multiply = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", torch.dtype], torch.Tensor
]
"""(x [M, K], weight [out, K], scale_x [M, 1], scale_w [out], bias [out], type) -> [M, out] of that type."""


class DenseLinear:
    """One number of tokens times weights of one size and type; see :class:`slidesparse.gemm.backend.LinearCall`.

    Args:
        lift: Quantises them, row-major and without padding.
        out_features: Rows of the weights.
        multiply: What follows, for biases of the activations' type.
    """

    __slots__ = ("_lift", "_multiply", "_out", "_weight")

    def __init__(self, lift: Call, out_features: int, multiply: Multiply) -> None:
        self._lift, self._out, self._multiply = lift, out_features, multiply
        self._weight = torch.Size((out_features, lift.width))

    def __call__(
        self,
        x: torch.Tensor,
        form: Sequence[torch.Tensor],
        scale_w: torch.Tensor | None,
        bias: torch.Tensor | None,
        gain: torch.Tensor | None,
        residual: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """See :class:`slidesparse.gemm.backend.LinearCall`."""
        lift, (_, pairs, weight, *_) = self._lift, form
        read = lift.read(x, pairs, gain, residual)
        if read is None or scale_w is None or weight.shape != self._weight or weight.device != lift.device:
            return None
        if not is_vector(scale_w, self._out, lift.device, (torch.float32,)):
            return None
        if bias is not None and not is_vector(bias, self._out, lift.device, (lift.source,)):
            return None
        total = None if residual is None else empty_here(*lift.shape, lift.source)
        total_at = None if total is None else total.data_ptr()
        values, scale = empty_here(lift.tokens, lift.width, lift.target), empty_here(lift.tokens, 1, torch.float32)
        lift.launch(lift.index, *read, total_at, values.data_ptr(), scale.data_ptr(), eps)
        return self._multiply(values, weight, scale, scale_w, bias, lift.source), total
