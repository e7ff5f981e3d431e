"""The fast ways to find the cheapest weights give what the definition gives, ties and limits included."""

from __future__ import annotations

import pytest
import torch

from slidesparse.prune import Linears, Magnitude, prune_mask
from slidesparse.prune.cheapest import FEW, by_definition, by_position, kept
from slidesparse.prune.mask import magnitude_cost, magnitude_order
from slidesparse.weights.pattern import Pattern


@pytest.mark.parametrize("size", [4, 6, 8, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_by_position_is_the_definition(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    for largest in (2, 5, 1000):  # nearly all tie, many, few
        groups = torch.randint(-1, largest, (40, 50, size), generator=generator).to(dtype)
        assert torch.equal(by_position(groups), by_definition(groups))
        assert torch.equal(kept(groups.to(torch.int16)), (~by_definition(groups)).to(torch.int16))
    groups[:, :, 1] = torch.finfo(torch.float32).max if dtype == torch.float32 else 32766
    assert torch.equal(by_position(groups), by_definition(groups))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_in_the_order_of_its_cost(dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    numbers = numbers[torch.isfinite(numbers)].view(1, -1)
    cost, order = magnitude_cost(numbers)[0], magnitude_order(numbers)[0]
    known = cost.unique()
    assert torch.equal(torch.searchsorted(known, cost), torch.searchsorted(order.unique(), order))
    assert bool(((cost == 0) == (order == 0)).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8])
@pytest.mark.parametrize("pattern", ["6:8", "8:10", "2:4"])
def test_magnitude_in_blocks_of_rows_is_its_mask(dtype: torch.dtype, pattern: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-9, 9, (1400, 1004), generator=generator).to(dtype)  # many ties, and more than one block
    pruned = Magnitude().prune(Linears({"w": weight}, Pattern.parse(pattern)))["w"]
    assert torch.equal(pruned, torch.where(prune_mask(weight, pattern), weight, torch.zeros((), dtype=dtype)))


@pytest.mark.parametrize("n", [FEW // 8, FEW])
def test_factors_hold_at_the_limits(n: int) -> None:
    groups = torch.tensor([32766, -1, -1, 32766, 0, 32766, 32766, 32766], dtype=torch.int16).expand(1, n, 8)
    assert kept(groups)[0, -1].tolist() == [1, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("among", ["nothing else", "a zero", "tiny ones", "huge ones"])
def test_weights_of_bfloat16_that_are_limited_and_those_that_are_not(among: str) -> None:
    weight = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    others = {"a zero": (0.0, -0.0), "tiny ones": (1e-30, 1e-38), "huge ones": (3e38, 1e37)}.get(among, ())
    for column, value in enumerate(others):
        weight[::3, column::5] = value
    pruned = Magnitude().prune(Linears({"w": weight}, Pattern(6, 8)))["w"]
    assert torch.equal(pruned, torch.where(prune_mask(weight, "6:8"), weight, torch.zeros((), dtype=weight.dtype)))
