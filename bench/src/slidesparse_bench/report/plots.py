"""Draw the plots of a report: speed-up against M with its ideal and roofline, and kernels' rates over a copy's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # not pyplot: a Figure of its own draws with Agg, without a window or global state
from matplotlib.lines import Line2D
from matplotlib.ticker import MultipleLocator

from slidesparse_bench.records import COPY, QUANTIZE, SQUARE
from slidesparse_bench.report.numbers import Comparison, Limits, Point, limits, median_us, points, ratio
from slidesparse_bench.report.table import file_name

COLOURS = {
    "2:4": "#0072b2",
    "4:6": "#009e73",
    "6:8": "#d55e00",
    "8:10": "#cc79a7",
    "10:12": "#e69f00",
    "12:14": "#56b4e9",
    "14:16": "#a6761d",
    "inf": "#888888",
}
"""Told apart by colour-blind readers; other variants (``auto 6:8``) have their numbers in the tables only."""

MAIN = ("2:4", "4:6", "6:8", "8:10")
"""Drawn with their rooflines; those of the denser patterns lie too close together to be read."""

MARKERS = dict(zip(COLOURS, "osD^vP*X", strict=True))
GREY = "#555555"
PANEL = (4.0, 3.1)
"""Inches."""


def draw_speedups(found: Sequence[Comparison], benchmark: str, title: str, folder: Path) -> list[Path]:
    """Draw a picture for each model (and for squares) with a panel for each type; return the pictures' paths."""
    pictures: dict[tuple[str, bool], dict[str, list[Point]]] = {}
    for point in points(found, benchmark):
        pictures.setdefault((point.model, point.scaled), {}).setdefault(point.dtype, []).append(point)
    known, paths = limits(found), []
    for (model, scaled), by_dtype in pictures.items():
        rows = 2 if len(by_dtype) == 4 else 1
        figure, panels = _grid(rows, len(by_dtype) // rows, f"{title}: {model}{'' if scaled else ', no scales'}")
        bounded = False
        for axes, (dtype, group) in zip(panels.flat, by_dtype.items(), strict=True):
            bounded |= _draw_panel(axes, group, known)
            axes.set_title(dtype.upper(), loc="left", fontsize=10)
        for row in panels:
            row[0].set_ylabel("speed-up over dense")
        # The panels share this axis, so its limits wait for all of them. No bars, so no need for zero; half of dense is
        # the bottom unless something is worse.
        panels[0][0].set_ylim(bottom=min(0.5, panels[0][0].get_ylim()[0]))
        panels[0][0].yaxis.set_major_locator(MultipleLocator(0.2))
        names = _patterns([point for group in by_dtype.values() for point in group])
        handles = [_sample(COLOURS[name], MARKERS[name], name) for name in names]
        if bounded:
            handles.append(Line2D([], [], color=GREY, linestyle=":", label="roofline"))
        handles.append(Line2D([], [], color=GREY, linewidth=3, solid_capstyle="butt", label="ideal"))
        path = folder / f"{benchmark}_speedup_{file_name(model)}{'' if scaled else '_bare'}.png"
        _save(figure, handles, path)
        paths.append(path)
    return paths


def _draw_panel(axes: Any, group: Sequence[Point], known: Limits) -> bool:
    """Draw the points of one type; return whether there are rooflines among them."""
    bounded = False
    axes.axhline(1, color=GREY, linewidth=1)
    axes.set_xscale("log", base=2)
    for name in _patterns(group):
        main = name in MAIN
        measured = {p.tokens: s for p in group if (s := p.speedup(name)) is not None}
        bound = {p.tokens: s for p in group if main and (s := p.roofline(name, known)) is not None}
        style = {"color": COLOURS[name], "marker": MARKERS[name], "markersize": 4 if main else 3}
        bounded |= bool(bound)
        axes.plot(list(bound), list(bound.values()), ":", color=COLOURS[name], linewidth=1.2)
        axes.plot(list(measured), list(measured.values()), linewidth=1.6 if main else 0.8, **style)
        ideal = next(i for point in group if (i := point.ideal(name)) is not None)
        # x in shares of the panel: a dash just outside its right edge.
        margin = axes.get_yaxis_transform()
        axes.plot((1.01, 1.05), (ideal, ideal), color=COLOURS[name], linewidth=3, transform=margin, clip_on=False)
    _token_axis(axes, [point.tokens for point in group], "M = N = K" if group[0].model == SQUARE else "M (tokens)")
    axes.yaxis.set_major_formatter("{x:.1f}x")
    return bounded


def _patterns(group: Sequence[Point]) -> list[str]:
    return [name for name in COLOURS if any(name in point.variants for point in group)]


def draw_kernels(found: Sequence[Comparison], path: Path) -> bool:
    """Draw the rates of quantise and of quantise + lift over that of a copy, against M; False without records."""
    groups: dict[tuple[int, str], list[Comparison]] = {}
    for one in found:
        if one.case.benchmark == "kernels" and one.best(COPY) is not None:
            groups.setdefault((one.case.in_features, one.case.dtype), []).append(one)
    styles = {QUANTIZE: (GREY, ".")} | {f"lift {name}": (COLOURS[name], MARKERS[name]) for name in COLOURS}
    timed = [one for group in groups.values() for one in group]
    curves = {name: style for name, style in styles.items() if any(one.best(name) for one in timed)}
    if not curves:
        return False
    widths = list(dict.fromkeys(columns for columns, _ in groups))
    dtypes = list(dict.fromkeys(dtype for _, dtype in groups))
    figure, panels = _grid(len(widths), len(dtypes), "Quantise and lift: bytes a second over those of a copy")
    for row, columns in zip(panels, widths, strict=True):
        for axes, dtype in zip(row, dtypes, strict=True):
            group = sorted(groups.get((columns, dtype), ()), key=lambda one: one.case.tokens)
            axes.axhline(1, color=GREY, linewidth=1)
            axes.set_xscale("log", base=2)
            for name, (colour, marker) in curves.items():
                shares = {one.case.tokens: _share_of_copy(one, name) for one in group}
                drawn = {tokens: share for tokens, share in shares.items() if share is not None}
                axes.plot(list(drawn), list(drawn.values()), color=colour, marker=marker, markersize=4)
            _token_axis(axes, [one.case.tokens for one in group], "M (tokens)")
            axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
            axes.set_title(f"K = {columns}, {dtype.upper()}", loc="left", fontsize=10)
        row[0].set_ylabel("of the copy's rate")
    panels[0][0].set_ylim(bottom=0)  # shared, so it waits for all of them
    label = {QUANTIZE: "quantise only"}
    handles = [_sample(*style, label.get(name, f"quantise + {name}")) for name, style in curves.items()]
    _save(figure, handles, path)
    return True


def _share_of_copy(one: Comparison, variant: str) -> float | None:
    copied, kernel = one.best(COPY), one.best(variant)
    if copied is None or kernel is None:
        return None
    return ratio(kernel.n_bytes / median_us(kernel), copied.n_bytes / median_us(copied))


def _grid(rows: int, columns: int, title: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(PANEL[0] * columns + 0.3, PANEL[1] * rows + 0.9), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=False, sharey=True)


def _sample(colour: str, marker: str, label: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, markersize=4, label=label)


def _token_axis(axes: Any, tokens: Sequence[int], label: str) -> None:
    every = max(1, -(-len(tokens) // 6))
    shown = sorted(tokens)[::-1][::every]
    axes.set_xticks(shown, [str(t) if t < 1024 else f"{t // 1024}k" for t in shown])
    axes.minorticks_off()
    axes.set_xlabel(label)
    axes.grid(color="#e4e4e4")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, handles: Sequence[Line2D], path: Path) -> None:
    widest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, int(figure.get_figwidth() / (0.6 + 0.09 * widest)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
