"""Two threads through one operator, each on a stream of its own: the bits of calls made alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from chained_linears import Weight, chained
from gpu_products import needs_hopper
from torch import nn

from slidesparse import ops
from slidesparse.layer.linear import SlideLinear

pytestmark = [pytest.mark.gpu, needs_hopper]

BF16 = torch.bfloat16
HIDDEN, WIDE = 512, 1024
SIZES = [(HIDDEN, WIDE), (2 * WIDE, HIDDEN), (HIDDEN, WIDE), (768, HIDDEN)]
"""Rows and columns of o, gate and up, down, and query, key and value."""

TOKENS = (1, 700, 16, 130, 64, 300)
"""Of several tiles, so that a launch that takes over another's arguments gives another result."""
CALLS = 300
"""Of a thread."""

Results = tuple[torch.Tensor, ...]
Call = Callable[[int, int], Results]
"""(thread, number of the input) -> what the operator gives for that input of the thread."""


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    """Python lets a thread run for 5 ms, a hundred calls, before another has its turn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _linears() -> list[nn.Linear]:
    return [nn.Linear(columns, out, bias=i == 3).to(BF16).cuda() for i, (out, columns) in enumerate(SIZES)]


def _layer(linear: nn.Linear) -> SlideLinear:
    return SlideLinear.from_linear(linear, "6:8", "int8", method="magnitude", backend="hopper")


def _weight(layer: SlideLinear) -> Weight:
    return [t for form in layer.forms for t in form.tensors], layer.weight_scale, layer.bias, layer.spec


def _inputs(width: int) -> list[list[torch.Tensor]]:
    """For each of two threads an input of every number of tokens."""
    return [[torch.randn(tokens, width, dtype=BF16, device="cuda") for tokens in TOKENS] for _ in range(2)]


def _linear_call(linears: list[nn.Linear], x: list[list[torch.Tensor]]) -> Call:
    layer = _layer(linears[0])
    return lambda thread, i: (layer(x[thread][i]),)


def _chain_call(
    linears: list[nn.Linear], x: list[list[torch.Tensor]], residual: list[list[torch.Tensor]], gains: list[torch.Tensor]
) -> Call:
    tensors, text = chained([_weight(_layer(linear)) for linear in linears], gains)
    return lambda thread, i: ops.chain(x[thread][i], residual[thread][i], tensors, text)


def _in_two_threads(call: Call) -> list[list[Results]]:
    """The results of ``CALLS`` calls of each of two threads that start together."""
    together = threading.Barrier(2)

    def run(thread: int) -> list[Results]:
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            together.wait(timeout=60)
            found = [call(thread, i % len(TOKENS)) for i in range(CALLS)]
        stream.synchronize()
        return found

    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def _check(alone: Call, shared: Call) -> None:
    """Compare two builds of one operator: what it has found out of its weights is new to the threads."""
    expected = [[alone(thread, i) for i in range(len(TOKENS))] for thread in range(2)]
    for thread, found in enumerate(_in_two_threads(shared)):
        wrong = [
            number
            for number, results in enumerate(found)
            if not all(map(torch.equal, results, expected[thread][number % len(TOKENS)]))
        ]
        assert not wrong, f"{len(wrong)} of {CALLS} calls of thread {thread}, the first one number {wrong[0]}"


def test_two_threads_through_one_linear() -> None:
    linears, x = _linears(), _inputs(WIDE)
    _check(_linear_call(linears, x), _linear_call(linears, x))


def test_two_threads_through_one_chain() -> None:
    linears, gains = _linears(), [torch.rand(HIDDEN, dtype=BF16, device="cuda") for _ in range(2)]
    given = linears, _inputs(WIDE), _inputs(HIDDEN), gains
    _check(_chain_call(*given), _chain_call(*given))
