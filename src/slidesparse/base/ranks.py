"""The processes of one run, which torchrun starts: who they are, how they meet and wait, and how they end together.

They talk through torch.distributed's store, a small table of texts. Each process says every few seconds that it is
alive. So nobody waits for one that is gone, and everybody waits for one that merely takes long. The first process that
fails says why, for all: the others end without a word.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeAlias

from slidesparse.base.apart import run_apart
from slidesparse.errors import InputError, SlideSparseError, first_line

BEAT_S = 2.0
"""Seconds between two signs of life."""

PATIENCE_S = 60.0
"""Seconds without a sign of life after which a process counts as gone."""

JOIN_S = 300.0
"""Seconds in which all processes must have begun unless a user says otherwise: machines may start late."""

LEAVE_S = 10.0
"""Seconds that processes which fail wait for each other, so that no launcher ends those that are still clearing up."""

INTERRUPTED_S = 5.0
"""The same where a process was killed or interrupted: it does not come, and the launcher is ending all of them."""

LONGEST_PAUSE_S = 0.1
"""Seconds between two looks at the store."""

MOST_RANKS = 1 << 16
"""Most processes of a run; each wait asks for every one of them."""

MOST_PORTS = (1 << 16) - 1

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun puts into the environment of every process."""

_SILENT = [False]


def is_silent() -> bool:
    """Return whether this process leaves its error to another one of the same run, which says it for all."""
    return _SILENT[0]


class LostRank(SlideSparseError, RuntimeError):
    """Another process of the run was killed or interrupted: what it was doing is left as a kill leaves it."""

    count = 0
    """How many processes are known to be gone."""


class FailedRank(SlideSparseError, RuntimeError):
    """Another process of the run ended with an error, and says which."""


Store: TypeAlias = Any
"""A ``torch.distributed.Store``, which has no types; each method raises a RuntimeError when its process has ended."""


class Ranks:
    """The processes of one run, seen from one of them. Alone it is a run of one process, which waits for nobody.

    Args:
        rank: This process, from 0; ``is_first`` says that it is 0, which writes what is written once, and prints.
        world: How many there are.
        local: This process among those of its machine, from 0.
        store: Where they talk; None alone.
        hosts: This process holds the store, and must end last.
        join_s: Seconds in which all of them must have begun.
    """

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        local: int = 0,
        store: Store | None = None,
        *,
        hosts: bool = False,
        join_s: float = JOIN_S,
    ) -> None:
        self.rank, self.world, self.local, self.store, self.hosts = rank, world, local, store, hosts
        self.join_s = join_s
        self.is_first = rank == 0
        self._step, self._told = 0, ""
        self._end: float | None = None
        self._ending, self._failed = threading.Event(), threading.Event()

    def __enter__(self) -> Ranks:
        if self.store is not None:
            self.store.set(f"alive/{self.rank}", "0")
            self._beating = threading.Thread(target=self._beat, args=(self.store,), daemon=True)
            self._beating.start()
            try:
                self.wait()
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.store is None:
            return
        if error is not None and not self.fail(error):
            _SILENT[0] = True
        try:
            if error is not None:
                self._count(self.store, "left", error)
            self._ending.set()
            self._beating.join()
            self.store.add("gone", 1)  # the last that this process asks of the store
            if self.hosts:
                self._count(self.store, "gone", error, 0)
        except RuntimeError:
            pass  # the process that held the store has ended
        finally:
            self._ending.set()

    def check(self) -> None:
        """Raise a FailedRank where another process ended with an error, and a LostRank where one was interrupted."""
        if self._failed.is_set():
            rank, kind = self._told.split()
            if kind == "error":
                raise FailedRank(f"rank {rank} of {self.world} failed")
            raise LostRank(f"rank {rank} of {self.world} was interrupted")

    def wait(self) -> None:
        """Wait until every process has come to the same call: see :meth:`gather`."""
        self.gather(None)

    @contextmanager
    def first_alone(self, of_machine: bool = False) -> Iterator[None]:
        """Let the first process, or that of each machine, go before others, which read what it has found or fetched."""
        is_first = self.is_first if not of_machine else not self.local
        if not is_first:
            self.wait()
        yield
        if is_first:
            self.wait()

    def gather(self, value: Any) -> list[Any]:
        """Return small values, such as JSON can hold, of all processes in their order when all have come to this call.

        Raises:
            FailedRank: Another process ended with an error.
            LostRank: Processes were interrupted, or give no sign of life; the error names them.
        """
        if self.store is None:
            return [value]
        self._step += 1
        keys = [f"{self._step}/{rank}" for rank in range(self.world)]
        lives = _Lives(self.store, self.world, self.join_s)
        pause = 0.001
        with self._explained():
            self.store.set(keys[self.rank], json.dumps(value))
            while not self.store.check(keys):
                self.check()
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                lives.require(missing)
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            return [json.loads(found) for found in self.store.multi_get(keys)]

    def require_all_alive(self) -> None:
        """After an error of a transfer, wait until it is known which process is the reason; raise as :meth:`gather`."""
        if self.store is None:
            return
        lives, end = _Lives(self.store, self.world, self.join_s), time.monotonic() + PATIENCE_S + 2 * BEAT_S
        with self._explained():
            while time.monotonic() < end:
                self.check()
                lives.require(range(self.world))
                time.sleep(LONGEST_PAUSE_S)

    def fail(self, error: BaseException) -> bool:
        """Tell the others that this process ends, and return whether it is the one that says why."""
        if self.store is None:
            return True
        kind = "error" if isinstance(error, Exception) and not isinstance(error, LostRank) else "interruption"
        try:
            told: str = self.store.compare_set("failed", "", f"{self.rank} {kind}").decode()
        except RuntimeError:
            return True  # nobody can be asked
        return told.split()[0] == str(self.rank)

    def wait_until_all_stopped(self, error: BaseException) -> None:
        """After :meth:`fail`, wait some seconds until the others have stopped writing: they call this too."""
        if self.store is not None:
            with suppress(RuntimeError):
                self._count(self.store, "stopped", error)

    def _count(self, store: Store, key: str, error: BaseException | None, amount: int = 1) -> None:
        """Add to a number, and wait until all processes that are left have done so, within the time of one end."""
        if self._end is None:
            short = isinstance(error, LostRank | KeyboardInterrupt)
            self._end = time.monotonic() + (INTERRUPTED_S if short else LEAVE_S)
        store.add(key, amount)
        lost = error.count if isinstance(error, LostRank) else 0
        while store.add(key, 0) < self.world - lost and time.monotonic() < self._end:
            time.sleep(0.02)

    def _beat(self, store: Store) -> None:
        """Say from time to time that this process is alive, and look whether another one has failed."""
        number = 0
        while not self._ending.wait(BEAT_S if number else 0):
            number += 1
            try:
                store.set(f"alive/{self.rank}", str(number))
                if not self._failed.is_set() and store.check(["failed"]):
                    self._told = store.get("failed").decode()
                    if not self._told.startswith(f"{self.rank} "):
                        self._failed.set()
            except RuntimeError:
                return  # the next call that needs the store says so

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Explain the store's errors, all of which mean that its process has ended."""
        try:
            yield
        except SlideSparseError:
            raise
        except RuntimeError as error:
            raise LostRank(f"rank 0 of {self.world} has ended", got=first_line(error)) from error


ALONE = Ranks()
"""A run of one process."""


class _Lives:
    """The signs of life of all processes, during one wait."""

    def __init__(self, store: Store, world: int, join_s: float) -> None:
        self.store, self.join_s, self.begun = store, join_s, time.monotonic()
        self.seen = dict.fromkeys(range(world), ("", self.begun))

    def require(self, missing: Sequence[int]) -> None:
        """Refuse to wait on for processes that are gone."""
        now = time.monotonic()
        gone = [rank for rank in missing if self._quiet_for(rank, now) > 0]
        if gone:
            names = ", ".join(map(str, gone))
            error = LostRank(
                f"rank {names} of {len(self.seen)} {'is' if len(gone) == 1 else 'are'} gone",
                got=f"no sign of life for {now - self.begun:.0f} s",
                needed="every process that torchrun was told to start",
            )
            error.count = len(gone)
            raise error

    def _quiet_for(self, rank: int, now: float) -> float:
        """Return by how many seconds a process has been quiet for too long."""
        key = f"alive/{rank}"
        if not self.store.check([key]):
            return now - self.begun - self.join_s
        beat = self.store.get(key).decode()
        if beat != self.seen[rank][0]:
            self.seen[rank] = beat, now
        return now - self.seen[rank][1] - PATIENCE_S


@contextmanager
def joined(environment: Mapping[str, str] = os.environ, join_s: float = JOIN_S) -> Iterator[Ranks]:
    """Join the run that the environment describes, as torchrun sets it; without one the process is alone.

    All processes must begin within ``join_s`` seconds.

    Raises:
        InputError: The environment names other processes, and not where they meet.
        LostRank: They do not come.
    """
    if _number(environment, "WORLD_SIZE", 1, MOST_RANKS) < 2:
        yield ALONE
        return
    missing = [name for name in NEEDED if name not in environment]
    if missing:
        got = f"WORLD_SIZE without {', '.join(missing)}"
        remedy = "start them with torchrun, or unset WORLD_SIZE"
        raise InputError("the environment names several processes", got=got, remedy=remedy)
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE", largest=MOST_RANKS)
    if not 0 <= rank < world:
        raise InputError("RANK", got=rank, needed=f"0 to {world - 1}")
    # torchrun's own process holds a store, which outlives the processes that it starts.
    hosts = rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = environment["MASTER_ADDR"], _number(environment, "MASTER_PORT", largest=MOST_PORTS)
    store = _store(address, port, environment.get("TORCHELASTIC_RESTART_COUNT", "0"), hosts, join_s)
    local = _number(environment, "LOCAL_RANK", rank)
    with Ranks(rank, world, local, store, hosts=hosts, join_s=join_s) as ranks:
        yield ranks


def _number(environment: Mapping[str, str], name: str, default: int | None = None, largest: int = 10**9) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal() or len(text) > 20 or int(text) > largest:
        raise InputError(f"{name} in the environment", got=f"{text!r:.80}", needed=f"a number up to {largest}")
    return int(text)


def _store(address: str, port: int, attempt: str, hosts: bool, join_s: float) -> Store:
    from torch import distributed

    dist: Any = distributed  # its stores have no types
    try:
        # It waits without an end, and deaf to signals, for the first word of another program that has the port.
        store = run_apart(
            lambda: dist.TCPStore(address, port, None, hosts, timedelta(seconds=join_s), wait_for_workers=False),
            join_s + BEAT_S,
        )
    except (RuntimeError, TimeoutError) as error:
        raise LostRank(
            f"cannot {'open' if hosts else 'reach'} {address}:{port}, where the processes meet",
            got=first_line(error),
            needed="MASTER_ADDR and MASTER_PORT of the machine of rank 0",
        ) from error
    return dist.PrefixStore(f"slidesparse/{attempt}", store)


def leads_its_machine(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is the one of its machine that says what all of them would say.

    torchrun starts the processes of a machine with the same words. Where the environment is not clear, each one speaks.
    """
    alone = environment.get("WORLD_SIZE", "1") in ("", "0", "1")
    return alone or environment.get("LOCAL_RANK", environment.get("RANK", "0")) in ("", "0")
