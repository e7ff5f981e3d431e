"""Which calls of a runner ran its own way, and on what memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slidesparse.ops import resolve


def listen(monkeypatch: pytest.MonkeyPatch, runner: type, default: type, module: Any) -> list[bool]:
    """Listen to a class of runners that launch by addresses, and call a default where they cannot.

    Args:
        monkeypatch: Of the test.
        runner: The class.
        default: The class of what they call then.
        module: Where the runners find their ``empty_here``, whose memory is full of poison from now on.

    Returns:
        Grows with every call: whether its own way ran, and not the default.
    """
    own: list[bool] = []
    running: list[object] = []
    run: Any = vars(runner)["__call__"]
    run_default: Any = vars(default)["__call__"]
    empty = module.empty_here

    def heard(self: Any, *arguments: Any) -> Any:
        own.append(True)
        running.append(self)
        try:
            return run(self, *arguments)
        finally:
            running.pop()

    def heard_default(self: Any, *arguments: Any) -> Any:
        if running:  # else somebody wants the default itself
            own[-1] = False
        return run_default(self, *arguments)

    def poisoned(*sizes: Any) -> torch.Tensor:
        tensor: torch.Tensor = empty(*sizes)
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in FP8, huge in the others
        return tensor

    monkeypatch.setattr(runner, "__call__", heard)
    monkeypatch.setattr(default, "__call__", heard_default)
    monkeypatch.setattr(module, "empty_here", poisoned)
    return own


def forget_runners() -> None:
    """Let every linear, lift and chain be resolved anew."""
    for cache in (resolve.resolve_lift, resolve.resolve_linear, resolve.resolve_chain, resolve._made_before):
        cache.cache_clear()
