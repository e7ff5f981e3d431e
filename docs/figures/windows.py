"""Draw windows.svg: how a row that keeps 6 of 8 weights becomes a 2:4 row of 12, and the activations with it.

Every number and every line in the picture comes from the library's own ``pack`` and ``lift``. Run it again after a
change: ``python docs/figures/windows.py [PATH]``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

import slidesparse as ss
from slidesparse.weights.pattern import STRIDE, WINDOW

PATTERN = ss.Pattern.parse("6:8")
WEIGHT = torch.tensor([3, 0, 7, -2, 4, 1, 0, 5], dtype=torch.int8)
"""The fourth weight shows the idea: window 0 covers it but is full, so it moves on to window 1."""

COLOURS = ("#0072b2", "#d55e00", "#008a63")
INK, FAINT = "#222222", "#9a9a9a"
GAP = 0.5
TIMES = "\N{MULTIPLICATION SIGN}"

# Heights of the rows, from the top.
BRACKETS_Y, WEIGHTS_Y, SLID_Y, LIFTED_Y = 6.5, 5.0, 2.4, 0.6


def cell(axes: Axes, x: float, y: float, text: str, colour: str | None, name: str, *, filled: bool = True) -> None:
    """A unit square, a little smaller than its place; without a colour it is an empty, hatched one."""
    square = Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor="white", linewidth=1.5)
    axes.add_patch(square)
    if colour is None:
        square.set(edgecolor="#c4c4c4", hatch="////", linewidth=1)
        return
    square.set(edgecolor=colour, facecolor=colour if filled else "white")
    ink = "white" if filled else INK
    axes.text(x + 0.5, y + 0.48, text, ha="center", va="center", color=ink, fontsize=13, gid=name)


def row_label(axes: Axes, y: float, title: str, remark: str) -> None:
    """What a row is, to its left."""
    axes.text(-0.5, y + 0.72, title, ha="right", va="center", fontsize=12, color=INK, weight="bold")
    axes.text(-0.5, y + 0.22, remark, ha="right", va="center", fontsize=10.5, color="#555555")


def draw(weight: torch.Tensor, path: Path) -> None:
    """Draw one group of weights, int8 [8], at most 6 of them not zero."""
    packed = ss.pack(weight.unsqueeze(0), PATTERN)
    slid = packed.columns()[0].tolist()
    source = packed.column_map().tolist()
    lifted = ss.lift(torch.arange(PATTERN.group, dtype=torch.int8), PATTERN).tolist()

    columns = [c + GAP * (c // WINDOW) for c in range(len(slid))]
    first = (columns[-1] + 1 - PATTERN.group) / 2  # the eight weights stand over the middle of the twelve
    lands_in = {source[c]: c for c, value in enumerate(slid) if value != 0}

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "windows", "hatch.color": "#d8d8d8"}):
        figure = Figure(figsize=(10, 4.95))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(-4.9, 13.6), ylim=(-0.85, 8.3), aspect="equal")
        axes.set_axis_off()
        # Opaque, so that it reads on dark pages too.
        figure.patches.append(
            FancyBboxPatch(
                (0.02, 0.035),
                0.96,
                0.93,
                boxstyle="round,pad=0.015",
                transform=figure.transFigure,
                facecolor="white",
                edgecolor="none",
                zorder=-1,
            )
        )
        row_label(axes, WEIGHTS_Y, f"weights, {PATTERN}", f"at most {PATTERN.keep} of {PATTERN.group} not zero")
        for k, value in enumerate(weight.tolist()):
            colour = COLOURS[lands_in[k] // WINDOW] if k in lands_in else None
            cell(axes, first + k, WEIGHTS_Y, str(value), colour, f"weight-{k}")
            axes.text(first + k + 0.5, WEIGHTS_Y + 1.17, str(k), ha="center", color=FAINT, fontsize=10)

        row_label(axes, BRACKETS_Y, f"{PATTERN.windows} windows", f"{WINDOW} wide, every {STRIDE} columns")
        for j, colour in enumerate(COLOURS):
            left, right = first + PATTERN.window(j)[0] + 0.08, first + PATTERN.window(j)[-1] + 0.92
            y = BRACKETS_Y + 0.45 * j
            axes.plot([left, left, right, right], [y, y + 0.22, y + 0.22, y], color=colour, linewidth=2.5)

        for k, c in lands_in.items():
            ends = [first + k + 0.5, columns[c] + 0.5], [WEIGHTS_Y, SLID_Y + 1]
            axes.plot(*ends, color=COLOURS[c // WINDOW], linewidth=1.2, alpha=0.7, zorder=0)

        row_label(axes, SLID_Y, "slid weights, 2:4", "at most 2 in every window")
        row_label(axes, LIFTED_Y, "lifted activations", "copied, no arithmetic")
        for c, x in enumerate(columns):
            colour = COLOURS[c // WINDOW]
            used = slid[c] != 0
            cell(axes, x, SLID_Y, str(slid[c]), colour if used else None, f"slid-{c}")
            cell(axes, x, LIFTED_Y, f"x{lifted[c]}", colour, f"lifted-{c}", filled=False)
            axes.text(x + 0.5, (SLID_Y + LIFTED_Y + 1) / 2, TIMES, ha="center", va="center", color=FAINT, fontsize=13)
        axes.text(
            (columns[-1] + 1) / 2,
            -0.2,
            "the same products, so the same sum: in INT8 to the last bit",
            ha="center",
            va="center",
            fontsize=12,
            color=INK,
        )
        figure.savefig(path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    draw(WEIGHT, Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_suffix(".svg"))
