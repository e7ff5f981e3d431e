"""The loss of training on: chunks of tokens give what the whole gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slidesparse.recovery.loss import Predictions, compare, distillation

TOKENS, WIDTH, VOCABULARY = 13, 8, 50


def predictions(cap: float | None, seed: int) -> Predictions:
    generator = torch.Generator().manual_seed(seed)
    hidden, head = (torch.randn(n, WIDTH, generator=generator) for n in (TOKENS, VOCABULARY))
    return Predictions(hidden, head, cap)


def whole(student: Predictions, dense: Predictions) -> torch.Tensor:
    logits = [one.hidden @ one.head.t() for one in (student, dense)]
    capped = [z if student.cap is None else student.cap * torch.tanh(z / student.cap) for z in logits]
    log_q, log_p = (F.log_softmax(z, -1) for z in capped)
    return F.kl_div(log_q, log_p, log_target=True, reduction="sum")


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("chunk", [1, 4 * VOCABULARY, 1 << 20])
def test_chunks_have_the_value_and_the_gradients_of_the_whole(chunk: int, cap: float | None) -> None:
    student, dense = predictions(cap, 1), predictions(cap, 2)
    for one in (student.hidden, student.head):
        one.requires_grad_()
    expected = whole(student, dense)
    wanted = torch.autograd.grad(expected * 0.3, [student.hidden, student.head])
    found = distillation(student, dense, chunk)
    torch.testing.assert_close(found, expected)
    given = torch.autograd.grad(found * 0.3, [student.hidden, student.head])
    torch.testing.assert_close(given, wanted)


def test_a_head_that_is_not_trained_gets_no_gradient() -> None:
    student, dense = predictions(None, 1), predictions(None, 2)
    student.hidden.requires_grad_()
    distillation(student, dense).backward()
    assert student.hidden.grad is not None
    assert student.head.grad is None


def test_equal_predictions_are_at_no_distance() -> None:
    one = predictions(None, 1)
    assert abs(float(distillation(one, one))) < 1e-5


def test_what_is_told_of_two_models() -> None:
    student, dense = predictions(None, 1), predictions(None, 2)
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    kl, loss, dense_loss, same = compare(student, dense, ids, chunk=3 * VOCABULARY).tolist()
    logits = [one.hidden @ one.head.t() for one in (student, dense)]
    assert kl == pytest.approx(float(whole(student, dense)), rel=1e-5)
    for found, z in zip((loss, dense_loss), logits, strict=True):
        assert found == pytest.approx(float(F.cross_entropy(z[:-1], ids[0, 1:], reduction="sum")), rel=1e-5)
    assert same == float((logits[0].argmax(-1) == logits[1].argmax(-1)).sum())
