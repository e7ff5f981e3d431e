"""The timing protocol of a layer, all of it.

1. The caller checks the result of every form before anything is timed; the captured graph's is checked once more.
2. A *pass* calls one form on each of several copies of its operands, enough to exceed three times the L2 cache, so
   every call finds a cold cache. If the calls can be captured, a pass is one CUDA graph: no launch gaps.
3. A form has a *stretch* of its own (:func:`time_stretches`), and the median of its later half counts. Forms that take
   turns pass by pass would share one clock rate, which under a power limit follows from the form that draws most
   power; a model runs one form all the time.
4. Dense takes part twice. The difference of its two medians is the noise: smaller differences mean nothing.
5. Clocks and power are never set.

Data are Gaussian: zeros and constants draw less power, so the clocks rise and all times come out too short.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch

MAX_COPIES = 512
"""Most copies of the operands. Problems of less than 3 L2 caches / 512 stay warm, for all variants alike."""
COLD_FACTOR = 3
"""L2 caches that operand copies fill: caches are not strictly least-recently-used."""

Reading = Callable[[], float]
"""Waits for a queued pass; returns microseconds per call."""


class Pass(Protocol):
    """One variant on all copies of its operands, ready to be queued again and again."""

    @property
    def method(self) -> str:
        """``graph`` or ``events``."""
        ...

    @property
    def copies(self) -> int:
        """Number of calls of the pass."""
        ...

    def launch(self) -> Reading:
        """Queue the pass without waiting for it."""
        ...


class Stopwatch(Protocol):
    """Times passes: with a GPU's events, or in a test with a clock of its own."""

    l2_bytes: int

    def free_bytes(self) -> int:
        """Return the bytes of memory for copies of operands."""
        ...

    def begin(self) -> None:
        """Start a comparison, which ends the use of earlier passes."""
        ...

    def wait(self) -> None:
        """Wait for the device; raises if it no longer works."""
        ...

    def prepare(self, calls: Sequence[Callable[[], Any]], capture: bool, check: Callable[[Any], None]) -> Pass:
        """Make a pass of ``calls``; ``check`` raises if the result of the last one is wrong."""
        ...


def copies_needed(n_bytes: int, l2_bytes: int, memory_bytes: int) -> int:
    """Return the number of copies of operands of ``n_bytes`` that keep L2 cold, within memory; at least one."""
    return cold_copies(n_bytes, l2_bytes, min(memory_bytes // max(1, n_bytes), MAX_COPIES))


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


def copies_of(operands: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """Return ``operands`` and ``count - 1`` deep copies of them (tensors, tuples, modules)."""
    return [operands] + [copy.deepcopy(operands) for _ in range(count - 1)]


def time_stretches(passes: Sequence[Pass], stretch_s: float) -> list[list[float]]:
    """Time passes as a model runs them: each alone for a while before the next one.

    The later half of a stretch counts: by then the clock is what the power limit allows for this pass.

    Returns:
        The samples of each pass, microseconds per call; a stretch takes ``stretch_s`` seconds.
    """
    lengths = []
    for one in passes:
        _stretch(one, 1)  # warms up
        (us,) = _stretch(one, 1)
        lengths.append(max(2, int(stretch_s * 1e6 / max(1e-3, us * one.copies))))
    taken = [_stretch(one, length) for one, length in zip(passes, lengths, strict=True)]
    return [samples[len(samples) // 2 :] for samples in taken]


def _stretch(one: Pass, times: int) -> list[float]:
    pending = [one.launch() for _ in range(times)]
    return [read() for read in pending]


def noise_of(first: Sequence[float], again: Sequence[float]) -> float:
    """Return the relative difference of the medians of the same variant timed twice."""
    one, two = statistics.median(first), statistics.median(again)
    return abs(one - two) / max(one, two)


def tensors_in(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a result: itself, or those of a tuple or list."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for item in result for t in tensors_in(item)] if isinstance(result, tuple | list) else []


def poison(result: Any) -> None:
    """Overwrite a result with a value of no right result, so that unwritten elements show."""
    for tensor in tensors_in(result):
        sized = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor  # a scalar has no bytes to be seen as
        sized.view(torch.uint8).fill_(0x7F)


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


@dataclass(frozen=True)
class _CudaPass:
    method: str
    calls: Sequence[Callable[[], Any]]  # a graph knows addresses only: what it reads must stay alive
    run: Callable[[], Any]

    @property
    def copies(self) -> int:
        return len(self.calls)

    def launch(self) -> Reading:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.run()
        end.record()

        def read() -> float:
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3 / self.copies

        return read


class CudaStopwatch:
    """Times on the current CUDA device."""

    def __init__(self) -> None:
        self.l2_bytes = l2_bytes()
        self._pool: Any = None

    def free_bytes(self) -> int:
        """Return half of the free bytes: outputs and workspaces need memory, too."""
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return (torch.cuda.mem_get_info()[0] + cached) // 2

    def begin(self) -> None:
        """Start a comparison, whose graphs share one memory pool: they run one after another."""
        torch.cuda.empty_cache()  # else the pools of earlier graphs keep their memory
        self._pool = torch.cuda.graph_pool_handle()

    def wait(self) -> None:
        """See :class:`Stopwatch`."""
        torch.cuda.synchronize()

    def prepare(self, calls: Sequence[Callable[[], Any]], capture: bool, check: Callable[[Any], None]) -> Pass:
        """Warm up, then capture if possible; see :class:`Stopwatch`."""
        for call in calls:
            call()
        self.wait()
        if capture:
            graph = torch.cuda.CUDAGraph()
            try:
                result = capture_calls(graph, calls, self._pool)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:
                # The pool stays marked as being captured into, so the rest of this comparison is timed by events too.
                self.wait()  # raises again when the device itself is broken
            else:
                graph.replay()
                poison(result)
                graph.replay()
                check(result)
                return _CudaPass("graph", calls, graph.replay)

        def eager() -> None:
            for call in calls:
                call()

        return _CudaPass("events", calls, eager)
