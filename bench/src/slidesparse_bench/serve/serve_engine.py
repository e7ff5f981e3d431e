"""An engine of vLLM or SGLang in a process of its own, which serves workloads and says what users felt.

It is asked in process (serve_inside.py, serve_sglang.py); what is asked, and when, is the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from slidesparse.errors import UnsupportedError, first_line
from slidesparse_bench.engine.engine_process import ENVIRONMENT, Engine, answer_calls
from slidesparse_bench.serve.engine_log import first_error
from slidesparse_bench.serve.serve_inside import Inside
from slidesparse_bench.serve.serve_load import BURST, MIXED, Request, Served, requests, soak_requests
from slidesparse_bench.serve.serve_measured import (
    Measured,
    Round,
    StepLog,
    Unmeasured,
    client_step,
    decode_step,
    summarise,
)
from slidesparse_bench.serve.serve_memory import MemoryLog, resident_bytes
from slidesparse_bench.serve.serve_options import ServeOptions
from slidesparse_bench.serve.serve_power import PowerMeter
from slidesparse_bench.serve.serve_sglang import SGLangInside
from slidesparse_bench.serve.serve_soak import verdict
from slidesparse_bench.serve.serve_steady import steady
from slidesparse_bench.served_records import AT_ONCE, DECODE, SGLANG, SOAK, Workload

T = TypeVar("T")

ANSWER_S = 600.0
"""A workload takes at most so long, and the seconds that it asks for."""

WARM_REQUESTS = 100
"""Of the mixed load, after a few bursts, before anything is timed."""


class ServedEngine(Engine):
    """The near end of an engine that serves; what it started ends with it."""

    def __init__(self, options: ServeOptions) -> None:
        super().__init__(options, _serve)

    def measure(self, workload: Workload, rate: float | None) -> Measured:
        """Let the engine serve a workload, and wait as long as that takes.

        Raises:
            UnsupportedError: It failed, or took too long.
        """
        self.ask("measure", workload, rate)
        measured: Measured = self.answer(ANSWER_S + workload.seconds)
        return measured

    def stop(self) -> None:
        """End it, gently first; at once if the wait is interrupted."""
        try:
            super().stop()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid or 0, signal.SIGKILL)


def _serve(connection: Connection, options: ServeOptions) -> None:
    os.setpgrp()  # the engine's processes end with this one, whatever happens to it
    os.environ.update(ENVIRONMENT | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"})
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    os.environ.update(options.environment)
    if not options.plugin:
        os.environ.update(VLLM_PLUGINS="none", SGLANG_PLUGINS="none")
    if options.log is not None:
        _write_into(options.log)
    drivers: list[ServeDriver] = []

    def make() -> ServeDriver:
        drivers.append(ServeDriver(options))
        return drivers[0]

    try:
        answer_calls(connection, make, partial(_tell, options.log))
    finally:
        for driver in drivers:
            driver.close()


def _write_into(log: Path) -> None:
    """Let this process, and the engine's that it starts, write into a file what they would print."""
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


def _tell(log: Path | None, error: Exception) -> str:
    """Say what an error is, and the cause where the log has it: vLLM's engine core fails in a process of its own."""
    cause = None if log is None else first_error(log)
    told = first_line(error)
    return told if cause is None or cause in told else f"{told}; {cause}"


class ServeDriver:
    """The far end: the engine and what can be asked of it."""

    def __init__(self, options: ServeOptions) -> None:
        self._options = options
        self._served = 0
        self._loop = _event_loop()
        front = SGLangInside if options.server == SGLANG else Inside
        self._front: Inside = self._run(front.start(options))
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

        Raises:
            UnsupportedError: The engine ended, or answered nothing.
        """
        if workload.kind == SOAK:
            assert rate is not None
            return self._soak(workload, rate)
        prepared = [requests(workload, turn, rate) for turn in range(workload.repeats)]
        rounds: list[Round] = []
        started = time.perf_counter()
        try:
            with self._meter or nullcontext():
                while (done := len(rounds)) < workload.repeats or time.perf_counter() - started < workload.seconds:
                    rounds.append(self._round(workload, prepared[done % workload.repeats]))
        except Unmeasured as why:
            nothing = summarise([], prepared[0], time.perf_counter() - started, None, None)
            return dataclasses.replace(nothing, why_not=str(why))
        wall_s = time.perf_counter() - started
        steps = self._front.steps
        if steps is not None and workload.kind != AT_ONCE:
            steps = StepLog()
        found = steady(rounds, self._meter) if workload.kind == AT_ONCE else None
        return summarise(rounds, prepared[0], wall_s, steps, self._meter.power if self._meter else None, found)

    def _soak(self, workload: Workload, rate: float) -> Measured:
        asked = soak_requests(workload, rate)
        memory = MemoryLog(
            {
                "host": lambda: resident_bytes(os.getpid()),
                "gpu": lambda: self._meter.memory_bytes() if self._meter else None,
            }
        )
        with memory, self._meter or nullcontext():
            one = self._round(workload, asked)
        stood = verdict(asked, one.answers, memory.growth("gpu"), memory.growth("host"))
        steps = None if self._front.steps is None else StepLog()
        power = self._meter.power if self._meter else None
        return dataclasses.replace(summarise([one], asked, one.seconds, steps, power), soak=stood)

    def close(self) -> None:
        """End the engine."""
        self._run(self._front.close())

    def _round(self, workload: Workload, asked: Sequence[Request]) -> Round:
        steps = self._front.steps
        if steps is not None:
            steps.clear()
        started = time.perf_counter()
        answers = self._serve(asked)
        seconds = time.perf_counter() - started
        if workload.kind == DECODE:
            seconds = client_step(answers) if steps is None else decode_step(steps, workload.requests)
        lost = sum(answer.tokens != request.output for request, answer in zip(asked, answers, strict=True))
        return Round(seconds, answers, lost, started)

    def _serve(self, asked: Sequence[Request]) -> list[Served]:
        answers = self._run(self._serve_all(asked))
        errors = [answer.error for answer in answers if answer.error is not None]
        if len(errors) == len(asked):
            raise UnsupportedError("the engine answered no request", got=errors[0])
        return answers

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
        return await self._front.answer(request, name, arrival)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)


def _event_loop() -> asyncio.AbstractEventLoop:
    """The one that vLLM's server has."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = import_module("uvloop").new_event_loop()
    return loop


def _meter(gpus: Sequence[str]) -> PowerMeter | None:
    try:
        return PowerMeter(gpus)
    except Exception as error:  # NVML's errors are its own; nothing else depends on them
        print(f"slidesparse: no power, clocks or energy: {error}", file=sys.stderr)
        return None
