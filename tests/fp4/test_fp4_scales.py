from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from fp4_oracles import nearest, value

from slidesparse import InputError
from slidesparse.weights.fp4 import MXFP4, NVFP4, Fp4Format, Fp4Tensor, quantize_fp4, unpack_bytes

FORMATS = pytest.mark.parametrize("fp4", [NVFP4, MXFP4], ids=lambda fp4: fp4.name)


def _matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows and blocks of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(2 * torch.randn(rows, columns, generator=generator))
    return torch.randn(rows, columns, generator=generator) * sizes


@FORMATS
@pytest.mark.parametrize("columns", [2, 16, 30, 32, 34, 128, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_the_nearest_and_numbers_are_exact(fp4: Fp4Format, columns: int, dtype: torch.dtype) -> None:
    x = _matrix(3, columns).to(dtype)
    q = quantize_fp4(x, fp4)
    codes, numbers, factor = unpack_bytes(q.pairs), q.dequantize(), Fraction(q.tensor_scale.item())
    for row in range(3):
        for column in range(columns):
            scale = Fraction(q.block_scale()[row, column // fp4.block].item()) * factor
            code = int(codes[row, column])
            assert code == (nearest(Fraction(x[row, column].item()) / scale) if scale else 0)
            assert Fraction(numbers[row, column].item()) == value(code) * scale


def test_nvfp4_scales_follow_their_formula() -> None:
    x = _matrix(4, 64)
    q = quantize_fp4(x, NVFP4)
    assert q.tensor_scale == x.abs().max() / 2688
    wanted = x.abs().unflatten(1, (-1, 16)).amax(-1).double() / (6 * q.tensor_scale.double())
    error = (q.block_scale() - wanted).abs()
    assert bool((error <= wanted.clamp(min=2.0**-6) * 2.0**-4).all())  # half a step of three mantissa bits
    assert q.block_scale().max() == 448
    assert q.dequantize().abs().max() == pytest.approx(x.abs().max().item(), rel=1e-6)


def test_mxfp4_scales_are_the_powers_of_two_of_the_standard() -> None:
    largest = torch.tensor([4.0, 6.0, 7.99, 8.0, 1.0, 2.0**-149, 3e38, 0.0])
    x = torch.zeros(1, 256)
    x[0, ::32] = largest
    q = quantize_fp4(x, MXFP4)
    assert q.scale.tolist() == [[127, 127, 127, 128, 125, 0, 127 + 125, 0]]
    assert q.dequantize()[0, ::32].tolist() == [4, 6, 6, 8, 1, 0, 6 * 2.0**125, 0]


@FORMATS
def test_zeros_and_the_smallest_numbers(fp4: Fp4Format) -> None:
    assert not quantize_fp4(torch.zeros(2, 32), fp4).pairs.any()
    assert quantize_fp4(torch.zeros(0, 32), fp4).dequantize().shape == (0, 32)
    tiny = torch.full((1, 32), 2.0**-149)
    assert not quantize_fp4(tiny, fp4).pairs.any()  # below any scale, and no NaN of 0 / 0
    x = torch.full((1, 32), 2.0**-12)
    x[0, 16:] = 2688.0
    assert not quantize_fp4(x, NVFP4).dequantize()[0, :16].any()  # the block's scale rounds to 0


@FORMATS
def test_shared_scales_repeat_and_fit_the_largest(fp4: Fp4Format) -> None:
    x = _matrix(2, 300)
    q = quantize_fp4(x, fp4, share=2 * fp4.block)
    bits = q.scale.view(torch.uint8)
    assert torch.equal(bits[:, 1::2], bits[:, : bits.shape[1] - 1 : 2])
    wider = fp4._replace(block=2 * fp4.block)
    assert torch.equal(bits[:, ::2], quantize_fp4(x, wider).scale.view(torch.uint8))
    assert torch.equal(q.dequantize().sign(), torch.where(q.dequantize() == 0, 0, x.sign().double()))


@pytest.mark.parametrize(
    ("x", "share", "message"),
    [
        (torch.zeros(2, 31), None, "come in pairs"),
        (torch.zeros(2, 32, dtype=torch.int8), None, "quantised already"),
        (torch.full((2, 32), float("nan")), None, "NaN"),
        (torch.zeros(2, 32), 24, "share a scale.*16"),
        (torch.zeros(2, 32), 0, "share a scale"),
        (torch.zeros(2, 32), 1.5, "whole number"),
    ],
)
def test_what_cannot_be_quantised_is_refused(x: torch.Tensor, share: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantize_fp4(x, NVFP4, share=share)


@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("pairs", torch.zeros(2, 16), r"pairs.*uint8"),
        ("scale", torch.zeros(2, 3).to(torch.float8_e4m3fn), r"scale.*float8"),
        ("scale", torch.zeros(2, 2, dtype=torch.uint8), r"scale.*uint8"),
        ("scale", torch.full((2, 2), -1.0).to(torch.float8_e4m3fn), "finite scales"),
        ("scale", torch.full((2, 2), float("nan")).to(torch.float8_e4m3fn), "finite scales"),
        ("tensor_scale", torch.ones(1), "tensor_scale"),
        ("tensor_scale", 1.0, "tensor_scale"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(field: str, wrong: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(quantize_fp4(torch.ones(2, 32), NVFP4), **{field: wrong})


def test_the_scale_that_is_no_number_is_refused_in_mxfp4() -> None:
    q = quantize_fp4(torch.ones(1, 32), MXFP4)
    with pytest.raises(InputError, match="finite scales >= 0"):
        Fp4Tensor(MXFP4, q.pairs, torch.full_like(q.scale, 255), q.tensor_scale, 32)
