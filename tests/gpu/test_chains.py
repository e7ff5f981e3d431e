"""Chains on the Hopper kernel, on a GPU: the bits of their linears, captured, on poison, and beside dense linears."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from chained_linears import Weight, chained, one_by_one
from gpu_products import needs_hopper
from runner_listener import forget_runners, listen
from torch import nn

from slidesparse import ops
from slidesparse.gemm import step_chain
from slidesparse.gemm.backend import OneByOne
from slidesparse.gemm.spec import parse_chain
from slidesparse.gemm.step_chain import StepChain
from slidesparse.integrations.warmup import WarmUp
from slidesparse.layer.linear import SlideLinear
from slidesparse.lifting import kernel as lift
from slidesparse.weights.quant import Rounding
from slidesparse.weights.support import as_bits

pytestmark = [pytest.mark.gpu, needs_hopper]

BF16 = torch.bfloat16
HIDDEN, WIDE = 512, 1024
SIZES = [(HIDDEN, WIDE), (2 * WIDE, HIDDEN), (HIDDEN, WIDE), (768, HIDDEN)]
"""Rows and columns of o, gate and up, down, and query, key and value."""


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every call of a chain, whether it ran as one, on memory full of poison, and not one by one."""
    return listen(monkeypatch, StepChain, OneByOne, step_chain)


def weights(pattern: str, dtype: str, dense: tuple[int, ...] = (), sparse: str = "hopper") -> list[Weight]:
    """The four linears, those of ``dense`` on the dense backend, the last one with a bias."""
    found = []
    for i, (out, columns) in enumerate(SIZES):
        linear, backend = nn.Linear(columns, out, bias=i == 3).to(BF16).cuda(), "dense" if i in dense else sparse
        rounding: Rounding = "6bit" if backend == "hopper-6bit" else "absmax"
        layer = SlideLinear.from_linear(linear, pattern, dtype, method="magnitude", backend=backend, rounding=rounding)
        tensors = [tensor for form in layer.forms for tensor in form.tensors]
        found.append((tensors, layer.weight_scale, layer.bias, layer.spec))
    return found


def inputs(tokens: int, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    x, residual = (torch.randn(tokens, width, dtype=dtype, device="cuda") for width in (WIDE, HIDDEN))
    return x, residual, [torch.rand(HIDDEN, dtype=dtype, device="cuda") for _ in range(2)]


def same(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(as_bits(a), as_bits(b)) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tokens", [1, 60, 700, 5000])
@pytest.mark.parametrize(
    ("pattern", "backend", "dtype"),
    [
        *((pattern, "hopper", dtype) for pattern in ("2:4", "4:6", "6:8") for dtype in ("int8", "fp8")),
        *((pattern, "hopper-6bit", "int8") for pattern in ("2:4", "4:6", "6:8", "dense")),
    ],
)
def test_a_chain_has_the_bits_of_its_linears(
    pattern: str, backend: str, dtype: str, tokens: int, answers: list[bool]
) -> None:
    given = weights(pattern, dtype, sparse=backend)
    for _ in range(2):  # the second time its weights are known
        x, residual, gains = inputs(tokens)
        before, expected = residual.clone(), one_by_one(x, residual, gains, given)
        assert same(ops.chain(x, residual, *chained(given, gains)), expected)
        assert torch.equal(residual, before)
    assert answers == [True, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_chains_of_other_activations(dtype: torch.dtype, answers: list[bool]) -> None:
    given, (x, residual, gains) = weights("6:8", "int8"), inputs(300, dtype)
    given[3] = (*given[3][:2], None, given[3][3])  # its bias is bf16
    expected = one_by_one(x, residual, gains, given)
    assert same(ops.chain(x, residual, *chained(given, gains)), expected)
    assert answers == [True]


def test_after_a_warm_up_a_chain_finds_all_kernels(answers: list[bool]) -> None:
    given, (x, residual, gains) = weights("6:8", "int8"), inputs(600)
    for cache in (lift._launcher, lift.find_kernel_lift):
        cache.cache_clear()
    forget_runners()
    warmup, (tensors, text) = WarmUp(700, BF16), chained(given, gains)
    ops.linear(x, *given[0])  # what a layer alone runs when it is loaded
    for linear in parse_chain(text):
        warmup.lift(linear.prologue, linear.weight, x.device)
    assert same(ops.chain(x, residual, tensors, text), one_by_one(x, residual, gains, given))
    assert answers == [True]


@pytest.mark.parametrize(("dense", "chains"), [((0,), 1), ((1,), 1), ((2,), 1), ((0, 2), 0), ((1, 3), 0)])
def test_dense_linears_stand_alone(dense: tuple[int, ...], chains: int, answers: list[bool]) -> None:
    given, (x, residual, gains) = weights("6:8", "int8", dense), inputs(600)
    expected = one_by_one(x, residual, gains, given)
    assert same(ops.chain(x, residual, *chained(given, gains)), expected)
    assert answers == [True] * chains


def test_a_chain_is_captured_and_runs_on_other_streams(answers: list[bool]) -> None:
    given, (x, residual, gains), stream = weights("6:8", "int8"), inputs(200), torch.cuda.Stream()
    chain: Callable[[], Any] = lambda: ops.chain(x, residual, *chained(given, gains))  # noqa: E731
    expected = one_by_one(x, residual, gains, given)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        aside = chain()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    graph.replay()
    assert same(aside, expected)
    assert same(captured, expected)
    x.mul_(2).add_(1)
    residual.mul_(3)
    graph.replay()
    assert same(captured, one_by_one(x, residual, gains, given))
    assert answers == [True, True]


def test_many_chains_without_a_pause_do_not_disturb_each_other(answers: list[bool]) -> None:
    given, gains = weights("4:6", "int8"), inputs(1)[2]
    calls = [inputs(tokens)[:2] for tokens in (40, 900, 7, 2000, 130) * 6]
    expected = []
    for x, residual in calls:
        expected.append(one_by_one(x, residual, gains, given))
        torch.cuda.synchronize()
    found = [ops.chain(x, residual, *chained(given, gains)) for x, residual in calls]
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert all(answers)


@pytest.fixture
def _threads_take_turns_often() -> Iterator[None]:
    """Python lets a thread run for 5 ms, a hundred calls, before another has its turn."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_threads_take_turns_often")
@pytest.mark.parametrize("chain", [False, True])
def test_two_threads_share_one_operator(chain: bool) -> None:
    """Each on a stream of its own, with tokens of several tiles: the bits of calls made alone."""
    tokens, calls, gains = (1, 700, 16, 130, 64, 300), 300, inputs(1)[2]
    given = [[inputs(m)[:2] for m in tokens] for _ in range(2)]
    together = threading.Barrier(2)

    def build() -> Callable[[int, int], tuple[torch.Tensor, ...]]:
        torch.manual_seed(0)
        made = weights("6:8", "int8")
        tensors, text = chained(made, gains)
        if chain:
            return lambda thread, i: ops.chain(*given[thread][i], tensors, text)
        return lambda thread, i: (ops.linear(given[thread][i][0], *made[0]),)

    def run(thread: int) -> list[tuple[torch.Tensor, ...]]:
        stream = torch.cuda.Stream()
        with torch.inference_mode(), torch.cuda.stream(stream):
            together.wait(timeout=60)
            found = [shared(thread, i % len(tokens)) for i in range(calls)]
        stream.synchronize()
        return found

    alone, shared = build(), build()  # two, so that what an operator finds out of its weights is new to the threads
    expected = [[alone(thread, i) for i in range(len(tokens))] for thread in range(2)]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(2) as pool:
        for thread, found in enumerate(pool.map(run, range(2))):
            wrong = [n for n, results in enumerate(found) if not same(results, expected[thread][n % len(tokens)])]
            assert not wrong, f"{len(wrong)} of {calls} calls of thread {thread}, the first one number {wrong[0]}"
