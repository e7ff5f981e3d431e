"""What became of a workload: times of its repeats and of their engine steps, and what its users waited."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slidesparse.bench.serve_load import Request, Served, between, to_first
from slidesparse.served_records import Latency, Power


@dataclass(frozen=True)
class Measured:
    """What became of a workload.

    Attributes:
        seconds: Of each repeat; of decoding, the median step of each.
        prompt_tokens: Taken in by each repeat.
        output_tokens: Given by each repeat.
        wall_s: All repeats together, as the GPU's energy was counted.
        first: Time to the first token, of all requests.
        between: Time between tokens, of all requests.
        lost: Requests that did not get all their tokens.
        step_tokens: Tokens of each engine step of the last repeat, where all is asked at once.
        step_us: What that step took.
        power: Of the GPU; None where it would not say.
    """

    seconds: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    wall_s: float
    first: Latency | None
    between: Latency | None
    lost: int
    step_tokens: tuple[int, ...]
    step_us: tuple[int, ...]
    power: Power | None


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
    """One repeat: what it took, and what became of each request."""

    seconds: float
    answers: list[Served]


def summarise(
    rounds: Sequence[Round], asked: Sequence[Request], wall_s: float, steps: StepLog, power: Power | None
) -> Measured:
    """Sum up the repeats of a workload."""
    answers = [answer for one in rounds for answer in one.answers]
    outputs = [request.output for request in asked]
    whole = sorted(outputs) * len(rounds)
    return Measured(
        seconds=tuple(one.seconds for one in rounds),
        prompt_tokens=sum(len(request.prompt) for request in asked),
        output_tokens=sum(outputs),
        wall_s=wall_s,
        first=to_first(answers),
        between=between(answers),
        lost=sum(given != due for given, due in zip(_by_round(rounds), whole, strict=True)),
        step_tokens=tuple(steps.tokens),
        step_us=tuple(round(1e6 * seconds) for seconds in steps.seconds),
        power=power,
    )


def _by_round(rounds: Sequence[Round]) -> list[int]:
    """Tokens of all answers, in order within each round: its requests are the same lengths in another order."""
    return [tokens for one in rounds for tokens in sorted(answer.tokens for answer in one.answers)]


def decode_step(steps: StepLog, sequences: int) -> float:
    """Return the median seconds of a step in which this many sequences run and nothing else does.

    Raises:
        ValueError: There was no such step.
    """
    found = [
        seconds
        for tokens, seconds in list(zip(steps.tokens, steps.seconds, strict=True))[2:]  # not those that took prompts in
        if tokens == sequences
    ]
    if not found:
        raise ValueError(f"no step in which {sequences} sequences decode: {sorted(set(steps.tokens))[:20]} tokens")
    return statistics.median(found)
