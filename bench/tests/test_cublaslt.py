"""What of the cuBLASLt baseline can be said without a GPU."""

from __future__ import annotations

import ctypes

import pytest
import torch

from slidesparse import UnsupportedError
from slidesparse_bench.kernels import cublaslt_api


def test_the_result_has_the_librarys_layout() -> None:
    # cublasLtMatmulHeuristicResult_t: 64 bytes of algorithm, size_t, status, float, four ints.
    result = cublaslt_api.CublasLtAlgorithm
    assert ctypes.sizeof(result) == 96
    assert (result.workspace.offset, result.state.offset, result.waves.offset) == (64, 72, 76)


def test_without_the_library_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "1.0")
    cublaslt_api._library.cache_clear()
    with pytest.raises(UnsupportedError, match=r"libcublasLt\.so\.1 is not loaded; .*; needed a torch built for CUDA"):
        cublaslt_api._library()
    cublaslt_api._library.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "out"),
    [("int8", torch.int32), ("fp8", torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_the_type_of_a_product(dtype: str, out: torch.dtype) -> None:
    assert cublaslt_api.DenseProblem(1, 1, 1, dtype, False, 0).out_dtype == out
