"""Which tensors a whole dense linear reads, what its launch and its product are told, and where there is one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from default_types import default_type

from slidesparse.base.log import log_once
from slidesparse.gemm import dense
from slidesparse.gemm.backend import LiftThenMultiply
from slidesparse.gemm.dense import DenseLinear
from slidesparse.layer.linear import SlideLinear
from slidesparse.lifting.addresses import LiftInputs
from slidesparse.lifting.choose import TorchLift
from slidesparse.lifting.layout import LiftSpec, LinearTensors
from slidesparse.weights.packed import pack_by

BF16, FP16, INT8, FP8 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn
TOKENS, OUT, COLUMNS = 40, 32, 64
INPUTS = LiftInputs(16, None, None, 64, 0)
WEIGHT = torch.zeros(OUT, COLUMNS, dtype=INT8)
PARTS = torch.empty(0), None
"""What the default gives."""


class Parts:
    """Stands for the lift, for the product and for the default, and keeps what they were told."""

    out_features = OUT

    def __init__(self, *, takes: bool = True, reason: str | None = None, ready: bool = True) -> None:
        self.launches: list[tuple[Any, ...]] = []
        self.products: list[tuple[Any, ...]] = []
        self.by_parts = 0
        self.lift: Any = SimpleNamespace(
            inputs=lambda *_: INPUTS if takes else None,
            why_not=lambda *_: reason,
            launcher=SimpleNamespace(ready=ready),
            launch=lambda inputs, eps, **outputs: self.launches.append((inputs, eps, outputs)),
            device=torch.device("cpu"),
            index=0,
            tokens=TOKENS,
            padded=TOKENS,
            k_packed=COLUMNS,
            shape=(TOKENS, COLUMNS),
            source=BF16,
            target=INT8,
            quantised=True,
        )
        by_parts: Any = self
        self.linear = DenseLinear(self.lift, by_parts, self.multiply)

    def __call__(self, *_: Any) -> Any:
        self.by_parts += 1
        return PARTS

    def multiply(self, *arguments: Any) -> torch.Tensor:
        self.products.append(arguments)
        return torch.ones(TOKENS, OUT)

    def run(self, weight: torch.Tensor, scale: torch.Tensor | None, bias: Any = None, residual: Any = None) -> Any:
        x, none = torch.ones(TOKENS, COLUMNS, dtype=BF16), torch.empty(0)
        return self.linear(x, residual, LinearTensors(none, [weight], scale, bias, None), 0.5)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "empty_here", lambda *sizes: torch.empty(*sizes[:2], dtype=sizes[2]))
    log_once.cache_clear()


def test_the_product_gets_what_the_launch_wrote() -> None:
    parts, scale, bias = Parts(), torch.ones(OUT), torch.ones(OUT, dtype=BF16)
    y, total = parts.run(WEIGHT, scale, bias)
    assert (y.shape, total) == ((TOKENS, OUT), None)
    ((values, weight, scale_x, scale_w, given_bias, out_dtype),) = parts.products
    assert (values.shape, values.dtype, scale_x.shape, scale_x.dtype) == ((40, 64), INT8, (40, 1), torch.float32)
    assert (weight is WEIGHT, scale_w is scale, given_bias is bias, out_dtype) == (True, True, True, BF16)
    assert parts.launches == [
        (INPUTS, 0.5, {"residual_out": None, "values": values.data_ptr(), "scale": scale_x.data_ptr()})
    ]
    assert not parts.by_parts


def test_a_residual_gives_a_new_one() -> None:
    parts = Parts()
    _, total = parts.run(WEIGHT, torch.ones(OUT), residual=torch.ones(TOKENS, COLUMNS))
    assert (total.shape, total.dtype) == ((TOKENS, COLUMNS), BF16)
    assert parts.launches[0][2]["residual_out"] == total.data_ptr()


@pytest.mark.parametrize(
    ("weight", "scale", "bias"),
    [
        (torch.zeros(OUT + 8, COLUMNS, dtype=INT8), torch.ones(OUT), None),  # padded
        (WEIGHT.to("meta"), torch.ones(OUT), None),
        (WEIGHT, None, None),
        (WEIGHT, torch.ones(OUT, dtype=BF16), None),
        (WEIGHT, torch.ones(OUT), torch.ones(OUT)),  # float32, where the kernels take the output's type
        (WEIGHT, torch.ones(OUT), torch.ones(OUT - 1, dtype=BF16)),
    ],
)
def test_what_the_kernels_do_not_read_is_left_to_the_parts(
    weight: torch.Tensor, scale: Any, bias: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="slidesparse")
    parts = Parts()
    for _ in range(2):
        assert parts.run(weight, scale, bias) is PARTS
    assert parts.by_parts == 2
    assert not parts.launches
    reason = "weight, scale or bias has not the shape, type or place that the kernel reads"
    assert caplog.messages == [f"slidesparse: dense, fused runs by its parts: {reason}"]


@pytest.mark.parametrize("reason", [None, "they are not aligned"])
def test_what_the_lift_does_not_read_is_left_to_the_parts(reason: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="slidesparse")
    parts = Parts(takes=False, reason=reason, ready=False)  # without a reason only a compilation is missing
    for _ in range(2):
        assert parts.run(WEIGHT, torch.ones(OUT)) is PARTS
    assert not parts.launches
    assert caplog.messages == ([] if reason is None else [f"slidesparse: dense, fused runs by its parts: {reason}"])


VLLM = "vLLM's kernel"


@pytest.mark.parametrize(
    ("dtype", "out_dtype", "tokens", "has_vllm", "by"),
    [
        (INT8, BF16, 1, True, "_by_vllm"),
        (INT8, torch.float32, 64, True, None),
        (INT8, BF16, 64, False, None),
        (FP8, BF16, 255, True, "_by_vllm"),
        (FP8, BF16, 256, True, "_by_torch"),
        (FP8, FP16, 256, True, "_by_vllm"),
        (FP8, FP16, 64, False, None),
    ],
)
def test_the_fastest_kernel_that_applies_scales(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, out_dtype: Any, tokens: int, has_vllm: bool, by: str | None
) -> None:
    monkeypatch.setattr(dense, "vllm_scaled_mm", lambda: VLLM if has_vllm else None)
    monkeypatch.setattr(dense, "_capability", lambda _: dense.HOPPER)
    found = dense.fused_product(dtype, out_dtype, tokens, 0)
    assert getattr(found, "func", found) is (None if by is None else getattr(dense, by))


@pytest.mark.parametrize("capability", [(10, 0), (12, 1)])
def test_vllms_kernel_is_not_asked_for_int8_on_blackwell(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    """It raises there: "Int8 not supported on SM120. Use FP8 quantization instead"."""
    monkeypatch.setattr(dense, "vllm_scaled_mm", lambda: VLLM)
    monkeypatch.setattr(dense, "_capability", lambda _: capability)
    assert dense.fused_product(INT8, BF16, 64, 0) is None
    for tokens in (64, 4096):
        fp8: Any = dense.fused_product(FP8, BF16, tokens, 0)
        assert fp8.func is dense._by_vllm


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
    backend, lift = dense.Dense(), Parts().lift
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


def test_what_the_scale_adds_is_in_no_state_dict() -> None:
    layer, other = fp8_layer(), fp8_layer()
    state, x = layer.state_dict(), torch.randn(TOKENS, COLUMNS)
    assert set(state) == {"weight", "weight_scale", "bias"}
    other.load_state_dict(state)
    assert torch.equal(other(x), layer(x))
