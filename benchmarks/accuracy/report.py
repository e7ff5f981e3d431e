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

PATTERNS = ("14:16", "8:10", "6:8", "4:6@50%", "4:6", "2:4")
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
    """One number a seed: perplexity over that of the dense model of the same seed and budget, or points of accuracy
    above it."""
    found = []
    for run in runs.values():
        record, dense = run.get(f"{pattern} {method} {steps}"), run[f"dense none {steps}"]
        if record is not None:
            one, other = record[measure], dense[measure]
            found.append(100 * (one / other - 1) if measure == "perplexity" else 100 * (one - other))
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
                    f"{trained['corpus']['held_out_xz_bits_per_byte']:.3f}",
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


def curve(everything: dict[str, Runs], path: Path) -> None:
    """Perplexity and accuracy by pattern; one-shot solid, recovered dashed."""
    figure = Figure(figsize=(11, 4.2 * len(everything)), layout="constrained")
    grid = figure.subplots(len(everything), 2, squeeze=False)
    for (model, runs), (left, right) in zip(everything.items(), grid, strict=True):
        for axes, measure in ((left, "perplexity"), (right, "exact_mean")):
            for offset, (method, (label, colour, marker)) in zip((-0.12, 0, 0.12), METHODS.items(), strict=True):
                for steps, style, suffix in ((0, "-", "one shot"), (recovery_steps(runs), "--", "recovered")):
                    points = [
                        (i + offset, *spread(found))
                        for i, pattern in enumerate(PATTERNS)
                        if (found := values(runs, pattern, method, steps, measure))
                    ]
                    if points:
                        x, y, deviation = zip(*points, strict=True)
                        axes.errorbar(
                            x,
                            y,
                            deviation,
                            color=colour,
                            marker=marker,
                            markersize=5,
                            linestyle=style,
                            linewidth=1.2,
                            capsize=3,
                            markerfacecolor=colour if steps == 0 else "white",
                            label=f"{label}, {suffix}",
                        )
            axes.set_xticks(range(len(PATTERNS)), PATTERNS)
            axes.axhline(0, color="#555555", linewidth=1)
            plain(axes)
        left.set_yscale("symlog", linthresh=1)
        left.set_yticks([-1, 0, 1, 3, 10, 30, 100, 200], ["-1", "0", "1", "3", "10", "30", "100", "200"])
        left.set(ylabel="held-out perplexity over dense (%)", title=NAMES[model])
        right.set(ylabel="exact answers over dense (points)", title=NAMES[model])
        right.legend(frameon=False, fontsize=8, loc="lower left")
    figure.savefig(path, dpi=150)


def frontier(runs: Runs, path: Path) -> None:
    """What SparseGPT leaves, against the modelled speed of the matrix products."""
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for axes, (name, gain) in zip(figure.subplots(1, 2, sharey=True), GAINS.items(), strict=True):
        for kind, colour, marker in (("uniform", "#d55e00", "^"), ("share", "#0072b2", "o")):
            points = []
            for key, record in next(iter(runs.values())).items():
                if record.get("method") == "sparsegpt" and record.get("recovery_steps") == 0:
                    pattern = Pattern.parse(record["pattern"])
                    found = values(runs, record["pattern"], "sparsegpt", 0, "perplexity")
                    if pattern.is_uniform == (kind == "uniform") and key:
                        points.append((float(pattern.speedup(gain)), *spread(found), record["pattern"]))
            points.sort()
            x, y, deviation, labels = zip(*points, strict=True)
            label = "uniform pattern" if kind == "uniform" else "pattern on a share of the columns"
            line = "-" if kind == "uniform" else "none"
            axes.errorbar(x, y, deviation, color=colour, marker=marker, linestyle=line, capsize=3, label=label)
            for here in zip(x, y, labels, strict=True):
                below = kind == "share"
                axes.annotate(
                    here[2],
                    here[:2],
                    xytext=(0, 8) if below else (4, -12),
                    textcoords="offset points",
                    fontsize=8,
                    ha="center" if below else "left",
                    color=colour,
                )
        plans = [r for r in next(iter(runs.values())).values() if "rival" in r and r["mma_gain"] == float(gain)]
        for number, plan in enumerate(plans):
            found = [
                100 * (run[plan["key"]]["perplexity"] / run["dense none 0"]["perplexity"] - 1) for run in runs.values()
            ]
            mean, deviation = spread(found)
            axes.errorbar(
                plan["speedup"],
                mean,
                deviation,
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
        axes.margins(x=0.12)
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        plain(axes)
    figure.axes[0].set_ylabel("held-out perplexity over dense (%)")
    figure.savefig(path, dpi=150)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with the records; tables and plots go there too")
    folder: Path = parser.parse_args().folder
    everything = {model: read(folder, model) for model in NAMES}
    small, large = everything["10m"], everything["100m"]
    encoder, times = lines(folder / "encoder.jsonl"), lines(folder / "layer-time.jsonl")
    sections = {
        "The trained models (10m-*.jsonl, 100m-0.jsonl)": dense_table(everything),
        "11 M parameters: held-out perplexity over dense, % (10m-*.jsonl)": pattern_table(small, "perplexity", 2),
        "11 M parameters: exact answers over dense, points (10m-*.jsonl)": pattern_table(small, "exact_mean", 1),
        "102 M parameters: held-out perplexity over dense, % (100m-0.jsonl)": pattern_table(large, "perplexity", 2),
        "102 M parameters: exact answers over dense, points (100m-0.jsonl)": pattern_table(large, "exact_mean", 1),
        "Calibration loss at 6:8": loss_table(everything),
        "Plans against uniform patterns of the same modelled speed (10m-*.jsonl)": plan_table(small),
        "The encoder (encoder.jsonl)": encoder_table(encoder),
        "A layer of 7B shape (layer-time.jsonl)": time_table(times),
    }
    text = "\n\n".join(f"## {title}\n\n{body}" for title, body in sections.items())
    (folder / "tables.md").write_text(
        f"# Accuracy of pruned models, drawn by benchmarks/accuracy/report.py\n\n{text}\n"
    )
    curve(everything, folder / "curve.png")
    frontier(small, folder / "frontier.png")
    encoder_plot(encoder, folder / "encoder.png")


if __name__ == "__main__":
    main()
