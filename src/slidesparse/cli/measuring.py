"""The commands that measure GPUs: ``tune``, and ``bench`` and ``report`` of slidesparse-bench."""

from __future__ import annotations

import argparse

from slidesparse.base.from_bench import from_bench
from slidesparse.cli.arguments import Commands, add_command, print_outcome
from slidesparse.errors import UnsupportedError

TUNED_TOKENS = (16, 64, 256, 1024, 4096, 8192, 16384)
"""Default numbers of tokens of ``tune``."""

OF_BENCH = {
    "bench": "Measure this GPU: GEMMs, kernels, whole layers, packing, served models.",
    "report": "Draw tables and plots from benchmark records.",
}
"""The commands of slidesparse-bench, and their help."""

NO_PREFIX = "\0"
"""Prefix of options that no word has, so that a parser takes all words as arguments."""


def add_commands(commands: Commands) -> None:
    """Add tune, bench and report."""
    _add_tune(commands)
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


def _add_tune(commands: Commands) -> None:
    text = "Find the fastest algorithms and backends at a model's shapes, once for each GPU."
    tune = add_command(commands, "tune", _tune, text)
    add = tune.add_argument
    add("models", nargs="*", metavar="MODEL", help="a checkpoint's folder, or Qwen2.5-7B, ... (default: all names)")
    text = "(default: the checkpoint's, or 2:4, 4:6, 6:8, 8:10)"
    add("--pattern", action="append", metavar="PATTERN", help=text)
    text = "int8, fp8 or bf16 (default: the checkpoint's, or int8, fp8)"
    add("--dtype", action="append", metavar="DTYPE", help=text)
    usual = " ".join(map(str, TUNED_TOKENS))
    add("--tokens", type=int, nargs="+", default=TUNED_TOKENS, metavar="M", help=f"(default: {usual})")
    add("--backends", nargs="+", metavar="BACKEND", help="hopper, ... (default: all accelerated ones)")


def _tune(options: argparse.Namespace) -> int:
    from slidesparse.offline.tune import tune
    from slidesparse.offline.tune_job import make_job

    tuned = tune(make_job(options.models, options.pattern, options.dtype, options.tokens, options.backends))
    print_outcome(options, tuned)
    return 1 if tuned.wrong else 0
