"""The parts of multimodal models, told by their configs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from architectures import on_meta
from torch import nn

from slidesparse.errors import InputError
from slidesparse.models.parts import language_model, parts_of, text_config
from slidesparse.models.targets import find_targets


def linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("llava", {"language": 15, "vision": 12, "joint": 2}),  # the output embedding is the language model's
        ("qwen2.5-vl", {"language": 15, "vision": 12}),
        (
            "phi4-multimodal",
            {"language": 9, "vision": 15, "audio": 17, "joint": 6},
        ),  # one config for text and the whole
        ("qwen2-audio", {"language": 15, "audio": 12, "joint": 1}),
        ("clip", {"language": 12, "vision": 12, "joint": 2}),
        ("llama", {}),
        ("t5", {}),
        ("vit", {}),
        ("whisper", {}),
        ("t5gemma", {}),  # two parts, and both are language
    ],
)
def test_linears_are_sorted(name: str, counts: dict[str, int]) -> None:
    model = on_meta(name)
    assert Counter(parts_of(model, linears(model)).values()) == counts


@pytest.mark.parametrize("name", ["llava", "phi4-multimodal", "mllama", "paligemma", "llama"])
def test_the_language_model_runs_on_text_alone(name: str) -> None:
    model = on_meta(name)
    inner = language_model(model)
    assert (inner is model) == (name in ("llama", "phi4-multimodal"))
    assert text_config(model.config).hidden_size == 64
    ids = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    out = inner(input_ids=ids)
    assert getattr(out, "last_hidden_state", getattr(out, "logits", None)).shape[:2] == (1, 4)


def test_the_language_part_is_treated_unless_another_is_asked_for() -> None:
    model = on_meta("llava")
    language = find_targets(model)
    assert {name.split(".")[1] for name in language.linears} == {"language_model"}
    assert language.dense["model.multi_modal_projector.linear_1"] == "in the joint part; --part all"
    vision = find_targets(model, part="vision")
    assert {name.split(".")[1] for name in vision.linears} == {"vision_tower"}
    whole = find_targets(model, part="all")
    assert set(whole.linears) > set(language.linears) | set(vision.linears)


@pytest.mark.parametrize("name", ["llama", "vit", "qwen2-audio"])
def test_a_part_that_is_not_there(name: str) -> None:
    with pytest.raises(InputError, match="has no vision part"):
        find_targets(on_meta(name), part="vision")
    part: Any = "sound"
    with pytest.raises(InputError, match="needed language or vision or all"):
        find_targets(on_meta(name), part=part)
