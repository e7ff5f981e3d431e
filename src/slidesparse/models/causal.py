"""Checks that a model is a causal language model: each of its predictions depends on earlier tokens alone.

Perplexity is defined for such models only. A masked language model gives numbers too, but its predictions have seen
the answer.
"""

from __future__ import annotations

from typing import Any

import torch

from slidesparse.base.other_libraries import other_library
from slidesparse.errors import InputError, SlideSparseError, first_line

TOKENS = 16
"""Tokens of the trial."""
SAME = 4
"""Tokens at its start that do not change; nor may their predictions."""

NOISE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""The largest change that counts as rounding, as a share of the logits' range: 1e-7 was measured in mixtures of
experts, and at least 2e-3 in random models that see later tokens."""
NOISE_16_BITS = 2e-2

NEEDED = "a causal language model, which answers with logits for the next token"


def require_causal(model: Any) -> None:
    """Raise an InputError for a model that is no causal language model, by running it on a few tokens."""
    refuse_masked(type(model))
    ids = torch.arange(TOKENS, device=next(iter(model.parameters())).device)[None]
    other = torch.cat([ids[:, :SAME], ids[:, SAME:] + TOKENS], 1)
    ids, other = (tokens % (vocabulary_of(model.config) or TOKENS) for tokens in (ids, other))
    answers = [_logits(model, tokens)[:, :SAME].to(torch.float32) for tokens in (ids, other)]
    change = (answers[0] - answers[1]).abs().max()
    limit = NOISE.get(model.dtype, NOISE_16_BITS) * (answers[0].max() - answers[0].min())
    if bool(change > limit):  # not for NaN, which perplexity names
        raise InputError(
            f"{type(model).__name__} has no causal loss", got="predictions that depend on later tokens", needed=NEEDED
        )


def refuse_masked(model_class: type) -> None:
    """Raise an InputError for a class of transformers that predicts masked tokens: its name says so."""
    if model_class.__name__.endswith("ForMaskedLM"):
        raise InputError(
            f"{model_class.__name__} has no causal loss", got="a model that predicts masked tokens", needed=NEEDED
        )


def vocabulary_of(config: Any) -> int:
    """Return the size of a model's vocabulary; 0 where the config does not give it."""
    size = getattr(_decoder_config(config), "vocab_size", None)
    return size if isinstance(size, int) and size > 0 else 0


def _decoder_config(config: Any) -> Any:
    """Return the config of a model's language part, which in most models is the whole."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    name = type(model).__name__
    try:
        with other_library():  # some decompress their weights in the first call
            answer = model(input_ids=ids, use_cache=False)
    except SlideSparseError:
        raise
    except Exception as error:  # a model of another kind can raise anything
        raise InputError(f"{name} has no causal loss", got=first_line(error), needed=NEEDED) from error
    logits = getattr(answer, "logits", None)
    if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        got = "no logits" if not isinstance(logits, torch.Tensor) else f"logits {list(logits.shape)}"
        raise InputError(f"{name} has no causal loss", got=f"{got} for {ids.shape[1]} tokens", needed=NEEDED)
    return logits
