"""Small random models of many architectures, written as their hub checkpoints are: under the hub's tensor names.

transformers 5 renames tensors when it loads, and ``save_pretrained`` renames them back, so what a test writes has the
names of the files on the hub. Every model has two layers of 64 features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

TEXT: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 152,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A language model's config under the names that most of them use."""

ENCODER: dict[str, Any] = {**TEXT, "intermediate_size": 128}
GPT = {
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
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
MAMBA = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 32}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
ROPE_3D = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
"""Rotary positions in three dimensions, for heads of 16 features."""
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


def wave() -> dict[str, torch.Tensor]:
    """Make a sound."""
    return {"input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(1))}


def spectrum() -> dict[str, torch.Tensor]:
    """A sound's spectrum for an encoder, and token numbers for its decoder."""
    features = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": tokens()["input_ids"]}


@dataclass(frozen=True)
class Architecture:
    """A small model.

    Attributes:
        model: Its class in transformers.
        config: Arguments of its config's class.
        inputs: Makes the arguments of a forward pass.
        refused: What the one-line refusal of ``prune`` says, for those that cannot be treated.
        named: Whether the 110 models of the first survey have it.
    """

    model: str
    config: Mapping[str, Any]
    inputs: Inputs = tokens
    refused: str | None = None
    named: bool = True


A = Architecture
MIXTURE = "mixture"

ARCHITECTURES: dict[str, Architecture] = {
    # -- decoders ------------------------------------------------------------------------------------------------
    "llama": A("LlamaForCausalLM", TEXT),
    "llama-tied": A("LlamaForCausalLM", {**TEXT, "tie_word_embeddings": True}),
    "qwen2": A("Qwen2ForCausalLM", TEXT),
    "qwen3": A("Qwen3ForCausalLM", {**TEXT, "head_dim": 16}),
    "qwen3-tied": A("Qwen3ForCausalLM", {**TEXT, "head_dim": 16, "tie_word_embeddings": True}),
    "mistral": A("MistralForCausalLM", TEXT),
    "ministral": A("MinistralForCausalLM", {**TEXT, "head_dim": 16}),
    "ministral3": A("Ministral3ForCausalLM", TEXT),
    "gemma": A("GemmaForCausalLM", {**TEXT, "head_dim": 16}),
    "gemma2": A("Gemma2ForCausalLM", {**TEXT, "head_dim": 16}),
    "gemma3-text": A("Gemma3ForCausalLM", {**TEXT, "head_dim": 16}),
    "gemma3n-text": A(
        "Gemma3nForCausalLM",
        {
            **{**TEXT, "head_dim": 16, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 32},
            **{"laurel_rank": 32, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2},
            **{"activation_sparsity_pattern": [0.0, 0.0]},
        },
    ),
    "gemma4-text": A(
        "Gemma4ForCausalLM",
        {
            **{**TEXT, "head_dim": 16, "global_head_dim": 16, "vocab_size_per_layer_input": 96},
            **{"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 2},
        },
    ),
    "vaultgemma": A("VaultGemmaForCausalLM", {**TEXT, "head_dim": 16}),
    "phi": A("PhiForCausalLM", TEXT),
    "phi3": A("Phi3ForCausalLM", TEXT),
    "opt": A("OPTForCausalLM", {**TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "gpt-j": A("GPTJForCausalLM", {**GPT, "rotary_dim": 8}),
    "gpt-neo": A("GPTNeoForCausalLM", {**TEXT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}),
    "codegen": A("CodeGenForCausalLM", {**GPT, "rotary_dim": 8, "n_ctx": 64}),
    "gpt-bigcode": A("GPTBigCodeForCausalLM", GPT),
    "bloom": A("BloomForCausalLM", {**TEXT, "n_layer": 2, "n_head": 4}),
    "mpt": A("MptForCausalLM", {"vocab_size": 96, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "starcoder2": A("Starcoder2ForCausalLM", TEXT),
    "stablelm": A("StableLmForCausalLM", TEXT),
    "olmo2": A("Olmo2ForCausalLM", TEXT),
    "olmo3": A("Olmo3ForCausalLM", TEXT),
    "cohere": A("CohereForCausalLM", TEXT),
    "cohere2": A("Cohere2ForCausalLM", TEXT),
    "granite": A("GraniteForCausalLM", TEXT),
    "smollm3": A("SmolLM3ForCausalLM", TEXT),
    "glm": A("GlmForCausalLM", {**TEXT, "head_dim": 16}),
    "glm4": A("Glm4ForCausalLM", {**TEXT, "head_dim": 16}),
    "exaone4": A("Exaone4ForCausalLM", TEXT),
    "nemotron": A("NemotronForCausalLM", TEXT),
    "seed-oss": A("SeedOssForCausalLM", {**TEXT, "head_dim": 16}),
    "ernie4.5": A("Ernie4_5ForCausalLM", {**TEXT, "head_dim": 16}),
    "hunyuan-dense": A("HunYuanDenseV1ForCausalLM", {**TEXT, "head_dim": 16}),
    "apertus": A("ApertusForCausalLM", TEXT),
    "arcee": A("ArceeForCausalLM", TEXT),
    "gpt-neox": A("GPTNeoXForCausalLM", TEXT),
    "falcon": A("FalconForCausalLM", TEXT),
    "gpt2": A("GPT2LMHeadModel", GPT, refused="Conv1D"),
    "xlnet": A("XLNetLMHeadModel", {"vocab_size": 96, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128}),
    # -- state spaces, and mixed with attention --------------------------------------------------------------------
    "mamba": A("MambaForCausalLM", MAMBA),
    "falcon-mamba": A("FalconMambaForCausalLM", MAMBA),
    "mamba2": A("Mamba2ForCausalLM", {**MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
    "falcon-h1": A(
        "FalconH1ForCausalLM",
        {**TEXT, "mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8},
    ),
    "bamba": A(
        "BambaForCausalLM",
        {
            **{**TEXT, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8},
            **{"attn_layer_indices": [1]},
        },
    ),
    "zamba2": A(
        "Zamba2ForCausalLM",
        {
            **{**TEXT, "num_key_value_heads": 4, "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 16},
            **{"chunk_size": 8, "hybrid_layer_ids": [1], "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1},
            **{"mamba_ngroups": 1, "attention_hidden_size": 128, "attention_head_dim": 32},
        },
    ),
    "lfm2": A("Lfm2ForCausalLM", {**TEXT, "block_ff_dim": 128, "layer_types": ["conv", "full_attention"]}),
    "nemotron-h": A(
        "NemotronHForCausalLM",
        {
            **{**TEXT, "head_dim": 16, "layers_block_type": ["mamba", "attention", "mlp"], "num_hidden_layers": 3},
            **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 8, "n_groups": 1},
        },
    ),
    "qwen3.5": A(
        "Qwen3_5ForCausalLM",
        {
            **{**TEXT, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2},
            **{"linear_num_value_heads": 4, "rope_parameters": {**ROPE_3D, "partial_rotary_factor": 1.0}},
        },
    ),
    "recurrentgemma": A(
        "RecurrentGemmaForCausalLM",
        {**TEXT, "lru_width": 64, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
    ),
    "rwkv": A(
        "RwkvForCausalLM",
        {
            **{"vocab_size": 96, "hidden_size": 64, "attention_hidden_size": 64, "intermediate_size": 128},
            **{"num_hidden_layers": 2, "context_length": 64},
        },
    ),
    # -- mixtures of experts ---------------------------------------------------------------------------------------
    "mixtral": A("MixtralForCausalLM", {**TEXT, "num_local_experts": 4}, refused=MIXTURE),
    "qwen2-moe": A("Qwen2MoeForCausalLM", {**TEXT, **EXPERTS, "num_experts": 4}, refused=MIXTURE),
    "qwen3-moe": A("Qwen3MoeForCausalLM", {**TEXT, **EXPERTS, "num_experts": 4, "head_dim": 16}, refused=MIXTURE),
    "qwen3-next": A(
        "Qwen3NextForCausalLM",
        {
            **{**TEXT, **EXPERTS, "num_experts": 4, "head_dim": 16, "shared_expert_intermediate_size": 48},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2},
            **{"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
        },
        refused=MIXTURE,
    ),
    "qwen3.5-moe": A(
        "Qwen3_5MoeForCausalLM",
        {
            **{**TEXT, **EXPERTS, "num_experts": 4, "head_dim": 16, "shared_expert_intermediate_size": 48},
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2},
            **{"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
            **{"rope_parameters": {**ROPE_3D, "partial_rotary_factor": 1.0}},
        },
        refused=MIXTURE,
    ),
    "deepseek-v2": A("DeepseekV2ForCausalLM", {**TEXT, **EXPERTS, **MLA}, refused=MIXTURE),
    "deepseek-v3": A("DeepseekV3ForCausalLM", {**TEXT, **EXPERTS, **MLA}, refused=MIXTURE),
    "glm4-moe": A(
        "Glm4MoeForCausalLM",
        {
            **{**TEXT, **EXPERTS, "head_dim": 16, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1},
            **{"topk_group": 1, "first_k_dense_replace": 1},
        },
        refused=MIXTURE,
    ),
    "granitemoe": A(
        "GraniteMoeForCausalLM", {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2}, refused=MIXTURE
    ),
    "granitemoehybrid": A(
        "GraniteMoeHybridForCausalLM",
        {
            **{**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
            **{"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8},
            **{"mamba_chunk_size": 8},
        },
        refused=MIXTURE,
    ),
    "olmoe": A("OlmoeForCausalLM", {**TEXT, "num_experts": 4, "num_experts_per_tok": 2}, refused=MIXTURE),
    "phimoe": A("PhimoeForCausalLM", {**TEXT, "num_local_experts": 4}, refused=MIXTURE),
    "minimax-m2": A(
        "MiniMaxM2ForCausalLM",
        {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        refused=MIXTURE,
    ),
    "jamba": A(
        "JambaForCausalLM",
        {
            **{**TEXT, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
            **{"expert_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 32},
            **{"use_mamba_kernels": False},
        },
        refused=MIXTURE,
    ),
    "gpt-oss": A(
        "GptOssForCausalLM",
        {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8},
        refused=MIXTURE,
    ),
    "llama4-text": A(
        "Llama4ForCausalLM",
        {**TEXT, "num_local_experts": 4, "intermediate_size_mlp": 128, "head_dim": 16, "moe_layers": [1]},
        refused=MIXTURE,
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
        refused=MIXTURE,
    ),
    # -- encoders --------------------------------------------------------------------------------------------------
    "bert": A("BertModel", ENCODER),
    "bert-mlm": A("BertForMaskedLM", ENCODER),
    "bert-classifier": A("BertForSequenceClassification", ENCODER),
    "roberta": A("RobertaForMaskedLM", ENCODER),
    "xlm-roberta": A("XLMRobertaForMaskedLM", ENCODER),
    "modernbert": A("ModernBertForMaskedLM", {**ENCODER, "cls_token_id": 1, "sep_token_id": 2}),
    "deberta-v2": A("DebertaV2ForMaskedLM", {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "distilbert": A(
        "DistilBertForMaskedLM", {"vocab_size": 96, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}
    ),
    "albert": A("AlbertForMaskedLM", {**ENCODER, "embedding_size": 32}),
    "electra": A("ElectraForMaskedLM", {**ENCODER, "embedding_size": 32}),
    "mpnet": A("MPNetForMaskedLM", ENCODER),
    # -- encoders and decoders -------------------------------------------------------------------------------------
    "bart": A("BartForConditionalGeneration", BART, both),
    "marian": A("MarianMTModel", BART, both),
    "t5": A("T5ForConditionalGeneration", T5, both),
    "t5-v1.1": A(
        "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, both
    ),
    "t5-encoder": A("T5EncoderModel", T5),
    "mt5": A("MT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, both),
    "whisper": A(
        "WhisperForConditionalGeneration",
        {**BART, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64},
        spectrum,
    ),
    # -- images and sound ------------------------------------------------------------------------------------------
    "vit": A("ViTForImageClassification", VISION, image()),
    "deit": A("DeiTForImageClassification", VISION, image()),
    "dinov2": A("Dinov2Model", {**VISION, "mlp_ratio": 2}, image()),
    "swin": A(
        "SwinForImageClassification",
        {
            **{"image_size": 16, "patch_size": 4, "num_channels": 3, "embed_dim": 32, "depths": [1, 1]},
            **{"num_heads": [2, 4], "window_size": 2},
        },
        image(),
    ),
    "clip": A("CLIPModel", {"text_config": ENCODER, "vision_config": VISION, "projection_dim": 64}, captioned),
    "siglip": A("SiglipModel", {"text_config": ENCODER, "vision_config": VISION}, captioned),
    "wav2vec2": A(
        "Wav2Vec2ForCTC",
        {
            **{**ENCODER, "conv_dim": [32, 32], "conv_stride": [5, 2], "conv_kernel": [10, 3]},
            **{"num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4},
        },
        wave,
    ),
    # -- images and text -------------------------------------------------------------------------------------------
    "qwen2-vl": A(
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": ROPE_3D},
            "vision_config": {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "patch_size": 8},
        },
    ),
    "qwen2.5-vl": A(
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "rope_parameters": ROPE_3D},
            "vision_config": {
                **{"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 128, "num_heads": 4},
                **{"patch_size": 8, "fullatt_block_indexes": [1]},
            },
        },
    ),
    "qwen3-vl": A(
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "head_dim": 16, "rope_parameters": ROPE_3D},
            "vision_config": {
                **{"depth": 2, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 128, "num_heads": 4},
                **{"patch_size": 8, "deepstack_visual_indexes": [1], "num_position_embeddings": 16},
            },
        },
    ),
    "gemma3": A(
        "Gemma3ForConditionalGeneration",
        {"text_config": {**TEXT, "head_dim": 16}, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "llava": A(
        "LlavaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
        },
    ),
    "llava-onevision": A(
        "LlavaOnevisionForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**VISION, "model_type": "siglip_vision_model"},
        },
    ),
    "internvl": A(
        "InternVLForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [8, 8]},
        },
    ),
    "mistral3": A(
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16},
        },
    ),
    "mllama": A(
        "MllamaForConditionalGeneration",
        {
            "text_config": {**TEXT, "cross_attention_layers": [1], "rope_parameters": {"rope_type": "default"}},
            "vision_config": {
                **{**VISION, "num_global_layers": 1, "attention_heads": 4, "intermediate_layers_indices": [0]},
                **{"vision_output_dim": 128, "max_num_tiles": 1, "supported_aspect_ratios": [[1, 1]]},
            },
        },
    ),
    "paligemma": A(
        "PaliGemmaForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "gemma", "head_dim": 16}, "vision_config": VISION, "projection_dim": 64},
    ),
    "idefics3": A(
        "Idefics3ForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION},
    ),
    "smolvlm": A(
        "SmolVLMForConditionalGeneration",
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION},
    ),
    "phi4-multimodal": A(
        "Phi4MultimodalForCausalLM",
        {
            **TEXT,
            "vision_config": {**VISION, "image_size": 32, "crop_size": 32},
            "audio_config": {
                **{"hidden_size": 64, "intermediate_size": 64, "num_blocks": 2, "num_attention_heads": 4},
                **{"ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64, "nemo_conv_channels": 32},
            },
        },
    ),
}


def make(path: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Write a small random checkpoint of an architecture, and return its model."""
    found = ARCHITECTURES[name]
    known = getattr(transformers, found.model)
    torch.manual_seed(0)
    model = known(known.config_class(**found.config)).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:  # the default std of 0.02 makes logits too small to compare
                parameter.normal_(std=0.15)
    model.save_pretrained(path)
    return model
