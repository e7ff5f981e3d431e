"""The command line: argument parsing and printing, nothing else.

Each command imports what it needs when it runs. So ``slidesparse --help`` waits neither for torch nor for transformers,
and an interruption while they are imported ends in one line.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Sequence

from slidesparse import __version__
from slidesparse.cli import benchmarks, checkpoints
from slidesparse.cli.arguments import JSON, Parser
from slidesparse.cli.failure import drop_output, report
from slidesparse.errors import SlideSparseError

BROKEN_PIPE = 128 + 13
"""Exit status of a command whose reader went away, as ``head`` does: that of a program which SIGPIPE ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 when it worked; 1 when it did not, with one line on standard error; 2 for wrong usage; 130 when interrupted;
        141 when nobody reads its output any more. With ``--json`` standard output has the error too (docs/formats.md).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    _make_printable()
    options = argparse.Namespace(json=JSON in words, verbose=False)
    try:
        options = build_parser(options.json).parse_args(words)
        status = _run(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:
        drop_output()
        return BROKEN_PIPE
    except KeyboardInterrupt as error:
        report(error, options.json)
        return 130
    except Exception as error:
        if options.verbose and not isinstance(error, SlideSparseError):
            traceback.print_exc()
        report(error, options.json)
        return 1


def _run(options: argparse.Namespace) -> int:
    from slidesparse.cli.verbosity import verbosity  # not for --help: it imports what draws bars

    command: Callable[[argparse.Namespace], int] = options.command
    with verbosity(options):
        return command(options)


def _make_printable() -> None:
    """Let standard output show names that its encoding does not have, as escapes, as standard error does."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def build_parser(as_json: bool = False) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Args:
        as_json: Say wrong usage in JSON too.
    """
    parser = Parser(prog="slidesparse", description="Sparse language models on 2:4 Sparse Tensor Cores.")
    parser.as_json = as_json
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    checkpoints.add_commands(commands)
    benchmarks.add_commands(commands)
    for command in commands.choices.values():
        command.as_json = as_json
    return parser
