"""What the distribution ``slidesparse-bench`` brings, where it is installed: found by entry points, never imported."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from slidesparse.errors import UnsupportedError

GROUP = "slidesparse.bench"


def has_bench() -> bool:
    """Return whether slidesparse-bench is installed."""
    return bool(entry_points(group=GROUP))


def from_bench(part: str, needed_by: str) -> Any:
    """Return a part of slidesparse-bench.

    Args:
        part: The name of its entry point.
        needed_by: What the user asked for: ``slidesparse bench``.

    Raises:
        UnsupportedError: slidesparse-bench is not installed.
    """
    found = list(entry_points(group=GROUP, name=part))
    if not found:
        raise UnsupportedError(
            f"{needed_by} needs slidesparse-bench",
            got="none installed",
            remedy="run pip install ./bench in a checkout of slidesparse",
        )
    return found[0].load()
