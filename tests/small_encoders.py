"""Small models that read text or listen, with and without a decoder."""

from __future__ import annotations

from small_models import BART, ENCODER, T5, TEXT, both, spectrum, spoken
from small_models import Architecture as A

MASKED = {
    **{"bert-mlm": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "mpnet": "MPNet"},
    **{"camembert": "Camembert", "ernie": "Ernie", "data2vec-text": "Data2VecText", "megatron-bert": "MegatronBert"},
    **{"gte": "Gte"},
}

LIKE_BART = {
    **{"bart": "Bart", "mbart": "MBart", "pegasus": "Pegasus", "blenderbot": "Blenderbot", "m2m100": "M2M100"},
}

ENCODERS: dict[str, A] = {
    **{name: A(f"{kind}ForMaskedLM", ENCODER) for name, kind in MASKED.items()},
    **{name: A(f"{kind}ForConditionalGeneration", BART, both) for name, kind in LIKE_BART.items()},
    # -- encoders ------------------------------------------------------------------------------------------------------
    "bert": A("BertModel", ENCODER),
    "bert-classifier": A("BertForSequenceClassification", ENCODER),
    "modernbert": A("ModernBertForMaskedLM", {**ENCODER, "cls_token_id": 1, "sep_token_id": 2}),
    "deberta-v2": A("DebertaV2ForMaskedLM", {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "distilbert": A(
        "DistilBertForMaskedLM", {"vocab_size": 96, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}
    ),
    "albert": A("AlbertForMaskedLM", {**ENCODER, "embedding_size": 32}),
    "electra": A("ElectraForMaskedLM", {**ENCODER, "embedding_size": 32}),
    "xmod": A("XmodForMaskedLM", {**ENCODER, "languages": ["en_XX"], "default_language": "en_XX"}),
    "roformer": A("RoFormerForMaskedLM", {**ENCODER, "embedding_size": 64}),
    "rembert": A("RemBertForMaskedLM", {**ENCODER, "input_embedding_size": 32, "output_embedding_size": 32}),
    "eurobert": A("EuroBertForMaskedLM", {**TEXT, "mask_token_id": 3}),
    # -- encoders and decoders -----------------------------------------------------------------------------------------
    "marian": A("MarianMTModel", BART, both),
    "t5": A("T5ForConditionalGeneration", T5, both, std=0.05),
    "t5-v1.1": A(
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        both,
        std=0.05,
    ),
    "t5-encoder": A("T5EncoderModel", T5, std=0.05),
    "mt5": A("MT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, both, std=0.05),
    "whisper": A(
        "WhisperForConditionalGeneration",
        {**BART, "num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 64},
        spectrum,
    ),
    "umt5": A("UMT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, both, std=0.05),
    "t5gemma": A(
        "T5GemmaForConditionalGeneration",
        {"encoder": {**TEXT, "head_dim": 16}, "decoder": {**TEXT, "head_dim": 16}},
        both,
    ),
    "moonshine": A(
        "MoonshineForConditionalGeneration",
        {
            **{**TEXT, "encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2, "decoder_start_token_id": 1},
            **{"encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4},
        },
        spoken,
    ),
    "ultrabert": A("UltrabertForMaskedLM", {**ENCODER, "prediction_head_size": 64, "sliding_window": 8}),
    "embedding-gemma2": A(
        "EmbeddingGemma2Model",
        {
            "text_config": {
                **{**TEXT, "head_dim": 16, "hidden_size_per_layer_input": 32, "embedding_dim": 64},
                "sliding_window": 8,
            },
            **{"vision_config": None, "audio_config": None},
        },
    ),
}
