"""A model with a draft that reads its hidden states: vLLM loads both, and decides what they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import by_magnitude
from vllm_families import DRAFTED, SMALL, write_pruned
from vllm_models import REFERENCE, configured, loaded_by

from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.models.unused_linears import entries_for_unused
from slidesparse.offline.prune import prune_checkpoint
from slidesparse_bench.engine.eagle_head import write_eagle_head

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

HIDDEN, WORDS, DRAFT_WORDS = 256, 512, 128
LINEARS = {"self_attn.qkv_proj": ("q", "k", "v"), "self_attn.o_proj": ("o",)} | {
    "mlp.gate_up_proj": ("gate", "up"),
    "mlp.down_proj": ("down",),
}
"""Linears of a layer in vLLM -> the parts of which their checkpoints have a tensor each."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer whose output embedding is pruned too."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, **sizes
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "dense")
    prune_checkpoint(folder / "dense", folder / "sparse", by_magnitude("6:8", "int8", lm_head=True))
    return folder / "sparse"


@pytest.fixture(scope="module")
def draft(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 draft with an output embedding of its own, for a part of the words."""
    folder = tmp_path_factory.mktemp("draft")
    write_eagle_head(folder / "head", json.loads((model / "config.json").read_text()), torch.device("cpu"), DRAFT_WORDS)
    return folder / "head"


@pytest.mark.usefixtures("no_dense_kernels")
@pytest.mark.parametrize("second_runner", [True, False])
def test_an_output_embedding_that_vllm_compares_with_a_drafts_stays_dense(
    model: Path, draft: Path, second_runner: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The start ended after loading: 'ParallelLMHead' object has no attribute 'weight'."""
    config = speculating(model, monkeypatch, method="eagle3", model=str(draft), num_speculative_tokens=2)
    monkeypatch.setattr(type(config), "use_v2_model_runner", second_runner)
    served = loaded_by(config)
    told = "slidesparse: lm_head: dense, left to vLLM, which compares its weight with a draft's"
    assert (told in caplog.messages) == second_runner
    assert hasattr(served.lm_head, "slide") != second_runner
    assert hasattr(served.model.layers[0].mlp.down_proj, "slide")
    if second_runner:
        assert draft_of(served, config).lm_head.weight.shape == (DRAFT_WORDS, HIDDEN)


@pytest.mark.usefixtures("no_dense_kernels")
@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_a_draft_in_the_models_own_checkpoint_is_loaded_as_it_is(
    tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multi-token prediction: vLLM builds the draft by the model's configuration, as a layer after the last one."""
    path = write_pruned(tmp_path, DRAFTED, dtype=dtype)
    config = speculating(path, monkeypatch, method="mtp", num_speculative_tokens=1)
    served = loaded_by(config)
    block = draft_of(served, config).model.layers[str(SMALL["num_hidden_layers"])].mtp_block
    assert sum(hasattr(module, "slide") for module in served.modules()) == len(LINEARS) * SMALL["num_hidden_layers"]
    stored = Checkpoint(path)
    for name, parts in LINEARS.items():
        parent = f"model.mtp_block.0.{name.partition('.')[0]}"
        weight = torch.cat([stored.tensor(f"{parent}.{part}_proj.weight") for part in parts])
        assert torch.equal(block.get_submodule(name).weight, weight)


def test_mimos_drafts_have_the_names_that_vllm_gives_them() -> None:
    names = ["model.mtp_layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"]
    assert entries_for_unused({f"{names[0]}.weight": (96, 64)}, layers=1) == names


def speculating(path: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> Any:
    """The configuration of a model that is served with a draft."""
    from vllm.config import ParallelConfig, SpeculativeConfig, VllmConfig
    from vllm.model_executor.models import registry

    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())  # many seconds for each kind of model
    target = configured(path, quantization="slidesparse")
    both: Any = {"target_model_config": target, "target_parallel_config": ParallelConfig()}
    speculation = SpeculativeConfig(**how, **both)
    return VllmConfig(model_config=target, additional_config=REFERENCE, speculative_config=speculation)


def draft_of(served: Any, config: Any) -> Any:
    """The draft that vLLM loads after its model."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu.spec_decode.eagle.utils import load_eagle_model

    with set_current_vllm_config(config):
        return load_eagle_model(served, config)
