"""Small models that read text or listen, with and without a decoder."""

from __future__ import annotations

from small_models import BART, ENCODER, T5, TEXT, both, spectrum, spoken
from small_models import Architecture as A

ENCODERS: dict[str, A] = {
    # -- encoders ------------------------------------------------------------------------------------------------------
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
    "camembert": A("CamembertForMaskedLM", ENCODER),
    "ernie": A("ErnieForMaskedLM", ENCODER),
    "data2vec-text": A("Data2VecTextForMaskedLM", ENCODER),
    "xmod": A("XmodForMaskedLM", {**ENCODER, "languages": ["en_XX"], "default_language": "en_XX"}),
    "roformer": A("RoFormerForMaskedLM", {**ENCODER, "embedding_size": 64}),
    "megatron-bert": A("MegatronBertForMaskedLM", ENCODER),
    "rembert": A("RemBertForMaskedLM", {**ENCODER, "input_embedding_size": 32, "output_embedding_size": 32}),
    "eurobert": A("EuroBertForMaskedLM", {**TEXT, "mask_token_id": 3}),
    # -- encoders and decoders -----------------------------------------------------------------------------------------
    "bart": A("BartForConditionalGeneration", BART, both),
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
    "mbart": A("MBartForConditionalGeneration", BART, both),
    "pegasus": A("PegasusForConditionalGeneration", BART, both),
    "blenderbot": A("BlenderbotForConditionalGeneration", BART, both),
    "m2m100": A("M2M100ForConditionalGeneration", BART, both),
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
    "gte": A("GteForMaskedLM", ENCODER),
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
