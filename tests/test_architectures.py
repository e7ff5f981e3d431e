"""Every architecture is pruned, inspected, loaded and run, and plain transformers agrees; or it is refused in one line.

A minute of it runs always. ``SLIDESPARSE_SWEEP=all pytest tests/test_architectures.py`` runs the rest too.
"""

from __future__ import annotations

import os
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import by_magnitude
from small_mixtures import MIXTURES
from small_models import Architecture, make

import slidesparse
from slidesparse.errors import SlideSparseError
from slidesparse.layer.linear import SlideLinear
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import prune_checkpoint

ROOT = Path(__file__).parent.parent

ALWAYS = (
    *("gpt-neox", "falcon", "gpt2", "xlnet", "opt", "xglm", "mamba", "zamba2", "nemotron-h", "rwkv", "recurrentgemma"),
    *("mixtral", "gpt-oss", "llama4", "bert-mlm", "albert", "marian", "t5", "t5-v1.1", "whisper"),
    *("vit", "dinov2", "swin", "siglip", "wav2vec2", "qwen2.5-vl", "gemma3", "llava", "internvl", "mllama"),
    *("paligemma", "phi4-multimodal"),
)
"""Architectures that differ in what the package does with them."""

NAMES = tuple(ARCHITECTURES) if os.environ.get("SLIDESPARSE_SWEEP") == "all" else ALWAYS


def answer(model: Any, found: Architecture) -> torch.Tensor:
    """What a model makes of its inputs, in float32 [tokens, features]."""
    inputs = {k: v.to(model.config.dtype) if v.is_floating_point() else v for k, v in found.inputs().items()}
    with torch.no_grad():
        out = model(**inputs)
    given = [getattr(out, name, None) for name in ("logits", "logits_per_text", "last_hidden_state")]
    return next(one for one in given if one is not None).float().flatten(0, -2)


def skip_if_unknown(found: Architecture) -> None:
    if not hasattr(transformers, found.model):
        pytest.skip(f"transformers {transformers.__version__} has no {found.model}")


def similarity(path: Path, found: Architecture) -> float:
    """How alike ``slidesparse.load`` and plain transformers answer: the least cosine of all tokens."""
    ours = answer(slidesparse.load(path), found)
    assert bool(torch.isfinite(ours).all())
    theirs = getattr(transformers, found.model).from_pretrained(path, dtype="auto").eval()
    return float(torch.nn.functional.cosine_similarity(ours, answer(theirs, found), dim=-1).min())


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_treated_or_refused(tmp_path: Path, name: str) -> None:
    found = ARCHITECTURES[name]
    skip_if_unknown(found)
    make(tmp_path / "m", found, found.dtype)
    if (why := found.refused or found.not_quantised) is not None:
        with pytest.raises(SlideSparseError, match=why):
            prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]
        if found.refused:
            return
    dtype = "int8" if found.not_quantised is None else {torch.bfloat16: "bf16", torch.float32: "fp32"}[found.dtype]
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", dtype))
    assert summary.patterns
    assert summary.in_transformers == (found.alone is None or dtype != "int8")
    inspection = inspect_checkpoint(tmp_path / "s")
    assert inspection.ok
    assert sorted(layer.name for layer in inspection.layers) == sorted(summary.patterns)
    assert sorted(layer.name for layer in inspection.expert_layers) == sorted(summary.experts)
    assert bool(summary.experts) == (name in MIXTURES)
    # INT8 differs a little: compressed-tensors divides activations by 127.5, slidesparse and vLLM by 127.
    if found.alone:
        assert bool(torch.isfinite(answer(slidesparse.load(tmp_path / "s"), found)).all())
    else:
        assert similarity(tmp_path / "s", found) > 0.95
    # Without rounding nothing differs but the order of sums.
    make(tmp_path / "m32", found, torch.float32)
    prune_checkpoint(tmp_path / "m32", tmp_path / "s32", by_magnitude("6:8", "fp32"))
    assert similarity(tmp_path / "s32", found) > 1 - 1e-5


def test_the_page_of_models_is_current() -> None:
    page = ROOT / "docs/models.md"
    assert runpy.run_path(str(ROOT / "docs/draw_models.py"))["drawn"](page.read_text()) == page.read_text()


def test_the_survey_is_whole() -> None:
    assert set(ALWAYS) <= set(ARCHITECTURES)
    assert len(ARCHITECTURES) - sum(one.refused is not None for one in ARCHITECTURES.values()) >= 100


SEEING = [name for name, one in ARCHITECTURES.items() if "vision_config" in one.config and not one.refused]


@pytest.mark.parametrize("name", SEEING if len(NAMES) > len(ALWAYS) else ["qwen2.5-vl", "llava"])
@pytest.mark.parametrize("part", ["vision", "all"])
def test_the_other_parts_on_request(tmp_path: Path, name: str, part: Any) -> None:
    found = ARCHITECTURES[name]
    make(tmp_path / "m", found, torch.float32)
    language = prune_checkpoint(tmp_path / "m", tmp_path / "l", by_magnitude("6:8", "fp32"))
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "fp32", part=part))
    assert (set(language.patterns) < set(summary.patterns)) == (part == "all")
    assert (not set(language.patterns) & set(summary.patterns)) == (part == "vision")
    assert similarity(tmp_path / "s", found) > 1 - 1e-5
    slid = {n for n, m in slidesparse.load(tmp_path / "s").named_modules() if isinstance(m, SlideLinear)}
    assert slid == set(summary.patterns)
