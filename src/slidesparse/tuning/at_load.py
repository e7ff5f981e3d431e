"""Measurement of a model's layers while it is loaded, where this machine has no times of them.

The times go into the user's cache (:mod:`slidesparse.gemm.speed_files`), by one of a server's processes. The others
wait for it and read; servers on other GPUs measure at the same time. What exceeds the budget is left to the next start,
and the log says so.

A form with a wrong result is recorded even without a time: a start that chose it by other times would serve wrong
answers.
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
from slidesparse.base.log import log_once
from slidesparse.errors import InputError, SlideSparseError
from slidesparse.gemm import Problem
from slidesparse.gemm.cards import ask_for_times
from slidesparse.gemm.expert_times import ExpertKind, keep_expert_times, measured_here, was_wrong
from slidesparse.gemm.select import Fallback, backends_to_compare, can_be_timed, find_measured, installation, wrong_form
from slidesparse.gemm.speed import LayerSpeed, lacking
from slidesparse.gemm.speed_files import add_layers, lock_path
from slidesparse.gemm.time_model import explain
from slidesparse.tuning.measure import SIZES, LayerMeasurement, TakenTimes, sizes_up_to
from slidesparse.tuning.measure_experts import ExpertMeasurement, RunExperts
from slidesparse.tuning.timing import CudaStopwatch, Stopwatch
from slidesparse.weights.packed import PackedWeight
from slidesparse.weights.quant import dtype_name

Tune = Literal["auto", "off"]

Keep = Callable[[LayerSpeed | None, frozenset[str]], Path | None]
"""(times or None; backends with wrong results) -> the file, or None where it cannot be written."""

Make = Callable[[torch.dtype, Stopwatch], LayerMeasurement | ExpertMeasurement]
"""(type of activations, stopwatch) -> the measurement of a kind of layer."""

BUDGET_S = 12.0
"""Most seconds that measuring, or waiting for another process that measures, adds to a start."""

NOISE = 0.15
"""Largest difference of dense timed twice; beyond it something else runs on the GPU, and times mean nothing."""


def check_tune(value: object, where: str) -> None:
    """Raise an InputError, with the place of the value, for anything but :data:`Tune`."""
    if not isinstance(value, str) or value not in ("auto", "off"):
        raise InputError(where, got=shown(value), needed="auto or off")


class LoadTuner:
    """Measures each kind of layer of one model once, before the first layer of that kind chooses its backends.

    Args:
        most: Tokens of the model's largest batch.
        source: Type of its activations.
        log: The logger.
        budget_s: See :data:`BUDGET_S`.
        stopwatch: Makes a stopwatch.
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
        self._logged_end = False

    def wants(self, problem: Problem, backend: str = "auto", fallback: Fallback = "dense") -> bool:
        """Return whether a layer is the first of its kind and is to be measured now."""
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
        """Numbers of tokens for experts, with one token, which reads few of them: launches decide."""
        return [1, *self.sizes]

    def measure(self, problem: Problem, packed: PackedWeight, fallback: Fallback = "dense") -> None:
        """Measure a layer that :meth:`wants` accepted, or wait for the process that does; a failure is logged."""
        self._alone(problem.device, layer_name(problem), lambda end: self._measure(problem, packed, fallback, end))

    def wants_experts(self, kind: ExpertKind) -> bool:
        """Return whether a layer's experts are the first of their kind and are to be measured now."""
        if kind in self._seen or not can_be_timed(kind.device) or torch.cuda.is_current_stream_capturing():
            return False
        self._seen.add(kind)
        return bool(self._lacking_experts(kind)) and self._has_time()

    def measure_experts(self, kind: ExpertKind, forms: Mapping[str, RunExperts]) -> None:
        """Measure all forms of experts that :meth:`wants_experts` accepted; see :meth:`measure`."""
        self._alone(kind.device, str(kind), lambda end: self._measure_experts(kind, forms, end))

    def _alone(self, device: torch.device, name: str, measure: Callable[[float], None]) -> None:
        """Measure within the budget, while no other process does; a failure is logged."""
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
        """Return whether no other process of this server, or on this GPU, measures now."""
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
        if backends and tokens:  # else another process has measured it meanwhile
            make, known = partial(LayerMeasurement, packed, backends), self._known(problem, backends)
            keep = partial(_keep_layer, problem)
            self._take(layer_name(problem), ", ".join(backends), make, tokens, known, keep, end)

    def _measure_experts(self, kind: ExpertKind, forms: Mapping[str, RunExperts], end: float) -> None:
        if tokens := self._lacking_experts(kind):  # else another process has measured it meanwhile
            make, keep = partial(ExpertMeasurement, kind, forms), partial(keep_expert_times, kind)
            self._take(str(kind), "packed and as they are,", make, tokens, measured_here(kind), keep, end)

    def _take(
        self, name: str, forms: str, make: Make, tokens: list[int], known: Sequence[int], keep: Keep, end: float
    ) -> None:
        """Measure a kind of layer at some numbers of tokens, and keep usable times; log the end of the budget."""
        start, line = self._clock(), "slidesparse: measuring %s on this GPU: %s at %d to %d tokens"
        self.log.info(line, name, forms, tokens[0], tokens[-1])
        taken = make(self.source, self._stopwatch()).measure(tokens, known, lambda: self._clock() >= end)
        seconds, layer = self._clock() - start, usable_times(taken, name, self.log)
        path = keep(layer, taken.wrong) if layer is not None or taken.wrong else None
        if layer is not None:
            line = "slidesparse: measured %s in %.1f s (%s): %s"
            self.log.info(line, name, seconds, path or "not kept", explain(layer))
            if path is not None and (asked := ask_for_times(installation().gpu, path)) is not None:
                log_once(asked, log=self.log)
        if self._clock() >= end and (taken.layer is None or lacking(tokens, taken.layer.tokens)):
            self._tell_spent()

    def _known(self, problem: Problem, backends: list[str]) -> tuple[int, ...]:
        measured = find_measured(problem, backends)
        return () if measured is None else measured.tokens

    def _lacking(self, problem: Problem, backends: list[str]) -> list[int]:
        return lacking(self.sizes, self._known(problem, backends))

    def _lacking_experts(self, kind: ExpertKind) -> list[int]:
        return [] if was_wrong(kind) else lacking(self.expert_sizes, measured_here(kind))

    def _tell_spent(self) -> None:
        if not self._logged_end:
            self._logged_end = True
            self.log.warning(
                "slidesparse: measuring ends after %g s of this start; the next start measures the rest",
                self.budget_s,
            )


def _own_gpu(device: torch.device) -> str:
    """Return the name of the process's GPU; an empty one if the server has several, and one measures for all."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return ""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else "cpu"


def usable_times(taken: TakenTimes, name: str, log: logging.Logger) -> LayerSpeed | None:
    """Return the times of a kind of layer; None without any, or from a busy GPU. Faults are logged."""
    for backend, fault in taken.faults.items():
        log.warning("slidesparse: %s: %s is not measured everywhere: %s", name, backend, fault)
    if taken.layer is not None and taken.noise > NOISE:
        line = "slidesparse: %s: times are not used: dense differs from itself by %.0f %%, so the GPU is busy"
        log.warning(line, name, 100 * taken.noise)
        return None
    return taken.layer


def _keep_layer(problem: Problem, layer: LayerSpeed | None, wrong: Iterable[str]) -> Path | None:
    forms = [wrong_form(problem, name) for name in wrong]
    return add_layers(installation(problem.device), [] if layer is None else [layer], forms)


def layer_name(problem: Problem) -> str:
    """Return ``int8 4608x3584 6:8``."""
    return f"{dtype_name(problem.dtype)} {problem.out_features}x{problem.in_features} {problem.pattern}"
