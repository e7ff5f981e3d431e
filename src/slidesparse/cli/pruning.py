"""Command ``prune``: its arguments, and its output."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slidesparse.cli.arguments import (
    Commands,
    add_command,
    add_device,
    add_source,
    device_of,
    named_path,
    print_outcome,
    source_of,
)  # fmt: skip
from slidesparse.cli.calibration import add_calibration, calibration_of
from slidesparse.cli.together import own_device, together
from slidesparse.errors import InputError

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks
    from slidesparse.offline.dry_run import DryRun
    from slidesparse.offline.outcome import PruneSummary

METHODS = ("magnitude", "sparsegpt", "wanda")
"""Pruning methods of :mod:`slidesparse.pruning`, whose import takes torch, and so seconds."""


def add_prune(commands: Commands) -> None:
    """Add the command ``prune``."""
    prune = add_command(commands, "prune", together(_prune), "Prune and quantise a Hugging Face checkpoint.")
    add_source(prune, "SRC", "folder with config.json and safetensors, or NAMESPACE/NAME on the hub")
    prune.add_argument("destination", type=named_path, metavar="DST", help="folder to make")
    what = prune.add_argument_group("what is pruned, and into which type")
    what.add_argument("--pattern", required=True, help="6:8, 4:6, 8:10, 2:4, ...; dense to round alone")
    text = "int8, fp8 (for Blackwell), or bf16, fp16, fp32 to prune only (default: int8, or a quantised source's own)"
    what.add_argument("--dtype", help=text)
    text = "how INT8 weights are rounded: a scale a channel, the same in six bits (20 %% less GPU memory on Hopper), or"
    kinds = ("absmax", "6bit", "ternary")
    what.add_argument("--rounding", choices=kinds, default="absmax", help=f"{text} BitNet's (default: %(default)s)")
    what.add_argument("--lm-head", action="store_true", help="treat the output embedding too")
    text = "what is treated of a model of text and images (default: %(default)s)"
    what.add_argument("--part", default="language", choices=("language", "vision", "all"), help=text)
    text = "leave a linear alone (name or re:...)"
    what.add_argument("--ignore", action="append", default=[], metavar="NAME", help=text)
    text = "another pattern for a layer (name or re:...)"
    what.add_argument("--layer", action="append", default=[], metavar="NAME=PATTERN", help=text)
    how = prune.add_argument_group("how")
    text = "how weights are chosen; magnitude reads no text, and loses many times more (default: %(default)s)"
    how.add_argument("--method", choices=METHODS, default="sparsegpt", help=text)
    text = "train each pruned layer to give the dense one's outputs on the calibration text, zeros held: 200"
    how.add_argument("--match-steps", type=int, default=0, metavar="STEPS", help=f"{text} (default: 0, none)")
    text = "do not fold outliers of activations into weights, by powers of two, before int8 is rounded"
    how.add_argument("--no-smooth", action="store_false", dest="smooth", help=text)
    words = prune.add_argument_group("the calibration text")
    text = "text like the model's use: .txt, .jsonl, .parquet, a folder, a data set (default: Python's library)"
    add_calibration(words, text)
    machine = prune.add_argument_group("the run")
    text = "say what would be done, how large it would be, and how long it takes; write nothing"
    machine.add_argument("--dry-run", action="store_true", help=text)
    add_device(machine, "where weights are pruned and calibration runs: cpu or cuda")
    text = "links that lead out of SRC: an error, copies of what is there, or left out (default: %(default)s)"
    machine.add_argument("--links", default="refuse", choices=("refuse", "copy", "skip"), help=text)
    prune.epilog = "Least is lost by --match-steps 200 with text like the model's use, then slidesparse recover."


def _prune(options: argparse.Namespace, ranks: Ranks) -> int:
    from slidesparse.offline.dry_run import dry_run
    from slidesparse.offline.prune import prune_checkpoint
    from slidesparse.offline.prune_options import PruneOptions, check_options

    pairs = [entry.rpartition("=") for entry in options.layer]
    layers = {name: pattern for name, _, pattern in pairs}
    if "" in layers or len(layers) < len(pairs):
        raise InputError("--layer", got=", ".join(options.layer), needed="NAME=PATTERN, each name once")
    same = ("pattern", "dtype", "method", "rounding", "lm_head", "part", "match_steps", "smooth")
    how = {name: getattr(options, name) for name in same}
    wanted = PruneOptions(calibration=calibration_of(options), ignore=tuple(options.ignore), layers=layers, **how)
    check_options(wanted)  # before a model of the hub is fetched
    with ranks.first_alone(of_machine=True):
        source = source_of(options)
    device = own_device(ranks, device_of(options))
    summary: DryRun | PruneSummary
    where: dict[str, Any] = {"device": device, "links": options.links}
    if not options.dry_run:
        summary = prune_checkpoint(source, options.destination, wanted, **where, ranks=ranks)
    elif ranks.is_first:
        summary = dry_run(source, options.destination, wanted, **where)
    if ranks.is_first:
        print_outcome(options, summary)
    return 0
