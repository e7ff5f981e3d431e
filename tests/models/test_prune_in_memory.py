"""Calibrated pruning of a model in memory: what ``slidesparse prune`` makes of the same model and windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from checkpoints import SMALL, make_source

import slidesparse as ss
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.models.targets import find_targets
from slidesparse.offline.calibrate.calibration import Calibration, calibration_windows
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions


def load(source: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **changes}))


def windows(length: int = 32) -> torch.Tensor:
    return torch.randint(3, 96, (12, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("method", "dtype", "how"),
    [
        ("wanda", "int8", {}),
        ("sparsegpt", "int8", {}),
        ("sparsegpt", "int8", {"match_steps": 12}),
        ("wanda", "fp32", {"match_steps": 12}),
        ("sparsegpt", "fp8", {}),
        ("sparsegpt", "int8", {"rounding": "6bit"}),
        ("sparsegpt", "int8", {"rounding": "6bit", "pattern": "dense"}),
    ],
)
def test_as_prune_does(tmp_path: Path, method: str, dtype: str, how: dict[str, Any]) -> None:
    source = make_source(tmp_path, "llama", torch.float32)
    text = Calibration(str(tmp_path / "text.txt"), samples=24, length=64)  # two batches
    how = {"pattern": "6:8"} | how
    options = PruneOptions(dtype=dtype, method=method, calibration=text, smooth=False, **how)
    prune_checkpoint(source, tmp_path / "out", options)
    model = load(source).train()
    calibration = calibration_windows(source, model.config, text)
    ss.sparsify_(model, dtype=dtype, method=method, calibration=calibration, **how)
    assert model.training
    written, made = Checkpoint(tmp_path / "out"), model.state_dict()
    for name in written.files:
        assert torch.equal(made[name], written.tensor(name)), name


def test_calibration_alone_means_sparsegpt() -> None:
    first, second = llama(), llama()
    ss.sparsify_(first, "4:6", "fp32", calibration=windows())
    ss.sparsify_(second, "4:6", "fp32", calibration=windows(), method="sparsegpt")
    assert all(torch.equal(first.state_dict()[name], one) for name, one in second.state_dict().items())


def test_an_exception_stays_dense_and_runs_as_it_is() -> None:
    model = llama()
    ss.sparsify_(model, "4:6", "fp32", calibration=windows(), layers={"re:.*down_proj": "dense"})
    kept, pruned = (model.model.layers[1].mlp.get_submodule(name) for name in ("down_proj", "up_proj"))
    assert float((kept.unpack() == 0).float().mean()) < 0.01 < float((pruned.unpack() == 0).float().mean())


@pytest.mark.parametrize(
    ("calibration", "how"),
    [
        (windows().int(), {}),
        (windows()[0], {}),
        (windows() + 90, {}),
        (windows(80), {}),
        (["a text"], {}),
        (windows(), {"method": "magnitude"}),
        (windows(), {"match_steps": -1}),
        (None, {"method": "wanda"}),
        (None, {"match_steps": 10}),
    ],
)
def test_refused(calibration: Any, how: dict[str, Any]) -> None:
    model = llama(max_position_embeddings=64)
    with pytest.raises(ss.InputError):
        ss.sparsify_(model, "6:8", calibration=calibration, **how)
    assert len(find_targets(model).linears) == 14


def test_a_model_whose_activations_break_is_left_as_it_was() -> None:
    """The first layer is pruned by then."""
    model = llama().train()
    model.model.layers[1].input_layernorm.weight.data[0] = torch.inf
    model.model.norm.eval()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(ss.InputError):
        ss.sparsify_(model, "6:8", calibration=windows())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert model.model.layers[0].training
    assert not model.model.norm.training


def test_hooks_of_layers_are_kept() -> None:
    """accelerate's take the place of a layer's forward, which calibration borrows."""
    model = llama()
    for layer in model.model.layers:
        add_hook_to_module(layer, ModelHook())
    own = [vars(layer)["forward"] for layer in model.model.layers]
    ss.sparsify_(model, "6:8", calibration=windows())
    assert [vars(layer)["forward"] for layer in model.model.layers] == own
