"""Find the mixtures of experts of a model, by what they are: modules that hold many weights of which a token uses few.

The experts of a layer are one parameter for all of them, ``[experts, ...]``, in a module whose class says so, or a list
of modules. transformers has both, and from its version 5 on mostly the first, whatever the checkpoint has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from slidesparse.errors import UnsupportedError


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        name: The module that holds them.
        count: How many there are; 0 where that cannot be told.
        weights: Parameter of the module -> its shape. Experts that are modules have the parameters of the first.
    """

    name: str
    count: int
    weights: dict[str, tuple[int, ...]]


def find_experts(model: nn.Module) -> list[Experts]:
    """Return the experts of every layer that has some, in the model's order."""
    return list(_experts(model))


def _experts(model: nn.Module) -> Iterator[Experts]:
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(inside):
            continue
        found = _fused(name, module) or _listed(name, module)
        if found is not None:
            inside = (*inside, f"{name}.")
            yield found


def _is_called_experts(name: str, module: nn.Module) -> bool:
    leaf = name.rpartition(".")[2]
    return re.search(r"experts?$|experts?[A-Z]", type(module).__name__, re.IGNORECASE) is not None or leaf == "experts"


def _fused(name: str, module: nn.Module) -> Experts | None:
    """Return experts whose weights are one parameter each, in a class such as ``MixtralExperts``."""
    own = dict(module.named_parameters(recurse=False))
    weights = {leaf: tuple(one.shape) for leaf, one in own.items() if one.dim() == 3}
    if not weights or not _is_called_experts(name, module):
        return None
    return Experts(name, next(iter(weights.values()))[0], weights)


def _listed(name: str, module: nn.Module) -> Experts | None:
    """Return experts that are modules of their own, in a list called ``experts``."""
    members = list(module.children())
    if (
        not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        or len(members) < 2
        or not _is_called_experts(name, module)
    ):
        return None
    weights = {leaf: tuple(one.shape) for leaf, one in members[0].named_parameters() if one.dim() > 1}
    return Experts(name, len(members), weights) if weights else None


def describe_experts(found: list[Experts]) -> list[str]:
    """Return a line for all layers whose experts differ only by the layer's number."""
    kinds: dict[tuple[object, ...], list[Experts]] = {}
    for one in found:
        kinds.setdefault((re.sub(r"\d+", "*", one.name), one.count, *one.weights.items()), []).append(one)
    return [_describe(group) for group in kinds.values()]


def _describe(group: list[Experts]) -> str:
    one = group[0]
    name = one.name if len(group) == 1 else f"{len(group)} x {re.sub(r'[0-9]+', '*', one.name)}"
    shapes = ", ".join(f"{leaf} {list(shape)}" for leaf, shape in one.weights.items())
    return f"{name}: {one.count} experts, {shapes}"


def refuse_experts(model: nn.Module) -> None:
    """Refuse a mixture of experts: most of its weights would stay dense.

    Raises:
        UnsupportedError: The model has experts; the error names them.
    """
    if found := find_experts(model):
        raise UnsupportedError(
            "mixtures of experts cannot be treated yet",
            got="; ".join(describe_experts(found)[:2]),
            needed="a model whose projections are linear layers",
        )
