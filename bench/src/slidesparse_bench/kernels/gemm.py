"""``bench gemm``: one product, every pattern on every backend against every available dense product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from slidesparse import ops
from slidesparse.gemm import Backend, Operand, Problem, get_backend
from slidesparse.lifting.layout import Layout
from slidesparse.tuning.checking import ends, relative_error
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.quant import QUANTISED
from slidesparse_bench.comparison import Refusal, Session, Subject, compare
from slidesparse_bench.kernels.dense import kernels
from slidesparse_bench.kernels.operands import (
    activations,
    expected,
    float_type,
    lifted,
    operand,
    packed_weight,
    problem_of,
    rounding_for,
    weight_bytes,
)
from slidesparse_bench.problems import HEADLINE, ideal_speedup
from slidesparse_bench.records import DENSE_VARIANT, Case, Record, Tried


@runtime_checkable
class Searched(Protocol):
    """A backend that searches among its own algorithms and can list them, for the record, after it has run."""

    def algorithms_tried(self, problem: Problem, tokens: int) -> Sequence[tuple[str, float | None, str | None]]:
        """Return (name, microseconds, why not) of every algorithm tried for a problem, the chosen one first."""
        ...


@runtime_checkable
class Bare(Protocol):
    """A backend that can run its product alone, for cases without scales; others are called without scales."""

    def bare(self, x: torch.Tensor, operand: Operand, out_features: int) -> torch.Tensor:
        """Multiply X [M, K'] -> at least [M, out], in the type in which the product leaves the GEMM."""
        ...


def measure(session: Session, case: Case) -> list[Record]:
    """Return the records of one case, dense first."""
    subjects, refusals = dense_subjects(session, case), []
    for name in session.backends:
        for label, variant in variants_of(session, case, get_backend(name)):
            found = _backend_subject(session, case, label, variant, name)
            if isinstance(found, Subject):
                subjects.append(found)
            else:
                refusals.append(found)
    return compare(session, case, subjects, refusals)


def variants_of(session: Session, case: Case, backend: Backend) -> list[tuple[str, str]]:
    """Return (label, variant) of everything that a backend is measured with.

    ``auto`` never takes a backend that is not accelerated, because it is no faster or rounds twice. Such a backend is
    measured at one pattern and under its own name, so that no table takes it for the fastest; without scales it rounds
    nothing that dense does not round too, and it counts like the others.
    """
    if not backend.layout.lifted:
        return [(DENSE_VARIANT, DENSE_VARIANT)]
    if backend.accelerated or not case.scaled:
        return [(variant, variant) for variant in session.patterns(case)]
    return [(f"{backend.name} {HEADLINE}", HEADLINE)]


def dense_subjects(session: Session, case: Case) -> list[Subject]:
    """Return every dense product of the case's type."""
    x = activations(case, DENSE_VARIANT, session.device)
    packed = packed_weight(DENSE_VARIANT, case.dtype, case.out_features, case.in_features, session.device)
    out_dtype = float_type(case.dtype)
    values, scale = lifted(x, packed, Layout(lifted=False))
    scale_w = packed.scale
    if not case.scaled and scale is not None and scale_w is not None:
        scale, scale_w = torch.ones_like(scale), torch.ones_like(scale_w)
    return [
        Subject(
            variant=DENSE_VARIANT,
            backend=kernel.backend,
            algorithm=kernel.algorithm,
            run=kernel.run,
            operands=(values, packed.unpack(), scale, scale_w),
            n_bytes=product_bytes(case, packed.n_bytes, values, out_dtype),
            check=error_against(x, packed, case.scaled),
            ideal_speedup=1.0,
            searched=partial(kernel.searched, case.tokens, case.out_features, case.in_features),
        )
        for kernel in kernels(packed.dtype, out_dtype, case.scaled)
    ]


def _backend_subject(session: Session, case: Case, label: str, variant: str, name: str) -> Subject | Refusal:
    backend, problem = get_backend(name), problem_of(case, variant, session.device, name)
    reason = backend.why_not(problem)
    if reason is not None:
        return Refusal(label, name, reason)
    x = activations(case, variant, session.device)
    weight = (variant, case.dtype, case.out_features, case.in_features, session.device)
    packed, multiplied = packed_weight(*weight, rounding_for(name, case.dtype)), operand(name, *weight)
    values, scale = lifted(x, packed, backend.layout, name)
    out_dtype = float_type(case.dtype)
    bare = isinstance(backend, Bare) and not case.scaled
    return Subject(
        variant=label,
        backend=name,
        algorithm="the product alone" if bare else "the backend's choice",
        run=partial(_bare if bare else _multiply, name, case.out_features, out_dtype),
        operands=(values, multiplied, *((scale, packed.scale) if case.scaled else (None, None))),
        n_bytes=product_bytes(case, weight_bytes(packed, multiplied), values, out_dtype),
        check=error_against(x, packed, case.scaled),
        ideal_speedup=ideal_speedup(variant),
        searched=partial(searched, name, problem, case.tokens),
    )


def searched(name: str, problem: Problem, tokens: int) -> Sequence[Tried]:
    """Return the algorithms that a backend's own search tried, if it tells."""
    backend = get_backend(name)
    return (
        [Tried(*found) for found in backend.algorithms_tried(problem, tokens)] if isinstance(backend, Searched) else []
    )


def _multiply(
    backend: str,
    out_features: int,
    out_dtype: torch.dtype,
    x: torch.Tensor,
    weight: Operand,
    scale_x: torch.Tensor | None,
    scale_w: torch.Tensor | None,
) -> torch.Tensor:
    y: torch.Tensor = ops.gemm(x, scale_x, list(weight), scale_w, None, out_features, out_dtype, backend)
    return y


def _bare(
    name: str, out_features: int, out_dtype: torch.dtype, x: torch.Tensor, weight: Operand, *scales: None
) -> torch.Tensor:
    backend = get_backend(name)
    assert isinstance(backend, Bare)
    return backend.bare(x, weight, out_features)


def error_against(x: torch.Tensor, packed: PackedWeight, scaled: bool) -> Callable[[torch.Tensor], float]:
    """Return a check of products: the relative error of their first and last rows."""
    reference: list[torch.Tensor] = []

    def check(y: torch.Tensor) -> float:
        if not reference:
            reference.append(expected(x, packed, scaled))
        return relative_error(ends(y[: len(x), : packed.shape[0]]), reference[0])

    return check


def product_bytes(case: Case, weight: int, x: torch.Tensor, out_dtype: torch.dtype) -> int:
    """Return the bytes of a product: activations as read, weight, scales of rows and tokens, output."""
    scales = 4 * (case.tokens + case.out_features) if x.dtype in QUANTISED and case.scaled else 0
    return x.nbytes + weight + scales + case.tokens * case.out_features * out_dtype.itemsize
