"""Soaks of a report: the verdict on each engine, a line each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slidesparse_bench.served_figures import Growth, Latency, Soak, Waits
from slidesparse_bench.served_records import ServeRecord


def soak_lines(records: Sequence[ServeRecord]) -> list[str]:
    """A line for each engine that stood a soak, or did not."""
    return [_line(record, record.soak) for record in records if record.soak is not None]


def _line(record: ServeRecord, soak: Soak) -> str:
    key = record.key
    parts = [
        f"{soak.whole} of {soak.asked} requests answered whole in {record.wall_s:.0f} s, {soak.errors} errors",
        f"first token p50/p99 {_by_thirds(soak.thirds, lambda waits: waits.first)} ms",
        f"between tokens {_by_thirds(soak.thirds, lambda waits: waits.between)} ms",
        *(f"{name} memory {_grown(growth)}" for name, growth in (("GPU", soak.gpu), ("host", soak.host))),
    ]
    way = ", ".join(record.way.told()) or "in process"
    said = "**failed**: " + "; ".join(soak.faults) if soak.faults else "**passed**"
    return f"- {key.model} {key.dtype} {key.engine}, {way}, {said}. {'; '.join(parts)}."


def _by_thirds(thirds: Sequence[Waits | None], part: Callable[[Waits], Latency | None]) -> str:
    found = [part(third) if third is not None else None for third in thirds]
    return ", ".join("-" if one is None else f"{one.p50_ms:.1f}/{one.p99_ms:.1f}" for one in found)


def _grown(growth: Growth | None) -> str:
    if growth is None:
        return "not known"
    return f"{growth.start_mb:.0f} to {growth.end_mb:.0f} MB ({growth.slope_mb_a_minute:+.1f} MB a minute)"
