"""The Hopper backend against the reference, the emulator and itself, on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import hopper_emulator as emulator
import numpy as np
import pytest
import torch
from gpu_products import (
    assert_compiled_and_captured,
    assert_same_every_time,
    assert_same_on_two_streams,
    in_slabs,
    packed_weight,
    tokens_of,
)
from runner_listener import forget_runners, listen
from slab_views import slab_view
from tolerances import FP8_TENSOR_CORE, assert_product
from torch import nn

from slidesparse import InputError, UnsupportedError, ops
from slidesparse.base.log import LOG
from slidesparse.gemm import Problem, get_backend
from slidesparse.gemm.backend import LiftThenMultiply
from slidesparse.gemm.hopper import launch as hopper_launch
from slidesparse.gemm.hopper import linear as hopper_linear
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.hopper.choose_tiles import Band
from slidesparse.gemm.hopper.kernel import load_kernel
from slidesparse.gemm.hopper.linear import HopperLinear
from slidesparse.gemm.hopper.tiles import TILES, Tile
from slidesparse.gemm.hopper.weights import SLABS
from slidesparse.gemm.reference import apply_scales, product
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.linear import SlideLinear
from slidesparse.ops.matmul import matmul
from slidesparse.ops.resolve import ResolvedLinear, resolve_linear
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import quantize_rows
from slidesparse.weights.slide import gather

pytestmark = pytest.mark.gpu

INT8, FP8, BF16, FP16, FP32 = torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
PATTERNS = ("2:4", "4:6", "6:8", "8:10", "14:16")
TOKENS = (0, 1, 7, 64, 193, 1000)
OUT, COLUMNS = 300, 1000
"""Neither is a multiple of a tile, nor is the lifted length of any pattern one of a slab."""
ALIGNED = 1008
"""Columns of rows that start at multiples of 16, as most do: others are lifted by another kernel."""


@pytest.fixture(autouse=True)
def _can_run() -> None:
    problem = Problem(Pattern(6, 8), INT8, 64, 64, torch.device("cuda"))
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernel is written for compute capability 9.0")
    assert get_backend("hopper").why_not(problem) is None


@pytest.fixture(params=[tile for tile in TILES if tile.split > 1], ids=str)
def split_tile(request: pytest.FixtureRequest) -> Tile:
    """Every tile whose steps several blocks share."""
    chosen: Tile = request.param
    return chosen


def _packed(dtype: torch.dtype, pattern: str, out: int = OUT, columns: int = COLUMNS) -> PackedWeight:
    return packed_weight(dtype, pattern, out, columns)


def _tokens(dtype: torch.dtype, m: int, columns: int = COLUMNS) -> torch.Tensor:
    return tokens_of(dtype, m, columns)


def _layer(
    pattern: str, dtype: str, backend: str = "hopper", *, biased: bool = True, columns: int = COLUMNS
) -> SlideLinear:
    torch.manual_seed(1)
    linear = nn.Linear(columns, OUT, bias=biased).to(BF16).cuda()
    return SlideLinear.from_linear(linear, pattern, dtype, method="magnitude", backend=backend)


# -- numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [OUT, 320])  # stored number by number, and 16 bytes at a time
@pytest.mark.parametrize("pattern", PATTERNS)
def test_int8_has_the_bits_of_the_reference(pattern: str, out: int, tile: Tile) -> None:
    packed, backend = _packed(INT8, pattern, out), Hopper()
    operand, bias = backend.prepare(packed), torch.randn(out, device="cuda")
    for m in TOKENS:
        x, scale_x = _tokens(INT8, m), torch.rand(m, 1, device="cuda")
        for out_dtype in (BF16, FP16, FP32):
            y = backend.matmul(in_slabs(x, packed), scale_x, operand, packed.scale, bias, out, out_dtype, tile)
            expected = apply_scales(product(x, packed.unpack()), scale_x, packed.scale, bias, out_dtype)
            assert torch.equal(y, expected)


@pytest.mark.parametrize("pattern", ["4:6", "6:8"])
@pytest.mark.parametrize("columns", [60, 200, 500])
def test_a_split_into_more_parts_than_there_are_steps(columns: int, pattern: str, split_tile: Tile) -> None:
    packed, backend = _packed(INT8, pattern, OUT, columns), Hopper()
    operand = backend.prepare(packed)
    for m in (3, 130):
        x = _tokens(INT8, m, columns)
        y = backend.matmul(in_slabs(x, packed), None, operand, packed.scale, None, OUT, BF16, split_tile)
        assert torch.equal(y, apply_scales(product(x, packed.unpack()), None, packed.scale, None, BF16))


@pytest.mark.parametrize("dtype", [FP8, BF16], ids=str)
def test_a_split_sums_in_the_same_order_every_time(dtype: torch.dtype, split_tile: Tile) -> None:
    packed, backend = _packed(dtype, "4:6", 1024, 2000), Hopper()
    x, operand = in_slabs(_tokens(dtype, 100, 2000), packed), backend.prepare(packed)
    given = x, None, operand, packed.scale, None, 1024, FP32, split_tile
    assert_same_every_time(lambda: backend.matmul(*given), 1000)


@pytest.mark.parametrize("out", [1, 63, 257, 320])
def test_any_number_of_channels(out: int, tile: Tile) -> None:
    packed, backend = _packed(INT8, "6:8", out, 256), Hopper()
    x = _tokens(INT8, 200, 256)
    for bias in (None, torch.randn(out, device="cuda").to(BF16), torch.randn(out, device="cuda").to(FP16)):
        y = backend.matmul(in_slabs(x, packed), None, backend.prepare(packed), packed.scale, bias, out, BF16, tile)
        assert torch.equal(y, apply_scales(product(x, packed.unpack()), None, packed.scale, bias, BF16))


LARGE = tuple(tile for tile in TILES if tile.channels == 256 and tile.split == 1)
REST = tuple(
    tile for tile in TILES if str(tile) in ("64x64b2", "64x128", "128x128", "128x128/2", "96x256", "160x256/2")
)


@pytest.mark.parametrize("rest", REST, ids=str)
@pytest.mark.parametrize("large", LARGE, ids=str)
def test_two_bands_are_one_product(large: Tile, rest: Tile) -> None:
    for dtype, pattern, out, out_dtype in (
        (INT8, "6:8", 300, BF16),
        (INT8, "4:6", 2560, FP32),
        (FP8, "2:4", 2563, FP16),
    ):
        packed, backend = _packed(dtype, pattern, out), Hopper()
        operand, bias = backend.prepare(packed), torch.randn(out, device="cuda").to(out_dtype)
        bands = Band(large, 256), Band(rest, out - 256)
        for m in (1, 200, 1000):
            x, scale_x = _tokens(dtype, m), torch.rand(m, 1, device="cuda")
            found, first, second = (
                backend.matmul(in_slabs(x, packed), scale_x, operand, packed.scale, bias, out, out_dtype, tile)
                for tile in (bands, large, rest)
            )
            assert torch.equal(found, torch.cat([first[:, :256], second[:, 256:]], 1))


def test_a_second_band_waits_for_what_both_read_and_holds_up_what_follows() -> None:
    # Three linears on the products of one another: whichever band or lift started too early would read old numbers.
    sizes, tokens, backend = [(37888, 512), (512, 37888), (2560, 512)], 384, Hopper()
    large, rest = (next(tile for tile in TILES if str(tile) == name) for name in ("192x256", "96x128"))
    packed = [_packed(INT8, "6:8", out, columns) for out, columns in sizes]
    operands = [backend.prepare(weight) for weight in packed]
    maps = [Hopper.layout.column_map(weight) for weight in packed]

    def linears(x: torch.Tensor, two: bool) -> torch.Tensor:
        for (out, _), weight, operand, columns in zip(sizes, packed, operands, maps, strict=True):
            first = 256 * max(1, out // 256 - 3)
            tile = (Band(large, first), Band(rest, out - first)) if two and first < out else large
            values, scale = ops.quantize_lift(x, columns, INT8, "hopper")
            x = backend.matmul(values, scale, operand, weight.scale, None, out, BF16, tile)
        return x

    given = torch.randn(tokens, sizes[0][1], device="cuda").to(BF16)
    linears(given, True), linears(given, False)  # compile and load
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = linears(given, True)
    for _ in range(100):
        given.copy_(torch.randn_like(given))
        found.fill_(float("nan"))
        graph.replay()
        assert torch.equal(found, linears(given, False))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [FP8, BF16, FP16], ids=str)
def test_floats_stay_within_the_table(pattern: str, dtype: torch.dtype, tile: Tile) -> None:
    packed, backend = _packed(dtype, pattern), Hopper()
    operand, bias = backend.prepare(packed), torch.randn(OUT, device="cuda") * 1e-2
    weight, scale_w = packed.unpack().double(), packed.scale
    for m in TOKENS:
        x, scale_x = _tokens(dtype, m), torch.rand(m, 1, device="cuda") if scale_w is not None else None
        y = backend.matmul(in_slabs(x, packed), scale_x, operand, scale_w, bias, OUT, BF16, tile)
        scale = 1.0 if scale_x is None or scale_w is None else scale_x.double() * scale_w.double()
        exact = scale * (x.double() @ weight.T) + bias.double()
        magnitude = scale * (x.double().abs() @ weight.abs().T) + bias.double().abs()
        assert_product(y, exact, magnitude, dtype, FP8_TENSOR_CORE if dtype == FP8 else None)


def test_the_emulator_reads_what_the_kernel_reads() -> None:
    for dtype, pattern in ((INT8, "6:8"), (INT8, "4:6"), (BF16, "8:10"), (BF16, "2:4")):
        packed, backend = _packed(dtype, pattern, 70, 320), get_backend("hopper")
        operand = backend.prepare(packed)
        decoded = emulator.weights(operand[0].cpu().numpy(), dtype.itemsize)
        # One token a column of K': the product is the operand itself, element by element.
        width = decoded.shape[1]
        identity = torch.eye(width, device="cuda").to(dtype)
        x = SLABS.arrange(identity).view(-1, width)[:width]
        assert slab_view(x, SLABS).shape[1] == width
        y = backend.matmul(x, None, operand, None, None, 70, FP32)
        bits = torch.from_numpy(decoded[:70].view(np.int8 if dtype == INT8 else np.int16).copy()).cuda()
        assert torch.equal(y.T, (bits if dtype == INT8 else bits.view(dtype)).float())


def test_a_shard_that_starts_inside_a_group() -> None:
    whole, backend = _packed(INT8, "6:8", OUT, 1600).unpack(), get_backend("hopper")
    shard = whole[:, 803:].contiguous()
    packed = pack_by(shard, "6:8", scale=torch.ones(OUT, device="cuda"), k_offset=803 % 8)
    x = _tokens(INT8, 100, shard.shape[1])
    y = backend.matmul(in_slabs(x, packed), None, backend.prepare(packed), packed.scale, None, OUT, FP32)
    assert torch.equal(y, product(x, shard).float())


@pytest.mark.parametrize("pattern", ["2:4", "6:8"])
@pytest.mark.parametrize("dtype", [INT8, FP8, BF16, FP16], ids=str)
def test_a_product_without_a_layer(dtype: torch.dtype, pattern: str) -> None:
    packed, bias = _packed(dtype, pattern), torch.randn(OUT, device="cuda") * 1e-2
    weight, source = packed.unpack().double(), BF16 if dtype.itemsize == 1 else dtype
    for m in TOKENS:
        x = torch.randn(m, COLUMNS, device="cuda").to(source)
        y = matmul(x, packed, bias, out_dtype=FP32)
        assert torch.equal(y, matmul(x, packed, bias, out_dtype=FP32, backend="hopper"))
        values, scale = x.double(), torch.ones(1, dtype=torch.float64, device="cuda")
        if packed.scale is not None:
            rows = quantize_rows(x, dtype)
            values, scale = rows.values.double(), rows.scale.double() * packed.scale.double()
        exact = scale * (values @ weight.T) + bias.double()
        magnitude = scale * (values.abs() @ weight.abs().T) + bias.double().abs()
        assert_product(y, exact, magnitude, dtype, FP8_TENSOR_CORE if dtype == FP8 else None)


def test_more_than_2_31_outputs() -> None:
    tokens, out, columns = 65536, 37888, 64
    needed = tokens * out * 2 + (4 << 30)
    if torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {needed >> 30} GiB of GPU memory")
    packed, backend = _packed(INT8, "6:8", out, columns), get_backend("hopper")
    assert packed.scale is not None
    x, scale_x = _tokens(INT8, tokens, columns), torch.rand(tokens, 1, device="cuda")
    y = backend.matmul(in_slabs(x, packed), scale_x, backend.prepare(packed), packed.scale, None, out, BF16)
    for start in (0, 28340, 56680, tokens - 64):  # 2^31 / out = 56680 is where 32 bits end
        some = slice(start, start + 64)
        expected = apply_scales(product(x[some], packed.unpack()), scale_x[some], packed.scale, None, BF16)
        assert torch.equal(y[some], expected)


@pytest.mark.parametrize("out", [OUT, 320])
def test_every_output_is_written(out: int) -> None:
    packed, backend = _packed(INT8, "6:8", out), get_backend("hopper")
    x, operand = in_slabs(_tokens(INT8, 777), packed), backend.prepare(packed)
    expected = backend.matmul(x, None, operand, packed.scale, None, out, BF16)
    for _ in range(3):  # the allocator gives the memory of the one before, poisoned
        poison = torch.full_like(expected, float("nan"))
        address = poison.data_ptr()
        del poison
        y = backend.matmul(x, None, operand, packed.scale, None, out, BF16)
        assert y.data_ptr() == address
        assert torch.equal(y, expected)
        del y


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
def test_ten_thousand_launches_give_the_same_bits(dtype: torch.dtype) -> None:
    packed, backend = _packed(dtype, "4:6", 1024, 2000), get_backend("hopper")
    x, operand = in_slabs(_tokens(dtype, 1500, 2000), packed), backend.prepare(packed)
    assert_same_every_time(lambda: backend.matmul(x, None, operand, packed.scale, None, 1024, BF16), 10_000)


# -- graphs, streams, devices --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [13, 199])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
@pytest.mark.parametrize("pattern", ["6:8", "4:6"])
def test_layer_eager_compiled_and_captured(pattern: str, dtype: str, tokens: int, columns: int) -> None:
    layer = _layer(pattern, dtype, columns=columns)
    reference = _layer(pattern, dtype, "reference", columns=columns)
    x = torch.randn(tokens, columns, dtype=BF16, device="cuda")
    if dtype == "int8":
        assert torch.equal(layer(x), reference(x))
    assert_compiled_and_captured(layer, x)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("tokens", [1, 60, 2000])
def test_a_product_waits_for_what_the_kernel_before_it_writes(tokens: int, dtype: str, columns: int) -> None:
    layer, expected = _layer("4:6", dtype, columns=columns), []
    inputs = torch.randn(40, tokens, columns, dtype=BF16, device="cuda")
    for x in inputs:
        torch.cuda.synchronize()  # nothing runs beside these calls
        expected.append(layer(x))
    for y, alone in zip([layer(x) for x in inputs], expected, strict=True):
        assert torch.equal(y, alone)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [layer(x) for x in inputs]
    for shift in range(1, 20):  # lest the activations of the replay before be right as well
        inputs.copy_(inputs.roll(1, 0))
        graph.replay()
        for i, y in enumerate(captured):
            assert torch.equal(y, expected[i - shift])


@pytest.mark.parametrize("tokens", [16, 256])
def test_long_rows_are_written_before_a_product_reads_them(tokens: int) -> None:
    out, columns, backend = 4736, 18944, get_backend("hopper")
    packed = _packed(INT8, "6:8", out, columns)
    order, operand = backend.layout.order(packed), list(backend.prepare(packed))
    where = (backend.layout.column_map(packed), INT8, "hopper", order.numbers)
    rest = (packed.scale, None, out, BF16, "hopper")
    inputs, expected = torch.randn(12, tokens, columns, dtype=BF16, device="cuda"), []
    for x in inputs:
        lifted = ops.quantize_lift(x, *where)
        torch.cuda.synchronize()  # the product starts when all is written
        expected.append(ops.gemm(lifted[0], lifted[1], operand, *rest))
        torch.cuda.synchronize()
    for _ in range(5):
        together = [ops.gemm(*ops.quantize_lift(x, *where), operand, *rest) for x in inputs]
        for y, alone in zip(together, expected, strict=True):
            assert torch.equal(y, alone)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every call of a linear, whether it ran as a whole, on memory full of poison, and not by its parts."""
    return listen(monkeypatch, HopperLinear, LiftThenMultiply, hopper_linear)


@pytest.fixture(params=[COLUMNS, ALIGNED])
def columns(request: pytest.FixtureRequest) -> int:
    """Columns of a layer that runs by its parts, then of one that runs as a whole."""
    wide: int = request.param
    return wide


def _linears(layer: SlideLinear, tokens: int, source: torch.dtype) -> dict[str, Callable[[], Any]]:
    """The layer after everything that can stand before it."""
    x, residual = torch.randn(2, tokens, ALIGNED, dtype=source, device="cuda").unbind(0)
    gain, gate_up = torch.randn(ALIGNED, dtype=source, device="cuda"), torch.cat([x, residual], 1)
    tensors = [tensor for form in layer.forms for tensor in form.tensors]
    weight = (tensors, layer.weight_scale, layer.bias, layer.spec)
    linears: dict[str, Callable[[], Any]] = {
        "none": lambda: ops.linear(x, *weight),
        "strided": lambda: ops.linear(gate_up[:, :ALIGNED], *weight),
    }
    if layer.weight_scale is None:
        return linears
    return linears | {
        "rms_norm": lambda: ops.rms_norm_linear(x, gain, 1e-6, *weight),
        "add_rms_norm": lambda: ops.add_rms_norm_linear(x, residual, gain, 1e-6, *weight),
        "gemma_norm": lambda: ops.gemma_norm_linear(x, gain, 1e-6, *weight),
        "add_gemma_norm": lambda: ops.add_gemma_norm_linear(x, residual, gain, 1e-6, *weight),
        "silu_mul": lambda: ops.silu_mul_linear(gate_up, *weight),
    }


def _by_parts(*sizes: Any) -> ResolvedLinear:
    """What :func:`resolve_linear` gives, with the default in place of a whole linear."""
    found = resolve_linear(*sizes)
    assert isinstance(found.runner, HopperLinear)
    return found._replace(runner=found.runner._by_parts)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 60, 2000])
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16", "fp16"])
@pytest.mark.parametrize("pattern", ["2:4", "4:6", "6:8"])
def test_a_whole_linear_has_the_bits_of_its_parts(
    pattern: str, dtype: str, tokens: int, biased: bool, answers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = {"fp16": FP16, "bf16": BF16}.get(dtype, FP32 if tokens == 60 else BF16)
    for linear in _linears(_layer(pattern, dtype, biased=biased, columns=ALIGNED), tokens, source).values():
        linear()  # compiles
        whole = linear()
        assert answers.pop()
        answers.clear()
        with monkeypatch.context() as apart:
            apart.setattr(ops, "resolve_linear", _by_parts)
            by_parts = linear()
        assert not answers
        pairs = zip(by_parts, whole, strict=True) if isinstance(whole, tuple) else [(by_parts, whole)]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_a_whole_linear_is_captured_and_runs_on_other_streams(answers: list[bool]) -> None:
    layer, stream = _layer("6:8", "int8", columns=ALIGNED), torch.cuda.Stream()
    x = torch.randn(200, ALIGNED, dtype=BF16, device="cuda")
    expected = [layer(x), layer(2 * x + 1)]
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        aside = layer(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    assert all(answers[1:])
    x.mul_(2).add_(1)
    graph.replay()
    assert torch.equal(aside, expected[0])
    assert torch.equal(captured, expected[1])


def test_what_a_whole_linear_does_not_take_is_run_or_refused_by_its_parts(answers: list[bool]) -> None:
    layer = _layer("6:8", "int8", biased=False, columns=ALIGNED)
    x, bias = torch.randn(64, ALIGNED, dtype=BF16, device="cuda"), torch.randn(OUT, device="cuda")
    tensors = layer.forms[0].tensors
    expected, weight = layer(x), (tensors, layer.weight_scale)
    answers.clear()
    unaligned = torch.randn(64 * ALIGNED + 1, dtype=BF16, device="cuda")[1:].view(64, ALIGNED)
    unaligned.copy_(x)
    assert torch.equal(layer(unaligned), expected)
    assert torch.equal(layer(x.t().contiguous().t()), expected)
    for wrong in (bias[:-1], bias.to(torch.int32), bias.cpu(), bias.repeat(2)[::2]):
        with pytest.raises(InputError):
            ops.linear(x, *weight, wrong, layer.spec)
        with pytest.raises(InputError):
            ops.linear(x, tensors, wrong, None, layer.spec)
    with pytest.raises(InputError):
        ops.linear(x.cpu(), *weight, None, layer.spec)
    with pytest.raises(InputError):
        ops.linear(x[:, :-8].contiguous(), *weight, None, layer.spec)
    gain = torch.ones(ALIGNED, dtype=BF16, device="cuda")
    for wrong in (gain[:-1], gain.float(), gain.cpu()):
        with pytest.raises(InputError):
            ops.rms_norm_linear(x, wrong, 1e-6, *weight, None, layer.spec)
    with pytest.raises(InputError):
        ops.add_rms_norm_linear(x, x[:-1], gain, 1e-6, *weight, None, layer.spec)
    assert not any(answers)
    assert torch.equal(layer(x), expected)
    assert answers[-1]


def test_two_streams(columns: int) -> None:
    assert_same_on_two_streams([_layer(pattern, "int8", columns=columns) for pattern in ("6:8", "4:6")], columns)


def test_a_second_gpu(columns: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    layer, x = _layer("6:8", "int8", columns=columns), torch.randn(100, columns, dtype=BF16, device="cuda")
    expected = layer(x)
    layer, x = layer.to("cuda:1"), x.to("cuda:1")
    for current in (0, 1, 1):
        with torch.cuda.device(current):
            assert torch.equal(layer(x).to("cuda:0"), expected)


def forget_kernels() -> None:
    for cache in (load_kernel, hopper_launch._launch):
        cache.cache_clear()
    forget_runners()


def test_after_a_warm_up_any_batch_can_be_captured(columns: int) -> None:
    forget_kernels()
    layer = _layer("6:8", "int8", columns=columns)
    WarmUp(3000, BF16, LOG).layer(layer)
    for tokens in range(1, 3001, 97):
        x = torch.randn(tokens, columns, dtype=BF16, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer(x)
        graph.replay()
        assert torch.equal(captured, layer(x))


def test_a_kernel_cannot_be_loaded_while_capturing(columns: int) -> None:
    layer, x = _layer("6:8", "int8", columns=columns), torch.randn(64, columns, dtype=BF16, device="cuda")
    layer(x)
    forget_kernels()
    with (
        pytest.raises(UnsupportedError, match="run the layer once with as many tokens before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer(x)
    torch.cuda.synchronize()
    assert torch.isfinite(layer(x)).all()


# -- bad input -----------------------------------------------------------------------------------------------------


def test_what_the_kernel_does_not_read_is_refused() -> None:
    packed, backend = _packed(INT8, "6:8"), get_backend("hopper")
    x, operand, rows = _tokens(INT8, 100), backend.prepare(packed), torch.ones(101, 1, device="cuda")
    slabs, right, wide = in_slabs(x, packed), torch.ones(OUT, device="cuda"), torch.ones(2 * OUT, device="cuda")
    for activations, scale_x, scale, bias, out_dtype in (
        (gather(x, Hopper.layout.column_map(packed)), None, right, None, BF16),  # of another layout
        (slabs[:, :256].contiguous(), None, right, None, BF16),
        (slabs, None, right, None, torch.float64),
        (slabs, None, right, right.to(torch.int32), BF16),
        (slabs, rows, right, None, BF16),
        *((slabs, None, wrong, None, BF16) for wrong in (right[:-1], right.cpu(), right.to(BF16), wide[::2])),
    ):
        with pytest.raises(InputError):
            backend.matmul(activations, scale_x, operand, scale, bias, OUT, out_dtype)


def test_quantise_and_lift_writes_what_the_kernel_reads() -> None:
    packed = _packed(INT8, "6:8")
    order = Hopper.layout.order(packed)
    assert order is not None
    x = torch.randn(100, COLUMNS, dtype=BF16, device="cuda")
    lifted, scale = ops.quantize_lift(x, Hopper.layout.column_map(packed), INT8, "hopper", order.numbers)
    y = get_backend("hopper").matmul(
        lifted, scale, get_backend("hopper").prepare(packed), packed.scale, None, OUT, BF16
    )
    layer = SlideLinear(packed, backend="reference")
    assert torch.equal(y, layer(x))


def test_a_thread_that_has_never_called_cuda() -> None:
    packed, backend = _packed(INT8, "6:8"), get_backend("hopper")
    x, operand, results = in_slabs(_tokens(INT8, 100), packed), backend.prepare(packed), []
    arguments = (x, None, operand, packed.scale, None, OUT, BF16)
    expected = backend.matmul(*arguments)
    thread = threading.Thread(target=lambda: results.append(backend.matmul(*arguments)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)


def test_a_layer_in_such_a_thread(columns: int) -> None:
    layer, x = _layer("6:8", "int8", columns=columns), torch.randn(100, columns, dtype=BF16, device="cuda")
    layer(x)  # compiles
    expected, results = layer(x), []
    thread = threading.Thread(target=lambda: results.append(layer(x)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)
