"""A command that several processes run together: which device each takes, and who speaks."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from slidesparse.base.log import LOG
from slidesparse.errors import SlideSparseWarning

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks


@contextmanager
def one_voice(ranks: Ranks, options: argparse.Namespace) -> Iterator[None]:
    """Show bars and warnings of the first process alone, and of the others only what ``--verbose`` adds."""
    from slidesparse.base.progress import hidden_bars

    with ExitStack() as stack:
        if not ranks.is_first:
            stack.enter_context(hidden_bars())
            if not options.verbose:
                before = LOG.level
                LOG.setLevel(logging.ERROR)
                stack.callback(LOG.setLevel, before)
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", SlideSparseWarning)
        yield


def own_device(ranks: Ranks, device: str) -> str:
    """Return the GPU of this process when ``cuda`` is asked for: that of its number among those of the machine."""
    return f"cuda:{ranks.local}" if device == "cuda" and ranks.world > 1 else device
