"""What the quantise-and-lift kernels must know of the packed column order, and of the layout that they write.

:meth:`slidesparse.packed.PackedWeight.column_map` defines the order as an index vector. A kernel that read it would
load eight bytes of index for every byte that it writes; these few numbers say the same, plus an index of two bytes for
every pair of columns when a partial pattern moves whole groups.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from slidesparse.errors import InputError
from slidesparse.packed import PackedWeight
from slidesparse.support import as_bits

SLAB_BYTES = 128
"""Row length of a slab: the widest swizzle span of Hopper's shared memory."""

CHUNK_BYTES = 16
"""What a swizzle moves as one."""


@dataclass(frozen=True)
class Columns:
    """The packed column order of one weight: a dense segment, then a slid one; either may be empty.

    Attributes:
        columns: Input columns K.
        group: Columns of a group, 2N.
        k_offset: Position inside its group at which input column 0 stands.
        dense_groups: Groups in the dense segment.
        slid_groups: Groups in the slid segment.
        dense_columns: Length of the dense segment, padding included.
        slid_columns: Length of the slid segment, padding included.
        pairs: [width / 2], the input column that feeds the first column of every packed pair, -2 where there is none:
            int16, int32 for K from 2^15 on. None when the groups are in input order.
    """

    columns: int
    group: int
    k_offset: int
    dense_groups: int
    slid_groups: int
    dense_columns: int
    slid_columns: int
    pairs: torch.Tensor | None = field(default=None, compare=False)

    @classmethod
    def of(cls, packed: PackedWeight, multiple: int = 1) -> Columns:
        """The order of ``packed.column_map(multiple)``.

        Args:
            packed: The weight that will multiply.
            multiple: Each segment is padded with zeros to a multiple of so many columns: 1 or an even number.
        """
        _check_multiple(multiple)
        pattern = packed.pattern
        count = {segment.kind: len(segment.groups) for segment in packed.segments}
        dense, slid = count.get("dense", 0), count.get("2:4", 0)
        moved = _pairs(packed.column_map(multiple), packed.shape[1]) if len(packed.segments) > 1 else None
        return cls(
            columns=packed.shape[1],
            group=pattern.group,
            k_offset=packed.k_offset,
            dense_groups=dense,
            slid_groups=slid,
            dense_columns=_padded(dense * pattern.group, multiple),
            slid_columns=_padded(slid * pattern.slid_group, multiple),
            pairs=moved,
        )

    @classmethod
    def identity(cls, columns: int, multiple: int = 1) -> Columns:
        """Columns as they are, an even number of them, for a dense GEMM: the lift of 2:4 moves nothing."""
        _check_multiple(multiple)
        width = _padded(columns, multiple)
        if width % 2:
            raise InputError("columns to quantise", got=columns, needed="an even number, or an even multiple")
        return cls(columns, 4, 0, 0, -(-columns // 4), 0, width)

    @property
    def gathered(self) -> bool:
        """The groups stand in an order of their own, which ``pairs`` says."""
        return self.dense_groups > 0 and self.slid_groups > 0

    @cached_property
    def without_pairs(self) -> Columns:
        """The same numbers without the tensor: something to remember calls by."""
        return self if self.pairs is None else replace(self, pairs=None)

    @property
    def order(self) -> list[int]:
        """All fields but ``pairs``, in order: what an operator can take as an argument."""
        return [
            self.columns,
            self.group,
            self.k_offset,
            self.dense_groups,
            self.slid_groups,
            self.dense_columns,
            self.slid_columns,
        ]

    @property
    def index_dtype(self) -> torch.dtype:
        """Type of ``pairs``."""
        return index_dtype(self.columns)

    @property
    def width(self) -> int:
        """Packed columns K'."""
        return self.dense_columns + self.slid_columns


@dataclass(frozen=True)
class Slabs:
    """Slab after slab: ``[K' bytes / 128][M, padded to a multiple of rows][128 bytes]``.

    Any tile of tokens by 128 bytes of K' is contiguous, what one bulk copy moves. Rows past M repeat the last one.

    Attributes:
        rows: A multiple of 8, with which the swizzle begins anew.
        swizzle: Put 16-byte chunk ``c`` of row ``r`` at chunk ``c ^ (r % 8)``: the 128-byte swizzle of wgmma operands,
            for copies that do not swizzle themselves.
    """

    rows: int = 8
    swizzle: bool = False

    def __post_init__(self) -> None:
        if self.rows <= 0 or self.rows % 8:
            raise InputError("rows of a slab", got=self.rows, needed="a positive multiple of 8")

    def padded(self, tokens: int) -> int:
        """M, padded."""
        return tokens + -tokens % self.rows

    def shape(self, tokens: int, width: int, itemsize: int) -> tuple[int, int, int]:
        """Shape of the output in elements."""
        slab = SLAB_BYTES // itemsize
        if width % slab:
            raise InputError("packed columns for slabs", got=width, needed=f"a multiple of {slab}")
        return width // slab, self.padded(tokens), slab

    def arrange(self, values: torch.Tensor) -> torch.Tensor:
        """Row-major values [M, K'] in this layout, in torch: what the kernels write, of :meth:`shape`."""
        tokens, width = values.shape
        slabs, rows, slab = self.shape(tokens, width, values.element_size())
        chunk = CHUNK_BYTES // values.element_size()
        padded = as_bits(values)[torch.arange(rows, device=values.device).clamp(max=tokens - 1)]
        chunks = padded.view(rows, slabs, slab // chunk, chunk).transpose(0, 1)
        if self.swizzle:
            chunks = swizzled(chunks, torch.arange(rows, device=values.device) % 8)
        return chunks.reshape(slabs, rows, slab).view(values.dtype)


def _pairs(column_map: torch.Tensor, columns: int) -> torch.Tensor:
    # Where one column of a pair does not exist (an odd k_offset, an odd K) the other one tells.
    first, second = column_map[::2], column_map[1::2]
    pairs = torch.where(second >= 0, second - 1, torch.where(first >= 0, first, -2))
    return pairs.to(index_dtype(columns))


def index_dtype(columns: int) -> torch.dtype:
    """The narrowest type for indices of so many columns."""
    return torch.int16 if columns < 2**15 else torch.int32


def swizzled(chunks: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Put chunk ``c`` of every row at ``c ^ key[row]``, as wgmma expects of operands in shared memory.

    Args:
        chunks: [..., rows, chunks, elements].
        key: int64 [rows]; the PTX ISA ("Matrix descriptor") has ``row % 8`` for rows of 128 bytes, ``row / 2 % 4`` for
            rows of 64.
    """
    chunk = torch.arange(chunks.shape[-2], device=chunks.device)
    # An exclusive or is its own inverse: chunk c comes from where chunk c went.
    return chunks.gather(-2, (chunk ^ key.unsqueeze(1)).unsqueeze(-1).expand_as(chunks))


def _padded(columns: int, multiple: int) -> int:
    return columns + -columns % multiple


def _check_multiple(multiple: int) -> None:
    # The kernels write pairs of columns; groups and windows are even, so only the padding could break a pair.
    if multiple < 1 or (multiple > 1 and multiple % 2):
        raise InputError("multiple of a segment", got=multiple, needed="1 or an even number")
