"""The commands ``bench`` and ``report`` of the distribution slidesparse-bench, found by its entry points."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from slidesparse.cli.arguments import Commands
from slidesparse.errors import UnsupportedError, first_line

GROUP = "slidesparse.bench"

OF_BENCH = {
    "bench": "Measure this GPU: GEMMs, kernels, whole layers, packing, served models.",
    "report": "Draw tables and plots from benchmark records.",
}
"""The commands, and their help."""

NO_PREFIX = "\0"
"""Prefix of options that no word has, so that a parser takes all words as arguments."""


def add_commands(commands: Commands) -> None:
    """Add bench and report; without slidesparse-bench, commands that take any words and say how to install it."""
    for name, text in OF_BENCH.items():
        try:
            _from_bench(name)(commands, text)
        except UnsupportedError:
            missing = commands.add_parser(name, help=text, description=text, prefix_chars=NO_PREFIX, add_help=False)
            missing.add_argument("words", nargs="*")
            missing.set_defaults(command=lambda _, name=name: _from_bench(name))


def _from_bench(name: str) -> Any:
    """Return what adds a command; an UnsupportedError where it cannot be imported."""
    got = "none installed"
    for point in entry_points(group=GROUP, name=name):
        try:
            return point.load()
        except ImportError as error:
            got = first_line(error)
    remedy = "run pip install ./bench in a checkout of slidesparse"
    raise UnsupportedError(f"slidesparse {name} needs slidesparse-bench", got=got, remedy=remedy)
