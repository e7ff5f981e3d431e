"""Checkpoints beside the pruned ones: weights of four bits, and drafts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slidesparse.weights.pattern import DENSE
from slidesparse_bench.engine.eagle_head import eagle_settings, write_eagle_head
from slidesparse_bench.engine.vllm_checkpoint import ARCHITECTURES, model_config, write_checkpoint

CPU = torch.device("cpu")
SMALL = model_config("Qwen2.5-7B", 4) | {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 64}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize(("kind", "activations"), [("w4a8", 8), ("w4a16", None)])
def test_four_bits_are_packed_as_compressed_tensors_does(tmp_path: Path, kind: str, activations: int | None) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for folder, four_bits in (("dense", None), ("packed", kind)):
        write_checkpoint(tmp_path / folder, SMALL, torch.bfloat16, DENSE, CPU, four_bits=four_bits)
    dense, packed = (load_file(tmp_path / folder / "layer-000.safetensors") for folder in ("dense", "packed"))
    name = "model.layers.0.mlp.down_proj"
    shape = torch.Size(packed[f"{name}.weight_shape"])
    values = helpers.unpack_from_int32(packed[f"{name}.weight_packed"], 4, shape)
    scale = packed[f"{name}.weight_scale"]
    assert scale.shape == (256, 512 // 128)
    wide = scale.float().repeat_interleave(128, 1)
    assert ((values * wide - dense[f"{name}.weight"].float()).abs() <= 0.51 * wide).all()
    assert values.min() < -6
    bias = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(dense[bias], packed[bias])
    config = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    (group,) = quantization.QuantizationConfig(**config).config_groups.values()
    assert (group.weights.num_bits, group.weights.group_size) == (4, 128)
    assert (group.input_activations and group.input_activations.num_bits) == activations


def test_a_draft_has_the_tensors_of_a_published_one(tmp_path: Path) -> None:
    write_eagle_head(tmp_path / "head", SMALL, CPU, 32)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (256, 512)  # an embedding beside a hidden state
    assert tensors["fc.weight"].shape == (256, 3 * 256)
    assert tensors["lm_head.weight"].shape == (32, 256)
    assert tensors["t2d"].sum() == len(tensors["d2t"]) == 32
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLMEagle3"], 32)
    for read in (config, config["eagle_config"]):  # by runners of vLLM, and by older ones and SGLang
        assert read["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    forced, _ = eagle_settings("vllm", tmp_path, 2.5)
    assert forced["speculative_config"]["synthetic_acceptance_length"] == 2.5
    assert eagle_settings("sglang", tmp_path, None)[1] == {}  # as they are accepted


def test_a_model_may_bring_its_own_sizes() -> None:
    assert model_config("Qwen2.5-32B")["num_key_value_heads"] == 8
    linears = sum(out * columns for out, columns in ARCHITECTURES["Qwen2.5-32B"].sizes("Qwen2.5-32B"))
    assert 64 * linears + 2 * 152064 * 5120 == pytest.approx(32.8e9, rel=0.01)
