"""The commands that train on and that write text to train on: their arguments, and what they print."""

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
    show,
    source_of,
)  # fmt: skip
from slidesparse.cli.calibration import PROMPTS, add_own_chats, add_texts, own_chats_of, planned_chats
from slidesparse.cli.together import add_join_timeout, once_a_machine, own_device, together

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks

SAME = (
    *("minutes", "rate", "window", "held", "seed", "train", "dtype", "recipe", "micro", "save_minutes", "recompute"),
)
"""Options that :class:`slidesparse.recover.options.RecoverOptions` takes as they are."""


def add_commands(commands: Commands) -> None:
    """Add recover and chats."""
    _add_recover(commands)
    _add_chats(commands)


def _add_recover(commands: Commands) -> None:
    text = "Train a pruned checkpoint toward the dense model, its zeros held."
    recover = add_command(commands, "recover", together(_recover), text)
    add_source(recover, "PRUNED", "a checkpoint that prune wrote with --dtype bf16")
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
    add("--batch", default="65536", metavar="TOKENS", help="tokens of a step (%(default)s)")
    add("--window", type=int, default=1024, help="tokens of a window (%(default)s)")
    add("--micro", type=int, default=32, help="most windows that a GPU takes at once (%(default)s)")
    add("--held", type=int, default=64, help="windows kept from training, to judge by (%(default)s)")
    add("--seed", type=int, default=0, help="of the order of windows (%(default)s)")
    text = "all but input and output embeddings, the linears of the layers alone, or everything (%(default)s)"
    add("--train", default="body", choices=("body", "linears", "all"), help=text)
    text = "round weights and activations as they are served, while training"
    add("--dtype", choices=("int8", "fp8"), help=text)
    add("--recipe", choices=("absmax", "6bit"), default="absmax", help="how INT8 weights are rounded (%(default)s)")
    text = "compute activations again in the backward pass: slower, and less memory (default: where it is needed)"
    add("--recompute", choices=("auto", "on", "off"), default="auto", help=text)
    add("--save-minutes", type=float, default=5.0, help="minutes between saved states, to go on from (%(default)s)")
    add_no_bos(recover)
    add_device(recover)
    add_join_timeout(recover)


def _recover(options: argparse.Namespace, ranks: Ranks) -> int:
    from slidesparse.files.hub import source_folder
    from slidesparse.recover.options import RecoverOptions, parse_amount
    from slidesparse.recover.run import recover

    with once_a_machine(ranks):
        pruned, dense = source_of(options), source_folder(options.dense, None)
    device = own_device(ranks, device_of(options))

    def wanted(own: list[str]) -> RecoverOptions:
        return RecoverOptions(
            texts=(*options.text, *options.chats, *own),
            tokens=None if options.tokens is None else parse_amount(options.tokens),
            batch=parse_amount(options.batch),
            bos=not options.no_bos,
            **{name: getattr(options, name) for name in SAME},
        )

    wanted(planned_chats(options))  # wrong options are refused before chats are written
    own = own_chats_of(options, dense, device, ranks)
    result = recover(pruned, dense, options.out, wanted(own), device=device, ranks=ranks)
    if ranks.is_first:
        print_outcome(options, result)
    return 0


def _add_chats(commands: Commands) -> None:
    text = "Let a model write chats itself, to calibrate on and to train a pruned form on."
    chats = add_command(commands, "chats", together(_chats), text)
    add_source(chats, "MODEL", "the dense model: a folder, or NAMESPACE/NAME on the hub")
    add = chats.add_argument
    add("out", type=named_path, metavar="OUT.jsonl", help="file to make")
    add("--number", type=int, required=True, help="how many chats")
    add("--prompts", metavar="FILE", help=f"a prompt a line {PROMPTS}")
    add("--longest", type=int, default=400, help="most tokens of an answer (%(default)s)")
    add("--seed", type=int, default=0, help="of the tasks, and of what is drawn (%(default)s)")
    text = "what runs the model (default: vLLM on a GPU where it is installed, else transformers)"
    add("--writer", choices=("auto", "vllm", "transformers"), default="auto", help=text)
    add_device(chats)
    add_join_timeout(chats)


def _chats(options: argparse.Namespace, ranks: Ranks) -> int:
    from slidesparse.recover.own_chats import ChatOptions, write_chats

    wanted = ChatOptions(options.number, options.prompts, options.longest, options.seed, options.writer)
    device = own_device(ranks, device_of(options))
    count = write_chats(source_of(options), options.out, wanted, device, ranks)
    if ranks.is_first:
        show(options, {"file": str(options.out), "chats": count}, lambda: f"{options.out}: {count} chats")
    return 0
