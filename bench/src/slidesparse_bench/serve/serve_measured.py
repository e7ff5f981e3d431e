"""What became of a workload: times of its repeats and of their engine steps, and what its users waited."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from slidesparse_bench.serve.serve_load import Request, Served, between, to_first
from slidesparse_bench.served_figures import Latency, Power, Soak, Steady


class Unmeasured(Exception):
    """A workload was served, but not so that its figure exists."""


@dataclass(frozen=True)
class Measured:
    """What became of a workload.

    Attributes:
        seconds: Of each repeat; of decoding, the median step of each, or of SGLang :func:`client_step`.
        prompt_tokens: Asked of each repeat.
        output_tokens: Given by each repeat, a mean where some were lost; 0 where nobody could measure.
        wall_s: All repeats together, as the GPU's energy was counted.
        first: Time to the first token, of all requests.
        between: Time between tokens, of all requests.
        lost: Requests that did not get all their tokens.
        error: What the first request that failed was told; None where none failed.
        step_tokens: Tokens of each engine step of the last repeat, where all is asked at once; None where nobody sees
            the engine's steps.
        step_us: What that step took.
        power: Of the GPU; None where it would not say.
        steady: The GPU while requests waited for a place; None of workloads in which none do.
        soak: The verdict on a load that lasts.
        why_not: Why there are no times though the workload was served; None where there are.
    """

    seconds: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    first: Latency | None
    between: Latency | None
    lost: int
    step_tokens: tuple[int, ...] | None
    step_us: tuple[int, ...] | None
    power: Power | None
    steady: Steady | None = None
    error: str | None = None
    soak: Soak | None = None
    why_not: str | None = None


@dataclass
class StepLog:
    """Tokens and time of every engine step, out of the statistics that vLLM's engine core sends with its answers."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    _last: float = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """Called by vLLM, once a step. A step takes what its sequences waited for their token, on the core's clock."""
        if iteration_stats is None:
            return
        graph = getattr(scheduler_stats, "cudagraph_stats", None)
        counted = iteration_stats.num_prompt_tokens + len(iteration_stats.inter_token_latencies_iter)
        self.tokens.append(counted if graph is None else int(graph.num_unpadded_tokens))
        now = iteration_stats.iteration_timestamp
        self.seconds.append(min(iteration_stats.inter_token_latencies_iter, default=now - (self._last or now)))
        self._last = now

    def log(self) -> None:
        """Nothing to say."""

    def log_engine_initialized(self) -> None:
        """Nothing to say."""

    def clear(self) -> None:
        """Forget all steps."""
        self.tokens, self.seconds, self._last = [], [], 0.0


@dataclass(frozen=True)
class Round:
    """One repeat.

    Attributes:
        seconds: What it took.
        answers: What became of each request.
        lost: How many requests did not get all their tokens.
        started: On the clock of time.perf_counter.
    """

    seconds: float
    answers: list[Served]
    lost: int
    started: float


def summarise(
    rounds: Sequence[Round],
    asked: Sequence[Request],
    wall_s: float,
    steps: StepLog | None,
    power: Power | None,
    steady: Steady | None = None,
) -> Measured:
    """Sum up the repeats of a workload."""
    answers = [answer for one in rounds for answer in one.answers]
    given = round(sum(answer.tokens for answer in answers) / len(rounds)) if rounds else 0
    return Measured(
        seconds=tuple(one.seconds for one in rounds),
        prompt_tokens=sum(len(request.prompt) for request in asked),
        output_tokens=given,
        wall_s=wall_s,
        first=to_first(answers),
        between=between(answers),
        lost=sum(one.lost for one in rounds),
        step_tokens=None if steps is None else tuple(steps.tokens),
        step_us=None if steps is None else tuple(round(1e6 * seconds) for seconds in steps.seconds),
        power=power,
        steady=steady,
        error=next((answer.error for answer in answers if answer.error is not None), None),
    )


def decode_step(steps: StepLog, sequences: int) -> float:
    """Return the median seconds of a step in which this many sequences run and nothing else does.

    Raises:
        Unmeasured: There was no such step.
    """
    found = [
        seconds
        for tokens, seconds in list(zip(steps.tokens, steps.seconds, strict=True))[2:]  # not those that took prompts in
        if tokens == sequences
    ]
    if not found:
        raise Unmeasured(f"no step in which {sequences} sequences decode: {sorted(set(steps.tokens))[:20]} tokens")
    return statistics.median(found)


def client_step(answers: Sequence[Served]) -> float:
    """Return the median seconds between tokens, as clients see them, while every request decodes.

    That is from the last request's first token on, until the first request has its last.

    Raises:
        Unmeasured: Nobody got two tokens in that time.
    """
    times = [answer.times for answer in answers if answer.times]
    begin = max((of_one[0] for of_one in times), default=0.0)
    end = min((of_one[-1] for of_one in times), default=0.0)
    found = [
        after - before for of_one in times for before, after in pairwise(of_one) if begin <= before and after <= end
    ]
    if not found:
        raise Unmeasured(f"no time in which all {len(answers)} sequences decode")
    return statistics.median(found)
