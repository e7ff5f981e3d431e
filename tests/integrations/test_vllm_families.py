"""Tiny models of many families through vLLM's own loader; tests/gpu/test_vllm_features.py serves them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_families import FAMILIES, SMALL, VISION_MODEL, write_pruned
from vllm_models import REFERENCE, configured, loaded

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM looks at each kind of model in a process of its own, which takes many seconds; and without its kernels."""
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    with torch.library._scoped_library("_C", "FRAGMENT") as library:
        if not hasattr(torch.ops._C, "gelu_tanh_and_mul"):  # Gemma's, looked up when a layer is made
            library.define("gelu_tanh_and_mul(Tensor! out, Tensor input) -> ()")
        yield


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_linear_of_the_decoder_is_packed(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if name == VISION_MODEL and find_spec("torchvision") is None:
        pytest.skip("vLLM's model of this family imports torchvision")
    text_only: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if name == VISION_MODEL else {}
    model = loaded(configured(write_pruned(tmp_path, name), **text_only), REFERENCE)
    packed = [layer for layer, module in model.named_modules() if hasattr(module, "slide")]
    kinds = {layer.rpartition(".")[2] for layer in packed}
    unfused = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    fused = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    assert kinds in (fused, unfused)  # unfused: vLLM runs transformers' own model
    assert len(packed) == len(kinds) * SMALL["num_hidden_layers"]
    (head,) = [line for line in caplog.messages if "layers run sparse" in line]
    kept = sum(sum(layer.slide.operand_bytes.values()) for layer in model.modules() if hasattr(layer, "slide")) / 1e9
    assert head.startswith(
        f"slidesparse: {len(packed)} of {len(packed)} layers run sparse; their weights take {kept:.2f}"
    )
