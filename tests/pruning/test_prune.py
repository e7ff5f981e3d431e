from __future__ import annotations

import itertools

import pytest
import torch
from correlated_linears import correlated_inputs, linears_with
from hypothesis import given
from hypothesis import strategies as st

from slidesparse import InputError, Pattern, prune_mask
from slidesparse.pruning import METHODS, Linears, get_pruner, output_error, sparsegpt
from slidesparse.pruning.mask import kept_by
from slidesparse.weights.support import INT_VIEW, check_pattern


@pytest.mark.parametrize("text", ["2:4", "4:6", "6:8", "14:16"])
def test_no_other_mask_removes_less(text: str) -> None:
    pattern = Pattern.parse(text)
    cost = torch.rand(6, 3 * pattern.group)
    mask = kept_by(cost, pattern)
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


@pytest.mark.parametrize("columns", [1, 7, 8, 21])
def test_padding_is_left_out_first(columns: int) -> None:
    mask = prune_mask(torch.rand(4, columns) + 1, "6:8")
    tail = columns % 8
    assert mask.shape == (4, columns)
    assert bool((mask[:, columns - tail :].sum(1) == min(tail, 6)).all())


@given(
    columns=st.integers(1, 70),
    text=st.sampled_from(["2:4", "4:6", "6:8", "14:16", "30:32"]),
    density=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_pruned_once_is_pruned(columns: int, text: str, density: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, columns, generator=generator)
    weight *= torch.rand(5, columns, generator=generator) < density
    pruned = weight * prune_mask(weight, text)
    check_pattern(pruned, text)
    assert torch.equal(pruned * prune_mask(pruned, text), pruned)


@pytest.mark.parametrize("tiny", [1e-25, 1e-40])
def test_a_weight_that_satisfies_its_pattern_is_left_as_it_is(tiny: float) -> None:
    # The square of such a number is zero in float32, so zeros and weights would tie.
    weight = torch.tensor([[0.0, 0.0, tiny, tiny, tiny, tiny, tiny, -tiny]])
    assert torch.equal(weight * prune_mask(weight, "6:8"), weight)


def test_huge_weights_are_weights() -> None:
    weight = torch.tensor([[1e30, 2e30, 1.0, 2.0]])
    assert prune_mask(weight, "2:4").tolist() == [[True, True, False, False]]


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


@pytest.mark.parametrize("method", METHODS)
def test_dense_prunes_nothing(method: str) -> None:
    linears, _ = linears_with(24, "dense", 5)
    pruned = get_pruner(method).prune(linears)
    assert all(bool((pruned[name] != 0).all()) for name in linears.weights)
    assert bool(prune_mask(torch.ones(2, 7), "dense").all())


# -- calibrated methods --------------------------------------------------------------------------------------------


CALIBRATED = sorted(name for name in METHODS if get_pruner(name).needs_calibration)


@pytest.mark.parametrize("method", CALIBRATED)
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "8:10", "30:32"])
@pytest.mark.parametrize("columns", [8, 190, 130])
def test_groups_start_at_column_zero_of_the_whole_weight(method: str, pattern: str, columns: int) -> None:
    """Also where the sweep's blocks of about 128 columns end inside a group of 6 or 10."""
    linears, _ = linears_with(columns, pattern, 5, 3)
    pruned = get_pruner(method).prune(linears)
    together = torch.cat(list(pruned.values()))
    check_pattern(together, pattern)


@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8"])
def test_the_more_a_method_knows_the_less_it_costs(pattern: str) -> None:
    linears, x = linears_with(240, pattern, 40, 24)
    assert linears.input_gram is not None
    errors = {}
    for method in ("magnitude", "wanda", "sparsegpt"):
        pruned = get_pruner(method).prune(linears)
        errors[method] = output_error(linears.weights, pruned, linears.input_gram)
        direct = sum(float((x @ (w - pruned[n]).T).double().square().sum()) for n, w in linears.weights.items())
        energy = sum(float((x @ w.T).double().square().sum()) for w in linears.weights.values())
        assert errors[method] == pytest.approx(direct / energy, rel=1e-4)  # float32 sums over 512 tokens
    assert errors["sparsegpt"] < errors["wanda"] < errors["magnitude"]


def test_wanda_on_equal_inputs_is_magnitude() -> None:
    weight = torch.randn(7, 64)
    linears = Linears({"w": weight}, Pattern.parse("6:8"), torch.eye(64))
    assert torch.equal(get_pruner("wanda").prune(linears)["w"], get_pruner("magnitude").prune(linears)["w"])


def test_wanda_keeps_a_small_weight_of_a_large_input() -> None:
    gram = torch.diag(torch.tensor([1.0, 1, 1, 10_000]))
    pruned = get_pruner("wanda").prune(Linears({"w": torch.tensor([[1.0, 3, 2, 0.1]])}, Pattern.parse("2:4"), gram))
    assert torch.equal(pruned["w"], torch.tensor([[0, 3, 0, 0.1]]))


def test_sparsegpt_on_independent_inputs_changes_nothing_that_it_keeps() -> None:
    weight = torch.randn(7, 64)
    linears = Linears({"w": weight}, Pattern.parse("6:8"), torch.eye(64))
    assert torch.equal(get_pruner("sparsegpt").prune(linears)["w"], get_pruner("magnitude").prune(linears)["w"])


def sparsegpt_by_definition(weight: torch.Tensor, gram: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Optimal brain surgery, a column at a time, with the inverse of the Hessian of what is left; float64."""
    weight, columns = weight.double().clone(), weight.shape[1]
    hessian = gram.double() + 0.01 * gram.double().diagonal().mean() * torch.eye(columns, dtype=torch.float64)
    for row in weight:
        leaving: list[int] = []
        for column in range(columns):
            if column % pattern.group == 0:
                members = range(column, min(column + pattern.group, columns))
                # what a removal costs when everything from that column on is free
                costs = [float(row[j] ** 2 / torch.linalg.inv(hessian[j:, j:])[0, 0]) for j in members]
                excess = max(len(members) - pattern.keep, 0)
                leaving = [members[i] for i in sorted(range(len(costs)), key=costs.__getitem__)[:excess]]
            if column in leaving:
                inverse = torch.linalg.inv(hessian[column:, column:])
                row[column:] -= row[column].clone() / inverse[0, 0] * inverse[0]
                row[column] = 0
    return weight


@pytest.mark.parametrize("block", [8, 24, 128])  # updates reach later columns one group at a time, by block, at once
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8"])
def test_the_sweep_is_what_its_definition_says(pattern: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsegpt, "BLOCK", block)
    linears, _ = linears_with(34, pattern, 6)
    assert linears.input_gram is not None
    weight, gram = linears.weights["w0"], linears.input_gram
    swept = sparsegpt.sweep(weight, sparsegpt.inverse_factor(gram)[0], linears.pattern)
    # float32 updates against float64 ones
    expected = sparsegpt_by_definition(weight, gram, linears.pattern)
    torch.testing.assert_close(swept.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", CALIBRATED)
def test_zeros_that_are_there_stay_and_count(method: str) -> None:
    linears, _ = linears_with(96, "6:8", 16)
    weight = linears.weights["w0"] * prune_mask(linears.weights["w0"], "6:8")
    pruned = get_pruner(method).prune(Linears({"w": weight}, linears.pattern, linears.input_gram))["w"]
    assert torch.equal(pruned, weight)


@pytest.mark.parametrize("method", CALIBRATED)
def test_dead_and_dependent_inputs_do_no_harm(method: str) -> None:
    x = correlated_inputs(64, 48)  # fewer tokens than it takes to tell the columns apart
    x[:, 5] = 0
    x[:, 9] = x[:, 8]
    linears = Linears({"w": torch.randn(9, 48)}, Pattern.parse("6:8"), x.T @ x)
    pruned = get_pruner(method).prune(linears)["w"]
    assert bool(torch.isfinite(pruned).all())
    check_pattern(pruned, "6:8")
    if method == "wanda":  # SparseGPT's damping makes it cost a little, like an input that is hardly ever there
        assert not bool(pruned[:, 5].any())


@pytest.mark.parametrize("method", CALIBRATED)
def test_unusable_statistics(method: str) -> None:
    for gram in (None, torch.eye(8), torch.full((16, 16), torch.nan), torch.zeros(16, 16)):
        with pytest.raises(InputError, match="q_proj"):
            get_pruner(method).prune(Linears({"q_proj": torch.randn(4, 16)}, Pattern.parse("6:8"), gram))
    wrong = {"q_proj": torch.ones(4, 16, dtype=torch.int8)}, {"q_proj": torch.full((4, 16), torch.nan)}
    for weights in wrong:
        with pytest.raises(InputError, match="q_proj"):
            get_pruner(method).prune(Linears(weights, Pattern.parse("6:8"), torch.eye(16)))


@pytest.mark.parametrize("method", CALIBRATED)
def test_types_and_shapes_are_kept(method: str) -> None:
    x = correlated_inputs(64, 24)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        pruned = get_pruner(method).prune(Linears({"w": torch.randn(3, 24).to(dtype)}, Pattern.parse("4:6"), x.T @ x))
        assert pruned["w"].dtype == dtype
        assert pruned["w"].shape == (3, 24)


def test_a_weight_that_is_trained_gets_the_mask_of_its_values() -> None:
    """A linear's weight is a parameter. It has more entries than those from which a CPU takes the faster way."""
    weight = torch.nn.Linear(128, 64).weight
    values = weight.detach()
    for pattern in ("6:8", "4:6"):
        mask = prune_mask(weight, pattern)
        assert torch.equal(mask, prune_mask(values, pattern))
        assert not mask.requires_grad
