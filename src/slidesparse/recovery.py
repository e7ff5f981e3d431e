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
from slidesparse.models.targets import find_targets
from slidesparse.support import is_nonzero


class HeldZeros:
    """The zeros of a pruned model, which training must not fill.

    Args:
        model: A pruned model, its weights in a float type.
        names: Linears whose zeros are held; None: all that :func:`slidesparse.models.targets.find_targets` finds.

    Raises:
        InputError: When no weight of these linears is zero, so that nothing was pruned.
    """

    def __init__(self, model: nn.Module, names: Iterable[str] | None = None) -> None:
        chosen = find_targets(model).linears if names is None else {name: model.get_submodule(name) for name in names}
        self.modules: dict[str, nn.Module] = {}
        self.zeros: dict[str, torch.Tensor] = {}
        for name, module in chosen.items():
            weight = module.weight
            if not isinstance(weight, nn.Parameter) or not weight.is_floating_point():
                raise InputError(f"cannot train {name}", got=f"a {weight.dtype} weight", needed="a float parameter")
            zero = ~is_nonzero(weight.detach())
            if bool(zero.any()):
                self.modules[name], self.zeros[name] = module, zero
        if not self.modules:
            raise InputError("the model has no zeros to hold", remedy="prune it first, to a float type")

    @torch.no_grad()
    def apply_(self) -> None:
        """Set the held weights back to zero; call it after each optimiser step."""
        for name, module in self.modules.items():
            weight: Any = module.weight  # asked for anew: Trainer moves the model after its callbacks are made
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
