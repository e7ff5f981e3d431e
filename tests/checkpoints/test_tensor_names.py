"""Which tensor of a checkpoint fills which parameter is what transformers says, by any name on the hub."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from checkpoints import by_magnitude
from safetensors.torch import load_file, save_file
from small_models import VISION, Architecture, image, make

import slidesparse
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.checkpoints.meta_model import MetaModel, build_meta_model
from slidesparse.errors import CheckpointError
from slidesparse.layer.linear import SlideLinear
from slidesparse.models.config_keys import MARKER_KEY
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import prune_checkpoint

FP32 = by_magnitude("6:8", "fp32")

Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def rewrite(path: Path, change: Change) -> None:
    """Change the tensors of a checkpoint."""
    file = path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(file)).items()}, file, {"format": "pt"})


def written(path: Path, name: str, change: Change | None = None, **changes: object) -> MetaModel:
    make(path, ARCHITECTURES[name], torch.float32, **changes)
    if change is not None:
        rewrite(path, change)
    return build_meta_model(Checkpoint(path))


def test_a_name_that_transformers_5_changed(tmp_path: Path) -> None:
    meta = written(tmp_path / "m", "gpt-neox")
    assert meta.prefix("lm_head") == "embed_out"
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    config = Checkpoint(tmp_path / "s").config
    assert "lm_head" in summary.dense
    assert config[MARKER_KEY]["ignore"] == ["lm_head"]
    assert config["quantization_config"]["ignore"] == ["lm_head", "embed_out"]  # whoever reads it knows one of them


def _as_on_the_hub(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("change", [lambda tensors: tensors, _as_on_the_hub])
def test_both_names_of_llavas_vision_tower(tmp_path: Path, change: Change) -> None:
    meta = written(tmp_path / "m", "llava", change)
    meta.require_complete()
    assert not meta.names.unexpected
    prefix = meta.prefix("model.language_model.layers.0.mlp.down_proj")
    assert prefix == "language_model.model.layers.0.mlp.down_proj"


def test_a_base_model_fills_one_with_a_head_and_the_other_way_round(tmp_path: Path) -> None:
    strip: Change = lambda tensors: {n.removeprefix("model."): t for n, t in tensors.items()}  # noqa: E731
    meta = written(tmp_path / "m", "llama", strip)
    meta.require_complete()
    assert meta.prefix("model.layers.1.mlp.up_proj") == "layers.1.mlp.up_proj"


def test_what_is_missing_and_what_is_not_used(tmp_path: Path) -> None:
    lost = "gpt_neox.layers.0.attention.dense.bias"
    change: Change = lambda tensors: {n: t for n, t in tensors.items() if n != lost} | {"visual.x": torch.zeros(2)}  # noqa: E731
    meta = written(tmp_path / "m", "gpt-neox", change)
    assert meta.names.missing == (lost,)
    assert meta.names.unexpected == ("visual.x",)
    with pytest.raises(CheckpointError, match="lacks 1 tensor of GPTNeoXForCausalLM"):
        meta.require_complete()


def test_tensors_that_old_checkpoints_hold_are_no_surprise(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    meta = written(tmp_path / "m", "llama", lambda tensors: {**tensors, name: torch.zeros(8)})
    assert not meta.names.unexpected


def test_what_is_tied_is_read_once(tmp_path: Path) -> None:
    meta = written(tmp_path / "m", "t5")
    embeddings = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert {name for name, other in meta.names.tied.items() if other == "shared.weight"} == embeddings
    assert not meta.names.missing
    prune_checkpoint(tmp_path / "m", tmp_path / "s", FP32)
    model = slidesparse.load(tmp_path / "s")
    assert model.lm_head.weight is model.shared.weight is model.decoder.embed_tokens.weight


def test_linears_that_share_a_weight_stay_dense(tmp_path: Path) -> None:
    """A program that loads the checkpoint would look for the scales of each."""
    shared = {
        **{"num_hidden_layers": 4, "hybrid_layer_ids": [1, 3]},
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    }
    make(tmp_path / "m", ARCHITECTURES["zamba2"], torch.float32, **shared)
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", FP32)
    assert not any("shared_transformer" in name for name in summary.patterns)
    model = slidesparse.load(tmp_path / "s")
    blocks = [model.model.layers[i].shared_transformer.self_attn.q_proj for i in (1, 3)]
    assert blocks[0].weight is blocks[1].weight
    theirs = transformers.Zamba2ForCausalLM.from_pretrained(tmp_path / "s", dtype="auto").eval()
    ids = ARCHITECTURES["zamba2"].inputs()
    with torch.no_grad():
        torch.testing.assert_close(model(**ids).logits, theirs(**ids).logits, rtol=1e-4, atol=1e-4)


def test_parameters_that_no_checkpoint_holds_are_made_as_transformers_makes_them(tmp_path: Path) -> None:
    meta = written(tmp_path / "m", "marian")
    name = "model.encoder.embed_positions.weight"
    assert name in meta.names.made
    theirs = transformers.MarianMTModel.from_pretrained(tmp_path / "m")
    assert torch.equal(meta.read(name, Checkpoint(tmp_path / "m").tensor), theirs.get_parameter(name))


def test_a_weight_that_is_half_of_a_tensor_stays_dense_and_is_read(tmp_path: Path) -> None:
    """DINOv2's gate and up projections are one tensor on the hub."""
    gated = Architecture("Dinov2Model", {**VISION, "use_swiglu_ffn": True}, image())
    model = make(tmp_path / "m", gated, torch.float32)
    summary = prune_checkpoint(tmp_path / "m", tmp_path / "s", FP32)
    halves = {name: why for name, why in summary.dense.items() if "gate_proj" in name or "up_proj" in name}
    assert len(halves) == 4
    assert set(halves.values()) == {
        f"the checkpoint has it in another form, in encoder.layer.{i}.mlp.weights_in.weight" for i in range(2)
    }
    assert inspect_checkpoint(tmp_path / "m").dense == {**halves}
    loaded = slidesparse.load(tmp_path / "s")
    for name in halves:
        assert torch.equal(loaded.get_submodule(name).weight, model.get_submodule(name).weight)
    assert any(isinstance(module, SlideLinear) for module in loaded.modules())
    theirs = transformers.Dinov2Model.from_pretrained(tmp_path / "s").eval()
    with torch.no_grad():
        ours, other = (one(**image()()).last_hidden_state for one in (loaded, theirs))
    torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-4)


def test_buffers_have_the_type_in_which_the_model_runs(tmp_path: Path) -> None:
    """As transformers builds it: XGLM adds its table of positions to embeddings."""
    found = replace(ARCHITECTURES["xglm"], dtype=torch.bfloat16)
    make(tmp_path / "m", found)
    prune_checkpoint(tmp_path / "m", tmp_path / "s", by_magnitude("6:8", "int8"))
    with torch.no_grad():
        assert slidesparse.load(tmp_path / "s")(**found.inputs()).logits.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
