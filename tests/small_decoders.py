"""Small models that write text: transformers, state spaces, and both mixed."""

from __future__ import annotations

import torch
from small_models import ENCODER, GPT, LINEAR_ATTENTION, MAMBA, ROPE_3D, SSM, TEXT
from small_models import Architecture as A

FLOAT_MIXERS = "first Mamba mixers, which vLLM holds in floats; prune it with --dtype bf16"
"""Why these are refused in 8 bits: nothing else is in them."""

PLAIN = {
    **{"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "ministral3": "Ministral3", "phi": "Phi"},
    **{"phi3": "Phi3", "starcoder2": "Starcoder2", "stablelm": "StableLm", "olmo2": "Olmo2", "olmo3": "Olmo3"},
    **{"cohere": "Cohere", "cohere2": "Cohere2", "granite": "Granite", "smollm3": "SmolLM3", "exaone4": "Exaone4"},
    **{"nemotron": "Nemotron", "apertus": "Apertus", "arcee": "Arcee", "gpt-neox": "GPTNeoX", "falcon": "Falcon"},
    **{"olmo": "Olmo", "persimmon": "Persimmon", "biogpt": "BioGpt"},
}
"""Those with the usual settings: name -> the beginning of the class."""

WITH_HEADS_OF_16 = {
    **{"qwen3": "Qwen3", "ministral": "Ministral", "gemma": "Gemma", "gemma2": "Gemma2", "gemma3-text": "Gemma3"},
    **{"vaultgemma": "VaultGemma", "glm": "Glm", "glm4": "Glm4", "seed-oss": "SeedOss", "ernie4.5": "Ernie4_5"},
    **{"hunyuan-dense": "HunYuanDenseV1", "helium": "Helium", "diffllama": "DiffLlama", "cwm": "Cwm"},
    **{"nanochat": "NanoChat"},
}

DECODERS: dict[str, A] = {
    **{name: A(f"{kind}ForCausalLM", TEXT) for name, kind in PLAIN.items()},
    **{name: A(f"{kind}ForCausalLM", {**TEXT, "head_dim": 16}) for name, kind in WITH_HEADS_OF_16.items()},
    # -- decoders ------------------------------------------------------------------------------------------------------
    "llama-tied": A("LlamaForCausalLM", {**TEXT, "tie_word_embeddings": True}),
    "qwen3-tied": A("Qwen3ForCausalLM", {**TEXT, "head_dim": 16, "tie_word_embeddings": True}),
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
    "opt": A("OPTForCausalLM", {**TEXT, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "gpt-j": A("GPTJForCausalLM", {**GPT, "rotary_dim": 8}),
    "gpt-neo": A("GPTNeoForCausalLM", {**TEXT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]}),
    "codegen": A("CodeGenForCausalLM", {**GPT, "rotary_dim": 8, "n_ctx": 64}),
    "gpt-bigcode": A("GPTBigCodeForCausalLM", GPT),
    "bloom": A("BloomForCausalLM", {**TEXT, "n_layer": 2, "n_head": 4}),
    "mpt": A("MptForCausalLM", {"vocab_size": 96, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "olmo-hybrid": A(
        "OlmoHybridForCausalLM",
        {**TEXT, **LINEAR_ATTENTION, "linear_num_key_heads": 4},
        alone="transformers 5.23 joins its convolutions, and finds none in INT8 checkpoints",
    ),
    "gpt2": A("GPT2LMHeadModel", GPT, refused="Conv1D, whose weight is stored"),
    "xlnet": A(
        "XLNetLMHeadModel",
        {"vocab_size": 96, "d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 128},
        dtype=torch.float32,
    ),
    "xglm": A(
        "XGLMForCausalLM",
        {
            **{"vocab_size": 96, "d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4},
            **{"max_position_embeddings": 64},
        },
    ),
    "modernbert-decoder": A("ModernBertDecoderForCausalLM", {**ENCODER, "cls_token_id": 1, "sep_token_id": 2}),
    "gpt-neox-japanese": A("GPTNeoXJapaneseForCausalLM", {**TEXT, "intermediate_multiple_size": 2}),
    # -- state spaces, and mixed with attention ------------------------------------------------------------------------
    "mamba": A("MambaForCausalLM", MAMBA, not_quantised=FLOAT_MIXERS),
    "falcon-mamba": A("FalconMambaForCausalLM", MAMBA, not_quantised=FLOAT_MIXERS),
    "mamba2": A("Mamba2ForCausalLM", {**MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
    "falcon-h1": A("FalconH1ForCausalLM", {**TEXT, **SSM, "mamba_d_ssm": 128}),
    "bamba": A("BambaForCausalLM", {**TEXT, **SSM, "attn_layer_indices": [1]}),
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
            **{**TEXT, **LINEAR_ATTENTION, "head_dim": 16},
            "rope_parameters": {**ROPE_3D, "partial_rotary_factor": 1.0},
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
