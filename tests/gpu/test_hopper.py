"""Layers on the Hopper backend against the reference and their parts, on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_products import (
    assert_compiled_and_captured,
    assert_same_on_two_streams,
    in_slabs,
    needs_hopper,
    packed_weight,
    tokens_of,
)
from runner_listener import forget_runners, listen
from torch import nn

from slidesparse import InputError, UnsupportedError, ops
from slidesparse.gemm import get_backend, launch, step_linear
from slidesparse.gemm.backend import LiftThenMultiply
from slidesparse.gemm.hopper.backend import Hopper
from slidesparse.gemm.kernel import load_kernel
from slidesparse.gemm.step_linear import StepLinear
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.linear import SlideLinear
from slidesparse.ops.resolve import ResolvedLinear, resolve_linear
from slidesparse.weights.slide import gather

pytestmark = [pytest.mark.gpu, needs_hopper]

INT8, BF16, FP16, FP32 = torch.int8, torch.bfloat16, torch.float16, torch.float32
OUT, COLUMNS = 300, 1000
"""Neither is a multiple of a tile, nor is the lifted length of any pattern one of a slab."""
ALIGNED = 1008
"""Columns of rows that start at multiples of 16, as most do: others are lifted by another kernel."""


def _layer(
    pattern: str, dtype: str, backend: str = "hopper", *, biased: bool = True, columns: int = COLUMNS
) -> SlideLinear:
    torch.manual_seed(1)
    linear = nn.Linear(columns, OUT, bias=biased).to(BF16).cuda()
    return SlideLinear.from_linear(linear, pattern, dtype, method="magnitude", backend=backend)


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
    packed = packed_weight(INT8, "6:8", out, columns)
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
    return listen(monkeypatch, StepLinear, LiftThenMultiply, step_linear)


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
    assert isinstance(found.runner, StepLinear)
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
    for cache in (load_kernel, launch._launch):
        cache.cache_clear()
    forget_runners()


def test_after_a_warm_up_any_batch_can_be_captured(columns: int) -> None:
    forget_kernels()
    layer = _layer("6:8", "int8", columns=columns)
    WarmUp(3000, BF16).layer(layer)
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
    packed, backend = packed_weight(INT8, "6:8", OUT, COLUMNS), get_backend("hopper")
    x, operand, rows = tokens_of(INT8, 100, COLUMNS), backend.prepare(packed), torch.ones(101, 1, device="cuda")
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


def test_a_layer_in_a_thread_that_has_never_called_cuda(columns: int) -> None:
    layer, x = _layer("6:8", "int8", columns=columns), torch.randn(100, columns, dtype=BF16, device="cuda")
    layer(x)  # compiles
    expected, results = layer(x), []
    thread = threading.Thread(target=lambda: results.append(layer(x)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], expected)
