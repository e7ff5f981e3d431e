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
    Tile(tokens=128, warpgroups=2, row_blocks=2, stages=5): Cost(656, 2900),
    Tile(tokens=96, warpgroups=2, row_blocks=2, stages=6): Cost(551, 3319),
    Tile(tokens=128, warpgroups=2, row_blocks=1, stages=8): Cost(336, 1950),
    Tile(tokens=96, warpgroups=2, row_blocks=1, stages=8): Cost(333, 1835),
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=12): Cost(276, 1175),
    Tile(tokens=32, warpgroups=1, row_blocks=1, stages=11, blocks=2): Cost(200, 665),
    Tile(tokens=16, warpgroups=1, row_blocks=1, stages=9, blocks=3): Cost(164, 500),
    Tile(tokens=128, warpgroups=2, row_blocks=1, stages=5, split=2): Cost(412, 5400),
    Tile(tokens=128, warpgroups=2, row_blocks=1, stages=5, split=4): Cost(504, 5400),
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=10, split=2): Cost(296, 3200),
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=10, split=4): Cost(408, 3145),
    Tile(tokens=64, warpgroups=1, row_blocks=1, stages=7, split=2, blocks=2): Cost(268, 2200),
    Tile(tokens=32, warpgroups=1, row_blocks=1, stages=11, split=2, blocks=2): Cost(200, 1650),
    Tile(tokens=32, warpgroups=1, row_blocks=1, stages=10, split=3, blocks=2): Cost(224, 2050),
    Tile(tokens=16, warpgroups=1, row_blocks=1, stages=8, split=3, blocks=3): Cost(168, 1815),
}


def work(tile: Tile, tokens: int, channels: int, steps: int) -> tuple[float, int]:
    """Steps that a multiprocessor takes one after another, and how many tiles it pays for besides.

    Blocks that share a multiprocessor wait for memory in each other's stead, so that their average number counts;
    where there is one at a time, the largest does.
    """
    blocks = tile.count(tokens, channels) * tile.split
    most = -(-blocks // MULTIPROCESSORS)
    load = most if tile.blocks == 1 else max(1.0, blocks / MULTIPROCESSORS)
    return load * steps / tile.split, -(-most // tile.blocks)


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

    def cycles(tile: Tile) -> float:
        steps, tiles = work(tile, tokens, channels, sparse_slabs + 2 * dense_slabs)
        return TILES[tile].step * steps + TILES[tile].tile * tiles

    return min(TILES, key=cycles)
