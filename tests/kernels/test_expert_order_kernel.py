"""The order of a mixture's rows: the kernel gives what torch does."""

from __future__ import annotations

import pytest
import torch

from slidesparse.lifting import expert_order_kernel
from slidesparse.lifting.expert_order import arrange, rows_needed


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "tile", "dtype"),
    [
        *((*sizes, torch.int64) for sizes in ((1, 8, 2, 16), (40, 5, 3, 16), (200, 128, 8, 64), (9, 3, 1, 16))),
        *((*sizes, torch.int32) for sizes in ((40, 5, 3, 16), (200, 128, 8, 64), (520, 20, 8, 64))),
    ],
)
def test_the_kernel_gives_what_torch_does(
    device: str, dtype: torch.dtype, tokens: int, experts: int, k: int, tile: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    for least in (0, -1):  # -1: experts that are elsewhere
        chosen = torch.randint(least, experts, (tokens, k), generator=generator).to(dtype)
        wanted = arrange(chosen, experts, tile)
        found = expert_order_kernel.arrange(chosen.to(device), experts, tile, rows_needed(tokens * k, experts, tile))
        rows, of_rows, of_tiles, used = (tensor.cpu() for tensor in found)
        assert torch.equal(used, wanted.used)
        assert torch.equal(rows, wanted.rows)
        assert torch.equal(of_rows, wanted.tokens)
        assert torch.equal(of_tiles[: int(used)], wanted.experts[: int(used)])


@pytest.mark.slow
@pytest.mark.parametrize(("pairs", "tiles"), [(300, 19), (4100, 257)])
def test_all_tokens_may_go_to_one_expert(device: str, pairs: int, tiles: int) -> None:
    chosen = torch.full((pairs, 1), 2, dtype=torch.int32)
    rows, tokens, experts, used = expert_order_kernel.arrange(chosen.to(device), 4, 16, rows_needed(pairs, 4, 16))
    assert rows.flatten().tolist() == list(range(pairs))
    assert tokens[:pairs].tolist() == list(range(pairs))
    assert int(used) == tiles
    assert experts[:tiles].tolist() == [2] * tiles
