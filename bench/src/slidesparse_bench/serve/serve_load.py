"""What a server is asked in ``bench serve``: workloads, the requests that they consist of, and what users felt.

All is drawn from fixed seeds, so every engine is asked the same; a workload that is repeated asks for the same lengths
in another order, with other tokens.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise

from slidesparse_bench.served_figures import Latency
from slidesparse_bench.served_records import ARRIVALS, AT_ONCE, BURST_LOAD, DECODE, MIXED_LOAD, SOAK, Workload

SEED = 18

FIRST_TOKEN, VOCABULARY = 10, 100_000
"""Token ids of random prompts."""


BURST = Workload(BURST_LOAD, AT_ONCE, 16, (1024, 1024), (1, 1), repeats=5, seconds=10.0)
MIXED = Workload(MIXED_LOAD, AT_ONCE, 1000, (64, 1024), (32, 256), repeats=2)
LONG = Workload("long", AT_ONCE, 8, (8192, 8192), (1, 1), repeats=5, seconds=10.0)
LOADS = tuple(
    replace(MIXED, name=f"arrivals at {share:.0%}", kind=ARRIVALS, repeats=1, load=share) for share in (0.5, 0.8)
)


def decode(sequences: int, context: int) -> Workload:
    """Return a workload in which this many sequences decode, each with this many tokens or a few less."""
    steps = 64
    return Workload(
        f"decode {sequences} at {context}",
        DECODE,
        sequences,
        (context - steps, context - steps),
        (steps, steps),
        repeats=5,
    )


def soak(seconds: float) -> Workload:
    """Return a workload of requests at random for so long, at the larger share of :data:`LOADS`."""
    return replace(LOADS[-1], name=f"{ARRIVALS}, {SOAK}", kind=SOAK, seconds=seconds)


QUICK = (BURST, MIXED, decode(64, 80))
FULL = (
    BURST,
    MIXED,
    *LOADS,
    LONG,
    *(decode(sequences, context) for context in (80, 600) for sequences in (16, 64, 256)),
)

ANSWERS = tuple(  # for speculation, where a step gives no set number of tokens
    Workload(f"answers {sequences}", AT_ONCE, sequences, (128, 128), (256, 256), repeats=5) for sequences in (1, 8, 64)
)

NAMED = (
    *FULL,
    *(decode(sequences, context) for context in (80, 600) for sequences in (1, 4, 8)),
    *(decode(sequences, 8192) for sequences in (1, 8, 64)),
    *ANSWERS,
)
"""All that a user may ask for by name."""

LONGEST = 8192 + 64
"""Tokens of a request, with its answer."""


@dataclass(frozen=True)
class Request:
    """One request: its prompt, how many tokens it gets, and when it comes, in seconds."""

    prompt: tuple[int, ...]
    output: int
    arrival_s: float = 0.0


def requests(workload: Workload, turn: int, rate: float | None = None) -> list[Request]:
    """The requests of one repeat.

    Args:
        workload: What is asked.
        turn: Which repeat.
        rate: Of ``arrivals``, requests a second.
    """
    sizes = random.Random(SEED)
    lengths = [(sizes.randint(*workload.prompt), sizes.randint(*workload.output)) for _ in range(workload.requests)]
    dice = random.Random(f"{SEED} {workload.name} {turn}")
    dice.shuffle(lengths)
    at, asked = 0.0, []
    for prompt, output in lengths:
        at += dice.expovariate(rate) if rate is not None else 0.0
        asked.append(Request(tuple(dice.choices(range(FIRST_TOKEN, VOCABULARY), k=prompt)), output, at))
    return asked


SOAK_TURNS = 4
"""Repeats of a soak with tokens of their own; then they come again, at other times."""


def soak_requests(workload: Workload, rate: float) -> list[Request]:
    """The requests of a soak, in the order in which they come.

    Args:
        workload: Of the kind ``soak``.
        rate: Requests a second.
    """
    drawn = [request for turn in range(SOAK_TURNS) for request in requests(workload, turn)]
    dice = random.Random(f"{SEED} {workload.name}")
    at, asked = dice.expovariate(rate), list[Request]()
    for request in cycle(drawn):
        if at > workload.seconds and asked:
            break
        asked.append(replace(request, arrival_s=at))
        at += dice.expovariate(rate)
    return asked


@dataclass(frozen=True)
class Served:
    """One request as its user saw it.

    Attributes:
        times: Seconds from its arrival to each part of the answer.
        tokens: Of the whole answer.
        error: What its user was told in place of an answer; None where there was no error.
    """

    times: tuple[float, ...]
    tokens: int
    error: str | None = None


def latency(seconds: Sequence[float]) -> Latency | None:
    """Of some waits; None of none.

    >>> latency([0.2, 0.1, 0.3])
    Latency(p50_ms=200.0, p99_ms=300.0)
    """
    if not seconds:
        return None
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return Latency(1e3 * statistics.median(ordered), 1e3 * p99)


def to_first(answers: Sequence[Served]) -> Latency | None:
    """Time to the first token."""
    return latency([answer.times[0] for answer in answers if answer.times])


def between(answers: Sequence[Served]) -> Latency | None:
    """Time between parts of an answer."""
    return latency([after - before for answer in answers for before, after in pairwise(answer.times)])
