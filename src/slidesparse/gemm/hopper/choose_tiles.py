"""The choice of the Hopper kernel's tiles by cost: a pure function of the problem's size.

The blocks of a launch walk over the tiles in parallel, so a launch takes as many *waves* as the busiest multiprocessor
has tiles, and a wave takes its steps plus a fixed cost of a tile; a split tile has several blocks, each with a part of
the steps. Of the tiles timed on an H100 in a case, the choice is 0.3 % slower than the best on average at the linears
of Qwen2.5-7B and 1.2 % at those of other models (results/h100/hopper-few-tokens.jsonl); for many tokens, of tiles that
are not split, it is 0.1 % on both GPUs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import torch

from slidesparse.gemm.hopper.tiles import DENSE_TILES, TILES, Tile
from slidesparse.gemm.kernel import multiprocessors
from slidesparse.gemm.launch import SECOND_LAUNCH, TOKEN_STEP, Band
from slidesparse.gemm.steps import TILE_ROWS, StepForm
from slidesparse.lifting.expert_order import rows_needed

MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200 SXM. An H100 PCIe has 114 and an H20 78: other tiles fill their waves there."""

CLUSTER_MULTIPROCESSORS = 18
"""Multiprocessors of a GPC, on which all blocks of a cluster run. Chips differ in which of the 8 GPCs have fewer, so
clusters are counted as in CUTLASS (gemm/kernel/tile_scheduler_params.h): as many full GPCs as possible, and one with
the rest. With clusters of four, two multiprocessors of a GPC idle."""

TWO_BAND_TOKENS = range(80, 4097)
"""Numbers of tokens for two bands. With fewer, memory decides; with more, a last wave is a small part of the time."""

MOST_TOKENS = 1 << 15
"""Largest number of tokens with a choice in advance."""

COSTS = TILES | DENSE_TILES


# -- the cost of a product -------------------------------------------------------------------------------------------


class _Columns(NamedTuple):
    """Cost parameters of several tiles, float64 [tiles, 1] each."""

    tokens: torch.Tensor
    channels: torch.Tensor
    split: torch.Tensor
    blocks: torch.Tensor
    concurrent: torch.Tensor
    sums_in_ring: torch.Tensor
    step_cycles: torch.Tensor
    tile_cycles: torch.Tensor


@lru_cache(maxsize=256)
def _columns(tiles: tuple[Tile, ...], multiprocessors: int) -> _Columns:
    rows = [
        (
            *(tile.tokens, tile.channels, tile.split, tile.blocks, concurrent_blocks(tile, multiprocessors)),
            *(tile.sums_in_ring, COSTS[tile].step, COSTS[tile].tile),
        )
        for tile in tiles
    ]
    return _Columns(*torch.tensor(rows, dtype=torch.float64, device="cpu").unsqueeze(-1).unbind(1))


def concurrent_blocks(tile: Tile, multiprocessors: int = MULTIPROCESSORS) -> int:
    """Return the number of concurrent blocks, one to a multiprocessor.

    Blocks of which a multiprocessor runs several find room for their clusters everywhere. Clusters of three would not
    fit as counted here: some GPCs have 16 multiprocessors (results/history/h100/hopper-halves-2.jsonl).

    >>> [concurrent_blocks(tile) for tile in TILES if str(tile) in ("64x128", "64x128/2", "64x128/4", "64x64/2b2")]
    [132, 132, 116, 132]
    """
    cluster = tile.split if tile.blocks == 1 else 1
    gpcs, rest = divmod(multiprocessors, CLUSTER_MULTIPROCESSORS)
    return gpcs * (CLUSTER_MULTIPROCESSORS // cluster * cluster) + rest // cluster * cluster


def work(
    tiles: tuple[Tile, ...], blocks: torch.Tensor, steps: int, multiprocessors: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequential steps and the tiles, with their fixed cost, of a multiprocessor, both [tiles, n].

    ``blocks`` are those of n products in each tile, from :func:`blocks_of`; ``steps`` are those of a tile. Where a
    multiprocessor runs several blocks, one computes while another waits for memory, so the average number of blocks
    counts; where it runs one, the largest number. Blocks that exchange sums in the ring are never more than concurrent
    ones: the next would load nothing meanwhile.
    """
    at = _columns(tiles, multiprocessors)
    most = (blocks / at.concurrent).ceil()
    load = torch.where(at.blocks == 1, most, (blocks / multiprocessors).clamp(min=1.0))
    in_sequence = load * steps / at.split
    return in_sequence.masked_fill((at.sums_in_ring > 0) & (most > 1), math.inf), (most / at.blocks).ceil()


def blocks_of(
    tiles: tuple[Tile, ...], tokens: int | torch.Tensor, channels: int | torch.Tensor, multiprocessors: int
) -> torch.Tensor:
    """Return the blocks of n products in each tile, float64 [tiles, n]; tokens M and channels are one or [n]."""
    at = _columns(tiles, multiprocessors)
    return (tokens / at.tokens).ceil() * (channels / at.channels).ceil() * at.split


def cycles_of(tiles: tuple[Tile, ...], blocks: torch.Tensor, steps: int, multiprocessors: int) -> torch.Tensor:
    """Return the estimated clock cycles of products; arguments and shape as of :func:`work`."""
    at, (in_sequence, paid) = _columns(tiles, multiprocessors), work(tiles, blocks, steps, multiprocessors)
    return at.step_cycles * in_sequence + at.tile_cycles * paid


# -- one product -----------------------------------------------------------------------------------------------------


def choose_for(tokens: int, channels: int, form: StepForm, itemsize: int, device: int) -> tuple[Band, ...]:
    """Return :func:`choose_bands` for a weight on a CUDA device; see :data:`Choose`."""
    return choose_bands(tokens, channels, form.slabs, multiprocessors(device), form.dense)


def choose_bands(
    tokens: int, channels: int, steps: int, multiprocessors: int = MULTIPROCESSORS, dense: bool = False
) -> tuple[Band, ...]:
    """Return the launches of a product, one or two, with the fewest estimated cycles.

    The last wave of large tiles can leave most multiprocessors idle. Then smaller tiles may compute its channels in
    less time. A weight has ``channels`` rows, a step for each of its slabs, and is 2:4 or ``dense``.

    >>> [str(band.tile) for m in (1, 64, 128, 256, 16384) for band in choose_bands(m, 3584, 42)]
    ['16x64/3b3', '64x64/2b2', '64x128/2', '128x128/2', '176x256']
    >>> [f"{band.channels} in {band.tile}" for band in choose_bands(384, 37888, 42)]
    ['33792 in 192x256', '4096 in 96x128']
    """
    if tokens > MOST_TOKENS:
        return (Band(cheapest(tokens, channels, steps, multiprocessors, dense), channels),)
    ends, bands = bands_by_tokens(channels, steps, multiprocessors, dense)
    return bands[bisect_left(ends, tokens)]


def cheapest(
    tokens: int, channels: int, steps: int, multiprocessors: int = MULTIPROCESSORS, dense: bool = False
) -> Tile:
    """Return the tile with the fewest estimated cycles for a product in one launch."""
    return _fewest_cycles(tokens, channels, steps, multiprocessors, dense)[1][0]


@lru_cache(maxsize=1024)
def bands_by_tokens(
    channels: int, steps: int, multiprocessors: int = MULTIPROCESSORS, dense: bool = False
) -> tuple[list[int], list[tuple[Band, ...]]]:
    """Return the choice for all numbers of tokens up to :data:`MOST_TOKENS`, most of which a server has.

    A choice takes 50 us, as long as the host needs for a linear otherwise. The result has the largest number of tokens
    of each range, ascending, and its launches.
    """
    tokens = torch.arange(TOKEN_STEP, MOST_TOKENS + 1, TOKEN_STEP, device="cpu")  # others set a default device
    cycles, best = _fewest_cycles(tokens, channels, steps, multiprocessors, dense)
    bands: list[tuple[Band, ...]] = [(Band(tile, channels),) for tile in best]
    some = (tokens >= TWO_BAND_TOKENS.start) & (tokens < TWO_BAND_TOKENS.stop)
    first = int(some.nonzero()[0])
    in_two = two_bands(tokens[some], channels, steps, multiprocessors, dense)
    for at, ((both, two), one) in enumerate(zip(in_two, cycles[some].tolist(), strict=True), first):
        if both < one:
            bands[at] = two
    last = [at for at, (here, after) in enumerate(pairwise(bands)) if here != after] + [len(bands) - 1]
    return [int(tokens[at]) for at in last], [bands[at] for at in last]


def two_bands(
    tokens: torch.Tensor, channels: int, steps: int, multiprocessors: int = MULTIPROCESSORS, dense: bool = False
) -> list[tuple[float, tuple[Band, ...]]]:
    """Return the best two launches for each number of tokens, and their cycles; infinite without any.

    In the first launch a large tile fills all of its waves, but for less than one row of tiles.
    """
    found: list[tuple[float, tuple[Band, ...]]] = [(math.inf, ())] * len(tokens)
    for tile in DENSE_TILES if dense else TILES:
        if tile.channels < TILE_ROWS or tile.split > 1:
            continue
        waves = tile.count(tokens, channels) // multiprocessors
        first = (waves * multiprocessors // -(-tokens // tile.tokens) * tile.channels).clamp(max=channels)
        after, rest = _fewest_cycles(tokens, channels - first, steps, multiprocessors, dense)
        blocks = blocks_of((tile,), tokens, first, multiprocessors)
        both = cycles_of((tile,), blocks, steps, multiprocessors)[0] + after + SECOND_LAUNCH
        both[(first == 0) | (first == channels)] = math.inf
        for at, (cycles, own) in enumerate(zip(both.tolist(), first.tolist(), strict=True)):
            found[at] = min(found[at], (cycles, (Band(tile, own), Band(rest[at], channels - own))), key=itemgetter(0))
    return found


def _fewest_cycles(
    tokens: int | torch.Tensor, channels: int | torch.Tensor, steps: int, multiprocessors: int, dense: bool
) -> tuple[torch.Tensor, list[Tile]]:
    """Return the cycles of the cheapest tile for each number of tokens, and the tile; the first of equal ones."""
    tiles = tuple(DENSE_TILES if dense else TILES)
    cycles = cycles_of(tiles, blocks_of(tiles, tokens, channels, multiprocessors), steps, multiprocessors)
    best = cycles.argmin(0)
    return cycles.gather(0, best[None])[0], [tiles[at] for at in best.tolist()]


# -- mixtures of experts ---------------------------------------------------------------------------------------------

GROUPED_TILES, DENSE_GROUPED_TILES = (
    tuple(tile for tile in tiles if tile.split == 1) for tiles in (TILES, DENSE_TILES)
)
"""Tiles of grouped products, without clusters: all blocks of one need work, or none."""

ROW_STEP = 0.25
"""Clock cycles of the whole GPU to read and write a slab of one row before the product, with the activations that it is
lifted from. An estimate from bytes, some 600 at 4 TB/s, not fitted to times."""


@lru_cache(maxsize=4096)
def choose_grouped(
    pairs: int,
    experts: int,
    sizes: tuple[tuple[int, int], ...],
    multiprocessors: int = MULTIPROCESSORS,
    dense: bool = False,
) -> tuple[Tile, ...]:
    """Return a tile for each linear of the same tokens, all with one number of tokens.

    The router is assumed to spread ``pairs``, tokens times the experts of each, at random: some experts have no token,
    and the last tile of each other expert is half empty on average. Padding rows count as lifted, although the kernel
    skips them: all measured times of layers belong to this choice. ``sizes`` are each linear's rows and steps.

    >>> [str(tile) for tile in choose_grouped(512, 128, ((1536, 24), (2048, 9)))]
    ['16x64b3', '16x64b3']
    >>> [str(tile) for tile in choose_grouped(131072, 128, ((1536, 24), (2048, 9)))]
    ['160x256', '160x256']
    """
    tiles = DENSE_GROUPED_TILES if dense else GROUPED_TILES

    def cycles(channels: int, steps: int) -> dict[Tile, float]:
        counts = [_token_tiles(pairs, experts, tile.tokens) * -(-channels // tile.channels) for tile in tiles]
        blocks = torch.tensor(counts, dtype=torch.float64, device="cpu").round().unsqueeze(1)
        return dict(zip(tiles, cycles_of(tiles, blocks, steps, multiprocessors)[:, 0].tolist(), strict=True))

    costs = [cycles(*size) for size in sizes]
    best: tuple[float, tuple[Tile, ...]] | None = None
    for tokens in sorted({tile.tokens for tile in tiles}):
        like = [tile for tile in tiles if tile.tokens == tokens]
        chosen = tuple(min(like, key=cost.__getitem__) for cost in costs)
        lifted = rows_needed(pairs, experts, tokens) * sum(steps for _, steps in sizes) * ROW_STEP
        total = lifted + sum(cost[tile] for tile, cost in zip(chosen, costs, strict=True))
        if best is None or total < best[0]:
            best = total, chosen
    assert best is not None
    return best[1]


def _token_tiles(pairs: int, experts: int, tokens: int) -> float:
    """Return the expected token tiles of all experts, with a random expert for each pair."""
    touched = experts * (1 - (1 - 1 / experts) ** pairs)
    return max(1.0, touched * max(1.0, pairs / touched / tokens + 0.5))
