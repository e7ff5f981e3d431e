"""Small checkpoints of the supported architectures, made with transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 152,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""152 is no multiple of 6 or 10, so down_proj pads its last group at 4:6 and 8:10."""

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {}),
    "bitnet": ("BitNet", {"tie_word_embeddings": True}),
}


def make_checkpoint(
    path: Path, name: str = "llama", dtype: torch.dtype = torch.bfloat16, shard_size: str = "5GB", **changes: Any
) -> transformers.PreTrainedModel:
    """Write a small random checkpoint of that architecture and return its model."""
    family, extra = ARCHITECTURES[name]
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **extra, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # the default std of 0.02 makes logits too small to compare
                parameter.normal_(std=0.15)
    if name == "bitnet":
        model.config.quantization_config = {
            "quant_method": "bitnet",
            "linear_class": "autobitlinear",
            "quantization_mode": "online",
        }
    model.save_pretrained(path, max_shard_size=shard_size)
    (path / "tokenizer.json").write_text('{"made": "for the test"}')
    return model


def tokens(vocabulary: int = SMALL["vocab_size"]) -> torch.Tensor:
    """A batch of token ids."""
    return torch.randint(3, vocabulary, (2, 11), generator=torch.Generator().manual_seed(1))
