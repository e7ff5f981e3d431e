"""Commands that several processes run together: the device of each, and output by the first alone."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from slidesparse.base.log import LOG
from slidesparse.base.ranks import joined
from slidesparse.errors import SlideSparseWarning

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks


def together(run: Callable[[argparse.Namespace, Ranks], int]) -> Callable[[argparse.Namespace], int]:
    """Return a command that all processes of a run execute together, with output by the first one."""

    def command(options: argparse.Namespace) -> int:
        with joined() as ranks, _first_prints(ranks, options):
            return run(options, ranks)

    return command


@contextmanager
def _first_prints(ranks: Ranks, options: argparse.Namespace) -> Iterator[None]:
    """Show bars and warnings of the first process alone, and of the others only those of ``--verbose``."""
    from slidesparse.base.progress import quietly

    with ExitStack() as stack:
        if not ranks.is_first:
            stack.enter_context(quietly())
            if not options.verbose:
                stack.callback(LOG.setLevel, LOG.level)
                LOG.setLevel(logging.ERROR)
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", SlideSparseWarning)
        yield


def own_device(ranks: Ranks, device: str) -> str:
    """Return the device of this process: for ``cuda`` the GPU of its local rank."""
    return f"cuda:{ranks.local}" if device == "cuda" and ranks.world > 1 else device
