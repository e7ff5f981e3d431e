"""Which calls by address ran, and on what memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def listen(monkeypatch: pytest.MonkeyPatch, call: type, module: Any) -> list[bool]:
    """Listen to a class whose objects allocate, launch by addresses, and give None where they leave that to others.

    Args:
        monkeypatch: Of the test.
        call: The class.
        module: Where it finds its ``empty_here``, whose memory is full of poison from now on.

    Returns:
        Grows with every call: whether it ran.
    """
    given: list[bool] = []
    run: Any = vars(call)["__call__"]
    empty = module.empty_here

    def heard(self: Any, *arguments: Any) -> Any:
        answer = run(self, *arguments)
        given.append(answer is not None)
        return answer

    def poisoned(*sizes: Any) -> torch.Tensor:
        tensor: torch.Tensor = empty(*sizes)
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in FP8, huge in the others
        return tensor

    monkeypatch.setattr(call, "__call__", heard)
    monkeypatch.setattr(module, "empty_here", poisoned)
    return given
