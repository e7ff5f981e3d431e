"""Packing by the kernels of :mod:`slidesparse.weights.pack_kernel` on a GPU, and in torch elsewhere."""

from __future__ import annotations

from functools import lru_cache

import torch

from slidesparse.base.device import runs_triton
from slidesparse.weights import packed
from slidesparse.weights.packed import PackedWeight, Packer, Shard
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import QUANTISED, Rounding, check_rounding, loadable, quantize_weight
from slidesparse.weights.support import check_form, require_dense


def pack(
    weight: torch.Tensor,
    pattern: Pattern | str,
    *,
    scale: torch.Tensor | None = None,
    k_offset: int = 0,
    name: str = "weight",
) -> PackedWeight:
    """Slide and compress a weight; see :func:`slidesparse.weights.packed.pack_by` for arguments and errors.

    The kernels return the same bits and raise the same errors as the definition.
    """
    require_dense(weight, name)
    packer = _packer(weight.device)
    return packed.pack_by(weight, pattern, scale=scale, k_offset=k_offset, name=name, packer=packer)


def pack_checked(
    weight: torch.Tensor,
    pattern: Pattern,
    *,
    scale: torch.Tensor | None = None,
    k_offset: int = 0,
    name: str = "weight",
) -> PackedWeight:
    """Pack a weight that :func:`check` has accepted, without a second check; arguments as of :func:`pack`."""
    packer = _packer(weight.device)
    return packed.pack_by(weight, pattern, scale=scale, k_offset=k_offset, checked=True, name=name, packer=packer)


def check(weight: torch.Tensor, pattern: Pattern, *, k_offset: int = 0, name: str = "weight") -> None:
    """Check that a weight can be packed; arguments as of :func:`pack`, with a pattern that is not ``DENSE``.

    Raises:
        PatternViolation: The weight does not satisfy the pattern.
        InputError: It is malformed, or holds NaN or Inf.
    """
    check_form(weight, name)
    _packer(weight.device).check(Shard(weight, pattern, k_offset, name))


@lru_cache(maxsize=64)
def _packer(device: torch.device) -> Packer:
    """Return the kernels' packer where they run, else torch's."""
    if not runs_triton(device):
        return packed.TORCH
    from slidesparse.weights.pack_kernel import KernelPacker

    return KernelPacker()


def pack_weight(
    weight: torch.Tensor, pattern: Pattern, dtype: torch.dtype, rounding: Rounding = "absmax", *, name: str = "weight"
) -> PackedWeight:
    """Quantise or cast a float weight [out, in] that satisfies its pattern, and pack it.

    Raises:
        InputError: There is no such rounding for the type.
    """
    check_rounding(rounding, dtype)
    if dtype in QUANTISED:
        values, scale = loadable(quantize_weight(weight, dtype, name=name, rounding=rounding))
        return pack(values, pattern, scale=scale, name=name)
    return pack(weight.to(dtype), pattern, name=name)
