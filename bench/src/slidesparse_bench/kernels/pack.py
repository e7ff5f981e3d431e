"""``bench pack``: the time to load a weight: check and pack it, then reorder it for a backend."""

from __future__ import annotations

from functools import partial

import torch

from slidesparse import ops
from slidesparse.gemm import Operand, get_backend
from slidesparse.tuning.checking import relative_error
from slidesparse.tuning.measure import gaussian
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.packing import pack
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.support import as_bits
from slidesparse_bench.comparison import Refusal, Session, Subject, compare
from slidesparse_bench.kernels.operands import expected, float_type, lifted, packed_weight, problem_of, rounding_for
from slidesparse_bench.records import CONTROL, Case, Record

CHECK_TOKENS = 64
"""Rows of activations with which a prepared operand is checked."""


def measure(session: Session, case: Case) -> list[Record]:
    """Return the records of one case: ``pack PATTERN`` and, for each backend, ``prepare PATTERN``."""
    subjects, refusals = [], []
    for variant in session.patterns(case):
        if variant == CONTROL:
            continue
        packed = packed_weight(variant, case.dtype, case.out_features, case.in_features, session.device)
        weight = packed.unpack()
        subjects.append(
            Subject(
                variant=f"pack {variant}",
                backend="slidesparse",
                algorithm="",
                run=partial(_pack, packed.pattern),
                operands=(weight,),
                n_bytes=weight.nbytes + packed.n_bytes,
                check=partial(_unpacks_to, weight),
                capture=False,  # it waits for the outcome of its checks
            )
        )
        for name in session.backends:
            backend = get_backend(name)
            if not (backend.layout.lifted and backend.accelerated):
                continue
            reason = backend.why_not(problem_of(case, variant, session.device, name))
            if reason is not None:
                refusals.append(Refusal(f"prepare {variant}", name, reason))
                continue
            size = (case.dtype, case.out_features, case.in_features, session.device)
            own = packed_weight(variant, *size, rounding_for(name, case.dtype))
            subjects.append(
                Subject(
                    variant=f"prepare {variant}",
                    backend=name,
                    algorithm="",
                    run=backend.prepare,
                    operands=(own,),
                    n_bytes=2 * own.n_bytes,
                    check=partial(_multiplies, own, name, case),
                    capture=False,
                )
            )
    return compare(session, case, subjects, refusals)


def _pack(pattern: Pattern, weight: torch.Tensor) -> PackedWeight:
    return pack(weight, pattern)


def _unpacks_to(weight: torch.Tensor, packed: PackedWeight) -> float:
    return 0.0 if torch.equal(as_bits(packed.unpack()), as_bits(weight)) else 1.0


def _multiplies(packed: PackedWeight, name: str, case: Case, operand: Operand) -> float:
    backend, dtype = get_backend(name), float_type(case.dtype)
    x = gaussian(CHECK_TOKENS, packed.shape[1], dtype=dtype, device=packed.device)
    values, scale = lifted(x, packed, backend.layout, name)
    y = ops.gemm(values, scale, list(operand), packed.scale, None, packed.shape[0], dtype, name)
    return relative_error(y, expected(x, packed, True))
