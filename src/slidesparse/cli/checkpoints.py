"""The commands that show and measure checkpoints: their arguments, and their output."""

from __future__ import annotations

import argparse

from slidesparse.cli.arguments import (
    Commands,
    add_command,
    add_device,
    add_no_bos,
    add_source,
    print_outcome,
    show,
    source_of,
)  # fmt: skip
from slidesparse.cli.chats import add_chats
from slidesparse.cli.compressing import add_compress
from slidesparse.cli.pruning import add_prune
from slidesparse.cli.recovering import add_recover


def add_commands(commands: Commands) -> None:
    """Add info, compress and its parts, and inspect."""
    add_command(commands, "info", _info, "Show the GPU, the libraries, and which backends can run here.")
    add_compress(commands)
    add_prune(commands)
    _add_eval(commands)
    inspect = add_command(commands, "inspect", _inspect, "Show which patterns the linears of a checkpoint satisfy.")
    add_source(inspect, "PATH", "a folder, or NAMESPACE/NAME on the hub")
    add_recover(commands)
    add_chats(commands)


def _info(options: argparse.Namespace) -> int:
    from slidesparse.offline import info

    collected = info.collect()
    show(options, collected, lambda: info.describe(collected))
    return 0


def _add_eval(commands: Commands) -> None:
    text = "Measure the perplexity of a checkpoint on a text, or run tasks of lm-evaluation-harness."
    evaluate = add_command(commands, "eval", _eval, text)
    add_source(evaluate, "PATH", "any checkpoint, pruned or not: a folder, or NAMESPACE/NAME on the hub")
    add = evaluate.add_argument
    add("--text", metavar="FILE", help="text or chats to measure on: .txt, .jsonl, .parquet, a folder, or a data set")
    add("--window", type=int, help="tokens of a text window (default: 2048, or what the model can read)")
    add("--stride", type=int, help="tokens between the starts of windows (default: half a window)")
    add("--tasks", nargs="+", default=[], metavar="TASK", help="names, or files, whose code is run; needs [eval]")
    add("--limit", type=int, help="examples of each task (default: all)")
    add("--batch", type=int, default=1, help="windows or examples at a time (default: %(default)s)")
    add_no_bos(evaluate)
    add_device(evaluate)


def _eval(options: argparse.Namespace) -> int:
    from slidesparse.offline.evaluate import evaluate

    names = ("text", "window", "stride", "batch", "tasks", "limit", "device", "revision")
    same = {name: getattr(options, name) for name in names}
    print_outcome(options, evaluate(options.source, **same, bos=not options.no_bos))
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from slidesparse.offline.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(source_of(options))
    print_outcome(options, inspection)
    return 0 if inspection.ok else 1
