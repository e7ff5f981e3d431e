"""Small mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from checkpoints import by_magnitude
from small_models import EXPERTS, INDICES, LINEAR_ATTENTION, MLA, QWEN_EYES, ROPE_3D, SSM, TEXT, VISION
from small_models import Architecture as A
from torch import nn

from slidesparse.models.packed_mixture import PackedMixture
from slidesparse.offline.prune import prune_checkpoint

FUSED = r"experts that are stored as .* cannot be quantised; .* use --dtype bf16"
"""Why these are refused in 8 bits: vLLM, or some release, reads only one tensor of all experts, without scales."""

INT8 = "transformers 5.23 cannot load INT8 experts"
"""Why transformers alone does not load the others."""

SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
SECOND = {"mlp_layer_types": ["dense", "sparse"]}
LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
}

MOE = {**TEXT, **EXPERTS, "num_experts": 4, "head_dim": 16}
SHARED = {"shared_expert_intermediate_size": 48}


def not_alone(model: str, config: dict[str, Any]) -> A:
    """A mixture that transformers alone cannot load in INT8."""
    return A(model, config, alone=INT8)


MIXTURES: dict[str, A] = {
    # -- mixtures of experts -------------------------------------------------------------------------------------------
    "mixtral": not_alone("MixtralForCausalLM", {**TEXT, "num_local_experts": 4}),
    "qwen2-moe": not_alone("Qwen2MoeForCausalLM", {**TEXT, **EXPERTS, "num_experts": 4}),
    "qwen3-moe": not_alone("Qwen3MoeForCausalLM", MOE),
    "qwen3-next": not_alone("Qwen3NextForCausalLM", {**MOE, **SHARED, **LINEAR_ATTENTION}),
    "qwen3.5-moe": not_alone(
        "Qwen3_5MoeForCausalLM",
        {**MOE, **SHARED, **LINEAR_ATTENTION, "rope_parameters": {**ROPE_3D, "partial_rotary_factor": 1.0}},
    ),
    "deepseek-v2": not_alone("DeepseekV2ForCausalLM", {**TEXT, **EXPERTS, **MLA}),
    "deepseek-v3": not_alone("DeepseekV3ForCausalLM", {**TEXT, **EXPERTS, **MLA}),
    "deepseek-v3.2": not_alone(
        "DeepseekV32ForCausalLM",
        {
            **{**TEXT, **EXPERTS, **MLA, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2},
            **{"layer_types": ["indexed_attention"] * 2, "mlp_layer_types": ["dense", "sparse"]},
        },
    ),
    "glm-5": not_alone("GlmMoeDsaForCausalLM", {**TEXT, **EXPERTS, **MLA, **INDICES}),
    "hy-v4": A("HYV4ForCausalLM", {**TEXT, **EXPERTS, **MLA, **INDICES, "hc_mult": 2}, not_quantised=FUSED),
    "kimi-linear": not_alone(
        "KimiLinearForCausalLM",
        {
            **{**TEXT, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
            **{"v_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4, "num_experts": 4},
            **{"num_experts_per_token": 2, "num_expert_group": 1, "topk_group": 1, "moe_intermediate_size": 48},
            **{"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"]},
        },
    ),
    "hunyuan-moe": not_alone("HunYuanMoEV1ForCausalLM", {**TEXT, "head_dim": 16, "num_experts": 4, "moe_topk": [2, 2]}),
    "glm4-moe-lite": not_alone(
        "Glm4MoeLiteForCausalLM", {**TEXT, **EXPERTS, **MLA, "mlp_layer_types": ["dense", "sparse"]}
    ),
    "glm4-moe": not_alone(
        "Glm4MoeForCausalLM",
        {
            **{**TEXT, **EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1},
            **{"topk_group": 1, "first_k_dense_replace": 1},
        },
    ),
    "granitemoe": A(
        "GraniteMoeForCausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}, not_quantised=FUSED
    ),
    "granitemoehybrid": A(
        "GraniteMoeHybridForCausalLM",
        {
            **{**TEXT, **SSM, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
            "layer_types": ["mamba", "attention"],
        },
        not_quantised=FUSED,
    ),
    "olmoe": not_alone("OlmoeForCausalLM", {**TEXT, "num_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": not_alone("PhimoeForCausalLM", {**TEXT, "num_local_experts": 4}),
    "minimax-m2": not_alone(
        "MiniMaxM2ForCausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    ),
    "jamba": not_alone(
        "JambaForCausalLM",
        {
            **{**TEXT, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
            **{"expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 32},
            **{"use_mamba_kernels": False},
        },
    ),
    "gpt-oss": A(
        "GptOssForCausalLM",
        {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8},
        not_quantised=FUSED,
    ),
    "llama4-text": A(
        "Llama4ForCausalLM",
        {**TEXT, "num_local_experts": 4, "intermediate_size_mlp": 128, "head_dim": 16, "moe_layers": [1]},
    ),
    "llama4": A(
        "Llama4ForConditionalGeneration",
        {
            "text_config": {**TEXT, "num_local_experts": 4, "intermediate_size_mlp": 128, "head_dim": 16},
            "vision_config": {
                **{**VISION, "intermediate_size": 256, "vision_output_dim": 64, "projector_input_dim": 64},
                "projector_output_dim": 64,
            },
        },
    ),
    "gemma4-moe": A(
        "Gemma4ForCausalLM",
        {
            **{**TEXT, "head_dim": 16, "global_head_dim": 16, "vocab_size_per_layer_input": 96},
            **{"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2},
            **{"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 48},
        },
        not_quantised=FUSED,
    ),
    "qwen3-vl-moe": not_alone(
        "Qwen3VLMoeForConditionalGeneration",
        {
            "text_config": {**MOE, "rope_parameters": ROPE_3D},
            "vision_config": {**QWEN_EYES, "deepstack_visual_indexes": [1], "num_position_embeddings": 16},
        },
    ),
    "flint": not_alone("FlintForCausalLM", {**MOE, **SHARED, **SLIDING, "mlp_only_layers": [0]}),
    "kolibri1": not_alone("Kolibri1ForCausalLM", {**MOE, **SHARED, **SLIDING}),
    "beam": not_alone("BeamForCausalLM", {**MOE, **SLIDING, **SECOND, "n_group": 1, "topk_group": 1}),
    "bailing-hybrid": not_alone(
        "BailingHybridForCausalLM",
        {
            **{**MOE, **LATENT, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 1, "layer_group_size": 2, "num_mtp_layers": 0},
        },
    ),
    "dots3-note": not_alone(
        "Dots3NoteForCausalLM",
        {
            **{**TEXT, **EXPERTS, **MLA, **SLIDING, **SECOND, "head_dim": 24, "shared_experts_intermediate_size": 48},
            **{"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 24, "swa_v_head_dim": 16},
            **{"swa_qk_nope_head_dim": 16, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 32},
        },
    ),
    "inkling2": A(
        "Inkling2ForCausalLM",
        {
            **{**TEXT, **EXPERTS, "unpadded_vocab_size": 90, "head_dim": 16, "n_routed_experts": 4},
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "d_rel": 8},
            **{"sliding_window_size": 8, "rel_extent": 16, "layer_types": ["hybrid_sliding", "hybrid"]},
        },
        refused="cannot tell along which dimension the experts .* --ignore",
    ),
    "mistral-large4": not_alone(
        "MistralLarge4ForConditionalGeneration",
        {
            "text_config": {
                **{**TEXT, **EXPERTS, **LATENT, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 8},
                **{"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
            },
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
            "image_token_index": 5,
        },
    ),
    "unlimited-ocr": not_alone(
        "UnlimitedOcrForConditionalGeneration",
        {
            "text_config": {
                **{**TEXT, **EXPERTS, **SECOND, "num_key_value_heads": 4, "head_dim": 16, "n_routed_experts": 4},
                **{"n_shared_experts": 1, "sliding_window": 8},
            },
            "vision_config": {
                "sam_config": {
                    **{"hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
                    **{"image_size": 16, "patch_size": 8, "mlp_dim": 128, "global_attn_indexes": [1]},
                    **{"downsample_channels": [32, 32], "window_size": 2},
                },
                "encoder_config": VISION,
            },
        },
    ),
    "muse-spark": A(
        "MuseSparkForConditionalGeneration",
        {
            "text_config": {
                **{**TEXT, **EXPERTS, **SLIDING, **SECOND, "head_dim": 16, "num_local_experts": 4},
                "moe_hidden_size": 64,
            },
            "vision_config": {
                **{"patch_size": 8, "pos_emb_height": 2, "pos_emb_width": 2, "num_attention_heads": 4},
                **{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 4},
            },
            "audio_config": {
                **{"patch_sizes": [4, 2], "hidden_sizes": [32, 64], "depths": [1, 1], "num_hidden_layers": 2},
                "out_hidden_size": 64,
            },
            **{"out_hidden_size": 64, "projector_hidden_size": 64},
        },
        not_quantised=FUSED,
    ),
}


def packed_mixtures(model: nn.Module) -> list[PackedMixture]:
    """The packed experts of a loaded model, layer by layer."""
    return [module for module in model.modules() if isinstance(module, PackedMixture)]


@torch.no_grad()
def spread_experts(model: nn.Module) -> None:
    """Give the weights of experts a size at which rounding shows."""
    for parameter in model.parameters():
        if parameter.dim() == 3:
            parameter.normal_(std=0.1)


def pruned_mixture(folder: Path, name: str, settings: dict[str, Any], dtype: str, ignore: tuple[str, ...] = ()) -> Path:
    """A class of transformers with such settings at 6:8."""
    known = getattr(transformers, name)
    torch.manual_seed(0)
    model = known(known.config_class(**settings)).to(torch.bfloat16)
    spread_experts(model)
    model.save_pretrained(folder / "dense")
    prune_checkpoint(folder / "dense", folder / "sparse", by_magnitude("6:8", dtype, ignore=ignore))
    return folder / "sparse"
