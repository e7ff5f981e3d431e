"""Smoothing: the float model computes what it computed, and outliers no longer spoil 8 bits."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import make_source, same_tensors
from interrupted_reads import interrupt
from small_models import make

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.models.smooth import MOST, best_exponents, exponents
from slidesparse.models.targets import find_targets
from slidesparse.offline.calibrate import smoothing
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.calibrate.smoothing import (
    ROWS,
    SmoothedCheckpoint,
    Smoothing,
    find_smoothing,
    smooth_checkpoint,
)
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.offline.source import Source
from slidesparse.pruning import rounding_error
from slidesparse.weights.quant import dequantize, quantize_rows

CPU = torch.device("cpu")


def with_outliers(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A model in which two channels of every norm are forty times as large as the others."""
    source = make_source(folder, "llama", dtype)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    for name, value in model.named_parameters():
        if "norm" in name and value.dim() == 1:
            value.data[[3, 17]] *= 40
    model.save_pretrained(source)
    return source


def smoothed_by(source: Path, ids: torch.Tensor, kept: Path) -> SmoothedCheckpoint:
    found = Source.of(Checkpoint(source))
    folds = find_smoothing(found, find_targets(found.meta.model).linears)
    return smooth_checkpoint(found.checkpoint, Smoothing(tuple(folds)), ids, kept, CPU)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_float_model_is_the_same_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    source = with_outliers(tmp_path, dtype=dtype)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    ids = torch.randint(3, 70, (6, 16), generator=torch.Generator().manual_seed(0))
    smoothed = smoothed_by(source, ids, tmp_path / "kept")
    before = logits(model, ids)
    norms = [name for name in smoothed.factors if "norm" in name]
    assert len(norms) == 2 * model.config.num_hidden_layers
    # Behind norms q, k, v, gate and up; and up's rows with down's columns.
    assert len(smoothed.factors) == (2 + 5 + 2) * model.config.num_hidden_layers
    for name in {name.removesuffix(ROWS) for name in smoothed.factors}:
        assert not torch.equal(smoothed.tensor(name), Checkpoint(source).tensor(name))
        model.get_parameter(name).data.copy_(smoothed.tensor(name))
    assert torch.equal(logits(model, ids), before)


def options(source: Path, **changes: Any) -> PruneOptions:
    text = Calibration(str(source.parent / "text.txt"), 4, 16)
    given: dict[str, Any] = {"pattern": "6:8", "dtype": "int8", "method": "sparsegpt", "calibration": text}
    return PruneOptions(**{**given, **changes})


def test_pruned_norms_and_weights_belong_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed after some layers goes on with the factors that these were pruned with."""
    source = with_outliers(tmp_path)
    prune_checkpoint(source, tmp_path / "whole", options(source))
    prune_checkpoint(source, tmp_path / "rough", options(source, smooth=False))
    interrupt(monkeypatch, smoothing.SmoothedCheckpoint, at=40)
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoint(source, tmp_path / "again", options(source))
    monkeypatch.setattr(smoothing, "_find_factors", lambda *_: pytest.fail("the factors are found a second time"))
    prune_checkpoint(source, tmp_path / "again", options(source))
    assert same_tensors(tmp_path / "whole", tmp_path / "again")
    whole, rough = (Checkpoint(tmp_path / name) for name in ("whole", "rough"))
    norm = "model.layers.1.input_layernorm.weight"
    assert not torch.equal(whole.tensor(norm), rough.tensor(norm))
    ids = torch.randint(3, 70, (6, 16), generator=torch.Generator().manual_seed(1))
    dense: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    wanted = logits(dense, ids)

    def distance(made: Checkpoint) -> float:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        for name in made.files:
            if not name.endswith("_scale"):
                value, scale = made.tensor(name).float(), f"{name}_scale"
                model.get_parameter(name).data.copy_(value * made.tensor(scale) if scale in made.files else value)
        return float((logits(model, ids) - wanted).norm())

    assert distance(whole) < 1.3 * distance(rough)  # in float activations: nothing is scaled twice or not at all


def test_the_cost_of_rounding_is_that_of_the_product() -> None:
    """It is counted from sums; here is the definition, with outliers and without."""
    generator = torch.Generator().manual_seed(0)
    for outlier in (1.0, 60.0):
        x, weight = torch.randn(512, 64, generator=generator), torch.randn(96, 64, generator=generator)
        x[:, 5] *= outlier
        rounded = dequantize(*quantize_rows(x, torch.int8))
        found = rounding_error({"a": weight[:32], "b": weight[32:]}, x.T @ x, float((x - rounded).square().sum()))
        wanted = ((x - rounded) @ weight.T).square().sum() / (x @ weight.T).square().sum()
        assert found == pytest.approx(float(wanted), rel=0.1)


@pytest.mark.parametrize(
    ("name", "smooth"),
    [
        ("gemma2", {"mlp.up_proj.weight rows", "mlp.down_proj.weight"}),
        ("olmo2", {"mlp.up_proj.weight rows", "mlp.down_proj.weight"}),
        ("bert", {"attention.self.value.weight rows", "attention.self.value.bias", "attention.output.dense.weight"}),
    ],
)
def test_only_what_leaves_a_layer_as_it_was_is_smoothed(name: str, smooth: set[str], tmp_path: Path) -> None:
    """Gemma's gain is one more than its weight, OLMo 2 has its norms after its linears, and BERT's layers end in one.

    No power of two passes through the activation of a gate, or through that between BERT's two linears.
    """
    make(tmp_path / "m", ARCHITECTURES[name], torch.float32)
    ids = torch.randint(3, 70, (2, 16), generator=torch.Generator().manual_seed(0))
    factors = smoothed_by(tmp_path / "m", ids, tmp_path / "kept").factors
    assert {re.sub(r".*layers?\.\d+\.", "", name) for name in factors} == smooth


def test_factors_are_powers_of_two_and_dead_channels_stay() -> None:
    inputs = torch.tensor([1.0, 1.0, 64.0, 0.0, 1e9, 1.0, 1.0])
    weights = [torch.ones(2, 7), torch.tensor([[0.5] * 5 + [0.0, 1.0]])]
    weights[0][:, 5] = 0
    assert exponents(inputs, weights).tolist() == [0, 0, 3, 0, MOST, 0, 0]


def test_factors_that_do_not_help_are_left_out() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 32, generator=generator), torch.randn(16, 32, generator=generator)
    eight = partial(quantize_rows, dtype=torch.int8)

    def best(x: torch.Tensor) -> torch.Tensor:
        return best_exponents(x, x.abs().amax(0), [weight], eight, eight)

    assert not bool(best(x.sign()).any())
    x[:, 5] *= 50
    powers = best(x)
    assert powers[5] > 1 + powers.float().median()

    def error(powers: torch.Tensor) -> float:
        factors = torch.exp2(powers.float())
        rounded = dequantize(*eight(x / factors)) @ dequantize(*eight(weight * factors)).T
        return float((rounded - x @ weight.T).square().sum())

    assert error(powers) < 0.2 * error(torch.zeros_like(powers))
