"""The plots of served loads: the speed of every engine over stock, and throughput against waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from slidesparse_bench.report.plots import COLOURS, GREY, MARKERS
from slidesparse_bench.report.serve_numbers import Group, tokens_a_second
from slidesparse_bench.served_records import AGAIN, ARRIVALS, CONTROL, MIXED_LOAD, RIVALS, STOCK

BLACK = "#000000"
LABELS = {CONTROL: "control (dense, joined)"}
ACROSS = 3
"""Panels in a row."""

LABEL_AT = 0.03
"""Where a bar has its label: at its foot, clear of the lines."""


def draw(group: Group, folder: Path) -> list[Path]:
    """Draw the pictures of one model and type; return those drawn."""
    speed, waits = folder / f"serve_speed_{group.slug}.png", folder / f"serve_waits_{group.slug}.png"
    return [path for path, drawn in ((speed, _draw_speed(group, speed)), (waits, _draw_waits(group, waits))) if drawn]


def _draw_speed(group: Group, path: Path) -> bool:
    """Draw a panel a workload: bars of all engines over the first stock one, in order, so that a drift is seen."""
    found = {name: _speeds(group, name) for name in group.workloads if not name.startswith(ARRIVALS)}
    panels = {name: speeds for name, speeds in found.items() if len(speeds) > 1}
    if not panels:
        return False
    columns = min(ACROSS, len(panels))
    rows = -(-len(panels) // columns)
    width = 1.2 + 0.55 * max(map(len, panels.values()))
    figure = Figure(figsize=(width * columns, 3.3 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (name, speeds) in zip(grid.flat, panels.items(), strict=False):
        _draw_bars(axes, speeds)
        axes.set_title(name, loc="left", fontsize=10)
    for row in grid:
        row[0].set_ylabel("speed over the first stock engine")
    drawn = any(CONTROL in speeds for speeds in panels.values())
    lines = "solid line: stock, dashed: control" if drawn else "line: stock"
    figure.suptitle(f"{group.name}: served loads; {lines}", x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=150)
    return True


def _speeds(group: Group, workload: str) -> dict[str, float]:
    """Engine -> over the first stock engine."""
    speeds = {engine: group.over(STOCK, engine, workload) for engine in group.engines}
    return {engine: speed for engine, speed in speeds.items() if speed is not None}


def _draw_bars(axes: Any, speeds: dict[str, float]) -> None:
    for place, (engine, speed) in enumerate(speeds.items()):
        face = "white" if engine == AGAIN else _colour(engine)
        axes.bar(place, speed, width=0.7, facecolor=face, edgecolor=_colour(engine), linewidth=1.2)
        ink = BLACK if engine == AGAIN else "white"
        axes.annotate(f"{speed:.2f}x", (place, LABEL_AT), ha="center", va="bottom", fontsize=8, color=ink)
    axes.axhline(1, color=BLACK, linewidth=1)
    if CONTROL in speeds:
        axes.axhline(speeds[CONTROL], color=GREY, linewidth=1, linestyle="--")
    axes.set_xticks(range(len(speeds)), [engine.replace(" ", "\n") for engine in speeds], fontsize=8)
    _tidy(axes)


def _draw_waits(group: Group, path: Path) -> bool:
    """Draw tokens a second against the 99th percentile between tokens, a line an engine, a point a load."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    loads: set[str] = set()
    for engine, served in group.records.items():
        points = {
            name: (tokens_a_second(record), record.between.p99_ms)
            for name, record in served.items()
            if (name.startswith(ARRIVALS) or name == MIXED_LOAD) and record.between is not None
        }
        if points:
            loads |= set(points)
            _draw_line(axes, engine, sorted(points.values()))
    if not loads:
        return False
    axes.set_xlabel("output tokens a second, more is better")
    axes.set_ylabel("wait between tokens, 99th percentile, ms")
    axes.margins(0.1)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=9)
    named = "mixed load" if loads == {MIXED_LOAD} else "loads"
    figure.suptitle(f"{group.name}, {named}: throughput and waits", x=0.01, ha="left", fontsize=11)
    _tidy(axes)
    figure.savefig(path, dpi=150)
    return True


def _draw_line(axes: Any, engine: str, points: list[tuple[float, float]]) -> None:
    style = {"color": _colour(engine), "label": LABELS.get(engine, engine), "marker": MARKERS.get(engine, "x")}
    if engine.startswith(STOCK):
        more_graphs = engine not in (STOCK, AGAIN)  # or other weights, in grey
        style |= {"marker": "^" if more_graphs else "s", "markerfacecolor": "white" if engine == AGAIN else BLACK}
    line = "none" if len(points) == 1 else "--" if engine == CONTROL else "-"
    axes.plot(*zip(*points, strict=True), linestyle=line, markersize=8, **style)


def _colour(engine: str) -> str:
    if engine.startswith(STOCK) and engine not in RIVALS:
        return BLACK
    return COLOURS.get(engine.partition(" ")[0].rstrip(","), GREY)


def _tidy(axes: Any) -> None:
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
