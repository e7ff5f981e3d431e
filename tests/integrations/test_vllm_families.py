"""Tiny models of many families through vLLM's own loader; tests/gpu/test_vllm_features.py serves them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from checkpoints import by_magnitude
from vllm_families import FAMILIES, SMALL, VISION_MODEL, write_pruned
from vllm_models import REFERENCE, configured, loaded

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.integrations.vllm.model_state import ModelState
from slidesparse.integrations.vllm.options import Options
from slidesparse.offline.prune import prune_checkpoint

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


@pytest.mark.parametrize(
    ("free", "told", "fallback"), [(75, "dense", "fastest"), (74, "dense", "dense"), (75, "none", "none")]
)
def test_dense_copies_of_sixteen_bits_are_kept_where_memory_is_mostly_free(
    monkeypatch: pytest.MonkeyPatch, free: int, told: Any, fallback: str
) -> None:
    asked = iter([(free, 100), (0, 100)])  # the second layer finds copies of the first
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: next(asked))
    state, on_gpu = ModelState(Options(fallback=told)), SimpleNamespace(device=torch.device("cuda", 0))
    for dtype, found in ((torch.int8, told), (torch.bfloat16, fallback), (torch.bfloat16, fallback)):
        on_gpu.dtype = dtype
        assert state.chooser_of(on_gpu).fallback == found  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_process")
def test_what_vllm_holds_in_floats_is_left_to_it(tmp_path: Path) -> None:
    """Its mixer of Mamba's first version and its output embedding read no scales: Jamba in 8 bits ended the start."""
    config = transformers.JambaConfig(
        **{"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 16, "mamba_dt_rank": 32},
        **{"use_mamba_kernels": False, "tie_word_embeddings": False, "max_position_embeddings": 64},
    )
    transformers.JambaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    prune_checkpoint(tmp_path / "dense", tmp_path / "sparse", by_magnitude("6:8", "int8"))
    model = loaded(configured(tmp_path / "sparse"), REFERENCE)
    packed = {name.rpartition(".")[2] for name, module in model.named_modules() if hasattr(module, "slide")}
    assert packed == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
    for name in ("model.layers.0.mamba.in_proj.weight", "lm_head.weight"):
        assert bool((model.get_parameter(name) == Checkpoint(tmp_path / "sparse").tensor(name)).all())
