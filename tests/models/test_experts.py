"""Mixtures of experts are recognised by what they are, and by nothing that others have too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, on_meta
from small_mixtures import MIXTURES
from torch import nn

import slidesparse as ss
from slidesparse.layer.linear import SlideLinear
from slidesparse.models.experts import experts_of_a_token, find_experts, find_routers


@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures_have_experts_and_say_along_which_dimension_they_multiply(name: str) -> None:
    found = find_experts(on_meta(name))
    assert found
    assert {one.count for one in found} == {4}
    assert all(one.name.endswith("experts") for one in found)
    for one in found:
        assert one.transposed is (name in ("gpt-oss", "llama4", "llama4-text"))
        assert one.columns("gate_up_proj") == 64
        assert one.columns("down_proj") in (48, 152)


def test_others_have_none() -> None:
    """Some have parameters with three dimensions too: RWKV, SigLIP, wav2vec2, XLNet, RecurrentGemma."""
    others = [name for name, one in ARCHITECTURES.items() if name not in MIXTURES and hasattr(transformers, one.model)]
    assert [name for name in others if find_experts(on_meta(name))] == []


class TinyExperts(nn.Module):
    """64 experts that share their parameters, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(64, 96, 64))
        self.down_proj = nn.Parameter(torch.zeros(64, 64, 48))


def test_experts_and_their_router_stay_as_they_are_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    """The router is a large linear here: one output for each of 64 experts."""
    layer = nn.ModuleDict({"experts": TinyExperts(), "gate": nn.Linear(64, 64), "norm": nn.LayerNorm(64)})
    model = nn.ModuleDict({"layer": layer, "after": nn.Linear(64, 64)})
    assert [*find_routers(model, find_experts(model))] == ["layer.gate"]
    ss.sparsify_(model, "6:8")
    assert [name for name, m in model.named_modules() if isinstance(m, SlideLinear)] == ["after"]
    assert "experts stay dense in memory" in caplog.text
    assert "layer.experts: 64 experts, gate_up_proj [64, 96, 64], down_proj [64, 64, 48]" in caplog.text


@pytest.mark.parametrize(("routed", "expected"), [(2, 2), ([2, 2], 2), ([2, 3], 3), ([], 1)])
def test_experts_of_a_token_may_be_a_list(routed: Any, expected: int) -> None:
    """Hunyuan-A13B's config has a number for each layer."""
    assert experts_of_a_token(transformers.HunYuanMoEV1Config(num_experts=4, moe_topk=routed)) == expected
