"""The plugin in a real vLLM, against stock dense vLLM on the same checkpoint.

Four layers of Qwen2.5-7B's shapes, prompts of uneven lengths of which some share a beginning, prefix caching and
chunked prefill on. Engines start side by side, each in a process of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from slidesparse.bench.vllm_checkpoint import model_config, write_checkpoint
from slidesparse.bench.vllm_engine import Engine, EngineOptions
from slidesparse.pattern import Pattern

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]

SETTINGS = {"enable_prefix_caching": True, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
LAYERS, PROMPTS, TOKENS, LIKELIEST = 4, 64, 64, 20

INT8, PARTIAL, FP8 = (torch.int8, "6:8"), (torch.int8, "4:6@50%"), (torch.float8_e4m3fn, "6:8")
Case = tuple[tuple[torch.dtype, str], str, str]
"""Type and pattern; ``stock`` or ``ours``; ``eager``, or ``compiled`` with CUDA graphs."""

CASES: list[Case] = [
    *((INT8, whose, mode) for whose in ("stock", "ours") for mode in ("eager", "compiled")),
    *((PARTIAL, whose, "eager") for whose in ("stock", "ours")),
    *((FP8, *how) for how in (("stock", "eager"), ("stock", "compiled"), ("ours", "compiled"))),
]


class Answers(NamedTuple):
    """What an engine said: tokens of all prompts, the likeliest first tokens of some, the kernels of a prefill."""

    tokens: list[list[int]]
    likeliest: list[dict[int, float]]
    kernels: dict[str, tuple[float, int]]


def prompts() -> list[list[int]]:
    draw = random.Random(0)
    shared = [draw.randrange(10, 100_000) for _ in range(300)]
    made = [[draw.randrange(10, 100_000) for _ in range(draw.randrange(16, 600))] for _ in range(PROMPTS)]
    return [shared + prompt if i % 4 == 0 else prompt for i, prompt in enumerate(made)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Case, Answers]]:
    folder = tmp_path_factory.mktemp("vllm")
    with ExitStack() as stack:
        engines = {}
        for case in CASES:
            (dtype, pattern), whose, mode = case
            sparse = {"slidesparse": {"fallback": "none"}}  # for every number of tokens
            arguments = SETTINGS | {"enforce_eager": mode == "eager"}
            path = checkpoint(folder, dtype, pattern)
            engines[case] = Engine(EngineOptions(path, whose == "ours", sparse, arguments, kv_cache_gb=1.0))
            stack.callback(engines[case].stop)
        for engine in engines.values():
            engine.ready()
        yield {
            case: Answers(
                engine.call("tokens", prompts(), TOKENS),
                engine.call("first_logprobs", prompts()[:16], LIKELIEST),
                engine.call("kernels", "prefill", 1024),
            )
            for case, engine in engines.items()
        }


def checkpoint(folder: Path, dtype: torch.dtype, pattern: str) -> Path:
    path = folder / f"{dtype}-{pattern.replace(':', 'of')}"
    if not path.exists():
        write_checkpoint(path, model_config("Qwen2.5-7B", LAYERS), dtype, Pattern.parse(pattern), torch.device("cuda"))
    return path


@pytest.mark.parametrize("weights", [INT8, PARTIAL], ids=str)
def test_eager_int8_gives_every_bit_of_stock_vllm(answers: dict[Case, Answers], weights: Any) -> None:
    stock, ours = answers[weights, "stock", "eager"], answers[weights, "ours", "eager"]
    assert ours.tokens == stock.tokens
    assert ours.likeliest == stock.likeliest


@pytest.mark.parametrize("weights", [INT8, FP8], ids=str)
def test_compiled_is_as_near_to_stock_as_stock_is_to_itself(answers: dict[Case, Answers], weights: Any) -> None:
    stock = answers[weights, "stock", "compiled"]
    ours = difference(stock, answers[weights, "ours", "compiled"])
    # Inductor rounds norms where eager kernels do not and sums in another order; 8-bit quantisation carries such bits
    # through all layers. So stock vLLM differs from itself, and that is the measure; 2 for the luck of few prompts.
    assert ours <= 2 * difference(stock, answers[weights, "stock", "eager"])


def difference(one: Answers, other: Answers) -> float:
    """The mean difference of the log-probabilities of first tokens that both find likely."""
    pairs = [(a[t], b[t]) for a, b in zip(one.likeliest, other.likeliest, strict=True) for t in a.keys() & b.keys()]
    assert len(pairs) >= 0.8 * len(one.likeliest) * LIKELIEST
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == "ours"], ids=str)
def test_every_layer_said_to_be_sparse_runs_a_sparse_kernel(answers: dict[Case, Answers], case: Case) -> None:
    weights, _, mode = case
    kernels, stock = answers[case].kernels, answers[weights, "stock", mode].kernels
    assert sum(launches for name, (_, launches) in kernels.items() if "sparse_gemm" in name) == 4 * LAYERS
    assert not any("cutlass_3x_gemm" in name for name in kernels)
    assert any("cutlass_3x_gemm" in name for name in stock)
