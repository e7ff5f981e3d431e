"""Memory of an engine: what must be free before it starts, and what its processes and its GPUs take over time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from slidesparse.errors import UnsupportedError
from slidesparse_bench.serve.serve_power import open_nvml
from slidesparse_bench.served_figures import Growth

INTERVAL_S = 1.0

MemorySample = tuple[float, float]
"""Seconds, and bytes."""


def require_free(uuids: Sequence[str], share: float, nvml: Any = None) -> None:
    """Refuse GPUs that others take too much of: vLLM's engine would end there, after its imports, in a page of text.

    Args:
        uuids: Of the GPUs.
        share: Of each one's memory, which vLLM takes.
        nvml: NVIDIA's library; None: where it is installed. Where it tells nothing, nothing is refused here.

    Raises:
        UnsupportedError: Less than the share is free.
    """
    try:
        nvml = open_nvml() if nvml is None else nvml
        found = {uuid: nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in uuids}
    except Exception:  # NVML's errors are its own, and the engine says the same later
        return
    for uuid, memory in found.items():
        if memory.free < share * memory.total:
            raise UnsupportedError(
                f"the memory of {uuid}",
                got=f"{memory.free / 1e9:.1f} of {memory.total / 1e9:.1f} GB free",
                needed=f"{share * memory.total / 1e9:.1f}, the {share:.0%} that vLLM takes",
                remedy="end what else runs there (nvidia-smi lists it), or choose another GPU by CUDA_VISIBLE_DEVICES",
            )


class MemoryLog:
    """Samples between entering and leaving.

    Args:
        sources: Name -> what tells how many bytes are in use; None where nothing does.
    """

    def __init__(self, sources: dict[str, Callable[[], int | None]]) -> None:
        self._sources = sources
        self._samples: dict[str, list[MemorySample]] = {name: [] for name in sources}

    def __enter__(self) -> MemoryLog:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._look()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def growth(self, name: str) -> Growth | None:
        """What became of a source; None where it told nothing."""
        return growth(self._samples[name])

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            self._look()

    def _look(self) -> None:
        for name, source in self._sources.items():
            if (found := source()) is not None:
                self._samples[name].append((time.monotonic(), float(found)))


def growth(samples: Sequence[MemorySample]) -> Growth | None:
    """Start, end and slope of memory; None of fewer than two samples.

    The slope is that of the last two thirds, since caches fill at the start: least squares, as in any textbook.

    >>> found = growth([(0.0, 1e6), (60.0, 1e6), (120.0, 5e6)])
    >>> found.start_mb, found.end_mb, round(found.slope_mb_a_minute, 3)
    (1.0, 5.0, 4.0)
    """
    if len(samples) < 2:
        return None
    begin = samples[0][0] + (samples[-1][0] - samples[0][0]) / 3
    late = [sample for sample in samples if sample[0] >= begin]
    times, sizes = [at for at, _ in late], [size for _, size in late]
    at, size = sum(times) / len(late), sum(sizes) / len(late)
    spread = sum((one - at) ** 2 for one in times)
    slope = sum((one - at) * (other - size) for one, other in late) / spread if spread else 0.0
    return Growth(samples[0][1] / 1e6, samples[-1][1] / 1e6, 60 * slope / 1e6)


def resident_bytes(root: int, proc: Path = Path("/proc")) -> int | None:
    """Resident memory of a process's descendants together, what they share counted in each.

    Args:
        root: The process.
        proc: Where the system tells of processes.

    Returns:
        Bytes; None where the system does not tell.
    """
    children: dict[int, list[int]] = {}
    pages: dict[int, int] = {}
    for folder in proc.glob("[0-9]*"):
        try:
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        children.setdefault(int(after_name[1]), []).append(int(folder.name))
        pages[int(folder.name)] = int(after_name[21])
    if root not in pages:
        return None
    found, left = [], [root]
    while left:
        one = left.pop()
        left += children.get(one, [])
        found.append(one)
    return sum(pages[one] for one in found[1:]) * os.sysconf("SC_PAGE_SIZE")
