"""The divergence of two models' predictions keeps its digits, whether they hardly differ or have nothing in common."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from slidesparse import InputError
from slidesparse.offline.plan.sensitivity import TOKENS_AT_ONCE, mean_divergence


def exact(p: torch.Tensor, q: torch.Tensor) -> float:
    """In float64, of the same float32 logits."""
    log_p, log_q = (logits.double().log_softmax(-1) for logits in (p, q))
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("difference", [1e-4, 3.0])
def test_models_that_hardly_differ(difference: float) -> None:
    torch.manual_seed(0)
    p = 4 * torch.randn(64, 1000)
    q = p + difference * torch.randn_like(p)
    found = mean_divergence([p], lambda _: q)
    assert found == pytest.approx(exact(p, q), rel=3e-3)


def test_models_that_have_nothing_in_common() -> None:
    p, q = torch.zeros(2, 8), torch.zeros(2, 8)
    p[:, 0], q[:, 1] = 150, 150  # the probabilities of all others are 0 in float32
    assert mean_divergence([p], lambda _: q) == pytest.approx(150, rel=1e-5)


def test_the_same_model_and_one_that_is_broken() -> None:
    p = torch.randn(3, 9)
    assert mean_divergence([p] * 2, lambda _: p) == 0
    with pytest.raises(InputError, match="NaN or Inf"):
        mean_divergence([p], lambda _: torch.full((3, 9), math.nan))


def test_few_tokens_are_in_float32_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a window may be hundreds of megabytes in 16 bits, and several copies are computed of them."""
    torch.manual_seed(0)
    p = torch.randn(2, 3 * TOKENS_AT_ONCE + 5, 40, dtype=torch.bfloat16)
    q = p + 0.1 * torch.randn_like(p)
    sizes, made = [], F.log_softmax

    def see(logits: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        sizes.append(len(logits))
        return made(logits, dim, dtype=dtype)

    monkeypatch.setattr(F, "log_softmax", see)
    assert mean_divergence([p, p[:1]], lambda i: q[: 2 - i]) == pytest.approx(
        (2 * exact(p, q) + exact(p[:1], q[:1])) / 3, rel=1e-4
    )
    assert max(sizes) == TOKENS_AT_ONCE
