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
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from slidesparse.gemm import cards as card_list
from slidesparse.weights.pattern import Pattern
from slidesparse_bench.known_models import MODELS
from slidesparse_bench.records import DENSE_VARIANT
from slidesparse_bench.report.serve_numbers import Group, groups
from slidesparse_bench.served_records import AGAIN, CONTROL, STOCK, read

sys.path.insert(0, str(Path(__file__).parent / "accuracy/published"))
import compare

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
H200 = RESULTS / "h200"
DRAWN = ("accuracy", "cards", "measured", "quickstart", "recipe", "task")
PAGES = (ROOT / "README.md", *(ROOT / f"docs/{name}.md" for name in DRAWN))
MARKED = re.compile(r"(<!-- table: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

TYPES = {"int8": "INT8", "fp8": "FP8", "bf16": "BF16"}


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A table, its numbers to the right."""
    rule = "|".join("---" if i < text_columns else "---:" for i in range(len(head)))
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]]) + "\n"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.01 else f"{100 * value:.1f} %"


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


# -- served loads --------------------------------------------------------------------------------------------------

NEWEST = {
    "7B": (
        "qwen2.5-7b-int8-rivals-0.33",
        "qwen2.5-7b-int8-control-0.33",
        "qwen2.5-7b-int8-dense-6bit-0.33",
        "qwen2.5-7b-int8-6bit-0.33",
    ),
    "32B": (
        "qwen2.5-32b-int8-6bit-0.33-again",
        "qwen2.5-32b-int8-control-0.33",
        "qwen2.5-32b-int8-dense-6bit-0.33",
        "qwen2.5-32b-int8-6bit-0.33",
    ),
    "8B": ("llama-3-8b-int8-6bit-0.33",),
    "14B on two GPUs": ("qwen2.5-14b-int8-6bit-2gpu-0.33",),
    "30B-A3B": ("qwen3-30b-a3b-int8-6bit-0.33",),
    "7B in SGLang": ("qwen2.5-7b-int8-6bit-sglang-fused", "qwen2.5-7b-int8-6bit-sglang-fused-2of4"),
}
"""Model -> its records with the newest vLLM, or SGLang. An engine is taken from the first that has it, and set beside
the stock engines of that record, or of the first where it has none."""


PATTERNS = ("6:8", "4:6", "2:4")
SIX_BITS = "hopper-6bit"
IN_SIX_BITS = {f"{pattern} {SIX_BITS}": f"{pattern}, six bits" for pattern in PATTERNS}
"""Engine that was told to take them -> what it is called here."""

AT_6OF8, NAME_6OF8 = next(iter(IN_SIX_BITS.items()))
PUBLISHED = RESULTS / "accuracy/published/qwen2.5-coder-0.5b.jsonl"
SMALLER = RESULTS / "accuracy/published/smollm2-135m.jsonl"
TASKS = PUBLISHED.with_name("tasks.jsonl")

RIVALS = {
    "int4 nearest": "INT4, groups of 128, to nearest",
    "int4 gptq, asymmetric": "INT4, groups of 128 with zero points, GPTQ",
}
LARGER, SMALLER_BY_GPU = (PUBLISHED.with_name(f"{name}.jsonl") for name in ("qwen2.5-coder-1.5b", "smollm2-135m-h200"))
LONGEST = {"6:8": "recover 80M", "4:6": "recover 100M", "2:4": "recover 80M"}
"""Pattern -> what ends the tag of the judged model that was trained on longest."""

OF_THE_LOG = re.compile(
    r"^plan | (rotate|reorder|chats|sparsegpt)$|^2:4 recover [24]0M$|^depth 1.18$|recover.* fp8$|one down"
    r"|^(4:6|2:4) magnitude$|^(6:8|4:6) recover.* worked|compress"
)
"""Tags that the page on accuracy leaves out."""

STOCK_RIVALS = ("stock FP8", "stock W4A8", "stock W4A16")
DENSE_SIX_BITS = f"{DENSE_VARIANT} {SIX_BITS}"
DENSE_OURS = {CONTROL: "dense, fused", DENSE_SIX_BITS: "dense, six bits"}

CURVE: dict[str, tuple[str, str, str, str]] = {
    "stock INT8": (STOCK, "dense int8", "", ""),
    "stock FP8": ("stock FP8", "dense fp8", "", ""),
    "stock W4A8": ("stock W4A8", "", "", ""),
    "stock W4A16": ("stock W4A16", "int4 nearest", "int4 nearest recover 20M", ""),
    "dense INT8, fused": (CONTROL, "dense int8", "", ""),
    "dense, six bits": (DENSE_SIX_BITS, "dense 6bit", "", "dense 6bit"),
    "6:8, six bits": (AT_6OF8, "6:8 match", "6:8 recover 20M 6bit", "6:8 recover 5M 6bit"),
    "4:6, six bits": (f"4:6 {SIX_BITS}", "4:6 match", "4:6 recover 100M 6bit", "4:6 recover 5M 6bit"),
    "2:4, six bits": (f"2:4 {SIX_BITS}", "2:4 match", "2:4 recover 80M", "2:4 recover 5M 6bit"),
}
"""README's rows: name -> engine, and the tags of the judged model in one shot, trained on, and on its task."""

CURVE_LOADS = {
    "burst": "prompts",
    "mixed": "mixed load",
    **{f"decode {n} at 80": f"decoding {n}" for n in (16, 64, 256)},
}
"""Workload -> README's word."""

NEWEST_LOADS = {
    "burst": "burst: 16 prompts of 1024 tokens",
    "mixed": "mixed load: 1000 requests",
    **{f"decode {n} at 80": f"decoding, a step of {n} sequences" for n in (8, 16, 64, 256)},
    "decode 1 at 80": "decoding, one sequence",
    "long": "8 prompts of 8192 tokens",
    "decode 8 at 8192": "decoding, 8 sequences of 8192 tokens",
}
"""Workload -> what it is called here."""

USUAL_LOADS = ("burst", "mixed", *(f"decode {n} at 80" for n in (16, 64, 256)))


@lru_cache
def group_of(path: Path) -> Group:
    """The engines of a record of one model and type, with what they served."""
    (group,) = groups(read([path]))
    return group


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


def curve() -> str:
    """README: what each way to serve a model gains over stock INT8, and what it costs."""
    found, rows = published_records(), []
    for name, (engine, *tags, on_task) in CURVE.items():
        speeds = (
            [1.0] * len(CURVE_LOADS) if engine == STOCK else [headline_speedup(engine, load) for load in CURVE_LOADS]
        )
        judged = [found.get(tag) for tag in tags]
        rises = ["-" if one is None else rise(one, found["dense"]) for one in judged]
        best = next((one for one in reversed(judged) if one is not None), None)
        dense = found["dense"]["humaneval"]["sampled"]
        answers = "-" if best is None else compare.points(best["humaneval"]["sampled"], dense)
        own = task_cell(task_records(), on_task, "reasoning")
        rows.append([name, *("-" if one is None else f"{one:.2f}x" for one in speeds), *rises, answers, own])
    losses = "perplexity, one shot", "after training", "HumanEval", "on its task"
    return markdown(("", *CURVE_LOADS.values(), *losses), rows)


def served_newest(model: str, columns: Mapping[str, str], *loads: str) -> str:
    """Engines of a model in the newest vLLM: milliseconds, and over the fastest stock INT8."""
    rows = []
    for load in loads:
        for words, measure in _measures(load, model).items():
            rows.append([f"{words}, ms", *_newest_cells(model, columns, load, measure)])
    return markdown((f"{model}, INT8", STOCK, *columns.values()), rows)


def served_side_by_side(models: Sequence[str], *loads: str) -> str:
    """Models in the newest vLLM at 6:8 in six bits: milliseconds of stock INT8 and ours, and over it."""
    rows = []
    asked = [(load, words, measure) for load in loads for words, measure in _measures(load).items()]
    for load, words, measure in asked:
        cells = (_newest_cells(model, [AT_6OF8], load, measure) for model in models)
        rows.append([f"{words}, ms", *chain.from_iterable(cells)])
    return markdown(("INT8", *(f"{model}, {who}" for model in models for who in (STOCK, NAME_6OF8))), rows)


def _newest_cells(model: str, engines: Iterable[str], load: str, measure: Measure) -> list[str]:
    """The fastest stock INT8, and engines of ours over it; a dash where no record has one."""
    stock = [found[0] for one in (STOCK, AGAIN) if (found := newest_ms(model, one, load, measure))]
    ours = (newest_ms(model, engine, load, measure) for engine in engines)
    cells = ["-" if one is None else f"{_ms(one[0])} ({one[1]:.2f})" for one in ours]
    return [_ms(min(stock)) if stock else "-", *cells]


def served_eagle() -> str:
    """Answers of 256 tokens with EAGLE-3's drafts: tokens a second in stock and at 6:8."""
    group, rows = group_of(H200 / "serve/qwen2.5-7b-int8-eagle-0.33.jsonl"), []
    for sequences in (1, 8, 64):
        seconds = [group.seconds(engine, f"answers {sequences}") or 0.0 for engine in (STOCK, AT_6OF8)]
        stock, ours = (256 * sequences / one for one in seconds)
        rows.append([str(sequences), f"{stock:.0f}", f"{ours:.0f} ({ours / stock:.2f})"])
    return markdown(("sequences", STOCK, NAME_6OF8), rows)


def _measures(load: str, model: str = "") -> dict[str, Measure]:
    """What is told of a load in the newest engines: the words of its row -> the measure.

    SGLang's steps are seen by its client alone, to whom a repeat can look too short: there medians count.
    """
    time: Measure = _median if "SGLang" in model else _undisturbed
    return {NEWEST_LOADS[load]: time} | ({"of it the GPU computes": _computing} if load == "mixed" else {})


def _median(group: Group, engine: str, load: str) -> float:
    return statistics.median(group.records[engine][load].seconds)


def _undisturbed(group: Group, engine: str, load: str) -> float:
    """Seconds: the median, and of decoding the fastest repeat."""
    return min(group.records[engine][load].seconds) if load.startswith("decode") else _median(group, engine, load)


def _computing(group: Group, engine: str, load: str = "mixed") -> float:
    """Seconds of a load in which any kernel ran: a slow host adds nothing to them."""
    power = group.records[engine][load].power
    assert power is not None
    return (group.seconds(engine, load) or 0.0) * power.busy


def _ms(ms: float) -> str:
    return f"{ms:.2f}" if ms < 10 else f"{ms:.0f}"


# -- linears -------------------------------------------------------------------------------------------------------

TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TUNED = (("int8", "Qwen2.5-7B"), ("int8", "Llama-3-8B"), ("int8", "Qwen2.5-14B"), ("fp8", "Qwen2.5-7B"))


def layers(gpu: str, tuned: Sequence[tuple[str, str]]) -> str:
    """The four linears of a block, by a GPU's tables of times; that of the newest kernel has the plain name."""
    path = ROOT / f"results/{gpu}/layers.json"
    tables = [json.loads(one.read_text()) for one in (path, *sorted(path.parent.glob(f"{path.stem}-*.json")))]
    rows = []
    for dtype, model in tuned:
        table, found = next(filter(None, (_of_model(table, dtype, model) for table in tables)))
        older = "" if table is tables[0] else f", `{table['installation']['libraries']['hopper'].split()[-1]}`"
        known = [name for name in found[0]["us"] if name.startswith("hopper")]
        first = (dtype, model) == tuned[0]
        known.sort(key=lambda name: name.startswith(SIX_BITS))
        names = [name for name in known if name.split()[1] in PATTERNS and (first or not name.startswith(SIX_BITS))]
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


def published_records(path: Path = PUBLISHED) -> dict[str, dict[str, Any]]:
    """Tag -> record of a judged model; the last of a tag counts."""
    return {one["tag"]: one for one in map(json.loads, path.read_text().splitlines())}


def rise(one: dict[str, Any], dense: dict[str, Any]) -> str:
    """How much larger the perplexity of held-out code is than the dense model's, with its paired standard error."""
    mean, error = compare.paired(one["code"]["loss"], dense["code"]["loss"])
    return f"{100 * math.expm1(mean):+.1f} ± {100 * math.exp(mean) * error:.1f} %"


def published_rivals() -> str:
    """What else makes a published model smaller or faster, beside patterns; all in one shot, on one text."""
    found = published_records(SMALLER)
    rows = {f"{one}, SparseGPT": found[f"{one} sparsegpt bf16"] for one in ("14:16", "6:8", "4:6", "2:4")}
    rows |= {RIVALS.get(tag, tag): one for tag, one in found.items() if tag in RIVALS or tag.startswith("fewer")}
    ordered = sorted(rows.items(), key=lambda row: sum(row[1]["code"]["loss"]))
    return markdown(("", "perplexity of code"), [[name, rise(one, found["dense"])] for name, one in ordered])


def solved(one: dict[str, Any]) -> str:
    """How many problems of HumanEval ten samples solve, in percent."""
    share = one["humaneval"]["sampled"]
    return f"{compare.points(share, share)} %"


def recipe() -> str:
    """The recipe: what patterns cost a published model before and after it was trained on."""
    found, rows = published_records(), []
    for pattern, longest in LONGEST.items():
        both = [found[f"{pattern} match"], found[f"{pattern} {longest}"]]
        rows.append([pattern, longest.split()[1], *(rise(one, found["dense"]) for one in both), *map(solved, both)])
    heads = ("perplexity of code, pruned", "trained", "HumanEval, pruned", "trained")
    return markdown(("pattern", "tokens", *heads), rows)


@lru_cache
def task_records() -> dict[str, Any]:
    """The judged models of the page on a use, by tag."""
    lines = map(json.loads, TASKS.read_text().splitlines())
    return {one["tag"]: one for one in lines if "run_by" in one}


def task_cell(judged: Mapping[str, Any], name: str, task: str) -> str:
    """A model's right answers to a task, beside the dense one's."""
    own, dense = (judged.get(f"{one}, {task}") for one in (name, "dense"))
    if own is None or dense is None:
        return "-"
    base = compare.all_questions(dense, task)
    return compare.points(base if own is dense else compare.all_questions(own, task), base)


def tasks() -> str:
    """The page on a use: models that were fine-tuned on a task, pruned and recovered on it, beside the dense one."""
    judged = task_records()
    names = dict.fromkeys(tag.rpartition(", ")[0] for tag in judged)
    ordered = sorted(names, key=lambda name: PATTERNS.index(name[:3]) if name.startswith(PATTERNS) else -1)
    rows = [[name, *(task_cell(judged, name, task) for task in compare.TASKS)] for name in ordered]
    return markdown(("model", *compare.TASKS.values()), rows)


def published_models(path: Path = PUBLISHED) -> str:
    """The page on accuracy: all models that were judged, beside the dense one, on the same problems."""
    found = published_records(path)
    dense, rows = found["dense"], []
    for tag, one in sorted(found.items(), key=lambda item: sum(item[1]["code"]["kl"])):
        if OF_THE_LOG.search(tag):
            continue
        kl = f"{sum(one['code']['kl']) / len(one['code']['kl']):.3f}"
        cells = compare.cells(one, dense)[4:7]
        rows.append([tag, "-" if one is dense else rise(one, dense), kl, *cells])
    heads = ("model", "perplexity of code", "KL", "HumanEval, greedy", "of ten samples", "exact answers")
    judged = [i for i in range(len(heads)) if any(row[i] != "-" for row in rows)]
    return markdown([heads[i] for i in judged], [[row[i] for i in judged] for row in rows])


def demo() -> str:
    """Every pattern on the demonstration's encoder."""
    rows: dict[str, dict[str, Any]] = {}
    for row in json.loads((RESULTS / "demo/minilm.json").read_text())["rows"]:
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
    return markdown((*head, "INT8 equal to dense product"), cells)


def cpu() -> str:
    """Packing and pruning on a CPU."""
    record = json.loads((RESULTS / "cpu.jsonl").read_text().splitlines()[-1])
    pack, prune = record["pack_4096x14336_int8_s"], record["prune_1b"]
    rows = [
        ["pack a 4096 x 14336 INT8 weight at 6:8", f"{pack['median']:.2f} s"],
        [
            "`prune --method magnitude` Llama-3.2-1B's shapes to 6:8 INT8, start-up included",
            f"{prune['seconds']:.0f} s",
        ],
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


def predicted() -> str:
    """What benchmarks/predict_cards.py predicts: dense's time over that of each pattern, by the number of tokens."""
    head, *lines = map(json.loads, (RESULTS / "predicted-cards.jsonl").read_text().splitlines())
    rows = (
        (
            row["card"],
            f"{TYPES[row['dtype']]}, {row['bits']} bits",
            *(" / ".join(map(shown, gains)) for gains in by_tokens),
        )
        for row in lines
        if "card" in row
        for by_tokens in [zip(*(row[pattern] for pattern in head["patterns"]), strict=True)]
    )
    return markdown((" / ".join(head["patterns"]), "weights", *map(str, head["tokens"])), rows, text_columns=2)


TABLES: dict[str, Callable[[], str]] = {
    "curve": curve,
    "served-0.33": partial(
        served_newest,
        "7B",
        {one: one.removeprefix("stock ") for one in STOCK_RIVALS} | DENSE_OURS | IN_SIX_BITS,
        *("burst", "mixed", *(f"decode {n} at 80" for n in (1, 16, 64, 256))),
    ),
    "served-0.33-32b": partial(
        served_newest,
        "32B",
        DENSE_OURS | IN_SIX_BITS,
        *("burst", "mixed", *(f"decode {n} at 80" for n in (1, 16, 64, 256))),
    ),
    "served-0.33-mixture": partial(served_newest, "30B-A3B", {AT_6OF8: NAME_6OF8}, *USUAL_LOADS),
    "served-eagle": served_eagle,
    "served-0.33-more": partial(
        served_side_by_side,
        ("8B", "14B on two GPUs"),
        *("burst", "mixed", *(f"decode {n} at 80" for n in (1, 16, 64, 256)), "long", "decode 8 at 8192"),
    ),
    "served-sglang": partial(served_newest, "7B in SGLang", IN_SIX_BITS, *USUAL_LOADS),
    "layers": partial(layers, "h200", TUNED),
    "published-models": published_models,
    "published-models-1.5b": partial(published_models, LARGER),
    "published-models-135m": partial(published_models, SMALLER_BY_GPU),
    "published-rivals": published_rivals,
    "recipe": recipe,
    "task": tasks,
    "cpu": cpu,
    "demo": demo,
    "cards": cards,
    "authors": authors,
    "predicted": predicted,
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
