"""Add commands to the command line's parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The commands of a parser; argparse gives their class no public name."""


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
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(command=run)
    return parser
