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
from slidesparse.offline import execute
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.prune import PruneOptions, prune_checkpoint
from slidesparse.weights.quant import loadable, quantize_weight

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("tensor", "value"),
    [("model.norm.weight", "inf"), ("model.embed_tokens.weight", "nan"), ("lm_head.weight", "-inf"), (DOWN, "nan")],
)
def test_they_are_found_before_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor: str, value: str
) -> None:
    monkeypatch.setattr(execute, "prune_layers_from_disk", lambda *_, **__: pytest.fail("it was calibrated"))
    make_checkpoint(tmp_path / "m")
    add_tokenizer(tmp_path / "m")
    weights = load_file(tmp_path / "m/model.safetensors")
    weights[tensor][3] = float(value)
    save_file(weights, tmp_path / "m/model.safetensors", {"format": "pt"})
    text = Calibration(str(write_text(tmp_path / "text.txt")), samples=2, length=16)
    with pytest.raises(CheckpointError, match=f"{tensor} holds NaN or Inf"):
        prune_checkpoint(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", "bf16", "wanda", text))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "text.txt"]


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
