"""Pack a weight by the kernels of :mod:`slidesparse.weights.pack_kernel` on a GPU, and in torch elsewhere."""

from __future__ import annotations

from functools import lru_cache

import torch

from slidesparse.base.device import runs_triton
from slidesparse.weights import packed
from slidesparse.weights.packed import PackedWeight, Packer, Shard
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import QUANTISED, Rounding, check_rounding, loadable, quantize_weight, rounding_of
from slidesparse.weights.support import check_form, check_groups, check_share, require_dense


def pack(
    weight: torch.Tensor,
    pattern: Pattern | str,
    *,
    scale: torch.Tensor | None = None,
    k_offset: int = 0,
    groups: torch.Tensor | None = None,
    checked: bool = False,
    name: str = "weight",
) -> PackedWeight:
    """Slide and compress a weight: :func:`slidesparse.weights.packed.pack_segments`, which explains the arguments.

    The kernels give the same bits and raise the same errors as the definition.
    """
    require_dense(weight, name)
    return packed.pack_segments(
        weight,
        pattern,
        scale=scale,
        k_offset=k_offset,
        groups=groups,
        checked=checked,
        name=name,
        packer=_packer(weight.device),
    )


def slid_groups(
    weight: torch.Tensor, pattern: Pattern, *, k_offset: int = 0, whole: bool = False, name: str = "weight"
) -> torch.Tensor:
    """Check a weight, and return the groups to slide: all of a uniform pattern, of a partial one those that follow.

    Arguments as of :func:`pack`, with a pattern that is not ``DENSE``. A whole weight is no shard: at least its
    pattern's share of groups must follow. Returns int64 [n], ascending, on the CPU.

    Raises:
        PatternViolation: A uniform pattern is violated.
        InputError: The weight is malformed, holds NaN or Inf, or too few groups of a whole one follow.
    """
    check_form(weight, name)
    total = pattern.groups(weight.shape[1], k_offset)
    following = _packer(weight.device).following(Shard(weight, pattern, k_offset, name))
    if pattern.is_uniform and len(following) < total:
        check_groups(weight, pattern, k_offset=k_offset, name=name)  # names the row and the group
    if whole:
        check_share(len(following), total, pattern, name)
    return following


@lru_cache(maxsize=64)
def _packer(device: torch.device) -> Packer:
    """Return the kernels where they run, else torch."""
    if not runs_triton(device):
        return packed.TORCH
    from slidesparse.weights.pack_kernel import KernelPacker

    return KernelPacker()


def pack_weight(
    weight: torch.Tensor, pattern: Pattern, dtype: torch.dtype, recipe: Rounding = "absmax", *, name: str = "weight"
) -> PackedWeight:
    """Quantise or cast a float weight [out, in] that satisfies its pattern, and pack it.

    Raises:
        InputError: There is no such recipe for the type.
    """
    check_rounding(recipe, dtype)
    if dtype in QUANTISED:
        rounded = quantize_weight(weight, dtype, name=name, recipe=rounding_of(recipe, pattern))
        values, scale = loadable(rounded)
        return pack(values, pattern, scale=scale, name=name)
    return pack(weight.to(dtype), pattern, name=name)
