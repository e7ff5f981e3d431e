"""Several processes with torchrun's environment, each of which runs one command.

They are forked from a server that has imported everything once, so that each costs little.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slidesparse.base import ranks as ranks_module
from slidesparse.cli import main

PRELOADED = ["rank_processes", "transformers.models.llama.modeling_llama", "slidesparse.offline.dry_run"]
"""What the server imports."""

SECONDS = 120
"""A process that runs longer is killed, and the test fails."""


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
    """Run one command in ``world`` processes, or one command of each; wait for all of them.

    Args:
        folder: For what they write.
        world: How many there are.
        commands: The words of a command, or a list of words for each process.
        before: See :data:`Before`.
    """
    each = commands if isinstance(commands[0], list) else [commands] * world
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes: list[Any] = []
    for rank, words in enumerate(each):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {name: str(value) for name, value in place.items()}
        files = [str(folder / f"{name}{rank}") for name in ("out", "err")]
        arguments = environment, [str(word) for word in words], files, before
        processes.append(context.Process(target=_run, args=arguments))
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
    return [
        Ended(process.exitcode, (folder / f"out{rank}").read_text(), (folder / f"err{rank}").read_text())
        for rank, process in enumerate(processes)
    ]


def _run(environment: dict[str, str], words: list[str], files: list[str], before: Before | None) -> None:
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = (open(descriptor, "w", closefd=False) for descriptor in (1, 2))  # noqa: SIM115
    os.environ.update(environment)
    torch.set_num_threads(1)
    ranks_module.BEAT_S, ranks_module.PATIENCE_S = 0.2, 3.0
    if before is not None:
        before(int(environment["RANK"]))
    status = main(words)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# -- what happens to a process: see Before ---------------------------------------------------------------------------


def rank_1_is_killed_at_its_second_shard(rank: int) -> None:
    from slidesparse.offline import execute

    write, shards = execute.write_shard, []

    def second(path: Path, *rest: Any) -> dict[str, str]:
        shards.append(path)
        if len(shards) == 2:
            path.with_name(f"{path.name}.0123456789abcdef.tmp").write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, *rest)

    if rank == 1:
        execute.write_shard = second


def rank_1_is_killed_in_its_second_layer(rank: int) -> None:
    from slidesparse.models.shared_layers import SharedLayers

    grams, layers = SharedLayers._grams, []

    def second(shared: SharedLayers, *rest: Any) -> Any:
        layers.append(rest)
        if len(layers) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return grams(shared, *rest)

    if rank == 1:
        SharedLayers._grams = second  # type: ignore[method-assign]


def all_are_terminated_at_their_second_shard(rank: int) -> None:
    """At one time, as a launcher does: a process that comes late finds the other one gone, and ends for that reason."""
    from slidesparse.offline import execute

    write, shards = execute.write_shard, []

    def second(path: Path, *rest: Any) -> dict[str, str]:
        shards.append(path)
        if len(shards) == 2:
            folder = next(parent for parent in path.parents if parent.suffix == ".partial").parent
            (folder / f"here{rank}").touch()
            while len(list(folder.glob("here?"))) < int(os.environ["WORLD_SIZE"]):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        return write(path, *rest)

    execute.write_shard = second


def rank_1_sees_another_folder(rank: int) -> None:
    from slidesparse.files import shared_staging

    if rank == 1:
        shared_staging.partial_folder = lambda destination: destination.parent / "elsewhere.partial"
