"""Tensors that remember how they were computed: what a loader does to them is done again with values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from slidesparse.base.traced_tensor import TracedTensor, origin_of, replay, sources

VALUES = {
    "a": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "b": torch.arange(12, 24, dtype=torch.float32).reshape(4, 3),
}

Compute = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def traced() -> list[TracedTensor]:
    return [TracedTensor.named(name, tuple(value.shape)) for name, value in VALUES.items()]


@pytest.mark.parametrize(
    "rename",
    [
        lambda a: a[...],
        lambda a: a.to(device="cpu", dtype=torch.bfloat16),
        lambda a: a.contiguous().detach().data,
        lambda a: nn.Parameter(a[...]),
        lambda a: nn.Parameter(a.to("cpu"), requires_grad=False).data,
    ],
)
def test_what_changes_no_value_keeps_the_name(rename: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert origin_of(rename(traced()[0])) == "a"


@pytest.mark.parametrize(
    ("compute", "of"),
    [
        (lambda a, b: torch.stack([a, b]), ["a", "b"]),
        (lambda a, b: torch.cat([b, a], dim=0), ["b", "a"]),
        (lambda a, b: torch.chunk(a, 2, dim=0)[1].contiguous(), ["a"]),
        (lambda a, b: torch.split(torch.cat([a, b]), [3, 5])[1], ["a", "b"]),
        (lambda a, b: a.reshape(2, 2, 3).transpose(0, 1).reshape(4, 3), ["a"]),
        (lambda a, b: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1).mT, ["a", "b"]),
        (lambda a, b: a[1:3] * 2 + b[:2], ["a", "b"]),
    ],
)
def test_a_computation_is_done_again(compute: Compute, of: list[str]) -> None:
    parameter = nn.Parameter(compute(*traced()))
    expected = compute(*VALUES.values())
    assert parameter.shape == expected.shape
    assert parameter.is_meta
    origin = origin_of(parameter)
    assert origin is not None
    assert sources(origin) == of
    assert torch.equal(replay(origin, VALUES.__getitem__), expected)


def test_a_value_that_is_set_changes_nothing() -> None:
    parameter = nn.Parameter(traced()[0])
    parameter.data = torch.zeros(4, 3)
    assert origin_of(parameter) == "a"
    assert parameter.is_meta


def test_other_tensors_have_no_origin() -> None:
    assert origin_of(torch.zeros(2)) is None
