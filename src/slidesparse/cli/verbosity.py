"""Output of a command besides its result: ``--verbose`` and ``--quiet``.

By default: our progress bars on a terminal, our warnings and advice as one line each, and nothing of other libraries.
Quiet: the result and errors alone. Verbose: the backends of each layer, and the bars, warnings and reports of other
libraries too.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from slidesparse.base.log import LOG
from slidesparse.base.other_libraries import quiet_libraries, quiet_transformers
from slidesparse.base.progress import quietly
from slidesparse.errors import SlideSparseWarning

SETTINGS = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "LOGURU_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Settings that transformers, huggingface_hub, compressed-tensors' logger, torch's sockets and vLLM read when they are
imported, which comes later."""


@contextmanager
def verbosity(options: argparse.Namespace) -> Iterator[None]:
    """Set the output of a block by the options ``verbose`` and ``quiet``, which may be missing."""
    verbose, quiet = getattr(options, "verbose", False), getattr(options, "quiet", False)
    with ExitStack() as stack:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_OneLine())
        stack.callback(LOG.removeHandler, handler)
        stack.callback(LOG.setLevel, LOG.level)
        LOG.addHandler(handler)
        LOG.setLevel(logging.INFO if verbose else logging.ERROR if quiet else logging.WARNING)
        stack.enter_context(_warnings(verbose, quiet))
        if quiet:
            stack.enter_context(quietly())
        if not verbose:
            stack.enter_context(quiet_libraries())
            for name in SETTINGS.keys() - os.environ.keys():  # what the user has set stays
                os.environ[name] = SETTINGS[name]
                stack.callback(os.environ.pop, name, None)
            stack.enter_context(quiet_transformers())
        yield


class _OneLine(logging.Formatter):
    """Begins each message with the program's name, once."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return f"slidesparse: {record.getMessage().removeprefix('slidesparse: ')}"


@contextmanager
def _warnings(verbose: bool, quiet: bool) -> Iterator[None]:
    """Show our warnings as one line each, unless quiet, and others only when verbose."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_ours(message: Warning | str, category: type[Warning], *where: Any, **how: Any) -> None:
            if issubclass(category, SlideSparseWarning):
                print(f"slidesparse: {message}", file=sys.stderr)
            else:
                show(message, category, *where, **how)

        warnings.showwarning = show_ours
        if not verbose:
            warnings.simplefilter("ignore")
        warnings.simplefilter("ignore" if quiet else "always", SlideSparseWarning)
        yield
