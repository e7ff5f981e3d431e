"""Inference inside of autograd: the forward pass runs, and a backward pass through it is an error.

Rounding has no gradient, so autograd's would be wrong. A forward pass alone is no mistake: the parameters of a model
that is evaluated outside of ``torch.no_grad`` require gradients.

Where gradients are recorded, a separate operator joins the result to the graph, by ``torch.library.register_autograd``.
No other operator has a kernel for autograd, which would cost 5 us a call under ``torch.no_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from slidesparse.errors import UnsupportedError
from slidesparse.ops.register import define


def _refusal() -> UnsupportedError:
    return UnsupportedError("slidesparse layers are for inference", remedy="train the dense model, with its zeros held")


def no_backward(compute: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Return ``compute(*arguments)``, through which no gradient passes.

    If an argument requires a gradient, the result joins the graph, and its backward pass raises an UnsupportedError.
    Tensors in lists are weights, which nobody trains.

    Raises:
        UnsupportedError: A tensor has a tangent (``torch.autograd.forward_ad``).
    """
    if not torch.is_grad_enabled():
        return compute(*arguments)
    tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
    if not torch.compiler.is_compiling() and any(unpack_dual(tensor).tangent is not None for tensor in tensors):
        raise _refusal()
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    if not trained:
        return compute(*arguments)
    with torch.no_grad():
        y = compute(*arguments)
    joined: torch.Tensor = torch.ops.slidesparse.join_graph(y, trained)
    return joined


def _join_graph(y: torch.Tensor, trained: Sequence[torch.Tensor]) -> torch.Tensor:
    return y.clone()  # an operator's result is none of its arguments


def _keep_forms(ctx: Any, inputs: tuple[torch.Tensor, Sequence[torch.Tensor]], output: torch.Tensor) -> None:
    ctx.forms = [(tensor.shape, tensor.dtype) for tensor in inputs[1]]


def _join_graph_backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, list[torch.Tensor]]:
    # An operator refuses, since torch.compile traces a backward pass with every forward pass that could have one.
    return None, [torch.ops.slidesparse.refuse_gradient(gradient, *form) for form in ctx.forms]


def _refuse_gradient(gradient: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    raise _refusal()


def _refuse_gradient_fake(gradient: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return gradient.new_empty(shape, dtype=dtype)


define("join_graph", "(Tensor y, Tensor[] trained) -> Tensor", _join_graph, _join_graph)
torch.library.register_autograd("slidesparse::join_graph", _join_graph_backward, setup_context=_keep_forms)
define(
    "refuse_gradient",
    "(Tensor gradient, SymInt[] shape, ScalarType dtype) -> Tensor",
    _refuse_gradient,
    _refuse_gradient_fake,
)
