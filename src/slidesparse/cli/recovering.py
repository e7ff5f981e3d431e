"""Command ``recover``: its arguments, and its output."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from slidesparse.cli.arguments import (
    Commands,
    add_command,
    add_device,
    add_no_bos,
    add_source,
    device_of,
    named_path,
    print_outcome,
    source_of,
)  # fmt: skip
from slidesparse.cli.calibration import add_texts
from slidesparse.cli.together import own_device, together

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks

SAME = (
    *("minutes", "lr", "window", "eval_windows", "seed", "train", "dtype", "rounding", "micro_batch", "save_minutes"),
    "gradient_checkpointing",
)
"""Options passed unchanged to :class:`slidesparse.recovery.options.RecoverOptions`."""


def add_recover(commands: Commands) -> None:
    """Add the command ``recover``."""
    text = "Train a pruned checkpoint toward its dense model, with the zeros held."
    recover = add_command(commands, "recover", together(_recover), text)
    add_source(recover, "PRUNED", "checkpoint that prune wrote in a float type, as with --dtype bf16")
    add = recover.add_argument
    add("destination", type=named_path, metavar="OUT", help="folder to make")
    add("--dense", required=True, metavar="BASE", help="dense model: a folder, or NAMESPACE/NAME on the hub")
    add("--dense-revision", metavar="REVISION", help="branch, tag or commit of BASE on the hub (default: main branch)")
    add("--tokens", help="budget: 5M, 20M, 1G; this or --minutes is needed")
    add("--minutes", type=float, help="budget in minutes of training; with both, whichever is spent first")
    add_texts(recover, "text", "texts or chats to train on, with a share among several; may be given again")
    add("--lr", type=float, help="peak learning rate (default: 9e-6 x 2048 / the model's width)")
    add("--batch", default="65536", metavar="TOKENS", help="tokens of a step (default: %(default)s)")
    add("--window", type=int, default=1024, help="tokens of a text window (default: %(default)s)")
    text = "most windows in one forward pass of a GPU (default: %(default)s)"
    add("--micro-batch", type=int, default=32, metavar="WINDOWS", help=text)
    text = "text windows kept out of training, to evaluate on (default: %(default)s)"
    add("--eval-windows", type=int, default=64, metavar="WINDOWS", help=text)
    text = "seed of the training order and of the choice of evaluation windows (default: %(default)s)"
    add("--seed", type=int, default=0, help=text)
    text = "all but input and output embeddings, the linears of the layers alone, or everything (default: %(default)s)"
    add("--train", default="body", choices=("body", "linears", "all"), help=text)
    text = "round weights and activations in training as they are rounded when served (default: no rounding)"
    add("--dtype", choices=("int8", "fp8"), help=text)
    add("--rounding", choices=("absmax", "6bit"), default="absmax", help="of INT8 weights (default: %(default)s)")
    text = "recompute activations in the backward pass: slower, with less memory (default: where memory needs it)"
    add("--gradient-checkpointing", choices=("auto", "on", "off"), default="auto", help=text)
    text = "minutes between saved states, from which a killed run resumes (default: %(default)s)"
    add("--save-minutes", type=float, default=5.0, help=text)
    add_no_bos(recover)
    add_device(recover)


def _recover(options: argparse.Namespace, ranks: Ranks) -> int:
    from slidesparse.recovery.options import RecoverOptions, parse_amount
    from slidesparse.recovery.recover_function import dense_folder
    from slidesparse.recovery.run import recover

    wanted = RecoverOptions(
        texts=tuple(options.text),
        tokens=None if options.tokens is None else parse_amount(options.tokens),
        batch=parse_amount(options.batch, "--batch"),
        bos=not options.no_bos,
        **{name: getattr(options, name) for name in SAME},
    )
    with ranks.first_alone(of_machine=True):
        dense = dense_folder(options.dense, options.dense_revision, options.revision)
        pruned = source_of(options)
    device = own_device(ranks, device_of(options))

    result = recover(pruned, dense, options.destination, wanted, device=device, ranks=ranks)
    if ranks.is_first:
        print_outcome(options, result)
    return 0
