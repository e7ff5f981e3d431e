"""Make the tables of a report: the paper's A and B and their efficiencies, kernels, packing, and missing times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from slidesparse_bench.records import COPY, DENSE_VARIANT, QUANTIZE, SQUARE, Record
from slidesparse_bench.report.numbers import Comparison, Point, median_us, points, ratio
from slidesparse_bench.report.table import Cell, Table

OURS = "slidesparse"
FEW = 8
"""The most algorithms of a library that a table names; of more it gives the number."""
ITEM_BYTES = {"int8": 1, "fp8": 1, "bf16": 2, "fp16": 2}


Value = Callable[[Point, str], float | None]


def speedup_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return speed-ups over dense: squares (the paper's A), model shapes (its B), whole layers."""
    return _by_group(found, "speed-up over the fastest dense", "speedup", Point.speedup, ".2f")


def efficiency_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return the paper's efficiency, in the same groups; nothing where 2:4 was not measured."""
    return _by_group(found, "efficiency against 2:4", "efficiency", Point.efficiency, ".0%")


def _by_group(found: Sequence[Comparison], what: str, name: str, value: Value, shown: str) -> list[Table]:
    made = []
    for benchmark in ("gemm", "linear"):
        groups: dict[tuple[str, bool, bool], list[Point]] = {}
        for point in points(found, benchmark):
            groups.setdefault((point.dtype, point.model == SQUARE, point.scaled), []).append(point)
        for (dtype, square, scaled), group in groups.items():
            shapes = "square" if square else "model"
            bare = "" if scaled else ", no scales"
            subject = {"gemm": "GEMM", "linear": "Whole linear layers"}[benchmark]
            title = f"{subject}, {dtype.upper()}{bare}, {shapes} shapes: {what}"
            stem = f"{benchmark}_{shapes}_{dtype}" + ("" if scaled else "_bare")
            table = _table(f"{stem}_{name}", title, group, value, shown)
            if any(cell is not None for row in table.rows for cell in row[len(_LEAD) : -1]):
                made.append(table)
    return made


_LEAD = ("model", "M", "dense us", "dense TOPS")


def _table(name: str, title: str, group: Sequence[Point], value: Value, shown: str) -> Table:
    variants = sorted({name for point in group for name in point.variants}, key=lambda name: _order(group, name))
    # Models in the order of the records, M rising within each.
    models = list(dict.fromkeys(part.case.model for point in group for part in point.parts))
    rows = [
        (
            point.model,
            point.tokens,
            point.time_us(DENSE_VARIANT),
            point.tops,
            *(value(point, v) for v in variants),
            point.noise,
        )
        for point in sorted(group, key=lambda point: (models.index(point.model), point.tokens))
    ]
    formats = {"dense us": ".1f", "dense TOPS": ".0f", "noise": ".1%"} | dict.fromkeys(variants, shown)
    return Table(name, title, (*_LEAD, *variants, "noise"), tuple(rows), formats)


def _order(group: Sequence[Point], variant: str) -> tuple[bool, float, str]:
    ideal = next((i for point in group if (i := point.ideal(variant)) is not None), 0.0)
    return " " in variant, -ideal, variant


KERNEL_COLUMNS = (
    *("pattern", "K", "M", "copy us", "vLLM quantize us", "quantize us", "quantize+lift us"),
    *("overhead", "more us", "of copy rate"),
)


def kernel_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return the paper's table of kernel latencies, with its quantise-only baseline and the time of a copy."""
    formats = {name: ".1f" for name in KERNEL_COLUMNS if name.endswith("us")}
    formats |= {"overhead": "+.0%", "of copy rate": ".0%"}
    rows: dict[str, list[tuple[Cell, ...]]] = {}
    for one in sorted(found, key=lambda one: (one.case.in_features, one.case.tokens)):
        only = one.best(QUANTIZE, OURS)
        if one.case.benchmark != "kernels" or only is None:
            continue
        for lift in one.records:
            if lift.variant.startswith("lift ") and lift.timing is not None:
                rows.setdefault(one.case.dtype, []).append(_kernel_row(one, only, lift))
    return [
        Table(
            f"kernels_{dtype}",
            f"Quantise and lift, {dtype.upper()}",
            KERNEL_COLUMNS,
            tuple(sorted(group, key=lambda row: int(str(row[0]).partition(":")[0]))),
            formats,
        )
        for dtype, group in rows.items()
    ]


def _kernel_row(one: Comparison, only: Record, lift: Record) -> tuple[Cell, ...]:
    copied, vllm = one.best(COPY), one.best(QUANTIZE, "vllm")
    return (
        lift.variant.removeprefix("lift "),
        one.case.in_features,
        one.case.tokens,
        None if copied is None else median_us(copied),
        None if vllm is None else median_us(vllm),
        median_us(only),
        median_us(lift),
        median_us(lift) / median_us(only) - 1,
        median_us(lift) - median_us(only),
        ratio(_rate(lift), None if copied is None else _rate(copied)),
    )


FUSED_COLUMNS = ("after", "pattern", "K", "M", "copy us", "bytes at copy rate us", "us", "over its bytes")


def fused_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return quantise-and-lift after a norm or an activation, over the time of its bytes at the rate of a copy."""
    formats = {name: ".1f" for name in FUSED_COLUMNS if name.endswith("us")} | {"over its bytes": ".2f"}
    rows: dict[str, list[tuple[Cell, ...]]] = {}
    for one in sorted(found, key=lambda one: (one.case.in_features, one.case.tokens)):
        copied = one.best(COPY)
        for record in one.records:
            first, lifts, pattern = record.variant.partition(" lift ")
            if one.case.benchmark == "kernels" and copied is not None and lifts and record.timing is not None:
                floor = record.n_bytes / _rate(copied)
                cells = (median_us(copied), floor, median_us(record), median_us(record) / floor)
                row = (first, pattern, one.case.in_features, one.case.tokens, *cells)
                rows.setdefault(one.case.dtype, []).append(row)
    return [
        Table(
            f"kernels_fused_{dtype}",
            f"Quantise and lift, fused with what comes before, {dtype.upper()}",
            FUSED_COLUMNS,
            tuple(sorted(group, key=lambda row: str(row[0]))),
            formats,
        )
        for dtype, group in rows.items()
    ]


def _rate(record: Record) -> float:
    return record.n_bytes / median_us(record)


def layer_cost_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return whole layers over their own GEMM: the cost of quantising, lifting and scales."""
    gemms = {(p.dtype, p.model, p.tokens): p for p in points(found, "gemm") if p.scaled}
    rows = []
    for layer in points(found, "linear"):
        gemm = gemms.get((layer.dtype, layer.model, layer.tokens))
        if gemm is None:
            continue
        for variant in (DENSE_VARIANT, *gemm.variants):
            cost = ratio(layer.time_us(variant), gemm.time_us(variant))
            if cost is not None:
                times = gemm.time_us(variant), layer.time_us(variant)
                rows.append((layer.dtype, layer.model, variant, layer.tokens, *times, cost - 1))
    columns = ("dtype", "model", "variant", "M", "GEMM us", "layer us", "added")
    formats = {"GEMM us": ".1f", "layer us": ".1f", "added": "+.0%"}
    title = "Whole layers over their own GEMM (both with scales; not one comparison, so clocks may differ)"
    return [Table("layer_over_gemm", title, columns, tuple(rows), formats)] if rows else []


def pack_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return the bytes of dense weights over the time to pack them, or to prepare them for a backend."""
    rows = []
    for one in found:
        if one.case.benchmark != "pack":
            continue
        case = one.case
        dense = case.out_features * case.in_features * ITEM_BYTES[case.dtype]
        for record in one.records:
            if record.timing is not None:
                time_us = median_us(record)
                rows.append(
                    (case.model, case.layer, case.dtype, record.variant, record.backend, time_us, dense / time_us / 1e3)
                )
    columns = ("model", "layer", "dtype", "step", "backend", "us", "dense GB/s")
    return [Table("pack", "Packing", columns, tuple(rows), {"us": ".0f", "dense GB/s": ".0f"})] if rows else []


def baseline_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return which dense product was the fastest how often, and among which others."""
    wins: Counter[tuple[str, str, str, str]] = Counter()
    tried: dict[tuple[str, str], dict[str, set[str]]] = {}
    for one in found:
        dense = one.best(DENSE_VARIANT)
        if dense is None or not dense.tried:
            continue
        benchmark, dtype = one.case.benchmark + ("" if one.case.scaled else ", no scales"), one.case.dtype
        winner = dense.algorithm if len(dense.tried) <= FEW else "the best of a search"
        wins[benchmark, dtype, dense.backend, winner] += 1
        names = tried.setdefault((benchmark, dtype), {})
        for record in one.records:
            if record.variant == DENSE_VARIANT:
                names.setdefault(record.backend, set()).update(t.name for t in record.tried)
    rows = tuple(
        (*key, count, sum(map(len, tried[key[:2]].values())), "; ".join(map(_named, tried[key[:2]].items())))
        for key, count in wins.items()
    )
    columns = ("benchmark", "dtype", "library", "algorithm", "fastest in", "algorithms", "tried")
    return [Table("baselines", "Dense baselines", columns, rows, {})] if rows else []


def _named(library: tuple[str, set[str]]) -> str:
    """Return a library with the algorithms tried; of a long search their number, since the records list them."""
    name, algorithms = library
    return f"{name}: {', '.join(sorted(algorithms)) if len(algorithms) <= FEW else f'{len(algorithms)} of a search'}"


def missing_tables(records: Sequence[Record]) -> list[Table]:
    """Return the problems that have no time, and why."""
    reasons = Counter(
        (r.case.benchmark, r.case.dtype, r.variant, r.backend, r.why_not) for r in records if r.why_not is not None
    )
    rows = tuple((*key, count) for key, count in reasons.items())
    columns = ("benchmark", "dtype", "variant", "backend", "reason", "problems")
    return [Table("missing", "Without a time", columns, rows, {})] if rows else []


def everything(found: Sequence[Comparison]) -> Table:
    """Return every record with a time, as one flat table."""
    columns = (
        *("benchmark", "model", "layer", "dtype", "scaled", "M", "N", "K", "variant", "backend", "algorithm"),
        *("median us", "p20 us", "p80 us", "host us", "speedup", "error", "noise", "SM MHz", "W", "started"),
    )
    rows = []
    for one in found:
        dense = one.best(DENSE_VARIANT)
        case = one.case
        for record in one.records:
            if record.timing is None:
                continue
            timing, clocks = record.timing, record.clocks_after
            speedup = None if dense is None else median_us(dense) / timing.median_us
            rows.append(
                (
                    *(case.benchmark, case.model, case.layer, case.dtype, str(case.scaled)),
                    *(case.tokens, case.out_features, case.in_features),
                    *(record.variant, record.backend, record.algorithm),
                    *(timing.median_us, timing.p20_us, timing.p80_us, timing.host_us),
                    *(speedup, record.error, record.noise, clocks.sm_mhz, clocks.power_w, record.started),
                )
            )
    return Table("records", "Every record", columns, tuple(rows), {})
