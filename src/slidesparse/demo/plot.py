"""Draw the demonstration's picture: fidelity against ideal speed-up, and memory, for each pattern."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure  # not pyplot: a Figure of its own draws without a window and without global state
from matplotlib.ticker import PercentFormatter

from slidesparse.base.whole_file import replace_file
from slidesparse.errors import InputError
from slidesparse.weights.pattern import DENSE

if TYPE_CHECKING:
    from slidesparse.demo.report import DemoReport, DemoRow

SERIES = {"int8": ("INT8", "#0072b2", "o", 9.0), "fp8": ("FP8", "#e69f00", "s", 5.0)}
"""dtype -> label, colour (safe for colour-blind readers), marker, and its size: the smaller one lies on top."""

GREY = "#555555"


def check_path(path: Path) -> None:
    """Raise an InputError for an unusable path, before any work is done."""
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise InputError("unknown picture format", got=path.name, needed=f"a name ending in .{', .'.join(formats)}")
    if not path.parent.is_dir():
        raise InputError("the folder of the picture does not exist", got=path.parent, remedy="make it first")
    if os.path.isdir(path) or not all(os.access(one, os.W_OK) for one in (path, path.parent) if os.path.exists(one)):
        got = "a folder" if os.path.isdir(path) else "no permission"
        raise InputError(f"{path} cannot be written", got=got, remedy="name another file with --plot")


def draw(report: DemoReport, path: Path) -> None:
    """Draw a report in the format of ``path``'s suffix; an InputError where it cannot be written."""
    check_path(path)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_fidelity(left, report.rows)
    _draw_bytes(right, report.rows)
    figure.suptitle(f"{report.model}, pruned by magnitude without retraining")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=160, format=path.suffix.removeprefix("."))
    try:
        replace_file(path, picture.getvalue())
    except OSError as error:
        remedy = "name another file with --plot"
        raise InputError(f"cannot write the picture {path}", got=error.strerror, remedy=remedy) from error


def _draw_fidelity(axes: Any, rows: Sequence[DemoRow]) -> None:
    for dtype, (label, colour, marker, size) in SERIES.items():
        points = {row.pattern: (row.ideal_speedup, row.fidelity) for row in rows if row.dtype == dtype}
        axes.plot(*zip(*points.values(), strict=True), marker, color=colour, markersize=size, label=label)
    for pattern in dict.fromkeys(row.pattern for row in rows):
        here = [row for row in rows if row.pattern == pattern]
        at = here[0].ideal_speedup, max(row.fidelity for row in here)
        axes.annotate(pattern, at, xytext=(5, 6), textcoords="offset points")
    axes.set(xlabel="ideal speed-up over dense 8 bit", ylabel="fidelity (cosine to float32 embeddings)")
    axes.set_title("Fidelity and ideal speed-up", loc="left")
    axes.xaxis.set_major_formatter("{x:.1f}x")
    axes.margins(0.1)
    axes.legend(loc="lower left", frameon=False)
    _plain(axes, "both")


def _draw_bytes(axes: Any, rows: Sequence[DemoRow]) -> None:
    heights = {row.pattern: row.relative_bytes for row in rows if row.dtype == "int8" and row.pattern != str(DENSE)}
    bars = axes.barh(list(heights), list(heights.values()), height=0.6, color=SERIES["int8"][1])
    axes.bar_label(bars, [f"{height:.1%}" for height in heights.values()], label_type="center", color="white")
    axes.axvline(1, color=GREY, linewidth=1.5, linestyle="--")
    where = {"xycoords": ("data", "axes fraction"), "xytext": (0, 2), "textcoords": "offset points"}
    axes.annotate("dense 8 bit", (1, 1), **where, ha="center", va="bottom", color=GREY)
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_xlabel("bytes of the INT8 linears (% of dense)")
    axes.set_title("Memory", loc="left")
    _plain(axes, "x")


def _plain(axes: Any, grid: str) -> None:
    axes.grid(axis=grid, color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
