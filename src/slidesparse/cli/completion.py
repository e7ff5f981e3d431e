"""Command ``completion``: shtab's script for a shell, which completes commands, options and their values."""

from __future__ import annotations

import argparse
import json

from slidesparse.cli.arguments import Commands, add_command
from slidesparse.errors import UnsupportedError


def add_completion(commands: Commands) -> None:
    """Add the command ``completion``."""
    completion = add_command(commands, "completion", _completion, "Print a script that completes commands in a shell.")
    completion.add_argument("shell", choices=("bash", "fish", "zsh"), help="for which shell")


def _completion(options: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError:
        raise UnsupportedError("shtab is not installed", remedy="pip install shtab") from None
    from slidesparse.cli import build_parser

    text = shtab.complete(build_parser(), options.shell)
    print(json.dumps(text) if options.json else text)
    return 0
