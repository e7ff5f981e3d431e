"""Training after pruning, with zeros held at zero.

It works with any loop and any optimiser: call :meth:`HeldZeros.apply_` after each step, or pass
:meth:`HeldZeros.callback` to transformers' Trainer. The zeros are read from the model, whatever pruned it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slidesparse.base.arguments import require_kind
from slidesparse.base.other_libraries import need
from slidesparse.errors import InputError
from slidesparse.models.experts import find_experts


class HeldZeros:
    """The zeros of a pruned model; they are held by :meth:`apply_` or :meth:`callback` alone, not by making this.

    They are those of all experts, and of all linears but those that share their weight with an embedding. A weight that
    is zero everywhere is passed over: no pattern made it so. Adapters begin like this, and would never learn.

    Args:
        model: A pruned model, its weights in a float type.

    Raises:
        InputError: When no weight of these is zero, so that nothing was pruned; or one cannot be trained.
    """

    def __init__(self, model: nn.Module) -> None:
        require_kind(model, nn.Module, "model", "a torch.nn.Module")
        self.places: dict[str, tuple[nn.Module, str]] = {}
        self.zeros: dict[str, torch.Tensor] = {}
        for name, (module, leaf) in prunable_weights(model).items():
            weight = _parameter(name, module, leaf)
            if not weight.is_floating_point() or weight.is_meta:
                got = f"a {weight.dtype} weight on {weight.device}"
                raise InputError(f"cannot train {name}", got=got, needed="a float parameter")
            zero = weight.detach() == 0
            if bool(zero.any()) and not bool(zero.all()):
                self.places[name], self.zeros[name] = (module, leaf), zero
        if not self.places:
            raise InputError("the model has no zeros to hold", remedy="prune it first, to a float type")

    @torch.no_grad()
    def apply_(self) -> None:
        """Set the held weights back to zero; call it after each optimiser step.

        Raises:
            InputError: A weight is computed from others now, or has another shape, so that its zeros cannot be held.
        """
        for name, (module, leaf) in self.places.items():
            weight = _parameter(name, module, leaf)  # asked for anew: Trainer moves the model after callbacks are made
            if weight.shape != self.zeros[name].shape:
                needed = f"{list(self.zeros[name].shape)}, as its zeros"
                raise InputError(f"shape of {name}", got=list(weight.shape), needed=needed)
            self.zeros[name] = _cut_like(weight, self.zeros[name])
            weight.masked_fill_(self.zeros[name], 0)

    def callback(self) -> Any:
        """Return a transformers ``TrainerCallback`` that calls :meth:`apply_` after each optimiser step."""
        apply, base = self.apply_, need("transformers").TrainerCallback

        class HoldZeros(base):  # type: ignore[misc, valid-type] # mypy wants a name
            def on_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                apply()

        return HoldZeros()


def prunable_weights(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and attribute of each weight that pruning may have treated: more than it does by default."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linears = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    places: dict[str, tuple[nn.Module, str]] = {
        name: (module, "weight") for name, module in linears if id(module.weight) not in embeddings
    }
    return places | {
        one.layer(leaf): (model.get_submodule(one.name), leaf) for one in find_experts(model) for leaf in one.weights
    }


def _cut_like(weight: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Return a mask on the device of its weight, and sharded like it by ``fully_shard`` and its like."""
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or hasattr(zero, "device_mesh"):
        return zero.to(weight.device)
    from torch.distributed.tensor import distribute_tensor

    placements: Any = getattr(weight, "placements", None)
    return distribute_tensor(zero.to(weight.device), mesh, placements)


def _parameter(name: str, module: nn.Module, leaf: str) -> nn.Parameter:
    """Return a weight that can be set, which one that is made of others when it is read cannot."""
    weight = getattr(module, leaf, None)
    if isinstance(weight, nn.Parameter):
        return weight
    kept = dict(module.named_buffers(recurse=False)).get(leaf)
    got = "a weight that is computed" if kept is None else f"a {kept.dtype} weight"
    raise InputError(f"cannot train {name}", got=got, needed="a float parameter, with no parametrization around it")
