"""Add commands to the command line's parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeAlias

from slidesparse.cli.failure import fields, print_error

JSON = "--json"

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The commands of a parser; argparse gives their class no public name."""


class Parser(argparse.ArgumentParser):
    """A parser that says wrong usage in JSON too.

    Attributes:
        as_json: Whether it does.
    """

    as_json = False

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and exit with status 2."""
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
