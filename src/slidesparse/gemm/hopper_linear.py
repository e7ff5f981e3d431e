"""A whole linear on the Hopper kernel: quantise and lift, then multiply, with only addresses between the two launches.

Run one by one, the two cost the host more than their launches do: each makes tensors of its own and checks, in general
terms, everything that its kernel reads by address. In a model of small layers that is more than the GPU needs. Here
all that does not depend on the tensors is worked out once, and one piece of memory holds lifted values and scales.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from slidesparse.gemm.hopper_launch import BIAS_TYPES
from slidesparse.gemm.hopper_layout import step_shapes
from slidesparse.gemm.hopper_run import find_run
from slidesparse.kernels.launcher import empty_here
from slidesparse.support import is_vector

if TYPE_CHECKING:
    from slidesparse.kernels.quantize_lift import Call  # needs Triton

FLOAT32 = (torch.float32,)


class HopperLinear:
    """One number of tokens times weights of one size and type; see :class:`slidesparse.gemm.base.LinearCall`.

    Args:
        lift: Quantises and lifts them.
        out_features: Rows of the weights.

    Raises:
        UnsupportedError: See :func:`slidesparse.gemm.hopper_launch.load`.
    """

    __slots__ = ("_dense", "_lift", "_out", "_run", "_scales_start", "_sparse", "_workspace")

    def __init__(self, lift: Call, out_features: int) -> None:
        activations = torch.Size((lift.tokens, lift.width))
        self._lift, self._out = lift, out_features
        self._sparse, self._dense = step_shapes(lift.columns, lift.target.itemsize, out_features)
        sizes = activations, lift.target, self._sparse, self._dense, out_features
        self._run = find_run(*sizes, lift.source, lift.index)
        self._scales_start = self._run.slab_bytes  # a multiple of a slab's row
        self._workspace = self._scales_start + 4 * lift.tokens * lift.quantised

    def __call__(
        self,
        x: torch.Tensor,
        pairs: torch.Tensor,
        operand: Sequence[torch.Tensor],
        scale_w: torch.Tensor | None,
        bias: torch.Tensor | None,
        gain: torch.Tensor | None,
        residual: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """See :class:`slidesparse.gemm.base.LinearCall`."""
        lift, run, (sparse, dense) = self._lift, self._run, operand
        read = lift.read(x, pairs, gain, residual)
        if read is None or not self._takes(sparse, dense, scale_w, bias):
            return None
        total = None if residual is None else empty_here(*lift.shape, lift.source)
        total_at = None if total is None else total.data_ptr()
        workspace = empty_here(1, self._workspace, torch.uint8)
        values_at = workspace.data_ptr()
        scale_at = values_at + self._scales_start if lift.quantised else None
        lift.launch(lift.index, *read, total_at, values_at, scale_at, eps)
        y = empty_here(lift.tokens, self._out, lift.source)  # while the GPU lifts
        scale_w_at = None if scale_w is None else scale_w.data_ptr()
        run.launch(values_at, scale_at, sparse.data_ptr(), dense.data_ptr(), scale_w_at, bias, y)
        return y, total

    def _takes(
        self, sparse: torch.Tensor, dense: torch.Tensor, scale_w: torch.Tensor | None, bias: torch.Tensor | None
    ) -> bool:
        device = self._lift.device
        if sparse.shape != self._sparse or dense.shape != self._dense:
            return False
        if sparse.device != device or dense.device != device:
            return False
        if scale_w is not None and not is_vector(scale_w, self._out, device, FLOAT32):
            return False
        return bias is None or is_vector(bias, self._out, device, BIAS_TYPES)
