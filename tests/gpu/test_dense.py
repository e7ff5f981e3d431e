"""The dense backend on a GPU: vLLM's or torch's kernels against exact products."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from gpu_products import assert_compiled_and_captured, packed_weight, skip_without_fp8, tokens_of
from runner_listener import forget_runners, listen
from tolerances import ACCUMULATION, FP8_TENSOR_CORE, assert_product
from torch import nn

from slidesparse import ops
from slidesparse.gemm import dense, get_backend
from slidesparse.gemm.backend import LiftThenMultiply
from slidesparse.gemm.dense import DenseLinear
from slidesparse.layer.linear import SlideLinear
from slidesparse.ops.resolve import ResolvedLinear, resolve_linear
from slidesparse.pruning import prune_mask
from slidesparse.weights.packing import pack_weight
from slidesparse.weights.pattern import Pattern
from slidesparse.weights.slide import gather

pytestmark = pytest.mark.gpu

INT8, FP8, BF16 = torch.int8, torch.float8_e4m3fn, torch.bfloat16
TOKENS = (0, 1, 7, 16, 17, 199, 1000)
SIZES = ((100, 333), (128, 1024))
"""(out, in): one that must be padded, one that need not be."""


@pytest.fixture
def _forgotten() -> Iterator[None]:
    """No test has what was made with other kernels at hand."""
    forget_runners()
    yield
    forget_runners()


@pytest.fixture(params=["vllm", "torch"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _forgotten: None) -> None:
    if request.param == "torch":
        monkeypatch.setattr(dense, "vllm_scaled_mm", lambda: None)
    elif find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_quantised_stays_within_the_table(
    dtype: torch.dtype, out_dtype: torch.dtype, biased: bool, size: tuple[int, int]
) -> None:
    skip_without_fp8(dtype)
    out, columns = size
    packed = packed_weight(dtype, "6:8", out, columns)
    weight = packed.unpack()
    backend = get_backend("dense")
    operand, column_map = backend.prepare(packed), backend.layout.column_map(packed)
    bias = (torch.randn(out, device="cuda") * 1e-2).to(out_dtype) if biased else None
    for m in TOKENS:
        x, scale_x = tokens_of(dtype, m, columns), torch.rand(m, 1, device="cuda")
        y = backend.matmul(gather(x, column_map), scale_x, operand, packed.scale, bias, out, out_dtype)
        assert y.shape == (m, out)
        assert y.is_contiguous()
        scale = scale_x.double() * packed.scale.double()
        exact = scale * (x.double() @ weight.double().T)
        magnitude = scale * (x.double().abs() @ weight.double().abs().T)
        if bias is not None:
            exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
        assert_product(y, exact, magnitude, dtype, FP8_TENSOR_CORE if dtype == FP8 else None)


def _by_parts(*sizes: Any) -> ResolvedLinear:
    """What :func:`resolve_linear` gives, with the default in place of a whole linear."""
    found = resolve_linear(*sizes)
    runner = found.runner._by_parts if isinstance(found.runner, DenseLinear) else found.runner
    return found._replace(runner=runner)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_a_whole_linear_has_the_bits_of_its_parts(
    dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without_fp8(dtype)
    out, columns = SIZES[1]
    bias = torch.randn(out, dtype=BF16, device="cuda") if biased else None
    kept = torch.randn(out, columns, device="cuda")
    packed = pack_weight(kept * prune_mask(kept, "6:8"), Pattern.parse("6:8"), dtype)
    layer, gain = SlideLinear(packed, bias, backend="dense"), torch.rand(columns, dtype=BF16, device="cuda")
    weight = list(layer.forms[0].tensors), layer.weight_scale, layer.bias, layer.spec
    taken = listen(monkeypatch, DenseLinear, LiftThenMultiply, dense)
    for tokens in (7, 32, 199, 1000):
        wide = torch.randn(tokens, 2 * columns, dtype=BF16, device="cuda")
        x, residual = wide.chunk(2, 1)
        results = []
        for resolve in (_by_parts, resolve_linear):  # by parts first, which compiles what a whole linear launches
            monkeypatch.setattr(ops, "resolve_linear", resolve)
            results.append(
                [
                    ops.linear(x, *weight),
                    ops.silu_mul_linear(wide, *weight),
                    ops.rms_norm_linear(x, gain, 1e-6, *weight),
                    *ops.add_rms_norm_linear(x, residual, gain, 1e-6, *weight),
                ]
            )
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
    # No kernel of torch's applies scales to INT8; fewer tokens than its kernels take are padded.
    expected = dense.vllm_scaled_mm() is not None or dtype == FP8
    assert taken == (12 * [True] if expected else [])


@pytest.fixture
def _full_precision_reductions() -> Iterator[None]:
    settings = torch.backends.cuda.matmul  # it has these names by __getattr__ alone, which monkeypatch cannot undo
    before = settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction
    settings.allow_bf16_reduced_precision_reduction = settings.allow_fp16_reduced_precision_reduction = False
    yield
    settings.allow_bf16_reduced_precision_reduction, settings.allow_fp16_reduced_precision_reduction = before


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("out_dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.usefixtures("_full_precision_reductions")
def test_floats_stay_within_the_table(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    packed, bias = packed_weight(dtype, "6:8", 100, 333), torch.randn(100, device="cuda").to(dtype)
    weight = packed.unpack()
    backend = get_backend("dense")
    operand, column_map = backend.prepare(packed), backend.layout.column_map(packed)
    for m in TOKENS:
        x = torch.randn(m, 333, device="cuda").to(dtype)
        y = backend.matmul(gather(x, column_map), None, operand, None, bias, 100, out_dtype)
        exact = x.double() @ weight.double().T + bias.double()
        magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        # For some shapes cuBLAS rounds the product to the operands' type before it adds the bias: half an ulp more.
        assert_product(y, exact, magnitude, dtype, ACCUMULATION[dtype] + torch.finfo(dtype).eps / 2)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("dtype", ["int8", "fp8", "bf16"])
def test_compiled_and_captured(dtype: str) -> None:
    skip_without_fp8(dtype)
    linear = nn.Linear(256, 128).to(BF16).cuda()
    layer = SlideLinear.from_linear(linear, "6:8", dtype, method="magnitude", backend="dense")
    assert_compiled_and_captured(layer, torch.randn(7, 256, dtype=BF16, device="cuda"), dynamic=None)
