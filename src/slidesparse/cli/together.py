"""A command that several processes run together: how long they wait, which device each takes, and who speaks."""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from slidesparse.base.log import LOG
from slidesparse.base.ranks import JOIN_S, LEAVE_S, joined, leads_its_machine
from slidesparse.errors import SlideSparseWarning

if TYPE_CHECKING:
    from slidesparse.base.ranks import Ranks
    from slidesparse.cli.arguments import Options

COMMANDS = ("prune", "recover", "chats")
"""The commands that several processes can run together."""

LONGEST_JOIN_S = 86400.0


def add_join_timeout(parser: Options) -> None:
    """Add the option that says how long the processes of one run wait for each other to begin."""
    text = f"how long processes of torchrun wait until all have begun (default: {JOIN_S:.0f})"
    parser.add_argument("--join-timeout", type=_join_seconds, default=JOIN_S, metavar="SECONDS", help=text)


def _join_seconds(text: str) -> float:
    """Return a time that one can wait; argparse says what is wrong with another one, in one line for all processes."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= LONGEST_JOIN_S:
        raise argparse.ArgumentTypeError(f"got {text!r:.80}; needed 1 to {LONGEST_JOIN_S:.0f} seconds")
    return seconds


def is_said_by_another(words: Sequence[str]) -> bool:
    """Return whether another process of this machine has the same words, and says what is wrong with them."""
    return bool(words) and words[0] in COMMANDS and not leads_its_machine()


def let_another_speak() -> None:
    """Wait some seconds before this process ends: a launcher that sees it end ends the one that has to speak."""
    try:
        time.sleep(LEAVE_S)
    except KeyboardInterrupt:  # the launcher has seen that the other one ended
        return


def together(run: Callable[[argparse.Namespace, Ranks], int]) -> Callable[[argparse.Namespace], int]:
    """Return a command that all processes of a run do together, and in which the first one speaks."""

    def command(options: argparse.Namespace) -> int:
        with joined(join_s=options.join_timeout) as ranks, _one_voice(ranks, options):
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
