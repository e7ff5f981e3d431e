"""Compute speed-ups, the paper's efficiency and rooflines from records.

A ratio is formed inside one comparison only (records that share ``started``), or between sums of such.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slidesparse_bench.known_models import LAYERS
from slidesparse_bench.records import ALL, COPY, DENSE_VARIANT, SQUARE, Case, Record

NATIVE = "2:4"
"""The pattern that the hardware runs without sliding; efficiency is relative to it."""


@dataclass(frozen=True)
class Comparison:
    """The records of one problem, measured side by side."""

    case: Case
    records: tuple[Record, ...]

    def best(self, variant: str, backend: str | None = None) -> Record | None:
        """Return the fastest record of a variant, on one backend or on any; None when it has no time."""
        timed = [
            record
            for record in self.records
            if record.variant == variant and backend in (None, record.backend) and record.timing is not None
        ]
        return min(timed, key=median_us, default=None)


def median_us(record: Record) -> float:
    """Return the median of a record that has a time."""
    assert record.timing is not None
    return record.timing.median_us


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """Group records by problem; of a problem that was measured several times the latest comparison counts."""
    latest: dict[Case, str] = {}
    groups: dict[tuple[Case, str], list[Record]] = {}
    for record in records:
        if record.variant == ALL:
            continue
        groups.setdefault((record.case, record.started), []).append(record)
        latest[record.case] = max(latest.get(record.case, ""), record.started)
    return [Comparison(case, tuple(group)) for (case, started), group in groups.items() if latest[case] == started]


@dataclass(frozen=True)
class Point:
    """One M of a curve: a square, or the linears of one layer of a model together.

    Attributes:
        benchmark: ``gemm`` or ``linear``.
        dtype: As in the records.
        model: A model's name or ``square``.
        scaled: See :class:`slidesparse_bench.records.Case`.
        tokens: M.
        parts: The comparison of the square, or those of the four linears.
    """

    benchmark: str
    dtype: str
    model: str
    scaled: bool
    tokens: int
    parts: tuple[Comparison, ...]

    @property
    def variants(self) -> list[str]:
        """Sparse variants with a time in every part, by falling ideal speed-up, ``auto`` last."""
        found = {
            record.variant: record for part in self.parts for record in part.records if record.variant != DENSE_VARIANT
        }
        whole = [name for name in found if self.time_us(name) is not None]
        return sorted(whole, key=lambda name: (" " in name, -(found[name].ideal_speedup or 0), name))

    def chosen(self, variant: str) -> list[Record] | None:
        """Return the fastest record of a variant in each part, or None when a part has none."""
        found = [part.best(variant) for part in self.parts]
        whole = [record for record in found if record is not None]
        return whole if len(whole) == len(found) else None

    def time_us(self, variant: str) -> float | None:
        """Return the time of all parts together."""
        chosen = self.chosen(variant)
        return None if chosen is None else sum(map(median_us, chosen))

    def speedup(self, variant: str) -> float | None:
        """Return the speed-up over the fastest dense product."""
        return ratio(self.time_us(DENSE_VARIANT), self.time_us(variant))

    def ideal(self, variant: str) -> float | None:
        """Return the variant's ideal speed-up."""
        chosen = self.chosen(variant)
        return None if chosen is None else chosen[0].ideal_speedup

    def efficiency(self, variant: str) -> float | None:
        """Return the paper's efficiency: speed-up over 2:4's, over the ratio that the densities promise; 1 is 100 %."""
        measured = ratio(self.speedup(variant), self.speedup(NATIVE))
        return ratio(measured, ratio(self.ideal(variant), self.ideal(NATIVE)))

    def roofline(self, variant: str, limits: Limits) -> float | None:
        """Return the speed-up if dense and sparse both ran at their limits: of arithmetic, or of memory."""
        return ratio(limits.floor_us(self, DENSE_VARIANT), limits.floor_us(self, variant))

    @property
    def noise(self) -> float:
        """The worst of the parts."""
        return max((record.noise or 0.0 for part in self.parts for record in part.records), default=0.0)

    @property
    def tops(self) -> float | None:
        """Dense operations, in units of 1e12 a second."""
        time_us = self.time_us(DENSE_VARIANT)
        return None if time_us is None else sum(part.case.n_operations for part in self.parts) / time_us / 1e6


@dataclass(frozen=True)
class Limits:
    """The highest rates that the GPU reached in some records.

    Attributes:
        bandwidth: Rate of copies in bytes a microsecond, read and written together; None without a copy record.
        peak: dtype -> operations a microsecond of the fastest dense product.
    """

    bandwidth: float | None
    peak: dict[str, float]

    def floor_us(self, point: Point, variant: str) -> float | None:
        """Return the least time of a variant: every part at the slower of its two limits."""
        chosen, peak = point.chosen(variant), self.peak.get(point.dtype)
        if chosen is None or peak is None or self.bandwidth is None:
            return None
        return sum(
            max(record.case.n_operations / (peak * (record.ideal_speedup or 1.0)), record.n_bytes / self.bandwidth)
            for record in chosen
        )


def limits(found: Sequence[Comparison]) -> Limits:
    """Return the limits that some comparisons show."""
    copies = [record for record in (one.best(COPY) for one in found) if record is not None]
    peak: dict[str, float] = {}
    for one in found:
        dense = one.best(DENSE_VARIANT) if one.case.benchmark == "gemm" else None
        if dense is not None:
            rate = one.case.n_operations / median_us(dense)
            peak[one.case.dtype] = max(rate, peak.get(one.case.dtype, 0.0))
    return Limits(max((record.n_bytes / median_us(record) for record in copies), default=None), peak)


def points(found: Sequence[Comparison], benchmark: str) -> list[Point]:
    """Return the points of a benchmark by type, model and M; an M without all four linears of a model is left out."""
    groups: dict[tuple[str, str, bool, int], list[Comparison]] = {}
    for one in found:
        case = one.case
        if case.benchmark == benchmark and one.best(DENSE_VARIANT) is not None:
            groups.setdefault((case.dtype, case.model, case.scaled, case.tokens), []).append(one)
    made = [
        Point(benchmark, dtype, model, scaled, tokens, tuple(parts))
        for (dtype, model, scaled, tokens), parts in groups.items()
        if model == SQUARE or {part.case.layer for part in parts} == set(LAYERS)
    ]
    return sorted(made, key=lambda point: point.tokens)


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """Return a quotient, or None where a part of it is missing."""
    return None if numerator is None or not denominator else numerator / denominator
