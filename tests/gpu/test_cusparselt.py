"""The cuSPARSELt backend against the reference, on a GPU."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from gpu_products import (
    assert_compiled_and_captured,
    assert_same_on_two_streams,
    packed_weight,
    skip_without_fp8,
    tokens_of,
)
from tolerances import FP8_TENSOR_CORE, assert_product
from torch import nn

from slidesparse import UnsupportedError
from slidesparse.gemm import Problem, get_backend
from slidesparse.gemm.cusparselt import api
from slidesparse.gemm.cusparselt import backend as cusparselt
from slidesparse.gemm.cusparselt import plan as plans
from slidesparse.gemm.cusparselt.backend import token_bucket
from slidesparse.gemm.cusparselt.plan import (
    DEFAULT,
    METADATA_TILE,
    MatmulPlan,
    Shape,
    algorithm_of,
    compress_matrix,
    plan_for,
)
from slidesparse.gemm.reference import product
from slidesparse.layer.linear import SlideLinear
from slidesparse.weights.packed import PackedWeight, pack_by
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.slide import gather

pytestmark = pytest.mark.gpu

INT8, FP8, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
PATTERNS = ("2:4", "4:6", "6:8", "8:10")
TOKENS = (0, 1, 7, 16, 17, 199, 1000)
OUT, COLUMNS = 100, 333
"""Neither is a multiple of 32, nor is the lifted length of any pattern."""


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan_for.cache_clear()


@pytest.fixture(autouse=True)
def _can_run() -> None:
    problem = Problem(Pattern(6, 8), INT8, 64, 64, torch.device("cuda"))
    if (why := get_backend("cusparselt").why_not(problem)) is not None:
        pytest.skip(why)


def _packed(
    dtype: torch.dtype, pattern: str, out: int = OUT, columns: int = COLUMNS, *, scaled: bool = True
) -> PackedWeight:
    return packed_weight(dtype, pattern, out, columns, scaled=scaled)


def _tokens(dtype: torch.dtype, m: int, columns: int = COLUMNS) -> torch.Tensor:
    return tokens_of(dtype, m, columns)


def _lifted(x: torch.Tensor, packed: PackedWeight, backend: str = "cusparselt") -> torch.Tensor:
    return gather(x, get_backend(backend).layout.column_map(packed))


def _layer(pattern: str, dtype: str, *, biased: bool = True, backend: str = "cusparselt") -> SlideLinear:
    torch.manual_seed(1)
    linear = nn.Linear(COLUMNS, OUT, bias=biased).to(BF16).cuda()
    return SlideLinear.from_linear(linear, pattern, dtype, method="magnitude", backend=backend)


# -- numbers -------------------------------------------------------------------------------------------------------


def test_large_int8_accumulators_are_as_good_as_exact() -> None:
    # The library's alpha is a float32, and what reads its accumulators converts them to float32: rounding to nearest
    # twice is rounding once, so that no output changes.
    weight = torch.full((32, 8192), -128, dtype=INT8, device="cuda").view(32, -1, 4)
    weight[..., 2:] = 0
    weight[:, 0, 0] = 127
    packed = pack_by(weight.view(32, 8192), "2:4")
    x = torch.full((32, 8192), -128, dtype=INT8, device="cuda")
    x[:, 0] = torch.arange(32)
    exact = product(x, packed.columns())
    assert int(exact.max()) > 2**25
    assert bool((exact % 2 == 1).any())
    acc = torch.empty(32, 32, dtype=torch.int32, device="cuda")
    plan = plan_for(Shape(0, 32, 8192, 32, INT8))
    plan.run(get_backend("cusparselt").prepare(packed)[0], x.data_ptr(), acc)
    assert torch.equal(acc.float(), exact.float())


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [BF16, torch.float16, torch.float32], ids=str)
def test_int8_layer_has_the_bits_of_the_reference(pattern: str, biased: bool, kind: torch.dtype) -> None:
    layer = _layer(pattern, "int8", biased=biased)
    reference = _layer(pattern, "int8", biased=biased, backend="reference")
    for m in TOKENS:
        x = torch.randn(m, COLUMNS, dtype=kind, device="cuda")
        y = layer(x)
        assert y.dtype == kind
        assert y.is_contiguous()
        assert torch.equal(y, reference(x))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("out_dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_fp8_stays_within_the_table(pattern: str, out_dtype: torch.dtype) -> None:
    skip_without_fp8(FP8)
    packed = _packed(FP8, pattern, columns=900)
    backend = get_backend("cusparselt")
    # As large as the products: a larger one would widen what assert_product allows.
    operand, bias = backend.prepare(packed), torch.randn(OUT, device="cuda") * 1e-2
    weight = packed.unpack().double()
    for m in TOKENS:
        x, scale_x = _tokens(FP8, m, 900), torch.rand(m, 1, device="cuda")
        y = backend.matmul(_lifted(x, packed), scale_x, operand, packed.scale, bias, OUT, out_dtype)
        scale = scale_x.double() * packed.scale.double()
        exact = scale * (x.double() @ weight.T) + bias.double()
        magnitude = scale * (x.double().abs() @ weight.abs().T) + bias.double().abs()
        assert_product(y, exact, magnitude, FP8, FP8_TENSOR_CORE)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("biased", [False, True])
def test_16_bit_stays_within_the_table(dtype: torch.dtype, pattern: str, biased: bool) -> None:
    packed = _packed(dtype, pattern, columns=1000, scaled=False)
    backend = get_backend("cusparselt")
    if (why := backend.why_not(Problem(packed.pattern, dtype, OUT, 1000, packed.device))) is not None:
        pytest.skip(why)
    operand, weight = backend.prepare(packed), packed.unpack().double()
    bias = torch.randn(OUT, device="cuda").to(dtype) if biased else None
    for m in TOKENS:
        x = _tokens(dtype, m, 1000)
        y = backend.matmul(_lifted(x, packed), None, operand, None, bias, OUT, dtype)
        assert y.is_contiguous()
        exact, magnitude = x.double() @ weight.T, x.double().abs() @ weight.abs().T
        if bias is not None:
            exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
        assert_product(y, exact, magnitude, dtype)


def test_16_bit_output_is_of_the_weights_type() -> None:
    packed = _packed(BF16, "6:8", scaled=False)
    backend = get_backend("cusparselt")
    with pytest.raises(UnsupportedError, match=r"got torch\.float32; needed torch\.bfloat16"):
        backend.matmul(_lifted(_tokens(BF16, 3), packed), None, backend.prepare(packed), None, None, OUT, torch.float32)


def test_rows_past_the_tokens_do_not_matter() -> None:
    packed = _packed(INT8, "6:8")
    backend = get_backend("cusparselt")
    operand, scale_x = backend.prepare(packed), torch.rand(17, 1, device="cuda")
    buffer = _lifted(_tokens(INT8, token_bucket(17)), packed)
    first = backend.matmul(buffer[:17], scale_x, operand, packed.scale, None, OUT, BF16)
    buffer[17:] = -128
    assert torch.equal(first, backend.matmul(buffer[:17], scale_x, operand, packed.scale, None, OUT, BF16))


def test_a_misaligned_and_strided_input() -> None:
    packed = _packed(INT8, "6:8")
    backend = get_backend("cusparselt")
    operand, lifted = backend.prepare(packed), _lifted(_tokens(INT8, 64), packed)
    expected = backend.matmul(lifted, None, operand, packed.scale, None, OUT, BF16)
    shifted = torch.empty(lifted.numel() + 1, dtype=INT8, device="cuda")[1:].view_as(lifted)
    shifted.copy_(lifted)
    wide = torch.cat([lifted, lifted], 1)[:, : lifted.shape[1]]
    for x in (shifted, wide):
        assert torch.equal(backend.matmul(x, None, operand, packed.scale, None, OUT, BF16), expected)


# -- what the backend takes for granted ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [INT8, FP8, BF16], ids=str)
def test_the_compressed_weight_is_the_same_for_every_plan(dtype: torch.dtype) -> None:
    skip_without_fp8(dtype)
    matrix = _packed(dtype, "2:4", 128, 256, scaled=False).columns().contiguous()
    ours, library = compress_matrix(matrix), api.load_library()
    stream = torch.cuda.current_stream().cuda_stream
    pointer = ctypes.c_void_p
    for rows in (32, 1024):
        plan = MatmulPlan(Shape(0, 128, 256, rows, dtype))
        handle, structure = pointer(plan._handle.address), pointer(plan._plan)
        size, scratch = ctypes.c_size_t(), ctypes.c_size_t()
        sizes = ctypes.byref(size), ctypes.byref(scratch)
        assert library.functions.cusparseLtSpMMACompressedSize(handle, structure, *sizes) == 0
        assert size.value == ours.numel() - METADATA_TILE
        theirs = torch.zeros_like(ours)
        buffer = torch.empty(scratch.value + 16, dtype=torch.uint8, device="cuda")
        pointers = [pointer(t.data_ptr()) for t in (matrix, theirs, buffer)]
        assert library.functions.cusparseLtSpMMACompress(handle, structure, *pointers, pointer(stream)) == 0
        assert torch.equal(ours, theirs)


# -- graphs, streams, plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("pattern", "dtype"), [("6:8", "int8"), ("4:6", "int8"), ("6:8", "fp8"), ("6:8", "bf16")])
def test_compiled_and_captured(pattern: str, dtype: str) -> None:
    skip_without_fp8(dtype)
    layer = _layer(pattern, dtype)
    assert_compiled_and_captured(layer, torch.randn(199, COLUMNS, dtype=BF16, device="cuda"), poison_mb=64)


def test_a_captured_plan_survives_the_cache() -> None:
    layer = _layer("6:8", "int8")
    x = torch.randn(64, COLUMNS, dtype=BF16, device="cuda")
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer(x)
    plan_for.cache_clear()
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, expected)


@pytest.mark.parametrize(("out", "columns"), [(64, 128), (1024, 2048), (4096, 6144)])
@pytest.mark.parametrize("rows", [32, 48, 256, 1088, 4096])
def test_the_searched_plan_has_the_references_product(
    monkeypatch: pytest.MonkeyPatch, out: int, columns: int, rows: int
) -> None:
    monkeypatch.setattr(plans, "_ALGORITHMS", {})
    packed = _packed(INT8, "2:4", out, columns, scaled=False)
    (weight,), shape = get_backend("cusparselt").prepare(packed), Shape(0, out, columns, rows, INT8)
    algorithm = algorithm_of(shape, weight)
    plan, x = plan_for(shape, algorithm), _tokens(INT8, rows, columns)
    y = torch.empty(rows, out, dtype=torch.int32, device="cuda")
    plan.run(weight, x.data_ptr(), y)
    assert torch.equal(y, product(x, packed.columns()))
    assert plan.algorithms > 1
    assert algorithm_of(shape, weight) == plan.algorithm == algorithm


def test_a_plan_cannot_be_made_while_capturing() -> None:
    layer = _layer("6:8", "int8")
    x = torch.randn(64, COLUMNS, dtype=BF16, device="cuda")
    with (
        pytest.raises(UnsupportedError, match="run the layer once with as many tokens before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        layer(x)
    torch.cuda.synchronize()
    assert torch.isfinite(layer(x)).all()


def test_two_streams() -> None:
    assert_same_on_two_streams([_layer("6:8", "int8"), _layer("4:6", "int8")], COLUMNS)


def test_plans_are_bounded_and_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed = []
    destroy = plans._destroy

    def counting(*arguments: object) -> None:
        destroyed.append(arguments)
        destroy(*arguments)

    monkeypatch.setattr(plans, "_destroy", counting)
    monkeypatch.setattr(cusparselt, "algorithm_of", lambda shape, weight: DEFAULT)  # a search makes plans too
    monkeypatch.setattr(cusparselt, "plan_for", lru_cache(maxsize=2)(plan_for.__wrapped__))
    layer, reference = _layer("6:8", "int8"), _layer("6:8", "int8", backend="reference")
    for m in (10, 40, 70, 10, 40, 70, 71, 72):
        x = torch.randn(m, COLUMNS, dtype=BF16, device="cuda")
        assert torch.equal(layer(x), reference(x))
    assert cusparselt.plan_for.cache_info().misses == 6
    assert len(destroyed) == 4
