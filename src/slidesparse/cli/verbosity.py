"""How much a command says besides its result: ``--verbose`` and ``--quiet``.

Usually: progress bars of ours on a terminal, warnings of ours as one line each, and nothing of other libraries. Quiet:
errors alone. Verbose: what each layer runs on, and the bars, warnings and reports of other libraries too.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TextIO

from slidesparse.base.log import LOG
from slidesparse.base.other_libraries import quiet_libraries, quiet_transformers
from slidesparse.base.progress import hidden_bars
from slidesparse.errors import SlideSparseWarning

SETTINGS = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "LOGURU_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Settings that transformers, huggingface_hub, compressed-tensors' logger and torch's sockets read when they are
imported, which no command has done yet."""


@contextmanager
def verbosity(options: argparse.Namespace) -> Iterator[None]:
    """Say as much as the options ask for while the block runs.

    Args:
        options: ``verbose`` and ``quiet``, both of which may be missing.
    """
    verbose, quiet = getattr(options, "verbose", False), getattr(options, "quiet", False)
    with ExitStack() as stack:
        stack.enter_context(_log(logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING))
        stack.enter_context(_warnings(verbose, quiet))
        if quiet:
            stack.enter_context(hidden_bars())
        if not verbose:
            stack.enter_context(quiet_libraries())
            stack.enter_context(_environment(SETTINGS))
            stack.enter_context(quiet_transformers())
        yield


@contextmanager
def _log(level: int) -> Iterator[None]:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    before = LOG.level
    LOG.addHandler(handler)
    LOG.setLevel(level)
    try:
        yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(before)


class _OneLine(logging.Formatter):
    """Begins each message with the program's name, once."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return f"slidesparse: {record.getMessage().removeprefix('slidesparse: ')}"


@contextmanager
def _warnings(verbose: bool, quiet: bool) -> Iterator[None]:
    """Show warnings of ours as one line each, unless quiet, and others only when verbose."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_ours(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, SlideSparseWarning):
                print(f"slidesparse: {message}", file=file or sys.stderr)
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = show_ours
        if not verbose:
            warnings.simplefilter("ignore")
        warnings.simplefilter("ignore" if quiet else "always", SlideSparseWarning)
        yield


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the block, except for those that the user has set."""
    new = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
