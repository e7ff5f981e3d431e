"""The command line: argument parsing and printing, nothing else.

Each command imports what it needs when it runs. So ``slidesparse --help`` waits neither for torch nor for transformers,
and an interruption while they are imported ends in one line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from slidesparse import __version__
from slidesparse.cli import benchmarks, checkpoints
from slidesparse.errors import SlideSparseError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 when it worked; 1 when it did not, with one line on standard error; 2 for wrong usage; 130 when interrupted.
    """
    try:
        options = build_parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except (SlideSparseError, OSError) as error:
        print(f"slidesparse: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("slidesparse: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="slidesparse", description="Sparse language models on 2:4 Sparse Tensor Cores."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    checkpoints.add_commands(commands)
    benchmarks.add_commands(commands)
    return parser
