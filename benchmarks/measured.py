"""Draw the tables of the pages from the committed records.

    python benchmarks/measured.py            # say which pages are not what the records say
    python benchmarks/measured.py --write    # draw their tables anew

A page marks where a table stands: ``<!-- table: NAME -->``, the table, ``<!-- end -->``. Every name is a function here.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from slidesparse.gemm import cards as card_list
from slidesparse.gemm.speed_files import file_name
from slidesparse.offline.known_models import LAYERS, MODELS
from slidesparse.weights.pattern import Pattern
from slidesparse_bench.expert_sizes import DOWN, GATE_UP, LAYER
from slidesparse_bench.records import COPY, DENSE_VARIANT, ENGINE, PLAIN, Record, read_records
from slidesparse_bench.report.experts import MEMORY_RATE, operations, share
from slidesparse_bench.report.numbers import Comparison, comparisons, median_us, points
from slidesparse_bench.report.serve_numbers import Group, groups, timeline_bins
from slidesparse_bench.served_records import AGAIN, CONTROL, STOCK, ServeRecord, Step, TimelineRecord, read

sys.path.insert(0, str(Path(__file__).parent / "accuracy/published"))
import compare

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
H100 = RESULTS / "h100"
H200 = RESULTS / "h200"
DRAWN = ("accuracy", "cards", "measured", "quickstart", "recipe")
LOGS = ("hopper-kernel", "lift-kernel", "served-h100", "served-models", "served-tables", "rounding", "six-bits")
PAGES = (
    ROOT / "README.md",
    *(ROOT / f"docs/{name}.md" for name in DRAWN),
    *(ROOT / f"docs/log/{name}.md" for name in LOGS),
)
MARKED = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

PATTERNS = ("2:4", "4:6", "6:8")
TYPES = {"int8": "INT8", "fp8": "FP8", "bf16": "BF16"}
ANCHORS = {"torch": "torch", "Humming": "Humming", "this kernel": "ours, dense"}
"""Other dense layers -> what a column calls them."""

Engines = dict[tuple[str, int], Comparison]
"""(prefill or decode, tokens) -> the engines of one comparison."""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A table, its numbers to the right."""
    rule = "|".join("---" if i < text_columns else "---:" for i in range(len(head)))
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"


# -- engines -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def engines(name: str) -> Engines:
    """The whole engines of a record."""
    found = comparisons(read_records([H200 / "vllm" / name]))
    return {(one.case.layer, one.case.tokens): one for one in found if one.case.benchmark == ENGINE}


def timed(one: Comparison, variant: str) -> Record | None:
    """An engine of ours as it comes, or stock."""
    return one.best(variant if variant == DENSE_VARIANT else f"auto {variant}")


def speedup(one: Comparison | None, pattern: str) -> float | None:
    """Over stock dense, by medians of the rounds."""
    ours, dense = (None, None) if one is None else (timed(one, pattern), timed(one, DENSE_VARIANT))
    return None if ours is None or dense is None else median_us(dense) / median_us(ours)


def spread(one: Comparison) -> float:
    """Of dense timed twice, or between the rounds of the engine that repeats itself least: the larger one."""
    timings = [record.timing for record in one.records if record.timing is not None]
    again = max(record.noise or 0.0 for record in one.records)
    return max(again, *((timing.p80_us - timing.p20_us) / timing.median_us for timing in timings))


def percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.01 else f"{100 * value:.1f} %"


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def milliseconds(one: Comparison) -> str:
    dense = timed(one, DENSE_VARIANT)
    assert dense is not None
    value = median_us(dense) / 1e3
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


SEVEN = {"int8": "q7-int8-auto.jsonl", "fp8": "q7-fp8-auto.jsonl"}
LONG = [("prefill", m) for m in (4096, 16384, 65536)] + [("decode", m) for m in (64, 128, 256)]


def seven() -> str:
    """Qwen2.5-7B, both types."""
    rows = []
    for kind, tokens in LONG:
        cells = [f"{kind} {tokens}"]
        for name in SEVEN.values():
            one = engines(name).get((kind, tokens))
            if one is None:
                cells += ["-"] * (len(PATTERNS) + 2)
            else:
                cells += [milliseconds(one), *(shown(speedup(one, p)) for p in PATTERNS), percent(spread(one))]
        rows.append(cells)
    columns = [column for kind in ("INT8", "FP8") for column in (f"{kind} dense, ms", *PATTERNS, "spread")]
    return markdown(("", *columns), rows)


def graphs() -> str:
    """Qwen2.5-7B with larger CUDA graphs."""
    rows = []
    for (kind, tokens), one in engines("q7-int8-graphs.jsonl").items():
        cells = [shown(speedup(one, pattern)) for pattern in ("2:4", "4:6", "6:8")]
        rows.append([f"{kind.partition(',')[0]} {tokens}", milliseconds(one), *cells, percent(spread(one))])
    return markdown(("INT8, graphs up to 2048 tokens", "dense, ms", "2:4", "4:6", "6:8", "spread"), rows)


# -- served loads --------------------------------------------------------------------------------------------------

SERVED = {name: H200 / f"serve/qwen2.5-7b-{name}.jsonl" for name in ("int8", "fp8")}
NEWEST = {
    "7B": ("qwen2.5-7b-int8-rivals-0.33", "qwen2.5-7b-int8-6bit-0.33"),
    "32B": ("qwen2.5-32b-int8-6bit-0.33-again", "qwen2.5-32b-int8-control-0.33", "qwen2.5-32b-int8-6bit-0.33"),
}
"""Model -> its records with the newest vLLM. An engine is taken from the first that has it, and compared with the stock
engines of that record, or of the first where it has none."""

MIXTURE = H200 / "serve/qwen3-30b-a3b-12-layers.jsonl"
HTTP = H200 / "serve/qwen2.5-7b-int8-http.jsonl"
OTHERS = {H200 / "serve/llama-3-8b-int8.jsonl": "8B", H200 / "serve/llama-3.2-1b-int8.jsonl": "1B"}
"""Record -> its model."""

WITH_BANDS = {
    H100 / "serve/qwen2.5-7b-int8-control.jsonl": "7B",
    H100 / "serve/qwen2.5-14b-int8-4of6.jsonl": "14B",
}
"""Record -> its model, on an H100 with the newest kernel."""

ON_H100 = {
    H100 / "serve/qwen2.5-7b-int8.jsonl": "7B",
    H100 / "serve/llama-3-8b-int8.jsonl": "8B",
    H100 / "serve/qwen2.5-14b-int8.jsonl": "14B",
}
"""The same by an older kernel, hopper-4."""

ON_SLOW_HOST = {
    H100 / "serve/qwen2.5-7b-fp8.jsonl": "7B in FP8",
    H100 / "serve/llama-3.2-3b-int8.jsonl": "3B in INT8",
    H100 / "serve/bitnet-2b-int8.jsonl": "BitNet-2B in INT8",
}
"""And of a machine whose host kept GPUs waiting."""

WITH_HALVES = {
    H100 / "serve/qwen2.5-7b-int8-halves.jsonl": "7B in INT8",
    H100 / "serve/qwen2.5-14b-int8-2gpu.jsonl": "14B in INT8 on two GPUs",
    H100 / "serve/qwen2.5-7b-bf16.jsonl": "7B in BF16",
}
"""And of one with hopper-6, of which two blocks may share a large tile."""

BESIDE_CONTROL = {
    H100 / "serve/qwen2.5-7b-int8-control.jsonl": "INT8, newest kernel",
    H100 / "serve/qwen2.5-7b-int8.jsonl": "INT8, `hopper-4`",
    H100 / "serve/qwen2.5-7b-fp8.jsonl": "FP8, `hopper-4`",
}
"""Records of an H100 with a control."""

TIMELINE = H200 / "serve/qwen2.5-7b-int8-timeline.jsonl.gz"
UNIFORM = ("6:8", "4:6", "2:4")
SIX_BITS = "hopper-6bit"
IN_SIX_BITS = {f"{pattern} {SIX_BITS}": f"{pattern}, six bits" for pattern in UNIFORM}
"""Engine that was told to take them -> what it is called here."""

(AT_6OF8, NAME_6OF8), *SPARSER = IN_SIX_BITS.items()
BY_AUTO = {CONTROL: CONTROL, "plan": NAME_6OF8, **dict(SPARSER)}
EIGHT_OR_SIX = {"6:8": "6:8", AT_6OF8: NAME_6OF8}
OURS = (CONTROL, *UNIFORM)
PUBLISHED = RESULTS / "accuracy/published/qwen2.5-coder-0.5b.jsonl"
SMALLER = RESULTS / "accuracy/published/smollm2-135m.jsonl"

RIVALS = {
    "int4 nearest": "INT4, groups of 128, to nearest",
    "int4 gptq, asymmetric": "INT4, groups of 128 with zero points, GPTQ",
}
LARGER, SMALLER_BY_GPU = (PUBLISHED.with_name(f"{name}.jsonl") for name in ("qwen2.5-coder-1.5b", "smollm2-135m-h200"))
LONGEST = {
    PUBLISHED: ("0.5B", {"6:8": "recover 20M", "4:6": "recover 100M", "2:4": "recover 40M"}),
    LARGER: ("1.5B", {"6:8": "recover 12M", "4:6": "recover 12M"}),
}
"""Record -> its model, and by pattern what ends the tag of the one that was trained on longest, if there is one."""

GRAPHS = f"{STOCK}, graphs to 1024"
LOADS = {
    "burst": "burst: 16 prompts of 1024 tokens",
    "mixed": "mixed load: 1000 requests",
    "decode 64 at 80": "decoding, a step of 64 sequences",
}
"""Workload -> what it is called here."""

HEADLINE = {
    "burst": "16 prompts of 1024 tokens",
    "mixed": "1000 mixed requests, GPU time",
    "decode 64 at 80": "decoding 64 sequences",
}
"""README's words."""

STOCK_RIVALS = ("stock FP8", "stock W4A8", "stock W4A16")

MIXTURE_LOADS = {
    "burst": LOADS["burst"],
    "mixed": LOADS["mixed"],
    **{f"decode {n} at 80": f"decoding, a step of {n} sequences" for n in (16, 64, 256)},
}
NEWEST_LOADS = MIXTURE_LOADS | {
    "decode 1 at 80": "decoding, one sequence",
    "decode 8 at 80": "decoding, a step of 8 sequences",
}
MOST = "arrivals at 80%"
WAITS = {"first": "to the first token", "between": "between tokens"}

SPARSE_GEMM = "sparse_gemm"


@lru_cache
def group_of(path: Path) -> Group:
    """The engines of a record of one model and type, with what they served."""
    (group,) = groups(read(ServeRecord, [path]))
    return group


def served_group(dtype: str) -> Group:
    """The engines of a type that served, with what they served."""
    return group_of(SERVED[dtype])


def started(dtype: str, engine: str) -> datetime:
    """When an engine was started."""
    return datetime.fromisoformat(served_group(dtype).records[engine]["mixed"].started)


def nearer_stock(dtype: str, engine: str) -> str:
    """The stock engine that was started nearer in time: another machine served the second one."""
    return min((STOCK, AGAIN), key=lambda stock: abs(started(dtype, stock) - started(dtype, engine)))


def served_speedup(dtype: str, engine: str, load: str) -> float:
    """Over the nearer stock engine."""
    over = served_group(dtype).over(nearer_stock(dtype, engine), engine, load)
    assert over is not None
    return over


Measure = Callable[[Group, str, str], float]


def newest_ms(model: str, engine: str, load: str, measure: Measure) -> tuple[float, float] | None:
    """Milliseconds of an engine in the newest vLLM, and how many times faster it is than the fastest stock INT8; None
    where no record has it."""
    found = [group_of(H200 / f"serve/{name}.jsonl") for name in NEWEST[model]]
    for group in found:
        if load in group.records.get(engine, ()):
            other = group if STOCK in group.records else found[0]
            stock = [measure(other, one, load) for one in (STOCK, AGAIN) if load in other.records.get(one, ())]
            own = measure(group, engine, load)
            return 1e3 * own, min(stock) / own
    return None


def headline_speedup(engine: str, load: str, model: str = "7B") -> float | None:
    """Over stock INT8 in the newest vLLM; of the mixed load what the GPU computes, since hosts kept it waiting."""
    found = newest_ms(model, engine, load, _computing if load == "mixed" else _undisturbed)
    return None if found is None else found[1]


def served_headline() -> str:
    """README: engines under load."""
    rows = []
    for model, load in (
        ("7B", "burst"),
        ("7B", "mixed"),
        ("7B", "decode 64 at 80"),
        ("32B", "mixed"),
        ("32B", "decode 64 at 80"),
    ):
        found = (headline_speedup(engine, load, model) for engine in (*STOCK_RIVALS, *IN_SIX_BITS))
        rows.append([f"{model}, {HEADLINE[load]}", *("-" if one is None else f"{one:.2f}x" for one in found)])
    return markdown(("over stock INT8", *STOCK_RIVALS, *UNIFORM), rows)


def served_newest(model: str, columns: Mapping[str, str], *loads: str) -> str:
    """Engines of a model in the newest vLLM: milliseconds, and over the fastest stock INT8."""
    rows = []
    for load in loads:
        measures: dict[str, Measure] = {NEWEST_LOADS[load]: _undisturbed}
        if load == "mixed":
            measures["of it the GPU computes"] = _computing
        for words, measure in measures.items():
            stock = [found[0] for one in (STOCK, AGAIN) if (found := newest_ms(model, one, load, measure))]
            cells = [
                "-" if one is None else f"{_ms(one[0])} ({one[1]:.2f})"
                for one in (newest_ms(model, engine, load, measure) for engine in columns)
            ]
            rows.append([f"{words}, ms", _ms(min(stock)), *cells])
    return markdown((f"{model}, INT8", STOCK, *columns.values()), rows)


def served() -> str:
    """Every load: milliseconds, and over the nearer stock engine."""
    rows = []
    for load, words in LOADS.items():
        for dtype in SERVED:
            group = served_group(dtype)
            engines = (STOCK, AGAIN, GRAPHS, *OURS)
            text = {engine: _ms(1e3 * (group.seconds(engine, load) or 0.0)) for engine in engines}
            ours = [f"{text[engine]} ({served_speedup(dtype, engine, load):.2f})" for engine in OURS]
            rows.append([f"{words}, ms", dtype.upper(), text[STOCK], text[AGAIN], text[GRAPHS], *ours])
    return markdown(("Qwen2.5-7B", "type", STOCK, AGAIN, GRAPHS, *OURS), rows, 2)


def served_eagle() -> str:
    """Answers of 256 tokens with EAGLE-3's drafts: tokens a second in stock and at 6:8."""
    group, rows = group_of(H200 / "serve/qwen2.5-7b-int8-eagle-0.33.jsonl"), []
    for sequences in (1, 8, 64):
        seconds = [group.seconds(engine, f"answers {sequences}") or 0.0 for engine in (STOCK, AT_6OF8)]
        stock, ours = (256 * sequences / one for one in seconds)
        rows.append([str(sequences), f"{stock:.0f}", f"{ours:.0f} ({ours / stock:.2f})"])
    return markdown(("sequences", STOCK, NAME_6OF8), rows)


def served_targets() -> str:
    """The mixed load, over what may be blamed for a gain: stock, stock with as many graphs, the control."""
    rows = []
    for dtype in SERVED:
        group = served_group(dtype)
        for pattern in ("6:8", "4:6", "2:4"):
            over = (group.over(GRAPHS, pattern, "mixed"), group.over(CONTROL, pattern, "mixed"))
            frugal = _joules(group, AGAIN) / _joules(group, pattern)
            ratios = (served_speedup(dtype, pattern, "mixed"), *over, frugal)
            rows.append([dtype.upper(), pattern, *(f"{ratio or 0.0:.2f}" for ratio in ratios)])
    head = ("over stock", "over stock with graphs to 1024", "over the control", "tokens a joule, over stock")
    return markdown(("mixed load", "pattern", *head), rows, 2)


def _joules(group: Group, engine: str) -> float:
    """What the mixed load took; every engine was asked for the same tokens."""
    power = group.records[engine]["mixed"].power
    assert power is not None
    return power.energy_j


def served_mixture() -> str:
    """A mixture under load: milliseconds, and over the fastest stock engine of each load."""
    stock: dict[str, tuple[Group, str]] = {}
    ours: dict[str, tuple[Group, str]] = {}
    for group in groups(read(ServeRecord, [MIXTURE])):
        for engine, served in group.records.items():
            dtype = served["mixed"].key.dtype.upper()
            if engine.startswith(STOCK):
                stock[f"{STOCK}, {dtype}{engine.removeprefix(STOCK)}"] = group, engine
            else:
                ours[f"{engine}, {dtype}"] = group, engine
    rows = _load_rows([*stock.values(), *ours.values()], MIXTURE_LOADS, len(stock))
    return markdown(("Qwen3-30B-A3B, 12 of 48 layers", *stock, *ours), rows)


def served_quick(path: Path, title: str) -> str:
    """What ``--quick`` asks, of engines alone: milliseconds, and over the fastest of the stock engines."""
    group, engines, stock = _stock_first(path)
    return markdown((title, *engines), _load_rows([(group, one) for one in engines], LOADS, stock))


def served_models(models: Mapping[Path, str], title: str, columns: Sequence[str], *waited: str) -> str:
    """The same of several models: of the stock engines the fastest of each row, and some of ours."""
    rows = []
    for path, model in models.items():
        group, engines, stock = _stock_first(path)
        for label, *cells in _load_rows([(group, one) for one in engines], LOADS, stock, *waited):
            shown = dict(zip(engines[stock:], cells[stock:], strict=True))
            rows.append([f"{model}, {label}", min(cells[:stock], key=float), *(shown.get(one, "-") for one in columns)])
    return markdown((title, STOCK, *columns), rows)


def over_control() -> str:
    """What patterns gain on an H100 beyond the control."""
    rows = []
    for path, label in BESIDE_CONTROL.items():
        group = group_of(path)
        for pattern in filter(group.engines.__contains__, UNIFORM):
            burst, mixed, decode = (group.over(CONTROL, pattern, load) for load in LOADS)
            computing = _computing(group, CONTROL) / _computing(group, pattern)
            rows.append([label, pattern, *map(shown, (burst, mixed, computing, decode))])
    head = ("burst", "mixed load", "of it the GPU computes", "decoding 64 sequences")
    return markdown(("over the control", "pattern", *head), rows, 2)


def served_six_bits() -> str:
    """Two engines of a machine, beside the faster stock one of another."""
    group = group_of(H100 / "serve/qwen2.5-7b-int8-6bit.jsonl")
    other = group_of(H100 / "serve/qwen2.5-7b-int8-control.jsonl")
    rows = []
    for load, words in LOADS.items():
        ms = [1e3 * (other.seconds(engine, load) or 0.0) for engine in (STOCK, AGAIN)]
        ms += [1e3 * (group.seconds(engine, load) or 0.0) for engine in ("6:8", "6:8 hopper-6bit")]
        rows.append([f"{words}, ms", *map(_ms, (min(ms[:2]), *ms[2:]))])
    return markdown(("7B in INT8 at 6:8", "stock, another machine", "eight bits", "six bits"), rows)


def served_forms(models: Mapping[str, str], columns: Mapping[str, str]) -> str:
    """Models of some records of an H200, with some engines of ours by other names; stock is the fastest of each row."""
    rows = []
    for name, model in models.items():
        group, engines, _ = _stock_first(H200 / f"serve/{name}.jsonl")
        measures = [
            (words, load, _undisturbed) for load, words in MIXTURE_LOADS.items() if load in group.records[STOCK]
        ]
        measures.insert(2, ("of it the GPU computes", "mixed", _computing))
        for words, load, measure in measures:
            asked = [engine for engine in engines if load in group.records[engine]]
            stock = sum(engine.startswith(STOCK) for engine in asked)
            cells = _over_fastest([1e3 * measure(group, engine, load) for engine in asked], stock)
            shown = dict(zip(asked[stock:], cells[stock:], strict=True))
            fastest = min(cells[:stock], key=float)
            rows.append([f"{model}, {words}, ms", fastest, *(shown.get(one, "-") for one in columns)])
    return markdown(("INT8", STOCK, *columns.values()), rows)


def _undisturbed(group: Group, engine: str, load: str) -> float:
    """Seconds: the median, and of decoding the fastest repeat."""
    seconds = group.records[engine][load].seconds
    return min(seconds) if load.startswith("decode") else statistics.median(seconds)


def _stock_first(path: Path) -> tuple[Group, list[str], int]:
    """The engines of a record, stock ones first, and how many these are."""
    group = group_of(path)
    engines = sorted(group.engines, key=lambda engine: not engine.startswith(STOCK))
    return group, engines, sum(engine.startswith(STOCK) for engine in engines)


def _load_rows(
    engines: Sequence[tuple[Group, str]], loads: Mapping[str, str], stock: int, *waited: str
) -> list[list[str]]:
    """Rows of loads, over the fastest of the first few engines; of the mixed one, and of others in which the host kept
    the GPU waiting, what of it the GPU computes."""
    rows = []
    for load, words in loads.items():
        ms = [1e3 * (group.seconds(engine, load) or 0.0) for group, engine in engines]
        rows.append([f"{words}, ms", *_over_fastest(ms, stock)])
        if load in ("mixed", *waited):
            computing = [1e3 * _computing(group, engine, load) for group, engine in engines]
            rows.append(["of it the GPU computes, ms", *_over_fastest(computing, stock)])
    return rows


def _over_fastest(values: Sequence[float], stock: int, digits: int | None = None) -> list[str]:
    """Milliseconds, and how many times faster than the fastest of the first few; with so many digits, else by size."""
    text = [_ms(value) if digits is None else f"{value:.{digits}f}" for value in values]
    ratios = [f"{shown} ({min(values[:stock]) / value:.2f})" for shown, value in zip(text, values, strict=True)]
    return [*text[:stock], *ratios[stock:]]


def _computing(group: Group, engine: str, load: str = "mixed") -> float:
    """Seconds of a load in which any kernel ran: a slow host adds nothing to them."""
    power = group.records[engine][load].power
    assert power is not None
    return (group.seconds(engine, load) or 0.0) * power.busy


def served_http() -> str:
    """Engines asked over HTTP: medians, and what users waited for, over the stock engine that was fastest there."""
    group, engines, stock = _stock_first(HTTP)
    rows = _load_rows([(group, one) for one in engines], {load: LOADS[load] for load in ("burst", "mixed")}, stock)
    rows += _waits(group, engines, MOST, stock)
    return markdown(("Qwen2.5-7B, INT8, over HTTP", *engines), rows)


def served_http_graphs(name: str, again: str | None = None) -> str:
    """The mixed load over HTTP with graphs of up to 2048 tokens, over stock with as many; engines may run again."""
    group, names, stock = _stock_first(H200 / "serve" / name)
    engines = [(group, one) for one in names]
    if again is not None:
        later, repeated, _ = _stock_first(H200 / "serve" / again)
        engines += [(later, one) for one in repeated]
        names = [*names, *(f"{one} again" for one in repeated)]
    rows = _load_rows(engines, {"mixed": LOADS["mixed"]}, stock)
    for percentile in ("p50", "p99"):
        waits = [getattr(group.records[one]["mixed"].between, f"{percentile}_ms") for group, one in engines]
        rows.append([f"between tokens, {percentile}, ms", *_over_fastest(waits, stock, 1)])
    return markdown(("Qwen2.5-7B, INT8, over HTTP, graphs to 2048 tokens", *names), rows)


def _waits(group: Group, engines: Sequence[str], load: str, stock: int) -> list[list[str]]:
    """Rows of what users waited for when requests come at random, over the best of the first few engines."""
    rows = []
    for measure, percentile in product(WAITS, ("p50", "p99")):
        waits = [getattr(getattr(group.records[one][load], measure), f"{percentile}_ms") for one in engines]
        words = f"{load} of what stock takes: {WAITS[measure]}, {percentile}, ms"
        rows.append([words, *_over_fastest(waits, stock, 1)])
    return rows


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.0f}"


def mixed_steps() -> str:
    """Steps of the mixed load under the profiler: what the GPU does, and how the host fares beside vLLM's own work."""
    rows = []
    for (name, most), records in timeline_bins(read(TimelineRecord, [TIMELINE])).items():
        if most in (1024, 2048, 4096):
            lead = [f"{most // 2 + 1} to {most}", name.split()[-1]]
            rows.append([*lead, *_step_cells([record.step for record in records])])
    measures = (
        "GPU busy, ms",
        "of it sparse GEMMs",
        "GPU busy",
        "host, ms",
        "`forward`, ms",
        "`preprocess`, ms",
        "ratio",
    )
    return markdown(("tokens", "engine", *measures), rows, 2)


def _step_cells(found: Sequence[Step]) -> list[str]:
    def middle(measure: Callable[[Step], float]) -> float:
        return statistics.median(map(measure, found))

    sparse = middle(lambda step: sum(us for name, us in step.names_us.items() if SPARSE_GEMM in name))
    forward, preprocess = (middle(lambda step, part=part: step.scopes_us[part]) for part in ("forward", "preprocess"))
    return [
        f"{middle(lambda step: step.busy_us) / 1e3:.1f}",
        f"{sparse / 1e3:.1f}",
        f"{100 * middle(lambda step: step.busy_us / step.gpu_us):.0f} %",
        f"{middle(lambda step: step.host_us) / 1e3:.1f}",
        f"{forward / 1e3:.1f}",
        f"{preprocess / 1e3:.1f}",
        f"{forward / preprocess:.1f}",
    ]


# -- linears -------------------------------------------------------------------------------------------------------

TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TUNED = (("int8", "Qwen2.5-7B"), ("int8", "Llama-3-8B"), ("int8", "Qwen2.5-14B"), ("fp8", "Qwen2.5-7B"))
TUNED_H100 = (("int8", "Qwen2.5-7B"), ("int8", "Llama-3-8B"), ("fp8", "Qwen2.5-7B"))


def layers(gpu: str, tuned: Sequence[tuple[str, str]]) -> str:
    """The four linears of a block, by the tables that ship; that of the newest kernel has the plain name."""
    (path,) = (ROOT / "src").rglob(file_name(gpu))
    tables = [json.loads(one.read_text()) for one in (path, *sorted(path.parent.glob(f"{path.stem}-*.json")))]
    rows = []
    for dtype, model in tuned:
        table, found = next(filter(None, (_of_model(table, dtype, model) for table in tables)))
        older = "" if table is tables[0] else f", `{table['libraries']['hopper'].split()[-1]}`"
        known = [name for name in found[0]["us"] if name.startswith("hopper")]
        first = (dtype, model) == tuned[0]
        known.sort(key=lambda name: name.startswith(SIX_BITS))
        names = [name for name in known if name.split()[1] in UNIFORM and (first or not name.startswith(SIX_BITS))]
        for name in names:
            lead = [f"{TYPES[dtype]}{older}", model] if name == names[0] else ["", ""]
            pattern = f"{name.split()[1]}, six bits" if name.startswith(SIX_BITS) else name.split()[1]
            rows.append([*lead, pattern, *(_share(found, name, tokens) for tokens in TOKENS)])
    return markdown(("type", "model", "pattern", *(f"{m}" for m in TOKENS)), rows, 3)


def _of_model(table: dict[str, Any], dtype: str, model: str) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """A table and its layers of a model, if it has all of them."""
    known = {(one["dtype"], one["out"], one["columns"]): one for one in table["layers"]}
    found = [known.get((dtype, *shape)) for shape in MODELS[model]]
    return None if None in found else (table, [one for one in found if one is not None])


def _share(found: Sequence[dict[str, Any]], name: str, tokens: int) -> str:
    if any(tokens not in one["tokens"] for one in found):
        return "-"
    dense, ours = ([one["us"][key][one["tokens"].index(tokens)] for one in found] for key in (DENSE_VARIANT, name))
    return "-" if None in dense or None in ours else f"{sum(dense) / sum(ours):.2f}"


SIX_BITS_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def six_bits() -> str:
    """What values of six bits take of the time of eight, each by its fastest tile."""
    found = [json.loads(line) for line in (H100 / "hopper-six-bits.jsonl").read_text().splitlines()[1:]]
    best: dict[tuple[str, int], tuple[float, float]] = {}
    for case in (one for one in found if one["pattern"] == "6:8"):
        six = [us for tile, us in case["us"].items() if tile.endswith(" 6 bits")]
        eight = [us for tile, us in case["us"].items() if not tile.endswith(" 6 bits")]
        best[case["layer"], case["tokens"]] = min(six), min(eight)
    layers = {"gate and up": ("gate_up",), "down": ("down",), "all four linears": LAYERS}
    rows = []
    for words, names in layers.items():
        pairs = [[best[name, tokens] for name in names] for tokens in SIX_BITS_TOKENS]
        rows.append([words, *(f"{sum(six for six, _ in one) / sum(eight for _, eight in one):.2f}" for one in pairs)])
    return markdown(("Qwen2.5-7B, INT8, 6:8", *(f"{m}" for m in SIX_BITS_TOKENS)), rows)


FORMS = {"six bits": "metadata, six bits", "six bits, counts": "counts, six bits", "eight bits, counts": "counts"}


def _six_bit_forms(what: str) -> list[dict[str, Any]]:
    lines = (H200 / "hopper/bundles-six-bits.jsonl").read_text().splitlines()[1:]
    return [row for row in map(json.loads, lines) if row["what"] == what]


def forms_of_linears() -> str:
    """What the four linears take in other forms, over eight bits with metadata."""
    found = [row for row in _six_bit_forms("product") if row["pattern"] == "6:8"]
    sums: dict[int, dict[str, float]] = {}
    for row in found:
        own = sums.setdefault(row["tokens"], dict.fromkeys(row["us"], 0.0))
        for form, us in row["us"].items():
            own[form] += us
    rows = [
        [words, *(f"{sums[tokens][form] / sums[tokens]['metadata']:.2f}" for tokens in sorted(sums))]
        for words, form in FORMS.items()
    ]
    return markdown(("Qwen2.5-7B, INT8, 6:8", *map(str, sorted(sums))), rows)


def forms_of_experts() -> str:
    """What a layer of experts takes in other forms, over eight bits with counts."""
    header = ("INT8", "tokens", "eight bits, us a layer", "six bits", "six bits without counts")
    rows = []
    for row in (row for row in _six_bit_forms("experts") if row["layer"] == "layer"):
        us, forms = row["us"], ("counts, six bits", "metadata, six bits")
        shares = (f"{us[form] / us['counts']:.2f}" for form in forms)
        rows.append([row["pattern"], str(row["tokens"]), f"{us['counts']:.0f}", *shares])
    return markdown(header, rows)


def published_records(path: Path = PUBLISHED) -> dict[str, dict[str, Any]]:
    """Tag -> record of a judged model; the last of a tag counts."""
    return {one["tag"]: one for one in map(json.loads, path.read_text().splitlines())}


def rise(one: dict[str, Any], dense: dict[str, Any]) -> str:
    """How much larger the perplexity of held-out code is than the dense model's, with its paired standard error."""
    mean, error = compare.paired(one["code"]["loss"], dense["code"]["loss"])
    return f"{100 * math.expm1(mean):+.1f} ± {100 * math.exp(mean) * error:.1f} %"


def published_rounding() -> str:
    """What rounding adds to a pattern, of checkpoints as they are served."""
    found = published_records(SMALLER)
    pruned = found["6:8 sparsegpt bf16"], found["6:8 sparsegpt bf16, again"]  # whose windows FP8 was calibrated on
    rows = [
        [f"{one}, BF16", rise(found[f"{one} sparsegpt bf16"], found["dense"]), "-"] for one in ("2:4", "4:6", "6:8")
    ]
    for name, tag, over in (("INT8", "int8", 0), ("six bits", "6bit", 0), ("FP8", "fp8", 1)):
        one = found[f"6:8 sparsegpt {tag}"]
        rows.append([f"6:8, {name}", rise(one, found["dense"]), rise(one, pruned[over])])
    return markdown(("SparseGPT", "perplexity of code over dense", "over the same in BF16"), rows)


def published_rivals() -> str:
    """What else makes a published model smaller or faster, beside patterns; all in one shot, on one text."""
    found = published_records(SMALLER)
    rows = {f"{one}, SparseGPT": found[f"{one} sparsegpt bf16"] for one in ("14:16", "6:8", "4:6", "2:4")}
    rows |= {RIVALS.get(tag, tag): one for tag, one in found.items() if tag in RIVALS or tag.startswith("fewer")}
    ordered = sorted(rows.items(), key=lambda row: sum(row[1]["code"]["loss"]))
    return markdown(("", "perplexity of code"), [[name, rise(one, found["dense"])] for name, one in ordered])


def published_loss() -> str:
    """README: what patterns cost published models, in one shot and recovered."""
    rows = []
    for path, (model, recovered) in LONGEST.items():
        found = published_records(path)
        for pattern, longest in recovered.items():
            both = [found.get(f"{pattern} {what}") for what in ("match", longest)]
            rises = [rise(one, found["dense"]) if one else "-" for one in both]
            rows.append([model, pattern, *rises, *(solved(one) if one else "-" for one in (found["dense"], *both))])
    heads = ("perplexity, one shot", "recovered", "HumanEval, dense", "one shot", "recovered")
    return markdown(("model", "pattern", *heads), rows, 2)


def solved(one: dict[str, Any]) -> str:
    """How many problems of HumanEval ten samples solve, in percent."""
    share = one["humaneval"]["sampled"]
    return f"{compare.points(share, share)} %"


def recipe() -> str:
    """The recipe: what patterns cost a published model before and after it was trained on."""
    found, rows = published_records(), []
    for pattern, longest in LONGEST[PUBLISHED][1].items():
        both = [found[f"{pattern} match"], found[f"{pattern} {longest}"]]
        rows.append([pattern, longest.split()[1], *(rise(one, found["dense"]) for one in both), *map(solved, both)])
    heads = ("perplexity of code, after step 2", "after step 3", "HumanEval, after step 2", "after step 3")
    return markdown(("pattern", "tokens", *heads), rows)


def published_models(path: Path = PUBLISHED) -> str:
    """The page on accuracy: all models that were judged, beside the dense one, on the same problems."""
    found = published_records(path)
    dense, rows = found["dense"], []
    for tag, one in sorted(found.items(), key=lambda item: sum(item[1]["code"]["kl"])):
        if tag.startswith("plan ") or tag.endswith((" rotate", " reorder", " chats")):  # of the log
            continue
        kl = f"{sum(one['code']['kl']) / len(one['code']['kl']):.3f}"
        cells = compare.cells(one, dense)[4:]
        rows.append([tag, "-" if one is dense else rise(one, dense), kl, *cells])
    heads = ("model", "perplexity of code", "KL", "HumanEval, greedy", "of ten samples", "exact answers")
    judged = [i for i in range(len(heads)) if any(row[i] != "-" for row in rows)]
    return markdown([heads[i] for i in judged], [[row[i] for i in judged] for row in rows])


def rounding() -> str:
    """What rounding alone takes from a published model, by part; the last of a tag counts."""
    lines = (RESULTS / "accuracy/published/rounding.jsonl").read_text().splitlines()
    found = {one["tag"]: one["over_float"] for one in map(json.loads, lines)}
    rows = [
        [tag, f"{one['kl']:.1f} ± {one['kl_error']:.1f}", f"{one['percent']:+.1f} ± {one['error']:.1f} %"]
        for tag, one in found.items()
    ]
    return markdown(("rounded", "divergence", "perplexity"), rows)


def six_bits_encoder() -> str:
    """What rounding to six bits costs the encoder of the demo."""
    found = json.loads((RESULTS / "accuracy/six-bits-encoder.json").read_text())["rows"]
    rows = [[one["pattern"], *(f"{one[name]:.3f}" for name in ("float", "absmax", "6bit"))] for one in found]
    return markdown(("pattern", "pruned, float32", "INT8", "INT8, six bits"), rows)


def decoding_us(name: str) -> dict[tuple[str, int, str], float]:
    """(type, sequences, variant) -> microseconds of a block, in a record of benchmarks/decoding_linears.py."""
    lines = (H200 / name).read_text().splitlines()[1:]
    return {(one["dtype"], one["tokens"], one["variant"]): one["us"] for one in map(json.loads, lines)}


def decoding() -> str:
    """The linears of decoding in one CUDA graph."""
    times = decoding_us("decoding-linears.jsonl")
    patterns = ("2:4", "4:6", "6:8", "8:10")
    rows = []
    for dtype, tokens in product(("int8", "fp8"), (16, 64, 256)):
        dense = times[dtype, tokens, DENSE_VARIANT]
        gains = [f"{dense / times[dtype, tokens, pattern]:.2f}" for pattern in patterns]
        rows.append([TYPES[dtype], str(tokens), f"{dense:.1f}", *gains])
    return markdown(("type", "sequences", "dense, us a block", *patterns), rows)


def decoding_anchors() -> str:
    """What a better dense kernel gives there, and what fewer bytes give on top of it."""
    times = decoding_us("decoding-anchors.jsonl")
    others = {f"dense, {name}": label for name, label in ANCHORS.items()}
    patterns = ("6:8", "4:6", "2:4")
    rows = []
    for dtype, tokens in product(("int8", "fp8"), (16, 64, 256)):
        dense = times[dtype, tokens, DENSE_VARIANT]
        names = (*others, *patterns)
        found = (times.get((dtype, tokens, name)) for name in names)
        gains = ["-" if us is None else f"{dense / us:.2f}" for us in found]
        own = times[dtype, tokens, "dense, this kernel"]
        bytes_alone = [f"{own / times[dtype, tokens, pattern]:.2f}" for pattern in patterns]
        rows.append([TYPES[dtype], str(tokens), f"{dense:.1f}", *gains, *bytes_alone])
    over_own = (f"{pattern} over ours, dense" for pattern in patterns)
    head = ("type", "sequences", "vLLM, us a block", *others.values(), *patterns, *over_own)
    return markdown(head, rows)


def gemm() -> str:
    """GEMMs alone, many tokens."""
    found = comparisons(read_records([H200 / "hopper-gemm.jsonl"]))
    at = {(p.dtype, p.tokens): p for p in points(found, "gemm") if p.model == "Qwen2.5-7B"}
    patterns = ("2:4", "4:6", "6:8", "8:10", "4:6@50%", "2:4@50%")
    rows = []
    for dtype in TYPES:
        point = at[dtype, 16384]
        rows.append([TYPES[dtype], f"{point.tops:.0f}", *(shown(point.speedup(pattern)) for pattern in patterns)])
    return markdown(("type", "fastest dense, TOPS", *patterns), rows)


@lru_cache(maxsize=4)
def experts_of(what: str) -> dict[tuple[str, int], Comparison]:
    """(type, tokens) -> what was measured of Qwen3-30B-A3B's experts, tokens routed by chance."""
    found = comparisons(read_records([H200 / "grouped.jsonl"]))
    return {
        (one.case.dtype, one.case.tokens): one
        for one in found
        if one.case.model == "Qwen3-30B-A3B" and one.case.layer == f"{what}, balanced" and one.best(DENSE_VARIANT)
    }


def expert_layers() -> str:
    """Whole layers of experts, over vLLM's own."""
    patterns, rows = ("2:4", "4:6", "6:8"), []
    for (dtype, tokens), one in sorted(
        experts_of(LAYER).items(), key=lambda item: (list(TYPES).index(item[0][0]), item[0][1])
    ):
        dense = one.best(DENSE_VARIANT)
        assert dense is not None
        cells = [f"{median_us(dense):.0f}", *(shown(share(one, pattern, DENSE_VARIANT)) for pattern in patterns)]
        rows.append([TYPES[dtype], str(tokens), *cells])
    return markdown(("type", "tokens", "vLLM, us a layer", *patterns), rows)


def expert_products() -> str:
    """One launch for all experts: rates, and what they are shares of."""
    rows = []
    for what in (GATE_UP, DOWN):
        for tokens in (64, 16384):
            for name in ("vLLM", "6:8", "4:6", "2:4"):
                one = experts_of(what)["int8", tokens]
                record = one.best(DENSE_VARIANT if name == "vLLM" else name)
                assert record is not None
                us, plain = median_us(record), share(one, name, f"{PLAIN} {name}")
                rate, tops = record.n_bytes / us * 1e6, operations(one) / us / 1e6
                shares = ["-" if plain is None else percent(plain), percent(rate / MEMORY_RATE)]
                rows.append([what, str(tokens), name, f"{us:.1f}", f"{rate / 1e12:.2f}", f"{tops:.0f}", *shares])
    return markdown(("INT8", "tokens", "weights", "us", "TB/s", "TOPS", "of the plain rate", "of 4.8 TB/s"), rows)


LIFTING = {
    "copy": COPY,
    "2:4": "lift 2:4",
    "4:6": "lift 4:6",
    "6:8": "lift 6:8",
    "4:6@50%": "lift 4:6@50%",
    "RMSNorm, 6:8": "rms_norm lift 6:8",
    "add + RMSNorm, 6:8": "add_rms_norm lift 6:8",
    "SiLU * up, 6:8": "silu_mul lift 6:8",
}
"""Column -> variant."""


def lifting() -> str:
    """Quantise + lift of many tokens: the rate at which the kernels move their bytes, beside a copy."""
    found = comparisons(read_records([H200 / "kernels.jsonl"]))
    many = [one for one in found if one.case.tokens >= 4096]
    rows = []
    for one in sorted(many, key=lambda one: (one.case.dtype != "int8", one.case.in_features, one.case.tokens)):
        records = [one.best(variant) for variant in LIFTING.values()]
        rates = ["-" if one is None else f"{one.n_bytes / median_us(one) / 1e6:.1f}" for one in records]
        rows.append([TYPES[one.case.dtype], str(one.case.in_features), str(one.case.tokens), *rates])
    return markdown(("TB/s", "K", "tokens", *LIFTING), rows)


def demo() -> str:
    """Every pattern on the demonstration's encoder."""
    rows: dict[str, dict[str, Any]] = {}
    for row in json.loads((RESULTS / "demo/minilm.json").read_text())["rows"]:
        if "@" not in row["pattern"]:  # partial patterns were deleted
            rows.setdefault(row["pattern"], {})[row["dtype"]] = row
    cells = []
    for pattern, types in rows.items():
        int8 = types["int8"]
        fidelity = [f"{types[dtype]['fidelity']:.3f}" for dtype in ("int8", "fp8")]
        exact = "every bit" if int8["exact"] else "no"
        zeros = f"{100 * float(1 - Pattern.parse(pattern).density):.0f} %"
        size = f"{100 * int8['relative_bytes']:.0f} %"
        cells.append([pattern, zeros, *fidelity, size, f"{int8['ideal_speedup']:.2f}x", exact])
    head = ("pattern", "zeros", "cosine, INT8", "cosine, FP8", "bytes of dense 8-bit", "ideal speed-up")
    return markdown((*head, "INT8 equal to dense"), cells)


def cpu() -> str:
    """Packing and pruning on a CPU."""
    record = json.loads((RESULTS / "cpu.jsonl").read_text().splitlines()[-1])
    pack, prune = record["pack_4096x14336_int8_s"], record["prune_1b"]
    rows = [
        ["pack a 4096 x 14336 INT8 weight at 6:8", f"{pack['median']:.2f} s"],
        ["`prune` Llama-3.2-1B's shapes to 6:8 INT8, start-up included", f"{prune['seconds']:.0f} s"],
        ["its peak memory", f"{prune['peak_gb']:.2f} GB"],
    ]
    return markdown((f"on {record['threads']} cores of an {record['cpu']}", "measured"), rows)


# -- cards ---------------------------------------------------------------------------------------------------------


def cards() -> str:
    """What can run on which card, and who measured it; no record of ours."""
    return markdown(card_list.COLUMNS, card_list.table(), text_columns=len(card_list.COLUMNS))


def authors() -> str:
    """What the paper's authors measured: GEMMs of Qwen2.5-7B by cuSPARSELt over their own cuBLASLt path."""
    gemms = json.loads((RESULTS / "authors.json").read_text())["gemms_6of8_over_dense"]
    counts = gemms.pop("tokens")
    rows = [
        (card, TYPES[dtype], *(f"{gain:.2f}" for gain in gains))
        for card, types in gemms.items()
        for dtype, gains in types.items()
    ]
    head = ("6:8 over dense", "type", *(f"{tokens} tokens" for tokens in counts))
    return markdown(head, rows, text_columns=2)


TABLES: dict[str, Callable[[], str]] = {
    "qwen2.5-7b": seven,
    "graphs": graphs,
    "served-headline": served_headline,
    "served": served,
    "served-targets": served_targets,
    "served-mixture": served_mixture,
    "served-mixture-whole": partial(
        served_quick, H200 / "serve/qwen3-30b-a3b-fp8.jsonl", "Qwen3-30B-A3B, FP8, 48 layers"
    ),
    "served-others": partial(served_models, OTHERS, "INT8", UNIFORM),
    "served-h100-newest": partial(served_models, WITH_BANDS, "INT8, newest kernel", (CONTROL, "6:8", "4:6")),
    "served-h100": partial(served_models, ON_H100, "INT8, `hopper-4`", OURS),
    "served-h100-slow-host": partial(served_models, ON_SLOW_HOST, "slow host, `hopper-4`", OURS, "burst"),
    "served-h100-halves": partial(served_models, WITH_HALVES, "slow host, `hopper-6`", ("6:8",), "burst"),
    "served-h100-control": over_control,
    "served-h100-6bit": served_six_bits,
    "served-h200-6bit": partial(
        served_forms,
        {"qwen2.5-7b-int8-6bit": "7B", "qwen2.5-14b-int8-6bit": "14B"},
        {CONTROL: CONTROL, "6:8": "6:8"} | IN_SIX_BITS,
    ),
    "served-h200-6bit-auto": partial(served_forms, {"qwen2.5-7b-int8-6bit-auto": "7B"}, BY_AUTO),
    "served-0.33": partial(
        served_newest,
        "7B",
        {one: one.removeprefix("stock ") for one in (*STOCK_RIVALS, CONTROL)} | IN_SIX_BITS,
        *("burst", "mixed", *(f"decode {n} at 80" for n in (1, 8, 16, 64, 256))),
    ),
    "served-0.33-32b": partial(
        served_newest,
        "32B",
        {CONTROL: CONTROL} | IN_SIX_BITS,
        *("burst", "mixed", *(f"decode {n} at 80" for n in (1, 16, 64, 256))),
    ),
    "served-0.33-mixture": partial(served_forms, {"qwen3-30b-a3b-int8-6bit-0.33": "30B-A3B"}, {AT_6OF8: NAME_6OF8}),
    "served-eagle": served_eagle,
    "served-0.33-again": partial(
        served_forms,
        {"qwen2.5-7b-int8-6bit-0.33": "first"}
        | {f"qwen2.5-7b-int8-6bit-0.33-{host}-host": f"{host} host" for host in ("slow", "busy")},
        {CONTROL: CONTROL} | IN_SIX_BITS,
    ),
    "served-sglang": partial(served_forms, {"qwen2.5-7b-int8-6bit-sglang": "7B"}, IN_SIX_BITS),
    "served-h200-head": partial(served_forms, {"qwen2.5-7b-int8-lm-head": "7B"}, EIGHT_OR_SIX),
    "served-h200-experts-6bit": partial(served_forms, {"qwen3-30b-a3b-24-layers-6bit": "30B-A3B"}, EIGHT_OR_SIX),
    "served-plan": partial(served_quick, H200 / "serve/qwen2.5-7b-int8-plan.jsonl", "Qwen2.5-7B, INT8"),
    "served-http": served_http,
    "served-http-graphs": partial(served_http_graphs, "qwen2.5-7b-int8-http-2048.jsonl"),
    "served-http-five": partial(
        served_http_graphs, "qwen2.5-7b-int8-http-five.jsonl", "qwen2.5-7b-int8-http-6of8-again.jsonl"
    ),
    "mixed-steps": mixed_steps,
    "layers": partial(layers, "NVIDIA H200", TUNED),
    "layers-h100": partial(layers, "NVIDIA H100 80GB HBM3", TUNED_H100),
    "six-bits": six_bits,
    "six-bits-forms": forms_of_linears,
    "six-bits-experts": forms_of_experts,
    "six-bits-encoder": six_bits_encoder,
    "rounding": rounding,
    "published-loss": published_loss,
    "published-models": published_models,
    "published-models-1.5b": partial(published_models, LARGER),
    "published-models-135m": partial(published_models, SMALLER_BY_GPU),
    "published-rivals": published_rivals,
    "published-rounding": published_rounding,
    "recipe": recipe,
    "decoding": decoding,
    "decoding-anchors": decoding_anchors,
    "gemm": gemm,
    "lifting": lifting,
    "expert-layers": expert_layers,
    "expert-products": expert_products,
    "cpu": cpu,
    "demo": demo,
    "cards": cards,
    "authors": authors,
}


def drawn(text: str) -> str:
    """A page with its tables as the records have them."""
    return MARKED.sub(lambda found: found[1] + TABLES[found[2]]() + found[3], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    write = parser.parse_args().write
    stale = [path for path in PAGES if path.read_text() != drawn(path.read_text())]
    for path in stale:
        print(f"{'drawn anew' if write else 'not what the records say'}: {path.relative_to(ROOT)}")
        if write:
            path.write_text(drawn(path.read_text()))
    return bool(stale) and not write


if __name__ == "__main__":
    sys.exit(main())
