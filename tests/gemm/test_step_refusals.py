"""What the backends of weights in steps say where they cannot run: no GPU needed."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slidesparse.gemm import Problem, get_backend, kernel, nvrtc, step_backend
from slidesparse.layer.linear import SlideLinear
from slidesparse.weights.packed import pack_by
from slidesparse.weights.pattern import DENSE, Pattern


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    cached = (nvrtc._nvrtc, nvrtc.nvrtc_version, kernel._driver, kernel.driver_version)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def _why_not(dtype: torch.dtype = torch.int8, device: str = "cuda") -> str | None:
    return get_backend("hopper").why_not(Problem(Pattern(6, 8), dtype, 64, 64, torch.device(device)))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def test_another_device_type_or_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _why_not(device="cpu") == "it needs a CUDA device"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert _why_not() == "it is written for compute capability 9.0 (H100, H200), this GPU has 10.0"
    assert _why_not(torch.float32) == "it has no fp32 kernels"


@pytest.mark.parametrize("problem", [{"slid": False}, {"pattern": DENSE}])
def test_a_dense_weight(problem: dict[str, Any], h200: None) -> None:
    wanted = replace(Problem(Pattern(6, 8), torch.int8, 64, 64, torch.device("cuda")), **problem)
    assert get_backend("hopper").why_not(wanted) == "a dense weight has no 2:4 form"


def test_no_bindings(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda.bindings", "cuda.bindings.driver", "cuda.bindings.nvrtc"):  # another test may have imported them
        monkeypatch.setitem(sys.modules, name, None)
    assert re.fullmatch("cuda-bindings is not installed; got .*; pip install cuda-bindings", _why_not() or "")


@pytest.mark.parametrize(
    ("version", "says"),
    [
        ((0, 11, 8), "NVRTC is too old; got 11.8; needed 12.0 or newer"),
        ((7, 0, 0), "nvrtcVersion failed with status 7"),
    ],
)
def test_an_old_or_broken_compiler(
    h200: None, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], says: str
) -> None:
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda: version))
    nvrtc.nvrtc_version.cache_clear()
    assert _why_not() == says
    monkeypatch.undo()  # before the fixture clears caches that the fake does not have


def test_no_compiler(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: SimpleNamespace(nvrtcVersion=missing))
    got = "RuntimeError: libnvrtc.so not found"
    assert _why_not() == f"NVRTC cannot be loaded; got {got}; pip install nvidia-cuda-nvrtc"
    monkeypatch.undo()


@pytest.mark.parametrize(("driver", "says"), [(13, None), (12, "NVRTC 13 makes code that this driver, of CUDA 12, ")])
def test_a_driver_older_than_the_compiler(
    h200: None, monkeypatch: pytest.MonkeyPatch, driver: int, says: str | None
) -> None:
    monkeypatch.setattr(step_backend, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(step_backend, "driver_version", lambda: driver)
    why = _why_not()
    assert why is None if says is None else why is not None and why.startswith(says)


def test_no_driver(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(step_backend, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(kernel, "_driver", lambda: SimpleNamespace(cuDriverGetVersion=missing))
    got = "RuntimeError: Failed to dlopen libcuda.so.1"
    assert _why_not() == f"the CUDA driver cannot be loaded; got {got}; install the NVIDIA driver"
    monkeypatch.undo()


def test_scales_and_bias_are_contiguous_whatever_was_given() -> None:
    weight = torch.randint(-9, 9, (8, 16), dtype=torch.int8) * 0
    packed = pack_by(weight, "6:8", scale=torch.ones(1).expand(8))
    assert packed.scale.is_contiguous()
    layer = SlideLinear(packed, bias=torch.rand(8, 3)[:, 0])
    assert layer.bias.is_contiguous()
