"""What patterns cost published models, by the records of docs/accuracy.md, and what was found to lose least."""

from __future__ import annotations

import math

from slidesparse.weights.pattern import Pattern

BEST = "--method sparsegpt --match 200 with text like the model's use, then slidesparse recover"
"""What lost least of all that was measured."""

COSTS = (
    ("SmolLM2-135M-Instruct", 135e6, "6:8", "3.8 %", "1.5 %"),
    ("SmolLM2-135M-Instruct", 135e6, "4:6", "9.7 %", "4.1 %"),
    ("Qwen2.5-Coder-0.5B-Instruct", 494e6, "6:8", "3.8 %", "0.8 %"),
    ("Qwen2.5-Coder-0.5B-Instruct", 494e6, "4:6", "9.3 %", "3.0 %"),
    ("Qwen2.5-Coder-0.5B-Instruct", 494e6, "2:4", "34.4 %", "7.7 %"),
    ("Qwen2.5-Coder-1.5B-Instruct", 1544e6, "6:8", "4.0 %", "2.2 %"),
    ("Qwen2.5-Coder-1.5B-Instruct", 1544e6, "4:6", "9.8 %", "6.3 %"),
)
"""Model, parameters, pattern, and how far it raised the perplexity of code, before and after recover."""


def costs_by_pattern() -> str:
    """Return what each pattern cost the models, from the least to the most.

    >>> costs_by_pattern().split(', ')[0]
    '3.8 to 4.0 % at 6:8 in one shot and 0.8 to 2.2 recovered'
    >>> costs_by_pattern().split(', ')[1:]
    ['9.3 to 9.8 and 3.0 to 6.3 % at 4:6', '34.4 and 7.7 % at 2:4']
    """

    def ends(costs: list[str]) -> str:
        found = sorted((cost.removesuffix(" %") for cost in costs), key=float)
        return " to ".join(dict.fromkeys((found[0], found[-1])))

    alike = {pattern: [one[3:] for one in COSTS if one[2] == pattern] for _, _, pattern, *_ in COSTS}
    both = {pattern: tuple(map(ends, map(list, zip(*costs, strict=True)))) for pattern, costs in alike.items()}
    (first, (once, recovered)), *others = both.items()
    told = [f"{once} % at {first} in one shot and {recovered} recovered"]
    return ", ".join([*told, *(f"{once} and {recovered} % at {pattern}" for pattern, (once, recovered) in others)])


def expected_cost(zeros: float, n_bytes: int) -> str:
    """Return what the pattern nearest to a share of zeros cost the model of the nearest size, by bytes in BF16.

    >>> expected_cost(0.3, 10**9)
    '4:6 cost Qwen2.5-Coder-0.5B-Instruct 9.3 % of perplexity in one shot with --match 200, 3.0 % recovered'
    """
    nearest = min(abs(Pattern.parse(one[2]).sparsity - zeros) for one in COSTS)
    alike = [one for one in COSTS if abs(Pattern.parse(one[2]).sparsity - zeros) == nearest]
    model, _, pattern, *costs = min(alike, key=lambda one: abs(math.log(2 * one[1] / max(n_bytes, 1))))
    return f"{pattern} cost {model} {costs[0]} of perplexity in one shot with --match 200, {costs[1]} recovered"
