"""Compare the variants of one problem: check each, time them in turns, and make their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from typing import Any

import torch

from slidesparse.errors import SlideSparseError
from slidesparse.tuning.checking import TOLERANCE, require_right
from slidesparse.tuning.timing import Pass, Stopwatch, copies_needed, copies_of, poison
from slidesparse_bench.interleaved import HostStopwatch, summarize, time_passes
from slidesparse_bench.records import Case, Clocks, Machine, Record, Timing, Tried


@dataclass(frozen=True)
class Subject:
    """A variant that can run.

    Attributes:
        variant: See :class:`slidesparse_bench.records.Record`.
        backend: The backend. Subjects of one variant and backend are alternatives: the fastest becomes the record.
        algorithm: The subject's name among the alternatives.
        run: The call to time; its arguments are ``operands``.
        operands: Tensors, tuples of them, and modules, which are copied to keep the cache cold.
        n_bytes: Fewest bytes that a call moves.
        check: Returns the relative error of a result.
        ideal_speedup: See :class:`slidesparse_bench.records.Record`.
        capture: Try a CUDA graph; False for calls that wait for the device.
        searched: Returns the algorithms that the backend tried by itself, the chosen one first; called after a run.
        tolerance: The relative error of a right result.
    """

    variant: str
    backend: str
    algorithm: str
    run: Callable[..., Any]
    operands: tuple[Any, ...]
    n_bytes: int
    check: Callable[[Any], float]
    ideal_speedup: float | None = None
    capture: bool = True
    searched: Callable[[], Sequence[Tried]] = tuple
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Refusal:
    """A variant that cannot run, and why."""

    variant: str
    backend: str
    why_not: str


@dataclass
class Session:
    """The settings that all comparisons of a run share.

    Attributes:
        stopwatch: Times passes.
        machine: The machine that goes into the records.
        clocks: Reads clocks and power.
        samples_s: Seconds that the timing of a comparison aims at.
        patterns: Returns the patterns at a case's shape.
        backends: Names of the backends to measure.
        device: The device to measure.
    """

    stopwatch: HostStopwatch
    machine: Machine
    clocks: Callable[[], Clocks]
    samples_s: float
    patterns: Callable[[Case], Sequence[str]]
    backends: tuple[str, ...]
    device: torch.device


@dataclass
class _Attempt:
    """A subject and its progress: prepared, then timed, or given up with a reason."""

    subject: Subject
    error: float | None = None
    made: Pass | None = None
    timing: Timing | None = None
    why_not: str | None = None

    @property
    def tried(self) -> Tried:
        return Tried(self.subject.algorithm, self.timing.median_us if self.timing else None, self.why_not)


def compare(
    session: Session, case: Case, subjects: Sequence[Subject], refusals: Sequence[Refusal] = (), *, host: bool = False
) -> list[Record]:
    """Check and time the variants of a problem, and return their records.

    Args:
        session: The run's settings.
        case: The problem.
        subjects: The variants that can run; the first of them is timed twice.
        refusals: The variants that cannot.
        host: Measure host time per call too.

    Returns:
        One record for each (variant, backend), of its fastest algorithm, and one for each refusal.
    """
    started = now()
    session.stopwatch.begin()
    before = after = session.clocks()
    attempts = [_prepare(session.stopwatch, subject, len(subjects)) for subject in subjects]
    ready = [attempt for attempt in attempts if attempt.made is not None]
    noise: float | None = None
    if ready:
        passes = [attempt.made for attempt in ready if attempt.made is not None]
        under_load: list[Clocks] = []
        samples, noise = time_passes(passes, session.samples_s, lambda: under_load.append(session.clocks()))
        after = under_load[0]
        for attempt, made, times in zip(ready, passes, samples, strict=True):
            run, operands = attempt.subject.run, attempt.subject.operands
            host_us = session.stopwatch.host_us(partial(run, *operands)) if host else None
            attempt.timing = summarize(times, made, host_us)
    common = partial(Record, case, session.machine, started, before, after)
    return [_record(common, group, noise) for group in _alternatives(attempts)] + [
        common(refusal.variant, refusal.backend, why_not=refusal.why_not) for refusal in refusals
    ]


def _prepare(stopwatch: Stopwatch, subject: Subject, rivals: int) -> _Attempt:
    attempt = _Attempt(subject)

    def check(result: Any) -> None:
        attempt.error = subject.check(result)
        require_right(attempt.error, subject.tolerance)

    try:
        poison(subject.run(*subject.operands))  # the allocator hands the same memory out again
        check(subject.run(*subject.operands))
        count = copies_needed(subject.n_bytes, stopwatch.l2_bytes, stopwatch.free_bytes() // rivals)
        calls = [partial(subject.run, *operands) for operands in copies_of(subject.operands, count)]
        attempt.made = stopwatch.prepare(calls, subject.capture, check)
    except torch.OutOfMemoryError:
        attempt.why_not = "out of memory"
    except SlideSparseError as error:
        attempt.why_not = str(error)
    except (RuntimeError, ValueError) as error:  # torch and vLLM refuse a shape so, and torch scales
        stopwatch.wait()  # raises when the device failed: no result after that would be right
        attempt.why_not = str(error).partition("\n")[0]
    return attempt


def _alternatives(attempts: Sequence[_Attempt]) -> list[list[_Attempt]]:
    groups: dict[tuple[str, str], list[_Attempt]] = {}
    for attempt in attempts:
        groups.setdefault((attempt.subject.variant, attempt.subject.backend), []).append(attempt)
    return list(groups.values())


def _record(common: Callable[..., Record], group: Sequence[_Attempt], noise: float | None) -> Record:
    timed = [attempt for attempt in group if attempt.timing is not None]
    best = min(timed, key=lambda attempt: attempt.tried.median_us or 0.0, default=group[0])
    subject = best.subject
    searched = subject.searched() if timed else ()
    return common(
        subject.variant,
        subject.backend,
        searched[0].name if searched else subject.algorithm,
        tried=tuple(searched) or tuple(attempt.tried for attempt in group),
        timing=best.timing,
        why_not=best.why_not,
        error=best.error if timed else None,
        noise=noise if timed else None,
        ideal_speedup=subject.ideal_speedup,
        n_bytes=subject.n_bytes,
    )


def now() -> str:
    """Return the time in UTC, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="microseconds")
