"""Compare variants in turns: a pass of each, round after round, so that all get their share of a drifting clock.

The protocol is that of :mod:`slidesparse.tuning.timing` otherwise. Every round begins with another variant. The first
one takes part twice: the difference of its two medians is the noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slidesparse.tuning.timing import CudaStopwatch, Pass, Reading, Stopwatch, noise_of
from slidesparse_bench.records import Timing

MIN_ROUNDS, MAX_ROUNDS = 9, 200
HOST_CALLS = 30


class HostStopwatch(Stopwatch, Protocol):
    """A stopwatch that times the host, too."""

    def host_us(self, call: Callable[[], Any]) -> float:
        """Return the host time of one eager call, in microseconds."""
        ...


class CudaHostStopwatch(CudaStopwatch):
    """Times on the current CUDA device, and on the host."""

    def host_us(self, call: Callable[[], Any]) -> float:
        """Return the mean over calls that are queued without waiting, in microseconds."""
        call()
        self.wait()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        elapsed = time.perf_counter() - start
        self.wait()
        return elapsed / HOST_CALLS * 1e6


def rounds_for(pass_us: Sequence[float], target_s: float) -> int:
    """Return the rounds that take about ``target_s`` seconds when a round takes the sum of ``pass_us``."""
    return max(MIN_ROUNDS, min(MAX_ROUNDS, int(target_s * 1e6 / max(1e-3, sum(pass_us)))))


def interleave(
    passes: Sequence[Pass], rounds: int, when_queued: Callable[[], None] = lambda: None
) -> list[list[float]]:
    """Queue one of each, ``rounds`` times, each round beginning one further; read the times at the end.

    Nothing waits in between, so the device never idles and the clocks stay those of load.

    Args:
        passes: The passes to time.
        rounds: The number of rounds.
        when_queued: Called once when all passes are queued and the device still works.

    Returns:
        For each pass its samples, microseconds per call.
    """
    pending: list[list[Reading]] = [[] for _ in passes]
    for number in range(rounds):
        for step in range(len(passes)):
            at = (number + step) % len(passes)
            pending[at].append(passes[at].launch())
    when_queued()
    return [[read() for read in readings] for readings in pending]


def time_passes(
    passes: Sequence[Pass], target_s: float, when_queued: Callable[[], None] = lambda: None
) -> tuple[list[list[float]], float]:
    """Time passes for about ``target_s`` seconds; returns the samples of each, and the noise."""
    twice = [*passes, passes[0]]
    interleave(twice, 1)  # warms up
    estimate = interleave(twice, 1)
    pass_us = [times[0] * one.copies for times, one in zip(estimate, twice, strict=True)]
    *samples, again = interleave(twice, rounds_for(pass_us, target_s), when_queued)
    return samples, noise_of(samples[0], again)


def summarize(samples: Sequence[float], made_by: Pass, host_us: float | None = None) -> Timing:
    """Return median and percentiles of at least two samples in microseconds."""
    p20, _, _, p80 = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(statistics.median(samples), p20, p80, len(samples), made_by.copies, made_by.method, host_us)
