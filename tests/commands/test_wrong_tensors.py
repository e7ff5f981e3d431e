"""Numbers that no program can use: found before hours of calibration, and rows too small for a scale load as zeros."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add_tokenizer, by_magnitude, make_checkpoint, write_text
from safetensors.torch import load_file, save_file

import slidesparse
from slidesparse.errors import CheckpointError
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.prune import PruneOptions, prune_checkpoint
from slidesparse.recovery.own_chats import ChatOptions, write_chats
from slidesparse.weights.quant import loadable, quantize_weight

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("tensor", "value"),
    [("model.norm.weight", "inf"), ("model.embed_tokens.weight", "nan"), ("lm_head.weight", "-inf"), (DOWN, "nan")],
)
def test_they_are_found_before_a_text_is_cut(tmp_path: Path, tensor: str, value: str) -> None:
    make_checkpoint(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    weights = load_file(tmp_path / "m/model.safetensors")
    weights[tensor][3] = float(value)
    save_file(weights, tmp_path / "m/model.safetensors", {"format": "pt"})
    too_short = Calibration(str(write_text(tmp_path / "text.txt", words=1)))
    with pytest.raises(CheckpointError, match=f"{tensor} holds NaN or Inf"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "bf16", "wanda", too_short))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "text.txt"]


def test_a_model_with_nan_writes_no_chats(tmp_path: Path) -> None:
    model: Any = make_checkpoint(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    model.model.norm.weight.data[3] = float("nan")
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "m/chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(CheckpointError, match=r"norm\.weight holds NaN or Inf"):
        write_chats(tmp_path / "m", tmp_path / "chats.jsonl", ChatOptions(1), "cpu")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("rounding", ["absmax", "6bit"])
def test_a_row_too_small_for_a_scale_is_a_row_of_zeros(tmp_path: Path, rounding: Any) -> None:
    """Its values were 127 and its scale 0, which was refused when it was loaded."""
    make_checkpoint(tmp_path / "m", dtype=torch.float32)
    weights = load_file(tmp_path / "m/model.safetensors")
    weights[Q][1] *= 1e-43
    weights[Q][2] *= 1e-41
    save_file(weights, tmp_path / "m/model.safetensors", {"format": "pt"})
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8", rounding=rounding))
    stored = load_file(tmp_path / "s/model.safetensors")
    assert not stored[Q][1].any()
    assert stored[Q][2].any()
    assert (stored[f"{Q}_scale"] == 0).flatten().nonzero().tolist() == [[1]]
    assert bool(torch.isfinite(slidesparse.load(tmp_path / "s")(torch.arange(8)[None]).logits).all())


def test_larger_rows_keep_their_bits() -> None:
    weight = torch.randn(8, 64)
    weight[3] *= 1e-43
    others = [0, 1, 2, 4, 5, 6, 7]
    values, scale = loadable(quantize_weight(weight, torch.int8))
    alone = quantize_weight(weight[others], torch.int8)
    assert torch.equal(values[others], alone.values)
    assert torch.equal(scale[others], alone.scale)
