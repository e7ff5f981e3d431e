"""Run a computation as inference: autocast is off inside, and a backward pass through it is an error.

Rounding has no gradient, so what autograd would find is wrong or nothing at all. A forward pass alone is no mistake:
a model that is evaluated outside of ``torch.no_grad`` has parameters that require gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slidesparse.errors import UnsupportedError


def inference_only() -> UnsupportedError:
    """Return the error of a backward pass."""
    return UnsupportedError("slidesparse layers are for inference", remedy="train the dense model, with its zeros held")


class NoBackward(torch.autograd.Function):
    """A computation on tensors that require gradients: its results join the graph, and the backward pass is an error.

    Called as ``NoBackward.apply(compute, *arguments)``.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Return ``compute(*arguments)``, in which autograd records nothing."""
        ctx.forms = [(a.shape, a.dtype) if isinstance(a, torch.Tensor) else None for a in arguments]
        return compute(*arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse, by an operator: torch.compile traces a backward pass with every forward pass that could have one.

        Raises:
            UnsupportedError: Always, where it is run and not traced.
        """
        given = next(gradient for gradient in gradients if gradient is not None)
        refused = [
            torch.ops.slidesparse.refuse_gradient(given, *form) if form is not None and wanted else None
            for form, wanted in zip(ctx.forms, ctx.needs_input_grad[1:], strict=True)
        ]
        return None, *refused


def infer(compute: Callable[..., torch.Tensor], x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """Return ``compute(x, *others)`` on the device of x, for what is not one operator, without autocast."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return infer(compute, x, *others)
    if torch.is_grad_enabled() and (x.requires_grad or any(other.requires_grad for other in others)):
        y: torch.Tensor = NoBackward.apply(compute, x, *others)
        return y
    return compute(x, *others)
