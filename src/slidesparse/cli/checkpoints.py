"""The commands that show and measure checkpoints: their arguments, and their output."""

from __future__ import annotations

import argparse
from pathlib import Path

from slidesparse.cli.arguments import (
    Commands,
    add_command,
    add_device,
    add_no_bos,
    add_source,
    device_of,
    named_path,
    print_outcome,
    show,
    source_of,
)  # fmt: skip
from slidesparse.cli.chats import add_chats
from slidesparse.cli.pruning import add_prune
from slidesparse.cli.recovering import add_recover
from slidesparse.errors import InputError

PLOT = Path("slidesparse-demo.png")


def add_commands(commands: Commands) -> None:
    """Add info, demo, prune, eval, inspect, recover and chats."""
    add_command(commands, "info", _info, "Show the GPU, the libraries, and which backends can run here.")
    _add_demo(commands)
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


def _add_demo(commands: Commands) -> None:
    text = "Prune a real trained model, prove exactness, and show what each pattern costs."
    demo = add_command(commands, "demo", _demo, text)
    demo.add_argument("--plot", type=named_path, help=f"where the plot goes (default: {PLOT})")
    text = "ask a chat model, dense and pruned: a folder, a .gguf or NAMESPACE/NAME (default: SmolLM2-135M-Instruct)"
    demo.add_argument("--chat", nargs="?", const=True, metavar="CHECKPOINT", help=text)
    add_device(demo)


def _demo(options: argparse.Namespace) -> int:
    if options.chat is not None:
        from slidesparse.demo.chat import run_chat

        if options.plot is not None:
            raise InputError("options without effect", got="--plot with --chat", remedy="leave out one of them")
        print_outcome(options, run_chat(None if options.chat is True else options.chat, device_of(options)))
        return 0
    from slidesparse.cli import failure
    from slidesparse.demo.run import draw_demo, run_demo
    from slidesparse.errors import SlideSparseError

    options.plot = options.plot or PLOT
    report = run_demo(options.plot, device=device_of(options))
    value, failed = report.to_json(), None
    try:
        draw_demo(report, options.plot)
    except SlideSparseError as error:  # such as of a full disk: the results are still shown
        value, failed = {**value, "error": error.to_json()}, error
    plot = f"\nplot: {options.plot}" if failed is None else ""
    show(options, value, lambda: report.table() + plot)
    if failed is not None:
        failure.report(failed, words=())
    return 0 if report.exact and failed is None else 1


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
    show(options, inspection.to_json(), inspection.table)
    return 0 if inspection.ok else 1
