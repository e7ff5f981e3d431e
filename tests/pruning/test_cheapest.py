"""The cheapest weights of a group are those that sorting finds, ties and limits included."""

from __future__ import annotations

import pytest
import torch

from slidesparse.pruning import Linears, Magnitude, prune_mask
from slidesparse.pruning.mask import two_cheapest
from slidesparse.weights.pattern import Pattern


@pytest.mark.parametrize("size", [4, 6, 8, 32])
def test_the_two_cheapest_are_those_of_a_stable_sort(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    for largest in (2, 5, 1000):  # nearly all tie, many, few
        groups = torch.randint(-1, largest, (40, 50, size), generator=generator).float()
        groups[0, :, 1] = torch.finfo(torch.float32).max
        order = size - 1 - groups.flip(-1).argsort(stable=True)[..., :2]  # the later of equals goes
        assert torch.equal(two_cheapest(groups), torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
@pytest.mark.parametrize("pattern", ["6:8", "8:10", "2:4"])
def test_magnitude_is_its_mask(dtype: torch.dtype, pattern: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-9, 9, (140, 1004), generator=generator).to(dtype)  # many ties
    pruned = Magnitude().prune(Linears({"w": weight}, Pattern.parse(pattern)))["w"]
    assert torch.equal(pruned, torch.where(prune_mask(weight, pattern), weight, torch.zeros((), dtype=dtype)))


@pytest.mark.parametrize("among", ["nothing else", "a zero", "tiny ones", "huge ones"])
def test_weights_of_bfloat16_that_are_limited_and_those_that_are_not(among: str) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    others = {"a zero": (0.0, -0.0), "tiny ones": (1e-30, 1e-38), "huge ones": (3e38, 1e37)}.get(among, ())
    for column, value in enumerate(others):
        weight[::3, column::5] = value
    pruned = Magnitude().prune(Linears({"w": weight}, Pattern(6, 8)))["w"]
    assert torch.equal(pruned, torch.where(prune_mask(weight, "6:8"), weight, torch.zeros((), dtype=weight.dtype)))
