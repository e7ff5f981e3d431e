"""vLLM's LoRA layers around sparse linears; no GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import by_magnitude
from vllm_models import REFERENCE, configured, loaded_by

from slidesparse.offline.prune import prune_checkpoint

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

RANK = 8


def add_nothing(*_: Any, **__: Any) -> None:
    """Stand for a method that would compute an adapter's part."""


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_vllms_layers_of_adapters_call_the_sparse_linear(checkpoints: Any, dtype: torch.dtype) -> None:
    """They ask for the device of its weight; tests/gpu/test_vllm_features.py compares what adapters add."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.lora import LoRAConfig
    from vllm.lora import layers

    lora = LoRAConfig(max_lora_rank=RANK, max_loras=1, lora_dtype=torch.bfloat16)
    model = configured(checkpoints("6:8", dtype), quantization="slidesparse")
    config = VllmConfig(model_config=model, additional_config=REFERENCE, lora_config=lora)
    layer = loaded_by(config).model.layers[0]
    added = SimpleNamespace(add_lora_linear=add_nothing, add_shrink=add_nothing, add_expand=add_nothing)
    for kind, base in (
        ("RowParallelLinearWithLoRA", layer.mlp.down_proj),
        ("MergedQKVParallelLinearWithLoRA", layer.self_attn.qkv_proj),
    ):
        x = torch.randn(5, base.input_size, generator=torch.Generator().manual_seed(0)).bfloat16()
        before = base(x)[0]
        with set_current_vllm_config(VllmConfig()):
            wrapped = getattr(layers, kind)(base)
        wrapped.create_lora_weights(1, lora)
        wrapped.set_mapping(added)
        assert torch.equal(wrapped(x)[0], before)


@pytest.mark.usefixtures("no_dense_kernels")
def test_a_linear_that_stays_dense_is_left_to_vllm_where_adapters_come(
    checkpoints: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An adapter reads the norm's result too, so nothing would be joined with the linear."""
    from vllm.config import CompilationMode, VllmConfig
    from vllm.config.lora import LoRAConfig

    lora = LoRAConfig(max_lora_rank=RANK, max_loras=1, lora_dtype=torch.bfloat16)
    config = VllmConfig(model_config=configured(checkpoints("6:8")), lora_config=lora)
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE  # as on a GPU; on a CPU vLLM compiles no adapters
    layer = loaded_by(config).model.layers[0]
    assert not hasattr(layer.mlp.down_proj, "slide")
    assert any("down_proj: dense, 6:8; hopper" in line for line in caplog.messages)


@pytest.mark.usefixtures("no_dense_kernels")
def test_a_pruned_output_embedding_keeps_its_weight_for_adapters(
    checkpoints: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What vLLM puts around the logits asks for its type and device."""
    from vllm.config import VllmConfig
    from vllm.config.lora import LoRAConfig

    prune_checkpoint(checkpoints("dense", torch.bfloat16), tmp_path / "s", by_magnitude("6:8", "int8", lm_head=True))
    lora = LoRAConfig(max_lora_rank=RANK, max_loras=1, lora_dtype=torch.bfloat16)
    config = VllmConfig(model_config=configured(tmp_path / "s"), additional_config=REFERENCE, lora_config=lora)
    model = loaded_by(config)
    assert model.lm_head.weight.dtype == torch.int8
    assert hasattr(model.model.layers[0].mlp.down_proj, "slide")
    assert "slidesparse: lm_head: dense, left to vLLM, since LoRA adapters read its weight" in caplog.messages
