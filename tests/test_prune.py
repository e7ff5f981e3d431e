from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slidesparse import InputError, Pattern, prune_mask
from slidesparse.prune import METHODS, Linears, get_pruner, prune_masks
from slidesparse.support import INT_VIEW, check_pattern, following_groups


@pytest.mark.parametrize("text", ["2:4", "4:6", "6:8", "14:16"])
def test_no_other_mask_removes_less(text: str) -> None:
    pattern = Pattern.parse(text)
    cost = torch.rand(6, 3 * pattern.group)
    mask = prune_mask(cost, pattern, cost)
    for row, row_mask in zip(cost, mask, strict=True):
        for start in range(0, len(row), pattern.group):
            group, kept = row[start : start + pattern.group], row_mask[start : start + pattern.group]
            cheapest = min(float(group[i] + group[j]) for i, j in itertools.combinations(range(pattern.group), 2))
            assert float(group[~kept].sum()) == cheapest
            assert int(kept.sum()) == pattern.keep


def test_of_equals_the_later_go() -> None:
    assert prune_mask(torch.ones(1, 16), "6:8").int().tolist() == [[1, 1, 1, 1, 1, 1, 0, 0] * 2]
    weight = torch.tensor([[2.0, 1, -1, 2, 1, 3, 3, 3]])
    assert prune_mask(weight, "6:8").int().tolist() == [[1, 1, 0, 1, 0, 1, 1, 1]]


@pytest.mark.parametrize("dtype", list(INT_VIEW), ids=str)
def test_magnitude_for_every_type(dtype: torch.dtype) -> None:
    weight = torch.tensor([[-8.0, 1, 2, -4, -3, 7, 5, 6]]).to(dtype)
    assert prune_mask(weight, "6:8").int().tolist() == [[1, 0, 0, 1, 1, 1, 1, 1]]


def test_int8_minimum_is_the_largest() -> None:
    weight = torch.tensor([[-128, 127, 126, 125]], dtype=torch.int8)
    assert prune_mask(weight, "2:4").tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("columns", [1, 2, 7, 8, 9, 21])
def test_padding_is_left_out_first(columns: int) -> None:
    mask = prune_mask(torch.rand(4, columns) + 1, "6:8")
    tail = columns % 8
    assert mask.shape == (4, columns)
    assert bool((mask[:, columns - tail :].sum(1) == min(tail, 6)).all())


@given(
    columns=st.integers(1, 70),
    text=st.sampled_from(["2:4", "4:6", "6:8", "14:16", "30:32", "4:6@50%", "2:4@33.33%"]),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_pruned_once_is_pruned(columns: int, text: str, density: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, columns, generator=generator)
    weight *= torch.rand(5, columns, generator=generator) < density
    pruned = weight * prune_mask(weight, text)
    assert len(check_pattern(pruned, text)) >= Pattern.parse(text).following(Pattern.parse(text).groups(columns))
    assert torch.equal(pruned * prune_mask(pruned, text), pruned)


@pytest.mark.parametrize("tiny", [1e-25, 1e-40])
def test_a_weight_that_satisfies_its_pattern_is_left_as_it_is(tiny: float) -> None:
    # The square of such a number is zero in float32, so zeros and weights would tie.
    weight = torch.tensor([[0.0, 0.0, tiny, tiny, tiny, tiny, tiny, -tiny]])
    assert torch.equal(weight * prune_mask(weight, "6:8"), weight)


def test_huge_weights_are_weights() -> None:
    weight = torch.tensor([[1e30, 2e30, 1.0, 2.0]])
    assert prune_mask(weight, "2:4").tolist() == [[True, True, False, False]]


# -- partial patterns ----------------------------------------------------------------------------------------------


def test_the_cheapest_groups_follow() -> None:
    # Pruning group g costs 2 * (g + 1)^2 in every row, but for the order.
    scale = torch.tensor([3.0, 1.0, 4.0, 2.0]).repeat_interleave(6)
    weight = scale.repeat(3, 1)
    mask = prune_mask(weight, "4:6@50%")
    assert following_groups(weight * mask, Pattern(4, 6)).tolist() == [1, 3]
    assert bool(mask.view(3, 4, 6)[:, [0, 2]].all())


@pytest.mark.parametrize(
    ("text", "columns", "following"), [("4:6@50%", 30, 3), ("2:4@33.33%", 16, 2), ("6:8@1%", 96, 1)]
)
def test_shares_that_are_no_whole_number_are_rounded_up(text: str, columns: int, following: int) -> None:
    mask = prune_mask(torch.rand(9, columns) + 1, text)
    assert len(following_groups(mask.float(), Pattern.parse(text))) == following


def test_linears_of_one_input_prune_the_same_groups() -> None:
    q, k, v = torch.randn(32, 60), torch.randn(8, 60), torch.randn(8, 60)
    pattern = Pattern.parse("4:6@50%")
    pruned = get_pruner("magnitude").prune(Linears({"q": q, "k": k, "v": v}, pattern))
    groups = [following_groups(weight, pattern).tolist() for weight in pruned.values()]
    assert groups[0] == groups[1] == groups[2]
    assert len(groups[0]) == 5
    # Alone they would not agree, so the equality above says something.
    alone = [following_groups(w * prune_mask(w, pattern), pattern).tolist() for w in (q, k, v)]
    assert not alone[0] == alone[1] == alone[2]
    fused = torch.cat(list(pruned.values()))
    assert following_groups(fused, pattern).tolist() == groups[0]


def test_groups_read_back_contain_the_chosen_ones() -> None:
    weight = torch.randn(4, 60)
    weight[:, 6:8] = 0  # group 1 follows before anything is pruned
    weight[:, 0:6] *= 1e-3
    weight[:, 12:18] *= 1e-2
    pruned = weight * prune_mask(weight, "4:6@20%")
    assert following_groups(pruned, Pattern(4, 6)).tolist() == [0, 1]
    # Group 1 costs nothing, so it was chosen; zeros elsewhere only add followers.
    pruned[:, 30:33] = 0
    assert check_pattern(pruned, "4:6@20%").tolist() == [0, 1, 5]


# -- methods -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_magnitude_changes_nothing_that_it_keeps(dtype: torch.dtype) -> None:
    weight = torch.randn(8, 21).to(dtype)
    before = weight.clone()
    pruned = get_pruner("magnitude").prune(Linears({"w": weight}, Pattern(6, 8)))["w"]
    assert torch.equal(weight, before)
    assert pruned.dtype == dtype
    assert torch.equal(pruned, weight * prune_mask(weight, "6:8"))


def test_unknown_method() -> None:
    with pytest.raises(InputError, match="unknown pruning method; got 'wandb'") as error:
        get_pruner("wandb")
    assert all(name in str(error.value) for name in METHODS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_bad_costs(bad: float) -> None:
    cost = torch.ones(2, 8)
    cost[1, 2] = bad
    with pytest.raises(InputError, match="cost is negative, NaN or Inf"):
        prune_mask(torch.ones(2, 8), "6:8", cost)


@pytest.mark.parametrize("shape", [(2, 7), (1, 8), (8,)])
def test_costs_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="cost") as error:
        prune_mask(torch.ones(2, 8), "6:8", torch.ones(shape))
    assert "\n" not in str(error.value)


def test_linears_of_different_width() -> None:
    with pytest.raises(InputError, match="differ in columns"):
        prune_masks([torch.ones(2, 8), torch.ones(2, 16)], "6:8")


def test_nan_weight_is_named() -> None:
    with pytest.raises(InputError, match="up_proj holds NaN"):
        get_pruner("magnitude").prune(Linears({"up_proj": torch.full((2, 8), float("nan"))}, Pattern(6, 8)))
