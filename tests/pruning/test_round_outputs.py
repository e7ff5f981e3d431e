"""Rounding for outputs: the integers of the definition, nearer outputs than to nearest, zeros and scales in place."""

from __future__ import annotations

import pytest
import torch
from correlated_linears import correlated_inputs, linears_with
from torch import nn

from slidesparse.models.grams import FIRST, collect_grams
from slidesparse.models.layer_stack import Sample
from slidesparse.pruning import Linears, RoundForOutputs, get_pruner, output_error
from slidesparse.pruning.round_outputs import FP8, SIX_BITS, Grid, round_for_outputs
from slidesparse.pruning.sparsegpt import inverse_factor
from slidesparse.weights.quant import Quantised, dequantize, quantize_weight

GRIDS = {"int8": Grid(127.0, torch.round), "6bit": SIX_BITS, "fp8": FP8}


def quantised(weight: torch.Tensor, name: str) -> Quantised:
    """What ``prune`` makes of a weight."""
    if name == "fp8":
        return quantize_weight(weight, torch.float8_e4m3fn)
    return quantize_weight(weight, torch.int8, rounding="6bit" if name == "6bit" else "absmax")


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_quantising_gives_the_rounded_values_and_the_scales_stay(dtype: torch.dtype, name: str) -> None:
    x = correlated_inputs(512, 200)
    weight = torch.randn(48, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[5] = 0
    weight[:, ::4] = 0
    found = round_for_outputs(weight, inverse_factor(x.T @ x)[0], GRIDS[name])
    (values, scale), (_, before) = (quantised(one, name) for one in (found, weight))
    assert found.dtype == dtype
    assert torch.equal(scale, before)
    assert torch.equal(dequantize(values, scale).to(dtype), found)
    assert not bool(found[weight == 0].any())


def test_each_column_is_rounded_where_the_best_of_the_columns_before_leaves_it() -> None:
    """The definition, in float64: with some columns given, the others are those that least squares make of them."""
    x, columns = correlated_inputs(400, 150).double(), 150
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(2))
    weight[:, ::3] = 0
    factor, damping = inverse_factor((x.T @ x).float())
    gram = x.T @ x + damping * torch.eye(columns, dtype=torch.float64)
    found = round_for_outputs(weight, factor).double()
    for row, exact in zip(found, weight.double(), strict=True):
        scale = exact.abs().max() / 31
        for column in range(columns):
            left, wrong = slice(column, None), (row - exact)[:column]
            best = exact[left] - torch.linalg.solve(gram[left, left], gram[left, :column] @ wrong)
            unit = float(best[0] / scale)
            if exact[column] == 0 or exact[column].abs() == exact.abs().max():
                assert row[column] == exact[column]
            elif abs(unit % 1 - 0.5) > 1e-2:  # float32 may take either neighbour of a half
                assert round(float(row[column] / scale)) == min(max(round(unit), -31), 31)


@pytest.mark.parametrize("name", ["6bit", "fp8"])
@pytest.mark.parametrize("method", ["sparsegpt", "wanda"])
def test_outputs_are_nearer_than_by_rounding_to_nearest(method: str, name: str) -> None:
    torch.manual_seed(0)
    linears, x = linears_with(160, "6:8", 32, 24)
    pruned = get_pruner(method).prune(linears)
    found = RoundForOutputs(GRIDS[name]).prune(Linears(pruned, linears.pattern, linears.input_gram))
    nearest, ours = (
        output_error(pruned, {key: dequantize(*quantised(weight, name)) for key, weight in one.items()}, x.T @ x)
        for one in (pruned, found)
    )
    assert 0 < ours < 0.5 * nearest


def test_tokens_count_alike_and_the_first_of_a_text_many_times() -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3)) * 10 ** torch.arange(5.0)[:, None]
    x[1, 3] = 0
    gram = torch.zeros(8, 8, dtype=torch.float64)
    for text in x.double():
        for place, token in enumerate(text):
            if token.any():
                gram += torch.outer(token, token) / token.square().sum() * (FIRST if place == 0 else 1)
    linear = nn.Linear(8, 4, bias=False)
    found = collect_grams(linear, 0, {"w": linear}, [Sample(x, [((), {})])], alike=True)["w"]
    torch.testing.assert_close(found.double(), gram, rtol=1e-5, atol=1e-5)
