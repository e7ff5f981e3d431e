"""The commands of slidesparse-bench: ``bench`` and ``report``."""

from __future__ import annotations

from slidesparse.base.from_bench import from_bench
from slidesparse.cli.arguments import Commands
from slidesparse.errors import UnsupportedError

OF_BENCH = {
    "bench": "Measure this GPU: GEMMs, kernels, whole layers, packing, served models.",
    "report": "Draw tables and plots from benchmark records.",
}
"""The commands, and their help."""

NO_PREFIX = "\0"
"""Prefix of options that no word has, so that a parser takes all words as arguments."""


def add_commands(commands: Commands) -> None:
    """Add bench and report."""
    for name, text in OF_BENCH.items():
        try:
            from_bench(name, f"slidesparse {name}")(commands, text)
        except UnsupportedError:
            _add_missing(commands, name, text)


def _add_missing(commands: Commands, name: str, text: str) -> None:
    """Add a command that takes any words, and whose error names the missing package."""
    missing = commands.add_parser(name, help=text, description=text, prefix_chars=NO_PREFIX, add_help=False)
    missing.add_argument("words", nargs="*")
    missing.set_defaults(command=lambda _: from_bench(name, f"slidesparse {name}"))
