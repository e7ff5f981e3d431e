"""Trained parameters of a pruned model, and the zeros that stay in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from slidesparse.checkpoints.marker import Marker
from slidesparse.errors import InputError
from slidesparse.models.experts import find_experts, find_routers
from slidesparse.models.held_zeros import prunable_weights
from slidesparse.recovery.options import Trained
from slidesparse.weights.support import check_pattern, tightest_pattern


def choose_trained(model: Any, train: Trained) -> list[str]:
    """Set the parameters of a model that require gradients; return the names of those that pruning may have treated.

    Routers of mixtures are never trained: experts that get fewer tokens learn less, and would get fewer still.
    """
    both = (model.get_input_embeddings(), model.get_output_embeddings())
    embeddings = {id(one) for part in both for one in part.parameters()}
    prunable = {id(getattr(module, leaf)) for module, leaf in prunable_weights(model).values()}
    routers = tuple(f"{name}." for name in find_routers(model, find_experts(model)))
    for name, parameter in model.named_parameters():
        inside = id(parameter) not in embeddings and (train == "body" or id(parameter) in prunable)
        parameter.requires_grad_((inside or train == "all") and not (routers and name.startswith(routers)))
    return [name for name, parameter in model.named_parameters() if id(parameter) in prunable]


def require_pattern(path: object, prunable: Iterable[str], read: Callable[[str], torch.Tensor]) -> None:
    """Raise an InputError for a checkpoint whose linears have no zeros, or zeros in no pattern.

    A parameter or two of a pruned checkpoint suffice.
    """
    any_zero = False
    for name in prunable:
        value = read(name)
        if not bool(value.any()):  # all zero, which fits each pattern
            continue
        any_zero |= bool((value == 0).any())
        if any_zero and (value.dim() != 2 or tightest_pattern(value) is not None):
            return
    raise InputError(
        f"{path} is not pruned",
        got="zeros that follow no pattern" if any_zero else "no zeros in its linears",
        needed="a checkpoint in a float type with a pattern of zeros",
        remedy="make one with: slidesparse prune DENSE PRUNED --pattern 6:8 --dtype bf16",
    )


def has_held_zeros(name: str, value: torch.Tensor, marker: Marker | None) -> bool:
    """Return whether a parameter that pruning may have treated has zeros to hold.

    Raises:
        PatternViolation: It does not follow the pattern that the marker of ``prune`` names.
    """
    linear, zero = name.removesuffix(".weight"), value == 0
    if marker is None or value.dim() != 2 or linear in marker.ignore:
        return bool(zero.any()) and not bool(zero.all())
    check_pattern(value, marker.pattern_of(linear), name=name)
    return bool(zero.any())


@torch.no_grad()
def hold_zeros(parameters: Mapping[str, nn.Parameter], held: set[str]) -> None:
    """Clear the gradients of zeros in the ``held`` parameters, after the backward pass and before clipping and steps.

    A weight whose gradients are all zero has moments of zero, and Adam without weight decay does not move it: it stays
    zero to the bit, without a mask that would take memory.
    """
    for name in held:
        parameter = parameters[name]
        if parameter.grad is not None:
            pair = parameter.grad, parameter.detach()  # this process's parts of them
            gradient, weight = (one.to_local() if isinstance(one, DTensor) else one for one in pair)
            gradient.mul_(weight != 0)
