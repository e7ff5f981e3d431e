from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from slidesparse.base import torch_private

pytest.importorskip("triton", reason="Triton is not installed")

if not torch.cuda.is_available():
    from interpreter import complete

    complete()


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where kernels run: on the GPU where there is one, else in Triton's interpreter; the cases are the same."""
    has_gpu = torch.cuda.is_available()
    if (request.param == "cuda") != has_gpu:
        pytest.skip("no CUDA GPU" if not has_gpu else "Triton was imported for the GPU, not for its interpreter")
    return "cuda" if has_gpu else "cpu"


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors hold garbage, so that a byte that a kernel forgets shows."""

    def poisoned(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*shape: Any, **options: Any) -> torch.Tensor:
            tensor = empty(*shape, **options)
            if tensor.numel():
                tensor.view(torch.uint8).fill_(0xA5)
            return tensor

        return run

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    if torch.cuda.is_available():
        monkeypatch.setattr(torch_private, "_empty_strided", poisoned(torch_private._empty_strided))
