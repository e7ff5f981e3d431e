"""Linears whose weight a model uses without calling them are found before anything is changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from small_models import build
from torch import nn

import slidesparse as ss
from slidesparse.errors import InputError
from slidesparse.layer.linear import SlideLinear
from slidesparse.models.targets import find_targets
from slidesparse.models.weight_reads import WHY, read_without_calling


class Reader(nn.Module):
    """Uses the weights of two linears in a way of the caller's."""

    def __init__(self, use: Callable[[nn.Linear, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use, self.one, self.two = use, nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.use(self.one, x))


@pytest.mark.parametrize(
    ("use", "found"),
    [
        (lambda linear, x: linear(x), []),
        (lambda linear, x: linear(x.to(linear.weight.dtype))[:, : linear.weight.shape[0]], []),
        (lambda linear, x: x @ linear.weight.T, ["one"]),
        (lambda linear, x: linear(x) + linear.weight.sum(), ["one"]),
        (lambda linear, x: (linear.weight.mul_(0.5), linear(x))[1], ["one"]),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_reads_are_told_from_calls(use: Any, found: list[str], device: str) -> None:
    model = Reader(use).to(device)
    before = dict(model.named_modules())
    linears = find_targets(model).linears
    values = model.one.weight.detach().clone()
    reads = read_without_calling(model, linears, lambda: model(torch.zeros(2, 64, device=device)))
    assert reads == dict.fromkeys(found, WHY)
    assert dict(model.named_modules()) == before
    assert device == "meta" or torch.equal(model.one.weight, values)


def test_a_model_that_cannot_be_run_tells_nothing() -> None:
    model = Reader(lambda linear, x: x @ linear.weight.T)

    def fail() -> None:
        raise InputError("no")

    assert read_without_calling(model, find_targets(model).linears, fail) == {}
    assert read_without_calling(model, find_targets(model).linears, None) == {}
    assert isinstance(model.one, nn.Linear)


LEFT = {
    "mamba": {"backbone.layers.*.mixer.dt_proj", "lm_head"},
    "rwkv": {"rwkv.blocks.*.attention.output", "rwkv.blocks.*.feed_forward.value", "head"},
    "t5": {"lm_head"},  # it asks for the type of a weight, which costs nothing
}


@pytest.mark.parametrize("name", LEFT)
def test_models_in_memory(name: str) -> None:
    found = ARCHITECTURES[name]
    model = ss.sparsify_(build(found).eval(), "6:8", "fp32")
    dense = {re.sub(r"\d+", "*", name) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert dense == LEFT[name]
    assert any(isinstance(module, SlideLinear) for module in model.modules())
    with torch.no_grad():
        assert bool(torch.isfinite(model(**found.inputs()).logits).all())
