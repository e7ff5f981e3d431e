"""Attention for writing many answers at once: one query a row, with keys and values read once for each group of heads.

PyTorch's kernels for attention with a mask are made for many queries; with one query a row, a thousand answers spend
most of their time there. Two batched products with grouped heads read no more than the keys and values.
"""

from __future__ import annotations

from typing import Any

import torch

NAME = "slidesparse_decode"


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, as transformers' ``AttentionInterface`` asks; prompts attend by PyTorch's kernels.

    Query [batch, heads, queries, width], key and value [batch, key heads, length, width], and a mask that is boolean or
    a float to add [batch, 1, queries, length] -> [batch, queries, heads, width], and no weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, queries, width = query.shape
    if queries > 1 or kwargs.get("softcap") is not None:
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return found
    groups = query.reshape(batch, key.shape[1], -1, width) * (width**-0.5 if scaling is None else scaling)
    scores = (groups @ key.transpose(-1, -2)).float()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    elif attention_mask is not None:
        scores = scores + attention_mask
    attended = torch.softmax(scores, -1).to(value.dtype) @ value
    return attended.reshape(batch, 1, heads, value.shape[-1]), None


def use_decode_attention(model: Any) -> None:
    """Let a transformers model attend so."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        model.set_attn_implementation(NAME)
