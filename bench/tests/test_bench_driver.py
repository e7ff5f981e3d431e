"""How the far end of an engine takes its times, without an engine."""

from __future__ import annotations

import os
from typing import Any

import pytest

from slidesparse_bench.engine import vllm_engine
from slidesparse_bench.engine.vllm_engine import Driver, undisturbed


@pytest.mark.parametrize(
    ("seconds", "found"),
    [([5.0], 5.0), ([5.0, 4.0], 4.0), ([3.0, 1.0, 2.0, 9.0, 8.0], 2.0), ([*map(float, range(100))], 20.0)],
)
def test_one_time_in_five_undercuts_the_one_that_counts(seconds: list[float], found: float) -> None:
    assert undisturbed(seconds) == found


def test_a_turn_is_one_core_for_all_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Any] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: taken.append((process, cores)))
    monkeypatch.setattr(vllm_engine, "_random_prompts", lambda *_, **__: [])
    for cores in ([2, 5, 7], [2, 5, 7]):
        driver = Driver.__new__(Driver)
        driver._cores = cores
        monkeypatch.setattr(driver, "_generate", lambda *_: None)
        for turn in range(4):
            assert driver.prefill(64, turn) >= 0
    assert taken == 2 * [(0, {2}), (0, {5}), (0, {7}), (0, {2})]
