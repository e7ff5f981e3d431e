"""Check and compression of a weight in one launch.

This is :func:`slidesparse.weights.slide.compress` (which explains the code) on the device, with the checks of
:mod:`weights.support`: the weight is read once from memory, and the host reads two counters instead of the weight.

One program compresses ``BLOCK`` groups of one row, a group along the second dimension::

    bits    [BLOCK, 2N]       weight bits; padding of a cut group is 0
    a, b    [BLOCK]           its last two zeros; a < 0 if it has fewer than two: a violation
    values  [BLOCK, 2N - 2]   entry i is at i + (i >= a) + (i + 1 >= b); read again, now from L1

Bytes moved a group of 8-bit weights: 2N in, 2N - 2 and a code of 1 or 2 out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from slidesparse.base.triton_launcher import Launcher
from slidesparse.weights.packed import Packer, Shard
from slidesparse.weights.support import as_bits, check_pattern, check_weight

BLOCK = 128
"""Groups of a program; its launch cost is spread over a kilobyte of weights and more."""

CODE_TYPES = {True: torch.uint8, False: torch.int16}


@dataclass(frozen=True)
class PackVariant:
    """The constants that a packing kernel is compiled for, besides the types of its arguments.

    Attributes:
        columns: Input columns K.
        group: Columns of a group, 2N.
        k_offset: Position inside its group of column 0.
        groups: Groups of a row.
        magnitude: Bits of a value that are not its sign; all of them for int8.
        non_finite: The first magnitude that is Inf or NaN; 0 where there is none.
        checked: Whether the weight was checked before.
        padded_group: The columns of a group, rounded up to a power of two.
        block: Groups of a program.
    """

    columns: int
    group: int
    k_offset: int
    groups: int
    magnitude: int
    non_finite: int
    checked: bool
    padded_group: int
    block: int = BLOCK

    @property
    def blocks(self) -> int:
        """Number of programs that share a row."""
        return -(-self.groups // self.block)


MAGNITUDE = {
    torch.int8: (-1, 0),
    torch.float8_e4m3fn: (0x7F, 0x7F),
    torch.bfloat16: (0x7FFF, 0x7F80),
    torch.float16: (0x7FFF, 0x7C00),
    torch.float32: (0x7FFFFFFF, 0x7F800000),
}
"""Weight type -> mask of the magnitude, and the first magnitude that is not finite (0: none)."""


@triton.jit
def _column(start, position, P: tl.constexpr):
    """Return the input columns at positions of groups, and a mask of those that exist."""
    column = start + position
    return column, (position < P.group) & (column >= 0) & (column < P.columns)


@triton.jit
def _blocks(P: tl.constexpr):
    """Return the number of programs that share a row."""
    return (P.groups + P.block - 1) // P.block


@triton.jit
def pack_kernel(weight, values, code, faults, row_stride, P: tl.constexpr):
    """Check and compress groups; see the top of this file.

    ``faults``: int32 [2], groups that violate the pattern, values that are not finite; None where nothing is checked.
    ``values`` and ``code`` are None where nothing is compressed.
    """
    row = (tl.program_id(0) // _blocks(P)).to(tl.int64)
    weight += row * row_stride
    nth = tl.program_id(0) % _blocks(P) * P.block + tl.arange(0, P.block)
    exists = (nth < P.groups)[:, None]
    start = (nth * P.group - P.k_offset)[:, None]

    position = tl.arange(0, P.padded_group)[None, :]
    column, inside = _column(start, position, P)
    magnitude = tl.load(weight + column, mask=inside & exists, other=0) & P.magnitude
    zeros = tl.where((magnitude == 0) & (position < P.group), position, -1)
    b = tl.max(zeros, 1)[:, None]
    a = tl.max(tl.where(zeros == b, -1, zeros), 1)[:, None]
    if not P.checked:
        violations = tl.sum(((a < 0) & exists).to(tl.int32))
        tl.atomic_add(faults, violations, mask=violations > 0)
        if P.non_finite > 0:
            broken = tl.sum((magnitude >= P.non_finite).to(tl.int32))
            tl.atomic_add(faults + 1, broken, mask=broken > 0)

    if values is not None:
        KEEP: tl.constexpr = P.group - 2
        entry = position
        column, inside = _column(start, entry + (entry >= a) + (entry + 1 >= b), P)
        kept = exists & (entry < KEEP)
        bits = tl.load(weight + column, mask=inside & kept, other=0)
        positive = tl.where((bits & P.magnitude) == 0, 0, bits)  # -0 becomes +0
        tl.store(values + row * (P.groups * KEEP) + nth[:, None] * KEEP + entry, positive.to(bits.dtype), mask=kept)
        rank = b * (b - 1) // 2 + a
        tl.store(code + row * P.groups + nth[:, None], rank.to(code.dtype.element_ty), mask=exists)


class KernelPacker(Packer):
    """Packs by this kernel, where the weight is."""

    def check(self, shard: Shard) -> None:
        """See :class:`slidesparse.weights.packed.Packer`; waits for the device once."""
        _run(shard.by_rows(), None, None, checked=False)

    def compress(self, shard: Shard, *, checked: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`slidesparse.weights.packed.Packer`; waits for the device once, unless all is checked."""
        weight, pattern, k_offset, _ = shard = shard.by_rows()
        out, groups = weight.shape[0], pattern.groups(weight.shape[1], k_offset)
        values = weight.new_empty(out, groups * pattern.keep)
        code = weight.new_empty(out, groups, dtype=CODE_TYPES[pattern.codes <= 256])
        _run(shard, values, code, checked=checked)
        return values, code


def _run(shard: Shard, values: torch.Tensor | None, code: torch.Tensor | None, *, checked: bool) -> None:
    weight, pattern, k_offset, name = shard
    if not len(weight):
        return
    faults = None if checked else torch.zeros(2, dtype=torch.int32, device=weight.device)
    bits = None if values is None else as_bits(values)
    kind = weight.dtype, weight.device, weight.shape[1], pattern.group, k_offset
    variant, launcher = _prepared(*kind, checked, values is not None)
    tensors = as_bits(weight), bits, code, faults
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        launcher.run(len(weight) * variant.blocks, weight.get_device(), tensors, (), (weight.stride(0),))
    if faults is not None and any(faults.tolist()):
        # Rare, and it ends in an error: the torch definition names the place.
        check_weight(weight, name)
        check_pattern(weight, pattern, k_offset, name=name)


@lru_cache(maxsize=4096)
def _prepared(
    dtype: torch.dtype,
    device: torch.device,  # a launcher is for one device and the types of all tensors
    columns: int,
    group: int,
    k_offset: int,
    checked: bool,
    compresses: bool,
) -> tuple[PackVariant, Launcher]:
    """Return the variant of a launch and its launcher by one look-up."""
    groups, padded = -(-(k_offset + columns) // group), 1 << (group - 1).bit_length()
    variant = PackVariant(columns, group, k_offset, groups, *MAGNITUDE[dtype], checked, padded_group=padded)
    return variant, Launcher(pack_kernel, (variant,), num_warps=4)
