"""Mixtures of experts are recognised by what they are, and by nothing that others have too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from small_mixtures import MIXTURES
from torch import nn

import slidesparse as ss
from slidesparse.errors import UnsupportedError
from slidesparse.linear import SlideLinear
from slidesparse.models.experts import Experts, describe_experts, find_experts


def empty(name: str) -> Any:
    found = ARCHITECTURES[name]
    known = getattr(transformers, found.model)
    with torch.device("meta"):
        return known(known.config_class(**found.config))


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_have_experts(name: str) -> None:
    found = find_experts(empty(name))
    assert found
    assert {one.count for one in found} == {4}
    assert all(one.name.endswith("experts") for one in found)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in MIXTURES])
def test_others_have_none(name: str) -> None:
    """Some have parameters with three dimensions too: RWKV, SigLIP, wav2vec2, XLNet, RecurrentGemma."""
    if hasattr(transformers, ARCHITECTURES[name].model):
        assert find_experts(empty(name)) == []


class Listed(nn.Module):
    """One module an expert, as transformers 4 has them."""

    def __init__(self) -> None:
        super().__init__()
        expert = [nn.ModuleDict({"up": nn.Linear(64, 96), "down": nn.Linear(96, 64)}) for _ in range(3)]
        self.experts, self.gate = nn.ModuleList(expert), nn.Linear(64, 64)


def test_experts_that_are_modules() -> None:
    found = find_experts(nn.ModuleList([Listed(), Listed()]))
    weights = {"up.weight": (96, 64), "down.weight": (64, 96)}
    assert found == [Experts(f"{i}.experts", 3, weights) for i in range(2)]
    assert describe_experts(found) == ["2 x *.experts: 3 experts, up.weight [96, 64], down.weight [64, 96]"]


def test_models_in_memory_are_refused_and_unchanged() -> None:
    model = nn.ModuleDict({"layer": Listed()})
    with pytest.raises(
        UnsupportedError, match=r"mixtures of experts cannot be treated yet; got layer\.experts: 3 experts"
    ):
        ss.sparsify_(model, "6:8")
    assert not any(isinstance(module, SlideLinear) for module in model.modules())
