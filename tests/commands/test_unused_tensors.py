"""Tensors that transformers does not use, such as heads that foresee several tokens: what programs that do are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import by_magnitude, config_of, make_checkpoint
from safetensors.torch import load_file, save_file

import slidesparse
from slidesparse.checkpoints.marker import Marker
from slidesparse.integrations.names import find_layer
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import prune_checkpoint

HEAD = {
    "mtp.fc.weight": (64, 128),
    "mtp.norm.weight": (64,),
    "mtp.layers.0.self_attn.o_proj.weight": (64, 64),
    "mtp.layers.0.mlp.experts.gate_up_proj": (4, 96, 64),
    "mtp.layers.0.mlp.experts.down_proj": (4, 64, 48),
}


def make_source(folder: Path, head: dict[str, tuple[int, ...]]) -> Path:
    """A checkpoint with tensors of which its class knows nothing."""
    make_checkpoint(folder, num_hidden_layers=1)
    weights = load_file(folder / "model.safetensors")
    weights |= {name: torch.randn(shape).to(torch.bfloat16) for name, shape in head.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_linears_that_the_model_does_not_use_are_not_said_to_be_quantised(tmp_path: Path, dtype: str) -> None:
    """vLLM runs such a head as a draft, and would read its float weights as 8 bits without scales."""
    source = make_source(tmp_path / "m", HEAD)
    prune_checkpoint(source, tmp_path / "s", by_magnitude("6:8", dtype))
    ignore = config_of(tmp_path / "s")["quantization_config"]["ignore"]
    experts = r"re:mtp\.layers\.0\.mlp\.experts\..*"
    assert ignore == ["lm_head", "mtp.fc", experts, "mtp.layers.0.self_attn.o_proj"]
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "s/model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in HEAD)
    assert inspect_checkpoint(tmp_path / "s").ok
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "s")


def test_vllms_own_names_of_a_draft_are_known(tmp_path: Path) -> None:
    """What was pruned with such a draft could not be loaded or inspected: the marker named layers beyond the last."""
    source = make_source(tmp_path / "m", {"model.mtp_block.0.mlp.up_proj.weight": (96, 64)})
    prune_checkpoint(source, tmp_path / "s", by_magnitude("6:8", "int8"))
    marker = Marker.require(config_of(tmp_path / "s"), tmp_path)
    assert marker.ignore == ("lm_head", "model.mtp_block.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert inspect_checkpoint(tmp_path / "s").ok
    with pytest.warns(UserWarning, match="LlamaForCausalLM has no use for 1 tensor"):
        slidesparse.load(tmp_path / "s")


def test_linears_that_the_model_does_not_use_have_no_pattern(tmp_path: Path) -> None:
    """Where nothing is quantised the marker alone says which linears of vLLM have zeros."""
    prune_checkpoint(make_source(tmp_path / "m", HEAD), tmp_path / "s", by_magnitude("6:8", "bf16"))
    marker = Marker.require(config_of(tmp_path / "s"), tmp_path)
    assert marker.ignore == ("lm_head", "mtp.fc", "mtp.layers.0.self_attn.o_proj")
    assert find_layer(marker, "mtp.layers.0.self_attn.o_proj", {}) is None
    inspection = inspect_checkpoint(tmp_path / "s")
    assert inspection.ok
    assert inspection.dense["mtp.fc"] == "on the ignore list"
    with pytest.warns(UserWarning, match="LlamaForCausalLM has no use for 5 tensors"):
        slidesparse.load(tmp_path / "s")
