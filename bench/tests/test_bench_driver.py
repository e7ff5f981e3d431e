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


@pytest.mark.parametrize(("tokens", "requests"), [(512, 10), (2048, 10), (4096, 5), (8192, 2), (16384, 1), (65536, 1)])
def test_all_engines_have_as_many_requests(monkeypatch: pytest.MonkeyPatch, tokens: int, requests: int) -> None:
    prompts: list[Any] = []
    driver = Driver.__new__(Driver)
    driver._cores = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(vllm_engine, "_random_prompts", lambda count, length, seed: [count, length, seed])
    monkeypatch.setattr(driver, "_generate", lambda *given: prompts.append(given))
    driver.prefill(tokens, 3)
    assert prompts == requests * [([max(1, tokens // 1024), min(1024, tokens), 3], 1)]
