"""Which tile the Hopper kernel uses: a pure function of the problem's size."""

from __future__ import annotations

from functools import lru_cache

from slidesparse.gemm.hopper_compile import Tile

GROUP = 16
"""Row tiles that neighbouring blocks cycle through."""

TILES = {
    Tile(tokens=192, warpgroups=2, row_blocks=2, stages=4): 960,
    Tile(tokens=96, warpgroups=2, row_blocks=2, stages=6): 600,
    Tile(tokens=96, warpgroups=2, row_blocks=1, stages=8): 450,
    Tile(tokens=64, warpgroups=2, row_blocks=1, stages=10): 400,
    Tile(tokens=32, warpgroups=2, row_blocks=1, stages=12): 350,
}
"""Tile -> cycles a slab."""


@lru_cache(maxsize=4096)
def choose_tile(tokens: int, channels: int, sparse_slabs: int, dense_slabs: int) -> Tile:
    """The tile with the least estimated time: waves of 132 multiprocessors times cycles a tile."""

    def cost(tile: Tile) -> int:
        tiles = -(-tokens // tile.tokens) * -(-channels // tile.channels)
        return -(-tiles // 132) * (TILES[tile] * (sparse_slabs + 2 * dense_slabs) + 3000)

    return min(TILES, key=cost)
