"""Make the tables of whole engines: the paper's C (prefill) and D (decode) with efficiencies, and times by kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slidesparse.offline.known_models import TYPES
from slidesparse_bench.records import DECODE, DENSE_VARIANT, ENGINE, KERNELS, PREFILL, STEP_KERNELS
from slidesparse_bench.report.numbers import Comparison, Point, median_us, ratio
from slidesparse_bench.report.table import Cell, Table

NAMES = {PREFILL: "C, prefill", DECODE: "D, decode"}


def engine_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return the tables of speed-ups over stock dense vLLM, and of efficiencies."""
    groups: dict[tuple[str, str], list[Point]] = {}
    for one in found:
        case = one.case
        if case.benchmark == ENGINE and one.best(DENSE_VARIANT) is not None:
            point = Point(ENGINE, case.dtype, case.model, True, case.tokens, (one,))
            groups.setdefault((case.layer, case.dtype), []).append(point)
    return [table for key in sorted(groups, key=_order) for table in _tables(*key, groups[key])]


def _order(group: tuple[str, str]) -> tuple[int, int, bool, int]:
    """Return a key that sorts prefill before decode, then by graphs, by way of measuring (one engine last), by type."""
    kind, dtype = group
    name, _, way = kind.partition(",")
    size = int("".join(filter(str.isdigit, way)) or 0)
    return list(NAMES).index(name), size, "one engine" in way, TYPES.index(dtype)


def _tables(kind: str, dtype: str, group: Sequence[Point]) -> list[Table]:
    ideals = {name: point.ideal(name) or 0.0 for point in group for name in point.variants}
    variants = sorted(ideals, key=lambda name: (" " in name, -ideals[name]))
    lead = ("model", "M", "dense ms", "dense tokens/s")
    formats = {"dense ms": ".2f", "dense tokens/s": ".0f", "noise": ".1%"}
    ordered = sorted(group, key=lambda point: (point.model, point.tokens))

    def table(what: str, title: str, values: list[list[float | None]], shown: str) -> Table:
        rows = tuple((*_lead(point), *row, _noise(point)) for point, row in zip(ordered, values, strict=True))
        name, comma, way = kind.partition(",")  # EngineProfile.kind
        heading = f"{NAMES[name]}{comma}{way}, {dtype.upper()}: {title}"
        return Table(
            f"vllm_{'_'.join(kind.replace(',', '').split())}_{dtype}_{what}",
            heading,
            (*lead, *variants, "noise"),
            rows,
            formats | dict.fromkeys(variants, shown),
        )

    speedups = [[point.speedup(name) for name in variants] for point in ordered]
    made = [table("speedup", "speed-up over stock dense vLLM", speedups, ".3f")]
    variants = [name for name in variants if " " not in name]  # auto's is that of a mixture
    efficiencies = [[point.efficiency(name) for name in variants] for point in ordered]
    if any(cell is not None for row in efficiencies for cell in row):
        made.append(table("efficiency", "efficiency against 2:4", efficiencies, ".0%"))
    return made


def _lead(point: Point) -> tuple[Cell, ...]:
    dense = point.time_us(DENSE_VARIANT) or 0.0
    return point.model, point.tokens, dense / 1e3, ratio(1e6 * point.tokens, dense)


def _noise(point: Point) -> float:
    """Return the noise of dense timed twice, or the spread of a variant between rounds, whichever is larger."""
    timings = [record.timing for part in point.parts for record in part.records if record.timing is not None]
    return max([point.noise, *((timing.p80_us - timing.p20_us) / timing.median_us for timing in timings)])


def breakdown_tables(found: Sequence[Comparison]) -> list[Table]:
    """Return GPU milliseconds of one prefill and of one decoding step, by what kernels do, and weights' memory."""
    memory = {
        (one.case.model, one.case.dtype, record.variant): record.n_bytes / 1e9
        for one in found
        if one.case.benchmark == ENGINE and one.case.layer in NAMES  # vLLM's own graphs, as the kernels
        for record in one.records
    }
    prefill = _breakdown(found, KERNELS, "vllm_kernels", "GPU time of one prefill", memory)
    return prefill + _breakdown(found, STEP_KERNELS, "vllm_step_kernels", "GPU time of one decoding step", memory)


def _breakdown(
    found: Sequence[Comparison], benchmark: str, name: str, title: str, memory: Mapping[tuple[str, str, str], float]
) -> list[Table]:
    rows: dict[tuple[str, str, int, str], dict[str, float]] = {}
    for one in found:
        if one.case.benchmark == benchmark:
            for record in one.records:
                key = (one.case.model, one.case.dtype, one.case.tokens, record.variant)
                rows.setdefault(key, {})[one.case.layer] = median_us(record) / 1e3
    classes = list(dict.fromkeys(kind for times in rows.values() for kind in times))
    cells = tuple(
        (*key, *(times.get(kind) for kind in classes), sum(times.values()), memory.get((key[0], key[1], key[3])))
        for key, times in rows.items()
    )
    columns = ("model", "dtype", "M", "variant", *(f"{kind} ms" for kind in classes), "sum ms", "weights GB")
    formats = {f"{kind} ms": ".1f" if benchmark == KERNELS else ".2f" for kind in (*classes, "sum")}
    return [Table(name, title, columns, cells, formats)] if cells else []
