"""Tensor, pipeline and data parallel over two GPUs, against stock dense vLLM.

With tensor parallelism the shards of these shapes cut the pattern's groups.

Prompts go in one by one: with two workers the batch that a prompt lands in depends on the clock, and 8-bit activations
carry the last bit of a sum, whose order depends on the batch, through all layers.
"""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from vllm_answers import SETTINGS, TOKENS, Answers, ask_one_by_one, checkpoint, difference, prompts
from vllm_driver import serve, serve_on_two

from slidesparse_bench.engine.engine_process import Engine, EngineOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

PATTERNS = ("4:6", "6:8", "8:10")
"""The second half of 3584 columns (o_proj) and of 18944 (down_proj) begins inside a group of 6 and of 10."""

BY_AMPERE = "8:10"
"""The pattern whose layers run by the kernel for ``mma.sync``, the others by ``auto``."""

ASKED = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


def ask_both(
    folder: Path, patterns: tuple[str, ...], eager: bool, kind: str = "tensor"
) -> dict[tuple[str, bool], Answers]:
    """(pattern, ours) -> answers."""
    arguments = SETTINGS | {"enforce_eager": eager, f"{kind}_parallel_size": 2}
    with ExitStack() as stack:
        engines = {}
        for pattern in patterns:
            for ours in (False, True):
                path = checkpoint(folder, (torch.int8, pattern))
                sparse = {"slidesparse": {"backend": "ampere"} if pattern == BY_AMPERE else {"fallback": "none"}}
                engines[pattern, ours] = Engine(EngineOptions(path, ours, sparse, arguments), serve)
                stack.callback(engines[pattern, ours].stop)
        for engine in engines.values():
            engine.ready()
        return {key: ask_one_by_one(engine, ASKED) for key, engine in engines.items()}


@pytest.fixture(scope="module")
def eager(folder: Path) -> dict[tuple[str, bool], Answers]:
    return ask_both(folder, PATTERNS, eager=True)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_eager_gives_every_token_of_stock_vllm(eager: dict[tuple[str, bool], Answers], pattern: str) -> None:
    assert eager[pattern, True].tokens == eager[pattern, False].tokens
    assert eager[pattern, True].likeliest == eager[pattern, False].likeliest


def test_compiled_is_as_near_to_stock_as_stock_is_to_itself(
    eager: dict[tuple[str, bool], Answers], folder: Path
) -> None:
    compiled = ask_both(folder, PATTERNS[:1], eager=False)
    ours, stock = compiled[PATTERNS[0], True], compiled[PATTERNS[0], False]
    # As in test_vllm.py.
    assert difference(stock, ours) <= 2 * difference(stock, eager[PATTERNS[0], False])


def test_pipeline_parallel_gives_every_token_of_stock_vllm(folder: Path) -> None:
    answers = ask_both(folder, PATTERNS[:1], eager=True, kind="pipeline")
    ours, stock = answers[PATTERNS[0], True], answers[PATTERNS[0], False]
    assert ours.tokens == stock.tokens
    assert ours.likeliest == stock.likeliest


def test_data_parallel_gives_every_token_of_stock_vllm_on_each_gpu(folder: Path) -> None:
    path = checkpoint(folder, (torch.int8, PATTERNS[0]))
    arguments = SETTINGS | {"enforce_eager": True}
    with ExitStack() as stack:
        ours = Engine(EngineOptions(path, True, {"slidesparse": {"backend": "hopper"}}, arguments), serve_on_two)
        stock = Engine(EngineOptions(path, False, {}, arguments), serve)
        for engine in (ours, stock):
            stack.callback(engine.stop)
            engine.ready()
        for prompt in prompts(ASKED):
            expected = stock.call("tokens", [prompt], TOKENS)[0]
            for gpu in range(2):
                assert ours.call("tokens", prompt, TOKENS, gpu) == expected
