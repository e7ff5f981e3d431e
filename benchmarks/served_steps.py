"""Write the constants by which ``slidesparse plan --at`` models a served step, from the records of ``bench serve``.

    python benchmarks/served_steps.py            # say whether the file is what the records say
    python benchmarks/served_steps.py --write

A served step less the times of its linears, by the table that ships with the package, is what the rest takes: of stock
vLLM, and of the plugin with a pruned model, the mean over three patterns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from bisect import bisect_left
from collections import defaultdict
from pathlib import Path

import torch

from slidesparse.bench.problems import MODELS
from slidesparse.commands.step_time import SERVED_STEPS, LayerTimes, Loads, Rest, ServedSteps, Steps
from slidesparse.models.choose_patterns import PlanSet
from slidesparse.pattern import Pattern
from slidesparse.report.serve_numbers import EDGES
from slidesparse.served_records import AGAIN, BURST_LOAD, DECODE, MIXED_LOAD, STOCK, ServeRecord, read

ROOT = Path(__file__).parent.parent
DTYPES = ("int8", "fp8")
ENGINES = {"stock": (STOCK, AGAIN), "plugin": ("6:8", "4:6", "2:4")}
DIGITS = 3


class Served:
    """The records of one type of weights, and the times of its linears."""

    def __init__(self, dtype: str) -> None:
        path = ROOT / f"results/h200/serve/qwen2.5-7b-{dtype}.jsonl"
        self.records = [r for r in read(ServeRecord, [path]) if r.why_not is None and r.key.graphs is None]
        self.key, self.machine = self.records[0].key, self.records[0].machine
        self.sets = [PlanSet((str(size),), (size,), ()) for size in MODELS[self.key.model]]
        self.times = LayerTimes(dtype, torch.device("cpu"))

    def linears(self, record: ServeRecord, tokens: float) -> float:
        """Microseconds of a decoder layer's linears."""
        pattern = Pattern.parse(record.key.pattern)
        return sum(self.times.us(one, pattern, [Pattern.parse("2:4")], tokens) for one in self.sets)

    def of(self, engines: tuple[str, ...], **like: str) -> list[ServeRecord]:
        """Records of some engines whose workload has these fields."""
        asked = [record for record in self.records if record.key.engine in engines and record.workload]
        return [r for r in asked if all(getattr(r.workload, name) == value for name, value in like.items())]

    def burst(self, engines: tuple[str, ...]) -> float:
        """What a token adds to prompts that come at once."""

        def rest(record: ServeRecord) -> float:
            steps = record.step_tokens or ()
            us = 1e6 * statistics.median(record.seconds) / self.key.layers
            return (us - sum(self.linears(record, tokens) for tokens in steps)) / sum(steps)

        return statistics.fmean(map(rest, self.of(engines, name=BURST_LOAD)))

    def decode(self, engines: tuple[str, ...]) -> float:
        """What a step of decoding takes besides linears."""

        def rest(record: ServeRecord, sequences: int) -> float:
            us = 1e6 * statistics.median(record.seconds) / self.key.layers
            return us - self.linears(record, sequences)

        found = self.of(engines, kind=DECODE)
        return statistics.fmean(rest(record, record.workload.requests) for record in found if record.workload)

    def mixed(self) -> tuple[Steps, ...]:
        """Steps of the mixed load by their tokens, of each bin the mean."""
        bins: dict[int, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
        for name, engines in ENGINES.items():
            for record in self.of(engines, name=MIXED_LOAD):
                for tokens, us in zip(record.step_tokens or (), record.step_us or (), strict=True):
                    if tokens and us:
                        rest = us / self.key.layers - self.linears(record, tokens)
                        bins[bisect_left(EDGES, tokens)][name].append((tokens, rest))
        return tuple(
            Steps(
                round(len(found["plugin"]) / len(ENGINES["plugin"])),
                round(statistics.fmean(tokens for tokens, _ in found["plugin"]), 1),
                rounded(**{name: statistics.fmean(rest for _, rest in found[name]) for name in ENGINES}),
            )
            for _, found in sorted(bins.items())
        )

    def loads(self) -> Loads:
        return Loads(
            rounded(**{name: self.burst(engines) for name, engines in ENGINES.items()}),
            rounded(**{name: self.decode(engines) for name, engines in ENGINES.items()}),
            self.mixed(),
        )


def rounded(stock: float, plugin: float) -> Rest:
    return Rest(round(stock, DIGITS), round(plugin, DIGITS))


def text() -> str:
    """The file's text."""
    served = {dtype: Served(dtype) for dtype in DTYPES}
    one = served["int8"]
    source = f"{one.key.model} on one {one.machine.gpu}, vLLM {one.machine.vllm}"
    steps = ServedSteps(source, {dtype: found.loads() for dtype, found in served.items()})
    return json.dumps(dataclasses.asdict(steps), indent=1) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        SERVED_STEPS.write_text(text())
    elif SERVED_STEPS.read_text() != text():
        raise SystemExit(f"{SERVED_STEPS.name} is not what the records say: --write")


if __name__ == "__main__":
    main()
