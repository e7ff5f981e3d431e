"""The kernel for ``mma.sync`` in a real vLLM, forced on a card that has a faster one, against stock vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
import torch
from vllm_answers import LAYERS, SETTINGS, Answers, Weights, ask, checkpoint, difference
from vllm_driver import serve

from slidesparse.weights.quant import Rounding
from slidesparse_bench.engine.engine_process import Engine, EngineOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]

SPARSE, DENSE, FP8 = (torch.int8, "6:8"), (torch.int8, "dense"), (torch.float8_e4m3fn, "6:8")
STOCK, EIGHT, SIX = "stock", "ampere", "ampere-6bit"

Case = tuple[Weights, Rounding, str, str]
"""Type and pattern; rounding; whose products; ``eager``, or ``compiled`` with CUDA graphs."""

Form = tuple[Weights, Rounding, str]

EAGER: list[Form] = [(SPARSE, "absmax", EIGHT), (SPARSE, "6bit", SIX), (DENSE, "6bit", SIX)]
COMPILED: list[Form] = [(SPARSE, "6bit", SIX), (FP8, "absmax", EIGHT)]


def cases() -> Iterator[Case]:
    """Every form, and stock vLLM on the same checkpoint: compiled ones are also compared with eager stock."""
    for weights, rounding, name in EAGER:
        yield from ((weights, rounding, who, "eager") for who in (STOCK, name))
    for weights, rounding, name in COMPILED:
        yield from ((weights, rounding, *rest) for rest in ((STOCK, "eager"), (STOCK, "compiled"), (name, "compiled")))


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, tuple[Answers, dict[str, int]]]]:
    """What every engine said, and the kernels of one prefill; engines start side by side."""
    folder = tmp_path_factory.mktemp("ampere")
    with ExitStack() as stack:
        engines = {}
        for case in dict.fromkeys(cases()):
            weights, rounding, who, mode = case
            arguments = SETTINGS | {"enforce_eager": mode == "eager"}
            ours = {"slidesparse": {"backend": who}}
            path = checkpoint(folder, weights, rounding)
            engines[case] = Engine(EngineOptions(path, who != STOCK, ours, arguments), serve)
            stack.callback(engines[case].stop)
        for engine in engines.values():
            engine.ready()
        yield {case: (ask(engine), engine.call("kernels", 1024)) for case, engine in engines.items()}


def products(kernels: dict[str, int]) -> int:
    return sum(count for kernel, count in kernels.items() if "sparse_gemm" in kernel)


@pytest.mark.parametrize(("weights", "rounding", "name"), EAGER, ids=str)
def test_eager_int8_gives_every_bit_of_stock_vllm(
    asked: dict[Case, tuple[Answers, dict[str, int]]], weights: Weights, rounding: Rounding, name: str
) -> None:
    (stock, _), (ours, kernels) = (asked[weights, rounding, who, "eager"] for who in (STOCK, name))
    assert products(kernels) == 4 * LAYERS
    assert ours == stock


@pytest.mark.parametrize(("weights", "rounding", "name"), COMPILED, ids=str)
def test_compiled_is_as_near_to_stock_as_stock_is_to_itself(
    asked: dict[Case, tuple[Answers, dict[str, int]]], weights: Weights, rounding: Rounding, name: str
) -> None:
    stock, kernels = asked[weights, rounding, STOCK, "compiled"][0], asked[weights, rounding, name, "compiled"][1]
    assert products(kernels) == 4 * LAYERS
    ours = difference(stock, asked[weights, rounding, name, "compiled"][0])
    assert ours <= 2 * difference(stock, asked[weights, rounding, STOCK, "eager"][0])  # see test_vllm.py
