"""Calibrated INT8 is rounded for outputs, after matching too: other integers than the nearest, with the same scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_source, write_text

from slidesparse.files.checkpoint import Checkpoint
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions, Recipe
from slidesparse.weights.quant import quantize_weight

FIRST = [f"model.layers.0.{leaf}_proj.weight" for leaf in ("self_attn.q", "self_attn.o", "mlp.up", "mlp.down")]


@pytest.mark.parametrize("match", [0, 3])
@pytest.mark.parametrize("recipe", ["absmax", "6bit"])
def test_integers_are_not_the_nearest_and_scales_are(recipe: Recipe, match: int, tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    text = Calibration(str(write_text(tmp_path / "text.txt")), 4, 16)
    options = {"pattern": "6:8", "method": "sparsegpt", "calibration": text, "match": match}
    prune_checkpoint(source, tmp_path / "float", PruneOptions(dtype="bf16", **options))
    prune_checkpoint(source, tmp_path / "int8", PruneOptions(dtype="int8", recipe=recipe, **options))
    floats, integers = Checkpoint(tmp_path / "float"), Checkpoint(tmp_path / "int8")
    for name in FIRST:  # later layers read what rounding left of this one
        values, scale = integers.tensor(name), integers.tensor(f"{name}_scale")
        weight = floats.tensor(name)
        nearest = quantize_weight(weight, torch.int8, recipe="6bit" if recipe == "6bit" else "absmax")
        step = 4 if recipe == "6bit" else 1
        away = (values.int() - nearest.values.int()).abs()
        assert torch.equal(scale, nearest.scale)
        assert not bool((values[weight == 0] != 0).any())
        assert not bool((away % step).any())
        assert 0.05 < float((away > 0)[weight != 0].double().mean()) < 0.9
