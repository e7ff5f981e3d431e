"""What engines of vLLM are asked in the GPU tests, and how two of them are compared.

Four layers of Qwen2.5-7B's shapes; prompts of uneven lengths, of which some share a beginning.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slidesparse.weights.pattern import Pattern
from slidesparse.weights.quant import Rounding
from slidesparse_bench.engine.engine_process import Engine
from slidesparse_bench.engine.vllm_checkpoint import model_config, write_checkpoint

SETTINGS = {"enable_prefix_caching": True, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
LAYERS, PROMPTS, TOKENS, LIKELIEST = 4, 64, 64, 20

Weights = tuple[torch.dtype, str]
"""Type and pattern."""


class Answers(NamedTuple):
    """What an engine said: tokens of all prompts, and the likeliest first tokens of some."""

    tokens: list[list[int]]
    likeliest: list[dict[int, float]]


def prompts(count: int = PROMPTS) -> list[list[int]]:
    """Prompts of 16 to 899 tokens, the same on every call."""
    draw = random.Random(0)
    shared = [draw.randrange(10, 100_000) for _ in range(300)]
    made = [[draw.randrange(10, 100_000) for _ in range(draw.randrange(16, 600))] for _ in range(count)]
    return [shared + prompt if i % 4 == 0 else prompt for i, prompt in enumerate(made)]


def checkpoint(folder: Path, weights: Weights, rounding: Rounding = "absmax") -> Path:
    """A random checkpoint, written on the first call."""
    dtype, pattern = weights
    path = folder / f"{dtype}-{pattern.replace(':', 'of')}-{rounding}"
    if not path.exists():
        config, device = model_config("Qwen2.5-7B", LAYERS), torch.device("cuda")
        write_checkpoint(path, config, dtype, Pattern.parse(pattern), device, rounding)
    return path


def ask(engine: Engine) -> Answers:
    """All prompts at once."""
    return Answers(engine.call("tokens", prompts(), TOKENS), engine.call("first_logprobs", prompts()[:16], LIKELIEST))


def ask_one_by_one(engine: Engine, count: int) -> Answers:
    """Some prompts, each alone: then nothing depends on how requests happen to share a batch."""
    each = [[prompt] for prompt in prompts(count)]
    tokens = [engine.call("tokens", one, TOKENS) for one in each]
    likeliest: list[Any] = [engine.call("first_logprobs", one, LIKELIEST) for one in each]
    return Answers([answer[0] for answer in tokens], [answer[0] for answer in likeliest])


def difference(one: Answers, other: Answers) -> float:
    """The mean difference of the log-probabilities of first tokens that both find likely."""
    pairs = [(a[t], b[t]) for a, b in zip(one.likeliest, other.likeliest, strict=True) for t in a.keys() & b.keys()]
    assert len(pairs) >= 0.8 * len(one.likeliest) * LIKELIEST
    return sum(abs(a - b) for a, b in pairs) / len(pairs)
