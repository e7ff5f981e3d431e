"""Leave out whole experts of a mixture by the criterion that is in use: router-weighted expert activation pruning.

An expert's saliency is the mean, over the tokens that the router sends to it, of its routing weight times the L2 norm
of its output. Routing weights sum to one for each token.

Source: Lasby et al., "REAP the Experts: Why Pruning Prevails for One-Shot MoE Compression" (2025), arXiv 2510.13999.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@torch.no_grad()
def mean_router_weighted_norms(model: Any, batches: Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    """Return the saliency of each layer's experts, float64 [experts] a layer; 0 for one that saw no token.

    Args:
        model: A mixture of transformers whose layers have ``mlp.experts`` with ``gate_up_proj`` and ``down_proj``.
        batches: Its inputs.
    """
    blocks = [layer.mlp for layer in model.model.layers]
    sums = [torch.zeros(block.experts.num_experts, dtype=torch.float64) for block in blocks]
    tokens = [torch.zeros_like(one) for one in sums]

    def see(i: int) -> Callable[..., None]:
        def hook(experts: Any, args: tuple[torch.Tensor, ...]) -> None:
            x, index, weights = args
            for expert in range(experts.num_experts):
                token, place = torch.where(index == expert)
                out = _expert(experts, expert, x[token])
                sums[i][expert] += float((weights[token, place] * out.norm(dim=1)).sum())
                tokens[i][expert] += len(token)

        return hook

    handles = [block.experts.register_forward_pre_hook(see(i)) for i, block in enumerate(blocks)]
    try:
        for batch in batches:
            model.model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return [total / count.clamp(min=1) for total, count in zip(sums, tokens, strict=True)]


def _expert(experts: Any, number: int, x: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, experts.gate_up_proj[number]).chunk(2, -1)
    return F.linear(experts.act_fn(gate) * up, experts.down_proj[number])


def drop_experts(model: Any, kept: Sequence[Sequence[int]]) -> None:
    """Leave out the other experts of each layer and their rows of the router, which renormalises over the kept ones."""
    for layer, numbers in zip(model.model.layers, kept, strict=True):
        chosen = list(numbers)
        for module, names in ((layer.mlp.experts, ("gate_up_proj", "down_proj")), (layer.mlp.gate, ("weight",))):
            for name in names:
                setattr(module, name, nn.Parameter(getattr(module, name).detach()[chosen]))
            module.num_experts = len(chosen)
