"""Packed experts in place of transformers' own, which hold the weights of a layer in one parameter each.

From version 5 on, transformers describes such modules: the layout of gate and up, the bias, the activation. Only
modules that it describes as gate, up and down with SiLU are replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from slidesparse.errors import UnsupportedError
from slidesparse.layer.experts import SlideExperts
from slidesparse.models.experts import Experts

DESCRIBED = {
    "has_gate": (True, "they have no gate"),
    "has_bias": (False, "they have a bias"),
    "has_post_expert_norm": (False, "a norm follows each expert"),
    "is_concatenated": (True, "gate and up take turns, row by row"),
    "is_transposed": (False, "their weights are transposed"),
}
"""Flag of a transformers module of experts -> its needed value, and the reason to keep experts dense otherwise."""

UNSAID = {"has_gate": True, "is_concatenated": True, "has_post_expert_norm": False}
"""Flags that versions before 5.3, 5.10 and 5.20 lack -> their value in a module that has the usual gate."""

PARAMETERS = ("gate_up_proj", "down_proj")
"""transformers' names of the parameters of fused experts."""


class PackedMixture(nn.Module):
    """Experts that are called as transformers calls them."""

    def __init__(self, slide: SlideExperts) -> None:
        super().__init__()
        self.slide = slide

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the chosen experts: [M, H] -> [M, H].

        Args:
            hidden_states: [M, H].
            top_k_index: Integers [M, k]; the number of experts itself means none.
            top_k_weights: [M, k].
        """
        here = torch.where(top_k_index < self.slide.count, top_k_index, -1)
        y: torch.Tensor = self.slide(hidden_states, top_k_weights, here)
        return y

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Raise an UnsupportedError: a model that is saved would lack its experts."""
        raise UnsupportedError(
            f"the state of packed experts ({prefix.removesuffix('.')})",
            remedy="copy the folder that they were loaded from, or read parameters() and buffers()",
        )


def why_not_packed(module: nn.Module, experts: Experts) -> str | None:
    """Return the reason why packed experts cannot replace a module; None where they can."""
    if set(experts.weights) != set(PARAMETERS):
        return f"{type(module).__name__} holds them in another way than in gate_up_proj and down_proj"
    for name, (needed, why) in DESCRIBED.items():
        flag = getattr(module, name, UNSAID.get(name))
        if flag is None:
            return f"transformers does not describe {type(module).__name__}"
        if flag is not needed:
            return why
    gate: Any = getattr(module, "_apply_gate", None)
    if getattr(gate, "__module__", None) != "transformers.integrations.moe":
        return f"the gate of {type(module).__name__} is its own"
    activation = type(getattr(module, "act_fn", None)).__name__
    return None if activation in ("SiLU", "SiLUActivation") else f"their activation is {activation}, not SiLU"
