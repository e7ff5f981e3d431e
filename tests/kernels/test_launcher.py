"""What a launcher spares a kernel while Triton compiles it, and what the kernels that lift are told in which order."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from slidesparse.base import triton_launcher
from slidesparse.base.log import log_once
from slidesparse.base.triton_launcher import Launcher
from slidesparse.lifting import kernel as lifts
from slidesparse.lifting.addresses import LiftInputs
from slidesparse.lifting.kernel import KernelLift
from slidesparse.lifting.layout import ColumnOrder, Layout, LiftSpec
from slidesparse.lifting.resident import resident_kernel
from slidesparse.lifting.walking import walking_kernel

ORDER = ColumnOrder(64, 8, 0, 8, 96, slid=True)
SPEC = LiftSpec("add_rms_norm", torch.bfloat16, torch.int8, tuple(ORDER.numbers), Layout())


class Kernel:
    """In the place of a ``triton.jit`` function."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.hooks: list[Any] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: object, **options: object) -> None:
            self.hooks += [knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook]
            if self.fails:
                raise RuntimeError("out of registers")

        return launch


@pytest.mark.parametrize("fails", [False, True])
def test_nobody_listens_while_it_compiles_and_everybody_does_afterwards(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    listeners = [lambda **_: None, lambda **_: None]
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", listeners[0])
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", listeners[1])
    kernel = Kernel(fails)
    try:
        Launcher(kernel, ()).compile_and_launch(1, (), aligned=True)
    except RuntimeError:
        assert fails
    assert kernel.hooks == [None, None]
    assert [knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook] == listeners


class Compiled:
    """In the place of Triton's ``CompiledKernel``, which from 3.8 on unloads its code when it dies."""

    function, packed_metadata = 7, (4, 1, 0)
    run = staticmethod(lambda *_: None)  # Triton's is another object too, which does not keep this one alive


def test_the_compiled_kernel_lives_as_long_as_its_launcher() -> None:
    made: list[weakref.ref[Compiled]] = []

    class Compiling(Kernel):
        def __getitem__(self, grid: tuple[int]) -> Any:
            def launch(*arguments: object, **options: object) -> Compiled:
                compiled = Compiled()
                made.append(weakref.ref(compiled))
                return compiled

            return launch

    launcher = Launcher(Compiling(), ())
    launcher.compile_and_launch(1, (), aligned=True)
    gc.collect()
    assert launcher.ready
    assert made[0]() is not None
    del launcher
    gc.collect()
    assert made[0]() is None


# -- a Triton that has changed -------------------------------------------------------------------------------------


class Compiling(Kernel):
    """One that gives what it compiled, as Triton does."""

    def __init__(self, **compiled: object) -> None:
        super().__init__()
        self.compiled = SimpleNamespace(**compiled)
        self.launches = 0

    def __getitem__(self, grid: tuple[int]) -> Any:
        def launch(*arguments: object, **options: object) -> object:
            self.launches += 1
            return self.compiled

        return launch


COMPILED = {"function": 7, "packed_metadata": (4, 1, 0), "run": lambda *passed: PASSED.append(passed)}
PASSED: list[tuple[object, ...]] = []


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    """What Triton can do is found out in this test, and forgotten after it."""
    caches = triton_launcher.refusal_of_order, log_once
    for cache in caches:
        cache.cache_clear()
    PASSED.clear()
    yield
    for cache in caches:
        cache.cache_clear()


def _launched_twice(kernel: Compiling) -> Launcher:
    launcher = Launcher(kernel, ("constant",))
    launcher.compile_and_launch(3, (16, 32), aligned=True)
    launcher.run(3, -1, (), (16,), (32,))
    return launcher


def test_a_launch_passes_what_triton_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert triton_launcher.refusal_of_order() is None, "this Triton launches its kernels in another way"
    monkeypatch.setattr(triton_launcher, "current_stream", lambda _: "stream")
    kernel = Compiling(**COMPILED)
    assert _launched_twice(kernel).ready
    assert kernel.launches == 1
    assert PASSED == [(3, 1, 1, "stream", 7, (4, 1, 0), None, None, None, 16, 32, "constant")]
    places = ("grid_0", "grid_1", "grid_2", "stream", "function", "packed_metadata")
    assert triton_launcher.ORDER[: len(places)] == places


def _swapped(self: Any, kernel: Any, stream: int, grid_0: int, bound_args: dict[str, object]) -> None:
    kernel.run(grid_0, 1, 1, kernel.function, stream, kernel.packed_metadata, *bound_args.values())


@pytest.mark.parametrize("run", [_swapped, len, None])
def test_another_order_leaves_every_launch_to_triton(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, run: Any
) -> None:
    if run is None:
        monkeypatch.delattr(JITFunction, "run")
        monkeypatch.delattr(JITFunction.__mro__[1], "run", raising=False)
    else:
        monkeypatch.setattr(JITFunction, "run", run)
    _runs_by_triton(Compiling(**COMPILED), caplog)


@pytest.mark.parametrize("lacking", list(COMPILED))
def test_a_compiled_kernel_without_a_part_leaves_every_launch_to_triton(
    caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    line = _runs_by_triton(Compiling(**{name: part for name, part in COMPILED.items() if name != lacking}), caplog)
    assert f"have no {lacking}" in line


def _runs_by_triton(kernel: Compiling, caplog: pytest.LogCaptureFixture) -> str:
    with caplog.at_level(logging.WARNING):
        assert not _launched_twice(kernel).ready
    assert kernel.launches == 2
    assert not PASSED
    (line,) = caplog.messages
    assert line.startswith("slidesparse: Triton itself launches all kernels")
    assert "\n" not in line
    return line


NUMBERS = {
    "x_ptr": 16,
    "residual_ptr": 32,
    "residual_out_ptr": 48,
    "norm_weight_ptr": 64,
    "out_ptr": 96,
    "scales_ptr": 112,
    "tokens": 5,
    "x_stride": 128,
    "residual_stride": 144,
    "eps": 0.25,
}
"""Parameter of the kernels that lift -> a number that no other has."""


@pytest.mark.parametrize("kernel", [resident_kernel, walking_kernel], ids=["held", "walking"])
def test_every_address_of_a_lift_lands_in_its_parameter(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    lift = KernelLift(SPEC, 5, torch.device("cpu"))
    launcher = Launcher(kernel, ("constants",))
    launcher._run = lambda *arguments: told.append(arguments)
    lift.launcher = launcher
    monkeypatch.setattr(lifts, "current_stream", lambda device: 4096)
    inputs = LiftInputs(x=16, residual=32, norm_weight=64, x_stride=128, residual_stride=144)
    lift.launch(inputs, 0.25, residual_out=48, values=96, scale=112)
    (arguments,) = told
    assert arguments[:4] == (5, 1, 1, 4096)
    assert kernel.arg_names == [*NUMBERS, "P"]
    assert dict(zip(kernel.arg_names, arguments[9:], strict=True)) == NUMBERS | {"P": "constants"}


def test_a_kernel_that_is_ready_is_told_the_same_by_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    lift = KernelLift(SPEC._replace(layout=Layout(rows=lambda _: 8)), 5, torch.device("cpu"))
    lift.launcher = SimpleNamespace(ready=True, launch=lambda *given: told.append(given))
    monkeypatch.setattr(lifts, "current_stream", lambda device: 4096)
    x, residual = torch.randn(2, 5, 128).bfloat16()[..., :64].unbind(0)
    norm_weight = torch.ones(64, dtype=torch.bfloat16)
    lifted = lift.run(x, residual, norm_weight, 0.25)
    ((programs, stream, *numbers),) = told
    written = lifted.residual, norm_weight, lifted.values, lifted.scale
    places = [None if tensor is None else tensor.data_ptr() for tensor in (x, residual, *written)]
    assert (programs, stream, numbers) == (5, 4096, [*places, 5, 128, 128, 0.25])
    assert lifted.values.shape == (5, ORDER.k_packed)
    assert lifted.values.untyped_storage().nbytes() == 8 * ORDER.k_packed
