"""The order of a mixture's tokens by expert, for a grouped product.

A token goes to several experts, and each such *pair* of a token and an expert is one row of the products. Rows are
sorted by expert, and each expert starts at a multiple of the product's token tile, so every tile has one expert::

    tile      0            1            2            3
    rows   | e0 e0 e0 -- | e2 e2 e2 e2 | e2 -- -- -- |   not used   |        -- padding rows; e1 has no token

Everything is computed by torch on the device, with shapes that follow from the numbers of tokens and experts alone:
the host never waits, and CUDA graphs can capture it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slidesparse.errors import InputError


class Arrangement(NamedTuple):
    """The rows of the (token, expert) pairs of a batch, sorted by expert and padded to whole tiles.

    Attributes:
        rows: int64 [M, k], the row of every pair; -1 where its expert is on another GPU.
        tokens: int64 [P], the token of every row; -1 for padding rows.
        experts: int32 [P / tile], the expert of every tile; undefined for tiles past ``used``.
        used: int32 [1], the number of tiles that have tokens; they come first.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor


def rows_needed(pairs: int, experts: int, tile: int) -> int:
    """Return P, an upper bound of the rows for any routing: every expert with a token may need one partly filled tile.

    >>> rows_needed(512, 128, 16), rows_needed(2, 128, 16), rows_needed(0, 8, 16)
    (2432, 32, 0)
    """
    most = pairs + min(pairs, experts) * (tile - 1)
    return most // tile * tile


def arrange(chosen: torch.Tensor, experts: int, tile: int) -> Arrangement:
    """Sort pairs by expert; within an expert they keep the order of the tokens.

    Args:
        chosen: Integers [M, k], the experts of every token, in [0, ``experts``); negative for one on another GPU.
        experts: Number of experts on this GPU.
        tile: Tokens of a tile.

    Raises:
        InputError: ``chosen`` is not a matrix of integers, or, on a CPU, names an expert that does not exist.
    """
    if chosen.dim() != 2 or chosen.dtype.is_floating_point or chosen.dtype == torch.bool:
        raise InputError("experts of tokens", got=f"{list(chosen.shape)} {chosen.dtype}", needed="integers [M, k]")
    pairs, device = chosen.numel(), chosen.device
    # A GPU is not checked: the host would wait for it.
    if device.type == "cpu" and pairs and (largest := int(chosen.max())) >= experts:
        raise InputError("experts of tokens", got=f"expert {largest}", needed=f"experts below {experts}")
    rows = rows_needed(pairs, experts, tile)
    of_pair = chosen.reshape(-1).to(torch.int64)
    of_pair = torch.where(of_pair < 0, experts, of_pair)  # one more bin, for experts on other GPUs
    counts = of_pair.new_zeros(experts + 1).scatter_add_(0, of_pair, of_pair.new_ones(pairs))
    ends = ((counts[:-1] + tile - 1) // tile).cumsum(0)  # in tiles
    starts = torch.nn.functional.pad(ends, (1, 0)) * tile
    order = of_pair.argsort(stable=True)
    sorted_experts = of_pair[order]
    within = torch.arange(pairs, device=device) - (counts.cumsum(0) - counts)[sorted_experts]
    places = torch.where(sorted_experts < experts, starts[sorted_experts] + within, -1)
    of_pairs = torch.empty_like(places).scatter_(0, order, places)
    token = torch.arange(pairs, device=device) // max(1, chosen.shape[1])
    # Pairs of experts on other GPUs are written to one extra row, which is cut off.
    whole = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
    tokens = whole.scatter_(0, of_pairs % (rows + 1), token)[:rows]
    numbers = torch.arange(rows // tile, device=device)
    of_tiles = torch.searchsorted(ends, numbers, right=True).clamp(max=max(0, experts - 1))
    return Arrangement(of_pairs.view(chosen.shape), tokens, of_tiles.to(torch.int32), ends[-1:].to(torch.int32))
