"""The Hopper kernel's tiles, and the choice among them: a pure function of the problem's size.

The blocks of a launch walk over the tiles in parallel, so a launch takes as many *waves* as the busiest multiprocessor
has tiles, and a wave takes its steps plus a fixed cost of a tile; a split tile has several blocks, each with a part of
the steps. The costs were fitted to times on an H200, INT8 at 2:4 and 6:8, the linears of Qwen2.5-7B: M from
16 to 256 on weights that no cache holds (results/h200/hopper-few-tokens.jsonl), M from 512 to 16384 on a warm one
(hopper-tiles.jsonl there). Those of tiles whose blocks share steps were then fitted on an H100, with what is near them
(results/h100/hopper-few-tokens.jsonl). Of the tiles timed there in a case, the choice is 0.3 % slower than the best on
average at the linears of Qwen2.5-7B and 1.2 % at those of other models; for many tokens, of tiles that are not split,
it is 0.1 % on both GPUs. A step has as many bytes and cycles in the other types.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import torch

from slidesparse.gemm.hopper.weights import PLANE_BYTES, TILE_ROWS, VALUE_BYTES, step_bytes, value_bytes
from slidesparse.lifting.layout import SLAB_BYTES
from slidesparse.lifting.routed.expert_order import rows_needed

GROUP = 16
"""Row tiles that neighbouring blocks cycle through. 4 to 32 made no difference beyond the noise."""

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200 SXM. An H100 PCIe has 114 and an H20 78: other tiles fill their waves there."""

CLUSTER_MULTIPROCESSORS = 18
"""Multiprocessors of a GPC, on which all blocks of a cluster run. Chips differ in which of the 8 GPCs have fewer, so
the count of clusters is CUTLASS's: as many full GPCs as there can be, and one with what is left (its
gemm/kernel/tile_scheduler_params.h). Where a GPC runs clusters of four, two of its multiprocessors idle."""

PIECE_TOKENS = 32
"""Tokens whose results a warpgroup turns into rows at a time."""


TOKEN_STEP = 16
"""Tokens of every tile are a multiple of it, so that no choice changes in between."""

TWO_BAND_TOKENS = range(80, 4097)
"""Numbers of tokens with which a product may have two bands. With fewer, memory decides; with more, a last wave is a
small part of the time."""

SECOND_LAUNCH = 8000
"""Clock cycles that a second band must save. Chosen by times on an H100 (results/h100/hopper-bands.jsonl): with this
number the choice between one and two bands is 0.8 % slower than the better one, and never 5 % slower than one."""

MOST_PLANNED = 1 << 15
"""The largest number of tokens that the plan of a weight's tiles covers."""


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
    """

    tokens: int
    warpgroups: int
    row_blocks: int
    stages: int
    split: int = 1
    blocks: int = 1

    def __str__(self) -> str:
        """Return tokens x channels, the split and the blocks of a multiprocessor: ``16x128/4b2``."""
        split = f"/{self.split}" if self.split > 1 else ""
        return f"{self.tokens}x{self.channels}{split}" + (f"b{self.blocks}" if self.blocks > 1 else "")

    @property
    def channels(self) -> int:
        """Channels of a tile."""
        return self.warpgroups * self.row_blocks * 64

    @property
    def sums_in_ring(self) -> bool:
        """Whether blocks that share a tile exchange their sums in the memory of the ring: theirs does not hold both."""
        return self.split > 1 and self.channels == TILE_ROWS

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and a warpgroup in which one thread produces."""
        return 128 * (self.warpgroups + 1)

    @property
    def share(self) -> int:
        """Tokens that a block completes and stores, as the source computes them: without a split all of the tile's."""
        shares = range(16, self.tokens + 1, 16)
        return next(share for share in shares if self.tokens % share == 0 and self.tokens // share <= self.split)

    def count(self, tokens: int, channels: int) -> int:
        """Return the number of tiles of a product [tokens, channels]."""
        return -(-tokens // self.tokens) * -(-channels // self.channels)

    def slots(self, count_bits: int) -> int:
        """Return the bundles whose counts, of ``count_bits`` bits, a block keeps at once; the source says why."""
        fewest_windows = {3: 2, 4: 4}
        return 1 + -(-(self.stages - 1) // fewest_windows[count_bits]) if count_bits else 0

    def shared_bytes(self, itemsize: int, count_bits: int = 0, value_bits: int = 8) -> int:
        """Return the bytes of shared memory of a block, as the source lays it out.

        Args:
            itemsize: Bytes of a weight.
            count_bits: Bits of a count; 0 for weights with metadata (:mod:`slidesparse.gemm.hopper.weights`).
            value_bits: Bits of a kept value: 6, or 8 for all others.
        """
        blocks = self.warpgroups * self.row_blocks
        sparse = value_bytes(value_bits) if count_bits else step_bytes(itemsize, value_bits)
        step = max(VALUE_BYTES, sparse)  # the first is a dense step's
        stage = -(-(self.tokens * SLAB_BYTES + blocks * step) // 1024) * 1024
        counts = self.slots(count_bits) * blocks * count_bits * PLANE_BYTES
        channels = self.row_blocks * 64
        transposed = PIECE_TOKENS * channels * 2
        factors = (self.share + 2 * channels) * 4
        sums = 0 if self.sums_in_ring else (self.split - 1) * self.channels * self.share * 4
        return 1024 + self.stages * (stage + 16) + counts + self.warpgroups * (transposed + factors) + sums + 8


@dataclass(frozen=True)
class Cost:
    """Clock cycles of a multiprocessor.

    Attributes:
        step: Cycles of a step of the ring: a 2:4 slab, or half a dense one.
        tile: Cycles of a tile besides those of its steps.
    """

    step: int
    tile: int


TILES = {
    Tile(tokens=192, warpgroups=2, row_blocks=2, stages=4): Cost(975, 5013),
    Tile(tokens=176, warpgroups=2, row_blocks=2, stages=4): Cost(914, 4279),
    Tile(tokens=160, warpgroups=2, row_blocks=2, stages=5): Cost(848, 3486),
    Tile(tokens=128, warpgroups=2, row_blocks=2, stages=5): Cost(678, 3729),
    Tile(tokens=96, warpgroups=2, row_blocks=2, stages=6): Cost(571, 2619),
    Tile(tokens=128, warpgroups=2, row_blocks=1, stages=8): Cost(395, 1760),
    Tile(tokens=96, warpgroups=2, row_blocks=1, stages=8): Cost(416, 778),
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


def work(
    tile: Tile, tokens: int, channels: int, steps: int, multiprocessors: int = MULTIPROCESSORS
) -> tuple[float, int]:
    """Return the steps that a multiprocessor runs in sequence, and the tiles whose fixed cost it pays.

    Where a multiprocessor runs several blocks, one computes while another waits for memory, so the average number of
    blocks a multiprocessor counts. Where it runs one block at a time, the largest number counts. Blocks that exchange
    their sums in the ring are never more than run at one time: the next ones would load nothing while they exchange.
    """
    return _work(tile, tile.count(tokens, channels) * tile.split, steps, multiprocessors)


def _work(tile: Tile, blocks: int, steps: int, multiprocessors: int) -> tuple[float, int]:
    most = -(-blocks // together(tile, multiprocessors))
    load = most if tile.blocks == 1 else max(1.0, blocks / multiprocessors)
    own = math.inf if tile.sums_in_ring and most > 1 else load * steps / tile.split
    return own, -(-most // tile.blocks)


def together(tile: Tile, multiprocessors: int = MULTIPROCESSORS) -> int:
    """Return the blocks that run at one time, one to a multiprocessor.

    Blocks of which a multiprocessor runs several find room for their clusters everywhere. Clusters of three would not
    fit as counted here: some GPCs have 16 multiprocessors (results/history/h100/hopper-halves-2.jsonl).

    >>> [together(tile) for tile in TILES if str(tile) in ("64x128", "64x128/2", "64x128/4", "64x64/2b2")]
    [132, 132, 116, 132]
    """
    cluster = tile.split if tile.blocks == 1 else 1
    gpcs, rest = divmod(multiprocessors, CLUSTER_MULTIPROCESSORS)
    return gpcs * (CLUSTER_MULTIPROCESSORS // cluster * cluster) + rest // cluster * cluster


class Band(NamedTuple):
    """What a launch computes of a product: some neighbouring channels, in one kind of tiles."""

    tile: Tile
    channels: int


def choose_bands(
    tokens: int, channels: int, sparse_slabs: int, dense_slabs: int, multiprocessors: int = MULTIPROCESSORS
) -> tuple[Band, ...]:
    """Return the launches of a product, one or two, with the fewest estimated cycles.

    The last wave of large tiles can leave most multiprocessors idle. Then the large tiles may end with the wave before
    it, and smaller ones compute the channels that are left in less time than that wave takes.

    Args:
        tokens: M.
        channels: Rows of the weight.
        sparse_slabs: Slabs of its 2:4 segment.
        dense_slabs: Slabs of its dense segment, two steps each.
        multiprocessors: Those of the GPU.

    >>> [str(band.tile) for m in (1, 64, 128, 256, 16384) for band in choose_bands(m, 3584, 42, 0)]
    ['16x64/3b3', '64x64/2b2', '64x128/2', '128x128/2', '176x256']
    >>> [f"{band.channels} in {band.tile}" for band in choose_bands(384, 37888, 42, 0)]
    ['33792 in 192x256', '4096 in 96x128']
    """
    steps = sparse_slabs + 2 * dense_slabs
    if tokens > MOST_PLANNED:
        return (Band(cheapest(tokens, channels, steps, multiprocessors), channels),)
    ends, bands = plan(channels, steps, multiprocessors)
    return bands[bisect_left(ends, tokens)]


def cheapest(tokens: int, channels: int, steps: int, multiprocessors: int = MULTIPROCESSORS) -> Tile:
    """Return the tile with the fewest estimated cycles for a product in one launch, by asking all of them."""
    return min(TILES, key=lambda tile: cycles_of(tile, tokens, channels, steps, multiprocessors))


def cycles_of(tile: Tile, tokens: int, channels: int, steps: int, multiprocessors: int = MULTIPROCESSORS) -> float:
    """Return the clock cycles that a product in one launch is estimated to take in these tiles."""
    return _cycles_of_blocks(tile, tile.count(tokens, channels) * tile.split, steps, multiprocessors)


def _cycles_of_blocks(tile: Tile, blocks: int, steps: int, multiprocessors: int) -> float:
    own, tiles = _work(tile, blocks, steps, multiprocessors)
    return TILES[tile].step * own + TILES[tile].tile * tiles


@lru_cache(maxsize=1024)
def plan(channels: int, steps: int, multiprocessors: int = MULTIPROCESSORS) -> tuple[list[int], list[tuple[Band, ...]]]:
    """Return the choice for all numbers of tokens up to :data:`MOST_PLANNED`: a server meets most of them.

    Asking all tiles takes 50 us, as much as all that the host does for a linear otherwise.

    Returns:
        The largest number of tokens of each range, in order, and the range's launches.
    """
    tokens = torch.arange(TOKEN_STEP, MOST_PLANNED + 1, TOKEN_STEP, device="cpu")  # others set a default device
    cycles, best = _fewest_cycles(tokens, channels, steps, multiprocessors)
    bands: list[tuple[Band, ...]] = [(Band(tile, channels),) for tile in best]
    some = (tokens >= TWO_BAND_TOKENS.start) & (tokens < TWO_BAND_TOKENS.stop)
    first = int(some.nonzero()[0])
    in_two = two_bands(tokens[some], channels, steps, multiprocessors)
    for at, ((both, two), one) in enumerate(zip(in_two, cycles[some].tolist(), strict=True), first):
        if both < one:
            bands[at] = two
    last = [at for at, (here, after) in enumerate(pairwise(bands)) if here != after] + [len(bands) - 1]
    return [int(tokens[at]) for at in last], [bands[at] for at in last]


def two_bands(
    tokens: torch.Tensor, channels: int, steps: int, multiprocessors: int = MULTIPROCESSORS
) -> list[tuple[float, tuple[Band, ...]]]:
    """Return the best two launches for each number of tokens, and their cycles; infinitely many where there are none.

    In the first launch a large tile fills all of its waves, but for less than one row of tiles.
    """
    found: list[tuple[float, tuple[Band, ...]]] = [(math.inf, ())] * len(tokens)
    for tile in TILES:
        if tile.channels < TILE_ROWS or tile.split > 1:
            continue
        waves = _blocks(tile, tokens, channels) // multiprocessors
        first = (waves * multiprocessors // -(-tokens // tile.tokens) * tile.channels).clamp(max=channels)
        after, rest = _fewest_cycles(tokens, channels - first, steps, multiprocessors)
        both = _cycles(tile, tokens, first, steps, multiprocessors) + after + SECOND_LAUNCH
        both[(first == 0) | (first == channels)] = math.inf
        for at, (cycles, own) in enumerate(zip(both.tolist(), first.tolist(), strict=True)):
            found[at] = min(found[at], (cycles, (Band(tile, own), Band(rest[at], channels - own))), key=itemgetter(0))
    return found


def _fewest_cycles(
    tokens: torch.Tensor, channels: int | torch.Tensor, steps: int, multiprocessors: int
) -> tuple[torch.Tensor, list[Tile]]:
    """Return the cycles of the cheapest tile for each number of tokens, and the tile; the first of equal ones."""
    cycles = torch.stack([_cycles(tile, tokens, channels, steps, multiprocessors) for tile in TILES])
    tiles, best = list(TILES), cycles.argmin(0)
    return cycles.gather(0, best[None])[0], [tiles[at] for at in best.tolist()]


def _cycles(
    tile: Tile, tokens: torch.Tensor, channels: int | torch.Tensor, steps: int, multiprocessors: int
) -> torch.Tensor:
    """:func:`work` and its cost, for many numbers of tokens."""
    blocks = _blocks(tile, tokens, channels)
    most = -(-blocks // together(tile, multiprocessors))
    load = most if tile.blocks == 1 else (blocks.double() / multiprocessors).clamp(min=1.0)
    cycles = TILES[tile].step * (load * steps / tile.split) + TILES[tile].tile * -(-most // tile.blocks)
    return cycles.masked_fill(most > 1, math.inf) if tile.sums_in_ring else cycles


def _blocks(tile: Tile, tokens: torch.Tensor, channels: int | torch.Tensor) -> torch.Tensor:
    return -(-tokens // tile.tokens) * -(-channels // tile.channels) * tile.split


# -- mixtures of experts ---------------------------------------------------------------------------------------------

WHOLE = tuple(tile for tile in TILES if tile.split == 1)
"""The tiles of grouped products: a cluster would need all of its blocks to have work, or none."""


ROW_STEP = 0.25
"""Clock cycles of the whole GPU in which a row of a step, 128 lifted bytes and what they are made of, is read and
written before the product: some 600 bytes at 4 TB/s. By arithmetic, and not measured yet."""


@lru_cache(maxsize=4096)
def choose_grouped(
    pairs: int, experts: int, sizes: tuple[tuple[int, int], ...], multiprocessors: int = MULTIPROCESSORS
) -> tuple[Tile, ...]:
    """Return a tile for each of the linears that the same tokens go through, all of one number of tokens.

    The router is taken to spread tokens by chance: some experts then have no token, and of the last tile of each other
    expert one half is empty on average. Empty rows count as lifted ones, which they no longer are: layers were
    measured with this choice.

    Args:
        pairs: Tokens times the experts of each.
        experts: Experts here.
        sizes: Of each linear the rows of its weight, and its steps.
        multiprocessors: Those of the GPU.

    >>> [str(tile) for tile in choose_grouped(512, 128, ((1536, 24), (2048, 9)))]
    ['16x64b3', '16x64b3']
    >>> [str(tile) for tile in choose_grouped(131072, 128, ((1536, 24), (2048, 9)))]
    ['160x256', '160x256']
    """

    def cost(tile: Tile, channels: int, steps: int) -> float:
        blocks = round(_token_tiles(pairs, experts, tile.tokens) * -(-channels // tile.channels))
        return _cycles_of_blocks(tile, blocks, steps, multiprocessors)

    best: tuple[float, tuple[Tile, ...]] | None = None
    for tokens in sorted({tile.tokens for tile in WHOLE}):
        like = [tile for tile in WHOLE if tile.tokens == tokens]
        chosen = tuple(min(like, key=lambda tile: cost(tile, *size)) for size in sizes)
        lifted = rows_needed(pairs, experts, tokens) * sum(steps for _, steps in sizes) * ROW_STEP
        total = lifted + sum(cost(tile, *size) for tile, size in zip(chosen, sizes, strict=True))
        if best is None or total < best[0]:
            best = total, chosen
    assert best is not None
    return best[1]


def _token_tiles(pairs: int, experts: int, tokens: int) -> float:
    """Token tiles of all experts, where each pair has a random one."""
    touched = experts * (1 - (1 - 1 / experts) ** pairs)
    return max(1.0, touched * max(1.0, pairs / touched / tokens + 0.5))
