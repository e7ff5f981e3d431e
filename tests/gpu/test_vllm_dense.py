"""Dense eight-bit checkpoints, written as llm-compressor does, in a real vLLM with and without the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
import torch
from llm_compressor_checkpoint import group, quantised, rewritten
from vllm_answers import LAYERS, SETTINGS, Answers, ask, checkpoint, difference
from vllm_driver import serve

from slidesparse_bench.engine.engine_process import Engine, EngineOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]

FLOAT = {"type": "float"}
TYPES = {
    "INT8": (torch.int8, quantised()),
    "FP8": (torch.float8_e4m3fn, quantised(group(FLOAT, FLOAT), form="float-quantized")),
}
CASES = [
    *((kind, who, "compiled") for kind in TYPES for who in ("stock", "ours")),
    *(("INT8", "stock", "eager"), ("INT8", "ours", "eager"), ("FP8", "stock", "eager")),
]
"""Type, whose engine, and ``eager``, or ``compiled`` with CUDA graphs."""

Said = dict[tuple[str, str, str], tuple[Answers, dict[str, int]]]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Said]:
    """What every engine answered, and the kernels of one prefill."""
    folder = tmp_path_factory.mktemp("dense")
    paths = {}
    for kind, (dtype, config) in TYPES.items():
        paths[kind] = rewritten(checkpoint(folder, (dtype, "dense")), folder / kind, config)
    with ExitStack() as stack:
        engines = {}
        for case in CASES:
            kind, who, mode = case
            arguments = SETTINGS | {"enforce_eager": mode == "eager"}
            arguments |= {"quantization": "slidesparse"} if who == "ours" else {}
            engines[case] = Engine(EngineOptions(paths[kind], who == "ours", {}, arguments), serve)
            stack.callback(engines[case].stop)
        for engine in engines.values():
            engine.ready()
        yield {case: (ask(engine), engine.call("kernels", 1024)) for case, engine in engines.items()}


def test_eager_int8_gives_every_bit_of_stock_vllm(said: Said) -> None:
    assert said["INT8", "ours", "eager"][0] == said["INT8", "stock", "eager"][0]


@pytest.mark.parametrize("kind", TYPES)
def test_compiled_is_as_near_to_stock_as_stock_is_to_itself(said: Said, kind: str) -> None:
    compared = (("stock", "compiled"), ("ours", "compiled"), ("stock", "eager"))
    stock, ours, eager = (said[kind, who, mode][0] for who, mode in compared)
    assert difference(stock, ours) <= 2 * difference(stock, eager)  # see test_vllm.py


def launches(kernels: dict[str, int], name: str) -> int:
    return sum(count for kernel, count in kernels.items() if name in kernel)


@pytest.mark.parametrize("kind", TYPES)
def test_every_linear_is_fused_with_what_stands_before_it(said: Said, kind: str) -> None:
    kernels, stock = said[kind, "ours", "compiled"][1], said[kind, "stock", "compiled"][1]
    assert launches(kernels, "sparse_gemm") == 0
    assert launches(kernels, "resident_kernel") + launches(kernels, "walking_kernel") == 4 * LAYERS
    assert launches(kernels, "scaled_int8_quant") + launches(kernels, "scaled_fp8_quant") == 0
    assert launches(stock, "triton") - launches(kernels, "triton") > 2 * LAYERS


def test_int8_products_are_those_of_stock_vllm(said: Said) -> None:
    ours, stock = (
        {kernel: count for kernel, count in said["INT8", who, "compiled"][1].items() if "cutlass" in kernel}
        for who in ("ours", "stock")
    )
    assert ours == stock != {}
