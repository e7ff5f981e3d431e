"""The order of a mixture's rows: every pair has one row, every tile one expert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slidesparse import InputError
from slidesparse.lifting.expert_order import arrange, rows_needed


@given(
    tokens=st.integers(0, 40),
    experts=st.integers(1, 9),
    k=st.integers(1, 4),
    tile=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_every_pair_has_a_row_in_a_tile_of_its_expert(tokens: int, experts: int, k: int, tile: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(-1, experts, (tokens, k), generator=generator)
    found = arrange(chosen, experts, tile)
    used, size = int(found.used), rows_needed(tokens * k, experts, tile)
    assert found.tokens.shape == (size,)
    assert found.experts.shape == (size // tile,)
    assert used <= size // tile
    here = chosen >= 0
    assert torch.equal(found.rows < 0, ~here)
    rows = found.rows[here]
    assert len(rows.unique()) == len(rows)
    assert torch.equal(found.tokens[rows], torch.arange(tokens).repeat_interleave(k).view(tokens, k)[here])
    assert torch.equal(found.experts[rows // tile].long(), chosen[here])
    tiles = [-(-int((chosen == expert).sum()) // tile) for expert in range(experts)]
    assert used == sum(tiles)
    of_tiles = found.experts[:used].tolist()
    assert of_tiles == sorted(of_tiles)


def test_rows_keep_the_order_of_their_tokens() -> None:
    found = arrange(torch.tensor([[1, 0], [1, 2], [0, 1]]), 3, 4)
    assert found.rows.tolist() == [[4, 0], [5, 8], [1, 6]]
    assert found.tokens.tolist()[:12] == [0, 2, -1, -1, 0, 1, 2, -1, 1, -1, -1, -1]
    assert (found.experts.tolist()[:3], found.used.tolist()) == ([0, 1, 2], [3])


@pytest.mark.parametrize(
    "wrong",
    [torch.zeros(3), torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.bool), torch.tensor([[0, 1], [-1, 2]])],
)
def test_what_are_no_experts_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(InputError, match="experts of tokens"):
        arrange(wrong, 2, 4)
