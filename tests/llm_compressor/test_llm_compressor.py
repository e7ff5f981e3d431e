"""Models that llm-compressor made: quantised ones are pruned further, pruned ones are recognised."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import by_magnitude

import slidesparse as ss
from slidesparse.checkpoints.checkpoint import Checkpoint
from slidesparse.offline.inspect import inspect_checkpoint
from slidesparse.offline.prune import prune_checkpoint

pytestmark = pytest.mark.skipif(
    find_spec("llmcompressor") is None and "LLM_COMPRESSOR_MUST_BE_THERE" not in os.environ,
    reason="python tests/llm_compressor/try_llm_compressor.py installs it and runs this, as CI does",
)

SMALL: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64},
}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Words, each with a number; the samples are numbers already, and llm-compressor wants one all the same."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def made(path: Path, recipe: list[Any]) -> Path:
    """A small Llama that llm-compressor has treated by the recipe, with random samples."""
    from datasets import Dataset
    from llmcompressor import oneshot

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).to(torch.bfloat16)
    model.save_pretrained(path / "dense")
    tokenizer().save_pretrained(path / "dense")
    samples = {"input_ids": torch.randint(2, 128, (8, 32)).tolist(), "attention_mask": [[1] * 32] * 8}
    model = transformers.LlamaForCausalLM.from_pretrained(path / "dense", dtype=torch.bfloat16)
    oneshot(
        model=model,
        processor=tokenizer(),
        dataset=Dataset.from_dict(samples),
        recipe=recipe,
        max_seq_length=32,
        num_calibration_samples=8,
        output_dir=str(path / "made"),
        save_compressed=True,
    )
    return path / "made"


def test_a_model_of_smoothquant_and_gptq_is_pruned_with_its_scales(tmp_path: Path) -> None:
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    scheme = {"targets": "Linear", "scheme": "W8A8", "ignore": ["lm_head"]}
    source = made(tmp_path, [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(**scheme)])
    prune_checkpoint(source, tmp_path / "pruned", by_magnitude("6:8"), progress=False)
    before, after = Checkpoint(source), Checkpoint(tmp_path / "pruned")
    for name in after.files:
        ours, theirs = after.tensor(name), before.tensor(name)
        if ours.dtype != torch.int8:
            assert torch.equal(ours, theirs), name  # norms, which SmoothQuant divided, and scales
            continue
        kept = ours != 0
        assert torch.equal(ours[kept], theirs[kept])
        assert kept.view(len(kept), -1, 8).sum(-1).max() <= 6
    model = ss.load(tmp_path / "pruned", device="cpu")
    assert isinstance(model.model.layers[0].mlp.down_proj, ss.SlideLinear)
    assert torch.isfinite(model(torch.arange(2, 20)[None]).logits).all()


def test_a_model_of_its_sparsegpt_is_recognised(tmp_path: Path) -> None:
    from llmcompressor.modifiers.pruning import SparseGPTModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier

    pruning = SparseGPTModifier(sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=["lm_head"])
    source = made(tmp_path, [pruning, QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])])
    layers = inspect_checkpoint(source).layers
    assert len(layers) == 14
    assert {str(layer.tightest) for layer in layers} == {"2:4"}
    prune_checkpoint(source, tmp_path / "marked", by_magnitude("2:4"), progress=False)
    before, after = Checkpoint(source), Checkpoint(tmp_path / "marked")
    assert all(torch.equal(after.tensor(name), before.tensor(name)) for name in after.files)
