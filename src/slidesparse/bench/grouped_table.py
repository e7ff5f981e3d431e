"""The table that ``bench gemm --grouped`` ends with: rates, and what they are shares of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slidesparse.bench.mixtures import part_and_routing, sizes_of
from slidesparse.records import DENSE_VARIANT, GROUPED, PLAIN, Case, Record

MEMORY_RATE = 4.8e12
"""Bytes a second of an H200's memory (NVIDIA's data sheet)."""

COLUMNS = (
    *("mixture", "type", "what", "routing", "tokens", "weights", "us", "TB/s", "TOPS"),
    *("of plain", "of 4.8 TB/s", "over vllm"),
)


def describe(records: Iterable[Record]) -> str:
    """Return a line for each record of experts, aligned, or an empty text; times of one comparison are related."""
    found = [record for record in records if record.case.benchmark == GROUPED and record.timing is not None]
    times = {(record.started, record.variant): _us(record) for record in found}
    rows = [COLUMNS, *(_row(record, times) for record in found if not record.variant.startswith(PLAIN))]
    if len(rows) == 1:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def operations(case: Case) -> int:
    """Return the multiplications and additions of the dense products of all pairs."""
    return case.n_operations * sizes_of(case).top_k


def _row(record: Record, times: dict[tuple[str, str], float]) -> Sequence[str]:
    case, us = record.case, _us(record)
    rate = record.n_bytes / us * 1e6
    plain = times.get((record.started, f"{PLAIN} {record.variant}"))
    stock = times.get((record.started, DENSE_VARIANT))
    what, routing = part_and_routing(case)
    return (
        *(case.model, case.dtype, what, routing, str(case.tokens)),
        *(record.algorithm if record.variant == DENSE_VARIANT else record.variant, f"{us:.1f}"),
        *(f"{rate / 1e12:.2f}", f"{operations(case) / us / 1e6:.0f}"),
        "-" if plain is None else f"{plain / us:.0%}",
        f"{rate / MEMORY_RATE:.0%}",
        "-" if stock is None or record.variant == DENSE_VARIANT else f"{stock / us:.2f}",
    )


def _us(record: Record) -> float:
    assert record.timing is not None
    return record.timing.median_us
