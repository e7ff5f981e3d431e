"""Put the tokens of a mixture into the order of its experts, for a grouped product.

A token goes to several experts: each such *pair* of a token and an expert is a row of the products. Rows stand expert
after expert, and those of an expert begin at a multiple of the product's token tile, so that a tile has one expert::

    tile      0            1            2            3
    rows   | e0 e0 e0 -- | e2 e2 e2 e2 | e2 -- -- -- |   not used   |        -- rows of nobody, e1 has no token

Everything is torch on the device, with shapes that follow from the numbers of tokens and experts alone: nothing waits
for the device, and CUDA graphs can hold it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from slidesparse.errors import InputError


class Arrangement(NamedTuple):
    """Where the pairs of some tokens stand.

    Attributes:
        rows: int64 [M, k], the row of every pair; -1 where its expert is not here.
        tokens: int64 [P], the token of every row; -1 for rows of nobody.
        experts: int32 [P / tile], the expert of every tile; of tiles past ``used`` any.
        used: int32 [1], the number of tiles that have rows, the first ones.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    experts: torch.Tensor
    used: torch.Tensor


def rows_needed(pairs: int, experts: int, tile: int) -> int:
    """Return P, the rows that suffice for any routing: every expert that can have a pair may need a tile more.

    >>> rows_needed(512, 128, 16), rows_needed(2, 128, 16), rows_needed(0, 8, 16)
    (2432, 32, 0)
    """
    most = pairs + min(pairs, experts) * (tile - 1)
    return most // tile * tile


def arrange(chosen: torch.Tensor, experts: int, tile: int) -> Arrangement:
    """Arrange tokens by their experts; the pairs of an expert keep the order of their tokens.

    Args:
        chosen: Integers [M, k], the experts of every token, each in [0, ``experts``); negative where one is not here.
        experts: Number of experts here.
        tile: Tokens of a tile.

    Raises:
        InputError: Not two dimensions, or no integers; on a CPU also an expert that does not exist.
    """
    if chosen.dim() != 2 or chosen.dtype.is_floating_point or chosen.dtype == torch.bool:
        raise InputError("experts of tokens", got=f"{list(chosen.shape)} {chosen.dtype}", needed="integers [M, k]")
    pairs, device = chosen.numel(), chosen.device
    if device.type == "cpu" and pairs and (largest := int(chosen.max())) >= experts:  # a GPU would be waited for
        raise InputError("experts of tokens", got=f"expert {largest}", needed=f"experts below {experts}")
    rows = rows_needed(pairs, experts, tile)
    of_pair = chosen.reshape(-1).to(torch.int64)
    of_pair = torch.where(of_pair < 0, experts, of_pair)  # one expert more, for those that are not here
    counts = of_pair.new_zeros(experts + 1).scatter_add_(0, of_pair, of_pair.new_ones(pairs))
    ends = ((counts[:-1] + tile - 1) // tile).cumsum(0)  # in tiles
    starts = torch.nn.functional.pad(ends, (1, 0)) * tile
    order = of_pair.argsort(stable=True)
    sorted_experts = of_pair[order]
    within = torch.arange(pairs, device=device) - (counts.cumsum(0) - counts)[sorted_experts]
    places = torch.where(sorted_experts < experts, starts[sorted_experts] + within, -1)
    of_pairs = torch.empty_like(places).scatter_(0, order, places)
    token = torch.arange(pairs, device=device) // max(1, chosen.shape[1])
    # Pairs that are not here go to one row more, which is cut off.
    whole = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
    tokens = whole.scatter_(0, of_pairs % (rows + 1), token)[:rows]
    numbers = torch.arange(rows // tile, device=device)
    of_tiles = torch.searchsorted(ends, numbers, right=True).clamp(max=max(0, experts - 1))
    return Arrangement(of_pairs.view(chosen.shape), tokens, of_tiles.to(torch.int32), ends[-1:].to(torch.int32))
