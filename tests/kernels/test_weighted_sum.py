"""The sum over the experts of a token: the kernel has the bits of torch."""

from __future__ import annotations

import pytest
import torch

from slidesparse import InputError
from slidesparse.lifting import expert_sum_kernel as kernel
from slidesparse.lifting.expert_sum import weighted_sum


@pytest.mark.parametrize("columns", [64, 1024, 1500])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernel_has_the_bits_of_torch(device: str, dtype: torch.dtype, columns: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, columns, generator=generator).to(dtype)
    rows = torch.stack([torch.randperm(40, generator=generator)[:3] for _ in range(7)])
    rows[2, 1] = rows[5] = -1
    x[~torch.isin(torch.arange(40), rows)] = float("nan")  # rows of nobody hold anything
    weights = torch.rand(7, 3, generator=generator)
    expected = weighted_sum(x, rows, weights)
    assert torch.isfinite(expected).all()
    assert not expected[5].any()
    y = kernel.weighted_sum(x.to(device), rows.to(device), weights.to(device))
    assert torch.equal(y.cpu(), expected)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError):
        weighted_sum(torch.randn(4, 8), torch.zeros(2, 2, dtype=torch.int64), torch.rand(2, 3))
    with pytest.raises(InputError):
        weighted_sum(torch.randn(8, 4).T, torch.zeros(2, 2, dtype=torch.int64), torch.rand(2, 2))
