"""Pack a weight by the kernels of :mod:`slidesparse.weights.pack_kernel` on a GPU, and in torch elsewhere."""

from __future__ import annotations

from functools import lru_cache

import torch

from slidesparse.base.device import runs_triton
from slidesparse.weights import packed
from slidesparse.weights.packed import PackedWeight, Packer
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import require_dense, with_contiguous_columns


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


def groups_to_slide(
    weight: torch.Tensor, pattern: Pattern, *, k_offset: int = 0, whole: bool = False, name: str = "weight"
) -> torch.Tensor:
    """Check a weight, and return its groups to slide: :func:`slidesparse.weights.packed.slid_groups`."""
    packer = _packer(weight.device)
    return packed.slid_groups(weight, pattern, k_offset=k_offset, whole=whole, name=name, packer=packer)


def pack_shard(
    weight: torch.Tensor,
    pattern: Pattern,
    *,
    scale: torch.Tensor | None = None,
    k_offset: int = 0,
    name: str = "weight",
) -> PackedWeight:
    """Pack a shard, of whose groups any number may follow a partial pattern; arguments as of :func:`pack`.

    Raises:
        PatternViolation: A uniform pattern is violated.
        InputError: The weight is malformed, or holds NaN or Inf.
    """
    groups = groups_to_slide(weight, pattern, k_offset=k_offset, name=name)
    return pack(weight, pattern, scale=scale, k_offset=k_offset, groups=groups, checked=True, name=name)


@lru_cache(maxsize=64)
def _packer(device: torch.device) -> Packer:
    """Return the kernels where they run, else torch."""
    return KernelPacker() if runs_triton(device) else packed.TORCH


class KernelPacker:
    """A :class:`slidesparse.weights.packed.Packer` that runs Triton kernels."""

    def following(self, weight: torch.Tensor, pattern: Pattern, k_offset: int, name: str) -> torch.Tensor:
        """See :class:`slidesparse.weights.packed.Packer`."""
        from slidesparse.weights.pack_kernel import find_following_groups

        with torch.cuda.device_of(weight):  # Triton launches on the current device
            return find_following_groups(with_contiguous_columns(weight), pattern, k_offset=k_offset, name=name)

    def copy(self, weight: torch.Tensor, pattern: Pattern, groups: torch.Tensor, k_offset: int) -> torch.Tensor:
        """See :class:`slidesparse.weights.packed.Packer`."""
        from slidesparse.weights.pack_kernel import copy_groups

        with torch.cuda.device_of(weight):
            return copy_groups(with_contiguous_columns(weight), pattern, groups, k_offset=k_offset)

    def compress(
        self,
        weight: torch.Tensor,
        pattern: Pattern,
        groups: torch.Tensor | None,
        k_offset: int,
        name: str,
        *,
        checked: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`slidesparse.weights.packed.Packer`."""
        from slidesparse.weights.pack_kernel import compress_groups

        with torch.cuda.device_of(weight):
            rows = with_contiguous_columns(weight)
            values, code, _ = compress_groups(rows, pattern, groups, k_offset=k_offset, checked=checked, name=name)
        return values, code
