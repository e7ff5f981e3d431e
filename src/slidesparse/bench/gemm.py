"""``bench gemm``: one product, every pattern on every backend against every dense product at hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from slidesparse.bench.comparison import Refusal, Session, Subject, compare, ends, relative_error
from slidesparse.bench.dense import kernels
from slidesparse.bench.operands import activations, expected, float_type, lifted, operand, packed_weight, problem_of
from slidesparse.bench.problems import ideal_speedup
from slidesparse.gemm import Problem, get_backend
from slidesparse.packed import PackedWeight
from slidesparse.quant import QUANTISED
from slidesparse.records import DENSE, Case, Record


@runtime_checkable
class Searched(Protocol):
    """A backend that searches among algorithms of its own may say which, for the record; asked after it has run."""

    def algorithms_tried(self, problem: Problem, tokens: int) -> Sequence[str]:
        """Names of the algorithms tried for a problem, the chosen one first."""
        ...


def measure(session: Session, case: Case) -> list[Record]:
    """The records of one case, dense first."""
    subjects, refusals = dense_subjects(session, case), []
    for name in session.backends:
        variants = session.patterns(case) if get_backend(name).layout.lifted else (DENSE,)
        for variant in variants:
            found = _backend_subject(session, case, variant, name)
            if isinstance(found, Subject):
                subjects.append(found)
            else:
                refusals.append(found)
    return compare(session, case, subjects, refusals)


def dense_subjects(session: Session, case: Case) -> list[Subject]:
    """Every dense product of the case's type."""
    x = activations(case, DENSE, session.device)
    packed = packed_weight(DENSE, case.dtype, case.out_features, case.in_features, session.device)
    out_dtype = float_type(case.dtype)
    values, scale = lifted(x, packed, get_backend("dense").layout)
    scale_w = packed.scale
    if not case.scaled and scale is not None and scale_w is not None:
        scale, scale_w = torch.ones_like(scale), torch.ones_like(scale_w)
    return [
        Subject(
            variant=DENSE,
            backend=kernel.backend,
            algorithm=kernel.algorithm,
            run=kernel.run,
            operands=(values, packed.unpack(), scale, scale_w),
            n_bytes=product_bytes(case, packed, values, out_dtype),
            check=error_against(x, packed, case.scaled),
            ideal_speedup=1.0,
        )
        for kernel in kernels(packed.dtype, out_dtype, case.scaled)
    ]


def _backend_subject(session: Session, case: Case, variant: str, name: str) -> Subject | Refusal:
    backend, problem = get_backend(name), problem_of(case, variant, session.device)
    reason = backend.why_not(problem)
    if reason is not None:
        return Refusal(variant, name, reason)
    x = activations(case, variant, session.device)
    weight = (variant, case.dtype, case.out_features, case.in_features, session.device)
    packed = packed_weight(*weight)
    values, scale = lifted(x, packed, backend.layout)
    out_dtype = float_type(case.dtype)
    return Subject(
        variant=variant,
        backend=name,
        algorithm="the backend's choice",
        run=partial(_multiply, name, out_dtype),
        operands=(
            values,
            scale if case.scaled else None,
            operand(name, *weight),
            packed.scale if case.scaled else None,
        ),
        n_bytes=product_bytes(case, packed, values, out_dtype),
        check=error_against(x, packed, case.scaled),
        ideal_speedup=ideal_speedup(variant),
        searched=partial(searched, name, problem, case.tokens),
    )


def searched(name: str, problem: Problem, tokens: int) -> Sequence[str]:
    """What a backend's own search tried, if it tells."""
    backend = get_backend(name)
    return backend.algorithms_tried(problem, tokens) if isinstance(backend, Searched) else ()


def _multiply(
    backend: str,
    out_dtype: torch.dtype,
    x: torch.Tensor,
    scale_x: torch.Tensor | None,
    weight: tuple[torch.Tensor, ...],
    scale_w: torch.Tensor | None,
) -> torch.Tensor:
    return get_backend(backend).matmul(x, scale_x, weight, scale_w, None, out_dtype)


def error_against(x: torch.Tensor, packed: PackedWeight, scaled: bool) -> Callable[[torch.Tensor], float]:
    """A check of products: the relative error of their first and last rows."""
    reference: list[torch.Tensor] = []

    def check(y: torch.Tensor) -> float:
        if not reference:
            reference.append(expected(x, packed, scaled))
        return relative_error(ends(y), reference[0])

    return check


def product_bytes(case: Case, packed: PackedWeight, x: torch.Tensor, out_dtype: torch.dtype) -> int:
    """Activations as they are read, the packed weight, its scales and those of the tokens, the output."""
    scales = 4 * (case.tokens + case.out_features) if packed.dtype in QUANTISED and case.scaled else 0
    return x.nbytes + packed.n_bytes + scales + case.tokens * case.out_features * out_dtype.itemsize
