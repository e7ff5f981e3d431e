"""Dense eight-bit checkpoints of other tools inside vLLM's real Python: which run fused, and which are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from blackwell import act_as_blackwell
from llm_compressor_checkpoint import group, quantised, rewritten
from safetensors.torch import load_file
from vllm_models import configured, loaded

from slidesparse.errors import UnsupportedError
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.weights.quant import quantize_rows

pytestmark = pytest.mark.usefixtures("vllm_on_cpu", "no_dense_kernels")

OURS = {"quantization": "slidesparse"}


def sparse_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("slidesparse: nothing is sparse")]


def test_a_dense_int8_checkpoint_runs_by_our_operators(
    checkpoints: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = rewritten(checkpoints("dense"), tmp_path / "dense")
    layer = loaded(configured(path, **OURS), {}).model.layers[0]
    stored = load_file(path / "model.safetensors")
    weight, scale = (stored[f"model.layers.0.mlp.down_proj.{kind}"] for kind in ("weight", "weight_scale"))
    x = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    values, scale_x = quantize_rows(x, torch.int8)
    expected = apply_scales(product(values, weight), scale_x, scale.float().flatten(), None, torch.bfloat16)
    assert weight.min() == -128
    assert torch.equal(layer.mlp.down_proj(x)[0], expected)
    for linear in (layer.mlp.gate_up_proj, layer.mlp.down_proj, layer.self_attn.qkv_proj, layer.self_attn.o_proj):
        assert linear.slide.choice.backends == ("dense",)
    assert sparse_lines(caplog) == [
        "slidesparse: nothing is sparse: 4 of 4 layers run dense by the product of vLLM's own,"
        " with norms, activations and quantisation fused"
    ]


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {}])
def test_where_nothing_can_be_fused_every_layer_is_vllms(
    checkpoints: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: dict[str, Any]
) -> None:
    options = {} if settings else {"slidesparse": {"fuse": False}}
    path = rewritten(checkpoints("dense"), tmp_path / "dense")
    layer = loaded(configured(path, **OURS, **settings), options).model.layers[0]
    assert not hasattr(layer.mlp.down_proj, "slide")
    assert hasattr(layer.mlp.down_proj, "weight")
    assert sparse_lines(caplog) == ["slidesparse: nothing is sparse, and nothing is fused: all 4 layers are vLLM's own"]


@pytest.mark.parametrize("refusal", [None, "NVRTC is too old"])
@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {}])
def test_on_blackwell_no_int8_layer_is_left_to_vllm_which_has_no_kernel(
    checkpoints: Any,
    tmp_path: Path,
    settings: dict[str, Any],
    refusal: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    act_as_blackwell(monkeypatch, refusal)
    path = rewritten(checkpoints("dense"), tmp_path / "dense")
    layer = loaded(configured(path, **OURS, **settings), {}).model.layers[0]
    for linear in (layer.mlp.gate_up_proj, layer.mlp.down_proj, layer.self_attn.qkv_proj, layer.self_attn.o_proj):
        assert linear.slide.choice.backends == ("dense" if refusal else "ampere",)
    stored = load_file(path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(layer.mlp.down_proj.slide.unpack(), stored)
    lacked = "dense by torch, since vLLM has no INT8 kernel for this GPU"
    total = f"slidesparse: nothing is sparse: 4 of 4 layers run {lacked}"
    assert sparse_lines(caplog) == ([total] if refusal else [])
    told = [line for line in caplog.messages if f": {lacked}, " in line]
    assert len(told) == (4 if refusal else 0)
    assert all("ampere: NVRTC is too old" in line and ("fused with" in line) == (not settings) for line in told)


FOUR_BITS = {"num_bits": 4, "strategy": "group", "group_size": 128}
STATIC = {"dynamic": False, "strategy": "tensor"}
REFUSED = {
    "static activations": (quantised(group(inputs=STATIC)), "input_activations with dynamic False"),
    "asymmetric weights": (quantised(group({"symmetric": False})), "weights with symmetric False"),
    "weights alone": (quantised(group(FOUR_BITS, {"num_bits": 0}), form="pack-quantized"), "weights with num_bits 4"),
    "FP8 in blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "quant_method 'fp8'"),
    "nothing": (quantised() | {"config_groups": {}}, "no config_groups"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_is_refused_when_the_configuration_is_read(checkpoints: Any, tmp_path: Path, kind: str) -> None:
    config, told = REFUSED[kind]
    settings = json.loads((checkpoints("dense") / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match=f"--quantization slidesparse.*got {told}.*vLLM serves it as it is"):
        configured(tmp_path, **OURS)


def test_of_a_mixed_checkpoint_the_other_layers_are_vllms(
    checkpoints: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mixed = quantised(group(targets="re:.*mlp.*"), group(inputs=STATIC, targets="re:.*self_attn.*"))
    layer = loaded(configured(rewritten(checkpoints("dense"), tmp_path / "mixed", mixed), **OURS), {}).model.layers[0]
    assert hasattr(layer.mlp.down_proj, "slide")
    assert not hasattr(layer.self_attn.o_proj, "slide")
    assert "nothing is sparse: 2 of 4 layers run dense" in caplog.text
    assert "self_attn.o_proj: dense, weights need one scale a channel and activations one a token" in caplog.text
