"""Commands that prune and write chats: their arguments, and what they print."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from slidesparse.cli.arguments import (
    Commands,
    add_command,
    add_device,
    add_source,
    device_of,
    named_path,
    print_outcome,
    show,
    source_of,
)  # fmt: skip
from slidesparse.cli.calibration import (
    PROMPTS,
    add_calibration,
    calibration_of,
    own_chats_of,
    planned_chats,
)  # fmt: skip
from slidesparse.cli.together import add_join_timeout, own_device, together
from slidesparse.errors import InputError
from slidesparse.offline.published import BEST, expected_cost

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks
    from slidesparse.offline.dry_run import DryRun
    from slidesparse.offline.outcome import PruneSummary

METHODS = ("magnitude", "sparsegpt", "wanda")
"""Pruning methods, of which :mod:`slidesparse.pruning` has the code: importing that takes torch, and so seconds."""


def add_prune(commands: Commands) -> None:
    """Add prune."""
    prune = add_command(commands, "prune", together(_prune), "Prune and quantise a Hugging Face checkpoint.")
    add_source(prune, "SRC", "folder with config.json and safetensors, or NAMESPACE/NAME on the hub")
    add = prune.add_argument
    add("destination", type=named_path, metavar="DST", help="folder to make")
    add("--pattern", required=True, help="6:8, 4:6, 8:10, 2:4, ...")
    text = "int8 or fp8 (docs/cards.md compares them); bf16, fp16 or fp32 to prune only (default: a quantised source's)"
    add("--dtype", help=text)
    add("--method", choices=METHODS, default="magnitude", help="how weights are chosen (default: %(default)s)")
    text = "train each pruned layer to give the dense one's outputs on the calibration text, zeros held: 200"
    add("--match", type=int, default=0, metavar="STEPS", help=f"{text} (default: 0, none)")
    text = "fold outliers of activations into weights before rounding, by powers of two (default: for int8 with"
    add("--smooth", action=argparse.BooleanOptionalAction, help=f"{text} calibration text)")
    add_calibration(prune, "text for wanda and sparsegpt: .txt, .jsonl, .parquet, a folder, a data set, or default")
    add_device(prune, "where weights are pruned and calibration runs: cpu or cuda")
    text = (
        "how INT8 weights are rounded: one scale a channel, BitNet b1.58's -1, 0, 1, or a scale a channel and six bits,"
        " which take 0.8 of the memory on an H100 or H200 (default: %(default)s)"
    )
    add("--recipe", choices=("absmax", "ternary", "6bit"), default="absmax", help=text)
    add("--ignore", action="append", default=[], metavar="NAME", help="leave a linear alone (name or re:...)")
    text = "another pattern for a layer (name or re:...)"
    add("--layer", action="append", default=[], metavar="NAME=PATTERN", help=text)
    add("--dry-run", action="store_true", help="say what would be done and how large it would be; write nothing")
    add("--lm-head", action="store_true", help="treat the output embedding too")
    text = "links that lead out of SRC: an error, copies of what is there, or left out (default: %(default)s)"
    add("--links", default="refuse", choices=("refuse", "copy", "skip"), help=text)
    text = "what is treated of a model of text and images (default: %(default)s)"
    add("--part", default="language", choices=("language", "vision", "all"), help=text)
    add_join_timeout(prune)
    costs = "; ".join(expected_cost(zeros, 10**9) for zeros in (1 / 4, 1 / 3, 1 / 2))
    prune.epilog = f"Least is lost by {BEST}. {costs} (docs/accuracy.md)."


def _prune(options: argparse.Namespace, ranks: Ranks) -> int:
    from slidesparse.offline.dry_run import dry_run
    from slidesparse.offline.prune import prune_checkpoint
    from slidesparse.offline.prune_options import PruneOptions, check_options

    if options.dry_run and options.own_chats:
        raise InputError("--self with --dry-run", needed="one of them", remedy="write chats with: slidesparse chats")
    calibration = calibration_of(options, planned_chats(options))
    pairs = [entry.rpartition("=") for entry in options.layer]
    layers = {name: pattern for name, _, pattern in pairs}
    if "" in layers or len(layers) < len(pairs):
        raise InputError("--layer", got=", ".join(options.layer), needed="NAME=PATTERN, each name once")
    same = ("pattern", "dtype", "method", "recipe", "lm_head", "part", "match", "smooth")
    how = {name: getattr(options, name) for name in same}
    wanted = PruneOptions(calibration=calibration, ignore=tuple(options.ignore), layers=layers, **how)
    check_options(wanted)  # before a model of the hub is fetched
    with ranks.first_alone(of_machine=True):
        source = source_of(options)
    device = own_device(ranks, device_of(options))
    if own := own_chats_of(options, source, device, ranks):
        wanted = replace(wanted, calibration=calibration_of(options, own))
    summary: DryRun | PruneSummary
    where: dict[str, Any] = {"device": device, "links": options.links}
    if not options.dry_run:
        summary = prune_checkpoint(source, options.destination, wanted, **where, ranks=ranks)
    elif ranks.is_first:
        summary = dry_run(source, options.destination, wanted, **where)
    if ranks.is_first:
        print_outcome(options, summary)
    return 0


def add_chats(commands: Commands) -> None:
    """Add chats."""
    text = "Let a model write chats itself, to calibrate on and to train a pruned form on."
    chats = add_command(commands, "chats", together(_chats), text)
    add_source(chats, "MODEL", "the dense model: a folder, or NAMESPACE/NAME on the hub")
    add = chats.add_argument
    add("out", type=named_path, metavar="OUT.jsonl", help="file to make")
    add("--number", type=int, required=True, help="how many chats")
    add("--prompts", metavar="FILE", help=f"a prompt a line {PROMPTS}")
    add("--longest", type=int, default=400, help="most tokens of an answer (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the tasks, and of what is drawn (default: %(default)s)")
    text = "what runs the model (default: vLLM on a GPU where it is installed, else transformers)"
    add("--writer", choices=("auto", "vllm", "transformers"), default="auto", help=text)
    add_device(chats)
    add_join_timeout(chats)


def _chats(options: argparse.Namespace, ranks: Ranks) -> int:
    from slidesparse.recovery.own_chats import ChatOptions, write_chats

    wanted = ChatOptions(options.number, options.prompts, options.longest, options.seed, options.writer)
    device = own_device(ranks, device_of(options))
    count = write_chats(source_of(options), options.out, wanted, device, ranks)
    if ranks.is_first:
        show(options, {"file": str(options.out), "chats": count}, lambda: f"{options.out}: {count} chats")
    return 0
