"""Make operators of the namespace ``torch.ops.slidesparse``, with little host time a call.

An operator here has one kernel for all devices and a fake implementation for torch.compile. It raises an error when a
gradient is computed, and switches autocast off inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.forward_ad import unpack_dual

from slidesparse.base import torch_private
from slidesparse.errors import UnsupportedError
from slidesparse.ops.inference_only import NoBackward, inference_only

_LIBRARY = torch.library.Library("slidesparse", "FRAGMENT")


def _refuse_gradients(*_: Any) -> Any:
    raise inference_only()


_EAGER: dict[int, bool] = {}


def _is_eager(keys: Any, dispatch: torch_private.Dispatch) -> bool:
    """Whether only a device's key has a kernel below autograd, so that nothing traces or wraps this call."""
    number = keys.raw_repr()
    known = _EAGER.get(number)
    if known is None:
        known = (keys & dispatch.after_inplace).highestPriorityTypeId() in dispatch.devices
        _EAGER[number] = known
    return known


def _has_tangent(arguments: Sequence[Any]) -> bool:
    tensors = (t for a in arguments for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor))
    return any(unpack_dual(tensor).tangent is not None for tensor in tensors)


def _under_autograd(name: str, kernel: Callable[..., Any], dispatch: torch_private.Dispatch) -> Callable[..., Any]:
    """Return the kernel of the autograd keys, through which every call outside inference mode goes.

    The one of ``torch.library.register_autograd`` goes through the dispatcher a second time and converts all arguments
    again: 8 us. Where the dispatcher would do nothing else, this one calls the operator's kernel.
    """
    operator = getattr(torch.ops.slidesparse, name).default
    after_autograd = dispatch.after_autograd

    def below_autograd(keys: Any, *arguments: Any) -> Any:
        with dispatch.below_autograd():
            return operator.redispatch(keys, *arguments)

    def run(keys: Any, *arguments: Any) -> Any:
        x = arguments[0]
        # Forward mode, whose tangents would be lost. Outside of it torch gives the tensor itself, which costs nothing.
        if unpack_dual(x).primal is not x and _has_tangent(arguments):
            raise inference_only()
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in arguments):
            if torch_private.in_transform():  # torch.func.grad, which takes no autograd.Function from here
                raise inference_only()
            return NoBackward.apply(below_autograd, keys & after_autograd, *arguments)
        lists = (a for a in arguments if isinstance(a, list))  # whose tensors autograd would not see
        if torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for al in lists for a in al):
            raise inference_only()
        if _is_eager(keys, dispatch):
            return kernel(*arguments)
        return operator.redispatch(keys & after_autograd, *arguments)

    return run


LAYER = "linear"
"""The operator of a whole layer, which answers in autocast's type as ``nn.Linear`` does."""


def _without_autocast(name: str, device: str) -> Callable[..., Any]:
    """Return the operator for ``torch.autocast``, switched off inside: it would round products to 16 bits.

    The answer of a whole layer is rounded once, at its end.
    """

    def run(*arguments: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            answer = getattr(torch.ops.slidesparse, name)(*arguments, **options)
        return answer.to(dtype) if name == LAYER else answer

    return run


def _refuse_vmap(*_: Any, **options: Any) -> Any:
    raise UnsupportedError(
        "torch.vmap over a slidesparse layer", remedy="give the layer the whole batch: it takes activations [..., in]"
    )


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Make an operator ``torch.ops.slidesparse.NAME`` by its schema, as torch.library writes them.

    ``kernel`` computes it on every device; ``fake`` returns tensors of the results' shapes and types.
    """
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    for device, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _LIBRARY.impl(name, _without_autocast(name, device), key)
    _LIBRARY.impl(name, _refuse_vmap, "FuncTorchBatched")
    torch.library.register_fake(f"slidesparse::{name}", fake, lib=_LIBRARY)
    dispatch = torch_private.dispatch()
    if dispatch is None:
        torch.library.register_autograd(f"slidesparse::{name}", _refuse_gradients, lib=_LIBRARY)
    else:
        _LIBRARY.impl(name, _under_autograd(name, kernel, dispatch), "Autograd", with_keyset=True)


def _refuse_gradient_fake(gradient: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return gradient.new_empty(shape, dtype=dtype)


define(
    "refuse_gradient",
    "(Tensor gradient, SymInt[] shape, ScalarType dtype) -> Tensor",
    _refuse_gradients,
    _refuse_gradient_fake,
)
