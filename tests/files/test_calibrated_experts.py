"""Experts are pruned with what their router sends them, in every form in which a checkpoint has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import add_tokenizer, same_tensors, write_text
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
from slidesparse.offline.calibrate.layer_store import CheckpointLayerStore
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


# -- against the definition --------------------------------------------------------------------------------------------


def routed_grams(folder: Path, text: Calibration) -> tuple[Any, list[torch.Tensor], list[torch.Tensor], list[int]]:
    """A Mixtral, and of layer 0 the gram matrices before and inside of each expert, and the tokens of each."""
    model = transformers.MixtralForCausalLM.from_pretrained(folder / "m", dtype=torch.float32).eval()
    experts = model.model.layers[0].mlp.experts
    before, inner, tokens = ([0] * 4 for _ in range(3))

    def note(_: Any, args: tuple[Any, ...]) -> None:
        for e in range(4):
            x = args[0][(args[1] == e).any(1)]
            gate, up = (x @ experts.gate_up_proj[e].T).chunk(2, 1)
            h = torch.nn.functional.silu(gate) * up
            before[e], inner[e], tokens[e] = before[e] + x.T @ x, inner[e] + h.T @ h, tokens[e] + len(x)

    experts.register_forward_pre_hook(note)
    with torch.no_grad():
        model(input_ids=windows(folder, model, text))
    return model, before, inner, tokens


def test_wanda_follows_the_definition(tmp_path: Path) -> None:
    text = source(tmp_path, "mixtral")
    summary = pruned(tmp_path, text, "wanda")
    model, before, inner, tokens = routed_grams(tmp_path, text)
    assert sum(tokens) == 2 * SAMPLES * LENGTH
    assert min(tokens) < 64 < max(tokens)  # so that one borrows what the router sends, and one does not
    assert any(64 < count < 152 for count in tokens)
    state, named = slidesparse.load(tmp_path / "s").state_dict(), {}
    for e in range(4):
        outer, inside = before[e].diagonal(), inner[e].diagonal()
        if tokens[e] < 64:
            outer = outer + sum(before).diagonal() * ((64 - tokens[e]) / sum(tokens))  # type: ignore[attr-defined]
            named[f"gate_up_proj.{e}"] = f"{tokens[e]} tokens of 64"
        if tokens[e] < 152:
            inside = inside + sum(inner).trace() / 152 * ((152 - tokens[e]) / sum(tokens))  # type: ignore[attr-defined]
            named[f"down_proj.{e}"] = f"{tokens[e]} tokens of 152"
        for leaf, squares in (("gate_up_proj", outer), ("down_proj", inside)):
            weight = model.state_dict()[f"model.layers.0.mlp.experts.{leaf}"][e]
            groups = (weight**2 * squares).reshape(len(weight), -1, 8)
            keep = torch.ones_like(groups).scatter(-1, groups.argsort(-1)[..., :2], 0).reshape(weight.shape)
            assert torch.equal(state[f"model.layers.0.mlp.experts.{leaf}"][e], weight * keep)
    first = {key: words for key, words in summary.borrowed.items() if ".0.mlp." in key}
    assert first == {f"model.layers.0.mlp.experts.{key}": words for key, words in named.items()}
    assert f"layer: {len(summary.borrowed)} of the experts' weights, such as model." in summary.describe()
    assert {key for names in summary.losses for key in names.split() if "experts" in key} == {
        f"model.layers.{i}.mlp.experts.{leaf}.{e}"
        for i in range(2)
        for leaf in ("gate_up_proj", "down_proj")
        for e in range(4)
    }


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


# -- in parts, and again after a kill ----------------------------------------------------------------------------------


def test_a_finished_layer_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = source(tmp_path, "mixtral")
    pruned(tmp_path, text, "wanda", "int8", "whole")
    keep = CheckpointLayerStore.keep

    def second(store: CheckpointLayerStore, name: str, *rest: Any) -> None:
        if name.endswith(".1"):
            raise KeyboardInterrupt
        keep(store, name, *rest)

    monkeypatch.setattr(CheckpointLayerStore, "keep", second)
    with pytest.raises(KeyboardInterrupt):
        pruned(tmp_path, text, "wanda", "int8")
    kept: list[str] = []
    monkeypatch.setattr(
        CheckpointLayerStore, "keep", lambda store, name, *rest: (kept.append(name), keep(store, name, *rest))
    )
    summary = pruned(tmp_path, text, "wanda", "int8")
    assert kept == ["model.layers.1"]
    assert any(".0.mlp.experts" in name for name in summary.borrowed)
    assert same_tensors(tmp_path / "s", tmp_path / "whole")
