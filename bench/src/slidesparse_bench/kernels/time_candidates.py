"""Quick search for the fastest of many candidates on a GPU.

* Launches come from a CUDA graph, so the host's speed does not count.
* Each candidate takes several copies of its operands in turn, so that L2 has none from the last use.
* One timing of each candidate selects finalists, which then run in turn; medians decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import TypeVar

import torch

from slidesparse.tuning.timing import capture_calls, cold_copies, l2_bytes

FINALISTS = 5
ROUNDS = 7
WINDOW_US = 400.0
"""Least time of one graph of launches, well above the resolution of events (0.5 us)."""
MOST_LAUNCHES = 64

Candidate = TypeVar("Candidate")


def copies_to_rotate(n_bytes: int, device: int) -> int:
    """Return the number of operand copies for :func:`time_candidates`, at most one for each launch of a graph."""
    # One more, so that the others fill the caches between two uses of a copy.
    return 1 + cold_copies(n_bytes, l2_bytes(device), MOST_LAUNCHES - 1)


def time_candidates(
    candidates: Iterable[tuple[Candidate, Callable[[int], None]]], copies: int
) -> dict[Candidate, float]:
    """Time candidates: candidate -> microseconds a call; memory for graphs must suffice.

    ``run(i)`` of a candidate launches one call on copy ``i`` of its operands. The first one is always a finalist. The
    median of the last rounds counts for finalists, the one timing for the others.
    """
    graphs: dict[Candidate, torch.cuda.CUDAGraph] = {}
    times: dict[Candidate, float] = {}
    launches, first = 0, None
    for name, run in candidates:
        if first is None:
            first = name
            single = _time_us(_captured(run, copies, copies), copies)
            launches = min(MOST_LAUNCHES, max(copies, round(WINDOW_US / single)))
        graphs[name] = _captured(run, copies, launches)
        times[name] = _time_us(graphs[name], launches)
        if len(graphs) > FINALISTS + 1:  # a graph keeps its workspace, which is large for split K: drop the slowest
            del graphs[max((other for other in graphs if other != first), key=lambda other: times[other])]
    rounds = [[_time_us(graph, launches) for graph in graphs.values()] for _ in range(ROUNDS)]
    finals = dict(zip(graphs, map(median, zip(*rounds, strict=True)), strict=True))
    return {name: finals.get(name, times[name]) for name in times}


def _captured(run: Callable[[int], None], copies: int, launches: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    capture_calls(graph, [partial(run, i % copies) for i in range(launches)])
    graph.replay()
    return graph


def _time_us(graph: torch.cuda.CUDAGraph, launches: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    milliseconds: float = start.elapsed_time(end)
    return milliseconds * 1000 / launches
