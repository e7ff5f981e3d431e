"""The commands that measure GPUs: ``tune``, and ``bench`` and ``report`` of slidesparse-bench."""

from __future__ import annotations

import argparse

from slidesparse.base.from_bench import from_bench
from slidesparse.cli.arguments import Commands, add_command, named_path, show
from slidesparse.errors import InputError, UnsupportedError

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
    add("--models", nargs="+", dest="more_models", default=[], metavar="MODEL", help="the same")
    text = "(default: the checkpoint's, or 2:4, 4:6, 6:8, 8:10)"
    add("--pattern", action="append", metavar="PATTERN", help=text)
    text = "int8, fp8 or bf16 (default: the checkpoint's, or int8, fp8)"
    add("--dtype", action="append", metavar="DTYPE", help=text)
    usual = " ".join(map(str, TUNED_TOKENS))
    add("--tokens", type=int, nargs="+", metavar="M", help=f"(default: {usual})")
    add("--backends", nargs="+", metavar="BACKEND", help="hopper, ... (default: all accelerated ones)")
    instead = tune.add_mutually_exclusive_group().add_argument
    instead("--algorithms-only", action="store_true", help="leave the choice of backends as it is")
    text = "measure nothing: write the times measured here, to send them in"
    instead("--share", type=named_path, metavar="FILE", help=text)
    text = "measure nothing: take the layer times of files that bench wrote on this GPU"
    instead("--from", dest="records", type=named_path, nargs="+", metavar="RECORDS", help=text)


def _tune(options: argparse.Namespace) -> int:
    from slidesparse.offline import tune
    from slidesparse.offline.tune_job import make_job

    models = [*options.models, *options.more_models]
    _refuse_measuring(options, models)
    if options.share is not None:
        shared = tune.share_times(options.share)
        show(options, str(options.share), lambda: tune.describe_shared(shared, options.share))
        return 0
    if options.records:
        tuned = tune.tune_from(options.records)
    else:
        tokens = TUNED_TOKENS if options.tokens is None else options.tokens
        job = make_job(models, options.pattern, options.dtype, tokens, options.backends)
        tuned = tune.tune(job, layers=not options.algorithms_only)
    show(options, tuned.to_json(), tuned.describe)
    return 1 if tuned.wrong else 0


def _refuse_measuring(options: argparse.Namespace, models: list[str]) -> None:
    """Refuse options of measuring where nothing is measured."""
    instead = "--share" if options.share is not None else "--from" if options.records else None
    names = ("pattern", "dtype", "tokens", "backends")
    values = {"MODEL": models} | {f"--{name}": vars(options)[name] for name in names}
    given = [name for name, value in values.items() if value]
    if instead is not None and given:
        remedy = f"leave out {instead} to measure, or leave out the rest"
        raise InputError(instead, got=", ".join(given), needed="none of these: it measures nothing", remedy=remedy)
