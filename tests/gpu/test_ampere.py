"""Products of the kernel for ``mma.sync`` against the reference, on any GPU from Ampere on: every form, every tile."""

from __future__ import annotations

import pytest
import torch
from gpu_products import (
    assert_compiled_and_captured,
    assert_same_every_time,
    assert_same_on_two_streams,
    in_slabs,
    packed_weight,
    skip_without_fp8,
    tokens_of,
)
from tolerances import FP8_TENSOR_CORE, assert_product

from slidesparse.gemm.ampere.backend import Ampere, AmpereSixBits
from slidesparse.gemm.ampere.tiles import TILES, Card, MmaTile, fitting
from slidesparse.gemm.kernel import load_kernels
from slidesparse.gemm.launch import Band
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.gemm.steps import StepForm
from slidesparse.layer.linear import SlideLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs Ampere or later"
    ),
]

INT8, FP8, BF16, FP16, FP32 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
FORMS = [
    *((Ampere, pattern) for pattern in ("2:4", "4:6", "6:8", "14:16", "dense")),
    *((AmpereSixBits, pattern) for pattern in ("2:4", "6:8", "dense")),
]
TOKENS = (0, 1, 7, 64, 193, 1000)
OUT, COLUMNS = 300, 1000


@pytest.fixture(params=TILES, ids=str)
def mma_tile(request: pytest.FixtureRequest) -> MmaTile:
    """Every tile in turn, for whatever form it has room."""
    chosen: MmaTile = request.param
    return chosen


def fitted(tile: MmaTile, backend: type[Ampere], pattern: str, itemsize: int = 1) -> MmaTile:
    form = StepForm(0, 0, backend.value_bits, pattern == "dense")
    found = [one for one in fitting(form, itemsize, Card.of(0)) if str(one) == str(tile)]
    if not found:
        pytest.skip("this card has not the shared memory")
    return found[0]


@pytest.mark.parametrize(("backend", "pattern"), FORMS)
def test_int8_has_the_bits_of_the_reference(backend: type[Ampere], pattern: str, mma_tile: MmaTile) -> None:
    tile, made = fitted(mma_tile, backend, pattern), backend()
    inside = 0 if pattern == "dense" else 3  # where a rank's shard starts in a group
    for out, columns, tokens, start in (
        *((OUT, COLUMNS, TOKENS, 0), (1, 64, (3,), 0), (3000, 500, (3000,), 0), (320, 18944, (16, 200), 0)),
        (OUT, 777, (100,), inside),
    ):
        packed, bias = (
            packed_weight(INT8, pattern, out, columns, bits=backend.value_bits, k_offset=start),
            torch.randn(out, device="cuda"),
        )
        operand, weight = made.prepare(packed), packed.unpack()
        for m in tokens:
            x, scale_x = tokens_of(INT8, m, columns), torch.rand(m, 1, device="cuda")
            for out_dtype in (BF16, FP32):
                given = scale_x, operand, packed.scale, bias, out, out_dtype, tile
                y = made.matmul(in_slabs(x, packed, backend), *given)
                assert torch.equal(y, apply_scales(product(x, weight), scale_x, packed.scale, bias, out_dtype)), m


@pytest.mark.parametrize(("backend", "pattern"), FORMS)
def test_two_bands_have_the_bits_of_the_reference(backend: type[Ampere], pattern: str, mma_tile: MmaTile) -> None:
    tile, made, out = fitted(mma_tile, backend, pattern), backend(), 1300
    large = fitting(StepForm(0, 0, backend.value_bits, pattern == "dense"), 1, Card.of(0))[0]
    packed, bias = packed_weight(INT8, pattern, out, COLUMNS, bits=backend.value_bits), torch.randn(out, device="cuda")
    for m in TOKENS:
        x, scale_x = tokens_of(INT8, m, COLUMNS), torch.rand(m, 1, device="cuda")
        given = scale_x, made.prepare(packed), packed.scale, bias, out, BF16, (Band(large, 512), Band(tile, 788))
        y = made.matmul(in_slabs(x, packed, backend), *given)
        assert torch.equal(y, apply_scales(product(x, packed.unpack()), scale_x, packed.scale, bias, BF16)), m


@pytest.mark.parametrize("pattern", ["2:4", "6:8", "dense"])
@pytest.mark.parametrize("dtype", [FP8, BF16, FP16], ids=str)
def test_floats_stay_within_the_table(dtype: torch.dtype, pattern: str, mma_tile: MmaTile) -> None:
    skip_without_fp8(dtype)
    tile, made = fitted(mma_tile, Ampere, pattern, dtype.itemsize), Ampere()
    packed, bias = packed_weight(dtype, pattern, OUT, COLUMNS), torch.randn(OUT, device="cuda") * 1e-2
    weight, scale_w = packed.unpack().double(), packed.scale
    for m in TOKENS:
        x = tokens_of(dtype, m, COLUMNS)
        scale_x = torch.rand(m, 1, device="cuda") if scale_w is not None else None
        y = made.matmul(in_slabs(x, packed, Ampere), scale_x, made.prepare(packed), scale_w, bias, OUT, BF16, tile)
        scale = 1.0 if scale_x is None or scale_w is None else scale_x.double() * scale_w.double()
        exact = scale * (x.double() @ weight.T) + bias.double()
        magnitude = scale * (x.double().abs() @ weight.abs().T) + bias.double().abs()
        assert_product(y, exact, magnitude, dtype, FP8_TENSOR_CORE if dtype == FP8 else None)


@pytest.mark.parametrize("tokens", [16, 64, 1500])
def test_ten_thousand_launches_give_the_same_bits(tokens: int) -> None:
    packed, made = packed_weight(INT8, "6:8", 1024, 2048, bits=6), AmpereSixBits()
    x, operand = in_slabs(tokens_of(INT8, tokens, 2048), packed, AmpereSixBits), made.prepare(packed)
    assert_same_every_time(lambda: made.matmul(x, None, operand, packed.scale, None, 1024, BF16), 10_000)


@pytest.mark.parametrize(("name", "bits"), [("ampere", 8), ("ampere-6bit", 6)])
def test_a_layer_is_compiled_and_captured_and_has_the_bits_of_the_reference(name: str, bits: int) -> None:
    packed = packed_weight(INT8, "6:8", 512, 1024, bits=bits)
    layer, reference = SlideLinear(packed, backend=name), SlideLinear(packed, backend="reference")
    for m in (1, 64, 700):
        x = torch.randn(m, 1024, dtype=BF16, device="cuda")
        assert torch.equal(layer(x), reference(x))
    assert_compiled_and_captured(layer, torch.randn(64, 1024, dtype=BF16, device="cuda"), poison_mb=64)
    assert_same_on_two_streams([layer, SlideLinear(packed, backend=name)], 1024)


def test_a_warm_up_loads_every_tile() -> None:
    Ampere().warm_up(INT8, BF16, torch.device("cuda"))
    load_kernels(fitting(StepForm(0, 0), 1, Card.of(0)), INT8, BF16, 0, 0, 8)
