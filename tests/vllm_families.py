"""Tiny random models of the families that vLLM serves, pruned by ``slidesparse prune``.

transformers makes and writes them, so the tensors have the names that a downloaded model's have. Shapes are such that
every kernel takes them: heads of 64 columns, and sizes that are multiples of 64.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from checkpoints import by_magnitude
from safetensors.torch import load_file, save_file

from slidesparse.offline.prune import prune_checkpoint
from slidesparse.offline.prune_options import PruneRounding

SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

VISION = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 256} | {
    "fullatt_block_indexes": [1],
    "patch_size": 14,
}
MARKS = {"image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 13}


VISION_MODEL = "qwen2.5-vl"
DRAFTED = "ernie4.5"
"""Its checkpoints hold a layer more, with which vLLM foresees a token (multi-token prediction)."""


class Family(NamedTuple):
    """A family of models.

    Attributes:
        model: Class of transformers.
        config: Class of its configuration.
        changes: Entries of the configuration besides :data:`SMALL`.
    """

    model: str
    config: str
    changes: Mapping[str, Any] = {}


FAMILIES = {
    "llama3": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config"),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config"),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {"sliding_window": None}),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config"),  # q, k, v and gate, up are one tensor each
    "glm4": Family("Glm4ForCausalLM", "Glm4Config", {"partial_rotary_factor": 0.5}),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config"),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {"tie_word_embeddings": True, "sliding_window": 64, "query_pre_attn_scalar": 64}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    DRAFTED: Family(
        "Ernie4_5_MoeForCausalLM",
        "Ernie4_5_MoeConfig",
        {"moe_layer_start_index": 2, "num_nextn_predict_layers": 1},  # so no layer is a mixture
    ),
    VISION_MODEL: Family("Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig"),
}

EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_intermediate_size": 128, "norm_topk_prob": True}
MIXTURES = {
    "one expert a token": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS | {"num_experts_per_tok": 1}),
    "two experts a token": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", EXPERTS | {"num_experts_per_tok": 2}),
}


DEEP = {"deep llama3": FAMILIES["llama3"]._replace(changes={**FAMILIES["llama3"].changes, "num_hidden_layers": 4})}
"""A draft of EAGLE-3 reads from three of its layers."""


def write_model(folder: Path, name: str, seed: int = 0, **shapes: int) -> None:
    """Write a random model of a family or mixture in bfloat16, whose activations keep their size over layers."""
    family = (FAMILIES | MIXTURES | DEEP)[name]
    made = getattr(transformers, family.config)
    if name == VISION_MODEL:
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
        config = made(text_config=SMALL | {"rope_parameters": rope}, vision_config=VISION, **MARKS)
    else:
        config = made(**SMALL | dict(family.changes) | shapes)
    torch.manual_seed(seed)
    model = getattr(transformers, family.model)(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:  # experts of a layer share a tensor
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
        model.get_input_embeddings().weight.normal_()
        if config.tie_word_embeddings:
            _talk_of_more_than_the_last_token(model)
    model.save_pretrained(folder)
    if name == DRAFTED:
        _add_draft(folder / "model.safetensors")


def _talk_of_more_than_the_last_token(model: torch.nn.Module) -> None:
    """Let the layers of a Gemma outweigh the embedding, which as the head too would answer with its own token.

    Gemma's norms multiply by one more than their weight. The last one brings logits back to those of other families.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            parameter.fill_(400.0)
        elif name == "model.norm.weight":
            parameter.fill_(-1 + parameter.numel() ** -0.5)


def _add_draft(file: Path) -> None:
    """Add the tensors that foresee a token: as the first layer alone would, so that some of what they say is right."""
    tensors = load_file(file)
    first = "model.layers.0."
    copied = {name: tensors[name].clone() for name in tensors if name.startswith(first)}
    draft = {name.replace(first, "model.mtp_block.0."): tensor for name, tensor in copied.items()}
    identity = torch.eye(SMALL["hidden_size"], dtype=torch.bfloat16)
    for which in ("emb", "hidden"):
        draft[f"model.mtp_{which}_norm.0.weight"] = torch.ones_like(identity[0])
    draft["model.mtp_linear_proj.0.weight"] = torch.cat([identity, torch.zeros_like(identity)], dim=1)
    save_file(tensors | draft, file, {"format": "pt"})


def write_pruned(
    folder: Path,
    name: str,
    pattern: str = "6:8",
    dtype: str = "int8",
    seed: int = 0,
    rounding: PruneRounding = "absmax",
    **shapes: int,
) -> Path:
    """Write a random model of a family and prune its language part into ``folder/pruned``."""
    source, pruned = folder / "source", folder / "pruned"
    write_model(source, name, seed, **shapes)
    prune_checkpoint(source, pruned, by_magnitude(pattern, dtype, rounding=rounding), progress=False)
    return pruned
