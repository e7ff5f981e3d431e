"""Make the weights and activations of a benchmark, and the products that are expected of them.

Making the packed forms of a weight takes longer than timing them, so the last few are kept: the cases of one weight
follow one another.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from slidesparse import ops
from slidesparse.gemm import Operand, Problem, get_backend
from slidesparse.gemm.hopper.backend import HopperSixBits
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.lifting.layout import Layout
from slidesparse.pruning import prune_mask
from slidesparse.tuning.checking import ends
from slidesparse.tuning.measure import gaussian
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.packing import pack_weight
from slidesparse.weights.pattern import DENSE
from slidesparse.weights.quant import DTYPES, QUANTISED, Rounding, parse_dtype, quantize_rows, rounded_bits
from slidesparse_bench.problems import pattern_and_columns
from slidesparse_bench.records import DENSE_VARIANT, Case

KEPT = 32
"""Packed weights and operands kept: those of one linear in every pattern, for three backends."""


def float_type(dtype: str) -> torch.dtype:
    """Return the type of activations and outputs: fp16 for fp16, bf16 for all others, as models run."""
    return DTYPES["fp16" if dtype == "fp16" else "bf16"]


def activations(case: Case, variant: str, device: torch.device) -> torch.Tensor:
    """Return standard normal activations [M, K] (2K for the control)."""
    _, columns = pattern_and_columns(variant, case.in_features)
    return _activations(case.tokens, columns, float_type(case.dtype), device)


@lru_cache(maxsize=2)
def _activations(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return gaussian(tokens, columns, dtype=dtype, device=device)


def weight_of(variant: str, dtype: str, out: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return a float weight [out, K] (2K for the control) of deviation K**-0.5, pruned to the variant's pattern."""
    pattern, columns = pattern_and_columns(variant, columns)
    weight = gaussian(out, columns, dtype=float_type(dtype), device=device, seed=1) * columns**-0.5
    return weight if variant == DENSE_VARIANT else torch.where(prune_mask(weight, pattern), weight, 0)


@lru_cache(maxsize=KEPT)
def packed_weight(
    variant: str, dtype: str, out: int, columns: int, device: torch.device, rounding: Rounding = "absmax"
) -> PackedWeight:
    """Return :func:`weight_of` quantised and packed."""
    pattern, _ = pattern_and_columns(variant, columns)
    return pack_weight(weight_of(variant, dtype, out, columns, device), pattern, parse_dtype(dtype), rounding)


AUTO_SIX_BITS = "auto-6bit"
"""The choice ``auto`` of a served model whose weights have six bits."""


def rounding_for(backend: str, dtype: str) -> Rounding:
    """Return how the weights are rounded that a backend is measured with."""
    return "6bit" if backend in (HopperSixBits.name, AUTO_SIX_BITS) and dtype == "int8" else "absmax"


@lru_cache(maxsize=KEPT)
def operand(backend: str, variant: str, dtype: str, out: int, columns: int, device: torch.device) -> Operand:
    """Return a backend's form of :func:`packed_weight`."""
    rounding = rounding_for(backend, dtype)
    return get_backend(backend).prepare(packed_weight(variant, dtype, out, columns, device, rounding))


def weight_bytes(packed: PackedWeight, form: Sequence[torch.Tensor]) -> int:
    """Return the fewest bytes that say what a weight is: packed, or in a backend's form where that is smaller."""
    return min(packed.n_bytes, sum(tensor.nbytes for tensor in form))


def problem_of(case: Case, variant: str, device: torch.device, backend: str) -> Problem:
    """Return the case as a problem of backends, with the weights that one of them is measured with."""
    pattern, columns = pattern_and_columns(variant, case.in_features)
    dtype = parse_dtype(case.dtype)
    bits = rounded_bits(rounding_for(backend, case.dtype), dtype)
    return Problem(pattern, dtype, case.out_features, columns, device, pattern != DENSE, bits)


def lifted(
    x: torch.Tensor, packed: PackedWeight, layout: Layout, backend: str = "reference"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return activations [M, K] in a backend's layout, with their scale [M, 1] if they are quantised."""
    columns, column_map = layout.order(packed), layout.column_map(packed)
    order = {} if columns is None else {"order": columns.numbers}
    if packed.dtype not in QUANTISED:
        return ops.lift(x, column_map, backend, **order), None
    values, scale = ops.quantize_lift(x, column_map, packed.dtype, backend, **order)
    return values, scale


def expected(x: torch.Tensor, packed: PackedWeight, scaled: bool) -> torch.Tensor:
    """Return the product's first and last rows, float32, from the unpacked weight: no lifting, no fast kernel."""
    rows, scale = ends(x), None
    if packed.dtype in QUANTISED:
        rows, scale = quantize_rows(rows, packed.dtype)
    accumulator = product(rows, packed.unpack())
    if not scaled:
        return accumulator.to(torch.float32)
    return apply_scales(accumulator, scale, packed.scale, None, torch.float32)
