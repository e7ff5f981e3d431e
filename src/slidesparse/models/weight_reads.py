"""Find the linears whose weight the model uses directly, instead of calling the layer.

Mamba multiplies by ``dt_proj.weight``, and RWKV divides ``output.weight`` in place. So packing them gains nothing, and
quantising them is wrong wherever the reader does not know of scales. The model runs once with stand-ins for its linears
that note each use of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from slidesparse.errors import InputError
from slidesparse.layer.dense_weight import DenseWeight

WHY = "the model computes with its weight without calling it"


class _Watched(DenseWeight):
    """A weight that may be written to: writes go into a copy."""

    @classmethod
    def refuse(cls, name: str) -> None:
        """Allow it."""


class _Noting(nn.Module):
    """Stand-in for a linear that notes when something else uses its weight.

    It is no ``nn.Linear``, as a SlideLinear is none, so that the model treats both alike.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.linear = [linear]  # in a list, so that it is no submodule
        self.read = False

    @property
    def weight(self) -> torch.Tensor:
        own = self.linear[0].weight
        return _Watched.of(self._note, (own.shape[0], own.shape[1]), own.dtype, own.device)

    def _note(self) -> torch.Tensor:
        self.read = True
        return self.linear[0].weight.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.linear[0]
        return F.linear(x, own.weight, own.bias)


def read_without_calling(
    model: nn.Module, linears: Mapping[str, nn.Linear], run: Callable[[], object] | None
) -> dict[str, str]:
    """Return the linears whose weight the model uses directly, with the reason to keep them dense."""
    if run is None:
        return {}
    noting = {name: _Noting(linear) for name, linear in linears.items()}
    try:
        for name, layer in noting.items():
            model.set_submodule(name, layer)
        with torch.no_grad():
            run()
    except InputError:
        return {}
    finally:
        for name, linear in linears.items():
            model.set_submodule(name, linear)
    return {name: WHY for name, layer in noting.items() if layer.read}


def without_weights(model: nn.Module) -> nn.Module | None:
    """Return a model of the same class and config on the meta device; None for one that is not of transformers."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "dummy_inputs"):
        return None
    try:
        with torch.device("meta"):
            return type(model)(config).eval()
    except Exception:  # a class of a user's own may take other arguments
        return None
