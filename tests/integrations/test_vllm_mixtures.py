"""Pruned mixtures of experts through vLLM's own loader: attention is packed, experts stay vLLM's, with every scale."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from vllm_models import REFERENCE, configured, loaded

from slidesparse.commands.prune import PruneOptions, prune_checkpoint
from slidesparse.files.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

SMALL: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 64},
    **{"tie_word_embeddings": False, "moe_intermediate_size": 64, "num_experts_per_tok": 2},
}
MODELS = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4},
    "GraniteMoeForCausalLM": {"num_local_experts": 4},
}
ROUTERS = {
    "MixtralForCausalLM": ("block_sparse_moe.gate", "block_sparse_moe.gate"),
    "Qwen3MoeForCausalLM": ("mlp.gate", "mlp.gate"),
    "GraniteMoeForCausalLM": ("block_sparse_moe.router.layer", "block_sparse_moe.gate"),
}
"""Where the checkpoint and vLLM have what chooses among the experts."""


def pruned(path: Path, name: str, dtype: str, ignore: tuple[str, ...] = ()) -> Path:
    known = getattr(transformers, name)
    torch.manual_seed(0)
    model = known(known.config_class(**SMALL, **MODELS[name])).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 3:
                parameter.normal_(std=0.1)
    model.save_pretrained(path / "dense")
    prune_checkpoint(path / "dense", path / "sparse", PruneOptions("6:8", dtype, ignore=ignore))
    return path / "sparse"


CASES = [
    ("MixtralForCausalLM", "int8", ()),
    *(("Qwen3MoeForCausalLM", dtype, ()) for dtype in ("int8", "fp8", "bf16")),
    ("Qwen3MoeForCausalLM", "int8", ("re:.*experts",)),
    ("GraniteMoeForCausalLM", "bf16", ()),
    ("GraniteMoeForCausalLM", "int8", ("re:.*experts",)),
]


@pytest.fixture
def without_expert_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's methods for experts be made and loaded on a CPU; which kernel runs them is not asked here."""
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe as quantised
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    methods: list[Any] = [UnquantizedFusedMoEMethod]
    for kind in ("int8", "fp8"):
        module = import_module(f"{quantised.__name__}.compressed_tensors_moe_w8a8_{kind}")
        monkeypatch.setattr(module, f"select_{kind}_moe_backend", lambda *_, **__: (None, None))
        methods.append(getattr(module, f"CompressedTensorsW8A8{kind.title()}MoEMethod"))
    for method in methods:
        monkeypatch.setattr(method, "process_weights_after_loading", lambda *_: None)


def expected(path: Path, layer: int) -> dict[str, torch.Tensor]:
    """The experts of a layer as vLLM holds them, put together from the checkpoint by their names."""
    checkpoint = Checkpoint(path)
    found: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name in checkpoint.files:
        if f"layers.{layer}." not in name:
            continue
        if "input_linear" in name or "output_linear" in name:
            kind = "w13" if "input_linear" in name else "w2"
            found[f"{kind}_weight"] = {"all": list(checkpoint.tensor(name))}
        elif (place := re.search(r"experts\.(\d)\.(\w+)\.(weight\w*)$", name)) is not None:
            kind = "w2" if place[2] in ("w2", "down_proj") else "w13"
            second = place[2] in ("w3", "up_proj")
            parts = found.setdefault(f"{kind}_{place[3]}", {}).setdefault(place[1], [])
            parts.insert(len(parts) if second else 0, checkpoint.tensor(name))
    return {
        key: torch.stack(each["all"] if "all" in each else [torch.cat(each[str(e)]) for e in range(4)])
        for key, each in found.items()
    }


@pytest.mark.usefixtures("without_expert_kernels")
@pytest.mark.parametrize(("name", "dtype", "ignore"), CASES)
def test_attention_is_packed_and_experts_are_loaded(
    tmp_path: Path, name: str, dtype: str, ignore: tuple[str, ...]
) -> None:
    path = pruned(tmp_path, name, dtype, ignore)
    try:
        model = loaded(configured(path, quantization="slidesparse"), REFERENCE)
    except ValueError as error:
        if dtype == "fp8" and "Failed to find a kernel" in str(error):
            pytest.skip("this release has no FP8 linears for a CPU")
        raise
    packed = sorted(layer for layer, module in model.named_modules() if hasattr(module, "slide"))
    assert packed == [f"model.layers.{i}.self_attn.{leaf}" for i in range(2) for leaf in ("o_proj", "qkv_proj")]
    state = model.state_dict()
    for layer in range(2):
        stored, held = ROUTERS[name]
        router = Checkpoint(path).tensor(f"model.layers.{layer}.{stored}.weight")
        assert torch.equal(state[f"model.layers.{layer}.{held}.weight"], router)
        wanted = expected(path, layer)
        quantised = dtype != "bf16" and not ignore
        kinds = ("weight", "weight_scale") if quantised else ("weight",)
        assert wanted.keys() == {f"{matrix}_{kind}" for matrix in ("w13", "w2") for kind in kinds}
        for leaf, value in wanted.items():
            (found,) = (v for k, v in state.items() if f"layers.{layer}." in k and k.endswith(f".{leaf}"))
            assert torch.equal(found.reshape(value.shape).float(), value.float()), leaf
            assert found.dtype == value.dtype


@pytest.mark.usefixtures("without_expert_kernels")
def test_stock_vllm_loads_it_dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )

    monkeypatch.setattr(CompressedTensorsLinearMethod, "process_weights_after_loading", lambda *_: None)
    path = pruned(tmp_path, "Qwen3MoeForCausalLM", "int8")
    model = loaded(configured(path, quantization="compressed-tensors"), {})
    assert not any(hasattr(module, "slide") for module in model.modules())
    scales = [k for k in model.state_dict() if k.endswith(("w13_weight_scale", "w2_weight_scale"))]
    assert len(scales) == 4
