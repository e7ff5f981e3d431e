"""Draw speed.svg: Qwen2.5-7B under load in vLLM, each pattern over stock dense vLLM, from the committed records.

Run it again when a record changes: ``python docs/figures/speed.py [PATH]``. The numbers are those of the README's
table, which ``benchmarks/measured.py`` draws from the same records. A bar is split into what stock does, what fused
norms give alone (the control has them too), and what sparsity adds.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FIGURES = Path(__file__).parent
MEASURED: dict[str, Any] = runpy.run_path(str(FIGURES.parent.parent / "benchmarks/measured.py"))

PANELS = {
    "burst": "16 prompts of 1024 tokens",
    "mixed": "1000 requests, what the GPU computes",
    "decode 64 at 80": "decoding, 64 sequences",
}
PATTERNS = {"6:8": "25 % zeros", "4:6": "33 % zeros", "2:4": "50 % zeros"}
COLOUR = "#0072b2"
INK, FAINT, STOCK = "#222222", "#8a8a8a", "#dddddd"
JOINED = 0.45
"""Opacity of the part that fused norms give."""

WIDTH = 0.6
TIMES = "\N{MULTIPLICATION SIGN}"


def conditions() -> str:
    """What the record says of where it was made."""
    records = [served["burst"] for served in MEASURED["group_of"](MEASURED["NEWEST"]).records.values()]
    ((vllm, gpu),) = {(record.machine.vllm, record.machine.gpu) for record in records}
    return f"Qwen2.5-7B's shapes, vLLM {vllm}, {gpu}"


def panel(axes: Axes, load: str, title: str) -> None:
    """One load: a bar for each pattern, and the line that stock vLLM is."""
    joined = max(MEASURED["headline_speedup"](MEASURED["CONTROL"], load), 1.0)
    for x, (pattern, engine) in enumerate(zip(PATTERNS, MEASURED["IN_SIX_BITS"], strict=True)):
        value = MEASURED["headline_speedup"](engine, load)
        shared = min(value, joined)
        axes.bar(x, 1, WIDTH, color=STOCK)
        axes.bar(x, shared - 1, WIDTH, bottom=1, color=COLOUR, alpha=JOINED)
        axes.bar(x, value - shared, WIDTH, bottom=shared, color=COLOUR)
        name = f"{load}-{pattern}".replace(" ", "-")
        axes.text(x, value + 0.02, f"{value:.2f}{TIMES}", ha="center", fontsize=10, color=INK, gid=name)
    axes.axhline(1, color=INK, linewidth=1.2)
    axes.set_xticks(range(3), [f"{pattern}\n{zeros}" for pattern, zeros in PATTERNS.items()], fontsize=10, color=INK)
    axes.set_title(title, fontsize=11, color=INK, weight="bold", pad=10)
    axes.set(xlim=(-0.6, 2.6), ylim=(0, 1.65), yticks=(0, 0.5, 1, 1.5))
    axes.tick_params(length=0, labelcolor=FAINT)
    axes.tick_params(axis="x", labelcolor=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_facecolor("none")


def draw(path: Path) -> None:
    """Draw the panels."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "speed"}):
        figure = Figure(figsize=(11, 4.3))
        # Opaque, so that it reads on dark pages too.
        box = {"boxstyle": "round,pad=0.015", "facecolor": "white", "edgecolor": "none", "zorder": -1}
        figure.patches.append(FancyBboxPatch((0.02, 0.035), 0.96, 0.93, transform=figure.transFigure, **box))
        figure.patch.set_alpha(0)
        for i, (load, title) in enumerate(PANELS.items()):
            axes = figure.add_axes((0.055 + 0.315 * i, 0.21, 0.285, 0.65))
            panel(axes, load, title)
            axes.tick_params(axis="y", labelleft=i == 0)
        figure.text(0.05, 0.055, "\N{BLACK SQUARE} INT8 in six bits", fontsize=11, color=COLOUR)
        told = "line: stock INT8; pale: fused norms, nothing pruned"
        figure.text(0.235, 0.057, told, fontsize=10, color=INK)
        figure.text(0.97, 0.057, conditions(), fontsize=9, color="#555555", ha="right")
        figure.savefig(path, metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES / "speed.svg")
