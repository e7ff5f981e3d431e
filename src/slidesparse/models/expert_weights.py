"""One expert's weight as a linear's, and its inputs while its layer runs, whatever the class of the experts.

transformers multiplies by slices of one parameter for all experts, and has a class for each family. All of them call a
product of torch with a weight in a known parameter. So the products are watched, and the weight's address identifies
the expert.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from slidesparse.models.experts import find_experts

_METHODS = (torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.__matmul__)
PRODUCTS: frozenset[Callable[..., Any]] = frozenset((F.linear, torch.matmul, torch.mm, torch.bmm, *_METHODS))
"""Functions whose second argument may be a weight."""

INNER = frozenset({"down_proj", "w2", "fc2", "output_linear", "c_proj"})
"""Names of weights that read an expert's inner activations; all others read the tokens that the router sends."""


@dataclass(frozen=True)
class ExpertWeight:
    """The weight of one expert.

    Attributes:
        module: The module with the experts of the layer.
        parameter: The parameter of it that holds the weight.
        expert: The expert's place in the parameter.
        transposed: Whether it is stored as [in, out].
        layer: The name under which the weights of this kind of all experts are pruned.
    """

    module: nn.Module
    parameter: str
    expert: int
    transposed: bool
    layer: str

    @property
    def stored(self) -> torch.Tensor:
        """The weight as the model stores it."""
        return self.module.get_parameter(self.parameter).detach()[self.expert]

    @property
    def weight(self) -> torch.Tensor:
        """The weight [out, in], in the model's memory."""
        return self.stored.T if self.transposed else self.stored

    @property
    def reads_inside(self) -> bool:
        """Whether its inputs are inner activations, whose channels mean something else in each expert."""
        return self.parameter in INNER


def calibrated_experts(model: nn.Module, layers: Container[str]) -> dict[str, ExpertWeight]:
    """Return the weights of a model's experts by name, such as ``model.layers.3.mlp.experts.gate_up_proj.7``.

    It also lets experts multiply one after the other: faster ways to run them, which transformers may choose, sort the
    tokens and multiply by all experts at once.
    """
    set_experts: Any = getattr(model, "set_experts_implementation", None)
    if set_experts is not None:
        set_experts("eager")
    return {
        one.expert(leaf, expert): ExpertWeight(
            model.get_submodule(one.name), leaf, expert, bool(one.transposed), one.layer(leaf)
        )
        for one in find_experts(model)
        for leaf in one.weights
        if one.layer(leaf) in layers
        for expert in range(one.count)
    }


def only_experts(linears: Mapping[str, Any]) -> dict[str, ExpertWeight]:
    """Return the weights of experts among some linears."""
    return {name: one for name, one in linears.items() if isinstance(one, ExpertWeight)}


class WatchExperts(TorchFunctionMode):
    """Reports the inputs of experts' weights while it is active.

    Args:
        weights: Name -> weight; the model must hold them.
        see: Gets a name and its inputs [tokens, in].
    """

    def __init__(self, weights: Mapping[str, ExpertWeight], see: Callable[[str, torch.Tensor], None]) -> None:
        super().__init__()
        self.see = see
        self.names = {_place(weight.stored): name for name, weight in weights.items()}
        self.parameters = {_place(weight.module.get_parameter(weight.parameter)) for weight in weights.values()}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function; note its input when it is a product with an expert's weight."""
        if func in PRODUCTS and len(args) >= 2:
            x, weight = args[:2]
            if weight.dim() == 2:
                self._note(x.detach().flatten(0, -2), weight)
            elif _place(weight) in self.parameters:  # all experts at once; zeros are tokens of other experts
                for rows, one in zip(x.detach(), weight, strict=True):
                    self._note(rows[(rows != 0).any(1)], one)
        return func(*args, **(kwargs or {}))

    def _note(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        name = self.names.get(_place(weight))
        if name is not None and len(x):
            self.see(name, x)


def _place(weight: torch.Tensor) -> int:
    return weight.data_ptr()
