"""Add commands to the command line's parser."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from slidesparse.cli.failure import fields, print_error
from slidesparse.cli.together import let_another_speak
from slidesparse.errors import printable

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The commands of a parser; argparse gives their class no public name."""

Options: TypeAlias = "argparse.ArgumentParser | argparse._ArgumentGroup"
"""Where options are added: a parser, or a group of its help."""


class Parser(argparse.ArgumentParser):
    """A parser that says wrong usage in JSON too where ``as_json``; where ``is_silent`` another process says it."""

    as_json = False
    is_silent = False

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with status 2."""
        if self.is_silent:
            let_another_speak()
            self.exit(2)
        if self.as_json:
            print_error(fields("UsageError", message))
        super().error(printable(message))


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command of this name and help, which ``run`` runs and gives an exit status; return its parser."""
    parser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text, errors too")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("-v", "--verbose", action="store_true", help="say more: what runs where, and other libraries")
    amount.add_argument("-q", "--quiet", action="store_true", help="say nothing but the result and errors")
    parser.set_defaults(command=run)
    return parser


def named_path(text: str) -> Path:
    """Return the path of an argument; an empty one, as of a variable that is not set, would be the folder one is in."""
    if not text:
        raise argparse.ArgumentTypeError("got an empty path; needed the name of a file or a folder")
    return Path(text)


def add_source(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """Add the argument ``source``, a checkpoint to read, which :func:`source_of` finds."""
    # No Path: that would make of ./a/b, a folder, the a/b of a hub.
    parser.add_argument("source", metavar=metavar, help=text)
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: its main branch)")


def add_device(parser: Options, text: str = "cpu or cuda") -> None:
    """Add the option ``--device``, which :func:`device_of` reads."""
    parser.add_argument("--device", help=f"{text} (default: cuda when there is one)")


def add_no_bos(parser: Options) -> None:
    """Add the option that says how windows begin."""
    text = "do not begin each window with what the tokenizer puts before a text, such as BOS"
    parser.add_argument("--no-bos", action="store_true", help=text)


def source_of(options: argparse.Namespace) -> Path:
    """Return the folder of the checkpoint to read, as :func:`slidesparse.files.hub.source_folder` does."""
    from slidesparse.files.hub import source_folder

    return source_folder(options.source, options.revision)


def device_of(options: argparse.Namespace) -> str:
    """Return the device that the options name, else a GPU if there is one."""
    import torch

    if options.device is not None:
        return str(options.device)
    return "cuda" if torch.cuda.is_available() else "cpu"


def print_outcome(options: argparse.Namespace, outcome: Any) -> None:
    """Print what a command made: as JSON, or as text in the width of the terminal."""
    from slidesparse.base.progress import wrapped

    show(options, outcome.to_json(), lambda: wrapped(outcome.describe()))


def show(options: argparse.Namespace, value: Any, text: Callable[[], str]) -> None:
    """Print a value as JSON, or the text that says it; with nothing of a checkpoint on which a terminal would act."""
    print(printable(json.dumps(value, indent=2) if options.json else text(), keep="\n"))
