"""Row-parallel layers by simulation: shards cut anywhere in K, packed alone, sum to the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import sparse_int8

from slidesparse import Pattern, PatternViolation, pack, prune_mask
from slidesparse.gemm.reference import product
from slidesparse.layer.settle import Chooser, RunsPacked, settle

ROW_PARALLEL_K = {
    # Model: inputs of o_proj (heads * head size) and of down_proj (intermediate size), from the models' config.json.
    "Llama-3.2-1B": (2048, 8192),
    "Llama-3.2-3B": (3072, 8192),
    "Llama-3-8B": (4096, 14336),
    "Llama-3-70B": (8192, 28672),
    "Qwen2.5-7B": (3584, 18944),
    "Qwen2.5-14B": (5120, 13824),
    "Qwen2.5-72B": (8192, 29568),
}
PATTERNS = ["4:6", "6:8", "8:10", "14:16"]
OUT = 4  # rows are independent; a few are enough


def _sum_of_shards(weight: torch.Tensor, x: torch.Tensor, pattern: Pattern, bounds: list[int]) -> torch.Tensor:
    """Settle every ``weight[:, bounds[i]:bounds[i + 1]]`` as a rank would, alone, and add up the int32 products."""
    total = torch.zeros(len(x), len(weight), dtype=torch.int32)
    for start, end in itertools.pairwise(bounds):
        shard = weight[:, start:end]
        settled = settle(shard, None, pattern, Chooser("reference"), start=start)
        assert isinstance(settled, RunsPacked)
        assert torch.equal(settled.packed.unpack(), shard)
        total += product(settled.packed.lift(x[:, start:end]), settled.packed.columns())
    return total


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("model", ROW_PARALLEL_K)
def test_shards_of_real_layers_sum_to_the_whole(model: str, pattern: str) -> None:
    p = Pattern.parse(pattern)
    for k in ROW_PARALLEL_K[model]:
        weight = sparse_int8(OUT, k, p.keep, p.group)
        x = torch.randint(-128, 128, (2, k), dtype=torch.int8)
        exact = x.long() @ weight.long().T
        for tp in (1, 2, 4, 8):
            assert k % tp == 0
            bounds = list(range(0, k + 1, k // tp))
            assert torch.equal(_sum_of_shards(weight, x, p, bounds).long(), exact), (k, tp)


@given(
    k=st.integers(1, 150),
    text=st.sampled_from(["2:4", *PATTERNS, "30:32"]),
    cuts=st.sets(st.integers(0, 150), max_size=6),
    seed=st.integers(0, 2**31),
)
def test_any_shard_boundary(k: int, text: str, cuts: set[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-128, 128, (OUT, k), dtype=torch.int8, generator=generator)
    weight = weight * prune_mask(weight, text)
    x = torch.randint(-128, 128, (3, k), dtype=torch.int8, generator=generator)
    bounds = sorted({0, k, *(cut for cut in cuts if cut < k)})
    total = _sum_of_shards(weight, x, Pattern.parse(text), bounds)
    assert torch.equal(total.long(), x.long() @ weight.long().T)


def test_a_shard_blocked_from_its_own_column_0_is_refused() -> None:
    weight = torch.ones(2, 16, dtype=torch.int8)
    weight[:, [0, 1, 14, 15]] = 0  # 6:8 in its own groups, yet columns 4 to 11 are full
    shard = weight[:, 4:]
    assert torch.equal(pack(shard, "6:8", k_offset=4).unpack(), shard)
    with pytest.raises(PatternViolation, match="down_proj violates 6:8 at row 0, group 0") as error:
        pack(shard, "6:8", name="down_proj")
    assert error.value.count == 8
