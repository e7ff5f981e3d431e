"""A CPU that is taken for a Blackwell GPU, by everything that decides which kernel runs."""

from __future__ import annotations

import sys

import pytest
import torch

from slidesparse.gemm.ampere.backend import Ampere

ASKING = ("gemm.backend", "gemm.select", "integrations.vllm.scheme", "integrations.sglang.scheme")


def act_as_blackwell(monkeypatch: pytest.MonkeyPatch, refusal: str | None = None) -> None:
    """Neither server has an INT8 kernel of its own; ``refusal``: ours cannot run either."""
    for name in ASKING:
        if (module := sys.modules.get(f"slidesparse.{name}")) is not None:
            monkeypatch.setattr(module, "servers_lack", lambda dtype, _: dtype == torch.int8)
    monkeypatch.setattr(Ampere, "why_not", lambda *_: refusal)
