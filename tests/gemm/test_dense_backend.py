"""The dense backend: which kernels multiply, where a whole linear runs, and what its operands are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from default_types import default_type

from slidesparse.gemm import dense
from slidesparse.gemm.backend import LiftThenMultiply
from slidesparse.gemm.dense import DenseLinear
from slidesparse.layer.linear import SlideLinear
from slidesparse.lifting.choose import TorchLift
from slidesparse.lifting.layout import LiftSpec
from slidesparse.weights.packed import pack_by

BF16, FP16, INT8, FP8 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
TOKENS, OUT, COLUMNS = 40, 32, 64
VLLM = "vLLM's kernel"


HOPPER, BLACKWELL = dense.HOPPER, (12, 1)


@pytest.mark.parametrize(
    ("capability", "dtype", "out_dtype", "tokens", "has_vllm", "by"),
    [
        (HOPPER, INT8, BF16, 1, True, "_by_vllm"),
        (HOPPER, INT8, torch.float32, 64, True, None),
        (HOPPER, INT8, BF16, 64, False, None),
        (HOPPER, FP8, BF16, 255, True, "_by_vllm"),
        (HOPPER, FP8, BF16, 256, True, "_by_torch"),
        (HOPPER, FP8, FP16, 256, True, "_by_vllm"),
        (HOPPER, FP8, FP16, 64, False, None),
        # vLLM's raises there: "Int8 not supported on SM120. Use FP8 quantization instead".
        ((10, 0), INT8, BF16, 64, True, None),
        (BLACKWELL, INT8, BF16, 64, True, None),
        (BLACKWELL, FP8, BF16, 4096, True, "_by_vllm"),
    ],
)
def test_the_fastest_kernel_that_applies_scales(
    monkeypatch: pytest.MonkeyPatch, capability: Any, dtype: Any, out_dtype: Any, tokens: int, has_vllm: bool, by: Any
) -> None:
    monkeypatch.setattr(dense, "vllm_scaled_mm", lambda: VLLM if has_vllm else None)
    monkeypatch.setattr(dense, "_capability", lambda _: capability)
    found = dense.fused_product(dtype, out_dtype, tokens, 0)
    assert getattr(found, "func", found) is (None if by is None else getattr(dense, by))


def test_inside_of_sglang_its_own_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    own = {
        dtype: lambda *call, name=name: given.append((name, *call)) for dtype, name in ((INT8, "int8"), (FP8, "fp8"))
    }
    monkeypatch.setattr(dense, "sglang_scaled_mm", lambda: own)
    monkeypatch.setattr(dense, "vllm_scaled_mm", lambda: VLLM)
    monkeypatch.setattr(dense, "_capability", lambda _: dense.HOPPER)
    x, weight = torch.zeros(3, 16, dtype=torch.int8), torch.zeros(32, 16, dtype=torch.int8)
    for dtype, name in ((INT8, "int8"), (FP8, "fp8")):
        multiply: Any = dense.fused_product(dtype, FP16, 4096, 0)
        multiply(x, weight, "scale_x", "scale_w", "bias", FP16)
        called, rows, columns, *others = given.pop()
        assert (called, rows.shape, columns.shape, columns.stride()) == (name, (3, 16), (16, 32), (1, 16))
        assert others == ["scale_x", "scale_w", FP16, "bias"]
    assert dense.fused_product(INT8, torch.float32, 4, 0) is None
    monkeypatch.setattr(dense, "_capability", lambda _: (10, 0))
    assert dense.fused_product(INT8, FP16, 4, 0) is None


def test_where_there_is_a_whole_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "vllm_scaled_mm", lambda: VLLM)
    monkeypatch.setattr(dense, "_capability", lambda _: dense.HOPPER)
    backend = dense.Dense()
    sizes = {"tokens": TOKENS, "padded": TOKENS, "k_packed": COLUMNS}
    lift: Any = SimpleNamespace(source=BF16, target=INT8, quantised=True, index=0, **sizes)
    whole = backend.runner(lift, OUT)
    assert isinstance(whole, DenseLinear)
    assert isinstance(whole._by_parts, LiftThenMultiply)

    def runs_by_parts(given: Any, out_features: int = OUT) -> bool:
        return isinstance(backend.runner(given, out_features), LiftThenMultiply)

    assert runs_by_parts(TorchLift(LiftSpec("none", torch.bfloat16, INT8, (), backend.layout)))
    assert runs_by_parts(lift, 0)
    assert runs_by_parts(lift, OUT + 8)  # its weight is padded
    for name, other in (("padded", TOKENS + 1), ("quantised", False), ("tokens", 0)):
        assert runs_by_parts(SimpleNamespace(**vars(lift) | {name: other}))
    for dtype, capability, parts in (
        (INT8, (7, 5), True),
        (INT8, (8, 0), False),
        (FP8, (8, 6), True),
        (FP8, (8, 9), False),
        (FP8, (12, 0), False),
    ):
        monkeypatch.setattr(dense, "_capability", lambda _, capability=capability: capability)
        assert runs_by_parts(SimpleNamespace(**vars(lift) | {"target": dtype})) == parts


def fp8_layer() -> SlideLinear:
    """A layer whose backend is the dense one."""
    return SlideLinear.from_linear(torch.nn.Linear(COLUMNS, OUT), "6:8", "fp8", method="magnitude", backend="dense")


@pytest.mark.parametrize("default", [torch.float32, BF16], ids=str)
def test_the_scale_of_fp8_is_float32_whatever_the_default_type(default: torch.dtype) -> None:
    # vLLM packs layers while torch's default type is the model's; torch refuses a scale that is not float32.
    packed = pack_by(torch.zeros(OUT, COLUMNS).to(FP8), "6:8", scale=torch.ones(OUT))
    with default_type(default):
        _, one = dense.Dense().prepare(packed)
    assert (one.dtype, one.shape, one.item()) == (torch.float32, (), 1)


def test_a_layer_built_on_a_cpu_has_what_a_gpu_multiplies_with(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = fp8_layer().half()  # moves of a model leave the scale's type alone
    x = torch.randn(TOKENS, COLUMNS).to(FP8)
    monkeypatch.setattr(dense, "fused_product", lambda *_: None)
    monkeypatch.setattr("slidesparse.gemm.scale.scale_rows", lambda acc, *_: acc)
    operand = layer.forms[0].operand
    y = dense._quantised(x, torch.ones(TOKENS, 1), operand, layer.weight_scale, None, OUT, torch.float32)
    torch.testing.assert_close(y, x.float() @ layer.unpack().float().T)
