"""Find the mixtures of experts of a model.

The experts of a layer share one parameter, ``[experts, ...]``, in a module whose class is named after experts: so
transformers has them from version 5 on, whatever the checkpoint has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from slidesparse.models.layer_kinds import alike, kind_of, shared_name

LEAVE_DENSE = "--ignore 're:.*experts'"
"""The option that leaves all experts alone."""

EXPERTS_FOLLOW = "experts follow their pattern: in INT8 and FP8 they run sparse on a Hopper GPU, all others run dense"
"""Line of the commands on pruned experts."""


@dataclass(frozen=True)
class Experts:
    """The experts of one layer.

    Attributes:
        name: The module that holds them.
        count: Number of experts; 0 where it is unknown.
        weights: Parameter of the module -> its shape.
        transposed: Whether a weight is [in, out], unlike a linear's; None where it is unknown.
    """

    name: str
    count: int
    weights: dict[str, tuple[int, ...]]
    transposed: bool | None = False

    def layer(self, leaf: str) -> str:
        """Return the name of one of ``weights`` in the model, under which it is pruned for all experts."""
        return f"{self.name}.{leaf}"

    def expert(self, leaf: str, expert: int) -> str:
        """Return the name of one expert's weight.

        >>> Experts("mlp.experts", 2, {"down_proj": (2, 8, 4)}).expert("down_proj", 1)
        'mlp.experts.down_proj.1'
        """
        return f"{self.layer(leaf)}.{expert}"

    def columns(self, leaf: str) -> int:
        """Return K of one of ``weights``, whose orientation must be known."""
        return self.weights[leaf][-2 if self.transposed else -1]


def find_experts(model: nn.Module) -> list[Experts]:
    """Return the experts of every layer that has some, in the model's order."""
    return [one for name, module in model.named_modules() if (one := _experts(name, module)) is not None]


def _experts(name: str, module: nn.Module) -> Experts | None:
    """Return experts whose weights are one parameter each, in a class such as ``MixtralExperts``."""
    own = dict(module.named_parameters(recurse=False))
    weights = {leaf: tuple(one.shape) for leaf, one in own.items() if one.dim() == 3}
    called = re.search(r"experts?$|experts?[A-Z]", type(module).__name__, re.IGNORECASE) is not None
    if not weights or not (called or name.rpartition(".")[2] == "experts"):
        return None
    return Experts(name, next(iter(weights.values()))[0], weights, _is_transposed(module, weights))


def _is_transposed(module: nn.Module, weights: dict[str, tuple[int, ...]]) -> bool | None:
    """Return whether weights are [experts, in, out], by the module's flag, else by the one way in which they fit."""
    flag = getattr(module, "is_transposed", None)
    if isinstance(flag, bool):
        return flag
    if set(weights) != {"gate_up_proj", "down_proj"}:
        return None
    (_, *gate_up), (_, *down) = weights["gate_up_proj"], weights["down_proj"]
    if gate_up == [2 * down[1], down[0]]:
        return False
    return True if gate_up == [down[1], 2 * down[0]] else None


def find_routers(model: nn.Module, experts: Iterable[Experts]) -> dict[str, str]:
    """Return the routers next to experts, each with the reason to leave it alone.

    Not all are linears, though servers have linears for all of them. Any other module with a matrix next to experts
    counts as one too, since it is not treated either.
    """
    routers: dict[str, str] = {}
    for one in experts:
        around = one.name.rpartition(".")[0]
        for name, module in model.get_submodule(around).named_modules(prefix=around):
            weight = getattr(module, "weight", None)
            if name.startswith(f"{one.name}.") or not isinstance(weight, nn.Parameter) or weight.dim() != 2:
                continue
            if not isinstance(module, nn.Linear) or module.out_features == one.count:
                routers[name] = "a router, which chooses among the experts"
    return routers


def ignore_entries(names: Iterable[str], *, every: bool) -> list[str]:
    r"""Return entries of an ignore list of compressed-tensors that match everything inside of modules of experts.

    Programs differ in their names for the linears of experts and for the wrapper of the language model. So an entry
    begins at a layer's number, or, where it is for every layer, at the experts' name within it.

    >>> for every in (True, False):
    ...     print(*ignore_entries(["model.layers.3.mlp.experts"], every=every))
    re:.*\.experts\..*
    re:.*\.3\.mlp\.experts\..*
    """
    tail = r"[^.]*$" if every else r"(?:(?<=\.)|^)\d+\.\D*$|[^.]*$"
    ends = [end[0] for name in names if (end := re.search(tail, name)) is not None]
    return [rf"re:.*\.{re.escape(end)}\..*" for end in dict.fromkeys(ends)]


def describe_experts(experts: list[Experts]) -> list[str]:
    """Return a line for all layers whose experts differ only by the layer's number."""
    lines = []
    for group in alike(experts, lambda one: (kind_of(one.name), one.count, *one.weights.items())):
        shapes = ", ".join(f"{leaf} {list(shape)}" for leaf, shape in group[0].weights.items())
        lines.append(f"{shared_name([one.name for one in group])}: {group[0].count} experts, {shapes}")
    return lines


def describe_treated(experts: Iterable[Experts], patterns: Mapping[str, str]) -> list[str]:
    """Return a line for each kind of experts' weights with a pattern; layers that differ by number share it."""
    treated = [
        (name, one.count, list(shape[-2:]), patterns[name])
        for one in experts
        for leaf, shape in one.weights.items()
        if (name := one.layer(leaf)) in patterns
    ]
    return [
        f"{shared_name([name for name, *_ in group])}, {count} experts of {shape}, at {pattern}"
        for group in alike(treated, lambda one: (kind_of(one[0]), *map(str, one[1:])))
        for _, count, shape, pattern in group[:1]
    ]


def experts_of_a_token(config: Any) -> int:
    """Return the number of experts that a layer routes a token to; 1 where the config does not give it.

    Hunyuan's config may have a list with a number for each layer: the largest counts.
    """
    for key in ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_k"):
        value = getattr(config, key, None)
        counts = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int) and one > 0]
        if counts:
            return max(counts)
    return 1
