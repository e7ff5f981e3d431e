"""Results come in order, an error comes where its result would, and torch has its threads afterwards."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
import torch

from slidesparse.base.ahead import ahead
from slidesparse.base.dealing import deal


def test_results_come_in_order_from_several_threads() -> None:
    seen = set()

    def work(number: int) -> int:
        seen.add(threading.current_thread().name)
        time.sleep(0.01 if number % 2 else 0.03)
        return number

    before = torch.get_num_threads()
    assert list(ahead(work, range(10), 2)) == list(range(10))
    assert len(seen) == 2
    assert torch.get_num_threads() == before


def test_no_more_is_computed_than_was_asked_for() -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        if number == 2:
            raise ValueError("two")
        return number

    with closing(ahead(work, range(100), 2)) as results:
        assert [next(results), next(results)] == [0, 1]
        with pytest.raises(ValueError, match="two"):
            next(results)
    assert len(begun) < 8


def test_work_is_dealt_evenly_and_all_of_it() -> None:
    sizes = {f"shard {i}": 3 + i % 5 for i in range(23)}
    for hands in (1, 2, 4, 30):
        dealt = deal(sizes, hands)
        assert sorted(name for hand in dealt for name in hand) == sorted(sizes)
        loads = [sum(sizes[name] for name in hand) for hand in dealt]
        assert max(loads) <= max(max(sizes.values()), 4 / 3 * sum(sizes.values()) / hands)
