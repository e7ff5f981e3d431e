"""Records of ``bench serve``: one workload on one engine a line, JSON, written as it comes and read strictly.

A file that exists is continued: what it holds is not measured again, so the budget of a run may end between engines.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from slidesparse.base.typed_json import decode, parse_json
from slidesparse.errors import InputError
from slidesparse_bench.number_range import require_numbers, require_printable
from slidesparse_bench.records import LARGEST, Machine, open_records, parse_lines, resume_lines
from slidesparse_bench.served_figures import Latency, Power, Soak, Steady, check_figures, check_soak

FORMAT = 1
"""Version of the schema; raised when a field changes its meaning."""

SERVE = "serve"

STOCK, AGAIN, CONTROL = "stock", "stock again", "control"
"""Engines: stock vLLM on unpruned weights, first and last, and the plugin with every layer dense and joined."""

VLLM, SGLANG = "vllm", "sglang"

RIVALS = {"stock FP8": "fp8", "stock W4A8": "w4a8", "stock W4A16": "w4a16"}
"""Engines of what a user would take instead -> their weights: stock, dense, beside the others of a model and type."""

LATER = {"steady": None, "error": None, "http": False, "soak": None, "server": VLLM, "speculation": None}
"""Fields that records of this version may lack: they were added to it, and mean nothing where they are missing."""

AT_ONCE, ARRIVALS, DECODE, SOAK = "at once", "arrivals", "decode", "soak"
"""Kinds of workloads; names of workloads that arrive at random, and of soaks, begin with ``arrivals``."""

BURST_LOAD, MIXED_LOAD = "burst", "mixed"
"""Names of the workloads that tables and plots ask for."""


@dataclass(frozen=True)
class EngineKey:
    """Which engine.

    Attributes:
        model: Whose shapes.
        dtype: ``int8``, ``fp8`` or ``bf16``.
        layers: Decoder layers.
        gpus: How many, by tensor parallelism.
        engine: ``stock``, ``stock again``, ``control``, one of :data:`RIVALS`, a pattern, or a pattern and a backend.
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

    @property
    def weights(self) -> str:
        """The type of its weights, which is another one than of the engines that it is compared with in a rival."""
        return RIVALS.get(self.engine, self.dtype)


@dataclass(frozen=True)
class Way:
    """How engines were asked; those of two ways are not compared.

    Attributes:
        server: ``vllm``, whose release is the machine's, or ``sglang`` and its release.
        http: Over HTTP, as older records are; else in process.
        speculation: How drafts were made and accepted; None: no speculation.
    """

    server: str = VLLM
    http: bool = False
    speculation: str | None = None

    def told(self) -> list[str]:
        """What is special about it, for headings; nothing of vLLM in process."""
        server = "" if self.server == VLLM else self.server.replace(SGLANG, "SGLang")
        return [part for part in (server, "over HTTP" if self.http else "", self.speculation) if part]


@dataclass(frozen=True)
class Workload:
    """One thing that is asked of every engine.

    Attributes:
        name: As tables call it.
        kind: ``at once``; ``arrivals``: at random, a Poisson process; ``decode``: at once, and only steps in which all
            requests decode count; ``soak``: at random, for as long as ``seconds`` says.
        requests: How many; of a soak, how many have lengths of their own, which then come again.
        prompt: Fewest and most tokens of a prompt.
        output: Fewest and most tokens of an answer.
        repeats: How often, at least.
        seconds: It is repeated for at least so long.
        load: Requests a second, as a share of what stock took of ``mixed``; of ``arrivals`` and ``soak`` only.
    """

    name: str
    kind: str
    requests: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    repeats: int = 1
    seconds: float = 0.0
    load: float = 0.0


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
        seconds: Of each repeat; of decoding, the median step of each, or over HTTP the median time between tokens.
        prompt_tokens: Asked of each repeat.
        output_tokens: Given by each repeat, a mean where some were lost; 0 without times.
        wall_s: All repeats together.
        first: Time to the first token.
        between: Time between tokens.
        lost: Requests that did not get all their tokens.
        step_tokens: Tokens of each engine step of the last repeat, where all is asked at once; None over HTTP, where
            nobody sees them.
        step_us: What it took.
        power: Of all its GPUs together, over all repeats.
        steady: The GPU while requests waited for a place; None of workloads in which none do, and in older records.
        error: What the first request that failed was told.
        http: Of its :class:`Way`, as ``server`` and ``speculation``.
        soak: The verdict on a load that lasts; None of the others.
        why_not: Why there are no times; None where there are. See :attr:`died`.
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
    step_tokens: tuple[int, ...] | None = ()
    step_us: tuple[int, ...] | None = ()
    power: Power | None = None
    steady: Steady | None = None
    error: str | None = None
    http: bool = False
    soak: Soak | None = None
    why_not: str | None = None
    server: str = VLLM
    speculation: str | None = None
    benchmark: str = SERVE
    format: int = FORMAT

    @property
    def way(self) -> Way:
        """How it was asked."""
        return Way(self.server, self.http, self.speculation)

    @property
    def died(self) -> bool:
        """Whether the engine ended here; else, without times, it served all but nobody can say how fast."""
        return self.why_not is not None and (self.workload is None or not self.wall_s)


def to_line(record: ServeRecord) -> str:
    """One line of a records file, without the newline."""
    return json.dumps(dataclasses.asdict(record), separators=(",", ":"), allow_nan=False)


def benchmark_of(path: Path) -> str | None:
    """The benchmark that a file's first line names, if it does; strict reading says what is wrong with it later."""
    try:
        with open_records(path, "r") as file:
            first = json.loads(file.readline(LARGEST))
    except (OSError, ValueError, EOFError, zlib.error, RecursionError):
        return None
    return first.get("benchmark") if isinstance(first, dict) else None


def read(paths: Iterable[Path]) -> list[ServeRecord]:
    """Read all records of some files, in their order.

    Raises:
        InputError: Naming the file and line that is no such record, or a file that cannot be read.
    """
    return parse_lines(paths, _from_line)


def resume(path: Path) -> list[ServeRecord]:
    """Read the records of a file that is to be added to, as :func:`read` does, and end its last line."""
    return resume_lines(path, _from_line)


def _from_line(line: str) -> ServeRecord:
    data = parse_json(line, "record")
    found = (data.get("benchmark"), data.get("format")) if isinstance(data, dict) else type(data).__name__
    if found != (SERVE, FORMAT):
        raise InputError("a record", got=repr(found), needed=repr((SERVE, FORMAT)))
    record: ServeRecord = decode(ServeRecord, LATER | data, "record")
    require_printable(record.key, "record.key")
    require_printable(record.machine, "record.machine")
    require_numbers(record.key, "record.key", "layers", "gpus", "graphs", positive=True)
    require_numbers(record.machine, "record.machine", "memory_gb", "l2_mb")
    _check_served(record)
    return record


def _check_served(record: ServeRecord) -> None:
    """Refuse numbers that nobody can have measured, and a record with neither times nor a reason."""
    require_printable(record.way, "record")
    if bool(record.seconds) == (record.why_not is not None):
        raise InputError("a record needs either times or a reason for having none", got=record.why_not)
    require_numbers(record, "record", "seconds", positive=True)
    counts = ("start_s", "rate", "prompt_tokens", "output_tokens", "wall_s", "lost", "step_tokens", "step_us")
    require_numbers(record, "record", *counts)
    check_figures(record.first, record.between, record.power, record.steady)
    if record.soak is not None:
        check_soak(record.soak)
    if record.workload is not None:
        if len(record.workload.prompt) != 2 or len(record.workload.output) != 2:
            raise InputError("record.workload", got="other than two numbers of tokens", needed="fewest and most")
        require_numbers(record.workload, "record.workload", "requests", positive=True)
        require_numbers(record.workload, "record.workload", "prompt", "output", "repeats", "seconds", "load")
