"""Training after pruning, with the zeros held where they are.

It works with any loop and any optimiser: call :meth:`HeldZeros.apply_` after each step, or give
:meth:`HeldZeros.callback` to transformers' Trainer. The zeros are read from the model, whatever pruned it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from slidesparse.errors import InputError, UnsupportedError
from slidesparse.models.experts import find_experts


class HeldZeros:
    """The zeros of a pruned model, which training must not fill.

    A weight that is zero everywhere is passed over: no pattern made it so. Adapters begin like this, and would never
    learn.

    Args:
        model: A pruned model, its weights in a float type.
        names: Weights whose zeros are held: names of linears, or of parameters such as those of experts. None: all
            linears but those that share their weight with an embedding, and all experts.

    Raises:
        InputError: When no weight of these is zero, so that nothing was pruned.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None = None) -> None:
        places = _weights(model) if names is None else {name: _place(model, name) for name in names}
        self.places: dict[str, tuple[nn.Module, str]] = {}
        self.zeros: dict[str, torch.Tensor] = {}
        for name, (module, leaf) in places.items():
            weight = getattr(module, leaf)
            if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
                raise InputError(f"cannot train {name}", got=f"a {weight.dtype} weight", needed="a float parameter")
            zero = weight.detach() == 0
            if bool(zero.any()) and (names is not None or not bool(zero.all())):
                self.places[name], self.zeros[name] = (module, leaf), zero
        if not self.places:
            raise InputError("the model has no zeros to hold", remedy="prune it first, to a float type")

    @torch.no_grad()
    def apply_(self) -> None:
        """Set the held weights back to zero; call it after each optimiser step."""
        for name, (module, leaf) in self.places.items():
            weight: Any = getattr(module, leaf)  # asked for anew: Trainer moves the model after its callbacks are made
            self.zeros[name] = self.zeros[name].to(weight.device)
            weight.masked_fill_(self.zeros[name], 0)

    def callback(self) -> Any:
        """Return a transformers ``TrainerCallback`` that calls :meth:`apply_` after each optimiser step."""
        try:
            from transformers import TrainerCallback
        except ImportError as error:
            raise UnsupportedError("transformers is not installed", remedy='pip install "slidesparse[hf]"') from error
        apply = self.apply_

        class HoldZeros(TrainerCallback):
            def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                apply()

        return HoldZeros()


def _weights(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return where the weights are that pruning may have treated: more than those that it treats by default."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    places: dict[str, tuple[nn.Module, str]] = {
        name: (module, "weight") for name, module in linears if id(module.weight) not in embeddings
    }
    states = [state for one in find_experts(model) for leaf in one.weights for state in one.states(leaf)]
    return places | {state: _place(model, state) for state in states if state.removesuffix(".weight") not in places}


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module and its attribute for the name of a linear or of a parameter."""
    owner, _, leaf = name.rpartition(".")
    if leaf in dict(model.get_submodule(owner).named_parameters(recurse=False)):
        return model.get_submodule(owner), leaf
    return model.get_submodule(name), "weight"
