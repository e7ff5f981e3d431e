"""What a number of tokens that was never met before costs the host: a server meets hundreds, most of them once."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import FrameType
from typing import Any

import pytest
import torch
from runner_listener import forget_runners

from slidesparse.gemm import launch
from slidesparse.gemm.hopper import choose_tiles
from slidesparse.gemm.hopper.tiles import Tile
from slidesparse.gemm.kernel import Kernel
from slidesparse.gemm.spec import FormSpec, LinearSpec, Route, WeightSpec, chain_text
from slidesparse.gemm.step_linear import StepLinear
from slidesparse.lifting import launch as lift_launch
from slidesparse.lifting.layout import SLAB_BYTES
from slidesparse.lifting.prologue import Prologue
from slidesparse.ops import resolve
from slidesparse_bench.known_models import MODELS

DEVICE, SOURCE = torch.device("cuda", 0), torch.bfloat16
PROLOGUES: tuple[Prologue, ...] = ("none", "add_rms_norm", "silu_mul", "add_rms_norm")
BEFORE = (100, 600)
"""Numbers of tokens that were met before, on both sides of where the lift changes."""

NEW = range(601, 601 + 130 * 7, 7)

MOST_S, MOST_CALLS = 500e-6, 210
"""For a chain of four linears. An idle machine takes 0.09 ms; before what is common was kept it took 0.4 ms."""


def linear(out: int, columns: int, prologue: Prologue) -> LinearSpec:
    """A linear at 6:8 that the Hopper kernel runs at any number of tokens."""
    slid = -(-(columns // 8 * 12) // SLAB_BYTES) * SLAB_BYTES
    form = FormSpec("hopper", (columns, 8, 0, columns // 8, slid, 1), 2)
    eps = 1e-6 if prologue == "add_rms_norm" else 0.0
    return LinearSpec(prologue, eps, True, False, WeightSpec(out, "int8", (form,), (Route(0, "hopper"),)))


def block() -> tuple[LinearSpec, ...]:
    """The four linears between two attentions of Qwen2.5-7B."""
    qkv, o, gate_up, down = MODELS["Qwen2.5-7B"]
    return tuple(linear(*size, prologue) for size, prologue in zip((o, gate_up, down, qkv), PROLOGUES, strict=True))


def forget(*more: Any) -> None:
    """What was made for other numbers of tokens, and for another GPU."""
    forget_runners()
    for cache in (launch._launch, lift_launch.starts_early, *more):
        cache.cache_clear()


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of compute capability 9.0 whose kernels are loaded, and cannot be launched."""
    kernels: dict[tuple[Any, ...], Kernel] = {}

    def load(tile: Tile, *types: Any) -> Kernel:
        found = kernels.get((tile, *types))
        return found or kernels.setdefault((tile, *types), Kernel("function", "context", tile, 0, 132))

    lift = pytest.importorskip("slidesparse.lifting.kernel", reason="Triton is not installed")
    caches = lift.find_kernel_lift, lift._launcher
    monkeypatch.setattr(launch, "load_kernel", load)
    monkeypatch.setattr(choose_tiles, "multiprocessors", lru_cache(lambda device: 132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    forget(*caches)
    yield
    forget(*caches)  # they hold kernels that are none


def calls_of(run: Callable[[], object]) -> int:
    """How many functions of Python it calls."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return calls


def test_a_new_number_of_tokens_costs_the_host_little() -> None:
    text = chain_text(block())
    for tokens in BEFORE:
        resolve.resolve_chain(text, tokens, SOURCE, DEVICE)
    calls = [calls_of(lambda m=m: resolve.resolve_chain(text, m + 5000, SOURCE, DEVICE)) for m in NEW]
    times = []
    for tokens in NEW:
        started = time.thread_time()
        resolve.resolve_chain(text, tokens, SOURCE, DEVICE)
        times.append(time.thread_time() - started)
    seen = calls_of(lambda: resolve.resolve_chain(text, NEW[0], SOURCE, DEVICE))
    assert seen <= 1
    assert max(calls) < MOST_CALLS
    assert statistics.median(times) < MOST_S


@pytest.mark.parametrize("spec", block(), ids=lambda spec: f"{spec.weight.out_features} {spec.prologue}")
def test_a_linear_for_other_tokens_is_the_one_that_would_be_made(spec: LinearSpec) -> None:
    for first in (1, 512, 513, 5000):
        given = spec.weight.text, spec.prologue
        forget()
        resolve.resolve_linear(*given, first, SOURCE, DEVICE)
        others = {m: resolve.resolve_linear(*given, m, SOURCE, DEVICE).runner for m in (1, 7, 512, 513, 700, 16384)}
        for tokens, other in others.items():
            forget()
            fresh = resolve.resolve_linear(*given, tokens, SOURCE, DEVICE).runner
            assert isinstance(other, StepLinear)
            assert isinstance(fresh, StepLinear)
            assert numbers(other) == numbers(fresh)


def numbers(runner: StepLinear) -> dict[str, Any]:
    """All that a linear and its launches are told."""
    lift, gemm = runner.lift, runner._gemm
    own = {name: getattr(runner, name) for name in ("kind", "out", "workspace_bytes", "_scales_start", "_steps")}
    own |= {f"lift {name}": getattr(lift, name) for name in lift.__slots__}
    own |= {f"gemm {name}": getattr(gemm, name) for name in ("_types", "slab_bytes")}
    own["bands"] = [band._replace(sizes=bytes(band.sizes)) for band in gemm.bands]
    return own | {"sizes": bytes(gemm._sizes), "by parts": runner._by_parts.lift is lift}
