"""Records of ``bench serve``: one workload on one engine a line, JSON, written as it comes and read strictly.

A file that exists is continued: what it holds is not measured again, so the budget of a run may end between engines.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slidesparse.base.typed_json import decode
from slidesparse.bench.serve_load import Latency, Workload
from slidesparse.bench.serve_power import Power
from slidesparse.bench.serve_timeline import Step
from slidesparse.errors import InputError
from slidesparse.records import Machine, open_records

FORMAT = 1
"""Version of the schema; raised when a field changes its meaning."""

SERVE, TIMELINE = "serve", "serve timeline"

STOCK, AGAIN, CONTROL = "stock", "stock again", "control"
"""Engines: stock vLLM on unpruned weights, first and last, and the plugin with every layer dense and joined."""


@dataclass(frozen=True)
class EngineKey:
    """Which engine.

    Attributes:
        model: Whose shapes.
        dtype: ``int8``, ``fp8`` or ``bf16``.
        layers: Decoder layers.
        gpus: How many, by tensor parallelism.
        engine: ``stock``, ``stock again``, ``control``, a pattern, or a pattern and a backend.
        pattern: Of its checkpoint.
        backend: ``auto`` or a backend's name; empty for stock vLLM.
        graphs: Tokens of the largest CUDA graph; None: vLLM's own choice.
    """

    model: str
    dtype: str
    layers: int
    gpus: int
    engine: str
    pattern: str
    backend: str
    graphs: int | None


@dataclass(frozen=True)
class ServeRecord:
    """One workload on one engine.

    Attributes:
        key: The engine.
        workload: What was asked; None where the engine did not start.
        machine: Where.
        started: When the engine was started: UTC, ISO 8601.
        start_s: Seconds until it could be asked.
        rate: Requests a second, of arrivals at random.
        seconds: Of each repeat; of decoding, the median step of each.
        prompt_tokens: Taken in by each repeat.
        output_tokens: Given by each repeat.
        wall_s: All repeats together.
        first: Time to the first token.
        between: Time between tokens.
        lost: Requests that did not get all their tokens.
        step_tokens: Tokens of each engine step of the last repeat, where all is asked at once.
        step_us: What it took.
        power: Of all its GPUs together, over all repeats.
        why_not: Why there are no times; None where there are.
    """

    key: EngineKey
    workload: Workload | None
    machine: Machine
    started: str
    start_s: float = 0.0
    rate: float | None = None
    seconds: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    wall_s: float = 0.0
    first: Latency | None = None
    between: Latency | None = None
    lost: int = 0
    step_tokens: tuple[int, ...] = ()
    step_us: tuple[int, ...] = ()
    power: Power | None = None
    why_not: str | None = None
    benchmark: str = SERVE
    format: int = FORMAT


@dataclass(frozen=True)
class TimelineRecord:
    """One engine step of the mixed load under the profiler.

    Attributes:
        key: The engine.
        machine: Where.
        started: When the engine was started.
        step: The step.
    """

    key: EngineKey
    machine: Machine
    started: str
    step: Step
    benchmark: str = TIMELINE
    format: int = FORMAT


R = TypeVar("R", ServeRecord, TimelineRecord)


def to_line(record: ServeRecord | TimelineRecord) -> str:
    """One line of a records file, without the newline."""
    return json.dumps(dataclasses.asdict(record), separators=(",", ":"), allow_nan=False)


def is_of(kind: str, path: Path) -> bool:
    """Whether a file's first line is a record of that benchmark; strict reading says what is wrong with it later."""
    try:
        with open_records(path, "r") as file:
            first = json.loads(file.readline())
    except (OSError, ValueError, EOFError):
        return False
    return isinstance(first, dict) and first.get("benchmark") == kind


def read(kind: type[R], paths: Iterable[Path]) -> list[R]:
    """All records of some files, in their order.

    Args:
        kind: :class:`ServeRecord` or :class:`TimelineRecord`.
        paths: The files.

    Raises:
        InputError: Naming the file and line that is no such record, or a file that cannot be read.
    """
    records: list[R] = []
    for path in paths:
        try:
            with open_records(path, "r") as file:
                lines = file.read().splitlines()
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {path}", got=error) from error
        for number, line in enumerate(lines, start=1):
            try:
                records.append(_from_line(kind, line))
            except InputError as error:
                raise InputError(f"{path}, line {number}", got=str(error)) from error
    return records


def _from_line(kind: type[R], line: str) -> R:
    try:
        data: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError("not JSON", got=str(error)) from error
    due = SERVE if kind is ServeRecord else TIMELINE
    found = (data.get("benchmark"), data.get("format")) if isinstance(data, dict) else type(data).__name__
    if found != (due, FORMAT):
        raise InputError("a record", got=repr(found), needed=repr((due, FORMAT)))
    record: R = decode(kind, data, "record")
    return record
