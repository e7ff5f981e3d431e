"""Make the experts of ``bench gemm --grouped``, packed and dense, and the results that are expected of them.

Making experts takes longer than timing them, so they are kept: the cases of a mixture come back to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from slidesparse.gemm import Problem
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.gemm.select import grouped_product
from slidesparse.layer.experts import SlideExperts, split_rows
from slidesparse.lifting.prologue import silu_mul
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.packing import pack_weight
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import Rounding, parse_dtype, quantize_rows, quantize_weight
from slidesparse_bench.expert_sizes import DOWN, GATE_UP, ExpertSizes
from slidesparse_bench.kernels.operands import weight_bytes, weight_of
from slidesparse_bench.records import DENSE_VARIANT

KEPT = 64
"""Layers kept: those of four mixtures, two types and three patterns, and the dense ones."""

Matrices = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Expert -> its dense quantised weight [N, K] and scale [N]."""


@dataclass(frozen=True)
class PackedExperts:
    """The experts of a layer in one pattern.

    Attributes:
        layer: They, ready to run.
        packed: Of each product the packed weights of all experts.
    """

    layer: SlideExperts
    packed: dict[str, list[PackedWeight]]

    def matrices(self, part: str) -> Matrices:
        """Return the experts of a product as matrices."""

        def of(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
            one = self.packed[part][expert]
            assert one.scale is not None
            return one.unpack(), one.scale.flatten()

        return of

    def n_bytes(self, part: str) -> int:
        """Return the bytes of one expert's weight, with its scales."""
        one, linear = self.packed[part][0], self.layer.gate_up if part == GATE_UP else self.layer.down
        return weight_bytes(one, [linear.operand[0]]) + 4 * one.shape[0]


@dataclass(frozen=True)
class DenseExperts:
    """The experts of a layer without a pattern: of each product values [E, N, K] and scales [E, N, 1]."""

    values: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor]

    def matrices(self, part: str) -> Matrices:
        """Return the experts of a product as matrices."""
        return lambda expert: (self.values[part][expert], self.scales[part][expert].flatten())

    def n_bytes(self, part: str) -> int:
        """Return the bytes of one expert's weight, with its scales."""
        return self.values[part][0].nbytes + self.scales[part][0].nbytes


@lru_cache(maxsize=KEPT)
def packed_experts(
    sizes: ExpertSizes, pattern: str, dtype: str, device: torch.device, rounding: Rounding = "absmax"
) -> PackedExperts | str:
    """Return random experts, pruned and packed, or why nothing can run them."""
    found = grouped_product(Problem(Pattern.parse(pattern), parse_dtype(dtype), *sizes.shape(GATE_UP), device))
    if isinstance(found, str):
        return found
    packed = {}
    for part in (GATE_UP, DOWN):
        rows, columns = sizes.shape(part)
        weight = weight_of(pattern, dtype, sizes.experts * rows, columns, device)
        packed[part] = split_rows(
            pack_weight(weight, Pattern.parse(pattern), parse_dtype(dtype), rounding), sizes.experts
        )
    return PackedExperts(SlideExperts(packed[GATE_UP], packed[DOWN], found), packed)


@lru_cache(maxsize=KEPT)
def dense_experts(sizes: ExpertSizes, dtype: str, device: torch.device) -> DenseExperts:
    """Return random experts, quantised."""
    values, scales = {}, {}
    for part in (GATE_UP, DOWN):
        rows, columns = sizes.shape(part)
        weight = weight_of(DENSE_VARIANT, dtype, sizes.experts * rows, columns, device)
        flat, scale = quantize_weight(weight, parse_dtype(dtype))
        values[part] = flat.view(sizes.experts, rows, columns)
        scales[part] = scale.reshape(sizes.experts, rows, 1)
    return DenseExperts(values, scales)


def expected_product(x: torch.Tensor, experts: Sequence[int], of: Matrices, out_dtype: torch.dtype) -> torch.Tensor:
    """Return each row of x by its expert's weight: x [R, K] -> [R, N]; no lifting, no fast kernel."""
    y: torch.Tensor | None = None
    for expert in sorted(set(experts)):
        rows = [row for row, of_row in enumerate(experts) if of_row == expert]
        weight, scale_w = of(expert)
        values, scale = quantize_rows(x[rows], weight.dtype)
        own = apply_scales(product(values, weight), scale, scale_w, None, out_dtype)
        y = own.new_empty(len(x), own.shape[1]) if y is None else y
        y[rows] = own
    assert y is not None
    return y


def expected_layer(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, gate_up: Matrices, down: Matrices
) -> torch.Tensor:
    """Return the layer's result for some tokens, float32: x [M, H], weights and chosen [M, k] -> [M, H]."""
    experts, k = chosen.flatten().tolist(), chosen.shape[1]
    run = partial(expected_product, experts=experts, out_dtype=x.dtype)
    outer = run(silu_mul(run(x.repeat_interleave(k, 0), of=gate_up)), of=down)
    return (outer.view(*chosen.shape, -1).to(torch.float32) * weights[..., None]).sum(1)
