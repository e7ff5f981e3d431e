"""Command ``compress``: its arguments, and its output."""

from __future__ import annotations

import argparse

from slidesparse.cli.arguments import Commands, add_command, add_device, add_source, named_path, print_outcome
from slidesparse.cli.calibration import PROMPTS

OPTIONS = ("pattern", "minutes", "prompts", "chats", "dtype", "rounding", "device", "revision")
"""Options passed unchanged to :func:`slidesparse.compress`."""


def add_compress(commands: Commands) -> None:
    """Add the command ``compress``."""
    text = "Prune, train, round and judge a chat model on chats that it writes, in a budget of minutes."
    compress = add_command(commands, "compress", _compress, text)
    add_source(compress, "MODEL", "the dense model: a folder, or NAMESPACE/NAME on the hub")
    add = compress.add_argument
    add("destination", type=named_path, metavar="OUT", help="folder to make; the result is OUT/served")
    add("--pattern", required=True, help="6:8, 4:6, 8:10, 2:4, ...")
    text = "for chats a quarter, pruning a half, judging a tenth, training at most the rest (default: %(default)s)"
    add("--minutes", type=float, default=60.0, help=text)
    add("--prompts", metavar="FILE", help=f"prompts for the chats {PROMPTS}")
    add("--chats", metavar="FILE", help="chats of the model's use, to read instead of writing any")
    add("--dtype", choices=("int8", "fp8"), default="int8", help="type of the result (default: %(default)s)")
    add("--rounding", choices=("absmax", "6bit"), default="absmax", help="of INT8 weights (default: %(default)s)")
    add_device(compress)


def _compress(options: argparse.Namespace) -> int:
    from slidesparse.recovery.compress import compress

    how = {name: getattr(options, name) for name in OPTIONS}
    print_outcome(options, compress(options.source, options.destination, **how))
    return 0
