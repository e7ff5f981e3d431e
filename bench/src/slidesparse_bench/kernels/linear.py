"""``bench linear``: a whole SlideLinear against a whole dense quantised linear, the difference that users notice.

Both take bf16 (fp16) activations and give bf16 (fp16) outputs: quantise, multiply, apply scales. Host time per call is
measured too.
"""

from __future__ import annotations

from functools import partial

import torch

from slidesparse import ops
from slidesparse.errors import UnsupportedError
from slidesparse.gemm import get_backend
from slidesparse.layer.linear import SlideLinear
from slidesparse.lifting.layout import ColumnOrder
from slidesparse.weights.quant import QUANTISED, parse_dtype
from slidesparse_bench.comparison import Refusal, Session, Subject, compare
from slidesparse_bench.kernels.dense import DenseKernel, kernels, vllm_ops, vllm_quantize
from slidesparse_bench.kernels.gemm import error_against, variants_of
from slidesparse_bench.kernels.operands import (
    activations,
    float_type,
    packed_weight,
    rounding_for,
    weight_bytes,
)
from slidesparse_bench.problems import HEADLINE, ideal_speedup
from slidesparse_bench.records import CONTROL, DENSE_VARIANT, Case, Record

AUTO = "auto"
"""The backend choice ``auto``. With its dense fallback it should never be slower than dense, so it is measured too."""

AUTO_PATTERNS = ("2:4", HEADLINE)
"""Patterns at which ``auto`` is measured: one at which sparse often wins, and one at which it seldom does."""


def measure(session: Session, case: Case) -> list[Record]:
    """Return the records of one case, dense first."""
    subjects, refusals = _dense_subjects(session, case), []
    wanted = [
        (label, variant, name)
        for name in session.backends
        for label, variant in variants_of(session, case, get_backend(name))
        if variant != CONTROL  # not a layer: its activations have twice the columns
    ]
    wanted += [(f"{AUTO} {pattern}", pattern, AUTO) for pattern in AUTO_PATTERNS if pattern in session.patterns(case)]
    for label, variant, name in wanted:
        try:
            subjects.append(layer_subject(session, case, label, variant, name))
        except UnsupportedError as error:
            refusals.append(Refusal(label, name, str(error)))
    return compare(session, case, subjects, refusals, host=True)


def layer_subject(session: Session, case: Case, label: str, variant: str, name: str) -> Subject:
    """Return a whole SlideLinear on a backend (or ``auto``), ready to be timed.

    Raises:
        UnsupportedError: The backend cannot run it.
    """
    rounding = rounding_for(name, case.dtype)
    packed = packed_weight(variant, case.dtype, case.out_features, case.in_features, session.device, rounding)
    layer = SlideLinear(packed, backend=name)
    x = activations(case, variant, session.device)
    chosen = layer.choice.at(case.tokens)
    form = next(form for form in layer.forms if form.backend == chosen)
    return Subject(
        variant=label,
        backend=name,
        algorithm=chosen,
        run=_call,
        operands=(layer, x),
        n_bytes=_bytes(case, weight_bytes(packed, form.operand), x),
        check=error_against(x, packed, True),
        ideal_speedup=ideal_speedup(variant),
    )


def _call(layer: SlideLinear, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = layer(x)
    return y


def _dense_subjects(session: Session, case: Case) -> list[Subject]:
    packed = packed_weight(DENSE_VARIANT, case.dtype, case.out_features, case.in_features, session.device)
    x = activations(case, DENSE_VARIANT, session.device)
    columns = torch.arange(case.in_features, device=session.device)
    quantisers = ["ours"] + (["vllm"] if vllm_ops() is not None else [])
    return [
        Subject(
            variant=DENSE_VARIANT,
            backend=kernel.backend,
            algorithm=f"{quantiser} quantisation + {kernel.algorithm}"
            if packed.dtype in QUANTISED
            else kernel.algorithm,
            run=partial(_dense_linear, kernel, packed.dtype, quantiser),
            operands=(x, packed.unpack(), packed.scale, columns),
            n_bytes=_bytes(case, packed.n_bytes, x),
            check=error_against(x, packed, True),
            ideal_speedup=1.0,
            searched=partial(kernel.searched, case.tokens, case.out_features, case.in_features),
        )
        for kernel in kernels(packed.dtype, float_type(case.dtype), scaled=True)
        for quantiser in (quantisers if packed.dtype in QUANTISED else ["no"])
    ]


def _dense_linear(
    kernel: DenseKernel,
    dtype: torch.dtype,
    quantiser: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    scale_w: torch.Tensor | None,
    columns: torch.Tensor,
) -> torch.Tensor:
    if dtype not in QUANTISED:
        return kernel.run(x, weight, None, None)
    if quantiser == "vllm":
        values, scale = vllm_quantize(x, dtype)
    else:
        values, scale = ops.quantize_lift(x, columns, dtype, order=ColumnOrder.identity(x.shape[1]).numbers)
    return kernel.run(values, weight, scale, scale_w)


def _bytes(case: Case, weight: int, x: torch.Tensor) -> int:
    """Return the bytes of float activations, weight, scales and output, without what passes between kernels."""
    scales = 4 * case.out_features if parse_dtype(case.dtype) in QUANTISED else 0
    return x.nbytes + weight + scales + case.tokens * case.out_features * x.itemsize
