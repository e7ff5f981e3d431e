"""``bench serve``: what users of a loaded server feel, engine after engine, each alone as ``vllm serve`` has it.

For every model and type: stock dense vLLM, a control (the plugin with every layer dense and joined, so that what fusion
gives and what sparsity gives are told apart), each pattern, and stock again. Each engine is a fresh process, whose
engine core runs in one of its own, and serves the workloads of bench/serve_load.py.

Records are appended as they come, and a run that finds its file goes on where the last one ended. An engine that dies
is a record, and the others go on; a run that continues does not start it again.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from slidesparse.bench import environment
from slidesparse.bench.comparison import now
from slidesparse.bench.serve_engine import SHARE, ServedEngine, ServeOptions
from slidesparse.bench.serve_load import MIXED
from slidesparse.bench.serve_measured import Measured
from slidesparse.bench.serve_plan import DTYPES, ServeProfile
from slidesparse.bench.vllm_checkpoint import ARCHITECTURES, model_config, write_checkpoint
from slidesparse.errors import UnsupportedError
from slidesparse.pattern import Pattern
from slidesparse.quant import parse_dtype
from slidesparse.records import DENSE_VARIANT, Machine, open_records
from slidesparse.served_records import (
    ARRIVALS,
    STOCK,
    EngineKey,
    ServeRecord,
    TimelineRecord,
    Workload,
    read,
    to_line,
)

FIRST_GUESS_S = 150.0
"""What an engine takes, before one has."""


@dataclass(frozen=True)
class ServeSummary:
    """What a run did.

    Attributes:
        path: The records file.
        records: How many it holds now.
        added: How many of them this run wrote.
        failed: Engines that died, and why.
        waiting: Engines that still have to run: the budget was spent.
    """

    path: str
    records: int
    added: int
    failed: dict[str, str]
    waiting: tuple[str, ...]

    def describe(self) -> str:
        """Lines for people."""
        lines = [f"{self.added} records more, {self.records} in all: {self.path}"]
        lines += [f"died: {engine}: {why}" for engine, why in self.failed.items()]
        if self.waiting:
            lines.append(f"not run yet, run the same command again: {', '.join(self.waiting)}")
        return "\n".join(lines)


@dataclass
class _Run:
    """One run: what was measured before, and where what comes goes."""

    profile: ServeProfile
    path: Path
    scratch: Path
    machine: Machine
    started: float
    found: list[ServeRecord] = field(default_factory=list)
    profiled: list[TimelineRecord] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    added: int = 0
    longest_s: float = 0.0

    def write(self, record: ServeRecord | TimelineRecord) -> None:
        with open_records(self.path, "a") as file:
            file.write(to_line(record) + "\n")
        self.added += 1
        if isinstance(record, ServeRecord):
            self.found.append(record)
        else:
            self.profiled.append(record)

    def missing(self, key: EngineKey) -> list[Workload]:
        """What an engine has still to serve: nothing once it died."""
        mine = [record for record in self.found if record.key == key]
        if any(record.why_not is not None for record in mine) or any(step.key == key for step in self.profiled):
            return []
        done = [record.workload for record in mine]
        return [workload for workload in self.profile.workloads if workload not in done]

    def spent(self) -> bool:
        """Whether another engine would end after the budget."""
        if self.profile.budget_s is None:
            return False
        return time.monotonic() - self.started + (self.longest_s or FIRST_GUESS_S) > self.profile.budget_s

    def saturation(self, key: EngineKey) -> float | None:
        """Requests a second that stock took of the mixed load."""
        stock = dataclasses.replace(key, engine=STOCK, pattern=DENSE_VARIANT, backend="", graphs=None)
        taken = [r.seconds for r in self.found if r.key == stock and r.workload == MIXED and r.why_not is None]
        return MIXED.requests / statistics.median(taken[-1]) if taken else None


def run(profile: ServeProfile, path: Path, scratch: Path | None = None) -> ServeSummary:
    """Measure what the file does not hold yet, and append a record as soon as it exists.

    Args:
        profile: What.
        path: The records file, new or of an earlier run.
        scratch: Where checkpoints are written, and kept for a later run of the same model and type; a temporary folder
            when None.

    Raises:
        InputError: The file holds something else.
        UnsupportedError: No GPU, too few, or no vLLM.
    """
    environment.require_cuda()
    if find_spec("vllm") is None:
        raise UnsupportedError("slidesparse bench serve needs vLLM", remedy='pip install "slidesparse[vllm]"')
    if torch.cuda.device_count() < profile.gpus:
        raise UnsupportedError("--gpus", got=torch.cuda.device_count(), needed=f"{profile.gpus} on this machine")
    timeline = profile.timeline is not None
    before = [path] if path.exists() and path.stat().st_size else []
    with _scratch(scratch) as folder:
        run_ = _Run(profile, path, folder, environment.machine(), time.monotonic())
        if timeline:
            run_.profiled = read(TimelineRecord, before)
        else:
            run_.found = read(ServeRecord, before)
        waiting = [
            key for model in profile.models for dtype in profile.dtypes for key in _serve_all(run_, model, dtype)
        ]
    return ServeSummary(
        path=str(path),
        records=len(run_.profiled if timeline else run_.found),
        added=run_.added,
        failed={_name(r.key): r.why_not for r in run_.found if r.why_not is not None} | run_.failed,
        waiting=tuple(map(_name, waiting)),
    )


@contextmanager
def _scratch(folder: Path | None) -> Iterator[Path]:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def _serve_all(run_: _Run, model: str, dtype: str) -> list[EngineKey]:
    """Run the engines of a model and type; returns those that the budget left out."""
    keys = run_.profile.keys(model, dtype)
    for key in keys:
        if not run_.missing(key):
            continue
        if run_.spent():
            break
        began = time.monotonic()
        _serve_one(run_, key)
        run_.longest_s = max(run_.longest_s, time.monotonic() - began)
    return [key for key in keys if run_.missing(key) and _name(key) not in run_.failed]


def _serve_one(run_: _Run, key: EngineKey) -> None:
    """Start an engine and let it serve what it has not served; a record says where it died."""
    workload: Workload | None = None
    options = _options(run_, key)
    record = ServeRecord(key, None, run_.machine, now())
    began = time.monotonic()
    _tell(f"{_name(key)}: starting")
    engine = ServedEngine(options)
    try:
        engine.ready()
        record = dataclasses.replace(record, start_s=round(time.monotonic() - began, 1))
        _tell(f"{_name(key)}: up after {record.start_s:.0f} s")
        engine.call("warm_up")
        if run_.profile.timeline is not None:
            for step in engine.call("timeline", run_.profile.timeline):
                run_.write(TimelineRecord(key, run_.machine, record.started, step))
            return
        for workload in run_.missing(key):
            rate = _rate(run_, key, workload)
            measured: Measured = engine.call("measure", workload, rate)
            run_.write(_record(record, workload, rate, measured))
            _tell(f"{_name(key)}: {_told(workload, measured)}")
    except UnsupportedError as error:
        _tell(f"{_name(key)}: died: {error}")
        run_.failed[_name(key)] = str(error)
        if run_.profile.timeline is None:
            run_.write(dataclasses.replace(record, workload=workload, why_not=str(error)))
    finally:
        engine.stop()


def _rate(run_: _Run, key: EngineKey, workload: Workload) -> float | None:
    if workload.kind != ARRIVALS:
        return None
    saturation = run_.saturation(key)
    if saturation is None:
        raise UnsupportedError(f"{workload.name} of what stock takes", got="no stock engine that served the mixed load")
    return workload.load * saturation


def _record(record: ServeRecord, workload: Workload, rate: float | None, measured: Measured) -> ServeRecord:
    found: dict[str, Any] = {name.name: getattr(measured, name.name) for name in dataclasses.fields(measured)}
    return dataclasses.replace(record, workload=workload, rate=rate, **found)


def _options(run_: _Run, key: EngineKey) -> ServeOptions:
    """Write an engine's checkpoint, unless it is there already, and say how to serve it."""
    folder = _folder(run_, key)
    if not folder.exists():
        _make_room(run_, key)
        _write(folder, key)
    arguments: dict[str, Any] = {"quantization": "slidesparse"} if key.dtype == "bf16" and key.backend else {}
    if key.graphs is not None:
        arguments["compilation_config"] = {"max_cudagraph_capture_size": key.graphs}
    if key.gpus > 1:
        arguments["tensor_parallel_size"] = key.gpus
    profile = run_.profile
    traces = None if profile.timeline is None else run_.scratch / f"traces-{len(run_.profiled)}"
    return ServeOptions(
        folder,
        bool(key.backend),
        {"slidesparse": {"backend": key.backend}} if key.backend else {},
        arguments,
        share=SHARE,
        gpus=tuple(environment.uuids(key.gpus)),
        timeline=traces,
        timeline_steps=profile.timeline or 0,
    )


def _folder(run_: _Run, key: EngineKey) -> Path:
    return run_.scratch / f"{key.model}-{key.layers}-{key.dtype}-{key.pattern.replace(':', 'of')}"


def _make_room(run_: _Run, key: EngineKey) -> None:
    """Remove the checkpoints of other models and types: a disk may hold those of one."""
    for model in ARCHITECTURES:
        for dtype in DTYPES:
            if (model, dtype) != (key.model, key.dtype):
                for other in run_.profile.keys(model, dtype):
                    shutil.rmtree(_folder(run_, other), ignore_errors=True)


def _write(folder: Path, key: EngineKey) -> None:
    """All of it or nothing: a run may be stopped meanwhile."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    device = torch.device("cuda", torch.cuda.current_device())
    config = model_config(key.model, key.layers)
    write_checkpoint(partial, config, parse_dtype(key.dtype), Pattern.parse(key.pattern), device)
    torch.cuda.empty_cache()
    partial.rename(folder)


def _name(key: EngineKey) -> str:
    return f"{key.model} {key.dtype} {key.engine}"


def _told(workload: Workload, measured: Measured) -> str:
    """One line for who waits."""
    median = statistics.median(measured.seconds)
    return f"{workload.name}: {1e3 * median:.1f} ms, the median of {len(measured.seconds)}"


def _tell(line: str) -> None:
    print(f"slidesparse: {line}", file=sys.stderr, flush=True)
