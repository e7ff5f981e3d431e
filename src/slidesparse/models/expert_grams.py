"""Statistics of what is routed to each expert, and what an expert that saw too few tokens borrows from its layer.

An expert sees the tokens that the router sends it, so it has a gram matrix of its own. A gram matrix of fewer tokens
than columns is singular: it says of some inputs that they never occur. So an expert with ``n`` tokens and ``K > n``
columns gets the ``K - n`` tokens that it lacks from its layer, ``G + (K - n) T``:

* What the router sends is the same kind of thing for all experts. ``T`` is the mean of ``x x^T`` over the tokens of all
  experts of the layer.
* What is inside of an expert (the input of ``down_proj``) means something else in each. ``T`` is a multiple of the
  identity with their mean energy, as in Ledoit and Wolf, "A Well-Conditioned Estimator for Large-Dimensional Covariance
  Matrices" (2004). An expert that saw nothing is then pruned by magnitude there.

"The layer" is the experts whose matrices are in memory together, which are all of them but for the largest models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slidesparse.errors import InputError
from slidesparse.models.expert_weights import ExpertWeight
from slidesparse.models.experts import LEAVE_DENSE

AT_ONCE = 2**32
"""Most bytes of gram matrices of experts at a time. While processes share a text, each holds up to four such sums. The
layer runs once more for each further part of its experts; ``plan`` does so at each pattern."""


def tokens_of(name: str) -> str:
    """Return the name of a count of tokens next to a gram matrix, as a matrix [1, 1]."""
    return f"{name} tokens"


def empty_grams(experts: Mapping[str, ExpertWeight]) -> dict[str, torch.Tensor]:
    """Return a gram matrix and a count of tokens for each weight, all zero."""
    grams: dict[str, torch.Tensor] = {}
    for name, one in experts.items():
        columns = one.weight.shape[1]
        grams[name] = torch.zeros(columns, columns, device=one.held.device)
        grams[tokens_of(name)] = torch.zeros(1, 1, device=one.held.device)
    return grams


def add_layer_sums(grams: dict[str, torch.Tensor], experts: Mapping[str, ExpertWeight]) -> None:
    """Add a sum over the experts for each kind of weights: of the matrices, or inside of experts of their traces."""
    for name, one in experts.items():
        part = grams[name].trace().view(1, 1) if one.reads_inside else grams[name]
        for key, value in ((one.layer, part), (tokens_of(one.layer), grams[tokens_of(name)])):
            if key in grams:
                grams[key] += value
            else:
                grams[key] = value.clone()


def sum_columns(one: ExpertWeight) -> int:
    """Return the columns of the sum that :func:`add_layer_sums` makes."""
    return 1 if one.reads_inside else one.weight.shape[1]


@dataclass(frozen=True)
class Inputs:
    """What a method knows of the inputs of linears.

    Attributes:
        gram: float32 [in, in].
        tokens: What the router sent to an expert; None for linears, which see all tokens.
        borrowed: The tokens that the matrix has from the layer.
        rounding: Squared error of the inputs, when each token is rounded to INT8; None for experts.
    """

    gram: torch.Tensor
    tokens: int | None = None
    borrowed: int = 0
    rounding: float | None = None


def expert_inputs(name: str, gram: torch.Tensor, tokens: int, layer: torch.Tensor, layer_tokens: int) -> Inputs:
    """Return the inputs of an expert, with the tokens that it borrows.

    Args:
        name: The weight.
        gram: float32 [in, in], the sum over its tokens.
        tokens: How many there are.
        layer: The sum over the experts of the layer: [in, in], or [1, 1] of the traces.
        layer_tokens: The tokens of all of them.

    Raises:
        InputError: No expert was seen to multiply by such a weight.
    """
    if not layer_tokens:
        raise InputError(
            f"no input of {name} was seen, nor of the other experts of its layer",
            needed="a text that reaches them, and experts that multiply by torch's products",
            remedy=f"use --method magnitude, or leave experts dense with {LEAVE_DENSE}",
        )
    columns = len(gram)
    lacking = max(columns - tokens, 0)
    if lacking:
        inside = layer.numel() == 1
        mean = torch.eye(columns, device=gram.device) * (layer / columns) if inside else layer
        gram = gram + mean * (lacking / layer_tokens)
    return Inputs(gram, tokens, lacking)


def in_parts(sets: Sequence[Sequence[str]], experts: Mapping[str, ExpertWeight]) -> list[list[Sequence[str]]]:
    """Cut sets into parts whose experts' gram matrices fit into :data:`AT_ONCE`; other sets are all in the first."""
    parts: list[list[Sequence[str]]] = [[names for names in sets if names[0] not in experts]]
    n_bytes = 0
    for names in (names for names in sets if names[0] in experts):
        size = 4 * experts[names[0]].weight.shape[1] ** 2
        if n_bytes and n_bytes + size > AT_ONCE:
            parts.append([])
            n_bytes = 0
        parts[-1].append(names)
        n_bytes += size
    return parts
