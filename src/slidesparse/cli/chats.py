"""Command ``chats``: its arguments, and its output."""

from __future__ import annotations

import argparse

from slidesparse.cli.arguments import (
    Commands,
    add_command,
    add_device,
    add_source,
    device_of,
    named_path,
    show,
    source_of,
)
from slidesparse.cli.calibration import PROMPTS


def add_chats(commands: Commands) -> None:
    """Add the command ``chats``."""
    text = "Let a model write chats itself, to calibrate on and to train a pruned form on."
    chats = add_command(commands, "chats", _chats, text)
    add_source(chats, "MODEL", "the dense model: a folder, or NAMESPACE/NAME on the hub")
    add = chats.add_argument
    add("out", type=named_path, metavar="OUT.jsonl", help="file to make")
    add("--count", type=int, required=True, help="number of chats")
    add("--minutes", type=float, help="write fewer, as many as these minutes suffice for, 32 at least")
    add("--prompts", metavar="FILE", help=f"a prompt a line, or chats {PROMPTS}")
    add("--max-tokens", type=int, default=400, help="most tokens of an answer (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts, and of sampling (default: %(default)s)")
    text = "what runs the model (default: vLLM on a GPU where it is installed, else transformers)"
    add("--writer", choices=("auto", "vllm", "transformers"), default="auto", help=text)
    add_device(chats)


def _chats(options: argparse.Namespace) -> int:
    from slidesparse.recovery.own_chats import ChatOptions, write_chats

    wanted = ChatOptions(options.count, options.prompts, options.max_tokens, options.seed, options.writer)
    count = write_chats(source_of(options), options.out, wanted, device_of(options), options.minutes)
    show(options, {"file": str(options.out), "chats": count}, lambda: f"{options.out}: {count} chats")
    return 0
