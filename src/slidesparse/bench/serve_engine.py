"""A vLLM engine as ``vllm serve`` runs it, in a process of its own, which serves workloads and says what users felt.

The engine core runs in another process yet, as a server's does: what it answers, asyncio takes in here and hands to
each request's own task, as vLLM's HTTP front end does. HTTP itself is left out.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from slidesparse.bench import serve_timeline
from slidesparse.bench.serve_load import BURST, LONGEST, MIXED, Request, Served, requests
from slidesparse.bench.serve_measured import Measured, Round, StepLog, decode_step, summarise
from slidesparse.bench.serve_power import PowerMeter
from slidesparse.bench.vllm_engine import BATCHED_TOKENS, ENVIRONMENT, Engine, EngineOptions, answer_calls
from slidesparse.served_records import AT_ONCE, DECODE, Step, Workload

T = TypeVar("T")

SEQUENCES = 256
"""Requests that run at a time; more wait."""

SHARE = 0.9
"""Of the GPU's memory, as vLLM takes it."""

WARM_REQUESTS = 100
"""Of the mixed load, after a few bursts, before anything is timed."""

TIMELINE_DELAY = 60
"""Engine steps of the mixed load before its timeline begins: those at its start take whole batches of prompts."""


@dataclass(frozen=True)
class ServeOptions(EngineOptions):
    """One engine that serves.

    Attributes:
        gpus: UUIDs of those that it runs on.
        timeline: Where it writes profiles; None: it makes none.
        timeline_steps: How many steps of a profile.
    """

    gpus: tuple[str, ...] = ()
    timeline: Path | None = None
    timeline_steps: int = 0


class ServedEngine(Engine):
    """The near end of an engine that serves; what it started ends with it."""

    def __init__(self, options: ServeOptions) -> None:
        super().__init__(options, _serve)

    def stop(self) -> None:
        """End it, gently first."""
        super().stop()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)


def _serve(connection: Connection, options: ServeOptions) -> None:
    os.setpgrp()  # the engine's processes end with this one, whatever happens to it
    os.environ.update(ENVIRONMENT | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    if not options.plugin:
        os.environ["VLLM_PLUGINS"] = "none"
    if options.timeline is not None:
        os.environ["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] = "1"
    drivers: list[ServeDriver] = []

    def make() -> ServeDriver:
        drivers.append(ServeDriver(options))
        return drivers[0]

    try:
        answer_calls(connection, make)
    finally:
        for driver in drivers:
            driver.close()


class ServeDriver:
    """The far end: the engine and what can be asked of it."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._steps = StepLog()
        self._served = 0
        self._loop = _event_loop()
        self._llm = self._run(_start(options, self._steps))
        gc.collect()
        gc.freeze()  # as vLLM's server does once it is up
        self._meter = _meter(options.gpus)

    def warm_up(self) -> None:
        """Serve what nobody times: clocks rise, and allocators find their size."""
        for turn in range(3):
            self._serve(requests(BURST, -1 - turn))
        self._serve(requests(MIXED, -1)[:WARM_REQUESTS])

    def measure(self, workload: Workload, rate: float | None) -> Measured:
        """Serve a workload as often as it says.

        Args:
            workload: What is asked.
            rate: Requests a second, of arrivals at random.
        """
        prepared = [requests(workload, turn, rate) for turn in range(workload.repeats)]
        rounds: list[Round] = []
        started = time.perf_counter()
        with self._meter or nullcontext():
            while (done := len(rounds)) < workload.repeats or time.perf_counter() - started < workload.seconds:
                rounds.append(self._round(workload, prepared[done % workload.repeats]))
        wall_s = time.perf_counter() - started
        steps = self._steps if workload.kind == AT_ONCE else StepLog()
        return summarise(rounds, prepared[0], wall_s, steps, self._meter.power if self._meter else None)

    def timeline(self, steps: int) -> list[Step]:
        """Profile this many steps of the mixed load; :data:`TIMELINE_DELAY` pass before."""
        assert self._options.timeline is not None
        asked = requests(MIXED, 0)
        self._run(self._llm.start_profile())
        self._serve(asked)
        self._run(self._llm.stop_profile())
        return serve_timeline.read_steps(_newest(self._options.timeline))[:steps]

    def close(self) -> None:
        """End the engine."""
        self._llm.shutdown()

    def _round(self, workload: Workload, asked: Sequence[Request]) -> Round:
        self._steps.clear()
        started = time.perf_counter()
        answers = self._serve(asked)
        seconds = time.perf_counter() - started
        if workload.kind == DECODE:
            seconds = decode_step(self._steps, workload.requests)
        return Round(seconds, answers)

    def _serve(self, asked: Sequence[Request]) -> list[Served]:
        return self._run(self._serve_all(asked))

    async def _serve_all(self, asked: Sequence[Request]) -> list[Served]:
        self._served += len(asked)
        start = time.perf_counter()
        names = range(self._served - len(asked), self._served)
        tasks = [self._serve_one(request, str(name), start) for request, name in zip(asked, names, strict=True)]
        return list(await asyncio.gather(*tasks))

    async def _serve_one(self, request: Request, name: str, start: float) -> Served:
        arrival = start + request.arrival_s
        if (wait := arrival - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        times, tokens = [], 0
        async for part in self._llm.generate(_input(request.prompt), _sampling(request.output), name):
            times.append(time.perf_counter() - arrival)
            tokens += len(part.outputs[0].token_ids)
        return Served(tuple(times), tokens)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


def _event_loop() -> asyncio.AbstractEventLoop:
    """The one that vLLM's server has."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = import_module("uvloop").new_event_loop()
    return loop


async def _start(options: ServeOptions, steps: StepLog) -> Any:
    from vllm import AsyncLLMEngine
    from vllm.engine.arg_utils import AsyncEngineArgs

    settings: dict[str, Any] = {
        "model": str(options.folder),
        "skip_tokenizer_init": True,  # random weights have none
        "max_model_len": LONGEST,
        "max_num_batched_tokens": BATCHED_TOKENS,
        "max_num_seqs": SEQUENCES,
        "gpu_memory_utilization": options.share,
        "enable_prefix_caching": False,  # random prompts repeat nothing
        "disable_log_stats": True,  # but for our own
        "cudagraph_metrics": True,  # how many tokens a step has
        "additional_config": options.additional,
    }
    if options.timeline is not None:
        settings["profiler_config"] = _profiler(options.timeline, options.timeline_steps)
    arguments = AsyncEngineArgs(**settings | options.arguments)
    return AsyncLLMEngine.from_engine_args(arguments, stat_loggers=[lambda config, index: steps])


def _profiler(folder: Path, steps: int) -> Any:
    from vllm.config import ProfilerConfig

    return ProfilerConfig(
        profiler="torch",
        torch_profiler_dir=str(folder),
        torch_profiler_with_stack=False,
        torch_profiler_use_gzip=False,
        torch_profiler_dump_cuda_time_total=False,
        ignore_frontend=True,
        delay_iterations=TIMELINE_DELAY,
        max_iterations=steps,
    )


def _newest(folder: Path) -> Path:
    traces = sorted(folder.glob("*.pt.trace.json"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise FileNotFoundError(f"vLLM left no trace in {folder}: the load ended before its timeline did")
    return traces[-1]


def _meter(gpus: Sequence[str]) -> PowerMeter | None:
    try:
        return PowerMeter(gpus)
    except Exception as error:  # NVML's errors are its own; nothing else depends on them
        print(f"slidesparse: no power, clocks or energy: {error}", file=sys.stderr)
        return None


def _input(prompt: Sequence[int]) -> Any:
    """A prompt as vLLM's server hands it on, once it is tokens."""
    from vllm.inputs import tokens_input

    return tokens_input(list(prompt))


def _sampling(tokens: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
