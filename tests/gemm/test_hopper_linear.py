"""Which tensors a whole linear reads, what its two launches are told, and what runs where it cannot read them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse.base.log import log_once
from slidesparse.gemm.hopper import linear as hopper_linear
from slidesparse.gemm.hopper.launch import BIAS_TYPES, WeightAddresses
from slidesparse.gemm.hopper.linear import HopperLinear
from slidesparse.gemm.hopper.weights import StepForm
from slidesparse.lifting.addresses import LiftInputs
from slidesparse.lifting.layout import ColumnOrder, LinearTensors

BF16 = torch.bfloat16
TOKENS, OUT = 5, 40
ORDER = ColumnOrder(64, 6, 0, 11, 128, slid=True)
FORM = StepForm.of_order(ORDER, 1)
VALUES = 8 * ORDER.k_packed
"""Bytes of the lifted values, padded tokens included."""

INPUTS = LiftInputs(16, None, None, 64, 0)
"""What the lift says of the tensors that it reads."""

PARTS = torch.empty(0), None
"""What the default gives."""


class Launches:
    """Stands for the lift, for the product's launch and for the default, and keeps what they were told."""

    slab_bytes = VALUES
    bands = ()

    def __init__(self, *, quantised: bool = True, takes: bool = True, reason: str | None = None) -> None:
        self.lifted: list[tuple[Any, ...]] = []
        self.multiplied: list[tuple[Any, ...]] = []
        self.by_parts: list[tuple[Any, ...]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.lift: Any = SimpleNamespace(
            launch=lambda inputs, eps, **outputs: self.lifted.append((inputs, eps, outputs)),
            inputs=lambda *tensors: self.asked.append(tensors) or (INPUTS if takes else None),
            why_not=lambda *tensors: reason,
            launcher=SimpleNamespace(ready=True),
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

    @property
    def out_features(self) -> int:
        return OUT

    def __call__(self, *arguments: Any) -> Any:
        self.by_parts.append(arguments)
        return PARTS

    def launch(self, *arguments: Any) -> None:
        self.multiplied.append(arguments)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hopper_linear, "empty_here", lambda rows, columns, dtype: torch.empty(rows, columns, dtype=dtype)
    )
    log_once.cache_clear()


def made(monkeypatch: pytest.MonkeyPatch, launches: Launches) -> HopperLinear:
    monkeypatch.setattr(hopper_linear, "find_launch", lambda *_: launches)
    by_parts: Any = launches
    return HopperLinear(launches.lift, by_parts)


def weight() -> LinearTensors:
    operand = [torch.empty(FORM.shape(OUT, 1), dtype=torch.uint8)]
    return LinearTensors(torch.empty(0), operand, torch.ones(OUT), None, None)


def rows() -> torch.Tensor:
    return torch.ones(TOKENS, ORDER.in_features, dtype=BF16)


def test_both_launches_get_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    bias = torch.ones(OUT)
    tensors = weight()._replace(bias=bias)
    y, total = made(monkeypatch, launches)(rows(), None, tensors, 0.0)
    assert y.shape == (TOKENS, OUT)
    assert y.dtype == BF16
    assert total is None
    ((inputs, eps, outputs),) = launches.lifted
    assert inputs is INPUTS
    assert (outputs["residual_out"], outputs["scale"], eps) == (None, outputs["values"] + VALUES, 0.0)
    (steps,), scale = tensors.operand, tensors.scale
    addresses = steps.data_ptr(), scale.data_ptr(), bias.data_ptr(), BIAS_TYPES[bias.dtype]
    assert launches.multiplied == [(outputs["values"], outputs["scale"], WeightAddresses(*addresses), y.data_ptr())]
    assert not launches.by_parts


@pytest.mark.parametrize("quantised", [True, False])
def test_the_workspace_has_values_and_scales(monkeypatch: pytest.MonkeyPatch, quantised: bool) -> None:
    linear = made(monkeypatch, Launches(quantised=quantised))
    assert linear.workspace_bytes == VALUES + (4 * TOKENS if quantised else 0)


def test_a_residual_gives_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    norm_weight = torch.ones(ORDER.in_features, dtype=BF16)
    _, total = made(monkeypatch, launches)(rows(), rows(), weight()._replace(norm_weight=norm_weight), 1e-6)
    assert (total.shape, total.dtype) == (rows().shape, BF16)
    ((_, eps, outputs),) = launches.lifted
    assert (outputs["residual_out"], eps) == (total.data_ptr(), 1e-6)


def test_lifting_alone_writes_no_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches(quantised=False)
    made(monkeypatch, launches)(rows(), None, weight()._replace(scale=None), 0.0)
    ((_, _, outputs),) = launches.lifted
    ((_, scale_x, addresses, _),) = launches.multiplied
    assert (outputs["scale"], scale_x, *addresses[1:]) == (None, None, None, None, 0)


(STEPS,) = weight().operand


@pytest.mark.parametrize(
    ("steps", "scale", "bias"),
    [
        (STEPS[:, :0], torch.ones(OUT), None),
        (torch.empty(1, 1, 4, 4096, dtype=torch.uint8), torch.ones(OUT), None),
        (STEPS.to("meta"), torch.ones(OUT), None),
        (STEPS.view(torch.int8), torch.ones(OUT), None),
        (STEPS.transpose(2, 3).contiguous().transpose(2, 3), torch.ones(OUT), None),
        (STEPS, torch.ones(OUT - 1), None),
        (STEPS, torch.ones(2 * OUT)[::2], None),
        (STEPS, torch.ones(OUT), torch.ones(OUT, dtype=torch.int32)),
        (STEPS, torch.ones(OUT), torch.ones(OUT, device="meta")),
    ],
)
def test_a_weight_that_the_kernel_could_not_read_is_left_to_the_parts(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    steps: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    caplog.set_level(logging.INFO, logger="slidesparse")
    launches = Launches()
    tensors, x = LinearTensors(torch.empty(0), [steps], scale, bias, None), rows()
    linear = made(monkeypatch, launches)
    for _ in range(2):
        assert linear(x, None, tensors, 0.5) is PARTS
    assert launches.by_parts == 2 * [(x, None, tensors, 0.5)]
    assert not launches.lifted
    reason = "weight, scale or bias has not the shape, type or place that the kernel reads"
    assert caplog.messages == [f"slidesparse: hopper nothing runs by its parts: {reason}"]


@pytest.mark.parametrize("reason", [None, "they are somewhere else"])
def test_activations_that_the_lift_does_not_take_are_left_to_the_parts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, reason: str | None
) -> None:
    caplog.set_level(logging.DEBUG, logger="slidesparse")
    launches = Launches(takes=False, reason=reason)
    launches.lift.launcher.ready = reason is not None  # without a reason only a compilation is missing
    linear = made(monkeypatch, launches)
    for _ in range(2):
        assert linear(rows(), None, weight(), 0.0) is PARTS
    assert not launches.lifted
    assert caplog.messages == ([] if reason is None else [f"slidesparse: hopper nothing runs by its parts: {reason}"])
