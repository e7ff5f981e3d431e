"""Which tile the Hopper kernel uses: a pure function of the problem's size.

The blocks of a launch walk over the tiles side by side, so a launch takes as many *waves* as the busiest
multiprocessor has tiles, and a wave its steps plus what a tile costs besides; a split tile is as many blocks, each with
a part of the steps. The costs were fitted to times on an H200, INT8 at 2:4 and 6:8, the linears of Qwen2.5-7B: M from
16 to 256 on weights that no cache holds (results/h200/hopper-few-tokens.jsonl), M from 512 to 16384 on a warm one
(hopper-tiles.jsonl there), and some of them then moved by up to a tenth where that chose better. Of the tiles timed in
a case, the choice is at most 4 % slower than the best, 0.3 % on average for few tokens and 0.1 % for many. A step has
as many bytes and cycles in the other types.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from slidesparse.gemm.hopper.compile import Tile

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
    Tile(tokens=192, warpgroups=2, row_blocks=2, stages=4): Cost(975, 5013),
    Tile(tokens=176, warpgroups=2, row_blocks=2, stages=4): Cost(914, 4279),
    Tile(tokens=160, warpgroups=2, row_blocks=2, stages=5): Cost(848, 3486),
    Tile(tokens=128, warpgroups=2, row_blocks=2, stages=5): Cost(678, 3729),
    Tile(tokens=96, warpgroups=2, row_blocks=2, stages=6): Cost(571, 2619),
    Tile(tokens=128, warpgroups=2, row_blocks=1, stages=8): Cost(395, 2000),
    Tile(tokens=96, warpgroups=2, row_blocks=1, stages=8): Cost(416, 778),
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=12): Cost(313, 581),
    Tile(tokens=64, warpgroups=1, row_blocks=1, stages=8, blocks=2): Cost(200, 750),
    Tile(tokens=32, warpgroups=1, row_blocks=1, stages=11, blocks=2): Cost(187, 1516),
    Tile(tokens=16, warpgroups=1, row_blocks=1, stages=9, blocks=3): Cost(145, 2089),
    Tile(tokens=128, warpgroups=2, row_blocks=1, stages=5, split=2): Cost(396, 6369),
    Tile(tokens=128, warpgroups=2, row_blocks=1, stages=5, split=4): Cost(488, 5696),
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=10, split=2): Cost(282, 3928),
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=10, split=4): Cost(416, 3541),
    Tile(tokens=64, warpgroups=1, row_blocks=1, stages=7, split=2, blocks=2): Cost(248, 2695),
    Tile(tokens=32, warpgroups=1, row_blocks=1, stages=11, split=2, blocks=2): Cost(194, 2364),
    Tile(tokens=32, warpgroups=1, row_blocks=1, stages=10, split=3, blocks=2): Cost(217, 2591),
    Tile(tokens=16, warpgroups=1, row_blocks=1, stages=8, split=3, blocks=3): Cost(149, 2938),
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


@lru_cache(maxsize=1 << 16)
def choose_tile(tokens: int, channels: int, sparse_slabs: int, dense_slabs: int) -> Tile:
    """The tile with the fewest estimated cycles.

    Args:
        tokens: M.
        channels: Rows of the weight.
        sparse_slabs: Slabs of its 2:4 segment.
        dense_slabs: Slabs of its dense segment, two steps each.

    >>> [str(choose_tile(m, 3584, 42, 0)) for m in (1, 64, 128, 256, 16384)]
    ['16x64/3b3', '64x64/2b2', '64x64b2', '64x128', '176x256']
    """

    def cycles(tile: Tile) -> float:
        steps, tiles = work(tile, tokens, channels, sparse_slabs + 2 * dense_slabs)
        return TILES[tile].step * steps + TILES[tile].tile * tiles

    return min(TILES, key=cycles)
