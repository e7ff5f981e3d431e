"""Which lift a number of tokens gets, and what is said where a GPU's activations are lifted by torch."""

from __future__ import annotations

import logging

import pytest
import torch

from slidesparse.base.log import log_once
from slidesparse.lifting import choose as lifting
from slidesparse.lifting.choose import TorchLift, find_lift
from slidesparse.lifting.layout import ColumnOrder, Layout, LiftSpec

ORDER = tuple(ColumnOrder.identity(64).numbers)
BF16, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _old_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    log_once.cache_clear()


def test_on_a_cpu_the_definition_runs_and_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    lift = find_lift(LiftSpec("none", BF16, INT8, ORDER, Layout()), 3, torch.device("cpu"))
    assert isinstance(lift, TorchLift)
    assert not caplog.records


@pytest.mark.parametrize(
    ("source", "target", "order", "triton", "reason"),
    [
        (BF16, INT8, (), True, "cannot write this column order"),
        (torch.float64, INT8, ORDER, True, "reads no torch.float64"),
        (BF16, INT8, ORDER, False, "Triton is not installed; pip install triton"),
        (BF16, FP8, ORDER, True, "needs compute capability 8.9"),
    ],
)
def test_a_gpu_that_lifts_by_torch_says_why_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    source: torch.dtype,
    target: torch.dtype,
    order: tuple[int, ...],
    triton: bool,
    reason: str,
) -> None:
    monkeypatch.setattr(lifting, "find_spec", lambda _: object() if triton else None)
    for tokens in (3, 4):
        assert isinstance(find_lift(LiftSpec("none", source, target, order, Layout()), tokens, CUDA), TorchLift)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert reason in record.getMessage()
