"""Mixtures of SGLang's own classes on a CPU: one rank of several, without groups of processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_sglang_plugin import config_of

from slidesparse.pruning import prune_mask
from slidesparse.weights.quant import quantize_weight

NAME = "model.layers.0.mlp.experts"

HIDDEN, INNER, EXPERTS, TOP_K = 64, 72, 4, 2  # half of INNER begins in the middle of a group of 8

SPARSE = {"backend": "reference", "experts": "sparse"}

SHARDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""SGLang's names of an expert's linears -> those of a checkpoint."""


@contextmanager
def one_rank(tensor: int = 1, experts: int = 1, rank: int = 0) -> Iterator[None]:
    """SGLang's configuration of one rank of several, which share each expert, or the experts."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.moe.token_dispatcher import standard

    def group(rank: int, size: int) -> Any:
        return SimpleNamespace(rank_in_group=rank, world_size=size, is_first_rank=True, is_last_rank=True)

    size, alone = tensor * experts, group(0, 1)
    sizes = {"tp_size": size, "attn_tp_size": size, "moe_tp_size": tensor, "moe_ep_size": experts}
    ranks = {"tp_rank": rank, "attn_tp_rank": rank, "moe_tp_rank": rank % tensor, "moe_ep_rank": rank // tensor}
    others = ("moe_dp_size", "attn_dp_size", "attn_cp_size", "pp_size"), ("attn_dp_rank", "attn_cp_rank", "pp_rank")
    ones, zeros = (dict.fromkeys(names, value) for names, value in zip(others, (1, 0), strict=True))
    groups = {"tp_group": group(rank, size), "attn_tp_group": group(rank, size), "pp_group": alone}
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        stack.enter_context(runtime_context.get_context().override_server_args(device="cpu"))
        stack.enter_context(runtime_context.get_parallel().override(**sizes, **ranks, **ones, **zeros, **groups))
        for name in ("_PP", "_MOE_DP"):  # which 0.5.17 asks
            patch.setattr(parallel_state, name, alone)
        patch.setattr(parallel_state, "_TP", group(rank, size))
        patch.setattr(standard, "get_device", lambda: "cpu")
        yield


def weights_of(
    dtype: torch.dtype, patterns: tuple[str, ...] = ("6:8",) * EXPERTS
) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Of each linear of :data:`SHARDS` the quantised weight and the scales of every expert."""
    generator, made = torch.Generator().manual_seed(0), {}
    for shard in SHARDS:
        shape, own = (HIDDEN, INNER) if shard == "w2" else (INNER, HIDDEN), []
        for pattern in patterns:
            weight = torch.randn(shape, generator=generator)
            values, scale = quantize_weight(weight * prune_mask(weight, pattern), dtype)
            own.append((values, scale.reshape(-1, 1)))
        made[shard] = own
    return made


def marked(name: str = NAME, pattern: str = "6:8", down: str = "6:8") -> dict[str, Any]:
    experts = {f"{name}.*.{leaf}": down if shard == "w2" else pattern for shard, leaf in SHARDS.items()}
    return {"version": 2, "pattern": pattern, "ignore": ["lm_head"], "layers": {}, "experts": experts}


def built(dtype: torch.dtype, weights: Mapping[str, Any], config: Any = None, **more: Any) -> Any:
    """A ``FusedMoE``, loaded by its own loader but not processed."""
    from sglang.srt.layers.moe.fused_moe_triton import FusedMoE

    count = len(weights["w1"])
    sizes = {"num_experts": count, "top_k": TOP_K, "hidden_size": HIDDEN, "intermediate_size": INNER, "layer_id": 0}
    config = config_of(marked(), SPARSE, dtype) if config is None else config
    layer = FusedMoE(**sizes, prefix=NAME, params_dtype=torch.bfloat16, quant_config=config, **more)
    for shard, leaf in SHARDS.items():
        ours = "w2" if shard == "w2" else "w13"
        for expert, pair in enumerate(weights[shard]):
            for kind, tensor in zip(("weight", "weight_scale"), pair, strict=True):
                parameter, name = getattr(layer, f"{ours}_{kind}"), f"{NAME}.{expert}.{leaf}.{kind}"
                layer.weight_loader(parameter, tensor, name, shard_id=shard, expert_id=expert)
    return layer


def loaded(*given: Any, **more: Any) -> Any:
    layer = built(*given, **more)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def tokens(hidden: int = HIDDEN, experts: int = EXPERTS, top_k: int = TOP_K) -> tuple[torch.Tensor, ...]:
    """Some tokens, the router's weights, and different experts for every token."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(11, experts, generator=generator).argsort(1)[:, :top_k].to(torch.int32)
    return torch.randn(11, hidden, generator=generator).bfloat16(), torch.rand(11, top_k, generator=generator), chosen


def through(layer: Any, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What a layer makes of tokens, as a model calls it."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    y: torch.Tensor = layer(x, StandardTopKOutput(weights, chosen, torch.empty(0)))
    return y


def mixture(experts: Mapping[str, Any], x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The mixture in float32, a token and an expert at a time, from quantised weights and their scales."""
    total = torch.zeros(x.shape)
    dense = {shard: [values.float() * scale.float() for values, scale in own] for shard, own in experts.items()}
    for token, row in enumerate(x.float()):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            gate, up = dense["w1"][expert] @ row, dense["w3"][expert] @ row
            total[token] += weight * (dense["w2"][expert] @ (torch.nn.functional.silu(gate) * up))
    return total


def is_close(y: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a result is as near as rounding activations to 8 bits twice allows."""
    return bool((y.float() - exact).norm() < (0.03 if dtype == torch.int8 else 0.06) * exact.norm())
