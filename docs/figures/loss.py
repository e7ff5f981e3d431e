"""Draw loss.svg: what a served speed costs a published model, from the records of judged models and of served engines.

Run it again when a record changes: ``python docs/figures/loss.py [PATH]``. On the x axis stands the mixed load of a 7B
over stock INT8, by what the GPU computes of it; a model with fewer layers is taken to be faster in proportion. On the y
axis stands the perplexity of held-out code of a 0.5B over the dense model in BF16: of patterns before they are rounded.
"""

from __future__ import annotations

import math
import runpy
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FIGURES = Path(__file__).parent
MEASURED: dict[str, Any] = runpy.run_path(str(FIGURES.parent.parent / "benchmarks/measured.py"))

PANELS = {"": "pruned or rounded in one shot", " recover 20M": "and trained on by 20 million tokens"}
"""What a record's tag ends with."""

DEPTH = "depth 1.18"
DENSE = (
    ("INT8", "stock", "dense int8"),
    ("fused", "control", "dense int8"),
    ("six bits", MEASURED["DENSE_SIX_BITS"], "dense 6bit"),
)
"""Points of dense models, which are not trained on: name, engine, and tag of the record."""

INK, FAINT = "#222222", "#8a8a8a"
TIMES = "\N{MULTIPLICATION SIGN}"
MOST = 60.0
"""Percent of perplexity at the top: what loses more stands there, with its loss in words."""


class Kind(NamedTuple):
    """How the points of a kind look."""

    label: str
    colour: str
    marker: str
    line: str


KINDS = {
    "pattern": Kind("a pattern, before rounding", "#0072b2", "o", "-"),
    "dense": Kind("dense: INT8, fused INT8, six bits", "#222222", "v", "none"),
    "four": Kind("INT4 to nearest (W4A16)", "#009e73", "D", "none"),
    "fewer": Kind("20 of 24 layers", "#d55e00", "s", "none"),
}


class Point(NamedTuple):
    """One model: its kind, its name, how fast it is served, and what it loses, in percent."""

    kind: str
    name: str
    speed: float
    loss: float


def points(end: str) -> list[Point]:
    """All models in one shot, or trained on."""
    found = MEASURED["published_records"]()
    speed = MEASURED["headline_speedup"]

    def point(kind: str, name: str, fast: float, tag: str) -> Point:
        mean, _ = MEASURED["compare"].paired(found[tag]["code"]["loss"], found["dense"]["code"]["loss"])
        return Point(kind, name, fast, 100 * math.expm1(mean))

    shot = end or " match"
    drawn = [
        point("pattern", engine.split()[0], speed(engine, "mixed"), f"{engine.split()[0]}{shot}")
        for engine in MEASURED["IN_SIX_BITS"]
    ]
    drawn += [
        point("dense", name, 1.0 if engine == "stock" else speed(engine, "mixed"), tag) for name, engine, tag in DENSE
    ]
    drawn.append(point("four", "INT4", speed("stock W4A16", "mixed"), f"int4 nearest{end}"))
    drawn.append(point("fewer", "20 layers", float(DEPTH.split()[1]), f"{DEPTH}{end}"))
    return drawn


def panel(axes: Axes, end: str) -> None:
    """In one shot, or trained on."""
    found = points(end)
    for kind, style in KINDS.items():
        mine = sorted((point for point in found if point.kind == kind), key=lambda point: point.speed)
        axes.plot(
            [point.speed for point in mine],
            [min(point.loss, MOST) for point in mine],
            color=style.colour,
            marker=style.marker,
            linestyle=style.line,
            markersize=7,
            label=style.label,
        )
        for point in mine:
            text = point.name if point.loss <= MOST else f"{point.name}: +{point.loss:.0f} %"
            left = kind == "dense" and point.name != "fused"
            axes.annotate(
                text,
                (point.speed, min(point.loss, MOST)),
                xytext=(-7 if left else 7, -4 if kind == "dense" else -11 if kind == "pattern" else 5),
                ha="right" if left else "left",
                textcoords="offset points",
                fontsize=10,
                color=style.colour,
                gid=f"loss{end}-{point.name}".replace(" ", "-"),
            )
    axes.axhline(0, color=FAINT, linewidth=1)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_yticks([0, 1, 3, 10, 30], ["0", "1", "3", "10", "30"])
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xticks([0.8, 1, 1.2, 1.4], [f"{x:g}{TIMES}" for x in (0.8, 1, 1.2, 1.4)])
    axes.set(xlim=(0.62, 1.56), ylim=(-0.25, 1.35 * MOST))
    axes.set_title(PANELS[end], fontsize=11, color=INK, weight="bold", pad=8)
    axes.set_xlabel("speed over stock INT8: GPU time of 1000 mixed requests to a 7B", fontsize=9, color=INK)
    axes.grid(color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_facecolor("none")


def draw(path: Path) -> None:
    """Draw the panels."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "loss"}):
        figure = Figure(figsize=(11, 4.6))
        # Opaque, so that it reads on dark pages too.
        box = {"boxstyle": "round,pad=0.015", "facecolor": "white", "edgecolor": "none", "zorder": -1}
        figure.patches.append(FancyBboxPatch((0.02, 0.035), 0.96, 0.93, transform=figure.transFigure, **box))
        figure.patch.set_alpha(0)
        panels = [figure.add_axes((0.075 + 0.48 * i, 0.2, 0.42, 0.7)) for i in range(len(PANELS))]
        for axes, end in zip(panels, PANELS, strict=True):
            panel(axes, end)
        panels[0].set_ylabel("perplexity of held-out code over dense (%)", color=INK)
        panels[1].legend(frameon=False, fontsize=9, loc="upper left", handletextpad=0.4)
        told = "Qwen2.5-Coder-0.5B; patterns in six bits lose about 1 % more; speeds of Qwen2.5-7B, vLLM 0.33, H200"
        figure.text(0.97, 0.055, told, fontsize=9, color="#555555", ha="right")
        figure.savefig(path, metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES / "loss.svg")
