"""Arrange weights as the Hopper kernel's shared memory needs them, so that every step of a tile is one bulk copy.

A *row block* is 64 rows of W, the M of ``wgmma``. A *slab* is 128 bytes of a row of lifted activations. The weight has

* in the 2:4 segment, one step a slab: 64 bytes of kept values a row, then the metadata of the 64 rows;
* in the dense segment, two steps a slab, each 64 bytes of weights a row.

Four row blocks are a *row tile*: a step of a row tile is contiguous, and so is a step of a half or a quarter of it.

Rows of 64 bytes are swizzled as ``wgmma`` expects of a shared-memory operand (PTX ISA, "Matrix descriptor", 64-byte
swizzling): 16-byte chunk ``c`` of row ``r`` is at ``c ^ (r / 2 % 4)``. ``gemm/hopper/sparse_gemm.cu`` reads this.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from slidesparse.layout import CHUNK_BYTES, SLAB_BYTES, ColumnOrder, Slabs, swizzled
from slidesparse.packed import PackedWeight, Segment
from slidesparse.slide import metadata
from slidesparse.support import as_bits

SLABS = Slabs(swizzle=True)
"""Layout of the activations."""

ROWS = 64
BLOCKS = 4
TILE_ROWS = ROWS * BLOCKS
STEP_BYTES = 64
ZERO_NIBBLE = 0x4
"""Metadata of a window whose two values are padding: indices 0 and 1."""


def step_bytes(itemsize: int) -> int:
    """Return the bytes of a row block in a 2:4 step: values, then metadata, 1024 bytes for 8-bit types, else 512."""
    return ROWS * STEP_BYTES + 1024 // itemsize


class HopperOperand(NamedTuple):
    """The tensors that the kernel reads of a weight, in the order of its arguments.

    Attributes:
        dense: From :func:`dense_steps`.
        sparse: From :func:`sparse_steps`.
    """

    dense: torch.Tensor
    sparse: torch.Tensor


def step_shapes(order: ColumnOrder, itemsize: int, out_features: int) -> tuple[torch.Size, torch.Size]:
    """Return the shapes of an :class:`HopperOperand`, dense first.

    Args:
        order: The packed column order in slabs.
        itemsize: Bytes of a weight.
        out_features: Rows of the weight.
    """
    tiles, slab = -(-out_features // TILE_ROWS), SLAB_BYTES // itemsize
    sparse = (tiles, order.slid_columns // slab, BLOCKS, step_bytes(itemsize))
    dense = (tiles, 2 * (order.dense_columns // slab), BLOCKS, ROWS * STEP_BYTES)
    return torch.Size(dense), torch.Size(sparse)


def sparse_steps(packed: PackedWeight) -> torch.Tensor:
    """Return the 2:4 segment in steps: uint8 [row tiles, slabs, 4, 4096 + metadata], no slabs without one."""
    out, itemsize = packed.shape[0], packed.dtype.itemsize
    segment = _segment(packed, "2:4")
    if segment is None or segment.code is None:
        return torch.empty(
            -(-out // TILE_ROWS), 0, BLOCKS, step_bytes(itemsize), dtype=torch.uint8, device=packed.device
        )
    values = _row_steps(segment.values)
    windows = SLAB_BYTES // itemsize // 4
    nibbles = metadata(segment.code, packed.pattern)
    missing = values.shape[1] * windows - nibbles.shape[1]
    nibbles = F.pad(nibbles, (0, missing, 0, -out % TILE_ROWS), value=ZERO_NIBBLE)
    words = _metadata_words(nibbles, windows) if itemsize == 1 else _metadata_words_16(nibbles, windows)
    return _row_tiles(torch.cat([values, words], -1))


def dense_steps(packed: PackedWeight) -> torch.Tensor:
    """Return the dense segment in steps: uint8 [row tiles, 2 * slabs, 4, 4096], no slabs without one."""
    segment = _segment(packed, "dense")
    if segment is None:
        tiles = -(-packed.shape[0] // TILE_ROWS)
        return torch.empty(tiles, 0, BLOCKS, ROWS * STEP_BYTES, dtype=torch.uint8, device=packed.device)
    steps = _row_steps(segment.values)
    return _row_tiles(F.pad(steps, (0, 0, 0, steps.shape[1] % 2)))


def _segment(packed: PackedWeight, kind: str) -> Segment | None:
    return next((segment for segment in packed.segments if segment.kind == kind), None)


def _row_tiles(steps: torch.Tensor) -> torch.Tensor:
    """Join row blocks to row tiles: [row blocks, steps, bytes] -> [row tiles, steps, 4, bytes]."""
    tiles: torch.Tensor = steps.unflatten(0, (-1, BLOCKS))
    return tiles.transpose(1, 2).contiguous()


def _row_steps(values: torch.Tensor) -> torch.Tensor:
    """Cut rows [out, columns] into steps of 64 bytes and swizzle them: uint8 [row blocks, steps, 4096]."""
    data = as_bits(values).contiguous().view(torch.uint8)
    data = F.pad(data, (0, -data.shape[1] % STEP_BYTES, 0, -data.shape[0] % TILE_ROWS))
    chunks = data.view(-1, ROWS, data.shape[1] // STEP_BYTES, STEP_BYTES // CHUNK_BYTES, CHUNK_BYTES).transpose(1, 2)
    return swizzled(chunks, torch.arange(ROWS, device=data.device) // 2 % 4).flatten(2)


def _metadata_words(nibbles: torch.Tensor, windows: int) -> torch.Tensor:
    """Arrange the metadata of 8-bit types: uint8 [out, windows of all slabs] -> uint8 [row blocks, slabs, 1024].

    An instruction covers 64 lifted columns, 16 windows. A thread's register holds eight windows of one row: lane bit 0
    adds 8 to the row, lane bit 1 takes the second eight (PTX ISA, ``wgmma.mma_async.sp``, metadata for ``.e4m3``).
    """
    pairs = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    # block, warp, +8, row, slab, instruction, half, byte
    by_lane = pairs.view(-1, 4, 2, 8, pairs.shape[1] * 2 // windows, 2, 2, 4)
    return by_lane.permute(0, 4, 5, 1, 3, 6, 2, 7).reshape(by_lane.shape[0], by_lane.shape[4], -1)


def _metadata_words_16(nibbles: torch.Tensor, windows: int) -> torch.Tensor:
    """Arrange the metadata of 16-bit types: uint8 [out, windows of all slabs] -> uint8 [row blocks, slabs, 512].

    An instruction covers 32 lifted columns, 8 windows, and reads half of the lanes; lane bit 1 is the instruction. A
    register holds four windows of a row and of the row 8 below; lane bit 0 takes the second four.
    """
    pairs = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    # block, warp, +8, row, slab, instruction, half, byte
    by_lane = pairs.view(-1, 4, 2, 8, pairs.shape[1] * 2 // windows, 2, 2, 2)
    return by_lane.permute(0, 4, 1, 3, 5, 6, 2, 7).reshape(by_lane.shape[0], by_lane.shape[4], -1)
