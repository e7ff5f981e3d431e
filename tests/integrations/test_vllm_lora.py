"""vLLM's LoRA layers around sparse linears; no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import by_magnitude
from vllm_models import REFERENCE, configured, loaded, loaded_by

from slidesparse.offline.prune import prune_checkpoint

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

RANK, TOKENS = 8, 5

Factors = tuple[torch.Tensor, torch.Tensor]


class Adapters:
    """What vLLM's kernels add to an output [M, out], for a batch of tokens that all have adapter 0."""

    def add_lora_linear(
        self, y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, scale: float, slices: tuple[int, ...], **_: Any
    ) -> None:
        self.add_expand(y, [scale * (x.float() @ down[0, 0].float().T) for down in a], b, slices)

    def add_shrink(self, shrunk: torch.Tensor, x: torch.Tensor, a: Any, scale: float) -> None:
        for part, down in zip(shrunk, a, strict=True):
            part += scale * (x.float() @ down[0, 0].float().T)

    def add_expand(self, y: torch.Tensor, shrunk: Any, b: Any, slices: tuple[int, ...], **_: Any) -> None:
        for part, factor, up in zip(y.split(slices, 1), shrunk, b, strict=True):
            part += (factor @ up[0, 0].float().T).bfloat16()


def around(kind: str, base: Any, lora: Any) -> Any:
    """One of vLLM's LoRA layers around a linear."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.lora import layers

    with set_current_vllm_config(VllmConfig()):
        made = getattr(layers, kind)(base)
    made.create_lora_weights(1, lora)
    made.set_mapping(Adapters())
    return made


def factors(out: int, columns: int) -> Factors:
    """An adapter's two matrices: [rank, columns] and [out, rank]."""
    generator = torch.Generator().manual_seed(out)
    a = torch.randn(RANK, columns, generator=generator) / columns**0.5
    b = torch.randn(out, RANK, generator=generator) / RANK**0.5
    return a.bfloat16(), b.bfloat16()


def assert_added(y: torch.Tensor, base: torch.Tensor, x: torch.Tensor, parts: list[Factors]) -> None:
    more = torch.cat([x.float() @ a.float().T @ b.float().T for a, b in parts], 1)
    # The product of an adapter is rounded to bf16 before it is added, and the sum is rounded.
    slack = 2.0**-8 * (2 * more.abs() + base.float().abs()) + 2.0**-12
    assert ((y.float() - base.float() - more).abs() <= slack).all()
    assert more.abs().mean() > 10 * slack.mean()


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
def test_an_adapter_adds_its_product_to_the_sparse_one(checkpoints: Any, dtype: torch.dtype) -> None:
    from vllm.config import VllmConfig
    from vllm.config.lora import LoRAConfig

    lora = LoRAConfig(max_lora_rank=RANK, max_loras=1, lora_dtype=torch.bfloat16)
    settings = {} if dtype == torch.int8 else {"quantization": "slidesparse"}
    model = configured(checkpoints("6:8", dtype), **settings)
    layer = loaded_by(VllmConfig(model_config=model, additional_config=REFERENCE, lora_config=lora)).model.layers[0]
    x, wide = (torch.randn(TOKENS, k, generator=torch.Generator().manual_seed(0)).bfloat16() for k in (256, 512))

    base, down = layer.mlp.down_proj(wide)[0], factors(256, 512)
    wrapped = around("RowParallelLinearWithLoRA", layer.mlp.down_proj, lora)
    wrapped.set_lora(0, *down)
    assert_added(wrapped(wide)[0], base, wide, [down])
    wrapped.reset_lora(0)
    assert torch.equal(wrapped(wide)[0], base)

    base, parts = layer.self_attn.qkv_proj(x)[0], [factors(out, 256) for out in (256, 128, 128)]
    wrapped = around("MergedQKVParallelLinearWithLoRA", layer.self_attn.qkv_proj, lora)
    wrapped.set_lora(0, *(list(matrices) for matrices in zip(*parts, strict=True)))
    assert_added(wrapped(x)[0], base, x, parts)


def test_layers_promise_no_weight_where_no_adapters_come(checkpoints: Any) -> None:
    """What reads a layer's weight must not find packed bytes."""
    layer = loaded(configured(checkpoints("6:8")), REFERENCE).model.layers[0].mlp.down_proj
    assert not any(hasattr(layer, name) for name in ("weight", "weight_packed", "qweight"))


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
