from __future__ import annotations

import pytest
import torch

from slidesparse import InputError
from slidesparse.gemm.reference import apply_scales
from slidesparse.gemm.scale import COLUMNS, ROWS, scale_rows

OUT_TYPES = [torch.bfloat16, torch.float16, torch.float32]


def _accumulator(rows: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype == torch.int32:
        return torch.randint(-(2**30), 2**30, (rows, columns), dtype=dtype, device=device)
    return (torch.randn(rows, columns, device=device) * 1e4).to(dtype)


def _factors(tokens: int, out: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(tokens, 1, device=device) * 1e-3, torch.rand(out, device=device) * 1e-3


@pytest.mark.parametrize("out_dtype", OUT_TYPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_bits_of_the_definition(
    out_dtype: torch.dtype, dtype: torch.dtype, bias_dtype: torch.dtype | None, device: str
) -> None:
    # The bias is as large as the product, so that it shows whether the multiply-add is fused.
    tokens, out = 2 * ROWS + 1, COLUMNS + 37
    acc = _accumulator(tokens, out, dtype, device)
    scale_x, scale_w = _factors(tokens, out, device)
    bias = None if bias_dtype is None else (torch.randn(out, device=device) * 100).to(bias_dtype)
    y = scale_rows(acc, scale_x, scale_w, bias, tokens, out, out_dtype)
    if device == "cpu" and bias is not None:
        # Triton's interpreter rounds product and sum of a multiply-add apart, and may take either order of the sum.
        y, exact = y.double(), apply_scales(acc, scale_x, scale_w, bias, torch.float32).double()
        ulp = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-22}[out_dtype]
        assert bool(((y - exact).abs() <= ulp * (exact.abs() + 100)).all())
    else:
        assert torch.equal(y, apply_scales(acc, scale_x, scale_w, bias, out_dtype))


@pytest.mark.parametrize(("tokens", "out"), [(1, 1), (3, 16), (ROWS, 40), (17, 100), (0, 8)])
def test_padding_is_not_read(tokens: int, out: int, device: str) -> None:
    acc = torch.full((tokens + 15, out + 24), float("nan"), device=device)
    acc[:tokens, :out] = torch.randn(tokens, out, device=device)
    scale_x, scale_w = _factors(tokens, out, device)
    y = scale_rows(acc, scale_x, scale_w, None, tokens, out, torch.float32)
    assert y.is_contiguous()
    assert torch.equal(y, apply_scales(acc[:tokens, :out], scale_x, scale_w, None, torch.float32))


@pytest.mark.parametrize("missing", ["scale_x", "scale_w", "both"])
def test_without_scales(missing: str, device: str) -> None:
    acc = _accumulator(6, 48, torch.float32, device)
    scale_x, scale_w = _factors(6, 48, device)
    scales = (None if missing != "scale_w" else scale_x, None if missing != "scale_x" else scale_w)
    assert torch.equal(
        scale_rows(acc, *scales, None, 6, 48, torch.bfloat16), apply_scales(acc, *scales, None, torch.bfloat16)
    )


@pytest.mark.parametrize("name", ["token scales", "channel scales", "bias"])
@pytest.mark.parametrize("fault", ["short", "strided", "elsewhere"])
def test_vectors_that_do_not_fit_are_refused(name: str, fault: str, device: str) -> None:
    lengths = {"token scales": 4, "channel scales": 32, "bias": 32}
    given = {known: torch.ones(length, device=device) for known, length in lengths.items()}
    wrong = {
        "short": given[name][1:],
        "strided": torch.ones(2 * lengths[name], device=device)[::2],
        "elsewhere": given[name].to("cpu" if device == "cuda" else "meta"),
    }
    given[name] = wrong[fault]
    acc = torch.zeros(4, 32, dtype=torch.int32, device=device)
    with pytest.raises(InputError):
        scale_rows(acc, *given.values(), 4, 32, torch.float32)
