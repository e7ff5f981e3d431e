"""The contract between lifting and multiplying: the order of activations in memory.

A GEMM backend declares a :class:`Layout`; the quantise-and-lift kernels write it; the backend's kernel reads it.

:meth:`weights.packed.PackedWeight.column_map` defines the column order as an index vector, of which a kernel would
load eight bytes for every byte that it writes. The few numbers of a :class:`ColumnOrder` are equivalent.

A layout may ask for *bundles* of 32 groups, whose windows are interleaved: one slab has window 0 of all of them, the
next slab their window 1 (:func:`in_bundles`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch

from slidesparse.errors import InputError
from slidesparse.lifting.prologue import Prologue
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.pattern import WINDOW
from slidesparse.weights.quant import ActivationRounding
from slidesparse.weights.support import as_bits

SLAB_BYTES = 128
"""Row length of a slab: the widest swizzle span of Hopper's shared memory."""

CHUNK_BYTES = 16
"""Bytes of a chunk, the unit of the swizzle."""

BUNDLE = 32
"""Groups of a bundle: one window of each fills a slab of 8-bit types."""

BUNDLE_STRIDE = 8
"""Distance of the groups of neighbouring windows in a slab of a bundle; see :func:`in_bundles`."""


@dataclass(frozen=True)
class ColumnOrder:
    """The packed column order of one weight.

    Attributes:
        in_features: Input columns K.
        group: Columns of a group, 2N; a dense weight has groups of 4, whose one window moves no column.
        k_offset: Position inside its group of input column 0.
        groups: Groups of a row.
        k_packed: Packed columns K', padding included.
        slid: Whether the weight is slid; False for a dense one.
        bundle: Groups whose windows are interleaved: 1 for none, or :data:`BUNDLE` (:func:`in_bundles`).
    """

    in_features: int
    group: int
    k_offset: int
    groups: int
    k_packed: int
    slid: bool
    bundle: int = 1

    @classmethod
    def of(cls, packed: PackedWeight, multiple: int = 1, bundle: int = 1) -> ColumnOrder:
        """Return the order of ``column_map(packed, multiple, bundle)``; ``multiple`` is 1 or even."""
        pattern, columns = packed.form, packed.shape[1]
        groups = pattern.groups(columns, packed.k_offset)
        k_packed = _padded(_padded(groups, bundle) * pattern.slid_group, multiple)
        return cls(columns, pattern.group, packed.k_offset, groups, k_packed, packed.slid, bundle)

    @classmethod
    def identity(cls, columns: int, multiple: int = 1) -> ColumnOrder:
        """Return the identical order, for a dense GEMM; the number of columns, or ``multiple``, must be even."""
        k_packed = _padded(columns, multiple)
        return cls(columns, WINDOW, 0, -(-columns // WINDOW), k_packed, slid=False)

    @property
    def numbers(self) -> list[int]:
        """All fields in order, as one argument of an operator."""
        return list(map(int, astuple(self)))


@dataclass(frozen=True)
class Slabs:
    """Slab after slab: ``[K' bytes / 128][M, padded to a multiple of 8][128 bytes]``.

    Any tile of tokens by 128 bytes of K' is contiguous: one bulk copy moves it. Rows past M repeat the last one.
    16-byte chunk ``c`` of row ``r`` is at chunk ``c ^ (r % 8)``: the 128-byte swizzle of wgmma operands, for copies
    that do not swizzle themselves.
    """

    def padded(self, tokens: int) -> int:
        """Return M, padded to a multiple of 8, after which the swizzle repeats."""
        return tokens + -tokens % 8

    def shape(self, tokens: int, k_packed: int, itemsize: int) -> tuple[int, int, int]:
        """Return the shape of the output in elements."""
        slab = SLAB_BYTES // itemsize
        if k_packed % slab:
            raise InputError("packed columns for slabs", got=k_packed, needed=f"a multiple of {slab}")
        return k_packed // slab, self.padded(tokens), slab

    def arrange(self, values: torch.Tensor) -> torch.Tensor:
        """Arrange row-major values [M, K'] in this layout, of :meth:`shape`: the definition of the kernels' output."""
        tokens, k_packed = values.shape
        slabs, rows, slab = self.shape(tokens, k_packed, values.element_size())
        chunk = CHUNK_BYTES // values.element_size()
        padded = as_bits(values)[torch.arange(rows, device=values.device).clamp(max=tokens - 1)]
        chunks = padded.view(rows, slabs, slab // chunk, chunk).transpose(0, 1)
        chunks = swizzled(chunks, torch.arange(rows, device=values.device) % 8)
        return chunks.reshape(slabs, rows, slab).view(values.dtype)


def exact_rows(tokens: int) -> int:
    """Return the number of tokens, for a GEMM without padding."""
    return tokens


def one_group(packed: PackedWeight) -> int:
    """Return 1: windows stay in the order of their groups."""
    return 1


@dataclass(frozen=True)
class Layout:
    """The layout in which a backend reads activations.

    Their tensor is always a contiguous [M, K'], whatever the order of its bytes and the memory after it, so that code
    for shapes needs no layout.

    Attributes:
        lifted: False for a backend that multiplies the unpacked weight.
        multiple: Columns are padded with zeros to a multiple of this.
        rows: Tokens M -> rows that its GEMM reads. The lift allocates so many, with any contents past M, which spares
            :func:`with_rows` a copy. Ignored with ``slabs``.
        slabs: The slabs in which the bytes are stored; None: row-major.
        bundle: Weight -> groups of a bundle, 1 or :data:`BUNDLE`.
    """

    lifted: bool = True
    multiple: int = 1
    rows: Callable[[int], int] = exact_rows
    slabs: Slabs | None = None
    bundle: Callable[[PackedWeight], int] = one_group

    def multiple_of(self, dtype: torch.dtype) -> int:
        """Return the multiple to which columns of this type are padded; slabs are whole."""
        return self.multiple if self.slabs is None else math.lcm(self.multiple, SLAB_BYTES // dtype.itemsize)

    def order(self, packed: PackedWeight) -> ColumnOrder | None:
        """Return the column order for the Triton kernels; None where they cannot write it."""
        multiple = self.multiple_of(packed.dtype)
        if self.lifted:
            return ColumnOrder.of(packed, multiple, self.bundle(packed))
        even = multiple % 2 == 0 or packed.shape[1] % 2 == 0  # the kernels write pairs of columns
        return ColumnOrder.identity(packed.shape[1], multiple) if even else None

    def column_map(self, packed: PackedWeight) -> torch.Tensor:
        """Return the input column of every column that the kernel reads, -1 for padding: int64 [K']."""
        multiple = self.multiple_of(packed.dtype)
        if self.lifted:
            return column_map(packed, multiple, self.bundle(packed))
        columns = torch.arange(packed.shape[1], device=packed.device)
        return torch.nn.functional.pad(columns, (0, -len(columns) % multiple), value=-1)


def column_map(packed: PackedWeight, multiple: int = 1, bundle: int = 1) -> torch.Tensor:
    """Return :meth:`~slidesparse.weights.packed.PackedWeight.column_map` with its windows in bundles: int64 [K'].

    Groups are padded to a multiple of ``bundle``, 1 or :data:`BUNDLE`, then columns to one of ``multiple``.
    """
    if bundle == 1:
        return packed.column_map(multiple)
    windows = packed.column_map().view(-1, packed.form.windows, WINDOW)
    columns = in_bundles(windows, -1).flatten()
    return torch.nn.functional.pad(columns, (0, -len(columns) % multiple), value=-1)


def in_bundles(windows: torch.Tensor, value: int) -> torch.Tensor:
    """Interleave the windows of each bundle of 32 groups: window j of all of them, then their window j + 1.

    The four windows of a lane's store are of groups 8 apart, so that neighbouring lanes read neighbouring groups: the
    quantise-and-lift kernels have no bank conflicts, and the product loses nothing::

        one slab: window j of the groups   0 8 16 24 | 1 9 17 25 | ... | 7 15 23 31

    [..., groups, windows of a group, items] -> [..., bundles, windows of a group, 32, items]; the last bundle is padded
    with ``value``.
    """
    windows = torch.nn.functional.pad(windows, (0, 0, 0, 0, 0, -windows.shape[-3] % BUNDLE), value=value)
    bundles: torch.Tensor = windows.unflatten(-3, (-1, BUNDLE // BUNDLE_STRIDE, BUNDLE_STRIDE))
    return bundles.transpose(-4, -2).flatten(-3, -2)


class LiftSpec(NamedTuple):
    """The steps of a lift, for every token.

    Attributes:
        prologue: The prologue.
        source: Type of the activations.
        target: torch.int8 or torch.float8_e4m3fn; ``source`` to lift only, bit for bit.
        order: :attr:`ColumnOrder.numbers`; empty where the kernel cannot write the order.
        layout: The layout of the backend that will read the values.
        activation_rounding: The server whose rounding is reproduced.
    """

    prologue: Prologue
    source: torch.dtype
    target: torch.dtype
    order: tuple[int, ...]
    layout: Layout
    activation_rounding: ActivationRounding = "vllm"

    @property
    def columns(self) -> ColumnOrder:
        """The column order, which must not be empty."""
        return ColumnOrder(*self.order)  # type: ignore[arg-type] # mypy does not count them

    @property
    def read(self) -> int:
        """Columns of an input row: K, or 2K for ``silu_mul``; the order must not be empty."""
        return self.order[0] * (2 if self.prologue == "silu_mul" else 1)


class LinearTensors(NamedTuple):
    """The tensors that a linear reads besides activations, the same in every call.

    Attributes:
        column_map: int64 [K'], the input column of every packed column.
        operand: The tensors that a backend's kernel reads of the weight.
        scale: float32 [out], the weight's scale; None for types that are not quantised.
        bias: [out], or None.
        norm_weight: [K], the weight of the norm in its prologue; None without one.
    """

    column_map: torch.Tensor
    operand: Sequence[torch.Tensor]
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    norm_weight: torch.Tensor | None


class Lifted(NamedTuple):
    """The result of a lift.

    Attributes:
        values: [M, K'], 8-bit or in the type of the activations, in the layout asked for.
        scale: float32 [M, 1]; None when nothing was quantised.
        residual: [M, K], ``x + residual`` with a norm that adds it; else None.
    """

    values: torch.Tensor
    scale: torch.Tensor | None
    residual: torch.Tensor | None


def check_slabs(x: torch.Tensor, needed: int) -> None:
    """Check that the memory of activations [M, K'] in slabs has as many bytes as needed.

    Raises:
        InputError: It ends too early: they were made for another layout, or copied since. Where there is enough memory,
            bytes of another layout are not recognised.
    """
    n_bytes = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    if not x.is_contiguous() or n_bytes < needed:
        raise InputError(
            "activations in slabs",
            got=f"{n_bytes} bytes, strides {x.stride()}",
            needed=f"{needed} bytes, contiguous",
            remedy="pass on the result of ops.quantize_lift for this backend, uncopied",
        )


def with_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """Return activations [M, K'] as [rows, K'], rows >= M; rows past M have any contents.

    A library's plan has a fixed number of rows, while batches vary. Reading on in the memory after ``x`` costs nothing;
    where that is too short, the activations are copied. The contents of extra rows never reach a result.
    """
    tokens, columns = x.shape
    if rows == tokens and x.is_contiguous():
        return x
    end = (x.storage_offset() + rows * columns) * x.element_size()
    if x.is_contiguous() and end <= x.untyped_storage().nbytes():
        return x.as_strided((rows, columns), (columns, 1))
    padded = x.new_empty(rows, columns)
    padded[:tokens] = x
    return padded


def swizzled(chunks: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Put chunk ``c`` of every row of [..., rows, chunks, elements] at ``c ^ key[row]``, as wgmma expects of operands.

    The PTX ISA ("Matrix descriptor") has ``row % 8`` for rows of 128 bytes in shared memory, ``row / 2 % 4`` for 64.
    """
    chunk = torch.arange(chunks.shape[-2], device=chunks.device)
    # An exclusive or is its own inverse: chunk c comes from where chunk c went.
    return chunks.gather(-2, (chunk ^ key.unsqueeze(1)).unsqueeze(-1).expand_as(chunks))


def _padded(columns: int, multiple: int) -> int:
    return columns + -columns % multiple
