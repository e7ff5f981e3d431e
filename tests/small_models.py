"""What small models of all architectures have in common: their sizes, their inputs, and how they are written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import SMALL

TEXT: dict[str, Any] = {**SMALL, "max_position_embeddings": 64}
"""A language model's config under the names that most of them use."""

ENCODER: dict[str, Any] = {**TEXT, "intermediate_size": 128}
GPT = {
    **{"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    **{"bos_token_id": 1, "eos_token_id": 2},
}
T5 = {
    **{"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0},
}
BART = {
    **{"vocab_size": 96, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": 2},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"image_size": 16, "patch_size": 8, "num_channels": 3},
}
WAVES: dict[str, Any] = {
    **{**ENCODER, "conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
    **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
}
MAMBA = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 32}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
ROPE_3D = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
"""Rotary positions in three dimensions, for heads of 16 features."""
LINEAR_ATTENTION = {
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "layer_types": ["linear_attention", "full_attention"],
}
"""A layer of linear attention, then one of the usual kind."""
QWEN_EYES = {
    **{"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 8}
}
"""The vision tower of Qwen's models."""
SSM = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
"""Mixers of Mamba's second version."""
INDICES = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2, "indexer_types": ["full", "shared"]}
"""Attention to few tokens, which the second layer takes from the first."""
MLA = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1},
}

Inputs = Callable[[], dict[str, torch.Tensor]]


def tokens() -> dict[str, torch.Tensor]:
    """Token numbers."""
    return {"input_ids": torch.randint(3, 96, (2, 11), generator=torch.Generator().manual_seed(1))}


def both() -> dict[str, torch.Tensor]:
    """Token numbers for an encoder, and others for its decoder."""
    return {**tokens(), "decoder_input_ids": tokens()["input_ids"].flip(1)}


def image(size: int = 16) -> Inputs:
    """Make pixels."""

    def pixels() -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))}

    return pixels


def captioned() -> dict[str, torch.Tensor]:
    """Pixels and token numbers."""
    return {**tokens(), **image()()}


def pictured() -> dict[str, torch.Tensor]:
    """Pixels, and token numbers that begin with the places of four features of the image."""
    ids = tokens()["input_ids"].clamp(min=6)
    ids[:, :4] = 5
    return {"input_ids": ids, **image()()}


def wave() -> dict[str, torch.Tensor]:
    """Make a sound."""
    return {"input_values": torch.randn(2, 2000, generator=torch.Generator().manual_seed(1))}


def spoken() -> dict[str, torch.Tensor]:
    """A sound for an encoder, and token numbers for its decoder."""
    return {**wave(), "decoder_input_ids": tokens()["input_ids"]}


def spectrum() -> dict[str, torch.Tensor]:
    """A sound's spectrum for an encoder, and token numbers for its decoder."""
    features = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": tokens()["input_ids"]}


def seeing(text: str, vision: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a config of a language model of a type with a vision tower of a type, or of its usual one."""
    tower = VISION if vision is None else {**VISION, "model_type": vision}
    return {"text_config": {**TEXT, "model_type": text}, "vision_config": tower, **more}


@dataclass(frozen=True)
class Architecture:
    """A small model.

    Attributes:
        model: Its class in transformers.
        config: Arguments of its config's class.
        inputs: Makes the arguments of a forward pass.
        refused: What the one-line refusal of ``prune`` says, for those that cannot be treated.
        std: Standard deviation of its weights. The default of 0.02 makes logits too small to compare.
        dtype: The type in which transformers runs it.
        alone: Why plain transformers cannot load the result in INT8.
        not_quantised: What the one-line refusal of ``prune`` to 8 bits says, for those that are pruned in a float type.
    """

    model: str
    config: Mapping[str, Any]
    inputs: Inputs = tokens
    refused: str | None = None
    std: float = 0.15
    dtype: torch.dtype = torch.bfloat16
    alone: str | None = None
    not_quantised: str | None = None


def build(found: Architecture, **changes: Any) -> Any:
    """Make a random model of an architecture in memory."""
    known = getattr(transformers, found.model)
    torch.manual_seed(0)
    return known(known.config_class(**{**found.config, **changes}))


def make(path: Path, found: Architecture, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Write a small random checkpoint of an architecture, and return its model.

    ``save_pretrained`` undoes the renaming of transformers 5, so the files have the names that those on the hub have.
    """
    model = build(found, **changes).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=found.std)
    model.save_pretrained(path)
    return model
