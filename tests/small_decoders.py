"""Small models that write text: transformers, state spaces, and both mixed."""

from __future__ import annotations

import torch
from small_models import ENCODER, GPT, MAMBA, ROPE_3D, TEXT
from small_models import Architecture as A

FLOAT_MIXERS = "first Mamba mixers, which vLLM holds in floats; prune it with --dtype bf16"
"""Why these are refused in 8 bits: nothing else is in them."""

DECODERS: dict[str, A] = {
    # -- decoders ------------------------------------------------------------------------------------------------------
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
    "olmo-hybrid": A(
        "OlmoHybridForCausalLM",
        {
            **{**TEXT, "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16},
            **{"linear_value_head_dim": 16, "linear_num_key_heads": 4, "linear_num_value_heads": 4},
        },
        alone="transformers 5.23 joins its convolutions, and finds none in INT8 checkpoints",
    ),
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
    "gpt2": A("GPT2LMHeadModel", GPT, refused="Conv1D, whose weight is stored"),
    "xlnet": A(
        "XLNetLMHeadModel",
        {"vocab_size": 96, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
        dtype=torch.float32,
    ),
    "olmo": A("OlmoForCausalLM", TEXT),
    "helium": A("HeliumForCausalLM", {**TEXT, "head_dim": 16}),
    "diffllama": A("DiffLlamaForCausalLM", {**TEXT, "head_dim": 16}),
    "persimmon": A("PersimmonForCausalLM", TEXT),
    "xglm": A(
        "XGLMForCausalLM",
        {
            **{"vocab_size": 96, "d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4},
            **{"max_position_embeddings": 64},
        },
    ),
    "biogpt": A("BioGptForCausalLM", TEXT),
    "cwm": A("CwmForCausalLM", {**TEXT, "head_dim": 16}),
    "nanochat": A("NanoChatForCausalLM", {**TEXT, "head_dim": 16}),
    "modernbert-decoder": A("ModernBertDecoderForCausalLM", {**ENCODER, "cls_token_id": 1, "sep_token_id": 2}),
    "gpt-neox-japanese": A("GPTNeoXJapaneseForCausalLM", {**TEXT, "intermediate_multiple_size": 2}),
    # -- state spaces, and mixed with attention ------------------------------------------------------------------------
    "mamba": A("MambaForCausalLM", MAMBA, not_quantised=FLOAT_MIXERS),
    "falcon-mamba": A("FalconMambaForCausalLM", MAMBA, not_quantised=FLOAT_MIXERS),
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
    "lfm3": A(
        "Lfm3ForCausalLM",
        {
            **{**TEXT, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 8},
            **{"layer_types": ["conv", "sliding_attention", "full_attention"]},
        },
    ),
}
