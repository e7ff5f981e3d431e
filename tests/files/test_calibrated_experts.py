"""Experts are pruned with what their router sends them, in every form in which a checkpoint has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import add_tokenizer, write_text
from small_models import make

import slidesparse
from slidesparse.base.rank_tensors import RankTensors
from slidesparse.base.ranks import ALONE
from slidesparse.checkpoints.expert_tensors import _Numbers
from slidesparse.errors import UnsupportedError
from slidesparse.models.expert_weights import calibrated_experts
from slidesparse.models.layer_stack import find_layer_list, record_inputs
from slidesparse.models.layerwise import prune_layers
from slidesparse.models.shared_layers import SharedLayers
from slidesparse.models.sparsify import run_once, sets_to_prune
from slidesparse.models.targets import find_targets
from slidesparse.offline.calibrate.calibration import Calibration, calibration_windows
from slidesparse.offline.dry_run import dry_run
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import PruneOptions, PruneSummary, prune_checkpoint
from slidesparse.pruning import Pruner, get_pruner
from slidesparse.weights.pattern import Pattern

FORMS = {
    "mixtral": "one tensor an expert, gate and up apart",
    "granitemoe": "one tensor for all",
    "gpt-oss": "transposed, gate and up between each other",
    "llama4-text": "transposed, cut in 8 bits",
    "qwen3-vl-moe": "transposed in the checkpoint alone, cut in 8 bits",
}
SAMPLES, LENGTH = 16, 16


def source(folder: Path, name: str) -> Calibration:
    """Write a small mixture, and a text of 256 tokens: some experts see fewer than they have columns."""
    make(folder / "m", ARCHITECTURES[name], torch.float32)
    add_tokenizer(folder / "m")
    return Calibration(str(write_text(folder / "text.txt")), SAMPLES, LENGTH)


def pruned(folder: Path, text: Calibration, method: str, dtype: str = "fp32", to: str = "s") -> PruneSummary:
    return prune_checkpoint(folder / "m", folder / to, PruneOptions("6:8", dtype, method, text))


def windows(folder: Path, model: Any, text: Calibration) -> torch.Tensor:
    return calibration_windows(folder / "m", model.config, text)


# -- every form --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_is_what_a_model_in_memory_becomes(tmp_path: Path, name: str) -> None:
    text = source(tmp_path, name)
    dtype = "fp32" if name in ("gpt-oss", "granitemoe") else "int8"
    dry_run(tmp_path / "m", tmp_path / "s", PruneOptions("6:8", dtype, "wanda", text))
    summary = pruned(tmp_path, text, "wanda", dtype)
    assert inspect_checkpoint(tmp_path / "s").ok
    known = getattr(transformers, ARCHITECTURES[name].model)
    model = known.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    linears = {key: model.get_submodule(key) for key in find_targets(model).linears if key in summary.patterns}
    weights = calibrated_experts(model, set(summary.experts))
    patterns = dict.fromkeys([*linears, *weights], Pattern.parse("6:8"))
    pruner: Pruner = get_pruner("wanda")
    layers = find_layer_list(model, linears)
    sets = sets_to_prune(model, linears, {key: patterns[key] for key in linears}, pruner, run_once(model))
    ids = windows(tmp_path, model, text)
    samples = record_inputs(model, layers, [{"input_ids": ids, "use_cache": False}])
    everything = [*sets, *([key] for key in weights)]
    prune_layer = SharedLayers(RankTensors(ALONE, torch.device("cpu")), 1).prune_layer
    list(prune_layers(model, layers, everything, patterns, pruner, samples, prune_layer, experts=weights))
    expected, found = model.state_dict(), slidesparse.load(tmp_path / "s").state_dict()
    assert len(summary.experts) * 4 == len(weights)
    for layer in summary.experts:
        near = 1e-5 if dtype == "fp32" else float(expected[layer].abs().max()) / 200
        torch.testing.assert_close(found[layer].float(), expected[layer], rtol=1e-3, atol=near)


def test_rows_that_are_torn_apart_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = source(tmp_path, "mixtral")
    of = _Numbers.of
    monkeypatch.setattr(_Numbers, "of", lambda self, name: of(self, name).flip(-2))
    with pytest.raises(
        UnsupportedError, match=r"rows of model.*gate_up_proj.0 come .* in an order of their own.*--method"
    ):
        pruned(tmp_path, text, "wanda")
