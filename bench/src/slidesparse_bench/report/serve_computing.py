"""The share of a mixed load's time in which the GPU computes: kernel times of a profile over steps as they were served.

The profiler slows the host and hardly the GPU, so the time that kernels take is the profile's, and the time that a step
takes is that of the served load without a profiler, both by the tokens of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slidesparse_bench.report.numbers import ratio
from slidesparse_bench.report.serve_numbers import bin_of
from slidesparse_bench.report.table import Cell, Table
from slidesparse_bench.served_records import MIXED_LOAD, EngineKey, ServeRecord, TimelineRecord

COMPUTING_TABLE = "serve_computing"

COMPUTING = """\
The share of time in which any kernel ran, in steps of the mixed load. Under the profiler the host is slower, so more of
the time is waiting. `as served`: what kernels take in profiled steps of about as many tokens, over what such steps take
without a profiler. `of the time`: how much of the load had such steps in the profile."""


@dataclass(frozen=True)
class Computing:
    """Shares of time, of one engine.

    Attributes:
        profiled: In the profiled steps.
        served: In the steps as served; None without a served load whose steps are known.
        covered: Of the served load's steps, by time.
    """

    profiled: float
    served: float | None
    covered: float | None


def computing(profiled: Sequence[TimelineRecord], records: Iterable[ServeRecord]) -> dict[EngineKey, Computing]:
    """Each profiled engine's shares."""
    steps = {
        record.key: list(zip(record.step_tokens, record.step_us or (), strict=True))
        for record in records
        if record.workload is not None and record.workload.name == MIXED_LOAD and record.step_tokens
    }
    found: dict[EngineKey, list[TimelineRecord]] = {}
    for record in profiled:
        found.setdefault(record.key, []).append(record)
    return {key: _computing(mine, steps.get(key, [])) for key, mine in found.items()}


def _computing(profiled: Sequence[TimelineRecord], served: Sequence[tuple[int, int]]) -> Computing:
    times: dict[int, list[float]] = {}
    for record in profiled:
        times.setdefault(bin_of(record.step.tokens), []).append(record.step.busy_us)
    busy = {most: statistics.fmean(found) for most, found in times.items()}
    known = [(bin_of(tokens), time_us) for tokens, time_us in served if tokens and time_us]
    of_bins = [(most, time_us) for most, time_us in known if most in busy]
    time_us = sum(time_us for _, time_us in of_bins)
    return Computing(
        ratio(sum(record.step.busy_us for record in profiled), sum(record.step.gpu_us for record in profiled)) or 0.0,
        ratio(sum(busy[most] for most, _ in of_bins), time_us) if of_bins else None,
        ratio(time_us, sum(time_us for _, time_us in known)) if known else None,
    )


def computing_tables(profiled: Sequence[TimelineRecord], records: Iterable[ServeRecord]) -> list[Table]:
    """A row for each profiled engine."""
    rows: list[tuple[Cell, ...]] = [
        (f"{key.model} {key.dtype} {key.engine}", one.profiled, one.served, one.covered)
        for key, one in computing(profiled, records).items()
    ]
    columns = ("engine", "under the profiler", "as served", "of the time")
    formats = dict.fromkeys(columns[1:], ".0%")
    return [Table(COMPUTING_TABLE, "The GPU in the mixed load", columns, tuple(rows), formats)] if rows else []
