"""Weights in the layout of our kernels' shared memory: every step of a tile is contiguous.

A *row block* is 64 rows of W, the M of ``wgmma``, and four of them are a *row tile*; a *slab* is 128 bytes of a row of
lifted activations. The weight has one step a slab: 64 bytes of kept values a row, then the metadata of the 64 rows. A
step of a row tile is contiguous, and so is one of a half or a quarter of it.

**Bundles** (:data:`COUNTS`). 8-bit weights of 4:6 to 14:16 need no metadata: two counts of 3 or 4 bits say how many
kept entries of a group precede each of its left-out positions. The slabs of a bundle (``lifting.layout.in_bundles``)
share 32 groups, with one copy of their counts before its steps: 0.84 bytes a weight at 6:8, in place of 0.94.

**Six bits** (:func:`weights.support.value_bits`). INT8 values that are all multiples of 4 have six bits in memory:
0.75 bytes a weight at 6:8. A thread loads its values of an instruction, with their metadata, as 16 bytes.

**Dense** weights have no metadata, and four instructions a slab: the values of its two halves, one after the other, or
six bits of them, 0.75 bytes a weight.

Rows of 64 bytes are swizzled as ``wgmma`` expects of a shared-memory operand (PTX ISA, "Matrix descriptor", 64-byte
swizzling): 16-byte chunk ``c`` of row ``r`` is at ``c ^ (r / 2 % 4)``. The kernels in ``csrc`` read this.

:func:`pack_steps` packs; :func:`unpack_steps` is its inverse.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import torch
import torch.nn.functional as F

from slidesparse.errors import UnsupportedError
from slidesparse.lifting.layout import BUNDLE, CHUNK_BYTES, SLAB_BYTES, ColumnOrder, Layout, Slabs, in_bundles, swizzled
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.pattern import COUNTED, WINDOW, WINDOW_KEEP, Pattern
from slidesparse.weights.slide import decode_group, metadata
from slidesparse.weights.support import INT_VIEW, as_bits

SLABS = Slabs()
"""Layout of the activations."""

ROWS = 64
BLOCKS = 4
TILE_ROWS = ROWS * BLOCKS
STEP_BYTES = 64
VALUE_BYTES = ROWS * STEP_BYTES
"""Values of a row block in a step."""

ZERO_NIBBLE = 0x4
"""Metadata of a window whose two values are padding: indices 0 and 1."""

PLANE_BYTES = 512
"""Bytes of one bit of all counts of a row block in a bundle: a word for each thread."""

PADDING = Fraction(51, 50)
"""Most slabs with bundles for each slab without; beyond it, padding to whole bundles costs more than it saves."""


def value_bytes(value_bits: int) -> int:
    """Return the bytes of the values of a row block in a 2:4 step, of 6 bits, or of 8 for all other types."""
    return VALUE_BYTES // 8 * value_bits


def step_bytes(itemsize: int, value_bits: int = 8, dense: bool = False) -> int:
    """Return the bytes of a row block in a step: values, and metadata of 2:4, 1024 bytes for 8-bit types, else 512."""
    return 2 * value_bytes(value_bits) if dense else value_bytes(value_bits) + 1024 // itemsize


def bundle_of(packed: PackedWeight) -> int:
    """Return the groups of a weight's bundle: :data:`~lifting.layout.BUNDLE`; 1 where metadata are better.

    Metadata are better for 16-bit types, for 2:4 (where a nibble is smaller than two counts), for counts of more than
    4 bits, and for few groups, which would not fill their bundles.
    """
    windows, groups = packed.form.windows, packed.form.groups(packed.shape[1], packed.k_offset)
    if packed.dtype.itemsize != 1 or windows not in COUNTED:
        return 1
    plain = -(-groups * packed.pattern.slid_group // SLAB_BYTES)
    return BUNDLE if -(-groups // BUNDLE) * windows <= PADDING * plain else 1


METADATA = Layout(slabs=SLABS)
"""Layout with metadata next to the values of every step."""

COUNTS = Layout(slabs=SLABS, bundle=bundle_of)
"""Layout with counts once a bundle, wherever they are smaller; see :func:`bundle_of`."""


class StepForm(NamedTuple):
    """The memory form of a weight.

    Attributes:
        slabs: Its slabs.
        windows: Slabs of a bundle; 0 with metadata in every step, and of a dense weight.
        value_bits: Bits of a kept value in memory: 6, or 8 for all others.
        dense: Whether the weight is dense.
    """

    slabs: int
    windows: int
    value_bits: int = 8
    dense: bool = False

    @classmethod
    def of_order(cls, order: ColumnOrder, itemsize: int, value_bits: int = 8) -> StepForm:
        """Return the form of the weight for activations in this order."""
        windows = order.group // 2 - 1 if order.bundle > 1 else 0
        return cls(order.k_packed * itemsize // SLAB_BYTES, windows, value_bits, not order.slid)

    @property
    def count_bits(self) -> int:
        """Bits of a count; 0 with metadata."""
        return count_bits_of(self.windows) if self.windows else 0

    def shape(self, out_features: int, itemsize: int) -> torch.Size:
        """Return the shape of a weight's tensor, for so many rows."""
        tiles = -(-out_features // TILE_ROWS)
        if not self.windows:
            return torch.Size((tiles, self.slabs, BLOCKS, step_bytes(itemsize, self.value_bits, self.dense)))
        return torch.Size((tiles, self.slabs // self.windows, bundle_bytes(self.windows, self.value_bits)))


def count_bits_of(windows: int) -> int:
    """Return the bits of a count of kept entries, 0 to twice the windows of a group.

    >>> [count_bits_of(windows) for windows in (2, 3, 4, 7)]
    [3, 3, 4, 4]
    """
    return (WINDOW_KEEP * windows).bit_length()


def bundle_bytes(windows: int, value_bits: int) -> int:
    """Return the bytes of a bundle of a row tile: counts, then the values of its steps."""
    return BLOCKS * (count_bits_of(windows) * PLANE_BYTES + windows * value_bytes(value_bits))


def refuse_dense(packed: PackedWeight) -> None:
    """Raise an UnsupportedError for a dense weight, whose eight bits the Hopper kernel cannot read."""
    if packed.code is None:
        what, remedy = "a dense weight for the Hopper kernel", "use backend='dense'"
        raise UnsupportedError(what, got="8 bits", needed="INT8 multiples of 4", remedy=remedy)


def pack_steps(packed: PackedWeight, bundle: int, value_bits: int = 8) -> torch.Tensor:
    """Return a weight in steps, for ``bundle`` groups of activations and 6 or 8 bits of a kept value.

    uint8 [row tiles, slabs, 4, bytes of a step]; or in bundles
    [row tiles, bundles, 4 * (512 * bits of a count + bytes of a step's values * windows of a group)].
    """
    out, itemsize = packed.shape[0], packed.dtype.itemsize
    if packed.code is None:
        padding = 0, -packed.values.shape[1] % (SLAB_BYTES // itemsize)
        padded = F.pad(as_bits(packed.values), padding).view(packed.dtype)
        halves = _six_bit_steps(padded) if value_bits == 6 else _row_steps(padded)
        return _row_tiles(halves.unflatten(1, (-1, 2)).flatten(2))
    if bundle > 1:
        return _bundles(packed.values, packed.code, packed.pattern, value_bits)
    values = _row_steps(packed.values) if value_bits == 8 else _six_bits(packed.values)
    windows = SLAB_BYTES // itemsize // 4
    nibbles = metadata(packed.code, packed.pattern)
    missing = values.shape[1] * windows - nibbles.shape[1]
    nibbles = F.pad(nibbles, (0, missing, 0, -out % TILE_ROWS), value=ZERO_NIBBLE)
    words = _metadata_words(nibbles, windows) if itemsize == 1 else _metadata_words_16(nibbles, windows)
    if value_bits == 6:  # of each thread: three words of values, one of metadata
        return _row_tiles(torch.cat([values, words.unflatten(-1, (-1, 4))], -1).flatten(2))
    return _row_tiles(torch.cat([values, words], -1))


def _bundles(values: torch.Tensor, code: torch.Tensor, pattern: Pattern, value_bits: int) -> torch.Tensor:
    """Arrange the kept values [out, n * keep] and codes [out, n] of groups as :func:`pack_steps` says."""
    windows = as_bits(values).unflatten(1, (-1, pattern.windows, WINDOW_KEEP))
    in_order = in_bundles(windows, 0).flatten(1)
    steps = _row_tiles(_six_bit_steps(in_order) if value_bits == 6 else _row_steps(in_order))
    a, b = decode_group(code, pattern)
    # Padding groups and rows keep their first entries: all kept entries precede both left-out positions.
    counts = torch.stack([a, b - 1], -1).unsqueeze(2)
    counts = in_bundles(counts, pattern.keep).squeeze(2)
    counts = F.pad(counts, (0, 0, 0, 0, 0, 0, 0, -len(counts) % TILE_ROWS), value=pattern.keep)
    words = _row_tiles(_count_words(counts, count_bits_of(pattern.windows)))
    steps = steps.unflatten(1, (-1, pattern.windows))
    return torch.cat([words.flatten(2), steps.flatten(2)], 2)


def _count_words(counts: torch.Tensor, bits: int) -> torch.Tensor:
    """Arrange counts bit by bit: int8 [out, bundles, 32, 2] -> uint8 [row blocks, bundles, 512 * bits].

    A word has one bit of the counts (a, b) of the 16 groups of a thread's metadata in the two instructions of a slab
    (:func:`_metadata_words`): nibble n has the group of window n of its first register, then of its second.
    """
    # block, warp, +8, row, bundle, instruction, half, window, count
    by_lane = counts.view(-1, 4, 2, 8, counts.shape[1], 2, 2, 8, 2)
    by_lane = by_lane.permute(0, 4, 1, 3, 6, 2, 7, 5, 8).flatten(-2)  # ..., window, the four counts of a nibble
    weight = torch.tensor([1, 2, 4, 8], dtype=torch.uint8, device=counts.device)
    planes = []
    for bit in range(bits):
        nibbles = ((by_lane >> bit & 1).to(torch.uint8) * weight).sum(-1, dtype=torch.uint8)
        planes.append((nibbles[..., 0::2] | nibbles[..., 1::2] << 4).flatten(2))
    return torch.cat(planes, -1)


def _row_tiles(steps: torch.Tensor) -> torch.Tensor:
    """Join row blocks to row tiles: [row blocks, steps, bytes] -> [row tiles, steps, 4, bytes]."""
    tiles: torch.Tensor = steps.unflatten(0, (-1, BLOCKS))
    return tiles.transpose(1, 2).contiguous()


def _padded(values: torch.Tensor) -> torch.Tensor:
    """Pad rows [out, columns] to whole row tiles and steps: uint8 [row blocks, 64, bytes]."""
    data = as_bits(values).contiguous().view(torch.uint8)
    data = F.pad(data, (0, -data.shape[1] % STEP_BYTES, 0, -data.shape[0] % TILE_ROWS))
    blocks: torch.Tensor = data.unflatten(0, (-1, ROWS))
    return blocks


def _row_steps(values: torch.Tensor) -> torch.Tensor:
    """Cut rows [out, columns] into steps of 64 bytes and swizzle them: uint8 [row blocks, steps, 4096]."""
    chunks = _padded(values).unflatten(2, (-1, STEP_BYTES // CHUNK_BYTES, CHUNK_BYTES)).transpose(1, 2)
    return swizzled(chunks, torch.arange(ROWS, device=values.device) // 2 % 4).flatten(2)


def _six_bit_steps(values: torch.Tensor) -> torch.Tensor:
    """Cut INT8 rows [out, columns] into steps without metadata: uint8 [row blocks, steps, 3072].

    Of an instruction two words of every thread come first, then their third words.
    """
    words = _six_bits(values).unflatten(2, (2, -1))
    return torch.cat([words[..., :8].flatten(3), words[..., 8:].flatten(3)], -1).flatten(2)


def _six_bits(values: torch.Tensor) -> torch.Tensor:
    """Arrange INT8 rows [out, columns] by threads: uint8 [row blocks, steps, 2 instructions * 128, 12].

    Of an instruction a thread has four registers (PTX ISA, "Register Fragments for sparse wgmma.mma_async.m64nNk64"):
    register r has row lane / 4 + r % 2 * 8 of its warp's, from kept value lane % 4 * 4 + r / 2 * 16 on. Upper nibbles
    of registers 0 and 1, and of 2 and 3, share a word; the next two bits of all four share the third.
    """
    # block, warp, +8, row, step, instruction, second half, lane % 4, byte
    by_lane = _padded(values).view(-1, 4, 2, 8, -(-values.shape[1] // STEP_BYTES), 2, 2, 4, 4)
    # the four registers first, then block, step, instruction, warp, row, lane % 4, byte
    r0, r1, r2, r3 = by_lane.permute(6, 2, 0, 4, 5, 1, 3, 7, 8).flatten(0, 1)
    words = r0 & 0xF0 | r1 >> 4, r2 & 0xF0 | r3 >> 4, (r3 & 12) << 4 | (r2 & 12) << 2 | r0 & 12 | r1 >> 2 & 3
    return torch.cat(words, -1).flatten(2, 5)


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


# -- the inverse: every function below undoes the one of a like name above --------------------------------------------


def unpack_steps(steps: torch.Tensor, form: StepForm, out_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix for lifted activations, zeros in place: the inverse of :func:`pack_steps`.

    Args:
        steps: uint8, the steps of one weight; of the weights of experts, one at a time.
        form: Its form.
        out_features: Its rows, without the padding to row tiles.
        dtype: Its type.

    Returns:
        [out, K'] in ``dtype``, bit for bit, its columns in the order of the activations in slabs.
    """
    if form.dense:
        halves = _row_blocks(steps).unflatten(2, (2, -1)).flatten(1, 2)
        rows = _from_six_bit_steps(halves) if form.value_bits == 6 else _from_row_steps(halves)
        return rows.view(dtype)[:out_features]
    if form.windows:
        values, nibbles = _from_bundles(steps, form)
    else:
        values, nibbles = _from_steps(_row_blocks(steps), form, dtype.itemsize)
    kept = values.view(INT_VIEW[dtype])[:out_features].unflatten(1, (-1, WINDOW_KEEP))
    first, second = kept.unbind(-1)
    index0, index1 = nibbles[:out_features] & 3, nibbles[:out_features] >> 2
    columns = [torch.where(index0 == at, first, torch.where(index1 == at, second, 0)) for at in range(WINDOW)]
    return torch.stack(columns, -1).flatten(1).view(dtype)


def _from_steps(blocks: torch.Tensor, form: StepForm, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and metadata, uint8 [rows, bytes] and [rows, windows], of uint8 [row blocks, slabs, bytes]."""
    if form.value_bits == 6:
        words = blocks.unflatten(2, (-1, 16))
        return _from_six_bits(words[..., :12]), _from_metadata_words(words[..., 12:].flatten(2), itemsize)
    return _from_row_steps(blocks[..., :VALUE_BYTES]), _from_metadata_words(blocks[..., VALUE_BYTES:], itemsize)


def _from_bundles(steps: torch.Tensor, form: StepForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and metadata, uint8 [rows, bytes] and [rows, windows], of uint8 [row tiles, bundles, bytes]."""
    count_bytes = BLOCKS * form.count_bits * PLANE_BYTES
    words = _row_blocks(steps[..., :count_bytes].unflatten(2, (BLOCKS, -1)))
    blocks = _row_blocks(steps[..., count_bytes:].unflatten(2, (form.windows, BLOCKS, -1)).flatten(1, 2))
    a, c = _from_count_words(words, form.count_bits).unsqueeze(2).split(1, -1)  # entries before each left-out position
    entry = torch.arange(form.windows * WINDOW_KEEP, dtype=torch.uint8, device=steps.device).view(form.windows, 1, -1)
    index = entry % WINDOW_KEEP + (entry >= a) + (entry >= c)
    nibbles = (index[..., 0] | index[..., 1] << 2).flatten(1)
    return (_from_row_steps if form.value_bits == 8 else _from_six_bit_steps)(blocks), nibbles


def _from_count_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the counts of uint8 [row blocks, bundles, 512 * bits]: uint8 [rows, bundles, 32, 2]."""
    places = torch.arange(4, dtype=torch.uint8, device=words.device)
    planes = _nibbles(words.unflatten(2, (bits, 4, 8, 2, 2, 4))).unsqueeze(-1) >> places & 1
    # block, bundle, warp, row, half, +8, window, instruction, count
    by_lane: torch.Tensor = (planes << places[:bits].view(-1, *[1] * 6)).sum(2, dtype=torch.uint8).unflatten(-1, (2, 2))
    return by_lane.permute(0, 2, 5, 3, 1, 7, 4, 6, 8).reshape(-1, words.shape[1], BUNDLE, 2)


def _row_blocks(tiles: torch.Tensor) -> torch.Tensor:
    """Split row tiles: [row tiles, steps, 4, bytes] -> [row blocks, steps, bytes]."""
    return tiles.transpose(1, 2).flatten(0, 1)


def _from_row_steps(steps: torch.Tensor) -> torch.Tensor:
    """Return the rows of uint8 [row blocks, steps, 4096]: uint8 [rows, bytes]."""
    chunks = steps.unflatten(2, (ROWS, -1, CHUNK_BYTES))
    return swizzled(chunks, torch.arange(ROWS, device=steps.device) // 2 % 4).transpose(1, 2).flatten(2).flatten(0, 1)


def _from_six_bit_steps(steps: torch.Tensor) -> torch.Tensor:
    """Return the rows of uint8 [row blocks, steps, 3072]: uint8 [rows, bytes]."""
    of_two, third = steps.unflatten(2, (2, -1)).split([1024, 512], -1)
    threads = torch.cat([of_two.unflatten(-1, (-1, 8)), third.unflatten(-1, (-1, 4))], -1)
    return _from_six_bits(threads.flatten(2, 3))


def _from_six_bits(threads: torch.Tensor) -> torch.Tensor:
    """Return the rows of uint8 [row blocks, steps, 2 instructions * 128, 12]: uint8 [rows, bytes]."""
    w0, w1, w2 = threads.unflatten(2, (2, 4, 8, 4)).split(4, -1)
    registers = w0 & 0xF0 | w2 & 12, w0 << 4 | w2 << 2 & 12, w1 & 0xF0 | w2 >> 2 & 12, w1 << 4 | w2 >> 4 & 12
    # second half, +8, block, step, instruction, warp, row, lane % 4, byte
    by_lane: torch.Tensor = torch.stack(registers).unflatten(0, (2, 2))
    return by_lane.permute(2, 5, 1, 6, 3, 4, 0, 7, 8).reshape(-1, threads.shape[1] * STEP_BYTES)


def _from_metadata_words(words: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Return the metadata of uint8 [row blocks, slabs, 1024, or 512 of 16-bit types]: uint8 [rows, windows]."""
    if itemsize == 1:  # block, slab, instruction, warp, row, half, +8, byte
        by_lane = words.unflatten(2, (2, 4, 8, 2, 2, 4)).permute(0, 3, 6, 4, 1, 2, 5, 7)
    else:  # block, slab, warp, row, instruction, half, +8, byte
        by_lane = words.unflatten(2, (4, 8, 2, 2, 2, 2)).permute(0, 2, 6, 3, 1, 4, 5, 7)
    return _nibbles(by_lane.flatten(4)).flatten(0, 3)


def _nibbles(pairs: torch.Tensor) -> torch.Tensor:
    """Split bytes into nibbles, the lower one first: [..., n] -> [..., 2n]."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)
