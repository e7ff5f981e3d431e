"""The problems of ``bench gemm --grouped``: the experts of mixtures that people serve, and who goes to which expert.

Routing is drawn from a seed. *Balanced*: every token takes its experts by chance, all alike. *Skewed*: by Zipf's law
with the exponent :data:`ZIPF`, over experts in a shuffled order; the busiest of 128 experts then has 5 times the
average number of tokens, the busiest of 8 has 1.7 times.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from slidesparse_bench.expert_sizes import DOWN, GATE_UP, LAYER, MIXTURES, ExpertSizes
from slidesparse_bench.problems import Profile
from slidesparse_bench.records import GROUPED, Case

BALANCED, SKEWED = "balanced", "skewed"
ZIPF = 0.5
"""Of experts in the order of their tokens, the r-th is drawn with a weight of ``r ** -ZIPF``."""

PATTERNS = ("6:8", "4:6", "2:4")
TOKENS = (1, 16, 64, 256, 1024, 4096, 16384)
TOLD = (16384, 64)
"""The numbers of tokens that are measured before all others: a prompt's, and a decoding step's."""


def profile_of(profile: Profile) -> Profile:
    """Return a profile's grouped products, with its budget."""
    return replace(profile, models=tuple(MIXTURES), dtypes=("int8", "fp8"), model_patterns=PATTERNS, tokens=TOKENS)


def cases(profile: Profile) -> list[Case]:
    """Return all cases, the most important first: the first mixture before others, :data:`TOLD` before other tokens."""
    told = tuple(m for m in TOLD if m in profile.tokens)
    rest = tuple(sorted(set(profile.tokens) - set(told), reverse=True))
    head, tail = profile.models[:1], profile.models[1:]
    return [
        Case(GROUPED, model, f"{part}, {routing}", dtype, tokens, *MIXTURES[model].shape(part))
        for models, sizes in ((head, told), (tail, told), (head, rest), (tail, rest))
        for model, routing, tokens, dtype, part in product(
            models, (BALANCED, SKEWED), sizes, profile.dtypes, (GATE_UP, DOWN, LAYER)
        )
    ]


def sizes_of(case: Case) -> ExpertSizes:
    """Return the experts of a case."""
    return MIXTURES[case.model]


def draw(routing: str, tokens: int, sizes: ExpertSizes, device: torch.device) -> torch.Tensor:
    """Return the experts of every token, all different: int32 [M, k]."""
    generator = torch.Generator(device).manual_seed(2)
    rank = torch.randperm(sizes.experts, generator=generator, device=device) + 1
    weight = rank.to(torch.float32) ** (-ZIPF if routing == SKEWED else 0.0)
    # The largest of log(weight) + Gumbel noise are a draw by these weights, without the same expert twice.
    noise = torch.empty(tokens, sizes.experts, device=device).exponential_(generator=generator)
    scores = weight.log() - noise.log()
    return scores.topk(sizes.top_k, dim=1).indices.to(torch.int32)
