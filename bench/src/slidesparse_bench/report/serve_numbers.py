"""What records of served loads say together: medians, ratios to stock and to the control, steps by their tokens."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from slidesparse_bench.report.numbers import ratio
from slidesparse_bench.report.table import file_name
from slidesparse_bench.served_records import CONTROL, STOCK, ServeRecord, Way

EDGES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Most tokens of the steps of a bin."""


@dataclass(frozen=True)
class Group:
    """The engines of one model, type and number of GPUs, all asked the same way.

    Attributes:
        name: For headings.
        slug: For files.
        records: Engine -> workload -> its latest record, in the order in which they ran.
    """

    name: str
    slug: str
    records: dict[str, dict[str, ServeRecord]]

    @property
    def engines(self) -> list[str]:
        """All of them, stock first."""
        return list(self.records)

    @property
    def workloads(self) -> list[str]:
        """Everything that any of them served."""
        return list(dict.fromkeys(name for served in self.records.values() for name in served))

    def seconds(self, engine: str, workload: str) -> float | None:
        """The median repeat."""
        record = self.records.get(engine, {}).get(workload)
        return None if record is None else statistics.median(record.seconds)

    def over(self, base: str, engine: str, workload: str) -> float | None:
        """How many times faster than another engine."""
        return ratio(self.seconds(base, workload), self.seconds(engine, workload))


def groups(records: Iterable[ServeRecord]) -> list[Group]:
    """Records with times, by model, type and GPUs; of what was served twice the latest counts."""
    found: dict[tuple[str, str, int, int, Way], dict[str, dict[str, ServeRecord]]] = {}
    for record in records:
        if record.why_not is None and record.workload is not None:
            key = record.key
            engines = found.setdefault((key.model, key.dtype, key.gpus, key.layers, record.way), {})
            served, name = engines.setdefault(_label(record), {}), record.workload.name
            served[name] = max(record, served.get(name, record), key=lambda one: one.started)
    made = []
    for (model, dtype, gpus, layers, way), engines in found.items():
        name = f"{model}, {dtype.upper()}, {layers} layers" + (f", {gpus} GPUs" if gpus > 1 else "")
        name = ", ".join([name, *way.told()])
        slug = "_".join([f"{model}_{dtype}_{layers}_{gpus}", *(part.removeprefix("over ") for part in way.told())])
        slug = file_name(slug.replace(".", "_").replace(" ", "_"))
        made.append(Group(name, slug, dict(sorted(engines.items(), key=lambda item: _order(item[0])))))
    return made


def _label(record: ServeRecord) -> str:
    """An engine's name; larger graphs make another engine of the same pattern."""
    graphs = f", graphs to {record.key.graphs}"
    plain = record.key.graphs is None or record.key.engine.endswith(graphs)
    return record.key.engine + ("" if plain else graphs)


def _order(engine: str) -> int:
    named = [STOCK, CONTROL]
    return named.index(engine) if engine in named else len(named) + (engine.startswith(STOCK))


def tokens_a_second(record: ServeRecord) -> float:
    """Given, of all requests together."""
    return record.output_tokens / statistics.median(record.seconds)


def tokens_a_joule(record: ServeRecord) -> float | None:
    """Taken in and given; None where the GPU would not say what it drew."""
    if record.power is None:
        return None
    return (record.prompt_tokens + record.output_tokens) * len(record.seconds) / record.power.energy_j


@dataclass(frozen=True)
class Bin:
    """Steps of about the same number of tokens.

    Attributes:
        most: Tokens.
        steps: How many.
        median_ms: Of one.
        share: Of the time of all steps.
    """

    most: int
    steps: int
    median_ms: float
    share: float


def bin_of(tokens: int) -> int:
    """The edge of a step's bin.

    >>> bin_of(64), bin_of(65), bin_of(99999)
    (64, 128, 16384)
    """
    return EDGES[min(bisect_left(EDGES, tokens), len(EDGES) - 1)]


def steps(record: ServeRecord) -> list[Bin]:
    """The steps of a record; those whose time is not known, the first after a pause, are left out."""
    found: dict[int, list[int]] = {}
    for tokens, time_us in zip(record.step_tokens or (), record.step_us or (), strict=True):
        if tokens and time_us:
            found.setdefault(bin_of(tokens), []).append(time_us)
    whole = sum(map(sum, found.values()))
    return [
        Bin(most, len(times), statistics.median(times) / 1e3, sum(times) / whole)
        for most, times in sorted(found.items())
    ]
