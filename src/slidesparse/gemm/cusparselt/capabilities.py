"""Kernels of cuSPARSELt by type and GPU, from NVIDIA's own list.

The list is in the descriptions of the wheels nvidia-cusparselt-cu13 0.8.0, 0.9.1 and 0.10.0. They agree, except that
10.3 is in it from 0.9.1 on: for 16-bit types and FP8, and not for INT8. Since 0.8.0 the library promises kernels for
later architectures, too, so a GPU newer than the list is not refused.
"""

from __future__ import annotations

import torch

from slidesparse.weights.quant import dtype_name

OLDEST = (8, 0)
"""Ampere: the first Sparse Tensor Cores."""

OLDEST_FP8 = (8, 9)

WITHOUT = {torch.int8: ((10, 3),)}
"""Type -> listed architectures without its kernels."""


def why_no_kernels(dtype: torch.dtype, capability: tuple[int, int]) -> str | None:
    """Return the reason why a compute capability has no kernels of a type; None if it has, or is not listed yet.

    >>> why_no_kernels(torch.int8, (10, 3))
    'cuSPARSELt has no int8 kernels for compute capability 10.3; use fp8'
    """
    if capability < OLDEST:
        return f"{_text(capability)} has no Sparse Tensor Cores; it needs {_text(OLDEST)}"
    if dtype == torch.float8_e4m3fn and capability < OLDEST_FP8:
        return f"FP8 needs {_text(OLDEST_FP8)}, this GPU has {_text(capability)}"
    if capability in WITHOUT.get(dtype, ()):
        return f"cuSPARSELt has no {dtype_name(dtype)} kernels for {_text(capability)}; use fp8"
    return None


def _text(capability: tuple[int, int]) -> str:
    return f"compute capability {capability[0]}.{capability[1]}"
