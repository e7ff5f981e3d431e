"""Join the processes of one run: who this one is, and where they meet, by the environment that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from slidesparse.base.apart import run_apart
from slidesparse.base.ranks import ALONE, BEAT_S, JOIN_S, LostRank, Ranks, Store
from slidesparse.errors import InputError, first_line

MOST_RANKS = 1 << 16
"""Most processes of a run; each wait asks for every one of them."""

MOST_PORTS = (1 << 16) - 1

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun puts into the environment of every process."""


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
        raise InputError(
            "the environment names several processes",
            got=f"WORLD_SIZE without {', '.join(missing)}",
            remedy="start them with torchrun, or unset WORLD_SIZE",
        )
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
