"""Dense products that a user would run without sparsity, in every way that is available.

All of them are timed in every comparison; the record of a library names its fastest and lists the others. The kernel
applies scales where it can, else one compiled kernel after it does. ``_scaled_mm``, ``_int_mm`` and matmul are torch's
calls of cuBLASLt, with the first algorithm of its heuristics (and of torch's CUTLASS kernel, for row-wise FP8);
``cublaslt`` is the library with the fastest of all algorithms that its heuristics name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from slidesparse.base.torch_private import fp8_mm, int8_mm
from slidesparse.gemm.reference import apply_scales
from slidesparse.weights.quant import QUANTISED, dtype_name
from slidesparse_bench.kernels import cublaslt
from slidesparse_bench.records import Tried

Multiply = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"], torch.Tensor]
"""(x [M, K], weight [N, K], scale_x [M, 1], scale_w [N]) -> [M, N]; scales of ones for a bare product."""


@dataclass(frozen=True)
class DenseKernel:
    """A dense product.

    Attributes:
        backend: The library that it comes from.
        algorithm: Its name among the library's products.
        run: Multiplies.
        bare_only: It cannot apply scales, so it counts only where none are asked for.
        searched: (M, N, K) -> the algorithms that a search of its own tried, the fastest first; called after a run.
    """

    backend: str
    algorithm: str
    run: Multiply
    bare_only: bool = False
    searched: Callable[[int, int, int], Sequence[Tried]] = lambda *_: ()


def kernels(dtype: torch.dtype, out_dtype: torch.dtype, scaled: bool) -> list[DenseKernel]:
    """Return the dense products of a type that can run here.

    Args:
        dtype: Type of both operands.
        out_dtype: Type of the result; a bare INT8 product may also come as int32.
        scaled: Scales are to be applied.
    """
    if dtype not in QUANTISED:
        found = [
            DenseKernel("torch", f"matmul, {library}", _with_library(library)) for library in ("cublaslt", "cublas")
        ]
    elif dtype == torch.int8:
        found = [
            DenseKernel("torch", "_int_mm, int32 out", lambda x, w, sx, sw: int8_mm(x, w.t()), bare_only=True),
            DenseKernel("torch", "_int_mm, compiled scales", _int8_scaled(out_dtype)),
        ]
    else:
        found = [DenseKernel("torch", f"_scaled_mm row-wise{_fast(f)}", _fp8_rows(out_dtype, f)) for f in (True, False)]
        found += [
            DenseKernel("torch", f"_scaled_mm{_fast(f)}", _fp8_tensor(out_dtype, f), bare_only=True)
            for f in (True, False)
        ]
    vllm = vllm_ops()
    if vllm is not None and dtype in QUANTISED:
        found.append(DenseKernel("vllm", "cutlass_scaled_mm", _vllm(vllm, out_dtype)))
    if torch.cuda.is_available():
        found.append(_cublaslt(dtype_name(dtype), out_dtype, scaled))
    return [kernel for kernel in found if not (scaled and kernel.bare_only)]


def _cublaslt(dtype: str, out_dtype: torch.dtype, scaled: bool) -> DenseKernel:
    """Return the product by cuBLASLt's best algorithm; INT8 leaves it as int32, and the compiled kernel scales it."""
    in_kernel = scaled and dtype == "fp8"

    def run(x: torch.Tensor, w: torch.Tensor, sx: torch.Tensor | None, sw: torch.Tensor | None) -> torch.Tensor:
        y = cublaslt.multiply(x, w, (sx, sw) if in_kernel and sx is not None and sw is not None else None, dtype)
        if scaled and dtype == "int8":
            y = _compiled_scales()(y, sx, sw, None, out_dtype)
        return y

    def searched(tokens: int, out: int, columns: int) -> Sequence[Tried]:
        return cublaslt.search(cublaslt.dense_problem(tokens, out, columns, dtype, in_kernel)).tried

    return DenseKernel("cublaslt", "the best of its heuristics", run, searched=searched)


def _fast(fast: bool) -> str:
    return ", fast accumulation" if fast else ""


def _with_library(library: str) -> Multiply:
    def run(x: torch.Tensor, w: torch.Tensor, sx: torch.Tensor | None, sw: torch.Tensor | None) -> torch.Tensor:
        if not x.is_cuda:
            return torch.nn.functional.linear(x, w)
        before = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library(library)
        try:
            return torch.nn.functional.linear(x, w)
        finally:
            torch.backends.cuda.preferred_blas_library(before)

    return run


def _int8_scaled(out_dtype: torch.dtype) -> Multiply:
    def run(x: torch.Tensor, w: torch.Tensor, sx: torch.Tensor | None, sw: torch.Tensor | None) -> torch.Tensor:
        y: torch.Tensor = _compiled_scales()(int8_mm(x, w.t()), sx, sw, None, out_dtype)
        return y

    return run


@lru_cache(maxsize=1)
def _compiled_scales() -> Callable[..., Any]:
    return torch.compile(apply_scales, dynamic=True)


def _fp8_rows(out_dtype: torch.dtype, fast: bool) -> Multiply:
    def run(x: torch.Tensor, w: torch.Tensor, sx: torch.Tensor | None, sw: torch.Tensor | None) -> torch.Tensor:
        assert sx is not None
        assert sw is not None
        y: torch.Tensor = fp8_mm(x, w.t(), sx, sw[None, :], out_dtype=out_dtype, use_fast_accum=fast)
        return y

    return run


def _fp8_tensor(out_dtype: torch.dtype, fast: bool) -> Multiply:
    def run(x: torch.Tensor, w: torch.Tensor, sx: torch.Tensor | None, sw: torch.Tensor | None) -> torch.Tensor:
        assert sx is not None
        assert sw is not None
        y: torch.Tensor = fp8_mm(x, w.t(), sx[0, 0], sw[0], out_dtype=out_dtype, use_fast_accum=fast)
        return y

    return run


def _vllm(ops: Any, out_dtype: torch.dtype) -> Multiply:
    def run(x: torch.Tensor, w: torch.Tensor, sx: torch.Tensor | None, sw: torch.Tensor | None) -> torch.Tensor:
        assert sw is not None
        y: torch.Tensor = ops.cutlass_scaled_mm(x, w.t(), sx, sw[:, None], out_dtype)
        return y

    return run


@lru_cache(maxsize=1)
def vllm_ops() -> Any:
    """Import the custom operators of vLLM; None where vLLM cannot be imported."""
    try:
        return importlib.import_module("vllm._custom_ops")
    except (ImportError, OSError, RuntimeError):  # a vLLM built for another torch fails in many ways
        return None


def vllm_quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise per token as vLLM does it: x [M, K] -> values [M, K], scale [M, 1]."""
    if dtype == torch.int8:
        values, scale, _ = vllm_ops().scaled_int8_quant(x)
    else:
        values, scale = vllm_ops().scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    return values, scale
