"""Experts of one GPU of several: which are here, where a shard's groups begin, and that all GPUs sum to the whole."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_weights import routed

from slidesparse.errors import PatternViolation
from slidesparse.integrations.experts import LoadedExperts, pack_experts
from slidesparse.integrations.names import NamedExperts
from slidesparse.integrations.vllm import experts
from slidesparse.integrations.vllm.experts import _multiply, loaded_experts
from slidesparse.pruning import prune_mask
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import quantize_weight

pytestmark = pytest.mark.usefixtures("vllm_on_cpu")

EXPERTS, HIDDEN, INNER, TOKENS = 4, 64, 72, 11  # half of INNER begins in the middle of a group of 8


def quantised(count: int, out: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of a pattern in INT8 [count, out, columns], and their scales [count, out, 1]."""
    whole = torch.randn(count * out, columns)
    values, scale = quantize_weight(whole * prune_mask(whole, "6:8"), torch.int8)
    return values.view(count, out, columns), scale.view(count, out, 1)


def parallel(**changed: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    return replace(FusedMoEParallelConfig.make_no_parallel(), **changed)


def layer_of(weights: dict[str, torch.Tensor], how: Any, expert_map: torch.Tensor | None = None) -> Any:
    config = SimpleNamespace(moe_parallel_config=how, num_experts=EXPERTS, experts_per_token=2)
    parameters = {name: torch.nn.Parameter(value, requires_grad=False) for name, value in weights.items()}
    return SimpleNamespace(moe_config=config, expert_map=expert_map, **parameters)


def gpu(*given: Any) -> tuple[Any, torch.Tensor]:
    """What the plugin finds on a GPU with such a layer, and what its experts give for the same tokens on every one."""
    layer = layer_of(*given)
    found = loaded_experts(layer, NamedExperts("experts", None))
    assert isinstance(found, LoadedExperts)
    generator = torch.Generator().manual_seed(2)
    x, weight = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16(), torch.rand(TOKENS, 2, generator=generator)
    torch.manual_seed(3)
    chosen = routed(TOKENS, EXPERTS, 2)
    return found, _multiply(layer, pack_experts(layer, found, None), x, weight, chosen).float()


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    (gate_up, gate_up_scale), (down, down_scale) = (
        quantised(EXPERTS, 2 * INNER, HIDDEN),
        quantised(EXPERTS, HIDDEN, INNER),
    )
    scales = {"w13_weight_scale": gate_up_scale, "w2_weight_scale": down_scale}
    return {"w13_weight": gate_up, "w2_weight": down, **scales}


def test_experts_of_two_gpus_sum_to_those_of_one(weights: dict[str, torch.Tensor]) -> None:
    """vLLM's map has the number of an expert on this GPU, -1 for those of the other."""
    _, whole = gpu(weights, parallel())
    total = torch.zeros_like(whole)
    for here in (slice(0, 2), slice(2, 4)):
        expert_map = torch.full((EXPERTS,), -1, dtype=torch.int32)
        expert_map[here] = torch.arange(2, dtype=torch.int32)
        found, part = gpu({name: value[here] for name, value in weights.items()}, parallel(ep_size=2), expert_map)
        assert (found.kind.experts, found.kind.everywhere) == (2, EXPERTS)
        assert part.any()
        total += part
    torch.testing.assert_close(total, whole, rtol=2e-2, atol=2e-2 * float(whole.abs().max()))


def shard_of(weights: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """Half of the rows of gate and of up, and half of the columns of down."""
    half = INNER // 2
    rows = torch.cat([torch.arange(half) + rank * half, torch.arange(half) + INNER + rank * half])
    columns = weights["w2_weight"][:, :, rank * half : (rank + 1) * half].contiguous()
    gate_up = {name: weights[name][:, rows] for name in ("w13_weight", "w13_weight_scale")}
    return gate_up | {"w2_weight": columns, "w2_weight_scale": weights["w2_weight_scale"]}


@pytest.mark.parametrize("bits", [[8, 8], [6, 8]])
def test_shards_of_two_gpus_sum_to_the_whole(weights: dict[str, torch.Tensor], bits: list[int]) -> None:
    """Each rank keeps the bits of its own values, and has times of its own."""
    if bits[0] == 6:
        for name in ("w13_weight", "w2_weight"):
            weights[name] &= -4
        second = weights["w2_weight"][..., INNER // 2 :]
        second += second // 4  # where there is a weight
    _, whole = gpu(weights, parallel())
    total, found_bits = torch.zeros_like(whole), []
    for rank in range(2):
        found, part = gpu(shard_of(weights, rank), parallel(tp_size=2, tp_rank=rank))
        assert (found.kind.pattern, found.kind.down) == (Pattern(6, 8), Pattern(6, 8))
        assert found.starts == (0, 4 * rank)
        found_bits.append(found.kind.bits)
        total += part
    assert found_bits == bits
    # Each rank rounds the inner activations of its own half to INT8.
    assert float((total - whole).norm()) < 0.03 * float(whole.norm())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shard_is_held_to_the_pattern_that_the_marker_claims(weights: dict[str, torch.Tensor], rank: int) -> None:
    """From the place in its group at which it begins; experts that break the pattern are refused by their name."""
    layer = layer_of(shard_of(weights, rank), parallel(tp_size=2, tp_rank=rank))
    named = NamedExperts("a.experts", (Pattern(6, 8), Pattern(6, 8)))
    found: Any = loaded_experts(layer, named)
    assert (found.kind.pattern, found.kind.down, found.starts) == (Pattern(6, 8), Pattern(6, 8), (0, 4 * rank))
    layer.w2_weight[1, 2, 8:] = 1
    with pytest.raises(PatternViolation, match=r"a\.experts\.w2_weight violates 6:8"):
        loaded_experts(layer, named)


@pytest.mark.parametrize(
    ("own", "other", "wanted"),
    [
        (None, None, "found"),
        (None, "they have a bias", "those of another GPU cannot be packed: they have a bias"),
        ("their weights satisfy no pattern", None, "their weights satisfy no pattern"),
    ],
)
def test_gpus_that_exchange_tokens_agree(
    monkeypatch: pytest.MonkeyPatch, own: str | None, other: str | None, wanted: str
) -> None:
    import vllm.distributed

    group = SimpleNamespace(world_size=2, cpu_group=object())

    def gather(told: list[Any], mine: Any, by: object) -> None:
        assert (by, mine) == (group.cpu_group, own)
        told[:] = [mine, other]

    monkeypatch.setattr(vllm.distributed, "get_ep_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    found: Any = own if own is not None else SimpleNamespace(name="found")
    agreed: Any = experts.agreed(found)
    assert getattr(agreed, "name", agreed) == wanted
