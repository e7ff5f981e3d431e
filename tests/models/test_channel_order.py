"""The search for an order of columns in which a mask takes less away."""

from __future__ import annotations

import pytest
import torch

from slidesparse.models import channel_order
from slidesparse.models.channel_order import better_order, exchange_gains, taken


def drop(scores: torch.Tensor, group: int) -> float:
    """What a mask takes away, by sorting each group of each row."""
    whole = scores[:, : scores.shape[1] // group * group].reshape(len(scores), -1, group)
    return float(whole.sort(-1).values[..., :2].sum())


@pytest.mark.parametrize("group", [4, 6, 8])
def test_gains_are_those_of_making_each_exchange(group: int) -> None:
    a, b = torch.rand(2, 5, 3, group)
    gains = exchange_gains(a, b)
    for pair in range(3):
        before = drop(torch.cat([a[:, pair], b[:, pair]], 1), group)
        for i in range(group):
            for j in range(group):
                x, y = a[:, pair].clone(), b[:, pair].clone()
                x[:, i], y[:, j] = b[:, pair, j], a[:, pair, i]
                after = drop(torch.cat([x, y], 1), group)
                assert gains[pair, i, j] == pytest.approx(before - after, abs=1e-5)


def test_equal_scores_are_told_apart() -> None:
    a = torch.tensor([[[1.0, 1.0, 1.0, 5.0]]])
    b = torch.tensor([[[7.0, 7.0, 2.0, 2.0]]])
    gains = exchange_gains(a, b)[0]
    assert gains[3, 2] == -3.0, "1 1 1 2 and 7 7 5 2 lose 2 and 7, where they lost 2 and 4"
    assert gains[0, 0] == 1.0, "7 1 1 5 and 1 7 2 2 lose 2 and 3"


@pytest.mark.parametrize("group", [4, 6, 8])
def test_an_order_takes_less_away(group: int) -> None:
    scores = torch.rand(40, 100, generator=torch.Generator().manual_seed(0)) ** 4
    order = better_order(scores, group, 0)
    assert sorted(order.tolist()) == list(range(100))
    assert taken(scores[:, order], group) < 0.95 * taken(scores, group)
    assert float(taken(scores, group)) == pytest.approx(drop(scores, group), rel=1e-5)
    past = 100 // group * group
    assert torch.equal(order[past:], torch.arange(past, 100))
    assert torch.equal(order, better_order(scores, group, 0))


def test_small_columns_spread_over_all_groups() -> None:
    scores = torch.tensor([[0.0] * 8 + [9.0] * 8])
    assert taken(scores[:, better_order(scores, 4, 0)], 4) == 0


def test_an_order_that_cannot_be_better_stays() -> None:
    scores = torch.tensor([[0.0, 0.0, 9.0, 9.0] * 3])
    assert torch.equal(better_order(scores, 4, 0), torch.arange(12))
    assert torch.equal(better_order(scores[:, :4], 4, 0), torch.arange(4)), "one group has no other"


def test_many_rows_and_groups_are_searched_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.rand(60, 96, generator=torch.Generator().manual_seed(1)) ** 4
    at_once = better_order(scores, 8, 0)
    monkeypatch.setattr(channel_order, "MOST_ITEMS", 60 * 64 * 2)
    assert torch.equal(better_order(scores, 8, 0), at_once)
    monkeypatch.setattr(channel_order, "ROWS", 20)
    fewer = better_order(scores, 8, 0)
    assert taken(scores[:, at_once], 8) < taken(scores[:, fewer], 8) < taken(scores, 8)
