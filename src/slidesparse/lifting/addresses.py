"""Addresses and strides of a quantise-and-lift launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from slidesparse.base.triton_launcher import ALIGNMENT, LARGEST


class LiftInputs(NamedTuple):
    """The addresses and strides that a launch reads; None for a tensor that the kernel does not read.

    A stride is the number of elements from one row to the next; 0 without a tensor.
    """

    x: int
    residual: int | None
    norm_weight: int | None
    x_stride: int
    residual_stride: int


def inputs_of(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None) -> LiftInputs:
    """Return the addresses of checked tensors."""
    residual_at, residual_stride = (None, 0) if residual is None else (residual.data_ptr(), residual.stride()[0])
    weight_at = None if weight is None else weight.data_ptr()
    return LiftInputs(x.data_ptr(), residual_at, weight_at, x.stride()[0], residual_stride)


def is_aligned(inputs: LiftInputs) -> bool:
    """Return whether a kernel compiled for multiples of 16 can read these; torch's allocations are aligned."""
    x, residual, weight, x_stride, residual_stride = inputs
    bits = x | x_stride | residual_stride | (residual or 0) | (weight or 0)
    return bits % ALIGNMENT == 0 and x_stride <= LARGEST and residual_stride <= LARGEST
