"""Parser, common arguments and printing of commands."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from slidesparse.cli.failure import fields, print_error
from slidesparse.errors import printable

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The commands of a parser, whose class has no public name in argparse."""

Options: TypeAlias = "argparse.ArgumentParser | argparse._ArgumentGroup"
"""A parser, or a group of its help, to add options to."""


class Parser(argparse.ArgumentParser):
    """A parser that names mistyped options, and reports wrong usage in JSON too (``as_json``)."""

    as_json = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse words as argparse does, which would rather name what a mistyped option leaves missing."""
        known, has_own = [*self._option_string_actions], self._subparsers is None and "-" in self.prefix_chars
        words = takewhile("--".__ne__, args or ()) if has_own else ()
        for name in (word.partition("=")[0] for word in words if word.startswith("--")):
            if not any(one.startswith(name) for one in known):
                nearest = [f"; did you mean {one}?" for one in get_close_matches(name, known, 1)]
                self.error("".join([f"there is no option {name}", *nearest]))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Report wrong usage, and exit with status 2."""
        if self.as_json:
            print_error(fields("UsageError", message))
        super().error(printable(message))


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command with its help, and return its parser; ``run`` returns its exit status."""
    parser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text, errors too")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("-v", "--verbose", action="store_true", help="say more: what runs where, and other libraries")
    amount.add_argument("-q", "--quiet", action="store_true", help="say nothing but the result and errors")
    parser.set_defaults(command=run)
    return parser


def named_path(text: str) -> Path:
    """Return the path of an argument; an empty one, such as of an unset variable, would mean the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("got an empty path; needed the name of a file or a folder")
    return Path(text)


def add_source(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """Add the argument ``source``, a checkpoint to read, for :func:`source_of`."""
    # Not a Path, which would turn the folder ./a/b into the hub's a/b.
    parser.add_argument("source", metavar=metavar, help=text)
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: its main branch)")


def add_device(parser: Options, text: str = "cpu or cuda") -> None:
    """Add the option ``--device`` for :func:`device_of`."""
    parser.add_argument("--device", help=f"{text} (default: cuda when there is one)")


def add_no_bos(parser: Options) -> None:
    """Add the option ``--no-bos``."""
    text = "do not begin each text window with the tokenizer's special tokens, such as BOS"
    parser.add_argument("--no-bos", action="store_true", help=text)


def source_of(options: argparse.Namespace) -> Path:
    """Return the folder of the checkpoint to read: see :func:`slidesparse.files.hub.source_folder`."""
    from slidesparse.files.hub import source_folder

    return source_folder(options.source, options.revision)


def device_of(options: argparse.Namespace) -> str:
    """Return the device of the options, by default a GPU if there is one."""
    import torch

    if options.device is not None:
        return str(options.device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def print_outcome(options: argparse.Namespace, outcome: Any) -> None:
    """Print the outcome of a command: as JSON, or as text in the width of the terminal."""
    from slidesparse.base.progress import wrapped

    show(options, outcome.to_json(), lambda: wrapped(outcome.describe()))


def show(options: argparse.Namespace, value: Any, text: Callable[[], str]) -> None:
    """Print a value as JSON or as text, without control characters of a checkpoint."""
    print(printable(json.dumps(value, indent=2) if options.json else text(), keep="\n"))
