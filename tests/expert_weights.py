"""Random experts, packed, with what they multiply by; and the mixture computed expert by expert."""

from __future__ import annotations

import torch

from slidesparse.gemm.reference import apply_scales, product
from slidesparse.lifting.prologue import silu_mul
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.quant import ActivationRounding, Rounding, quantize_rows, quantize_weight


def packed_experts(
    count: int,
    out: int,
    columns: int,
    dtype: torch.dtype,
    pattern: str = "6:8",
    device: str = "cpu",
    k_offset: int = 0,
    rounding: Rounding = "absmax",
) -> list[PackedWeight]:
    """Random weights [out, columns] of a pattern, quantised."""
    made = []
    for _ in range(count):
        whole = torch.randn(out, k_offset + columns, device=device)
        weight = (whole * prune_mask(whole, pattern))[:, k_offset:]
        values, scale = quantize_weight(weight, dtype, rounding=rounding)
        made.append(pack_by(values.contiguous(), pattern, scale=scale, k_offset=k_offset))
    return made


def one_by_one(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate_up: list[PackedWeight],
    down: list[PackedWeight],
    activation_rounding: ActivationRounding = "vllm",
) -> torch.Tensor:
    """The mixture, a token and an expert at a time, from unpacked weights; the sum in float32 in the order of k."""

    def linear(rows: torch.Tensor, packed: PackedWeight) -> torch.Tensor:
        values, scale = quantize_rows(rows, packed.dtype, activation_rounding)
        return apply_scales(product(values, packed.unpack()), scale, packed.scale, None, x.dtype)

    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token in range(len(x)):
        for k in range(chosen.shape[1]):
            if (expert := int(chosen[token, k])) >= 0:
                inner = silu_mul(linear(x[token : token + 1], gate_up[expert]))
                own = linear(inner, down[expert])[0].to(torch.float32)
                total[token] = total[token] + weights[token, k] * own
    return total.to(x.dtype)


def routed(tokens: int, experts: int, k: int, device: str = "cpu") -> torch.Tensor:
    """Different random experts for every token: int32 [tokens, k]."""
    return torch.rand(tokens, experts, device=device).argsort(1)[:, :k].to(torch.int32)
