"""The processes of a run, started by torchrun and connected by torch.distributed; the first to fail says why."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from slidesparse.errors import InputError, SlideSparseError, first_line

JOIN = timedelta(minutes=5)
"""Timeout for all processes to start: machines may start late."""

LONGEST_WAIT = timedelta(days=1)
"""Timeout of every wait. The first process may prepare for hours (smoothing, reading texts, writing chats). A process
that ends closes its connections, which ends all waits at once: only a lost network or machine takes that long."""

_SPEAKER: dict[str, Any] = {}
"""Store and rank of this process in the run that it has joined; empty after leaving without an error."""


class LostRank(SlideSparseError, RuntimeError):
    """Another process of the run has ended, by an error of its own or by a signal."""


@dataclass(frozen=True)
class Ranks:
    """The processes of a run, seen from one of them; by default a run of one process.

    Attributes:
        rank: Number of this process, from 0.
        world: Number of processes.
        local: Number of this process on its machine, from 0.
        group: The gloo group of all processes; None for a single one.
    """

    rank: int = 0
    world: int = 1
    local: int = 0
    group: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process is number 0, which prints and writes shared files."""
        return self.rank == 0

    def wait(self) -> None:
        """Wait until every process makes this call; raises a LostRank when one has ended."""
        self.gather(None)

    def gather(self, value: Any) -> list[Any]:
        """Return the small values of all processes, in order of rank, when all have made this call."""
        values = [value] * self.world
        if self.group is not None:
            from torch import distributed

            with explained():
                distributed.all_gather_object(values, value, self.group)
        return values

    @contextmanager
    def first_alone(self, of_machine: bool = False) -> Iterator[None]:
        """Run the block in the first process (of each machine) before the others, which read its results."""
        is_first = self.is_first if not of_machine else not self.local
        if not is_first:
            self.wait()
        yield
        if is_first:
            self.wait()


ALONE = Ranks()
"""A run of one process."""


def is_one_of_several() -> bool:
    """Return whether torchrun's environment says that this process is one of several."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the run of torchrun's environment; without it this is a run of one process.

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
    # Not after an error: it would wait for processes that are gone, and one has to say why.
    dist.destroy_process_group()
    _SPEAKER.clear()


@contextmanager
def explained() -> Iterator[None]:
    """Raise a LostRank for the errors of torch.distributed that an ended process causes in the others."""
    try:
        yield
    except RuntimeError as error:
        from torch import distributed

        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):  # whose errors name its files
            raise
        got = first_line(error).partition(". ")[0]
        raise LostRank("another process of the run has ended", got=got, remedy="torchrun says which") from error


def is_first_to_fail() -> bool:
    """Return whether this process is the first of its run to ask, and so has to say why the run ended."""
    if not _SPEAKER:
        return True
    try:
        first: str = _SPEAKER["store"].compare_set("failed", "", _SPEAKER["rank"]).decode()
    except RuntimeError:  # the process with the store has ended
        return True
    return first == str(_SPEAKER["rank"])
