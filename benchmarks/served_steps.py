"""Write the constants by which ``slidesparse plan --at`` models a served step, from the records of ``bench serve``.

    python benchmarks/served_steps.py            # say whether the file is what the records say
    python benchmarks/served_steps.py --write

Each kind of load has one factor a form of the linears, and what the rest takes. A record's rest is its steps less the
times of its linears, by the table that ships with the package. The plugin's is the mean over four engines, whose
linears are all dense (the control), 6:8, 4:6 or 2:4; what one of them takes more or less is put on its linears, as a
factor. The mixed load has one over all its steps: some of its bins have one step or nine, too few to tell a clock from
chance.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from slidesparse.offline.known_models import MODELS
from slidesparse.offline.plan.choose_patterns import PlanSet
from slidesparse.weights.pattern import Pattern
from slidesparse_bench.report.serve_numbers import EDGES
from slidesparse_bench.served_records import (
    AGAIN,
    BURST_LOAD,
    CONTROL,
    DECODE,
    MIXED_LOAD,
    STOCK,
    ServeRecord,
    Workload,
    read,
)
from slidesparse_bench.step_time import SERVED_STEPS, LayerTimes, Loads, Rest, ServedSteps, Steps

ROOT = Path(__file__).parent.parent
SERVED = {"h200": ("int8", "fp8"), "h100": ("int8",)}
"""Folder of records -> types of weights."""

PLUGIN = {CONTROL: "dense", "6:8": "6:8", "4:6": "4:6", "2:4": "2:4"}
FORMS = {STOCK: "dense", AGAIN: "dense", **PLUGIN}
"""Engine -> form of all its linears. The control's checkpoint follows 6:8, but runs dense."""

DIGITS, FACTOR_DIGITS = 3, 4


@dataclass(frozen=True)
class Served:
    """A step as it was served, by its tokens: microseconds of a decoder layer, and of its linears in the table."""

    tokens: float
    us: float
    linears: float


Engines = dict[str, list[Served]]
"""Engine -> its steps of a load."""


class Records:
    """The records of one GPU and type of weights, and the times of its linears."""

    def __init__(self, folder: str, dtype: str) -> None:
        path = ROOT / f"results/{folder}/serve/qwen2.5-7b-{dtype}.jsonl"
        found = (r for r in read(ServeRecord, [path]) if r.why_not is None and r.key.graphs is None)
        self.records = [record for record in found if record.key.engine in FORMS]
        self.key, self.machine = self.records[0].key, self.records[0].machine
        self.sets = [PlanSet((str(size),), (size,), ()) for size in MODELS[self.key.model]]
        assert self.machine.gpu is not None
        self.times = LayerTimes(dtype, torch.device("cpu"), self.machine.gpu)

    def linears(self, record: ServeRecord, tokens: float) -> float:
        """Microseconds of a decoder layer's linears."""
        pattern = Pattern.parse(FORMS[record.key.engine])
        return sum(self.times.us(one, pattern, [Pattern.parse("2:4")], tokens) for one in self.sets)

    def steps(self, record: ServeRecord, workload: Workload) -> list[Served]:
        """What a record's median repeat was made of: of a burst a mean token of all its prompts."""
        us, tokens = 1e6 * statistics.median(record.seconds) / self.key.layers, record.step_tokens or ()
        if workload.kind == DECODE:
            return [Served(workload.requests, us, self.linears(record, workload.requests))]
        linears = [self.linears(record, number) if number else 0.0 for number in tokens]
        if workload.name == BURST_LOAD:
            return [Served(1, us / sum(tokens), sum(linears) / sum(tokens))]
        each = record.step_us or ()  # of the last repeat, without what lies between steps: up to 4 % off the median
        found = zip(tokens, each, linears, strict=True)
        return [Served(number, us * one / sum(each), linear) for number, one, linear in found if number]

    def of(self, **like: str) -> Engines:
        """Steps of each engine in workloads with these fields."""
        return {
            record.key.engine: self.steps(record, record.workload)
            for record in self.records
            if record.workload and all(getattr(record.workload, name) == value for name, value in like.items())
        }

    def loads(self) -> Loads:
        burst, decode, mixed = self.of(name=BURST_LOAD), self.of(kind=DECODE), self.of(name=MIXED_LOAD)
        factors = {"prefill": fit(burst), "decode": fit(decode), "mixed": fit(mixed)}
        return Loads(
            rest(burst, factors["prefill"]), rest(decode, factors["decode"]), bins(mixed, factors["mixed"]), factors
        )


def fit(engines: Engines) -> dict[str, float]:
    """Factors with which the plugin has the same rest at all forms, in sum over their steps."""
    linears = {form: sum(step.linears for step in engines[name]) for name, form in PLUGIN.items()}
    rests = {form: sum(step.us for step in engines[name]) - linears[form] for name, form in PLUGIN.items()}
    mean = statistics.fmean(rests.values())
    return {form: round(1 + (rests[form] - mean) / linears[form], FACTOR_DIGITS) for form in rests}


def rest(engines: Engines, factors: dict[str, float]) -> Rest:
    """The rest of a mean step, of stock vLLM and of the plugin."""

    def mean(names: Iterable[str]) -> float:
        rests = (step.us - factors[FORMS[name]] * step.linears for name in names for step in engines[name])
        return round(statistics.fmean(rests), DIGITS)

    return Rest(mean({STOCK, AGAIN} & set(engines)), mean(PLUGIN))


def bins(engines: Engines, factors: dict[str, float]) -> tuple[Steps, ...]:
    """Steps by their tokens, of each bin the mean."""
    found: dict[int, Engines] = defaultdict(lambda: defaultdict(list))
    for name, steps in engines.items():
        for step in steps:
            found[bisect_left(EDGES, step.tokens)][name].append(step)
    made = []
    for _, each in sorted(found.items()):
        tokens = [step.tokens for name in PLUGIN for step in each[name]]
        count = round(len(tokens) / len(PLUGIN))
        made.append(Steps(count, round(statistics.fmean(tokens), 1), rest(each, factors)))
    return tuple(made)


def text() -> str:
    """The file's text."""
    steps: dict[str, ServedSteps] = {}
    for folder, dtypes in SERVED.items():
        served = {dtype: Records(folder, dtype) for dtype in dtypes}
        one = served["int8"]
        source = f"{one.key.model} on one {one.machine.gpu}, vLLM {one.machine.vllm}"
        steps[one.times.gpu] = ServedSteps(source, {dtype: found.loads() for dtype, found in served.items()})
    return json.dumps({gpu: dataclasses.asdict(found) for gpu, found in steps.items()}, indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        SERVED_STEPS.write_text(text())
    elif SERVED_STEPS.read_text() != text():
        raise SystemExit(f"{SERVED_STEPS.name} is not what the records say: --write")


if __name__ == "__main__":
    main()
