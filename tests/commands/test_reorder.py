"""``prune --reorder``: channels of an MLP change places, the float model stays, and masks take less away."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import make_source
from interrupted_reads import interrupt
from small_models import TEXT, make

from slidesparse.errors import InputError
from slidesparse.files.checkpoint import Checkpoint
from slidesparse.files.meta_model import build_meta_model
from slidesparse.models.reorder import Inner, can_change_places, find_inner
from slidesparse.models.sparsify import run_once
from slidesparse.models.targets import find_targets
from slidesparse.offline.calibrate import reordering
from slidesparse.offline.calibrate.calibration import Calibration
from slidesparse.offline.calibrate.reordering import (
    COLUMNS,
    ROWS,
    ReorderedCheckpoint,
    find_reordering,
    reorder_checkpoint,
)
from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneOptions
from slidesparse.weights.pattern import DENSE, Pattern

CPU = torch.device("cpu")


def reordered(source: Path, kept: Path, pattern: str = "4:6", **others: str) -> ReorderedCheckpoint:
    """Find orders for one pattern everywhere, but for linears whose names end otherwise."""
    checkpoint = Checkpoint(source)
    meta = build_meta_model(checkpoint)
    linears = find_targets(meta.model).linears
    patterns = dict.fromkeys(linears, Pattern.parse(pattern))
    for end, other in others.items():
        patterns |= {name: Pattern.parse(other) for name in linears if name.endswith(end)}
    ids = torch.randint(3, 60, (6, 16), generator=torch.Generator().manual_seed(0))
    channels = find_reordering(meta, checkpoint, patterns, run_once(meta.model))
    return reorder_checkpoint(checkpoint, channels, patterns, ids, kept, CPU)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(ids).logits
    return found


@pytest.mark.parametrize(
    ("name", "writers"),
    [
        ("llama", 2),
        ("gemma2", 2),
        ("olmo2", 2),
        ("gpt-neox", 1),
        ("opt", 1),
        ("starcoder2", 1),
        ("phi3", 1),
        ("glm", 1),
        ("llama4-text", 2),
    ],
)
def test_the_float_model_computes_what_it_did(name: str, writers: int, tmp_path: Path) -> None:
    """With gates, norms around the MLP, biases, both writers in one linear, and a router that gives a tuple."""
    make(tmp_path / "m", ARCHITECTURES[name], torch.float32)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 50)  # a new model's biases are zero
    model.save_pretrained(tmp_path / "m")
    made = reordered(tmp_path / "m", tmp_path / "kept")
    ids = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(1))
    before = logits(model, ids)
    columns = [key for key in made.orders if key.startswith(COLUMNS)]
    assert len(columns) == model.config.num_hidden_layers
    weights = [key for key in made.orders if key.startswith(ROWS) and key.endswith(".weight")]
    assert len(weights) == writers * len(columns)
    for key in made.orders:
        tensor = key.removeprefix(ROWS).removeprefix(COLUMNS)
        assert not torch.equal(made.tensor(tensor), Checkpoint(tmp_path / "m").tensor(tensor))
        model.get_parameter(tensor).data.copy_(made.tensor(tensor))
    assert torch.allclose(logits(model, ids), before, rtol=1e-4, atol=1e-5)


def test_only_inner_channels_are_found() -> None:
    """Those of heads have shapes that would fit, and cannot change places."""
    config = transformers.LlamaConfig(**{**TEXT, "num_hidden_layers": 1, "num_key_value_heads": 4})
    model: Any = transformers.LlamaForCausalLM(config)
    run, layer = run_once(model), "model.layers.0"
    assert run is not None
    linears = find_targets(model).linears
    mlp = Inner((f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    found = find_inner(linears, model, run)
    assert mlp in found
    heads = Inner(tuple(f"{layer}.self_attn.{leaf}_proj" for leaf in "qkv"), f"{layer}.self_attn.o_proj")
    assert heads in found, "the shapes would fit"
    modules: dict[str, Any] = {name: model.get_submodule(name) for name in linears}
    ids, weights = torch.randint(3, 60, (2, 16)), copy.deepcopy(model.state_dict())
    whole = model.model.layers[0]
    assert can_change_places(whole, modules, mlp, partial(model, ids))
    assert not can_change_places(whole, modules, heads, partial(model, ids))
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_dense_and_partial_readers_stay(tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", torch.float32)
    for pattern in (str(DENSE), "4:6@50%"):
        with pytest.raises(InputError, match="no channels of LlamaForCausalLM"):
            prune_checkpoint(source, tmp_path / "made", options(source, layers={"re:.*down_proj": pattern}))
    assert not list(tmp_path.glob("made*"))


def test_a_gain_for_each_channel_keeps_them_in_place(tmp_path: Path) -> None:
    """BitNet has a norm between the linears of its MLP, whose gain would have to move, too."""
    source = make_source(tmp_path, "bitnet", torch.float32)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.ffn_sub_norm.weight.data.uniform_(0.1, 3.0)
    model.save_pretrained(source)
    with pytest.raises(InputError, match="no channels of BitNetForCausalLM can change places"):
        reordered(source, tmp_path / "kept")


def options(source: Path, **changes: Any) -> PruneOptions:
    text = Calibration(str(source.parent / "text.txt"), 4, 16)
    given: dict[str, Any] = {"pattern": "4:6", "dtype": "int8", "method": "wanda", "calibration": text}
    return PruneOptions(**{**given, "reorder": True, **changes})


def test_masks_take_less_away_and_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    whole = prune_checkpoint(source, tmp_path / "whole", options(source))
    plain = prune_checkpoint(source, tmp_path / "plain", options(source, reorder=False))
    down = [names for names in whole.losses if names.endswith("down_proj")]
    assert len(down) == 2
    assert all(whole.losses[names] < plain.losses[names] for names in down)
    interrupt(monkeypatch, ReorderedCheckpoint, at=30)
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoint(source, tmp_path / "again", options(source))
    monkeypatch.setattr(reordering, "_find_orders", lambda *_: pytest.fail("the orders are found a second time"))
    prune_checkpoint(source, tmp_path / "again", options(source))
    first, again = (Checkpoint(tmp_path / name) for name in ("whole", "again"))
    assert all(torch.equal(first.tensor(name), again.tensor(name)) for name in first.files)


def test_smoothing_comes_first(tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    prune_checkpoint(source, tmp_path / "made", options(source, smooth=True, pattern="6:8"))
    card = (tmp_path / "made" / "README.md").read_text()
    assert "smoothing and reordering and wanda" in card
    assert "| channels | inside MLPs in another order: adapters made for the source do not fit there |" in card


def test_what_cannot_be_reordered(tmp_path: Path) -> None:
    source = make_source(tmp_path, "llama", torch.bfloat16)
    with pytest.raises(InputError, match="reordering needs calibration text; got --method magnitude"):
        prune_checkpoint(source, tmp_path / "made", options(source, method="magnitude", calibration=None))
    assert not (tmp_path / "made").exists()
