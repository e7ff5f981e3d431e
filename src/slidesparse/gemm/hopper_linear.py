"""A whole linear on the Hopper kernel: quantise and lift, then multiply, with only addresses between the two launches.

One by one, the two cost the host more than their launches do: tensors to make for what stands between them, and checks
of everything that a kernel reads by its address. In a model of small layers that is more than the GPU needs. Here one
piece of memory holds the lifted values and their scales, and a weight is checked once: whoever calls runs it one by one
the first time, which checks all of it, and then lets :meth:`HopperLinear.learn` remember where its tensors are.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import torch

from slidesparse.gemm.hopper_launch import BIAS_TYPES
from slidesparse.gemm.hopper_run import Run, find_run
from slidesparse.kernels.columns import Columns
from slidesparse.kernels.launcher import empty_here, is_current

if TYPE_CHECKING:
    from slidesparse.kernels.quantize_lift import Call  # needs Triton

Addresses: TypeAlias = tuple[int, int, int, int]
"""Of a weight's index of pairs, its 2:4 and its dense segment, and its scales; 0 for what it has not."""


@lru_cache(maxsize=4096)
def checked(columns: Columns, dtype: torch.dtype, out_features: int, device: int) -> set[Addresses]:
    """Where weights of this size and type are that were checked, on a device.

    What is at such an address later is a weight of the same kind: only layers of that size and type ask here.
    """
    return set()


class HopperLinear:
    """One number of tokens times weights of one size and type; see :class:`slidesparse.gemm.base.LinearCall`.

    Args:
        lift: Quantises and lifts them.
        out_features: Rows of the weights.
    """

    __slots__ = ("_checked", "_device", "_lift", "_out", "_run", "_scales_start", "_workspace")

    def __init__(self, lift: Call, out_features: int) -> None:
        self._lift, self._out, self._device = lift, out_features, lift.device.index
        self._run: Run | None = None
        self._checked = checked(lift.columns, lift.target, out_features, self._device)
        self._scales_start = lift.padded * lift.width * lift.target.itemsize  # whole rows of slabs
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
        lift, device = self._lift, self._device
        weight = _addresses(pairs, operand, scale_w)
        if not (weight in self._checked and is_current(device) and self._takes(x, bias, gain, residual)):
            return None
        total, total_at, residual_at, residual_stride = None, None, None, 0
        if residual is not None:
            total = empty_here(*lift.shape, lift.source)
            total_at, residual_at, residual_stride = total.data_ptr(), residual.data_ptr(), residual.stride()[0]
        gain_at = None if gain is None else gain.data_ptr()
        pairs_at, sparse_at, dense_at, scale_w_at = weight
        workspace = empty_here(1, self._workspace, torch.uint8)
        values_at = workspace.data_ptr()
        scale_at = values_at + self._scales_start if lift.quantised else None
        read = x.data_ptr(), residual_at, total_at, gain_at, pairs_at or None
        if not lift.launch(device, *read, values_at, scale_at, x.stride()[0], residual_stride, eps):
            return None
        y = empty_here(lift.tokens, self._out, lift.source)
        run = self._run or self._resolve(operand)
        run.launch(values_at, scale_at, sparse_at, dense_at, scale_w_at or None, bias, y)
        return y, total

    def learn(self, pairs: torch.Tensor, operand: Sequence[torch.Tensor], scale_w: torch.Tensor | None) -> None:
        """See :class:`slidesparse.gemm.base.LinearCall`."""
        self._checked.add(_addresses(pairs, operand, scale_w))

    def _takes(
        self,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        gain: torch.Tensor | None,
        residual: torch.Tensor | None,
    ) -> bool:
        """What comes with the weight is as the kernels read it; where it is not, one by one says what is wrong."""
        lift = self._lift
        if not self._is_rows(x) or (residual is not None and not self._is_rows(residual)):
            return False
        if gain is not None and not self._is_vector(gain, lift.columns.columns, (lift.source,)):
            return False
        return bias is None or self._is_vector(bias, self._out, BIAS_TYPES)

    def _is_rows(self, x: torch.Tensor) -> bool:
        lift = self._lift
        same = x.shape == lift.shape and x.dtype == lift.source and x.get_device() == self._device
        return same and x.stride()[1] == 1

    def _is_vector(self, vector: torch.Tensor, length: int, types: Container[torch.dtype]) -> bool:
        fits = vector.numel() == length and vector.dtype in types and vector.is_contiguous()
        return fits and vector.get_device() == self._device

    def _resolve(self, operand: Sequence[torch.Tensor]) -> Run:
        lift = self._lift
        activations = torch.Size((lift.tokens, lift.width))
        self._run = find_run(activations, lift.target, operand, self._out, lift.source, self._device)
        return self._run


def _addresses(pairs: torch.Tensor, operand: Sequence[torch.Tensor], scale_w: torch.Tensor | None) -> Addresses:
    sparse, dense = operand
    return pairs.data_ptr(), sparse.data_ptr(), dense.data_ptr(), 0 if scale_w is None else scale_w.data_ptr()
