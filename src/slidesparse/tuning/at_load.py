"""Measure the layers of a model while it is loaded, where this machine has no times of them yet.

A start-up pays for it once: the times go into the user's cache (:mod:`slidesparse.gemm.speed_files`), by one of a
server's processes. The others wait for it and read; servers on other GPUs measure at the same time. What takes longer
than the budget is left to the next start; until then a prior decides, and the log says so.

A form that gives a wrong result is kept as such, even where no time is: a start that chose it by other times would
serve wrong answers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from slidesparse.base.arguments import shown
from slidesparse.base.file_lock import file_lock
from slidesparse.errors import InputError, SlideSparseError
from slidesparse.gemm import Problem
from slidesparse.gemm.expert_times import ExpertKind, keep_expert_times, measured_here, was_wrong
from slidesparse.gemm.select import Fallback, backends_to_compare, can_be_timed, find_measured, installation, wrong_form
from slidesparse.gemm.speed import DENSE_FORM, LayerSpeed, lacking
from slidesparse.gemm.speed_files import add_layers, lock_path
from slidesparse.tuning.measure import SIZES, LayerMeasurement, TakenTimes, sizes_up_to
from slidesparse.tuning.measure_experts import ExpertMeasurement, RunExperts
from slidesparse.tuning.timing import CudaStopwatch, Stopwatch
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.quant import dtype_name

Tune = Literal["auto", "off"]

Keep = Callable[[LayerSpeed | None, frozenset[str]], Path | None]
"""(times, or None where there are none; backends that were wrong) -> the file, or None where it cannot be written."""

Make = Callable[[torch.dtype, Stopwatch], LayerMeasurement | ExpertMeasurement]
"""(type of activations, what times) -> the measurement of a kind of layer."""

BUDGET_S = 12.0
"""Seconds by which measuring, and waiting for another process that measures, may make one start longer."""

NOISE = 0.15
"""Where dense timed twice differs by more, something else runs on the GPU, and the times mean nothing."""


def check_tune(value: object, where: str) -> None:
    """Raise an InputError, with the place where it was given, for anything but the values of :data:`Tune`."""
    if not isinstance(value, str) or value not in ("auto", "off"):
        raise InputError(where, got=shown(value), needed="auto or off")


class LoadTuner:
    """Measures each kind of layer of one model once, before the first layer of that kind chooses its backends.

    Args:
        most: Tokens of the largest batch that the model will run.
        source: Type of its activations.
        log: Where its lines go.
        budget_s: See :data:`BUDGET_S`.
        stopwatch: Makes what times passes.
        clock: Returns seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self,
        most: int,
        source: torch.dtype,
        log: logging.Logger,
        *,
        budget_s: float = BUDGET_S,
        stopwatch: Callable[[], Stopwatch] = CudaStopwatch,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.sizes, self.source, self.log = sizes_up_to(min(most, SIZES[-1])), source, log
        self.budget_s, self.spent_s = budget_s, 0.0
        self._stopwatch, self._clock, self._sleep = stopwatch, clock, sleep
        self._seen: set[object] = set()
        self._told = False

    def wants(self, problem: Problem, backend: str = "auto", fallback: Fallback = "dense") -> bool:
        """Return whether a layer is the first one of a kind that is to be measured now."""
        kind = problem.dtype, problem.out_features, problem.in_features, str(problem.pattern), problem.bits
        if kind in self._seen:
            return False
        backends = backends_to_compare(problem, backend, fallback)
        if not backends or torch.cuda.is_current_stream_capturing():
            return False
        self._seen.add(kind)
        return bool(self._lacking(problem, backends)) and self._has_time()

    def _has_time(self) -> bool:
        if self.spent_s >= self.budget_s:
            self._tell_spent()
            return False
        return True

    @property
    def expert_sizes(self) -> list[int]:
        """The numbers of tokens at which experts are measured: one token reads few of them, and launches decide."""
        return [1, *self.sizes]

    def measure(self, problem: Problem, packed: PackedWeight, fallback: Fallback = "dense") -> None:
        """Measure a layer that :meth:`wants` named, or wait for the process that does; a failure is one line."""
        self._alone(problem.device, layer_name(problem), lambda end: self._measure(problem, packed, fallback, end))

    def wants_experts(self, kind: ExpertKind) -> bool:
        """Return whether a layer's experts are the first ones of a kind that is to be measured now."""
        if kind in self._seen or not can_be_timed(kind.device) or torch.cuda.is_current_stream_capturing():
            return False
        self._seen.add(kind)
        return bool(self._lacking_experts(kind)) and self._has_time()

    def measure_experts(self, kind: ExpertKind, forms: Mapping[str, RunExperts]) -> None:
        """Measure experts that :meth:`wants_experts` named, in their forms, as :meth:`measure` does a layer."""
        self._alone(kind.device, str(kind), lambda end: self._measure_experts(kind, forms, end))

    def _alone(self, device: torch.device, name: str, measure: Callable[[float], None]) -> None:
        """Measure by the end of the budget, while no other process does; a failure is one line."""
        start = self._clock()
        end = start + self.budget_s - self.spent_s
        try:
            with torch.no_grad(), ExitStack() as stack:
                if device.type == "cuda":
                    stack.enter_context(torch.cuda.device(device))
                if self._is_alone(stack, device, end):
                    measure(end)
        except (RuntimeError, ValueError, SlideSparseError) as error:  # a broken device fails again where it runs
            self.log.warning("slidesparse: %s is not measured: %s", name, str(error).partition("\n")[0])
        self.spent_s += self._clock() - start

    def _is_alone(self, stack: ExitStack, device: torch.device, end: float) -> bool:
        """Return whether this process may measure now, because no other one of this server, or on this GPU, does."""
        path = lock_path(installation(device), _own_gpu(device))
        if stack.enter_context(file_lock(path, 0)):
            return True
        self.log.info("slidesparse: waiting for another process that measures")
        wait_s = max(0.0, end - self._clock())
        if stack.enter_context(file_lock(path, wait_s, clock=self._clock, sleep=self._sleep)):
            return True
        self._tell_spent()
        return False

    def _measure(self, problem: Problem, packed: PackedWeight, fallback: Fallback, end: float) -> None:
        backends = backends_to_compare(problem, "auto", fallback)
        tokens = self._lacking(problem, backends)
        if backends and tokens:  # else the process that was waited for has measured it
            make, known = partial(LayerMeasurement, packed, backends), self._known(problem, backends)
            keep = partial(_keep_layer, problem)
            self._take(layer_name(problem), ", ".join(backends), make, tokens, known, keep, end)

    def _measure_experts(self, kind: ExpertKind, forms: Mapping[str, RunExperts], end: float) -> None:
        if tokens := self._lacking_experts(kind):  # else the process that was waited for has measured it
            make, keep = partial(ExpertMeasurement, kind, forms), partial(keep_expert_times, kind)
            self._take(str(kind), "packed and as they are,", make, tokens, measured_here(kind), keep, end)

    def _take(
        self, name: str, forms: str, make: Make, tokens: list[int], known: Sequence[int], keep: Keep, end: float
    ) -> None:
        """Measure a kind of layer at some numbers of tokens, and keep what can be used; say where the budget ended."""
        start, line = self._clock(), "slidesparse: measuring %s on this GPU: %s at %d to %d tokens"
        self.log.info(line, name, forms, tokens[0], tokens[-1])
        found = make(self.source, self._stopwatch()).measure(tokens, known, lambda: self._clock() >= end)
        seconds, layer = self._clock() - start, usable_times(found, name, self.log)
        path = keep(layer, found.wrong) if layer is not None or found.wrong else None
        if layer is not None:
            line = "slidesparse: measured %s in %.1f s (%s): %s"
            self.log.info(line, name, seconds, path or "not kept", describe(layer))
        if self._clock() >= end and (found.layer is None or lacking(tokens, found.layer.tokens)):
            self._tell_spent()

    def _known(self, problem: Problem, backends: list[str]) -> tuple[int, ...]:
        measured = find_measured(problem, backends)
        return () if measured is None else measured.here

    def _lacking(self, problem: Problem, backends: list[str]) -> list[int]:
        return lacking(self.sizes, self._known(problem, backends))

    def _lacking_experts(self, kind: ExpertKind) -> list[int]:
        return [] if was_wrong(kind) else lacking(self.expert_sizes, measured_here(kind))

    def _tell_spent(self) -> None:
        if not self._told:
            self._told = True
            self.log.warning(
                "slidesparse: measuring ends after %g s of this start; the kinds of layers that are left go by a prior,"
                " and the next start, or slidesparse tune, measures them",
                self.budget_s,
            )


def _own_gpu(device: torch.device) -> str:
    """Return the name of a process's GPU; nothing for one of several of a server, of which one measures for all."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return ""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def usable_times(found: TakenTimes, name: str, log: logging.Logger) -> LayerSpeed | None:
    """Return the times that were taken of a kind of layer; None where there are none, or the GPU was busy.

    What could not be measured, and a busy GPU, is a line of the log.
    """
    for backend, fault in found.faults.items():
        log.warning("slidesparse: %s: %s is not measured everywhere: %s", name, backend, fault)
    if found.layer is not None and found.noise > NOISE:
        line = "slidesparse: %s: times are not used: dense differs from itself by %.0f %%, so the GPU is busy"
        log.warning(line, name, 100 * found.noise)
        return None
    return found.layer


def _keep_layer(problem: Problem, layer: LayerSpeed | None, wrong: Iterable[str]) -> Path | None:
    forms = [wrong_form(problem, name) for name in wrong]
    return add_layers(installation(problem.device), [] if layer is None else [layer], forms)


def describe(layer: LayerSpeed) -> str:
    """Return a layer's times over dense in words: ``hopper 6:8 over dense 0.77 at 16, 1.03 at 64 tokens``."""
    lines = []
    for name, times in layer.us.items():
        if name != DENSE_FORM:
            dense = layer.us[DENSE_FORM]
            shares = [
                f"{us / base:.2f} at {m}" for m, us, base in zip(layer.tokens, times, dense, strict=True) if us and base
            ]
            lines.append(f"{name} over dense {', '.join(shares)} tokens" if shares else f"{name} cannot run")
    return "; ".join(lines)


def layer_name(problem: Problem) -> str:
    """Return ``int8 4608x3584 6:8``."""
    return f"{dtype_name(problem.dtype)} {problem.out_features}x{problem.in_features} {problem.pattern}"
