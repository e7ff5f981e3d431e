"""The commands that train on and that write text to train on: their arguments, and what they print."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from slidesparse.cli.arguments import Commands, add_command, add_source, device_of, named_path, source_of
from slidesparse.cli.together import add_join_timeout, one_voice, own_device
from slidesparse.errors import InputError

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks


def add_commands(commands: Commands) -> None:
    """Add recover and chats."""
    _add_recover(commands)
    _add_chats(commands)


def _add_recover(commands: Commands) -> None:
    recover = add_command(
        commands, "recover", _recover, "Train a pruned checkpoint toward the dense model, its zeros held."
    )
    add_source(recover, "PRUNED", "a checkpoint that prune wrote with --dtype bf16")
    recover.add_argument("--dense", required=True, metavar="BASE", help="the dense model: a folder, or a hub's name")
    recover.add_argument("--out", type=named_path, required=True, metavar="OUT", help="folder to make")
    budget = recover.add_mutually_exclusive_group(required=True)
    budget.add_argument("--tokens", help="budget: 5M, 20M, 1G")
    budget.add_argument("--minutes", type=float, help="budget in minutes of training")
    for name, what in (("text", "a text to train on"), ("chats", "chats to train on, one a line as JSON")):
        recover.add_argument(
            f"--{name}",
            action="append",
            default=[],
            metavar="FILE[:WEIGHT]",
            help=f"{what}, with its share among several; may be given again",
        )
    add_own_chats(recover, "the dense model")
    recover.add_argument("--rate", type=float, help="highest rate (default: 2e-5 x 2048 / the model's width)")
    recover.add_argument("--batch", default="65536", metavar="TOKENS", help="tokens of a step (%(default)s)")
    recover.add_argument("--window", type=int, default=1024, help="tokens of a window (%(default)s)")
    recover.add_argument("--micro", type=int, default=32, help="most windows that a GPU takes at once (%(default)s)")
    recover.add_argument("--held", type=int, default=64, help="windows kept from training, to judge by (%(default)s)")
    recover.add_argument("--seed", type=int, default=0, help="of the order of windows (%(default)s)")
    recover.add_argument(
        "--train",
        default="body",
        choices=("body", "linears", "all"),
        help="all but input and output embeddings, the linears of the layers alone, or everything (%(default)s)",
    )
    recover.add_argument(
        "--dtype", choices=("int8", "fp8"), help="round weights and activations as they are served, while training"
    )
    recover.add_argument(
        "--recipe", choices=("absmax", "6bit"), default="absmax", help="how INT8 weights are rounded (%(default)s)"
    )
    recover.add_argument(
        "--recompute",
        choices=("auto", "on", "off"),
        default="auto",
        help="compute activations again in the backward pass: slower, and less memory (default: where it is needed)",
    )
    recover.add_argument(
        "--save-minutes", type=float, default=5.0, help="minutes between saved states, to go on from (%(default)s)"
    )
    add_no_bos(recover)
    recover.add_argument("--device", help="cpu or cuda (default: cuda when there is one)")
    add_join_timeout(recover)


def add_own_chats(parser: argparse.ArgumentParser, model: str) -> None:
    """Add the options of chats that a model writes itself, which :func:`own_chats_of` reads."""
    parser.add_argument(
        "--self", type=int, metavar="NUMBER", dest="own_chats", help=f"chats that {model} writes itself, and keeps"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", help="prompts for --self (default: tasks from documentation of installed packages)"
    )


def add_no_bos(parser: argparse.ArgumentParser) -> None:
    """Add the option that says how windows begin."""
    parser.add_argument(
        "--no-bos",
        action="store_true",
        help="do not begin each window with what the tokenizer puts before a text, such as BOS",
    )


def own_chats_of(options: argparse.Namespace, model: Path, device: str, ranks: Ranks) -> list[str]:
    """Return the file of chats that the options ask a model to write, once it is written; none where they ask for none.

    Raises:
        InputError: ``--prompts`` without ``--self``.
    """
    if options.own_chats is None:
        if options.prompts is not None:
            raise InputError("options without effect", got="--prompts without --self", needed="--self NUMBER")
        return []
    from slidesparse.recover.own_chats import ChatOptions, kept_chats

    wanted = ChatOptions(options.own_chats, options.prompts)
    return [str(kept_chats(model, wanted, device, ranks))]


def _recover(options: argparse.Namespace) -> int:
    from slidesparse.base.join import joined

    with joined(join_s=options.join_timeout) as ranks, one_voice(ranks, options):
        return _recover_together(options, ranks)


def _recover_together(options: argparse.Namespace, ranks: Ranks) -> int:
    from slidesparse.base.progress import wrapped
    from slidesparse.files.hub import source_folder
    from slidesparse.recover.options import RecoverOptions, parse_amount
    from slidesparse.recover.run import recover

    if ranks.local:
        ranks.wait()  # one process of each machine fetches models of the hub for all
    pruned, dense = source_of(options), source_folder(options.dense, None)
    if not ranks.local:
        ranks.wait()
    device = own_device(ranks, device_of(options))
    texts = [*options.text, *options.chats, *(["own chats"] if options.own_chats else [])]

    def wanted(texts: list[str]) -> RecoverOptions:
        return RecoverOptions(
            texts=tuple(texts),
            tokens=None if options.tokens is None else parse_amount(options.tokens),
            minutes=options.minutes,
            rate=options.rate,
            batch=parse_amount(options.batch),
            window=options.window,
            held=options.held,
            seed=options.seed,
            train=options.train,
            dtype=options.dtype,
            recipe=options.recipe,
            bos=not options.no_bos,
            micro=options.micro,
            save_minutes=options.save_minutes,
            recompute=options.recompute,
        )

    wanted(texts)  # wrong options are refused before chats are written
    own = own_chats_of(options, dense, device, ranks)
    result = recover(
        pruned, dense, options.out, wanted([*options.text, *options.chats, *own]), device=device, ranks=ranks
    )
    if ranks.is_first:
        print(json.dumps(result.to_json(), indent=2) if options.json else wrapped(result.describe()))
    return 0


def _add_chats(commands: Commands) -> None:
    chats = add_command(
        commands, "chats", _chats, "Let a model write chats itself, to calibrate on and to train a pruned form on."
    )
    add_source(chats, "MODEL", "the dense model: a folder, or NAMESPACE/NAME on the hub")
    chats.add_argument("out", type=named_path, metavar="OUT.jsonl", help="file to make")
    chats.add_argument("--number", type=int, required=True, help="how many chats")
    chats.add_argument(
        "--prompts", metavar="FILE", help="a prompt a line (default: tasks from documentation of installed packages)"
    )
    chats.add_argument("--longest", type=int, default=400, help="most tokens of an answer (%(default)s)")
    chats.add_argument("--seed", type=int, default=0, help="of the tasks, and of what is drawn (%(default)s)")
    chats.add_argument(
        "--writer",
        choices=("auto", "vllm", "transformers"),
        default="auto",
        help="what runs the model (default: vLLM on a GPU where it is installed, else transformers)",
    )
    chats.add_argument("--device", help="cpu or cuda (default: cuda when there is one)")
    add_join_timeout(chats)


def _chats(options: argparse.Namespace) -> int:
    from slidesparse.base.join import joined
    from slidesparse.recover.own_chats import ChatOptions, write_chats

    with joined(join_s=options.join_timeout) as ranks, one_voice(ranks, options):
        wanted = ChatOptions(options.number, options.prompts, options.longest, options.seed, options.writer)
        device = own_device(ranks, device_of(options))
        count = write_chats(source_of(options), options.out, wanted, device, ranks)
        if ranks.is_first:
            told = {"file": str(options.out), "chats": count}
            print(json.dumps(told) if options.json else f"{options.out}: {count} chats")
    return 0
