"""The commands that make, measure and show checkpoints: their arguments, and what they print."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slidesparse.cli.arguments import Commands, add_command
from slidesparse.errors import InputError

METHODS = ("magnitude", "sparsegpt", "wanda")
"""Pruning methods, of which :mod:`slidesparse.prune` has the code: importing that takes torch, and so seconds."""


def add_commands(commands: Commands) -> None:
    """Add info, demo, prune, plan, eval, pack and inspect."""
    for add in (_add_info, _add_demo, _add_prune, _add_plan, _add_eval, _add_pack, _add_inspect):
        add(commands)


def _add_info(commands: Commands) -> None:
    add_command(commands, "info", _info, "Show the GPU, the libraries, and which backends can run here.")


def _info(options: argparse.Namespace) -> int:
    from slidesparse.commands import info

    found = info.collect()
    print(json.dumps(found, indent=2) if options.json else info.describe(found))
    return 0


def _add_demo(commands: Commands) -> None:
    demo = add_command(
        commands, "demo", _demo, "Prune a real trained model, prove exactness, and show what each pattern costs."
    )
    demo.add_argument(
        "--plot", type=Path, default=Path("slidesparse-demo.png"), help="where the plot goes (%(default)s)"
    )
    demo.add_argument("--device", default=None, help="cpu or cuda (default: cuda when there is one)")


def _demo(options: argparse.Namespace) -> int:
    from slidesparse.demo.run import run_demo

    report = run_demo(options.plot, device=_device(options))
    print(json.dumps(report.to_json(), indent=2) if options.json else f"{report.table()}\nplot: {options.plot}")
    return 0 if report.exact else 1


def _add_prune(commands: Commands) -> None:
    prune = add_command(commands, "prune", _prune, "Prune and quantise a local Hugging Face checkpoint.")
    prune.add_argument("source", type=Path, metavar="SRC", help="folder with config.json and safetensors")
    prune.add_argument("destination", type=Path, metavar="DST", help="folder to make")
    which = prune.add_mutually_exclusive_group(required=True)
    which.add_argument("--pattern", help="6:8, 4:6, 8:10, 2:4, ... or a share of one: 4:6@50%%")
    which.add_argument("--plan", type=Path, metavar="FILE", help="patterns that slidesparse plan chose")
    prune.add_argument(
        "--dtype", help="int8 or fp8; bf16, fp16 or fp32 to prune only (default: that of a quantised source)"
    )
    prune.add_argument("--method", choices=METHODS, help="how weights are chosen (default: magnitude, or the plan's)")
    _add_calibration(prune, "text for wanda and sparsegpt: UTF-8, .jsonl with text, or a data set on disk")
    prune.add_argument(
        "--device", help="where calibration runs the layers: cpu or cuda (default: cuda when there is one)"
    )
    prune.add_argument(
        "--recipe",
        default="absmax",
        choices=("absmax", "ternary"),
        help="how INT8 weights are rounded: one scale a channel, or BitNet b1.58's -1, 0, 1",
    )
    prune.add_argument(
        "--ignore", action="append", default=[], metavar="NAME", help="leave a linear alone (name or re:...)"
    )
    prune.add_argument(
        "--layer",
        action="append",
        default=[],
        metavar="NAME=PATTERN",
        help="another pattern for a layer (name or re:...)",
    )
    prune.add_argument("--lm-head", action="store_true", help="treat the output embedding too")
    prune.add_argument(
        "--links",
        default="refuse",
        choices=("refuse", "copy", "skip"),
        help="links that lead out of SRC: an error, copies of what is there, or left out (default: %(default)s)",
    )


def _prune(options: argparse.Namespace) -> int:
    from slidesparse.commands.plan import as_options, read_plan
    from slidesparse.commands.prune import PruneOptions, prune_checkpoint
    from slidesparse.files.calibration import Calibration

    pairs = [entry.rpartition("=") for entry in options.layer]
    layers = {name: pattern for name, _, pattern in pairs}
    if "" in layers or len(layers) < len(pairs):
        raise InputError("--layer", got=", ".join(options.layer), needed="NAME=PATTERN, each name once")
    pattern, method = options.pattern, options.method or "magnitude"
    if options.plan is not None:
        if layers:
            raise InputError("--layer and --plan", needed="one of them")
        plan = read_plan(options.plan)
        pattern, layers = as_options(plan.layers)
        method = options.method or plan.method
    calibration = None
    if options.calibration is not None:
        calibration = Calibration(options.calibration, options.samples, options.length, options.seed)
    summary = prune_checkpoint(
        options.source,
        options.destination,
        PruneOptions(
            pattern=pattern,
            dtype=options.dtype,
            method=method,
            calibration=calibration,
            recipe=options.recipe,
            ignore=tuple(options.ignore),
            layers=layers,
            lm_head=options.lm_head,
        ),
        device=_device(options),
        links=options.links,
    )
    print(json.dumps(summary.to_json(), indent=2) if options.json else summary.describe())
    return 0


def _add_plan(commands: Commands) -> None:
    plan = add_command(
        commands,
        "plan",
        _plan,
        "Choose a pattern for every layer: the least damage at a speed, share of zeros or size.",
    )
    plan.add_argument(
        "source", type=Path, metavar="SRC", help="folder with config.json and safetensors, in a float type"
    )
    plan.add_argument("--out", type=Path, required=True, metavar="FILE.json", help="plan to make, for prune --plan")
    target = plan.add_mutually_exclusive_group(required=True)
    target.add_argument("--speedup", type=float, help="modelled, of all treated matrix products together: 1.2")
    target.add_argument("--sparsity", type=float, help="share of zeros: 0.25")
    target.add_argument("--memory", type=float, metavar="GB", help="treated weights in 8 bits, 2:4 form")
    plan.add_argument(
        "--mma-gain", default="2", help="2:4 over dense multiply: 2, or about 1.6 on Hopper (%(default)s)"
    )
    plan.add_argument("--method", default="sparsegpt", choices=METHODS, help="(default: %(default)s)")
    plan.add_argument("--patterns", nargs="+", metavar="PATTERN", help="what layers may get, besides staying dense")
    plan.add_argument("--backend", help="refuse patterns that it cannot run here in INT8")
    plan.add_argument("--ignore", action="append", default=[], metavar="NAME", help="leave a linear alone")
    plan.add_argument("--device", help="cpu or cuda; it holds the whole model (default: cuda when there is one)")
    _add_calibration(plan, "text to measure on: UTF-8, .jsonl with text, or a data set on disk", required=True)


@contextmanager
def _standard_output_kept_clean() -> Iterator[None]:
    """Send to standard error what libraries print: the solver's C code prints lines that no option turns off."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # what C code printed may still wait for its turn
        os.dup2(kept, 1)
        os.close(kept)


def _plan(options: argparse.Namespace) -> int:
    from slidesparse.commands import plan as planning
    from slidesparse.files.calibration import Calibration
    from slidesparse.models.choose_patterns import Target

    wanted = planning.PlanOptions(
        target=Target(options.speedup, options.sparsity, options.memory),
        calibration=Calibration(options.calibration, options.samples, options.length, options.seed),
        method=options.method,
        patterns=tuple(options.patterns or planning.CANDIDATES),
        mma_gain=planning.parse_gain(options.mma_gain),
        ignore=tuple(options.ignore),
        backend=options.backend,
    )
    with _standard_output_kept_clean():
        plan = planning.plan_checkpoint(options.source, options.out, wanted, device=_device(options))
    print(options.out.read_text().rstrip() if options.json else planning.describe(plan, wanted, options.out))
    return 0


def _add_eval(commands: Commands) -> None:
    evaluate = add_command(
        commands, "eval", _eval, "Measure a checkpoint's perplexity on a text, or run tasks of lm-evaluation-harness."
    )
    evaluate.add_argument("path", type=Path, metavar="PATH", help="any local checkpoint, pruned or not")
    evaluate.add_argument(
        "--text", type=Path, metavar="FILE", help="UTF-8 text, .jsonl with text, or a data set on disk"
    )
    evaluate.add_argument(
        "--window", type=int, help="tokens read at a time (default: 2048, or what the model can read)"
    )
    evaluate.add_argument("--stride", type=int, help="tokens between windows (default: half a window)")
    evaluate.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="needs the extra [eval]")
    evaluate.add_argument("--limit", type=int, help="examples of each task (default: all)")
    evaluate.add_argument("--batch", type=int, default=1, help="windows or examples at a time (%(default)s)")
    evaluate.add_argument("--device", help="cpu or cuda (default: cuda when there is one)")


def _eval(options: argparse.Namespace) -> int:
    from slidesparse.commands.evaluate import evaluate

    evaluation = evaluate(
        options.path,
        text=options.text,
        window=options.window,
        stride=options.stride,
        batch=options.batch,
        tasks=options.tasks,
        limit=options.limit,
        device=_device(options),
    )
    print(json.dumps(evaluation.to_json(), indent=2) if options.json else evaluation.describe())
    return 0


def _add_pack(commands: Commands) -> None:
    pack = add_command(
        commands, "pack", _pack, "Write the packed form of a pruned checkpoint into its folder, to load it faster."
    )
    pack.add_argument("path", type=Path, metavar="PATH")


def _pack(options: argparse.Namespace) -> int:
    from slidesparse.files.packed_file import write_packed

    file = write_packed(options.path)
    size = file.stat().st_size
    print(json.dumps({"file": str(file), "bytes": size}) if options.json else f"{file}: {size / 1e6:.1f} MB")
    return 0


def _add_inspect(commands: Commands) -> None:
    inspect = add_command(commands, "inspect", _inspect, "Show which patterns the linears of a checkpoint satisfy.")
    inspect.add_argument("path", type=Path, metavar="PATH")


def _inspect(options: argparse.Namespace) -> int:
    from slidesparse.commands.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(options.path)
    print(json.dumps(inspection.to_json(), indent=2) if options.json else inspection.table())
    return 0 if inspection.ok else 1


def _add_calibration(parser: argparse.ArgumentParser, text: str, required: bool = False) -> None:
    parser.add_argument("--calibration", metavar="FILE", required=required, help=text)
    parser.add_argument("--samples", type=int, default=128, help="calibration windows (%(default)s)")
    parser.add_argument("--length", type=int, help="tokens of a window (default: 2048, or what the model can read)")
    parser.add_argument("--seed", type=int, default=0, help="which windows of the text are taken (%(default)s)")


def _device(options: argparse.Namespace) -> str:
    import torch

    if options.device is not None:
        return str(options.device)
    return "cuda" if torch.cuda.is_available() else "cpu"
