"""Quick search for the fastest of many candidates on a GPU.

* Launches come from a CUDA graph, so the host's speed does not count.
* Each candidate takes several copies of its operands in turn, so that L2 has none from the last use.
* One timing of each candidate selects finalists, which then run in turn; medians decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from statistics import median
from typing import Any, TypeVar

import torch

FINALISTS = 5
ROUNDS = 7
WINDOW_US = 400.0
"""Least time of one graph of launches, well above the resolution of events (0.5 us)."""
COLD_FACTOR = 3
"""L2 caches that operand copies fill: caches are not strictly least-recently-used."""
MOST_LAUNCHES = 64

Candidate = TypeVar("Candidate")


def l2_bytes(device: int | None = None) -> int:
    """Return the size of a GPU's L2 cache; None: of the current GPU."""
    # Before Hopper 40 MB at most.
    size: int = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 40 << 20)
    return size


def cold_copies(n_bytes: int, l2_bytes: int, at_most: int) -> int:
    """Return the number of copies of operands of ``n_bytes`` with which each call finds a cold L2 cache.

    1 to ``at_most``, for memory or launches: operands below ``COLD_FACTOR * l2_bytes / at_most`` stay warm.
    """
    return max(1, min(-(-COLD_FACTOR * l2_bytes // max(1, n_bytes)), at_most))


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


def capture_calls(graph: torch.cuda.CUDAGraph, calls: Iterable[Callable[[], Any]], pool: Any = None) -> Any:
    """Capture calls, and return the result of the last one; graphs of one ``pool`` must run one after another.

    ``torch.cuda.graph`` would also collect garbage and empty the allocator's cache, which takes longer than most
    measured times, and would fail if another thread of a server calls CUDA meanwhile.
    """
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    result = None
    with torch.cuda.stream(stream):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            for call in calls:
                result = None  # frees its memory before the next call allocates
                result = call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return result


@lru_cache(maxsize=64)
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of all captures on a GPU: cuBLAS keeps 32 MB for each stream."""
    return torch.cuda.Stream(device)


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
