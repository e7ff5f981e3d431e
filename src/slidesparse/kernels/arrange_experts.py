"""Put the tokens of a mixture into the order of its experts: one launch in place of fifteen small ones.

A program is an expert. It counts the pairs of all experts, which gives the rows before its own, and then numbers its
own pairs in their order. So every program reads all pairs twice, which suits decoding and short prompts. Beyond
:data:`MOST_PAIRS`, :func:`slidesparse.expert_order.arrange`, the definition, takes a small share of a layer's time.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from slidesparse.base.torch_private import is_current
from slidesparse.kernels.triton_launcher import Launcher

CHUNK = 1024
NUM_WARPS = 4
MOST_PAIRS = 4096
"""Pairs that the kernel has loops for; they are unrolled, and those past the last pair are left out."""


@triton.jit
def _experts_of(chosen, pair, pairs, EXPERTS: tl.constexpr):
    """Load the experts of some pairs; EXPERTS for those that are not here, and past the last pair."""
    expert = tl.load(chosen + pair, mask=pair < pairs, other=-1).to(tl.int32)
    return tl.where(expert < 0, EXPERTS, expert)


@triton.jit(do_not_specialize=["pairs"])
def arrange_kernel(
    chosen,
    rows,
    tokens,
    experts,
    used,
    pairs,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TILE: tl.constexpr,
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
    tiles = tl.where(bins < EXPERTS, (counts + TILE - 1) // TILE, 0)
    first = tl.sum(tl.where(bins < own, tiles, 0))
    seen = 0
    for start in tl.static_range(0, MOST, CHUNK):
        if start < pairs:
            pair = start + tl.arange(0, CHUNK)
            expert = _experts_of(chosen, pair, pairs, EXPERTS)
            mine = (expert == own).to(tl.int32)
            row = (first * TILE + seen + tl.cumsum(mine, 0) - mine).to(tl.int64)
            tl.store(rows + pair, row, mask=mine > 0)
            tl.store(tokens + row, (pair // K).to(tl.int64), mask=mine > 0)
            if own == 0:
                tl.store(rows + pair, tl.full((CHUNK,), -1, tl.int64), mask=(expert == EXPERTS) & (pair < pairs))
            seen += tl.sum(mine)
    tile = tl.arange(0, CHUNK)
    tl.store(
        experts + tile, tl.full((CHUNK,), 0, tl.int32) + own, mask=(tile >= first) & (tile * TILE < first * TILE + seen)
    )
    if own == 0:
        tl.store(used, tl.sum(tiles))


def takes(pairs: int, tiles: int) -> bool:
    """Return whether the kernel has loops for these numbers of pairs and token tiles."""
    return pairs <= MOST_PAIRS and tiles <= CHUNK


def arrange(
    chosen: torch.Tensor, experts: int, tile: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the fields of a :class:`slidesparse.expert_order.Arrangement`.

    Arguments are checked, and such as it :func:`takes`.

    Args:
        chosen: Contiguous integers [M, k].
        experts: Number of experts here.
        tile: Tokens of a tile.
        rows: P, from :func:`slidesparse.expert_order.rows_needed`.
    """
    index, device = chosen.get_device(), chosen.device
    if index >= 0 and not is_current(index):
        with torch.cuda.device(index):
            return arrange(chosen, experts, tile, rows)
    of_pairs = torch.empty(chosen.shape, dtype=torch.int64, device=device)
    tokens = torch.full((rows,), -1, dtype=torch.int64, device=device)
    of_tiles = torch.empty(rows // tile, dtype=torch.int32, device=device)
    used = torch.empty(1, dtype=torch.int32, device=device)
    launcher = _launcher(chosen.dtype, chosen.shape[1], experts, tile, device)
    launcher.run(experts, index, (chosen, of_pairs, tokens, of_tiles, used), (chosen.numel(),), ())
    return of_pairs, tokens, of_tiles, used


@lru_cache(maxsize=256)
def _launcher(dtype: torch.dtype, k: int, experts: int, tile: int, device: torch.device) -> Launcher:
    """Return the launcher for a type of numbers of experts, and the sizes of a mixture, on one device."""
    bins = triton.next_power_of_2(experts + 1)
    return Launcher(arrange_kernel, (k, experts, tile, bins, MOST_PAIRS, CHUNK), num_warps=NUM_WARPS)
