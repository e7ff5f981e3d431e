"""A command that several processes run together: which device each takes, and who speaks."""

from __future__ import annotations

import argparse
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from slidesparse.base.log import LOG
from slidesparse.base.ranks import is_one_of_several, joined
from slidesparse.errors import SlideSparseWarning

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks

COMMANDS = ("prune", "recover")
"""The commands that several processes can run together."""

SPEAK_S = 10.0
"""Most seconds in which another process has said what is wrong with its arguments, and the launcher ends this one."""


def is_said_by_another(words: Sequence[str]) -> bool:
    """Return whether another process of this machine has the same words, and says what is wrong with them."""
    own = os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0"))
    return bool(words) and words[0] in COMMANDS and is_one_of_several() and own not in ("", "0")


def let_another_speak() -> None:
    """Wait before this process ends: a launcher that sees it end ends the one that has to speak."""
    try:
        time.sleep(SPEAK_S)
    except KeyboardInterrupt:  # the launcher has seen that the other one ended
        return


def together(run: Callable[[argparse.Namespace, Ranks], int]) -> Callable[[argparse.Namespace], int]:
    """Return a command that all processes of a run do together, and in which the first one speaks."""

    def command(options: argparse.Namespace) -> int:
        with joined() as ranks, _one_voice(ranks, options):
            return run(options, ranks)

    return command


@contextmanager
def _one_voice(ranks: Ranks, options: argparse.Namespace) -> Iterator[None]:
    """Show bars and warnings of the first process alone, and of the others only what ``--verbose`` adds."""
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
    """Return the GPU of this process when ``cuda`` is asked for: that of its number among those of the machine."""
    return f"cuda:{ranks.local}" if device == "cuda" and ranks.world > 1 else device
