"""The page of served loads: what each engine takes, what users wait, and the steps of a load."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from slidesparse.errors import InputError
from slidesparse_bench.report.page import machine_line, write_page
from slidesparse_bench.report.serve_numbers import (
    Group,
    groups,
    steps,
    tokens_a_joule,
    tokens_a_second,
)
from slidesparse_bench.report.serve_soak import soak_lines
from slidesparse_bench.report.table import Cell, Table
from slidesparse_bench.served_records import (
    AGAIN,
    ARRIVALS,
    CONTROL,
    DECODE,
    MIXED_LOAD,
    STOCK,
    VLLM,
    ServeRecord,
)

PAGE = "serve.md"

ABOUT = """\
Engines alone on the GPU, one after the other, vLLM's engine core in a process of its own as `vllm serve` has it.
`stock` and `stock again` are one engine, vLLM without the plugin on unpruned weights, run first and last. Where they
differ, the machine changed between them, and engines far apart in time must not be compared. `control` is the plugin
with every layer dense and joined with the norm or activation before it: its gain over stock comes from fusion, and a
pattern's gain over it from sparsity. Weights are random, of real shapes.

Over HTTP, each engine is a `vllm serve`, asked by the client of vLLM's own benchmark; in process, the same engine is
asked without a server. The two must not be compared with each other. `GPU busy` is the share of time in which any
kernel ran, by samples of the driver: it says nothing of how much of the GPU a kernel took. `steady` is the same while
requests waited for a place, from the first answer's end until the rest ran all at once."""

OTHERS = """\
SGLang tells nobody of its steps, so a step of decoding is the time between a client's tokens there. Drafts of EAGLE-3
have random weights, and the server is told how many of their tokens to accept."""

SOAKED = """\
Requests at random for minutes, at 80 % of what stock takes of the mixed load. Waits are those of the first, second and
last third of the time; memory of the host is that of the engine's processes, its slope that of the last two thirds."""


ONE = {"gpu": "GPU", "vllm": "release of vLLM"}
"""What all machines of a report have in common, since engines are divided by one another: field -> its name."""

BASES = (STOCK, AGAIN, CONTROL)


def write_serve_report(records: Sequence[ServeRecord], folder: Path) -> list[Path]:
    """Draw everything that records of served loads hold.

    Args:
        records: Of one GPU model and one release of vLLM.
        folder: Made if it does not exist; files of an earlier report are replaced.

    Returns:
        The files written, the page first.

    Raises:
        InputError: Records of different GPUs or releases, or a folder that cannot be written.
    """
    from slidesparse_bench.report import serve_plots

    machines = list(dict.fromkeys(r.machine for r in records))
    of_vllm = [r.machine for r in records if r.server == VLLM]
    for name, what in ONE.items():
        values = sorted({str(getattr(machine, name)) for machine in (of_vllm if name == VLLM else machines)})
        if len(values) > 1 or not machines:
            raise InputError("records of a report", got=", ".join(values) or "none", needed=f"records of one {what}")
    found = groups(records)
    tables = [table for group in found for table in group_tables(group)]
    tables += missing_tables(records)

    def parts(pictures: list[str]) -> list[str]:
        head = [f"# Served loads on {machines[0].gpu}", "\n".join(map(machine_line, machines)), ABOUT, *pictures]
        head += [OTHERS] if any(r.server != VLLM or r.speculation for r in records) else []
        soaks = soak_lines(records)
        head += ["## Soaks", SOAKED, "\n".join(soaks)] if soaks else []
        return head + [part for one in tables for part in (f"## {one.title}", one.markdown())]

    def draw(where: Path) -> list[Path]:
        return [path for group in found for path in serve_plots.draw(group, where)]

    return write_page(folder / PAGE, draw, parts, tables)


def group_tables(group: Group) -> list[Table]:
    """Speed and loads of one model and type, and steps where somebody saw them: over HTTP nobody does."""
    made = [speed_table(group), load_table(group), steps_table(group)]
    return [table for table in made if table.rows]


def speed_table(group: Group) -> Table:
    """Milliseconds of every workload but arrivals, and how many times faster than stock, twice, and the control."""
    times = ("median ms", "fastest ms", "slowest ms")
    gains = tuple(f"over {base}" for base in BASES)
    formats = dict.fromkeys(times, ".2f") | dict.fromkeys(gains, ".3f")
    rows: list[tuple[Cell, ...]] = []
    for name in group.workloads:
        for engine, served in group.records.items():
            if (record := served.get(name)) is not None and not name.startswith(ARRIVALS):
                seconds = (statistics.median(record.seconds), min(record.seconds), max(record.seconds))
                over = (group.over(base, engine, name) for base in BASES)
                rows.append((name, engine, len(record.seconds), *(1e3 * one for one in seconds), *over))
    columns = ("load", "engine", "repeats", *times, *gains)
    return Table(f"serve_speed_{group.slug}", f"{group.name}: speed", columns, tuple(rows), formats)


def load_table(group: Group) -> Table:
    """Tokens, energy and waits of every load."""
    columns = (
        *("engine", "load", "requests/s", "output tokens/s", "tokens/J", "W", "SM MHz", "GPU busy", "steady"),
        *("first token p50 ms", "p99", "between p50 ms", "p99 ", "lost"),
    )
    formats = dict.fromkeys(("requests/s", "tokens/J"), ".2f") | dict.fromkeys(columns[9:], ".1f")
    formats |= dict.fromkeys(("output tokens/s", "W", "SM MHz"), ".0f") | {"GPU busy": ".0%", "steady": ".0%"}
    rows: list[tuple[Cell, ...]] = []
    for name in group.workloads:
        for engine, served in group.records.items():
            if (record := served.get(name)) is not None:
                rows.append((engine, name, *_load_cells(record)))
    return Table(f"serve_loads_{group.slug}", f"{group.name}: loads", columns, tuple(rows), formats)


def _load_cells(record: ServeRecord) -> tuple[Cell, ...]:
    assert record.workload is not None
    power, first, between = record.power, record.first, record.between
    served = record.workload.kind != DECODE
    asked = record.workload.requests if record.soak is None else record.soak.asked
    return (
        asked / statistics.median(record.seconds) if served else None,
        tokens_a_second(record) if served else None,
        tokens_a_joule(record),
        *((power.mean_w, power.sm_mhz, power.busy) if power is not None else (None, None, None)),
        record.steady.busy if record.steady is not None else None,
        *((first.p50_ms, first.p99_ms) if first is not None else (None, None)),
        *((between.p50_ms, between.p99_ms) if between is not None else (None, None)),
        record.lost,
    )


def steps_table(group: Group) -> Table:
    """Steps of the mixed load by their tokens: how many, what share of the time, and what one takes on each engine."""
    found = {name: steps(served[MIXED_LOAD]) for name, served in group.records.items() if MIXED_LOAD in served}
    columns = ["tokens a step, at most"]
    for name in found:
        columns += [f"{name}: steps", f"{name}: of the time", f"{name}: ms"]
    formats = {column: ".0%" if column.endswith("time") else ".2f" for column in columns}
    edges = sorted({one.most for bins in found.values() for one in bins})
    rows: list[tuple[Cell, ...]] = []
    for most in edges:
        row: list[Cell] = [most]
        for bins in found.values():
            one = next((one for one in bins if one.most == most), None)
            row += [None] * 3 if one is None else [one.steps, one.share, one.median_ms]
        rows.append(tuple(row))
    return Table(
        f"serve_steps_{group.slug}", f"{group.name}: steps of the mixed load", tuple(columns), tuple(rows), formats
    )


def missing_tables(records: Sequence[ServeRecord]) -> list[Table]:
    """Engines that died, and what was served without a figure."""
    rows = tuple(
        (f"{r.key.model} {r.key.dtype} {r.key.engine}", r.workload.name if r.workload else "start", r.why_not)
        for r in records
        if r.why_not is not None
    )
    return [Table("serve_missing", "What was not measured", ("engine", "at", "reason"), rows, {})] if rows else []
