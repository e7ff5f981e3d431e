"""Kill a run while it reads a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slidesparse.checkpoints.checkpoint import Checkpoint


def interrupt(monkeypatch: pytest.MonkeyPatch, kind: type[Checkpoint], at: int) -> None:
    """Let the reading of the ``at``-th tensor of such a checkpoint be what Ctrl-C interrupts; later ones are read."""
    read, calls = kind.tensor, list[str]()

    def killed(self: Any, name: str, device: Any = "cpu") -> torch.Tensor:
        calls.append(name)
        if len(calls) == at:
            raise KeyboardInterrupt
        return read(self, name, device)

    monkeypatch.setattr(kind, "tensor", killed)
