"""Gram matrices of the inputs of linears, collected over the tokens of a text while a layer runs.

An expert sees the tokens that the router sends it, so it has a gram matrix of its own. A gram matrix of fewer tokens
than columns is singular, as if some inputs never occurred. So an expert with ``n`` tokens and ``K > n`` columns gets
the ``K - n`` tokens that it lacks from its layer, ``G + (K - n) T``:

* Tokens that the router sends have the same channels for all experts. ``T`` is the mean of ``x x^T`` over the tokens of
  all experts of the layer.
* Inner activations (the input of ``down_proj``) have channels of their own in each expert. ``T`` is a multiple of the
  identity with their mean energy, as in Ledoit and Wolf, "A Well-Conditioned Estimator for Large-Dimensional Covariance
  Matrices" (2004). An expert that saw nothing is then pruned by magnitude there.

"The layer" is the experts whose matrices are in memory together: all of them but in the largest models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from slidesparse.errors import InputError
from slidesparse.models.expert_weights import ExpertWeight, WatchExperts, only_experts
from slidesparse.models.experts import LEAVE_DENSE
from slidesparse.models.hooks import hooked
from slidesparse.models.layer_stack import Sample, run_layer
from slidesparse.weights.quant import dequantize, quantize_rows

AT_ONCE = 2**32
"""Most bytes of gram matrices of experts at a time. While processes share a text, each holds up to four such sums. The
layer runs once more for each further part of its experts."""


def tokens_key(name: str) -> str:
    """Return the key of the count of tokens [1, 1] next to a gram matrix."""
    return f"{name} tokens"


def empty_grams(experts: Mapping[str, ExpertWeight]) -> dict[str, torch.Tensor]:
    """Return a gram matrix and a count of tokens for each weight, all zero."""
    grams: dict[str, torch.Tensor] = {}
    for name, one in experts.items():
        columns = one.weight.shape[1]
        grams[name] = torch.zeros(columns, columns, device=one.stored.device)
        grams[tokens_key(name)] = torch.zeros(1, 1, device=one.stored.device)
    return grams


def add_layer_sums(grams: dict[str, torch.Tensor], experts: Mapping[str, ExpertWeight]) -> None:
    """Add a sum over the experts for each kind of weights: of the matrices, or of the traces of inner ones."""
    for name, one in experts.items():
        part = grams[name].trace().view(1, 1) if one.reads_inside else grams[name]
        for key, value in ((one.layer, part), (tokens_key(one.layer), grams[tokens_key(name)])):
            if key in grams:
                grams[key] += value
            else:
                grams[key] = value.clone()


def sum_columns(one: ExpertWeight) -> int:
    """Return the columns of a weight's sum in :func:`add_layer_sums`."""
    return 1 if one.reads_inside else one.weight.shape[1]


@dataclass(frozen=True)
class Inputs:
    """Statistics of the inputs of linears.

    Attributes:
        gram: float32 [in, in].
        tokens: Number of tokens sent to an expert; None for linears, which see all tokens.
        borrowed: Number of tokens that the matrix has from the layer.
        rounding: Squared error of the inputs when each token is rounded to INT8; None for experts.
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
        tokens: Number of its tokens.
        layer: The sum over the experts of the layer: [in, in], or [1, 1] of the traces.
        layer_tokens: Number of tokens of all experts.

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
    """Split sets into parts whose experts' gram matrices fit into :data:`AT_ONCE`; other sets are all in the first."""
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


def error_key(name: str) -> str:
    """Return the key of the squared error [1, 1] of a linear's inputs in INT8 next to a gram matrix."""
    return f"{name} rounding"


FIRST = 64
"""Weight of the first token of a text where tokens count alike: most others attend to it, and share its error."""

FIRST_SHARE = 8
"""Weight of the first token where tokens count by their size, for the same reason: an eighth of its text window. On a
published model SparseGPT then loses an eighth less (docs/log/kept-weights.md)."""


def alike_tokens(x: torch.Tensor) -> torch.Tensor:
    """Scale tokens [..., in] to a norm of 1, the first of each text to the root of :data:`FIRST`."""
    norm = x.norm(dim=-1, keepdim=True)
    scaled = x / torch.where(norm > 0, norm, 1.0)
    if x.dim() == 3:
        scaled[:, 0] *= FIRST**0.5
    return scaled


def collect_grams(
    layer: nn.Module,
    index: int,
    linears: Mapping[str, nn.Linear | ExpertWeight],
    samples: Iterable[Sample],
    alike: bool = False,
) -> dict[str, torch.Tensor]:
    """Return ``sum x x^T`` over all tokens that each linear reads, float32 [in, in] by name; see :data:`FIRST_SHARE`.

    With ``alike`` tokens count the same however large they are: the largest can be 300 thousand times the others.

    Each comes with its rounding error (:func:`error_key`), or for experts with counts and sums.

    Raises:
        InputError: A linear is never called.
    """
    experts = only_experts(linears)
    grams: dict[str, torch.Tensor] = empty_grams(experts)

    def collect(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            wide = args[0].detach().to(torch.float32)
            x = (alike_tokens(wide) if alike else wide).flatten(0, -2)
            if name not in grams:
                grams[name] = torch.zeros(x.shape[1], x.shape[1], device=x.device)
                grams[error_key(name)] = torch.zeros(1, 1, device=x.device)
            grams[name].addmm_(x.T, x)
            if wide.dim() == 3 and not alike:
                more = max(wide.shape[1] // FIRST_SHARE, 1) - 1
                grams[name].addmm_(wide[:, 0].T, wide[:, 0], alpha=more)
            grams[error_key(name)] += (x - dequantize(*quantize_rows(x, torch.int8))).square().sum()

        return hook

    def see(name: str, x: torch.Tensor) -> None:
        wide = alike_tokens(x.to(torch.float32)) if alike else x.to(torch.float32)
        grams[name].addmm_(wide.T, wide)
        grams[tokens_key(name)] += len(x)

    plain = {name: linear for name, linear in linears.items() if isinstance(linear, nn.Module)}
    hooks = (linear.register_forward_pre_hook(collect(name)) for name, linear in plain.items())
    with hooked(hooks), WatchExperts(experts, see) if experts else nullcontext():
        for sample in samples:
            run_layer(layer, sample, index)
    silent = [name for name in plain if name not in grams]
    if silent:
        raise InputError(f"{silent[0]} is never called, so it cannot be calibrated", remedy="put it on the ignore list")
    add_layer_sums(grams, experts)
    return grams
