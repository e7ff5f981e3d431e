"""``bench kernels``: quantise and lift, alone and after each fused prologue, against quantise only and a copy.

This is the paper's table of fused-kernel latencies, with a true quantise-only baseline: the same quantisation without
lifting.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from slidesparse import ops
from slidesparse.gemm import get_backend
from slidesparse.lifting.layout import ColumnOrder, LiftSpec, LinearTensors
from slidesparse.lifting.prologue import Prologue, add_rms_norm, rms_norm, silu_mul
from slidesparse.ops.resolve import resolve_lift
from slidesparse.tuning.checking import ends, relative_error
from slidesparse.tuning.measure import gaussian
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.packing import pack
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import parse_dtype, quantize_rows
from slidesparse.weights.slide import gather
from slidesparse_bench.comparison import Session, Subject, compare
from slidesparse_bench.kernels.dense import vllm_ops, vllm_quantize
from slidesparse_bench.kernels.operands import activations
from slidesparse_bench.problems import HEADLINE
from slidesparse_bench.records import CONTROL, COPY, DENSE_VARIANT, QUANTIZE, Case, Record

MULTIPLE = 32
"""Columns are padded to a multiple of this, as sparse GEMMs ask."""

EPS = 1e-6


def measure(session: Session, case: Case) -> list[Record]:
    """Return the records of one case: copy, quantise, and quantise + lift for every pattern."""
    x, dtype = activations(case, DENSE_VARIANT, session.device), parse_dtype(case.dtype)
    columns = torch.arange(case.in_features, device=session.device)
    moved = x.nbytes + x.numel() + 4 * case.tokens
    subjects = [
        Subject(
            QUANTIZE,
            "slidesparse",
            "",
            partial(_quantize_lift, dtype, ColumnOrder.identity(case.in_features).numbers),
            (x, columns),
            moved,
            _check(x, columns, dtype),
        ),
        Subject(COPY, "torch", "copy_", _copy, (x, torch.empty_like(x)), 2 * x.nbytes, partial(_copy_error, x)),
    ]
    if vllm_ops() is not None:
        run = partial(_vllm_quantize, dtype)
        subjects.append(Subject(QUANTIZE, "vllm", "", run, (x,), moved, _check(x, columns, dtype)))
    for variant in session.patterns(case):
        if variant == CONTROL:
            continue  # it needs no lifting: its columns do not repeat
        packed = any_weight(Pattern.parse(variant), case.in_features, session.device)
        lifted, order = packed.column_map(MULTIPLE), ColumnOrder.of(packed, MULTIPLE)
        moved = x.nbytes + case.tokens * (len(lifted) + 4)
        run, operands = partial(_quantize_lift, dtype, order.numbers), (x, lifted)
        subjects.append(Subject(f"lift {variant}", "slidesparse", "", run, operands, moved, _check(x, lifted, dtype)))
    return compare(session, case, subjects + _fused_subjects(session, case, x))


def _fused_subjects(session: Session, case: Case, x: torch.Tensor) -> list[Subject]:
    """Return quantise-and-lift after each prologue that it can be fused with, at one pattern."""
    packed, dtype = any_weight(Pattern.parse(HEADLINE), case.in_features, session.device), parse_dtype(case.dtype)
    lifted, order = packed.column_map(MULTIPLE), ColumnOrder.of(packed, MULTIPLE).numbers
    more = partial(gaussian, dtype=x.dtype, device=session.device)
    residual, weight = more(*x.shape, seed=2), more(case.in_features, seed=3)
    written = case.tokens * (len(lifted) + 4)
    inputs: dict[Prologue, tuple[tuple[torch.Tensor, ...], int]] = {
        "rms_norm": ((x, weight), x.nbytes),
        "add_rms_norm": ((x, residual, weight), 3 * x.nbytes),
        "silu_mul": ((torch.cat([x, residual], 1),), 2 * x.nbytes),
    }
    return [
        Subject(
            f"{first} lift {HEADLINE}",
            "slidesparse",
            "",
            partial(_fused, first, dtype, order),
            (*tensors, lifted),
            moved + written,
            partial(_fused_error, first, dtype, tensors, lifted),
        )
        for first, (tensors, moved) in inputs.items()
    ]


def _fused(
    first: Prologue, dtype: torch.dtype, order: list[int], x: torch.Tensor, *tensors: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    *given, lifted = tensors
    gain = given.pop() if given else None
    residual = given.pop() if given else None
    spec = LiftSpec(first, x.dtype, dtype, tuple(order), get_backend("reference").layout)
    lift = resolve_lift(spec, x.shape[0], x.device)
    made = lift(x, residual, LinearTensors(lifted, (), None, None, gain), EPS)
    return tuple(result for result in made if result is not None)


def _fused_error(
    first: Prologue,
    dtype: torch.dtype,
    tensors: tuple[torch.Tensor, ...],
    columns: torch.Tensor,
    result: tuple[torch.Tensor, ...],
) -> float:
    if first == "silu_mul":
        made: tuple[torch.Tensor, ...] = (silu_mul(ends(tensors[0])),)
    elif first == "rms_norm":
        made = (rms_norm(ends(tensors[0]), tensors[1], EPS),)
    else:
        made = add_rms_norm(ends(tensors[0]), ends(tensors[1]), tensors[2], EPS)
    values, scale = quantize_rows(made[0], dtype)
    wanted = (gather(values, columns), scale, *made[1:])
    return max(relative_error(ends(got).float(), exact.float()) for got, exact in zip(result, wanted, strict=True))


def any_weight(pattern: Pattern, columns: int, device: torch.device) -> PackedWeight:
    """Return a weight of this pattern and width, all of which have one column order."""
    return pack(torch.zeros(1, columns, dtype=torch.int8, device=device), pattern)


def _quantize_lift(
    dtype: torch.dtype, order: list[int], x: torch.Tensor, columns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    values, scale = ops.quantize_lift(x, columns, dtype, order=order)
    return values, scale


def _vllm_quantize(dtype: torch.dtype, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return vllm_quantize(x, dtype)


def _copy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return y.copy_(x)


def _copy_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return 0.0 if torch.equal(x, y) else 1.0


def _check(x: torch.Tensor, columns: torch.Tensor, dtype: torch.dtype) -> Callable[[Any], float]:
    def check(result: tuple[torch.Tensor, torch.Tensor]) -> float:
        values, scale = quantize_rows(ends(x), dtype)
        of_values = relative_error(ends(result[0]).float(), gather(values, columns).float())
        return max(of_values, relative_error(ends(result[1]), scale))

    return check
