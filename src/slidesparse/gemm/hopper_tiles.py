"""Which tile the Hopper kernel uses: a pure function of the problem's size.

The blocks of a launch walk over the tiles side by side, so a launch takes as many *waves* as the busiest block has
tiles, and a wave its steps plus what a tile costs besides. Both were fitted to times of tiles of 192 and 96 tokens on
an H200; between them they grow with the tokens. At 2:4 and 6:8 in INT8, the linears of Qwen2.5-7B, M from 256 to 16384
(results/h200/hopper-tiles.jsonl, made by benchmarks/hopper_tiles.py), the choice is at most 3 % slower than the best
tile, 0.1 % on average. A step has as many bytes and cycles in the other types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from slidesparse.gemm.hopper_compile import Tile

GROUP = 16
"""Row tiles that neighbouring blocks cycle through. 4 to 32 made no difference beyond the noise."""

MULTIPROCESSORS = 132
"""Of an H100 or H200 SXM. With fewer, waves are longer; which tile is best hardly changes."""


@dataclass(frozen=True)
class Cost:
    """Clock cycles of a multiprocessor.

    Attributes:
        step: Of a step of the ring: a 2:4 slab, or half a dense one.
        tile: Of a tile, besides its steps.
    """

    step: int
    tile: int


TILES = {
    Tile(tokens=192, warpgroups=2, row_blocks=2, stages=4): Cost(965, 5700),
    Tile(tokens=176, warpgroups=2, row_blocks=2, stages=4): Cost(896, 5303),
    Tile(tokens=160, warpgroups=2, row_blocks=2, stages=5): Cost(827, 4906),
    Tile(tokens=128, warpgroups=2, row_blocks=2, stages=5): Cost(689, 4112),
    Tile(tokens=96, warpgroups=2, row_blocks=2, stages=6): Cost(551, 3319),
    Tile(tokens=96, warpgroups=2, row_blocks=1, stages=8): Cost(333, 1835),
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=10): Cost(293, 2034),
    Tile(tokens=32, warpgroups=2, row_blocks=1, stages=12): Cost(267, 2287),
}


@lru_cache(maxsize=4096)
def choose_tile(tokens: int, channels: int, sparse_slabs: int, dense_slabs: int) -> Tile:
    """The tile with the fewest estimated cycles.

    Args:
        tokens: M.
        channels: Rows of the weight.
        sparse_slabs: Slabs of its 2:4 segment.
        dense_slabs: Slabs of its dense segment, two steps each.

    >>> [choose_tile(m, 3584, 42, 0).tokens for m in (1, 300, 600, 16384)]
    [32, 96, 96, 176]
    """

    def cycles(tile: Tile) -> int:
        cost = TILES[tile]
        return -(-tile.count(tokens, channels) // MULTIPROCESSORS) * (
            cost.step * (sparse_slabs + 2 * dense_slabs) + cost.tile
        )

    return min(TILES, key=cycles)
