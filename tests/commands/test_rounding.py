"""SparseGPT in six bits is rounded for outputs, also after matching: not to nearest, but with the same scales."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_source, write_text

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.weights.quant import quantize_weight
from slidesparse.weights.support import value_bits

FIRST = [f"model.layers.0.{leaf}_proj.weight" for leaf in ("self_attn.q", "self_attn.o", "mlp.up", "mlp.down")]


ROUNDED = {"dtype": "int8", "rounding": "6bit"}, {"dtype": "fp8"}


@pytest.mark.parametrize("how", ROUNDED, ids=lambda how: how["dtype"])
@pytest.mark.parametrize("match", [0, 3])
def test_values_are_not_the_nearest_and_scales_are(match: int, how: dict[str, Any], tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    text = Calibration(str(write_text(tmp_path / "text.txt")), 4, 16)
    options = {"pattern": "6:8", "method": "sparsegpt", "calibration": text, "match_steps": match}
    plain = prune_checkpoint(source, tmp_path / "float", PruneOptions(dtype="bf16", **options))
    rounded = prune_checkpoint(source, tmp_path / "rounded", PruneOptions(**how, **options))
    assert plain.weight_rounding == {}
    assert rounded.weight_rounding.keys() == rounded.losses.keys()
    # To nearest it is a twelfth of the square of a step: (absmax / 31)^2 of weights up to 2.7 deviations, 6e-4; and of
    # FP8, whose steps are a sixteenth to an eighth of a value, 7e-4.
    assert all(1e-5 < cost < (6e-4 if "rounding" in how else 7e-4) for cost in rounded.weight_rounding.values())
    assert "rounding weights costs: mean" in rounded.describe()
    floats, integers = Checkpoint(tmp_path / "float"), Checkpoint(tmp_path / "rounded")
    for name in FIRST:  # later layers read what rounding left of this one
        values, scale = integers.tensor(name), integers.tensor(f"{name}_scale")
        weight = floats.tensor(name)
        nearest = quantize_weight(weight, values.dtype, rounding=how.get("rounding", "absmax"))
        away = (values.float() - nearest.values.float()).abs()
        assert torch.equal(scale, nearest.scale)
        assert not bool((values.float()[weight == 0] != 0).any())
        assert "rounding" not in how or not bool((away % 4).any())
        assert 0.05 < float((away > 0)[weight != 0].double().mean()) < 0.9


def test_dense_weights_in_six_bits_are_rounded_for_their_outputs(tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    text = Calibration(str(write_text(tmp_path / "text.txt")), 4, 16)
    options: dict[str, Any] = {"rounding": "6bit", "calibration": text, "smooth": False}
    rounded = prune_checkpoint(source, tmp_path / "rounded", PruneOptions("dense", **options))
    assert all(1e-5 < cost < 6e-4 for cost in rounded.weight_rounding.values())
    assert len(rounded.weight_rounding) == len(rounded.losses) > 0 == sum(rounded.losses.values())
    floats, integers = Checkpoint(source), Checkpoint(tmp_path / "rounded")
    for name in FIRST:
        values, scale = integers.tensor(name), integers.tensor(f"{name}_scale")
        nearest = quantize_weight(floats.tensor(name), torch.int8, rounding="6bit")
        assert torch.equal(scale, nearest.scale)
        assert value_bits(values) == 6
        assert 0.05 < float((values != nearest.values).double().mean()) < 0.9
