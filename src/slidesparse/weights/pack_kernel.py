"""Check a weight's pattern and compress it, in one launch.

This is :func:`slidesparse.weights.slide.compress` (which explains the code) on the device, with the checks of
:mod:`weights.support`: nothing is copied into groups first, the weight is read once from memory, and the host reads
two counters instead of the weight.

One program compresses ``BLOCK`` groups of one row, a group along the second dimension::

    bits    [BLOCK, 2N]       weight bits; padding of a cut group is 0
    a, b    [BLOCK]           its last two zeros; a < 0 if it has fewer than two: a violation
    values  [BLOCK, 2N - 2]   entry i is at i + (i >= a) + (i + 1 >= b); read again, now from L1

Bytes moved a group of 8-bit weights: 2N in, 2N - 2 and a code of 1 or 2 out.

A second kernel finds the groups of a weight that follow a partial pattern, reading it once; a third one copies the
groups that do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from slidesparse.base.triton_launcher import Launcher
from slidesparse.weights.packed import Packer, Shard
from slidesparse.weights.support import as_bits, check_groups, check_weight

BLOCK = 128
"""Groups of a program; its launch cost is spread over a kilobyte of weights and more."""

COUNTED_ROWS = 16
"""Rows that a program counts before it adds its result to the others', by one atomic operation a group."""

CODE_TYPES = {True: torch.uint8, False: torch.int16}


@dataclass(frozen=True)
class PackVariant:
    """The constants that a packing kernel is compiled for, besides the types of its arguments.

    Attributes:
        columns: Input columns K.
        group: Columns of a group, 2N.
        k_offset: Position inside its group of column 0.
        groups: Groups to compress.
        gathered: Whether a vector names them.
        magnitude: Bits of a value that are not its sign; all of them for int8.
        non_finite: The first magnitude that is Inf or NaN; 0 where there is none.
        checked: Whether the weight was checked before, so that nothing is checked.
        padded_group: The power of two that holds a group.
        block: Groups of a program.
    """

    columns: int
    group: int
    k_offset: int
    groups: int
    gathered: bool
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
"""Weight type -> the bits that are not the sign, and the first such pattern that is no finite number (0: none)."""


@triton.jit
def _column(start, position, P: tl.constexpr):
    """Return the input columns at positions of groups, and whether they exist."""
    column = start + position
    return column, (position < P.group) & (column >= 0) & (column < P.columns)


@triton.jit
def _blocks(P: tl.constexpr):
    """Return the number of programs that share a row."""
    return (P.groups + P.block - 1) // P.block


@triton.jit
def _nth(P: tl.constexpr):
    """Return the groups of this program, numbered among the groups of the launch [BLOCK]."""
    return tl.program_id(0) % _blocks(P) * P.block + tl.arange(0, P.block)


@triton.jit
def _start(nth, group_ids, P: tl.constexpr):
    """Return the columns at which groups begin, [BLOCK, 1]."""
    group = nth
    if P.gathered:
        group = tl.load(group_ids + nth, mask=nth < P.groups, other=0).to(tl.int32)
    return (group * P.group - P.k_offset)[:, None]


@triton.jit
def pack_kernel(weight, group_ids, values, code, faults, row_stride, P: tl.constexpr):
    """Check and compress groups; see the top of this file.

    ``faults``: int32 [2], groups that violate the pattern, values that are not finite; None where nothing is checked.
    """
    row = (tl.program_id(0) // _blocks(P)).to(tl.int64)
    weight += row * row_stride
    nth = _nth(P)
    exists = (nth < P.groups)[:, None]
    start = _start(nth, group_ids, P)

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

    KEEP: tl.constexpr = P.group - 2
    entry = position
    column, inside = _column(start, entry + (entry >= a) + (entry + 1 >= b), P)
    kept = exists & (entry < KEEP)
    bits = tl.load(weight + column, mask=inside & kept, other=0)
    positive = tl.where((bits & P.magnitude) == 0, 0, bits)  # -0 becomes +0
    tl.store(values + row * (P.groups * KEEP) + nth[:, None] * KEEP + entry, positive.to(bits.dtype), mask=kept)
    rank = b * (b - 1) // 2 + a
    tl.store(code + row * P.groups + nth[:, None], rank.to(code.dtype.element_ty), mask=exists)


@triton.jit
def copy_kernel(weight, group_ids, values, row_stride, P: tl.constexpr):
    """Copy groups, -0 as +0, with zeros where a group is cut: ``values`` [out, groups * 2N]."""
    row = (tl.program_id(0) // _blocks(P)).to(tl.int64)
    weight += row * row_stride
    nth = _nth(P)
    position = tl.arange(0, P.padded_group)[None, :]
    column, inside = _column(_start(nth, group_ids, P), position, P)
    here = (nth < P.groups)[:, None] & (position < P.group)
    bits = tl.load(weight + column, mask=inside & here, other=0)
    positive = tl.where((bits & P.magnitude) == 0, 0, bits)
    at = values + row * (P.groups * P.group) + nth[:, None] * P.group + position
    tl.store(at, positive.to(bits.dtype), mask=here)


@triton.jit(do_not_specialize=["rows"])
def count_kernel(weight, counts, rows, row_stride, P: tl.constexpr, ROWS: tl.constexpr):
    """Count faults as pack_kernel does, and non-zeros in each group's fullest row: int32 [2 + groups], 0 before."""
    nth = _nth(P)
    exists = (nth < P.groups)[:, None]
    column, inside = _column((nth * P.group - P.k_offset)[:, None], tl.arange(0, P.padded_group)[None, :], P)
    largest = tl.full((P.block,), 0, tl.int32)
    broken = 0
    first = (tl.program_id(0) // _blocks(P)).to(tl.int64) * ROWS
    for r in range(ROWS):
        row = first + r
        here = inside & exists & (row < rows)
        magnitude = tl.load(weight + row * row_stride + column, mask=here, other=0) & P.magnitude
        largest = tl.maximum(largest, tl.sum((magnitude != 0).to(tl.int32), 1))
        if P.non_finite > 0:
            broken += tl.sum((magnitude >= P.non_finite).to(tl.int32))
    tl.atomic_max(counts + 2 + nth, largest, mask=nth < P.groups)
    tl.atomic_add(counts + 1, broken, mask=broken > 0)


class KernelPacker(Packer):
    """Packs by these kernels, where the weight is."""

    def following(self, shard: Shard) -> torch.Tensor:
        """See :class:`slidesparse.weights.packed.Packer`."""
        weight, pattern, k_offset, name = shard.by_rows()
        rows, groups = weight.shape[0], pattern.groups(weight.shape[1], k_offset)
        counts = torch.zeros(2 + groups, dtype=torch.int32, device=weight.device)
        if rows:
            variant, launcher = _prepare(count_kernel, weight, (pattern.group, groups, k_offset), None, COUNTED_ROWS)
            _run(launcher, -(-rows // COUNTED_ROWS) * variant.blocks, weight, (counts,), (rows,))
        on_host = counts.cpu()
        if bool(on_host[1]):
            check_weight(weight, name)
        following: torch.Tensor = (on_host[2:] <= pattern.keep).nonzero().flatten()
        return following

    def copy(self, shard: Shard, groups: torch.Tensor) -> torch.Tensor:
        """See :class:`slidesparse.weights.packed.Packer`."""
        weight, pattern, k_offset, _ = shard.by_rows()
        out, count = weight.shape[0], groups.numel()
        groups = groups.contiguous()  # read by address
        values = weight.new_empty(out, count * pattern.group)
        if out and count:
            variant, launcher = _prepare(copy_kernel, weight, (pattern.group, count, k_offset), groups)
            _run(launcher, out * variant.blocks, weight, (groups, as_bits(values)))
        return values

    def compress(
        self, shard: Shard, groups: torch.Tensor | None, *, checked: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`slidesparse.weights.packed.Packer`; waits for the device once, unless all is checked."""
        weight, pattern, k_offset, name = shard.by_rows()
        out, columns = weight.shape
        groups = None if groups is None else groups.contiguous()  # read by address
        count = pattern.groups(columns, k_offset) if groups is None else groups.numel()
        values = weight.new_empty(out, count * pattern.keep)
        code = weight.new_empty(out, count, dtype=CODE_TYPES[pattern.codes <= 256])
        faults = None if checked else torch.zeros(2, dtype=torch.int32, device=weight.device)
        if out and count:
            sizes = pattern.group, count, k_offset
            variant, launcher = _prepare(pack_kernel, weight, sizes, groups, checked=checked)
            _run(launcher, out * variant.blocks, weight, (groups, as_bits(values), code, faults))
        if faults is not None and any(faults.tolist()):
            # Rare, and it ends in an error: the torch definition names the place.
            check_weight(weight, name)
            check_groups(weight, pattern, groups, k_offset=k_offset, name=name)
        return values, code


def _run(
    launcher: Launcher,
    programs: int,
    weight: torch.Tensor,
    others: tuple[torch.Tensor | None, ...],
    free: tuple[int, ...] = (),
) -> None:
    with torch.cuda.device_of(weight):  # Triton launches on the current device
        launcher.run(programs, weight.get_device(), (as_bits(weight), *others), free, (weight.stride(0),))


def _prepare(
    kernel: Any,
    weight: torch.Tensor,
    sizes: tuple[int, int, int],
    groups: torch.Tensor | None,
    *constants: object,
    checked: bool = False,
) -> tuple[PackVariant, Launcher]:
    """Return the variant of a launch and its launcher by one look-up; ``sizes``: of a group, of all groups, offset."""
    gathered = None if groups is None else groups.dtype
    return _prepared(kernel, weight.dtype, weight.device, (weight.shape[1], *sizes), gathered, checked, *constants)


@lru_cache(maxsize=4096)
def _prepared(
    kernel: Any,
    dtype: torch.dtype,
    device: torch.device,  # a launcher is for one device and the types of all tensors
    sizes: tuple[int, int, int, int],
    gathered: torch.dtype | None,
    checked: bool,
    *constants: object,
) -> tuple[PackVariant, Launcher]:
    columns, group, groups, k_offset = sizes
    limits, size = MAGNITUDE[dtype], 1 << (group - 1).bit_length()
    variant = PackVariant(columns, group, k_offset, groups, gathered is not None, *limits, checked, padded_group=size)
    return variant, Launcher(kernel, (variant, *constants), num_warps=4)
