"""Parts of the distribution ``slidesparse-bench``, if installed: found by entry points, never imported."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from slidesparse.errors import UnsupportedError, first_line

GROUP = "slidesparse.bench"


def from_bench(part: str, needed_by: str) -> Any:
    """Return a part of slidesparse-bench by its entry point; an UnsupportedError where it cannot be imported.

    ``needed_by`` names the command: ``slidesparse bench``.
    """
    got = "none installed"
    for point in entry_points(group=GROUP, name=part):
        try:
            return point.load()
        except ImportError as error:
            got = first_line(error)
    remedy = "run pip install ./bench in a checkout of slidesparse"
    raise UnsupportedError(f"{needed_by} needs slidesparse-bench", got=got, remedy=remedy)
