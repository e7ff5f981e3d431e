"""Rounding for outputs: nearer outputs than rounding to nearest, the same integers when quantised, zeros in place."""

from __future__ import annotations

import pytest
import torch
from correlated_linears import correlated_inputs, linears_with

from slidesparse.prune import RoundedForOutputs, get_pruner, output_error, round_outputs
from slidesparse.prune.round_outputs import round_for_outputs
from slidesparse.weights.quant import Rounding, dequantize, quantize_weight

MOST: dict[Rounding, float] = {"absmax": 127.0, "6bit": 31.0}


def served(weight: torch.Tensor, recipe: Rounding) -> torch.Tensor:
    """The weight that its INT8 form stands for."""
    return dequantize(*quantize_weight(weight, torch.int8, recipe=recipe))


@pytest.mark.parametrize("recipe", MOST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantising_gives_the_rounded_integers_and_the_scales_stay(dtype: torch.dtype, recipe: Rounding) -> None:
    x = correlated_inputs(512, 200)
    weight = torch.randn(48, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[5] = 0
    found = round_for_outputs(weight, x.T @ x, MOST[recipe], 1.0)
    (values, scale), (_, before) = (quantize_weight(one, torch.int8, recipe=recipe) for one in (found, weight))
    assert found.dtype == dtype
    assert torch.equal(scale, before)
    assert torch.equal(dequantize(values, scale).to(dtype), found)


@pytest.mark.parametrize("recipe", MOST)
@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_outputs_are_nearer_than_by_rounding_to_nearest(method: str, recipe: Rounding) -> None:
    torch.manual_seed(0)
    linears, x = linears_with(160, "6:8", 32, 24)
    pruned = get_pruner(method).prune(linears)
    found = RoundedForOutputs(get_pruner(method), recipe).prune(linears)
    for name, weight in pruned.items():
        # Among values of six bits, those near zero may become zero, and no zero becomes a value.
        assert not bool((found[name][weight == 0] != 0).any())
    nearest, ours = (
        output_error(pruned, {name: served(weight, recipe) for name, weight in one.items()}, x.T @ x)
        for one in (pruned, found)
    )
    assert 0 < ours < 0.5 * nearest


def test_after_enough_passes_no_single_step_makes_outputs_nearer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_outputs, "PASSES", 100)
    x = correlated_inputs(256, 12)
    gram = x.T @ x
    weight = torch.randn(6, 12, generator=torch.Generator().manual_seed(2))
    found = round_for_outputs(weight, gram, 31.0, 0.0)
    scale = weight.abs().amax(1, keepdim=True) / 31
    errors = (((found - weight) @ gram) * (found - weight)).sum(1)
    for column in range(12):
        for step in (-1, 1):
            other = found.clone()
            other[:, column] += step * scale[:, 0]
            moved = (((other - weight) @ gram) * (other - weight)).sum(1)
            free = weight[:, column].abs() < weight.abs().amax(1)
            inside = (other[:, column] / scale[:, 0]).abs() < 31.5
            assert bool((moved >= errors * (1 - 1e-4))[free & inside].all())
