"""The fastest of many ways to do one thing on a GPU, timed honestly and in little time.

* Launches come from a CUDA graph, so the host's speed does not show.
* Each way works on several copies of its operands in turn, so that L2 holds none from the last use.
* A first look at all sorts out the slow; then the finalists run in turn, and medians decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median
from typing import TypeVar

import torch

FINALISTS = 5
ROUNDS = 7
WINDOW_US = 400.0
"""Time that one graph of launches should take at least, well above the resolution of events (0.5 us)."""
COLD = 3
"""Bytes read between two uses of an operand, in sizes of L2."""
MOST_LAUNCHES = 64

Way = TypeVar("Way")


def copies_to_rotate(n_bytes: int, device: int) -> int:
    """Copies of operands of ``n_bytes`` that keep L2 cold, at most one for each launch of a graph."""
    # Before Hopper 40 MB at most; a device that does not say has less.
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 40 << 20)
    return min(MOST_LAUNCHES, 1 + -(-COLD * l2 // n_bytes))


def race(ways: Iterable[tuple[Way, Callable[[int], None]]], copies: int) -> dict[Way, float]:
    """Time every way; memory for graphs must suffice.

    Args:
        ways: (name, run), taken one by one; ``run(i)`` launches one call on copy ``i`` of its operands. The first one
            takes part to the end, however slow it is.
        copies: How many copies there are.

    Returns:
        Name -> microseconds a call, in the order of ``ways``: of the finalists from the final, of the others from the
        first look.
    """
    graphs: dict[Way, torch.cuda.CUDAGraph] = {}
    times: dict[Way, float] = {}
    launches, first = 0, None
    for name, run in ways:
        if first is None:
            first = name
            single = _time_us(_capture(run, copies, copies), copies)
            launches = min(MOST_LAUNCHES, max(copies, round(WINDOW_US / single)))
        graphs[name] = _capture(run, copies, launches)
        times[name] = _time_us(graphs[name], launches)
        if len(graphs) > FINALISTS + 1:  # a graph keeps its workspace, which split K makes large: let the slowest go
            del graphs[max((other for other in graphs if other != first), key=lambda other: times[other])]
    rounds = [[_time_us(graph, launches) for graph in graphs.values()] for _ in range(ROUNDS)]
    finals = dict(zip(graphs, map(median, zip(*rounds, strict=True)), strict=True))
    return {name: finals.get(name, times[name]) for name in times}


def _capture(run: Callable[[int], None], copies: int, launches: int) -> torch.cuda.CUDAGraph:
    # torch.cuda.graph() would also empty the allocator's cache, which takes longer than most searches.
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin()
        try:
            for i in range(launches):
                run(i % copies)
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
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
