"""``bench serve``: what users of a loaded server feel, engine after engine, each alone as its server has it.

For every model and type: stock dense vLLM or SGLang, a control (the plugin with every layer dense and joined, so that
what fusion gives and what sparsity gives are told apart), each pattern, other stock engines if asked for, in vLLM stock
with CUDA graphs as large as the plugin captures, and stock again. Each engine is a fresh process, whose engine core is
in one of its own, and serves the workloads of serve_load.py.

Records are appended as they come, and a run that finds its file goes on where the last one ended. An engine that dies
is a record, and the others go on; a run that continues does not start it again.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from slidesparse.base.counted import counted
from slidesparse.base.file_lock import file_lock
from slidesparse.errors import InputError, UnsupportedError, system_words
from slidesparse.integrations import NAME
from slidesparse_bench import environment
from slidesparse_bench.comparison import now
from slidesparse_bench.engine.eagle_head import STEPS, eagle_settings
from slidesparse_bench.engine.vllm_checkpoint import ARCHITECTURES
from slidesparse_bench.kernels.linear import AUTO
from slidesparse_bench.kernels.operands import AUTO_SIX_BITS
from slidesparse_bench.records import DENSE_VARIANT, Machine
from slidesparse_bench.serve.serve_checkpoints import (
    ready_checkpoint,
    ready_draft,
    removable,
    require_space,
    scratch_folder,
)
from slidesparse_bench.serve.serve_engine import ServedEngine
from slidesparse_bench.serve.serve_load import MIXED
from slidesparse_bench.serve.serve_measured import Measured
from slidesparse_bench.serve.serve_memory import require_free
from slidesparse_bench.serve.serve_options import SHARE, ServeOptions
from slidesparse_bench.serve.serve_profile import ServeProfile
from slidesparse_bench.serve.serve_run import ServeRun
from slidesparse_bench.served_records import (
    AT_ONCE,
    DECODE,
    SGLANG,
    STOCK,
    VLLM,
    EngineKey,
    ServeRecord,
    Way,
    Workload,
    resume,
)

NEEDS = {VLLM: ("vLLM", 'pip install ".[vllm]" in a checkout of slidesparse'), SGLANG: ("SGLang", "pip install sglang")}

SAME = ("gpu", "driver", "torch", "vllm")
"""What all records of a file share: engines are compared with one another, and arrivals go by what stock took."""


@dataclass(frozen=True)
class ServeSummary:
    """What a run did.

    Attributes:
        path: The records file.
        records: How many it holds now.
        added: How many of them this run wrote.
        failed: Engines that died, in this run or an earlier one, and why.
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


def run(profile: ServeProfile, path: Path, scratch: Path | None = None) -> ServeSummary:
    """Measure what the file does not hold yet, and append a record as soon as it exists.

    Args:
        profile: What.
        path: The records file, new or of an earlier run.
        scratch: Where checkpoints are written, and kept for a later run of the same model and type; a temporary folder
            when None.

    Raises:
        InputError: The file holds something else, was measured elsewhere or is added to by another run, or requests
            are to arrive at a share of what no stock engine took.
        UnsupportedError: No GPU, too few, one that others hold; no server; a full disk.
    """
    environment.require_gpu()  # first: who has no GPU shall not install vLLM for nothing
    if find_spec(profile.server) is None:
        name, remedy = NEEDS[profile.server]
        raise UnsupportedError(f"slidesparse bench serve needs {name}", remedy=remedy)
    if torch.cuda.device_count() < profile.gpus:
        raise UnsupportedError("--gpus", got=torch.cuda.device_count(), needed=f"{profile.gpus} on this machine")
    with _alone(path), scratch_folder(scratch) as folder:
        found, machine = resume(path), environment.machine()
        _require_same(path, (one.machine for one in found), machine)
        server = VLLM if profile.server == VLLM else f"{SGLANG} {version(SGLANG)}"
        speculation = None if profile.eagle is None else f"EAGLE-3 by {STEPS} with {profile.eagle:g} tokens a step"
        way = Way(server, speculation=speculation)
        run_ = ServeRun(profile, path, folder, machine, time.monotonic(), way, found)
        asked = [profile.keys(model, dtype) for model in profile.models for dtype in profile.dtypes]
        ahead = [[key for key in keys if run_.missing(key)] for keys in asked]
        if any(ahead):
            require_free(environment.uuids(profile.gpus), SHARE)
        for keys in ahead:
            _require(run_, keys)
        _tell_ahead(run_, [key for keys in ahead for key in keys])
        waiting = [key for keys in asked for key in _serve_all(run_, keys)]
    died = [r for r in run_.found if r.died and r.way == way and any(r.key in keys for keys in asked)]
    return ServeSummary(
        path=str(path),
        records=len(run_.found),
        added=run_.added,
        failed={_name(r.key): r.why_not or "" for r in died} | run_.failed,
        waiting=tuple(map(_name, waiting)),
    )


def _require_same(path: Path, before: Iterable[Machine], machine: Machine) -> None:
    """Refuse to add to records of another GPU or of other libraries; what a machine would not say is no difference."""
    for earlier in before:
        for name in SAME:
            was, now_is = getattr(earlier, name), getattr(machine, name)
            if None not in (was, now_is) and was != now_is:
                raise InputError(
                    f"{path} was measured elsewhere",
                    got=f"{name} {was} there",
                    needed=f"{now_is} as here",
                    remedy="name a new file with --out",
                )


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a file that can be added to: a second run would measure what this one does, at the same time.

    Raises:
        InputError: The file cannot be written, or another run holds it.
    """
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise InputError("--out", got=system_words(error), needed="a file that can be written") from error
    try:
        with file_lock(path, 0) as held:
            if not held:
                remedy = "wait for its end, or name another file with --out"
                raise InputError(f"another bench serve adds to {path}", needed="one at a time", remedy=remedy)
            yield
    finally:
        if new and not path.stat().st_size:
            path.unlink()


def _require(run_: ServeRun, keys: list[EngineKey]) -> None:
    """Refuse what cannot end well before any engine is started."""
    if not keys:
        return
    require_space(run_.scratch, keys, removable(run_.profile, keys[0]))
    random = [workload.name for key in keys for workload in run_.missing(key) if workload.load]
    if random and not run_.stock_counts(keys[0]):
        raise InputError(
            f"{random[0]} of what stock takes",
            got="no stock engine that serves the mixed load",
            needed=f"{STOCK} among --engines, and {MIXED.name} among --workloads, or a file that holds both",
        )


def _tell_ahead(run_: ServeRun, keys: Sequence[EngineKey]) -> None:
    """Say what will run, and how long that takes by a guess."""
    if not keys:
        return
    minutes, names = sum(map(run_.guess_s, keys)) / 60, ", ".join(map(_name, keys))
    line = f"about {minutes:.0f} minutes for {counted(len(keys), 'engine')}: {names}"
    loads = [workload.name for workload in run_.missing(keys[0]) if workload.load]
    if loads and run_.stock_comes(keys[0]):
        line += f"; stock serves the mixed load first, as {', '.join(loads)} will be a share of what it takes"
    _tell(line)


def _serve_all(run_: ServeRun, keys: Sequence[EngineKey]) -> list[EngineKey]:
    """Run the engines of a model and type; returns those that the budget left out."""
    for key in keys:
        if not run_.missing(key):
            continue
        if run_.spent(key):
            break
        began = time.monotonic()
        _serve_one(run_, key)
        run_.longest_s = max(run_.longest_s, time.monotonic() - began)
    return [key for key in keys if run_.missing(key) and _name(key) not in run_.failed]


def _serve_one(run_: ServeRun, key: EngineKey) -> None:
    """Start an engine and let it serve what it has not served; a record says where it died."""
    workload: Workload | None = None
    options = _options(run_, key)
    record = ServeRecord(key, None, run_.machine, now(), **vars(run_.way))
    began = time.monotonic()
    _tell(f"{_name(key)}: starting")
    engine = ServedEngine(options)
    try:
        engine.ready()
        record = dataclasses.replace(record, start_s=round(time.monotonic() - began, 1))
        _tell(f"{_name(key)}: up after {record.start_s:.0f} s")
        engine.call("warm_up")
        for workload in run_.missing(key):
            rate = _rate(run_, key, workload)
            measured: Measured = engine.measure(workload, rate)
            run_.write(_record(record, workload, rate, measured))
            _tell(f"{_name(key)}: {_told(workload, measured)}")
    except UnsupportedError as error:
        _tell(f"{_name(key)}: died: {error}; see {options.log}")
        run_.failed[_name(key)] = str(error)
        run_.write(dataclasses.replace(record, workload=workload, why_not=str(error)))
    finally:
        engine.stop()


def _rate(run_: ServeRun, key: EngineKey, workload: Workload) -> float | None:
    if workload.kind in (AT_ONCE, DECODE):
        return None
    saturation = run_.saturation(key)
    if saturation is None:
        raise UnsupportedError(f"{workload.name} of what stock takes", got="no stock engine that served the mixed load")
    return workload.load * saturation


def _record(record: ServeRecord, workload: Workload, rate: float | None, measured: Measured) -> ServeRecord:
    found: dict[str, Any] = {name.name: getattr(measured, name.name) for name in dataclasses.fields(measured)}
    return dataclasses.replace(record, workload=workload, rate=rate, **found)


def _options(run_: ServeRun, key: EngineKey) -> ServeOptions:
    """Write an engine's checkpoint, unless it is there already, and say how to serve it."""
    folder = ready_checkpoint(run_.scratch, key, removable(run_.profile, key))
    arguments: dict[str, Any] = {"quantization": "slidesparse"} if key.dtype == "bf16" and key.backend else {}
    if key.graphs is not None:
        arguments["compilation_config"] = {"max_cudagraph_capture_size": key.graphs}
    if key.gpus > 1:
        arguments["tp_size" if run_.profile.server == SGLANG else "tensor_parallel_size"] = key.gpus
    if key.backend and key.pattern == DENSE_VARIANT and run_.profile.server == VLLM:
        arguments["quantization"] = NAME  # there is no marker; in SGLang the options say it
    profile, forced = run_.profile, dict[str, str]()
    if profile.eagle is not None:
        drafts, forced = eagle_settings(profile.server, ready_draft(run_.scratch, key), profile.eagle)
        arguments |= drafts
    return ServeOptions(
        folder,
        bool(key.backend),
        {"slidesparse": _own_options(key)} if key.backend else {},
        arguments,
        share=SHARE,
        gpus=tuple(environment.uuids(key.gpus)),
        log=_log_of(run_.path, key),
        server=profile.server,
        environment=forced,
    )


def _log_of(path: Path, key: EngineKey) -> Path:
    """Where an engine's output goes: a file of its own, since what it says of its layers explains what it serves."""
    name = re.sub(r"[^\w.]+", "-", _name(key))
    return path.with_name(f"{path.name}.{name}.log")


def _own_options(key: EngineKey) -> dict[str, str]:
    """Options of the plugin: experts go with the linears, as they come, all sparse, or in the control all dense."""
    backend = AUTO if key.backend == AUTO_SIX_BITS else key.backend
    experts = backend if backend in (AUTO, "dense") else "sparse"
    return {"backend": backend} | ({"experts": experts} if ARCHITECTURES[key.model].mixture is not None else {})


def _name(key: EngineKey) -> str:
    return f"{key.model} {key.dtype} {key.engine}"


def _told(workload: Workload, measured: Measured) -> str:
    """One line for who waits."""
    if measured.why_not is not None:
        return f"{workload.name}: served, but not measured: {measured.why_not}"
    median = statistics.median(measured.seconds)
    return f"{workload.name}: {1e3 * median:.1f} ms, the median of {len(measured.seconds)}"


def _tell(line: str) -> None:
    print(f"slidesparse: {line}", file=sys.stderr, flush=True)
