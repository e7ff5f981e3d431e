from __future__ import annotations

import logging

import pytest
import torch
from correlated_linears import correlated_inputs, linears_with

from slidesparse import Pattern
from slidesparse.errors import InputError
from slidesparse.pruning import Linears, get_pruner, prune_mask, solve_kept, sparsegpt
from slidesparse.weights.support import is_nonzero

PATTERNS = ["2:4", "4:6", "6:8", "8:10", "14:16"]


def by_definition(dense: torch.Tensor, kept: torch.Tensor, gram: torch.Tensor, damping: float) -> torch.Tensor:
    """One dense system for each row, in float64: ``(G + damping)_SS v_S = ((G + damping) w)_S``."""
    hessian = gram.double() + damping * torch.eye(len(gram), dtype=torch.float64)
    solved = torch.zeros_like(dense, dtype=torch.float64)
    for row, (weight, mask) in enumerate(zip(dense.double(), kept, strict=True)):
        solved[row, mask] = torch.linalg.solve(hessian[mask][:, mask], (hessian @ weight)[mask])
    return solved


def error(dense: torch.Tensor, weight: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """The squared error of each row's outputs, float64 [out]."""
    difference = weight.double() - dense.double()
    return ((difference @ gram.double()) * difference).sum(1)


def problem(pattern: str, columns: int = 52, rows: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """A weight, the gram matrix of its inputs, what SparseGPT's sweep makes of it, and the damping."""
    linears, _ = linears_with(columns, pattern, rows)
    weight, gram = linears.weights["w0"], linears.input_gram
    assert gram is not None
    factor, damping = sparsegpt.inverse_factor(gram)
    return weight, gram, sparsegpt.sweep(weight, factor, linears.pattern), damping


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("stronger", [1, 30])
def test_as_exact_as_a_dense_system_for_each_row(
    pattern: str, stronger: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solve_kept, "ITERATIONS", 400)
    monkeypatch.setattr(solve_kept, "TOLERANCE", 1e-6)
    weight, gram, swept, damping = problem(pattern)
    solved = solve_kept.solve_kept(weight, swept, gram, stronger * damping)
    expected = by_definition(weight, is_nonzero(swept), gram, stronger * damping)
    torch.testing.assert_close(solved.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_iterations_that_are_made_are_enough(pattern: str) -> None:
    weight, gram, swept, damping = problem(pattern, 520, 16)
    solved = solve_kept.solve_kept(weight, swept, gram, damping)
    best = by_definition(weight, is_nonzero(swept), gram, damping)
    before, after, least = (float(error(weight, w, gram).sum()) for w in (swept, solved, best))
    assert after < 0.97 * before
    assert after - least < 0.05 * (before - least)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_row_gets_worse_and_no_zero_moves(pattern: str, dtype: torch.dtype) -> None:
    linears, _ = linears_with(120, pattern, 30, 10)
    weights = {name: weight.to(dtype) for name, weight in linears.weights.items()}
    gram = linears.input_gram
    assert gram is not None
    pruned = get_pruner("sparsegpt").prune(Linears(weights, linears.pattern, gram))
    factor, _ = sparsegpt.inverse_factor(gram)
    swept = sparsegpt.sweep(torch.cat(list(weights.values())).float(), factor, linears.pattern).to(dtype)
    dense, after = torch.cat(list(weights.values())), torch.cat(list(pruned.values()))
    assert torch.equal(is_nonzero(after), is_nonzero(swept))
    before = error(dense, swept, gram)
    assert bool((error(dense, after, gram) <= before * (1 + 1e-4)).all())  # compared in float32, judged in float64
    assert not torch.equal(after, swept)


def test_weights_near_the_limit_of_fp16_stay_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.rand(16, 64, generator=generator) * 2e4 + 4.4e4).half()
    x = torch.rand(256, 1, generator=generator) + 0.05 * torch.randn(256, 64, generator=generator)
    factor, _ = sparsegpt.inverse_factor(x.T @ x)
    assert float(sparsegpt.sweep(weight.float(), factor, Pattern(4, 6)).max()) > torch.finfo(torch.float16).max
    pruned = get_pruner("sparsegpt").prune(Linears({"w": weight}, Pattern(4, 6), x.T @ x))["w"]
    assert bool(torch.isfinite(pruned).all())


def test_a_row_that_would_get_worse_keeps_what_the_sweep_gave_it() -> None:
    dense, gram = torch.ones(2, 4), torch.eye(4)
    first, second = torch.tensor([[1.0, 1, 0, 0], [1, 0, 0, 0]]), torch.tensor([[1.0, 0.5, 0, 0], [1, 0.5, 0, 0]])
    assert torch.equal(solve_kept.better_rows(dense, first, second, gram), torch.stack([first[0], second[1]]))
    second[1, 0] = torch.nan
    assert torch.equal(solve_kept.better_rows(dense, first, second, gram), first)


def test_rows_that_are_solved_already_keep_their_bits() -> None:
    weight = torch.randn(6, 64)
    x = correlated_inputs(256, 64)
    pruned = weight * prune_mask(weight, "6:8")
    assert torch.equal(solve_kept.solve_kept(pruned, pruned, x.T @ x, 1.0), pruned)


def test_the_same_bits_again_and_as_good_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gram, swept, damping = problem("4:6", 130, 20)
    solved = solve_kept.solve_kept(weight, swept, gram, damping)
    assert torch.equal(solve_kept.solve_kept(weight, swept, gram, damping), solved)
    monkeypatch.setattr(solve_kept, "AT_ONCE", 3 * 130)
    in_parts = solve_kept.solve_kept(weight, swept, gram, damping)
    # The order of sums differs, and the iterations end before that is forgotten.
    torch.testing.assert_close(error(weight, in_parts, gram), error(weight, solved, gram), rtol=0.02, atol=0)


def test_what_is_no_gram_matrix_gives_numbers() -> None:
    """Conjugate gradients stop where the curvature is not positive; the row is then judged like any other."""
    gram = torch.diag(torch.tensor([1.0, 1, 1, -3]))
    gram[0, 1:] = gram[1:, 0] = 2
    dense = torch.ones(3, 4)
    assert bool(torch.isfinite(solve_kept.solve_kept(dense, dense * 0.5, gram, 0.1)).all())


def nearly_positive(columns: int, off: float) -> torch.Tensor:
    """The identity, but for a direction in which it is -off."""
    direction = torch.ones(columns, dtype=torch.float64) / columns**0.5
    return (torch.eye(columns, dtype=torch.float64) - (1 + off) * torch.outer(direction, direction)).float()


@pytest.mark.parametrize(("off", "share"), [(0.05, 0.1), (0.5, 1.0)])
def test_a_matrix_that_rounding_spoilt_gets_more_damping_aloud(
    off: float, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    gram = nearly_positive(32, off)
    with caplog.at_level(logging.WARNING, "slidesparse"):
        factor, damping = sparsegpt.inverse_factor(gram, "q_proj")
    assert [record.getMessage() for record in caplog.records] == [
        f"the Hessian of q_proj is not positive definite: damped by {share:g} of its mean, not 0.01"
    ]
    mean = float(gram.diagonal().mean())
    assert damping == pytest.approx(share * mean)
    hessian = gram.double() + damping * torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close((factor.T @ factor).double(), torch.linalg.inv(hessian), rtol=1e-3, atol=1e-3)


def test_no_damping_hides_what_is_no_gram_matrix() -> None:
    linears = Linears({"w": torch.randn(4, 32)}, Pattern.parse("6:8"), nearly_positive(32, 1.5))
    with pytest.raises(InputError, match="Hessian of w is not positive definite"):
        get_pruner("sparsegpt").prune(linears)
