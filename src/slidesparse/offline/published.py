"""Costs of patterns for published models, by the records of docs/accuracy.md, and the best measured method."""

from __future__ import annotations

import math

from slidesparse.weights.pattern import Pattern

BEST = "--match-steps 200 with text like the model's use, then slidesparse recover"
"""The method with the least loss of all that were measured."""

COSTS = (
    ("SmolLM2-135M-Instruct", 135e6, "6:8", "3.8 %", "1.5 %"),
    ("SmolLM2-135M-Instruct", 135e6, "4:6", "9.7 %", "4.1 %"),
    ("Qwen2.5-Coder-0.5B-Instruct", 494e6, "6:8", "3.8 %", "0.8 %"),
    ("Qwen2.5-Coder-0.5B-Instruct", 494e6, "4:6", "9.3 %", "3.0 %"),
    ("Qwen2.5-Coder-0.5B-Instruct", 494e6, "2:4", "34.4 %", "7.7 %"),
    ("Qwen2.5-Coder-1.5B-Instruct", 1544e6, "6:8", "4.0 %", "2.2 %"),
    ("Qwen2.5-Coder-1.5B-Instruct", 1544e6, "4:6", "9.8 %", "6.3 %"),
)
"""Model, parameters, pattern, and rise of the perplexity of code, before and after recover."""


def expected_cost(zeros: float, n_bytes: int) -> str:
    """Describe the cost of the pattern nearest to a share of zeros, for the model of the nearest size in BF16.

    >>> expected_cost(0.3, 10**9)
    '4:6 cost Qwen2.5-Coder-0.5B-Instruct 9.3 % of perplexity in one shot with --match-steps 200, 3.0 % recovered'
    """
    nearest = min(abs(Pattern.parse(one[2]).sparsity - zeros) for one in COSTS)
    alike = [one for one in COSTS if abs(Pattern.parse(one[2]).sparsity - zeros) == nearest]
    model, _, pattern, *costs = min(alike, key=lambda one: abs(math.log(2 * one[1] / max(n_bytes, 1))))
    return f"{pattern} cost {model} {costs[0]} of perplexity in one shot with --match-steps 200, {costs[1]} recovered"
