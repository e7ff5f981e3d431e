"""The command line: argument parsing and printing, nothing else.

Each command imports its modules when it runs. So ``slidesparse --help`` waits neither for torch nor for transformers,
and an interruption during an import ends in one line.
"""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any

from slidesparse.cli.interruption import Signals
from slidesparse.errors import SlideSparseError, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

BROKEN_PIPE = 128 + 13
"""Exit status after a broken pipe, as with ``head``: that of a program ended by SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: Words after the program's name; None: those of the process, which ends with the command.

    Returns:
        0 for success; 1 for an error, with one line on standard error; 2 for wrong usage; 141 for a broken pipe; 128
        plus the number of a signal that ended it: 130 when interrupted, 143 when terminated. With ``--json`` standard
        output has the error too (docs/formats.md).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with Signals(to_the_end=arguments is None) as signals:
        try:
            return _answer(words, signals)
        except KeyboardInterrupt as error:
            from slidesparse.cli.failure import report

            report(error, words)
            return signals.exit_status()


def _answer(words: list[str], signals: Signals) -> int:
    """Run a command and report its errors, except interruptions."""
    verbose = False
    try:
        if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")  # for names outside of its encoding, as on standard error
        options = build_parser("--json" in words).parse_args(words)
        verbose = getattr(options, "verbose", False)
        from slidesparse.cli.verbosity import verbosity  # not for --help: it imports progress bars

        with verbosity(options):
            status: int = options.command(options)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except Exception as error:
        if signals.received is not None:  # which a library has turned into another error
            raise signals.received from error
        signals.reporting = True
        from slidesparse.cli.failure import drop_output, report

        if isinstance(error, BrokenPipeError):
            drop_output()
            return BROKEN_PIPE
        if verbose and not isinstance(error, SlideSparseError):
            print(printable(traceback.format_exc(), keep="\n"), file=sys.stderr)
        report(error, words)
        return 1


def build_parser(as_json: bool = False) -> argparse.ArgumentParser:
    """Return the parser of all commands; ``as_json``: it reports wrong usage in JSON too."""
    from slidesparse.base.version import __version__
    from slidesparse.cli import checkpoints, measuring
    from slidesparse.cli.arguments import Parser

    parser = Parser(prog="slidesparse", description="Sparse language models on 2:4 Sparse Tensor Cores.")
    parser.as_json = as_json
    parser.add_argument("--version", action="version", version=__version__)
    commands: Any = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    checkpoints.add_commands(commands)
    measuring.add_commands(commands)
    for command in commands.choices.values():
        command.as_json = as_json
    return parser
