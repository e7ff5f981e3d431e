"""Host time of a linear in its steady state: what Python and the dispatcher add to a product that takes no time."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time
from typing import Any

import pytest
import torch
from torch import nn

from slidesparse import SlideLinear
from slidesparse.gemm.backend import Runner
from slidesparse.gemm.reference import Reference
from slidesparse.gemm.select import BACKENDS
from slidesparse.lifting.choose import Lift
from slidesparse.weights.packing import pack_weight
from slidesparse.weights.pattern import Pattern

pytestmark = pytest.mark.slow

CALLS, ROUNDS = 25, 400
"""Calls of one time, and times of which the least counts: a busy machine leaves some of them alone."""

MOST = 1.9
"""The most host time of a linear, in calls of :class:`Unit`. Measured: 1.29 to 1.31, of a layer called twice 2.54 to
2.56, on two cores that other processes shared (load 16)."""


class Nothing(Reference):
    """A backend whose products cost nothing, so that a call of a layer takes the host's time alone."""

    name = "nothing"

    def runner(self, lift: Lift, out_features: int) -> Runner:
        y = torch.empty(1, out_features, dtype=torch.bfloat16)
        return lambda *_: (y, None)


class Unit(nn.Module):
    """Work that grows with the machine as a layer's does: calls of Python and of torch's dispatcher, in equal parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts: dict[int, Any] = {}
        for number in range(20):
            counts[number] = counts.get(number - 1, number)
        for _ in range(3):
            x = x.view(1, 8).detach()
        return x


def least(runs: list[Callable[[], object]]) -> list[float]:
    """Return the least seconds of this thread in each run, measured in turns, so that all meet the same machine."""
    best = [float("inf")] * len(runs)
    for _ in range(ROUNDS):
        for i, run in enumerate(runs):
            start = thread_time()
            for _ in range(CALLS):
                run()
            best[i] = min(best[i], thread_time() - start)
    return best


def test_a_steady_linear_takes_little_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "nothing", Nothing)
    packed = pack_weight(torch.eye(8), Pattern(6, 8), torch.int8)
    layer, unit = SlideLinear(packed, backend="nothing"), Unit()
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    with torch.inference_mode():  # as servers run it
        of_unit, once, twice = least([lambda: unit(x), lambda: layer(x), lambda: (layer(x), layer(x))])
    assert once < MOST * of_unit, f"{once / of_unit:.2f} units, {1e6 * once / CALLS:.1f} us a call"
    assert twice > MOST * of_unit, "a doubled time would pass unnoticed: lower the bound"
