"""The timing protocol: cold caches, stretches of a form's own, and results that would show if nothing wrote them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from slidesparse.tuning.timing import MAX_COPIES, copies_needed, copies_of, poison, time_stretches


@dataclass
class GovernedPass:
    """Takes as much longer as the power of the last launches on its GPU was higher."""

    power: float
    gpu: deque[float]
    us: float = 100.0
    copies: int = 2
    method: str = "graph"

    def launch(self) -> Callable[[], float]:
        self.gpu.append(self.power)
        us = self.us * statistics.mean(self.gpu)
        return lambda: us


@pytest.mark.parametrize(
    ("n_bytes", "l2", "memory", "copies"),
    [
        (100, 1000, 10**6, 30),
        (99, 1000, 10**6, 31),
        (100, 1000, 550, 5),
        (10**7, 1000, 10**6, 1),
        (100, 1000, 50, 1),
        (1, 10**6, 10**9, MAX_COPIES),
        (0, 10**6, 10**9, MAX_COPIES),
    ],
)
def test_copies_exceed_three_caches_as_memory_allows(n_bytes: int, l2: int, memory: int, copies: int) -> None:
    assert copies_needed(n_bytes, l2, memory) == copies


def test_copies_are_equal_and_apart() -> None:
    operands = (torch.arange(4), None, (torch.ones(2),))
    first, second = copies_of(operands, 2)
    assert first is operands
    assert torch.equal(second[0], operands[0])
    assert second[1] is None
    assert second[2][0].data_ptr() != operands[2][0].data_ptr()


def test_in_stretches_a_form_has_its_own_clock_where_turns_share_the_hungriest_one() -> None:
    gpu: deque[float] = deque(maxlen=20)
    samples = time_stretches([GovernedPass(2.0, gpu), GovernedPass(1.0, gpu)], 0.3)
    assert [statistics.median(times) for times in samples] == [200, 100]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.int8, torch.float8_e4m3fn])
def test_poison_is_far_from_any_result(dtype: torch.dtype) -> None:
    result = torch.ones(3, 5, dtype=dtype), (torch.ones(2), torch.ones(()))
    poison(result)
    for tensor in (result[0], *result[1]):
        wide = tensor.to(torch.float64)
        assert bool((wide.isnan() | (wide > 100)).all())
