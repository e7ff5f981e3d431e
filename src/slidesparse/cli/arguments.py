"""Add commands to the command line's parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeAlias

from slidesparse.cli.failure import fields, print_error
from slidesparse.cli.together import let_another_speak

JSON = "--json"

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The commands of a parser; argparse gives their class no public name."""


class Parser(argparse.ArgumentParser):
    """A parser that says wrong usage in JSON too.

    Attributes:
        as_json: Whether it does.
        is_silent: Whether another process says the same, so that this one exits without a word.
    """

    as_json = False
    is_silent = False

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with status 2."""
        if self.is_silent:
            let_another_speak()
            self.exit(2)
        if self.as_json:
            print_error(fields("UsageError", message))
        super().error(message)


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command, and return its parser.

    Args:
        commands: Those of the whole command line.
        name: The word that a user types.
        run: Runs the command with its parsed arguments, and returns the exit status.
        text: Its help, one sentence.
    """
    parser = commands.add_parser(name, help=text, description=text)
    parser.add_argument(JSON, action="store_true", help="print JSON instead of text, errors too")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("-v", "--verbose", action="store_true", help="say more: what runs where, and other libraries")
    amount.add_argument("-q", "--quiet", action="store_true", help="say nothing but the result and errors")
    parser.set_defaults(command=run)
    return parser


def named_path(text: str) -> Path:
    """Return the path of an argument; an empty one, as of a variable that is not set, would be the folder one is in.

    Raises:
        ArgumentTypeError: It is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("got an empty path; needed the name of a file or a folder")
    return Path(text)


def add_source(parser: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """Add the argument ``source``, a checkpoint to read, which :func:`source_of` finds."""
    # No Path: that would make of ./a/b, a folder, the a/b of a hub.
    parser.add_argument("source", metavar=metavar, help=text)
    parser.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: its main branch)")


def source_of(options: argparse.Namespace) -> Path:
    """Return the folder of the checkpoint to read; a model of the hub is fetched first.

    Raises:
        SlideSparseError: There is no such folder or model: see :func:`slidesparse.files.hub.source_folder`.
    """
    from slidesparse.files.hub import source_folder

    return source_folder(options.source, options.revision)


def device_of(options: argparse.Namespace) -> str:
    """Return the device that the options name, else a GPU if there is one."""
    import torch

    if options.device is not None:
        return str(options.device)
    return "cuda" if torch.cuda.is_available() else "cpu"
