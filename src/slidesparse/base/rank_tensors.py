"""Tensors on their way between the processes of one run: through NCCL on GPUs, and through gloo elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from slidesparse.base.ranks import LostRank, Ranks
from slidesparse.errors import first_line


class RankTensors:
    """Sends tensors on a device between processes. Every transfer is one that all of them know of, in one order."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to a process that calls :meth:`receive`."""
        with self._explained():
            dist.send(_bytes(tensor), to)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Return the tensor that another process sends."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        with self._explained():
            dist.recv(_bytes(tensor), source)
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give every process the tensor of one of them, in place."""
        if self.ranks.world > 1:
            with self._explained():
                dist.broadcast(_bytes(tensor), source)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Name the process whose end is the reason for an error of the transport, once it is known."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.ranks.require_all_alive()
            raise LostRank("tensors cannot be sent between the processes", got=first_line(error)) from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, which every transport can send, without a copy."""
    return tensor.view(-1).view(torch.uint8)


@contextmanager
def rank_tensors(ranks: Ranks, device: torch.device) -> Iterator[RankTensors]:
    """Let processes send tensors while the block runs; a LostRank says that they cannot be connected."""
    if ranks.store is None:
        yield RankTensors(ranks, device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store: Any = ranks.store
    transport = "nccl" if device.type == "cuda" else "gloo"
    ranks.wait()
    try:
        dist.init_process_group(transport, store=store, rank=ranks.rank, world_size=ranks.world)
    except (RuntimeError, ValueError) as error:
        raise LostRank(f"the processes cannot be connected by {transport}", got=first_line(error)) from error
    # Not after an error: it would wait for processes that are gone.
    yield RankTensors(ranks, device)
    ranks.wait()
    dist.destroy_process_group()
