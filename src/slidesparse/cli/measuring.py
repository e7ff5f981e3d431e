"""The commands that measure GPUs: ``tune``, and ``bench`` and ``report``, which slidesparse-bench brings."""

from __future__ import annotations

import argparse

from slidesparse.base.from_bench import from_bench
from slidesparse.cli.arguments import Commands, add_command, named_path, show
from slidesparse.errors import InputError, UnsupportedError

TUNED_TOKENS = (16, 64, 256, 1024, 4096, 8192, 16384)
"""Numbers of tokens that tune measures, unless the user names others."""

OF_BENCH = {
    "bench": "Measure this GPU: GEMMs, kernels, whole layers, packing, served models.",
    "report": "Draw tables and plots from benchmark records.",
}
"""The commands of slidesparse-bench, and their help."""

NO_PREFIX = "\0"
"""A prefix of options that no word has, so that a parser takes all words as they are."""


def add_commands(commands: Commands) -> None:
    """Add tune, bench and report."""
    _add_tune(commands)
    for name, text in OF_BENCH.items():
        try:
            from_bench(name, f"slidesparse {name}")(commands, text)
        except UnsupportedError:
            _add_missing(commands, name, text)


def _add_missing(commands: Commands, name: str, text: str) -> None:
    """Add a command that takes any words, and says how to install what it needs."""
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
    from slidesparse.gemm.cusparselt.table import AlgorithmRecord
    from slidesparse.gemm.speed import LayerSpeed, WrongForm
    from slidesparse.offline import share, tune
    from slidesparse.offline.tune_job import make_job

    models = [*options.models, *options.more_models]
    _refuse_measuring(options, models)
    if options.share is not None:
        table = share.write(options.share)
        show(options, str(options.share), lambda: share.describe(table, options.share))
        return 0
    algorithms, path, layers, wrong = list[AlgorithmRecord](), None, list[LayerSpeed](), list[WrongForm]()
    if options.records:
        layers, wrong, driver = from_bench("layer-times", "slidesparse tune --from")(options.records)
        path = tune.store_layers(layers, wrong, driver)
    else:
        tokens = TUNED_TOKENS if options.tokens is None else options.tokens
        job = make_job(models, options.pattern, options.dtype, tokens, options.backends)
        algorithms = tune.search_algorithms(job)
        for found, faulty in () if options.algorithms_only else tune.measure_layers(job):
            path = tune.store_layers(found, faulty)  # whatever becomes of the rest
            layers, wrong = layers + found, wrong + faulty
    show(options, tune.to_json(algorithms, layers, wrong), lambda: tune.describe(algorithms, layers, wrong, path))
    return 1 if wrong else 0


def _refuse_measuring(options: argparse.Namespace, models: list[str]) -> None:
    """Refuse options that say what to measure where nothing is measured."""
    instead = "--share" if options.share is not None else "--from" if options.records else None
    said = {"MODEL": models} | {f"--{name}": vars(options)[name] for name in ("pattern", "dtype", "tokens", "backends")}
    given = [name for name, value in said.items() if value]
    if instead is not None and given:
        remedy = f"leave out {instead} to measure, or leave out the rest"
        raise InputError(instead, got=", ".join(given), needed="none of these: it measures nothing", remedy=remedy)
