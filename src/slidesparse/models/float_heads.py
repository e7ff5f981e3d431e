"""Find the output embeddings that vLLM holds in floats: for some models it makes them without a place for scales."""

from __future__ import annotations

from torch import nn

from slidesparse.models.parts import text_config
from slidesparse.models.targets import output_embedding

MODEL_TYPES = frozenset(
    {
        *("bamba", "bloom", "chameleon", "dory", "falcon_h1", "falcon_mamba", "gpt_bigcode", "gpt_oss", "jamba"),
        *("mamba", "mamba2", "minimax", "nemotron_h", "opt", "persimmon", "qwen3_5_moe_text", "qwen3_5_text"),
        *("qwen3_next", "zamba2"),
    }
)
"""Models whose ``ParallelLMHead`` has no quant_config in vLLM 0.22.1 or in 0.33.0 (model_executor/models)."""

HEAD_IN_FLOATS = "an output embedding that vLLM, or one of its releases, holds in floats"


def float_heads(model: nn.Module) -> dict[str, str]:
    """Return the output embedding where vLLM does not read it in 8 bits, and why.

    Args:
        model: A transformers model, which may be on the meta device.
    """
    if getattr(text_config(getattr(model, "config", None)), "model_type", None) not in MODEL_TYPES:
        return {}
    head = output_embedding(model)
    return {name: HEAD_IN_FLOATS for name, module in model.named_modules() if module is head}
