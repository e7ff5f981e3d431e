"""Transfers of tensors between the processes of a run: by NCCL on GPUs, by gloo elsewhere."""

from __future__ import annotations

import torch
import torch.distributed as dist

from slidesparse.base.ranks import Ranks, explained


class RankTensors:
    """Sends tensors on a device between processes, which all make the same transfers in the same order.

    A LostRank is raised when another process has ended.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        if ranks.world > 1 and device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL's own memory goes there

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to a process that calls :meth:`receive`."""
        with explained():
            dist.send(_bytes(tensor), to)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Return the tensor that another process sends."""
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        with explained():
            dist.recv(_bytes(tensor), source)
        return tensor

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Copy the tensor of process ``source`` to all others, in place."""
        if self.ranks.world > 1:
            with explained():
                dist.broadcast(_bytes(tensor), source)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as bytes, which every transport can send, without a copy."""
    return tensor.view(-1).view(torch.uint8)
