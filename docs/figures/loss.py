"""Draw loss.svg: what a served speed costs, from the records of the accuracy experiment and of served engines.

Run it again when a record changes: ``python docs/figures/loss.py [PATH]``. On the x axis stands a mixed load over stock
dense vLLM as it was served; a model with fewer layers is taken to be faster in proportion. On the y axis stands the
perplexity of held-out packages over the dense model, both as served in INT8.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FIGURES = Path(__file__).parent
ROOT = FIGURES.parent.parent
RECORDS = ROOT / "results/accuracy"
sys.path.insert(0, str(ROOT / "benchmarks/accuracy"))

import report  # noqa: E402 - of the benchmarks

MODEL = "30m"
PANELS = {False: "pruned in one shot", True: "and trained on for 3 % of the budget"}
"""By whether models were recovered."""

INK, FAINT = "#222222", "#8a8a8a"
TIMES = "\N{MULTIPLICATION SIGN}"


class Kind(NamedTuple):
    """How the points of a kind look."""

    label: str
    colour: str
    marker: str
    line: str


KINDS = {
    "pattern": Kind("a pattern everywhere", "#0072b2", "o", "-"),
    "plan": Kind("patterns mixed by a plan", "#009e73", "*", "none"),
    "left out": Kind("layers left out", "#d55e00", "s", "-"),
    "dense": Kind("nothing pruned, norms fused", "#222222", "v", "none"),
    "smaller": Kind("a smaller dense model, trained alike", "#555555", "D", "none"),
}


class Point(NamedTuple):
    """One model."""

    kind: str
    name: str
    speed: float
    loss: float
    deviation: float


def points(recovered: bool) -> Iterator[Point]:
    """All models in one shot, or recovered at the rate that suits each best."""
    runs = report.read(RECORDS, MODEL)
    for name, key, speed in report.rivals(runs):
        end = report.best_recovery(runs, key) if recovered else report.ONE_SHOT
        kind = "left out" if "left out" in name else "plan" if name == "plan" else "pattern"
        if end is not None:
            found = report.values(runs, f"{key} {end}", "packages_perplexity", "int8", "int8")
            yield Point(kind, name.split()[0] if kind == "left out" else name, speed, *report.spread(found))
    yield Point("dense", "dense", report.served_speeds("mixed")["dense"], 0.0, 0.0)
    for name, speed, found in report.smaller(RECORDS, runs, "int8"):
        yield Point("smaller", name.split()[-2], speed, *report.spread(found))


def panel(axes: Axes, recovered: bool) -> None:
    """In one shot, or recovered."""
    found = list(points(recovered))
    for kind, style in KINDS.items():
        mine = sorted(point for point in found if point.kind == kind)
        if not mine:
            continue
        mine.sort(key=lambda point: point.speed)
        several = any(point.deviation for point in mine)
        axes.errorbar(
            [point.speed for point in mine],
            [point.loss for point in mine],
            [point.deviation for point in mine] if several else None,
            color=style.colour,
            marker=style.marker,
            linestyle=style.line,
            markersize=13 if kind == "plan" else 7,
            capsize=3,
            label=style.label,
        )
        for point in mine:
            text = point.name if kind == "pattern" else f"\N{MINUS SIGN}{point.name}" if kind == "left out" else ""
            axes.annotate(
                text,
                (point.speed, point.loss),
                xytext=(-6, 6),
                textcoords="offset points",
                ha="right",
                fontsize=10,
                color=style.colour,
                gid=f"loss-{recovered:d}-{kind}-{point.name}".replace(" ", "-"),
            )
    axes.axhline(0, color=FAINT, linewidth=1)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_yticks([0, 0.5, 1, 3, 10, 30, 100], ["0", "0.5", "1", "3", "10", "30", "100"])
    axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
    axes.set_xticks([1, 1.1, 1.2, 1.3, 1.4], [f"{x:g}{TIMES}" for x in (1, 1.1, 1.2, 1.3, 1.4)])
    axes.set_title(PANELS[recovered], fontsize=11, color=INK, weight="bold", pad=8)
    axes.set_xlabel("mixed load over stock dense vLLM, as served with Qwen2.5-7B in INT8", fontsize=9, color=INK)
    axes.grid(color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_facecolor("none")


def conditions() -> str:
    """What the records say of the models."""
    runs = report.read(RECORDS, MODEL)
    trained, seeds = next(iter(runs.values()))["trained"], len(runs)
    model = (
        f"{trained['parameters'] / 1e6:.0f} M parameters, {trained['layers']} layers, {seeds} seed{'s' * (seeds > 1)}"
    )
    return f"{model}; speeds of a plan and of fewer layers in proportion to their weights"


def draw(path: Path) -> None:
    """Draw the panels."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "loss"}):
        figure = Figure(figsize=(11, 4.6))
        # Opaque, so that it reads on dark pages too.
        box = {"boxstyle": "round,pad=0.015", "facecolor": "white", "edgecolor": "none", "zorder": -1}
        figure.patches.append(FancyBboxPatch((0.02, 0.035), 0.96, 0.93, transform=figure.transFigure, **box))
        figure.patch.set_alpha(0)
        panels = [figure.add_axes((0.075 + 0.48 * i, 0.2, 0.42, 0.7)) for i in range(len(PANELS))]
        for axes, recovered in zip(panels, PANELS, strict=True):
            panel(axes, recovered)
        losses = [point.loss for recovered in PANELS for point in points(recovered)]
        for axes in panels:
            axes.set(xlim=(1, 1.43), ylim=(min(*losses, 0) - 0.15, 1.6 * max(losses)))
        panels[0].set_ylabel("held-out perplexity over dense, INT8 (%)", color=INK)
        panels[1].legend(frameon=False, fontsize=9, loc="upper left", handletextpad=0.4)
        figure.text(0.97, 0.055, conditions(), fontsize=9, color="#555555", ha="right")
        figure.savefig(path, metadata={"Date": None}, transparent=True)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FIGURES / "loss.svg")
