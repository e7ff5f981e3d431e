"""Whole linears, on Hopper and dense: what their two launches are told, and what they leave to the default."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from slidesparse.base.log import log_once
from slidesparse.gemm import dense, step_linear
from slidesparse.gemm.dense import DenseLinear
from slidesparse.gemm.launch import BIAS_TYPES, WeightAddresses
from slidesparse.gemm.step_linear import StepLinear
from slidesparse.gemm.steps import StepForm
from slidesparse.lifting.addresses import LiftInputs
from slidesparse.lifting.layout import ColumnOrder, LinearTensors

BF16 = torch.bfloat16
TOKENS, OUT = 5, 40
ORDER = ColumnOrder(64, 6, 0, 11, 128, slid=True)
VALUES = 8 * ORDER.k_packed
"""Bytes of the lifted values of the Hopper kernel, padded tokens included."""

INPUTS = LiftInputs(16, None, None, 64, 0)
"""What the lift says of the tensors that it reads."""

PARTS = torch.empty(0), None
"""What the default gives."""

STEPS = torch.empty(StepForm.of_order(ORDER, 1).shape(OUT, 1), dtype=torch.uint8)
WEIGHTS = {"hopper": STEPS, "dense": torch.zeros(OUT, ORDER.k_packed, dtype=torch.int8)}
NAMES = {"hopper": "hopper nothing", "dense": "dense, fused"}


class Parts:
    """Stands for the lift, the product and the default, and keeps what they were told."""

    out_features, slab_bytes, bands = OUT, VALUES, ()
    backend = SimpleNamespace(name="hopper")

    def __init__(self, *, quantised: bool = True, takes: bool = True, reason: str | None = None) -> None:
        self.lifted: list[tuple[Any, ...]] = []
        self.products: list[tuple[Any, ...]] = []
        self.by_parts: list[tuple[Any, ...]] = []
        self.lift: Any = SimpleNamespace(
            launch=lambda inputs, eps, **outputs: self.lifted.append((inputs, eps, outputs)),
            inputs=lambda *_: INPUTS if takes else None,
            why_not=lambda *_: reason,
            launcher=SimpleNamespace(ready=takes or reason is not None),
            order=ORDER,
            spec="what it does",
            source=BF16,
            target=torch.int8,
            quantised=quantised,
            device=torch.device("cpu"),
            index=0,
            tokens=TOKENS,
            k_packed=ORDER.k_packed,
            shape=(TOKENS, ORDER.in_features),
        )

    def __call__(self, *arguments: Any) -> Any:
        self.by_parts.append(arguments)
        return PARTS

    def launch(self, *arguments: Any) -> None:
        self.products.append(arguments)

    def multiply(self, *arguments: Any) -> torch.Tensor:
        self.products.append(arguments)
        return torch.ones(TOKENS, OUT)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (step_linear, dense):
        monkeypatch.setattr(module, "empty_here", lambda *sizes: torch.empty(*sizes[:2], dtype=sizes[2]))
    log_once.cache_clear()


def run(kind: str, parts: Any, residual: torch.Tensor | None = None, **changed: Any) -> Any:
    """What a linear gives of ones, and its tensors."""
    if kind == "hopper":
        with patch.object(step_linear, "find_launch", lambda *_: parts):
            linear: Any = StepLinear(parts.lift, parts, lambda *_: (), 8)
    else:
        linear = DenseLinear(parts.lift, parts, parts.multiply)
    given = {"operand": [WEIGHTS[kind]], "scale": torch.ones(OUT), "bias": None, "norm_weight": None} | changed
    tensors = LinearTensors(torch.empty(0), **given)
    return linear(torch.ones(TOKENS, ORDER.in_features, dtype=BF16), residual, tensors, 0.5)


def test_both_launches_of_hopper_get_addresses() -> None:
    parts, scale, bias = Parts(), torch.ones(OUT), torch.ones(OUT)
    y, total = run("hopper", parts, scale=scale, bias=bias)
    assert (y.shape, y.dtype, total) == ((TOKENS, OUT), BF16, None)
    ((inputs, eps, outputs),) = parts.lifted
    assert (inputs, eps) == (INPUTS, 0.5)
    assert (outputs["residual_out"], outputs["scale"]) == (None, outputs["values"] + VALUES)
    addresses = STEPS.data_ptr(), scale.data_ptr(), bias.data_ptr(), BIAS_TYPES[bias.dtype]
    assert parts.products == [(outputs["values"], outputs["scale"], WeightAddresses(*addresses), y.data_ptr())]
    assert not parts.by_parts


def test_lifting_alone_writes_no_scales() -> None:
    parts = Parts(quantised=False)
    run("hopper", parts, scale=None)
    ((_, _, outputs),) = parts.lifted
    ((_, scale_x, addresses, _),) = parts.products
    assert (outputs["scale"], scale_x, *addresses[1:]) == (None, None, None, None, 0)


def test_the_dense_product_gets_what_the_launch_wrote() -> None:
    parts, scale, bias = Parts(), torch.ones(OUT), torch.ones(OUT, dtype=BF16)
    y, total = run("dense", parts, scale=scale, bias=bias)
    assert (y.shape, total) == ((TOKENS, OUT), None)
    ((values, weight, scale_x, scale_w, given_bias, out_dtype),) = parts.products
    assert (values.shape, values.dtype) == ((TOKENS, ORDER.k_packed), torch.int8)
    assert (scale_x.shape, scale_x.dtype) == ((TOKENS, 1), torch.float32)
    assert (weight is WEIGHTS["dense"], scale_w is scale, given_bias is bias, out_dtype) == (True, True, True, BF16)
    written = {"residual_out": None, "values": values.data_ptr(), "scale": scale_x.data_ptr()}
    assert parts.lifted == [(INPUTS, 0.5, written)]
    assert not parts.by_parts


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_residual_gives_a_new_one(kind: str) -> None:
    parts, residual = Parts(), torch.ones(TOKENS, ORDER.in_features, dtype=BF16)
    _, total = run(kind, parts, residual, norm_weight=torch.ones(ORDER.in_features, dtype=BF16))
    assert (total.shape, total.dtype) == (residual.shape, BF16)
    assert parts.lifted[0][2]["residual_out"] == total.data_ptr()


DENSE = WEIGHTS["dense"]


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("hopper", {"operand": [STEPS[:, :0]]}),
        ("hopper", {"operand": [torch.empty(1, 1, 4, 4096, dtype=torch.uint8)]}),
        ("hopper", {"operand": [STEPS.to("meta")]}),
        ("hopper", {"operand": [STEPS.view(torch.int8)]}),
        ("hopper", {"operand": [STEPS.transpose(2, 3).contiguous().transpose(2, 3)]}),
        ("hopper", {"scale": torch.ones(OUT - 1)}),
        ("hopper", {"scale": torch.ones(2 * OUT)[::2]}),
        ("hopper", {"bias": torch.ones(OUT, dtype=torch.int32)}),
        ("hopper", {"bias": torch.ones(OUT, device="meta")}),
        ("dense", {"operand": [torch.nn.functional.pad(DENSE, (0, 0, 0, 8))]}),
        ("dense", {"operand": [DENSE.to("meta")]}),
        ("dense", {"scale": None}),
        ("dense", {"scale": torch.ones(OUT, dtype=BF16)}),
        ("dense", {"bias": torch.ones(OUT)}),  # float32, where the kernels take the output's type
        ("dense", {"bias": torch.ones(OUT - 1, dtype=BF16)}),
    ],
)
def test_what_the_kernels_do_not_read_is_left_to_the_parts(
    kind: str, changed: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="slidesparse")
    parts = Parts()
    for _ in range(2):
        assert run(kind, parts, **changed) is PARTS
    assert len(parts.by_parts) == 2
    assert not parts.lifted
    reason = "weight, scale or bias has not the shape, type or place that the kernel reads"
    assert caplog.messages == [f"slidesparse: {NAMES[kind]} runs by its parts: {reason}"]


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("reason", [None, "they are not aligned"])  # without a reason only a compilation is missing
def test_what_the_lift_does_not_read_is_left_to_the_parts(
    kind: str, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="slidesparse")
    parts = Parts(takes=False, reason=reason)
    for _ in range(2):
        assert run(kind, parts) is PARTS
    assert not parts.lifted
    assert caplog.messages == ([] if reason is None else [f"slidesparse: {NAMES[kind]} runs by its parts: {reason}"])
