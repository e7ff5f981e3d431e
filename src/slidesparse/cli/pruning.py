"""The commands that prune, train on, and write chats: their arguments, and what they print."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
from slidesparse.cli.calibration import (
    PROMPTS,
    add_calibration,
    add_own_chats,
    add_texts,
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
    prune.add_argument("destination", type=named_path, metavar="DST", help="folder to make")
    what = prune.add_argument_group("what is pruned, and into which type")
    what.add_argument("--pattern", required=True, help="6:8, 4:6, 8:10, 2:4, ...; dense to round alone")
    text = "int8, fp8 (for Blackwell), or bf16, fp16, fp32 to prune only (default: int8, or a quantised source's own)"
    what.add_argument("--dtype", help=text)
    text = "how INT8 weights are rounded: a scale a channel, the same in six bits (20 %% less GPU memory on Hopper), or"
    kinds = ("absmax", "6bit", "ternary")
    what.add_argument("--recipe", choices=kinds, default="absmax", help=f"{text} BitNet's (default: %(default)s)")
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
    how.add_argument("--match", type=int, default=0, metavar="STEPS", help=f"{text} (default: 0, none)")
    text = "fold outliers of activations into weights before rounding, by powers of two (default: for int8 with text)"
    how.add_argument("--smooth", action=argparse.BooleanOptionalAction, help=text)
    words = prune.add_argument_group("the calibration text")
    text = "text like the model's use: .txt, .jsonl, .parquet, a folder, a data set (default: this package's own pages)"
    add_calibration(words, text)
    machine = prune.add_argument_group("the run")
    text = "say what would be done, how large it would be, and how long it takes; write nothing"
    machine.add_argument("--dry-run", action="store_true", help=text)
    add_device(machine, "where weights are pruned and calibration runs: cpu or cuda")
    text = "links that lead out of SRC: an error, copies of what is there, or left out (default: %(default)s)"
    machine.add_argument("--links", default="refuse", choices=("refuse", "copy", "skip"), help=text)
    add_join_timeout(machine)
    costs = "; ".join(expected_cost(zeros, 10**9) for zeros in (1 / 4, 1 / 3, 1 / 2))
    prune.epilog = f"Least is lost by {BEST}. {costs}."


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


RECOVER_OPTIONS = (
    *("minutes", "rate", "window", "held", "seed", "train", "dtype", "recipe", "micro", "save_minutes", "recompute"),
)
"""Options that :class:`slidesparse.recovery.options.RecoverOptions` takes as they are."""


def add_recover(commands: Commands) -> None:
    """Add recover."""
    text = "Train a pruned checkpoint toward the dense model, its zeros held."
    recover = add_command(commands, "recover", together(_recover), text)
    add_source(recover, "PRUNED", "a checkpoint that prune wrote in a float type, as with --dtype bf16")
    add = recover.add_argument
    add("--dense", required=True, metavar="BASE", help="the dense model: a folder, or a hub's name")
    add("--out", type=named_path, required=True, metavar="OUT", help="folder to make")
    budget = recover.add_mutually_exclusive_group(required=True)
    budget.add_argument("--tokens", help="budget: 5M, 20M, 1G")
    budget.add_argument("--minutes", type=float, help="budget in minutes of training")
    for name, what in (("text", "a text to train on"), ("chats", "chats to train on, one a line as JSON")):
        add_texts(recover, name, f"{what}, with its share among several; may be given again")
    add_own_chats(recover, "the dense model")
    add("--rate", type=float, help="highest rate (default: 9e-6 x 2048 / the model's width)")
    add("--batch", default="65536", metavar="TOKENS", help="tokens of a step (default: %(default)s)")
    add("--window", type=int, default=1024, help="tokens of a window (default: %(default)s)")
    add("--micro", type=int, default=32, help="most windows that a GPU takes at once (default: %(default)s)")
    add("--held", type=int, default=64, help="windows kept from training, to judge by (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the order of windows (default: %(default)s)")
    text = "all but input and output embeddings, the linears of the layers alone, or everything (default: %(default)s)"
    add("--train", default="body", choices=("body", "linears", "all"), help=text)
    text = "round weights and activations as they are served, while training"
    add("--dtype", choices=("int8", "fp8"), help=text)
    text = "how INT8 weights are rounded (default: %(default)s)"
    add("--recipe", choices=("absmax", "6bit"), default="absmax", help=text)
    text = "compute activations again in the backward pass: slower, and less memory (default: where it is needed)"
    add("--recompute", choices=("auto", "on", "off"), default="auto", help=text)
    text = "minutes between saved states, to go on from (default: %(default)s)"
    add("--save-minutes", type=float, default=5.0, help=text)
    add_no_bos(recover)
    add_device(recover)
    add_join_timeout(recover)


def _recover(options: argparse.Namespace, ranks: Ranks) -> int:
    from slidesparse.files.hub import source_folder
    from slidesparse.recovery.options import RecoverOptions, parse_amount
    from slidesparse.recovery.run import recover

    with ranks.first_alone(of_machine=True):
        pruned, dense = source_of(options), source_folder(options.dense, None)
    device = own_device(ranks, device_of(options))

    def wanted(own: list[str]) -> RecoverOptions:
        return RecoverOptions(
            texts=(*options.text, *options.chats, *own),
            tokens=None if options.tokens is None else parse_amount(options.tokens),
            batch=parse_amount(options.batch, "--batch"),
            bos=not options.no_bos,
            **{name: getattr(options, name) for name in RECOVER_OPTIONS},
        )

    wanted(planned_chats(options))  # wrong options are refused before chats are written
    own = own_chats_of(options, dense, device, ranks)
    result = recover(pruned, dense, options.out, wanted(own), device=device, ranks=ranks)
    if ranks.is_first:
        print_outcome(options, result)
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
