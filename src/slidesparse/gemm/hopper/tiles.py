"""The geometry and the cost of the Hopper kernel's tiles.

The costs were fitted to times on an H200, INT8 at 2:4 and 6:8, the linears of Qwen2.5-7B: M from 16 to 256 on cold
weights (results/h200/hopper-few-tokens.jsonl), M from 512 to 16384 on warm ones (hopper-tiles.jsonl there). Split tiles
and those near them were then fitted on an H100 (results/h100/hopper-few-tokens.jsonl). A step has as many bytes and
cycles in the other types.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from slidesparse.gemm.hopper.compile import cubin
from slidesparse.gemm.kernel import BLOCK_BYTES
from slidesparse.gemm.steps import PLANE_BYTES, TILE_ROWS, VALUE_BYTES, step_bytes, value_bytes
from slidesparse.lifting.layout import SLAB_BYTES

PIECE_TOKENS = 32
"""Tokens whose results a warpgroup transposes at a time."""

MULTIPROCESSOR_BYTES = 233472
"""Shared memory of a multiprocessor (CUDA programming guide, compute capability 9.0)."""

_Count = TypeVar("_Count", int, torch.Tensor)


@dataclass(frozen=True)
class Tile:
    """The geometry of a variant of the kernel.

    Attributes:
        tokens: Tokens of a tile, the N of its instructions: a multiple of 16, at most 192.
        warpgroups: Consumer warpgroups, each with channels of its own.
        row_blocks: Blocks of 64 channels of a warpgroup.
        stages: Steps of the ring.
        split: Thread blocks of the cluster that shares the steps of a tile: 1 to 8.
        blocks: Thread blocks of a multiprocessor.
        dense: Whether weights are dense: a step has twice the instructions of a 2:4 one, and more bytes.
    """

    tokens: int
    warpgroups: int
    row_blocks: int
    stages: int
    split: int = 1
    blocks: int = 1
    dense: bool = False

    early = True
    """Whether a launch may begin before the kernel before it has ended."""

    def __str__(self) -> str:
        """Return tokens x channels, split and blocks of a multiprocessor: ``16x128/4b2``."""
        split = f"/{self.split}" if self.split > 1 else ""
        return f"{self.tokens}x{self.channels}{split}" + (f"b{self.blocks}" if self.blocks > 1 else "")

    @property
    def channels(self) -> int:
        """Channels of a tile."""
        return self.warpgroups * self.row_blocks * 64

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return self.split

    def compile(
        self, dtype: torch.dtype, out_dtype: torch.dtype, device: int, grouped: bool, count_bits: int, value_bits: int
    ) -> bytes:
        """Return the machine code for a device, by its index; see :func:`slidesparse.gemm.hopper.compile.cubin`."""
        return cubin(self, dtype, out_dtype, grouped, count_bits, value_bits)

    @property
    def sums_in_ring(self) -> bool:
        """Whether blocks that share a tile exchange their sums in the ring: shared memory does not fit both."""
        return self.split > 1 and self.channels == TILE_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, and a warpgroup with the producer thread."""
        return 128 * (self.warpgroups + 1)

    @property
    def share(self) -> int:
        """Tokens that a block completes and stores, as in the source: without a split all of the tile's."""
        shares = range(16, self.tokens + 1, 16)
        return next(share for share in shares if self.tokens % share == 0 and self.tokens // share <= self.split)

    def count(self, tokens: _Count, channels: int) -> _Count:
        """Return the number of tiles of a product [tokens, channels]."""
        return -(-tokens // self.tokens) * -(-channels // self.channels)

    def slots(self, count_bits: int) -> int:
        """Return the number of bundles with counts of ``count_bits`` bits in a block; see geometry.cuh."""
        fewest_windows = {3: 2, 4: 4}
        return 1 + -(-(self.stages - 1) // fewest_windows[count_bits]) if count_bits else 0

    def shared_bytes(self, itemsize: int, count_bits: int = 0, value_bits: int = 8) -> int:
        """Return the bytes of a block's shared memory, as in the source, for weights of ``itemsize`` bytes.

        ``count_bits`` and ``value_bits`` are those of :func:`slidesparse.gemm.hopper.compile.sources`.
        """
        blocks = self.warpgroups * self.row_blocks
        own = value_bytes(value_bits) if count_bits else step_bytes(itemsize, value_bits, self.dense)
        step = max(VALUE_BYTES, own)  # the first is that of a dense step of eight bits, which no weight has
        stage = -(-(self.tokens * SLAB_BYTES + blocks * step) // 1024) * 1024
        counts = self.slots(count_bits) * blocks * count_bits * PLANE_BYTES
        channels = self.row_blocks * 64
        transposed = PIECE_TOKENS * channels * 2
        factors = (self.share + 2 * channels) * 4
        sums = 0 if self.sums_in_ring else (self.split - 1) * self.channels * self.share * 4
        return 1024 + self.stages * (stage + 16) + counts + self.warpgroups * (transposed + factors) + sums + 8


@dataclass(frozen=True)
class Cost:
    """Clock cycles of a multiprocessor: of a step, which is a slab, and of a tile besides its steps."""

    step: int
    tile: int


TILES = {
    Tile(tokens=192, warpgroups=2, row_blocks=2, stages=4): Cost(975, 5013),
    Tile(tokens=176, warpgroups=2, row_blocks=2, stages=4): Cost(914, 4279),
    Tile(tokens=160, warpgroups=2, row_blocks=2, stages=5): Cost(848, 3486),
    Tile(tokens=128, warpgroups=2, row_blocks=2, stages=5): Cost(678, 3729),
    Tile(tokens=96, warpgroups=2, row_blocks=2, stages=6): Cost(571, 2619),
    Tile(tokens=128, warpgroups=2, row_blocks=1, stages=8): Cost(395, 1760),
    Tile(tokens=96, warpgroups=2, row_blocks=1, stages=8): Cost(380, 900),
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=12): Cost(313, 581),
    Tile(tokens=64, warpgroups=1, row_blocks=1, stages=8, blocks=2): Cost(209, 420),
    Tile(tokens=32, warpgroups=1, row_blocks=1, stages=11, blocks=2): Cost(187, 1516),
    Tile(tokens=16, warpgroups=1, row_blocks=1, stages=9, blocks=3): Cost(145, 2089),
    Tile(tokens=128, warpgroups=2, row_blocks=1, stages=6, split=2): Cost(396, 3680),
    Tile(tokens=128, warpgroups=2, row_blocks=1, stages=6, split=4): Cost(488, 5696),
    Tile(tokens=192, warpgroups=2, row_blocks=2, stages=4, split=2): Cost(975, 6400),
    Tile(tokens=160, warpgroups=2, row_blocks=2, stages=5, split=2): Cost(848, 5500),
    Tile(tokens=128, warpgroups=2, row_blocks=2, stages=5, split=2): Cost(678, 7500),
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=11, split=2): Cost(282, 3240),
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=10, split=4): Cost(416, 3541),
    Tile(tokens=64, warpgroups=1, row_blocks=1, stages=7, split=2, blocks=2): Cost(238, 2695),
    Tile(tokens=32, warpgroups=1, row_blocks=1, stages=11, split=2, blocks=2): Cost(194, 2364),
    Tile(tokens=32, warpgroups=1, row_blocks=1, stages=11, split=3, blocks=2): Cost(217, 2591),
    Tile(tokens=16, warpgroups=1, row_blocks=1, stages=8, split=3, blocks=3): Cost(149, 2938),
}


def _dense(tile: Tile, cost: Cost) -> tuple[Tile, Cost]:
    """Return a tile for dense weights of six bits, with as many stages as fit, and its estimated cost.

    A step has 1.2 times the bytes for which the cost of 2:4 was fitted, and needs 2 cycles of the tensor cores for each
    token and row block, of which a tenth was left idle.
    """
    stages = (replace(tile, stages=stages, dense=True) for stages in range(tile.stages, 2, -1))
    room = MULTIPROCESSOR_BYTES // tile.blocks - BLOCK_BYTES
    fits = next(one for one in stages if one.shared_bytes(1, value_bits=6) <= room)
    return fits, Cost(max(cost.step * 6 // 5, 11 * tile.tokens * tile.channels // 320), cost.tile)


DENSE_TILES = dict(_dense(*each) for each in TILES.items())
