"""The dense baseline that tries every algorithm of cuBLASLt, and cuSPARSELt's product alone, on a GPU."""

from __future__ import annotations

import pytest
import torch

from slidesparse.gemm import Problem, get_backend
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.pruning import prune_mask
from slidesparse.weights.packed import pack_by
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import DTYPES
from slidesparse.weights.slide import gather
from slidesparse_bench.kernels import cublaslt
from slidesparse_bench.kernels.dense import kernels

pytestmark = pytest.mark.gpu

M, N, K = 48, 320, 512


def _operands(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    if dtype == "int8":
        return tuple(torch.randint(-128, 128, (rows, K), dtype=torch.int8, device="cuda") for rows in (M, N))
    return tuple(torch.randn(rows, K, device="cuda").to(DTYPES[dtype]) for rows in (M, N))


def _error(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16", "fp16"])
def test_the_product_alone(dtype: str) -> None:
    x, w = _operands(dtype)
    y, expected = cublaslt.multiply(x, w, None, dtype), product(x, w)
    if dtype == "int8":
        assert torch.equal(y, expected)
    else:
        assert _error(y, expected) < 5e-3  # one rounding to bf16 costs 2e-3
    tried = cublaslt.search(cublaslt.dense_problem(M, N, K, dtype, False)).tried
    times = [one.median_us for one in tried if one.median_us is not None]
    assert times == sorted(times)
    assert len(times) > 1
    assert not [one for one in tried if one.why_not == "wrong product"]


def test_scales_along_rows_and_columns_inside_the_kernel() -> None:
    x, w = _operands("fp8")
    scale_x, scale_w = torch.rand(M, 1, device="cuda"), torch.rand(N, device="cuda")
    expected = apply_scales(product(x, w), scale_x, scale_w, None, torch.float32)
    y = cublaslt.multiply(x, w, (scale_x, scale_w), "fp8")
    assert _error(y, expected) < 5e-3
    # The next call's scales are its own.
    twice = cublaslt.multiply(x, w, (2 * scale_x, scale_w), "fp8")
    assert _error(twice, 2 * expected) < 5e-3


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
@pytest.mark.parametrize("scaled", [False, True])
def test_every_dense_baseline_gives_the_product(dtype: str, scaled: bool) -> None:
    x, w = _operands(dtype)
    scale_x, scale_w = torch.rand(M, 1, device="cuda"), torch.rand(N, device="cuda")
    if dtype == "bf16" or not scaled:
        scale_x, scale_w = torch.ones_like(scale_x), torch.ones_like(scale_w)
    expected = apply_scales(product(x, w), scale_x, scale_w, None, torch.float32)
    found = kernels(DTYPES[dtype], torch.bfloat16, scaled)
    assert "cublaslt" in {kernel.backend for kernel in found}
    for kernel in found:
        assert _error(kernel.run(x, w, scale_x, scale_w), expected) < 5e-3, kernel.algorithm


@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_cusparselts_product_alone(dtype: str) -> None:
    backend, (x, w) = get_backend("cusparselt"), _operands(dtype)
    problem = Problem(Pattern(6, 8), DTYPES[dtype], N, K, torch.device("cuda"))
    if (why := backend.why_not(problem)) is not None:
        pytest.skip(why)
    w = (w.float() * prune_mask(w.float(), "6:8")).to(w.dtype)
    packed = pack_by(w, "6:8")
    lifted = gather(x, backend.layout.column_map(packed))
    y = backend.bare(lifted, backend.prepare(packed), N)[:M, :N]
    if dtype == "int8":
        assert torch.equal(y, product(x, w))
    else:
        assert _error(y, product(x, w)) < 5e-3
