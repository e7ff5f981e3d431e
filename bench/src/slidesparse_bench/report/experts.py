"""Make the tables of a mixture's experts: times, rates, and what they are shares of."""

from __future__ import annotations

from collections.abc import Sequence

from slidesparse_bench.expert_sizes import MIXTURES, part_and_routing
from slidesparse_bench.records import DENSE_VARIANT, GROUPED, PLAIN, Record
from slidesparse_bench.report.numbers import Comparison, median_us, ratio
from slidesparse_bench.report.table import Cell, Table

MEMORY_RATE = 4.8e12
"""Bytes a second of an H200's memory (NVIDIA's data sheet)."""

COLUMNS = (
    *("mixture", "what", "routing", "M", "weights", "us", "TB/s", "TOPS"),
    *("of plain", "of 4.8 TB/s", "over vllm"),
)
FORMATS = {"us": ".1f", "TOPS": ".0f", "of plain": ".0%", "of 4.8 TB/s": ".0%"}


def expert_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return a table for each type: whole layers, and products alone."""
    rows: dict[str, list[tuple[Cell, ...]]] = {}
    for one in found:
        if one.case.benchmark == GROUPED:
            rows.setdefault(one.case.dtype, []).extend(
                _row(one, record)
                for record in one.records
                if record.timing is not None and not record.variant.startswith(PLAIN)
            )
    return [
        Table(f"experts_{dtype}", f"Experts of mixtures, {dtype.upper()}", COLUMNS, tuple(own), FORMATS)
        for dtype, own in rows.items()
        if own
    ]


def operations(one: Comparison) -> int:
    """Return the multiplications and additions of the dense products of all pairs of a token and an expert."""
    return one.case.n_operations * MIXTURES[one.case.model].top_k


def share(one: Comparison, variant: str, of: str) -> float | None:
    """Return the rate of a variant over that of another one, which does the same work."""
    ours, other = one.best(variant), one.best(of)
    return ratio(None if other is None else median_us(other), None if ours is None else median_us(ours))


def _row(one: Comparison, record: Record) -> tuple[Cell, ...]:
    us, dense = median_us(record), record.variant == DENSE_VARIANT
    what, routing = part_and_routing(one.case.layer)
    rate = record.n_bytes / us * 1e6
    return (
        *(one.case.model, what, routing, one.case.tokens, record.algorithm if dense else record.variant),
        *(us, rate / 1e12, operations(one) / us / 1e6),
        share(one, record.variant, f"{PLAIN} {record.variant}"),
        rate / MEMORY_RATE,
        None if dense else share(one, record.variant, DENSE_VARIANT),
    )
