"""Small models that see or hear, alone or together with a language model."""

from __future__ import annotations

from small_models import (
    ENCODER,
    LINEAR_ATTENTION,
    QWEN_EYES,
    ROPE_3D,
    TEXT,
    VISION,
    WAVES,
    captioned,
    image,
    pictured,
    seeing,
    wave,
)
from small_models import Architecture as A

CUT = "transformers 5.23 loads no compressed-tensors checkpoint of a model of which it may cut a weight in two"

QWEN_WITH_EYES = {
    "text_config": {
        **{**TEXT, **LINEAR_ATTENTION, "model_type": "qwen3_5_text", "head_dim": 16},
        "rope_parameters": {**ROPE_3D, "partial_rotary_factor": 1.0},
    },
    "vision_config": {**VISION, "insert_layer_id": 0},
}

MULTIMODAL: dict[str, A] = {
    # -- images and sound ----------------------------------------------------------------------------------------------
    "vit": A("ViTForImageClassification", VISION, image()),
    "deit": A("DeiTForImageClassification", VISION, image()),
    "dinov2": A("Dinov2Model", {**VISION, "mlp_ratio": 2}, image(), alone=CUT),
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
    "wav2vec2": A("Wav2Vec2ForCTC", WAVES, wave),
    "hubert": A("HubertForCTC", WAVES, wave),
    "wavlm": A("WavLMForCTC", WAVES, wave),
    "beit": A("BeitForImageClassification", VISION, image()),
    "dinov3-vit": A("DINOv3ViTModel", VISION, image()),
    # -- images and text -----------------------------------------------------------------------------------------------
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
            "vision_config": {**QWEN_EYES, "fullatt_block_indexes": [1]},
        },
    ),
    "qwen3-vl": A(
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**TEXT, "head_dim": 16, "rope_parameters": ROPE_3D},
            "vision_config": {**QWEN_EYES, "deepstack_visual_indexes": [1], "num_position_embeddings": 16},
        },
    ),
    "gemma3": A(
        "Gemma3ForConditionalGeneration",
        {"text_config": {**TEXT, "head_dim": 16}, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "llava": A("LlavaForConditionalGeneration", seeing("llama", "clip_vision_model")),
    "llava-onevision": A("LlavaOnevisionForConditionalGeneration", seeing("qwen2", "siglip_vision_model")),
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
    "idefics3": A("Idefics3ForConditionalGeneration", seeing("llama")),
    "smolvlm": A("SmolVLMForConditionalGeneration", seeing("llama")),
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
    "llava-next": A("LlavaNextForConditionalGeneration", seeing("llama", "clip_vision_model")),
    "vipllava": A(
        "VipLlavaForConditionalGeneration",
        seeing("llama", "clip_vision_model", vision_feature_layers=[-1, -2]),
    ),
    "aya-vision": A("AyaVisionForConditionalGeneration", seeing("cohere2", "siglip_vision_model")),
    "cohere2-vision": A("Cohere2VisionForConditionalGeneration", seeing("cohere2", "siglip_vision_model")),
    "got-ocr2": A(
        "GotOcr2ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {
                **{"hidden_size": 64, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
                **{"image_size": 64, "patch_size": 16, "mlp_dim": 128, "window_size": 2, "global_attn_indexes": [1]},
            },
        },
    ),
    "glm4v": A(
        "Glm4vForConditionalGeneration",
        {
            "text_config": {**TEXT, "head_dim": 16, "rope_parameters": {**ROPE_3D, "partial_rotary_factor": 1.0}},
            "vision_config": {**QWEN_EYES, "image_size": 16},
        },
    ),
    "blip2": A(
        "Blip2ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "opt", "ffn_dim": 128, "word_embed_proj_dim": 64},
            "vision_config": VISION,
            "qformer_config": {**ENCODER, "encoder_hidden_size": 64},
            "num_query_tokens": 4,
            "image_token_index": 5,
        },
        pictured,
    ),
    "qwen2-audio": A(
        "Qwen2AudioForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "audio_config": {
                **{"num_mel_bins": 8, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4},
                **{"encoder_ffn_dim": 128, "max_source_positions": 10},
            },
        },
    ),
    "lfm3-vl": A(
        "Lfm3VlForConditionalGeneration",
        {
            "text_config": {
                **{**TEXT, "model_type": "lfm3", "head_dim": 16, "sliding_window": 8},
                "layer_types": ["conv", "sliding_attention"],
            },
            "vision_config": {
                **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
                **{"num_key_value_heads": 2, "patch_size": 8, "layer_types": ["conv", "full_attention"]},
            },
            "projector_hidden_size": 64,
        },
    ),
    "molmo2": A(
        "Molmo2ForConditionalGeneration",
        {
            "text_config": {**TEXT, "head_dim": 16, "additional_vocab_size": 8},
            "vision_config": {**VISION, "num_key_value_heads": 4, "head_dim": 16, "image_size": [16, 16]},
            "adapter_config": {
                **{"vision_feature_layer": [-1, 0], "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16},
                **{"num_key_value_heads": 4, "intermediate_size": 128, "text_hidden_size": 64},
            },
        },
        alone=CUT,
    ),
    "granite-docling": A(
        "GraniteDoclingForConditionalGeneration",
        {
            "text_config": TEXT,
            "vision_config": {**{**VISION, "out_hidden_size": 64, "scale_factor": 2, "deepstack_visual_indexes": [1]}},
        },
    ),
    "hyperclovax-vision": A(
        "HyperCLOVAXVisionV2ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "hyperclovax"},
            "vision_config": {**QWEN_EYES, "fullatt_block_indexes": [1]},
        },
    ),
    "minicpm-ocr": A("MiniCPMOcrForConditionalGeneration", {**QWEN_WITH_EYES, "insert_layer_id": 0}),
    "minicpm-v4.7": A("MiniCPMV4_7ForConditionalGeneration", {**QWEN_WITH_EYES, "insert_layer_id": 0}),
    "ultravbert": A(
        "UltraVBertForMaskedLM",
        {
            "text_config": {**ENCODER, "model_type": "ultrabert", "prediction_head_size": 64, "sliding_window": 8},
            "vision_config": {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False},
            "pixel_shuffle_factor": 2,
        },
    ),
    "moss-transcribe": A(
        "MossTranscribeDiarizeForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 16},
            "audio_config": {
                **{"num_mel_bins": 8, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
                **{"intermediate_size": 128, "max_source_positions": 20},
            },
        },
    ),
}
