"""Draw speed.svg: one step of Qwen2.5-7B in vLLM, each pattern over stock dense vLLM, from the committed records.

Run it again when a record changes: ``python docs/figures/speed.py [PATH]``. The numbers are those of the README's
table, which ``benchmarks/measured.py`` draws from the same records.
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

PANELS = {("prefill", 16384): "prefill, one step of 16384 tokens", ("decode", 64): "decoding, one step of 64 sequences"}
COLOURS = {"int8": "#0072b2", "fp8": "#d55e00"}
INK, FAINT = "#222222", "#8a8a8a"
WIDTH = 0.38
TIMES = "\N{MULTIPLICATION SIGN}"


def speedups(kind: str, tokens: int, dtype: str) -> dict[str, float]:
    """Pattern -> over stock dense, by falling number of weights kept."""
    one = MEASURED["engines"](MEASURED["SEVEN"][dtype])[kind, tokens]
    return {pattern: MEASURED["speedup"](one, pattern) for pattern in ("6:8", "4:6", "2:4")}


def conditions() -> str:
    """What the records say of where they were made."""
    machines = {
        MEASURED["engines"](name)[key].records[0].machine for name in MEASURED["SEVEN"].values() for key in PANELS
    }
    (setting,) = {(machine.vllm, machine.gpu) for machine in machines}
    return f"Qwen2.5-7B's shapes, vLLM {setting[0]}, {setting[1]}, engines in turn in one run"


def panel(axes: Axes, kind: str, tokens: int, title: str) -> None:
    """One kind of step: a pair of bars for each pattern, and the line that stock vLLM is."""
    for i, dtype in enumerate(COLOURS):
        for j, (pattern, value) in enumerate(speedups(kind, tokens, dtype).items()):
            x = j + (i - 0.5) * (WIDTH + 0.04)
            axes.bar(x, value, WIDTH, color=COLOURS[dtype])
            name = f"{kind}-{dtype}-{pattern}"
            axes.text(x, value + 0.02, f"{value:.2f}{TIMES}", ha="center", fontsize=10.5, color=INK, gid=name)
    axes.axhline(1, color=INK, linewidth=1.2)
    axes.set_xticks(range(3), ["6:8\n25 % zeros", "4:6\n33 % zeros", "2:4\n50 % zeros"], fontsize=11, color=INK)
    axes.set_title(title, fontsize=12, color=INK, weight="bold", pad=10)
    axes.set(xlim=(-0.6, 2.6), ylim=(0, 1.85), yticks=(0, 0.5, 1, 1.5))
    axes.tick_params(length=0, labelcolor=FAINT)
    axes.tick_params(axis="x", labelcolor=INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_facecolor("none")


def draw(path: Path) -> None:
    """Draw both panels."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "speed"}):
        figure = Figure(figsize=(10, 4.3))
        # Opaque, so that it reads on dark pages too.
        box = {"boxstyle": "round,pad=0.015", "facecolor": "white", "edgecolor": "none", "zorder": -1}
        figure.patches.append(FancyBboxPatch((0.02, 0.035), 0.96, 0.93, transform=figure.transFigure, **box))
        figure.patch.set_alpha(0)
        for i, ((kind, tokens), title) in enumerate(PANELS.items()):
            panel(figure.add_axes((0.06 + 0.48 * i, 0.2, 0.43, 0.66)), kind, tokens, title)
        for i, (dtype, colour) in enumerate(COLOURS.items()):
            figure.text(0.06 + 0.08 * i, 0.055, f"\N{BLACK SQUARE} {dtype.upper()}", fontsize=12, color=colour)
        figure.text(0.225, 0.058, "line: stock dense vLLM", fontsize=11, color=INK)
        figure.text(0.97, 0.058, conditions(), fontsize=10, color="#555555", ha="right")
        figure.savefig(path, metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES / "speed.svg")
