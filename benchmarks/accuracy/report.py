"""Tables and plots of the accuracy experiment, from its records alone.

python benchmarks/accuracy/report.py results/accuracy
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from slidesparse.pattern import Pattern

PATTERNS = ("14:16", "4:6@50%", "8:10", "6:8", "4:6", "2:4")
"""In the order of their zeros."""

METHODS = {
    "magnitude": ("magnitude", "#888888", "s"),
    "wanda": ("Wanda", "#0072b2", "o"),
    "sparsegpt": ("SparseGPT", "#d55e00", "^"),
}
"""Method -> label, colour (told apart by colour-blind readers), marker."""

NAMES = {"10m": "11 M parameters, three seeds", "100m": "102 M parameters, one seed"}
GAINS = {"a 2:4 multiply twice as fast": Fraction(2), "Hopper: 1.6 times": Fraction(8, 5)}
Record = dict[str, Any]
Runs = dict[int, dict[str, Record]]
"""Seed -> key -> record."""


def read(folder: Path, model: str) -> Runs:
    runs: Runs = {}
    for path in sorted(folder.glob(f"{model}-*.jsonl")):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            runs.setdefault(record["seed"], {})[record["key"]] = record
    return runs


def recovery_steps(runs: Runs) -> int:
    return int(max(record.get("recovery_steps", 0) for run in runs.values() for record in run.values()))


def values(runs: Runs, pattern: str, method: str, steps: int, measure: str) -> list[float]:
    """One number a seed, against the dense model of the same seed and budget.

    Perplexities as percent above it, shares as points above it, nats as thousandths above it.
    """
    found = []
    for run in runs.values():
        record, dense = run.get(f"{pattern} {method} {steps}"), run[f"dense none {steps}"]
        if record is not None:
            one, other = record[measure], dense[measure]
            if measure == "perplexity":
                found.append(100 * (one / other - 1))
            else:
                found.append((1000 if measure == "calibration_nats" else 100) * (one - other))
    return found


def spread(numbers: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation, 0 for a single number."""
    return statistics.mean(numbers), statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def cell(numbers: Sequence[float], digits: int, sign: str = "+") -> str:
    if not numbers:
        return "-"
    mean, deviation = spread(numbers)
    text = f"{mean:{sign}.{digits}f}"
    return f"{text} ± {deviation:.{digits}f}" if len(numbers) > 1 else text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# -- tables --------------------------------------------------------------------------------------------------------


def dense_table(everything: dict[str, Runs]) -> str:
    rows = []
    for model, runs in everything.items():
        for seed, run in sorted(runs.items()):
            trained, dense, more = run["trained"], run["dense none 0"], run[f"dense none {recovery_steps(runs)}"]
            rows.append(
                (
                    f"{model}, seed {seed}",
                    f"{trained['parameters'] / 1e6:.1f} M",
                    f"{trained['tokens'] / 1e6:.0f} M",
                    f"{dense['perplexity']:.3f}",
                    f"{dense['bits_per_byte']:.3f}",
                    f"{trained['corpus']['xz_bits_per_byte']:.3f}",
                    f"{100 * dense['exact_mean']:.1f} %",
                    f"{more['perplexity']:.3f}",
                    f"{100 * more['exact_mean']:.1f} %",
                )
            )
    head = ("model", "parameters", "tokens", "perplexity", "bits a byte", "xz -9", "exact", "trained on", "exact")
    return table(head, rows)


def pattern_table(runs: Runs, measure: str, digits: int) -> str:
    steps = recovery_steps(runs)
    head = [
        "pattern",
        *(label for label, *_ in METHODS.values()),
        *(f"{label}, recovered" for label, *_ in METHODS.values()),
    ]
    rows = [
        [pattern, *(cell(values(runs, pattern, method, s, measure), digits) for s in (0, steps) for method in METHODS)]
        for pattern in PATTERNS
    ]
    return table(head, rows)


def loss_table(everything: dict[str, Runs]) -> str:
    """Calibration loss of 6:8 by method: mean of the sets' relative output errors, and nats a token of the model."""
    rows = []
    for model, runs in everything.items():
        for seed, run in sorted(runs.items()):
            records = [run[f"6:8 {method} 0"] for method in METHODS]
            rows.append(
                [
                    f"{model}, seed {seed}",
                    *(f"{r['set_loss_mean']:.4f}" for r in records),
                    f"{run['dense none 0']['calibration_nats']:.4f}",
                ]
                + [f"{r['calibration_nats']:.4f}" for r in records]
            )
    labels = [label for label, *_ in METHODS.values()]
    return table(["model", *(f"{x}, sets" for x in labels), "dense, nats", *(f"{x}, nats" for x in labels)], rows)


def plan_table(runs: Runs) -> str:
    rows = []
    keys = [key for key in next(iter(runs.values())) if key.startswith("plan ")]
    for key in keys:
        plans = [run[key] for run in runs.values() if key in run]
        dense = [run["dense none 0"]["perplexity"] for run in runs.values()]
        rivals = [run[f"{plan['rival']} sparsegpt 0"] for run, plan in zip(runs.values(), plans, strict=True)]
        rows.append(
            (
                f"{plans[0]['rival']}",
                f"{plans[0]['mma_gain']:g}",
                f"{plans[0]['rival_speedup']:.3f}x",
                cell([100 * (r["perplexity"] / d - 1) for r, d in zip(rivals, dense, strict=True)], 2),
                cell([100 * (p["perplexity"] / d - 1) for p, d in zip(plans, dense, strict=True)], 2),
                cell([100 * (p["exact_mean"] - r["exact_mean"]) for p, r in zip(plans, rivals, strict=True)], 1),
            )
        )
    head = (
        "uniform",
        "2:4 gain",
        "modelled speed",
        "uniform: perplexity, %",
        "plan: perplexity, %",
        "plan's accuracy, points above",
    )
    return table(head, rows)


def frontier_table(runs: Runs) -> str:
    first = next(iter(runs.values()))
    records = [r for r in first.values() if r.get("method") == "sparsegpt" and r.get("recovery_steps") == 0]
    rows = []
    for record in sorted(records, key=lambda r: Pattern.parse(r["pattern"]).ideal_speedup):
        pattern = Pattern.parse(record["pattern"])
        speeds = [f"{float(pattern.speedup(gain)):.3f}x" for gain in GAINS.values()]
        found = [
            cell(values(runs, str(pattern), "sparsegpt", 0, m), d) for m, d in (("perplexity", 2), ("exact_mean", 1))
        ]
        rows.append([str(pattern), f"{float(pattern.sparsity):.3f}", *speeds, *found])
    return table(("pattern", "zeros", "speed at 2x", "speed at 1.6x", "perplexity, %", "exact, points"), rows)


def encoder_table(records: list[Record]) -> str:
    patterns = list(dict.fromkeys(record["pattern"] for record in records))
    rows = []
    for pattern in sorted(patterns, key=lambda text: Pattern.parse(text).sparsity):
        here = [record for record in records if record["pattern"] == pattern]
        by_method = {method: [r for r in here if r["method"] == method] for method in METHODS}
        cells = [
            cell([r[name] for r in by_method[m]], 3, "") for name in ("cosine", "rank_correlation") for m in METHODS
        ]
        rows.append([pattern, f"{here[0]['zeros']:.3f}", *cells])
    labels = [label for label, *_ in METHODS.values()]
    return table(["pattern", "zeros", *(f"cosine, {x}" for x in labels), *(f"Spearman, {x}" for x in labels)], rows)


def matching_table(records: list[Record]) -> str:
    """What matching and more text bring, in float and in INT8: a row for each pattern, text and number of steps."""
    measures = ("cosine", "rank_correlation", "cosine_int8", "rank_correlation_int8")
    groups: dict[tuple[str, int, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["pattern"], record["sentences"], record["match"]), []).append(record)
    order = sorted(groups, key=lambda group: (Pattern.parse(group[0]).sparsity, *group[1:]))
    rows = [[*map(str, key), *(cell([r[name] for r in groups[key]], 4, "") for name in measures)] for key in order]
    return table(("pattern", "sentences", "steps", "cosine", "Spearman", "cosine, INT8", "Spearman, INT8"), rows)


def time_table(records: list[Record]) -> str:
    rows = [
        (r["method"], r["pattern"], f"{r['layer_s']:.2f}", f"{r['model_of_32_layers_s'] / 60:.1f}") for r in records
    ]
    return table(("method", "pattern", "seconds a layer", "minutes for 32 layers"), rows)


# -- plots ---------------------------------------------------------------------------------------------------------


def plain(axes: Any) -> None:
    axes.grid(color="#dddddd")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


MEASURES = {
    "perplexity": "held-out perplexity over dense (%)",
    "calibration_nats": "training-like text: loss over dense (0.001 nats)",
    "exact_mean": "exact answers over dense (points)",
}

LIMITS = {"perplexity": (-5, 400), "calibration_nats": (-0.5, 2000)}


def curve(everything: dict[str, Runs], path: Path) -> None:
    """Every measure by pattern; one shot filled, recovered hollow; lines join uniform patterns only."""
    figure = Figure(figsize=(14, 4.4 * len(everything)), layout="constrained")
    grid = figure.subplots(len(everything), len(MEASURES), squeeze=False)
    for (model, runs), row in zip(everything.items(), grid, strict=True):
        for axes, (measure, label) in zip(row, MEASURES.items(), strict=True):
            for offset, method in zip((-0.15, 0, 0.15), METHODS, strict=True):
                for steps in (0, recovery_steps(runs)):
                    draw_method(axes, runs, method, steps, measure, offset)
            axes.set_xticks(range(len(PATTERNS)), PATTERNS)
            axes.axhline(0, color="#555555", linewidth=1)
            if measure in LIMITS:
                axes.set_yscale("symlog", linthresh=1)
                axes.set_ylim(*LIMITS[measure])
                axes.yaxis.set_major_formatter("{x:g}")
            axes.set(ylabel=label, title=NAMES[model])
            plain(axes)
        row[-1].legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=130)


def draw_method(axes: Any, runs: Runs, method: str, steps: int, measure: str, offset: float) -> None:
    label, colour, marker = METHODS[method]
    style: dict[str, Any] = {
        "color": colour,
        "marker": marker,
        "markersize": 5,
        "markerfacecolor": "white" if steps else colour,
        "linewidth": 1.2,
        "capsize": 3,
    }
    found = {pattern: values(runs, pattern, method, steps, measure) for pattern in PATTERNS}
    for uniform in (True, False):
        points = [
            (i + offset, *spread(found[pattern]))
            for i, pattern in enumerate(PATTERNS)
            if found[pattern] and Pattern.parse(pattern).is_uniform == uniform
        ]
        if points:
            x, y, deviation = zip(*points, strict=True)
            line = "none" if not uniform else "--" if steps else "-"
            name = f"{label}, {'recovered' if steps else 'one shot'}" if uniform else None
            axes.errorbar(x, y, deviation, linestyle=line, label=name, **style)


def frontier(runs: Runs, path: Path) -> None:
    """What SparseGPT leaves, against the modelled speed of the matrix products."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    first = next(iter(runs.values()))
    one_shot = [r for r in first.values() if r.get("method") == "sparsegpt" and r.get("recovery_steps") == 0]
    for axes, (name, gain) in zip(figure.subplots(1, 2, sharey=True), GAINS.items(), strict=True):
        for uniform, label, colour, marker in (
            (True, "uniform pattern", "#d55e00", "^"),
            (False, "pattern on a share of the columns", "#0072b2", "o"),
        ):
            patterns = [Pattern.parse(r["pattern"]) for r in one_shot]
            points = sorted(
                (float(p.speedup(gain)), *spread(values(runs, str(p), "sparsegpt", 0, "perplexity")), str(p))
                for p in patterns
                if p.is_uniform == uniform
            )
            x, y, deviation, names = zip(*points, strict=True)
            line = "-" if uniform else "none"
            axes.errorbar(x, y, deviation, color=colour, marker=marker, linestyle=line, capsize=3, label=label)
            # Shares lie above the uniform patterns where 2:4 is twice as fast, and below them on Hopper.
            for at, height, text in zip(x, y, names, strict=True):
                right = uniform == (gain == 2) and not text.startswith("2:4@")
                axes.annotate(
                    text,
                    (at, height),
                    xytext=(7, -9) if right else (-7, 3),
                    textcoords="offset points",
                    fontsize=8,
                    ha="left" if right else "right",
                    color=colour,
                )
        for number, plan in enumerate(r for r in first.values() if r.get("mma_gain") == float(gain)):
            dense = {seed: run["dense none 0"]["perplexity"] for seed, run in runs.items()}
            found = [100 * (run[plan["key"]]["perplexity"] / dense[seed] - 1) for seed, run in runs.items()]
            axes.errorbar(
                plan["speedup"],
                *spread(found),
                color="black",
                marker="*",
                markersize=11,
                capsize=3,
                linestyle="none",
                label=None if number else "chosen by slidesparse plan",
            )
        axes.axhline(0, color="#555555", linewidth=1)
        axes.set_yscale("symlog", linthresh=1)
        axes.set_yticks([0, 0.5, 1, 3, 10, 30], ["0", "0.5", "1", "3", "10", "30"])
        axes.set(title=name, xlabel="modelled speed of the matrix products over dense")
        axes.margins(x=0.2)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        plain(axes)
    figure.axes[0].set_ylabel("held-out perplexity over dense (%)")
    figure.savefig(path, dpi=130)


def encoder_plot(records: list[Record], path: Path) -> None:
    figure = Figure(figsize=(6.5, 4.4), layout="constrained")
    axes = figure.subplots()
    order = sorted(
        {r["pattern"] for r in records},
        key=lambda text: (
            -spread([r["cosine"] for r in records if r["pattern"] == text and r["method"] == "sparsegpt"])[0]
        ),
    )
    for method, (label, colour, marker) in METHODS.items():
        found = [[r["cosine"] for r in records if r["pattern"] == p and r["method"] == method] for p in order]
        mean, deviation = zip(*map(spread, found), strict=True)
        axes.errorbar(
            range(len(order)), mean, deviation, color=colour, marker=marker, markersize=5, capsize=3, label=label
        )
    axes.set_xticks(range(len(order)), order)
    axes.set(ylabel="cosine to the unpruned embeddings", title="all-MiniLM-L6-v2, one shot")
    axes.legend(frameon=False)
    plain(axes)
    figure.savefig(path, dpi=150)


def lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tables(folder: Path) -> str:
    """All tables as Markdown."""
    small, large = read(folder, "10m"), read(folder, "100m")
    sections = {"The trained models (10m-*.jsonl, 100m-0.jsonl)": dense_table({"10m": small, "100m": large})}
    titles = {
        "perplexity": "held-out perplexity over dense, %",
        "calibration_nats": "loss on training-like text over dense, thousandths of a nat",
        "exact_mean": "exact answers over dense, points",
    }
    for name, runs, files in (("11 M", small, "10m-*.jsonl"), ("102 M", large, "100m-0.jsonl")):
        for measure, title in titles.items():
            digits = 2 if measure == "perplexity" else 1
            sections[f"{name} parameters: {title} ({files})"] = pattern_table(runs, measure, digits)
    sections["Calibration loss at 6:8 (10m-*.jsonl, 100m-0.jsonl)"] = loss_table({"10m": small, "100m": large})
    sections["11 M parameters: the frontier, SparseGPT, one shot (10m-*.jsonl)"] = frontier_table(small)
    sections["Plans against uniform patterns of the same modelled speed (10m-*.jsonl)"] = plan_table(small)
    sections["The encoder (encoder.jsonl)"] = encoder_table(lines(folder / "encoder.jsonl"))
    sections["The encoder, matched (encoder-matched.jsonl)"] = matching_table(lines(folder / "encoder-matched.jsonl"))
    sections["A layer of 7B shape (layer-time.jsonl)"] = time_table(lines(folder / "layer-time.jsonl"))
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections.items())
    return f"# Accuracy of pruned models\n\nDrawn by benchmarks/accuracy/report.py.\n\n{body}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with the records; tables and plots go there too")
    folder: Path = parser.parse_args().folder
    (folder / "tables.md").write_text(tables(folder))
    curve({model: read(folder, model) for model in NAMES}, folder / "curve.png")
    frontier(read(folder, "10m"), folder / "frontier.png")
    encoder_plot(lines(folder / "encoder.jsonl"), folder / "encoder.png")


if __name__ == "__main__":
    main()
