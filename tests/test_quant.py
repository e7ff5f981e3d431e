from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracles import e4m3_values, sglang_fp8, sglang_int8, vllm_fp8, vllm_int8

from slidesparse import InputError
from slidesparse.weights.quant import (
    DTYPES,
    ROWS_AT_ONCE,
    ActivationRounding,
    _ties_away,
    check_rounding,
    dequantize,
    dtype_name,
    parse_dtype,
    quantize_rows,
    quantize_rows_to_six_bits,
    quantize_weight,
    ternary_scale,
    ternary_weight,
)
from slidesparse.weights.support import value_bits

Oracle = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
ROWS = {
    "gaussian": lambda: torch.randn(7, 96),
    "zero": lambda: torch.zeros(2, 96),
    "absmax 1e-3": lambda: 1e-3 * torch.rand(7, 96).clamp(min=0.01),
    "one outlier": lambda: torch.cat([torch.randn(5, 95), torch.full((5, 1), 3e4)], 1),
    "subnormal": lambda: torch.rand(5, 96) * 1e-40,
    # Half of absmax is 63.5 steps: where it goes depends on the last bit of 127 / absmax.
    "half of absmax": lambda: (torch.rand(999, 1) + 1) * torch.tensor([[0.5, -0.5, 1.0, 0.25]]),
    "ties": lambda: torch.arange(-127, 128).repeat(2, 1) / 2,
    "huge": lambda: torch.randn(5, 96).clamp(-2, 2) * 3e4,
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("activation_rounding", "oracle"), [("vllm", vllm_int8), ("sglang", sglang_int8)])
def test_int8_follows_a_server_bit_for_bit(
    activation_rounding: ActivationRounding, oracle: Oracle, rows: str, dtype: torch.dtype
) -> None:
    x = ROWS[rows]().to(dtype)
    values, scale = quantize_rows(x, torch.int8, activation_rounding)
    expected, expected_scale = oracle(x.float().numpy())
    assert scale.dtype == torch.float32
    assert np.array_equal(values.numpy(), expected)
    assert np.array_equal(scale.numpy(), expected_scale)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("activation_rounding", "oracle", "rows"),
    [("vllm", vllm_fp8, rows) for rows in ROWS]
    + [("sglang", sglang_fp8, rows) for rows in ROWS if rows != "subnormal"],
)
def test_fp8_follows_a_server_bit_for_bit(
    activation_rounding: ActivationRounding, oracle: Oracle, rows: str, dtype: torch.dtype
) -> None:
    x = ROWS[rows]().to(dtype)
    values, scale = quantize_rows(x, torch.float8_e4m3fn, activation_rounding)
    expected, expected_scale = oracle(x.float().numpy())
    assert values.dtype == torch.float8_e4m3fn
    assert np.array_equal(values.to(torch.float64).numpy(), expected)
    assert np.array_equal(scale.numpy(), expected_scale)


@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_ties_go_away_from_zero_in_every_float32(sign: int) -> None:
    """Up to 2^7, beyond which no quotient is; below 2^-2 nothing is near a tie. The sum is exact in float64."""
    for start in range(0x3E800000, 0x43000000, 1 << 22):
        x = sign * torch.arange(start, start + (1 << 22), dtype=torch.int32).view(torch.float32)
        wide = x.double()
        assert torch.equal(_ties_away(x).double(), (wide.abs() + 0.5).floor().copysign(wide))


def test_subnormal_rows_stay_finite_in_sglangs_fp8() -> None:
    """Its kernel flushes their scales to zero on Hopper, or computes 0 * infinity."""
    values, scale = quantize_rows(torch.tensor([[1e-40, -1e-44, 0.0]]), torch.float8_e4m3fn, "sglang")
    assert bool(values.float().isfinite().all())
    assert scale.item() == pytest.approx(1e-40 / 448, abs=2e-45)


def test_the_oracles_e4m3_is_torchs() -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert np.array_equal(codes.to(torch.float64).numpy(), e4m3_values())


@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_faulty_row_stays_visible_and_alone(storage: torch.dtype, bad: float) -> None:
    x = torch.randn(2, 8)
    x[0, 3] = bad
    back = dequantize(*quantize_rows(x, storage))
    assert bool(back[0].isnan().any())
    assert bool(back[1].isfinite().all())


@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_no_rows_and_leading_dimensions(storage: torch.dtype) -> None:
    values, scale = quantize_rows(torch.zeros(0, 8), storage)
    assert (values.shape, scale.shape) == ((0, 8), (0, 1))
    x = torch.randn(2, 3, 8)
    values, scale = quantize_rows(x, storage)
    flat, flat_scale = quantize_rows(x.flatten(0, 1), storage)
    assert torch.equal(values.flatten(0, 1).view(torch.int8), flat.view(torch.int8))
    assert torch.equal(scale.flatten(0, 1), flat_scale)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.full((2, 4), float("nan")), "k_proj holds NaN or Inf; got 8"),
        (torch.zeros(2, 4, dtype=torch.int8), "k_proj is quantised already"),
        (torch.zeros(2, 0), "k_proj has no input columns"),
        (torch.zeros(4), "k_proj has the wrong rank"),
    ],
)
def test_weights_that_cannot_be_quantised(weight: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        quantize_weight(weight, torch.int8, name="k_proj")


# -- BitNet b1.58 --------------------------------------------------------------------------------------------------


def test_ternary_is_bitnets_absmean() -> None:
    weight = torch.randn(16, 64).to(torch.bfloat16)
    wide = weight.float().numpy()
    absmean = np.abs(wide).mean(dtype=np.float64)
    scale = ternary_scale(weight)
    # A mean of 1024 float32 numbers: pairwise sums err by a few ulp.
    assert abs(scale.item() - absmean) <= 2.0**-20 * absmean
    values, channel_scale = ternary_weight(weight, scale)
    assert values.dtype == torch.int8
    assert np.array_equal(values.numpy(), 4 * np.clip(np.rint(wide / np.float32(scale.item())), -1, 1))
    assert torch.equal(channel_scale, scale.expand(16, 1) / 4)
    assert value_bits(values) == 6


def test_ternary_of_nothing() -> None:
    assert ternary_scale(torch.zeros(4, 8)).item() == np.float32(1e-5)
    assert not ternary_weight(torch.zeros(4, 8), ternary_scale(torch.zeros(4, 8))).values.any()


# -- names ---------------------------------------------------------------------------------------------------------


def test_names_of_types() -> None:
    for name, dtype in DTYPES.items():
        assert parse_dtype(name) == parse_dtype(dtype) == dtype
        assert dtype_name(dtype) == name


@pytest.mark.parametrize("name", ["int4", "INT8", torch.float64, None])
def test_unknown_types(name: Any) -> None:
    with pytest.raises(InputError, match=r"unknown weight type; got .*int8, fp8, bf16, fp16, fp32"):
        parse_dtype(name)
    with pytest.raises(InputError):
        quantize_rows(torch.zeros(1, 4), torch.uint8)
    with pytest.raises(InputError):
        ternary_weight(torch.ones(4, 8), torch.tensor(1.0), torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("smallest", [1e-45, 1e-7])
def test_a_weight_is_quantised_as_its_rows_are(dtype: torch.dtype, storage: torch.dtype, smallest: float) -> None:
    """Also where 127 / absmax overflows, in rows of zeros, and where rounding meets halves and the largest number."""
    weight = torch.randn(ROWS_AT_ONCE + 6, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[0], weight[1] = smallest, 0
    weight[2] = torch.arange(500).to(dtype) / 2 - 127
    weight[3, 7] = torch.finfo(dtype).max
    before = weight.clone()
    found, wanted = quantize_weight(weight, storage), quantize_rows(weight, storage)
    assert torch.equal(found.values.view(torch.int8), wanted.values.view(torch.int8))
    assert torch.equal(found.scale, wanted.scale)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_six_bits_are_int8_multiples_of_four(dtype: torch.dtype) -> None:
    weight = torch.randn(300, 64).to(dtype)
    weight[::7], weight[:, 5] = 0, 0
    values, scale = quantize_weight(weight, torch.int8, rounding="6bit")
    assert (value_bits(values), values.min(), values.max()) == (6, -124, 124)
    assert not values[::7].any()
    assert not values[:, 5].any()
    step = weight.float().abs().amax(1, keepdim=True) / 31
    assert torch.equal(scale, step / 4)
    assert bool(((dequantize(values, scale) - weight.float()).abs() <= step * 0.5001).all())


def test_bits_of_values() -> None:
    assert value_bits(torch.tensor([[-128, 124, 0, 4]], dtype=torch.int8)) == 6
    assert value_bits(torch.tensor([[-128, 124, 0, 6]], dtype=torch.int8)) == 8
    assert [value_bits(torch.zeros(1, 2, dtype=dtype)) for dtype in (torch.float8_e4m3fn, torch.bfloat16)] == [8, 16]


def test_a_faulty_row_of_six_bits_stays_visible() -> None:
    values, scale = quantize_rows_to_six_bits(torch.tensor([[1.0, float("nan")], [1.0, -1.0], [1e-45, 0]]))
    assert scale[0].isnan()
    assert values[1].tolist() == [124, -124]
    assert bool(values[2].abs().le(124).all())


@pytest.mark.parametrize(("rounding", "dtype"), [("6bits", torch.int8), (6, torch.int8), ("6bit", torch.float8_e4m3fn)])
def test_roundings_that_there_are_not(rounding: object, dtype: torch.dtype) -> None:
    with pytest.raises(InputError, match="rounding"):
        check_rounding(rounding, dtype)
    with pytest.raises(InputError, match="rounding"):
        quantize_weight(torch.ones(2, 4), dtype, rounding=rounding)  # type: ignore[arg-type] # a user's
