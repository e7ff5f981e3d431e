"""A GPU as far as measuring sees one: a clock of the test's own, and backends that take the times they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from slidesparse.base import log
from slidesparse.gemm import BACKENDS, select, speed_files
from slidesparse.gemm.dense import Dense
from slidesparse.gemm.expert_times import ExpertChoice, ExpertKind
from slidesparse.gemm.reference import Reference
from slidesparse.tuning import at_load

Us = Callable[[str, int], float]
"""(backend, tokens) -> microseconds of a call."""


class Quick(Reference):
    """A backend that ``auto`` may take."""

    name = "quick"
    accelerated = True

    def library(self) -> str:
        return "Quick 1.0"


class Wrong(Quick):
    """A backend whose products are wrong."""

    name = "wrong"

    def library(self) -> str:
        return "Wrong 1.0"

    def matmul(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().matmul(*args, **kwargs) * 2


@dataclass
class FakeClock:
    """Seconds that pass only where somebody says so."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class _Pass:
    backend: str
    us: float
    copies: int
    method: str
    stopwatch: FakeStopwatch

    def launch(self) -> Callable[[], float]:
        us = self.us * self.stopwatch.disturbance ** len(self.stopwatch.launches)
        self.stopwatch.clock.seconds += us * self.copies * 1e-6
        self.stopwatch.launches.append(self.backend)
        return lambda: us


@dataclass
class FakeStopwatch:
    """Runs and checks the calls once, and takes as long as ``us`` says."""

    us: Us
    clock: FakeClock = field(default_factory=FakeClock)
    memory: int = 1 << 40
    l2_bytes: int = 1000
    disturbance: float = 1.0
    prepared: list[tuple[str, int, bool, int]] = field(default_factory=list)
    launches: list[str] = field(default_factory=list)

    def free_bytes(self) -> int:
        return self.memory

    def begin(self) -> None:
        """Nothing to free."""

    def wait(self) -> None:
        """It works."""

    def prepare(self, calls: Sequence[Callable[[], Any]], capture: bool, check: Callable[[Any], None]) -> _Pass:
        results = [call() for call in calls]
        check(results[-1])
        backend, tokens = calls[0].func.__self__.backend, len(results[-1])  # type: ignore[attr-defined]
        self.prepared.append((backend, tokens, capture, len(calls)))
        return _Pass(backend, self.us(backend, tokens), len(calls), "graph" if capture else "events", self)


def pretend_hopper(monkeypatch: pytest.MonkeyPatch, cache: Path, *modules: ModuleType) -> None:
    """Let the CPU pass for a Hopper GPU without times of its own, which may be timed as far as these modules see."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "cache"))
    monkeypatch.setattr(speed_files, "_UNWRITTEN", {})
    for module in modules:
        monkeypatch.setattr(module, "can_be_timed", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(select, "driver_version", lambda: "580.1")
    monkeypatch.setattr(at_load, "ask_for_times", lambda *_: None)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Let the CPU pass for a GPU with one accelerated backend, :class:`Quick`, and no times yet."""
    pretend_hopper(monkeypatch, cache, select)
    log.log_once.cache_clear()
    for name in [*reversed(BACKENDS)]:  # so that they return in their order
        monkeypatch.delitem(BACKENDS, name)
    for backend in (Reference, Dense, Quick):
        monkeypatch.setitem(BACKENDS, backend.name, backend)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 9))


def pretend_start(monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakeStopwatch:
    """Let a server's starts measure on :func:`pretend_gpu`, where dense takes twice as long as the packed form."""
    pretend_gpu(monkeypatch, cache)
    made = FakeStopwatch(lambda backend, _: 2e3 if backend == "dense" else 1e3, FakeClock())
    real = at_load.LoadTuner.__init__

    def with_fakes(self: at_load.LoadTuner, *given: Any) -> None:
        real(self, *given, stopwatch=lambda: made, clock=made.clock, sleep=made.clock.sleep)

    monkeypatch.setattr(at_load.LoadTuner, "__init__", with_fakes)
    return made


class ExpertTuner:
    """In place of what measures experts: runs both forms once, and takes the times that it was given.

    ``given`` makes the arguments of both forms, the same on every call: tokens, the router's weights, and experts.
    """

    expert_sizes = (16, 64)

    def __init__(self, sparse: bool, given: Callable[[ExpertKind], tuple[torch.Tensor, ...]]) -> None:
        self.sparse, self.given = sparse, given
        self.seen: dict[ExpertKind, dict[str, torch.Tensor]] = {}

    def wants(self, *_: Any) -> bool:
        return False

    def wants_experts(self, kind: ExpertKind) -> bool:
        return kind not in self.seen

    def measure_experts(self, kind: ExpertKind, forms: dict[str, Callable[..., torch.Tensor]]) -> None:
        given = self.given(kind)
        self.seen[kind] = {name: run(*given) for name, run in forms.items()}
        assert torch.equal(given[0], self.given(kind)[0])  # no form wrote over its input

    def choose(self, kind: ExpertKind, tokens: Sequence[int]) -> ExpertChoice:
        assert kind in self.seen
        assert tokens == self.expert_sizes
        return ExpertChoice(self.sparse, "hopper takes 0.50 of dense's time; measured here")
