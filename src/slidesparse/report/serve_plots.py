"""The plots of served loads: throughput against waiting, and gains split into fusion and sparsity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from slidesparse.report.plots import COLOURS, GREY, MARKERS
from slidesparse.report.serve_numbers import Group, tokens_a_second
from slidesparse.served_records import AGAIN, ARRIVALS, BURST_LOAD, CONTROL, MIXED_LOAD, STOCK

BLACK = "#000000"


def draw(group: Group, folder: Path) -> list[Path]:
    """The pictures of one model and type; returns those drawn."""
    waits, gains = folder / f"serve_waits_{group.slug}.png", folder / f"serve_gains_{group.slug}.png"
    return [path for path, drawn in ((waits, _draw_waits(group, waits)), (gains, _draw_gains(group, gains))) if drawn]


def _draw_waits(group: Group, path: Path) -> bool:
    """Tokens a second against the 99th percentile between tokens, a line an engine, a point a load."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    drawn = False
    for engine, served in group.records.items():
        loads = [record for name, record in served.items() if name.startswith(ARRIVALS) or name == MIXED_LOAD]
        points = sorted((tokens_a_second(r), r.between.p99_ms) for r in loads if r.between is not None)
        if engine == AGAIN or not points:
            continue
        drawn = True
        line, marker = "--" if engine == CONTROL else "-", MARKERS.get(engine, "x")
        axes.plot(*zip(*points, strict=True), linestyle=line, color=_colour(engine), marker=marker, label=engine)
    axes.set_xlabel("output tokens a second")
    axes.set_ylabel("between tokens, 99th percentile, ms")
    axes.set_ylim(bottom=0)
    _finish(figure, axes, f"{group.name}: what users wait", path if drawn else None)
    return drawn


def _draw_gains(group: Group, path: Path) -> bool:
    """Speed over stock, a bar a pattern and workload: fusion below, sparsity above, or hatched where it loses."""
    bars = [
        (f"{engine}\n{name}", engine, fused, whole)
        for name in (BURST_LOAD, MIXED_LOAD)
        for engine in group.sparse
        if (whole := group.over(STOCK, engine, name)) is not None
        and (fused := group.over(STOCK, CONTROL, name)) is not None
    ]
    figure = Figure(figsize=(1.6 + 0.9 * len(bars), 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (_, engine, fused, whole) in enumerate(bars):
        labels = {"fusion": "fusion", "sparsity": "sparsity"} if place == 0 else {}
        axes.bar(place, fused - 1, bottom=1, color=GREY, width=0.6, label=labels.get("fusion"))
        axes.bar(
            place,
            whole - fused,
            bottom=fused,
            color=_colour(engine),
            width=0.6 if whole >= fused else 0.3,
            hatch="" if whole >= fused else "//",
            label=labels.get("sparsity"),
        )
        axes.annotate(f"{whole:.2f}x", (place, max(whole, fused, 1)), ha="center", va="bottom", fontsize=9)
    axes.axhline(1, color=BLACK, linewidth=1)
    axes.set_xticks(range(len(bars)), [label for label, *_ in bars], fontsize=8)
    axes.set_ylabel("speed over stock vLLM")
    _finish(figure, axes, f"{group.name}: fusion and sparsity", path if bars else None)
    return bool(bars)


def _colour(engine: str) -> str:
    if engine.startswith(STOCK):
        return BLACK
    return COLOURS.get(engine.partition(" ")[0].rstrip(","), GREY)


def _finish(figure: Figure, axes: Any, title: str, path: Path | None) -> None:
    if path is None:
        return
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    axes.grid(axis="y", color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
