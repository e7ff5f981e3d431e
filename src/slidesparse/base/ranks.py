"""The processes of one run, which torchrun starts and torch.distributed connects; the first that fails says why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from slidesparse.errors import InputError, SlideSparseError, first_line

JOIN = timedelta(minutes=5)
"""Time in which all processes must have begun: machines may start late."""

LONGEST_WAIT = timedelta(days=1)
"""Timeout of every wait. The first process may prepare for hours (smoothing, reading texts, writing chats) while others
wait. A process that ends closes its connections, which ends these waits at once, and torchrun ends the others: only a
machine that loses its network or its power is waited for that long."""

_SPEAKER: dict[str, Any] = {}
"""The store and the rank of this process in the run that it has joined, and has not left without an error."""


class LostRank(SlideSparseError, RuntimeError):
    """Another process of the run has ended, by an error of its own or by a signal."""


@dataclass(frozen=True)
class Ranks:
    """The processes of one run, seen from one of them. Alone it is a run of one process, which waits for nobody.

    Attributes:
        rank: This process, from 0.
        world: How many there are.
        local: This process among those of its machine, from 0.
        group: The gloo group through which they wait for each other; None alone.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    group: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process is number 0, which writes what is written once, and prints."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until every process has come to the same call; a LostRank says that one of them has ended."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Return small values of all processes in their order when all have come to this call, as :meth:`wait` does."""
        values = [value] * self.world
        if self.group is not None:
            from torch import distributed

            with explained():
                distributed.all_gather_object(values, value, self.group)
        return values

    @contextmanager
    def first_alone(self, of_machine: bool = False) -> Iterator[None]:
        """Let the first process, or that of each machine, go before others, which read what it has found or fetched."""
        is_first = self.is_first if not of_machine else not self.local
        if not is_first:
            self.wait()
        yield
        if is_first:
            self.wait()


ALONE = Ranks()
"""A run of one process."""


def is_one_of_several() -> bool:
    """Return whether the environment says that this process is one of several, as torchrun sets it."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the run that torchrun's environment describes; without one the process is alone.

    The default group sends tensors, by NCCL between GPUs and by gloo elsewhere.

    Raises:
        InputError: The environment names other processes, and they do not meet.
        LostRank: Another process has ended.
    """
    if not is_one_of_several():
        yield ALONE
        return
    import torch
    from torch import distributed

    dist: Any = distributed  # its stores have no types
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=JOIN))
        local = int(os.environ.get("LOCAL_RANK", rank))
    except (RuntimeError, ValueError) as error:
        remedy = "start them with torchrun, or unset WORLD_SIZE"
        raise InputError("the processes of the run cannot meet", got=first_line(error), remedy=remedy) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # one store may serve all attempts
    store = dist.PrefixStore(f"slidesparse/{attempt}", store)
    _SPEAKER.update(store=store, rank=str(rank))
    with explained():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
        group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    yield Ranks(rank, world, local, group)
    # Not after an error: it would wait for processes that are gone, and somebody has to say why.
    dist.destroy_process_group()
    _SPEAKER.clear()


@contextmanager
def explained() -> Iterator[None]:
    """Explain errors of torch.distributed, which a process that has ended causes in the others, by a LostRank."""
    try:
        yield
    except RuntimeError as error:
        from torch import distributed

        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):  # whose errors name its files
            raise
        got = first_line(error).partition(". ")[0]
        raise LostRank("another process of the run has ended", got=got, remedy="torchrun says which") from error


def is_first_to_fail(alone: bool) -> bool:
    """Return whether this process is the first of its run that asks this, and so says why the run ended.

    ``alone`` is the answer for a process that has joined no run.
    """
    if not _SPEAKER:
        return alone
    try:
        told: str = _SPEAKER["store"].compare_set("failed", "", _SPEAKER["rank"]).decode()
    except RuntimeError:  # the process that held the store has ended
        return True
    return told == str(_SPEAKER["rank"])
