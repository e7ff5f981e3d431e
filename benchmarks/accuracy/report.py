"""Tables and plots of the accuracy experiment, from its records alone.

python benchmarks/accuracy/report.py results/accuracy
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from six_bits import METHODS as ROUNDED_METHODS
from six_bits import SIX_BITS
from speeds import served_speeds

from slidesparse.weights.pattern import Pattern

PATTERNS = ("6:8", "4:6", "2:4")
"""In the order of their zeros."""

MATCHED = "sparsegpt + match"
ONE_SHOT = "0"
RECOVERIES = {"0.03@0.05": "at 0.05", "0.01@0.05": "by 1 % at 0.05", "0.03@0.15": "at 0.15", "0.03@0.3": "at 0.3"}
"""End of a key: the share of the budget and of its rate -> what a column says of it, a share of 3 % unsaid."""

GENTLEST, *_ = RECOVERIES
COLUMNS = {
    "magnitude": ("magnitude", ONE_SHOT),
    "SparseGPT": ("sparsegpt", ONE_SHOT),
    "matched": (MATCHED, ONE_SHOT),
    **{f"recovered {name}": (MATCHED, end) for end, name in RECOVERIES.items()},
}
"""Column -> method, and the end of the key."""

ENCODER_METHODS = {
    "magnitude": ("magnitude", "#888888", "s"),
    "wanda": ("Wanda", "#0072b2", "o"),
    "sparsegpt": ("SparseGPT", "#d55e00", "^"),
}
"""Method -> label, colour (told apart by colour-blind readers), marker."""

METHOD_NAMES = {"magnitude": "magnitude", "sparsegpt": "SparseGPT"}
MODELS = {"30m": "30 M", "100m": "101 M"}
SMALLER = ("30m-12", "30m-10")
MEASURES = {
    "packages_perplexity": "perplexity of held-out packages over dense, %",
    "files_perplexity": "perplexity of held-out files over dense, %",
    "exact_mean": "exact answers over dense, points",
}
TYPES = {"": "BF16", "int8": "INT8", "fp8": "FP8"}
ROUNDED = {"": "BF16", "int8": "INT8", SIX_BITS: "INT8 in six bits", "fp8": "FP8"}
Record = dict[str, Any]
Runs = dict[int, dict[str, Record]]
"""Seed -> key -> record."""


def read(folder: Path, model: str) -> Runs:
    runs: Runs = {}
    for path in sorted(folder.glob(f"{model}-*.jsonl")):
        for record in lines(path):
            if record["model"] == model:
                runs.setdefault(record["seed"], {})[record["key"]] = record
    return runs


def lines(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def value(record: Record, measure: str, dtype: str = "") -> float:
    """A record's measure, in floats or as served in a type."""
    found: float = (record[dtype] if dtype else record)[measure]
    return found


def values(
    runs: Runs, key: str, measure: str, dtype: str = "", than: str = "", base: Runs | None = None
) -> list[float]:
    """One number a seed, against the dense model of the same seed, in floats or as served in the type ``than``.

    Perplexities as percent above it, shares as points above it.
    """
    found = []
    for seed, run in runs.items():
        dense = (base or runs)[seed]["dense none 0"]
        if key in run:
            one, other = value(run[key], measure, dtype), value(dense, measure, than)
            found.append(100 * (one - other) if measure == "exact_mean" else 100 * (one / other - 1))
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
            trained, dense = run["trained"], run.get("dense none 0")
            judged = ["-"] * 5
            if dense is not None:
                judged = [
                    f"{dense['packages_perplexity']:.3f}",
                    f"{dense['packages_bits_per_byte']:.3f}",
                    f"{trained['corpus']['xz_bits_per_byte']:.3f}",
                    f"{dense['files_perplexity']:.3f}",
                    f"{100 * dense['exact_mean']:.1f} %",
                ]
            rows.append(
                (
                    f"{model}, seed {seed}",
                    f"{trained['parameters'] / 1e6:.1f} M",
                    f"{trained['layers']}",
                    f"{trained['tokens'] / 1e6:.0f} M",
                    f"{trained['epochs']:g}",
                    f"{trained['loss']:.4f}",
                    *judged,
                )
            )
    head = (
        "model",
        "parameters",
        "layers",
        "tokens",
        "text read",
        "last batch, nats",
        "held-out packages",
        "bits a byte",
    )
    return table((*head, "xz -9", "held-out files", "exact"), rows)


def columns_of(runs: Runs) -> dict[str, tuple[str, str]]:
    """The columns that have a number."""
    known = {key for run in runs.values() for key in run}
    return {
        name: (method, end)
        for name, (method, end) in COLUMNS.items()
        if any(f"{pattern} {method} {end}" in known for pattern in PATTERNS)
    }


def pattern_table(runs: Runs, measure: str) -> str:
    """Rows of patterns, columns of methods and of recovery."""
    digits, columns = 1 if measure == "exact_mean" else 2, columns_of(runs)
    rows = [
        [
            pattern,
            *(cell(values(runs, f"{pattern} {method} {end}", measure), digits) for method, end in columns.values()),
        ]
        for pattern in PATTERNS
    ]
    return table(["pattern", *columns], rows)


def served_table(runs: Runs) -> str:
    """In floats and as served, one shot, matched, and recovered; and how fast that is served."""
    head = ["pattern", *(f"{name}{more}" for more in ("", ", recovered") for name in TYPES.values())]
    eight_bits = {dtype: served_speeds("mixed", dtype) for dtype in TYPES if dtype}
    rows = []
    for pattern in ("dense", *PATTERNS):
        keys = ["dense none 0"]
        if pattern != "dense":
            keys = [f"{pattern} {MATCHED} {end}" for end in (ONE_SHOT, GENTLEST)]
        cells = [cell(values(runs, key, "packages_perplexity", dtype), 2) for key in keys for dtype in TYPES]
        speeds = [f"{found[pattern]:.3f}x" for found in eight_bits.values()]
        rows.append([pattern, *cells, *(["-"] * (2 * len(TYPES) - len(cells))), *speeds])
    return table([*head, *(f"speed, {TYPES[dtype]}" for dtype in eight_bits)], rows)


def six_bits_table(runs: Runs) -> str:
    """As served in every type, six bits among them, in one shot."""
    kinds = {"dense none 0": ("dense", "-")}
    kinds |= {
        f"{pattern} {method} {ONE_SHOT}": (pattern, METHOD_NAMES[method])
        for method in ROUNDED_METHODS
        for pattern in PATTERNS
    }
    rows = [
        [*named, *(cell(values(runs, key, "packages_perplexity", dtype), 2) for dtype in ROUNDED)]
        for key, named in kinds.items()
    ]
    return table(["pattern", "method", *ROUNDED.values()], rows)


def rivals(runs: Runs) -> Iterator[tuple[str, str, float]]:
    """What competes for a speed: a name, the key without its end, and the served speed over stock."""
    speeds, first = served_speeds("mixed"), next(iter(runs.values()))
    yield from ((pattern, f"{pattern} {MATCHED}", speeds[pattern]) for pattern in PATTERNS)
    for key in (key.removesuffix(" 0") for key in first if key.startswith("plan@") and key.endswith(" 0")):
        yield "plan", key, float(key.split()[0].removeprefix("plan@"))
    layers = first["trained"]["layers"]
    for key in (key.removesuffix(" 0") for key in first if key.endswith("left-out 0")):
        count = int(key.split("-")[0])
        name = f"{count} of {layers} layers left out"
        yield name, key, layers / (layers - count)


def smaller(folder: Path, runs: Runs, dtype: str = "") -> Iterator[tuple[str, float, list[float]]]:
    """Smaller dense models trained alike: name, speed, percent of perplexity."""
    whole = next(iter(runs.values()))["trained"]
    layers = whole["layers"]
    for model in (name for name in SMALLER if name.startswith(f"{whole['model']}-")):
        found = {seed: run for seed, run in read(folder, model).items() if "dense none 0" in run}
        if found:
            fewer = next(iter(found.values()))["trained"]["layers"]
            loss = values(found, "dense none 0", "packages_perplexity", dtype, dtype, runs)
            yield f"trained with {fewer} layers", layers / fewer, loss


def speed_table(folder: Path, runs: Runs) -> str:
    """Loss at a served speed: patterns, plans, depth pruning, smaller dense models."""
    measures = {"packages_perplexity": ("perplexity, %", 2), "exact_mean": ("exact, points", 1)}
    tried = {key.rpartition(" ")[2] for run in runs.values() for key in run}
    ends = {ONE_SHOT: "", **{end: f", recovered {name}" for end, name in RECOVERIES.items() if end in tried}}
    rows = []
    for name, key, speed in rivals(runs):
        cells = [
            cell(values(runs, f"{key} {end}", measure), digits)
            for measure, (_, digits) in measures.items()
            for end in ends
        ]
        rows.append((speed, [name, *cells]))
    empty = ["-"] * (2 * len(ends) - 1)
    rows += [(speed, [name, cell(loss, 2), *empty]) for name, speed, loss in smaller(folder, runs)]
    head = [f"{label}{after}" for label, _ in measures.values() for after in ends.values()]
    return table(["speed", "what", *head], [[f"{s:.3f}x", *row] for s, row in sorted(rows, key=lambda row: row[0])])


def layer_table(runs: Runs) -> str:
    """Which layers depth pruning leaves out, and what their influence is."""
    rows = [
        [f"seed {seed}", " ".join(f"{value:.3f}" for value in record["influence"])]
        for seed, run in sorted(runs.items())
        for record in [next(r for key, r in run.items() if "left-out" in key)]
    ]
    return table(["model", "1 - cosine of each layer"], rows)


def experts_bytes(record: Record) -> float:
    """Of a weight in 8 bits, over dense, in the form that packed experts have now."""
    if record["method"] == "reap":
        return float(record["experts_kept"])
    return float(Pattern.parse(record["pattern"]).bytes_per_weight("counts"))


def mixture_table(runs: Runs) -> str:
    """What is left of the experts' weights, and the loss of that, in float and in INT8; most bytes first."""
    found = [record for key, record in next(iter(runs.values())).items() if key != "trained"]
    rows = []
    for record in sorted(found, key=lambda record: -experts_bytes(record)):
        pattern, method, key = record["pattern"], record["method"], record["key"]
        name = f"{pattern}, {METHOD_NAMES[method]}" if method in METHOD_NAMES else pattern
        if method == "reap":
            count, _, _ = pattern.partition("-")
            name = f"{count} of {len(record['kept'][0]) + int(count)} experts left out, REAP"
        losses = [cell(values(runs, key, "packages_perplexity", dtype), 2) for dtype in ("", "int8")]
        rows.append([name, f"{record['experts_kept']:.3f}", f"{experts_bytes(record):.3f}", *losses])
    return table(["experts", "weights kept", "bytes of experts", "perplexity, %", "perplexity, %, INT8"], rows)


def encoder_table(records: list[Record]) -> str:
    zeros = {record["pattern"]: record["zeros"] for record in records}
    rows = []
    for pattern in sorted(zeros, key=lambda text: zeros[text]):
        here = [record for record in records if record["pattern"] == pattern]
        by_method = {method: [r for r in here if r["method"] == method] for method in ENCODER_METHODS}
        cells = [
            cell([r[name] for r in by_method[m]], 3, "")
            for name in ("cosine", "rank_correlation")
            for m in ENCODER_METHODS
        ]
        rows.append([pattern, f"{here[0]['zeros']:.3f}", *cells])
    labels = [label for label, *_ in ENCODER_METHODS.values()]
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


STYLES = {
    "magnitude": ("#888888", "s", "-"),
    "SparseGPT": ("#d55e00", "^", "-"),
    "matched": ("#0072b2", "o", "-"),
    "recovered at 0.05": ("#009e73", "D", "-"),
    "recovered by 1 % at 0.05": ("#56b4e9", "x", "-."),
    "recovered at 0.15": ("#cc79a7", "v", "--"),
    "recovered at 0.3": ("#e69f00", "P", ":"),
}


def curve(everything: dict[str, Runs], path: Path) -> None:
    """Every measure by pattern, one shot and recovered: a row for each model, with the same axes."""
    figure = Figure(figsize=(13.5, 4.4 * len(everything)), layout="constrained")
    grid = figure.subplots(len(everything), len(MEASURES), squeeze=False, sharey="col")
    for (model, runs), row in zip(everything.items(), grid, strict=True):
        for axes, (measure, label) in zip(row, MEASURES.items(), strict=True):
            columns = columns_of(runs)
            for place, (name, (method, end)) in enumerate(columns.items()):
                aside = (place - (len(columns) - 1) / 2) / 10
                points = [
                    (i + aside, *spread(found))
                    for i, pattern in enumerate(PATTERNS)
                    if (found := values(runs, f"{pattern} {method} {end}", measure))
                ]
                if points:
                    x, y, deviation = zip(*points, strict=True)
                    error = deviation if len(runs) > 1 else None  # bars of no height would claim an exact value
                    colour, marker, line = STYLES[name]
                    style = {"color": colour, "marker": marker, "linestyle": line, "markersize": 5, "capsize": 3}
                    axes.errorbar(x, y, error, label=name, linewidth=1.2, **style)
            axes.set_xticks(range(len(PATTERNS)), PATTERNS)
            axes.axhline(0, color="#555555", linewidth=1)
            if measure != "exact_mean":
                axes.set_yscale("symlog", linthresh=1)
                axes.set_yticks([0, 0.5, 1, 3, 10, 30], ["0", "0.5", "1", "3", "10", "30"])
            seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
            axes.set(ylabel=label, title=f"{MODELS[model]} parameters, {seeds}")
            plain(axes)
        row[0].legend(frameon=False, fontsize=8, loc="upper left")
    for column, measure in zip(grid.T, MEASURES, strict=True):
        if measure != "exact_mean":
            ends = [axes.dataLim.intervaly for axes in column]
            column[0].set_ylim(min(low for low, _ in ends) - 0.1, 1.8 * max(high for _, high in ends))
    figure.savefig(path, dpi=110)


def encoder_plot(records: list[Record], path: Path) -> None:
    figure = Figure(figsize=(6.5, 4.4), layout="constrained")
    axes = figure.subplots()
    order = sorted(
        {r["pattern"] for r in records},
        key=lambda text: (
            -spread([r["cosine"] for r in records if r["pattern"] == text and r["method"] == "sparsegpt"])[0]
        ),
    )
    for method, (label, colour, marker) in ENCODER_METHODS.items():
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


def tables(folder: Path) -> str:
    """All tables as Markdown."""
    everything = {model: runs for model in (*MODELS, *SMALLER) if (runs := read(folder, model))}
    sections = {"The trained models": dense_table(everything)}
    for model in (model for model in MODELS if model in everything):
        runs, files = everything[model], f"{model}-*.jsonl"
        for measure, title in MEASURES.items():
            sections[f"{MODELS[model]} parameters: {title} ({files})"] = pattern_table(runs, measure)
        sections[f"{MODELS[model]} parameters as served: {MEASURES['packages_perplexity']} ({files})"] = served_table(
            runs
        )
        sections[f"{MODELS[model]} parameters at a served speed ({files})"] = speed_table(folder, runs)
        sections[f"{MODELS[model]} parameters: influence of layers ({files})"] = layer_table(runs)
    title = f"Six bits, 30 M parameters as served: {MEASURES['packages_perplexity']} (six-bits/30m-*.jsonl)"
    sections[title] = six_bits_table(read(folder / "six-bits", "30m"))
    sections["A mixture of experts (mixture-*.jsonl)"] = mixture_table(read(folder, "mixture"))
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
    curve({model: runs for model in MODELS if (runs := read(folder, model))}, folder / "curve.png")
    encoder_plot(lines(folder / "encoder.jsonl"), folder / "encoder.png")


if __name__ == "__main__":
    main()
