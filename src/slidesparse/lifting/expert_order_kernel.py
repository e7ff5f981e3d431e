"""Sorting of a mixture's pairs by expert, in one launch or two in place of fifteen.

Few pairs: one program an expert. It counts the pairs of all experts, which gives its first row, and then numbers its
own pairs in order. So every program reads all pairs twice, which suits decoding and short prompts.

Many pairs: one program a chunk of pairs. The first launch counts the pairs of each expert in each chunk. In the second,
each program adds up the counts of the chunks before its own, sorts its pairs by expert, and numbers them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from slidesparse.base.triton_launcher import Launcher

CHUNK = 1024
NUM_WARPS = 4
FEW_PAIRS = 4096
"""Most pairs of a single launch, whose loops are unrolled; iterations past the last pair are skipped."""
COUNTS_AT_ONCE = 8
"""Chunks whose counts a program adds in a step."""
MOST_EXPERTS = 1023
"""Most experts whose counts fit in a program, and so in :func:`arrange`."""


@triton.jit
def _experts_of(chosen, pair, pairs, EXPERTS: tl.constexpr):
    """Load the experts of some pairs; EXPERTS for experts on other GPUs, and past the last pair."""
    expert = tl.load(chosen + pair, mask=pair < pairs, other=-1).to(tl.int32)
    return tl.where(expert < 0, EXPERTS, expert)


@triton.jit(do_not_specialize=["pairs", "tile_rows"])
def arrange_kernel(
    chosen,
    rows,
    tokens,
    experts,
    used,
    pairs,
    tile_rows,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    MOST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Arrange the pairs of one expert, see the top of this file. ``tokens`` holds -1."""
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.full((BINS,), 0, tl.int32)
    for start in tl.static_range(0, MOST, CHUNK):
        if start < pairs:
            counts += tl.histogram(_experts_of(chosen, start + tl.arange(0, CHUNK), pairs, EXPERTS), BINS)
    tiles = tl.where(bins < EXPERTS, (counts + tile_rows - 1) // tile_rows, 0)
    first = tl.sum(tl.where(bins < own, tiles, 0))
    seen = 0
    for start in tl.static_range(0, MOST, CHUNK):
        if start < pairs:
            pair = start + tl.arange(0, CHUNK)
            expert = _experts_of(chosen, pair, pairs, EXPERTS)
            mine = (expert == own).to(tl.int32)
            row = (first * tile_rows + seen + tl.cumsum(mine, 0) - mine).to(tl.int64)
            tl.store(rows + pair, row, mask=mine > 0)
            tl.store(tokens + row, (pair // K).to(tl.int64), mask=mine > 0)
            if own == 0:
                tl.store(rows + pair, tl.full((CHUNK,), -1, tl.int64), mask=(expert == EXPERTS) & (pair < pairs))
            seen += tl.sum(mine)
    tile = tl.arange(0, CHUNK)
    tl.store(
        experts + tile,
        tl.full((CHUNK,), 0, tl.int32) + own,
        mask=(tile >= first) & (tile * tile_rows < first * tile_rows + seen),
    )
    if own == 0:
        tl.store(used, tl.sum(tiles))


@triton.jit(do_not_specialize=["pairs"])
def count_kernel(chosen, counts, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """Count the pairs of each expert in a chunk: int32 ``counts`` [chunks, BINS]."""
    own = tl.program_id(0)
    found = tl.histogram(_experts_of(chosen, own * CHUNK + tl.arange(0, CHUNK), pairs, EXPERTS), BINS)
    tl.store(counts + own * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["pairs", "tile_rows"])
def place_kernel(
    chosen,
    counts,
    rows,
    tokens,
    experts,
    used,
    pairs,
    tile_rows,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Arrange the pairs of one chunk, and store the experts of some tiles. ``tokens`` holds -1."""
    own, chunks = tl.program_id(0), tl.num_programs(0)
    bins = tl.arange(0, BINS)
    total = tl.full((BINS,), 0, tl.int32)
    before = tl.full((BINS,), 0, tl.int32)
    start = 0
    while start < chunks:
        chunk = start + tl.arange(0, AT_ONCE)
        inside = (chunk < chunks)[:, None] & (bins < EXPERTS)[None, :]
        found = tl.load(counts + chunk[:, None] * BINS + bins[None, :], mask=inside, other=0)
        total += tl.sum(found, 0)
        before += tl.sum(tl.where((chunk < own)[:, None], found, 0), 0)
        start += AT_ONCE
    in_tiles = (total + tile_rows - 1) // tile_rows
    ends = tl.cumsum(in_tiles, 0)

    pair = tl.arange(0, CHUNK)
    expert = _experts_of(chosen, own * CHUNK + pair, pairs, EXPERTS)
    ordered = tl.sort(expert * CHUNK + pair)  # by expert, and by pair where that is the same
    expert, pair = ordered // CHUNK, own * CHUNK + ordered % CHUNK
    here = tl.histogram(expert, BINS)
    first = (ends - in_tiles) * tile_rows + before - (tl.cumsum(here, 0) - here)
    row = (tl.gather(first, expert, 0) + tl.arange(0, CHUNK)).to(tl.int64)
    row = tl.where(expert < EXPERTS, row, -1)
    tl.store(rows + pair, row, mask=pair < pairs)
    tl.store(tokens + row, (pair // K).to(tl.int64), mask=expert < EXPERTS)

    last = tl.max(ends)
    tile = own
    while tile < last:
        tl.store(experts + tile, tl.sum((ends <= tile).to(tl.int32)))
        tile += chunks
    if own == 0:
        tl.store(used, last)


def arrange(
    chosen: torch.Tensor, experts: int, tile: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return :func:`slidesparse.lifting.expert_order.arrange` of contiguous integers [M, k]; nothing is checked.

    ``rows`` are :func:`~slidesparse.lifting.expert_order.rows_needed`.
    """
    index, device = chosen.get_device(), chosen.device
    of_pairs = torch.empty(chosen.shape, dtype=torch.int64, device=device)
    tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
    of_tiles = torch.empty(rows // tile, dtype=torch.int32, device=device)
    used = torch.empty(1, dtype=torch.int32, device=device)
    pairs, k = chosen.numel(), chosen.shape[1]
    made = of_pairs, tokens, of_tiles, used
    if pairs <= FEW_PAIRS and len(of_tiles) <= CHUNK:
        _one_launch(chosen.dtype, k, experts, device).run(experts, index, (chosen, *made), (pairs, tile), ())
        return made
    chunks = triton.cdiv(pairs, CHUNK)
    counts = torch.empty(chunks, _bins(experts), dtype=torch.int32, device=device)
    count, place = _two_launches(chosen.dtype, k, experts, device)
    count.run(chunks, index, (chosen, counts), (pairs,), ())
    place.run(chunks, index, (chosen, counts, *made), (pairs, tile), ())
    return made


def _bins(experts: int) -> int:
    """Return the number of counts of a program, one of them for pairs of experts on other GPUs."""
    return int(triton.next_power_of_2(experts + 1))


@lru_cache(maxsize=256)
def _one_launch(dtype: torch.dtype, k: int, experts: int, device: torch.device) -> Launcher:
    """Return the launcher for one integer type and one size of a mixture, on one device."""
    return Launcher(arrange_kernel, (k, experts, _bins(experts), FEW_PAIRS, CHUNK), num_warps=NUM_WARPS)


@lru_cache(maxsize=256)
def _two_launches(dtype: torch.dtype, k: int, experts: int, device: torch.device) -> tuple[Launcher, Launcher]:
    bins = _bins(experts)
    count = Launcher(count_kernel, (experts, bins, CHUNK), num_warps=NUM_WARPS)
    return count, Launcher(place_kernel, (k, experts, bins, CHUNK, COUNTS_AT_ONCE), num_warps=NUM_WARPS)
