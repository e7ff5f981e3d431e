"""Several processes, each of which runs one command, started and ended as torchrun does it.

Their store is here, as torchrun's agent has it, and when one of them fails the others are terminated. They are forked
from a server that has imported everything once, so that each costs little.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from slidesparse.cli import main

PRELOADED = ["rank_processes", "transformers.models.llama.modeling_llama", "slidesparse.offline.dry_run"]
"""What the server imports."""

SECONDS = 120
"""A process that runs longer is killed, and the test fails."""

GRACE = 20
"""Seconds after another process has failed; torchrun waits for thirty."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: its status, as multiprocessing gives it, and what it wrote."""

    status: int | None
    out: str
    err: str


Before = Callable[[int], None]
"""Called with its rank in each process before the command runs; importable by name."""


def run_ranks(
    folder: Path, world: int, commands: Sequence[Sequence[Any]] | Sequence[Any], before: Before | None = None
) -> list[Ended]:
    """Run one command in ``world`` processes, or one command of each, until all of them have ended.

    Args:
        folder: For what they write.
        world: How many there are.
        commands: The words of a command, or a list of words for each process.
        before: See :data:`Before`.
    """
    each = commands if isinstance(commands[0], list) else [commands] * world
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    dist: Any = distributed  # its stores have no types
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=SECONDS), wait_for_workers=False)
    everybody = {"WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port}
    everybody["TORCHELASTIC_USE_AGENT_STORE"] = True
    processes: list[Any] = []
    for rank, words in enumerate(each):
        place = {"RANK": rank, "LOCAL_RANK": rank, **everybody}
        environment = {name: str(value) for name, value in place.items()}
        files = [str(folder / f"{name}{rank}") for name in ("out", "err")]
        arguments = environment, [str(word) for word in words], files, before
        processes.append(context.Process(target=_run, args=arguments))
    for process in processes:
        process.start()
    _wait(processes)
    return [
        Ended(process.exitcode, (folder / f"out{rank}").read_text(), (folder / f"err{rank}").read_text())
        for rank, process in enumerate(processes)
    ]


def _wait(processes: Sequence[Any]) -> None:
    """Wait for all; terminate them when one fails, and kill those that take too long."""
    end, is_ending = time.monotonic() + SECONDS, False
    while any(one.is_alive() for one in processes):
        if not is_ending and any(one.exitcode for one in processes):
            is_ending, end = True, min(end, time.monotonic() + GRACE)
            for one in processes:
                one.terminate()
        if time.monotonic() > end:
            for one in processes:
                one.kill()
        time.sleep(0.05)


def _run(environment: dict[str, str], words: list[str], files: list[str], before: Before | None) -> None:
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    os.environ.update(environment)
    torch.set_num_threads(1)
    if before is not None:
        before(int(environment["RANK"]))
    status = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# -- what happens to a process: see Before ---------------------------------------------------------------------------


def _at_the_second_call(owner: Any, name: str, happens: Callable[..., None]) -> None:
    original, calls = getattr(owner, name), []

    def counted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            happens(*given)
        return original(*given)

    setattr(owner, name, counted)


def _is_killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def rank_1_is_killed_at_its_second_shard(rank: int) -> None:
    from slidesparse.offline import execute

    def half_written(path: Path, *_: Any) -> None:
        path.with_name(f"{path.name}.0123456789abcdef.tmp").write_bytes(b"half")
        _is_killed()

    if rank == 1:
        _at_the_second_call(execute, "write_shard", half_written)


def rank_1_is_killed_in_its_second_layer(rank: int) -> None:
    from slidesparse.models.shared_layers import SharedLayers

    if rank == 1:
        _at_the_second_call(SharedLayers, "_grams", _is_killed)


def all_are_terminated_at_their_second_shard(rank: int) -> None:
    """At one time, as a launcher does when it is interrupted itself."""
    from slidesparse.offline import execute

    def together(path: Path, *_: Any) -> None:
        folder = next(parent for parent in path.parents if parent.suffix == ".partial").parent
        (folder / f"here{rank}").touch()
        while len(list(folder.glob("here?"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    _at_the_second_call(execute, "write_shard", together)


def rank_1_sees_another_folder(rank: int) -> None:
    from slidesparse.files import staging

    if rank == 1:
        staging.partial_folder = lambda destination: destination.parent / "elsewhere.partial"
