"""Checks that a model is a causal language model: each of its predictions depends on earlier tokens alone.

Perplexity is defined for such models only. A masked language model gives numbers too, but its predictions have seen
the answer.
"""

from __future__ import annotations

from typing import Any

from slidesparse.errors import InputError

ALL_WAYS = frozenset({"XLNetLMHeadModel"})
"""Classes of transformers that generate, and see later tokens unless told otherwise."""


def require_causal(model_class: Any, config: Any) -> None:
    """Raise an InputError for a class of transformers, with its config, that is no causal language model."""
    generates = model_class.can_generate() and model_class.__name__ not in ALL_WAYS
    if not generates or getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{model_class.__name__} has no causal loss", needed="a causal language model")


def vocabulary_of(config: Any) -> int:
    """Return the size of a model's vocabulary; 0 where the config does not give it."""
    # A multimodal model's is that of its language part.
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else 0
